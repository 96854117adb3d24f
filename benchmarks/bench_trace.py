"""What `bascule trace` predicts of a run that does not use bascule, and what bascule then brings.

Run: `python benchmarks/bench_trace.py` (about three minutes on two idle cores); writes
results/trace.json.

In each round a plain DDP script on two ranks of one thread, with samples of log-normal lengths, is
profiled; its traces and its list of lengths give a cost model and a prediction. Then the same
script trains on the same steps without a profiler, first as it is, then with a `BalancedLoader`
that has this cost model. Predicted and measured are the medians of the rounds.
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

from bascule.costs import PolynomialCost
from bascule.data import BalancedLoader
from bascule.workload.traces import balancing_worth, read_traces, step_parts
from bascule.workload.traces.worth import read_lens

RANKS, WARMUP = 2, 2
TERMS = ("quadratic", "linear", "constant", "overhead")


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

    def predict(turn: int) -> dict[str, Any]:
        traces = Path(folder) / f"traces{turn}"
        traces.mkdir(exist_ok=True)
        profiled(traces, rank, num_steps, lambda step: trainer.step(steps[step]), warmup=WARMUP)
        dist.barrier()
        found: list[Any] = [predicted(str(traces), num_steps) if rank == 0 else None]
        dist.broadcast_object_list(found)
        return found[0]

    def plain() -> float:
        for samples in steps[:WARMUP]:
            trainer.step(samples)
        dist.barrier()
        start = time.perf_counter()
        for samples in steps[WARMUP:]:
            trainer.step(samples)
        dist.barrier()
        return (time.perf_counter() - start) / num_steps

    def balanced(cost: PolynomialCost) -> float:
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

    turns: list[tuple[dict[str, Any], float, float]] = []
    for turn in range(rounds):
        found = predict(turn)
        cost = PolynomialCost(*(found["worth"]["cost"][term] for term in TERMS))
        turns.append((found, plain(), balanced(cost)))
    if rank == 0:
        report(turns)
    dist.barrier()
    dist.destroy_process_group()


def report(turns: list[tuple[dict[str, Any], float, float]]) -> None:
    """Compare and write."""
    predictions = [found["speedup"] for found, _, _ in turns]
    ratios = [before / after for _, before, after in turns]
    predicted, measured = statistics.median(predictions), statistics.median(ratios)
    error = predicted / measured - 1.0
    path = write_results(
        "trace",
        {
            "predicted": predicted,
            "measured": measured,
            "error": error,
            "rounds": [
                {"plain_s": before, "balanced_s": after, "measured": before / after, "trace": found}
                for found, before, after in turns
            ],
        },
    )
    print(
        f"{'met' if abs(error) <= 0.10 else 'MISSED'}: predicted {predicted:.3f}x "
        f"({min(predictions):.3f} to {max(predictions):.3f}), measured {measured:.3f}x "
        f"({min(ratios):.3f} to {max(ratios):.3f}), error {error:+.1%}; wrote {path}"
    )


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, (folder, options.steps, options.rounds), nprocs=RANKS)


if __name__ == "__main__":
    main()
