"""Kernels for block-sparse attention: queries see some blocks of the keys.

Shapes: queries (1, 1, Sq, D), keys (1, 1, Sk, D) and their blocks as in `BlockRows`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bascule.attention.kernels.protocol import (
    BlockForm,
    BlockRows,
    Grads,
    OutLse,
    Seen,
    blocks_of,
    no_module,
    nothing_seen,
    only_blocks,
    wide_dtype,
    with_adjacent_values,
)
from bascule.errors import ConfigError
from bascule.plan.routes import Ints

_aten: Any = torch.ops.aten


class CpuLoopKernel:
    """Torch's flash attention for CPUs, in a loop over query blocks: any floating dtype.

    A query block meets the key blocks that it sees, gathered next to each other, in one call.
    """

    def unfit(self, form: BlockForm) -> str | None:
        """As `BlockKernel`."""
        if form.device_type != "cpu":
            return f"runs on CPUs, not on {form.device_type}"
        return only_blocks(form)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> OutLse:
        """As `BlockKernel`."""
        rows = blocks_of(seen, q, k)
        q, k, v = map(with_adjacent_values, (q, k, v))
        keys, values = _Blocks(rows, k), _Blocks(rows, v)
        out, lse = nothing_seen(q)
        for at, columns in rows.runs:
            if columns.size:
                out[:, :, at], lse[:, :, at] = _aten._scaled_dot_product_flash_attention_for_cpu(
                    q[:, :, at], keys.take(columns), values.take(columns), scale=scale
                )
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        seen: Seen,
        scale: float,
    ) -> Grads:
        """As `BlockKernel`."""
        rows, wide = blocks_of(seen, q, k), wide_dtype(q)
        grad, q, k, v, out = map(with_adjacent_values, (grad, q, k, v, out))
        keys, values = _Blocks(rows, k), _Blocks(rows, v)
        dq = torch.zeros_like(q)
        dk, dv = (torch.zeros(k.shape, dtype=wide) for _ in range(2))
        dkeys, dvalues = _Blocks(rows, dk), _Blocks(rows, dv)
        for at, columns in rows.runs:
            if columns.size:
                parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *(grad[:, :, at], q[:, :, at], keys.take(columns), values.take(columns)),
                    *(out[:, :, at], lse[:, :, at], 0.0, False),
                    scale=scale,
                )
                dq[:, :, at] = parts[0]
                dkeys.add(columns, parts[1])
                dvalues.add(columns, parts[2])
        return dq, dk.to(k.dtype), dv.to(v.dtype)


class _Blocks:
    """Keys, values or their gradients (1, 1, Sk, D), by key block."""

    def __init__(self, rows: BlockRows, tokens: Tensor) -> None:
        self._bounds = rows.k_bounds
        self._tokens = tokens
        self._parts = tokens.tensor_split(rows.k_bounds[1:-1].tolist(), dim=2)

    def take(self, columns: Ints) -> Tensor:
        """The tokens of these blocks, next to each other; a view if they already are."""
        run = self._run(columns)
        return torch.cat(self._pick(columns), dim=2) if run is None else self._tokens[:, :, run]

    def add(self, columns: Ints, more: Tensor) -> None:
        """Add to the tokens of these blocks what `take` would give the place of."""
        run = self._run(columns)
        if run is not None:
            self._tokens[:, :, run] += more
            return
        parts = self._pick(columns)
        _aten._foreach_add_.List(parts, more.split([part.shape[2] for part in parts], dim=2))

    def _pick(self, columns: Ints) -> list[Tensor]:
        return [self._parts[column] for column in columns.tolist()]

    def _run(self, columns: Ints) -> slice | None:
        """Where the blocks are if nothing is between them."""
        first, last = int(columns[0]), int(columns[-1])
        if last - first + 1 != columns.size:
            return None
        return slice(int(self._bounds[first]), int(self._bounds[last + 1]))


class TritonKernel:
    """Triton kernels of `triton_sparse`: half and single precision, blocks of any length."""

    def unfit(self, form: BlockForm) -> str | None:
        """As `BlockKernel`."""
        if form.device_type != "cuda":
            return f"runs on CUDA devices, not on {form.device_type}"
        if form.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"takes bfloat16, float16 or float32, not {form.dtype}"
        if form.head_dim not in (16, 32, 64, 128):
            return f"takes head widths 16, 32, 64 and 128, not {form.head_dim}"
        return only_blocks(form) or no_module("triton")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> OutLse:
        """As `BlockKernel`."""
        from bascule.attention.kernels import triton_sparse

        return triton_sparse.attend(q, k, v, blocks_of(seen, q, k), scale)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        seen: Seen,
        scale: float,
    ) -> Grads:
        """As `BlockKernel`."""
        from bascule.attention.kernels import triton_sparse

        return triton_sparse.gradients(grad, q, k, v, out, lse, blocks_of(seen, q, k), scale)


class _ForwardOnly:
    """A kernel without backward."""

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        seen: Seen,
        scale: float,
    ) -> Grads:
        """Refused.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{type(self).__name__} has no backward: train with triton or flex")


class SpargeKernel(_ForwardOnly):
    """SpargeAttn's block-sparse kernel: 8-bit queries and keys, no LSE, no backward.

    Source: `block_sparse_sage2_attn_cuda` of spas_sage_attn/core.py. Its README has masks of 128
    queries by 64 keys; on devices of compute capability 9.0 the code reads them as 64 by 128.
    """

    def unfit(self, form: BlockForm) -> str | None:
        """As `BlockKernel`."""
        if form.needs_lse:
            return "gives no log-sum-exp, without which parts of a ring cannot be merged"
        return _no_quantized(form, "spas_sage_attn", (128,))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> OutLse:
        """As `BlockKernel`, except that the LSE of queries that see something is nan."""
        from spas_sage_attn import (  # pyright: ignore[reportMissingImports]
            block_sparse_sage2_attn_cuda,
        )

        rows = blocks_of(seen, q, k)
        is_hopper = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
        mask = _head_mask(rows, q.device, *((64, 128) if is_hopper else (128, 64)))
        out = block_sparse_sage2_attn_cuda(
            *(_heads(x, mask.shape[1]) for x in (q, k, v)),
            mask_id=mask,
            scale=scale,
            tensor_layout="HND",
        )
        lse = torch.full(q.shape[:3], math.nan, dtype=wide_dtype(q), device=q.device)
        return _without_unseeing(out.reshape(q.shape).to(q.dtype), lse, rows)


class ParoKernel(_ForwardOnly):
    """PAROAttention's block-sparse kernel: 8-bit queries and keys, with LSE, no backward.

    Source: `paroattn_qk_int8_pv_fp16_cuda` of paroattention/core.py, whose kernel reads masks of
    64 by 64 with as many columns as rows, contiguous.
    """

    def unfit(self, form: BlockForm) -> str | None:
        """As `BlockKernel`."""
        if torch.cuda.is_available() and torch.cuda.get_device_capability() != (8, 0):
            return "needs a device of compute capability 8.0"
        return _no_quantized(form, "paroattention", (64, 128))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> OutLse:
        """As `BlockKernel`."""
        from paroattention.core import (  # pyright: ignore[reportMissingImports]
            paroattn_qk_int8_pv_fp16_cuda,
        )

        rows = blocks_of(seen, q, k)
        mask = _head_mask(rows, q.device, 64, 64)
        if mask.shape[2] != mask.shape[3]:
            raise ConfigError(
                f"kernel 'paro': {mask.shape[2]} blocks of queries and {mask.shape[3]} of keys a "
                "head: it takes as many of both, so use triton or flex"
            )
        out, lse = paroattn_qk_int8_pv_fp16_cuda(
            *(_heads(x, mask.shape[1]) for x in (q, k, v)),
            tensor_layout="HND",
            sm_scale=scale,
            sparse=mask,
            return_lse=True,
        )
        return _without_unseeing(out.reshape(q.shape), lse.reshape(q.shape[:3]), rows)


def _no_quantized(form: BlockForm, module: str, blocks: Sequence[int]) -> str | None:
    """Why a kernel with 8-bit queries and keys cannot compute that."""
    if form.device_type != "cuda":
        return f"runs on CUDA devices, not on {form.device_type}"
    if form.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 or float16, not {form.dtype}"
    if form.head_dim not in (64, 128):
        return f"takes head widths 64 and 128, not {form.head_dim}"
    if form.block is not None and form.block not in blocks:
        return f"takes blocks of {' or '.join(map(str, blocks))} tokens, not {form.block}"
    return only_blocks(form) or no_module(module)


def _head_mask(rows: BlockRows, device: torch.device, queries: int, keys: int) -> Tensor:
    """(1, H, Q / H, K / H) what is seen, in tiles of so many queries and keys; contiguous.

    The heads are the most parts of equal size that see nothing of each other.

    Raises:
        ConfigError: Blocks are not equally long, or do not consist of tiles.
    """

    def make() -> Tensor:
        lens = np.concatenate([np.diff(rows.q_bounds), np.diff(rows.k_bounds)])
        if lens.min() != lens.max() or rows.block % max(queries, keys):
            raise ConfigError(
                f"blocks of {lens.min()} to {lens.max()} tokens: kernels with 8-bit queries and "
                f"keys take equal ones of {max(queries, keys)} each, or a multiple, so use triton "
                "or flex"
            )
        num_q, num_k = rows.q_bounds.size - 1, rows.k_bounds.size - 1
        row_of, columns = np.repeat(np.arange(num_q), rows.counts), rows.columns
        most = math.gcd(num_q, num_k)
        num_heads = next(
            heads
            for heads in range(most, 0, -1)
            if most % heads == 0
            and (row_of // (num_q // heads) == columns // (num_k // heads)).all()
        )
        num_q, num_k = num_q // num_heads, num_k // num_heads
        mask = np.zeros((1, num_heads, num_q, num_k), dtype=np.bool_)
        mask[0, row_of // num_q, row_of % num_q, columns % num_k] = True
        tiled = mask.repeat(rows.block // queries, axis=2).repeat(rows.block // keys, axis=3)
        return torch.from_numpy(tiled).to(device)

    return rows.keep(("heads", device, queries, keys), make)


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """(1, H, S, D) packed rows of H heads."""
    return x.contiguous().view(1, num_heads, -1, x.shape[3])


def _without_unseeing(out: Tensor, lse: Tensor, rows: BlockRows) -> OutLse:
    """Out 0 and LSE -inf for queries that see nothing."""
    is_empty = torch.from_numpy(np.repeat(rows.counts == 0, np.diff(rows.q_bounds))).to(out.device)
    return out.masked_fill(is_empty[:, None], 0.0), lse.masked_fill(is_empty, -math.inf)
