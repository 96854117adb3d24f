"""Cases of block-sparse plans for the table of recorded plans."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from bascule.arrays import Ints
from bascule.machine.cluster import HardwareProfile
from bascule.plan.sparse import (
    BlockLayout,
    PlanReuse,
    SparsePlan,
    SparsePlanner,
    block_counts,
    block_lens,
    partition_blocks,
    partition_heads,
)
from bascule.plan.sparse.choose import CallSize, LayerPlans, Strategies, columns_of
from bascule.plan.sparse.layout import coupled_ends, over_mean
from bascule.plan.sparse.planner import greedy, paper_blocks
from bascule.plan.topology import all_degrees
from tests.helpers.sparse_simulation import Bools, clustered_mask, random_mask, toeplitz_mask

HEADS, LENS = 12, block_lens((100, 1900), 32)
MESHES = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (1, 4), (5, 1), (2, 3), (4, 2), (8, 1))
MACHINE = HardwareProfile(
    device="slow wires", attention_flops_per_s=2.56e4, intra_bytes_per_s=500.0, launch_s=3.0
)


class Decision(NamedTuple):
    """Every integer that a plan decides, and its imbalance."""

    bin_of: Ints
    makespan: float


def sparse_cases() -> Iterator[Callable[[], Decision]]:
    """Yield planners on meshes of 1 to 8 ranks, then partitions, heads and choices."""
    for seed, mesh in enumerate(MESHES):
        mask = _mask(seed)
        yield lambda mesh=mesh, mask=mask: _planned(mesh, mask, "minimal_move")
    for seed, (method, mesh) in enumerate(
        [("stripe", (2, 2)), ("paper", (4, 2)), ("paper", (1, 4)), ("in_order", (3, 2))]
    ):
        mask = _mask(seed)
        yield lambda method=method, mesh=mesh, mask=mask: _planned(mesh, mask, method)
    yield lambda: _planned((3, 2), _mask(4), "minimal_move", as_counts=True)
    yield lambda: _planned((2, 4), _mask(5), "stripe", as_counts=True)
    yield lambda: _planned((2, 2), _mask(6), "minimal_move", num_kv_heads=4, run=True)
    yield lambda: _planned((2, 2), _mask(7), "minimal_move", ordered=True)
    for seed, ranks in enumerate((2, 4, 7, 8)):
        matrix = _mask(seed).sum(axis=0).astype(float)
        runs = np.arange(LENS.size) * ranks // LENS.size
        if seed % 2:
            yield lambda matrix=matrix, ranks=ranks: _blocks(
                partition_blocks(matrix, ranks, keys_stay=ranks == 8)
            )
        else:
            yield lambda matrix=matrix, ranks=ranks, runs=runs: _blocks(
                partition_blocks(matrix, ranks, q_home=runs, kv_home=runs)
            )
    yield lambda: _blocks(paper_blocks(_mask(8).sum(axis=0), 4, capacity=(20, 20)))
    counts = block_counts(_mask(9), kv_lens=LENS)[:, :, 0]
    yield lambda: _heads(counts, 8, 0.0)
    yield lambda: _heads(counts, 5, 0.02)
    yield lambda: _heads(counts, 3, np.inf)
    yield lambda: Decision(greedy(counts.sum(axis=1), 5), 0.0)
    yield _reused
    yield _chosen


def _mask(seed: int) -> Bools:
    shape = HEADS, LENS.size, LENS.size
    if seed % 3 == 0:
        return clustered_mask(shape, seed)
    return toeplitz_mask(shape, seed) if seed % 3 == 1 else random_mask(shape, 0.2, seed)


def _planned(
    mesh: tuple[int, int],
    mask: Bools,
    method: str,
    *,
    as_counts: bool = False,
    num_kv_heads: int | None = None,
    run: bool = False,
    ordered: bool = False,
) -> Decision:
    q = BlockLayout.contiguous(LENS, *mesh) if run else BlockLayout.striped(LENS, *mesh)
    if ordered:
        tokens = np.tile(np.arange(LENS.sum()), (HEADS, 1))
        q = BlockLayout(q.lens, q.home, np.random.default_rng(0).permuted(tokens, axis=1))
    work: Any = mask
    if as_counts:
        of = q.home // mesh[1]
        work = block_counts(mask, kv_lens=LENS, kv_of=of, ring_degree=mesh[0])
    kv = BlockLayout.striped(LENS, *mesh)
    plan = SparsePlanner(*mesh, method=method, cut_above=0.01 if mesh[1] < 4 else 0.1).plan(
        work, q, kv, num_kv_heads=num_kv_heads
    )
    routes = [plan.route(rank, batch=2) for rank in range(plan.num_ranks)]
    tables = [
        np.zeros(0, np.int64) if table is None else table
        for one in routes
        for table in (one.send_index, one.send_splits, one.recv_splits, one.recv_index)
    ]
    return Decision(np.concatenate([_ints(plan), *tables]), plan.imbalance)


def _ints(plan: SparsePlan) -> Ints:
    parts = (plan.ring_of, plan.q_of, plan.kv_of, plan.tiles)
    return np.concatenate([part.ravel() for part in parts]).astype(np.int64)


def _blocks(plan: Any) -> Decision:
    return Decision(
        np.concatenate([plan.q_of, plan.kv_of]), over_mean(coupled_ends(plan.tiles), plan.tiles)
    )


def _heads(counts: Ints, ranks: int, cut_above: float) -> Decision:
    plan = partition_heads(counts, ranks, cut_above=cut_above)
    return Decision(plan.rank_of.ravel(), plan.makespan + plan.lower_bound)


def _reused() -> Decision:
    home = BlockLayout.striped(LENS, 2, 2)
    planner = SparsePlanner(2, 2)
    reuse = PlanReuse(planner, planner.plan(_mask(0), home), 0.02)
    parts: list[Ints] = []
    for seed in (0, 3, 1, 1, 2):
        reuse = reuse.after(_mask(seed))
        parts += [_ints(reuse.plan), np.array([reuse.num_planned, reuse.num_kept])]
    return Decision(np.concatenate(parts), reuse.ahead.imbalance)


def _chosen() -> Decision:
    home = BlockLayout.striped(LENS, 2, 4)
    reuses = {
        degrees: PlanReuse(planner, planner.plan(columns_of(_mask(0), degrees), home))
        for degrees in all_degrees(8)
        for planner in [SparsePlanner(*degrees)]
    }
    strategies = Strategies(MACHINE, min_gain=0.01, switch_s=10.0)
    plans = LayerPlans.first(reuses, CallSize(2, 64, 64), strategies, start=(8, 1))
    degrees: list[int] = []
    for seed in (2, 0, 1, 2):
        plans = plans.after(_mask(seed))
        degrees += reversed(plans.degrees)
    assert plans.choice is not None
    return Decision(np.array(degrees), plans.choice.predicted_s)
