"""Bags as parts of one process group, over bags with process groups of their own.

Run: `python benchmarks/bench_bags.py` (about a minute); writes results/bags.json.

Four ranks of one thread over gloo, in two bags. "set-up" is what it takes until a bag can be used;
"all-to-all" is an exchange of rows inside the bag. Both ways take turns; a call lasts as long as
the slowest rank's.
"""

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import ratio, summary, verdict, write_results
from torch.multiprocessing.spawn import spawn

from bascule.comm.collectives import start_all_to_all
from bascule.comm.groups import RankGroup, new_group

NUM_RANKS, WIDTH, ROUNDS, SET_UPS = 4, 256, 200, 10
ROWS = {"few rows": 16, "many rows": 4096}
TARGET = 1.05


def main() -> None:
    """Measure in spawned processes, print the verdicts, write the results."""
    with tempfile.TemporaryDirectory() as folder:
        queue: Any = mp.get_context("spawn").SimpleQueue()
        spawn(measure, args=(os.path.join(folder, "store"), queue), nprocs=NUM_RANKS)
        results = queue.get()
    for case in results["cases"]:
        spread = case["part_over_group"]
        print(verdict(case["what"], spread["median"], TARGET, spread))
    print("written to", write_results("bags", results))


def measure(rank: int, store: str, queue: Any) -> None:
    """One rank: every case in turn; rank 0 reports."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    world = new_group(range(NUM_RANKS), "all", 60.0)
    ranks = [rank // 2 * 2, rank // 2 * 2 + 1]
    part, group = of_part(world, ranks), of_group(ranks)
    turns = alternate(lambda: of_part(world, ranks), lambda: of_group(ranks), SET_UPS)
    cases = [case_of("set-up of a bag", turns)]
    for label, num_rows in ROWS.items():
        rows = torch.randn(num_rows, WIDTH)
        turns = alternate(exchange_in(part, rows), exchange_in(group, rows), ROUNDS)
        cases.append(case_of(f"all-to-all in a bag, {label}", turns))
    if rank == 0:
        queue.put({"num_ranks": NUM_RANKS, "target": TARGET, "cases": cases})
    dist.barrier()
    dist.destroy_process_group()


def of_part(world: RankGroup, ranks: list[int]) -> RankGroup:
    """As bags are."""
    return world.part(ranks, "bag")


def of_group(ranks: list[int]) -> RankGroup:
    """With its first collective, in which gloo may still connect."""
    group = new_group(ranks, "bag", 60.0)
    exchange_in(group, torch.zeros(2, 1))()
    return group


def exchange_in(group: RankGroup, rows: torch.Tensor) -> Callable[[], object]:
    """Half of the rows to each rank."""
    received, splits = torch.empty_like(rows), [len(rows) // 2] * 2
    return lambda: start_all_to_all(group, "all_to_all", received, rows, splits, splits)()


def alternate(
    one: Callable[[], object], other: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of the slowest rank in each round."""
    times: tuple[list[float], list[float]] = [], []
    for turn in range(2 * rounds):
        dist.barrier()
        start = time.perf_counter()
        (other if turn % 2 else one)()
        slowest = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times[turn % 2].append(float(slowest))
    return times


def case_of(what: str, times: tuple[list[float], list[float]]) -> dict[str, Any]:
    """A row of the results."""
    part, group = times
    summaries = {"part": summary(part), "group": summary(group)}
    return {"what": what, "part_over_group": ratio(part, group), "times": summaries}


if __name__ == "__main__":
    main()
