"""Blocks of a sequence: their tokens, their ranks, the work in their masks, its imbalance.

A causal mask of six blocks on a ring of three ranks. A number is the ring rank that computes:

    runs of blocks           blocks in turns (`BlockLayout.striped`)
    q0  0 . . . . .          q0  0 . . . . .
    q1  0 0 . . . .          q1  1 1 . . . .
    q2  1 1 1 . . .          q2  2 2 2 . . .
    q3  1 1 1 1 . .          q3  1 1 1 1 . .
    q4  2 2 2 2 2 .          q4  2 2 2 2 2 .
    q5  2 2 2 2 2 2          q5  0 0 0 0 0 0
    work of ranks 3, 7, 11   work of ranks 7, 6, 8

A query block and a key block that a head computes count as q_len x kv_len of work; without lengths,
as 1, like in db-SP. Sums are of integers below 2^53 in float64, so every machine gets the same.

Legend: see `sparse`; C columns (key blocks, or ring ranks).
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from bascule.arrays import Bools, Floats, Ints, frozen
from bascule.checks import MAX_LENGTH, array, ints, whole
from bascule.errors import ConfigError

Counts = npt.NDArray[Any]
"""(H, Q, C) bool masks over key blocks, or counts of keys as `block_counts` returns them."""

Number = TypeVar("Number", int, Ints)

_BITS_PER_WORD = 64


def block_counts(
    masks: npt.ArrayLike,
    *,
    kv_lens: npt.ArrayLike | None = None,
    kv_of: npt.ArrayLike | None = None,
    ring_degree: int = 1,
) -> Ints:
    """Count the keys (H, Q, R) that each query block of a head sees, by the keys' ring rank.

    Each rank counts for its own query blocks, and ranks exchange the counts instead of masks.

    Args:
        masks: (H, Q, K) bool, True where computed. Fastest in C order.
        kv_lens: (K,) tokens of each key block. Default: 1, which counts blocks.
        kv_of: (K,) ring rank of each key block. Default: 0.
        ring_degree: R.
    """
    masks, ring_degree = check_masks(masks), whole("ring_degree", ring_degree, 1)
    num_blocks = masks.shape[2]
    ones = np.ones(num_blocks, np.int64)
    lens = ones if kv_lens is None else ints("kv_lens", kv_lens, num_blocks, MAX_LENGTH)
    ranks = 0 * ones if kv_of is None else ints("kv_of", kv_of, num_blocks, ring_degree - 1)
    longest = int(lens.max(initial=0))
    words, counts = _words(masks), np.empty((ring_degree, *masks.shape[:2]), np.int64)
    small = np.min_scalar_type(num_blocks)
    for rank in range(ring_degree):
        chosen = words if ring_degree == 1 else words & _words(ranks == rank)
        blocks = np.bitwise_count(chosen).sum(0, dtype=small).reshape(masks.shape[:2])
        np.multiply(blocks, longest, out=counts[rank], dtype=np.int64)
        short = np.flatnonzero((ranks == rank) & (lens < longest))
        counts[rank] -= masks[..., short] @ (longest - lens[short])
    return np.ascontiguousarray(counts.transpose(1, 2, 0))


def _words(masks: Bools) -> npt.NDArray[np.uint64]:
    """Pack the last dim into bits, (words, rows): words first, so that sums run over long rows."""
    rows = np.packbits(masks.reshape(math.prod(masks.shape[:-1]), masks.shape[-1]), axis=-1)
    words = -(-masks.shape[-1] // _BITS_PER_WORD)
    padded = np.zeros((rows.shape[0], words * 8), np.uint8)
    padded[:, : rows.shape[1]] = rows
    return np.ascontiguousarray(padded.view(np.uint64).T)


def ring_work(work: Counts, ring_of: Ints, ulysses_degree: int) -> Floats:
    """Return (U, Q, C) sums of `work` over the heads of each ring; `ring_of` is (H, Q)."""
    masks = work.dtype == np.bool_
    values = np.ascontiguousarray(work).view(np.uint8) if masks else work
    # Bytes are summed eight times as fast as words, as long as no sum passes 255.
    dtype = np.min_scalar_type(work.shape[0]) if masks else work.dtype
    sums = np.zeros((ulysses_degree, *work.shape[1:]), dtype)
    for head, rings in zip(values, ring_of, strict=True):
        first = rings[0] if rings.size else 0
        if (rings == first).all():
            np.add(sums[first], head, out=sums[first])
        else:
            for ring in np.unique(rings):
                sums[ring][rings == ring] += head[rings == ring]
    return sums.astype(np.float64)


def tile_work(matrix: Floats, q_of: Ints, kv_of: Ints, ring_degree: int) -> Floats:
    """Sum (Q, C) work to (R, R): the work of each ring rank's queries on each rank's keys."""
    places = np.eye(ring_degree)
    return places[q_of].T @ (matrix @ places[kv_of])


def check_masks(masks: npt.ArrayLike) -> Bools:
    """Return the masks as an array; refuse any but bool masks with three dims."""
    table = array("masks", masks)
    if table.dtype != np.bool_ or table.ndim != 3:
        wrong = f"masks of shape {table.shape} and dtype {table.dtype}"
        raise ConfigError(f"{wrong}: give bool (heads, q_blocks, kv_blocks), True where computed")
    return table


def check_work(work: npt.ArrayLike, q_blocks: int, kv_blocks: int, ring_degree: int) -> Counts:
    """Check masks over the blocks, or counts by ring rank; return an array."""
    table = array("work", work)
    is_mask = table.dtype == np.bool_
    shape = q_blocks, kv_blocks if is_mask else ring_degree
    if table.ndim != 3 or table.shape[1:] != shape or table.dtype.kind not in "biu":
        masks, counts = (f"(heads, {q_blocks}, {num})" for num in (kv_blocks, ring_degree))
        needed = f"give bool masks {masks}, or counts {counts} of block_counts"
        raise ConfigError(f"work of shape {table.shape} and dtype {table.dtype}: {needed}")
    if not is_mask and int(table.min(initial=0)) < 0:
        raise ConfigError(f"work has a count of {table.min()}: counts must be at least 0")
    return table if is_mask else table.astype(np.int64)


def rounds_of(tiles: Floats) -> Floats:
    """Return (..., R, R) work of each ring rank in each round, from (..., R, R) tiles."""
    size: int = tiles.shape[-1]
    rank = np.arange(size)[:, None]
    return tiles[..., rank, (rank - np.arange(size)) % size]


def barrier_ends(tiles: Floats) -> Floats:
    """Return (...) end times of rings whose ranks wait for each other every round (db-SP)."""
    return rounds_of(tiles).max(-2, initial=0.0).sum(-1)


def coupled_ends(tiles: Floats) -> Floats:
    """Return (...) end times of rings whose ranks wait only for their neighbours' transfers.

    Both ends post a transfer when its round starts, and it takes no time:
    S_i(t+1) = max(S_i(t) + w_i(t), S_{i-1}(t), S_{i+1}(t)).
    """
    work = rounds_of(tiles)
    start = np.zeros(work.shape[:-1])
    for turn in range(work.shape[-1] - 1):
        neighbours = np.maximum(np.roll(start, 1, -1), np.roll(start, -1, -1))
        start = np.maximum(start + work[..., turn], neighbours)
    return (start + work[..., -1]).max(-1)


def over_mean(ends: Floats, tiles: Floats) -> float:
    """Return the latest end time over a rank's mean work in (.., R, R) tiles; at least 1."""
    mean = float(tiles.sum()) / (tiles.size // tiles.shape[-1])
    return max(float(ends.max()) / mean, 1.0) if mean > 0.0 else 1.0


TURN_STEP = 889_516_852
"""Step of turns where no mask chooses another: the fraction of sqrt 2, times 2^31."""

_GOLDEN = 1_327_217_885  # fraction of the golden ratio, times 2^31
_NUM_STEPS = 64  # equal steps of a whole round of the ring that `best_step` tries


def turns(blocks: Number, ring_degree: int, step: int = TURN_STEP) -> Number:
    """Return the ring ranks of blocks (numbers below 2^32), which turns deal one to each rank.

    Turn t begins at rank floor(R frac(t step / 2^31)): with step 0 always at rank 0, with
    2^31 / R at rank t mod R. If all turns began at rank 0, and frames had a multiple of R blocks, a
    rank would get the same rows of every frame. Steps of sqrt 2 have no such period
    (`test_turns_are_even_whatever_the_frame`).
    """
    first = blocks // ring_degree * ring_degree * step >> 31
    return (blocks + first) % ring_degree


def best_step(works: Iterable[Floats], ring_degree: int, places: tuple[Ints, Ints]) -> int:
    """Return the step of turns with which rings compute some layers' work (Q, C) soonest.

    `places` numbers query blocks, and key blocks, as `turns` deals them. Equal rings get the first
    step of a fixed list, so all ranks choose alike.
    """
    even = [-(-(k << 31) // parts) for parts in (ring_degree, _NUM_STEPS) for k in range(parts)]
    ends = dict.fromkeys([TURN_STEP, _GOLDEN, *even], 0.0)
    for work in works:
        for step in ends:
            q, kv = (turns(place, ring_degree, step) for place in places)
            tiles = tile_work(work, q, kv, ring_degree)
            ends[step] += float(barrier_ends(tiles) + coupled_ends(tiles))
    return min(ends, key=lambda step: ends[step])


MAX_RING = 2**9  # most ranks of a ring: placing its blocks takes time by their cube
MAX_MESH_RANKS = 2**15  # most ranks of a mesh: their numbers are sorted as 16 bits


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The blocks of a sequence, and the rank that has the tokens of each, for all heads.

    Tokens are in the order of the sequence. If each head has its own order of tokens, as in
    PAROAttention, blocks follow that order. Then a block's tokens come from many ranks, and `home`
    is the rank that computes it by default.

    Attributes:
        lens: (n,) tokens of each block.
        home: (n,) rank of each block: ring rank * U + Ulysses rank.
        order: (heads, tokens) index of the token at each place of each head. None: in order.
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
    def striped(
        cls,
        lens: npt.ArrayLike,
        ring_degree: int,
        ulysses_degree: int,
        step: int = TURN_STEP,
        skip: int = 0,
    ) -> Self:
        """Deal blocks to ring ranks by `turns`, and turn t to Ulysses rank t mod U.

        More than `skip` blocks go on in turns after that many others, such as blocks of text.

        Neighbouring blocks see about equally much, so work is nearly even under any mask.
        """
        check_degrees(ring_degree, ulysses_degree)
        lens = ints("lens", lens, None, MAX_LENGTH)
        place = np.arange(lens.size, dtype=np.int64) + (skip if lens.size > skip else 0)
        ulysses = place // ring_degree % ulysses_degree
        return cls(lens, turns(place, ring_degree, step) * ulysses_degree + ulysses)

    @classmethod
    def contiguous(cls, lens: npt.ArrayLike, ring_degree: int, ulysses_degree: int) -> Self:
        """Put a run of blocks on each rank; the lengths of runs differ by at most one block."""
        check_degrees(ring_degree, ulysses_degree)
        lens = ints("lens", lens, None, MAX_LENGTH)
        return cls(lens, np.arange(lens.size) * (ulysses_degree * ring_degree) // max(lens.size, 1))

    def offsets(self, num_ranks: int) -> tuple[Ints, Ints]:
        """Return (n,) first rows of blocks on their ranks, and (num_ranks,) tokens of the ranks."""
        order = np.argsort(self.home, kind="stable")
        tokens = np.bincount(self.home, self.lens, num_ranks).astype(np.int64)
        ends = np.cumsum(self.lens[order]) - self.lens[order]
        first = np.empty_like(self.lens)
        first[order] = ends - (np.cumsum(tokens) - tokens)[self.home[order]]
        return first, tokens

    @cached_property
    def digest(self) -> bytes:
        """Digest of all integers of the layout, equal on ranks that agree."""
        parts = (self.lens, self.home) if self.order is None else (self.lens, self.home, self.order)
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(np.array([*part.shape, -1], dtype="<i8").tobytes())
            digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        return digest.digest()


def block_lens(segments: npt.ArrayLike, block: int) -> Ints:
    """Return (n,) tokens of the blocks of a sequence; no block has tokens of two segments."""
    tokens = ints("segments", segments, None, MAX_LENGTH)
    counts = -(-tokens // whole("block", block, 1))
    lens = np.full(counts.sum(), block, np.int64)
    last, used = np.cumsum(counts) - 1, tokens > 0
    lens[last[used]] -= (counts * block - tokens)[used]
    return lens


def check_degrees(ring_degree: int, ulysses_degree: int) -> None:
    """Refuse a mesh with too few or too many ranks."""
    ring = whole("ring_degree", ring_degree, 1, MAX_RING)
    ranks = whole("ulysses_degree", ulysses_degree, 1) * ring
    whole("ulysses_degree * ring_degree", ranks, 1, MAX_MESH_RANKS)


def _order_of(values: npt.ArrayLike, num_tokens: int) -> Ints:
    order = array("order", values)
    if order.ndim != 2 or order.shape[1] != num_tokens or order.dtype.kind not in "iu":
        wrong = f"order of shape {order.shape} and dtype {order.dtype}"
        raise ConfigError(f"{wrong}: give integers (heads, {num_tokens}), tokens by place")
    wrong = np.flatnonzero((np.sort(order, axis=1) != np.arange(num_tokens)).any(axis=1))
    if wrong.size:
        raise ConfigError(f"order[{wrong[0]}] is not an order of the {num_tokens} tokens")
    return order.astype(np.int64)
