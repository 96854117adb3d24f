"""Block-sparse attention in compiled code: operators that find the running pass by its number.

Plans change between steps, so a graph must not contain a plan, layer or step. Each attention call
passes a ticket, the numbers of the pass and of its next layer, to the next call; this orders calls.
CUDA graphs leave these operators out.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from bascule.attention.usp import own_memory
from bascule.comm.failures import shared
from bascule.comm.groups import this_world

_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
_operator = partial(torch.library.custom_op, mutates_args=(), tags=_tags)


@_operator("bascule::sparse_begin")
def begin(last: Tensor, model: int) -> Tensor:
    """Start a pass of a split model; `last` only orders it after the previous pass."""
    return this_world().find(model).begin_recorded()


@_operator("bascule::sparse_attend")
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    ticket: Tensor,
    segments: str,
    lengths: Sequence[int],
    is_causal: bool,
    scale: float | None,
    records: bool,
) -> tuple[Tensor, Tensor]:
    """Attend in the pass that a ticket names; return output (B, H, T, D) and the next ticket."""
    with shared("sparse attention"), _autograd(records):
        current = this_world().find(int(ticket[0]))
        # The backward reads copies: graphs reuse the memory of arguments and outputs.
        qkv = [x.clone().requires_grad_() if records else x for x in (q, k, v)]
        names = tuple(segments.split("\n"))
        current.sparse.ticket = ticket
        out = current.attend_recorded(qkv, mask, names, tuple(lengths), is_causal, scale)
        if records:
            current.sparse.recorded[int(ticket[1])] = qkv, out
            current.sparse.layers.hold(current)
        return own_memory(out.detach().clone() if records else out), current.sparse.ticket.clone()


@_operator("bascule::sparse_backward")
def backward(grad: Tensor, ticket: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    with shared("sparse attention, backward"), _autograd(False):
        qkv, out = this_world().find(int(ticket[0])).sparse.recorded.pop(int(ticket[1]))
        dq, dk, dv = map(own_memory, torch.autograd.grad(out, qkv, grad))
        return dq, dk, dv


@_operator("bascule::sparse_end")
def end(ticket: Tensor) -> Tensor:
    """End the pass of a ticket."""
    with shared("end of sparse attention"), torch.inference_mode(False):
        this_world().find(int(ticket[0])).sparse.end()
        return torch.tensor(ticket.tolist())  # no inference tensor, as the graph expects


@contextmanager
def _autograd(records: bool) -> Iterator[None]:
    """Let autograd record within an operator."""
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.set_grad_enabled(records):
        yield


@backward.register_fake
def _(grad: Tensor, ticket: Tensor, num_kv_heads: int) -> tuple[Tensor, ...]:
    of_keys = grad.shape[0], num_kv_heads, *grad.shape[2:]
    return grad.new_empty(grad.shape), grad.new_empty(of_keys), grad.new_empty(of_keys)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[4])
    ctx.num_kv_heads = inputs[1].shape[1]


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *backward(grad, *ctx.saved_tensors, ctx.num_kv_heads), *(None,) * 7


begin.register_fake(lambda last, model: last.clone())
attend.register_fake(lambda q, k, v, mask, ticket, *_: (q.new_empty(q.shape), ticket.clone()))
end.register_fake(torch.clone)
attend.register_autograd(_gradients, setup_context=_save)
for _name in ("attend", "backward", "end"):
    has_side_effect(getattr(torch.ops.bascule, f"sparse_{_name}").default)
