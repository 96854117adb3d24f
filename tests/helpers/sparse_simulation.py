"""Masks for tests, and all ranks of a sparse plan in one process: what each has, and computes."""

from typing import Any

import numpy as np
import numpy.typing as npt

from bascule.arrays import Ints
from bascule.plan.sparse import BlockLayout, PackedRows, SparsePlan
from tests.helpers.simulation import exchange

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


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


def rank_rows(layout: BlockLayout, rank: int) -> Ints:
    """Tokens of the sequence that a rank has at home."""
    return np.flatnonzero(np.repeat(layout.home, layout.lens) == rank)


def at_home(values: npt.NDArray, layout: BlockLayout, rank: int) -> npt.NDArray:
    """(rows, ...) of (batch, heads, tokens, ...): what a rank has."""
    own = values[:, :, rank_rows(layout, rank)]
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


def attend(plan: SparsePlan, masks: Bools, q: Floats, k: Floats, v: Floats) -> Floats:
    """Masked attention as the ranks of a plan compute it; all shapes (batch, heads, tokens, D)."""
    ranks, batch = range(plan.num_ranks), len(q)
    tensors = (q, plan.q), (k, plan.kv), (v, plan.kv)
    home: list[Any] = [
        np.concatenate([at_home(*tensor, rank) for tensor in tensors]) for rank in ranks
    ]
    arrived: list[Any] = exchange([plan.route(rank, batch=batch) for rank in ranks], home)
    outs: list[Any] = [_own_part(plan, masks, rank, arrived, batch) for rank in ranks]
    back = exchange([plan.output_route(rank, batch=batch) for rank in ranks], outs)
    out = np.full_like(q, np.nan)
    for rank in ranks:
        own = rank_rows(plan.q, rank)
        out[:, :, own] = back[rank].reshape(batch, q.shape[1], own.size, q.shape[3])
    return out


def _own_part(
    plan: SparsePlan, masks: Bools, rank: int, arrived: list[Floats], batch: int
) -> Floats:
    """What one rank computes: its query rows on what every rank of its ring has."""
    group = len(plan.ring_of) // plan.num_kv_heads
    rows, keys, values = plan.q_rows(rank), {}, {}
    for owner in plan.owners(rank):
        kv, at = plan.kv_rows(owner), batch * int(plan.q_rows(owner).lens.sum())
        total = batch * int(kv.lens.sum())
        for store, offset in ((keys, at), (values, at + total)):
            place = offset
            for item in range(batch):
                for (head, block), length in zip(listed(kv), kv.lens.tolist(), strict=True):
                    assert (item, head, block) not in store, "a key block comes once"
                    store[item, head, block] = arrived[owner][place : place + length]
                    place += length
    out, place = np.zeros((batch * int(rows.lens.sum()), arrived[rank].shape[1])), 0
    for item in range(batch):
        for (head, block), length in zip(listed(rows), rows.lens.tolist(), strict=True):
            seen = [(item, head // group, int(j)) for j in np.flatnonzero(masks[head, block])]
            if sum(len(keys[key]) for key in seen):
                own = arrived[rank][place : place + length]
                k, v = (np.concatenate([store[key] for key in seen]) for store in (keys, values))
                weights = np.exp(own @ k.T)
                out[place : place + length] = weights @ v / weights.sum(axis=1, keepdims=True)
            place += length
    return out


def dense_attention(plan: SparsePlan, masks: Bools, q: Floats, k: Floats, v: Floats) -> Floats:
    """The same without any plan."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    weights = np.exp(q @ k.swapaxes(2, 3)) * dense_masks(plan, masks)
    total = weights.sum(axis=3, keepdims=True)
    return weights @ v / np.where(total > 0.0, total, 1.0)


def dense_masks(plan: SparsePlan, masks: Bools) -> Bools:
    """(..., heads, tokens, tokens) of masks (..., heads, q_blocks, kv_blocks), block by block."""
    group = len(plan.ring_of) // plan.num_kv_heads
    size = int(plan.q.lens.sum()), int(plan.kv.lens.sum())
    dense = np.zeros((*masks.shape[:-2], *size), np.bool_)
    for head, i, j in np.ndindex(*masks.shape[-3:]):
        rows, columns = tokens_of(plan.q, head, i), tokens_of(plan.kv, head // group, j)
        dense[..., head, rows[:, None], columns] = masks[..., head, i, j, None, None]
    return dense
