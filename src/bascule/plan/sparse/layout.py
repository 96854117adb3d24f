"""The blocks of a sequence before attention: their tokens, and the ranks that have them."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from bascule.arrays import Ints, frozen
from bascule.errors import ConfigError
from bascule.plan.checks import array, ints, whole
from bascule.plan.sequences import MAX_LENGTH

MAX_RING = 2**9
"""Most ranks of a ring: placing its blocks takes time by the cube of them."""

MAX_MESH_RANKS = 2**15
"""Most ranks of a mesh: their numbers are 16 bits wide where they are sorted."""


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The blocks of a sequence at home: a rank has the tokens of a block for all heads.

    Tokens are in the order of the sequence. Rank = ring rank * U + Ulysses rank. Where heads have
    token orders of their own, as in PAROAttention, tokens stay at home, but blocks are cut from the
    head's order: their tokens come from many ranks, and `home` is where it is computed by default.

    Attributes:
        lens: (n,) tokens of each block.
        home: (n,) rank that has them.
        order: (heads, tokens) token of the sequence at each place of each head. None: all heads
            have the order of the sequence.
    """

    lens: Ints
    home: Ints
    order: Ints | None = None

    def __post_init__(self) -> None:
        lens = ints("lens", self.lens, None, MAX_LENGTH)
        home = ints("home", self.home, lens.size, MAX_MESH_RANKS - 1)
        order = None if self.order is None else _order_of(self.order, int(lens.sum()))
        for name, value in (("lens", lens), ("home", home), ("order", order)):
            object.__setattr__(self, name, value if value is None else frozen(value))

    @classmethod
    def striped(cls, lens: npt.ArrayLike, ulysses_degree: int, ring_degree: int) -> Self:
        """Put block i on ring rank i mod R, and there on Ulysses rank (i // R) mod U.

        Neighbouring blocks see about as much as each other: work is nearly even without masks.
        """
        check_degrees(ulysses_degree, ring_degree)
        lens = ints("lens", lens, None, MAX_LENGTH)
        place = np.arange(lens.size)
        ulysses = place // ring_degree % ulysses_degree
        return cls(lens, place % ring_degree * ulysses_degree + ulysses)

    @classmethod
    def contiguous(cls, lens: npt.ArrayLike, ulysses_degree: int, ring_degree: int) -> Self:
        """Put a run of blocks on each rank; runs differ by one block at most."""
        check_degrees(ulysses_degree, ring_degree)
        lens = ints("lens", lens, None, MAX_LENGTH)
        return cls(lens, np.arange(lens.size) * (ulysses_degree * ring_degree) // max(lens.size, 1))

    def offsets(self, num_ranks: int) -> tuple[Ints, Ints]:
        """Return (n,) first row of each block on its rank, and (num_ranks,) tokens of each rank."""
        order = np.argsort(self.home, kind="stable")
        tokens = np.bincount(self.home, self.lens, num_ranks).astype(np.int64)
        ends = np.cumsum(self.lens[order]) - self.lens[order]
        first = np.empty_like(self.lens)
        first[order] = ends - (np.cumsum(tokens) - tokens)[self.home[order]]
        return first, tokens

    @cached_property
    def digest(self) -> bytes:
        """Return a digest of all its integers, equal on ranks that agree."""
        parts = (self.lens, self.home) if self.order is None else (self.lens, self.home, self.order)
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(np.array([*part.shape, -1], dtype="<i8").tobytes())
            digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        return digest.digest()


def block_lens(segments: npt.ArrayLike, block: int) -> Ints:
    """Return (n,) tokens of each block of a sequence; no block straddles two segments."""
    tokens = ints("segments", segments, None, MAX_LENGTH)
    counts = -(-tokens // whole("block", block, 1))
    lens = np.full(counts.sum(), block, np.int64)
    last, used = np.cumsum(counts) - 1, tokens > 0
    lens[last[used]] -= (counts * block - tokens)[used]
    return lens


def check_degrees(ulysses_degree: int, ring_degree: int) -> None:
    """Refuse a mesh without ranks, or with more than can be planned for."""
    ring = whole("ring_degree", ring_degree, 1, MAX_RING)
    ranks = whole("ulysses_degree", ulysses_degree, 1) * ring
    whole("ulysses_degree * ring_degree", ranks, 1, MAX_MESH_RANKS)


def _order_of(values: npt.ArrayLike, num_tokens: int) -> Ints:
    order = array("order", values)
    if order.ndim != 2 or order.shape[1] != num_tokens or order.dtype.kind not in "iu":
        raise ConfigError(
            f"order of shape {order.shape} and dtype {order.dtype}: give integers (heads, "
            f"{num_tokens}), the token at each place of each head"
        )
    wrong = np.flatnonzero((np.sort(order, axis=1) != np.arange(num_tokens)).any(axis=1))
    if wrong.size:
        raise ConfigError(f"order[{wrong[0]}] is not an order of the {num_tokens} tokens")
    return order.astype(np.int64)
