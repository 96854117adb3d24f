"""Where the blocks of a sequence are before attention, and of which tokens they are."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from bascule.arrays import Ints, frozen
from bascule.errors import ConfigError
from bascule.plan.checks import array, integer, ints, put
from bascule.plan.sparse.counts import MAX_RING, check_lens, check_ranks

MAX_BLOCKS = 2**20
"""Most blocks of a sequence."""

MAX_MESH_RANKS = 2**15
"""Most ranks of a mesh: their numbers are 16 bits wide where they are sorted."""


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The blocks of a sequence at home: a rank has the tokens of a block for all heads.

    A rank holds its tokens in the order of the sequence. Ranks are numbered ring by Ulysses: rank =
    ring rank * U + Ulysses rank.

    Heads may have token orders of their own, as in PAROAttention. Tokens are at home as without,
    but the blocks of a head are cut from its order: their tokens come from many ranks, and `home`
    is where such a block is computed if the plan leaves it.

    Attributes:
        lens: (n,) tokens of each block.
        home: (n,) rank that has them.
        order: (heads, tokens) token of the sequence at each place of each head. None: all heads
            have the order of the sequence.

    Raises:
        ConfigError: There is not one home a block, or an order is not a permutation.
    """

    lens: Ints
    home: Ints
    order: Ints | None = None

    def __post_init__(self) -> None:
        lens, home = check_lens("lens", self.lens), ints("home", self.home)
        if lens.shape != home.shape:
            raise ConfigError(f"{home.size} homes for {lens.size} blocks: give one each")
        put(self, "lens", frozen(lens))
        put(self, "home", frozen(home))
        if self.order is not None:
            order = _order_of(array("order", self.order), int(lens.sum()))
            put(self, "order", frozen(order))

    @classmethod
    def striped(cls, lens: npt.ArrayLike, ulysses_degree: int, ring_degree: int) -> Self:
        """Block i on ring rank i mod R, and there on Ulysses rank (i // R) mod U.

        Neighbouring blocks see about as much as each other, so that ring ranks have about the same
        work before anything is known of the masks.
        """
        check_degrees(ulysses_degree, ring_degree)
        lens = check_lens("lens", lens)
        place = np.arange(lens.size)
        ulysses = place // ring_degree % ulysses_degree
        return cls(lens, place % ring_degree * ulysses_degree + ulysses)

    @classmethod
    def contiguous(cls, lens: npt.ArrayLike, ulysses_degree: int, ring_degree: int) -> Self:
        """A run of blocks on each rank; runs differ by one block at most."""
        check_degrees(ulysses_degree, ring_degree)
        lens = check_lens("lens", lens)
        return cls(lens, np.arange(lens.size) * (ulysses_degree * ring_degree) // max(lens.size, 1))

    def offsets(self, num_ranks: int) -> tuple[Ints, Ints]:
        """(n,) first row of each block on its rank, and (num_ranks,) tokens of each rank."""
        check_ranks("home", self.home, num_ranks)
        order = np.argsort(self.home, kind="stable")
        tokens = np.bincount(self.home, self.lens, num_ranks).astype(np.int64)
        ends = np.cumsum(self.lens[order]) - self.lens[order]
        first = np.empty_like(self.lens)
        first[order] = ends - (np.cumsum(tokens) - tokens)[self.home[order]]
        return first, tokens

    @cached_property
    def digest(self) -> bytes:
        """Of all its integers; equal on ranks that agree."""
        parts = (self.lens, self.home) if self.order is None else (self.lens, self.home, self.order)
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(np.array([*part.shape, -1], dtype="<i8").tobytes())
            digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        return digest.digest()


def block_lens(segments: npt.ArrayLike, block: int) -> Ints:
    """(n,) tokens of each block of a sequence of segments, such as text and video.

    Blocks never straddle segments, so the last one of each may be short.

    Raises:
        ConfigError: A segment is negative, or a block has no token.
    """
    tokens = check_lens("segments", segments)
    if integer("block", block) < 1:
        raise ConfigError(f"block is {block}: a block has at least one token")
    counts = -(-tokens // block)
    if int(counts.sum()) > MAX_BLOCKS:
        raise ConfigError(
            f"block is {block}: {int(tokens.sum())} tokens make {int(counts.sum())} blocks, and "
            f"at most {MAX_BLOCKS} can be planned for: use larger blocks"
        )
    lens = np.full(counts.sum(), block, np.int64)
    last, used = np.cumsum(counts) - 1, tokens > 0
    lens[last[used]] -= (counts * block - tokens)[used]
    return lens


def check_degrees(ulysses_degree: int, ring_degree: int) -> None:
    """Refuse a mesh without ranks, or with more than can be planned for.

    Raises:
        ConfigError: Says both degrees.
    """
    degrees = [integer("ulysses_degree", ulysses_degree), integer("ring_degree", ring_degree)]
    if min(degrees) < 1 or degrees[0] * degrees[1] > MAX_MESH_RANKS or degrees[1] > MAX_RING:
        raise ConfigError(
            f"Ulysses degree {ulysses_degree}, ring degree {ring_degree}: both must be at least 1, "
            f"a ring at most {MAX_RING}, and their product at most {MAX_MESH_RANKS}"
        )


def _order_of(order: npt.NDArray[Any], num_tokens: int) -> Ints:
    if order.ndim != 2 or order.shape[1] != num_tokens or order.dtype.kind not in "iu":
        raise ConfigError(
            f"order of shape {order.shape} and dtype {order.dtype}: give integers (heads, "
            f"{num_tokens}), the token at each place of each head"
        )
    wrong = np.flatnonzero((np.sort(order, axis=1) != np.arange(num_tokens)).any(axis=1))
    if wrong.size:
        raise ConfigError(f"order[{wrong[0]}] is not an order of the {num_tokens} tokens")
    return order.astype(np.int64)
