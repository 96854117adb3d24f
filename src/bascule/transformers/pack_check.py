"""Whether a model keeps the samples of a pack apart: asked of the model itself, on a few tokens."""

from typing import Any

import torch
from torch import Tensor, nn

from bascule.data.packs import Pack, make_pack
from bascule.errors import ConfigError
from bascule.transformers.train_loader import inputs_of_pack

_FIRST, _SECOND = (1, 2, 3), (3, 1)  # tokens that any vocabulary has
_MOST_MIXED = 0.1  # seen: 1e-6 of Llama and its like, 0.28 of OPT, 1 of Falcon and Mamba


def check_separates(model: nn.Module, device: torch.device) -> None:
    """Refuse a model that mixes the samples of a pack; models do so without a word.

    Some take ``position_ids`` and make their mask without them, and the state of convolutions,
    recurrences and linear attention crosses samples. So the second of two samples is computed in a
    pack, alone, and behind the first as one sample. The pack must give what it gives alone.

    Three forward passes of five tokens at most, without gradients and in evaluation mode, which
    wrapped models make on all processes alike.

    Args:
        model: As it is trained, wrapped or not.
        device: Of its inputs.

    Raises:
        ConfigError: The model mixes them (on all processes, since all have the same weights).
    """
    pack = Pack(tokens=len(_FIRST + _SECOND))
    samples = [{"input_ids": torch.tensor(tokens)} for tokens in (_FIRST, _SECOND)]
    packed = _logits(model, inputs_of_pack(make_pack(samples, pack), pack, model), device)
    alone = _logits(model, {"input_ids": torch.tensor([_SECOND])}, device)
    joined = _logits(model, {"input_ids": torch.tensor([_FIRST + _SECOND])}, device)
    mixed = float((packed - alone).norm() / (joined - alone).norm())
    inner = getattr(model, "module", model)
    if not mixed <= _MOST_MIXED:
        raise ConfigError(
            f"{type(inner).__name__} mixes the samples of a pack: in a pack, a sample differs from "
            f"itself alone {mixed:.2g} times as much as behind another as one text; leave out "
            "pack, or override packed_inputs of the Trainer to tell the model where samples begin"
        )


def _logits(model: nn.Module, inputs: dict[str, Any], device: torch.device) -> Tensor:
    """(2, vocabulary) of the last two tokens, in float32."""
    given = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits = model(**(given | {"use_cache": False})).logits
    finally:
        model.train(was_training)
    return logits[0, -len(_SECOND) :].float()
