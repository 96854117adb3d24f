"""Masks or counts as one thing: work by query block and column.

Legend: H heads, Q query blocks, K key blocks, C columns (key blocks, or ring ranks), U rings, R
ranks of a ring.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from bascule.errors import ConfigError
from bascule.plan.checks import MAX_WHOLE, of_type
from bascule.plan.routes import Ints
from bascule.plan.sparse.block_layout import BlockLayout
from bascule.plan.sparse.counts import (
    Floats,
    Work,
    block_counts,
    check_ranks,
    check_work,
    ring_work,
)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Work by query block and column: key blocks, or the keys of each ring rank.

    Attributes:
        work: (H, Q, C) masks or counts.
        lens: (C,) tokens that a count of one stands for.
        home: (C,) ring rank of each column at home.
        q_lens: (Q,) tokens of each query block.
        q_home: (Q,) ring rank of each query block at home.
        are_blocks: Whether columns are key blocks, which may be moved.
    """

    work: Work
    lens: Ints
    home: Ints
    q_lens: Ints
    q_home: Ints
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
            of_type(name, layout, BlockLayout, "a BlockLayout: blocks and where they are")
            check_ranks(f"{name}.home", layout.home, ulysses_degree * ring_degree)
        work = check_work(work, ring_degree, kv.lens.size)
        if work.shape[1] != q.lens.size:
            raise ConfigError(f"work of {work.shape[1]} query blocks for a layout of {q.lens.size}")
        _check_amount(work, int(q.lens.sum()), int(kv.lens.sum()))
        q_home, kv_home = q.home // ulysses_degree, kv.home // ulysses_degree
        if work.dtype == np.bool_:
            if ring_degree > 1:
                return cls(work, kv.lens, kv_home, q.lens, q_home, True)
            work = block_counts(work, kv_lens=kv.lens)
        ranks = np.arange(ring_degree)
        return cls(work, np.ones_like(ranks), ranks, q.lens, q_home, False)

    def per_block(self) -> Ints:
        """(H, Q) work of each query block of each head."""
        if self.are_blocks:
            return block_counts(self.work, kv_lens=self.lens)[:, :, 0] * self.q_lens
        return self.work.sum(axis=2) * self.q_lens

    def matrices(self, ring_of: Ints, ulysses_degree: int) -> Floats:
        """(U, Q, C) work of each ring."""
        sums = ring_work(self.work, ring_of, ulysses_degree)
        sums *= np.multiply.outer(self.q_lens, self.lens)
        return sums


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
