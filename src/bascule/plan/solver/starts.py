"""First assignments: longest first, and the greedy of KnapFormer; both deterministic.

Longest first (LPT) gives each item, longest first, to the bin that completes it first, ties to the
lowest index. On m identical bins it is at most 4/3 - 1/(3m) above the best makespan (Graham 1969,
Bounds on multiprocessing timing anomalies).
"""

from heapq import heapify, heappop, heapreplace

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.plan.solver.problem import Problem

_MANY_BINS = 48
"""From here on, rounds of numpy beat a heap."""

_MAX_PAIRED = 1 << 15
"""Most slow bins times items that are filled by pairs."""


def longest_first(problem: Problem) -> Ints:
    """LPT by completion time, without limits.

    O(n log m) for identical bins, O(n (k + log m)) for k different speeds.
    """
    if problem.num_bins == 1:
        return np.zeros(problem.num_items, dtype=np.int64)
    if not problem.identical:
        return by_speed(problem, fill_first=False)
    # At least 1 unit an item, so that items without cost spread too.
    work = np.maximum(problem.work[problem.order], 1.0)
    sorted_bins = _identical_bins(work, problem.carried_work)
    bin_of = np.empty(problem.num_items, dtype=np.int64)
    bin_of[problem.order] = sorted_bins
    return bin_of


def longest_first_counted(problem: Problem) -> Ints:
    """LPT that keeps a limit on items: a full bin takes no more. For identical bins. O(n log m).

    A bin with a giant gets its other items last, so they are the shortest.
    """
    most = int(problem.room[problem.resources.index("items"), 0])
    left = [most] * problem.num_bins
    bits = (problem.num_bins - 1).bit_length()
    heap = [(int(load) << bits) + k for k, load in enumerate(problem.carried_work.tolist())]
    heapify(heap)
    mask, taken = (1 << bits) - 1, list[int]()
    # At least 1 unit an item, as in `longest_first`.
    for step in np.maximum(problem.work[problem.order], 1.0).astype(np.int64).tolist():
        index = heap[0] & mask
        taken.append(index)
        left[index] -= 1
        if left[index]:
            heapreplace(heap, heap[0] + (step << bits))
        else:
            heappop(heap)
    bin_of = np.empty(problem.num_items, dtype=np.int64)
    bin_of[problem.order] = taken
    return bin_of


def by_speed(problem: Problem, *, fill_first: bool) -> Ints:
    """Longest first over bins of different speeds, a heap per speed.

    Args:
        problem: Items and bins.
        fill_first: False: LPT by completion time. True: the greedy of KnapFormer: among the bins
            whose remaining share of the total work holds the item, the one that is filled least;
            if there is none, the one that completes the item first.
    """
    ceiling = float((problem.work.sum() + problem.carried_work.sum()) / problem.speeds.sum())
    bin_of = np.empty(problem.num_items, dtype=np.int64)
    bin_of[problem.order] = _fill_first(problem, ceiling) if fill_first else _longest_first(problem)
    return bin_of


def topped_up(problem: Problem, start: Ints, target: float) -> Ints | None:
    """Fill the slow bins as if they were knapsacks; the fastest bins level what is left, by LPT.

    Each bin below the top speed gives back its two shortest items of ``start`` and takes the pair,
    of these and of what lies on the fastest bins, that fills it best until ``target``. Few items on
    a slow bin leave much room for error, many on a fast one little. None if too large.
    O(k n log n) for k slow bins.
    """
    fast = problem.speeds == problem.speeds.max()
    slow = np.flatnonzero(~fast)
    if slow.size * problem.num_items > _MAX_PAIRED:
        return None
    ascending = problem.order[::-1]
    bins, work = start[ascending], problem.work[ascending]
    by_bin = np.argsort(bins, kind="stable")
    counts = np.bincount(bins, minlength=fast.size)
    place = np.empty_like(by_bin)
    place[by_bin] = np.arange(by_bin.size) - np.repeat(np.cumsum(counts) - counts, counts)
    free = fast[bins] | (place < 2)
    pool = np.flatnonzero(free)
    bins[free] = -1
    loads = problem.carried_work + np.bincount(bins + 1, work, fast.size + 1)[1:]
    pairs = _best_pairs(np.append(0.0, work[pool]), target * problem.speeds[slow] - loads[slow])
    for one, two, lane in pairs:
        bins[pool[[index - 1 for index in (one, two) if index]]] = slow[lane]
    rest = np.flatnonzero(bins < 0)[::-1]
    fastest = np.flatnonzero(fast)
    bins[rest] = fastest[_heap(work[rest], loads[fastest])]
    bin_of = np.empty_like(bins)
    bin_of[ascending] = bins
    return bin_of


def _best_pairs(work: Floats, room: Floats) -> list[tuple[int, int, int]]:
    """In each room in turn, the two free items of ascending ``work`` that leave least of it.

    Item 0 is no item: it costs nothing, and any number of rooms may have it.

    Returns:
        Pairs of items, and the room.
    """
    wanted = room[:, None] - work
    partner = np.searchsorted(work, wanted, side="right") - 1
    np.minimum(partner, np.arange(work.size) - 1, out=partner)
    left = wanted - work[partner]
    left[(partner < 0) | (left < 0.0)] = np.inf
    pairs: list[tuple[int, int, int]] = []
    free = np.ones(work.size, dtype=bool)
    for lane, partners in enumerate(partner):
        gaps = np.where(free & free[partners], left[lane], np.inf)
        one = int(gaps.argmin())
        if gaps[one] < np.inf:
            two = int(partners[one])
            pairs.append((one, two, lane))
            free[[one, two]] = False
            free[0] = True
    return pairs


def _identical_bins(work: Floats, loads: Floats) -> Ints:
    """LPT of descending work on identical bins, for the most part in vectorised rounds.

    With bins by ascending load a_1 <= a_2 .. and items w_1 >= w_2 .., LPT gives item k to bin k as
    long as no bin used before comes first again: a_k <= min over j < k of a_j + w_j. Such a run of
    items is one round. A round usually spans most bins; where rounds stay short (few bins hold
    little load), a heap finishes.
    """
    num_bins, num_items = loads.size, work.size
    if num_bins < _MANY_BINS:
        return _heap(work, loads)
    loads, parts, done = loads.copy(), [np.empty(0, dtype=np.int64)], 0
    for _ in range(8 + 3 * (num_items // num_bins)):
        bins = np.argsort(loads, kind="stable")[: num_items - done]
        starts = loads[bins]
        ends = starts + work[done : done + bins.size]
        late = starts[1:] > np.minimum.accumulate(ends[:-1])
        run = int(late.argmax()) + 1 if late.any() else bins.size
        loads[bins[:run]] = ends[:run]
        parts.append(bins[:run])
        done += run
        if done == num_items:
            break
    return np.concatenate([*parts, _heap(work[done:], loads)])


def _heap(work: Floats, loads: Floats) -> Ints:
    """LPT with one heap of integers ``load * 2**b + bin``: ties fall to the lowest bin."""
    bits = (loads.size - 1).bit_length()
    heap = [(int(load) << bits) + index for index, load in enumerate(loads.tolist())]
    heapify(heap)
    mask = (1 << bits) - 1
    taken = [
        heapreplace(heap, heap[0] + (step << bits)) & mask
        for step in work.astype(np.int64).tolist()
    ]
    return np.array(taken, dtype=np.int64)


def _longest_first(problem: Problem) -> list[int]:
    """Bins in the order of the items: each where it ends first, ties to the lowest index."""
    lanes = _lanes(problem)
    taken: list[int] = []
    for work in problem.work[problem.order].tolist():
        chosen, least, first = lanes[0][1], np.inf, -1
        for speed, heap in lanes:
            load, index = heap[0]
            end = (load + work) / speed
            if end < least or (end == least and index < first):
                chosen, least, first = heap, end, index
        heapreplace(chosen, (chosen[0][0] + work, first))
        taken.append(first)
    return taken


def _fill_first(problem: Problem, ceiling: float) -> list[int]:
    """The same, but where an item ends by ``ceiling``, the bin that is filled least."""
    lanes = _lanes(problem)
    taken: list[int] = []
    for work in problem.work[problem.order].tolist():
        chosen, least, first, fitting = lanes[0][1], np.inf, -1, False
        for speed, heap in lanes:
            load, index = heap[0]
            rank = (load + work) / speed
            if rank <= ceiling:
                if not fitting:
                    fitting, least = True, np.inf
                rank = load / speed
            elif fitting:
                continue
            if rank < least or (rank == least and index < first):
                chosen, least, first = heap, rank, index
        heapreplace(chosen, (chosen[0][0] + work, first))
        taken.append(first)
    return taken


def _lanes(problem: Problem) -> list[tuple[float, list[tuple[float, int]]]]:
    """Per speed, a heap of the loads and indices of its bins."""
    heaps: dict[float, list[tuple[float, int]]] = {}
    bins = zip(problem.speeds.tolist(), problem.carried_work.tolist(), strict=True)
    for index, (speed, load) in enumerate(bins):
        heaps.setdefault(speed, []).append((load, index))
    for heap in heaps.values():
        heapify(heap)
    return sorted(heaps.items())
