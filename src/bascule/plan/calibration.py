"""What was measured of a machine: times over sizes, the curves through them, and how far they miss.

Every measurement is kept with its curve, so that a profile can be drawn and judged later.
"""

from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats
from bascule.errors import ConfigError
from bascule.plan.checks import MAX_RANKS, listed, number, of_type, put, shown, whole

FORWARD, RECOMPUTE, BACKWARD = "forward", "recompute", "backward"
PASSES = (FORWARD, RECOMPUTE, BACKWARD)
"""Of a block: without anything kept, with what backward needs kept, and backward."""

ALL_TO_ALL, POINT_TO_POINT = "all-to-all", "to the next rank"
TOKENS, BYTES = "tokens", "bytes"
NUM_COEFFICIENTS = {TOKENS: 3, BYTES: 2}
"""By unit of the sizes: of attention a square, too."""

_MOST_POINTS = 1000
_MOST_FITS = 100
_MOST_LETTERS = 2000
_MOST_S = 1e6

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Seconds over sizes: `c0 + c1 x` of bytes x, and `+ c2 x^2` of tokens.

    Args:
        what: What was timed, for example "forward".
        unit: Of the sizes: "tokens" or "bytes".
        coefficients: (K,) seconds by power of the size, from 0.
        errors: (K,) half the widths of their 95 % confidence intervals; None where the points say
            nothing of them.
        sizes: (n,) what was timed.
        seconds: (n,) measured.
        held_out: (n,) whether the fit did not see the point, but was judged by it.

    Raises:
        ConfigError: A value is out of range, or there are not as many of each.
    """

    what: str
    unit: str
    coefficients: tuple[float, ...]
    errors: tuple[float | None, ...]
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    held_out: tuple[bool, ...]

    def __post_init__(self) -> None:
        put(self, "what", _text("Fit: what", self.what))
        if not isinstance(self.unit, str) or self.unit not in NUM_COEFFICIENTS:  # pyright: ignore[reportUnnecessaryIsInstance]
            known = ", ".join(NUM_COEFFICIENTS)
            raise ConfigError(f"Fit(unit={shown(self.unit)}): must be one of {known}")
        limits = {
            "coefficients": (0.0, _MOST_S),
            "sizes": (1e-6, 1e15),
            "seconds": (1e-30, _MOST_S),
        }
        for name, (least, most) in limits.items():
            told, values = f"Fit of {self.what}: one of {name},", _listed(name, getattr(self, name))
            put(self, name, tuple(number(told, value, least, most) for value in values))
        errors = _listed("Fit: errors", self.errors)
        told = (None if x is None else number("Fit: one of errors,", x) for x in errors)
        put(self, "errors", tuple(told))
        flags = _listed("Fit: held_out", self.held_out)
        told = (of_type("Fit: one of held_out", x, bool, "true or false") for x in flags)
        put(self, "held_out", tuple(told))
        counts = len(self.coefficients), len(self.errors)
        if counts != (NUM_COEFFICIENTS[self.unit],) * 2:
            raise ConfigError(
                f"Fit of {self.what}: {counts[0]} coefficients and {counts[1]} errors; over "
                f"{self.unit} there are {NUM_COEFFICIENTS[self.unit]}"
            )
        if not len(self.sizes) == len(self.seconds) == len(self.held_out) > sum(self.held_out):
            raise ConfigError(
                f"Fit of {self.what}: {len(self.sizes)} sizes, {len(self.seconds)} seconds and "
                f"{len(self.held_out)} held out; give one of each a point, and fit some of them"
            )

    def __call__(self, sizes: npt.ArrayLike) -> Floats:
        """Predicted seconds of these sizes; same shape."""
        x = np.asarray(sizes, dtype=np.float64)
        return (x[..., None] ** np.arange(len(self.coefficients))) @ np.array(self.coefficients)

    @property
    def misses(self) -> Floats:
        """(n,) predicted over measured, minus 1."""
        return self(self.sizes) / np.array(self.seconds) - 1.0

    @property
    def held_out_error(self) -> float | None:
        """Median of what the held-out points are missed by, either way; None if there are none."""
        misses = np.abs(self.misses[np.array(self.held_out)])
        return float(np.median(misses)) if misses.size else None


def is_held_out(num_points: int) -> npt.NDArray[np.bool_]:
    """(n,) every third point, but not the last one: what judges a curve lies within it."""
    places = np.arange(num_points)
    return (places % 3 == 1) & (places < num_points - 1)


def least_points(unit: str) -> int:
    """Of so many sizes, one more than there are coefficients is fitted, and one is held out."""
    return next(n for n in range(1, 99) if (~is_held_out(n)).sum() > NUM_COEFFICIENTS[unit])


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Seconds of the host that do not grow with sizes.

    Args:
        what: Of what.
        seconds: Lower quartile of the rounds.
        error: Half the width of its 95 % confidence interval.

    Raises:
        ConfigError: A value is out of range.
    """

    what: str
    seconds: float
    error: float

    def __post_init__(self) -> None:
        put(self, "what", _text("Overhead: what", self.what))
        for name in ("seconds", "error"):
            put(self, name, number(f"Overhead({name}", getattr(self, name), most=_MOST_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How the numbers of a profile were measured.

    Args:
        name: Of the profile.
        date: When, as 2026-11-23.
        torch: Version.
        num_ranks: That measured together.
        settings: What was timed, in words: block, widths, dtype, kernel, rounds.
        d_model: Width for which costs count FLOPs.
        measured: Fields of the profile that were measured; the others are those of `base`.
        base: Profile from which everything else is.
        fits: Curves.
        overheads: What does not grow with sizes.

    Raises:
        ConfigError: A value is out of range.
    """

    name: str
    date: str
    torch: str
    num_ranks: int
    settings: str
    d_model: int
    measured: tuple[str, ...]
    base: str
    fits: tuple[Fit, ...]
    overheads: tuple[Overhead, ...] = ()

    def __post_init__(self) -> None:
        for name in ("name", "date", "torch", "settings", "base"):
            put(self, name, _text(f"Calibration: {name}", getattr(self, name)))
        put(self, "num_ranks", whole("Calibration(num_ranks", self.num_ranks, 1, MAX_RANKS))
        put(self, "d_model", whole("Calibration(d_model", self.d_model, 1, 2**31))
        measured = _listed("Calibration: measured", self.measured)
        put(self, "measured", tuple(_text("Calibration: one of measured", x) for x in measured))
        for name, kind in (("fits", Fit), ("overheads", Overhead)):
            values = _listed(f"Calibration: {name}", getattr(self, name), _MOST_FITS)
            told = f"Calibration: one of {name}"
            put(self, name, tuple(of_type(told, x, kind, f"a {kind.__name__}") for x in values))

    @classmethod
    def of_dict(cls, values: object) -> Self:
        """From what JSON holds.

        Raises:
            ConfigError: It holds something else; says what.
        """
        if isinstance(values, dict):
            given = dict(cast(dict[str, Any], values))
            for name, kind in (("fits", Fit), ("overheads", Overhead)):
                if isinstance(given.get(name), list | tuple):
                    given[name] = [built(kind, one) for one in given[name]]
            return built(cls, given)
        return built(cls, values)

    @property
    def gamma(self) -> float | None:
        """Seconds of a FLOP of attention over those of a FLOP of the linear layers, forward.

        A block has 24 L d^2 of these and 4 L^2 d of those. None: the block was not measured.
        """
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
        """The curve of something, if it was measured."""
        return next((fit for fit in self.fits if fit.what == what), None)


def block_rates(forward: "Fit", d_model: int) -> dict[str, float]:
    """FLOP/s of the linear layers and of attention, by the fields of a profile that hold them.

    A block of width d has 24 d^2 FLOPs a token and 4 d a pair of tokens.

    Args:
        forward: Of a block.
        d_model: Its width.
    """
    _, linear_s, square_s = forward.coefficients
    flops = {
        "matmul_flops_per_s": (24.0 * d_model**2, linear_s),
        "attention_flops_per_s": (4.0 * d_model, square_s),
    }
    return {name: work / seconds for name, (work, seconds) in flops.items() if seconds > 0}


def built(kind: type[_Made], values: object) -> _Made:
    """A dataclass from its fields, all of which must be there.

    Raises:
        ConfigError: Other fields are; or one holds what it cannot.
    """
    names = [field.name for field in fields(cast(Any, kind))]
    given = cast(dict[str, Any], values) if isinstance(values, dict) else {}
    if given.keys() != set(names):
        raise ConfigError(
            f"{kind.__name__} holds {_shown_names(given)}; it must hold {', '.join(names)}"
        )
    return kind(**given)


def _shown_names(given: dict[str, Any]) -> str:
    """Fields, for a message: on one line, and not all of them where there are many."""
    text = "".join(char if char.isprintable() else " " for char in ", ".join(given))
    return (text if len(text) <= 500 else f"{text[:500]} ..") or "no fields"


def _text(name: str, value: object) -> str:
    found = of_type(name, value, str, "a text")
    if len(found) > _MOST_LETTERS:
        raise ConfigError(f"{name} has {len(found)} letters: at most {_MOST_LETTERS}")
    return found


def _listed(name: str, values: object, most: int = _MOST_POINTS) -> list[Any]:
    found = listed(name, values)
    if len(found) > most:
        raise ConfigError(f"{name} has {len(found)} entries: at most {most}")
    return found
