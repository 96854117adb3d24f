"""Ring attention: keys and values travel from rank to rank while each attends to those at hand.

Source: Ring Attention (arXiv:2310.01889), double-buffered as in FastUSP: the send of the shard in
hand is posted before the attention that uses it, in N - 1 rounds.

Shapes: as in `registry`; R ranks of the ring. Round t works on the keys of ring rank (r - t) mod R.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bascule.attention.kernels.protocol import Attended, AttentionKernel, merge, wide_dtype
from bascule.attention.mask import EVERYTHING, AttentionMask
from bascule.comm.collectives import Transfers
from bascule.comm.groups import RankGroup
from bascule.comm.wire import Wire


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Queries of this rank that attend to keys of one shard.

    Attributes:
        q: Which queries of this rank; numbers of rows are int64, each of them once.
        k: Which keys of the shard; numbers of rows may repeat.
        mask: What those see of these.
    """

    q: "slice | Tensor"
    k: "slice | Tensor"
    mask: AttentionMask = EVERYTHING


@dataclass(frozen=True, slots=True, eq=False)
class RingPlan:
    """What a rank does in each round.

    Attributes:
        group: The ring; None for one rank.
        kv_lens: (R,) keys that each ring rank has at home.
        tiles: (R,) by ring rank, what this rank's queries see of its keys.
        kernel: Computes a tile.
        scale: Factor of the scores.
        wire: How keys and values of other ranks come, with centres of these heads; None: as they
            are. Gradients always travel as they are.
        step: Step number in errors; 0 where there are none.
        is_blocking: Whether a round waits for what the next one needs before it attends.
    """

    group: RankGroup | None
    kv_lens: Sequence[int]
    tiles: Sequence[Sequence[Tile]]
    kernel: AttentionKernel
    scale: float
    wire: Wire | None = None
    step: int = 0
    is_blocking: bool = False

    @property
    def size(self) -> int:
        """R."""
        return len(self.kv_lens)

    @property
    def rank(self) -> int:
        """This rank's place in the ring."""
        return 0 if self.group is None else self.group.rank

    def owner(self, turn: int) -> int:
        """Ring rank whose keys are at hand in a round."""
        return (self.rank - turn) % self.size


def ring_forward(q: Tensor, k: Tensor, v: Tensor, plan: RingPlan) -> tuple[Tensor, Tensor]:
    """Exact attention of this rank's queries to the keys of the whole ring, and its LSE.

    R - 1 exchanges with the neighbours. Autograd does not record it; see `usp`.

    Returns:
        Out (B, H, Sq, D), in memory of its own, and LSE (B, H, Sq).
    """
    if _is_one_tile(plan) and q.numel() and k.numel():
        out, lse = plan.kernel.forward(q, k, v, plan.tiles[0][0].mask, plan.scale)
        return out.to(q.dtype), lse
    merged = Merged(q)

    def attend(turn: int, keys: Tensor, values: Tensor) -> None:
        for tile in plan.tiles[plan.owner(turn)]:
            qkv = _rows(q, tile.q), _rows(keys, tile.k), _rows(values, tile.k)
            if qkv[0].numel() and qkv[1].numel():
                merged.add(tile.q, *plan.kernel.forward(*qkv, tile.mask, plan.scale))

    rotate(plan, k, v, attend)
    return merged.result()


def ring_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: RingPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of `ring_forward`, from that of its output.

    2 R - 1 exchanges with the neighbours.
    """
    grad = grad.contiguous()

    if _is_one_tile(plan) and q.numel() and k.numel():
        done = Attended(q, k, v, out, lse, plan.tiles[0][0].mask, plan.scale)
        dq, dk, dv = plan.kernel.backward(grad, done)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    wide = wide_dtype(q)
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    travelling = _Travelling(plan, k, wide)

    def attend(turn: int, keys: Tensor, values: Tensor) -> None:
        dkv = torch.zeros(2, *keys.shape, dtype=wide, device=q.device)
        for tile in plan.tiles[plan.owner(turn)]:
            qkv = _rows(q, tile.q), _rows(keys, tile.k), _rows(values, tile.k)
            if qkv[0].numel() and qkv[1].numel():
                found, found_lse, given = (_rows(x, tile.q) for x in (out, lse, grad))
                done = Attended(*qkv, found, found_lse, tile.mask, plan.scale)
                grads = plan.kernel.backward(given, done)
                for total, at, part in zip(
                    (dq, *dkv), (tile.q, tile.k, tile.k), grads, strict=True
                ):
                    _add_rows(total, at, part)
        travelling.add(turn, dkv)

    try:
        rotate(plan, k, v, attend)
    finally:
        arrived = travelling.home()
    dk, dv = arrived.unbind(0)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _is_one_tile(plan: RingPlan) -> bool:
    """Whether one call of the kernel does it all."""
    if plan.size != 1 or len(plan.tiles[0]) != 1:
        return False
    (tile,), everything = plan.tiles[0], slice(None)
    return all(isinstance(rows, slice) and rows == everything for rows in (tile.q, tile.k))


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
    plan: RingPlan,
    k: Tensor,
    v: Tensor,
    attend: Callable[[int, Tensor, Tensor], None],
) -> None:
    """Call `attend` with the keys and values of every ring rank, own ones first."""
    at_hand = k if plan.size == 1 else _packed(k, v, plan)
    for turn in range(plan.size):
        shift = None
        if turn < plan.size - 1:
            shape = (*at_hand.shape[:-2], plan.kv_lens[plan.owner(turn + 1)], at_hand.shape[-1])
            coming = _staged(plan, turn + 1, shape, at_hand)
            name = f"keys and values, round {turn + 1}"
            shift = _Shift(plan, at_hand, coming, name)
        arrived = shift.wait() if shift is not None and plan.is_blocking else None
        keys, values = (k, v) if turn == 0 else _unpacked(at_hand, k.dtype, plan.wire)
        try:
            attend(turn, keys, values)
        finally:  # also after an error: memory that is written to must not be left
            if shift is not None:
                at_hand = shift.wait() if arrived is None else arrived


def _packed(k: Tensor, v: Tensor, plan: RingPlan) -> Tensor:
    """(2, B, K, Sk, ...) what travels: packed once, and passed on as it came."""
    if plan.wire is not None:
        k, v = plan.wire.pack(k, plan.wire.k_centre), plan.wire.pack(v, plan.wire.v_centre)
    packed = _staged(plan, 0, (2, *k.shape), k)
    packed[0], packed[1] = k, v
    return packed


def _staged(plan: RingPlan, turn: int, shape: Sequence[int], like: Tensor) -> Tensor:
    """Memory for the keys and values of a round; the next one's is another, the one's after not."""
    assert plan.group is not None
    role = f"keys and values, {'even' if turn % 2 == 0 else 'odd'} rounds"
    return plan.group.staging.take(role, math.prod(shape), like).view(*shape)


def _unpacked(rows: Tensor, dtype: torch.dtype, wire: Wire | None) -> tuple[Tensor, Tensor]:
    keys, values = rows.unbind(0)
    if wire is None:
        return keys, values
    return wire.unpack(keys, dtype, wire.k_centre), wire.unpack(values, dtype, wire.v_centre)


class _Travelling:
    """Gradients of keys and values on their way around the ring, one round behind the keys.

    Every rank adds its part to the gradients of the keys that it has at hand, and passes them on;
    after R rounds they are where the keys came from.
    """

    def __init__(self, plan: RingPlan, k: Tensor, wide: torch.dtype) -> None:
        self._plan = plan
        self._shape = (2, *k.shape)
        self._wide = wide
        self._shift: _Shift | None = None
        self._sum: Tensor | None = None

    def add(self, turn: int, dkv: Tensor) -> None:
        """Add a round's part to what arrived, and pass it on."""
        plan = self._plan
        self._sum = dkv if self._shift is None else dkv.add_(self._shift.wait())
        if plan.size == 1:
            return
        shape = (*self._shape[:-2], plan.kv_lens[plan.owner(turn + 1)], self._shape[-1])
        coming = self._sum.new_empty(shape)
        self._shift = _Shift(plan, self._sum, coming, f"gradients, round {turn + 1}")

    def home(self) -> Tensor:
        """(2, B, K, Sk, D) gradients of this rank's own keys and values."""
        if self._shift is not None:
            return self._shift.wait()
        return torch.empty(self._shape) if self._sum is None else self._sum


class _Shift:
    """A tensor on its way to the next rank of the ring, and one from the rank before.

    The one place where the ring puts tensors on the wire; posted when it is made.
    """

    def __init__(self, plan: RingPlan, sent: Tensor, received: Tensor, name: str) -> None:
        assert plan.group is not None
        self._received = received
        after, before = (plan.rank + 1) % plan.size, (plan.rank - 1) % plan.size
        to, come = {after: sent.contiguous()}, {before: self._received}
        self._transfers = Transfers(plan.group, f"step {plan.step}: ring ({name})", to, come)

    def wait(self) -> Tensor:
        """What arrived."""
        self._transfers.wait()
        return self._received
