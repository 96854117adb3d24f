"""Balanced block-sparse attention in wall-clock time, against the same attention unbalanced.

Run: `python benchmarks/bench_sparse.py` (about two minutes; `--quick`: 30 seconds, writes nothing);
writes results/sparse.json.

Two ranks of one thread over gloo; synthetic masks of a small Wan2.1 grid at the densities of
db-SP's table, blocks of 64 tokens, 8 heads of width 64, float32. Both sides do the same exchanges
and call the same kernel; they differ in the plan alone:

- without: a run of blocks on each rank, heads in their order, as even as their numbers allow;
- with: blocks dealt in turns at home, heads through the solver, and moves that are worth it.

They take turns within a round. What is predicted is the ratio of their imbalances (work of the
slowest rank over the mean). On two ranks a ring has two rounds; both definitions of its imbalance,
with a barrier after each round and of the critical path, are given, and the prediction is the
former, db-SP's. Outputs are compared with dense masked attention in one process.

Target: the speed-up is at least 95 % of the predicted one.
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _common import ratio, write_results
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import scaled_dot_product_attention

from bascule.attention.sparse.attend import rows_of, sparse_attention
from bascule.comm.mesh import AttentionMesh
from bascule.diffusers import SparseConfig
from bascule.plan.sparse import BlockLayout, SparsePlan, in_order, plan_under
from bascule.workload.masks import WAN21, synthetic_masks

DENSITIES = (0.41, 0.68)
MESHES = ((2, 1), (1, 2))
"""(ring degree, Ulysses degree)"""
GRID, NUM_HEADS, HEAD_DIM = (6, 24, 32), 8, 64
TARGET, LARGEST_ERROR = 0.95, 1e-5


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison on this rank: the call, and its plan."""

    plan: SparsePlan
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    expected: torch.Tensor


def main() -> None:
    """Measure in spawned processes, print the verdicts, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; writes nothing")
    quick = parser.parse_args().quick
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        results = f"{folder}/results.pt"
        spawn(measure, (f"file://{folder}/store", 5 if quick else 40, results), nprocs=2)
        cases = torch.load(results)
    for case in cases:
        is_met = case["speedup"]["median"] >= TARGET * case["predicted"]
        print(
            f"{'met   ' if is_met else 'MISSED'}  ring {case['ring']} x Ulysses {case['ulysses']}, "
            f"density {case['density']:.2f}: {case['speedup']['median']:.3f}x of "
            f"{case['predicted']:.3f}x predicted ({case['share']:.1%}; target {TARGET:.0%}); rho "
            f"{case['before']['rho']:.3f} to {case['after']['rho']:.3f}, of the critical path "
            f"{case['before']['critical_path']:.3f} to {case['after']['critical_path']:.3f}; "
            f"error {case['error']:.1e}"
        )
        assert case["error"] < LARGEST_ERROR
    if not quick:
        print("written:", write_results("sparse", {"load_before": load_before, "cases": cases}))


def measure(rank: int, store: str, rounds: int, results: str) -> None:
    """All cases on this rank; rank 0 saves what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    cases: list[dict[str, Any]] = []
    for ring, ulysses in MESHES:
        names = ("ring", "ulysses")
        mesh = AttentionMesh.of(init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=names))
        for density in DENSITIES:
            model = replace(WAN21, grid=GRID, num_heads=NUM_HEADS, density=density)
            masks = synthetic_masks(model)
            arms = {
                "without": unbalanced(masks, model.block_lens, ring, ulysses),
                "with": balanced(masks, model.block_lens, ring, ulysses),
            }
            found = in_turns(
                mesh, {n: make_arm(p, masks, rank) for n, p in arms.items()}, masks, rounds
            )
            cases.append(case_of(ring, ulysses, float(masks.mean()), arms, found))
    if rank == 0:
        torch.save(cases, results)
    dist.barrier()
    dist.destroy_process_group()


def unbalanced(masks: Any, lens: Any, ring: int, ulysses: int) -> SparsePlan:
    """Runs of blocks, heads in their order: what a library does that does not look at masks."""
    home = BlockLayout.contiguous(lens, ulysses, ring)
    plan = in_order(len(masks), home, home, ulysses, ring)
    return plan_under(plan, masks)


def balanced(masks: Any, lens: Any, ring: int, ulysses: int) -> SparsePlan:
    """What `parallelize` does: nothing moves that gains less than it costs."""
    planner = SparseConfig(keep=1.0).planner(ulysses, ring)
    return planner.plan(masks, BlockLayout.striped(lens, ulysses, ring))


def make_arm(plan: SparsePlan, masks: Any, rank: int) -> Arm:
    """This rank's tokens under a plan, and what attention must give for them."""
    generator = torch.Generator().manual_seed(0)
    tokens = int(plan.q.lens.sum())
    shape = (1, NUM_HEADS, tokens, HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    dense = torch.from_numpy(masks.repeat(plan.q.lens, axis=1).repeat(plan.kv.lens, axis=2))
    heads = zip(q[0], k[0], v[0], dense, strict=True)
    whole = torch.stack([scaled_dot_product_attention(a, b, c, mask) for a, b, c, mask in heads])
    own = torch.from_numpy(np.flatnonzero(np.repeat(plan.q.home, plan.q.lens) == rank))
    mine = (q[:, :, own].contiguous(), k[:, :, own].contiguous(), v[:, :, own].contiguous())
    return Arm(plan, mine, whole[None][:, :, own])


def in_turns(mesh: AttentionMesh, arms: dict[str, Arm], masks: Any, rounds: int) -> dict[str, Any]:
    """Seconds of each arm in each round, from barrier to barrier, and the largest error."""
    seen, times, error = rows_of(masks), {name: list[float]() for name in arms}, 0.0
    with torch.inference_mode():
        for arm in arms.values():
            out = sparse_attention(*arm.inputs, mesh, arm.plan, seen)
            error = max(error, float((out - arm.expected).norm() / arm.expected.norm()))
        for turn in range(rounds):
            for name in list(arms)[:: 1 if turn % 2 else -1]:
                dist.barrier()
                start = time.perf_counter()
                sparse_attention(*arms[name].inputs, mesh, arms[name].plan, seen)
                dist.barrier()
                times[name].append(time.perf_counter() - start)
    return {"seconds": times, "error": error}


def case_of(
    ring: int, ulysses: int, density: float, plans: dict[str, SparsePlan], found: dict[str, Any]
) -> dict[str, Any]:
    """What is reported of one mesh and density."""
    times = found["seconds"]
    speedup = ratio(times["without"], times["with"])
    predicted = plans["without"].imbalance / plans["with"].imbalance
    rho = {
        name: {"rho": plan.imbalance, "critical_path": plan.critical_path_imbalance}
        for name, plan in plans.items()
    }
    return {
        "ring": ring,
        "ulysses": ulysses,
        "density": density,
        "before": rho["without"],
        "after": rho["with"],
        "predicted": predicted,
        "speedup": speedup,
        "share": speedup["median"] / predicted,
        "median_s": {name: statistics.median(seconds) for name, seconds in times.items()},
        "error": found["error"],
    }


if __name__ == "__main__":
    main()
