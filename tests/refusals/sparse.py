"""Block-sparse plans and masks: one wrong value of each public argument."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bascule.attention.sparse.rules import in_blocks, keep_mass, keep_top_k
from bascule.machine.cluster import HardwareProfile
from bascule.plan.sparse import (
    BlockLayout,
    PlanReuse,
    SparsePlanner,
    block_counts,
    block_lens,
    partition_blocks,
    partition_heads,
    plan_under,
    sparse_imbalance,
)
from bascule.plan.sparse.choose import Strategies
from bascule.workload import save_masks
from bascule.workload.masks import MaskModel, synthetic_masks

MASKS, MATRIX = np.ones((2, 4, 4), bool), np.arange(16.0).reshape(4, 4)
COUNTS = np.ones((2, 4, 2), np.int64)
HOME = BlockLayout.striped([5] * 4, 2, 1)
RUNS = BlockLayout.contiguous([5] * 4, 2, 1)
PLANNER = SparsePlanner(2, 1)
PLAN = PLANNER.plan(MASKS, HOME)
H100 = HardwareProfile.load("h100-datasheet")
MODEL = MaskModel((2, 4, 4), 2, block=8)


def plan(work: Any, home: Any = HOME, **options: Any) -> Callable[[], object]:
    return lambda: PLANNER.plan(work, home, **options)


def blocks(matrix: Any = MATRIX, ring: int = 2, **options: Any) -> Callable[[], object]:
    return lambda: partition_blocks(matrix, ring, **options)


def rho(masks: Any, ulysses: int = 1, ring: int = 2, *plan: Any) -> Callable[[], object]:
    return lambda: sparse_imbalance(masks, ring, ulysses, *plan)


def planner(**options: Any) -> Callable[[], object]:
    return lambda: SparsePlanner(**options)


def strategies(**options: Any) -> Callable[[], object]:
    return lambda: Strategies(**{"machine": H100, **options})


def model(**change: Any) -> Callable[[], object]:
    return lambda: replace(MODEL, **change)


def ordered(order: Any) -> BlockLayout:
    return BlockLayout(np.ones(3, int), np.zeros(3, int), np.array(order))


def moves_keys() -> object:
    plan = SparsePlanner(2, 1).plan(MASKS, HOME, RUNS)
    return plan_under(replace(plan, kv_of=1 - plan.kv_of), COUNTS)


SCORES = torch.zeros(1, 4, 10, 3)
CASES = [
    (
        "blocks",
        lambda: in_blocks(SCORES, [4, 5]),
        ("2 blocks have [4, 5] tokens, and there are 10",),
    ),
    ("blocks of tokens, empty", lambda: in_blocks(SCORES, [10, 0]), ("lengths of at least 1",)),
    ("num_keep", lambda: keep_top_k(SCORES, -1), ("num_keep is -1",)),
    ("mass", lambda: keep_mass(SCORES, 1.1, [1, 1, 1]), ("mass is 1.1",)),
    ("mass, lens", lambda: keep_mass(SCORES, 0.5, [1, 1]), ("2 lengths", "3 key blocks")),
    ("heads", lambda: partition_heads([[-1, 2]], 2), ("block_counts[0, 0] is -1.0",)),
    ("heads, dims", lambda: partition_heads(np.ones((2, 2, 2)), 2), ("shape (2, 2, 2)",)),
    ("cut_above", lambda: partition_heads([1, 2], 2, cut_above=-1.0), ("cut_above is -1.0",)),
    ("matrix", lambda: partition_blocks([[-1.0]], 1), ("block_matrix[0, 0] is -1.0",)),
    ("ring_degree", lambda: partition_blocks(MATRIX, 0), ("ring_degree is 0", "at least 1")),
    ("q_home", blocks(q_home=[0, 5, 0, 1]), ("q_home has 5", "at most 1")),
    ("kv_home", blocks(kv_home=[0, 1]), ("kv_home of shape (2,)", "4 integers")),
    ("masks", rho(MASKS * 1), ("(2, 4, 4) and dtype int64", "(heads, q_blocks, kv_blocks)")),
    ("tensor", rho(torch.ones(2, 4, 4, dtype=torch.bfloat16)), ("masks of type Tensor",)),
    ("mesh", lambda: sparse_imbalance(MASKS, 2, 0), ("ulysses_degree is 0", "at least 1")),
    ("mesh of a plan", rho(MASKS, 2, 1, PLAN), ("a plan for 2 x 1 ranks", "mesh of 1 x 2")),
    ("heads of a plan", rho(MASKS[[0, 0, 1]], 1, 2, PLAN), ("work has 3 heads, the plan 2",)),
    ("blocks of a plan", rho(np.ones((2, 5, 4), bool), 1, 2, PLAN), ("work of shape (2, 5, 4)",)),
    ("counts, kv_of", lambda: block_counts(MASKS, kv_of=[0, 0, 0, 2], ring_degree=2), ("has 2",)),
    ("counts, kv_lens", lambda: block_counts(MASKS, kv_lens=[1]), ("kv_lens of shape (1,)",)),
    ("block", lambda: block_lens((3,), 0), ("block is 0", "at least 1")),
    ("segments", lambda: block_lens((3, -1), 4), ("segments has -1", "at least 0")),
    ("layout", lambda: BlockLayout([1, 1], [0, 0, 0]), ("home of shape (3,)", "2 integers")),  # pyright: ignore[reportArgumentType]
    ("order", lambda: ordered([[0, 2, 1], [0, 1, 1]]), ("order[1] is not an order of the 3",)),
    ("order, shape", lambda: ordered([[0, 1]]), ("give integers (heads, 3)",)),
    ("order, floats", lambda: ordered([[0.0, 1.0, 2.0]]), ("dtype float64",)),
    (
        "order of other heads",
        plan(np.ones((4, 3, 3), bool), ordered([[0, 1, 2]] * 4), num_kv_heads=2),
        ("kv.order of 4 heads for 2 heads of kv",),
    ),
    ("home", plan(MASKS, BlockLayout.striped([5] * 4, 2, 2)), ("q.home names rank 3",)),
    ("not a layout", plan(MASKS, [5] * 4), ("q is [5, 5, 5, 5]", "give a BlockLayout")),
    ("work, columns", plan(MASKS[:, :, :3]), ("bool masks (heads, 4, 4)", "counts (heads, 4, 2)")),
    ("work, floats", plan(COUNTS / 2), ("dtype float64", "of block_counts")),
    ("work, negative", plan(-COUNTS), ("count of -1", "must be at least 0")),
    ("num_kv_heads", plan(MASKS, num_kv_heads=3), ("2 heads and 3 key-value heads", "multiple")),
    ("counts where keys moved", moves_keys, ("this plan moves keys", "give the masks")),
    (
        "counts for the paper",
        lambda: SparsePlanner(2, 1, method="paper").plan(COUNTS, HOME),
        ('use "minimal_move"',),
    ),
    ("planner, method", planner(method="best"), ("SparsePlanner(method='best')", '"in_order"')),
    ("planner, target", planner(target=-1), ("SparsePlanner(target=-1)",)),
    ("planner, cut_above", planner(cut_above=math.nan), ("SparsePlanner(cut_above=nan)",)),
    ("planner, row_work", planner(row_work=-1.0), ("SparsePlanner(row_work=-1.0)",)),
    ("planner, mesh", planner(ring_degree=1.5), ("ring_degree is 1.5", "integer")),
    (
        "planner, ranks",
        planner(ulysses_degree=128, ring_degree=512),
        ("ulysses_degree * ring_degree is 65536", "at most 32,768"),
    ),
    ("planner, ring", planner(ring_degree=513), ("ring_degree is 513", "at most 512")),
    ("tolerance", lambda: PlanReuse(PLANNER, PLAN, -0.1), ("PlanReuse(tolerance=-0.1)",)),
    ("machine", strategies(machine="fast"), ("'fast'", "give a HardwareProfile")),
    ("machine, rates", strategies(machine=HardwareProfile(device="x")), ("x has no attention",)),
    (
        "machine, nodes",
        strategies(machine=replace(H100, inter_bytes_per_s=None), ranks_per_node=2),
        ("has no inter_bytes_per_s",),
    ),
    ("min_gain", strategies(min_gain=3), ("Strategies(min_gain=3)", "at most 1")),
    ("meshes", strategies(meshes=("U2R1",)), ("'U2R1'", "give (ring, Ulysses) degrees")),
    ("meshes, degrees", strategies(meshes=((2, 0),)), ("Strategies(meshes[0]=0)",)),
    ("grid", model(grid=(0, 4, 4)), ("MaskModel(grid", "0", "at least 1")),
    ("model, density", model(density=1.0), ("MaskModel(density=1.0)", "at most")),
    ("model, size", model(grid=(200, 100, 100), block=1), ("2,000,000 blocks", "larger blocks")),
    ("seed", lambda: synthetic_masks(MODEL, seed=-1), ("seed", "-1")),
    ("uint8", lambda: save_masks("x.npz", MASKS.astype(int)), ("masks are int64", "must be bool")),
    ("name of masks", lambda: save_masks("x.npy", MASKS), ("packed masks are an .npz file",)),
]
