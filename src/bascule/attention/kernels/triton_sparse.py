"""Block-sparse attention in Triton. Importing this module needs Triton.

A program works on a tile of a query block and goes through its key blocks, or, for gradients of
keys and values, the other way round: no two programs write to the same place. Source:
FlashAttention-2 (arXiv:2307.08691), algorithms 1, 2.

Shapes: queries (1, 1, Sq, D), keys (1, 1, Sk, D), blocks as in `BlockRows`; D is a power of two
from 16 on.
"""
# pyright: reportIndexIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# A kernel is in Triton's language, in which loops and constants have other types.

import math

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from bascule.attention.kernels.protocol import Grads, OutLse, nothing_seen
from bascule.attention.mask import BlockRows

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))


def sizes_of(dtype: torch.dtype, block: int | None = None) -> dict[str, int]:
    """Return tile sizes and launch options of a Triton program; `block` is None for gradients."""
    queries, keys, num_warps, num_stages = 64, 64, 4, 1
    if dtype == torch.float32:
        queries = keys = 32
    elif block is not None:
        num_stages = 2
        if block > 64:
            queries, num_warps = 128, 8
    return {"QUERIES": queries, "KEYS": keys, "num_warps": num_warps, "num_stages": num_stages}


def attend(q: Tensor, k: Tensor, v: Tensor, rows: BlockRows, scale: float) -> OutLse:
    """Return out and LSE over the blocks that are seen."""
    sizes, tables = sizes_of(q.dtype, rows.block), rows.on(q.device)
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse = nothing_seen(q)
    _forward[(rows.q_bounds.size - 1, triton.cdiv(rows.block, sizes["QUERIES"]))](
        *(q, k, v, out, lse),
        *(tables.q_bounds, tables.k_bounds, tables.row_bounds, tables.columns, scale),
        D=q.shape[3],
        PER_BLOCK=triton.cdiv(rows.block, sizes["KEYS"]),
        **sizes,
    )
    return out, lse


def gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: BlockRows,
    scale: float,
) -> Grads:
    """Return the gradients of q, k and v; `out` and `lse` cover all keys."""
    options = {"D": q.shape[3], **sizes_of(q.dtype)}
    by_queries, by_keys = (triton.cdiv(rows.block, options[x]) for x in ("QUERIES", "KEYS"))
    grad, q, k, v, lse = (x.contiguous() for x in (grad, q, k, v, lse))
    delta = (grad.float() * out.float()).sum(dim=-1)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    tables, by_key = rows.on(q.device), rows.transposed.on(q.device)
    _query_gradients[rows.q_bounds.size - 1, by_queries](
        *(grad, q, k, v, lse, delta, dq),
        *(tables.q_bounds, tables.k_bounds, tables.row_bounds, tables.columns, scale),
        PER_BLOCK=by_keys,
        **options,
    )
    _key_gradients[rows.k_bounds.size - 1, by_keys](
        *(grad, q, k, v, lse, delta, dk, dv),
        *(by_key.q_bounds, by_key.k_bounds, by_key.row_bounds, by_key.columns, scale),
        PER_BLOCK=by_queries,
        **options,
    )
    return dq, dk, dv


@triton.jit
def _tile(bounds, block, part, SIZE: tl.constexpr):
    """Return the first token of a tile, and which of the SIZE from there on are in the block."""
    first = tl.load(bounds + block) + part * SIZE
    return first.to(tl.int64), first + tl.arange(0, SIZE) < tl.load(bounds + block + 1)


@triton.jit
def _load(tokens, first, inside, SIZE: tl.constexpr, D: tl.constexpr):
    """Load (SIZE, D) tokens from `first` on; 0 for those outside of the block."""
    at = tl.arange(0, SIZE)[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(tokens + first * D + at, mask=inside[:, None], other=0.0)


@triton.jit
def _store(tokens, first, inside, values, SIZE: tl.constexpr, D: tl.constexpr):
    """Store what `_load` loads, in the dtype of the tokens."""
    at = tl.arange(0, SIZE)[:, None] * D + tl.arange(0, D)[None, :]
    values = values.to(tokens.dtype.element_ty)
    tl.store(tokens + first * D + at, values, mask=inside[:, None])


@triton.jit
def _forward(
    q_rows, k_rows, v_rows, out_rows, lse_rows,
    q_bounds, k_bounds, row_bounds, columns, scale,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    first, inside = _tile(q_bounds, block, tl.program_id(1), QUERIES)
    q = _load(q_rows, first, inside, QUERIES, D)
    peak = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, D), tl.float32)
    start, stop = tl.load(row_bounds + block), tl.load(row_bounds + block + 1)
    for step in range(start * PER_BLOCK, stop * PER_BLOCK):
        column = tl.load(columns + step // PER_BLOCK)
        first_key, is_key = _tile(k_bounds, column, step % PER_BLOCK, KEYS)
        k = _load(k_rows, first_key, is_key, KEYS, D)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        # Finite: the first tile of a block has a key.
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        v = _load(v_rows, first_key, is_key, KEYS, D)
        out = out * shrink[:, None]
        out = tl.dot(weights.to(v.dtype), v, out, input_precision="ieee")
        peak = higher
    total = tl.where(total == 0, 1.0, total)  # of a query that sees nothing
    _store(out_rows, first, inside, out / total[:, None], QUERIES, D)
    lse = (peak + tl.log2(total)) * LN2
    tl.store(lse_rows + first + tl.arange(0, QUERIES), lse, mask=inside)


@triton.jit
def _query_gradients(
    grad_rows, q_rows, k_rows, v_rows, lse_rows, delta_rows, dq_rows,
    q_bounds, k_bounds, row_bounds, columns, scale,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    first, inside = _tile(q_bounds, block, tl.program_id(1), QUERIES)
    q = _load(q_rows, first, inside, QUERIES, D)
    grad = _load(grad_rows, first, inside, QUERIES, D)
    at = first + tl.arange(0, QUERIES)
    lse = tl.load(lse_rows + at, mask=inside, other=0.0)
    delta = tl.load(delta_rows + at, mask=inside, other=0.0)
    dq = tl.zeros((QUERIES, D), tl.float32)
    start, stop = tl.load(row_bounds + block), tl.load(row_bounds + block + 1)
    for step in range(start * PER_BLOCK, stop * PER_BLOCK):
        column = tl.load(columns + step // PER_BLOCK)
        first_key, is_key = _tile(k_bounds, column, step % PER_BLOCK, KEYS)
        k = _load(k_rows, first_key, is_key, KEYS, D)
        v = _load(v_rows, first_key, is_key, KEYS, D)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        weights = tl.exp2((scores - lse[:, None]) * LOG2E)
        # Their scores are 0, whose weight may be infinite.
        weights = tl.where(is_key[None, :], weights, 0.0)
        dweights = tl.dot(grad, tl.trans(v), input_precision="ieee")
        dscores = weights * (dweights - delta[:, None])
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")
    _store(dq_rows, first, inside, dq * scale, QUERIES, D)


@triton.jit
def _key_gradients(
    grad_rows, q_rows, k_rows, v_rows, lse_rows, delta_rows, dk_rows, dv_rows,
    k_bounds, q_bounds, row_bounds, columns, scale,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    first, inside = _tile(k_bounds, block, tl.program_id(1), KEYS)
    k = _load(k_rows, first, inside, KEYS, D)
    v = _load(v_rows, first, inside, KEYS, D)
    dk = tl.zeros((KEYS, D), tl.float32)
    dv = tl.zeros((KEYS, D), tl.float32)
    start, stop = tl.load(row_bounds + block), tl.load(row_bounds + block + 1)
    for step in range(start * PER_BLOCK, stop * PER_BLOCK):
        column = tl.load(columns + step // PER_BLOCK)
        first_query, is_query = _tile(q_bounds, column, step % PER_BLOCK, QUERIES)
        q = _load(q_rows, first_query, is_query, QUERIES, D)
        grad = _load(grad_rows, first_query, is_query, QUERIES, D)
        at = first_query + tl.arange(0, QUERIES)
        lse = tl.load(lse_rows + at, mask=is_query, other=0.0)
        delta = tl.load(delta_rows + at, mask=is_query, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
        weights = tl.exp2((scores - lse[None, :]) * LOG2E)
        dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision="ieee")
        dweights = tl.dot(v, tl.trans(grad), input_precision="ieee")
        dscores = weights * (dweights - delta[None, :])
        dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee")
    _store(dk_rows, first, inside, dk * scale, KEYS, D)
    _store(dv_rows, first, inside, dv, KEYS, D)
