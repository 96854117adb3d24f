"""Lower bounds on the makespan, which certify how good an assignment is.

A bin of speed s_b that carries work until r_b finishes items W at r_b + W / s_b. The makespan is at
least max r_b, so bins can be pooled: a set F cannot end W before (W + sum_F s_b r_b) / sum_F s_b.
"""

import numpy as np

from bascule.arrays import Floats
from bascule.plan.solver.problem import Problem

_ROUNDING = 2.0**-40  # above the relative error of any sum here
_CLOSE = 1.0 + 1e-4  # a makespan this close to a bound needs no better one
_SAMPLE = 16  # items whose common divisor is looked at first
_FINEST_GRID = 2.0**-30  # of the bound: finer grids cannot raise it by anything that matters


def lower_bound(problem: Problem, makespan: float = np.inf) -> float:
    """Return the best of all bounds, in the caller's units of time. O(n log n + m log m).

    It computes only the two cheapest bounds if they are within 0.01 % or so of `makespan`.
    """
    bounds = [mean_bound(problem)]
    if problem.num_items:
        bounds.append(counting_bound(problem))
        if makespan <= (bound := on_grid(problem, max(bounds))) * _CLOSE:
            return bound
        if problem.identical:
            bounds += [f(problem) for f in (pigeonhole_bound, surplus_bound, crowding_bound)]
        else:
            bounds.append(threshold_bound(problem))
        if problem.limited:
            best_of_all = _best_times(problem, np.ones(problem.num_bins, dtype=bool))
            bounds += [float(best_of_all.max()), spill_bound(problem), company_bound(problem)]
    return on_grid(problem, max(bounds))


def mean_bound(problem: Problem) -> float:
    """Bound by all work (with carried loads) over all speeds, and by carried loads. O(n + m)."""
    pooled = _pooled(float(problem.costs.sum()), problem.speeds, problem.carried)
    return max(pooled, float(problem.carried.max()))


def counting_bound(problem: Problem) -> float:
    """Place the k longest items on k places: longest item on the fastest bin, and pigeonhole.

    Until time t a bin of speed s completes at most `floor(s t / w)` items of cost w or more. So the
    k longest items, the shortest of which costs w_k, need t = w_k q_k, where q_k is the k-th
    smallest of all numbers j / s_b (j = 1, 2, ..). O(n log n).
    """
    earliest = float(problem.carried.min())
    if problem.identical:
        # q_k = ceil(k / m) / s, and within equal q_k the first, longest item counts.
        longest = problem.ranked[:: problem.num_bins]
        rounds = np.arange(1, longest.size + 1)
        return earliest + float((longest * rounds).max() / problem.speeds[0])
    slots = _slot_times(problem.speeds, problem.num_items)
    return earliest + float((problem.ranked * slots).max())


def pigeonhole_bound(problem: Problem) -> float:
    """Bound for m identical bins: one gets k + 1 of the k m + 1 longest items.

    Source: Dell'Amico and Martello 1995, bound L3 for identical machines. O(n).
    """
    ends = np.arange(0, problem.num_items, problem.num_bins)
    prefix = np.concatenate(([0.0], np.cumsum(problem.ranked)))
    sums = prefix[ends + 1] - prefix[ends - np.arange(ends.size)]
    # The difference of two prefix sums is rounded at the scale of the total.
    slack = float(prefix[-1]) * _ROUNDING
    fastest = float(problem.speeds.max())
    return float(problem.carried.min()) + max(float(sums.max()) - slack, 0.0) / fastest


def surplus_bound(problem: Problem) -> float:
    """Bound by the work that bins with few items cannot hold, for identical bins. O(n).

    With n items in m bins, at least `x = m - floor(n / (k + 1))` bins have at most k items. Any x
    of them hold at most the k x longest items, and the other m - x bins the rest. Only k near n / m
    can beat the mean. Items that cost nothing do not count.
    """
    total, bound = float(problem.costs.sum()), 0.0
    longest = np.cumsum(_costly(problem))
    carried = np.cumsum(np.sort(problem.carried))
    speed = float(problem.speeds[0])
    mean_count = longest.size // problem.num_bins
    for most in range(max(mean_count, 1), mean_count + 3):
        others = longest.size // (most + 1)
        few = problem.num_bins - others
        if few > 0 and 0 < others and most * few <= longest.size:
            rest = total * (1.0 - _ROUNDING) - float(longest[most * few - 1])
            bound = max(bound, (rest / speed + float(carried[others - 1])) / others)
    return bound


def crowding_bound(problem: Problem) -> float:
    """Bound by the shortest items in bins with more than n // m items, for identical bins. O(n).

    With k = n // m and e = n - k m, the z bins with more than k items hold k z + e items or more.
    So some bin holds at least S(k z + e) / z for a z from 1 to e, where S(i) is the sum of the i
    shortest items. Items that cost nothing do not count.
    """
    shortest = np.cumsum(_costly(problem)[::-1])
    each, extra = divmod(shortest.size, problem.num_bins)
    if extra == 0:
        return 0.0
    crowded = np.arange(1, extra + 1)
    work = float((shortest[each * crowded + extra - 1] / crowded).min())
    return float(problem.carried.min()) + work * (1.0 - _ROUNDING) / float(problem.speeds[0])


def _costly(problem: Problem) -> Floats:
    """Return the costs above 0, longest first: a bound without the others holds with them."""
    return problem.ranked[: np.count_nonzero(problem.costs)]


def on_grid(problem: Problem, bound: float) -> float:
    """Round a bound up to a multiple of the costs' common divisor, for identical bins. O(n)."""
    is_plain = problem.identical and problem.num_kinds == 1 and not problem.carried.any()
    if problem.num_items == 0 or not is_plain:
        return bound
    if not np.array_equal(problem.work * problem.unit, problem.costs):
        return bound
    whole = problem.work.astype(np.int64)
    divisor = np.gcd.reduce(whole[:_SAMPLE])
    step = float(divisor) * problem.unit / float(problem.speeds[0])
    if step < bound * _FINEST_GRID:
        return bound
    step = float(np.gcd.reduce(whole)) * problem.unit / float(problem.speeds[0])
    return max(bound, float(np.ceil(bound / step * (1.0 - _ROUNDING))) * step) if step else bound


def threshold_bound(problem: Problem) -> float:
    """Bound by the items that fast bins must take because they are too long for slow ones.

    For a split of the bins at a speed, let t_i be the time that item i needs on the best slow bin
    (infinite where its size fits none), in descending order. At a makespan T < t_j the first j + 1
    items run on the fast bins, which pool. So T is at least the smallest `max(t_j, time of the fast
    bins for the first j items)`, over j. O(n log n) per speed.
    """
    best = 0.0
    for speed in np.unique(problem.speeds)[1:]:
        fast = problem.speeds >= speed
        times = _best_times(problem, ~fast)
        order = np.argsort(-times, kind="stable")
        forced = np.concatenate(([0.0], np.cumsum(problem.costs[order])))
        speeds, carried = problem.speeds[fast], problem.carried[fast]
        fast_times = (forced + (speeds * carried).sum()) / speeds.sum()
        slow_times = np.append(times[order], 0.0)
        best = max(best, float(np.maximum(fast_times, slow_times).min()))
    return best


def spill_bound(problem: Problem) -> float:
    """Bound by the least work that limits keep off the fast bins. O(n log n) per speed.

    Source: the fractional knapsack (Dantzig 1957), cheapest cost per size first.
    """
    best = 0.0
    for speed in np.unique(problem.speeds)[1:]:
        fast = problem.speeds >= speed
        work = 0.0
        for use, room in zip(problem.use, problem.room, strict=True):
            spilled = float(use.sum() - room[fast].sum())
            work = max(work, _cheapest(problem.costs, use, spilled))
        best = max(best, _pooled(work, problem.speeds[~fast], problem.carried[~fast]))
    return best


def company_bound(problem: Problem) -> float:
    """Bound by the company of the longest item where items are limited, for any bins. O(n).

    With at most k items in each of m bins, the bin of the longest item holds n - k (m - 1) or more
    (what all hold but the smallest): the shortest ones at least. Tight where a giant meets full
    bins.
    """
    if "items" not in problem.resources:
        return 0.0
    most = problem.room[problem.resources.index("items")]
    least = problem.num_items - int(most.sum() - most.min())
    if least < 2:
        return 0.0
    company = float(problem.ranked[1 - least :].sum()) * (1.0 - _ROUNDING)
    work = float(problem.ranked[0]) + company
    return float(problem.carried.min()) + work * (1.0 - _ROUNDING) / float(problem.speeds.max())


def _pooled(work: float, speeds: Floats, carried: Floats) -> float:
    """Time at which bins that share their work perfectly finish it."""
    return float((work + (speeds * carried).sum()) / speeds.sum())


def _slot_times(speeds: Floats, num_slots: int) -> Floats:
    """Return the `num_slots` smallest of all numbers j / s_b, j = 1, 2, .., in ascending order."""
    # In time t the bins hold between t sum(s) - m and t sum(s) slots: enough at (n + m) / sum(s).
    horizon = (num_slots + speeds.size) / float(speeds.sum())
    counts = np.minimum(np.ceil(speeds * horizon), num_slots).astype(np.int64)
    bins = np.repeat(np.arange(speeds.size), counts)
    within = np.arange(bins.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.sort((within + 1) / speeds[bins])[:num_slots]


def _best_times(problem: Problem, among: np.ndarray) -> Floats:
    """Return the earliest completion of each item, alone, on the bins `among` that can hold it."""
    best = np.full(problem.num_items, np.inf)
    alike = np.stack([problem.speeds, *problem.room])
    kinds = np.unique(alike[:, among], axis=1) if problem.limited else np.unique(alike[:, among])
    for kind in kinds.T.reshape(-1, alike.shape[0]):
        bins = among & (alike == kind[:, None]).all(axis=0)
        times = problem.carried[bins].min() + problem.costs / kind[0]
        fits = (problem.use <= kind[1:, None]).all(axis=0)
        np.minimum(best, np.where(fits, times, np.inf), out=best)
    return best


def _cheapest(costs: Floats, sizes: Floats, size: float) -> float:
    """Return the least cost of fractions of items whose sizes add up to `size`."""
    if size <= 0.0:
        return 0.0
    used = np.flatnonzero(sizes > 0.0)
    order = used[np.argsort(costs[used] / sizes[used], kind="stable")]
    filled = np.cumsum(sizes[order])
    whole = int(np.searchsorted(filled, size))
    cost = float(costs[order[:whole]].sum())
    if whole < order.size:
        before = filled[whole - 1] if whole else 0.0
        cost += float(costs[order[whole]] * (size - before) / sizes[order[whole]])
    return cost


def price_bound(problem: Problem, weights: Floats, makespan: float) -> float:
    """Bound by duality: any weights of the kinds' time give a bound. O(kinds n).

    With the work of kind k at most S_k T - R_k (speeds S, carried work R), and weights w with
    sum w S = 1: T >= sum_k w_k R_k + sum_i min_k w_k cost_ki, the minimum over the kinds on which
    item i alone ends by `makespan`, an answer's at hand, in the caller's units.
    """
    earliest = np.full(problem.kind_costs.shape, np.inf)
    first = np.zeros(problem.num_kinds)
    for kind in range(problem.num_kinds):
        bins = problem.kind_of == kind
        speeds, carried = problem.speeds[bins], problem.carried[bins]
        first[kind] = (speeds * carried).sum()
        earliest[kind] = carried.min() + problem.kind_costs[kind] / speeds.max()
    priced = np.where(
        earliest <= makespan * (1 + 1e-12), weights[:, None] * problem.kind_costs, np.inf
    )
    alone = float(earliest.min(axis=0).max(initial=0.0))
    slack = 1.0 - 1e-12  # sums are rounded
    return max(alone, float(((weights * first).sum() + priced.min(axis=0).sum()) * slack))
