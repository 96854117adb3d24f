"""`AttentionCall`, a distributed attention without its tensors, and the loop of its ring.

Keys and values travel from rank to rank while each attends to those at hand: Ring Attention
(arXiv:2310.01889), double-buffered as in FastUSP: the send of the shard in hand is posted before
the attention that uses it, in R - 1 rounds. With `overlap`, a rank attends from its tokens to
its keys while the rows of Ulysses arrive, and to keys of other ranks while their results leave.

Shapes: as in `usp` and `registry`; R ring ranks. Round t works on the keys of rank (r - t) mod R.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bascule.attention.kernels.protocol import (
    Attended,
    AttentionKernel,
    merge,
    nothing_seen,
    wide_dtype,
)
from bascule.attention.mask import EVERYTHING, AttentionMask
from bascule.comm.collectives import Transfers
from bascule.comm.groups import RankGroup
from bascule.comm.heads import HeadExchange
from bascule.comm.quantized import Quantized


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Queries of this rank that attend to keys of one shard."""

    q: "slice | Tensor"  # queries of this rank: a slice, or int64 rows, each once
    k: "slice | Tensor"  # keys of the shard: a slice, or int64 rows, which may repeat
    mask: AttentionMask = EVERYTHING  # what the queries see of the keys


Tiles = Sequence[Sequence[Tile]]
"""The tiles of local queries and keys of each ring rank, by ring rank."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """A distributed attention without its tensors; made by a step, a mesh or a sparse plan."""

    kernel: AttentionKernel  # computes a tile
    scale: float  # factor of the scores, above 0
    # which keys local queries see; a function of the mask or None where it depends on the mask
    tiles: Tiles | Callable[[Tensor | None], Tiles]
    kv_lens: Sequence[int]  # (R,) keys that each ring rank has at home
    ring: RankGroup | None = None  # the ranks that pass keys and values on; None for one
    heads: HeadExchange | None = None  # None: one rank per ring rank, which has all heads
    wire: Quantized | None = None  # how rows travel; None: as they are, and so do gradients
    overlap: bool = False  # whether rows travel while the rank attends to its own tokens
    where: str = "attention"  # for errors and profiles
    name: str = ""  # with `sizes`, how a recorded program finds this call; see `usp`
    # S, this rank's heads of queries and keys (0 if unshared), then segments or a step's number
    sizes: Sequence[int] = ()
    count: Callable[[], object] | None = None  # called after each forward

    def owner(self, turn: int) -> int:
        """Return the ring rank whose keys are at hand in a round."""
        return ((0 if self.ring is None else self.ring.rank) - turn) % len(self.kv_lens)


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    """Attend to the keys of the whole ring; return out (B, H, Sq, D) and its LSE. No autograd."""
    if _is_one_tile(tiles) and q.numel() and k.numel():
        out, lse = call.kernel.forward(q, k, v, tiles[0][0].mask, call.scale)
        return (out if out.dtype == q.dtype else out.to(q.dtype)), lse
    merged = Merged(q)

    def attend(turn: int, keys: Tensor, values: Tensor) -> None:
        for tile in tiles[call.owner(turn)]:
            qkv = _rows(q, tile.q), _rows(keys, tile.k), _rows(values, tile.k)
            if qkv[0].numel() and qkv[1].numel():
                merged.add(tile.q, *call.kernel.forward(*qkv, tile.mask, call.scale))

    rotate(call, k, v, attend)
    return merged.result()


def ring_backward(
    grad: Tensor, saved: Sequence[Tensor], tiles: Tiles, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k and v, from `saved` q, k, v, output and LSE; 2 R - 1 exchanges."""
    q, k, v, out, lse = saved
    grad = grad.contiguous()
    if _is_one_tile(tiles) and q.numel() and k.numel():
        done = Attended(q, k, v, out, lse, tiles[0][0].mask, call.scale)
        dq, dk, dv = call.kernel.backward(grad, done)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    wide = wide_dtype(q)
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    coming = list[Callable[[], Tensor]]()  # gradients, one round behind the keys

    def attend(turn: int, keys: Tensor, values: Tensor) -> None:
        dkv = torch.zeros(2, *keys.shape, dtype=wide, device=q.device)
        for tile in tiles[call.owner(turn)]:
            qkv = _rows(q, tile.q), _rows(keys, tile.k), _rows(values, tile.k)
            if qkv[0].numel() and qkv[1].numel():
                own_out, own_lse, own_grad = (_rows(x, tile.q) for x in (out, lse, grad))
                done = Attended(*qkv, own_out, own_lse, tile.mask, call.scale)
                grads = call.kernel.backward(own_grad, done)
                places = tile.q, tile.k, tile.k
                for total, at, part in zip((dq, *dkv), places, grads, strict=True):
                    if isinstance(at, slice):
                        total[:, :, at] += part
                    else:  # a row may occur several times
                        total.index_add_(2, at, part.to(total.dtype))
        total = dkv.add_(coming.pop()()) if coming else dkv
        coming.append(_passed_on(call, turn, total))

    try:
        rotate(call, k, v, attend)
    finally:
        arrived = [wait() for wait in coming]
    dk, dv = arrived[0].unbind(0)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _is_one_tile(tiles: Tiles) -> bool:
    """Return whether one call of the kernel computes all tiles."""
    if len(tiles) != 1 or len(tiles[0]) != 1:
        return False
    q, k = tiles[0][0].q, tiles[0][0].k
    return isinstance(q, slice) and isinstance(k, slice) and q == k == slice(None)


def _rows(x: Tensor, rows: slice | Tensor) -> Tensor:
    """Return some rows of (B, H, S, ...)."""
    return x[:, :, rows] if isinstance(rows, slice) else x.index_select(2, rows)


class Merged:
    """Running output and LSE; float32 at least once two parts were merged."""

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: slice | Tensor, part: Tensor, part_lse: Tensor) -> None:
        """Merge attention of some queries to more keys."""
        is_whole = isinstance(rows, slice) and rows == slice(None)
        if self._out is None and is_whole:
            self._out, self._lse = part, part_lse
            return
        out, lse = self._state()
        out = out.to(wide_dtype(self._q))
        if is_whole:
            out, lse = merge(out, lse, part, part_lse)
        else:
            before = out[:, :, rows], lse[:, :, rows]
            out[:, :, rows], lse[:, :, rows] = merge(*before, part, part_lse)
        self._out, self._lse = out, lse

    def result(self) -> tuple[Tensor, Tensor]:
        """Return out in the dtype of the queries, and LSE; 0 and -inf where no key was seen."""
        out, lse = self._state()
        return out.to(self._q.dtype), lse

    def _state(self) -> tuple[Tensor, Tensor]:
        if self._out is not None and self._lse is not None:
            return self._out, self._lse
        return nothing_seen(self._q)


def rotate(
    call: AttentionCall, k: Tensor, v: Tensor, attend: Callable[[int, Tensor, Tensor], None]
) -> None:
    """Call `attend` with the number, keys and values of each round; round 0 has the local ones.

    A rank computes the tiles of round t, whose keys come from rank s = (r - t) mod R::

        plain     s any     all queries to all keys
        causal    s = r     a triangle
                  s < r     all queries to all keys
                  s > r     nothing
        zigzag    s = r     a triangle
                  s < r     all queries to the early half of the keys
                  s > r     the late half of the queries to all keys
    """
    size, wire = len(call.kv_lens), call.wire
    at_hand = k if size == 1 else _packed(k, v, call)
    for turn in range(size):
        wait = None
        if turn < size - 1:
            coming = _staged(call, turn + 1, _shape_in(call, turn + 1, at_hand), at_hand)
            wait = _shift(call, at_hand, coming, f"keys and values, round {turn + 1}")
        keys, values = (k, v) if turn == 0 else at_hand.unbind(0)
        if turn and wire is not None:
            keys, values = wire.unpack(keys, k.dtype), wire.unpack(values, k.dtype)
        try:
            attend(turn, keys, values)
        finally:  # after an error too: a transfer still writes to this memory
            if wait is not None:
                at_hand = wait()


def _shape_in(call: AttentionCall, turn: int, like: Tensor) -> tuple[int, ...]:
    """Return the shape (2, B, K, Sk, ...) of a round's keys and values."""
    return (*like.shape[:-2], call.kv_lens[call.owner(turn)], like.shape[-1])


def _packed(k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Return keys and values as they travel, (2, B, K, Sk, ...)."""
    if call.wire is not None:
        k, v = call.wire.pack(k), call.wire.pack(v)
    return torch.stack((k, v), out=_staged(call, 0, (2, *k.shape), k))


def _staged(call: AttentionCall, turn: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return memory for the keys and values of a round: one buffer for even rounds, one for odd."""
    assert call.ring is not None
    role = f"keys and values, {'even' if turn % 2 == 0 else 'odd'} rounds"
    return call.ring.calls.staging.take(role, shape, like)


def _passed_on(call: AttentionCall, turn: int, dkv: Tensor) -> Callable[[], Tensor]:
    """Pass gradients (2, B, K, Sk, D) on; the result waits for those of the next round's keys."""
    if call.ring is None:
        return lambda: dkv
    coming = dkv.new_empty(_shape_in(call, turn + 1, dkv))
    return _shift(call, dkv, coming, f"gradients, round {turn + 1}")


def _shift(call: AttentionCall, sent: Tensor, received: Tensor, name: str) -> Callable[[], Tensor]:
    """Send a tensor to the next rank of the ring; the result waits for the previous rank's."""
    assert call.ring is not None
    ring, where = call.ring, f"{call.where}: ring ({name})"
    after, before = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
    transfers = Transfers(ring, where, {after: sent.contiguous()}, {before: received})

    def wait() -> Tensor:
        transfers.wait()
        return received

    return wait


def overlapped_forward(
    xs: Sequence[Tensor], tiles: Tiles, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `usp.forward` from (B, T, heads, D) q, k and v while rows travel; output as q."""
    heads, wire = call.heads, call.wire
    assert heads is not None
    local = heads.own_tokens
    mine = [heads.own_heads(x) for x in xs]
    mine = mine if wire is None else [_arrived(x, wire) for x in mine]
    own_q, own_k, own_v = [x.transpose(1, 2) for x in mine]
    arrive = heads.start_to_heads(xs, call.where, wire)
    merged = Merged(own_q)
    try:
        _attend(merged, (own_q, own_k, own_v), local, local, tiles[call.owner(0)], call)
    finally:  # after an error too: a transfer still writes to this memory
        whole = arrive()
    parts = whole.split([own_q.shape[1], own_k.shape[1], own_k.shape[1]], 2)
    q, k, v = [x.transpose(1, 2) for x in parts]
    bounds = (0, local.start), (local.stop, q.shape[2])
    others = [slice(first, end) for first, end in bounds if first < end]
    theirs = [Merged(q[:, :, part]) for part in others]
    out = q.new_empty(parts[0].shape)
    lse = q.new_empty(q.shape[:3], dtype=wide_dtype(q))
    leaving: list[Callable[[], list[Tensor]]] = []

    def attend(turn: int, keys: Tensor, values: Tensor) -> None:
        every, seen = slice(0, keys.shape[2]), tiles[call.owner(turn)]
        for partial, part in zip(theirs, others, strict=True):
            _attend(partial, (q[:, :, part], keys, values), part, every, seen, call)
        if turn == len(call.kv_lens) - 1:
            for partial, part in zip(theirs, others, strict=True):
                done, lse[:, :, part] = partial.result()
                out[:, part] = done.transpose(1, 2)
            leaving.append(heads.start_to_tokens(out, [q.shape[1]], call.where, wire))
        for columns in others if turn == 0 else [every]:
            here = keys[:, :, columns], values[:, :, columns]
            _attend(merged, (own_q, *here), local, columns, seen, call)

    try:
        rotate(call, k, v, attend)
    finally:
        arrived = [finish() for finish in leaving]
    done, lse[:, :, local] = merged.result()
    out[:, local] = done.transpose(1, 2)
    ((home,),) = arrived
    mine = out[:, local] if wire is None else _arrived(out[:, local], wire)
    heads.own_heads(home).copy_(mine)
    return home, whole, out, lse


def _arrived(x: Tensor, wire: Quantized) -> Tensor:
    """Round (B, T, heads, D) as the wire does."""
    return wire.unpack(wire.pack(x), x.dtype)


def _attend(
    merged: Merged,
    qkv: Sequence[Tensor],
    rows: slice,
    columns: slice,
    tiles: Sequence[Tile],
    call: AttentionCall,
) -> None:
    """Attend from the queries `rows` to the keys `columns`, and merge the result."""
    q, k, v = qkv
    for tile in tiles:
        for seen, mask in _parts(tile.mask, rows, columns):
            at = slice(seen.start - columns.start, seen.stop - columns.start)
            if q.numel() and k[:, :, at].numel():
                part = call.kernel.forward(q, k[:, :, at], v[:, :, at], mask, call.scale)
                merged.add(slice(None), *part)


def _parts(mask: AttentionMask, rows: slice, columns: slice) -> list[tuple[slice, AttentionMask]]:
    """Return the spans of `columns` that `rows` see, with masks; they hold all `rows` or none."""
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
