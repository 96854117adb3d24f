"""Heads over ranks and blocks over rings: by hand, and against the text of the paper."""

import math
from typing import Any

import numpy as np
import pytest

from bascule.arrays import Ints
from bascule.plan.sparse import partition_blocks, partition_heads
from bascule.plan.sparse.baselines import paper_blocks, paper_heads
from tests.helpers.sparse_simulation import MASK_KINDS, clustered_mask, mask_of, toeplitz_mask

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


def test_head_level_balance_over_many_draws() -> None:
    """Densities as the masks of video models have them: 1.005 on average, 1.015 at most mostly."""
    for num_heads in (40, 48):
        rho = []
        for seed in range(100):
            random = np.random.default_rng((num_heads, seed))
            counts = (random.beta(1.6, 2.3, num_heads) * 1184**2).astype(np.int64)
            plan = partition_heads(counts, 8)
            rho.append(plan.makespan / plan.loads.mean())
        assert np.mean(rho) <= 1.005
        assert np.quantile(rho, 0.95) <= 1.015


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


def test_paper_heads_are_its_text() -> None:
    """ "each head is always placed onto the GPU that currently has the least cumulative number of
    blocks" """
    counts = np.random.default_rng(3).integers(1, 1000, 41)
    expected = transcribed(counts.tolist(), 8, [0] * 41, 0.0, math.inf)
    found = paper_heads(counts, 8)
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


@pytest.mark.parametrize("kind", MASK_KINDS)
@pytest.mark.parametrize("ring", [4, 8])
def test_runs_get_more_even_by_moves_and_even_by_stripes(kind: str, ring: int) -> None:
    """From a home that suits nobody single moves may end early, and stripes do not ask for it."""
    matrix = mask_of(kind, (8, 160, 160)).sum(axis=0)
    home = np.arange(160) * ring // 160
    place: dict[str, Any] = {"method": "minimal_move", "q_home": home, "kv_home": home}
    before = partition_blocks(matrix, ring, target=9.0, **place)
    plan = partition_blocks(matrix, ring, **place)
    stripe = partition_blocks(matrix, ring, q_home=home, kv_home=home)
    assert max(plan.imbalance, stripe.imbalance) < before.imbalance
    assert stripe.imbalance < 1.07
    assert sum(plan.num_moved) < sum(paper_blocks(matrix, ring).num_moved)


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


def test_a_ring_that_is_even_enough_does_not_move() -> None:
    matrix = np.ones((12, 12))
    home = np.repeat(np.arange(4), 3)
    plan = partition_blocks(matrix, 4, method="minimal_move", q_home=home, kv_home=home)
    assert plan.num_moved == (0, 0)


def test_keys_stay_where_they_must() -> None:
    matrix = clustered_mask((4, 64, 4), 0).sum(axis=0)
    home = np.arange(64) * 4 // 64
    plan = partition_blocks(
        matrix, 4, method="minimal_move", q_home=home, kv_home=np.arange(4), keys_stay=True
    )
    assert plan.kv_of.tolist() == [0, 1, 2, 3]
    assert plan.num_moved[0] > 0
    before = partition_blocks(
        matrix,
        4,
        method="minimal_move",
        q_home=home,
        kv_home=np.arange(4),
        keys_stay=True,
        target=9.0,
    )
    assert plan.imbalance < before.imbalance


def test_moves_end_at_the_target() -> None:
    """Loads of 12, 8, 11, 9 rows: one move makes the most loaded rank 11 of a mean of 10."""
    home = np.repeat(np.arange(4), [12, 8, 11, 9])
    plan = partition_blocks(
        np.ones((40, 4)), 4, method="minimal_move", q_home=home, kv_home=np.arange(4), target=1.1
    )
    assert plan.loads.tolist() == [44, 36, 44, 36]
    assert plan.num_moved == (1, 0)


def test_heads_are_cut_until_the_limit_not_the_mean() -> None:
    """Loads of 13, 10.5 and 6.5: the first gives 3, then 10.5 is within 10 % of the mean of 10."""
    counts = np.array([[1.0] * 13 + [0.0] * 8, [0.5] * 21, [0.5] * 13 + [0.0] * 8])
    plan = partition_heads(counts, 3, cut_above=0.1)
    assert sorted(plan.loads.tolist()) == [9.5, 10.0, 10.5]
    assert plan.cut_heads.tolist() == [0]
    even = partition_heads(counts, 3, cut_above=0.0)
    assert even.loads.tolist() == [10.0] * 3 and even.cut_heads.size == 2
