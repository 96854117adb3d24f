"""Forward and backward of all microbatches of an optimiser step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

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
    """Add the gradients of some microbatches to a model's; the sum of their losses, detached.

    The optimiser's step and `zero_grad` stay with the caller. An error of this rank is known to the
    ranks that wait for it in about two seconds, with its text, whether it is met in the forward or
    in the backward.

    Args:
        model: What is trained: plain, in DistributedDataParallel, or sharded by FSDP2.
        microbatches: Each gives its part of the loss of the step, from the model.
        sync: When ranks average their gradients: after every "microbatch", or once a "step", which
            FSDP2 pays for with unsharded gradients. Default: `sync_of` the model.
        where: What errors and profiles call it.

    Raises:
        ConfigError: There is no microbatch, or no such `sync`.
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
    """When the ranks of a wrapped model wait for each other, as `plan_step` takes it.

    FSDP's ranks meet in every all-gather of parameters, so in every "microbatch", however they
    reduce gradients; those of DDP or of a plain model once a "step", if gradients are reduced then.
    """
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    return "microbatch" if is_sharded else "step"


@contextmanager
def _averaging(model: nn.Module, is_wanted: bool) -> Iterator[None]:
    """Return whether the backward within ends with gradients that are averaged over ranks."""
    if is_wanted:
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
