"""Packs of T tokens for models of transformers, and a check that samples stay apart."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bascule.data.packs import MADE, VISUAL_FIELDS, Pack, make_pack, unpack
from bascule.errors import ConfigError

Inputs = dict[str, Any]

_GRIDS = ("image_grid_thw", "video_grid_thw")
_FIRST, _SECOND = (1, 2, 3), (3, 1)  # tokens that any vocabulary has
_MOST_MIXED = 0.1  # seen: 1e-6 of Llama and its like, 0.28 of OPT, 1 of Falcon and Mamba


def inputs_of_pack(packed: Mapping[str, Any], pack: Pack, model: nn.Module | None = None) -> Inputs:
    """Return a pack as a causal language model of transformers takes it, or one that sees images.

    Token fields become (1, T, ..), and ``position_ids`` separate samples. Packs with images need
    the model, wrapped or not, because it counts their positions.
    """
    for name in VISUAL_FIELDS:
        if model is None and packed.get(name) is not None:
            raise ConfigError(
                f"a pack with {name}: the positions of images depend on the model; give the "
                "model, or override packed_inputs of the Trainer to give them as position_ids"
            )
    mask = packed.get("attention_mask")
    if mask is not None and not mask[: int(packed["cu_items"]["attention_mask"][-1])].all():
        raise ConfigError(
            "attention_mask hides tokens of a sample in a pack: a pack has no padding inside; "
            "give samples without it"
        )
    inputs = {
        name: value[None] if name in pack.token_fields and isinstance(value, Tensor) else value
        for name, value in packed.items()
        if name not in MADE and name != "attention_mask"
    }
    positions = packed["positions"][None] if model is None else _positions(packed, model)
    return inputs | {"position_ids": positions, "use_cache": False}


def check_separates(model: nn.Module, device: torch.device) -> None:
    """Refuse a model that mixes the samples of a pack, which none of them reports.

    The second of two samples must have the same logits in a pack as alone, not as behind the first.
    """
    pack = Pack(tokens=len(_FIRST + _SECOND))
    samples = [{"input_ids": torch.tensor(tokens)} for tokens in (_FIRST, _SECOND)]
    packed = _logits(model, inputs_of_pack(make_pack(samples, pack), pack, model), device)
    alone = _logits(model, {"input_ids": torch.tensor([_SECOND])}, device)
    joined = _logits(model, {"input_ids": torch.tensor([_FIRST + _SECOND])}, device)
    mixed = float((packed - alone).norm() / (joined - alone).norm())
    if not mixed <= _MOST_MIXED:
        raise ConfigError(
            f"{type(getattr(model, 'module', model)).__name__} mixes the samples of a pack: in a "
            f"pack, a sample differs from itself alone {mixed:.2g} times as much as behind another "
            "as one text; leave out pack, or override packed_inputs of the Trainer so that the "
            "model gets the bounds of samples"
        )


def _logits(model: nn.Module, inputs: Inputs, device: torch.device) -> Tensor:
    """Return (2, vocabulary) logits of the last two tokens, in float32."""
    inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits = model(**(inputs | {"use_cache": False})).logits
    finally:
        model.train(was_training)
    return logits[0, -len(_SECOND) :].float()


def _positions(packed: Mapping[str, Any], model: nn.Module) -> Tensor:
    """Return (1, T) places in samples, or (4, 1, T) with those in time, height and width below."""
    places = packed["positions"]
    methods = (getattr(part, "get_rope_index", None) for part in model.modules())
    rope_index = next((one for one in methods if callable(one)), None)
    if rope_index is None:
        return places[None]
    parts = [_positions_of(sample, rope_index) for sample in unpack(packed)]
    num_real = sum(part.shape[2] for part in parts)
    padding = places[num_real:].expand(3, 1, -1)
    return torch.cat([places.expand(1, 1, -1), torch.cat([*parts, padding], dim=2)])


def _positions_of(sample: Mapping[str, Any], rope_index: Any) -> Tensor:
    """Return positions (3, 1, tokens of the sample)."""
    ids, types = sample["input_ids"], sample.get("mm_token_type_ids")
    if not any(sample.get(name) is not None and len(sample[name]) for name in _GRIDS):
        return torch.arange(len(ids), device=ids.device).expand(3, 1, -1)
    if types is None:
        raise ConfigError(
            "a sample with images or videos has no mm_token_type_ids, by which its model counts "
            "positions: keep all that the model's processor returns"
        )
    names = (*_GRIDS, "second_per_grid_ts")
    grids = {name: sample[name] for name in names if sample.get(name) is not None}
    return rope_index(ids[None], mm_token_type_ids=types[None], **grids)[0]
