"""Measure in turns, on one process or on ranks, and write results with commit, date and device."""

import heapq
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.spawn import start_processes
from torch.profiler import ProfilerActivity, profile

from bascule import HardwareProfile

RESULTS = Path(__file__).parent / "results"

MIXES = {
    "low-res": "g32b32i256f1s0",
    "mixed": "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0",
    "joint": (
        "g8b4i256f1s0,g2b5i512f1s0,g2b5i1024f1s0,g4b1i2048f1s0,"
        "g1b10i256f4s0,g3b1i512f4s0,g8b2i256f85s1,g4b1i512f85s1"
    ),
}
"""The three mixes of KnapFormer's Table 1, for 32 ranks."""

Timer = Callable[[Callable[[], object], int], float]
"""Gives the seconds of one call, from so many in a row."""


def environment() -> dict[str, Any]:
    """What a timing depends on, as far as it can be read."""
    return {
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "num_cpus": torch.multiprocessing.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        **(_cuda() if torch.cuda.is_available() else {}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _cuda() -> dict[str, Any]:
    """What only a CUDA device has."""
    found = torch.cuda.get_device_properties()
    return {
        "capability": f"{found.major}.{found.minor}",
        "num_multiprocessors": found.multi_processor_count,
        "device_memory_bytes": found.total_memory,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": version("triton") if find_spec("triton") else None,
    }


def write_results(name: str, results: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write `results/NAME.json`: the results and the environment."""
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"{name}.json"
    here = {"benchmark": name, "command": command(), "environment": environment()}
    text = json.dumps(here | dict(results), indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def uncommitted() -> str:
    """Return the sources that no commit has, a line each; "" outside git, too."""
    try:
        return _git("status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return ""


def command() -> str:
    """Return the command line of this process."""
    return shlex.join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]])


def bascule(*arguments: str) -> None:
    """Run a command of bascule with one thread a rank."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bascule.cli", *arguments]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def calibrated(folder: Path, *options: str, lengths: str = "64:4096") -> HardwareProfile:
    """This machine, as `bascule calibrate` measures it."""
    out = folder / "machine.json"
    bascule("calibrate", *options, "--lengths", lengths, "--out", str(out))
    return HardwareProfile.load(out)


def wall_seconds(call: Callable[[], object], calls: int) -> float:
    """Seconds of a call by the clock of the host."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int = 1,
    timer: Timer = wall_seconds,
) -> dict[str, list[float]]:
    """Seconds a call of each candidate in each round; all of them take turns within a round.

    So what else runs on the machine hits all candidates alike, and the ratio of two of them within
    a round means more than the times do. The order turns from round to round.
    """
    names = list(candidates)
    for name in names:
        candidates[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(timer(candidates[name], calls))
    return times


def in_turns(
    calls: Mapping[str, Callable[[], object]], rounds: int, *, warmup: int = 3
) -> dict[str, list[float]]:
    """Return the seconds of each call in each round on the slowest rank. All ranks call it."""
    local = torch.zeros(len(calls), rounds, dtype=torch.float64)
    for turn in range(-warmup, rounds):
        order = list(enumerate(calls.values()))
        for place, call in order if turn % 2 else reversed(order):
            dist.barrier()
            start = time.perf_counter()
            call()
            if turn >= 0:
                local[place, turn] = time.perf_counter() - start
    dist.all_reduce(local, op=dist.ReduceOp.MAX)
    return dict(zip(calls, local.tolist(), strict=True))


def on_ranks(function: Callable[..., Any], *args: Any, num_ranks: int = 2) -> Any:
    """Run a module's function on ranks of one thread over gloo; return the first rank's result."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "numpy", "scipy.optimize", "bascule.parallel"])
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as of torchrun
    with tempfile.TemporaryDirectory() as folder:
        of_ranks = num_ranks, store.port, folder, function, args
        start_processes(_rank, of_ranks, num_ranks, start_method="forkserver")
        return torch.load(Path(folder) / "result", weights_only=False)


def _rank(
    rank: int,
    num_ranks: int,
    port: int,
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    result = function(*args)
    if rank == 0:
        torch.save(result, Path(folder) / "result")
    dist.barrier()
    dist.destroy_process_group()


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes that torch's allocator of the host held at once, beyond those from before.

    Allocations are counted, so it is the same in every run.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    del result
    kineto: Any = profiler.profiler and profiler.profiler.kineto_results
    memory = [event for event in kineto.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(memory, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Least and median of the rounds, in microseconds."""
    return {"min_us": min(seconds) * 1e6, "median_us": statistics.median(seconds) * 1e6}


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Times as long as the reference: median over rounds, its quartiles, and of the minima."""
    ratios = [a / b for a, b in zip(seconds, reference, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "median": middle,
        "lower_quartile": low,
        "upper_quartile": high,
        "of_minima": min(seconds) / min(reference),
    }


def met(is_met: bool | None) -> str:
    """Return the first word of a verdict; blanks where there is none."""
    return {True: "met   ", False: "MISSED", None: "      "}[is_met]


def say(text: str, is_met: bool | None = None) -> None:
    """Print a line with its verdict."""
    print(f"{met(is_met)}  {text}", flush=True)


def verdict(label: str, measured: float, target: float, spread: Mapping[str, float]) -> str:
    """One line for the terminal."""
    return (
        f"{met(measured <= target)}  {label}: {measured:.2f}x "
        f"(quartiles {spread['lower_quartile']:.2f} to {spread['upper_quartile']:.2f}; "
        f"target at most {target:g}x)"
    )


def bare_heap(costs: list[float], num_bins: int) -> list[int]:
    """Deal the longest first to the least loaded bin, and nothing else."""
    heap = [(0.0, index) for index in range(num_bins)]
    bin_of = [0] * len(costs)
    for item in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        load, index = heap[0]
        bin_of[item] = index
        heapq.heapreplace(heap, (load + costs[item], index))
    return bin_of


def _commit() -> str:
    """Commit of the working tree, "+changes" if it differs, "unknown" outside git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain", "--", "src") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent.parent), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
