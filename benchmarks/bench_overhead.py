"""Host overhead: planning with all index tables, and the host part of one attention call.

Run: `python benchmarks/bench_overhead.py` (about half a minute); writes results/overhead.json.

Planning: the time of `plan_batch` and of every table that one rank needs, over that of a bare
longest-first loop with `heapq` on the same costs, which decides as much and builds nothing. It is
measured in a fresh process, and after a large block was freed once, as in any process that handles
images: from then on glibc keeps freed memory instead of returning it to the system after every
plan, and the tables (1 MB each at g8n4) cause no page faults. The target is for the second.

Attention: that of a bag on the `fake` back end, whose collectives do nothing, with a kernel that
returns its query; over two bare `all_to_all_single` of the same sizes. What is left is the time
that the host needs to prepare the exchanges. It must not depend on the number of chunks: the same
tensors are cut into 64 and into 2,048 chunks. With one token a chunk the larger case copies more,
too.
"""

import heapq
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from _common import ratio, summary, time_interleaved, verdict, write_results
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from bascule.arrays import Ints
from bascule.attention import packed
from bascule.attention.kernels.protocol import OutLse
from bascule.attention.mask import AttentionMask
from bascule.attention.packed import Bag, Contexts
from bascule.attention.tiles import Pieces
from bascule.attention.usp import attend as attend_shared
from bascule.comm.groups import RankGroup
from bascule.comm.mesh import AttentionMesh
from bascule.plan.costs import TransformerCost
from bascule.plan.plan import Plan, plan_batch
from bascule.workload.codes import parse_data_codes, sample_lengths, seq_lens

DATA = "g32b32i256f1s0"
COST = TransformerCost(3072, gamma=0.426)
RANK = 13
BAG_SIZE, HEAD_DIM = 8, 1
PLANNING_TARGET, ATTENTION_TARGET, CHUNKS_TARGET = 10.0, 5.0, 1.1


def main() -> None:
    """Measure both parts, print the verdicts, write the results."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {"planning_in_a_fresh_process": measure_planning("fresh process")}
    free_a_large_block()
    results["planning"] = measure_planning("settled allocator")
    results["attention"] = measure_attention()
    print("written to", write_results("overhead", results))


def free_a_large_block() -> None:
    """Make glibc keep freed memory: its threshold becomes the largest block freed, up to 32 MB."""
    _ = torch.empty(31 * 2**20, dtype=torch.uint8)


def measure_planning(state: str) -> dict[str, Any]:
    """Both planners on both topologies, one after another in every round."""
    lens = seq_lens(sample_lengths(parse_data_codes(DATA), seed=0, step=0))
    costs = COST(np.concatenate([np.array(rank) for rank in lens])).tolist()
    results: dict[str, Any] = {"data": DATA, "num_seqs": len(costs), "target": PLANNING_TARGET}
    for topology, num_bags in (("g1n32", 32), ("g8n4", 4)):
        plan = plan_batch(lens, topology, COST)
        times = time_interleaved(
            {
                "heapq": lambda num_bags=num_bags: bare_longest_first(costs, num_bags),
                "plan_batch": lambda topology=topology: plan_batch(lens, topology, COST),
                "tables": lambda plan=plan: build_tables(fresh(plan)),
                "lpt": lambda topology=topology: build_tables(plan_batch(lens, topology, COST)),
                "knapsack": lambda topology=topology: build_tables(
                    plan_batch(lens, topology, COST, planner="knapsack")
                ),
            },
            rounds=60,
            calls=5,
        )
        results[topology] = {
            "times": {name: summary(seconds) for name, seconds in times.items()},
            "ratios": {name: ratio(times[name], times["heapq"]) for name in ("lpt", "knapsack")},
        }
        spread = results[topology]["ratios"]["lpt"]
        label = f"planning {topology} with all tables, {state}, over a heapq loop"
        print(verdict(label, spread["median"], PLANNING_TARGET, spread))
    return results


def bare_longest_first(costs: list[float], num_bags: int) -> list[int]:
    """Longest first to the least loaded bag, and nothing else."""
    heap = [(0.0, bag) for bag in range(num_bags)]
    bag_of = [0] * len(costs)
    for i in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        load, bag = heap[0]
        bag_of[i] = bag
        heapq.heapreplace(heap, (load + costs[i], bag))
    return bag_of


def fresh(plan: Plan) -> Plan:
    """The same plan without anything cached."""
    return Plan(
        topology=plan.topology,
        source_counts=plan.source_counts,
        seq_lens=plan.seq_lens,
        bag_of=plan.bag_of,
        loads=plan.loads,
        lower_bound=plan.lower_bound,
        planner=plan.planner,
    )


def bag_of(mesh: AttentionMesh, lens: Ints) -> Bag:
    """A bag without a ring."""
    pieces = Pieces(lens.sum(axis=0)[None], 1, None, torch.device("cpu"))
    no_contexts = Contexts(np.zeros_like(lens[0]), np.arange(lens.shape[1]))
    return Bag(mesh, lens, pieces, None, no_contexts)


def build_tables(plan: Plan) -> None:
    """Everything that a rank looks up in a step: model, route, restore, attention in its bag."""
    local = plan.local(RANK)
    route = plan.route(RANK)
    back = route.inverse()
    bag = bag_of(AttentionMesh(None, None, None), plan.bag_lens(RANK))
    tables = [local.seq_ids, local.slots, local.positions, route.send_index, back.recv_index]
    for table in tables:
        if table is not None:
            torch.from_numpy(table)
    _ = bag.tiles, bag.tokens, bag.order


def measure_attention() -> dict[str, Any]:
    """The host part of an attention call, for few and for many chunks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=BAG_SIZE)
    world = dist.group.WORLD
    assert world is not None
    ranks = tuple(range(BAG_SIZE))
    group = RankGroup(lambda: world, 0, ranks, ranks, "bag")
    results: dict[str, Any] = {
        "bag_size": BAG_SIZE,
        "head_dim": HEAD_DIM,
        "target": ATTENTION_TARGET,
    }
    for label, few_tokens in (("same_tensors", 32), ("one_token_a_chunk", 1)):
        with mock.patch.object(packed, "select_kernel", lambda *_, **__: NoKernel()):
            few = attention_calls(group, num_seqs=8, chunk_len=few_tokens)
            many = attention_calls(group, num_seqs=256, chunk_len=1)
        calls = {"few": few[0], "few_bare": few[1], "many": many[0], "many_bare": many[1]}
        times = time_interleaved(calls, rounds=100, calls=50)
        num_ops = {"64_chunks": count_ops(few[0]), "2048_chunks": count_ops(many[0])}
        results[label] = {
            "64_chunks_over_bare": ratio(times["few"], times["few_bare"]),
            "2048_chunks_over_bare": ratio(times["many"], times["many_bare"]),
            "2048_chunks_over_64": ratio(times["many"], times["few"]),
            "torch_ops": num_ops,
            "times": {name: summary(seconds) for name, seconds in times.items()},
        }
        spread = results[label]["2048_chunks_over_bare"]
        print(
            verdict(
                f"attention, {label}, over bare exchanges",
                spread["median"],
                ATTENTION_TARGET,
                spread,
            )
        )
        spread = results[label]["2048_chunks_over_64"]
        print(
            verdict(f"attention, {label}, 2,048 over 64", spread["median"], CHUNKS_TARGET, spread)
        )
    dist.destroy_process_group()
    return results


def attention_calls(
    group: RankGroup, *, num_seqs: int, chunk_len: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """An attention call as in training, and the two exchanges that it stands on."""
    lens = np.full((BAG_SIZE, num_seqs), chunk_len)
    bag = bag_of(AttentionMesh(None, group, None), lens)
    num_tokens = num_seqs * chunk_len
    q, k, v = (torch.randn(num_tokens, BAG_SIZE, HEAD_DIM, requires_grad=True) for _ in range(3))
    qkv_in, qkv_out = (torch.empty(BAG_SIZE * num_tokens * 3 * HEAD_DIM) for _ in range(2))
    out_in, out_out = (torch.empty(BAG_SIZE * num_tokens * HEAD_DIM) for _ in range(2))
    qkv_splits = [num_tokens * 3 * HEAD_DIM] * BAG_SIZE
    out_splits = [num_tokens * HEAD_DIM] * BAG_SIZE

    def bare() -> None:
        process_group = group.process_group
        dist.all_to_all_single(qkv_out, qkv_in, qkv_splits, qkv_splits, group=process_group)
        dist.all_to_all_single(out_out, out_in, out_splits, out_splits, group=process_group)

    call = bag.call("all", None, q, k, 1.0)

    def attend() -> Tensor:
        return attend_shared(q, k, v, call)

    return attend, bare


class NoKernel:
    """Stands for an attention kernel that takes no time."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        """The queries."""
        return q, q.new_empty(q.shape[:3])


class _CountOps(TorchDispatchMode):
    num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


def count_ops(call: Callable[[], object]) -> int:
    """Torch operations of one call."""
    with _CountOps() as counter:
        call()
    return counter.num_ops


if __name__ == "__main__":
    main()
