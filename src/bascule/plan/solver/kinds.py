"""Bins of several kinds, on each of which an item has another cost: unrelated machines.

An item's kind of bin is guessed, the problem is solved at the costs of the guess, and the guess is
corrected. Kinds ascend: long items lose least on the last one (the largest bags).
"""

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.plan.solver.problem import Problem

_HALVINGS = 40


def fluid(problem: Problem) -> tuple[Ints, Floats]:
    """Kinds that a fluid would choose, and what a second of each kind of bin is worth to it.

    Long items lose least on the last kind: for a makespan, each kind in turn, last one first, is
    filled with the longest items left. Bisection finds where the first kind is full. O(n log n).
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
    """Where the items of each kind end, last kind first; whether all of them fit."""
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
    """Prices at which the item between two kinds costs both the same; last kind first."""
    num_kinds, num_items = costs.shape
    weights = np.ones(num_kinds)
    for turn, kind in enumerate(reversed(range(num_kinds - 1))):
        last = min(int(ends[turn + 1]), num_items - 1)
        here, above = (float(costs[k, last]) for k in (kind, kind + 1))
        weights[kind] = weights[kind + 1] * (above / here if here > 0 else 1.0)
    return weights / (weights * speeds).sum()


def price_bound(problem: Problem, weights: Floats, makespan: float) -> float:
    """Linear programming duality: any weights of the kinds' time give a bound. O(kinds n).

    With the work of kind k at most S_k T - R_k (speeds S, carried work R), and weights w with
    sum w S = 1: T >= sum_k w_k R_k + sum_i min_k w_k cost_ki, the minimum over the kinds on which
    item i alone ends by ``makespan``: that of an answer at hand, in the caller's units.
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
