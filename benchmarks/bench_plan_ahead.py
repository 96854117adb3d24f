"""What a training step waits for its plan: 32 ranks, 32 sequences each, planned behind the step.

    python benchmarks/bench_plan_ahead.py           # about a minute

All 32 ranks are real processes of one machine, which agree over gloo. A step of 1 s is a sleep: the
accelerator computes, the host has nothing to do. Each rank begins the plan of the next step before
the sleep (`plan_async`), and takes it afterwards (`result`); both calls are what a run waits for.
Where all plans are ready when they are taken, that is the processor time of the two calls, which
does not depend on how many ranks share a core; the wall clock here does, as all ranks wake at once.
Target: at most 0.2 % of the step.
"""

import multiprocessing
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _common import write_results

from bascule.parallel import SequenceParallel
from bascule.plan.costs import TransformerCost
from bascule.workload.codes import parse_data_codes, sample_lengths, seq_lens

RANKS, STEPS, WARMUP, STEP_S = 32, 20, 3, 1.0
DATA = {"low-res": "g32b32i256f1s0", "mixed": "g16b32i256f1s0,g8b32i512f1s0,g8b32i1024f1s0"}
TARGET = 0.002


def measure(rank: int, store: str, data: str, queue: Any) -> None:
    """One rank: of each step, if its plan was ready, processor and wall seconds of both calls."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=store,
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    parallel = SequenceParallel(dist.group.WORLD, f"g1n{RANKS}", TransformerCost(3072, gamma=0.43))
    codes = parse_data_codes(data)
    lens = [seq_lens(sample_lengths(codes, seed=0, step=i))[rank] for i in range(STEPS + 1)]
    waits: list[tuple[bool, float, float]] = []
    later = parallel.plan_async([lens[0]])
    for step in range(STEPS):
        time.sleep(STEP_S)
        is_ready, start, wall = later.done(), time.thread_time(), time.perf_counter()
        later.result()
        later = parallel.plan_async([lens[step + 1]])
        waits.append((is_ready, time.thread_time() - start, time.perf_counter() - wall))
    later.result()
    queue.put((rank, waits[WARMUP:]))
    dist.barrier()
    dist.destroy_process_group()


def run(data: str) -> dict[str, float]:
    """All ranks; the waits of every rank and step."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bascule.parallel", __name__])
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        ranks = [
            context.Process(target=measure, args=(rank, store, data, queue))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        found = sorted(queue.get(timeout=300) for _ in ranks)
        for process in ranks:
            process.join()
    waits = np.array([waits for _, waits in found])
    return {
        "ready_share": float(waits[..., 0].mean()),
        "median_s": float(np.median(waits[..., 1])),
        "slowest_rank_median_s": float(np.median(waits[..., 1].max(axis=0))),
        "wall_clock_median_s": float(np.median(waits[..., 2])),
    }


def main() -> None:
    """Run, print and write the results."""
    results: dict[str, Any] = {"ranks": RANKS, "step_s": STEP_S, "target_share": TARGET}
    for name, data in DATA.items():
        found = run(data)
        share = found["slowest_rank_median_s"] / STEP_S
        print(
            f"{name}: {found['ready_share']:.0%} of the plans ready; taking one and beginning the "
            f"next: {found['median_s'] * 1e3:.2f} ms, the slowest of {RANKS} ranks {share:.3%} of "
            f"the median step (target {TARGET:.1%}); wall clock of ranks that share cores: "
            f"{found['wall_clock_median_s'] * 1e3:.1f} ms"
        )
        results[name] = {"data": data, **found}
    print("written:", write_results("plan_ahead", results))


if __name__ == "__main__":
    main()
