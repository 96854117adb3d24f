"""Masks for tests, and all ranks of a sparse plan in one process: what each has, and computes."""

import numpy as np
import numpy.typing as npt

from bascule.arrays import Ints
from bascule.plan.sparse import BlockLayout, PackedRows, SparsePlan

Bools = npt.NDArray[np.bool_]


def random_mask(shape: tuple[int, int, int], density: float, seed: int) -> Bools:
    """Every block on its own."""
    return np.random.default_rng(seed).random(shape) < density


def toeplitz_mask(shape: tuple[int, int, int], seed: int) -> Bools:
    """Bands of a width that differs by head and drifts along the queries, and some noise."""
    random = np.random.default_rng(seed)
    heads, q, kv = (np.arange(size).reshape(-1, *[1] * (2 - i)) for i, size in enumerate(shape))
    width = random.uniform(0.05, 0.6, heads.size)[:, None, None] * (1 + q / shape[1]) * shape[2]
    near = np.abs(q * shape[2] / max(shape[1], 1) - kv) < width
    return near ^ (random.random(shape) < 0.05)


def clustered_mask(shape: tuple[int, int, int], seed: int) -> Bools:
    """Broad queries at one end, popular keys at the other, heads of very different densities."""
    random = np.random.default_rng(seed)
    score = random.normal(0.0, 0.5, shape)
    score += np.linspace(2.0, -2.0, shape[1])[:, None] + np.linspace(-1.0, 1.0, shape[2]) ** 3
    return score > random.normal(0.0, 1.0, shape[0])[:, None, None]


MASK_KINDS = ("random", "toeplitz", "clustered")


def mask_of(kind: str, shape: tuple[int, int, int], seed: int = 0) -> Bools:
    """One of these kinds."""
    if kind == "random":
        return random_mask(shape, 0.3, seed)
    return (toeplitz_mask if kind == "toeplitz" else clustered_mask)(shape, seed)


def at_home(values: npt.NDArray, layout: BlockLayout, rank: int) -> npt.NDArray:
    """(rows, ...) of (batch, heads, tokens, ...): what a rank has."""
    own = values[:, :, np.repeat(layout.home, layout.lens) == rank]
    return own.reshape(-1, *values.shape[3:])


def tokens_of(layout: BlockLayout, head: int, block: int) -> Ints:
    """Places in the sequence of the tokens of a head's block."""
    first = int(layout.lens[:block].sum())
    places = np.arange(first, first + int(layout.lens[block]))
    return places if layout.order is None else layout.order[head, places]


def packed(values: npt.NDArray, rows: list[tuple[int, int]], layout: BlockLayout) -> npt.NDArray:
    """(rows, ...) the tokens of (head, block) rows, for each batch item, one after another."""
    parts = [np.zeros((0, *values.shape[3:]), values.dtype)]
    for item in values:
        parts += [item[head, tokens_of(layout, head, block)] for head, block in rows]
    return np.concatenate(parts)


def listed(rows: PackedRows) -> list[tuple[int, int]]:
    """(head, block) pairs."""
    return list(zip(rows.heads.tolist(), rows.blocks.tolist(), strict=True))


def labels(kind: int, batch: int, heads: int, tokens: int) -> Ints:
    """(batch, heads, tokens, 4): what a row is."""
    grid = np.indices((batch, heads, tokens)).transpose(1, 2, 3, 0)
    return np.concatenate([np.full((*grid.shape[:3], 1), kind), grid], axis=3)


def dense_masks(plan: SparsePlan, masks: Bools) -> Bools:
    """(..., heads, tokens, tokens) of masks (..., heads, q_blocks, kv_blocks), block by block."""
    group = len(plan.ring_of) // plan.num_kv_heads
    size = int(plan.q.lens.sum()), int(plan.kv.lens.sum())
    dense = np.zeros((*masks.shape[:-2], *size), np.bool_)
    for head, i, j in np.ndindex(*masks.shape[-3:]):
        rows, columns = tokens_of(plan.q, head, i), tokens_of(plan.kv, head // group, j)
        dense[..., head, rows[:, None], columns] = masks[..., head, i, j, None, None]
    return dense
