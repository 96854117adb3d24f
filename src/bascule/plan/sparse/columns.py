"""Masks or counts as one thing: work by query block and column; and plans with that work.

Legend: H heads, Q query blocks, K key blocks, C columns (key blocks, or ring ranks), U rings, R
ranks of a ring.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.errors import ConfigError
from bascule.plan.checks import MAX_WHOLE, of_type
from bascule.plan.sparse.block_layout import BlockLayout
from bascule.plan.sparse.block_partition import BlockPlan
from bascule.plan.sparse.counts import (
    Work,
    block_counts,
    check_ranks,
    check_work,
    ring_work,
    tile_work,
)
from bascule.plan.sparse.sparse_plan import SparsePlan


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
