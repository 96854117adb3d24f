"""Ulysses attention that computes while rows travel, alone or around a ring.

A rank attends with its own tokens' queries to its own tokens' keys while queries, keys and values
come. All queries then see the keys of each ring rank in turn; in the last round those of others
come first, and its own attend while their results travel. Shapes: as in `usp`.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from bascule.attention.call import AttentionCall, Tile, Tiles
from bascule.attention.kernels.protocol import wide_dtype
from bascule.attention.mask import EVERYTHING, AttentionMask
from bascule.attention.ring import Merged, rotate
from bascule.comm.quantized import Quantized


def forward(
    xs: Sequence[Tensor], tiles: Tiles, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (B, T, H, D) the output at home, and `whole`, `out` and `lse` as `usp.forward` does.

    `xs` are (B, T, heads, D) q, k and v.
    """
    heads, quantized = call.heads, call.quantized
    assert heads is not None
    own = heads.own_tokens
    mine = [heads.own_heads(x) for x in xs]
    mine = mine if quantized is None else [_arrived(x, quantized) for x in mine]
    own_q, own_k, own_v = [x.transpose(1, 2) for x in mine]
    arrive = heads.start_to_heads(xs, call.where, quantized)
    merged = Merged(own_q)
    try:
        _attend(merged, (own_q, own_k, own_v), own, own, tiles[call.owner(0)], call)
    finally:  # also after an error: memory that is written to must not be left
        whole = arrive()
    parts = whole.split([own_q.shape[1], own_k.shape[1], own_k.shape[1]], 2)
    q, k, v = [x.transpose(1, 2) for x in parts]
    bounds = (0, own.start), (own.stop, q.shape[2])
    others = [slice(first, end) for first, end in bounds if first < end]
    theirs = [Merged(q[:, :, part]) for part in others]
    out = q.new_empty(parts[0].shape)
    lse = q.new_empty(q.shape[:3], dtype=wide_dtype(q))
    leaving: list[Callable[[], list[Tensor]]] = []

    def attend(turn: int, keys: Tensor, values: Tensor) -> None:
        every, seen = slice(0, keys.shape[2]), tiles[call.owner(turn)]
        for one, part in zip(theirs, others, strict=True):
            _attend(one, (q[:, :, part], keys, values), part, every, seen, call)
        if turn == len(call.kv_lens) - 1:
            for one, part in zip(theirs, others, strict=True):
                done, lse[:, :, part] = one.result()
                out[:, part] = done.transpose(1, 2)
            leaving.append(heads.start_to_tokens(out, [q.shape[1]], call.where, quantized))
        for columns in others if turn == 0 else [every]:
            here = keys[:, :, columns], values[:, :, columns]
            _attend(merged, (own_q, *here), own, columns, seen, call)

    try:
        rotate(call, k, v, attend)
    finally:
        arrived = [one() for one in leaving]
    done, lse[:, :, own] = merged.result()
    out[:, own] = done.transpose(1, 2)
    ((home,),) = arrived
    mine = out[:, own] if quantized is None else _arrived(out[:, own], quantized)
    heads.own_heads(home).copy_(mine)
    return home, whole, out, lse


def _arrived(x: Tensor, quantized: Quantized) -> Tensor:
    """Round (B, T, heads, D) as it would arrive."""
    return quantized.unpack(quantized.pack(x, 1), x.dtype, 1)


def _attend(
    merged: Merged,
    qkv: Sequence[Tensor],
    rows: slice,
    columns: slice,
    tiles: Sequence[Tile],
    call: AttentionCall,
) -> None:
    """Add what some queries, `rows`, see of some keys, `columns`, to what they saw before."""
    q, k, v = qkv
    for tile in tiles:
        for seen, mask in _parts(tile.mask, rows, columns):
            at = slice(seen.start - columns.start, seen.stop - columns.start)
            if q.numel() and k[:, :, at].numel():
                part = call.kernel.forward(q, k[:, :, at], v[:, :, at], mask, call.scale)
                merged.add(slice(None), *part)


def _parts(mask: AttentionMask, rows: slice, columns: slice) -> list[tuple[slice, AttentionMask]]:
    """Return which of some columns some rows of a mask see, and how.

    Columns hold those of the rows' numbers, all or none.
    """
    if mask.causal:
        parts = [(slice(columns.start, min(columns.stop, rows.start)), EVERYTHING)]
        if columns.start <= rows.start and rows.stop <= columns.stop:
            parts.append((rows, mask))
        return [part for part in parts if part[0].start < part[0].stop]
    bias = mask.bias
    if bias is None:
        return [(columns, mask)]
    bias = bias[:, :, rows] if bias.shape[2] > 1 else bias
    bias = bias[:, :, :, columns] if bias.shape[3] > 1 else bias
    return [(columns, AttentionMask(bias=bias))]
