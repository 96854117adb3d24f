"""Store measurements of a machine: times by size, the curves fitted to them, and their errors."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import Any, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Bools, Floats
from bascule.checks import MAX_RANKS, choice, each, fields, number, of_type, whole
from bascule.errors import ConfigError

FORWARD, RECOMPUTE, BACKWARD = "forward", "recompute", "backward"
PASSES = (FORWARD, RECOMPUTE, BACKWARD)
"""Passes of a block: keeping nothing, keeping what backward needs, and backward."""

ALL_TO_ALL, POINT_TO_POINT = "all-to-all", "to the next rank"
TOKENS, BYTES = "tokens", "bytes"
NUM_COEFFICIENTS = {TOKENS: 3, BYTES: 2}
"""Coefficients of a curve by unit of the sizes; attention adds a square to tokens."""

_MOST_POINTS = 1000
_MOST_S = 1e6
_TEXT = of_type, str, "a text"

_Built = TypeVar("_Built")


def _some(name: str, values: object, check: Callable[..., Any], *details: object) -> Any:
    entries = each(name, values, check, *details)
    if len(entries) > _MOST_POINTS:
        raise ConfigError(f"{name}) has {len(entries)} entries: at most {_MOST_POINTS}")
    return entries


def _error(name: str, value: object) -> float | None:
    return None if value is None else number(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A curve of seconds by size x: `c0 + c1 x` for bytes, `c0 + c1 x + c2 x^2` for tokens."""

    what: str  # name of the timed thing, for example "forward"
    unit: str  # of the sizes: "tokens" or "bytes"
    coefficients: tuple[float, ...]  # (K,) seconds by power of the size, from 0
    errors: tuple[float | None, ...]  # (K,) half of 95 % intervals; None: not known
    sizes: tuple[float, ...]  # (n,)
    seconds: tuple[float, ...]  # (n,) measured
    held_out: tuple[bool, ...]  # (n,) true where a point was left out of the fit, to judge it

    def __post_init__(self) -> None:
        fields(
            self,
            what=_TEXT,
            unit=(choice, *NUM_COEFFICIENTS),
            coefficients=(_some, number, 0.0, _MOST_S),
            errors=(_some, _error),
            sizes=(_some, number, 1e-6, 1e15),
            seconds=(_some, number, 1e-30, _MOST_S),
            held_out=(_some, of_type, bool, "true or false"),
        )
        counts = len(self.coefficients), len(self.errors)
        if counts != (NUM_COEFFICIENTS[self.unit],) * 2:
            wrong = f"Fit of {self.what}: {counts[0]} coefficients and {counts[1]} errors"
            raise ConfigError(f"{wrong}; {self.unit} need {NUM_COEFFICIENTS[self.unit]} of each")
        if not len(self.sizes) == len(self.seconds) == len(self.held_out) > sum(self.held_out):
            wrong = f"Fit of {self.what}: {len(self.sizes)} sizes, {len(self.seconds)} seconds and"
            fix = "give one of each per point, and fit some of them"
            raise ConfigError(f"{wrong} {len(self.held_out)} held out; {fix}")

    def __call__(self, sizes: npt.ArrayLike) -> Floats:
        """Predict the seconds for these sizes; the output has their shape."""
        x = np.asarray(sizes, dtype=np.float64)
        return (x[..., None] ** np.arange(len(self.coefficients))) @ np.array(self.coefficients)

    @property
    def misses(self) -> Floats:
        """(n,) predicted over measured, minus 1."""
        return self(self.sizes) / np.array(self.seconds) - 1.0

    @property
    def held_out_error(self) -> float | None:
        """Median absolute relative error at the held-out points; None without any."""
        misses = np.abs(self.misses[np.array(self.held_out)])
        return float(np.median(misses)) if misses.size else None


def is_held_out(num_points: int) -> Bools:
    """Return (n,) flags of the points that test a fitted curve: every third, but no end point."""
    places = np.arange(num_points)
    return (places % 3 == 1) & (places < num_points - 1)


def least_points(unit: str) -> int:
    """Return the fewest sizes that a curve needs: coefficients + 1, and one held out."""
    return next(n for n in range(1, 99) if (~is_held_out(n)).sum() > NUM_COEFFICIENTS[unit])


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Host time, in seconds, that does not grow with size: the lower quartile of the rounds."""

    what: str
    seconds: float
    error: float  # half the width of its 95 % confidence interval

    def __post_init__(self) -> None:
        seconds = number, 0.0, _MOST_S
        fields(self, what=_TEXT, seconds=seconds, error=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The measurements that a profile's numbers come from."""

    name: str
    date: str  # as 2026-11-23
    torch: str  # its version
    num_ranks: int  # that measured together
    settings: str  # block, widths, dtype, kernel, rounds, in words
    d_model: int  # width for which costs count FLOPs
    measured: tuple[str, ...]  # fields of the profile; the others come from `base`
    base: str
    fits: tuple[Fit, ...]
    overheads: tuple[Overhead, ...] = ()

    def __post_init__(self) -> None:
        fields(self, **dict.fromkeys(("name", "date", "torch", "settings", "base"), _TEXT))
        fields(
            self,
            num_ranks=(whole, 1, MAX_RANKS),
            d_model=(whole, 1, 2**31),
            measured=(_some, *_TEXT),
            fits=(_some, of_type, Fit, "a Fit"),
            overheads=(_some, of_type, Overhead, "an Overhead"),
        )

    @classmethod
    def of_dict(cls, values: object) -> Self:
        """Read a calibration from the values of a JSON object."""
        rest = dict(cast(dict[str, Any], values)) if isinstance(values, dict) else {}
        for name, kind in (("fits", Fit), ("overheads", Overhead)):
            if isinstance(rest.get(name), list | tuple):
                rest[name] = [built(kind, entry) for entry in rest[name]]
        return built(cls, rest)

    @property
    def gamma(self) -> float | None:
        """Forward time of an attention FLOP over that of a linear FLOP; None: not measured."""
        forward = self.fit(FORWARD)
        if forward is None or not forward.coefficients[1] > 0:
            return None
        _, linear_s, square_s = forward.coefficients
        return square_s / linear_s * 6.0 * self.d_model

    @property
    def rates(self) -> dict[str, float]:
        """`block_rates` of the forward pass, if it was measured."""
        forward = self.fit(FORWARD)
        return {} if forward is None else block_rates(forward, self.d_model)

    def fit(self, what: str) -> Fit | None:
        """Return the curve named `what`, if it was measured."""
        return next((fit for fit in self.fits if fit.what == what), None)


def block_rates(forward: Fit, d_model: int) -> dict[str, float]:
    """Return FLOP/s of linear layers (24 d^2 per token) and attention (4 d per pair), by field."""
    _, linear_s, square_s = forward.coefficients
    flops = {
        "matmul_flops_per_s": (24.0 * d_model**2, linear_s),
        "attention_flops_per_s": (4.0 * d_model, square_s),
    }
    return {name: work / seconds for name, (work, seconds) in flops.items() if seconds > 0}


def built(kind: type[_Built], values: object) -> _Built:
    """Make a dataclass from a file's values; fields that have a default may be missing."""
    known: dict[str, Any] = cast(Any, kind).__dataclass_fields__
    needed = {name for name, field in known.items() if field.default is MISSING}
    entries = cast(dict[str, Any], values) if isinstance(values, dict) else {}
    if not needed <= entries.keys() <= known.keys():
        text = "".join(char if char.isprintable() else " " for char in ", ".join(entries))
        text = (text if len(text) <= 500 else f"{text[:500]} ..") or "no fields"
        raise ConfigError(f"{kind.__name__} holds {text}; it must hold {', '.join(known)}")
    return kind(**entries)
