"""The one solver of bascule: items with costs into bins with speeds and limits.

It serves sequences in bags, samples in ranks, attention heads, sparse blocks, images, strings and
tiles alike. It starts with the longest item first, improves with moves and swaps until the gap to
a lower bound is certified to be small, and says how large the gap is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bascule.errors import ConfigError, PlanError
from bascule.plan._constrained import Homes, constrain, total_excess
from bascule.plan._homes import bring_home
from bascule.plan._placement import place_by_size, place_exactly
from bascule.plan._problem import Floats, Ints, Problem, build_problem
from bascule.plan._refine import refine
from bascule.plan._starts import by_speed, longest_first
from bascule.plan.bounds import lower_bound
from bascule.plan.limits import Limits


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


def assign(
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
    tolerance: float = 1e-4,
) -> Assignment:
    """Assign items to bins so that the last bin completes as early as possible.

    Deterministic on every machine: ties go to the lowest index, there is no clock, and work is
    compared as integers (see ``_problem``). O((n + m) log n) a round, in a bounded number of rounds.

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
        tolerance: Gap at which the search stops.

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
    tolerance = _fraction("tolerance", tolerance)
    home_tolerance = _fraction("home_tolerance", home_tolerance)
    problem = build_problem(
        costs,
        num_bins,
        speeds=speeds,
        limits=limits,
        sizes=sizes,
        ranks_per_bin=ranks_per_bin,
        carried_loads=carried_loads,
    )
    bins = None if home is None else _home_bins(home, problem)
    bound = lower_bound(problem)
    bin_of = _solve(problem, bound / problem.unit * (1.0 + tolerance))
    if bins is not None and problem.num_items:
        weights = np.ones(problem.num_items) if problem.sizes is None else problem.sizes
        ceiling = problem.makespan(bin_of) * (1.0 + home_tolerance)
        bin_of = bring_home(problem, bin_of, Homes(bins, weights, ceiling))
    return _certified(problem, bin_of, bound)


def _fraction(name: str, value: float) -> float:
    if not 0.0 <= value < np.inf:
        raise ConfigError(f"{name} is {value}; it must be finite and >= 0, for example 0.01")
    return float(value)


def _home_bins(home: ArrayLike, problem: Problem) -> Ints:
    bins = np.asarray(home)
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
    """The best of the starts, each improved until ``target``; within the limits."""
    best = _best(problem, target, _unlimited(problem, target))
    if not problem.limited or not total_excess(problem, best):
        return best
    legal = _legal(problem, target, best)
    if legal is None:
        raise PlanError(_missed(problem, best))
    return legal


def _best(problem: Problem, target: float, candidates: Iterator[Ints]) -> Ints:
    """The candidate with the earliest makespan; stops at the first that meets ``target``."""
    best, best_makespan = next(candidates), np.inf
    candidate: Ints | None = best
    while candidate is not None:
        makespan = problem.makespan(candidate)
        if makespan < best_makespan:
            best, best_makespan = candidate, makespan
        candidate = None if best_makespan <= target else next(candidates, None)
    return best


def _unlimited(problem: Problem, target: float) -> Iterator[Ints]:
    """Assignments that ignore the limits, cheapest to find first."""
    start = longest_first(problem)
    yield start
    yield refine(problem, start, target)
    if not problem.identical:
        start = by_speed(problem, fill_first=True)
        yield start
        yield refine(problem, start, target)
