"""How plans for block-sparse attention are made, and kept across denoising steps.

Legend: H heads, Q query blocks, K key blocks, U rings (Ulysses ranks), R ranks of a ring.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.errors import ConfigError
from bascule.plan.checks import MAX_WHOLE, integer, number, of_type, shown
from bascule.plan.sparse.baselines import REWARD, in_order, paper_blocks, paper_heads
from bascule.plan.sparse.counts import (
    Work,
    barrier_imbalance,
    block_counts,
    check_masks,
    check_ranks,
    check_work,
    coupled_imbalance,
    ring_work,
    tile_work,
)
from bascule.plan.sparse.heads import partition_heads
from bascule.plan.sparse.layout import BlockLayout, check_degrees
from bascule.plan.sparse.partition import METHODS, TARGET, BlockPlan, partition_blocks
from bascule.plan.sparse.plan import SparsePlan


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Work by query block and column: key blocks, or the keys of each ring rank.

    Attributes:
        work: (H, Q, C) masks or counts.
        lens: (C,) tokens that a count of one stands for.
        home: (C,) ring rank of each column at home.
        q: The query blocks at home.
        kv: The key blocks at home.
        ulysses_degree: U.
        ring_degree: R.
        are_blocks: Whether columns are key blocks, which may be moved.
    """

    work: Work
    lens: Ints
    home: Ints
    q: BlockLayout
    kv: BlockLayout
    ulysses_degree: int
    ring_degree: int
    are_blocks: bool

    @classmethod
    def of(
        cls,
        work: npt.ArrayLike,
        q: BlockLayout,
        kv: BlockLayout,
        ulysses_degree: int,
        ring_degree: int,
    ) -> Self:
        """The columns of masks, or of counts by home ring rank.

        Raises:
            ConfigError: The work does not fit the layouts, or is more than is counted exactly.
        """
        for name, layout in (("q", q), ("kv", kv)):
            of_type(name, layout, BlockLayout, "a BlockLayout")
            check_ranks(f"{name}.home", layout.home, ulysses_degree * ring_degree)
        work = check_work(work, ring_degree, kv.lens.size)
        if work.shape[1] != q.lens.size:
            raise ConfigError(f"work of {work.shape[1]} query blocks for a layout of {q.lens.size}")
        _check_amount(work, int(q.lens.sum()), int(kv.lens.sum()))
        where = q, kv, ulysses_degree, ring_degree
        if work.dtype == np.bool_:
            if ring_degree > 1:
                return cls(work, kv.lens, kv.home // ulysses_degree, *where, True)
            work = block_counts(work, kv_lens=kv.lens)
        ranks = np.arange(ring_degree)
        return cls(work, np.ones_like(ranks), ranks, *where, False)

    @property
    def q_home(self) -> Ints:
        """(Q,) ring rank of each query block at home."""
        return self.q.home // self.ulysses_degree

    def per_block(self) -> Ints:
        """(H, Q) work of each query block of each head."""
        if self.are_blocks:
            return block_counts(self.work, kv_lens=self.lens)[:, :, 0] * self.q.lens
        return self.work.sum(axis=2) * self.q.lens

    def matrices(self, ring_of: Ints) -> Floats:
        """(U, Q, C) work of each ring, given the ring (H, Q) of each query block of each head."""
        sums = ring_work(self.work, ring_of, self.ulysses_degree)
        sums *= np.multiply.outer(self.q.lens, self.lens)
        return sums

    def tiles(self, matrices: Floats, q_of: Ints, column_of: Ints) -> Floats:
        """(U, R, R) from (U, Q, C), (U, Q) and (U, C)."""
        rings = zip(matrices, q_of, column_of, strict=True)
        return np.stack([tile_work(*ring, self.ring_degree) for ring in rings])

    def plan(self, ring_of: Ints, rings: Sequence[BlockPlan], num_kv_heads: int) -> SparsePlan:
        """The plan of these rings.

        Args:
            ring_of: (H, Q) ring that computes a query block of a head.
            rings: (U,) where query blocks and columns are in each.
            num_kv_heads: Key-value heads.
        """
        q_of, column_of = (
            np.stack([getattr(x, name) for x in rings]) for name in ("q_of", "kv_of")
        )
        degrees = self.ulysses_degree, self.ring_degree
        kv_of = column_of if self.are_blocks else _kv_at_home(self.kv, self.ulysses_degree)
        tiles = np.stack([x.tiles for x in rings])
        return SparsePlan(*degrees, num_kv_heads, self.q, self.kv, ring_of, q_of, kv_of, tiles)


def plan_under(plan: SparsePlan, work: npt.ArrayLike) -> SparsePlan:
    """The same decision, with other work in its tiles; errors as of `tiles_under`."""
    return replace(plan, tiles=tiles_under(plan, work))


def tiles_under(plan: SparsePlan, work: npt.ArrayLike) -> Floats:
    """(U, R, R) work of the tiles of a plan under masks or counts other than its own.

    Raises:
        ConfigError: The work does not fit the plan; or it is counts, and the plan moves keys.
    """
    of_type("plan", plan, SparsePlan, "a SparsePlan, as SparsePlanner.plan makes them")
    columns = Columns.of(work, plan.q, plan.kv, plan.ulysses_degree, plan.ring_degree)
    if columns.work.shape[0] != plan.ring_of.shape[0]:
        raise ConfigError(
            f"work of {columns.work.shape[0]} heads for a plan of {plan.ring_of.shape[0]}"
        )
    column_of = plan.kv_of
    if not columns.are_blocks:
        if (plan.kv_of != _kv_at_home(plan.kv, plan.ulysses_degree)).any():
            raise ConfigError(
                "this plan moves keys, and counts are by the ring rank where keys are at home: "
                "give the masks, or make plans from counts"
            )
        column_of = np.tile(columns.home, (plan.ulysses_degree, 1))
    return columns.tiles(columns.matrices(plan.ring_of), plan.q_of, column_of)


def _kv_at_home(kv: BlockLayout, ulysses_degree: int) -> Ints:
    return np.tile(kv.home // ulysses_degree, (ulysses_degree, 1))


def _check_amount(work: Work, q_tokens: int, kv_tokens: int) -> None:
    """Refuse counts of more keys than there are, and more work than sums are exact for."""
    if work.dtype != np.bool_ and (most := int(work.sum(axis=2).max(initial=0))) > kv_tokens:
        raise ConfigError(
            f"work of {most} keys for a query block, but there are {kv_tokens} tokens of keys: "
            "count tokens, with block_counts(kv_lens=..)"
        )
    if (pairs := work.shape[0] * q_tokens * kv_tokens) > MAX_WHOLE:
        raise ConfigError(
            f"{work.shape[0]} heads of {q_tokens} query and {kv_tokens} key tokens are {pairs} "
            "pairs, and work is counted exactly up to 2^53 of them: give shorter blocks"
        )


def sparse_imbalance(
    masks: npt.ArrayLike, ulysses_degree: int, ring_degree: int, plan: SparsePlan | None = None
) -> float:
    """Rho of db-SP: the slowest rank's work over the mean, summed over rounds.

    Ranks of a ring wait for each other after each of its R rounds, rings only at the end: equation
    2 with R = 1, equation 3 with U = 1, and else the reading of the paper's public code. Equation 1
    taken literally would have all ranks wait for each other after every round.

    Args:
        masks: (H, Q, K) bool.
        ulysses_degree: U; 1 is ring attention.
        ring_degree: R; 1 is Ulysses.
        plan: Who computes what; work is then in pairs of tokens. Default: heads in their order, and
            runs of blocks on each ring rank, as even as their numbers allow; blocks count 1.

    Raises:
        ConfigError: The masks are none, or the plan is for another mesh or other masks.
    """
    return barrier_imbalance(_tiles_of(masks, ulysses_degree, ring_degree, plan))


def critical_path_imbalance(
    masks: npt.ArrayLike, ulysses_degree: int, ring_degree: int, plan: SparsePlan | None = None
) -> float:
    """The same for a ring whose ranks wait for their neighbours alone, as they in fact do.

    Takes the same arguments as `sparse_imbalance`, and is at most as large.
    """
    return coupled_imbalance(_tiles_of(masks, ulysses_degree, ring_degree, plan))


def _tiles_of(
    masks: npt.ArrayLike, ulysses_degree: int, ring_degree: int, plan: SparsePlan | None
) -> Floats:
    checked = check_masks(masks)
    check_degrees(ulysses_degree, ring_degree)
    if plan is None:
        degrees = ulysses_degree, ring_degree
        ones = (np.ones(size, np.int64) for size in checked.shape[1:])
        q, kv = (BlockLayout.contiguous(lens, *degrees) for lens in ones)
        plan = in_order(len(checked), q, kv, *degrees)
    of_type("plan", plan, SparsePlan, "a SparsePlan, as SparsePlanner.plan makes them")
    if (plan.ulysses_degree, plan.ring_degree) != (ulysses_degree, ring_degree):
        raise ConfigError(
            f"a plan for {plan.ulysses_degree} x {plan.ring_degree} ranks (Ulysses x ring) on a "
            f"mesh of {ulysses_degree} x {ring_degree}"
        )
    return tiles_under(plan, checked)


PLANNERS = (*METHODS, "paper", "in_order")
"""The methods, and what they are compared with."""


@dataclass(frozen=True, slots=True)
class SparsePlanner:
    """How plans are made.

    Args:
        ulysses_degree: U.
        ring_degree: R.
        method: How blocks are placed: "stripe" or "minimal_move", as for `partition_blocks`. To
            compare with: "paper" is the method of db-SP, "in_order" leaves heads in their order and
            blocks where they are, as without a plan.
        target: Imbalance at which "minimal_move" moves no more, over the mean work of all ranks.
        cut_above: See `partition_heads`.
        reward: For "paper": how much less loaded a block's home rank counts, in blocks like it.

    Raises:
        ConfigError: A value is out of range.
    """

    ulysses_degree: int = 1
    ring_degree: int = 1
    method: str = "minimal_move"
    target: float = TARGET
    cut_above: float = 0.01
    reward: float = REWARD

    def __post_init__(self) -> None:
        check_degrees(self.ulysses_degree, self.ring_degree)
        if of_type("method", self.method, str, f"one of {PLANNERS}") not in PLANNERS:
            raise ConfigError(f"method {shown(self.method)}: plans are made by one of {PLANNERS}")
        for name in ("target", "reward"):
            number(f"SparsePlanner({name}", getattr(self, name))
        number("SparsePlanner(cut_above", self.cut_above, most=np.inf)

    def plan(
        self,
        work: npt.ArrayLike,
        q: BlockLayout,
        kv: BlockLayout | None = None,
        *,
        num_kv_heads: int | None = None,
    ) -> SparsePlan:
        """Decide who computes what.

        Args:
            work: (H, Q, K) masks, or (H, Q, R) counts by home ring rank: `block_counts` with
                the lengths of `kv`. With counts, keys stay at home.
            q: The query blocks at home.
            kv: The key blocks at home. Default: those of the queries.
            num_kv_heads: Key-value heads. Default: H.

        Raises:
            ConfigError: The arguments do not fit each other.
        """
        kv, degrees = q if kv is None else kv, (self.ulysses_degree, self.ring_degree)
        columns = Columns.of(work, q, kv, *degrees)
        num_heads = columns.work.shape[0]
        num_kv = num_heads if num_kv_heads is None else integer("num_kv_heads", num_kv_heads)
        if num_kv < 1 or num_heads % num_kv:
            raise ConfigError(
                f"{num_heads} heads and {num_kv} key-value heads: the former must be a multiple of "
                "the latter"
            )
        if self.method == "in_order":
            return plan_under(in_order(num_heads, q, kv, *degrees, num_kv_heads=num_kv), work)
        if self.method == "paper":
            return paper_plan(columns, num_kv_heads=num_kv, reward=self.reward)
        ring_of = self._rings(columns)
        matrices = columns.matrices(ring_of)
        # Rings with less work than others need not be as even.
        mean = max(float(matrices.sum()) / len(matrices), 1.0)
        least = (1.0 + self.target) / 2
        rings = [
            partition_blocks(
                matrix,
                self.ring_degree,
                method=self.method,
                q_home=columns.q_home,
                kv_home=columns.home,
                target=max(self.target * mean / max(float(matrix.sum()), 1.0), least),
                keys_stay=not columns.are_blocks,
            )
            for matrix in matrices
        ]
        return columns.plan(ring_of, rings, num_kv)

    def _rings(self, columns: Columns) -> Ints:
        """(H, Q) ring of every query block of every head."""
        # In turns from the ring ranks, so that every rank of a ring gets its share of a cut head.
        order = _dealt(columns.q_home)
        heads = partition_heads(
            columns.per_block()[:, order], self.ulysses_degree, cut_above=self.cut_above
        )
        ring_of = np.empty_like(heads.rank_of)
        ring_of[:, order] = heads.rank_of
        return ring_of


def _dealt(ranks: Ints) -> Ints:
    """(n,) items in turns from the ranks: the first of each rank, the second of each, ..."""
    by_rank = np.argsort(ranks, kind="stable")
    first = np.searchsorted(ranks[by_rank], ranks[by_rank])
    place = np.empty_like(by_rank)
    place[by_rank] = np.arange(ranks.size) - first
    return np.lexsort((ranks, place))


def paper_plan(columns: Columns, *, num_kv_heads: int, reward: float = REWARD) -> SparsePlan:
    """A plan by the paper: whole heads, and one placement of blocks that all rings share.

    Args:
        columns: The work of masks: the paper moves keys.
        num_kv_heads: Key-value heads.
        reward: As for `paper_blocks`.

    Raises:
        ConfigError: The work is counts by ring rank, so that keys cannot move.
    """
    if columns.ring_degree > 1 and not columns.are_blocks:
        raise ConfigError(
            'method "paper" moves keys, and counts are by the ring rank where keys are at home: '
            'give the masks, or use "minimal_move"'
        )
    per_block = columns.per_block()
    rings = paper_heads(per_block.sum(axis=1), columns.ulysses_degree)
    ring_of = np.repeat(rings[:, None], per_block.shape[1], axis=1)
    matrices = columns.matrices(ring_of)
    shared = paper_blocks(
        matrices.sum(axis=0),
        columns.ring_degree,
        q_home=columns.q_home,
        kv_home=columns.home,
        reward=reward,
    )
    placed = shared.q_of, shared.kv_of
    rings = [
        replace(shared, tiles=tile_work(matrix, *placed, columns.ring_degree))
        for matrix in matrices
    ]
    return columns.plan(ring_of, rings, num_kv_heads)
