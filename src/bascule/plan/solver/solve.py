"""`assign` items with costs to bins with speeds and limits, with a certified gap."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from bascule.arrays import Floats, Ints
from bascule.checks import MAX_NUMBER, amounts, array, number, of_type, whole
from bascule.errors import ConfigError
from bascule.plan.limits import Limits
from bascule.plan.solver.homes import Homes
from bascule.plan.solver.portfolio import near_home, solve
from bascule.plan.solver.problem import Assignment, build_problem
from bascule.quantities import number as written

_MAX_BINS = 2**20  # most bins of a problem: their tables and heaps stay small


def assign(
    costs: ArrayLike,
    num_bins: int | None = None,
    *,
    speeds: ArrayLike | None = None,
    limits: Limits | None = None,
    sizes: ArrayLike | Mapping[str, ArrayLike] | None = None,
    ranks_per_bin: ArrayLike | None = None,
    location: ArrayLike | None = None,
    locality_tolerance: float = 0.0,
    initial_loads: ArrayLike | None = None,
    tolerance: float | None = None,
) -> Assignment:
    """Assign items to bins so that the last bin completes as early as possible.

    Deterministic on every machine: ties go to the lowest index, work is compared as integers.
    O((n + m) log n) a round, a bounded number of rounds.

    Args:
        costs: Cost per item, in time on a bin of speed 1; finite and >= 0.
        num_bins: Number of bins; may be left out if `speeds` is given.
        speeds: Speed per bin, > 0; a bag of G ranks has speed G. Default: 1.
        limits: Limits of a rank. A bin holds at most the limit of tokens or bytes times its ranks,
            but at most `limits.items` items, because all ranks of a bag share each item.
        sizes: Tokens or bytes per item, whichever `limits` restricts; for both, a mapping with the
            keys "tokens" and "bytes".
        ranks_per_bin: Ranks per bin, for limits. Default: the speeds.
        location: Preferred bin per item; -1 for none.
        locality_tolerance: Share by which the makespan may exceed the lower bound (0.01 is 1 %), so
            that less of `sizes` (the first of a mapping; else items) is away from its location.
        initial_loads: Completion time per bin before any item. Default: 0.
        tolerance: Gap at which the search stops. Default: 1e-4; 5e-4 where speeds differ.

    Raises:
        PlanError: The limits cannot be kept; it says which limit, and by how much.

    Example:
        >>> plan = assign([7, 5, 4, 3, 1], 2)
        >>> plan.bin_of.tolist(), plan.makespan, plan.gap
        ([0, 1, 1, 0, 1], 10.0, 0.0)
    """
    speed, cost = _speeds(num_bins, speeds), amounts("costs", costs)
    carried = None if initial_loads is None else _vector("initial_loads", initial_loads, speed.size)
    ranks = None if ranks_per_bin is None else _vector("ranks_per_bin", ranks_per_bin, speed.size)
    if ranks is not None and ranks.min() == 0.0:
        raise ConfigError(f"ranks_per_bin[{int(ranks.argmin())}] is 0; a bin has at least 1 rank")
    size = _sizes(sizes, cost.size, limits)
    locality_tolerance = number("locality_tolerance", locality_tolerance)
    tolerance = None if tolerance is None else number("tolerance", tolerance)
    bins = None if location is None else _home_bins(location, cost.size, speed.size)
    problem = build_problem(cost, speed, carried=carried, limits=limits, sizes=size, ranks=ranks)
    solution = solve(problem, tolerance)
    if bins is not None and problem.num_items:
        weights = next(iter(size.values()), np.ones(problem.num_items))
        allowed = solution.lower_bound / problem.unit * (1.0 + locality_tolerance)
        ceiling = max(problem.makespan(solution.bin_of), allowed) or np.inf
        homes = Homes(bins, np.where(bins >= 0, weights, 0.0), ceiling)
        bin_of, name = near_home(problem, solution.bin_of, homes)
        solution = Assignment.of(problem, bin_of, solution.lower_bound, name or solution.method)
    return solution


def _vector(name: str, values: ArrayLike, size: int) -> Floats:
    vector = amounts(name, values)
    if vector.size != size:
        raise ConfigError(f"{name} has {vector.size} entries; give {size}")
    return vector


def _speeds(num_bins: int | None, speeds: ArrayLike | None) -> Floats:
    if speeds is None:
        if num_bins is None:
            raise ConfigError("num_bins and speeds are both missing; give one of them")
        return np.ones(whole("num_bins", num_bins, 1, _MAX_BINS))
    speed = amounts("speeds", speeds)
    if num_bins is not None and whole("num_bins", num_bins, 1, _MAX_BINS) != speed.size:
        raise ConfigError(f"num_bins is {num_bins}, but speeds has {speed.size} entries; drop one")
    if speed.size == 0:
        raise ConfigError("speeds is empty; at least one bin is needed")
    if not 1.0 / MAX_NUMBER <= speed.min() <= speed.max() <= MAX_NUMBER:
        wrong = f"speeds from {written(speed.min())} to {written(speed.max())}: leave out bins"
        raise ConfigError(f"{wrong}, or give {written(1 / MAX_NUMBER)} to {written(MAX_NUMBER)}")
    return speed


def _sizes(
    sizes: ArrayLike | Mapping[str, ArrayLike] | None, num_items: int, limits: Limits | None
) -> dict[str, Floats]:
    """Return (items,) sizes by what they count; "" is one array for whatever is limited."""
    named = sizes if isinstance(sizes, Mapping) else {} if sizes is None else {"": sizes}
    checked = {
        name: _vector(f"sizes[{name!r}]" if name else "sizes", values, num_items)
        for name, values in named.items()
    }
    if limits is not None:
        of_type("limits", limits, Limits, "Limits(tokens=..), or None")
        limit_of = {"tokens": limits.tokens, "bytes": limits.num_bytes}
        limited = [name for name, most in limit_of.items() if most is not None]
        if len(limited) == 2 and "" in checked:
            wrong = f"{limits} restricts tokens and bytes, but sizes can count only one of them"
            fix = 'keep one limit, or give sizes as {"tokens": .., "bytes": ..}'
            raise ConfigError(f"{wrong}; {fix}")
        for name in limited:
            if name not in checked and "" not in checked:
                raise ConfigError(f"limits restricts {name}, but sizes is missing; pass {name}")
    return checked


def _home_bins(location: ArrayLike, num_items: int, num_bins: int) -> Ints:
    bins = array("location", location)
    if bins.size == 0:
        bins = bins.astype(np.int64)
    if bins.shape != (num_items,) or bins.dtype.kind not in "iu":
        what = f"location must be {num_items} integers, one per item"
        raise ConfigError(f"{what}; got shape {bins.shape} of {bins.dtype}")
    wrong = np.flatnonzero((bins < -1) | (bins >= num_bins))
    if wrong.size:
        what = f"location[{wrong[0]}] is {bins[wrong[0]]}"
        raise ConfigError(f"{what}; it must be a bin, 0 to {num_bins - 1}, or -1 for none")
    return bins.astype(np.int64)
