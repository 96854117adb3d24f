"""Assign heads to rings, and blocks to the ranks of a ring.

Heads stay whole if that is even enough; otherwise they are split along their queries. Blocks dealt
in turns (stripes) are nearly even. Else blocks move one at a time, from the rank that delays its
ring most to the rank where the move shortens the ring most.

Legend: Q query blocks, K key blocks, R ranks of the ring; n blocks of one side, m of the other.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.checks import amounts, ints, number, whole
from bascule.plan.metrics import imbalance
from bascule.plan.solver.solve import Assignment, assign
from bascule.plan.sparse.layout import barrier_ends, over_mean, rounds_of, tile_work, turns

TARGET = 1.005
"""Default imbalance at which moves end."""

_LEAST_FALL = 1e-4  # least share of a rank's mean work by which a move must shorten the ring

Placement = tuple[Ints, Ints]
"""Ring rank of each query block and of each key block."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockPlan:
    """The ring rank that computes or keeps each block. Arrays are read-only."""

    q_of: Ints  # (Q,) ring rank that computes each query block
    kv_of: Ints  # (K,) ring rank on which each key block starts its way
    tiles: Floats  # (R, R) work of the queries of each rank on the keys of each

    def __post_init__(self) -> None:
        for array in (self.q_of, self.kv_of, self.tiles):
            array.flags.writeable = False

    @property
    def imbalance(self) -> float:
        """The imbalance rho of db-SP, equation 3: ranks wait for each other in every round."""
        return over_mean(barrier_ends(self.tiles), self.tiles)


def partition_blocks(
    block_matrix: npt.ArrayLike,
    ring_degree: int,
    *,
    q_home: npt.ArrayLike | None = None,
    kv_home: npt.ArrayLike | None = None,
    target: float = TARGET,
    keys_stay: bool = False,
) -> BlockPlan:
    """Move blocks from home one by one, while a move shortens the ring and it is not even enough.

    Args:
        block_matrix: (Q, K) work of each query block on each key block, of all heads of the ring.
            Integers, so that all ranks get the same plan.
        ring_degree: R.
        q_home: (Q,) ring rank where each query block is. Default: `turns`.
        kv_home: (K,) ring rank where each key block is. Default: `turns`.
        target: Imbalance at which moves end.
        keys_stay: Whether only query blocks move.
    """
    matrix = amounts("block_matrix", block_matrix, (2,))
    ring_degree, target = whole("ring_degree", ring_degree, 1), number("target", target)
    (num_q, num_kv), most = matrix.shape, ring_degree - 1
    q_striped, kv_striped = (turns(np.arange(n, dtype=np.int64), ring_degree) for n in matrix.shape)
    homes: Placement = (
        q_striped if q_home is None else ints("q_home", q_home, num_q, most),
        kv_striped if kv_home is None else ints("kv_home", kv_home, num_kv, most),
    )
    budget = target * float(matrix.sum()) / ring_degree
    placed = _moved(matrix, homes, ring_degree, budget, keys_stay=keys_stay)
    return BlockPlan(*placed, tile_work(matrix, *placed, ring_degree))


@dataclass(slots=True)
class _Side:
    """The query blocks of a ring; or the key blocks, with all tables transposed."""

    matrix: Floats  # (n, m) work of each block on each block of the other side
    profiles: Floats  # (n, R) work of each block on the other side's blocks of each rank
    tiles: Floats  # (R, R) work between ranks; a view, shared by both sides
    rank_of: Ints  # (n,) rank of each block


def _moved(
    matrix: Floats, homes: Placement, ring_degree: int, budget: float, *, keys_stay: bool
) -> Placement:
    """Move blocks from home until the ring ends within the budget, or no move lowers its end."""
    if ring_degree == 1 or barrier_ends(tile_work(matrix, *homes, ring_degree)) <= budget:
        return homes
    places = np.eye(ring_degree)
    q_of, kv_of = homes[0].copy(), homes[1].copy()
    q_profiles, kv_profiles = matrix @ places[kv_of], matrix.T @ places[q_of]
    tiles = places[q_of].T @ q_profiles
    q = _Side(matrix, q_profiles, tiles, q_of)
    kv = _Side(matrix.T, kv_profiles, tiles.T, kv_of)
    least_fall = _LEAST_FALL * float(matrix.sum()) / ring_degree
    while (end := float(barrier_ends(tiles))) > budget:
        q_end, *q_move = _best_move(q)
        kv_end, *kv_move = (np.inf, 0, 0) if keys_stay else _best_move(kv)
        if min(q_end, kv_end) >= end - least_fall:
            break
        if q_end <= kv_end:
            _move(q, kv, *q_move)
        else:
            _move(kv, q, *kv_move)
    return q_of, kv_of


def _best_move(side: _Side) -> tuple[float, int, int]:
    """Return the earliest end by one move (inf: none), the block, its new rank. O(n R^2)."""
    rounds, size = rounds_of(side.tiles), len(side.tiles)
    ranked: Floats = np.sort(rounds, axis=0)
    waits: Floats = np.where(rounds == ranked[-1], ranked[-1] - ranked[-2], 0.0).sum(axis=1)
    source = int(waits.argmax())
    blocks = np.flatnonzero(side.rank_of == source)
    best = np.inf, 0, 0
    if waits[source] <= 0.0 or not blocks.size:
        return best
    turns, profiles = np.arange(size), side.profiles[blocks]
    left = rounds[source] - profiles[:, (source - turns) % size]
    others = rounds.copy()
    others[source] = 0.0
    ranked = np.sort(others, axis=0)
    is_first = others == ranked[-1]
    for dest in (rank for rank in range(size) if rank != source):
        grown = rounds[dest] + profiles[:, (dest - turns) % size]
        rest = ranked[-1].copy()
        np.copyto(rest, ranked[-2], where=is_first[dest])
        ends = np.maximum(np.maximum(left, grown), rest).sum(axis=1)
        place = int(ends.argmin())
        if ends[place] < best[0]:
            best = float(ends[place]), int(blocks[place]), dest
    return best


def _move(side: _Side, other: _Side, block: int, rank: int) -> None:
    source = int(side.rank_of[block])
    side.tiles[source] -= side.profiles[block]
    side.tiles[rank] += side.profiles[block]
    other.profiles[:, source] -= side.matrix[block]
    other.profiles[:, rank] += side.matrix[block]
    side.rank_of[block] = rank


@dataclass(frozen=True, slots=True, eq=False)
class HeadPlan(Assignment):
    """An `Assignment` of heads to ranks, in which heads may be split along their queries.

    `bin_of` is the rank that a split head came from; `lower_bound` then allows for split heads.
    """

    rank_of: Ints  # (heads, q_blocks) rank of each block of a head; (heads, 1) of whole heads


def partition_heads(
    block_counts: npt.ArrayLike, num_ranks: int, *, cut_above: float = 0.01
) -> HeadPlan:
    """Assign attention heads to ranks so that all ranks have the same work.

    Ranks may get unequal numbers of heads, or none. Heads are split only if whole heads leave the
    slowest rank more than `cut_above` over the mean. Other ranks then receive a head's last queries
    and its keys and values. At most num_ranks - 1 splits remove all imbalance but about a block.

    Args:
        block_counts: (heads,) work of each head, never split; or (heads, q_blocks) work by block.
        num_ranks: Number of ranks.
        cut_above: Heads are split if the imbalance of whole heads exceeds 1 + this. Inf: never.
    """
    counts = amounts("block_counts", block_counts, (1, 2))
    cut_above = number("cut_above", cut_above, 0.0, np.inf)
    can_cut = counts.ndim == 2
    counts = counts if can_cut else counts[:, None]
    whole = assign(counts.sum(axis=1), num_ranks)
    rank_of, bound = np.repeat(whole.bin_of[:, None], counts.shape[1], axis=1), whole.lower_bound
    if can_cut and imbalance(whole.loads) > 1.0 + cut_above:
        mean = float(whole.loads.mean())
        _cut(counts, rank_of, whole.loads.copy(), (1.0 + cut_above) * mean)
        bound = max(mean, float(counts.max()))
    loads = np.bincount(rank_of.ravel(), counts.ravel(), num_ranks).astype(np.float64)
    makespan = float(loads.max())
    for array in (rank_of, loads):
        array.flags.writeable = False
    # The bound is a sum of rounded numbers, and may be an ulp above the makespan.
    return HeadPlan(whole.bin_of, loads, makespan, min(bound, makespan), rank_of)


def _cut(counts: Floats, rank_of: Ints, loads: Floats, limit: float) -> None:
    """Move query blocks off ranks above the limit, in `rank_of` (heads, q_blocks) and `loads`."""
    mean = loads.mean()
    while loads.max() > limit:
        giver, taker = int(loads.argmax()), int(loads.argmin())
        owned = np.where(rank_of == giver, counts, 0.0)
        head, blocks = _piece(owned, min(loads[giver] - mean, mean - loads[taker]))
        work = counts[head, blocks].sum()
        if work >= loads[giver] - loads[taker]:  # no block is light enough to help
            break
        rank_of[head, blocks] = taker
        loads[giver] -= work
        loads[taker] += work


def _piece(counts: Floats, amount: float) -> tuple[int, Ints]:
    """Return a head, heaviest first, and its last blocks within the amount; else the lightest."""
    for head in np.argsort(-counts.sum(axis=1), kind="stable").tolist():
        blocks = np.flatnonzero(counts[head])[::-1]
        fitting = np.searchsorted(np.cumsum(counts[head, blocks]), amount, side="right")
        if fitting:
            return head, blocks[:fitting]
    lightest = int(np.where(counts > 0.0, counts, np.inf).argmin())
    head, block = divmod(lightest, counts.shape[1])
    return head, np.array([block])
