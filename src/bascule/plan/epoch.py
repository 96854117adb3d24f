"""Deal the samples of an epoch, whose lengths are all known, to ranks and microbatches.

An epoch is split into optimiser steps, and the samples of a step are dealt to cells: every rank in
every microbatch gets at least one. If ranks wait in each microbatch, two deals are tried: even
cells, with the heaviest in one microbatch; and the longest samples in one microbatch, together with
the next longest. A padded batch of n samples costs n times its dearest sample. Its samples are
consecutive in descending order of cost, and fill it up to a level that is found by bisection.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.checks import MAX_RANKS, MAX_WHOLE, whole
from bascule.errors import ConfigError, PlanError
from bascule.plan.limits import Limits
from bascule.plan.plan import Sync
from bascule.plan.solver import assign
from bascule.plan.solver.portfolio import solve
from bascule.plan.solver.problem import build_problem

_MAX_COUNT = 2**31
_ROUNDING = 1e-12

_MAX_TRIED = 1 << 18  # pieces, over all trials of a move, up to which moves are tried
_MAX_MOVES = 32


def epoch_order(num_samples: int, *, shuffle: bool, seed: int, epoch: int) -> Ints:
    """Return (num_samples,) all indices, in an order that only seed and epoch decide. O(n)."""
    order = np.arange(num_samples)
    if shuffle:
        np.random.default_rng([seed, epoch]).shuffle(order)
    return order


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of an optimiser step. A *cell* is a rank's batch in a microbatch, never empty."""

    batch_size: int  # samples of a cell in a full step; where counts vary, their mean
    num_ranks: int
    accumulate: int  # microbatches of a step

    def __post_init__(self) -> None:
        most = {"batch_size": _MAX_COUNT, "num_ranks": MAX_RANKS, "accumulate": _MAX_COUNT}
        for name, highest in most.items():
            count = whole(f"BalancedSampler({name}", getattr(self, name), 1, highest)
            object.__setattr__(self, name, count)
        if self.full > MAX_WHOLE:
            raise ConfigError(f"{self}: {self.full} samples per step; give at most {MAX_WHOLE}")

    @property
    def num_cells(self) -> int:
        """Number of batches of a step, over all ranks and microbatches."""
        return self.num_ranks * self.accumulate

    @property
    def full(self) -> int:
        """Number of samples of a full step: the global batch size."""
        return self.batch_size * self.num_cells

    def next_size(self, left: int) -> int:
        """Return the number of samples of the next step if `left` are left in the epoch.

        A remainder too small for all cells joins the last full step; both are halved together if
        each half fills all cells. Only `left` decides, so a resumed run splits the epoch alike.
        """
        over = left - self.full
        if over <= 0 or over >= self.num_cells:
            return min(left, self.full)
        return left if self.batch_size == 1 else -(-left // 2)

    def sizes(self, left: int) -> Iterator[int]:
        """Yield the number of samples of each remaining step."""
        while left > 0:
            size = self.next_size(left)
            yield size
            left -= size

    def _steps(self, left: int) -> tuple[int, list[int]]:
        """Return how many steps are surely full, and the sizes of the few after them."""
        num_full = max(left // self.full - 1, 0)
        return num_full, list(self.sizes(left - num_full * self.full))

    def num_steps(self, left: int) -> int:
        """Return how many steps `left` samples make."""
        num_full, rest = self._steps(left)
        return num_full + len(rest)

    def samples_in(self, left: int, num_steps: int) -> int:
        """Return the number of samples in the next steps if `left` are left in the epoch."""
        num_full, rest = self._steps(left)
        return self.full * min(num_full, num_steps) + sum(rest[: max(num_steps - num_full, 0)])

    def most_in_a_cell(self, left: int) -> int:
        """Return the number of samples of the largest cell of any step, if counts are even."""
        num_full, rest = self._steps(left)
        return -(-max([self.full] * (num_full > 0) + rest, default=0) // self.num_cells)


@dataclass(frozen=True, slots=True)
class DealRules:
    """The rules of a deal: its limits, and when ranks wait for each other."""

    shape: StepShape  # ranks and microbatches
    sync: Sync = "microbatch"  # when ranks wait for each other, as for `plan_step`
    limits: Limits | None = None  # tokens, and samples, of a cell; hard
    even_counts: bool = True  # cells get as many samples each as can be; else at least one
    padded: bool = False  # n samples then cost n times the dearest
    tolerance: float = 0.01  # gap to the bound at which the search stops

    def limits_of(self, num_samples: int) -> Limits | None:
        """Return the limits of a cell in a step of `num_samples` samples."""
        if not self.even_counts:
            return self.limits
        limits, even = self.limits or Limits(), -(-num_samples // self.shape.num_cells)
        return replace(limits, items=min(limits.common("items") or even, even))


@dataclass(frozen=True, slots=True)
class StepTable:
    """(n,) costs, tokens and homes of samples; cell number = microbatch * num_ranks + rank."""

    costs: Floats
    tokens: Ints
    rules: DealRules
    home: Ints | None

    def loads(self, cells: Ints) -> Floats:
        """Return (accumulate, num_ranks) costs of the cells."""
        shape = self.rules.shape
        loads = np.bincount(cells, self.costs, shape.num_cells)
        if self.rules.padded:
            counts = np.bincount(cells, minlength=shape.num_cells)
            loads = counts * largest_of(cells, self.costs, shape.num_cells)
        return np.asarray(loads, dtype=np.float64).reshape(shape.accumulate, shape.num_ranks)

    def makespan(self, cells: Ints) -> float:
        """Return the predicted time of the step."""
        loads = self.loads(cells)
        if self.rules.sync == "step":
            return float(loads.sum(axis=0).max())
        return float(loads.max(axis=1).sum())

    def keeps_limits(self, cells: Ints) -> bool:
        """Return whether every cell keeps the limits of tokens and samples."""
        limits, num = self.rules.limits, self.rules.shape.num_cells
        if limits is None:
            return True
        counts, tokens = np.bincount(cells, minlength=num), np.bincount(cells, self.tokens, num)
        if self.rules.padded:
            tokens = counts * largest_of(cells, self.tokens, num)
        return limits.keeps(items=counts, tokens=tokens)

    def lower_bound(self) -> float:
        """Return a lower bound on the time of a step, however its samples are dealt."""
        shape = self.rules.shape
        bound = max(float(self.costs.sum()) / shape.num_ranks, float(self.costs.max()))
        if self.rules.padded:
            if self.rules.even_counts:
                bound = max(bound, self._padding_bound())
        elif self.rules.even_counts and self.rules.sync == "microbatch":
            bound = max(bound, self._company_bound())
        return bound * (1.0 - _ROUNDING)

    def _company_bound(self) -> float:
        """Bound even counts: giants cannot all be in one microbatch, nor alone in their cells.

        Of microbatches by descending longest sample, the first k hold no more than the n_k longest
        samples, n_k = k * num_ranks * most. So the next has the next longest or a longer one, with
        the shortest of all in its cell at least; and what the first k cannot hold, the others must.
        """
        shape, ranked = self.rules.shape, -np.sort(-self.costs)
        num = ranked.size
        most = -(-num // shape.num_cells)
        least = max(num - most * (shape.num_cells - 1), 1)
        company = float(ranked[num - least + 1 :].sum())
        longest = np.append(0.0, ranked[:: shape.num_ranks * most] + company)
        sums = np.append(0.0, np.cumsum(ranked))
        ends = np.minimum(np.arange(longest.size) * shape.num_ranks * most, num)
        rest = (sums[-1] - sums[ends]) / shape.num_ranks
        return float((np.cumsum(longest) + rest).max())

    def _padding_bound(self) -> float:
        """Bound padded batches of even counts: the cost of pieces of the ranked samples."""
        shape, ranked = self.rules.shape, -np.sort(-self.costs)
        most = -(-ranked.size // shape.num_cells)
        least = max(ranked.size - most * (shape.num_cells - 1), 1)
        if self.rules.sync == "microbatch":
            return float(ranked[:: shape.num_ranks * most].sum()) * least
        return float(ranked[::most].sum()) * least / shape.num_ranks


def largest_of(cells: Ints, values: npt.NDArray[Any], num_cells: int) -> Floats:
    """Return (num_cells,) largest value in each cell."""
    largest = np.zeros(num_cells)
    np.maximum.at(largest, cells, values)
    return largest


@dataclass(frozen=True, slots=True, eq=False)
class Deal:
    """The samples of a step in their cells, and a lower bound. Arrays are read-only."""

    samples: Ints  # (n,) in the order of the epoch
    rank_of: Ints  # (n,) rank of each
    microbatch_of: Ints  # (n,) microbatch of each
    loads: Floats  # (accumulate, num_ranks) cost of each cell
    makespan: float  # sum over microbatches of the largest load, or the largest sum of a rank
    lower_bound: float  # no deal of these samples takes less

    def batch(self, rank: int, microbatch: int) -> Ints:
        """Return the samples of one cell."""
        return self.samples[(self.rank_of == rank) & (self.microbatch_of == microbatch)]


def deal_step(costs: Floats, tokens: Ints, rules: DealRules, home: Ints | None = None) -> Deal:
    """Deal the samples of one step so that it ends as early as possible.

    Give at least as many samples as cells. `home` is the (n,) rank that each sample should be on if
    that makes the step no longer. PlanError: a limit cannot be kept.
    """
    table = StepTable(costs, tokens, rules, home)
    bound, best, least = table.lower_bound(), None, np.inf
    failures: list[PlanError] = []
    for deal in _deals(rules):
        try:
            cells, new_bound = deal(table)
        except PlanError as error:
            failures.append(error)
            continue
        bound, makespan = max(bound, new_bound), table.makespan(cells)
        if makespan < least:
            best, least = cells, makespan
        if least <= bound * (1.0 + rules.tolerance):
            break
    if best is None:
        raise failures[-1]
    plain = np.arange(costs.size) % rules.shape.num_cells  # dealt like cards
    if table.keeps_limits(plain) and table.makespan(plain) < least:
        best = plain
    microbatch_of, rank_of = np.divmod(best, rules.shape.num_ranks)
    arrays = np.arange(best.size), rank_of, microbatch_of, table.loads(best)
    for array in arrays:
        array.flags.writeable = False
    makespan = table.makespan(best)
    return Deal(*arrays, makespan, min(bound, makespan))


def _deals(rules: DealRules) -> list[Callable[[StepTable], tuple[Ints, float]]]:
    """Return functions that deal samples to cells, and return a bound; tried in this order."""
    if rules.padded:
        return [_by_length]
    if rules.shape.accumulate == 1:
        return [_to_ranks]
    if rules.sync == "microbatch":
        return [_all_alike, _by_room]
    if rules.limits is not None and rules.limits.tokens is not None:
        return [_cells_to_ranks]  # limits hold for a microbatch
    return [_by_rank, _cells_to_ranks]


def _to_ranks(table: StepTable) -> tuple[Ints, float]:
    """Assign the samples of the only microbatch to ranks."""
    num_ranks, num = table.rules.shape.num_ranks, table.costs.size
    return _solved(table, np.arange(num), num_ranks, table.rules.limits_of(num), table.home)


def _by_rank(table: StepTable) -> tuple[Ints, float]:
    """Assign samples to ranks, whose samples are then dealt to microbatches, longest first."""
    shape, every = table.rules.shape, np.arange(table.costs.size)
    most = (table.rules.limits_of(every.size) or Limits()).common("items")
    limits = None if most is None else Limits(items=shape.accumulate * most)
    ranks, bound = _solved(table, every, shape.num_ranks, limits, table.home, shape.accumulate)
    order = np.lexsort((every, -table.costs, ranks))
    counts = np.bincount(ranks, minlength=shape.num_ranks)
    place = every - np.repeat(np.cumsum(counts) - counts, counts)
    turn, within = np.divmod(place, shape.accumulate)
    forth_and_back = np.where(turn % 2, shape.accumulate - 1 - within, within)
    cells = np.empty_like(every)
    cells[order] = forth_and_back * shape.num_ranks + ranks[order]
    return cells, bound


def _cells_to_ranks(table: StepTable) -> tuple[Ints, float]:
    """Assign samples to cells, then cells to ranks, so that the sums of ranks are even."""
    shape, num = table.rules.shape, table.costs.size
    cells, _ = _solved(table, np.arange(num), shape.num_cells, table.rules.limits_of(num))
    return _grouped(table, cells), 0.0


def _all_alike(table: StepTable) -> tuple[Ints, float]:
    """Make all cells as even as possible; put the heaviest into one microbatch."""
    shape, num = table.rules.shape, table.costs.size
    limits = table.rules.limits_of(num)
    cells, _ = _solved(table, np.arange(num), shape.num_cells, limits)
    return _nearer_home(table, _heavy_together(table, cells)), 0.0


def _by_room(table: StepTable) -> tuple[Ints, float]:
    """Put the longest samples into one microbatch, and fill its other ranks to their level."""
    rules, cells = table.rules, np.empty(table.costs.size, dtype=np.int64)
    limits, num_ranks = rules.limits_of(table.costs.size), rules.shape.num_ranks
    parts = split_by_room(table.costs, rules.shape, even_counts=rules.even_counts)
    for number, chosen in enumerate(parts):
        home = None if table.home is None else table.home[chosen]
        ranks, _ = _solved(table, chosen, num_ranks, limits, home)
        cells[chosen] = number * num_ranks + ranks
    return cells, 0.0


def _by_length(table: StepTable) -> tuple[Ints, float]:
    """Cut the samples, by descending cost, into consecutive padded batches."""
    rules, shape, num = table.rules, table.rules.shape, table.costs.size
    order, bound = np.argsort(-table.costs, kind="stable"), 0.0
    if rules.even_counts:
        each, extra = divmod(num, shape.num_cells)  # pieces of dear samples are shorter
        pieces = each + (np.arange(shape.num_cells) >= shape.num_cells - extra)
    else:
        most = _most_padded(table, order)
        pieces, level = free_pieces(table.costs[order], most, shape, 0.1 * rules.tolerance)
        bound = level if shape.accumulate == 1 else 0.0
    cells = np.empty(num, dtype=np.int64)
    cells[order] = np.repeat(np.arange(shape.num_cells), pieces)
    if not table.keeps_limits(cells):
        wrong = f"{num} samples in padded batches of equal counts exceed {rules.limits}"
        raise PlanError(f"{wrong}: raise them, lower batch_size, or set even_counts=False")
    if rules.sync == "step":
        return _grouped(table, cells), bound
    return _nearer_home(table, _heavy_together(table, cells)), bound


def _most_padded(table: StepTable, order: Ints) -> Ints:
    """Return (n,) the most samples of a batch that begins at each place of the order."""
    limits = table.rules.limits or Limits()
    items, tokens = limits.common("items"), limits.common("tokens")
    items = order.size if items is None else items
    if tokens is None:
        return np.full(order.size, items)
    longest = np.maximum.accumulate(table.tokens[order][::-1])[::-1]
    return np.minimum(items, tokens // np.maximum(longest, 1))


def _grouped(table: StepTable, cells: Ints) -> Ints:
    """Assign whole cells to ranks, as many to each, so that the sums of ranks are even."""
    shape, loads = table.rules.shape, table.loads(cells).ravel()
    limits = Limits(items=shape.accumulate)
    ranks = assign(loads, shape.num_ranks, limits=limits, tolerance=table.rules.tolerance).bin_of
    order = np.argsort(ranks, kind="stable")  # `accumulate` cells of each rank
    place = np.empty_like(order)
    place[order] = np.tile(np.arange(shape.accumulate), shape.num_ranks)
    return (place * shape.num_ranks + ranks)[cells]


def _heavy_together(table: StepTable, cells: Ints) -> Ints:
    """Renumber cells so that the heaviest are in the first microbatch, the next in the second."""
    place = np.empty(table.rules.shape.num_cells, dtype=np.int64)
    place[np.argsort(-table.loads(cells).ravel(), kind="stable")] = np.arange(place.size)
    return place[cells]


def _nearer_home(table: StepTable, cells: Ints) -> Ints:
    """Swap the cells of each microbatch so that most samples are at home."""
    from scipy.optimize import linear_sum_assignment

    shape = table.rules.shape
    if table.home is None:
        return cells
    num_ranks, size = shape.num_ranks, shape.num_cells * shape.num_ranks
    at_home = np.bincount(cells * num_ranks + table.home, minlength=size)
    by_microbatch = at_home.reshape(shape.accumulate, num_ranks, num_ranks)
    ranks = [linear_sum_assignment(gains, maximize=True)[1] for gains in by_microbatch]
    return cells // num_ranks * num_ranks + np.concatenate(ranks)[cells]


def _solved(
    table: StepTable,
    chosen: Ints,
    num_bins: int,
    limits: Limits | None,
    home: Ints | None = None,
    least: int = 1,
) -> tuple[Ints, float]:
    """Assign the chosen samples to bins, `least` to each at least; return the bound too."""
    costs, tokens, tolerance = table.costs[chosen], table.tokens[chosen], table.rules.tolerance
    if home is None:
        limited = limits or Limits()
        free, most = Limits(items=limited.common("items")), limited.common("tokens")
        result = solve(build_problem(costs, np.ones(num_bins), limits=free), tolerance, quick=True)
        fullest = np.bincount(result.bin_of, tokens, num_bins).max()
        if most is None or fullest <= most:
            return _filled(result.bin_of, costs, num_bins, least), result.lower_bound
    result = assign(
        costs, num_bins, limits=limits, sizes=tokens, location=home, tolerance=tolerance
    )
    return _filled(result.bin_of, costs, num_bins, least), result.lower_bound


def _filled(bin_of: Ints, costs: Floats, num_bins: int, least: int) -> Ints:
    """Fill bins with too few items: each takes the shortest item of a bin with most of them."""
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


def split_by_room(costs: Floats, shape: StepShape, *, even_counts: bool) -> list[Ints]:
    """Return the samples of each microbatch: the longest first, one microbatch after another.

    Each rank gets the longest sample left, then samples up to the level of the microbatch. This is
    the cost of the longest sample and its company, or the mean of all samples left if that is more.
    """
    order = np.argsort(costs, kind="stable")
    pool, num_ranks = _Pool(order.tolist(), costs[order].tolist()), shape.num_ranks
    chosen: list[list[int]] = []
    sizes = [part.size for part in np.array_split(costs, shape.accumulate)]
    for number, size in enumerate(sizes[:-1]):
        later = shape.accumulate - number
        even = sum(pool.costs) / (num_ranks * later)
        if even_counts:
            chosen.append(pool.take_even(size, num_ranks, even))
        else:
            chosen.append(pool.take(num_ranks, even, num_ranks * (later - 1)))
    return [np.array(part, dtype=np.int64) for part in (*chosen, pool.items)]


@dataclass(slots=True)
class _Pool:
    """Samples that no microbatch has taken, by ascending cost."""

    items: list[int]
    costs: list[float]

    def take_even(self, num: int, num_ranks: int, even: float) -> list[int]:
        """Take `num` samples, as many on each rank as possible."""
        each, extra = divmod(num, num_ranks)
        level = max(self.costs[-1] + sum(self.costs[: each - 1]), even)
        taken, rooms = self._seeds(num_ranks, level)
        for left in range(each - 1, 0, -1):  # the emptiest ranks choose first
            for rank in sorted(range(num_ranks), key=lambda rank: -rooms[rank]):
                rooms[rank] -= self._nearest(rooms[rank] / left, taken)
        for room in sorted(rooms, reverse=True)[:extra]:
            self._nearest(room, taken)
        return taken

    def take(self, num_ranks: int, even: float, reserved: int) -> list[int]:
        """Take any number of samples, one a rank at least, and leave `reserved` of them."""
        taken, rooms = self._seeds(num_ranks, max(self.costs[-1], even))
        for room in rooms:
            while len(self.items) > reserved:
                place = bisect_right(self.costs, room) - 1
                if place < 0:
                    break
                room -= self._pop(place, taken)
        return taken

    def _seeds(self, num_ranks: int, level: float) -> tuple[list[int], list[float]]:
        """Take the longest sample for each rank; return the room that each leaves below `level`."""
        taken: list[int] = []
        return taken, [level - self._pop(-1, taken) for _ in range(num_ranks)]

    def _nearest(self, wanted: float, taken: list[int]) -> float:
        """Take the sample whose cost is nearest; of two, the shorter one."""
        place = bisect_left(self.costs, wanted)
        if place == len(self.costs) or (
            place > 0 and wanted - self.costs[place - 1] <= self.costs[place] - wanted
        ):
            place -= 1
        return self._pop(place, taken)

    def _pop(self, place: int, taken: list[int]) -> float:
        taken.append(self.items.pop(place))
        return self.costs.pop(place)


def free_pieces(
    ranked: Floats, most: Ints, shape: StepShape, tolerance: float
) -> tuple[Ints, float]:
    """Return (num_cells,) lengths of pieces that end a step early, and a lower bound on its time.

    With one microbatch it is optimal up to the tolerance. O(num_cells log(1 / tolerance)). `ranked`
    are (n,) descending costs; `most[k]` is the most samples of a piece that begins at sample k.
    """
    costs, allowed = ranked.tolist(), most.tolist()
    if _pieces(costs, allowed, shape, np.inf) is None:
        wrong = f"{ranked.size} samples of a step do not fit into {shape.num_cells} padded batches"
        raise PlanError(f"{wrong} within the limits; raise them, or lower batch_size")
    low = high = float(ranked.sum()) / shape.num_cells
    while (pieces := _pieces(costs, allowed, shape, high)) is None:
        low, high = high, 2.0 * high
    while high > low * (1.0 + tolerance):
        middle = (low + high) / 2.0
        trial = _pieces(costs, allowed, shape, middle)
        if trial is None:
            low = middle
        else:
            high, pieces = middle, trial
    if shape.accumulate == 1:
        return np.array(pieces, dtype=np.int64), low
    return _improved(np.array(pieces, dtype=np.int64), ranked, most, shape.num_ranks), low


def _improved(pieces: Ints, ranked: Floats, most: Ints, num_ranks: int) -> Ints:
    """Move single samples between pieces while that ends the step earlier."""
    num = pieces.size
    best = float(_makespans(pieces[None], ranked, most, num_ranks)[0])
    if num**3 > _MAX_TRIED:
        return pieces
    changes = np.eye(num, dtype=np.int64)
    changes = (changes[:, None] - changes).reshape(-1, num)
    for _ in range(_MAX_MOVES):
        trials = pieces + changes
        trials = trials[trials.min(axis=1) >= 1]
        ends = _makespans(trials, ranked, most, num_ranks)
        chosen = int(ends.argmin())
        if ends[chosen] >= best:
            break
        pieces, best = trials[chosen], float(ends[chosen])
    return pieces


def _makespans(pieces: Ints, ranked: Floats, most: Ints, num_ranks: int) -> Floats:
    """Return (trials,) times of steps, heaviest pieces in one microbatch; inf above limits."""
    starts = np.cumsum(pieces, axis=1) - pieces
    loads = -np.sort(-ranked[starts] * pieces, axis=1)
    ends = loads[:, ::num_ranks].sum(axis=1)
    return np.where((pieces <= most[starts]).all(axis=1), ends, np.inf)


def _pieces(
    costs: list[float], allowed: list[int], shape: StepShape, level: float
) -> list[int] | None:
    """Cut pieces that cost no more than a level; None if samples are left over."""
    place, pieces, num = 0, list[int](), len(costs)
    for cell in range(shape.num_cells):
        head, spare = costs[place], num - place - (shape.num_cells - cell - 1)
        fitting = spare if head * spare <= level else int(level / head)
        pieces.append(max(min(fitting, allowed[place], spare), 1))
        place += pieces[-1]
    return pieces if place == num else None
