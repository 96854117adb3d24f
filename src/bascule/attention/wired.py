"""Exchanges of attention with a wire: rows are packed before them and unpacked after them.

Compilers see the packing, and fuse it with what computes the rows; the exchanges are operators of
`ops`. What a rank sends to itself is rounded, too, so that a row is the same wherever it is used.

The forward uses the rows as they were received; the backward treats the transport as the identity,
and gradients travel as they are. Source: the straight-through estimator (arXiv:1308.3432).

Shapes: as in `mesh`.
"""

from typing import Any

import torch
from torch import Tensor

from bascule.attention import ops
from bascule.comm.quantize import Format, Wire

HeadRun = tuple[int, int]  # (first, number) key-value heads of this rank
Geometry = tuple[int, list[int], bool, int, str, str]
"""Arguments of `ops.tokens_to_heads` after `xs`."""


def tokens_to_heads(
    q: Tensor, k: Tensor, v: Tensor, wire: Wire | None, own: HeadRun, geometry: Geometry
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.tokens_to_heads` of queries, keys and values. One all-to-all."""
    if wire is None:
        q, k, v = ops.tokens_to_heads([q, k, v], *geometry)
        return q, k, v
    centres = wire.k_centre, wire.v_centre
    return _ToHeads.apply(wire.format, own, geometry, *centres, q, k, v)


def heads_to_tokens(out: Tensor, wire: Wire | None, own: HeadRun, geometry: Geometry) -> Tensor:
    """`ops.heads_to_tokens` of attention's output. One all-to-all."""
    if wire is None:
        return ops.heads_to_tokens([out], *geometry)[0]
    return _ToTokens.apply(wire.format, own, geometry, wire.v_centre, out)


def ring_settings(wire: Wire | None, own: HeadRun) -> tuple[str, Tensor | None, Tensor | None]:
    """The last arguments of `ops.ring_attention`: format and centres of this rank's heads."""
    if wire is None:
        return "", None, None
    mine = wire.of_heads(*own)
    return mine.format, mine.k_centre, mine.v_centre


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fmt: Format,
        own: HeadRun,
        geometry: Geometry,
        k_centre: Tensor | None,
        v_centre: Tensor | None,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.geometry = geometry
        wire = Wire(fmt, k_centre, v_centre)
        mine = wire.of_heads(*own)
        before = (None, wire.k_centre, wire.v_centre)
        after = (None, mine.k_centre, mine.v_centre)
        packed = [wire.pack(x, centre) for x, centre in zip(xs, before, strict=True)]
        rows = ops.tokens_to_heads(packed, *geometry)
        pairs = zip(rows, after, strict=True)
        return tuple(mine.unpack(x, xs[0].dtype, centre) for x, centre in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *(None,) * 5, *ops.heads_to_tokens(list(grads), *ctx.geometry)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fmt: Format,
        own: HeadRun,
        geometry: Geometry,
        v_centre: Tensor | None,
        out: Tensor,
    ) -> Tensor:
        ctx.geometry = geometry
        wire = Wire(fmt, v_centre=v_centre)
        packed = wire.pack(out, wire.of_heads(*own).out_centre(out.shape[1]))
        (rows,) = ops.heads_to_tokens([packed], *geometry)
        return wire.unpack(rows, out.dtype, wire.out_centre(rows.shape[1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *(None,) * 4, *ops.tokens_to_heads(list(grads), *ctx.geometry)
