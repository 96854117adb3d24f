"""Make block masks from the positions of tokens on a video's grid, in raster order.

A block sees another block if any of its tokens does. Shapes: N query blocks, M key blocks; p parts
of blocks that lie in one frame.
"""

import math
from collections.abc import Callable

import numpy as np

from bascule.arrays import Bools, Ints, cumulative
from bascule.errors import ConfigError

Grid = tuple[int, int, int]
"""Frames, height and width, in tokens."""


def sliding_tiles(q_lens: Ints, kv_lens: Ints, grid: Grid, tile: Grid, window: Grid) -> Bools:
    """Return (N, M) mask: tokens see the tiles in a window around theirs, kept in the grid."""
    if min(*tile, *window) < 1 or not all(size % 2 for size in window):
        wrong = f"sliding_tiles: tiles {tile} and a window {window}"
        raise ConfigError(f"{wrong}: give sizes of at least 1, and odd ones in the window")
    sees = np.ones((1, 1), np.bool_)
    for length, size, width in zip(grid, tile, window, strict=True):
        num, half = -(-length // size), width // 2
        places = np.arange(num)
        centres = places.clip(half, max(num - 1 - half, half))
        sees = np.kron(sees, np.abs(centres[:, None] - places) <= half)
    nums = [-(-length // size) for length, size in zip(grid, tile, strict=True)]
    places = np.unravel_index(np.arange(math.prod(grid)), grid)
    at = [place // size for place, size in zip(places, tile, strict=True)]
    tile_of = np.ravel_multi_index(at, nums)
    q, kv = (np.zeros((lens.size, len(sees)), np.float32) for lens in (q_lens, kv_lens))
    for table, lens in ((q, q_lens), (kv, kv_lens)):
        table[np.repeat(np.arange(lens.size), lens), tile_of] = 1.0
    return q @ sees.astype(np.float32) @ kv.T > 0.0


def by_frames(
    q_lens: Ints, kv_lens: Ints, grid: Grid, sees: Callable[[Ints, Ints], Bools]
) -> Bools:
    """Return (N, M) mask: tokens see frame 0, and tokens for which `sees(frame and place gaps)`.

    If `sees` is False for a gap of places, it must be False for all larger gaps.
    """
    size = grid[1] * grid[2]
    q_starts, q_bounds = _parts(q_lens, size)
    kv_starts, kv_bounds = _parts(kv_lens, size)
    q_frame, q_first = divmod(q_bounds[:-1], size)
    frame, first = divmod(kv_bounds[:-1], size)
    q_last, last = q_first + np.diff(q_bounds) - 1, first + np.diff(kv_bounds) - 1
    far = np.abs(q_frame[:, None] - frame)
    gap = np.maximum(np.maximum(q_first[:, None] - last, first - q_last[:, None]), 0)
    seen = sees(far, gap) | (frame == 0)
    by_row = np.logical_or.reduceat(seen, q_starts, axis=0)
    return np.logical_or.reduceat(by_row, kv_starts, axis=1)


def _parts(lens: Ints, size: int) -> tuple[Ints, Ints]:
    """Return (N,) first part of each block, and (p + 1,) bounds of the parts in one frame each."""
    blocks = cumulative(lens)
    bounds = np.unique(np.concatenate([blocks, np.arange(0, int(blocks[-1]), size)]))
    return np.searchsorted(bounds, blocks[:-1]), bounds
