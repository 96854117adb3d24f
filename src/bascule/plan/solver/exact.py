"""Placements that put the limits first: greedily, by linear relaxation, and exactly."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csc_array

from bascule.arrays import Floats, Ints
from bascule.plan.solver.problem import Problem

_MAX_EXACT_CELLS = 4096
"""Largest number of items times bins that is given to the exact solver."""

_MAX_RELAXED_CELLS = 8192
"""Largest number of items times bins that is given to the linear solver."""

_MAX_NODES = 10_000
"""Step budget of the exact solver."""


def place_longest(problem: Problem) -> Ints:
    """LPT by completion time among the bins that have room. O(n m).

    An item for which there is no room goes to the bin with the most, and passes its limit.
    """
    bin_of = np.empty(problem.num_items, dtype=np.int64)
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


def place_exactly(problem: Problem) -> Ints | None:
    """Any assignment within the limits, by integer programming (HiGHS); None if none was found.

    Only for small problems; larger ones give None.
    """
    items, bins = problem.num_items, problem.num_bins
    if items * bins > _MAX_EXACT_CELLS:
        return None
    limits = [_within(use, room) for use, room in zip(problem.use, problem.room, strict=True)]
    return _place_program(items, bins, limits, whole=True)


def place_relaxed(problem: Problem, start: Ints, target: float, longest: float) -> Ints | None:
    """Round a linear relaxation, with the long items where ``start`` has them; None if too large.

    A vertex of the relaxation splits few items over bins; each goes to where most of it is. Long
    items stay whole, because splitting them hides what they force. The result may pass limits a
    little. Source: Lenstra, Shmoys and Tardos 1990, Approximation algorithms for scheduling
    unrelated parallel machines.

    Args:
        problem: Items, bins and limits.
        start: An assignment.
        target: Completion time that the fastest bin is measured against.
        longest: Share of the fastest bin's time until ``target`` above which an item is long.
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
    placed = _place_program(split.size, bins, constraints, whole=False)
    if placed is None:
        return None
    rounded = start.copy()
    rounded[split] = placed
    return rounded


def _within(use: Floats, limit: Floats, makespan: Floats | None = None) -> LinearConstraint:
    """Per bin, the (items,) or (bins, items) use is at most ``limit + makespan * variable``.

    Variables are the share of item i in bin b, at i * bins + b, and the makespan.
    """
    bins, items = limit.size, int(use.shape[-1])
    cells = bins * items
    rows = np.arange(cells + bins) % bins
    columns = np.concatenate((np.arange(cells), np.full(bins, cells)))
    slope = np.zeros(bins) if makespan is None else makespan
    shares: Floats = np.zeros((items, bins)) + use.T.reshape(items, -1)
    data = np.append(shares, -slope)
    matrix = csc_array((data, (rows, columns)), shape=(bins, cells + 1))
    return LinearConstraint(matrix, -np.inf, limit)


def _place_program(
    items: int, bins: int, constraints: list[LinearConstraint], *, whole: bool
) -> Ints | None:
    """Solve a placement program for the least makespan variable; None if there is no answer."""
    cells = items * bins
    place = (np.repeat(np.arange(items), bins), np.arange(cells))
    once = csc_array((np.ones(cells), place), shape=(items, cells + 1))
    integrality = np.full(cells + 1, int(whole))
    integrality[-1] = 0
    upper = np.append(np.ones(cells), np.inf)
    result = milp(
        np.append(np.zeros(cells), 1.0),
        integrality=integrality,
        bounds=Bounds(0.0, upper),
        constraints=[LinearConstraint(once, 1.0, 1.0), *constraints],
        options={"node_limit": _MAX_NODES},
    )
    if result.x is None:
        return None
    shares = np.asarray(result.x, dtype=np.float64)[:-1].reshape(items, bins)
    return shares.argmax(axis=1).astype(np.int64)
