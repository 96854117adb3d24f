"""Sequence lengths as a caller gives them, checked: where one is illegal, and why."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Ints
from bascule.errors import ConfigError
from bascule.plan.checks import array, by_rank, real, shown

MAX_LENGTH = 2**40


def check_lengths(seq_lens: Sequence[npt.ArrayLike], num_ranks: int) -> tuple[Ints, Ints]:
    """(num_ranks,) counts and (num_seqs,) lengths of a batch given as one list a source rank.

    Raises:
        ConfigError: The number of lists is not the number of ranks, or a length is not a
            non-negative integer; rank, place and value are named.
    """
    lists = by_rank("sequence lengths", seq_lens)
    if len(lists) != num_ranks:
        raise ConfigError(
            f"{len(lists)} lists of sequence lengths for {num_ranks} ranks: give one list a "
            "source rank, empty where a rank has no data"
        )
    each = [_as_numbers(rank, lens) for rank, lens in enumerate(lists)]
    counts = np.array([lens.size for lens in each], dtype=np.int64)
    given = np.concatenate([*each, np.zeros(0, np.int64)])
    bad = _find_bad_length(given)
    if bad is not None:
        rank, place = source_of(bad, counts)
        raise ConfigError(_bad_length(rank, place, each[rank][place]))
    return counts, given.astype(np.int64)


def _as_numbers(rank: int, lens: Any) -> npt.NDArray[Any]:
    """The lengths of one rank, all of them numbers, but perhaps not whole or not positive."""
    listed: Sequence[object] | None = None
    if isinstance(lens, list | tuple):
        listed = cast(Sequence[object], lens)
    try:
        given = array(f"rank {rank}: lengths", cast(object, lens))
    except ConfigError:
        _check_each(rank, listed or ())  # says which one it is
        raise
    if given.ndim != 1:
        raise ConfigError(
            f"rank {rank}: lengths must be a flat list of integers, not {shown(cast(object, lens))}"
        )
    # numpy would take True for 1 and "8" for a text.
    has_bools = listed is not None and bool({bool, np.bool_} & set(map(type, listed)))
    if given.dtype.kind in "iuf" and not has_bools:
        return given
    return _check_each(rank, given if listed is None else listed)


def _check_each(rank: int, values: Iterable[object]) -> npt.NDArray[np.float64]:
    """The values as float64, if each is a real number."""
    numbers: list[float] = []
    for place, value in enumerate(values):
        number = real(value)
        if number is None:
            raise ConfigError(_bad_length(rank, place, value))
        numbers.append(number)
    return np.array(numbers, dtype=np.float64)


def source_of(seq_id: int, counts: Ints) -> tuple[int, int]:
    """Rank that loaded a sequence, and its place there."""
    rank = int(np.searchsorted(np.cumsum(counts), seq_id, side="right"))
    return rank, seq_id - int(counts[:rank].sum())


def _find_bad_length(given: npt.NDArray[Any]) -> int | None:
    """Place of the first length that is not a whole number from 0 to 2^40, or None."""
    with np.errstate(invalid="ignore"):
        legal = (given >= 0) & (given <= MAX_LENGTH) & (given == np.floor(given))
    return None if legal.all() else int(np.argmin(legal))


def _bad_length(rank: int, place: int, value: object) -> str:
    """The one sentence for an illegal length, the same wherever it is found."""
    told = shown(value)
    return f"rank {rank}, sequence {place}: length {told} is not a whole number from 0 to 2^40"
