"""Operators of torch for the exchanges of a step, in eager code and in recorded programs alike.

An operator is one node of a traced graph, and one thing that a checkpointing policy can keep. It
takes its step by a number, since a graph serves steps with other plans, and sizes, which may be
symbols. Defined by their schemas: `custom_op` costs 25 microseconds more a call.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from bascule.comm.groups import this_world
from bascule.comm.transforms import refuse_second
from bascule.errors import ConfigError

if TYPE_CHECKING:
    from bascule.step import Step


def check_mean(values: Any, weights: Any) -> None:
    """Refuse values and weights that have no mean over tokens."""
    if not isinstance(values, Tensor) or not isinstance(weights, Tensor | None):
        raise ConfigError(
            f"mean: values are a {type(values).__name__} and weights a {type(weights).__name__}: "
            "give tensors"
        )
    if values.dim() == 0 or not values.is_floating_point() or values.is_meta:
        raise ConfigError(
            f"mean: values of shape {tuple(values.shape)} and {values.dtype} on {values.device}: "
            "give a real floating-point value for each token, not their mean or sum (a scalar)"
        )
    if weights is None:
        return
    shape = (1,) * (values.dim() - weights.dim()) + tuple(weights.shape)
    fits = len(shape) == values.dim() and all(
        a in (1, b) for a, b in zip(shape, values.shape, strict=True)
    )
    if not fits or weights.is_complex() or weights.device != values.device:
        raise ConfigError(
            f"mean: weights of shape {tuple(weights.shape)} and {weights.dtype} on "
            f"{weights.device} for values of shape {tuple(values.shape)} on {values.device}: give "
            "real numbers that broadcast to the values, on their device"
        )
    check_weights(weights)


def check_weights(weights: Tensor | None) -> None:
    """Refuse weights that want a gradient."""
    if isinstance(weights, Tensor) and weights.requires_grad:
        raise ConfigError(
            "mean: weights want a gradient, and the mean gives them none: pass weights.detach()"
        )


def mean_gradient(
    grad: Tensor, weights: Tensor | None, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the values; it broadcasts to them."""
    wide = torch.promote_types(dtype, torch.float32)
    each = (grad.double() * scale).to(wide)
    if weights is not None:
        each = each * weights.to(wide)
    return each.to(dtype)


_SCHEMAS = {
    "exchange": "(Tensor[] xs, SymInt step, str way, str names, bool[] needs, SymInt num_rows)"
    " -> Tensor[]",
    "count_routed": "(Tensor is_marked, SymInt step) -> Tensor",
    "mean": "(Tensor values, Tensor? weights, SymInt step) -> (Tensor, Tensor)",
}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"bascule::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)

exchange = torch.ops.bascule.exchange.default
count_routed = torch.ops.bascule.count_routed.default
mean = torch.ops.bascule.mean.default
for _operator in (exchange, mean):  # one of no rows is still waited for by other ranks
    has_side_effect(_operator)

ADJOINT = {"route": "restore", "route_contexts": "contexts back", "gather_samples": "samples back"}
ADJOINT |= {back: way for way, back in ADJOINT.items()}


@torch.library.impl("bascule::exchange", "CompositeExplicitAutograd")
def _exchange(
    xs: list[Tensor], step: int, way: str, names: str, needs: list[bool], num_rows: int
) -> list[Tensor]:
    """Move the rows of tensors one way; the gradient is the exchange the other way.

    `names` are those of the tensors, for the agreement on them and its errors; "" on the way back.
    """
    made: Step = this_world().step(step)
    return list(made.move(way, names, xs, needs))


@torch.library.register_fake("bascule::exchange")
def _(
    xs: list[Tensor], step: int, way: str, names: str, needs: list[bool], num_rows: int
) -> list[Tensor]:
    return [x.new_empty((num_rows, *x.shape[1:])) for x in xs]


def _keep_exchange(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    xs, step, way, _, needs, _ = inputs
    # A tensor without a gradient here has none there either: positions stay out of the graph.
    ctx.mark_non_differentiable(*(x for x, one in zip(output, needs, strict=True) if not one))
    ctx.needs, ctx.settings = needs, (step, ADJOINT[way], "")
    ctx.num_rows = xs[0].shape[0]


def _exchange_gradients(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    sent = [x for x, is_needed in zip(grads, ctx.needs, strict=True) if is_needed]
    moved = iter(exchange(sent, *ctx.settings, [True] * len(sent), ctx.num_rows))
    return [next(moved) if is_needed else None for is_needed in ctx.needs], *(None,) * 5


torch.library.register_autograd(
    "bascule::exchange", _exchange_gradients, setup_context=_keep_exchange
)


@torch.library.impl("bascule::count_routed", "CompositeExplicitAutograd")
def _count_routed(is_marked: Tensor, step: int) -> Tensor:
    return torch.tensor(this_world().step(step).num_marked(is_marked))


@torch.library.register_fake("bascule::count_routed")
def _(is_marked: Tensor, step: int) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.impl("bascule::mean", "CompositeExplicitAutograd")
def _mean(values: Tensor, weights: Tensor | None, step: int) -> tuple[Tensor, Tensor]:
    """Return the mean over the tokens of all ranks, and the factor of its gradient."""
    return this_world().step(step).mean_and_scale(values, weights)


@torch.library.register_fake("bascule::mean")
def _(values: Tensor, weights: Tensor | None, step: int) -> tuple[Tensor, Tensor]:
    return values.new_empty(()), values.new_empty((), dtype=torch.float64)


def _keep_mean(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    values, weights, _ = inputs
    ctx.save_for_backward(weights, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.dtype, ctx.shape = values.dtype, values.shape


def _mean_gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    refuse_second(grad)
    weights, scale = ctx.saved_tensors
    return mean_gradient(grad, weights, scale, ctx.dtype).expand(ctx.shape), None, None


torch.library.register_autograd("bascule::mean", _mean_gradients, setup_context=_keep_mean)
