"""Ring attention: keys and values travel from rank to rank while each attends to those at hand.

Source: Ring Attention (arXiv:2310.01889), double-buffered as in FastUSP: the send of the shard in
hand is posted before the attention that uses it, in N - 1 rounds.

Shapes: as in `registry`; R ranks of the ring. Round t works on the keys of ring rank (r - t) mod R.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bascule.attention.call import AttentionCall, Tiles
from bascule.attention.kernels.protocol import Attended, merge, wide_dtype
from bascule.comm.collectives import Transfers
from bascule.comm.quantized import Quantized


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    """Attend to the keys of the whole ring: new (B, H, Sq, D) and its LSE; no autograd."""
    if _is_one_tile(tiles) and q.numel() and k.numel():
        out, lse = call.kernel.forward(q, k, v, tiles[0][0].mask, call.scale)
        return out.to(q.dtype), lse
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
    """Return gradients of q, k and v; `saved` are q, k, v, the output and its LSE.

    2 R - 1 exchanges with the neighbours.
    """
    q, k, v, out, lse = saved
    grad = grad.contiguous()
    if _is_one_tile(tiles) and q.numel() and k.numel():
        done = Attended(q, k, v, out, lse, tiles[0][0].mask, call.scale)
        dq, dk, dv = call.kernel.backward(grad, done)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    wide = wide_dtype(q)
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    travelling = _Travelling(call, k)

    def attend(turn: int, keys: Tensor, values: Tensor) -> None:
        dkv = torch.zeros(2, *keys.shape, dtype=wide, device=q.device)
        for tile in tiles[call.owner(turn)]:
            qkv = _rows(q, tile.q), _rows(keys, tile.k), _rows(values, tile.k)
            if qkv[0].numel() and qkv[1].numel():
                own_out, own_lse, own_grad = (_rows(x, tile.q) for x in (out, lse, grad))
                done = Attended(*qkv, own_out, own_lse, tile.mask, call.scale)
                grads = call.kernel.backward(own_grad, done)
                for total, at, part in zip(
                    (dq, *dkv), (tile.q, tile.k, tile.k), grads, strict=True
                ):
                    _add_rows(total, at, part)
        travelling.add(turn, dkv)

    try:
        rotate(call, k, v, attend)
    finally:
        arrived = travelling.home()
    dk, dv = arrived.unbind(0)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _is_one_tile(tiles: Tiles) -> bool:
    """Return whether one call of the kernel does it all."""
    if len(tiles) != 1 or len(tiles[0]) != 1:
        return False
    q, k = tiles[0][0].q, tiles[0][0].k
    return isinstance(q, slice) and isinstance(k, slice) and q == k == slice(None)


def _rows(x: Tensor, rows: slice | Tensor) -> Tensor:
    """Some rows of (B, H, S, ...)."""
    return x[:, :, rows] if isinstance(rows, slice) else x.index_select(2, rows)


def _add_rows(total: Tensor, rows: slice | Tensor, part: Tensor) -> None:
    """Add to some rows; also to one row several times."""
    if isinstance(rows, slice):
        total[:, :, rows] += part
    else:
        total.index_add_(2, rows, part.to(total.dtype))


class Merged:
    """Attention of all queries to the keys that came so far; wide from the second part on."""

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: slice | Tensor, part: Tensor, part_lse: Tensor) -> None:
        """Merge attention of some queries to more keys."""
        if self._out is None and part.shape == self._q.shape:
            self._out, self._lse = part, part_lse
            return
        out, lse = self._state()
        if part.shape == out.shape:
            self._out, self._lse = merge(out.to(wide_dtype(self._q)), lse, part, part_lse)
            return
        out = out.to(wide_dtype(self._q))
        out[:, :, rows], lse[:, :, rows] = merge(
            out[:, :, rows], lse[:, :, rows], part.to(out.dtype), part_lse
        )
        self._out, self._lse = out, lse

    def result(self) -> tuple[Tensor, Tensor]:
        """Out in the dtype of the queries, and LSE; 0 and -inf where no key came."""
        out, lse = self._state()
        return out.to(self._q.dtype), lse

    def _state(self) -> tuple[Tensor, Tensor]:
        if self._out is not None and self._lse is not None:
            return self._out, self._lse
        q = self._q
        lse = torch.full(q.shape[:3], -math.inf, dtype=wide_dtype(q), device=q.device)
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device), lse


def rotate(
    call: AttentionCall, k: Tensor, v: Tensor, attend: Callable[[int, Tensor, Tensor], None]
) -> None:
    """Call `attend` with the number of each round, and its keys and values; own ones first."""
    size, quantized = len(call.kv_lens), call.quantized
    num_more = 0 if quantized is None else quantized.num_more
    at_hand = k if size == 1 else _packed(k, v, call)
    for turn in range(size):
        wait = None
        if turn < size - 1:
            coming = _staged(call, turn + 1, _shape_in(call, turn + 1, at_hand, num_more), at_hand)
            wait = _shift(call, at_hand, coming, f"keys and values, round {turn + 1}")
        arrived = wait() if wait is not None and not call.double_buffer else None
        keys, values = (k, v) if turn == 0 else _unpacked(at_hand, k.dtype, quantized)
        try:
            attend(turn, keys, values)
        finally:  # also after an error: memory that is written to must not be left
            if wait is not None:
                at_hand = wait() if arrived is None else arrived


def _shape_in(call: AttentionCall, turn: int, like: Tensor, num_more: int = 0) -> tuple[int, ...]:
    """Shape (2, B, K, Sk, ...) of the keys and values of a round, with so many rows more."""
    return (*like.shape[:-2], call.kv_lens[call.owner(turn)] + num_more, like.shape[-1])


def _packed(k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Return keys and values as they travel, (2, B, K, Sk, ...); other ranks pass these on."""
    if call.quantized is not None:
        k, v = call.quantized.pack(k), call.quantized.pack(v)
    return torch.stack((k, v), out=_staged(call, 0, (2, *k.shape), k))


def _staged(call: AttentionCall, turn: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return memory for the keys and values of a round: one buffer for even rounds, one for odd."""
    assert call.ring is not None
    role = f"keys and values, {'even' if turn % 2 == 0 else 'odd'} rounds"
    return call.ring.calls.staging.take(role, shape, like)


def _unpacked(
    rows: Tensor, dtype: torch.dtype, quantized: Quantized | None
) -> tuple[Tensor, Tensor]:
    keys, values = rows.unbind(0)
    if quantized is None:
        return keys, values
    return quantized.unpack(keys, dtype), quantized.unpack(values, dtype)


class _Travelling:
    """Gradients of keys and values, which go around the ring one round behind the keys."""

    def __init__(self, call: AttentionCall, k: Tensor) -> None:
        self._call, self._k = call, k
        self._coming: Callable[[], Tensor] | None = None
        self._sum: Tensor | None = None

    def add(self, turn: int, dkv: Tensor) -> None:
        """Add a round's part to what arrived, and pass it on."""
        call = self._call
        self._sum = dkv if self._coming is None else dkv.add_(self._coming())
        if call.ring is not None:
            coming = dkv.new_empty(_shape_in(call, turn + 1, dkv))
            self._coming = _shift(call, self._sum, coming, f"gradients, round {turn + 1}")

    def home(self) -> Tensor:
        """Return gradients (2, B, K, Sk, D) of this rank's own keys and values."""
        if self._coming is not None:
            return self._coming()
        return self._k.new_empty(2, *self._k.shape) if self._sum is None else self._sum


def _shift(call: AttentionCall, sent: Tensor, received: Tensor, name: str) -> Callable[[], Tensor]:
    """Send a tensor to the next rank of the ring; the result waits for that of the rank before."""
    assert call.ring is not None
    ring, where = call.ring, f"{call.where}: ring ({name})"
    after, before = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
    transfers = Transfers(ring, where, {after: sent.contiguous()}, {before: received})

    def wait() -> Tensor:
        transfers.wait()
        return received

    return wait
