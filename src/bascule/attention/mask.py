"""Masks: the keys that queries see, in one type for all kernels, rings and layouts.

Shapes: B batch, H query heads, Sq queries, Sk keys.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bascule.arrays import Ints
from bascule.checks import whole
from bascule.comm.collectives import table_on
from bascule.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Scores:
    """Limits attention scores by a window, by chunks or by a soft cap; 0 means none.

    Args:
        window: Number of tokens that a token sees in causal attention: the last ones and itself.
        chunk: Tokens per chunk, counted from the start of the sequence or document: in causal
            attention a token sees only keys of its own chunk.
        cap: Scaled scores become cap * tanh(score / cap).

    Raises:
        ConfigError: A number is negative or not finite, or there are both a window and chunks.
    """

    window: int = 0
    chunk: int = 0
    cap: float = 0.0

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():  # there, lengths may be symbols
            return
        whole("Scores(window", self.window, 0)
        whole("Scores(chunk", self.chunk, 0)
        if (self.window and self.chunk) or not 0.0 <= self.cap < math.inf:
            raise ConfigError(f"{self}: give a window or chunks, and a finite cap, 0 for none")

    @property
    def is_near(self) -> bool:
        """True if tokens see only some of the tokens before them."""
        return bool(self.window or self.chunk)

    @property
    def key(self) -> tuple[int, int, float]:
        """The arguments as plain numbers, even in compiled code, where they may be symbols."""
        return len(range(self.window)), len(range(self.chunk)), float(self.cap)


PLAIN = Scores()


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Sequences packed one after another: queries see only the keys of their own sequence.

    Bounds are on the device of the tokens, lengths on the host, so that kernels need not wait.
    """

    seq_lens: tuple[int, ...]  # queries of each sequence
    kv_lens: tuple[int, ...]  # keys of each; others than queries if they are another rank's
    device: torch.device  # of the bounds

    @classmethod
    def build(
        cls, seq_lens: Sequence[int], device: torch.device, kv_lens: Sequence[int] | None = None
    ) -> "PackedSequences":
        """Build the type without empty sequences, because kernels disagree about them."""
        pairs = zip(seq_lens, seq_lens if kv_lens is None else kv_lens, strict=True)
        pairs = [pair for pair in pairs if pair != (0, 0)]
        queries, keys = zip(*pairs, strict=True) if pairs else ((), ())
        return cls(queries, keys, device)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Bounds of the sequences among the queries, (n + 1,) int32."""
        return table_on(_bounds(self.seq_lens), self.device)

    @cached_property
    def cu_kv_lens(self) -> Tensor:
        """Bounds of the sequences among the keys, (n + 1,) int32."""
        if self.kv_lens == self.seq_lens:
            return self.cu_seqlens
        return table_on(_bounds(self.kv_lens), self.device)

    @cached_property
    def without_keys(self) -> Tensor | None:
        """Queries of sequences that have no keys here, (Sq,) bool; None if all have some."""
        if all(self.kv_lens):
            return None
        is_empty = np.repeat(np.array(self.kv_lens) == 0, self.seq_lens)
        return table_on(is_empty, self.device)


def _bounds(lens: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.cumsum((0, *lens), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class BlockTables:
    """The arrays of `BlockRows` on a device, as int32."""

    q_bounds: Tensor
    k_bounds: Tensor
    row_bounds: Tensor
    columns: Tensor


@dataclass(frozen=True, eq=False)
class BlockRows:
    """A block-sparse mask: the key blocks that each query block sees. No block is empty.

    Queries (1, 1, Sq, D) and keys (1, 1, Sk, D) hold the blocks of all samples and heads.
    """

    q_bounds: Ints  # (Q + 1,) bounds of the query blocks among the queries
    k_bounds: Ints  # (K + 1,) bounds of the key blocks among the keys
    row_bounds: Ints  # (Q + 1,) bounds of the rows of query blocks in `columns`
    columns: Ints  # (N,) key blocks that a query block sees, ascending in each row
    _tables: dict[torch.device, BlockTables] = field(default_factory=dict, init=False, repr=False)

    @property
    def block(self) -> int:
        """Tokens of the longest block; 0 without blocks."""
        bounds = self.q_bounds, self.k_bounds
        return max(int(np.diff(ends).max(initial=0)) for ends in bounds)

    @property
    def counts(self) -> Ints:
        """Key blocks that each query block sees, (Q,)."""
        return np.diff(self.row_bounds)

    @cached_property
    def transposed(self) -> "BlockRows":
        """Return the rows of the key blocks: the query blocks that see each."""
        from scipy import sparse

        shape = (self.q_bounds.size - 1, self.k_bounds.size - 1)
        ones = np.ones(self.columns.size, dtype=np.int8)
        by_key = sparse.csr_array((ones, self.columns, self.row_bounds), shape).tocsc()
        bounds, columns = (x.astype(np.int64) for x in (by_key.indptr, by_key.indices))
        return BlockRows(self.k_bounds, self.q_bounds, bounds, columns)

    @cached_property
    def runs(self) -> list[tuple[slice, Ints]]:
        """The queries of neighbouring blocks that see the same key blocks, and those key blocks."""
        rows = np.split(self.columns, self.row_bounds[1:-1])
        starts = [i for i in range(len(rows)) if not i or not np.array_equal(rows[i], rows[i - 1])]
        bounds = self.q_bounds[[*starts, -1]].tolist()
        return [(slice(*bounds[n : n + 2]), rows[start]) for n, start in enumerate(starts)]

    def on(self, device: torch.device) -> BlockTables:
        """Return the arrays on a device, copied there once."""
        if device not in self._tables:
            arrays = (self.q_bounds, self.k_bounds, self.row_bounds, self.columns)
            tables = BlockTables(*(table_on(x.astype(np.int32), device) for x in arrays))
            self._tables[device] = tables
        return self._tables[device]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMask:
    """The keys that queries see; by default all."""

    # query i sees only keys 0 to i; as many queries as keys, of packed sequences in each
    causal: bool = False
    # added to the scaled scores; broadcasts to (B, H, Sq, Sk); of the queries' dtype or float32
    bias: Tensor | None = None
    blocks: BlockRows | None = None  # blocks of keys that are seen; with none of the others
    packed: PackedSequences | None = None  # sequences of a batch of one; without a bias


EVERYTHING = AttentionMask()
