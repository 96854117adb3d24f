"""Gradients of split models, averaged over the ranks of their mesh."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bascule.comm.agree import agree
from bascule.comm.collectives import all_reduce
from bascule.comm.groups import RankGroup
from bascule.errors import ConfigError


def average_gradients(group: RankGroup, models: Sequence[nn.Module]) -> None:
    """Average the gradients of all ranks, which must be of the same parameters, and whole."""
    parameters = [pair for model in models for pair in model.named_parameters()]
    sharded = [name for name, one in parameters if isinstance(one.grad, DTensor)]
    error = None
    if sharded:
        error = ConfigError(
            f"average_gradients: the gradient of {sharded[0]} is sharded, as by FSDP, which "
            "averages gradients itself: leave out this call"
        )
    settings = {
        "parameters": str([f"{name} {tuple(one.shape)} {one.dtype}" for name, one in parameters]),
        "parameters without gradients": str([name for name, one in parameters if one.grad is None]),
    }
    agree(group, settings, error, what="average_gradients")
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for _, parameter in parameters:
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for grads in by_dtype.values():
        flat = torch.cat([grad.flatten() for grad in grads])
        mean = all_reduce(group, "all_reduce (gradients)", flat) / group.size
        for grad, part in zip(grads, mean.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
