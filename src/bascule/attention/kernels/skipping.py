"""Kernels for block-sparse attention: queries see some blocks of the keys.

Shapes: queries (1, 1, Sq, D), keys (1, 1, Sk, D) and their blocks as in `BlockRows`.
"""

from typing import Any

import torch
from torch import Tensor

from bascule.arrays import Ints
from bascule.attention.kernels.protocol import (
    Attended,
    Grads,
    KernelQuery,
    OutLse,
    blocks_of,
    misfit,
    no_module,
    nothing_seen,
    wide_dtype,
    with_adjacent_values,
)
from bascule.attention.mask import AttentionMask, BlockRows

_aten: Any = torch.ops.aten


class CpuLoopKernel:
    """Torch's flash attention for CPUs, any floating dtype, in a loop over query blocks."""

    def unfit(self, form: KernelQuery) -> str | None:
        return misfit(form, device="cpu", needs_blocks=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        rows = blocks_of(mask)
        q, k, v = map(with_adjacent_values, (q, k, v))
        keys, values = _Blocks(rows, k), _Blocks(rows, v)
        out, lse = nothing_seen(q)
        for at, columns in rows.runs:
            if columns.size:
                out[:, :, at], lse[:, :, at] = _aten._scaled_dot_product_flash_attention_for_cpu(
                    q[:, :, at], keys.take(columns), values.take(columns), scale=scale
                )
        return out, lse

    def backward(self, grad: Tensor, done: Attended) -> Grads:
        q, k, v, out, lse, mask, scale = done
        rows, wide = blocks_of(mask), wide_dtype(q)
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
        """Return the rows of the blocks if nothing is between them."""
        first, last = int(columns[0]), int(columns[-1])
        if last - first + 1 != columns.size:
            return None
        return slice(int(self._bounds[first]), int(self._bounds[last + 1]))


class TritonKernel:
    """Triton kernels of `triton_sparse`: half and single precision, blocks of any length."""

    def unfit(self, form: KernelQuery) -> str | None:
        if form.head_dim not in (16, 32, 64, 128):
            return f"takes head widths 16, 32, 64 and 128, not {form.head_dim}"
        dtypes = torch.bfloat16, torch.float16, torch.float32
        refused = misfit(form, device="cuda", dtypes=dtypes, needs_blocks=True)
        return refused or no_module("triton")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        from bascule.attention.kernels import triton_sparse

        return triton_sparse.attend(q, k, v, blocks_of(mask), scale)

    def backward(self, grad: Tensor, done: Attended) -> Grads:
        q, k, v, out, lse, mask, scale = done
        from bascule.attention.kernels import triton_sparse

        return triton_sparse.gradients(grad, q, k, v, out, lse, blocks_of(mask), scale)
