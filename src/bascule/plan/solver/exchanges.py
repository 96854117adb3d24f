"""Exchanges between pairs of bins: who is paired, what can be given and taken, and the best of it.

A late bin gives a group of one or two items to an early bin, and may take a group back. The fast
search without limits (`refine`) and the general one (`improve`) differ in how they find the best
return for a group; the pairs, the groups and the choice are these.
"""

from dataclasses import dataclass

import numpy as np

from bascule.arrays import Floats, Ints

Moves = tuple[Ints, Ints]
"""Items, and the bin that each of them goes to."""

_MAX_GROUPS = 1 << 13
"""Most groups of two items in one round."""

_MAX_SAMPLED = 32
"""Most items of a bin that form groups of two."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """Late bins and the early bins that each is compared with.

    Attributes:
        late: (K,) late bins, latest first.
        early: (M, K) early bins; column k is compared with late bin k; no bin occurs twice.
    """

    late: Ints
    early: Ints

    def slot_of_bin(self, num_bins: int) -> Ints:
        """(bins,) slots 0..K-1 for the late bins, then the early ones; -1 for all others."""
        bins = np.concatenate((self.late, self.early.ravel()))
        slots = np.full(num_bins, -1)
        slots[bins] = np.arange(bins.size)
        return slots


@dataclass(frozen=True, slots=True)
class Groups:
    """One or two items of a bin that leave it together, sorted by slot, then by work.

    Attributes:
        slot: Position of the bin among the bins compared.
        work: Work of the items together.
        first: The item.
        second: The second item; -1 if there is none.
    """

    slot: Ints
    work: Floats
    first: Ints
    second: Ints

    def take(self, index: Ints | slice) -> "Groups":
        """The groups at ``index``."""
        return Groups(self.slot[index], self.work[index], self.first[index], self.second[index])


@dataclass(frozen=True, slots=True)
class Offers:
    """The best exchange found for each group that a late bin could give.

    Attributes:
        score: What the exchange leaves behind; lower is better.
        row: Row of the early bin in ``Pairing.early``.
        taken: The group that comes back, an index; -1 if none does.
    """

    score: Floats
    row: Ints
    taken: Ints


def match_bins(late: Ints, early: Ints) -> Pairing | None:
    """Compare the k-th late bin with the k-th early one, and with every K-th after it."""
    if late.size == 0 or early.size == 0:
        return None
    late = late[: early.size]
    num_each = early.size // late.size
    return Pairing(late, early[: num_each * late.size].reshape(num_each, late.size))


def bin_groups(work: Floats, slots: Ints, *, in_twos: bool) -> Groups:
    """Groups of the items in the bins compared.

    Args:
        work: (items,) ascending.
        slots: (items,) slot of each item's bin; negative if it is not compared.
        in_twos: Whether to add groups of two.
    """
    num_items = work.size
    keys = slots * num_items + np.arange(num_items)
    keys = np.sort(keys[slots >= 0])
    slot, item = np.divmod(keys, num_items)
    singles = Groups(slot, work[item], item, np.full(item.size, -1))
    return _in_twos(singles) if in_twos else singles


def _in_twos(singles: Groups) -> Groups:
    """Add groups of two items of a bin, for as many bins as the budget allows.

    From a bin with many items, an even sample by work is taken.
    """
    sampled = singles.take(sample(singles.slot, _MAX_SAMPLED))
    counts = np.bincount(sampled.slot)
    allowed = np.cumsum(counts * (counts - 1) // 2) <= _MAX_GROUPS
    inside = sampled.take(np.flatnonzero(allowed[sampled.slot]))
    ends = np.cumsum(counts)[inside.slot]
    index = np.arange(inside.slot.size)
    partners = ends - index - 1
    one = np.repeat(index, partners)
    offset = np.arange(one.size) - np.repeat(np.cumsum(partners) - partners, partners)
    other = one + 1 + offset
    slot = np.concatenate((singles.slot, inside.slot[one]))
    work = np.concatenate((singles.work, inside.work[one] + inside.work[other]))
    first = np.concatenate((singles.first, inside.first[one]))
    second = np.concatenate((singles.second, inside.first[other]))
    order = np.lexsort((work, slot))
    return Groups(slot, work, first, second).take(order)


def sample(slot: Ints, most: int) -> Ints:
    """Indices of at most ``most`` evenly spaced entries of each slot; slots ascend."""
    counts = np.bincount(slot)
    within = np.arange(slot.size) - (np.cumsum(counts) - counts)[slot]
    span = np.maximum(counts, most)[slot]
    return np.flatnonzero(within * most // span != (within - 1) * most // span)


def split_groups(groups: Groups, num_late: int) -> tuple[Groups, Groups]:
    """The groups of the late bins, and those of the early ones with slots from 0."""
    split = int(np.searchsorted(groups.slot, num_late))
    late, early = groups.take(slice(split)), groups.take(slice(split, None))
    return late, Groups(early.slot - num_late, early.work, early.first, early.second)


def best_exchanges(
    pairing: Pairing, given: Groups, offered: Groups, offers: Offers, before: Floats
) -> Moves | None:
    """Per late bin, the offer with the lowest score, ties to the first, if below ``before``.

    Every late bin must have a group. None if no exchange lowers a score.
    """
    lanes = np.arange(pairing.late.size)
    best = np.minimum.reduceat(offers.score, np.searchsorted(given.slot, lanes))
    improved = np.flatnonzero(best < before)
    if improved.size == 0:
        return None
    hits = np.flatnonzero(offers.score == best[given.slot])[::-1]
    chosen = np.empty_like(lanes)
    chosen[given.slot[hits]] = hits  # of several hits in a slot the last written, first one stays
    chosen = chosen[improved]
    taken = offers.taken[chosen]
    some = taken >= 0
    early = pairing.early[offers.row[chosen], improved]
    late, taken = pairing.late[improved][some], taken[some]
    parts = (given.first[chosen], given.second[chosen], offered.first[taken], offered.second[taken])
    items, bins = np.concatenate(parts), np.concatenate((early, early, late, late))
    return items[items >= 0], bins[items >= 0]
