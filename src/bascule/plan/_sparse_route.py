"""Index tables that take rows of heads from home to where they are computed, and back.

A piece is a run of rows: the tokens of one block, of one head of one batch item. At home a rank's
tensor (batch, heads, tokens, D) lies as rows (batch, head, token), its tokens in the order of the
sequence; q is followed by k and v. At their destination rows lie by tensor, batch item, head and
block. Pieces are listed in the order of destination, and both ends take it from the same list: so
what arrives from one rank is in order, and one sort by rank at either end makes the tables.

Legend: n blocks, N ranks, X rows of a table, P pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from bascule.errors import ConfigError
from bascule.plan._sparse_layout import BlockLayout
from bascule.plan.layout import Ints, Route, cumulative, ranges, sums_by


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
    """Where the blocks of some heads of one tensor go. A head may go to several places.

    Attributes:
        layout: The blocks at home.
        num_heads: Heads of the tensor.
        heads: (X,) head of each row of the table.
        rank_of: (X, n) rank to which each block of it goes; -1: not at all.
        order: (num_heads, tokens) token at each place of a head, if its blocks are cut from another
            order than that of the sequence.
    """

    layout: BlockLayout
    num_heads: int
    heads: Ints
    rank_of: Ints
    order: Ints | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Runs of rows that travel. All (P,).

    Attributes:
        source: Rank that has it.
        start: First row of it there.
        lens: Rows.
        dest: Rank that gets it.
    """

    source: Ints
    start: Ints
    lens: Ints
    dest: Ints

    @classmethod
    def of(cls, travels: Sequence[Travel], batch: int, num_ranks: int) -> Self:
        """The pieces of several tensors that lie one after another."""
        parts: list[tuple[Ints, Ints, Ints, Ints]] = []
        base = np.zeros(num_ranks, np.int64)
        for travel in travels:
            offsets, tokens = travel.layout.offsets(num_ranks)
            source, offset, lens, dest = _runs(travel, offsets)
            items = np.arange(batch)[:, None, None]
            heads = items * travel.num_heads + travel.heads[:, None]
            start = base[source] + heads * tokens[source] + offset
            shape, used = start.shape, np.broadcast_to(dest >= 0, start.shape)
            arrays = (np.broadcast_to(x, shape)[used] for x in (source, start, lens, dest))
            parts.append(tuple(arrays))  # pyright: ignore[reportArgumentType]
            base = base + batch * travel.num_heads * tokens
        return cls(*(np.concatenate(part) for part in zip(*parts, strict=True)))

    def route(self, rank: int, num_ranks: int) -> Route:
        """One rank's part in the exchange."""
        sent = np.flatnonzero(self.source == rank)
        sent = sent[_by_rank(self.dest[sent])]
        received = np.flatnonzero(self.dest == rank)
        arrival = _by_rank(self.source[received])
        places = np.empty_like(arrival)
        places[arrival] = cumulative(self.lens[received[arrival]])[:-1]
        return Route(
            send_index=ranges(self.start[sent], self.lens[sent]),
            send_splits=sums_by(self.dest[sent], self.lens[sent], num_ranks),
            recv_splits=sums_by(self.source[received], self.lens[received], num_ranks),
            recv_index=ranges(places, self.lens[received]),
        )


def check_order(name: str, order: npt.ArrayLike, num_heads: int, num_tokens: int) -> Ints:
    """Token orders of all heads.

    Raises:
        ConfigError: They are not (heads, tokens), or one is no permutation.
    """
    array = np.asarray(order)
    if array.shape != (num_heads, num_tokens) or array.dtype.kind not in "iu":
        raise ConfigError(
            f"{name} of shape {array.shape} and dtype {array.dtype}: give integers ({num_heads}, "
            f"{num_tokens}), the token at each place of each head"
        )
    wrong = np.flatnonzero((np.sort(array, axis=1) != np.arange(num_tokens)).any(axis=1))
    if wrong.size:
        raise ConfigError(f"{name}[{wrong[0]}] is not an order of the {num_tokens} tokens")
    return array.astype(np.int64)


def _runs(travel: Travel, offsets: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Source, offset in the source's tokens, length and destination; broadcast to (X, runs)."""
    layout = travel.layout
    if travel.order is None:
        return layout.home, offsets, layout.lens, travel.rank_of
    # Every token is a run of its own.
    home, first = np.repeat(layout.home, layout.lens), ranges(offsets, layout.lens)
    tokens = travel.order[travel.heads]
    dest = np.repeat(travel.rank_of, layout.lens, axis=1)
    return home[tokens], first[tokens], np.ones(1, np.int64), dest


def _by_rank(ranks: Ints) -> Ints:
    """Stable order by rank; numpy sorts small integers in linear time."""
    return np.argsort(ranks.astype(np.int16), kind="stable")
