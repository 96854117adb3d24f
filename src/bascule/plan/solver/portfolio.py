"""The portfolio: named starts, the search that improves them, and the choice of the answer.

Longest first (LPT) gives each item, longest first, to the bin that completes it first, ties to the
lowest index: at most 4/3 - 1/(3m) above the best on m identical bins (Graham 1969, Bounds on
multiprocessing timing anomalies). On unrelated machines an item's kind is guessed, the problem is
solved at the costs of the guess, and the guess is corrected. Kinds ascend: long items lose least on
the last one (the largest bags). Where limits are tight, linear and integer programs (HiGHS) place.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.errors import PlanError
from bascule.plan.solver.bounds import lower_bound, mean_bound, price_bound
from bascule.plan.solver.homes import Homes, relabel
from bascule.plan.solver.problem import Assignment, Problem
from bascule.plan.solver.search import improve

if TYPE_CHECKING:
    from scipy.optimize import LinearConstraint

_ROUNDING = 1e-9  # relative difference of sums of the same costs in another order, at most
_TOLERANCE = 1e-4  # gap at which the search stops
_MIXED_TOLERANCE = 5e-4  # gap at which it stops for bins of different speeds: the rest is slow
_GUESS_TOLERANCE = 1e-3  # gap at which it stops at the costs of guessed kinds, not the last word
_LONG_SHARES = (0.5, 0.4, 0.3)  # of the fastest bin's time: longer items stay whole when relaxed
_MAX_LATE = 0.3  # share of all work above the ceiling, from which on all at home is not repaired
_MANY_BINS = 48  # from here on, rounds of numpy beat a heap
_HALVINGS = 40
_MAX_EXACT_CELLS = 512  # most items times bins that are placed exactly: larger ones hardly ever end
_MAX_CLOSED_CELLS = 32  # most such cells where the best so far ends after `_LATE` times the target
_LATE = 1.05
_MAX_RELAXED_CELLS = 8192  # largest number of items times bins whose relaxation is solved
_MAX_EXACT_STEPS = 1 << 17  # step budget of the exact solver, in nodes times cells

_makespan = attrgetter("makespan")


@dataclass(frozen=True, slots=True)
class Candidate:
    """An assignment, and the start and search that found it."""

    bin_of: Ints
    method: str
    makespan: float  # in units of work per unit of speed
    is_improved: bool = False

    @staticmethod
    def of(problem: Problem, method: str, bin_of: Ints) -> "Candidate":
        """Return an assignment with its makespan."""
        return Candidate(bin_of, method, problem.makespan(bin_of))

    def improved(self, problem: Problem, target: float) -> "Candidate":
        """Improve the assignment by the local search."""
        bin_of = improve(problem, self.bin_of, target)
        name = self.method if self.is_improved else f"{self.method}, improved"
        return Candidate(bin_of, name, problem.makespan(bin_of), is_improved=True)


def solve(
    problem: Problem, tolerance: float | None = None, *, enough: float = 0.0, quick: bool = False
) -> Assignment:
    """Return the best assignment that the portfolio finds within the limits.

    The search stops at a gap of `tolerance`, or at the completion time `enough`, in units of work
    per unit of speed. With `quick`, it improves only one start if several are good, and solves no
    integer program if no start keeps the limits.
    """
    if problem.num_items == 0:
        nothing = np.empty(0, np.int64)
        return Assignment.of(problem, nothing, mean_bound(problem), "nothing to do")
    if tolerance is None:
        is_plain = problem.identical or problem.num_kinds > 1
        tolerance = _TOLERANCE if is_plain else _MIXED_TOLERANCE
    if problem.num_kinds == 1 and not problem.limited:
        best, bound = _unlimited(problem, tolerance, enough)
        return Assignment.of(problem, best.bin_of, bound, best.method)
    bound = lower_bound(problem)
    if problem.num_kinds == 1:
        target = max(_target(problem, bound, tolerance), enough)

        def free() -> Iterator[Candidate]:  # where it is asked for
            yield _unlimited(problem.unlimited(), tolerance, enough, bound)[0]

        best = _best(problem, target, _starts(problem, target, free(), quick), quick)
        return Assignment.of(problem, best.bin_of, bound, best.method)
    guess, weights = fluid(problem)
    at_guess = sorted(_of_kinds(problem, guess), key=_makespan)
    least = at_guess[0].makespan * problem.unit
    early_bound = max(bound, min(price_bound(problem, weights, least), least))
    target = max(_target(problem, early_bound, tolerance), enough)
    at_guess = at_guess[:1] if quick else at_guess
    best = _best(problem, target, _starts(problem, target, at_guess, quick), quick)
    makespan = float(problem.loads(best.bin_of).max())
    bound = max(bound, price_bound(problem, weights, makespan))
    return Assignment.of(problem, best.bin_of, bound, best.method)


def may_end_by(problem: Problem, makespan: float) -> bool:
    """Return False if a bound shows that some bin must complete later. O(n log n)."""
    time = makespan * problem.unit * (1.0 + _ROUNDING)
    if lower_bound(problem) > time:
        return False
    return not problem.num_items or price_bound(problem, fluid(problem)[1], time) <= time


def _target(problem: Problem, bound: float, tolerance: float) -> float:
    """Return the completion time at which a search may stop, in units of work per unit of speed."""
    return bound / problem.unit * (1.0 + tolerance) if bound else np.inf


def _starts(
    problem: Problem, target: float, free: Iterable[Candidate], quick: bool
) -> Iterator[Candidate]:
    """Yield all starts: those that know no limits, then those that put the limits first.

    Where items alone are limited, in equal bins, the order is the other one.
    """
    is_counted = problem.resources == ("items",) and problem.identical
    if is_counted:
        yield Candidate.of(problem, "longest first, counted", place_longest(problem))
        if quick:
            return
    yield from free
    if problem.limited:
        by_room = place_longest(problem)
        if not is_counted:
            yield Candidate.of(problem, "room first", by_room)
        for share in _LONG_SHARES:
            relaxed = place_relaxed(problem, by_room, target, share)
            if relaxed is not None:
                yield Candidate.of(problem, f"relaxation of items below {share:g}", relaxed)


def _unlimited(
    problem: Problem, tolerance: float, enough: float = 0.0, bound: float | None = None
) -> tuple[Candidate, float]:
    """Return the best of the starts that know no limits, improved, and its bound."""
    best = Candidate.of(problem, "longest first", longest_first(problem))
    if bound is None:
        bound = lower_bound(problem, best.makespan * problem.unit)
    target = max(_target(problem, bound, tolerance), enough)
    starts = [best]
    if not problem.identical:  # also the greedy's, so that no answer is worse than it
        starts.append(Candidate.of(problem, "knapsack", by_speed(problem, fill_first=True)))
        starts.sort(key=_makespan)
    best = starts[0]
    for start in starts:  # few items end far apart, by which start they came from
        if best.makespan > target:
            best = min(best, start.improved(problem, target), key=_makespan)
    return best, bound


def _of_kinds(problem: Problem, guess: Ints) -> Iterator[Candidate]:
    """Yield assignments without limits, made at the costs of guessed kinds, with true makespans.

    The guess is the fluid optimum: each kind keeps the items guessed for it, or all bins share all.
    """

    def at(costs: Floats, items: Ints, bins: Ints) -> Ints:
        return _unlimited(problem.at_costs(costs, items, bins), _GUESS_TOLERANCE)[0].bin_of

    items, bins = np.arange(problem.num_items), np.arange(problem.num_bins)
    apart = np.zeros_like(guess)
    for kind in np.unique(guess).tolist():
        chosen, among = np.flatnonzero(guess == kind), np.flatnonzero(problem.kind_of == kind)
        apart[chosen] = among[at(problem.kind_costs[kind], chosen, among)]
    yield Candidate.of(problem, "kinds apart", apart)
    together = at(problem.kind_costs[guess, items], items, bins)
    yield Candidate.of(problem, "kinds together", together)


def _best(problem: Problem, target: float, starts: Iterable[Candidate], quick: bool) -> Candidate:
    """Return the first assignment within the limits that ends by the target, or the earliest.

    Starts are repaired and improved; if none keeps the limits, an exact placement unless `quick`.
    """
    legal, illegal = list[Candidate](), list[Candidate]()
    for start in chain(starts, () if quick else _exactly(problem, legal, target)):
        is_done = start.makespan <= target or start.is_improved
        solution = start
        if not is_done or problem.excess(start.bin_of):
            solution = start.improved(problem, target)
            is_done = solution.makespan <= target
        if problem.excess(solution.bin_of):
            illegal.append(solution)
        else:
            legal.append(solution)
            if is_done:
                break
    if not legal:
        closest = min(illegal, key=lambda candidate: problem.excess(candidate.bin_of))
        raise PlanError(_missed(problem, closest.bin_of))
    return min(legal, key=_makespan)


def _exactly(problem: Problem, legal: Sequence[Candidate], target: float) -> Iterator[Candidate]:
    """Yield an exact placement of a small problem if none is legal so far, or all are late.

    The search compares late bins with early ones: where several kinds of bins are equally late, an
    exchange between two of them may be better for both.
    """
    items, bins = problem.num_items, problem.num_bins
    if items * bins > (_MAX_CLOSED_CELLS if legal else _MAX_EXACT_CELLS):
        return
    limits = [_within(use, room) for use, room in zip(problem.use, problem.room, strict=True)]
    if legal:
        if (
            problem.num_kinds == 1
            or min(candidate.makespan for candidate in legal) <= _LATE * target
        ):
            return
        work = problem.kind_work[problem.kind_of] / (problem.speeds * target)[:, None]
        before = problem.carried_work / (problem.speeds * target)
        limits.append(_within(work, -before, makespan=np.ones(bins)))
    if (exact := _place(items, bins, limits, whole=True)) is not None:
        yield Candidate.of(problem, "exact", exact)


def _missed(problem: Problem, closest: Ints) -> str:
    """Say what the assignment closest to the limits still passes, and by how much."""
    used = problem.used(closest)
    over = used - problem.room
    row, full = np.unravel_index(over.argmax(), over.shape)
    what = "no assignment keeps every bin within its limits: the closest one found puts"
    amount = f"{used[row, full]:.15g} {problem.resources[row]} on bin {full}"
    limit = f"above its limit of {problem.room[row, full]:.15g} by {over[row, full]:.15g}"
    return f"{what} {amount}, {limit}; raise the limit or send fewer items"


def near_home(problem: Problem, bin_of: Ints, homes: Homes) -> tuple[Ints, str]:
    """Bring items to their preferred bins, with no bin later than the ceiling; return how, or "".

    It puts all items at home, then repairs late bins; if that fails, it searches from `bin_of`.
    """
    relabelled = relabel(problem, bin_of, homes)
    home, name = np.where(homes.bins >= 0, homes.bins, bin_of), "everything at home, improved"
    late = np.maximum(problem.bin_work(home) - homes.ceiling * problem.speeds, 0.0).sum()
    total = homes.ceiling * problem.speeds.sum()
    is_far = problem.num_kinds > 1 or (not problem.identical and late > _MAX_LATE * total)
    if not is_far:
        home = improve(problem, home, homes.ceiling, homes)
    if is_far or problem.makespan(home) > homes.ceiling or problem.excess(home):
        home, name = improve(problem, relabelled, homes.ceiling, homes), "relabelled, improved"
    candidates = [(bin_of, ""), (relabelled, "relabelled"), (home, name)]
    return min(candidates, key=lambda candidate: homes.total_away(candidate[0]))


def longest_first(problem: Problem) -> Ints:
    """Assign by LPT, by completion time, without limits. O(n log m) for m identical bins."""
    if not problem.identical:
        return by_speed(problem, fill_first=False)
    # At least 1 unit an item, so that items without cost spread too.
    work = np.maximum(problem.work[problem.order], 1.0)
    bin_of = np.empty(problem.num_items, dtype=np.int64)
    bin_of[problem.order] = _identical_bins(work, problem.carried_work)
    return bin_of


def place_longest(problem: Problem) -> Ints:
    """Place by LPT among the bins that have room. O(n m); O(n log m) if only counts are limited."""
    bin_of = np.empty(problem.num_items, dtype=np.int64)
    alike = problem.identical and (problem.room == problem.room[:, :1]).all()
    if problem.resources == ("items",) and alike:
        work = np.maximum(problem.work[problem.order], 1.0)
        bin_of[problem.order] = _heap(work, problem.carried_work, int(problem.room[0, 0]))
        return bin_of
    loads, room = problem.carried_work.copy(), problem.room.copy()
    work = problem.kind_work[problem.kind_of] if problem.num_kinds > 1 else problem.kind_work
    for item in problem.order.tolist():
        left = room - problem.use[:, item, None]
        fits = (left >= 0.0).all(axis=0)
        ends = loads + work[:, item]
        if fits.any():
            chosen = int(np.where(fits, ends / problem.speeds, np.inf).argmin())
        else:
            chosen = int(left.min(axis=0).argmax())
        loads[chosen] = ends[chosen]
        room[:, chosen] = left[:, chosen]
        bin_of[item] = chosen
    return bin_of


def _identical_bins(work: Floats, loads: Floats) -> Ints:
    """Place descending work by LPT on identical bins, for the most part in vectorised rounds.

    With bins by ascending load a_1 <= a_2 .. and items w_1 >= w_2 .., LPT gives item k to bin k as
    long as no bin used before comes first again: a_k <= min over j < k of a_j + w_j. Such a run of
    items is one round; where rounds stay short, a heap finishes.
    """
    num_bins, num_items = loads.size, work.size
    if num_bins < _MANY_BINS:
        return _heap(work, loads, num_items)
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
    return np.concatenate([*parts, _heap(work[done:], loads, num_items)])


def _heap(work: Floats, loads: Floats, most: int) -> Ints:
    """Place by LPT with one heap of integers `load * 2**b + bin`, at most so many items a bin.

    Ties fall to the lowest bin. A load's integer may pass 2**63.
    """
    bits = (loads.size - 1).bit_length()
    heap = [(int(load) << bits) + index for index, load in enumerate(loads.tolist())]
    heapify(heap)
    mask, steps = (1 << bits) - 1, (work.astype(np.int64) << bits).tolist()
    if most >= work.size:
        taken = [heapreplace(heap, heap[0] + step) & mask for step in steps]
        return np.array(taken, dtype=np.int64)
    left, taken = [most] * loads.size, list[int]()
    for step in steps:
        index = heap[0] & mask
        taken.append(index)
        left[index] -= 1
        if left[index]:
            heapreplace(heap, heap[0] + step)
        else:
            heappop(heap)
    return np.array(taken, dtype=np.int64)


def by_speed(problem: Problem, *, fill_first: bool) -> Ints:
    """Place items, longest first, on bins of different speeds, with a heap per speed.

    Uses LPT by completion time. `fill_first` uses KnapFormer's greedy instead: the least filled bin
    whose remaining share of the total work holds the item; else LPT, as the paper has no rule.
    """
    total = problem.work.sum() + problem.carried_work.sum()
    ceiling = float(total / problem.speeds.sum())
    heaps: dict[float, list[tuple[float, int]]] = {}
    bins = zip(problem.speeds.tolist(), problem.carried_work.tolist(), strict=True)
    for index, (speed, load) in enumerate(bins):
        heaps.setdefault(speed, []).append((load, index))
    for heap in heaps.values():
        heapify(heap)
    lanes, taken = sorted(heaps.items()), list[int]()
    for work in problem.work[problem.order].tolist():
        chosen, least, first = lanes[0][1], np.inf, -1
        if fill_first:
            for speed, heap in lanes:
                load, index = heap[0]
                fill = load / speed if (load + work) / speed <= ceiling else np.inf
                if fill < least or (fill == least and index < first):
                    chosen, least, first = heap, fill, index
        if first < 0:
            for speed, heap in lanes:
                load, index = heap[0]
                end = (load + work) / speed
                if end < least or (end == least and index < first):
                    chosen, least, first = heap, end, index
        heapreplace(chosen, (chosen[0][0] + work, first))
        taken.append(first)
    bin_of = np.empty(problem.num_items, dtype=np.int64)
    bin_of[problem.order] = taken
    return bin_of


def fluid(problem: Problem) -> tuple[Ints, Floats]:
    """Return each item's kind in a fluid relaxation, and the value of a second of each kind.

    Each kind in turn, the last first, takes the longest items left, up to a bisected makespan.
    """
    num_kinds = problem.num_kinds
    costs = problem.kind_costs[:, problem.order]
    sums = np.cumsum(costs, axis=1)
    speeds = np.bincount(problem.kind_of, problem.speeds, num_kinds).astype(np.float64)
    before = np.bincount(problem.kind_of, problem.speeds * problem.carried, num_kinds)
    low, high = 0.0, float((before.sum() + sums[:, -1:].max(initial=0.0)) / speeds.min())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = _fill(sums, middle * speeds - before)[1]
        low, high = (low, middle) if fits else (middle, high)
    ends, _ = _fill(sums, high * speeds - before)
    guess = np.empty(problem.num_items, dtype=np.int64)
    for turn, kind in enumerate(reversed(range(num_kinds))):
        guess[problem.order[ends[turn] : ends[turn + 1]]] = kind
    return guess, _weights(costs, ends, speeds)


def _fill(sums: Floats, room: Floats) -> tuple[Ints, bool]:
    """Return where the items of each kind end, last kind first, and True if all of them fit."""
    num_kinds, num_items = sums.shape
    ends = np.zeros(num_kinds + 1, dtype=np.int64)
    for turn, kind in enumerate(reversed(range(num_kinds))):
        done = float(sums[kind, ends[turn] - 1]) if ends[turn] else 0.0
        end = int(np.searchsorted(sums[kind], done + max(float(room[kind]), 0.0), side="right"))
        ends[turn + 1] = max(end, ends[turn])
    fits = bool(ends[-1] == num_items)
    ends[-1] = num_items
    return ends, fits


def _weights(costs: Floats, ends: Ints, speeds: Floats) -> Floats:
    """Return prices at which the item between two kinds costs both alike; last kind first."""
    num_kinds, num_items = costs.shape
    weights = np.ones(num_kinds)
    for turn, kind in enumerate(reversed(range(num_kinds - 1))):
        last = min(int(ends[turn + 1]), num_items - 1)
        here, above = (float(costs[k, last]) for k in (kind, kind + 1))
        weights[kind] = weights[kind + 1] * (above / here if here > 0 else 1.0)
    return weights / (weights * speeds).sum()


def place_relaxed(problem: Problem, start: Ints, target: float, longest: float) -> Ints | None:
    """Round a linear relaxation, with the long items where `start` has them; None if too large.

    A vertex of the relaxation splits few items over bins; each goes to the bin with most of it.
    Items longer than a share `longest` of the fastest bin's time until `target` stay whole. The
    result may exceed limits a little. Source: Lenstra, Shmoys and Tardos 1990, Approximation
    algorithms for scheduling unrelated parallel machines.
    """
    bins, fastest = problem.num_bins, target * float(problem.speeds.max())
    is_long = problem.work > longest * fastest
    split, fixed = np.flatnonzero(~is_long), np.flatnonzero(is_long)
    if split.size == 0 or problem.num_items * bins > _MAX_RELAXED_CELLS:
        return None
    at = start[fixed]
    constraints = [
        _within(use[split], room - np.bincount(at, use[fixed], bins))
        for use, room in zip(problem.use, problem.room, strict=True)
    ]
    share = problem.kind_work[problem.kind_of] / fastest
    before = problem.carried_work / fastest + np.bincount(at, share[at, fixed], bins)
    relative = problem.speeds / problem.speeds.max()
    constraints.append(_within(share[:, split], -before, makespan=relative))
    placed = _place(split.size, bins, constraints, whole=False)
    if placed is None:
        return None
    rounded = start.copy()
    rounded[split] = placed
    return rounded


def _within(use: Floats, limit: Floats, makespan: Floats | None = None) -> "LinearConstraint":
    """Limit the (items,) or (bins, items) use of each bin to `limit + makespan * variable`.

    Variables are the share of item i in bin b, at i * bins + b, and the makespan.
    """
    from scipy.optimize import LinearConstraint
    from scipy.sparse import csc_array

    bins, cells = limit.size, limit.size * int(use.shape[-1])
    rows = np.arange(cells + bins) % bins
    columns = np.concatenate((np.arange(cells), np.full(bins, cells)))
    shares = np.broadcast_to(use, (bins, use.shape[-1])).T.ravel()
    slope = np.zeros(bins) if makespan is None else makespan
    matrix = csc_array((np.append(shares, -slope), (rows, columns)), shape=(bins, cells + 1))
    return LinearConstraint(matrix, -np.inf, limit)


def _place(
    items: int, bins: int, constraints: "list[LinearConstraint]", *, whole: bool
) -> Ints | None:
    """Solve a placement program for the least makespan variable; None if there is no answer."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csc_array

    cells = items * bins
    place = (np.repeat(np.arange(items), bins), np.arange(cells))
    once = csc_array((np.ones(cells), place), shape=(items, cells + 1))
    result = milp(
        np.append(np.zeros(cells), 1.0),
        integrality=np.append(np.full(cells, int(whole)), 0),
        bounds=Bounds(0.0, np.append(np.ones(cells), np.inf)),
        constraints=[LinearConstraint(once, 1.0, 1.0), *constraints],
        options={"node_limit": _MAX_EXACT_STEPS // cells},
    )
    if result.x is None:
        return None
    shares = np.asarray(result.x, dtype=np.float64)[:-1].reshape(items, bins)
    return shares.argmax(axis=1).astype(np.int64)
