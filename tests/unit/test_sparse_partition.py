"""Heads over ranks and blocks over rings: by hand, and against the text of the paper."""

import math
from typing import Any

import numpy as np
import pytest

from bascule.plan.routes import Ints
from bascule.plan.sparse import partition_blocks, partition_heads
from bascule.plan.sparse.moves import _disjoint
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
    plan = partition_blocks(matrix, ring, method="paper", reward=reward, capacity=capacity)
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
    plan = partition_heads(counts, 8, method="paper")
    np.testing.assert_array_equal(plan.bin_of, expected)
    assert plan.makespan >= partition_heads(counts, 8).makespan


# Blocks


@pytest.mark.parametrize("kind", MASK_KINDS)
@pytest.mark.parametrize("reward", [0.0, 2.0])
@pytest.mark.parametrize("ring", [4, 8])
def test_minimal_move_matches_the_paper_and_never_moves_more(
    kind: str, reward: float, ring: int
) -> None:
    """From the same home, runs of blocks."""
    matrix = mask_of(kind, (8, 160, 160)).sum(axis=0)
    home = np.arange(160) * ring // 160
    paper = partition_blocks(matrix, ring, method="paper", reward=reward)
    ours = partition_blocks(
        matrix, ring, method="minimal_move", q_home=home, kv_home=home, target=paper.imbalance
    )
    assert ours.imbalance <= paper.imbalance
    assert sum(ours.num_moved) <= sum(paper.num_moved)


@pytest.mark.parametrize("target", [1.2, 1.1, 1.05])
def test_minimal_move_reaches_a_target_from_anywhere_with_few_moves(target: float) -> None:
    """Where the paper's reward of 2, at the same home, moves half of the blocks."""
    matrix = clustered_mask((8, 160, 160), 0).sum(axis=0)
    home = np.arange(160) * 4 // 160
    place = {"method": "minimal_move", "q_home": home, "kv_home": home}
    before = partition_blocks(matrix, 4, target=9.0, **place)
    plan = partition_blocks(matrix, 4, target=target, **place)
    assert before.imbalance > 1.4
    assert plan.imbalance <= target
    assert sum(plan.num_moved) < sum(partition_blocks(matrix, 4, method="paper").num_moved)


@pytest.mark.parametrize("kind", ["toeplitz", "clustered"])
@pytest.mark.parametrize("ring", [4, 8])
def test_a_hard_target_is_reached_from_home(kind: str, ring: int) -> None:
    """From runs of blocks: other placements would move 1 - 1 / ring of the blocks."""
    matrix = mask_of(kind, (8, 600, 600), 1).sum(axis=0)
    home = np.arange(600) * ring // 600
    plan = partition_blocks(
        matrix, ring, method="minimal_move", q_home=home, kv_home=home, target=1.005
    )
    assert plan.imbalance <= 1.005
    assert sum(plan.num_moved) < 0.5 * 1200


@pytest.mark.parametrize("price", [0.0, 1.0])
def test_ranks_swap_where_no_single_move_helps(price: float) -> None:
    """Rows of 5 and 3 on one rank, of 4 and 2 on the other."""
    matrix = np.multiply.outer([5, 3, 4, 2], [1, 1])
    plan = partition_blocks(
        matrix,
        2,
        method="minimal_move",
        q_home=[0, 0, 1, 1],
        prices=(price * (1 - np.eye(2)), np.full((2, 2), np.inf)),
        target=1.0,
    )
    assert plan.num_moved == (2, 0)
    assert plan.loads.tolist() == [14, 14]


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


@pytest.mark.parametrize("seed", range(12))
def test_moves_with_a_toll_are_worth_it(seed: int) -> None:
    """What they gain is more than they cost, and no turn of the ring would cost less."""
    random = np.random.default_rng(seed)
    ring = int(random.integers(2, 5))
    matrix = random.integers(0, 50, (18, 15)) * random.random((18, 1)).round(2)
    homes = random.integers(0, ring, 18), random.integers(0, ring, 15)
    prices = [random.integers(1, 4) * (1.0 - np.eye(ring)) for _ in range(2)]
    place: dict[str, Any] = {"q_home": homes[0], "kv_home": homes[1], "prices": prices}
    mean, ends = matrix.sum() / ring, []
    at_home = partition_blocks(matrix, ring, method="minimal_move", target=99.0, **place)
    assert at_home.num_moved == (0, 0)
    for toll, first in ((0.0, 0.0), (2.0, 0.0), (20.0, 0.0), (2.0, 30.0), (2.0, 1e9), (1e9, 0.0)):
        plan = partition_blocks(
            matrix, ring, method="minimal_move", target=1.0, toll=toll, first_toll=first, **place
        )

        def cost(turn: int, plan: Any = plan) -> float:
            q, kv = (plan.q_of + turn) % ring, (plan.kv_of + turn) % ring
            return prices[0][homes[0], q].sum() + prices[1][homes[1], kv].sum()

        assert cost(0) == min(cost(turn) for turn in range(ring))
        gain = (at_home.imbalance - plan.imbalance) * mean
        has_moved = sum(plan.num_moved) > 0
        assert gain >= toll * cost(0) + first * has_moved - 1e-6
        ends.append(plan.imbalance)
    assert ends[0] < at_home.imbalance == ends[4] == ends[5]


def test_keys_stay_where_they_must() -> None:
    matrix = clustered_mask((4, 64, 4), 0).sum(axis=0)
    stay = 1 - np.eye(4), np.full((4, 4), np.inf)
    home = np.arange(64) * 4 // 64
    plan = partition_blocks(
        matrix, 4, method="minimal_move", q_home=home, kv_home=np.arange(4), prices=stay
    )
    assert plan.kv_of.tolist() == [0, 1, 2, 3]
    assert plan.num_moved[0] > 0
    before = partition_blocks(
        matrix, 4, method="minimal_move", q_home=home, kv_home=np.arange(4), prices=stay, target=9.0
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


def test_moves_of_a_round_gain_at_least_half_of_the_best() -> None:
    gains = np.zeros((6, 6))
    gains[0, 1], gains[2, 3], gains[4, 5] = 10.0, 6.0, 4.0
    assert _disjoint(gains, np.array([0, 0, 2, 2, 4, 4])) == [(0, 1), (2, 3)]
    gains[2, 1] = 9.0  # rank 1 has got a block already
    assert _disjoint(gains, np.array([0, 0, 2, 2, 4, 4])) == [(0, 1), (2, 3)]
