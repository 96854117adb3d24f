"""Which tokens of its sequences each rank of a bag has.

A bag of P = G * R ranks cuts a sequence into P chunks, one for each rank in turn: ring rank r, of
G ranks that share heads, has the G chunks from r G on. Where tokens see what is before them, later
ring ranks would have more work. So there the sequence is cut into 2 P chunks, and ring rank r has
two runs of G chunks: the r-th and the (2 R - 1 - r)-th (zigzag). A rank's early chunks lie before
its late ones. A sequence of several documents, none of which sees another, is cut document by
document: else who has the long ones would have more work.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from bascule.arrays import Ints
from bascule.plan import routes
from bascule.plan.loaded.masks import Masks
from bascule.plan.routes import LocalLayout, Route
from bascule.plan.topology import Topology


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of a plan's sequences, or of their documents; here both are called parts.

    Attributes:
        topology: The bags.
        seq_lens: (n,) tokens of each part.
        bag_of: (n,) its bag.
        is_zigzag: Whether rings have an early and a late chunk of each part on a rank.
        seqs: (n,) the sequence of each part, ascending.
        begins: (n,) its first position in the sequence.
        whole_lens: (n,) tokens of the sequence.
    """

    topology: Topology
    seq_lens: Ints
    bag_of: Ints
    is_zigzag: bool
    seqs: Ints
    begins: Ints
    whole_lens: Ints

    @classmethod
    def of(cls, topology: Topology, seq_lens: Ints, bag_of: Ints, masks: Masks | None) -> Self:
        """Those of sequences in bags."""
        is_zigzag = masks is not None and bool(masks.is_causal.any())
        if masks is None or masks.apart.seqs.size <= np.count_nonzero(seq_lens):
            every, begins = np.arange(seq_lens.size), np.zeros_like(seq_lens)
            return cls(topology, seq_lens, bag_of, is_zigzag, every, begins, seq_lens)
        parts = masks.apart
        where = parts.seqs, parts.starts, seq_lens[parts.seqs]
        return cls(topology, parts.lens, bag_of[parts.seqs], is_zigzag, *where)

    @property
    def is_by_document(self) -> bool:
        """Whether the parts are documents."""
        return bool(self.begins.any())

    @cached_property
    def counts(self) -> Ints:
        """(num_bags,) chunks that a bag cuts a sequence into."""
        sizes = self.topology.bag_sizes
        return sizes * (1 + (self.topology.ring_degrees > 1)) if self.is_zigzag else sizes

    @cached_property
    def _rotations(self) -> Ints:
        return routes.rotations(self.seq_lens, self.bag_of, self.counts)

    def num_on_a_rank(self, bag: int) -> int:
        """Chunks of a sequence that each rank of a bag has."""
        return int(self.counts[bag] // self.topology.bag_sizes[bag])

    def _starts(self, seqs: Ints | slice, index: Ints | int) -> Ints:
        """Where chunk `index` of each of some sequences begins."""
        counts = self.counts[self.bag_of[seqs]]
        return routes.chunk_starts(self.seq_lens[seqs], counts, self._rotations[seqs], index)

    def _places(self, bags: Ints, chunks: Ints) -> Ints:
        """The rank in its bag that has a chunk."""
        rings, sizes = self.topology.ring_degrees[bags], self.topology.bag_sizes[bags]
        degrees = sizes // rings
        run = chunks // degrees
        return np.minimum(run, 2 * rings - 1 - run) * degrees + chunks % degrees

    def _late(self, bags: Ints, places: Ints) -> Ints:
        """The late chunk of a rank of a bag that has two."""
        degrees = self.topology.bag_sizes[bags] // self.topology.ring_degrees[bags]
        return self.counts[bags] - degrees * (1 + places // degrees) + places % degrees

    def _of_rank(self, rank: int) -> tuple[Ints, list[int]]:
        """The parts of a rank's bag, and the rank's chunks of each."""
        bag = self.topology.bag_of_rank[rank : rank + 1]
        place = rank - self.topology.first_ranks[bag]
        chunks = [place] if self.num_on_a_rank(bag[0]) == 1 else [place, self._late(bag, place)]
        return np.flatnonzero(self.bag_of == bag), [int(chunk[0]) for chunk in chunks]

    @cached_property
    def tokens(self) -> Ints:
        """(num_ranks,) tokens that each rank has."""
        bags = np.repeat(np.arange(self.counts.size), self.counts)
        chunks = routes.ranges(np.zeros_like(self.counts), self.counts)
        counts = self.counts[self.bag_of]
        base = routes.sums_by(self.bag_of, self.seq_lens // counts, self.counts.size)
        # The remainders of a bag are dealt in turn, so their sum tells how many each chunk got.
        extra = routes.sums_by(self.bag_of, self.seq_lens % counts, self.counts.size)[bags]
        size = self.counts[bags]
        lens = base[bags] + extra // size + (chunks < extra % size)
        ranks = self.topology.first_ranks[bags] + self._places(bags, chunks)
        return routes.sums_by(ranks, lens, self.topology.num_ranks)

    def num_at(self, source_ranks: Ints) -> int:
        """Tokens that are computed where their sequences were loaded."""
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
        """(bag size, m) tokens of each chunk that `LocalLayout` lists, on each rank of the bag."""
        seqs, chunks = self._of_rank(rank)
        bag = int(self.topology.bag_of_rank[rank])
        lens = np.diff(self._starts(seqs, np.arange(int(self.counts[bag]) + 1)[:, None]), axis=0)
        if len(chunks) == 1:
            return lens
        places = np.arange(int(self.topology.bag_sizes[bag]))
        return np.concatenate(
            [lens[places], lens[self._late(np.full_like(places, bag), places)]], 1
        )

    def local(self, rank: int) -> LocalLayout:
        """What a rank computes on."""
        parts, chunks = self._of_rank(rank)
        starts = np.concatenate([self._starts(parts, chunk) for chunk in chunks])
        lens = np.concatenate([self._starts(parts, chunk + 1) for chunk in chunks]) - starts
        at = np.tile(parts, len(chunks))
        starts = starts + self.begins[at]
        return LocalLayout(
            seq_ids=self.seqs[at],
            seq_lens=self.whole_lens[at],
            chunk_starts=starts,
            chunk_lens=lens,
            cu_seqlens=routes.cumulative(lens).astype(np.int32),
            positions=routes.ranges(starts, lens),
            slots=np.repeat(np.arange(at.size), lens),
        )

    def route(self, rank: int, source_ranks: Ints) -> Route:
        """The part of a rank in the exchange from where sequences were loaded."""
        num_ranks, source = self.topology.num_ranks, source_ranks[self.seqs]
        source_counts = np.bincount(source, minlength=num_ranks)
        seqs, chunks = self._of_rank(rank)
        lens = np.stack(
            [self._starts(seqs, chunk + 1) - self._starts(seqs, chunk) for chunk in chunks]
        )
        received = routes.sums_by(source[seqs], lens.sum(axis=0), num_ranks)
        recv_index = None
        if len(chunks) > 1:  # they arrive by sequence
            first = routes.cumulative(lens.T.ravel())[:-1].reshape(lens.T.shape)
            recv_index = routes.ranges(first.T.ravel(), lens.ravel())
        return Route(*self._sent(rank, source_counts), received, recv_index)

    def _sent(self, rank: int, source_counts: Ints) -> tuple[Ints, Ints]:
        """Row to send at each place, and rows to each rank: by destination, then sequence."""
        first = int(source_counts[:rank].sum())
        own = np.arange(first, first + int(source_counts[rank]))
        counts = self.counts[self.bag_of[own]]
        piece_seq, chunk = np.repeat(own, counts), routes.ranges(np.zeros_like(counts), counts)
        starts = self._starts(piece_seq, chunk)
        lens = self._starts(piece_seq, chunk + 1) - starts
        bags = self.bag_of[piece_seq]
        dest = self.topology.first_ranks[bags] + self._places(bags, chunk)
        rows = routes.cumulative(self.seq_lens[own])[piece_seq - first] + starts
        return routes.sending(rows, lens, dest, self.topology.num_ranks)
