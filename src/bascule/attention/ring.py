"""Ring attention: keys and values travel from rank to rank while each attends to those at hand.

Source: Ring Attention (arXiv:2310.01889), double-buffered as in FastUSP: the send of the shard in
hand is posted before the attention that uses it, in N - 1 rounds.

Shapes: as in `blocks`; R ranks of the ring. Round t works on the keys of ring rank (r - t) mod R.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bascule.attention.blocks import BlockKernel, merge, wide_dtype
from bascule.comm.groups import RankGroup, reporting


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Queries of this rank that attend to keys of one shard.

    Attributes:
        q: Which queries of this rank.
        k: Which keys of the shard.
        causal: Whether query i sees only keys 0 to i of these.
        bias: Added to the scaled scores; broadcasts to (B, H, queries, keys). None adds nothing.
    """

    q: slice
    k: slice
    causal: bool
    bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class RingPlan:
    """What a rank does in each round.

    Attributes:
        group: The ring; None for one rank.
        kv_lens: (R,) keys that each ring rank has at home.
        tiles: (R,) by ring rank, what this rank's queries see of its keys.
        kernel: Computes a tile.
        scale: Factor of the scores.
    """

    group: RankGroup | None
    kv_lens: Sequence[int]
    tiles: Sequence[Sequence[Tile]]
    kernel: BlockKernel
    scale: float

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


def ring_attention(q: Tensor, k: Tensor, v: Tensor, plan: RingPlan) -> tuple[Tensor, Tensor]:
    """Exact attention of this rank's queries to the keys of the whole ring.

    Differentiable in the output; R - 1 exchanges with the neighbours forward and 2 R - 1 backward.

    Returns:
        Out (B, H, Sq, D), and its LSE, which carries no gradient.
    """
    return _Ring.apply(q, k, v, plan)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: RingPlan) -> tuple[Tensor, Tensor]:
        wide = wide_dtype(q)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], -math.inf, dtype=wide, device=q.device)

        def attend(turn: int, keys: Tensor, values: Tensor) -> None:
            for tile in plan.tiles[plan.owner(turn)]:
                rows = q[:, :, tile.q]
                if not rows.numel() or not keys[:, :, tile.k].numel():
                    continue
                part, part_lse = plan.kernel.forward(
                    rows,
                    keys[:, :, tile.k],
                    values[:, :, tile.k],
                    tile.bias,
                    tile.causal,
                    plan.scale,
                )
                merged = merge(out[:, :, tile.q], lse[:, :, tile.q], part.to(wide), part_lse)
                out[:, :, tile.q], lse[:, :, tile.q] = merged

        _rotate(plan, k, v, attend)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.plan = plan
        ctx.mark_non_differentiable(lse)
        return result, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan, grad, wide = ctx.plan, grad_outputs[0].contiguous(), wide_dtype(q)
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        travelling = _Travelling(plan, k, wide)

        def attend(turn: int, keys: Tensor, values: Tensor) -> None:
            dkv = torch.zeros(2, *keys.shape, dtype=wide, device=q.device)
            for tile in plan.tiles[plan.owner(turn)]:
                if not q[:, :, tile.q].numel() or not keys[:, :, tile.k].numel():
                    continue
                grads = plan.kernel.backward(
                    *(x[:, :, tile.q] for x in (grad, q)),
                    *(x[:, :, tile.k] for x in (keys, values)),
                    *(x[:, :, tile.q] for x in (out, lse)),
                    tile.bias,
                    tile.causal,
                    plan.scale,
                )
                dq[:, :, tile.q] += grads[0]
                dkv[0, :, :, tile.k] += grads[1]
                dkv[1, :, :, tile.k] += grads[2]
            travelling.add(turn, dkv)

        _rotate(plan, k, v, attend)
        dk, dv = travelling.home().unbind(0)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _rotate(
    plan: RingPlan, k: Tensor, v: Tensor, attend: Callable[[int, Tensor, Tensor], None]
) -> None:
    """Call `attend` with the keys and values of every ring rank, own ones first."""
    at_hand = k if plan.size == 1 else torch.stack((k, v))
    for turn in range(plan.size):
        shift = None
        if turn < plan.size - 1:
            shape = (*at_hand.shape[:-2], plan.kv_lens[plan.owner(turn + 1)], at_hand.shape[-1])
            shift = _Shift(plan, at_hand, shape, f"keys and values, round {turn + 1}")
        keys, values = (k, v) if turn == 0 else at_hand.unbind(0)
        attend(turn, keys, values)
        if shift is not None:
            at_hand = shift.wait()


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
        self._shift = _Shift(plan, self._sum, shape, f"gradients, round {turn + 1}")

    def home(self) -> Tensor:
        """(2, B, K, Sk, D) gradients of this rank's own keys and values."""
        assert self._sum is not None
        return self._sum if self._shift is None else self._shift.wait()


class _Shift:
    """A tensor on its way to the next rank of the ring, and one from the rank before.

    Point-to-point; in a compiled graph, where that is not supported, one all-to-all in which each
    rank sends to one other only.
    """

    def __init__(self, plan: RingPlan, sent: Tensor, shape: Sequence[int], name: str) -> None:
        assert plan.group is not None
        self._group, self._name = plan.group, name
        self._sent = sent.contiguous()  # alive until it is sent
        self._received = sent.new_empty(tuple(shape))
        after, before = (plan.rank + 1) % plan.size, (plan.rank - 1) % plan.size
        with reporting(plan.group, f"ring ({name})", 0):
            self._works = self._post(after, before)

    def wait(self) -> Tensor:
        """What arrived."""
        with reporting(self._group, f"ring ({self._name})", 0):
            for work in self._works:
                work.wait()
        return self._received

    def _post(self, after: int, before: int) -> Sequence[Any]:
        group = self._group
        if torch.compiler.is_compiling():
            send_splits, recv_splits = [0] * group.size, [0] * group.size
            send_splits[after] = self._sent.numel()
            recv_splits[before] = self._received.numel()
            dist.all_to_all_single(
                self._received.view(-1),
                self._sent.view(-1),
                recv_splits,
                send_splits,
                group=group.process_group,
            )
            return ()
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group.ranks[after], group=group.process_group),
                dist.P2POp(
                    dist.irecv, self._received, group.ranks[before], group=group.process_group
                ),
            ]
        )
