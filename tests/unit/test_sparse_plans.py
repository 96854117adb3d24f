"""Plans for block-sparse attention: counts, heads, blocks, plans, reuse and choice, by hand."""

import dataclasses
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bascule.arrays import Bools, Ints
from bascule.plan.machine import AttentionLatency, AttentionLoad
from bascule.plan.sparse import (
    BlockLayout,
    PlanReuse,
    SparsePlan,
    SparsePlanner,
    block_counts,
    block_lens,
    critical_path_imbalance,
    partition_blocks,
    partition_heads,
    plan_under,
    sparse_imbalance,
)
from bascule.plan.sparse.baselines import greedy, paper_blocks
from bascule.plan.sparse.choose import LayerPlans, Strategies, all_degrees, columns_of
from bascule.plan.sparse.planner import PLANNERS
from tests.helpers.sparse_simulation import (
    MASK_KINDS,
    mask_of,
    random_mask,
    toeplitz_mask,
)

# Counts and imbalance


def mask_at(shape: tuple[int, int, int], rows: list[int], columns: list[int]) -> Bools:
    masks = np.zeros(shape, bool)
    masks[0, rows, columns] = True
    return masks


@pytest.mark.parametrize("num_kv", [1, 7, 64, 65, 130])
@pytest.mark.parametrize("ring", [1, 3])
def test_counts_are_sums_of_the_mask(num_kv: int, ring: int) -> None:
    random = np.random.default_rng(num_kv)
    masks = random_mask((3, 5, num_kv), 0.5, 1)
    lens, owner = random.integers(0, 9, num_kv), random.integers(0, ring, num_kv)
    counts = block_counts(masks, kv_lens=lens, kv_of=owner, ring_degree=ring)
    assert counts.shape == (3, 5, ring)
    for rank in range(ring):
        expected = (masks * (lens * (owner == rank))).sum(axis=2)
        np.testing.assert_array_equal(counts[:, :, rank], expected)
    np.testing.assert_array_equal(block_counts(masks[:, ::2])[:, :, 0], masks[:, ::2].sum(axis=2))


@pytest.mark.parametrize(
    ("dtype", "heads", "value", "tokens"),
    [
        (bool, 300, 1, 500**2),  # more heads than a byte counts
        # 40 heads with 100 keys a block: 4,000, which 8 bits do not hold.
        *((dtype, 40, 100, 500) for dtype in ("int8", "uint8", "int16", "int32", "uint64")),
    ],
)
def test_sums_over_heads_do_not_wrap(dtype: Any, heads: int, value: int, tokens: int) -> None:
    home = BlockLayout.striped([500] * 4, 2, 2)
    masks = np.full((heads, 4, 4 if dtype is bool else 2), value, dtype)
    plan = SparsePlanner(2, 2).plan(masks, home)
    assert plan.tiles.sum() == masks.size * value * tokens


IN_TURNS = mask_at((1, 3, 3), [0, 1, 2], [0, 0, 0])  # rank 0 works in round 0, rank 1 in 1, 2 in 2
ONE_WAY = mask_at((1, 4, 4), [0, 0, 1, 1, 2], [0, 1, 0, 3, 1])
UNLIKE_HEADS = np.concatenate(
    [mask_at((1, 2, 2), [0, 0, 1], [0, 1, 1]), mask_at((1, 2, 2), [0], [0])]
)


@pytest.mark.parametrize(
    ("masks", "mesh", "rho", "critical"),
    [
        (UNLIKE_HEADS, (2, 1), 1.5, 1.5),  # 3 blocks over a mean of 2
        # Tiles of the sum are [[2, 1], [0, 1]]; rounds are (2, 1) and (1, 0); the mean is 2. Rank 0
        # starts its second round at 2 and ends at 3.
        (UNLIKE_HEADS, (1, 2), 1.5, 1.5),
        # Rank 0 enters round 1 at 1, so rank 2 enters round 2, in which it has its work, at 1.
        (IN_TURNS, (1, 3), 3.0, 2.0),
        # The sum over rounds does not see which way keys travel; who waits for whom does.
        (ONE_WAY, (1, 4), 3.2, 1.6),
        (ONE_WAY[:, ::-1, ::-1], (1, 4), 3.2, 2.4),
        *(
            (np.zeros(s, bool), (2, 3), 1.0, 1.0)
            for s in ((2, 3, 4), (0, 3, 4), (2, 0, 4), (2, 3, 0))
        ),
    ],
)
def test_imbalance_by_hand(
    masks: Bools, mesh: tuple[int, int], rho: float, critical: float
) -> None:
    assert sparse_imbalance(masks, *mesh) == rho
    assert critical_path_imbalance(masks, *mesh) == critical


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("random", [499, 295, 604, 239, 207, 238]),
        ("toeplitz", [1108, 660, 1123, 516, 476, 483]),
        ("clustered", [1117, 627, 937, 518, 356, 532]),
    ],
)
def test_without_a_plan_nothing_is_padded_dropped_or_turned(kind: str, expected: list[int]) -> None:
    """Uneven heads and blocks in runs, and for R > 2 the keys that are at hand in each round."""
    masks = mask_of(kind, (7, 29, 23))
    meshes = (1, 3), (2, 3), (3, 1), (2, 4), (5, 2), (1, 8)
    slowest = [sparse_imbalance(masks, u, r) * masks.sum() / (u * r) for u, r in meshes]
    assert slowest == pytest.approx(expected)


# Heads


UNEVEN = np.array([[1.0] * 13 + [0.0] * 8, [0.5] * 21, [0.5] * 13 + [0.0] * 8])


@pytest.mark.parametrize(
    ("counts", "ranks", "cut_above", "loads", "num_cut"),
    [
        ([7, 5, 4, 3, 1], 2, 0.0, [10, 10], 0),
        # Whole, two of twelve heads meet on four ranks and the other four have one.
        (np.full((12, 100), 3), 8, math.inf, [300] * 4 + [600] * 4, 0),
        (np.full((12, 100), 3), 8, 0.05, [450] * 8, 4),
        (np.full((1, 1024), 3), 8, 0.05, [384] * 8, 1),
        # The first of 13, 10.5 and 6.5 gives 3, then 10.5 is within 10 % of the mean of 10.
        (UNEVEN, 3, 0.1, [9.5, 10, 10.5], 1),
        (UNEVEN, 3, 0.0, [10, 10, 10], 2),
    ],
)
def test_heads_are_cut_only_as_far_as_whole_ones_are_uneven(
    counts: Any, ranks: int, cut_above: float, loads: list[float], num_cut: int
) -> None:
    plan = partition_heads(counts, ranks, cut_above=cut_above)
    assert sorted(plan.loads.tolist()) == loads and plan.makespan == max(loads)
    assert plan.cut_heads.size == num_cut
    if len(counts) == 1:
        assert np.flatnonzero(np.diff(plan.rank_of[0])).size == ranks - 1  # runs of query blocks


def test_a_cut_head_of_uneven_blocks_is_even() -> None:
    plan = partition_heads(np.arange(1, 129).repeat(16)[None], 8)
    assert plan.makespan <= plan.loads.mean() * 1.01


# Blocks

WEIGHTS = np.arange(8, 0, -1)


@pytest.mark.parametrize(
    ("reward", "most", "q_of", "kv_of", "imbalance"),
    [
        (0.0, None, [0, 1, 2, 2, 1, 0, 0, 1], [1, 0, 0, 1, 2, 2, 1, 0], 481 / 432),
        (1.0, None, [0, 1, 2, 1, 2, 0, 2, 0], [2, 2, 0, 0, 1, 1, 0, 2], 7 / 6),
        (2.0, None, [0, 0, 1, 1, 2, 2, 2, 1], [1, 0, 0, 0, 1, 1, 2, 2], 61 / 48),
        (2.0, (8, 8), [0, 0, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 1, 1, 2, 2], 1.25),
        (10.0, (8, 8), [0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1, 2, 2], 1.875),
    ],
)
def test_the_method_of_the_paper(
    reward: float, most: tuple[int, int] | None, q_of: list[int], kv_of: list[int], imbalance: float
) -> None:
    """Sections 4.2.1 and 4.2.2: the heaviest first, to the least after the reward."""
    matrix = np.multiply.outer(WEIGHTS, WEIGHTS[::-1])
    plan = paper_blocks(matrix, 3, reward=reward, capacity=most)
    assert (plan.q_of.tolist(), plan.kv_of.tolist()) == (q_of, kv_of)
    assert plan.imbalance == pytest.approx(imbalance)
    assert greedy(np.array([9, 8, 7, 6, 5, 5, 4, 2, 2]), 3).tolist() == [0, 1, 2, 2, 1, 0, 1, 2, 0]


@pytest.mark.parametrize("kind", MASK_KINDS)
@pytest.mark.parametrize("reward", [0.0, 2.0])
@pytest.mark.parametrize("ring", [4, 8])
def test_stripes_are_as_even_as_the_paper_and_move_less(
    kind: str, reward: float, ring: int
) -> None:
    """To 0.01 with 20 blocks a rank; the paper's moves are counted from runs, where it starts."""
    matrix = mask_of(kind, (8, 160, 160)).sum(axis=0)
    paper = paper_blocks(matrix, ring, reward=reward)
    ours = partition_blocks(matrix, ring, method="minimal_move", target=paper.imbalance)
    assert ours.imbalance <= paper.imbalance + 0.01
    assert sum(ours.num_moved) <= 0.2 * sum(paper.num_moved)


@pytest.mark.parametrize(
    ("seed", "start", "end", "moved"),
    [
        (0, 1528, 1444, (0, 1)),
        (1, 2353, 2081, (1, 0)),
        (2, 1828, 1441, (0, 1)),
        (4, 2598, 2237, (1, 0)),
    ],
)
def test_the_first_move_is_the_best_of_the_rank_that_is_waited_for(
    seed: int, start: int, end: int, moved: tuple[int, int]
) -> None:
    """The ends are those of the best of all moves, found by trying each."""
    random = np.random.default_rng(seed)
    ring = int(random.integers(2, 5))
    matrix = random.integers(0, 50, (14, 11))
    homes = [random.integers(0, ring, size) for size in matrix.shape]
    mean = matrix.sum() / ring
    place: dict[str, Any] = {"method": "minimal_move", "q_home": homes[0], "kv_home": homes[1]}
    # A target just below the start ends after the first move.
    plan = partition_blocks(matrix, ring, target=start / mean - 1e-3, **place)
    assert plan.imbalance * mean == pytest.approx(end) and plan.num_moved == moved


FOUR = np.repeat(np.arange(4), [12, 8, 11, 9])


@pytest.mark.parametrize(
    ("matrix", "ring", "options", "loads", "moved"),
    [
        # Rows of 5 and 3 on one rank, of 4 and 2 on the other: only a swap would even them out.
        (
            np.multiply.outer([5, 3, 4, 2], [1, 1]),
            2,
            {"q_home": [0, 0, 1, 1], "keys_stay": True, "target": 1.0},
            [16, 12],
            0,
        ),
        # One move makes the most loaded of 12, 8, 11 and 9 rows 11, of a mean of 10.
        (
            np.ones((40, 4)),
            4,
            {"q_home": FOUR, "kv_home": np.arange(4), "target": 1.1},
            [44, 36, 44, 36],
            1,
        ),
    ],
)
def test_moves_end_at_the_target_or_where_none_helps(
    matrix: np.ndarray, ring: int, options: dict[str, Any], loads: list[int], moved: int
) -> None:
    plan = partition_blocks(matrix, ring, method="minimal_move", **options)
    assert plan.loads.tolist() == loads and plan.num_moved == (moved, 0)


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_from_a_stripe_a_few_moves_reach_the_target(ring: int) -> None:
    """Text first, all of it dense: the stripe has it on the first ranks."""
    masks = toeplitz_mask((8, 600, 600), 1)
    masks[:, :4] = masks[:, :, :4] = True
    matrix = masks.sum(axis=0)
    stripe = partition_blocks(matrix, ring)
    moved = partition_blocks(matrix, ring, method="minimal_move", target=1.01)
    assert stripe.num_moved == (0, 0)
    assert moved.imbalance <= min(1.01, max(stripe.imbalance, 1.0))
    assert sum(moved.num_moved) <= 0.05 * 1200


# Plans


ONE_RING_IDLE = np.ones((2, 8, 8), bool)
ONE_RING_IDLE[1, 4:] = ONE_RING_IDLE[1, :, 4:] = False


@pytest.mark.parametrize(
    ("layout", "planner", "masks", "loads"),
    [
        # A ring with little work ends before the other, however uneven it is.
        (
            BlockLayout.contiguous([1] * 8, 2, 2),
            SparsePlanner(2, 2, cut_above=math.inf),
            ONE_RING_IDLE,
            [32, 16, 32, 0],
        ),
        # A cut head gives every ring rank its share, also where blocks lie in runs.
        (
            BlockLayout.contiguous([1] * 24, 2, 3),
            SparsePlanner(2, 3, target=9.0),
            np.ones((1, 24, 24), bool),
            [96] * 6,
        ),
        # A block of one token beside one of 64 weighs less.
        (
            BlockLayout.striped([64, 1], 1, 2),
            SparsePlanner(1, 2),
            np.ones((1, 2, 2), bool),
            [64 * 65, 65],
        ),
    ],
)
def test_plans_that_need_no_move(
    layout: BlockLayout, planner: SparsePlanner, masks: Bools, loads: list[int]
) -> None:
    plan = planner.plan(masks, layout)
    assert plan.loads.tolist() == loads and plan.moved == (0.0, 0.0)


def test_ranks_of_the_largest_mesh_are_not_confused() -> None:
    """They are numbered in 16 bits where they are sorted."""
    most = 2**15
    home = BlockLayout(np.ones(4, np.int64), np.array([0, 1, most - 2, most - 1]))
    plan = SparsePlanner(most, 1, method="in_order").plan(np.ones((2, 4, 4), bool), home)
    sent = plan.route(most - 1).send_splits  # q, k and v of one token of two heads
    assert np.flatnonzero(sent).tolist() == [0, most // 2] and sent.sum() == 6


def test_layouts_by_hand() -> None:
    """Rank = ring rank * 2 + Ulysses rank."""
    striped = BlockLayout.striped([1] * 8, 2, 3)
    assert striped.home.tolist() == [0, 2, 4, 1, 3, 5, 0, 2]
    assert BlockLayout.contiguous([1] * 8, 2, 3).home.tolist() == [0, 0, 1, 2, 3, 3, 4, 5]
    plan = SparsePlanner(2, 3).plan(np.ones((4, 8, 8), bool), striped)
    assert plan.owners(3) == [3, 1, 5]  # ring ranks 1, 0, 2 of ring 1
    # Blocks never straddle segments.
    assert block_lens((226, 0, 128, 5), 64).tolist() == [64, 64, 64, 34, 64, 64, 5]
    assert block_lens((), 64).tolist() == []


def test_any_change_has_another_digest() -> None:
    masks = mask_of("random", (4, 9, 9))
    layout = BlockLayout.striped([2] * 9, 2, 2)
    plan = SparsePlanner(2, 2).plan(masks, layout)
    others = [
        dataclasses.replace(plan, **{name: _bumped(getattr(plan, name))})
        for name in ("ring_of", "q_of", "kv_of")
    ]
    others += [dataclasses.replace(plan, num_kv_heads=2)]
    others += [
        dataclasses.replace(plan, **{side: BlockLayout(lens, home)})
        for side in ("q", "kv")
        for lens, home in ((layout.lens + 1, layout.home), (layout.lens, 3 - layout.home))
    ]
    straight = np.tile(np.arange(18), (4, 1))
    others += [
        dataclasses.replace(plan, **{side: dataclasses.replace(layout, order=order)})
        for side in ("q", "kv")
        for order in (straight, np.roll(straight, 1, axis=1))
    ]
    assert len({plan, *others}) == 1 + len(others)
    tiles = plan.tiles + 1  # predicted work is no decision
    assert dataclasses.replace(plan, tiles=tiles) == plan


def _bumped(array: Ints) -> Ints:
    copy = array.copy()
    copy.flat[-1] = 1 - copy.flat[-1]
    return copy


def test_masks_and_matrices_lie_in_memory_as_they_like() -> None:
    rng = np.random.default_rng(0)
    masks, matrix = rng.random((4, 8, 8)) < 0.5, rng.integers(0, 9, (8, 8)).astype(float)
    home = BlockLayout.striped([3] * 8, 1, 2)
    expected = SparsePlanner(1, 2).plan(masks, home)
    moved = partition_blocks(matrix, 2, method="minimal_move")
    wide, tall = np.zeros((4, 16, 16), bool), np.zeros((16, 8))
    wide[:, ::2, ::2], tall[::2] = masks, matrix
    as_tensor: Any = torch.from_numpy(masks)
    for other in (np.asfortranarray(masks), wide[:, ::2, ::2], masks.tolist(), as_tensor):
        assert SparsePlanner(1, 2).plan(other, home) == expected
    read_only = np.frombuffer(matrix.tobytes()).reshape(8, 8)
    for other in (np.asfortranarray(matrix), tall[::2], read_only, matrix.tolist()):
        again = partition_blocks(other, 2, method="minimal_move")
        np.testing.assert_array_equal(again.q_of, moved.q_of)
        np.testing.assert_array_equal(again.kv_of, moved.kv_of)


@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("blocks", [(0, 0), (0, 4), (3, 0)])
def test_a_sequence_of_no_blocks_has_a_plan(mesh: tuple[int, int], blocks: tuple[int, int]) -> None:
    q, kv = (BlockLayout.striped([5] * number, *mesh) for number in blocks)
    masks = np.zeros((2, *blocks), bool)
    assert block_counts(masks, ring_degree=mesh[1]).shape == (2, blocks[0], mesh[1])
    for method in PLANNERS:
        planner = SparsePlanner(*mesh, method=method)
        plan = planner.plan(masks, q, kv)
        assert plan.imbalance == 1.0 and not plan.tiles.any()
        assert plan.route(0).send_splits.sum() == 2 * (plan.q.home == 0).sum() * 5 + 2 * sum(
            5 * int((plan.kv_rank_of[:, :, block] >= 0).any(0).sum())
            for block in np.flatnonzero(plan.kv.home == 0)
        )
        assert PlanReuse(planner, plan).after(masks).num_kept == 1


def test_a_layout_is_its_own() -> None:
    """Neither what it was made from changes it, nor it what it was made from."""
    base, home = np.array([5, 6, 7, 8]), np.array([0, 1])
    order = np.array([[1, 0, *range(2, 11)]])
    made = BlockLayout(base[:2], home, order)
    digest = made.digest
    base[0], home[0], order[0, 0] = 99, 1, 99
    again = BlockLayout(np.array([5, 6]), np.array([0, 1]), np.array([[1, 0, *range(2, 11)]]))
    assert made.lens.tolist() == [5, 6] and digest == again.digest
    for one in (made.lens, made.home, made.order):
        assert one is not None and not one.flags.writeable


# Reuse and choice


def test_a_plan_is_renewed_where_the_mask_has_changed() -> None:
    masks = mask_of("toeplitz", (8, 40, 40))
    planner = SparsePlanner(2, 2)
    plan = planner.plan(masks, BlockLayout.striped([1] * 40, 2, 2))
    kept = PlanReuse(planner, plan, tolerance=0.05).after(masks)
    changed = masks.copy()
    changed[kept.plan.ring_of[:, 0] == 0] = False  # one ring has nothing to do
    renewed = kept.after(changed)
    assert (renewed.num_planned, renewed.num_kept) == (2, 1)
    assert sparse_imbalance(changed, 2, 2, renewed.plan) <= 1.05
    assert (kept.num_planned, kept.num_kept) == (1, 1)  # states do not change


@pytest.mark.parametrize(("tolerance", "is_kept"), [(0.06, False), (0.07, True)])
def test_a_plan_is_kept_up_to_its_tolerance(tolerance: float, is_kept: bool) -> None:
    """Two heads on two ranks with 15 blocks each; then one has 17: 1.0625 of the mean."""
    masks = np.zeros((2, 1, 17), bool)
    masks[:, :, :15] = True
    planner = SparsePlanner(2, 1, cut_above=math.inf)
    q, kv = BlockLayout.striped([1], 2, 1), BlockLayout.striped([1] * 17, 2, 1)
    state = PlanReuse(planner, planner.plan(masks, q, kv), tolerance)
    assert state.plan.imbalance == 1.0
    masks[0] = True
    assert sparse_imbalance(masks, 2, 1, state.plan) == 1.0625
    assert (state.after(masks).num_kept == 1) == is_kept


def test_a_plan_that_cannot_be_even_is_not_made_again_and_again() -> None:
    masks = np.zeros((1, 4, 4), bool)
    masks[0, 0, 0] = True
    planner = SparsePlanner(1, 4)
    state = PlanReuse(planner, planner.plan(masks, BlockLayout.striped([1] * 4, 1, 4)))
    for _ in range(3):
        state = state.after(masks)
    assert (state.num_planned, state.num_kept) == (1, 3)


LATENCY = AttentionLatency(3.0, 0.002, 40.0, 0.001, 0.01, 5.0, 0.0003)

LENS = block_lens((5, 70), 8)

BATCH, ROW_BYTES = 2, 64


def random_masks(seed: int, density: float) -> Bools:
    random = np.random.default_rng(seed)
    drawn = random.random((6, LENS.size, LENS.size))
    return drawn < density * 2 * random.random((6, 1, 1))


@pytest.mark.parametrize("degrees", all_degrees(6))
def test_counts_by_rank_are_counts_by_ring_rank_of_any_mesh(degrees: tuple[int, int]) -> None:
    masks, home = random_masks(0, 0.4), BlockLayout.striped(LENS, 3, 2).home
    by_rank = block_counts(masks, kv_lens=LENS, kv_of=home, ring_degree=6)
    ulysses, ring = degrees
    expected = block_counts(masks, kv_lens=LENS, kv_of=home // ulysses, ring_degree=ring)
    np.testing.assert_array_equal(columns_of(by_rank, degrees), expected)
    assert columns_of(masks, degrees) is masks


@pytest.mark.parametrize(
    ("degrees", "method", "work", "wires"),
    [
        ((4, 1), "minimal_move", 6736, (57600, 0, 76800)),
        ((4, 1), "in_order", 13170, (42496, 0, 57600)),
        ((2, 2), "minimal_move", 6852, (34368, 48640, 62400)),
        ((2, 2), "in_order", 7648, (28800, 29184, 57600)),
        ((1, 4), "minimal_move", 7880, (10368, 33792, 57600)),
        ((1, 4), "in_order", 8632, (0, 33792, 0)),
    ],
)
def test_the_load_of_a_plan(
    degrees: tuple[int, int], method: str, work: int, wires: tuple[int, int, int]
) -> None:
    """Counted token by token: what ranks send, pass on, and copy."""
    home = BlockLayout.striped(LENS, 2, 2)
    plan = SparsePlanner(*degrees, method=method).plan(random_masks(1, 0.5), home)
    found = dataclasses.astuple(AttentionLoad.of_plan(plan, BATCH, ROW_BYTES))
    assert found == pytest.approx((*degrees, work, *wires), rel=1e-12)


def predicted_s(plan: SparsePlan, masks: Bools) -> float:
    return LATENCY(AttentionLoad.of_plan(plan_under(plan, masks), BATCH, ROW_BYTES))


def first_plans(work: Any, meshes: list[tuple[int, int]]) -> dict[tuple[int, int], PlanReuse]:
    home = BlockLayout.striped(LENS, 2, 2)
    planners = {degrees: SparsePlanner(*degrees) for degrees in meshes}
    return {
        d: PlanReuse(one, one.plan(columns_of(work, d), home), 0.02) for d, one in planners.items()
    }


def counts_by_rank(masks: Bools) -> Any:
    home = BlockLayout.striped(LENS, 2, 2).home
    return block_counts(masks, kv_lens=LENS, kv_of=home, ring_degree=4)


@pytest.mark.parametrize("as_counts", [False, True])
def test_every_step_takes_the_mesh_with_the_lowest_prediction(as_counts: bool) -> None:
    steps = [random_masks(seed, density) for seed, density in enumerate((0.9, 0.05, 0.05, 0.9))]
    work: Any = counts_by_rank(steps[0]) if as_counts else steps[0]
    expected = first_plans(work, all_degrees(4))
    plans = LayerPlans.first(
        expected,
        Strategies(LATENCY, min_gain=0.0),
        start=None,
        batch=BATCH,
        row_bytes=ROW_BYTES,
    )
    used = set[tuple[int, int]]()
    for masks, later in itertools.pairwise([steps[0], *steps]):
        predicted = {d: predicted_s(x.plan, later) for d, x in expected.items()}
        if later is masks:
            assert plans.choice is not None
            assert plans.choice.predicted_s == pytest.approx(min(predicted.values()))
        work = counts_by_rank(later) if as_counts else later
        expected = {d: x.after(columns_of(work, d)) for d, x in expected.items()}
        plans = plans.after(work, BATCH, ROW_BYTES)
        assert {d: x.plan for d, x in plans.reuses.items()} == {
            d: x.plan for d, x in expected.items()
        }
        predicted = {d: predicted_s(x.plan, later) for d, x in expected.items()}
        assert predicted[plans.degrees] == pytest.approx(min(predicted.values()))
        assert plans.chosen.plan.ulysses_degree == plans.degrees[0]
        used.add(plans.degrees)
    assert len(used) > 1 and plans.choice is not None and plans.choice.num_switches > 1


def test_a_layer_starts_where_it_is_told_to_and_has_to_be_paid_for_a_switch() -> None:
    masks = random_masks(0, 0.05)
    given: dict[str, Any] = {"start": (1, 4), "batch": BATCH, "row_bytes": ROW_BYTES}
    reuses = first_plans(masks, all_degrees(4))
    at_once = LayerPlans.first(reuses, Strategies(LATENCY), **given)
    assert at_once.degrees == (1, 4)
    assert at_once.after(masks, BATCH, ROW_BYTES).degrees == (4, 1)
    unsure = Strategies(replace(LATENCY, fit_error=0.9))
    assert LayerPlans.first(reuses, unsure, **given).after(masks, BATCH, ROW_BYTES).degrees == (
        1,
        4,
    )
    dear = LayerPlans.first(reuses, Strategies(LATENCY, switch_s=1e6), **given)
    assert dear.after(masks, BATCH, ROW_BYTES).degrees == (1, 4)


def test_one_mesh_is_no_choice() -> None:
    masks, other = random_masks(0, 0.3), random_masks(1, 0.6)
    plans = LayerPlans.first(
        first_plans(masks, [(2, 2)]), None, start=None, batch=BATCH, row_bytes=ROW_BYTES
    )
    later = plans.after(other, BATCH, ROW_BYTES)
    assert later.choice is None and later.degrees == (2, 2)
    assert later.chosen.plan == plans.chosen.after(other).plan


def test_a_kept_plan_knows_the_work_that_it_was_kept_for() -> None:
    planner, home = SparsePlanner(2, 2), BlockLayout.striped(LENS, 2, 2)
    masks, other = random_masks(0, 0.5), random_masks(1, 0.5)
    kept = PlanReuse(planner, planner.plan(masks, home), 9.0).after(other)
    assert kept.ran is kept.ahead and kept.plan is not kept.ran
    np.testing.assert_array_equal(kept.ahead.tiles, plan_under(kept.plan, other).tiles)
    made = PlanReuse(planner, kept.plan, 0.0).after(other)
    assert made.num_planned == 2 and made.ran is not None
    np.testing.assert_array_equal(made.ran.tiles, plan_under(kept.plan, other).tiles)
    assert made.ahead is made.plan and made.plan.imbalance < made.ran.imbalance
