"""Small models on two ranks of one thread: bascule against its peers and against no communication.

Run: `python benchmarks/bench_inference.py [--peer-python PATH] [--compiled] [--shapes NAME ...]`
(about three minutes a shape, and two more to compile); writes results/inference.json. PATH is a
Python with torch, `diffusers==0.33.1` and `para-attn==0.3.38`, which do not run with newer
diffusers; without it, para-attn is left out.

Every candidate is a pair of processes that stays alive; one candidate at a time is asked for a few
forward passes, in turns, so that whatever else runs on the machine hits all alike. Candidates:

- one rank: the model alone on one rank, the other idle;
- ceiling: bascule's ring, the one of its methods that copies least, with collectives that move
  nothing, on both ranks at once: the same work of each rank and the same pressure on the memory;
- bascule ring, bascule Ulysses: `parallelize`. The verdict is on the faster one, as a user would
  choose it;
- diffusers Ulysses, diffusers ring: its own context parallelism, in its modes for any length where
  tokens do not divide (asked how many accelerators there are, torch says none on this machine, on
  which diffusers fails; it is told one);
- para-attn, cache-dit: their context parallelism with Ulysses; cache-dit where it is installed.
  Where tokens do not divide, it and diffusers gather tensors of unlike sizes, as NCCL can and gloo
  cannot; they are given a gather that fills them up.

A peer that does not run a shape, or runs it wrong, is named with its reason and left out. Speeds
are of rank 0, between two barriers. The 95 % interval of a ratio is that of the mean of the
logarithms of the paired ratios of rounds.
"""

import argparse
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _inference_shapes import SHAPES, Shape
from torch.distributed.device_mesh import init_device_mesh

NUM_RANKS = 2
FORWARDS = 2  # a turn
MAX_ERROR = 1e-5  # relative; float32
CEILING_TARGET, PEER_TARGET = 0.95, 1.0
OURS = {"ceiling": "ring", "bascule ring": "ring", "bascule Ulysses": "ulysses"}
PEERS = "diffusers Ulysses", "diffusers ring", "para-attn", "cache-dit"
CANDIDATES = ("one rank", *OURS, *PEERS)


def main() -> None:
    """Measure in turns, print the verdicts, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", type=Path, help="a Python with para-attn")
    parser.add_argument("--compiled", action="store_true", help="compile all, instead of none")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--worker", nargs=4, metavar=("NAME", "RANK", "STORE", "SHAPE"))
    options = parser.parse_args()
    if options.worker:
        name, rank, store, shape = options.worker
        work(name, int(rank), store, SHAPES[shape], options.compiled)
    else:
        measure(options)


# --- the processes that are measured --------------------------------------------------------------


def work(name: str, rank: int, store: str, shape: Shape, compiled: bool) -> None:
    """Answer each line of standard input, a number of forward passes, with their seconds."""
    torch.set_num_threads(1)
    start_ranks(name, rank, store)
    model, inputs = shape.make(shape)
    with torch.inference_mode():
        expected = model(**inputs)[0]
        try:
            forward = prepare(name, model, inputs, shape, compiled)
            found = forward()
        except Exception as error:  # of whatever peer
            text = " ".join(str(error).split())[:200]
            print(json.dumps({"failed": f"{type(error).__name__}: {text}"}), flush=True)
            return
        error = float((found - expected).norm() / expected.norm())
        print(json.dumps({"error": error}), flush=True)
        for line in sys.stdin:
            number = int(line)
            dist.barrier()
            start = time.perf_counter()
            if name != "one rank" or rank == 0:
                for _ in range(number):
                    forward()
            seconds = (time.perf_counter() - start) / max(number, 1)
            print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


def start_ranks(name: str, rank: int, store: str) -> None:
    """Two ranks; those of the ceiling exchange nothing."""
    if name == "ceiling":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=NUM_RANKS)
        return
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=300),
    )


def prepare(
    name: str, model: Any, inputs: dict[str, Any], shape: Shape, compiled: bool
) -> Callable[[], torch.Tensor]:
    """The forward pass of a candidate; the whole output on every rank."""
    if name in OURS:
        from bascule.diffusers import parallelize

        mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=(OURS[name],))
        parallelize(model, mesh=mesh)
    elif name.startswith("diffusers"):
        from diffusers.models._modeling_parallel import ContextParallelConfig

        kind = name.split()[1].lower()
        degrees: dict[str, Any] = {f"{kind}_degree": NUM_RANKS}
        degrees[f"{kind}_anything"] = not shape.is_divisible
        with mock.patch("torch.accelerator.device_count", lambda: 1):
            model.enable_parallelism(config=ContextParallelConfig(**degrees))
    elif name == "para-attn":
        peer = importlib.import_module("para_attn.context_parallel")
        adapters = importlib.import_module("para_attn.context_parallel.diffusers_adapters")
        mesh = peer.init_context_parallel_mesh("cpu", max_ring_dim_size=1)
        adapters.parallelize_transformer(model, mesh=mesh)
    elif name == "cache-dit":
        peer = importlib.import_module("cache_dit")
        with mock.patch("torch.accelerator.device_count", lambda: 1):
            config = peer.ParallelismConfig(
                ulysses_size=NUM_RANKS, ulysses_anything=not shape.is_divisible
            )
            peer.enable_cache(model, parallelism_config=config)
    if not name.startswith("bascule"):
        dist.all_gather = all_gather_any
    run = torch.compile(model) if compiled else model
    return lambda: run(**inputs)[0]


def all_gather_any(parts: list[torch.Tensor], x: torch.Tensor, group: Any = None) -> None:
    """`dist.all_gather` of tensors that differ in one size, which gloo does not have."""
    sizes = [max(each) for each in zip(*(part.shape for part in parts), strict=True)]
    filled = x.new_zeros(sizes)
    filled[tuple(map(slice, x.shape))] = x
    whole = filled.new_empty(len(parts) * filled.numel())
    dist.all_gather_into_tensor(whole, filled.flatten(), group=group)
    for part, found in zip(parts, whole.view(len(parts), *sizes), strict=True):
        part.copy_(found[tuple(map(slice, part.shape))])


# --- who asks them in turns -----------------------------------------------------------------------


class Candidate:
    """Two processes that run one candidate.

    Attributes:
        error: Of its output, relative; NaN if it does not run.
        failed: Why it does not run; None if it does.
    """

    def __init__(
        self, name: str, python: Path, folder: Path, options: argparse.Namespace, shape: str
    ) -> None:
        self.name = name
        script = [str(python), __file__, *(["--compiled"] if options.compiled else [])]
        store = str(folder / f"{name} {shape}".replace(" ", "_"))
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._ranks = [
            subprocess.Popen(
                [*script, "--worker", name, str(rank), store, shape],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env,
            )
            for rank in range(NUM_RANKS)
        ]
        said = [self._heard(process) for process in self._ranks]
        self.failed = next((one["failed"] for one in said if "failed" in one), None)
        self.error = max(one.get("error", math.nan) for one in said)
        if self.failed is None and name != "ceiling" and self.error > MAX_ERROR:
            self.failed = f"wrong by {self.error:.1e}"

    def seconds(self, number: int) -> float:
        """Of a forward pass, on rank 0."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
        first, *_ = [self._heard(process) for process in self._ranks]
        return first

    def close(self) -> None:
        """End the processes."""
        for process in self._ranks:
            if self.failed is not None:
                process.kill()
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)

    def _heard(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(("{", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9")):
                return json.loads(line)
        return {"failed": f"a process ended with {process.wait()}"}


def measure(options: argparse.Namespace) -> None:
    """All shapes, one after the other."""
    from _common import write_results

    cases = list[dict[str, Any]]()
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            cases.append(measure_shape(shape, options, Path(folder)))
        print_verdicts(cases[-1])
    name = "inference_compiled" if options.compiled else "inference"
    if set(options.shapes) == set(SHAPES):
        print("written:", write_results(name, {"rounds": options.rounds, "cases": cases}))


def measure_shape(shape: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All candidates in turns."""
    pythons = dict.fromkeys(CANDIDATES, Path(sys.executable))
    if options.peer_python is None:
        del pythons["para-attn"]
    else:
        pythons["para-attn"] = options.peer_python
    started = [Candidate(name, python, folder, options, shape) for name, python in pythons.items()]
    candidates = [candidate for candidate in started if candidate.failed is None]
    times: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for candidate in candidates:
        candidate.seconds(2)
    for turn in range(options.rounds):
        first = turn % len(candidates)
        for candidate in candidates[first:] + candidates[:first]:
            times[candidate.name].append(candidate.seconds(FORWARDS))
    for candidate in started:
        candidate.close()
    return {
        "model": f"{SHAPES[shape]}, {'compiled' if options.compiled else 'eager'}",
        "do_not_run": {one.name: one.failed for one in started if one.failed is not None},
        "errors": {candidate.name: candidate.error for candidate in candidates},
        **summarize(times),
    }


def summarize(times: dict[str, list[float]]) -> dict[str, Any]:
    """Speed-ups over one rank, and the paired ratios that the verdicts are about."""
    peers = [name for name in PEERS if name in times]
    ours = [name for name in OURS if name != "ceiling"]
    best, own = (
        min(names, key=lambda name: statistics.median(times[name]), default=None)
        for names in (peers, ours)
    )
    return {
        "median_s": {name: statistics.median(seconds) for name, seconds in times.items()},
        "speedup": {name: paired(times["one rank"], times[name]) for name in times},
        "of_ceiling": {name: paired(times["ceiling"], times[name]) for name in (*ours, *peers)},
        "best_peer": best,
        "best_own": own,
        "over_best_peer": {
            name: paired(times[best], times[name]) for name in ours if best is not None
        },
    }


def paired(slower: Sequence[float], faster: Sequence[float]) -> dict[str, float]:
    """Geometric mean of the ratios of rounds, with its 95 % interval (normal approximation)."""
    logs = [math.log(a / b) for a, b in zip(slower, faster, strict=True)]
    middle = statistics.fmean(logs)
    half = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    return {
        "mean": math.exp(middle),
        "low": math.exp(middle - half),
        "high": math.exp(middle + half),
        "of_minima": min(slower) / min(faster),
    }


def print_verdicts(results: dict[str, Any]) -> None:
    print(results["model"])
    for name, found in results["speedup"].items():
        print(
            f"  {name}: {results['median_s'][name] * 1e3:.1f} ms, {found['mean']:.2f}x one rank "
            f"({found['low']:.2f} to {found['high']:.2f})"
            + ("" if name == "ceiling" else f", relative error {results['errors'][name]:.1e}")
        )
    for name, reason in results["do_not_run"].items():
        print(f"  {name} does not run this: {reason}")
    own, best = results["best_own"], results["best_peer"]
    for name, part in results["of_ceiling"].items():
        if name not in OURS:
            continue
        is_met = part["mean"] >= CEILING_TARGET
        print(
            f"{_verdict(is_met, name == own)} {name} at {part['mean']:.1%} of the ceiling "
            f"({part['low']:.1%} to {part['high']:.1%}; target {CEILING_TARGET:.0%})"
        )
    for name, peer in results["over_best_peer"].items():
        is_met = peer["high"] >= PEER_TARGET
        print(
            f"{_verdict(is_met, name == own)} {name} {peer['mean']:.3f}x {best} "
            f"({peer['low']:.3f} to {peer['high']:.3f}; the interval must reach {PEER_TARGET:g})"
        )


def _verdict(is_met: bool, counts: bool) -> str:
    return ("met   " if is_met else "MISSED") if counts else "      "


if __name__ == "__main__":
    main()
