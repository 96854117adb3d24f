"""A small Flux on two ranks of one thread: bascule against its peers and against no communication.

Run: `python benchmarks/bench_inference.py [--peer-python PATH] [--compiled]`; writes
results/inference.json. PATH is a Python with torch, `diffusers==0.33.1` and `para-attn==0.3.38`,
which do not run with newer diffusers; without it, para-attn is left out.

Every candidate is a pair of processes that stays alive; one candidate at a time is asked for a few
forward passes, in turns, so that whatever else runs on the machine hits all alike. Candidates:

- one rank: the model alone on one rank, the other idle;
- ceiling: bascule's ring, the one of its methods that copies least, with collectives that move
  nothing, on both ranks at once: the same work of each rank and the same pressure on the memory;
- bascule ring, bascule Ulysses: `parallelize`. The verdict is on the faster one, as a user would
  choose it;
- diffusers: its own context parallelism with Ulysses (asked how many accelerators there are, torch
  says none on this machine, on which diffusers fails; it is told one);
- para-attn: its context parallelism with Ulysses.

Speeds are of rank 0, between two barriers. The 95 % interval of a ratio is that of the mean of the
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
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

NUM_RANKS = 2
IMAGE, TEXT = (32, 32), 128  # latent patches, tokens
WIDTH, HEADS, BLOCKS, SINGLE_BLOCKS = 512, 8, 2, 4
FORWARDS = 3  # a turn
CEILING_TARGET, PEER_TARGET = 0.95, 1.0
OURS = {
    "ceiling": (NUM_RANKS, 1),
    "bascule ring": (NUM_RANKS, 1),
    "bascule Ulysses": (1, NUM_RANKS),
}  # (ring degree, Ulysses degree)
CANDIDATES = ("one rank", *OURS, "diffusers", "para-attn")


def main() -> None:
    """Measure in turns, print the verdicts, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", type=Path, help="a Python with para-attn")
    parser.add_argument("--compiled", action="store_true", help="compile all, instead of none")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--worker", nargs=3, metavar=("NAME", "RANK", "STORE"))
    options = parser.parse_args()
    if options.worker:
        name, rank, store = options.worker
        work(name, int(rank), store, options.compiled)
    else:
        measure(options)


# --- the processes that are measured --------------------------------------------------------------


def work(name: str, rank: int, store: str, compiled: bool) -> None:
    """Answer each line of standard input, a number of forward passes, with their seconds."""
    torch.set_num_threads(1)
    backend = "fake" if name == "ceiling" else "gloo"
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=NUM_RANKS)
    else:
        init = f"file://{store}"
        dist.init_process_group(backend, init_method=init, rank=rank, world_size=NUM_RANKS)
    model, inputs = make_model()
    with torch.inference_mode():
        expected = model(**inputs)[0]
        forward = prepare(name, model, inputs, compiled)
        found = forward()
        error = float((found - expected).norm() / expected.norm())
        print(json.dumps({"error": error, "rank": rank}), flush=True)
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


def make_model() -> tuple[Any, dict[str, Any]]:
    """A Flux with random weights, the same on all ranks, and inputs for an image of 512 x 512."""
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    torch.manual_seed(0)
    head_dim = WIDTH // HEADS
    model = FluxTransformer2DModel(
        in_channels=64,
        num_layers=BLOCKS,
        num_single_layers=SINGLE_BLOCKS,
        attention_head_dim=head_dim,
        num_attention_heads=HEADS,
        joint_attention_dim=256,
        pooled_projection_dim=256,
        axes_dims_rope=(8, 28, 28),
    ).eval()
    height, width = IMAGE
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack([torch.zeros(height, width), rows, columns], dim=-1).view(-1, 3)
    inputs = {
        "hidden_states": torch.randn(1, height * width, 64),
        "encoder_hidden_states": torch.randn(1, TEXT, 256),
        "pooled_projections": torch.randn(1, 256),
        "timestep": torch.tensor([0.5]),
        "img_ids": places,
        "txt_ids": torch.zeros(TEXT, 3),
        "return_dict": False,
    }
    return model, inputs


def prepare(
    name: str, model: Any, inputs: dict[str, Any], compiled: bool
) -> Callable[[], torch.Tensor]:
    """The forward pass of a candidate; the whole output on every rank."""
    if name in OURS:
        from bascule.integrations.diffusers import parallelize

        ring, ulysses = OURS[name]
        parallelize(model, ring_degree=ring, ulysses_degree=ulysses)
    elif name == "diffusers":
        from diffusers.models._modeling_parallel import ContextParallelConfig

        with mock.patch("torch.accelerator.device_count", lambda: 1):
            model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=NUM_RANKS))
    elif name == "para-attn":
        peer = importlib.import_module("para_attn.context_parallel")
        adapters = importlib.import_module("para_attn.context_parallel.diffusers_adapters")
        mesh = peer.init_context_parallel_mesh("cpu", max_ring_dim_size=1)
        adapters.parallelize_transformer(model, mesh=mesh)
    run = torch.compile(model) if compiled else model
    return lambda: run(**inputs)[0]


# --- who asks them in turns -----------------------------------------------------------------------


class Candidate:
    """Two processes that run one candidate."""

    def __init__(self, name: str, python: Path | str, folder: Path, compiled: bool) -> None:
        self.name = name
        script = [str(python), __file__, *(["--compiled"] if compiled else [])]
        store = str(folder / name.replace(" ", "_"))
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._ranks = [
            subprocess.Popen(
                [*script, "--worker", name, str(rank), store],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env,
            )
            for rank in range(NUM_RANKS)
        ]
        self.error = max(self._heard(process)["error"] for process in self._ranks)

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
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)

    def _heard(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(("{", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9")):
                return json.loads(line)
        raise RuntimeError(f"{self.name}: a process ended with {process.wait()}")


def measure(options: argparse.Namespace) -> None:
    """All candidates in turns."""
    from _common import write_results

    pythons = dict.fromkeys(CANDIDATES, Path(sys.executable))
    if options.peer_python is None:
        del pythons["para-attn"]
    else:
        pythons["para-attn"] = options.peer_python
    times: dict[str, list[float]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as folder:
        candidates = [
            Candidate(name, python, Path(folder), options.compiled)
            for name, python in pythons.items()
        ]
        for candidate in candidates:
            candidate.seconds(2)
        for turn in range(options.rounds):
            first = turn % len(candidates)
            for candidate in candidates[first:] + candidates[:first]:
                times[candidate.name].append(candidate.seconds(FORWARDS))
        for candidate in candidates:
            candidate.close()
    results = summarize(times) | {
        "errors": {candidate.name: candidate.error for candidate in candidates},
        "rounds": options.rounds,
        "model": f"Flux, width {WIDTH}, {BLOCKS} + {SINGLE_BLOCKS} blocks, {math.prod(IMAGE)} + "
        f"{TEXT} tokens, float32, {'compiled' if options.compiled else 'eager'}",
    }
    print_verdicts(results)
    name = "inference_compiled" if options.compiled else "inference"
    print("written:", write_results(name, results))


def summarize(times: dict[str, list[float]]) -> dict[str, Any]:
    """Speed-ups over one rank, and the paired ratios that the verdicts are about."""
    peers = [name for name in ("diffusers", "para-attn") if name in times]
    ours = [name for name in OURS if name != "ceiling"]
    best, own = (min(names, key=lambda n: statistics.median(times[n])) for names in (peers, ours))
    return {
        "median_s": {name: statistics.median(seconds) for name, seconds in times.items()},
        "speedup": {name: paired(times["one rank"], times[name]) for name in times},
        "of_ceiling": {name: paired(times["ceiling"], times[name]) for name in (*ours, *peers)},
        "best_peer": best,
        "best_own": own,
        "over_best_peer": {name: paired(times[best], times[name]) for name in ours},
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
    own, best = results["best_own"], results["best_peer"]
    for name in results["over_best_peer"]:
        part, peer = results["of_ceiling"][name], results["over_best_peer"][name]
        is_met = part["mean"] >= CEILING_TARGET
        print(
            f"{_verdict(is_met, name == own)} {name} at {part['mean']:.1%} of the ceiling "
            f"({part['low']:.1%} to {part['high']:.1%}; target {CEILING_TARGET:.0%})"
        )
        is_met = peer["high"] >= PEER_TARGET
        print(
            f"{_verdict(is_met, name == own)} {name} {peer['mean']:.3f}x {best} "
            f"({peer['low']:.3f} to {peer['high']:.3f}; the interval must reach {PEER_TARGET:g})"
        )


def _verdict(is_met: bool, counts: bool) -> str:
    return ("met   " if is_met else "MISSED") if counts else "      "


if __name__ == "__main__":
    main()
