"""One optimizer step: forward and backward of microbatches, with averaged gradients."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy

from bascule.comm.failures import shared
from bascule.errors import ConfigError
from bascule.plan.step import Sync, check_sync


def train_step(
    model: nn.Module,
    microbatches: Sequence[Callable[[nn.Module], Tensor]],
    *,
    sync: Sync | None = None,
    where: str = "a training step",
) -> Tensor:
    """Add the gradients of all microbatches to the model's; return the sum of losses, detached.

    The caller steps the optimizer and calls `zero_grad`. An error reaches the ranks that wait.

    Args:
        model: A plain module, in DistributedDataParallel, or sharded by FSDP2.
        microbatches: Functions that take the model and return a part of the loss of the step.
        sync: Ranks average gradients after every "microbatch", or once a "step", for which FSDP2
            keeps unsharded gradients. Default: `sync_of(model)`.
        where: Name of the step in errors and profiles.
    """
    sync = sync_of(model) if sync is None else sync
    check_sync(sync)
    if not microbatches:
        raise ConfigError("train_step: no microbatch: give one function at least")
    losses: list[Tensor] = []
    with shared(where):
        for number, loss_of in enumerate(microbatches, 1):
            with _averaging(model, sync == "microbatch" or number == len(microbatches)):
                loss = loss_of(model)
                loss.backward()
            losses.append(loss.detach())
    return torch.stack(losses).sum()


def sync_of(model: nn.Module) -> Sync:
    """Return `sync` for `plan_step`: FSDP's ranks wait in each "microbatch", others in a "step"."""
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    return "microbatch" if is_sharded else "step"


@contextmanager
def _averaging(model: nn.Module, is_on: bool) -> Iterator[None]:
    """Let the backward within average gradients over ranks, or only add them up."""
    if is_on:
        yield
    elif isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield


def keep_exchanges(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep exchanges and attention in selective activation checkpointing; recompute all else."""
    is_exchange = getattr(operator, "namespace", "") == "bascule"
    return CheckpointPolicy.MUST_SAVE if is_exchange else CheckpointPolicy.PREFER_RECOMPUTE
