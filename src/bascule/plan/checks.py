"""Check arguments where they enter: return the value in its right type, or raise a ConfigError.

Every check is called as `check(name, value, *details)`: `whole`, `number`, `choice`, `of_type`,
`each`, `ints`, `floats`; `fields` applies them to a dataclass, one line a class.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from numbers import Real
from operator import index
from typing import Any, TypeGuard, TypeVar, cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.errors import ConfigError

MAX_WHOLE = 2**53
"""Largest whole number that is taken: all up to it are exact in float64."""

MAX_NUMBER = 1e30
"""Largest real number that is taken where a bound is no loss: products of a few stay finite."""

MAX_RANKS = 2**17
"""Most ranks of a world; every plan has tables of one entry a rank."""

_SHOWN = 80

_Value = TypeVar("_Value")


def shown(value: object) -> str:
    """A value for a message: on one line, and short."""
    kind = type(value).__name__
    if isinstance(value, np.generic):
        value = cast(Any, value).item()
    try:
        text = repr(value)
    except Exception:  # for example whole numbers of more digits than Python prints
        text = f"a value of type {kind}"
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 20]}..{text[-15:]}"


def fields(owner: Any, **rules: Callable[..., object] | tuple[Any, ...]) -> None:
    """Check fields of a dataclass and store what the checks return; for `__post_init__`.

    A rule is a check of this module, or a tuple of a check and its further arguments:
    `fields(self, d_model=(whole, 1, 2**31), gamma=number)`. None passes where it is the default.
    """
    for name, rule in rules.items():
        value = getattr(owner, name)
        if value is None and owner.__dataclass_fields__[name].default is None:
            continue
        check, *details = cast(tuple[Any, ...], rule if isinstance(rule, tuple) else (rule,))
        object.__setattr__(owner, name, check(f"{type(owner).__name__}({name}", value, *details))


def choice(name: str, value: object, *legal: str) -> str:
    """Return one of some words."""
    if not isinstance(value, str) or value not in legal:
        words = " or ".join(f'"{word}"' for word in legal)
        raise ConfigError(f"{_told(name, value)} must be {words}")
    return value


def each(
    name: str, values: object, check: Callable[..., _Value], *details: object
) -> tuple[_Value, ...]:
    """Check each entry of a list by a check of this module; return them as a tuple."""
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise ConfigError(f"{_told(name, values)} must be a list")
    listed = enumerate(cast(Iterable[object], values))
    return tuple(check(f"{name}[{i}]", one, *details) for i, one in listed)


def integer(name: str, value: object) -> int:
    """Check an integer of either sign, also one of numpy; a bool or a float is refused.

    Raises:
        ConfigError: It is not an integer, or beyond 2^53.
    """
    found = index_of(value)
    if found is None or abs(found) > MAX_WHOLE:
        raise ConfigError(f"{_told(name, value)} must be an integer, at most {_power(MAX_WHOLE)}")
    return found


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an ``int`` and not a ``bool``."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole(name: str, value: object, least: int = 0, most: int = MAX_WHOLE) -> int:
    """Check a whole number in a range, also one of numpy; a bool or a float is refused.

    Args:
        name: What it is, for the message; "Limits(tokens" shows "Limits(tokens=-1)".
        value: As given.
        least: Smallest that is legal.
        most: Largest that is legal.

    Raises:
        ConfigError: It is not such a value; the message says the range.
    """
    found = index_of(value)
    if found is None or not least <= found <= most:
        raise ConfigError(
            f"{_told(name, value)} must be an integer, at least {least} and at most {_power(most)}"
        )
    return found


def number(name: str, value: object, least: float = 0.0, most: float = MAX_NUMBER) -> float:
    """Check a finite real number in a range; a bool is refused.

    Args:
        name: As for `whole`.
        value: As given.
        least: Smallest that is legal.
        most: Largest that is legal.

    Raises:
        ConfigError: It is not such a value; the message says the range.
    """
    found = real(value)
    if found is None or not least <= found <= most:
        raise ConfigError(
            f"{_told(name, value)} must be finite, at least {least:g} and at most {most:g}"
        )
    return found


def rate(name: str, value: object) -> float:
    """A real number above 0: so far above that what is divided by it stays finite.

    Raises:
        ConfigError: It is not such a value; the message says the range.
    """
    return number(name, value, 1.0 / MAX_NUMBER)


def index_of(value: object) -> int | None:
    """A whole number, or None; `True` does not count as one."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return index(cast(Any, value))
    except Exception:  # a tensor raises what it likes
        return None


def real(value: object) -> float | None:
    """A real number within float64, or None; NaN, `True`, texts and durations are none."""
    excluded = isinstance(value, bool | np.bool_ | np.timedelta64)
    if excluded or not isinstance(value, Real):
        return None
    try:
        found = float(value)
    except (OverflowError, ValueError):
        return None
    return None if math.isnan(found) else found


def of_type(
    name: str, value: object, kind: type[_Value] | tuple[type[_Value], ...], advice: str
) -> _Value:
    """Return a value of this type; the advice says what to give instead."""
    if not isinstance(value, kind):
        is_field = "(" in name and not name.endswith(")")
        told = f"{name}={shown(value)})" if is_field else f"{name} is {shown(value)}"
        raise ConfigError(f"{told}: give {advice}")
    return value


def function(name: str, value: object) -> Callable[..., Any]:
    """Return what can be called."""
    if not callable(value):
        raise ConfigError(f"{_told(name, value)} must be a function")
    return value


def put(owner: object, name: str, value: object) -> None:
    """Set a field of a frozen value that is being made: to what its check gave."""
    object.__setattr__(owner, name, value)


def check_rank(rank: object, num_ranks: int) -> int:
    """One of so many ranks.

    Raises:
        ConfigError: There is no such rank.
    """
    found = index_of(rank)
    if found is None or not 0 <= found < num_ranks:
        raise ConfigError(
            f"rank {shown(rank)}: this plan is for ranks 0 to {num_ranks - 1}, whole numbers"
        )
    return found


def by_rank(name: str, values: object) -> Sequence[Any]:
    """One entry a rank, in their order: a list, a tuple, an array.

    Raises:
        ConfigError: It has no length or no order, or it is a text.
    """
    if isinstance(values, list | tuple):
        return cast(Sequence[Any], values)
    if hasattr(values, "__len__") and hasattr(values, "__getitem__"):
        try:
            return listed(name, values)
        except ConfigError:
            pass
    raise ConfigError(f"{name} are {shown(values)}: give a list with one entry a source rank")


def listed(name: str, values: object) -> list[Any]:
    """Anything that can be gone through, as a list.

    Raises:
        ConfigError: It cannot, or it is a text or has no order.
    """
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping | AbstractSet):
        try:
            return list(cast(Iterable[Any], values))
        except TypeError:  # an array without dims
            pass
    raise ConfigError(f"{name} are {shown(cast(object, values))}: give a list of them")


def array(name: str, values: object) -> npt.NDArray[Any]:
    """The values as an array, of whatever dtype.

    Raises:
        ConfigError: numpy cannot read them; says what they are.
    """
    try:
        found = np.asarray(cast(Any, values))
    except Exception as error:  # a tensor raises what it likes
        told = " ".join(str(error).split())
        raise ConfigError(
            f"{name} of type {type(values).__name__} cannot be read as an array ({told[:200]}): "
            "give a list of numbers or a numpy array; a tensor has .tolist()"
        ) from error
    if np.ma.is_masked(values):
        raise ConfigError(f"{name}: some entries are masked; leave them out")
    return found


def floats(name: str, values: object, num_dims: tuple[int, ...] | None = None) -> Floats:
    """Real numbers as a float64 array of their own; nothing is said of their range.

    Args:
        name: What they are, for the message.
        values: As given: numbers of any real dtype; no texts, no complex numbers, no dates.
        num_dims: Numbers of dims that are legal. Default: any.

    Raises:
        ConfigError: They are none.
    """
    given = array(name, values)
    is_real = given.dtype.kind in "biuf" or (
        given.dtype.kind == "O" and all(real(value) is not None for value in given.ravel())
    )
    if not is_real:
        raise ConfigError(
            f"{name} must be a flat sequence of real numbers, not {shown(values)} ({given.dtype})"
        )
    if num_dims is not None and given.ndim not in num_dims:
        dims = " or ".join({1: "one dimension", 2: "two dimensions"}[n] for n in num_dims)
        raise ConfigError(f"{name} must have {dims}, got shape {given.shape}")
    with np.errstate(over="ignore"):  # a long double may be beyond: infinite then
        return np.array(given, dtype=np.float64)


def amounts(name: str, values: object, num_dims: tuple[int, ...] = (1,)) -> Floats:
    """Finite numbers of at least 0, as a read-only float64 array of their own.

    Raises:
        ConfigError: One is not; says which.
    """
    found = floats(name, values, num_dims)
    # One reduction a side: a NaN fails both comparisons.
    if found.size and not (found.min() >= 0.0 and found.max() < np.inf):
        place = np.argwhere(~((found >= 0.0) & (found < np.inf)))[0].tolist()
        raise ConfigError(f"{name}{place} is {found[tuple(place)]}; it must be finite and >= 0")
    with np.errstate(over="ignore"):
        if not np.isfinite(found.sum()):
            raise ConfigError(f"{name} up to {found.max()} overflow in a sum; use a larger unit")
    found.flags.writeable = False
    return found


def ints(name: str, values: object, size: int | None = None, most: int = MAX_WHOLE) -> Ints:
    """Whole numbers from 0 to a bound, as an int64 array of their own with one dim.

    Args:
        name: What they are, for the message.
        values: As given; of an integer dtype, or empty.
        size: How many there must be. Default: any number.
        most: Largest that is legal.

    Raises:
        ConfigError: They are none, or their number is another.
    """
    given = array(name, values)
    if given.ndim != 1 or (size is not None and given.size != size):
        needed = "one dim" if size is None else f"{size} integers"
        raise ConfigError(f"{name} of shape {given.shape} and dtype {given.dtype}: give {needed}")
    if given.size == 0:
        return np.zeros(0, np.int64)
    if given.dtype.kind not in "iu":
        raise ConfigError(
            f"{name} of dtype {given.dtype}: give {given.size} integers, from 0 to {_power(most)}"
        )
    low, high = int(given.min()), int(given.max())
    if low < 0 or high > most:
        wrong = low if low < 0 else high
        raise ConfigError(f"{name} has {wrong}: it must be at least 0, at most {_power(most)}")
    return given.astype(np.int64)


def called(name: str, function: Callable[..., _Value], *args: object) -> _Value:
    """What a caller's function gives.

    Raises:
        ConfigError: It raised; says what. Its own ConfigErrors pass.
    """
    if not callable(function):
        raise ConfigError(
            f"{name} is {shown(function)}: it must be a function of token "
            "counts, as TransformerCost(d_model, num_layers=..)"
        )
    try:
        return function(*args)
    except ConfigError:
        raise
    except Exception as error:
        told = " ".join(str(error).split())
        raise ConfigError(f"{name} raised {type(error).__name__}: {told[:200]}") from error


def _power(bound: int) -> str:
    """A bound as people write it."""
    exponent = bound.bit_length() - 1
    return f"2^{exponent}" if exponent > 20 and bound == 1 << exponent else f"{bound}"


def _told(name: str, value: object) -> str:
    """`name is value; it`, for a field `Owner(name=value):`, for a flag `--name value:`."""
    if name.startswith("--"):
        return f"{name} {shown(value)}:"
    return f"{name}={shown(value)}):" if "(" in name else f"{name} is {shown(value)}; it"
