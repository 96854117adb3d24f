"""The one solver of bascule: items with costs into bins with speeds and limits.

It serves sequences in bags, samples in ranks, attention heads, sparse blocks, images, strings and
tiles alike. It starts with the longest item first, improves with moves and swaps until the gap to
a lower bound is certified to be small, and says how large the gap is.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bascule.errors import ConfigError, PlanError
from bascule.plan.checks import array, number
from bascule.plan.limits import Limits
from bascule.plan.solver.bounds import lower_bound
from bascule.plan.solver.constrain import Homes, constrain, total_excess
from bascule.plan.solver.exact import place_exactly, place_longest, place_relaxed
from bascule.plan.solver.homes import bring_home
from bascule.plan.solver.problem import Ints, Problem, build_problem
from bascule.plan.solver.refine import refine
from bascule.plan.solver.starts import by_speed, longest_first, topped_up

_TOLERANCE = 1e-4
_MIXED_TOLERANCE = 5e-4
"""Gaps at which the search stops, for bins of equal and of different speeds: the last steps to 1e-4
take most of the time where a few short bins must be filled exactly."""

_LONG_SHARES = (0.5, 0.4, 0.3)
"""Items above this share of the fastest bin's time stay whole in a relaxation; all are tried."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Items in bins, with a certificate. Arrays are read-only.

    Attributes:
        bin_of: Bin per item.
        loads: Completion time per bin: carried load + sum of costs / speed.
        makespan: Latest completion time.
        lower_bound: No assignment completes earlier.
    """

    bin_of: NDArray[np.int64]
    loads: NDArray[np.float64]
    makespan: float
    lower_bound: float

    @property
    def gap(self) -> float:
        """Certified distance to the best: makespan / lower_bound - 1; 0 where nothing is to do."""
        return self.makespan / self.lower_bound - 1.0 if self.lower_bound > 0.0 else 0.0


def assign(  # noqa: PLR0913  (public)
    costs: ArrayLike,
    num_bins: int | None = None,
    *,
    speeds: ArrayLike | None = None,
    limits: Limits | None = None,
    sizes: ArrayLike | None = None,
    ranks_per_bin: ArrayLike | None = None,
    home: ArrayLike | None = None,
    home_tolerance: float = 0.0,
    carried_loads: ArrayLike | None = None,
    tolerance: float | None = None,
) -> Assignment:
    """Assign items to bins so that the last bin completes as early as possible.

    Deterministic on every machine: ties go to the lowest index, there is no clock, and work is
    compared as integers (see ``_problem``). O((n + m) log n) a round, a bounded number of rounds.

    Args:
        costs: Cost per item, in time on a bin of speed 1; finite and >= 0.
        num_bins: Number of bins; may be left out if ``speeds`` is given.
        speeds: Speed per bin, > 0; a bag of G ranks has speed G. Default: 1.
        limits: What a rank can hold. Tokens or bytes of a bin are limited to the limit times the
            bin's ranks; items of a bin to ``limits.items``, as all ranks of a bag share each item.
        sizes: Tokens or bytes per item, whichever ``limits`` restricts.
        ranks_per_bin: Ranks per bin, for limits. Default: the speeds.
        home: Preferred bin per item; -1 for none.
        home_tolerance: By how much the makespan may pass the best one found so that fewer sizes
            (without ``sizes``: items) are away from home; 0.01 is 1 %.
        carried_loads: Completion time per bin before any item. Default: 0.
        tolerance: Gap at which the search stops. Default: 1e-4; 5e-4 where speeds differ.

    Returns:
        The assignment and its certificate.

    Raises:
        ConfigError: An argument is wrong.
        PlanError: The limits cannot be kept; says what misses by how much.

    Example:
        >>> plan = assign([7, 5, 4, 3, 1], 2)
        >>> plan.bin_of.tolist(), plan.makespan, plan.gap
        ([0, 1, 1, 0, 1], 10.0, 0.0)
    """
    home_tolerance = number("home_tolerance", home_tolerance)
    problem = build_problem(
        costs,
        num_bins,
        speeds=speeds,
        limits=limits,
        sizes=sizes,
        ranks_per_bin=ranks_per_bin,
        carried_loads=carried_loads,
    )
    if tolerance is None:
        tolerance = _TOLERANCE if problem.identical else _MIXED_TOLERANCE
    tolerance = number("tolerance", tolerance)
    bins = None if home is None else _home_bins(home, problem)
    bound = lower_bound(problem)
    bin_of = _solve(problem, bound / problem.unit * (1.0 + tolerance) if bound else np.inf)
    if bins is not None and problem.num_items:
        weights = np.ones(problem.num_items) if problem.sizes is None else problem.sizes
        ceiling = (problem.makespan(bin_of) or np.inf) * (1.0 + home_tolerance)
        bin_of = bring_home(problem, bin_of, Homes(bins, weights, ceiling))
    return _certified(problem, bin_of, bound)


def knapsack(
    costs: ArrayLike, *, speeds: ArrayLike, carried_loads: ArrayLike | None = None
) -> Assignment:
    """The greedy of KnapFormer (section 3.3), a baseline for `assign`: no search, no limits.

    Longest first, each item to the least occupied bin whose remaining capacity suffices; where none
    does (the paper has no rule), to the bin that completes it first.

    Args:
        costs: As for `assign`.
        speeds: As for `assign`.
        carried_loads: As for `assign`.

    Raises:
        ConfigError: An argument is wrong.
    """
    problem = build_problem(
        costs,
        None,
        speeds=speeds,
        limits=None,
        sizes=None,
        ranks_per_bin=None,
        carried_loads=carried_loads,
    )
    return _certified(problem, by_speed(problem, fill_first=True), lower_bound(problem))


def _home_bins(home: ArrayLike, problem: Problem) -> Ints:
    bins = array("home", home)
    if bins.size == 0:
        bins = bins.astype(np.int64)
    if bins.shape != (problem.num_items,) or bins.dtype.kind not in "iu":
        raise ConfigError(
            f"home must be {problem.num_items} integers, one per item; got shape {bins.shape} of "
            f"{bins.dtype}"
        )
    wrong = np.flatnonzero((bins < -1) | (bins >= problem.num_bins))
    if wrong.size:
        raise ConfigError(
            f"home[{wrong[0]}] is {bins[wrong[0]]}; it must be a bin, 0 to "
            f"{problem.num_bins - 1}, or -1 for none"
        )
    return bins.astype(np.int64)


def _solve(problem: Problem, target: float) -> Ints:
    """The best assignment that the search finds, within the limits; stops at ``target``."""
    best = _best(problem, target, _unlimited(problem, target))
    if best is None:
        return np.empty(0, dtype=np.int64)
    if not problem.limited or not total_excess(problem, best):
        return best
    return _within_limits(problem, target, best)


def _within_limits(problem: Problem, target: float, ideal: Ints) -> Ints:
    """The same within the limits; ``ideal`` is the answer without them."""
    closest, least = ideal, total_excess(problem, ideal)
    legal: list[Ints] = []
    for candidate in _repaired(problem, target, ideal):
        excess = total_excess(problem, candidate)
        if not excess:
            legal.append(candidate)
            if problem.makespan(candidate) <= target:
                break
        elif excess < least:
            closest, least = candidate, excess
    if not legal:
        exact = place_exactly(problem)
        if exact is None or total_excess(problem, exact):
            raise PlanError(_missed(problem, closest))
        legal.append(constrain(problem, exact, target))
    return min(legal, key=problem.makespan)


def _repaired(problem: Problem, target: float, ideal: Ints) -> Iterator[Ints]:
    """Assignments that keep the limits or nearly so, cheapest to find first."""
    yield constrain(problem, ideal, target)
    start = place_longest(problem)
    yield constrain(problem, start, target)
    for longest in _LONG_SHARES:
        relaxed = place_relaxed(problem, start, target, longest)
        if relaxed is not None:
            yield constrain(problem, relaxed, target)


def _best(problem: Problem, target: float, candidates: Iterable[Ints]) -> Ints | None:
    """The candidate with the earliest makespan; looks at none after one that meets ``target``."""
    best, best_makespan = None, np.inf
    for candidate in candidates:
        makespan = problem.makespan(candidate)
        if makespan < best_makespan:
            best, best_makespan = candidate, makespan
        if best_makespan <= target:
            break
    return best


def _unlimited(problem: Problem, target: float) -> Iterator[Ints]:
    """Assignments that ignore the limits: the starts, then the best one refined."""
    starts = [longest_first(problem)]
    if not problem.identical:  # also the greedy's, so that no answer is worse than it
        starts.append(by_speed(problem, fill_first=True))
    yield min(starts, key=problem.makespan)
    if not problem.identical:
        starts += topped_up(problem, starts[0], target)
        yield from starts[2:]
    yield refine(problem, min(starts, key=problem.makespan), target)


def _missed(problem: Problem, closest: Ints) -> str:
    """What the assignment closest to the limits still passes, and by how much."""
    counts = np.bincount(closest, minlength=problem.num_bins)
    if problem.sizes is not None and problem.capacity is not None:
        held = np.bincount(closest, weights=problem.sizes, minlength=problem.num_bins)
        over = held - problem.capacity
        full = int(over.argmax())
        if over[full] > 0.0:
            members = np.flatnonzero(closest == full)
            item = int(members[problem.sizes[members].argmin()])
            return (
                f"no assignment keeps every bin within its limit of {problem.resource}: the "
                f"closest one found puts {held[full]:.15g} {problem.resource} on bin {full}, above "
                f"its limit of {problem.capacity[full]:.15g} by {over[full]:.15g} (the smallest of "
                f"its {members.size} items is item {item} with {problem.sizes[item]:.15g}); raise "
                "the limit or send fewer items"
            )
    full = int(counts.argmax())
    return (
        f"no assignment keeps every bin within its limits: the closest one found puts "
        f"{counts[full]} items on bin {full}, and limits.items is {problem.max_items}; raise it or "
        "send fewer items"
    )


def _certified(problem: Problem, bin_of: Ints, bound: float) -> Assignment:
    """Completion times in the caller's units, and the certificate."""
    items = np.bincount(bin_of, weights=problem.costs, minlength=problem.num_bins)
    loads = problem.carried + items / problem.speeds
    makespan = float(loads.max())
    bin_of.flags.writeable = loads.flags.writeable = False
    # Both are sums of rounded numbers: where they meet, the bound may be an ulp above.
    return Assignment(bin_of, loads, makespan, min(bound, makespan))
