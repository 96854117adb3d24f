"""Routing against the least that any exchange of the same rows costs.

Run: `python benchmarks/bench_route.py` (about a minute); writes results/route.json.

Two ranks of one thread over gloo. The reference is one `all_to_all_single` with the same splits and
two `index_select` of the same bytes, before and after it, into the wide integers that copy fastest.
Both take turns; a call lasts as long as the slower rank's.
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
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from bascule.parallel import SequenceParallel, Step
from bascule.plan.costs import TransformerCost

NUM_RANKS, WIDTH, ROUNDS, TARGET = 2, 512, 300, 1.2
LENS = ((4096, 2048, 1024, 512, 300, 212), (2048, 2048, 1536, 1024, 1000, 536))
TOPOLOGIES = ("g1n2", "g2n1")


def main() -> None:
    """Measure in spawned processes, print the verdicts, write the results."""
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        queue: Any = mp.get_context("spawn").SimpleQueue()
        spawn(measure, args=(store, queue), nprocs=NUM_RANKS)
        results = queue.get()
    for case in results["cases"]:
        spread = case["ratio"]
        label = f"route {case['tensors']}, {case['topology']}, {case['megabytes']:.1f} MB a rank"
        print(verdict(label, spread["median"], TARGET, spread))
    print("written to", write_results("route", results))


def measure(rank: int, store: str, queue: Any) -> None:
    """One rank: every case in turn; rank 0 reports."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    cases: list[dict[str, Any]] = []
    for topology in TOPOLOGIES:
        parallel = SequenceParallel(None, topology, TransformerCost(WIDTH))
        step = parallel.plan(list(LENS[rank]))
        for name, tensors in inputs(sum(LENS[rank])).items():
            times = alternate(
                {
                    "route": lambda step=step, tensors=tensors: step.route(**tensors),
                    "bare": bare_exchange(step, rank, tensors),
                }
            )
            cases.append(
                {
                    "tensors": name,
                    "topology": topology,
                    "megabytes": sum(x.nbytes for x in tensors.values()) / 1e6,
                    "moved_share": step.plan.moved_tokens / int(step.plan.seq_lens.sum()),
                    "ratio": ratio(times["route"], times["bare"]),
                    "times": {key: summary(seconds) for key, seconds in times.items()},
                }
            )
    if rank == 0:
        queue.put({"num_ranks": NUM_RANKS, "width": WIDTH, "target": TARGET, "cases": cases})
    dist.destroy_process_group()


def inputs(num_tokens: int) -> dict[str, dict[str, Tensor]]:
    """Tokens alone, and with what else a training step routes."""
    x = torch.randn(num_tokens, WIDTH).to(torch.bfloat16)
    others = {
        "pos": torch.randn(num_tokens, 3),
        "ids": torch.arange(num_tokens) + 2**40,
        "is_text": torch.arange(num_tokens) % 3 == 0,
    }
    return {"bf16 tokens": {"x": x}, "bf16, float32, int64 and bool": {"x": x, **others}}


def bare_exchange(step: Step, rank: int, tensors: dict[str, Tensor]) -> Callable[[], Tensor]:
    """One buffer of the same bytes a row: select, exchange, select."""
    route = step.plan.route(rank)
    row_bytes = sum(x.nbytes // x.shape[0] for x in tensors.values())
    rows = torch.ones(route.send_splits.sum(), -(-row_bytes // 8), dtype=torch.int64)
    assert route.send_index is not None
    send_index = torch.from_numpy(route.send_index)
    recv_index = torch.arange(int(route.recv_splits.sum()))
    send_splits, recv_splits = route.send_splits.tolist(), route.recv_splits.tolist()

    def call() -> Tensor:
        sent = rows.index_select(0, send_index)
        received = sent.new_empty(sum(recv_splits), sent.shape[1])
        dist.all_to_all_single(received, sent, recv_splits, send_splits)
        return received.index_select(0, recv_index)

    return call


def alternate(calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each call in each round on the slower rank, taking turns."""
    own = torch.zeros(len(calls), ROUNDS, dtype=torch.float64)
    for turn in range(-3, ROUNDS):
        order = list(enumerate(calls.values()))
        for place, call in order if turn % 2 else reversed(order):
            dist.barrier()
            start = time.perf_counter()
            call()
            if turn >= 0:
                own[place, turn] = time.perf_counter() - start
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return dict(zip(calls, own.tolist(), strict=True))


if __name__ == "__main__":
    main()
