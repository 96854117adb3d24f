"""The work in block masks, and how uneven it is.

A query block and a key block that a head computes are q_len x kv_len of work, in tokens; without
lengths 1, as in db-SP. All sums are of integers below 2^53 in float64, the same on every machine.

Legend: see `sparse`; C columns (key blocks, or ring ranks).
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from bascule.arrays import Bools, Floats, Ints
from bascule.errors import ConfigError
from bascule.plan.checks import array, ints, whole
from bascule.plan.sequences import MAX_LENGTH

Work = npt.NDArray[Any]
"""(H, Q, C) bool masks, whose columns are key blocks, or counts of `block_counts`."""

_BITS_PER_WORD = 64


def block_counts(
    masks: npt.ArrayLike,
    *,
    kv_lens: npt.ArrayLike | None = None,
    kv_of: npt.ArrayLike | None = None,
    ring_degree: int = 1,
) -> Ints:
    """Count the keys (H, Q, R) that a query block of a head sees, by the ring rank that has them.

    Ranks send each other these counts instead of masks: each counts for the query blocks it has.

    Args:
        masks: (H, Q, K) bool, True is computed. Fastest in C order.
        kv_lens: (K,) tokens of each key block. Default: 1 each, so that blocks are counted.
        kv_of: (K,) ring rank of each key block. Default: all on rank 0.
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
    """Return (words, ...): the last dim as bits, words first, so that sums run over long rows."""
    rows = np.packbits(masks.reshape(math.prod(masks.shape[:-1]), masks.shape[-1]), axis=-1)
    words = -(-masks.shape[-1] // _BITS_PER_WORD)
    padded = np.zeros((rows.shape[0], words * 8), np.uint8)
    padded[:, : rows.shape[1]] = rows
    return np.ascontiguousarray(padded.view(np.uint64).T)


def ring_work(work: Work, ring_of: Ints, ulysses_degree: int) -> Floats:
    """Return (U, Q, C): what query blocks see, summed over the heads whose ring (H, Q) is each."""
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
    """Return (R, R) from (Q, C): work of the queries of each ring rank on the keys of each."""
    places = np.eye(ring_degree)
    return places[q_of].T @ (matrix @ places[kv_of])


def check_masks(masks: npt.ArrayLike) -> Bools:
    """Return the masks as an array, if they are bool with three dims."""
    table = array("masks", masks)
    if table.dtype != np.bool_ or table.ndim != 3:
        raise ConfigError(
            f"masks of shape {table.shape} and dtype {table.dtype}: give bool (heads, q_blocks, "
            "kv_blocks), True where a block is computed"
        )
    return table


def check_work(work: npt.ArrayLike, q_blocks: int, kv_blocks: int, ring_degree: int) -> Work:
    """Return masks over these blocks, or counts for this ring, as an array."""
    table = array("work", work)
    is_mask = table.dtype == np.bool_
    shape = q_blocks, kv_blocks if is_mask else ring_degree
    if table.ndim != 3 or table.shape[1:] != shape or table.dtype.kind not in "biu":
        raise ConfigError(
            f"work of shape {table.shape} and dtype {table.dtype}: give bool masks (heads, "
            f"{q_blocks}, {kv_blocks}), or counts (heads, {q_blocks}, {ring_degree}) of "
            "block_counts"
        )
    if not is_mask and int(table.min(initial=0)) < 0:
        raise ConfigError(f"work of {table.min()}: counts must be at least 0")
    return table if is_mask else table.astype(np.int64)


def rounds_of(tiles: Floats) -> Floats:
    """Return (..., R, R) work of each ring rank in each round, from (..., R, R) tiles."""
    size: int = tiles.shape[-1]
    rank = np.arange(size)[:, None]
    return tiles[..., rank, (rank - np.arange(size)) % size]


def barrier_ends(tiles: Floats) -> Floats:
    """Return (...) when a ring ends whose ranks wait for each other in every round (db-SP)."""
    return rounds_of(tiles).max(-2, initial=0.0).sum(-1)


def coupled_ends(tiles: Floats) -> Floats:
    """Return (...) when a ring ends whose ranks wait for their neighbours' transfers alone.

    A transfer is posted when its round starts, at both ends, and takes no time:
    S_i(t+1) = max(S_i(t) + w_i(t), S_{i-1}(t), S_{i+1}(t)).
    """
    work = rounds_of(tiles)
    start = np.zeros(work.shape[:-1])
    for turn in range(work.shape[-1] - 1):
        neighbours = np.maximum(np.roll(start, 1, -1), np.roll(start, -1, -1))
        start = np.maximum(start + work[..., turn], neighbours)
    return (start + work[..., -1]).max(-1)


def over_mean(ends: Floats, tiles: Floats) -> float:
    """Return the last end over the mean work of a rank, of (.., R, R) tiles; at least 1."""
    mean = float(tiles.sum()) / (tiles.size // tiles.shape[-1])
    return max(float(ends.max()) / mean, 1.0) if mean > 0.0 else 1.0
