"""Bound the latency, and the number of kept deadlines, of any policy."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bascule.arrays import Floats, Ints, ranges
from bascule.errors import ConfigError
from bascule.plan.requests.state import NEVER, Request


@dataclass(frozen=True, slots=True)
class RequestBound:
    """Bounds that no policy beats; see `request_bound`."""

    on_time: float  # share of requests within their deadlines
    mean_latency_s: float


_MOST_GROUPS = 4000  # of equal requests in one linear program


def request_bound(requests: Sequence[Request], num_ranks: int) -> RequestBound:
    """Bound the deadlines kept and the mean latency of any policy.

    The bound treats all ranks as one machine. It computes a request's cheapest rank-seconds in any
    parts between arrival and deadline, but no faster than alone at the fastest degree. Deadlines:
    a linear program, which counts parts of requests. Latency: shortest remaining time first, which
    is optimal on one machine.
    """
    if not requests:
        return RequestBound(1.0, 0.0)
    arrival = np.array([request.arrival_s for request in requests])
    deadline = np.array([request.deadline_s for request in requests])
    alone = np.array([request.alone_s for request in requests])
    work = np.array([request.work_s for request in requests]) / num_ranks
    order = np.argsort(arrival, kind="stable")
    mean = max(_shortest_rest_first(arrival[order], work[order]), float(alone.mean()))
    return RequestBound(_most_on_time(arrival, deadline, alone, work), mean)


def _shortest_rest_first(arrival: Floats, work: Floats) -> float:
    """Return the mean latency of shortest remaining time first on one machine."""
    now, total, rest = 0.0, 0.0, list[tuple[float, float]]()
    upcoming = [*arrival[1:].tolist(), NEVER]
    for begin, needs, following in zip(arrival.tolist(), work.tolist(), upcoming, strict=True):
        now = max(now, begin)
        heapq.heappush(rest, (needs, begin))
        while rest and now < following:
            needs, came = heapq.heappop(rest)
            if now + needs > following:
                heapq.heappush(rest, (needs - (following - now), came))
                now = following
            else:
                now += needs
                total += now - came
    return total / arrival.size


def _most_on_time(arrival: Floats, deadline: Floats, alone: Floats, work: Floats) -> float:
    """Bound the share of requests that meet their deadlines, by a linear program."""
    from scipy import optimize, sparse

    possible = arrival + alone <= deadline * (1 + 1e-12)
    has_deadline = deadline < NEVER
    always = int((~has_deadline).sum())
    chosen = np.flatnonzero(possible & has_deadline)
    if not chosen.size:
        return always / arrival.size
    # Rounding outwards, so that more fits: arrivals down and deadlines up to a grid of moments.
    begin, end = arrival[chosen], deadline[chosen]
    num_moments = min(240, 2 * chosen.size + 2)
    grid = np.quantile(np.concatenate([begin, end]), np.linspace(0, 1, num_moments))
    grid = np.unique(np.concatenate([[begin.min()], grid, [end.max()]]))
    first = np.searchsorted(grid, begin, side="right") - 1
    last = np.searchsorted(grid, end, side="left")
    rows = np.stack([first, last, np.round(work[chosen], 12)], axis=1)
    groups, counts = np.unique(rows, axis=0, return_counts=True)
    if len(groups) > _MOST_GROUPS:
        raise ConfigError(f"{len(groups)} unlike requests: give at most {_MOST_GROUPS} to bound")
    spans = np.diff(grid)
    starts, stops = groups[:, 0].astype(int), np.maximum(groups[:, 1].astype(int), 1)
    lens = stops - starts
    of_group = np.repeat(np.arange(len(groups)), lens)
    slot: Ints = ranges(starts, lens)
    # Variables: requests on time of each group, then its work in each slot.
    num = len(groups)
    variables = num + slot.size
    ones, in_slots = np.ones(slot.size), num + np.arange(slot.size)
    rows, columns = np.append(np.arange(num), of_group), np.append(np.arange(num), in_slots)
    values = np.append(groups[:, 2], -ones)
    enough = sparse.csr_array((values, (rows, columns)), (num, variables))
    fits = sparse.csr_array((ones, (slot, in_slots)), (spans.size, variables))
    upper = np.append(counts, np.inf * ones)
    solve: Any = optimize.linprog
    result = solve(
        -np.append(np.ones(num), 0.0 * ones),
        A_ub=sparse.vstack([enough, fits], format="csr"),
        b_ub=np.concatenate([np.zeros(num), spans]),
        bounds=np.stack([np.zeros(variables), upper], axis=1).tolist(),
        method="highs",
    )
    on_time: float = -result.fun
    return min(1.0, (always + np.floor(on_time + 1e-6)) / arrival.size)
