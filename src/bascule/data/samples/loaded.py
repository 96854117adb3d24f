"""The samples that all ranks of a balanced loader loaded for a step; every rank knows the same.

Legend: M microbatches of a step, D data-parallel ranks, n samples of a step. A sample's id is its
place in the order of microbatches, then of the ranks that loaded it, then of their loaders.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from bascule.arrays import Ints
from bascule.comm.groups import RankGroup
from bascule.comm.samples.sample_bytes import Parcel
from bascule.errors import ConfigError

Sample = Any
Ends = Literal["drop_last", "pad_empty", "finish"]

FLAGS, _VERSION, _NUM_FIXED = 0, 1, 2  # places in what a rank says; then the counts
_SHORT, CLOSING, _SOME = 1, 2, 4
_NUM_NUMBERS = 3  # of a sample: tokens, weight, bytes
_MOST = 2**40  # sums of many stay below 2^63


def whole_number(value: Any, what: str) -> int:
    """A length or weight as an integer.

    Raises:
        ConfigError: It is not an integer from 0 to 2^40.
    """
    try:
        number = int(value)
        is_whole = bool(number == value) and 0 <= number <= _MOST
    except Exception:
        number, is_whole = 0, False
    if not is_whole or _is_truth(value) or isinstance(value, str | bytes):
        raise ConfigError(f"{what} gave {value!r}: it must be a whole number from 0 to 2^40")
    return number


def _is_truth(value: Any) -> bool:
    """Whether it is True or False, of Python, numpy or torch: a comparison, not a length."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


@dataclass(frozen=True, slots=True, eq=False)
class DataRanks:
    """The ranks of a group, by what they load. Peers (tensor, pipeline) get the same batch.

    Attributes:
        group: All ranks, peers included.
        place: (group size,) data-parallel index of each.
    """

    group: RankGroup
    place: Ints

    @property
    def index(self) -> int:
        """Data-parallel index of this rank."""
        return int(self.place[self.group.rank])

    @property
    def num(self) -> int:
        """D, the data-parallel ranks."""
        return int(self.place.max()) + 1

    @property
    def leaders(self) -> Ints:
        """(D,) of each data-parallel rank, the first rank of the group: the one that loads."""
        return np.unique(self.place, return_index=True)[1]

    @property
    def is_leader(self) -> bool:
        """Whether this rank loads samples, rather than one of its peers."""
        return int(self.leaders[self.index]) == self.group.rank


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What one rank loaded for a step.

    Attributes:
        samples: Of each microbatch.
        lens: (n,) tokens of each sample, microbatches one after the other.
        weights: (n,) what each counts in the global mean.
        parcels: The samples on the wire.
        num_items: Items of the loader in each microbatch; a ready-made pack is one item.
        is_short: Whether it ran out of samples before the step was full.
        is_closing: Whether this rank wants no further step.
        cost_version: Newest cost model that it knows.
        error: What went wrong while loading.
    """

    samples: Sequence[Sequence[Sample]] = ()
    lens: Sequence[int] = ()
    weights: Sequence[int] = ()
    parcels: Sequence[Parcel] = ()
    num_items: Sequence[int] = ()
    is_short: bool = False
    is_closing: bool = False
    cost_version: int = 0
    error: Exception | None = None

    def values(self, accumulate: int) -> Ints:
        """As it is gathered: flags, version, M counts of samples and of items; then the samples."""
        flags = _SHORT * self.is_short + CLOSING * self.is_closing + _SOME * bool(self.samples)
        missing = [0] * (accumulate - len(self.samples))
        counts = [*map(len, self.samples), *missing, *self.num_items, *missing]
        sizes = [parcel.num_bytes for parcel in self.parcels]
        parts = ([flags, self.cost_version, *counts], self.lens, self.weights, sizes)
        return np.concatenate([np.array(part, dtype=np.int64) for part in parts])


@dataclass(frozen=True, eq=False)
class Loaded:
    """What all ranks loaded for a step. Arrays of n are in the order of sample ids.

    Attributes:
        flags: (D,) of each data-parallel rank.
        cost_version: Newest cost model that all ranks know.
        counts: (M, D) samples of each microbatch and rank.
        num_items: (M, D) items of the loaders that they came from.
        lens: (n,) tokens.
        weights: (n,) what each counts in the global mean.
        num_bytes: (n,) on the wire.
    """

    flags: Ints
    cost_version: int
    counts: Ints
    num_items: Ints
    lens: Ints
    weights: Ints
    num_bytes: Ints

    @classmethod
    def of(cls, values: Sequence[Ints], ranks: DataRanks, accumulate: int) -> "Loaded":
        """From what the ranks of the group said."""
        own = [values[leader] for leader in ranks.leaders.tolist()]
        middle, first = _NUM_FIXED + accumulate, _NUM_FIXED + 2 * accumulate
        counts = np.stack([part[_NUM_FIXED:middle] for part in own], axis=1)
        num_items = np.stack([part[middle:first] for part in own], axis=1)
        numbers = np.concatenate([part[first:].reshape(_NUM_NUMBERS, -1) for part in own], axis=1)
        micro = np.concatenate([np.repeat(np.arange(accumulate), count) for count in counts.T])
        order = np.argsort(micro, kind="stable")
        lens, weights, num_bytes = numbers[:, order]
        flags = np.array([part[FLAGS] for part in own])
        version = min(int(part[_VERSION]) for part in values)
        return cls(flags, version, counts, num_items, lens, weights, num_bytes)

    @cached_property
    def micro(self) -> Ints:
        """(n,) microbatch of each sample."""
        return np.repeat(np.arange(self.counts.shape[0]), self.counts.sum(axis=1))

    @cached_property
    def source(self) -> Ints:
        """(n,) data-parallel rank that loaded each sample."""
        num_micro, num_ranks = self.counts.shape
        return np.repeat(np.tile(np.arange(num_ranks), num_micro), self.counts.ravel())

    def is_last(self, ends: Ends) -> bool:
        """Whether there is no step any more: alike on all ranks."""
        if not (self.flags & _SOME).any():
            return True
        return ends == "drop_last" and bool(((self.flags & _SHORT) > 0).any())

    def lens_of(self, micro: int) -> list[Ints]:
        """Tokens of the samples of each rank in a microbatch."""
        bounds = np.cumsum(self.counts[micro])[:-1]
        return np.split(self.lens[self.micro == micro], bounds)
