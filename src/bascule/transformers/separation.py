"""A trial of a model on sequences in a row, with a few tokens, and up to which length it holds."""

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

_A, _B, _C = (1, 2, 3, 4, 5), (6, 2, 7, 1), (5, 1, 6, 3, 2)  # tokens that any vocabulary has
_MOST_MIXED = 0.05  # of what one text would mix
NOISE = 30.0  # of the outputs, in units of their rounding: experts compute on other rows
_MOST_MOVED = 0.1  # of what standing behind another text would change
_ROPES = {"default", "linear", "yarn", "llama3", "proportional"}  # a token's depends on its place


@dataclass(frozen=True, slots=True)
class Reach:
    """Lengths up to which a model that was tried computes each sequence as alone."""

    rope: float  # of ropes that change with the longest sequence of a call
    row: float  # of scales that count the tokens of a row

    @property
    def is_endless(self) -> bool:
        """True if any length is computed as alone."""
        return math.isinf(min(self.rope, self.row))

    def check(self, name: str, longest: int, row: int) -> None:
        """Refuse a longest sequence, or a rank's longest row of tokens, beyond these limits."""
        rope = "has another rope for all where the longest is above {} tokens"
        scale = "scales scores by the place in the row, right up to {} tokens in bags and packs"
        for limit, length, fact in (
            (self.rope, longest, rope),
            (self.row, max(longest, row), scale),
        ):
            if length > limit:
                raise ConfigError(
                    f"{name} {fact.format(int(limit))}, and has {length} here: sequences would not "
                    "be computed as alone; give shorter ones"
                )


def reach_of(model: nn.Module) -> Reach:
    """Return what a model reaches, from its modules."""
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
    return Reach(min(ropes), min(scales))


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
                where, reason = module_of(error, inner), " ".join(str(error).split())
                raise ConfigError(
                    f"{kind} cannot take several sequences in a row: {where or kind} raised "
                    f"{type(error).__name__}: {reason[:200]}; {advice}"
                ) from error
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
    """Return a norm over another; 0 of no difference."""
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
    """Return some rows of each module's output in a call, in the order in which they end."""
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


def first_difference(one: dict[str, Tensor], other: dict[str, Tensor], noise: float) -> str:
    """Return the first module whose outputs differ, "" if none does."""
    alike = (name for name in one if name in other and one[name].shape == other[name].shape)
    return next((name for name in alike if ratio(one[name] - other[name], one[name]) > noise), "")
