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


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint64])
def test_counts_of_small_integers_do_not_wrap(dtype: Any) -> None:
    """40 heads with 100 keys a block: 4,000, which 8 bits do not hold."""
    home = BlockLayout.striped([500] * 4, 2, 2)
    plan = SparsePlanner(2, 2).plan(np.full((40, 4, 2), 100, dtype), home)
    assert plan.tiles.sum() == 40 * 4 * 2 * 100 * 500


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


def contiguous_rho(masks: np.ndarray, ulysses: int, ring: int) -> float:
    """Equations 1 to 3 in loops, blocks and heads dealt by rounding down: ragged where they are."""
    heads, num_q, num_kv = masks.shape
    work = np.zeros((ulysses, ring, ring))
    for h, i, j in np.argwhere(masks):
        rank, owner = i * ring // num_q, j * ring // num_kv
        work[h * ulysses // heads, rank, (rank - owner) % ring] += 1  # keys go from rank to rank+1
    return max(rounds.max(axis=0).sum() for rounds in work) / (work.sum() / ulysses / ring)


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


# Heads


def test_whole_heads_are_an_assignment() -> None:
    plan = partition_heads([7, 5, 4, 3, 1], 2)
    assert (plan.makespan, plan.lower_bound, plan.gap) == (10.0, 10.0, 0.0)
    assert np.bincount(plan.bin_of, [7, 5, 4, 3, 1]).tolist() == plan.loads.tolist() == [10, 10]
    assert plan.rank_of.tolist() == plan.bin_of[:, None].tolist()


def test_twelve_heads_on_eight_ranks_are_cut() -> None:
    """Whole, two heads meet on four ranks and the other four have one: 2 over 1.5."""
    counts = np.full((12, 100), 3)
    assert partition_heads(counts.sum(axis=1), 8).makespan == 600
    plan = partition_heads(counts, 8)
    assert plan.makespan == plan.lower_bound == 450
    assert plan.cut_heads.size == 4
    assert partition_heads(counts, 8, cut_above=math.inf).makespan == 600


def test_one_head_is_cut_into_all_ranks() -> None:
    plan = partition_heads(np.full((1, 1024), 3), 8)
    assert plan.loads.tolist() == [3 * 128] * 8
    assert np.flatnonzero(np.diff(plan.rank_of[0])).size == 7  # runs of query blocks
    uneven = partition_heads(np.arange(1, 129).repeat(16)[None], 8)
    assert uneven.makespan <= uneven.loads.mean() * 1.01


def test_heads_are_cut_only_where_whole_ones_are_uneven() -> None:
    random = np.random.default_rng(0)
    counts = random.integers(1, 100, (40, 64)) * random.uniform(0.2, 1.0, (40, 1))
    counts = counts.astype(np.int64)
    assert partition_heads(counts, 8).cut_heads.size == 0
    assert partition_heads(counts, 8, cut_above=0.0).makespan <= partition_heads(counts, 8).makespan


def test_heads_are_cut_until_the_limit_not_the_mean() -> None:
    """Loads of 13, 10.5 and 6.5: the first gives 3, then 10.5 is within 10 % of the mean of 10."""
    counts = np.array([[1.0] * 13 + [0.0] * 8, [0.5] * 21, [0.5] * 13 + [0.0] * 8])
    plan = partition_heads(counts, 3, cut_above=0.1)
    assert sorted(plan.loads.tolist()) == [9.5, 10.0, 10.5]
    assert plan.cut_heads.tolist() == [0]
    even = partition_heads(counts, 3, cut_above=0.0)
    assert even.loads.tolist() == [10.0] * 3 and even.cut_heads.size == 2


# The paper's method, transcribed from sections 4.2.1 and 4.2.2 of its text


def transcribed(
    weights: list[int], gpus: int, initial: list[int], reward: float, most: float
) -> Ints:
    """ "sort each block in descending order by the total count [...] First, the accumulated block
    count on the block's initial GPU is artificially reduced by the reward multiplied by the current
    block's block count. Then, the algorithm selects the GPU with the least resulting accumulated
    count for assignment." """
    accumulated, members = dict.fromkeys(range(gpus), 0.0), {gpu: [] for gpu in range(gpus)}
    for block in sorted(range(len(weights)), key=lambda block: (-weights[block], block)):
        resulting = dict(accumulated)
        resulting[initial[block]] -= reward * weights[block]
        open_gpus = [gpu for gpu in range(gpus) if len(members[gpu]) < most]
        chosen = min(open_gpus, key=lambda gpu: (resulting[gpu], gpu))
        members[chosen].append(block)
        accumulated[chosen] += weights[block]
    placed = {block: gpu for gpu, blocks in members.items() for block in blocks}
    return np.array([placed[block] for block in range(len(weights))])


@pytest.mark.parametrize("kind", MASK_KINDS)
@pytest.mark.parametrize("ring", [2, 3, 8])
@pytest.mark.parametrize("reward", [0.0, 1.0, 2.0, 10.0])
@pytest.mark.parametrize("has_capacity", [True, False])
def test_paper_method_is_its_text(kind: str, ring: int, reward: float, has_capacity: bool) -> None:
    masks = mask_of(kind, (5, 48, 41))
    matrix = masks.sum(axis=0)
    initial = [[i * ring // size for i in range(size)] for size in matrix.shape]
    most = [-(-size // ring) if has_capacity else math.inf for size in matrix.shape]
    sums = matrix.sum(axis=1).tolist(), matrix.sum(axis=0).tolist()
    expected = [
        transcribed(weights, ring, homes, reward, capacity)
        for weights, homes, capacity in zip(sums, initial, most, strict=True)
    ]
    capacity = None if has_capacity else matrix.shape
    plan = paper_blocks(matrix, ring, reward=reward, capacity=capacity)
    np.testing.assert_array_equal(plan.q_of, expected[0])
    np.testing.assert_array_equal(plan.kv_of, expected[1])
    rho = sum(
        max(
            matrix[np.ix_(expected[0] == i, expected[1] == (i - t) % ring)].sum()
            for i in range(ring)
        )
        for t in range(ring)
    ) / (matrix.sum() / ring)
    assert plan.imbalance == pytest.approx(rho, rel=1e-12)


def test_heads_of_the_paper_are_its_text() -> None:
    """ "each head is always placed onto the GPU that currently has the least cumulative number of
    blocks" """
    counts = np.random.default_rng(3).integers(1, 1000, 41)
    expected = transcribed(counts.tolist(), 8, [0] * 41, 0.0, math.inf)
    found = greedy(counts, 8)
    np.testing.assert_array_equal(found, expected)
    assert np.bincount(found, counts).max() >= partition_heads(counts, 8).makespan


# Blocks


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


def end_of(matrix: np.ndarray, q_of: Ints, kv_of: Ints, ring: int) -> float:
    """When a ring ends, round by round."""
    return sum(
        max(float(matrix[np.ix_(q_of == i, kv_of == (i - t) % ring)].sum()) for i in range(ring))
        for t in range(ring)
    )


@pytest.mark.parametrize("seed", range(8))
def test_moves_are_the_best_of_the_rank_that_is_waited_for(seed: int) -> None:
    """One move, against all moves tried one by one."""
    random = np.random.default_rng(seed)
    ring = int(random.integers(2, 5))
    matrix = random.integers(0, 50, (14, 11))
    homes = [random.integers(0, ring, size) for size in matrix.shape]
    place: dict[str, Any] = {"method": "minimal_move", "q_home": homes[0], "kv_home": homes[1]}
    start = end_of(matrix, homes[0], homes[1], ring)
    mean = matrix.sum() / ring
    # A target just below the start ends after the first move.
    plan = partition_blocks(matrix, ring, target=start / mean - 1e-3, **place)
    ends: list[float] = []
    for side in (0, 1):
        longest = [
            sum(
                sorted(round_of)[-1] - sorted(round_of)[-2]
                for t in range(ring)
                if (round_of := [tile(matrix, homes, i, t, side, ring) for i in range(ring)])
                and round_of[rank] == max(round_of)
            )
            for rank in range(ring)
        ]
        source = int(np.argmax(longest))
        for block in np.flatnonzero(homes[side] == source):
            for rank in range(ring):
                moved = [home.copy() for home in homes]
                moved[side][block] = rank
                ends.append(end_of(matrix, moved[0], moved[1], ring))
    assert sum(plan.num_moved) == (min(ends) < start)
    assert plan.imbalance * mean == pytest.approx(min(*ends, start), rel=1e-12)


def tile(
    matrix: np.ndarray, homes: list[Ints], rank: int, turn: int, side: int, ring: int
) -> float:
    """What a rank's blocks of one kind are in a round: of queries, or of keys."""
    q, kv = (rank, (rank - turn) % ring) if side == 0 else ((rank - turn) % ring, rank)
    return float(matrix[np.ix_(homes[0] == q, homes[1] == kv)].sum())


def test_what_no_single_move_lowers_stays() -> None:
    """Rows of 5 and 3 on one rank, of 4 and 2 on the other: only a swap would even them out."""
    matrix = np.multiply.outer([5, 3, 4, 2], [1, 1])
    plan = partition_blocks(
        matrix, 2, method="minimal_move", q_home=[0, 0, 1, 1], keys_stay=True, target=1.0
    )
    assert plan.num_moved == (0, 0)
    assert plan.loads.tolist() == [16, 12]


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


def test_moves_end_at_the_target() -> None:
    """Loads of 12, 8, 11, 9 rows: one move makes the most loaded rank 11 of a mean of 10."""
    home = np.repeat(np.arange(4), [12, 8, 11, 9])
    plan = partition_blocks(
        np.ones((40, 4)), 4, method="minimal_move", q_home=home, kv_home=np.arange(4), target=1.1
    )
    assert plan.loads.tolist() == [44, 36, 44, 36]
    assert plan.num_moved == (1, 0)


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


def test_ranks_of_the_largest_mesh_are_not_confused() -> None:
    """They are numbered in 16 bits where they are sorted."""
    most = 2**15
    home = BlockLayout(np.ones(4, np.int64), np.array([0, 1, most - 2, most - 1]))
    plan = SparsePlanner(most, 1, method="in_order").plan(np.ones((2, 4, 4), bool), home)
    sent = plan.route(most - 1).send_splits  # q, k and v of one token of two heads
    assert np.flatnonzero(sent).tolist() == [0, most // 2] and sent.sum() == 6


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


def load_by_loops(plan: SparsePlan, masks: Bools) -> AttentionLoad:
    """Tokens one by one."""
    ulysses, ring = plan.ulysses_degree, plan.ring_degree
    work = np.zeros((ulysses, ring, ring))
    sent, copied = 0, 0
    keys: dict[int, set[tuple[int, int]]] = {}
    for head, q_block in np.ndindex(plan.ring_of.shape):
        owner = int(plan.ring_of[head, q_block])
        rank = int(plan.q_of[owner, q_block]) * ulysses + owner
        tokens = int(LENS[q_block])
        copied += 2 * tokens
        sent += 2 * tokens * (rank != plan.q.home[q_block])
        for block in range(LENS.size):
            ring_rank = int(plan.kv_of[owner, block])
            keys.setdefault(ring_rank * ulysses + owner, set()).add((head, block))
            if masks[head, q_block, block]:
                turn = (rank // ulysses - ring_rank) % ring
                work[owner, rank // ulysses, turn] += tokens * int(LENS[block])
    kv_tokens = dict.fromkeys(range(ulysses * ring), 0)
    for rank, blocks in keys.items():
        for _, block in blocks:
            kv_tokens[rank] += int(LENS[block])
            sent += 2 * int(LENS[block]) * (rank != plan.kv.home[block])
    copied = copied + 2 * sum(kv_tokens.values()) if sent else 0
    slowest = max(rounds.max(axis=0).sum() for rounds in work)
    p2p = 2 * max(kv_tokens.values()) if ring > 1 else 0
    ranks, scale = ulysses * ring, BATCH * ROW_BYTES
    return AttentionLoad(
        ulysses, ring, BATCH * slowest, sent * scale / ranks, p2p * scale, copied * scale / ranks
    )


@pytest.mark.parametrize("degrees", all_degrees(4))
@pytest.mark.parametrize("method", ["minimal_move", "in_order"])
def test_the_load_of_a_plan(degrees: tuple[int, int], method: str) -> None:
    masks = random_masks(1, 0.5)
    home = BlockLayout.striped(LENS, 2, 2)
    plan = SparsePlanner(*degrees, method=method).plan(masks, home)
    found, expected = AttentionLoad.of_plan(plan, BATCH, ROW_BYTES), load_by_loops(plan, masks)
    for name in AttentionLoad.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12), name


def seconds_by_hand(load: AttentionLoad) -> float:
    compute = 5.0 + 0.01 * load.work / load.ring_degree
    p2p = 40.0 + 0.001 * load.p2p_bytes
    total = 0.0003 * load.copied_bytes + 0.002 * load.all_to_all_bytes
    total += 6.0 if load.all_to_all_bytes else 0.0
    return total + (load.ring_degree - 1) * max(compute, p2p) + compute


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
        predicted = {d: seconds_by_hand(load_by_loops(x.plan, later)) for d, x in expected.items()}
        if later is masks:
            assert plans.choice is not None
            assert plans.choice.predicted_s == pytest.approx(min(predicted.values()))
        work = counts_by_rank(later) if as_counts else later
        expected = {d: x.after(columns_of(work, d)) for d, x in expected.items()}
        plans = plans.after(work, BATCH, ROW_BYTES)
        assert {d: x.plan for d, x in plans.reuses.items()} == {
            d: x.plan for d, x in expected.items()
        }
        predicted = {d: seconds_by_hand(load_by_loops(x.plan, later)) for d, x in expected.items()}
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
