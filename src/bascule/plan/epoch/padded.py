"""Steps whose batches are padded: a batch costs as many times its dearest sample as it has samples.

Batches are consecutive pieces of the samples by descending cost, filled up to a bisected level.
"""

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.errors import PlanError
from bascule.plan.epoch.order import StepShape

_NUM_LEVELS = 48
"""Levels of a microbatch that are compared, where there are several."""

_MAX_TRIED = 1 << 18
"""Pieces of all trials of a move, at most; without moves, many pieces are within percents."""

_MAX_MOVES = 32


def even_pieces(num_samples: int, num_cells: int) -> Ints:
    """(num_cells,) lengths of the pieces, as equal as can be; those of dear samples shorter."""
    each, extra = divmod(num_samples, num_cells)
    return np.array([each] * (num_cells - extra) + [each + 1] * extra, dtype=np.int64)


def free_pieces(
    ranked: Floats, most: Ints, shape: StepShape, tolerance: float
) -> tuple[Ints, float]:
    """Return (num_cells,) lengths of pieces that end a step early, and a level that bounds it.

    Optimal up to the tolerance with one microbatch, O(num_cells log(1 / tolerance)); with several
    also by a dynamic programme over a grid of levels, O(n (log num_ranks + accumulate)). `ranked`
    are (n,) descending costs, `most` the (n,) most samples of a piece that begins there.
    """
    costs, allowed = ranked.tolist(), most.tolist()
    if _pieces(costs, allowed, shape, [np.inf] * shape.accumulate) is None:
        raise PlanError(
            f"the {ranked.size} samples of a step do not fit into {shape.num_cells} padded batches "
            "within the limits; raise them, or make batch_size smaller"
        )

    def below(level: float) -> list[int] | None:
        return _pieces(costs, allowed, shape, [level] * shape.accumulate)

    low = high = float(ranked.sum()) / shape.num_cells
    while (pieces := below(high)) is None:
        low, high = high, 2.0 * high
    while high > low * (1.0 + tolerance):
        middle = (low + high) / 2.0
        trial = below(middle)
        if trial is None:
            low = middle
        else:
            high, pieces = middle, trial
    if shape.accumulate == 1:
        return np.array(pieces, dtype=np.int64), low
    other = _pieces(costs, allowed, shape, _levels(ranked, most, shape, low)) or pieces
    starts = [np.array(start, dtype=np.int64) for start in (pieces, other)]
    ends = [_improved(start, ranked, most, shape.num_ranks) for start in starts]
    return min(ends, key=lambda end: end[1])[0], low


def _improved(pieces: Ints, ranked: Floats, most: Ints, num_ranks: int) -> tuple[Ints, float]:
    """Move single samples between pieces while the step ends earlier; return pieces and its end."""
    num = pieces.size
    best = float(_makespans(pieces[None], ranked, most, num_ranks)[0])
    if num**3 > _MAX_TRIED:
        return pieces, best
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
    return pieces, best


def _makespans(pieces: Ints, ranked: Floats, most: Ints, num_ranks: int) -> Floats:
    """(trials,) ends of steps, whose heaviest pieces meet in one microbatch; inf above limits."""
    starts = np.cumsum(pieces, axis=1) - pieces
    loads = -np.sort(-ranked[starts] * pieces, axis=1)
    ends = loads[:, ::num_ranks].sum(axis=1)
    return np.where((pieces <= most[starts]).all(axis=1), ends, np.inf)


def _pieces(
    costs: list[float], allowed: list[int], shape: StepShape, levels: list[float]
) -> list[int] | None:
    """Pieces below the levels of their microbatches, or of one sample; None if some are left."""
    place, pieces, num = 0, list[int](), len(costs)
    for cell in range(shape.num_cells):
        head, spare = costs[place], num - place - (shape.num_cells - cell - 1)
        level = levels[cell // shape.num_ranks]
        fitting = spare if head * spare <= level else int(level / head)
        pieces.append(max(min(fitting, allowed[place], spare), 1))
        place += pieces[-1]
    return pieces if place == num else None


def _levels(ranked: Floats, most: Ints, shape: StepShape, mean: float) -> list[float]:
    """Return a level for each microbatch, with the least sum, by a programme over their starts."""
    num, every = ranked.size, np.arange(ranked.size + 1)
    top = float(ranked[0])
    grid = np.geomspace(mean, max(top, 4.0 * mean), _NUM_LEVELS) if mean > 0.0 else np.zeros(1)
    grid = np.unique([*grid.tolist(), top, top * num])
    with np.errstate(divide="ignore", invalid="ignore"):
        fitting = np.nan_to_num(grid[:, None] / ranked, nan=num, posinf=num)
    lengths = np.clip(np.minimum(fitting, most), 1, num).astype(np.int64)
    jumps = np.minimum(every + np.pad(lengths, ((0, 0), (0, 1))), num)
    after = np.broadcast_to(every, jumps.shape)
    for bit in bin(shape.num_ranks)[:1:-1]:
        if bit == "1":
            after = np.take_along_axis(jumps, after, axis=1)
        jumps = np.take_along_axis(jumps, jumps, axis=1)
    price = np.where(grid[:, None] >= np.append(ranked, 0.0), grid[:, None], np.inf)
    price[:, num] = 0.0
    best = np.where(every == num, 0.0, np.inf)
    chosen: list[Ints] = []
    for _ in range(shape.accumulate):
        sums = price + best[after]
        chosen.append(sums.argmin(axis=0))
        best = sums.min(axis=0)
    place, levels = 0, list[float]()
    for choice in reversed(chosen):
        levels.append(float(grid[choice[place]]))
        place = int(after[choice[place], place])
    return levels
