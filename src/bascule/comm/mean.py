"""The mean over the tokens of all ranks, right under gradient averaging."""

from typing import Any

import torch
from torch import Tensor

from bascule.comm.groups import RankGroup
from bascule.comm.guard.calls import Call
from bascule.comm.guard.derivatives import only_first, refuse_transforms
from bascule.comm.transfers import all_reduce
from bascule.errors import ConfigError


def check(values: Any, weights: Any) -> None:
    """Refuse what has no mean.

    Raises:
        ConfigError: Values are one number, or not real floating point, or without data; weights do
            not broadcast to them, are complex, or want a gradient.
    """
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
    given = (1,) * (values.dim() - weights.dim()) + tuple(weights.shape)
    fits = len(given) == values.dim() and all(
        a in (1, b) for a, b in zip(given, values.shape, strict=True)
    )
    if not fits or weights.is_complex() or weights.device != values.device:
        raise ConfigError(
            f"mean: weights of shape {tuple(weights.shape)} and {weights.dtype} on "
            f"{weights.device} for values of shape {tuple(values.shape)} on {values.device}: give "
            "real numbers that broadcast to the values, on their device"
        )
    if weights.requires_grad:
        raise ConfigError(
            "mean: weights want a gradient, and the mean gives them none: pass weights.detach()"
        )


def global_mean(values: Tensor, weights: Tensor | None, group: RankGroup, step: int) -> Tensor:
    """Weighted mean of the values of all ranks; one all-reduce of two numbers, none backward.

    FSDP and DDP divide the sum of the ranks' gradients by their number N, so each rank's part
    carries a gradient of N / (sum of weights). A rank without values takes part; where weights add
    up to nothing the mean is 0.

    Args:
        values: This rank's values, any shape and number, as `check` allows.
        weights: What each value counts; broadcasts to them. None counts each once.
        group: The ranks whose gradients are averaged.
        step: Step number in errors.
    """
    refuse_transforms("mean", values)
    return _GlobalMean.apply(values, weights, group, step)


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weights: Tensor | None, group: RankGroup, step: int
    ) -> Tensor:
        wide = values.double()
        counted = torch.ones((), dtype=wide.dtype, device=wide.device)
        if weights is not None:
            counted = weights.double()
        counted = counted.expand_as(values)
        sums = torch.stack([(wide * counted).sum(), counted.sum()])
        sums = all_reduce(group, Call("all_reduce (mean)", step), sums)
        inverse = torch.where(sums[1] == 0.0, 0.0, sums[1].reciprocal())
        ctx.save_for_backward(values.new_empty(0), weights, inverse * group.size)
        ctx.shape = values.shape
        return (sums[0] * inverse).to(values.dtype)

    @staticmethod
    @only_first
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        like, weights, scale = ctx.saved_tensors
        wide = torch.promote_types(like.dtype, torch.float32)
        each = (grad.double() * scale).to(wide)
        if weights is not None:
            each = each * weights.to(wide)
        return each.to(like.dtype).expand(ctx.shape), None, None, None
