"""Plan block-sparse attention, and evaluate a plan under other masks. Legend: see `sparse`.

Baselines: the method of db-SP (section 4.2), and no plan at all. The paper has no rule for ties, so
here the first item and the first rank win.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints, num_before
from bascule.checks import choice, fields, number, of_type, whole
from bascule.errors import ConfigError
from bascule.plan.sparse.layout import (
    BlockLayout,
    Counts,
    block_counts,
    check_degrees,
    check_masks,
    check_work,
    coupled_ends,
    ring_work,
    tile_work,
)
from bascule.plan.sparse.partition import (
    TARGET,
    BlockPlan,
    Placement,
    partition_blocks,
    partition_heads,
)
from bascule.plan.sparse.plan import SparsePlan

REWARD = 2.0
"""Weight of a block by which its home rank counts as less loaded: the best in the paper."""


def greedy(
    weights: Floats | Ints,
    num_ranks: int,
    *,
    home: Ints | None = None,
    reward: float = 0.0,
    capacity: float = math.inf,
) -> Ints:
    """Return (n,) ranks: heaviest item first, on the least loaded rank. O(n (log n + ranks)).

    The home rank of an item counts as less loaded, by `reward` times the item's weight. The paper's
    text gives ranks no capacity; its public code needs equal numbers of items.
    """
    loads, room = [0.0] * num_ranks, [capacity] * num_ranks
    values: list[float] = weights.tolist()
    homes: list[int] = [-1] * len(values) if home is None else home.tolist()
    rank_of = np.empty(len(values), np.int64)
    order: list[int] = np.argsort(-weights, kind="stable").tolist()
    for item in order:
        weight, at_home = values[item], homes[item]
        least, chosen = math.inf, -1
        for rank, load in enumerate(loads):
            biased = load - reward * weight if rank == at_home else load
            if biased < least and room[rank]:
                least, chosen = biased, rank
        rank_of[item] = chosen
        loads[chosen] += weight
        room[chosen] -= 1
    return rank_of


def paper_blocks(
    block_matrix: npt.ArrayLike,
    ring_degree: int,
    homes: Placement | None = None,
    *,
    reward: float = REWARD,
    capacity: tuple[float, float] | None = None,
) -> BlockPlan:
    """Place query blocks by the sums of rows, key blocks by the sums of columns.

    Source: db-SP, section 4.2.2. Without `homes`, each rank begins with consecutive blocks, as the
    paper assumes. `capacity` is the most query blocks, and the most key blocks, of a rank. Default:
    1/R of all, rounded up, as in the public code.
    """
    matrix = np.asarray(block_matrix, np.float64)
    q_home, kv_home = homes or (
        np.arange(size, dtype=np.int64) * ring_degree // max(size, 1) for size in matrix.shape
    )
    q_most, kv_most = capacity or (-(-size // ring_degree) for size in matrix.shape)
    q_of, kv_of = (
        greedy(matrix.sum(axis=axis), ring_degree, home=home, reward=reward, capacity=most)
        for axis, home, most in ((1, q_home, q_most), (0, kv_home, kv_most))
    )
    return BlockPlan(q_of, kv_of, tile_work(matrix, q_of, kv_of, ring_degree))


def in_order(
    num_heads: int,
    q: BlockLayout,
    kv: BlockLayout,
    ring_degree: int,
    ulysses_degree: int,
    num_kv_heads: int | None = None,
) -> SparsePlan:
    """Return the plan with heads in order that moves no block; its tiles are 0."""
    rings = np.arange(num_heads) * ulysses_degree // max(num_heads, 1)
    ring_of = np.tile(rings, (q.lens.size, 1)).T
    q_of, kv_of = (np.tile(x.home // ulysses_degree, (ulysses_degree, 1)) for x in (q, kv))
    where = ring_of, q_of, kv_of
    tiles = np.zeros((ulysses_degree, ring_degree, ring_degree))
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    return SparsePlan(ring_degree, ulysses_degree, num_kv_heads, q, kv, *where, tiles)


PLANNERS = ("stripe", "minimal_move", "paper", "in_order")
"""Two methods, and two baselines."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The work (H, Q, C) of query blocks; columns are key blocks, or the keys of ring ranks."""

    work: Counts
    lens: Ints  # (C,) tokens of a count of 1
    home: Ints  # (C,) ring rank at which each column is
    q: BlockLayout
    kv: BlockLayout
    ring_degree: int
    ulysses_degree: int
    are_blocks: bool  # columns are key blocks, which may be moved

    @classmethod
    def of(
        cls,
        work: npt.ArrayLike,
        q: BlockLayout,
        kv: BlockLayout,
        ring_degree: int,
        ulysses_degree: int,
    ) -> Self:
        """Check masks, or counts by home ring rank, and make columns from them."""
        work = check_work(work, q.lens.size, kv.lens.size, ring_degree)
        where = q, kv, ring_degree, ulysses_degree
        if work.dtype == np.bool_:
            if ring_degree > 1:
                return cls(work, kv.lens, kv.home // ulysses_degree, *where, True)
            work = block_counts(work, kv_lens=kv.lens)
        ranks = np.arange(ring_degree)
        return cls(work, np.ones_like(ranks), ranks, *where, False)

    @property
    def q_home(self) -> Ints:
        """(Q,) ring rank at which each query block is."""
        return self.q.home // self.ulysses_degree

    def per_block(self) -> Ints:
        """Return (H, Q) work of each query block of each head."""
        if self.are_blocks:
            return block_counts(self.work, kv_lens=self.lens)[:, :, 0] * self.q.lens
        return self.work.sum(axis=2) * self.q.lens

    def matrices(self, ring_of: Ints) -> Floats:
        """Return (U, Q, C) work of rings; `ring_of` is the (H, Q) ring of each block of a head."""
        sums = ring_work(self.work, ring_of, self.ulysses_degree)
        sums *= np.multiply.outer(self.q.lens, self.lens)
        return sums


def plan_under(plan: SparsePlan, work: npt.ArrayLike) -> SparsePlan:
    """Return the same plan with tiles of other work, given as masks or counts."""
    columns = Columns.of(work, plan.q, plan.kv, plan.ring_degree, plan.ulysses_degree)
    if len(columns.work) != len(plan.ring_of):
        raise ConfigError(f"work has {len(columns.work)} heads, the plan {len(plan.ring_of)}")
    column_of = plan.kv_of
    if not columns.are_blocks:
        if (plan.kv_of != plan.kv.home // plan.ulysses_degree).any():
            raise ConfigError("this plan moves keys, but counts are by key home: give the masks")
        column_of = np.tile(columns.home, (plan.ulysses_degree, 1))
    rings = zip(columns.matrices(plan.ring_of), plan.q_of, column_of, strict=True)
    return replace(plan, tiles=np.stack([tile_work(*ring, plan.ring_degree) for ring in rings]))


def sparse_imbalance(
    masks: npt.ArrayLike, ring_degree: int, ulysses_degree: int, plan: SparsePlan | None = None
) -> float:
    """Return rho of db-SP: the slowest rank's work over the mean, summed over rounds.

    Ranks of a ring wait for each other after each of R rounds, and rings wait only at the end. This
    is equation 2 for R = 1, equation 3 for U = 1, and otherwise as in the paper's public code.

    Args:
        masks: (H, Q, K) bool.
        ring_degree: R; 1 is Ulysses.
        ulysses_degree: U; 1 is ring attention.
        plan: The plan to evaluate; work then counts pairs of tokens. Default: heads in order, and
            equal runs of blocks on each ring rank; each block then counts 1.
    """
    masks, degrees = check_masks(masks), (ring_degree, ulysses_degree)
    check_degrees(*degrees)
    if plan is None:
        ones = (np.ones(size, np.int64) for size in masks.shape[1:])
        q, kv = (BlockLayout.contiguous(lens, *degrees) for lens in ones)
        plan = in_order(len(masks), q, kv, *degrees)
    if (plan.ring_degree, plan.ulysses_degree) != degrees:
        planned = f"{plan.ring_degree} x {plan.ulysses_degree} ranks (ring x Ulysses)"
        raise ConfigError(f"a plan for {planned} on a mesh of {ring_degree} x {ulysses_degree}")
    return plan_under(plan, masks).imbalance


@dataclass(frozen=True, slots=True)
class SparsePlanner:
    """Plan block-sparse attention on a mesh of ring x Ulysses ranks.

    Args:
        ring_degree: R.
        ulysses_degree: U.
        method: "stripe" (blocks stay at home), "minimal_move" (see `partition_blocks`), or a
            baseline: "paper" (of db-SP), or "in_order" (heads in order, no block moves).
        target: Slowest rank over the mean of all ranks at which "minimal_move" ends. Where no row
            needs an exchange, it moves nothing if the critical path is already that short.
        cut_above: See `partition_heads`.
        row_work: Pairs of tokens that a rank computes while it receives a row. Heads are split and
            blocks moved only if that saves more work than the exchange of rows costs.
        exchange_work: Pairs of tokens that a rank computes while it starts a call's exchanges.
        reward: See `REWARD`; only for "paper".
    """

    ring_degree: int = 1
    ulysses_degree: int = 1
    method: str = "minimal_move"
    target: float = TARGET
    cut_above: float = 0.01
    row_work: float = 0.0
    exchange_work: float = 0.0
    reward: float = REWARD

    def __post_init__(self) -> None:
        check_degrees(self.ring_degree, self.ulysses_degree)
        amount = number, 0.0, np.inf
        fields(self, method=(choice, *PLANNERS), target=number, reward=number)
        fields(self, cut_above=amount, row_work=amount, exchange_work=amount)

    def plan(
        self,
        work: npt.ArrayLike,
        q: BlockLayout,
        kv: BlockLayout | None = None,
        *,
        num_kv_heads: int | None = None,
    ) -> SparsePlan:
        """Decide which rank computes which query blocks of which heads.

        Args:
            work: (H, Q, K) masks, or (H, Q, R) counts: `block_counts` with the lengths and homes
                of `kv`. With counts, keys stay at home.
            q: The query blocks at home.
            kv: The key blocks at home. Default: `q`.
            num_kv_heads: Number of key-value heads. Default: H.
        """
        kv, degrees = q if kv is None else kv, (self.ring_degree, self.ulysses_degree)
        for name, layout in (("q", q), ("kv", kv)):
            of_type(name, layout, BlockLayout, "a BlockLayout")
        columns = Columns.of(work, q, kv, *degrees)
        num_heads = len(columns.work)
        num_kv_heads = num_heads if num_kv_heads is None else whole("num_kv_heads", num_kv_heads, 1)
        self._check(columns, num_kv_heads)
        if self.method == "in_order":
            return plan_under(in_order(num_heads, q, kv, *degrees, num_kv_heads), work)
        ring_of = self._rings(columns)
        matrices = columns.matrices(ring_of)
        at_home = np.tile(kv.home // self.ulysses_degree, (self.ulysses_degree, 1))

        def build(rings: list[BlockPlan]) -> SparsePlan:
            names = "q_of", "kv_of", "tiles"
            q_of, column_of, tiles = (np.stack([getattr(x, n) for x in rings]) for n in names)
            kv_of = column_of if columns.are_blocks else at_home
            return SparsePlan(*degrees, num_kv_heads, q, kv, ring_of, q_of, kv_of, tiles)

        ring, homes = self.ring_degree, (columns.q_home, columns.home)
        if self.method == "paper":  # places blocks alike in all rings
            alike = paper_blocks(matrices.sum(axis=0), ring, homes, reward=self.reward)
            homes = alike.q_of, alike.kv_of
        still = build([BlockPlan(*homes, tile_work(matrix, *homes, ring)) for matrix in matrices])
        if self.method != "minimal_move":
            return still
        end, mean = self._cost(still), float(still.tiles.sum()) / still.num_ranks
        if still.is_local and end <= max(self.target * mean, mean + self._price(still)):
            return still  # even enough, or not even perfect balance would pay for the exchange
        # Rings with less work than others need not be as even.
        goal = self.target * max(float(matrices.sum()) / len(matrices), 1.0)
        least = (1.0 + self.target) / 2
        targets = [max(goal / max(float(matrix.sum()), 1.0), least) for matrix in matrices]
        where: Any = {"q_home": homes[0], "kv_home": homes[1], "keys_stay": not columns.are_blocks}
        pairs = zip(matrices, targets, strict=True)
        moved = build([partition_blocks(x, ring, target=target, **where) for x, target in pairs])
        return moved if self._cost(moved) <= end else still

    def _cost(self, plan: SparsePlan) -> float:
        """Return the work of the slowest rank, on which ranks wait for their neighbours alone."""
        end = float(coupled_ends(plan.tiles).max())
        return end if plan.is_local else end + self._price(plan)

    def _price(self, plan: SparsePlan) -> float:
        """Return the work that a rank computes while a plan's rows are exchanged.

        An exchange reorders all rows of q, k, v and output, about as fast as a link sends them.
        """
        heads, tokens = (len(plan.ring_of), plan.num_kv_heads), (plan.q, plan.kv)
        rows = sum(
            2.0 * num * np.bincount(layout.home, layout.lens, plan.num_ranks)
            for num, layout in zip(heads, tokens, strict=True)
        )
        return self.exchange_work + self.row_work * float((rows + plan.routed_rows).max())

    def _check(self, columns: Columns, num_kv_heads: int) -> None:
        num_heads, num_ranks = len(columns.work), self.ulysses_degree * self.ring_degree
        if num_heads % num_kv_heads:
            heads = f"{num_heads} heads and {num_kv_heads} key-value heads"
            raise ConfigError(f"{heads}: give a multiple of the key-value heads")
        sides = ("q", columns.q, num_heads), ("kv", columns.kv, num_kv_heads)
        for name, layout, heads in sides:
            if (most := int(layout.home.max(initial=0))) >= num_ranks:
                raise ConfigError(f"{name}.home names rank {most}: there are {num_ranks} ranks")
            if layout.order is not None and len(layout.order) != heads:
                wrong = f"{name}.order of {len(layout.order)} heads for {heads} heads of {name}"
                raise ConfigError(f"{wrong}: give one order per head")
        if self.method == "paper" and self.ring_degree > 1 and not columns.are_blocks:
            wrong = 'method "paper" moves keys, but counts are by key home'
            raise ConfigError(f'{wrong}: give the masks, or use "minimal_move"')

    def _rings(self, columns: Columns) -> Ints:
        """Return (H, Q) ring of every query block of every head."""
        per_block = columns.per_block()
        if self.method == "paper":
            rings_H = greedy(per_block.sum(axis=1), self.ulysses_degree)
            return np.repeat(rings_H[:, None], per_block.shape[1], axis=1)
        # Query blocks take turns by ring rank, so that all ranks of a ring share a cut head.
        order = np.lexsort((columns.q_home, num_before(columns.q_home)))
        num_rows = 2 * int(columns.kv.lens.sum())  # keys and values of a head
        cost = self.row_work * num_rows * self.ulysses_degree / max(int(per_block.sum()), 1)
        least = max(self.cut_above, cost)
        heads = partition_heads(per_block[:, order], self.ulysses_degree, cut_above=least)
        ring_of = np.empty_like(heads.rank_of)
        ring_of[:, order] = heads.rank_of
        return ring_of
