"""One optimizer step, with averaged gradients, and the measured speed of each rank."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy

from bascule.calibrate.timed import Probe, seconds_of
from bascule.comm import groups
from bascule.comm.collectives import all_gather
from bascule.comm.failures import shared
from bascule.errors import ConfigError
from bascule.plan.plan import Sync, check_sync

_RUNS = 5
_EQUAL = 0.03  # relative difference from the median below which a speed is 1
_WIDTHS = {"cuda": (8192, torch.bfloat16), "cpu": (512, torch.float32)}  # some milliseconds


@shared("measure_speeds")
def measure_speeds(
    mesh_or_group: "DeviceMesh | dist.ProcessGroup | None" = None,
    *,
    device: torch.device | str = "cpu",
    work: Callable[[], object] | None = None,
) -> tuple[float, ...]:
    """Return the speed of each rank over the median rank's; the same on all ranks.

    Each rank takes the fastest of five runs. Less than 3 % off the median counts as equal.

    Args:
        mesh_or_group: A one-axis DeviceMesh, a process group, or None for the default group.
        device: Device that is measured.
        work: Work to time, alike on all ranks, without collectives. Default: a matrix product.
    """
    group = groups.member_of(groups.resolve(mesh_or_group), "speeds")
    device = torch.device(device)
    probe = Probe("work", "speed", device.type, 0, 0.0, work or _product(device))
    seconds = max(min([seconds_of(probe, device) for _ in range(_RUNS + 1)][1:]), 1e-9)
    local = torch.tensor([seconds], dtype=torch.float64, device=groups.device_of(group))
    times = all_gather(group, "all_gather (speeds)", local).flatten().cpu()
    speeds = times.quantile(0.5) / times
    return tuple(torch.where((speeds - 1.0).abs() < _EQUAL, 1.0, speeds).tolist())


def _product(device: torch.device) -> Callable[[], object]:
    width, dtype = _WIDTHS["cuda" if device.type == "cuda" else "cpu"]
    matrix = torch.full((width, width), 0.5, dtype=dtype, device=device)
    return partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix))


def train_step(
    model: nn.Module,
    microbatches: Sequence[Callable[[nn.Module], Tensor]],
    *,
    sync: Sync | None = None,
    where: str = "a training step",
) -> Tensor:
    """Add the gradients of all microbatches to the model's; return the sum of losses, detached.

    The caller steps the optimizer and calls `zero_grad`. An error reaches the ranks that wait. A
    step without microbatches, on all ranks alike, adds nothing: the model is not called.

    Args:
        model: A plain module, in DistributedDataParallel, or sharded by FSDP2.
        microbatches: Functions that take the model and return a part of the loss of the step.
        sync: Ranks average gradients after every "microbatch", or once a "step", for which FSDP2
            keeps unsharded gradients. Default: `sync_of(model)`.
        where: Name of the step in errors and profiles.

    Raises:
        ConfigError: Functions that a loop made, which all see the loop's last values.
    """
    sync = sync_of(model) if sync is None else sync
    check_sync(sync)
    _refuse_loops(microbatches)
    if not microbatches:
        return torch.zeros((), device=next((p.device for p in model.parameters()), None))
    losses: list[Tensor] = []
    with shared(where):
        for number, loss_of in enumerate(microbatches, 1):
            with _averaging(model, sync == "microbatch" or number == len(microbatches)):
                loss = loss_of(model)
                loss.backward()
            losses.append(loss.detach())
    return torch.stack(losses).sum()


def _refuse_loops(microbatches: Sequence[Callable[[nn.Module], Tensor]]) -> None:
    """Refuse functions of one loop that share its variables: each would train the last values."""
    first = dict[tuple[object, ...], int]()
    for number, loss_of in enumerate(microbatches, 1):
        if isinstance(loss_of, FunctionType) and loss_of not in microbatches[: number - 1]:
            shares = *map(id, loss_of.__closure__ or ()), *map(id, loss_of.__defaults__ or ())
            other = first.setdefault((loss_of.__code__, *shares), number)
            if other != number:
                fix = "see its last values: give partial(loss_of, batch, step) for each"
                what = f"microbatches {other} and {number} are functions of one loop"
                raise ConfigError(f"train_step: {what} and {fix}")


def sync_of(model: nn.Module) -> Sync:
    """Return `sync` for `plan_step`: "microbatch" for a model sharded by FSDP2, else "step"."""
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    return "microbatch" if is_sharded else "step"


@contextmanager
def _averaging(model: nn.Module, is_on: bool) -> Iterator[None]:
    """Let the enclosed backward average gradients over ranks, or only add them up."""
    if is_on or not isinstance(model, DistributedDataParallel | FSDPModule):
        yield
    elif isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)


def keep_exchanges(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep exchanges and attention in selective activation checkpointing; recompute all else."""
    is_exchange = getattr(operator, "namespace", "") == "bascule"
    return CheckpointPolicy.MUST_SAVE if is_exchange else CheckpointPolicy.PREFER_RECOMPUTE
