"""How fast each rank is just now, so that a throttled one gets less to do."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bascule.comm import groups
from bascule.comm.collectives import all_gather
from bascule.comm.failures import shared

_RUNS = 5
_ALIKE = 0.03
_WIDTHS = {"cuda": (8192, torch.bfloat16), "cpu": (512, torch.float32)}
"""Rows of the matrices that are multiplied, some milliseconds of work, by type of device."""


@shared("measure_speeds")
def measure_speeds(
    mesh_or_group: "DeviceMesh | dist.ProcessGroup | None" = None,
    *,
    device: torch.device | str = "cpu",
    work: Callable[[], object] | None = None,
) -> tuple[float, ...]:
    """The speed of each rank of a group over that of the median one; the same on all ranks.

    Each rank does the same work six times, and its fastest run but the first counts. One small
    all-gather, in which ranks wait for the slowest. What differs by less than 3 % is 1.

    Args:
        mesh_or_group: A one-axis DeviceMesh, a process group, or None for the default group.
        device: What is measured.
        work: What is timed: the same on all ranks, and without waiting for others. Default: a
            product of matrices, of some milliseconds.

    Returns:
        What `SequenceParallel.set_speeds`, `BalancedLoader.set_cost` and `plan_batch` take.

    Raises:
        CommError: A rank is gone, or failed.
    """
    group = groups.member_of(groups.resolve(mesh_or_group), "speeds")
    device = torch.device(device)
    seconds = _fastest(work or _product(device), device)
    call = "all_gather (speeds)"
    own = torch.tensor([seconds], dtype=torch.float64, device=groups.device_of(group))
    times = all_gather(group, call, own).flatten().cpu()
    speeds = times.quantile(0.5) / times
    return tuple(torch.where((speeds - 1.0).abs() < _ALIKE, 1.0, speeds).tolist())


def _product(device: torch.device) -> Callable[[], object]:
    width, dtype = _WIDTHS["cuda" if device.type == "cuda" else "cpu"]
    matrix = torch.full((width, width), 0.5, dtype=dtype, device=device)
    return partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix))


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    times: list[float] = []
    for _ in range(_RUNS + 1):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return max(min(times[1:]), 1e-9)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
