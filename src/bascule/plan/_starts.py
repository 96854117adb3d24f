"""First assignments: longest first, and the greedy of KnapFormer; both deterministic.

Longest first (LPT) gives each item, longest first, to the bin that completes it first, ties to the
lowest index. On m identical bins it is at most 4/3 - 1/(3m) above the best makespan (Graham 1969,
Bounds on multiprocessing timing anomalies).
"""

from heapq import heapify, heapreplace

import numpy as np

from bascule.plan._problem import Floats, Ints, Problem

_MANY_BINS = 48
"""From here on, rounds of numpy beat a heap."""

_MANY_SPEEDS = 12
"""From here on, a numpy minimum over all bins beats a heap per speed."""


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


def by_speed(problem: Problem, *, fill_first: bool) -> Ints:
    """Longest first over bins of different speeds, a heap per speed.

    Args:
        problem: Items and bins.
        fill_first: False: LPT by completion time. True: the greedy of KnapFormer: among the bins
            whose remaining share of the total work holds the item, the one that is filled least;
            if there is none, the one that completes the item first.
    """
    speeds = np.unique(problem.speeds)
    ceiling = float((problem.work.sum() + problem.carried_work.sum()) / problem.speeds.sum())
    if not fill_first:
        ceiling = -1.0
    place = _speed_heaps if speeds.size < _MANY_SPEEDS else _all_bins
    bin_of = np.empty(problem.num_items, dtype=np.int64)
    bin_of[problem.order] = place(problem, speeds, ceiling)
    return bin_of


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


def _speed_heaps(problem: Problem, speeds: Floats, ceiling: float) -> list[int]:
    """Bins in the order of the items; ``ceiling`` is the time up to which bins fill by load."""
    lanes: list[tuple[float, list[tuple[float, int]]]] = []
    for speed in speeds.tolist():
        bins = np.flatnonzero(problem.speeds == speed)
        heap = list(zip(problem.carried_work[bins].tolist(), bins.tolist(), strict=True))
        heapify(heap)
        lanes.append((speed, heap))
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


def _all_bins(problem: Problem, speeds: Floats, ceiling: float) -> list[int]:
    """The same with a minimum over all bins per item; for many different speeds."""
    del speeds
    loads = problem.carried_work.copy()
    taken: list[int] = []
    for work in problem.work[problem.order].tolist():
        ends = (loads + work) / problem.speeds
        fits = ends <= ceiling
        if fits.any():
            index = int(np.where(fits, loads / problem.speeds, np.inf).argmin())
        else:
            index = int(ends.argmin())
        loads[index] += work
        taken.append(index)
    return taken
