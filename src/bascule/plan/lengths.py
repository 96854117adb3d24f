"""Sequence lengths as a caller gives them, checked: where one is illegal, and why."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from bascule.errors import ConfigError
from bascule.plan.layout import Ints

MAX_LENGTH = 2**40


def check_lengths(seq_lens: Sequence[npt.ArrayLike], num_ranks: int) -> tuple[Ints, Ints]:
    """(num_ranks,) counts and (num_seqs,) lengths of a batch given as one list a source rank.

    Raises:
        ConfigError: The number of lists is not the number of ranks, or a length is not a
            non-negative integer; rank, place and value are named.
    """
    if len(seq_lens) != num_ranks:
        raise ConfigError(
            f"{len(seq_lens)} lists of sequence lengths for {num_ranks} ranks: give one list a "
            "source rank, empty where a rank has no data"
        )
    per_rank = [_as_numbers(rank, lens) for rank, lens in enumerate(seq_lens)]
    counts = np.array([lens.size for lens in per_rank], dtype=np.int64)
    given = np.concatenate(per_rank)
    bad = _find_bad_length(given)
    if bad is not None:
        rank, place = source_of(bad, counts)
        raise ConfigError(_bad_length(rank, place, per_rank[rank][place]))
    return counts, given.astype(np.int64)


def _as_numbers(rank: int, lens: object) -> npt.NDArray[Any]:
    """The lengths of one rank, all of them numbers, but perhaps not whole or not positive."""
    try:
        given = np.asarray(cast(Any, lens))
    except ValueError:  # ragged
        given = np.asarray(cast(Any, lens), dtype=object)
    if given.ndim != 1:
        raise ConfigError(f"rank {rank}: lengths must be a flat list of integers, not {lens!r}")
    # numpy would take True for 1 and "8" for a text.
    values = cast(list[object], lens)
    kinds = set(map(type, values)) if isinstance(lens, list | tuple) else set[type]()
    if given.dtype.kind in "iuf" and not kinds & {bool, np.bool_}:
        return given
    for place, value in enumerate(values):
        is_number = isinstance(value, int | float | np.integer | np.floating)
        if not is_number or isinstance(value, bool):
            raise ConfigError(_bad_length(rank, place, value))
    return given.astype(np.float64)


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
    return f"rank {rank}, sequence {place}: length {value} is not a whole number from 0 to 2^40"
