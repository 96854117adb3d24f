"""The mean over the tokens of all ranks, right under gradient averaging."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bascule.comm.groups import RankGroup, reporting


def global_mean(values: Tensor, weights: Tensor | None, group: RankGroup, step: int) -> Tensor:
    """Weighted mean of the values of all ranks; one all-reduce of two numbers, none backward.

    FSDP and DDP divide the sum of the ranks' gradients by their number N, so each rank's part
    carries a gradient of N / (sum of weights). A rank without values takes part; without any the
    mean is 0.

    Args:
        values: This rank's values, any shape and number.
        weights: As `values`; None counts each once.
        group: The ranks whose gradients are averaged.
        step: Step number in errors.
    """
    counted = torch.ones_like(values) if weights is None else weights.to(values.dtype)
    return _GlobalMean.apply(values, counted.detach(), group, step)


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: Tensor, group: RankGroup, step: int) -> Tensor:
        wide = torch.float64
        sums = torch.stack([(values.to(wide) * weights.to(wide)).sum(), weights.to(wide).sum()])
        with reporting(group, "all_reduce (mean)", step):
            dist.all_reduce(sums, group=group.process_group)
        inverse = sums[1].clamp(min=torch.finfo(wide).tiny).reciprocal()
        ctx.save_for_backward(weights, inverse * group.size)
        return (sums[0] * inverse).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        weights, scale = ctx.saved_tensors
        return (grad.to(scale.dtype) * scale).to(weights.dtype) * weights, None, None, None
