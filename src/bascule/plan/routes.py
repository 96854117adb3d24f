"""Split sequences into chunks on ranks, and make the index tables that move tokens there.

Two layouts follow the order of global sequence ids: *source* is as loaded; in *compute*, each rank
of a bag has one chunk of each of the bag's sequences. For example, ranks 0 and 1 loaded sequences A
of six tokens and B of two, and both sequences go to a bag of these two ranks::

                     rank 0              rank 1
    source           A0 A1 A2 A3 A4 A5   B0 B1
    g2n1             A0 A1 A2 B0         A3 A4 A5 B1
    g1r2n1, causal   A0 A1 A5 B1         A2 A3 A4 B0

A bag of G * R ranks splits a sequence into G * R chunks. Ring rank r is a group of G ranks that
share heads, and has the G chunks from chunk r G on. Causal masks need twice as many chunks: ring
rank r then has the r-th and the (2 R - 1 - r)-th run of G chunks, early chunks first (zigzag), so
that all have the same work. Documents that do not see each other are split separately.

An all-to-all delivers in the order of source ranks. Only if a rank has two chunks of a sequence, a
second pass puts them in place.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from bascule.arrays import Ints, Ranks, cumulative, ranges, sums_by
from bascule.plan.masks import Masks
from bascule.plan.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One rank's part in an exchange: `all_to_all(x[send_index])[recv_index]`."""

    send_index: Ints | None  # (rows sent,) row to send at each place; None keeps the order
    send_splits: Ints  # (num_ranks,) rows to each rank
    recv_splits: Ints  # (num_ranks,) rows from each rank
    recv_index: Ints | None  # (rows received,) received row at each place; None keeps the order

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
        """Return a rank's part in sending (n,) items of `lens` rows; they arrive in listed order.

        List an item once per receiver. `starts` are the items' first rows at the senders, or None.
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

    def inverse(self) -> "Route":
        """Return the exchange that brings every row back to its sender."""
        return Route(
            send_index=_inverse_permutation(self.recv_index),
            send_splits=self.recv_splits,
            recv_splits=self.send_splits,
            recv_index=_inverse_permutation(self.send_index),
        )


@dataclass(frozen=True, slots=True, eq=False)
class LocalLayout:
    """The n chunks that one rank computes on, packed without padding.

    In a bag with a ring and causal masks, all early chunks precede all late chunks.
    """

    seq_ids: Ints  # (n,) global ids of the sequences, ascending; alike on all ranks of the bag
    seq_lens: Ints  # (n,) tokens of each whole sequence
    chunk_starts: Ints  # (n,) position of each chunk in its sequence
    chunk_lens: Ints  # (n,) tokens of each chunk; may be 0
    cu_seqlens: npt.NDArray[np.int32]  # (n + 1,) bounds of the chunks on this rank
    positions: Ints  # (T,) position of each local token in its sequence
    slots: Ints  # (T,) index into `seq_ids` of each local token


def chunk_starts(seq_lens: Ints, bag_sizes: Ints, rotations: Ints, index: npt.ArrayLike) -> Ints:
    """Return where chunk `index` of each sequence begins; `index = bag size` gives its length.

    Ranks get L // G tokens; from the rotation on, L % G ranks get one more. Arguments broadcast.
    """
    base, extra = seq_lens // bag_sizes, seq_lens % bag_sizes
    before = np.asarray(index, dtype=np.int64)
    straight = np.clip(before - rotations, 0, extra)
    wrapped = np.minimum(before, np.maximum(rotations + extra - bag_sizes, 0))
    return before * base + straight + wrapped


def rotations(seq_lens: Ints, bag_of: Ints, bag_sizes: Ints) -> Ints:
    """Return (n,) ranks within bags that get the first spare token of each sequence.

    This rank follows the one that got the last spare token of the previous sequence. So the numbers
    of tokens of a bag's ranks differ by at most one.
    """
    if bag_sizes.max() == 1:
        return np.zeros_like(seq_lens)
    sizes = bag_sizes[bag_of]
    extra = seq_lens % sizes
    # Integers of 16 bits are sorted in linear time.
    keys = bag_of.astype(np.int16) if bag_sizes.size < 1 << 15 else bag_of
    order = np.argsort(keys, kind="stable")
    before = np.cumsum(extra[order]) - extra[order]
    sorted_bags = bag_of[order]
    is_first = np.ones(sorted_bags.size, dtype=bool)
    is_first[1:] = sorted_bags[1:] != sorted_bags[:-1]
    bag_start = np.maximum.accumulate(np.where(is_first, before, 0))
    result = np.empty_like(seq_lens)
    result[order] = (before - bag_start) % sizes[order]
    return result


def sending(first: Ints, lens: Ints, dest: Ranks, num_ranks: int) -> tuple[Ints, Ints]:
    """Return the rows to send, sorted by destination, and the number of rows for each rank."""
    order = np.argsort(dest, kind="stable")
    return ranges(first[order], lens[order]), sums_by(dest, lens, num_ranks)


def _inverse_permutation(index: Ints | None) -> Ints | None:
    if index is None:
        return None
    inverse = np.empty_like(index)
    inverse[index] = np.arange(index.size)
    return inverse


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunks of a plan's parts: its sequences, or their documents if these are split separately."""

    topology: Topology
    seq_lens: Ints  # (n,) tokens of each part
    bag_of: Ints  # (n,) bag of each part
    is_zigzag: bool  # whether rings have an early and a late chunk of each part on a rank
    seqs: Ints  # (n,) sequence of each part, ascending
    begins: Ints  # (n,) first position of each part in its sequence
    whole_lens: Ints  # (n,) tokens of the sequence of each part

    @classmethod
    def of(cls, topology: Topology, seq_lens: Ints, bag_of: Ints, masks: Masks | None) -> Self:
        """Split sequences, or their documents, over the ranks of their bags."""
        is_zigzag = masks is not None and bool(masks.is_causal.any())
        if masks is None or masks.apart.seqs.size <= np.count_nonzero(seq_lens):
            every, begins = np.arange(seq_lens.size), np.zeros_like(seq_lens)
            return cls(topology, seq_lens, bag_of, is_zigzag, every, begins, seq_lens)
        parts = masks.apart
        where = parts.seqs, parts.starts, seq_lens[parts.seqs]
        return cls(topology, parts.lens, bag_of[parts.seqs], is_zigzag, *where)

    @cached_property
    def counts(self) -> Ints:
        """(num_bags,) number of chunks into which each bag splits a sequence."""
        sizes = self.topology.bag_sizes
        return sizes * (1 + (self.topology.ring_degrees > 1)) if self.is_zigzag else sizes

    @cached_property
    def _rotations(self) -> Ints:
        return rotations(self.seq_lens, self.bag_of, self.counts)

    def num_on_a_rank(self, bag: int) -> int:
        """Return how many chunks of a sequence each rank of a bag has."""
        return int(self.counts[bag] // self.topology.bag_sizes[bag])

    def _starts(self, seqs: Ints | slice, index: Ints | int) -> Ints:
        """Return the first position of chunk `index` of each of some sequences."""
        counts = self.counts[self.bag_of[seqs]]
        return chunk_starts(self.seq_lens[seqs], counts, self._rotations[seqs], index)

    def _places(self, bags: Ints, chunks: Ints) -> Ints:
        """Return the rank in its bag that has a chunk."""
        rings, sizes = self.topology.ring_degrees[bags], self.topology.bag_sizes[bags]
        degrees = sizes // rings
        run = chunks // degrees
        return np.minimum(run, 2 * rings - 1 - run) * degrees + chunks % degrees

    def _late(self, bags: Ints, places: Ints) -> Ints:
        """Return the second chunk of ranks whose bags give each two."""
        degrees = self.topology.bag_sizes[bags] // self.topology.ring_degrees[bags]
        return self.counts[bags] - degrees * (1 + places // degrees) + places % degrees

    @cached_property
    def _cut_bags(self) -> dict[int, tuple[Ints, Ints]]:
        return {}

    def _cut(self, bag: int) -> tuple[Ints, Ints]:
        """Return the m parts of a bag, and (chunks + 1, m) bounds of the chunks of each."""
        if bag not in self._cut_bags:
            parts, counts = np.flatnonzero(self.bag_of == bag), self.counts[bag : bag + 1]
            index = np.arange(int(counts[0]) + 1)[:, None]
            starts = chunk_starts(self.seq_lens[parts], counts, self._rotations[parts], index)
            self._cut_bags[bag] = parts, starts
        return self._cut_bags[bag]

    def _of_rank(self, rank: int) -> tuple[Ints, Ints, Ints]:
        """Return the m parts of a rank's bag, and (1 or 2, m) starts and ends of its chunks."""
        bag = self.topology.bag_of_rank[rank : rank + 1]
        place = rank - self.topology.first_ranks[bag]
        parts, starts = self._cut(int(bag[0]))
        if self.num_on_a_rank(bag[0]) > 1:
            place = np.append(place, self._late(bag, place))
        return parts, starts[place], starts[place + 1]

    @cached_property
    def tokens(self) -> Ints:
        """(num_ranks,) number of tokens that each rank has."""
        bags = np.repeat(np.arange(self.counts.size), self.counts)
        chunks = ranges(np.zeros_like(self.counts), self.counts)
        counts = self.counts[self.bag_of]
        base = sums_by(self.bag_of, self.seq_lens // counts, self.counts.size)
        # Spare tokens of a bag are dealt in turn, so their sum tells how many each chunk got.
        extra = sums_by(self.bag_of, self.seq_lens % counts, self.counts.size)[bags]
        size = self.counts[bags]
        lens = base[bags] + extra // size + (chunks < extra % size)
        ranks = self.topology.first_ranks[bags] + self._places(bags, chunks)
        return sums_by(ranks, lens, self.topology.num_ranks)

    def num_at(self, source_ranks: Ints) -> int:
        """Count the tokens that are computed on the rank that loaded them."""
        ranks, bags, everything = source_ranks[self.seqs], self.bag_of, slice(None)
        sizes, place = self.topology.bag_sizes[bags], ranks - self.topology.first_ranks[bags]
        is_in_bag = (place >= 0) & (place < sizes)
        place = np.clip(place, 0, sizes - 1)
        lens = self._starts(everything, place + 1) - self._starts(everything, place)
        late = np.where(self.counts[bags] > sizes, self._late(bags, place), self.counts[bags])
        end = np.minimum(late + 1, self.counts[bags])
        lens = lens + self._starts(everything, end) - self._starts(everything, late)
        return int(np.where(is_in_bag, lens, 0).sum())

    def bag_lens(self, rank: int) -> Ints:
        """Return (bag size, m) tokens that each rank of the bag has of the m parts of `local`."""
        bag = int(self.topology.bag_of_rank[rank])
        lens = np.diff(self._cut(bag)[1], axis=0)
        if self.num_on_a_rank(bag) == 1:
            return lens
        places = np.arange(int(self.topology.bag_sizes[bag]))
        late = self._late(np.full_like(places, bag), places)
        return np.concatenate([lens[places], lens[late]], axis=1)

    def local(self, rank: int) -> LocalLayout:
        """Return the chunks that a rank computes on."""
        parts, first, end = self._of_rank(rank)
        at, lens = np.tile(parts, len(first)), (end - first).ravel()
        starts = first.ravel() + self.begins[at]
        return LocalLayout(
            seq_ids=self.seqs[at],
            seq_lens=self.whole_lens[at],
            chunk_starts=starts,
            chunk_lens=lens,
            cu_seqlens=cumulative(lens).astype(np.int32),
            positions=ranges(starts, lens),
            slots=np.repeat(np.arange(at.size), lens),
        )

    def route(self, rank: int, source_ranks: Ints) -> Route:
        """Return a rank's part in the exchange from the loaded to the compute layout."""
        num_ranks, source = self.topology.num_ranks, source_ranks[self.seqs]
        source_counts = np.bincount(source, minlength=num_ranks)
        parts, first, end = self._of_rank(rank)
        lens = end - first
        received = sums_by(source[parts], lens.sum(axis=0), num_ranks)
        recv_index = None
        if len(lens) > 1:  # both chunks of a sequence arrive together
            first = cumulative(lens.T.ravel())[:-1].reshape(lens.T.shape)
            recv_index = ranges(first.T.ravel(), lens.ravel())
        return Route(*self._sent(rank, source_counts), received, recv_index)

    def _sent(self, rank: int, source_counts: Ints) -> tuple[Ints, Ints]:
        """Return the row to send at each place, by destination and sequence; rows to each rank."""
        first = int(source_counts[:rank].sum())
        loaded = np.arange(first, first + int(source_counts[rank]))
        counts = self.counts[self.bag_of[loaded]]
        piece_seq, chunk = np.repeat(loaded, counts), ranges(np.zeros_like(counts), counts)
        starts = self._starts(piece_seq, chunk)
        ends = np.empty_like(starts)
        ends[:-1] = starts[1:]
        ends[np.cumsum(counts) - 1] = self.seq_lens[loaded]
        lens, bags = ends - starts, self.bag_of[piece_seq]
        dest = self.topology.first_ranks[bags] + self._places(bags, chunk)
        rows = cumulative(self.seq_lens[loaded])[piece_seq - first] + starts
        return sending(rows, lens, dest, self.topology.num_ranks)
