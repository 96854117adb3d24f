"""Measure how fast each rank is just now, so that a throttled one gets less work."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bascule.calibrate.timed import Probe, seconds_of
from bascule.comm import groups
from bascule.comm.collectives import all_gather
from bascule.comm.failures import shared

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

    Each takes the fastest of five runs. A difference of less than 3 % counts as none.

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
