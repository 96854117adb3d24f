"""What `bascule trace` predicts of a run that does not use bascule, and what bascule then brings.

Run: `python benchmarks/bench_trace.py` (about three minutes on two idle cores); writes
results/trace.json.

A plain DDP script on two ranks of one thread, with samples of log-normal lengths, is profiled. Its
traces and its list of lengths give a cost model and a prediction. Then the same script trains on
the same steps without and with a `BalancedLoader` that has this cost model, taking turns, without
a profiler. Each round is as many steps as were profiled.
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import write_results
from _plain_ddp import NUM_SAMPLES, Trainer, profiled, samples_of, write_lens
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader

from bascule import PolynomialCost
from bascule.data import BalancedLoader
from bascule.workload.traces import balancing_worth, read_traces, step_parts
from bascule.workload.traces.worth import read_lens

RANKS, WARMUP = 2, 2


def length_of(sample: dict[str, Tensor]) -> int:
    """Tokens of a sample."""
    return len(sample["x"])


def predicted(folder: str, num_steps: int) -> dict[str, Any]:
    """What the traces of a run say: the parts of its steps and the prediction."""
    traces, notes = read_traces(folder)
    parts = step_parts(traces, notes)
    write_lens(Path(folder) / "lens.jsonl", RANKS, num_steps + WARMUP)
    worth = balancing_worth(parts, read_lens(Path(folder) / "lens.jsonl"))
    return {
        "step_ms": parts.step_seconds.mean() * 1e3,
        "imbalance": parts.imbalance,
        "waiting_share": (parts.waiting.sum(axis=0) / parts.seconds.sum(axis=0)).tolist(),
        "slowest_rank": parts.slowest_rank,
        "speedup": worth.speedup,
        "model_error": worth.model_error,
        "worth": asdict(worth),
    }


def measure(rank: int, folder: str, num_steps: int, rounds: int) -> None:
    """Profile, predict, and measure in turns; rank 0 writes the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    steps = [samples_of(rank, step) for step in range(num_steps + WARMUP)]
    trainer = Trainer()
    for _ in range(2):
        trainer.step(steps[0])
    traces = Path(folder) / "traces"
    profiled(traces, rank, num_steps, lambda step: trainer.step(steps[step]), warmup=WARMUP)
    dist.barrier()
    found: list[Any] = [predicted(str(traces), num_steps) if rank == 0 else None]
    dist.broadcast_object_list(found)
    worth = found[0]["worth"]
    terms = ("quadratic", "linear", "constant", "overhead")
    cost = PolynomialCost(*(worth["cost"][term] for term in terms))

    def plain() -> float:
        for samples in steps[:WARMUP]:
            trainer.step(samples)
        dist.barrier()
        start = time.perf_counter()
        for samples in steps[WARMUP:]:
            trainer.step(samples)
        dist.barrier()
        return (time.perf_counter() - start) / num_steps

    def balanced() -> float:
        start = 0.0
        data = [{"x": sample} for samples in steps for sample in samples]
        loaded = DataLoader(data, NUM_SAMPLES, collate_fn=list)  # pyright: ignore[reportArgumentType]
        with BalancedLoader(loaded, cost=cost, length_fn=length_of) as loader:
            for number, batch in enumerate(loader):
                if number == WARMUP:
                    dist.barrier()
                    start = time.perf_counter()
                trainer.step([sample["x"] for sample in batch.data], batch.loss_scale)
            dist.barrier()
            return (time.perf_counter() - start) / num_steps

    turns = [(plain(), balanced()) for _ in range(rounds)]
    if rank == 0:
        report(found[0], turns)
    dist.barrier()
    dist.destroy_process_group()


def report(prediction: dict[str, Any], turns: list[tuple[float, float]]) -> None:
    """Compare and write."""
    ratios = [before / after for before, after in turns]
    measured = statistics.median(ratios)
    error = prediction["speedup"] / measured - 1.0
    path = write_results(
        "trace",
        {
            "predicted": prediction,
            "measured": {
                "speedup": measured,
                "of_rounds": ratios,
                "plain_s": [before for before, _ in turns],
                "balanced_s": [after for _, after in turns],
            },
            "error": error,
        },
    )
    verdict = "met" if abs(error) <= 0.10 else "MISSED"
    print(
        f"{verdict}: predicted {prediction['speedup']:.3f}x, measured {measured:.3f}x "
        f"(rounds {min(ratios):.3f} to {max(ratios):.3f}), error {error:+.1%}; wrote {path}"
    )


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "traces").mkdir()
        spawn(measure, (folder, options.steps, options.rounds), nprocs=RANKS)


if __name__ == "__main__":
    main()
