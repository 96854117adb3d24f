"""A plan for block-sparse attention on a mesh of rings: who computes what, and every index table.

Legend: H heads, Q query blocks, K key blocks, U rings (Ulysses ranks), R ranks of a ring. Rank =
ring rank * U + Ulysses rank.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bascule.errors import ConfigError
from bascule.plan._sparse_counts import Floats
from bascule.plan._sparse_layout import BlockLayout
from bascule.plan._sparse_metrics import barrier_imbalance, coupled_imbalance
from bascule.plan._sparse_route import PackedRows, Pieces, Travel, check_order
from bascule.plan.layout import Ints, Route, frozen

_DIGEST_VERSION = 1


@dataclass(frozen=True, eq=False)
class SparsePlan:
    """A frozen decision for one mask: who computes what, and where keys and values live.

    Attributes:
        ulysses_degree: U.
        ring_degree: R.
        num_kv_heads: Key-value heads; each serves H // num_kv_heads query heads in a row.
        q: The query blocks at home.
        kv: The key blocks at home.
        ring_of: (H, Q) ring that computes a query block of a head.
        q_of: (U, Q) ring rank that computes a query block in each ring.
        kv_of: (U, K) ring rank on which a key block starts its way in each ring.
        tiles: (U, R, R) work of the queries of each ring rank on the keys of each, in pairs of
            tokens.
    """

    ulysses_degree: int
    ring_degree: int
    num_kv_heads: int
    q: BlockLayout
    kv: BlockLayout
    ring_of: Ints
    q_of: Ints
    kv_of: Ints
    tiles: Floats

    def __post_init__(self) -> None:
        for array in (self.ring_of, self.q_of, self.kv_of, self.tiles):
            array.flags.writeable = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SparsePlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def num_ranks(self) -> int:
        """U R."""
        return self.ulysses_degree * self.ring_degree

    @cached_property
    def rank_of(self) -> Ints:
        """(H, Q) rank that computes a query block of a head."""
        ring_rank = np.take_along_axis(self.q_of, self.ring_of, axis=0)
        return frozen(ring_rank * self.ulysses_degree + self.ring_of)

    @cached_property
    def kv_rank_of(self) -> Ints:
        """(U, num_kv_heads, K) rank that gets a key block for each ring; -1: the ring needs none.

        A key-value head is in every ring that has queries of one of its heads.
        """
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
        """Rho of db-SP, equation 1: ranks of a ring wait for each other in every round."""
        return barrier_imbalance(self.tiles)

    @property
    def critical_path_imbalance(self) -> float:
        """The same where ranks of a ring wait for their neighbours alone."""
        return coupled_imbalance(self.tiles)

    @property
    def moved(self) -> tuple[float, float]:
        """Share of (head, block) rows of queries, and of keys, on another ring rank than at home.

        What is computed on the home ring rank needs the exchange of Ulysses alone.
        """
        degree = self.ulysses_degree
        q_away = self.rank_of // degree != self.q.home // degree
        kv_sent = self.kv_rank_of >= 0
        kv_away = kv_sent & (self.kv_rank_of // degree != self.kv.home // degree)
        return (
            float(q_away.sum()) / max(q_away.size, 1),
            float(kv_away.sum()) / max(int(kv_sent.sum()), 1),
        )

    def wire_bytes(self, head_dim: int, itemsize: int = 2, batch: int = 1) -> int:
        """Bytes that leave a rank of all ranks: q, k and v to where they are used, output back."""
        q_rows = int((self.q.lens * (self.rank_of != self.q.home)).sum())
        kv_away = (self.kv_rank_of >= 0) & (self.kv_rank_of != self.kv.home)
        return 2 * (q_rows + int((self.kv.lens * kv_away).sum())) * batch * head_dim * itemsize

    def q_rows(self, rank: int) -> PackedRows:
        """The queries that a rank computes.

        Raises:
            ConfigError: There is no such rank.
        """
        self._check_rank(rank)
        heads, blocks = np.nonzero(self.rank_of == rank)
        return PackedRows(heads, blocks, self.q.lens[blocks])

    def kv_rows(self, rank: int) -> PackedRows:
        """The keys and values that start their way around the ring on a rank.

        Raises:
            ConfigError: There is no such rank.
        """
        self._check_rank(rank)
        heads, blocks = np.nonzero(self.kv_rank_of[rank % self.ulysses_degree] == rank)
        return PackedRows(heads, blocks, self.kv.lens[blocks])

    def owners(self, rank: int) -> list[int]:
        """(R,) rank whose keys and values a rank works on in each round; its own ones first."""
        self._check_rank(rank)
        ring_rank, ring = divmod(rank, self.ulysses_degree)
        ring_ranks = [(ring_rank - turn) % self.ring_degree for turn in range(self.ring_degree)]
        return [owner * self.ulysses_degree + ring for owner in ring_ranks]

    def route(
        self,
        rank: int,
        *,
        batch: int = 1,
        q_order: npt.ArrayLike | None = None,
        kv_order: npt.ArrayLike | None = None,
    ) -> Route:
        """One rank's part in the exchange of q, k and v from home to where they are used.

        Rows are those of q (batch, H, tokens, D), then of k and of v (batch, num_kv_heads, tokens,
        D), on both sides; what arrives lies by tensor, batch item, head and block, as `q_rows` and
        `kv_rows` list it. Keys of heads that are in several rings are sent to each: then the
        exchange has no inverse, and rows may have several gradients.

        Args:
            rank: The rank.
            batch: Sequences that are attended alike.
            q_order: (H, tokens) token at each place of each head, if its blocks are cut from
                another order than that of the sequence.
            kv_order: (num_kv_heads, tokens) the same of keys and values.

        Raises:
            ConfigError: There is no such rank, or an order is none.
        """
        self._check_rank(rank)
        travel = self._kv_travel(kv_order)
        travels = (self._q_travel(q_order), travel, travel)
        return Pieces.of(travels, batch, self.num_ranks).route(rank, self.num_ranks)

    def output_route(
        self, rank: int, *, batch: int = 1, q_order: npt.ArrayLike | None = None
    ) -> Route:
        """One rank's part in the exchange of the output, rows as of q, back home.

        Raises:
            ConfigError: There is no such rank, or the order is none.
        """
        self._check_rank(rank)
        pieces = Pieces.of([self._q_travel(q_order)], batch, self.num_ranks)
        return pieces.route(rank, self.num_ranks).inverse()

    def _q_travel(self, order: npt.ArrayLike | None) -> Travel:
        num_heads = len(self.ring_of)
        if order is not None:
            order = check_order("q_order", order, num_heads, int(self.q.lens.sum()))
        return Travel(self.q, num_heads, np.arange(num_heads), self.rank_of, order)

    def _kv_travel(self, order: npt.ArrayLike | None) -> Travel:
        if order is not None:
            order = check_order("kv_order", order, self.num_kv_heads, int(self.kv.lens.sum()))
        heads = np.tile(np.arange(self.num_kv_heads), self.ulysses_degree)
        ranks = self.kv_rank_of.reshape(heads.size, self.kv.lens.size)
        return Travel(self.kv, self.num_kv_heads, heads, ranks, order)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.num_ranks:
            raise ConfigError(f"rank {rank}: this plan is for ranks 0 to {self.num_ranks - 1}")

    @cached_property
    def digest(self) -> str:
        """Hex digest of the integers that decide who computes what; equal on ranks that agree."""
        sizes = (*self.ring_of.shape, self.kv.lens.size)
        degrees = (self.ulysses_degree, self.ring_degree, self.num_kv_heads)
        digest = hashlib.blake2b(digest_size=16)
        layouts = (self.q.lens, self.q.home, self.kv.lens, self.kv.home)
        head = np.array([_DIGEST_VERSION, *degrees, *sizes])
        for part in (head, *layouts, self.ring_of, self.q_of, self.kv_of):
            digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        return digest.hexdigest()
