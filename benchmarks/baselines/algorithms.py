"""Policies of other libraries that give samples to ranks, written anew after what they publish.

Where there is an original to run (Megatron's schedulers, verl's and transformers' functions), the
results were equal on hundreds of random batches when this was written.

A step is `step[microbatch][rank]`: the samples of a rank, as indices. A sample that several ranks
of a microbatch have is shared by them: context parallelism.
"""

import heapq
import math
from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Step = list[list[list[int]]]
Price = Callable[[int, int], float]
"""Cost of a sequence of these many tokens for each of these many ranks that share it."""

NO_WORK = 0.0


# --- one global batch, whole samples ------------------------------------------------------------


def as_loaded(num_samples: int, num_ranks: int) -> Step:
    """Nothing: each rank computes what it loaded, neighbours in the order of the batch."""
    return [[part.tolist() for part in np.array_split(np.arange(num_samples), num_ranks)]]


def karmarkar_karp(costs: Floats, num_ranks: int, *, equal_size: bool) -> Step:
    """Largest differencing: the two partial divisions of greatest spread are put together.

    Follows verl (b178a3cd5, January 2026), `verl/utils/seqlen_balancing.py`: `karmarkar_karp`,
    with `equal_size` as its trainer deals a global batch to ranks, without it as it makes
    microbatches. Simplified: ties between equal sums go to the division that was made first; sets
    that are empty are not stored.
    """
    order = np.argsort(costs, kind="stable").tolist()
    values = costs.tolist()
    width = num_ranks if equal_size else 1
    heap: list[tuple[float, int, _Sets]] = []
    for number, first in enumerate(range(0, len(order), width)):
        sets = sorted(((values[k], [k]) for k in order[first : first + width]), key=_by_sum)
        heap.append((-_spread(sets, num_ranks), number, sets))
    heapq.heapify(heap)
    made = len(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = _merged(one, other, num_ranks)
        heapq.heappush(heap, (-_spread(merged, num_ranks), made, merged))
        made += 1
    sets = heap[0][2]
    empty: list[list[int]] = [[] for _ in range(num_ranks - len(sets))]
    return [[sorted(items) for _, items in sets] + empty]


_Sets = list[tuple[float, list[int]]]
"""The sets of a division that are not empty, by ascending sum."""


def _by_sum(entry: tuple[float, list[int]]) -> float:
    return entry[0]


def _spread(sets: _Sets, num_ranks: int) -> float:
    return sets[-1][0] - (sets[0][0] if len(sets) == num_ranks else NO_WORK)


def _merged(one: _Sets, other: _Sets, num_ranks: int) -> _Sets:
    """The heaviest set of one gets the lightest of the other, and so on; empty sets count."""
    large, small = (one, other) if len(one) >= len(other) else (other, one)
    common = max(len(large) + len(small) - num_ranks, 0)
    # Ascending: the lightest of the large division meet the heaviest of the small one.
    pairs = [
        (large[k][0] + small[common - 1 - k][0], large[k][1] + small[common - 1 - k][1])
        for k in range(common)
    ]
    rest = small[common:]
    result = large[common:]
    for entry in pairs + rest:
        insort(result, entry, key=_by_sum)
    return result


def batch_rebalance(costs: Floats, num_ranks: int) -> Step:
    """Samples by descending length, cut into a group for each rank; one sample moves at a time.

    Follows transformers 5.23.0, `trainer_pt_utils.BatchRebalanceSampler`, for one microbatch a
    step: a group costs its number of samples times its dearest; the dearest group gives a sample to
    the cheapest, until it has one left or a division comes back. The real one is called in
    `tests/unit/test_baselines.py`, and gives the same; this one prices all groups at once, because
    on 1,024 ranks the real one takes minutes a step. Its fixed price is replaced by that of all.
    """
    order = np.argsort(-costs, kind="stable")
    ranked = costs[order]
    num = ranked.size
    counts = np.full(num_ranks, num // num_ranks)
    counts[: num % num_ranks] += 1
    seen: set[bytes] = set()
    best, least = counts.copy(), math.inf
    for _ in range(max(30 * num_ranks, num)):
        key = counts.tobytes()
        if key in seen:
            break
        seen.add(key)
        loads = counts * ranked[np.cumsum(counts) - counts]
        dearest, cheapest = int(loads.argmax()), int(loads.argmin())
        spread = float(loads[dearest] - loads[cheapest])
        if spread < least:
            best, least = counts.copy(), spread
        if spread == 0.0 or counts[dearest] == 1:
            break
        counts[dearest] -= 1
        counts[cheapest] += 1
    ends = np.cumsum(best)
    loads = best * ranked[ends - best]
    groups = [part.tolist() for part in np.split(order, ends[:-1])]
    return [[groups[k] for k in np.argsort(-loads, kind="stable")]]


def next_fit(lens: Ints, num_ranks: int, max_tokens: int, degree: int = 1) -> Step:
    """Sequences in their order into packs of so many tokens; packs in turn to groups of ranks.

    Follows Megatron-LM (d98e8a64dd, August 2026), `megatron/core/datasets/data_schedule.py`:
    `DpBalancedScheduler.get_groups_and_subsamples`, without virtual pipelines. Packs that miss to
    a multiple of the groups are made of the last sequences of the last packs.

    Args:
        lens: Of the sequences.
        num_ranks: Of all groups.
        max_tokens: Of a pack on one rank; `degree` ranks hold as many times more.
        degree: Context-parallel ranks of a group.
    """
    packs: list[list[int]] = [[]]
    held = 0
    for number, length in enumerate(lens.tolist()):
        if held + length > max_tokens * degree:
            packs.append([])
            held = 0
        packs[-1].append(number)
        held += length
    packs = [pack for pack in packs if pack]
    groups = num_ranks // degree
    missing, last = -len(packs) % groups, len(packs) - 1
    while missing:
        if len(packs[last]) > 1:
            packs.append([packs[last].pop()])
            missing -= 1
        else:
            last -= 1
    rows = [packs[first : first + groups] for first in range(0, len(packs), groups)]
    return [[list(pack) for pack in row for _ in range(degree)] for row in rows]


# --- an epoch, whole samples --------------------------------------------------------------------


def bucket_steps(bucket_of: Ints, num_ranks: int, batch_size: int, seed: int) -> Iterator[Step]:
    """All ranks in one bucket of shapes in every step; what does not fill a batch is dropped.

    Follows NeMo AutoModel (36044ad3d, August 2026),
    `components/datasets/diffusion/sampler.py`: `SequentialBucketSampler` with its defaults (buckets
    and their samples shuffled, one batch size, incomplete batches dropped, a bucket repeated from
    its start until it divides by the ranks). Simplified: numpy's random numbers. There images are
    resized to the shape of their bucket; here they keep their size, as in all other policies.
    """
    draw = np.random.default_rng(seed)
    for bucket in draw.permutation(np.unique(bucket_of)).tolist():
        members = draw.permutation(np.flatnonzero(bucket_of == bucket))
        rows = np.resize(members, (-(-members.size // num_ranks), num_ranks))
        for first in range(0, len(rows) - batch_size + 1, batch_size):
            yield [rows[first : first + batch_size].T.tolist()]


# --- groups of context-parallel ranks -----------------------------------------------------------


@dataclass
class _Group:
    """Neighbouring ranks that share their sequences.

    Attributes:
        size: Ranks.
        load: What each of them has to do.
        members: (sequence, tokens) in the order in which they came.
    """

    size: int
    load: float = 0.0
    members: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


@dataclass(frozen=True)
class _InGroups(ABC):
    """Fills microbatches with groups of ranks that share sequences, the longest first.

    Attributes:
        num_ranks: A power of two.
        max_tokens: Of one sequence, or of a pack, on a rank.
        price: Of a sequence in a group.
    """

    num_ranks: int
    max_tokens: int
    price: Price

    def steps(self, lens: Ints) -> Step:
        """The microbatches of some sequences."""
        left = sorted(enumerate(lens.tolist()), key=lambda entry: -entry[1])
        step: Step = []
        while left:
            groups, left = self._microbatch(left)
            step.append([[seq for seq, _ in g.members] for g in groups for _ in range(g.size)])
        return step

    @abstractmethod
    def _microbatch(
        self, left: Sequence[tuple[int, int]]
    ) -> tuple[list[_Group], list[tuple[int, int]]]:
        """Return the groups of the next microbatch, and what is left."""


@dataclass(frozen=True)
class HybridContext(_InGroups):
    """Groups of ranks by the length of a sequence, balanced microbatch by microbatch.

    Follows Megatron-LM (d98e8a64dd, August 2026),
    `megatron/core/pipeline_parallel/hybrid_cp_schedule.py`: `BalancedCPScheduler`. A sequence gets
    the power of two of ranks that holds it. Simplified: its ranks are kept as groups in their
    order, which is how it makes and shifts them. Its price, L^2 over ranks, is replaced by that of
    all.

    Attributes:
        slack: Spread of a microbatch, over its longest load, that counts as balanced.
    """

    slack: float = 0.05

    def needed(self, length: int) -> int:
        """Ranks that hold a sequence."""
        return 1 << max(0, math.ceil(math.log2(length / self.max_tokens)))

    def _alone(self, length: int) -> float:
        return self.price(length, self.needed(length))

    def _buckets(self, left: Sequence[tuple[int, int]]) -> list[deque[tuple[int, int]]]:
        """As many runs of about equal cost as there are group sizes, at most a tenth above."""
        num = len({self.needed(length) for _, length in left})
        target = sum(self._alone(length) for _, length in left) / num
        buckets: list[deque[tuple[int, int]]] = []
        current: deque[tuple[int, int]] = deque()
        work, remaining = 0.0, num
        for number, (seq, length) in enumerate(left):
            cost = self._alone(length)
            is_scarce = len(left) - number <= remaining - len(buckets)
            if current and (work + cost > 1.1 * target or is_scarce):
                buckets.append(current)
                current, work, remaining = deque(), 0.0, remaining - 1
            current.append((seq, length))
            work += cost
        return [*buckets, current]

    def _microbatch(
        self, left: Sequence[tuple[int, int]]
    ) -> tuple[list[_Group], list[tuple[int, int]]]:
        """Groups with their sequences, and what is left for later microbatches."""
        buckets = self._buckets(left)
        groups: list[_Group] = []
        by_size: dict[int, list[tuple[float, int]]] = {}
        free, first_size, is_checked = self.num_ranks, 0, False
        while buckets:
            place = self._next(buckets, by_size, free)
            if place is None:
                break
            seq, length = buckets[place].popleft()
            size = self.needed(length)
            first_size = first_size or size
            if free >= size:
                number, free = len(groups), free - size
                groups.append(_Group(size))
            else:
                number = heapq.heappop(by_size[size])[1]
            groups[number].members.append((seq, length))
            groups[number].load += self._alone(length)
            heapq.heappush(by_size.setdefault(size, []), (groups[number].load, number))
            while buckets and not buckets[0]:
                buckets.pop(0)
            is_checked = is_checked or size < first_size
            if is_checked and buckets and not free and self._is_even(groups):
                break
        rest = [entry for bucket in buckets for entry in bucket]
        if not free:
            rest += self._trimmed(groups)
        self._filled(groups, free)
        return groups, rest

    def _next(
        self,
        buckets: Sequence[deque[tuple[int, int]]],
        by_size: dict[int, list[tuple[float, int]]],
        free: int,
    ) -> int | None:
        """The first bucket whose next sequence has a place."""
        for number, bucket in enumerate(buckets):
            if bucket and ((size := self.needed(bucket[0][1])) in by_size or free >= size):
                return number
        return None

    def _is_even(self, groups: Sequence[_Group]) -> bool:
        most = max(group.load for group in groups)
        return most - min(group.load for group in groups) <= self.slack * most

    def _trimmed(self, groups: list[_Group]) -> list[tuple[int, int]]:
        """Last sequences of the heaviest groups, taken out while that makes loads more even."""
        removed: list[tuple[int, int]] = []
        while not self._is_even(groups):
            heaviest = max(groups, key=lambda group: group.load)
            if len(heaviest.members) <= 1:
                break
            before = heaviest.load - min(group.load for group in groups)
            heaviest.load -= self._alone(heaviest.members[-1][1])
            loads = [group.load for group in groups]
            if max(loads) - min(loads) >= before:
                heaviest.load += self._alone(heaviest.members[-1][1])
                break
            removed.append(heaviest.members.pop())
        return removed

    def _filled(self, groups: list[_Group], free: int) -> None:
        """Ranks without work join the smallest groups, the first of these first."""
        while free > 0:
            smallest = min(group.size for group in groups)
            group = next(group for group in groups if group.size == smallest)
            added = min(2 * smallest, self.num_ranks) - smallest
            group.size, free = group.size + added, free - added


@dataclass(frozen=True)
class DynamicContext(_InGroups):
    """Groups of ranks in which a short sequence may get more ranks than it needs.

    Follows Megatron-LM's branch dev (d48bd6be0a, August 2026),
    `megatron/core/datasets/data_schedule_utils.py`: `next_hdp_group_packing_aware`, the whole of
    `DefaultDynamicCPScheduler` without virtual pipelines. A sequence goes, longest first, where the
    longest load of the microbatch stays least; a load may exceed by `slack` what a rank full of
    sequences like the longest has. Simplified: groups in place of ranks, no group is looked at once
    none can be better (which makes it many times faster), and ranks are a power of two. Its price
    is L^2 over ranks.

    Attributes:
        least: Ranks of the smallest group.
        slack: Share by which loads may exceed the limit.
    """

    least: int = 1
    slack: float = 0.05

    def _microbatch(
        self, left: Sequence[tuple[int, int]]
    ) -> tuple[list[_Group], list[tuple[int, int]]]:
        longest = left[0][1]
        size = self._needed(longest)
        most = self.price(longest, size) * self.max_tokens * size / longest * (1.0 + self.slack)
        groups = [_Group(size, self.price(longest, size), [left[0]])]
        free, reached, rest = self.num_ranks - size, groups[0].load, list[tuple[int, int]]()
        for entry in left[1:]:
            group, size = self._place(entry[1], groups, free, reached, most)
            if not size:
                rest.append(entry)
                continue
            if group is None:
                group, free = _Group(size), free - size
                groups.append(group)
            group.members.append(entry)
            group.load += self.price(entry[1], size)
            reached = max(reached, group.load)
        while free:
            smallest = min(group.size for group in groups)
            group = next(group for group in groups if group.size == smallest)
            group.size, free = 2 * smallest, free - smallest
        return groups, rest

    def _needed(self, length: int) -> int:
        return max(self.least, 1 << max(0, math.ceil(math.log2(length / self.max_tokens))))

    def _place(
        self, length: int, groups: Sequence[_Group], free: int, reached: float, most: float
    ) -> tuple[_Group | None, int]:
        """The group, or None for a new one, and its size; 0 if there is no place."""
        best, found = math.inf, (None, 0)
        size = self._needed(length)
        while size <= self.num_ranks:
            cost = self.price(length, size)
            for group in groups:
                if group.size != size or self._tokens(group) + length / size > self.max_tokens:
                    continue
                after = max(reached, group.load + cost)
                if after <= most and after < best:
                    best, found = after, (group, size)
                    if after == reached:
                        return found
            after = max(reached, cost)
            if free >= size and after <= most and after < best:
                best, found = after, (None, size)
                if after == reached:
                    return found
            size *= 2
        return found

    @staticmethod
    def _tokens(group: _Group) -> float:
        return sum(length / group.size for _, length in group.members)


def cached(price: Price) -> Price:
    """The same, remembering what it was asked."""
    return lru_cache(maxsize=None)(price)
