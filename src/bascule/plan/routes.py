"""Where every token goes: chunks of sequences on ranks, and the index tables that move them.

Two layouts, both in the order of global sequence ids (rank 0's sequences first, then rank 1's,
...): the *source* layout, as the data loader made it, and the *compute* layout, in which a rank of
a bag holds one chunk of each of the bag's sequences. Since both follow the same order and an
all-to-all delivers in the order of the source ranks, what arrives is already in place: `route`
gathers before the exchange and `restore` after it, one pass over the data each. Only where a rank
has two chunks of a sequence, what arrives is put in place by a second pass.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bascule.arrays import Ints

Ranks = npt.NDArray[np.integer[Any]]
"""Numbers of ranks; small ones, of which there may be one a token, are sorted in linear time."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One rank's part in an exchange: `all_to_all(x[send_index])[recv_index]`.

    Attributes:
        send_index: (tokens sent,) row to send at each place; None leaves the order as it is.
        send_splits: (num_ranks,) rows to each rank.
        recv_splits: (num_ranks,) rows from each rank.
        recv_index: (tokens received,) received row at each place; None leaves the order as it is.
    """

    send_index: Ints | None
    send_splits: Ints
    recv_splits: Ints
    recv_index: Ints | None

    @classmethod
    def of_items(
        cls,
        source: Ranks,
        dest: Ranks,
        lens: Ints,
        rank: int,
        num_ranks: int,
        *,
        starts: Ints | None = None,
    ) -> "Route":
        """The part of one rank in moving items, each a run of rows, from rank to rank.

        Items are listed in the order in which they are to lie, on every rank alike. Items that
        neither come from this rank nor go to it may be left out. O(items log items + rows of the
        rank).

        Args:
            source: (n,) rank that has each item.
            dest: (n,) rank that gets it. An item that goes to several ranks is listed for each.
            lens: (n,) its rows.
            rank: This rank.
            num_ranks: All ranks.
            starts: (n,) its first row on the rank that has it. Default: items lie as listed.
        """
        sent, received = np.flatnonzero(source == rank), np.flatnonzero(dest == rank)
        first = cumulative(lens[sent])[:-1] if starts is None else starts[sent]
        send_index, send_splits = sending(first, lens[sent], dest[sent], num_ranks)
        arrival = np.argsort(source[received], kind="stable")
        places = np.empty_like(arrival)
        places[arrival] = cumulative(lens[received[arrival]])[:-1]
        return cls(
            send_index=send_index,
            send_splits=send_splits,
            recv_splits=sums_by(source[received], lens[received], num_ranks),
            recv_index=ranges(places, lens[received]),
        )

    @property
    def lean(self) -> "Route":
        """The same with None for an index that leaves the order as it is: rows are not copied."""
        args = _unless_in_order(self.send_index), self.send_splits, self.recv_splits
        return Route(*args, _unless_in_order(self.recv_index))

    def inverse(self) -> "Route":
        """The exchange that brings every row back to where it came from."""
        return Route(
            send_index=_inverse_permutation(self.recv_index),
            send_splits=self.recv_splits,
            recv_splits=self.send_splits,
            recv_index=_inverse_permutation(self.send_index),
        )


@dataclass(frozen=True, slots=True, eq=False)
class LocalLayout:
    """What one rank computes on: chunks of the sequences of its bag, packed without padding.

    A rank has a chunk of each sequence, or of each of its documents. In a bag with a ring, under
    causal masks, it has two: first the early chunks of all, then their late ones.

    Attributes:
        seq_ids: (n,) global id of each chunk's sequence, ascending (twice, where there are early
            and late ones); the same on all ranks of the bag.
        seq_lens: (n,) the whole lengths of these sequences.
        chunk_starts: (n,) position of each chunk in its sequence.
        chunk_lens: (n,) tokens of it; may be 0.
        cu_seqlens: (n + 1,) int32, bounds of the chunks on this rank.
        positions: (T,) position of each local token in its sequence.
        slots: (T,) index into `seq_ids` of each local token.
    """

    seq_ids: Ints
    seq_lens: Ints
    chunk_starts: Ints
    chunk_lens: Ints
    cu_seqlens: npt.NDArray[np.int32]
    positions: Ints
    slots: Ints


def chunk_starts(seq_lens: Ints, bag_sizes: Ints, rotations: Ints, index: npt.ArrayLike) -> Ints:
    """Position at which chunk `index` of each sequence begins; `index = bag size` gives its length.

    A sequence of L tokens in a bag of G gives every rank L // G tokens; the remainder goes one
    token a rank to the L % G ranks from `rotation` on, cyclically. All arguments broadcast.
    """
    base, extra = seq_lens // bag_sizes, seq_lens % bag_sizes
    before = np.asarray(index, dtype=np.int64)
    straight = np.clip(before - rotations, 0, extra)
    wrapped = np.minimum(before, np.maximum(rotations + extra - bag_sizes, 0))
    return before * base + straight + wrapped


def rotations(seq_lens: Ints, bag_of: Ints, bag_sizes: Ints) -> Ints:
    """Rank in its bag at which each sequence's remainder starts: where the previous one's ended.

    Hence the tokens of the ranks of a bag differ by at most one. O(n log n) in the number of
    sequences.
    """
    sizes = bag_sizes[bag_of]
    extra = seq_lens % sizes
    order = np.argsort(bag_of, kind="stable")
    before = np.cumsum(extra[order]) - extra[order]
    sorted_bags = bag_of[order]
    is_first = np.ones(sorted_bags.size, dtype=bool)
    is_first[1:] = sorted_bags[1:] != sorted_bags[:-1]
    bag_start = np.maximum.accumulate(np.where(is_first, before, 0))
    result = np.empty_like(seq_lens)
    result[order] = (before - bag_start) % sizes[order]
    return result


def sending(first: Ints, lens: Ints, dest: Ranks, num_ranks: int) -> tuple[Ints, Ints]:
    """Row to send at each place, and rows to each rank: by destination, then as listed.

    Args:
        first: (n,) first row of each item.
        lens: (n,) its rows.
        dest: (n,) rank that gets it.
        num_ranks: All ranks.
    """
    order = np.argsort(dest, kind="stable")
    return ranges(first[order], lens[order]), sums_by(dest, lens, num_ranks)


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """The concatenation of `arange(start, start + length)`."""
    used = lengths > 0
    starts, lengths = starts[used], lengths[used]
    ends = np.cumsum(lengths)
    # A running sum, in place, over steps of one with a jump to where each range begins.
    steps = np.ones(ends[-1] if ends.size else 0, dtype=np.int64)
    steps[:1] = starts[:1]
    steps[ends[:-1]] = starts[1:] - starts[:-1] - lengths[:-1] + 1
    return np.cumsum(steps, out=steps)


def cumulative(lengths: Ints) -> Ints:
    """(n + 1,) bounds of consecutive pieces of these lengths."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def sums_by(groups: Ranks, values: Ints, num_groups: int) -> Ints:
    """(num_groups,) sum of the values in each group; exact below 2^53."""
    return np.bincount(groups, weights=values, minlength=num_groups).astype(np.int64)


def frozen(array: Ints) -> Ints:
    """The same array, read-only from here on."""
    array.flags.writeable = False
    return array


def _unless_in_order(index: Ints | None) -> Ints | None:
    in_order = index is None or np.array_equal(index, np.arange(index.size))
    return None if in_order else index


def _inverse_permutation(index: Ints | None) -> Ints | None:
    if index is None:
        return None
    inverse = np.empty_like(index)
    inverse[index] = np.arange(index.size)
    return inverse
