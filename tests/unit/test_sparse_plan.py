"""Plans for block-sparse attention: counts, imbalance, plans, reuse and errors, by hand."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from bascule.arrays import Ints
from bascule.errors import ConfigError
from bascule.plan.sparse import (
    BlockLayout,
    PlanReuse,
    SparsePlanner,
    block_counts,
    block_lens,
    critical_path_imbalance,
    partition_blocks,
    partition_heads,
    sparse_imbalance,
)
from bascule.plan.sparse.baselines import paper_blocks
from tests.helpers.sparse_simulation import MASK_KINDS, mask_of, random_mask


def contiguous_rho(masks: np.ndarray, ulysses: int, ring: int) -> float:
    """Equations 1 to 3 in loops, blocks and heads dealt by rounding down: ragged where they are."""
    heads, num_q, num_kv = masks.shape
    work = np.zeros((ulysses, ring, ring))
    for h, i, j in np.argwhere(masks):
        rank, owner = i * ring // num_q, j * ring // num_kv
        work[h * ulysses // heads, rank, (rank - owner) % ring] += 1  # keys go from rank to rank+1
    return max(rounds.max(axis=0).sum() for rounds in work) / (work.sum() / ulysses / ring)


# Counts


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


def test_more_heads_than_a_byte_counts() -> None:
    masks = np.ones((300, 4, 6), bool)
    plan = SparsePlanner(1, 2).plan(masks, *(BlockLayout.striped([1] * n, 1, 2) for n in (4, 6)))
    assert plan.tiles.sum() == 300 * 4 * 6


# Imbalance


def test_imbalance_by_hand() -> None:
    """Two heads, 3 and 1 blocks: one a rank is 3 over a mean of 2."""
    masks = np.zeros((2, 2, 2), bool)
    masks[0, [0, 0, 1], [0, 1, 1]] = masks[1, 0, 0] = True
    assert sparse_imbalance(masks, 2, 1) == 1.5
    # Ring of 2: tiles of the sum are [[2, 1], [0, 1]]; rounds are (2, 1) and (1, 0); mean is 2.
    assert sparse_imbalance(masks, 1, 2) == (2 + 1) / 2
    # Rank 0 works all the time: it starts its second round at 2 and ends at 3.
    assert critical_path_imbalance(masks, 1, 2) == 1.5


def test_a_ring_hides_what_a_barrier_does_not() -> None:
    """Ranks that are slow in turns: every round has a slow one, but no rank is slower overall."""
    masks = np.zeros((1, 3, 3), bool)
    masks[0, [0, 1, 2], [0, 0, 0]] = True  # rank 0 in round 0, rank 1 in round 1, rank 2 in 2
    assert sparse_imbalance(masks, 1, 3) == 3.0
    # Rank 0 enters round 1 at 1, so rank 2 enters round 2, in which it has its work, at 1.
    assert critical_path_imbalance(masks, 1, 3) == 2.0


@pytest.mark.parametrize("kind", MASK_KINDS)
@pytest.mark.parametrize("mesh", [(1, 3), (2, 3), (3, 1), (2, 4), (5, 2), (1, 8)])
def test_without_a_plan_nothing_is_padded_dropped_or_turned(
    kind: str, mesh: tuple[int, int]
) -> None:
    """What the public code gets wrong: H % U, n % R, trailing blocks, non-square masks, and for
    R > 2 which keys are at hand in which round."""
    masks = mask_of(kind, (7, 29, 23))
    assert sparse_imbalance(masks, *mesh) == pytest.approx(contiguous_rho(masks, *mesh), rel=1e-12)


def test_which_way_keys_travel_matters_to_the_critical_path() -> None:
    """The sum over rounds does not see it; who waits for whom does."""
    masks = mask_of("random", (1, 4, 4), 3)
    forward = critical_path_imbalance(masks, 1, 4)
    backward = critical_path_imbalance(masks[:, ::-1, ::-1], 1, 4)
    assert sparse_imbalance(masks, 1, 4) == sparse_imbalance(masks[:, ::-1, ::-1], 1, 4)
    assert forward != backward


def test_nothing_to_do_is_even() -> None:
    for shape in ((2, 3, 4), (0, 3, 4), (2, 0, 4), (2, 3, 0)):
        masks = np.zeros(shape, bool)
        assert sparse_imbalance(masks, 2, 3) == critical_path_imbalance(masks, 2, 3) == 1.0


# Plans


def test_a_ring_with_little_work_need_not_be_even() -> None:
    """It ends before the other however uneven it is."""
    masks = np.ones((2, 8, 8), bool)
    masks[1, 4:] = masks[1, :, 4:] = False
    layout = BlockLayout.contiguous([1] * 8, 2, 2)
    plan = SparsePlanner(2, 2, cut_above=math.inf).plan(masks, layout)
    assert plan.loads.tolist() == [32, 16, 32, 0]
    assert plan.moved == (0.0, 0.0)


def test_a_cut_head_gives_every_ring_rank_its_share() -> None:
    """Also where blocks lie in runs, and nothing is moved."""
    layout = BlockLayout.contiguous([1] * 24, 2, 3)
    plan = SparsePlanner(2, 3, target=9.0).plan(np.ones((1, 24, 24), bool), layout)
    assert plan.loads.tolist() == [96] * 6
    assert plan.moved == (0.0, 0.0)


def test_ranks_are_numbered_ring_by_ulysses() -> None:
    """As the mesh of attention has it; the public code takes the ring rank for rank % R."""
    masks = mask_of("random", (4, 12, 12))
    plan = SparsePlanner(2, 3, method="stripe").plan(masks, BlockLayout.striped([1] * 12, 2, 3))
    for rank in range(6):
        rows = plan.q_rows(rank)
        assert set(rows.blocks % 3) == {rank // 2}
        assert set(plan.kv_rows(rank).blocks % 3) == {rank // 2}
        assert set(plan.ring_of[rows.heads, rows.blocks]) == {rank % 2}
    assert plan.owners(3) == [3, 1, 5]  # ring ranks 1, 0, 2 of ring 1


def test_striped_home_lets_nothing_move() -> None:
    masks = mask_of("toeplitz", (6, 31, 31))
    for mesh in ((2, 3), (1, 4), (3, 1)):
        plan = SparsePlanner(*mesh, method="stripe").plan(
            masks, BlockLayout.striped([1] * 31, *mesh)
        )
        assert plan.moved == (0.0, 0.0)


def test_wire_bytes_by_hand() -> None:
    """One head on two ring ranks: one query block of 3 tokens leaves, and no key."""
    masks = np.ones((1, 2, 2), bool)
    q, kv = (BlockLayout(np.array([3, 3]), np.array(home)) for home in ([0, 0], [0, 1]))
    plan = SparsePlanner(1, 2, method="stripe").plan(masks, q, kv)
    assert plan.moved == (0.5, 0.0)
    assert plan.wire_bytes(head_dim=10, itemsize=4, batch=2) == 2 * 3 * 10 * 4 * 2  # and back


def test_wire_bytes_with_token_orders_by_hand() -> None:
    """Two blocks of two tokens on two ranks; the second head sees the tokens backwards."""
    masks = np.ones((2, 2, 2), bool)
    lens, home = np.array([2, 2]), np.array([0, 1])
    layout = BlockLayout(lens, home, np.array([[0, 1, 2, 3], [3, 2, 1, 0]]))
    plan = SparsePlanner(1, 2, method="stripe").plan(masks, layout)
    q_rows, kv_rows = plan.rows_between
    assert q_rows.tolist() == kv_rows.tolist() == [[2, 2], [2, 2]]
    assert plan.moved == (0.5, 0.5)
    assert plan.wire_bytes(head_dim=10, itemsize=4) == 4 * 4 * 10 * 4  # q, k, v, and out
    whole = SparsePlanner(2, 1).plan(masks, layout)  # each rank has a head of each of two
    assert whole.moved == (0.0, 0.0)
    assert whole.wire_bytes(head_dim=10, itemsize=4) == 4 * 4 * 10 * 4


def test_short_blocks_weigh_less() -> None:
    """A block of one token beside one of 64: blocks count alike without lengths."""
    lens = block_lens((65,), 64)
    assert lens.tolist() == [64, 1]
    plan = SparsePlanner(1, 2).plan(np.ones((1, 2, 2), bool), BlockLayout.striped(lens, 1, 2))
    assert plan.loads.tolist() == [64 * 65, 65]
    assert plan.imbalance == pytest.approx(64 * 65 / (65 * 65 / 2))


def test_home_layouts_by_hand() -> None:
    """Rank = ring rank * 2 + Ulysses rank."""
    assert BlockLayout.striped([1] * 8, 2, 3).home.tolist() == [0, 2, 4, 1, 3, 5, 0, 2]
    assert BlockLayout.contiguous([1] * 8, 2, 3).home.tolist() == [0, 0, 1, 2, 3, 3, 4, 5]


def test_blocks_never_straddle_segments() -> None:
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


# Reuse


def test_a_plan_is_kept_until_the_mask_has_changed() -> None:
    planner = SparsePlanner(2, 2)
    layout = BlockLayout.striped([1] * 40, 2, 2)
    masks = mask_of("toeplitz", (8, 40, 40))
    state = PlanReuse(planner, planner.plan(masks, layout), tolerance=0.05)
    kept = state.after(masks)
    assert kept.plan is state.plan
    assert (kept.num_planned, kept.num_kept) == (1, 1)
    changed = masks.copy()
    changed[kept.plan.ring_of[:, 0] == 0] = False  # one ring has nothing to do
    assert sparse_imbalance(changed, 2, 2, kept.plan) > 1.9
    renewed = kept.after(changed)
    assert (renewed.num_planned, renewed.num_kept) == (2, 1)
    assert sparse_imbalance(changed, 2, 2, renewed.plan) <= 1.05
    assert (kept.num_planned, state.num_kept) == (1, 0)  # states do not change


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


def test_reuse_works_from_counts() -> None:
    """Of the home ring ranks: all that ranks tell each other."""
    layout = BlockLayout.striped([1] * 24, 2, 3)
    ring_of = layout.home // 2

    def counts(seed: int) -> Ints:
        return block_counts(mask_of("clustered", (6, 24, 24), seed), kv_of=ring_of, ring_degree=3)

    planner = SparsePlanner(2, 3)
    state = PlanReuse(planner, planner.plan(counts(0), layout), tolerance=0.0).after(counts(1))
    assert state.num_planned == 2
    assert state.plan == planner.plan(counts(1), layout)


# Errors


def test_wrong_arguments_are_named() -> None:
    masks, layout = np.ones((2, 4, 4), bool), BlockLayout.striped([1] * 4, 1, 2)
    planner, moving = SparsePlanner(1, 2), SparsePlanner(1, 2, method="stripe")
    plan = planner.plan(masks, layout)
    away = moving.plan(masks, layout, BlockLayout.contiguous([1] * 4, 1, 2))
    counts = np.ones((2, 4, 2), np.int64)

    def ordered(order: Any) -> BlockLayout:
        return BlockLayout(np.ones(3, int), np.zeros(3, int), np.array(order))

    wrong = {
        "masks of shape .* bool": lambda: sparse_imbalance(masks.astype(int), 1, 2),
        "both must be at least 1": lambda: sparse_imbalance(masks, 0, 2),
        "a plan for 1 x 2 ranks": lambda: sparse_imbalance(masks, 2, 1, plan),
        "work of 3 heads for a plan of 2": lambda: sparse_imbalance(masks[[0, 0, 1]], 1, 2, plan),
        r"bool masks \(heads, q_blocks, 4\)": lambda: planner.plan(masks[:, :, :3], layout),
        "work of 3 query blocks": lambda: planner.plan(masks[:, :3], layout),
        "counts must be at least 0": lambda: planner.plan(-counts, layout),
        "moves keys": lambda: PlanReuse(moving, away).after(counts),
        'use "minimal_move"': lambda: SparsePlanner(1, 2, method="paper").plan(counts, layout),
        "key-value heads": lambda: planner.plan(masks, layout, num_kv_heads=3),
        "ranks 0 to 1": lambda: plan.route(2),
        r"order\[1\] is not an order of the 3": lambda: ordered([[0, 2, 1], [0, 1, 1]]),
        "is not an order": lambda: ordered([[0, 2, 3]]),
        r"integers \(heads, 3\)": lambda: ordered([[0, 1]]),
        "dtype float64": lambda: ordered([[0.0, 1.0, 2.0]]),
        "kv.order of 4 heads for 2": lambda: planner.plan(
            np.ones((4, 3, 3), bool), ordered([[0, 1, 2]] * 4), num_kv_heads=2
        ),
        "one of": lambda: partition_blocks(np.ones((2, 2)), 2, method="best"),
        "raise capacity": lambda: paper_blocks(np.ones((4, 4)), 2, capacity=(1, 4)),
        "finite": lambda: partition_blocks([[-1.0]], 1),
        "names rank 5": lambda: partition_blocks(np.ones((2, 2)), 2, q_home=[0, 5]),
        "cut_above": lambda: partition_heads([1, 2], 2, cut_above=-1.0),
        "plans are made by one of": lambda: SparsePlanner(1, 2, method="best"),
        "at least one token": lambda: block_lens((3,), 0),
        "give one each": lambda: BlockLayout(np.ones(2, int), np.zeros(3, int)),
        "tolerance is": lambda: PlanReuse(planner, plan, tolerance=-0.1),
    }
    for message, call in wrong.items():
        with pytest.raises(ConfigError, match=message):
            call()
