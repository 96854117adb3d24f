"""Ways to deal the samples of a step into its cells, and the bound that each of them finds.

Where there are several microbatches, two are worth trying: all cells alike, the heaviest of which
then meet in one microbatch; and giants together, with what the other ranks have room for beside
them (see `microbatches`).
"""

from collections.abc import Iterator

import numpy as np
from scipy.optimize import linear_sum_assignment

from bascule.arrays import Floats, Ints
from bascule.errors import PlanError
from bascule.plan.epoch.cells import StepTable
from bascule.plan.epoch.microbatches import split_by_room
from bascule.plan.epoch.padded import even_pieces, free_pieces
from bascule.plan.limits import Limits
from bascule.plan.solver import assign
from bascule.plan.solver.portfolio import solve
from bascule.plan.solver.problem import build_problem


def candidates(table: StepTable) -> Iterator[tuple[Ints, float] | PlanError]:
    """Cells of the samples, and a bound that was found with them; or why there are none."""
    rules, limits = table.rules, table.rules.limits
    if rules.padded:
        ways = [_by_length]
    elif rules.shape.accumulate == 1:
        ways = [_to_ranks]
    elif rules.sync == "microbatch":
        ways = [_all_alike, _by_room]
    elif limits is not None and limits.tokens is not None:
        ways = [_cells_to_ranks]  # limits are those of a microbatch
    else:
        ways = [_by_rank, _cells_to_ranks]
    for way in ways:
        try:
            yield way(table)
        except PlanError as error:
            yield error


def _to_ranks(table: StepTable) -> tuple[Ints, float]:
    """One microbatch: samples to ranks."""
    num_ranks, num = table.rules.shape.num_ranks, table.costs.size
    return _solved(table, np.arange(num), num_ranks, table.rules.limits_of(num), table.home)


def _by_rank(table: StepTable) -> tuple[Ints, float]:
    """Samples to ranks; then each rank deals its own to its microbatches, longest first."""
    shape, every = table.rules.shape, np.arange(table.costs.size)
    given = table.rules.limits_of(every.size)
    limits = None
    if given is not None and given.items is not None:
        limits = Limits(items=shape.accumulate * given.items)
    ranks, bound = _solved(table, every, shape.num_ranks, limits, table.home, shape.accumulate)
    order = np.lexsort((every, -table.costs, ranks))
    counts = np.bincount(ranks, minlength=shape.num_ranks)
    turn, within = np.divmod(
        every - np.repeat(np.cumsum(counts) - counts, counts), shape.accumulate
    )
    forth_and_back = np.where(turn % 2, shape.accumulate - 1 - within, within)
    cells = np.empty_like(every)
    cells[order] = forth_and_back * shape.num_ranks + ranks[order]
    return cells, bound


def _cells_to_ranks(table: StepTable) -> tuple[Ints, float]:
    """Samples to cells, then cells to ranks, so that the sums of the ranks are even."""
    shape, num = table.rules.shape, table.costs.size
    cells, _ = _solved(table, np.arange(num), shape.num_cells, table.rules.limits_of(num))
    return _grouped(table, cells), 0.0


def _all_alike(table: StepTable) -> tuple[Ints, float]:
    """All cells as even as can be; those that are heavier meet in one microbatch."""
    shape, num = table.rules.shape, table.costs.size
    limits = table.rules.limits_of(num)
    cells, _ = _solved(table, np.arange(num), shape.num_cells, limits)
    return _nearer_home(table, _heavy_together(table, cells)), 0.0


def _by_room(table: StepTable) -> tuple[Ints, float]:
    """Giants together, and beside them what brings the other ranks to their level."""
    rules, cells = table.rules, np.empty(table.costs.size, dtype=np.int64)
    limits, num_ranks = rules.limits_of(table.costs.size), rules.shape.num_ranks
    parts = split_by_room(table.costs, rules.shape, even_counts=rules.even_counts)
    for number, chosen in enumerate(parts):
        home = None if table.home is None else table.home[chosen]
        ranks, _ = _solved(table, chosen, num_ranks, limits, home)
        cells[chosen] = number * num_ranks + ranks
    return cells, 0.0


def _by_length(table: StepTable) -> tuple[Ints, float]:
    """Padded batches: consecutive pieces of the samples by descending cost."""
    rules, shape, num = table.rules, table.rules.shape, table.costs.size
    order, bound = np.argsort(-table.costs, kind="stable"), 0.0
    if rules.even_counts:
        pieces = even_pieces(num, shape.num_cells)
    else:
        most = _most_padded(table, order)
        pieces, level = free_pieces(table.costs[order], most, shape, 0.1 * rules.tolerance)
        bound = level if shape.accumulate == 1 else 0.0
    cells = np.empty(num, dtype=np.int64)
    cells[order] = np.repeat(np.arange(shape.num_cells), pieces)
    if not table.keeps_limits(cells):
        raise PlanError(
            f"{num} samples in padded batches of equal counts pass {rules.limits}: raise the "
            "limits, make batch_size smaller, or let counts differ (even_counts=False)"
        )
    if rules.sync == "step":
        return _grouped(table, cells), bound
    return _nearer_home(table, _heavy_together(table, cells)), bound


def _most_padded(table: StepTable, order: Ints) -> Ints:
    """(n,) samples that a batch may have at most, if it begins there in this order."""
    limits = table.rules.limits or Limits()
    items = order.size if limits.items is None else limits.items
    if limits.tokens is None:
        return np.full(order.size, items)
    longest = np.maximum.accumulate(table.tokens[order][::-1])[::-1]
    return np.minimum(items, limits.tokens // np.maximum(longest, 1))


def _grouped(table: StepTable, cells: Ints) -> Ints:
    """Whole cells dealt to ranks, as many each, so that the sums of the ranks are even."""
    shape, loads = table.rules.shape, table.loads(cells).ravel()
    limits = Limits(items=shape.accumulate)
    ranks = assign(loads, shape.num_ranks, limits=limits, tolerance=table.rules.tolerance).bin_of
    order = np.argsort(ranks, kind="stable")  # `accumulate` cells of each rank
    place = np.empty_like(order)
    place[order] = np.tile(np.arange(shape.accumulate), shape.num_ranks)
    return (place * shape.num_ranks + ranks)[cells]


def _heavy_together(table: StepTable, cells: Ints) -> Ints:
    """The cells renamed so that the heaviest are in the first microbatch, and so on."""
    place = np.empty(table.rules.shape.num_cells, dtype=np.int64)
    place[np.argsort(-table.loads(cells).ravel(), kind="stable")] = np.arange(place.size)
    return place[cells]


def _nearer_home(table: StepTable, cells: Ints) -> Ints:
    """The ranks of each microbatch renamed so that most samples are at home."""
    shape = table.rules.shape
    if table.home is None:
        return cells
    for number in range(shape.accumulate):
        chosen = np.flatnonzero(cells // shape.num_ranks == number)
        ranks = _renamed(cells[chosen] % shape.num_ranks, table.home[chosen], shape.num_ranks)
        cells[chosen] = number * shape.num_ranks + ranks
    return cells


def _solved(
    table: StepTable,
    chosen: Ints,
    num_bins: int,
    limits: Limits | None,
    home: Ints | None = None,
    least: int = 1,
) -> tuple[Ints, float]:
    """Bins of the chosen samples, each with at least so many; and the bound."""
    costs, tokens, tolerance = table.costs[chosen], table.tokens[chosen], table.rules.tolerance
    if home is None:
        free = None if limits is None or limits.items is None else Limits(items=limits.items)
        found = solve(build_problem(costs, num_bins, limits=free), tolerance, quick=True)
        held = np.bincount(found.bin_of, tokens, num_bins).max()
        if limits is not None and limits.tokens is not None and held > limits.tokens:
            problem = build_problem(costs, num_bins, limits=limits, sizes=tokens)
            found = solve(problem, tolerance)
        bin_of, bound = found.bin_of, found.bound
    else:
        near = assign(costs, num_bins, limits=limits, sizes=tokens, home=home, tolerance=tolerance)
        bin_of, bound = near.bin_of, near.lower_bound
    return _filled(bin_of, costs, num_bins, least), bound


def _renamed(ranks: Ints, home: Ints, num_ranks: int) -> Ints:
    """The ranks renamed so that most samples are at home."""
    at_home = np.bincount(ranks * num_ranks + home, minlength=num_ranks**2)
    at_home = at_home.reshape(num_ranks, num_ranks)
    return linear_sum_assignment(at_home, maximize=True)[1][ranks]


def _filled(bin_of: Ints, costs: Floats, num_bins: int, least: int) -> Ints:
    """No bin with fewer items than needed: each takes the shortest item of a bin with most of them.

    An empty bin that gets one item ends no later than the latest bin did.
    """
    counts = np.bincount(bin_of, minlength=num_bins)
    if counts.min() >= least:
        return bin_of
    bin_of = bin_of.copy()
    while counts.min() < least:
        poor, rich = int(counts.argmin()), int(counts.argmax())
        members = np.flatnonzero(bin_of == rich)
        bin_of[members[costs[members].argmin()]] = poor
        counts[poor] += 1
        counts[rich] -= 1
    return bin_of
