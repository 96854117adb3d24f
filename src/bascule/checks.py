"""Check arguments of users: return the value in its right type, or raise a ConfigError.

A check is called as `check(name, value, *details)`; messages show the name: "tokens", "--tokens".
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar, cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.errors import ConfigError
from bascule.quantities import number as written

MAX_WHOLE = 2**53
"""Largest whole number that is taken: all up to it are exact in float64."""

MAX_NUMBER = 1e30
"""Largest real number that is taken by default: products of a few such stay finite."""

MAX_RANKS = 2**17
"""Most ranks of a world; every plan has tables of one entry a rank."""

MAX_LENGTH = 2**40
"""Most tokens of a sequence."""

_MOST_SHOWN = 80  # characters of a value in a message

_Value = TypeVar("_Value")


def fields(owner: Any, **rules: Callable[..., object] | tuple[Any, ...]) -> None:
    """Check fields of a dataclass in `__post_init__`: `fields(self, d_model=(whole, 1, 2**31))`.

    None passes where it is the default.
    """
    for name, rule in rules.items():
        value = getattr(owner, name)
        if value is None and owner.__dataclass_fields__[name].default is None:
            continue
        check, *details = cast(tuple[Any, ...], rule if isinstance(rule, tuple) else (rule,))
        object.__setattr__(owner, name, check(f"{type(owner).__name__}({name}", value, *details))


def whole(name: str, value: object, least: int = 0, most: int = MAX_WHOLE) -> int:
    """Return an integer in a range; refuse a bool or a float."""
    is_bool = isinstance(value, bool)
    if not is_bool and isinstance(value, Integral) and least <= int(value) <= most:
        return int(value)
    limits = f"at least {_bound(least)} and at most {_bound(most)}"
    raise ConfigError(f"{_named(name, value)} must be an integer, {limits}")


def number(name: str, value: object, least: float = 0.0, most: float = MAX_NUMBER) -> float:
    """Return a real number in a range; refuse a bool, infinity and NaN."""
    is_real = isinstance(value, Real) and not isinstance(value, bool | np.timedelta64)
    if is_real and least <= cast(float, value) <= most:
        return float(cast(float, value))
    limits = f"at least {_bound(least)} and at most {_bound(most)}"
    raise ConfigError(f"{_named(name, value)} must be finite, {limits}")


def rate(name: str, value: object) -> float:
    """Return a number that is far enough above 0 to divide by."""
    return number(name, value, 1.0 / MAX_NUMBER)


def choice(name: str, value: object, *legal: str) -> str:
    """Return a value that is one of the legal words."""
    if not isinstance(value, str) or value not in legal:
        words = " or ".join(f'"{word}"' for word in legal)
        raise ConfigError(f"{_named(name, value)} must be {words}")
    return value


def of_type(
    name: str, value: object, kind: type[_Value] | tuple[type[_Value], ...], advice: str
) -> _Value:
    """Return a value that has a type; `advice` says what to give instead."""
    if not isinstance(value, kind):
        is_field = "(" in name and not name.endswith(")")
        subject = f"{name}={shown(value)})" if is_field else f"{name} is {shown(value)}"
        raise ConfigError(f"{subject}: give {advice}")
    return value


def function(name: str, value: object) -> Callable[..., Any]:
    """Return a value that is callable."""
    if not callable(value):
        raise ConfigError(f"{_named(name, value)} must be a function")
    return value


def each(
    name: str, values: object, check: Callable[..., _Value], *details: object
) -> tuple[_Value, ...]:
    """Check each entry of a list by another check; return the entries as a tuple."""
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise ConfigError(f"{_named(name, values)} must be a list")
    entries = enumerate(cast(Iterable[object], values))
    return tuple(check(f"{name}[{i}]", entry, *details) for i, entry in entries)


def listed(name: str, values: object) -> list[Any]:
    """Return the entries of an iterable; refuse a text, a set or a mapping."""
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping | AbstractSet):
        return list(cast(Iterable[Any], values))
    raise ConfigError(f"{name} are {shown(cast(object, values))}: give a list of them")


def array(name: str, values: object) -> npt.NDArray[Any]:
    """Return values as an array of any dtype."""
    try:
        return np.asarray(cast(Any, values))
    except Exception as error:  # a tensor raises what it likes
        reason = " ".join(str(error).split())
        what = f"{name} of type {type(values).__name__} cannot be read as an array ({reason[:200]})"
        fix = "give a list of numbers or a numpy array; a tensor has .tolist()"
        raise ConfigError(f"{what}: {fix}") from None


def ints(name: str, values: object, size: int | None = None, most: int = MAX_WHOLE) -> Ints:
    """Return whole numbers from 0 to `most` as a new int64 array, (size,)."""
    table = array(name, values)
    if table.ndim != 1 or (size is not None and table.size != size):
        needed = "one dimension" if size is None else f"{size} integers"
        raise ConfigError(f"{name} of shape {table.shape} and dtype {table.dtype}: give {needed}")
    if table.size and table.dtype.kind not in "iu":
        needed = f"{table.size} integers, from 0 to {_bound(most)}"
        raise ConfigError(f"{name} of dtype {table.dtype}: give {needed}")
    if table.size and not 0 <= table.min() <= table.max() <= most:
        wrong = table.min() if table.min() < 0 else table.max()
        raise ConfigError(f"{name} has {wrong}: it must be at least 0, at most {_bound(most)}")
    return table.astype(np.int64)


def floats(name: str, values: object, num_dims: tuple[int, ...] | None = None) -> Floats:
    """Return real numbers in any range as a new float64 array."""
    table = array(name, values)
    if table.dtype.kind not in "biuf":
        what = f"{shown(values)} ({table.dtype})"
        raise ConfigError(f"{name} must be a flat sequence of real numbers, not {what}")
    if num_dims is not None and table.ndim not in num_dims:
        dims = " or ".join({1: "one dimension", 2: "two dimensions"}[n] for n in num_dims)
        raise ConfigError(f"{name} must have {dims}, got shape {table.shape}")
    return table.astype(np.float64)


def amounts(name: str, values: object, num_dims: tuple[int, ...] = (1,)) -> Floats:
    """Return finite numbers of at least 0 as a new, read-only float64 array."""
    numbers = floats(name, values, num_dims)
    if numbers.size and not (numbers.min() >= 0.0 and numbers.max() < np.inf):  # NaN is neither
        place = np.argwhere(~((numbers >= 0.0) & (numbers < np.inf)))[0].tolist()
        raise ConfigError(f"{name}{place} is {numbers[tuple(place)]}; it must be finite and >= 0")
    with np.errstate(over="ignore"):
        if not np.isfinite(numbers.sum()):
            raise ConfigError(f"{name} up to {numbers.max()} overflow in a sum: use a larger unit")
    numbers.flags.writeable = False
    return numbers


def check_lengths(
    seq_lens: Sequence[npt.ArrayLike], num_ranks: int | None = None
) -> tuple[Ints, Ints]:
    """Check a list of lengths per source rank; return (num_ranks,) counts, (num_seqs,) lengths."""
    if isinstance(seq_lens, str) or not hasattr(seq_lens, "__len__"):
        raise ConfigError(f"sequence lengths {shown(seq_lens)}: give one list per source rank")
    if num_ranks is not None and len(seq_lens) != num_ranks:
        what = f"{len(seq_lens)} lists of sequence lengths for {num_ranks} ranks"
        raise ConfigError(f"{what}: give one list per source rank; a list may be empty")
    by_rank = [_as_numbers(rank, lens) for rank, lens in enumerate(seq_lens)]
    counts = np.array([lens.size for lens in by_rank], dtype=np.int64)
    lens = np.concatenate([*by_rank, np.zeros(0, np.int64)])
    legal = (lens >= 0) & (lens <= MAX_LENGTH)
    if lens.dtype.kind == "f":
        legal &= lens == np.floor(lens)
    if not legal.all():
        rank, place = source_of(int(np.argmin(legal)), counts)
        value = list(cast(Sequence[Any], seq_lens[rank]))[place]
        what = f"rank {rank}, sequence {place}: length {shown(value)}"
        raise ConfigError(f"{what} must be a whole number from 0 to 2^40")
    return counts, lens.astype(np.int64)


def _as_numbers(rank: int, values: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return the lengths of one rank as numbers of any dtype; NaN for an illegal entry."""
    lens = array(f"rank {rank}: lengths", values)
    if lens.ndim != 1:
        needed = "must be a flat list of integers"
        raise ConfigError(f"rank {rank}: lengths {needed}, not {shown(values)}")
    if lens.dtype.kind in "iuf":
        return lens
    entries, legal = list(cast(Sequence[Any], values)), (int, float)
    numbers = [n if type(n) in legal and 0 <= n <= MAX_LENGTH else np.nan for n in entries]
    return np.array(numbers, np.float64)


def source_of(seq_id: int, counts: Ints) -> tuple[int, int]:
    """Return the rank that loaded a sequence, and the index of the sequence there."""
    rank = int(np.searchsorted(np.cumsum(counts), seq_id, side="right"))
    return rank, seq_id - int(counts[:rank].sum())


def called(name: str, function: Callable[..., _Value], *args: object) -> _Value:
    """Call a user's function; turn an error that it raises into a ConfigError."""
    try:
        return function(*args)
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{name} raised {type(error).__name__}: {reason[:200]}") from error


def is_int(value: object) -> TypeGuard[int]:
    """Return whether a value is an `int`, but not a `bool`."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Return the text of a value for a message: one short line."""
    plain = cast(Any, value).item() if isinstance(value, np.generic) else value
    text = " ".join(repr(plain).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 20]}..{text[-15:]}"


def _bound(bound: float) -> str:
    """Format a bound with all of its digits, a large power of two as 2^n."""
    if isinstance(bound, int) and bound > 2**20 and not bound & bound - 1:
        return f"2^{bound.bit_length() - 1}"
    return f"{bound:,.15g}" if not bound or 1e-6 <= abs(bound) < 1e15 else written(bound)


def _named(name: str, value: object) -> str:
    """Return how a message begins: `name is value; it`, `Owner(name=value):`, `--name value:`."""
    if name.startswith("--"):
        return f"{name} {shown(value)}:"
    return f"{name}={shown(value)}):" if "(" in name else f"{name} is {shown(value)}; it"
