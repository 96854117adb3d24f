"""Gradients of split models, averaged over the ranks of their mesh."""

from collections.abc import Sequence

import torch
from torch import nn

from bascule.comm.collectives import all_reduce
from bascule.comm.groups import RankGroup
from bascule.diffusers.request import agree_on_gradients


def average_gradients(group: RankGroup, models: Sequence[nn.Module]) -> None:
    """As `ParallelHandle.average_gradients`.

    Raises:
        ConfigError: FSDP has averaged them.
        CommError: Ranks have gradients of different parameters.
    """
    agree_on_gradients(group, models)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for model in models:
        for parameter in model.parameters():
            if parameter.grad is not None:
                by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for grads in by_dtype.values():
        flat = torch.cat([grad.flatten() for grad in grads])
        total = all_reduce(group, "all_reduce (gradients)", flat)
        parts = (total / group.size).split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))
