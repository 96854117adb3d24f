"""Placements by linear and integer programming (HiGHS), where limits are tight."""

from typing import TYPE_CHECKING

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.plan.solver.problem import Problem

if TYPE_CHECKING:
    from scipy.optimize import LinearConstraint

_MAX_EXACT_CELLS = 512
"""Largest number of items times bins that is placed exactly: larger programs hardly ever end."""

_MAX_RELAXED_CELLS = 8192
"""Largest number of items times bins whose relaxation is solved."""

_MAX_EXACT_STEPS = 1 << 17
"""Step budget of the exact solver, in nodes times cells."""


def place_exactly(problem: Problem) -> Ints | None:
    """Any assignment within the limits; None if none was found, or the problem is too large."""
    items, bins = problem.num_items, problem.num_bins
    if items * bins > _MAX_EXACT_CELLS:
        return None
    limits = [_within(use, room) for use, room in zip(problem.use, problem.room, strict=True)]
    return _place(items, bins, limits, whole=True)


def place_relaxed(problem: Problem, start: Ints, target: float, longest: float) -> Ints | None:
    """Round a linear relaxation, with the long items where `start` has them; None if too large.

    A vertex of the relaxation splits few items over bins; each goes to where most of it is. Items
    longer than a share `longest` of the fastest bin's time until `target` stay whole. The result
    may pass limits a little. Source: Lenstra, Shmoys and Tardos 1990, Approximation algorithms for
    scheduling unrelated parallel machines.
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
