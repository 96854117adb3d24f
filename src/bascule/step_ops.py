"""The exchanges of a step as operators of torch: for compilers, and for chosen checkpoints.

An operator is one node of a traced graph, and one thing that a checkpointing policy can keep
instead of making it again. It takes its step by a number, since every step has another plan and a
graph should serve all of them, and the sizes that compilers must know as whole numbers, which may
be symbols. It runs as the same call does elsewhere: with its checks and its agreements.
So ranks fit together of which only some run compiled code.

Shapes: C tokens that a rank computes on, S those of its Ulysses ranks, H heads, K key-value heads,
D head width; n samples of a rank, N of all.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bascule.attention.ops import own_memory
from bascule.comm.exchange import has_gradient
from bascule.comm.guard.failures import telling
from bascule.comm.mean import mean_gradient
from bascule.comm.transforms import NO_SECOND, refuse_second
from bascule.comm.world import this_world
from bascule.errors import ConfigError

if TYPE_CHECKING:
    from bascule.step import Step


def _step(number: int) -> "Step":
    with telling("a recorded step"):
        return this_world().steps.find(number)


# Attention. Where heads are shared, what was brought together is kept for the backward, with the
# output and its LSE; elsewhere the operands and the output at home are, and `whole` and `out` are
# empty: no output of an operator may be part of another tensor.


@torch.library.custom_op("bascule::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: int,
    sizes: list[int],
    needs_grad: list[bool],
    kind: str,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`Step.attend`; (C, H, D), and what the backward takes: whole, out and LSE.

    `kind` is "all" or "causal"; of "contexts" it is `Step.attend_contexts`, and k and v have other
    rows than q. `sizes` are S and this rank's heads, of queries and of keys; none where no heads
    are shared. Queries are multiplied already with a scale that is not above 0.
    """
    done = _step(step).attend_now((q, k, v), needs_grad, kind, scale)
    own, lse = own_memory(done.own), own_memory(done.lse)
    if done.whole is None:
        return own, q.new_empty(0), q.new_empty(0), lse
    return own, own_memory(done.whole), own_memory(done.out.transpose(1, 2)), lse


@attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: int,
    sizes: list[int],
    needs_grad: list[bool],
    kind: str,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own = q.new_empty(q.shape)
    wide = torch.promote_types(q.dtype, torch.float32)
    if not sizes:
        lse = q.new_empty((1, q.shape[1], q.shape[0]), dtype=wide)
        return own, q.new_empty(0), q.new_empty(0), lse
    num_together, num_q, num_kv = sizes
    whole = q.new_empty((1, num_together, num_q + 2 * num_kv, q.shape[2]))
    out = q.new_empty((1, num_together, num_q, q.shape[2]))
    return own, whole, out, q.new_empty((1, num_q, num_together), dtype=wide)


@torch.library.custom_op("bascule::attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor,
    saved: list[Tensor],
    step: int,
    sizes: list[int],
    kind: str,
    scale: float | None,
) -> list[Tensor]:
    """Gradients of q, k and v, of so many heads of queries and keys, and so many rows of keys."""
    num_q, num_kv, num_keys = sizes
    shapes = (grad.shape[0], num_q), (num_keys, num_kv)
    found = _step(step).attend_back(grad, saved, shapes, kind, scale)
    return list(map(own_memory, found))


@attend_backward.register_fake
def _(
    grad: Tensor,
    saved: list[Tensor],
    step: int,
    sizes: list[int],
    *_: Any,
) -> list[Tensor]:
    num_q, num_kv, num_keys = sizes
    shapes = (grad.shape[0], num_q), (num_keys, num_kv), (num_keys, num_kv)
    return [grad.new_empty((*shape, grad.shape[2])) for shape in shapes]


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, step, shared, _, kind, scale = inputs
    own, whole, out, lse = output
    kept = (whole, out, lse) if shared else (q, k, v, own, lse)
    ctx.save_for_backward(*kept)
    ctx.mark_non_differentiable(whole, out, lse)
    ctx.set_materialize_grads(False)  # of those: they are large
    ctx.settings = step, [q.shape[1], k.shape[1], k.shape[0]], kind, scale


def _attention_gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    refuse_second(grad)
    return *attend_backward(grad, list(ctx.saved_tensors), *ctx.settings), *(None,) * 5


attend.register_autograd(_attention_gradients, setup_context=_keep_attention)


@torch.library.custom_op("bascule::exchange", mutates_args=())
def exchange(
    tensors: list[Tensor], step: int, what: str, names: str, needs_grad: list[bool], num_rows: int
) -> list[Tensor]:
    """`Step.route`, `restore` or `route_contexts` of tensors."""
    by_name = dict(zip(names.split(","), tensors, strict=True))
    return list(map(own_memory, _step(step).exchange_now(what, by_name, needs_grad)))


@exchange.register_fake
def _(
    tensors: list[Tensor], step: int, what: str, names: str, needs_grad: list[bool], num_rows: int
) -> list[Tensor]:
    return [x.new_empty((num_rows, *x.shape[1:])) for x in tensors]


@torch.library.custom_op("bascule::exchange_backward", mutates_args=())
def exchange_backward(grads: list[Tensor], step: int, what: str, num_rows: int) -> list[Tensor]:
    """What `exchange` moved, moved back."""
    return list(map(own_memory, _step(step).exchange_back(what, grads)))


@exchange_backward.register_fake
def _(grads: list[Tensor], step: int, what: str, num_rows: int) -> list[Tensor]:
    return [x.new_empty((num_rows, *x.shape[1:])) for x in grads]


def _keep_exchange(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, step, what, _, needs_grad, _ = inputs
    pairs = zip(output, needs_grad, strict=True)
    ctx.mark_non_differentiable(*(x for x, is_needed in pairs if not is_needed))
    ctx.needs, ctx.settings = needs_grad, (step, what, tensors[0].shape[0])


def _exchange_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    needed = [x for x, is_needed in zip(grads, ctx.needs, strict=True) if is_needed]
    moved = iter(exchange_backward(needed, *ctx.settings))
    return [next(moved) if is_needed else None for is_needed in ctx.needs], *(None,) * 5


exchange.register_autograd(_exchange_gradients, setup_context=_keep_exchange)


@torch.library.custom_op("bascule::gather_samples", mutates_args=())
def gather_samples(tensor: Tensor, step: int, num_samples: int, needs_grad: bool) -> Tensor:
    """`Step.gather_samples`; (N, ...)."""
    return _step(step).gather_now(tensor, needs_grad)


@gather_samples.register_fake
def _(tensor: Tensor, step: int, num_samples: int, needs_grad: bool) -> Tensor:
    return tensor.new_empty((num_samples, *tensor.shape[1:]))


@torch.library.custom_op("bascule::gather_samples_backward", mutates_args=())
def gather_samples_backward(grad: Tensor, step: int, num_samples: int) -> Tensor:
    """(n, ...) the gradient of this rank's samples, from that of all."""
    return own_memory(_step(step).gather_back(grad))


@gather_samples_backward.register_fake
def _(grad: Tensor, step: int, num_samples: int) -> Tensor:
    return grad.new_empty((num_samples, *grad.shape[1:]))


def _keep_samples(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensor, step, _, _ = inputs
    ctx.settings = step, tensor.shape[0]
    if not has_gradient(output):
        ctx.mark_non_differentiable(output)


def _sample_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return gather_samples_backward(grad, *ctx.settings), None, None, None


gather_samples.register_autograd(_sample_gradients, setup_context=_keep_samples)


@torch.library.custom_op("bascule::count_routed", mutates_args=())
def count_routed(is_marked: Tensor, step: int) -> Tensor:
    """`Step.count_routed`, as a number on the host."""
    return torch.tensor(_step(step).count_routed(is_marked))


@count_routed.register_fake
def _(is_marked: Tensor, step: int) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("bascule::mean", mutates_args=())
def mean(values: Tensor, weights: Tensor | None, step: int) -> tuple[Tensor, Tensor]:
    """`Step.mean`, and what its gradient is multiplied by."""
    return _step(step).mean_now(values, weights)


@mean.register_fake
def _(values: Tensor, weights: Tensor | None, step: int) -> tuple[Tensor, Tensor]:
    return values.new_empty(()), values.new_empty((), dtype=torch.float64)


def _keep_mean(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    values, weights, _ = inputs
    ctx.save_for_backward(weights, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.dtype, ctx.shape = values.dtype, values.shape


def _mean_gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    weights, scale = ctx.saved_tensors
    return mean_gradient(grad, weights, scale, ctx.dtype).expand(ctx.shape), None, None


mean.register_autograd(_mean_gradients, setup_context=_keep_mean)


def _no_second(ctx: Any, *grads: Any) -> Any:
    raise ConfigError(NO_SECOND)


# Where a graph of gradients is made, theirs ends at these, and not without a word.
attend_backward.register_autograd(_no_second)
exchange_backward.register_autograd(_no_second)
gather_samples_backward.register_autograd(_no_second)
