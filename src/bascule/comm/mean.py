"""Mean over the tokens of all ranks, right under gradient averaging."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bascule.comm.collectives import all_reduce
from bascule.comm.groups import RankGroup
from bascule.errors import ConfigError


def check(values: Any, weights: Any) -> None:
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
    check_gradient(weights)


def check_gradient(weights: Tensor | None) -> None:
    """Refuse weights that want a gradient."""
    if isinstance(weights, Tensor) and weights.requires_grad:
        raise ConfigError(
            "mean: weights want a gradient, and the mean gives them none: pass weights.detach()"
        )


class MeanOver(NamedTuple):
    """Ranks of a mean, and the way in which their gradients are put together."""

    group: RankGroup
    divisor: int  # of the sum of their gradients: N, or 1
    step: int  # for errors


def mean_and_scale(values: Tensor, weights: Tensor | None, over: MeanOver) -> tuple[Tensor, Tensor]:
    """Return the weighted mean of the values of all ranks, and the factor of its gradient.

    One all-reduce, no autograd. The gradient is divisor / (sum of weights); without weights 0.
    """
    wide = values.double()
    counted = torch.ones((), dtype=wide.dtype, device=wide.device)
    if weights is not None:
        counted = weights.double()
    counted = counted.expand_as(values)
    sums = torch.stack([(wide * counted).sum(), counted.sum()])
    sums = all_reduce(over.group, f"step {over.step}: all_reduce (mean)", sums)
    inverse = torch.where(sums[1] == 0.0, 0.0, sums[1].reciprocal())
    return (sums[0] * inverse).to(values.dtype), inverse * over.divisor


def mean_gradient(
    grad: Tensor, weights: Tensor | None, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the values; it broadcasts to them."""
    wide = torch.promote_types(dtype, torch.float32)
    each = (grad.double() * scale).to(wide)
    if weights is not None:
        each = each * weights.to(wide)
    return each.to(dtype)
