"""Index tables that take rows of heads from home to where they are computed, and back.

A piece is a run of rows: the tokens of one block, of one head of one batch item. At home a rank's
tensor (batch, heads, tokens, D) lies as rows (batch, head, token), its tokens in the order of the
sequence; q is followed by k and v. At their destination rows lie by tensor, batch item, head and
block. Where heads have token orders of their own, the tokens of a block are not together at home,
and each is a piece. Pieces are listed in the order of destination, at both ends alike: so what
arrives from one rank is in order, and one sort by rank at either end makes the tables.

Legend: n blocks, N ranks, X rows of a table, S runs of tokens, P pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bascule.arrays import Ints
from bascule.plan.routes import Route, ranges, sums_by
from bascule.plan.sparse.block_layout import BlockLayout

Ranks = npt.NDArray[np.int16]
"""Small, as there may be one a token and head; and numpy sorts them in linear time."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """The (head, block) rows of a rank, in the order in which they lie; every batch item has them.

    Attributes:
        heads: (rows,) head of each: a query head, or a key-value head.
        blocks: (rows,) block of the sequence.
        lens: (rows,) tokens of it.
    """

    heads: Ints
    blocks: Ints
    lens: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Travel:
    """Where the blocks of some heads of a tensor go. A head may go to several places.

    Attributes:
        layout: The blocks at home.
        num_heads: Heads of the tensor.
        heads: (X,) head of each row of the table.
        rank_of: (X, n) rank to which each block of it goes.
    """

    layout: BlockLayout
    num_heads: int
    heads: Ints
    rank_of: Ints

    def runs(self) -> tuple[Ints, Ints, Ranks, Ranks]:
        """Tokens that travel together: (S,) how many; (X, S) which run, who has it, who gets it."""
        layout, dest = self.layout, self.rank_of.astype(np.int16)
        home, lens = layout.home.astype(np.int16), layout.lens
        if layout.order is None:
            runs = np.broadcast_to(np.arange(lens.size), dest.shape)
        else:  # Every token is a run of its own.
            runs = layout.order[self.heads]
            home, dest = np.repeat(home, lens), np.repeat(dest, lens, axis=1)
            lens = np.ones_like(home, np.int64)
        return lens, runs, home[runs], dest

    def rows_between(self, num_ranks: int) -> Ints:
        """(num_ranks, num_ranks) rows that go from each rank to each."""
        lens, runs, source, dest = self.runs()
        pairs = (source.astype(np.int64) * num_ranks + dest).ravel()
        return sums_by(pairs, lens[runs].ravel(), num_ranks**2).reshape(num_ranks, num_ranks)

    def pieces(
        self, rank: int, num_ranks: int, copies: int, base: Ints
    ) -> tuple[Ints, Ints, Ranks, Ranks]:
        """What a rank sends or gets of equal tensors that lie one after another.

        Args:
            rank: The rank.
            num_ranks: N.
            copies: Tensors.
            base: (N,) first row of them on each rank.

        Returns:
            (P,) each: first row at home, number of rows, rank that has them, rank that gets them.
        """
        offsets, tokens = self.layout.offsets(num_ranks)
        if self.layout.order is not None:
            offsets = ranges(offsets, self.layout.lens)
        lens, runs, source, dest = self.runs()
        row, place = np.nonzero((source == rank) | (dest == rank))
        source, dest, run = source[row, place], dest[row, place], runs[row, place]
        heads = np.arange(copies)[:, None] * self.num_heads + self.heads[row]
        start = heads * tokens[source] + (base[source] + offsets[run])
        lens = np.tile(lens[run], copies)
        return start.ravel(), lens, np.tile(source, copies), np.tile(dest, copies)


def route_of(travels: Sequence[tuple[Travel, int]], rank: int, num_ranks: int) -> Route:
    """One rank's part in the exchange of several tensors, each with its number of copies."""
    parts, base = list[tuple[Ints, Ints, Ranks, Ranks]](), np.zeros(num_ranks, np.int64)
    for travel, copies in travels:
        parts.append(travel.pieces(rank, num_ranks, copies, base))
        base = base + copies * travel.num_heads * travel.layout.offsets(num_ranks)[1]
    start, lens, source, dest = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Route.of_items(source, dest, lens, rank, num_ranks, starts=start)
