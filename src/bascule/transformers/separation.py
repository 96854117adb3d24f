"""Whether a model keeps the sequences of a row apart, tried with a few tokens."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bascule.errors import ConfigError

Run = Callable[[Sequence[Tensor], bool], Any]
"""Calls the model on sequences of ids in one row; True gives their positions, False none."""

_A, _B, _C = (1, 2, 3, 4, 5), (6, 2, 7, 1), (5, 1, 6, 3, 2)  # tokens that any vocabulary has
_MOST_MIXED = 0.05  # of what one text would mix
_NOISE = 30.0  # of the outputs, in units of their rounding: experts compute on other rows
_MOST_MOVED = 0.1  # of what standing behind another text would change


def check_separates(model: nn.Module, run: Run, advice: str) -> None:
    """Refuse a model that mixes the sequences of a row, or counts their positions otherwise.

    Another sequence in front must not change the outputs of the second, as it does where both are
    one text; and the second must be as alone, with the positions that the model gives it. Errors
    end with the advice.

    Raises:
        ConfigError: Names the first module whose output differs, or the one that failed.
    """
    inner = getattr(model, "module", model)
    a, b, c = (torch.tensor(tokens) for tokens in (_A, _B, _C))
    kind = type(inner).__name__
    with as_in_use(model), torch.no_grad():

        def last(sequences: Sequence[Tensor], has_positions: bool = True) -> Tensor:
            try:
                out = run(sequences, has_positions)
            except ConfigError:
                raise
            except Exception as error:
                where, reason = _module_of(error, inner), " ".join(str(error).split())
                raise ConfigError(
                    f"{kind} cannot take several sequences in a row: {where or kind} raised "
                    f"{type(error).__name__}: {reason[:200]}; {advice}"
                ) from error
            return _rows(out)[0, -len(b) :]

        behind_a, behind_c = last([a, b]), last([c, b])
        one_text, other_text = last([torch.cat([a, b])]), last([torch.cat([c, b])])
        alone = last([b], False)
        mixed = _ratio(behind_a - behind_c, one_text - other_text)
        moved = _ratio(behind_a - alone, one_text - alone)
        noise = _NOISE * torch.finfo(behind_a.dtype).eps
        is_mixed = mixed > _MOST_MIXED or _ratio(behind_a - behind_c, behind_a) > noise
        if not is_mixed and moved <= _MOST_MOVED:
            return
        other = partial(run, [c, b], True) if is_mixed else partial(run, [b], False)
        seen = _outputs(inner, partial(run, [a, b], True), len(b))
        first = _first_difference(seen, _outputs(inner, other, len(b)), noise)
    at = first or "its output"
    if is_mixed:
        fault = f"mixes the sequences of a row: {at} changes with the sequence in front"
    else:
        fault = f"counts positions in a row otherwise than in each sequence alone: {at} differs"
    raise ConfigError(f"{kind} {fault}; {advice}")


def _ratio(difference: Tensor, scale: Tensor) -> float:
    """Return a norm over another; 0 of no difference."""
    norm = float(difference.double().norm())
    return norm / max(float(scale.double().norm()), 1e-30) if norm else 0.0


def _rows(out: Any) -> Tensor:
    """Return the logits of an output, or its hidden states: (1, T, ..)."""
    if isinstance(out, Tensor):
        return out
    logits = getattr(out, "logits", None)
    return out[0] if logits is None else logits


@contextmanager
def as_in_use(model: nn.Module) -> Iterator[None]:
    """Turn off what is random in training, and compilers, which would fix these few shapes."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, is_training in training.items():
            module.training = is_training


def _module_of(error: BaseException, model: nn.Module) -> str:
    """Return the name of the innermost module of a model in which an error was raised."""
    names = {module: name for name, module in model.named_modules()}
    frames = traceback.walk_tb(error.__traceback__)
    owners = [frame.f_locals.get("self") for frame, _ in frames]
    inside = [names[one] for one in owners if isinstance(one, nn.Module) and one in names]
    return inside[-1] if inside else ""


def _outputs(model: nn.Module, call: Callable[[], object], num_last: int) -> dict[str, Tensor]:
    """Return the last rows of each module's output in a call, in the order in which they end."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) and out else out
        if isinstance(out, Tensor) and out.dim() > 2 and out.shape[1] >= num_last:
            outputs.setdefault(name, out[0, -num_last:])

    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: keep(name, out))
        for name, module in model.named_modules()
    ]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _first_difference(one: dict[str, Tensor], other: dict[str, Tensor], noise: float) -> str:
    """Return the first module whose outputs differ, "" if none does."""
    alike = (name for name in one if name in other and one[name].shape == other[name].shape)
    return next((name for name in alike if _ratio(one[name] - other[name], one[name]) > noise), "")
