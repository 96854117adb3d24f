"""Plans for block-sparse attention, and their index tables. Legend: see `sparse`."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bascule.arrays import Floats, Ints, Ranks, cumulative, frozen, ranges, sums_by
from bascule.plan.routes import Route
from bascule.plan.sparse.layout import BlockLayout, barrier_ends, coupled_ends, over_mean
from bascule.traffic import Traffic


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """The (head, block) pairs of a rank, in order, the same for every batch item."""

    heads: Ints  # (pairs,) query head or key-value head
    blocks: Ints  # (pairs,) block of the sequence
    lens: Ints  # (pairs,) tokens of the block

    def tokens(self, layout: BlockLayout) -> Ints:
        """Return the index of the token at each row."""
        places = ranges(cumulative(layout.lens)[self.blocks], self.lens)
        if layout.order is None:
            return places
        return layout.order[np.repeat(self.heads, self.lens), places]


@dataclass(frozen=True, slots=True, eq=False)
class Travel:
    """The ranks to which the blocks of a tensor's heads are sent. A head may go to several."""

    layout: BlockLayout  # the blocks at home
    num_heads: int  # heads of the tensor
    heads: Ints  # (X,) head of each row of the table
    rank_of: Ints  # (X, n) rank to which each block of the head goes

    def runs(self) -> tuple[Ints, Ints, Ranks, Ranks]:
        """Return (S,) lengths of runs of tokens; (X, S) run, sender and receiver of each."""
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
        """Return (num_ranks, num_ranks) numbers of rows that each rank sends to each rank."""
        lens, runs, source, dest = self.runs()
        pairs = (source.astype(np.int64) * num_ranks + dest).ravel()
        return sums_by(pairs, lens[runs].ravel(), num_ranks**2).reshape(num_ranks, num_ranks)


def route_of(travels: Sequence[tuple[Travel, int]], rank: int, num_ranks: int) -> Route:
    """Return a rank's part in one exchange of several tensors; each has a number of copies."""
    parts = list[tuple[Ints, Ints, Ranks, Ranks]]()
    base = np.zeros(num_ranks, np.int64)  # first row of a tensor on each rank
    for travel, copies in travels:
        offsets, tokens = travel.layout.offsets(num_ranks)
        if travel.layout.order is not None:
            offsets = ranges(offsets, travel.layout.lens)
        lens, runs, source, dest = travel.runs()
        row, place = np.nonzero((source == rank) | (dest == rank))
        source, dest, run = source[row, place], dest[row, place], runs[row, place]
        heads = np.arange(copies)[:, None] * travel.num_heads + travel.heads[row]
        start = heads * tokens[source] + (base[source] + offsets[run])
        lens = np.tile(lens[run], copies)
        parts.append((start.ravel(), lens, np.tile(source, copies), np.tile(dest, copies)))
        base = base + copies * travel.num_heads * tokens
    start, lens, source, dest = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Route.of_items(source, dest, lens, rank, num_ranks, starts=start)


@dataclass(frozen=True, eq=False)
class SparsePlan:
    """A frozen plan for one mask: the rank of every query block, key block and value block."""

    ring_degree: int
    ulysses_degree: int
    num_kv_heads: int  # each serves H // num_kv_heads query heads in a row
    q: BlockLayout  # the query blocks at home
    kv: BlockLayout  # the key blocks at home
    ring_of: Ints  # (H, Q) ring that computes a query block of a head
    q_of: Ints  # (U, Q) ring rank that computes a query block in each ring
    kv_of: Ints  # (U, K) ring rank on which a key block starts its way in each ring
    tiles: Floats  # (U, R, R) pairs of tokens, of the queries of each ring rank with keys of each

    def __post_init__(self) -> None:
        for array in (self.ring_of, self.q_of, self.kv_of, self.tiles):
            array.flags.writeable = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SparsePlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def num_ranks(self) -> int:
        """U R, the number of ranks of the mesh."""
        return self.ulysses_degree * self.ring_degree

    @cached_property
    def rank_of(self) -> Ints:
        """(H, Q) rank that computes a query block of a head."""
        ring_rank = np.take_along_axis(self.q_of, self.ring_of, axis=0)
        return frozen(ring_rank * self.ulysses_degree + self.ring_of)

    @cached_property
    def kv_rank_of(self) -> Ints:
        """(U, num_kv_heads, K) rank of each ring that receives a key block; -1: not needed."""
        group = self.ring_of.shape[0] // self.num_kv_heads
        heads = self.ring_of.reshape(self.num_kv_heads, group * self.ring_of.shape[1])
        rings = np.arange(self.ulysses_degree)
        is_needed = (heads == rings[:, None, None]).any(axis=2)
        ranks = self.kv_of * self.ulysses_degree + rings[:, None]
        return frozen(np.where(is_needed[:, :, None], ranks[:, None], -1))

    @property
    def loads(self) -> Floats:
        """(num_ranks,) work of each rank."""
        return self.tiles.sum(axis=2).T.ravel()

    @property
    def imbalance(self) -> float:
        """Rho of db-SP: ranks of a ring wait in every round, and rings wait only at the end."""
        return over_mean(barrier_ends(self.tiles), self.tiles)

    @property
    def critical_path_imbalance(self) -> float:
        """Slowest rank over the mean if ranks of a ring wait only for their neighbours."""
        return over_mean(coupled_ends(self.tiles), self.tiles)

    @cached_property
    def rows_between(self) -> tuple[Ints, Ints]:
        """(num_ranks, num_ranks) rows from rank to rank, of q and of k; v has as many as k."""
        q, kv = (t.rows_between(self.num_ranks) for t in (self._q_travel, self._kv_travel))
        return frozen(q), frozen(kv)

    @cached_property
    def is_local(self) -> bool:
        """True if every rank computes on its own rows, so that no row is sent."""
        return all(int(rows.sum()) == int(rows.trace()) for rows in self.rows_between)

    @property
    def moved(self) -> tuple[float, float]:
        """Shares of the rows of queries, and of keys, that leave their ring rank."""
        shape = (self.ring_degree, self.ulysses_degree) * 2
        by_ring = [rows.reshape(shape).sum(axis=(1, 3)) for rows in self.rows_between]
        q, kv = ((rows.sum() - rows.trace()) / max(int(rows.sum()), 1) for rows in by_ring)
        return float(q), float(kv)

    def wire_bytes(self, head_dim: int, itemsize: int = 2, batch: int = 1) -> int:
        """Return the bytes that all ranks send: q, k, v to the ranks that use them, output back."""
        return int(self.routed_rows.sum()) * batch * head_dim * itemsize

    def rows_sent(self, ranks_per_node: int) -> tuple[int, int]:
        """Count rows of q, k, v and outputs sent within nodes, and sent to other nodes."""
        q, kv = self.rows_between
        rows = q + q.T + 2 * kv
        node = np.arange(self.num_ranks) // ranks_per_node
        is_near = node[:, None] == node
        near, far = int(rows[is_near].sum()), int(rows[~is_near].sum())
        return near - int(rows.trace()), far

    @property
    def most_kv_tokens(self) -> int:
        """Largest number of key rows of a rank, over all heads, before the ring's first round."""
        used = self.kv_rank_of >= 0
        lens = np.broadcast_to(self.kv.lens, used.shape)[used]
        return int(np.bincount(self.kv_rank_of[used], lens, self.num_ranks).max(initial=0.0))

    @cached_property
    def routed_rows(self) -> Ints:
        """(num_ranks,) rows (a head, a token) that each rank sends: q, k and v, outputs home."""
        q, kv = (rows - np.diag(rows.diagonal()) for rows in self.rows_between)
        return q.sum(axis=1) + q.sum(axis=0) + 2 * kv.sum(axis=1)

    def traffic(self, rank: int, row_bytes: int) -> Traffic:
        """Count the bytes that a rank sends in a forward pass: routed rows, keys and values."""
        passed = sum(int(self.kv_rows(owner).lens.sum()) for owner in self.owners(rank)[:-1])
        return Traffic(routed=int(self.routed_rows[rank]) * row_bytes, ring=2 * passed * row_bytes)

    def q_rows(self, rank: int) -> PackedRows:
        """Return the queries that a rank computes."""
        heads, blocks = np.nonzero(self.rank_of == rank)
        return PackedRows(heads, blocks, self.q.lens[blocks])

    def kv_rows(self, rank: int) -> PackedRows:
        """Return the keys and values that a rank has before the ring's first round."""
        heads, blocks = np.nonzero(self.kv_rank_of[rank % self.ulysses_degree] == rank)
        return PackedRows(heads, blocks, self.kv.lens[blocks])

    def owners(self, rank: int) -> list[int]:
        """Return (R,) ranks whose keys and values `rank` sees, round by round, itself first."""
        ring_rank, ring = divmod(rank, self.ulysses_degree)
        ring_ranks = [(ring_rank - turn) % self.ring_degree for turn in range(self.ring_degree)]
        return [owner * self.ulysses_degree + ring for owner in ring_ranks]

    def route(self, rank: int, *, batch: int = 1) -> Route:
        """Return one rank's part in the exchange of q, k and v from home to ranks that use them.

        Send rows of q (batch, H, tokens, D), then of k and v (batch, num_kv_heads, tokens, D). They
        arrive by tensor, batch item, head and block. Keys may go to several rings.
        """
        travels = ((self._q_travel, batch), (self._kv_travel, 2 * batch))
        return route_of(travels, rank, self.num_ranks)

    def output_route(self, rank: int, *, batch: int = 1) -> Route:
        """Return one rank's part in sending the output, with the rows of q, back home."""
        return route_of([(self._q_travel, batch)], rank, self.num_ranks).inverse()

    @property
    def _q_travel(self) -> Travel:
        num_heads = len(self.ring_of)
        return Travel(self.q, num_heads, np.arange(num_heads), self.rank_of)

    @property
    def _kv_travel(self) -> Travel:
        rings, heads = np.nonzero((self.kv_rank_of >= 0).any(axis=2))
        return Travel(self.kv, self.num_kv_heads, heads, self.kv_rank_of[rings, heads])

    @cached_property
    def digest(self) -> str:
        """Hex digest of the integers that decide who computes what; equal on ranks that agree."""
        sizes = (*self.ring_of.shape, self.kv.lens.size)
        degrees = (self.ulysses_degree, self.ring_degree, self.num_kv_heads)
        digest = hashlib.blake2b(self.q.digest + self.kv.digest, digest_size=16)
        head = np.array([*degrees, *sizes])
        for part in (head, self.ring_of, self.q_of, self.kv_of):
            digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        return digest.hexdigest()
