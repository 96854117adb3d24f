"""Test on a few tokens whether a model keeps packed sequences apart, and up to which length."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bascule.errors import ConfigError
from bascule.stand_in import as_in_use, module_of

Run = Callable[[Sequence[Tensor], bool], Any]
"""Calls the model on sequences of ids in one row; True gives their positions, False none."""

_A, _B, _C = (1, 2, 3, 4, 5), (6, 2, 7, 1), (5, 1, 6, 3, 2)  # token ids of any vocabulary
_MOST_MIXED = 0.05  # change by the sequence in front, over the change if both were one text
NOISE = 30.0  # tolerance of outputs, in units of their rounding: experts see other batches
_MOST_MOVED = 0.1  # change by standing behind a sequence, over the change if both were one text
_ROPES = {"default", "linear", "yarn", "llama3", "proportional"}  # depend on the position alone


@dataclass(frozen=True, slots=True)
class Reach:
    """The lengths up to which a tested model computes each packed sequence as if it were alone."""

    rope: float  # longest sequence before a rope changes for all sequences of a call
    row: float  # longest row before scales that count its tokens change

    @classmethod
    def of(cls, model: nn.Module) -> "Reach":
        """Return the reach of a model, by its modules."""
        ropes, scales = [math.inf], [math.inf]
        for module in model.modules():
            kinds: Any = getattr(module, "rope_type", "default")
            if not set(kinds.values() if isinstance(kinds, dict) else [kinds]) <= _ROPES:
                config: Any = getattr(module, "config", None)
                rope: Any = getattr(config, "rope_parameters", {})
                nested = [x for x in rope.values() if isinstance(x, dict)] or [rope]
                name = "original_max_position_embeddings"
                most = getattr(config, "max_position_embeddings", math.inf)  # none in vision towers
                ropes.append(min(min(x.get(name) or most, most) for x in nested))
            is_tuned = getattr(module, "attn_temperature_tuning", None)
            if is_tuned and not getattr(module, "use_rope", False):
                scales.append(getattr(module, "floor_scale", math.inf) - 1)
        return cls(min(ropes), min(scales))

    @property
    def is_endless(self) -> bool:
        """True if the model has no such limit of length."""
        return math.isinf(min(self.rope, self.row))

    def check(self, name: str, longest: int, row: int) -> None:
        """Refuse a longest sequence, or a rank's longest row of tokens, above the limits."""
        rope = "has another rope for all where the longest is above {} tokens"
        scale = "scales scores by the place in the row, right up to {} tokens in bags and packs"
        limits = (self.rope, longest, rope), (self.row, max(longest, row), scale)
        for limit, length, reason in limits:
            if length > limit:
                fault = f"{name} {reason.format(int(limit))}, and has {length} here"
                raise ConfigError(f"{fault}: sequences would not be as alone; give shorter ones")


def check_separates(model: nn.Module, run: Run, advice: str) -> None:
    """Refuse a model that mixes the sequences of a row, or counts positions across them.

    The first sequence must not change the second sequence's outputs, unlike in one text. The second
    sequence's outputs must be as if it were alone, with positions that the model counts. Errors end
    with the advice.

    Raises:
        ConfigError: Names the first module whose output differs, or that failed.
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
                where, reason = module_of(error, inner), " ".join(str(error).split())
                text = f"{where or kind} raised {type(error).__name__}: {reason[:200]}; {advice}"
                what = f"{kind} cannot compute several sequences in a row"
                raise ConfigError(f"{what}: {text}") from error
            return _rows(out)[0, -len(b) :]

        behind_a, behind_c = last([a, b]), last([c, b])
        one_text, other_text = last([torch.cat([a, b])]), last([torch.cat([c, b])])
        alone = last([b], False)
        mixed = ratio(behind_a - behind_c, one_text - other_text)
        moved = ratio(behind_a - alone, one_text - alone)
        noise = NOISE * torch.finfo(behind_a.dtype).eps
        is_mixed = mixed > _MOST_MIXED or ratio(behind_a - behind_c, behind_a) > noise
        if not is_mixed and moved <= _MOST_MOVED:
            return
        other = partial(run, [c, b], True) if is_mixed else partial(run, [b], False)

        def last_rows(x: Tensor) -> Tensor | None:
            return x[0, -len(b) :] if x.shape[1] >= len(b) else None

        seen = outputs_of(inner, partial(run, [a, b], True), last_rows)
        first = first_difference(seen, outputs_of(inner, other, last_rows), noise)
    at = first or "its output"
    if is_mixed:
        fault = f"mixes the sequences of a row: {at} changes with the sequence in front"
    else:
        fault = f"counts positions in a row otherwise than in each sequence alone: {at} differs"
    raise ConfigError(f"{kind} {fault}; {advice}")


def ratio(difference: Tensor, scale: Tensor) -> float:
    """Return the norm of a difference over the norm of `scale`; 0 for no difference."""
    norm = float(difference.double().norm())
    return norm / max(float(scale.double().norm()), 1e-30) if norm else 0.0


def _rows(out: Any) -> Tensor:
    """Return the logits of an output, or its hidden states: (1, T, ..)."""
    if isinstance(out, Tensor):
        return out
    logits = getattr(out, "logits", None)
    return out[0] if logits is None else logits


def outputs_of(
    model: nn.Module, call: Callable[[], object], rows_of: Callable[[Tensor], Tensor | None]
) -> dict[str, Tensor]:
    """Return `rows_of` each module's output in a call, in the order in which modules finish."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) and out else out
        rows = rows_of(out) if isinstance(out, Tensor) and out.dim() > 2 else None
        if rows is not None:
            outputs.setdefault(name, rows)

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


def first_difference(a: dict[str, Tensor], b: dict[str, Tensor], noise: float) -> str:
    """Return the first module of `a` whose output in `b` differs, "" if none does."""
    common = (name for name in a if name in b and a[name].shape == b[name].shape)
    return next((name for name in common if ratio(a[name] - b[name], a[name]) > noise), "")
