"""What marked calls cost: exchanges with them, over the same through the back end's collectives.

Run: `python benchmarks/bench_calls.py` (about a minute); writes results/calls.json.

Two ranks of one thread over gloo. "marked" is the library as it is: messages from rank to rank,
tagged with the mark of their call, and a wait that is watched. "bare" is the same call with gloo's
own all-to-all, all-gather and all-reduce in place of that. Both take turns. "host" is the processor
time of a rank and its threads of gloo; "wall" lasts until the slower rank is done. Marks travel as
tags, so no byte and no message is added.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import ratio, summary, verdict, write_results
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from bascule.parallel import SequenceParallel
from bascule.plan.costs import TransformerCost

NUM_RANKS, WIDTH, ROUNDS, TARGET = 2, 512, 200, 1.05
LENS = {"small": ((40, 20), (10, 5)), "large": ((4096, 2048, 512), (300, 212, 100))}


def main() -> None:
    """Measure in spawned processes, print the verdicts, write the results."""
    with tempfile.TemporaryDirectory() as folder:
        queue: Any = mp.get_context("spawn").SimpleQueue()
        spawn(measure, args=(os.path.join(folder, "store"), queue), nprocs=NUM_RANKS)
        results = queue.get()
    for case in results["cases"]:
        spread = case["marked_over_bare"]
        label = f"{case['call']}, {case['batch']} batch, {case['clock']} time"
        print(verdict(label, spread["median"], TARGET, spread))
    print("written to", write_results("calls", results))


def measure(rank: int, store: str, queue: Any) -> None:
    """One rank: every case in turn; rank 0 reports."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    cases: list[dict[str, Any]] = []
    for batch, lens in LENS.items():
        for call, run in calls(lens[rank]).items():
            for clock, (marked, bare) in alternate(run).items():
                cases.append(
                    {
                        "call": call,
                        "batch": batch,
                        "clock": clock,
                        "marked_over_bare": ratio(marked, bare),
                        "times": {"marked": summary(marked), "bare": summary(bare)},
                    }
                )
    if rank == 0:
        queue.put({"num_ranks": NUM_RANKS, "target": TARGET, "cases": cases})
    dist.barrier()
    dist.destroy_process_group()


def calls(lens: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    """What a step is made of."""
    balanced = SequenceParallel(None, "g1n2", TransformerCost(WIDTH))
    bags = SequenceParallel(None, "g2n1", TransformerCost(WIDTH))
    step, in_bag = balanced.plan(list(lens)), bags.plan(list(lens))
    x = torch.randn(sum(lens), WIDTH)
    heads = torch.randn(in_bag.local.positions.size, 8, WIDTH // 8)
    return {
        "plan": lambda: balanced.plan(list(lens)),
        "route": lambda: step.route(x=x),
        "mean": lambda: step.mean(x[:, 0]),
        "exchanges of attention": lambda: in_bag.attend(heads, heads, heads),
    }


Times = tuple[list[float], list[float]]


def alternate(run: Callable[[], object]) -> dict[str, Times]:
    """Seconds of the slower rank in each round, marked and bare."""
    run()
    times: dict[str, Times] = {"host": ([], []), "wall": ([], [])}
    for turn in range(2 * ROUNDS):
        is_bare = turn % 2
        dist.barrier()
        with bare_collectives() if is_bare else nullcontext():
            starts = time.process_time(), time.perf_counter()
            run()
            ends = time.process_time(), time.perf_counter()
        slowest = torch.tensor([end - start for start, end in zip(starts, ends, strict=True)])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        for seconds, of_clock in zip(slowest.tolist(), times.values(), strict=True):
            of_clock[is_bare].append(seconds)
    return times


@contextmanager
def bare_collectives() -> Iterator[None]:
    """Gloo's own collectives, neither marked nor watched."""

    def all_to_all(
        group: Any, what: Any, received: Tensor, sent: Tensor, recv_splits: Any, send_splits: Any
    ) -> None:
        splits = list(recv_splits), list(send_splits)
        dist.all_to_all_single(received, sent, *splits, group=group.process_group)

    class AllToAll:
        def __init__(self, *settings: Any) -> None:
            all_to_all(*settings)

        def wait(self) -> None:
            """It is done."""

    def all_gather(group: Any, what: Any, own: Tensor) -> Tensor:
        gathered = own.new_empty(group.size * own.numel())
        dist.all_gather_into_tensor(gathered, own.flatten(), group=group.process_group)
        return gathered.view(group.size, *own.shape)

    def all_reduce(group: Any, what: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group.process_group)
        return total

    with ExitStack() as stack:
        for module, function in (
            ("comm.exchange", all_to_all),
            ("comm.heads", AllToAll),
            ("comm.agree", all_gather),
            ("comm.mean", all_reduce),
        ):
            at = import_module(f"bascule.{module}")
            stack.enter_context(mock.patch.object(at, function.__name__, function))
        yield


if __name__ == "__main__":
    main()
