"""Time calls on all ranks, in many rounds, so that a short disturbance affects only one round."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bascule.arrays import Floats
from bascule.comm.collectives import (
    Transfers,
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_to_all,
)
from bascule.comm.groups import RankGroup
from bascule.machine.calibration import ALL_TO_ALL, POINT_TO_POINT

COLLECTIVE = "collective"
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"

MOST_IN_A_ROW = 10
_ITEM_BYTES = 4  # float32

Moment = float | torch.cuda.Event


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A call to time. All ranks make it, even ranks without a part in its exchange."""

    kind: str  # for example "work" or "collective"
    name: str  # in reports
    on: str  # device type of its tensors
    size: int  # bytes of a rank, or tokens; 0 if the probe has one size
    amount: float  # FLOPs of a rank, or bytes that it has to send
    run: Callable[[], object]
    in_a_row: int = 1  # runs of one measurement: an unequal start of ranks then matters less
    ends: tuple[tuple[int, int], ...] = ()  # pairs of ranks that exchange at the same time
    prepare: Callable[[], Callable[[], object]] | None = None  # makes the call that is timed


def time_round(group: RankGroup, device: torch.device, probes: Sequence[Probe]) -> Floats:
    """Time each probe, which all ranks begin together; return (ranks, probes) seconds."""
    seconds = np.zeros(len(probes))
    for place, probe in enumerate(probes):
        together = torch.zeros(1)
        all_gather(group, "all_gather (timing, to begin together)", together)
        seconds[place] = seconds_of(probe, device)
    return all_gather(group, "all_gather (timing, seconds)", torch.from_numpy(seconds)).numpy()


def seconds_of(probe: Probe, device: torch.device) -> float:
    """Return the mean seconds of a probe on this rank, over its runs in a row."""
    runs = [probe.run] * probe.in_a_row
    if probe.prepare is not None:
        runs = [probe.prepare() for _ in runs]
    start = now(device)
    for run in runs:
        run()
    return (now(device) - start) / probe.in_a_row


def now(device: torch.device) -> float:
    """Synchronize a device, and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def moment(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Moment:
    """Return the time by a clock; on a GPU, record an event in the stream, without waiting."""
    if device.type != "cuda":
        return clock()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two moments; on a GPU, wait for the events."""
    if isinstance(end, torch.cuda.Event):
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    return end - start


def collectives(group: RankGroup, where: torch.device, size: int) -> list[Probe]:
    """Make probes of bascule's collectives; they count bytes as nccl-tests counts bus bytes."""
    share = -(-size // (group.size * _ITEM_BYTES))  # items of a rank's part
    size = share * group.size * _ITEM_BYTES
    sent = torch.ones(group.size * share, device=where)
    received = torch.empty_like(sent)
    splits = [share] * group.size
    part = size * (group.size - 1) / group.size

    def ring() -> None:
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        call = "point-to-point (timing)"
        Transfers(group, call, {after: sent}, {before: received}).wait()

    def exchange() -> None:
        start_all_to_all(group, "all_to_all (timing)", received, sent, splits, splits)()

    def reduce() -> None:
        reduce_scatter(group, "reduce_scatter (timing)", sent.view(group.size, -1))

    runs: dict[str, tuple[float, Callable[[], object]]] = {
        ALL_TO_ALL: (part, exchange),
        ALL_GATHER: (part, lambda: all_gather(group, "all_gather (timing)", sent[:share])),
        REDUCE_SCATTER: (part, reduce),
        ALL_REDUCE: (2 * part, lambda: all_reduce(group, "all_reduce (timing)", sent)),
        POINT_TO_POINT: (size, ring),
    }
    on, count = where.type, in_a_row(size)
    return [Probe(COLLECTIVE, name, on, size, x, run, count) for name, (x, run) in runs.items()]


def in_a_row(size: int) -> int:
    """Return how many messages of a size one measurement sends."""
    return max(2, min(MOST_IN_A_ROW, 2**20 // size))


def device_name(device: torch.device) -> str:
    """Return the product name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")  # Linux; elsewhere Python's own name must do
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes(device: torch.device) -> int | None:
    """Return the bytes of memory of a GPU, or of the host for a CPU; None: not known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
