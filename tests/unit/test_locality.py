"""Tokens that stay where they were loaded, against every relabelling, at the same loads."""

import itertools

import numpy as np
import pytest

from bascule.plan import locality
from bascule.plan.costs import PolynomialCost, TransformerCost
from bascule.plan.limits import Limits
from bascule.plan.machine import Cluster
from bascule.plan.plan import Plan, plan_batch
from bascule.plan.prices import RankState, price
from bascule.plan.sequences import Batch
from bascule.plan.solver import homes
from bascule.plan.solver.homes import relabel
from bascule.plan.solver.solve import assign
from bascule.plan.topology import Topology

COST = TransformerCost(64)


def random_batch(seed: int, num_ranks: int, most: int = 5) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 3000, rng.integers(1, most)).tolist() for _ in range(num_ranks)]


def leaving_node(plan: Plan, per_node: int) -> int:
    """Tokens computed on another node than they were loaded on, counted token by token."""
    total = 0
    for rank in range(plan.num_ranks):
        local = plan.local(rank)
        away = plan.source_ranks[local.seq_ids] // per_node != rank // per_node
        total += int(local.chunk_lens[away].sum())
    return total


@pytest.mark.parametrize("seed", range(10))
def test_relabelling_is_the_best_of_all_and_changes_no_load(seed: int) -> None:
    batch = random_batch(seed, 6)
    lens = np.concatenate(batch)
    ranks = np.repeat(np.arange(6), [len(rank) for rank in batch])
    bare = assign(COST(lens), 6)
    plan = plan_batch(batch, "g1n6", COST)
    assert np.sort(plan.loads) == pytest.approx(np.sort(bare.loads), rel=1e-12)
    fewest = min(
        int(lens[np.array(label)[bare.bin_of] != ranks].sum())
        for label in itertools.permutations(range(6))
    )
    assert plan.moved_tokens == fewest


@pytest.mark.parametrize("seed", range(5))
def test_many_bags_are_matched_nearly_as_well(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch(seed, 24)
    exact = plan_batch(batch, "g1n24", COST)
    monkeypatch.setattr(homes, "_MAX_EXACT", 1)
    greedy = plan_batch(batch, "g1n24", COST)
    assert np.sort(greedy.loads) == pytest.approx(np.sort(exact.loads), rel=1e-12)
    total = int(exact.seq_lens.sum())
    assert total - greedy.moved_tokens >= (total - exact.moved_tokens) / 2


@pytest.mark.parametrize("spec", ["g1n4", "g2n2", "g4n1", "g1n2+g2n1"])
@pytest.mark.parametrize("tolerance", [None, 0.0, 0.01])
def test_nothing_moves_between_bags_where_nothing_is_to_gain(
    spec: str, tolerance: float | None
) -> None:
    size = {"g1n4": 1, "g2n2": 2, "g4n1": 4, "g1n2+g2n1": 1}[spec]
    batch = [[1000, 500], [500, 1000], [1000, 500], [500, 1000]]
    plan = plan_batch(batch, spec, COST, locality_tolerance=tolerance)
    if spec != "g4n1":
        assert plan.bag_of.tolist() == plan.topology.bag_of_rank[plan.source_ranks].tolist()
    if size == 1:
        assert plan.moved_tokens <= 1500


def test_a_giant_that_binds_leaves_the_rest_even_or_at_home() -> None:
    batch = [[5000], [300, 200], [100], [400]]
    even = plan_batch(batch, "g1n4", COST)
    home = plan_batch(batch, "g1n4", COST, locality_tolerance=0.0)
    assert home.makespan == even.makespan and even.gap == 0.0
    assert home.moved_tokens == 0 < even.moved_tokens <= 200
    assert np.sort(even.tokens).tolist() == [300, 300, 400, 5000]
    assert even.wir < home.wir


@pytest.mark.parametrize("seed", range(20))
def test_a_giant_leaves_the_rest_as_even_as_longest_first_makes_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rest = [rng.integers(10, 400, rng.integers(0, 6)).tolist() for _ in range(4)]
    alone = plan_batch(rest, "g1n4", COST)
    plan = plan_batch([[60_000], *rest], "g1n5", COST)
    others = np.sort(plan.loads)[:-1]
    assert plan.makespan == pytest.approx(COST(np.array([60_000]))[0])
    assert others.max() <= alone.makespan * (4 / 3)  # longest first, Graham 1969
    assert plan.binding is not None and plan.binding.seq_id == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_tolerance_is_kept_and_saves_tokens(seed: int) -> None:
    batch = random_batch(seed, 8)
    best = plan_batch(batch, "g1n8", COST)
    near = plan_batch(batch, "g1n8", COST, locality_tolerance=0.05)
    assert near.makespan <= best.makespan * (1.05 + 2e-4)
    assert near.moved_tokens <= best.moved_tokens


@pytest.mark.parametrize("seed", range(5))
def test_nodes_count_before_ranks(seed: int) -> None:
    cluster = Cluster(2, 3, 1e12, 1e9, 1e9, 1e8, 0.0)
    batch = random_batch(seed, 6)
    topology = Topology.parse("g1n6")
    lens = np.concatenate(batch)
    counts = np.array([len(rank) for rank in batch])
    ranks = np.repeat(np.arange(6), counts)
    prices = price(Batch(counts, lens), topology, COST, cluster, RankState.of(cluster.num_ranks))
    source = locality.Source(ranks, lens, topology, cluster)
    bare = assign(prices.work[0], 6).bin_of
    wanted = source.homes(np.inf)
    found = relabel(prices.problem(None), bare, wanted)

    def away(bag_of: np.ndarray) -> tuple[int, int]:
        left = lens[bag_of // 3 != ranks // 3].sum()
        return int(left), int(lens[bag_of != ranks].sum())

    every = (np.array(label)[bare] for label in itertools.permutations(range(6)))
    assert away(found) == min(map(away, every))
    tokens, ties = away(found)
    assert wanted.total_away(found) == pytest.approx(tokens + ties / (2.0 * lens.sum() + 1.0))


def test_the_node_tolerance_holds_by_default() -> None:
    cluster = Cluster(2, 4, 1e12, 1e9, 1e9, 1e8, 0.0)
    left = np.zeros(2, dtype=np.int64)
    for seed in range(5):
        batch = random_batch(seed, 8, most=8)
        best = plan_batch(batch, "g4n2", COST, cluster=cluster, locality_tolerance=0.0)
        plan = plan_batch(batch, "g4n2", COST, cluster=cluster)
        assert plan.makespan <= best.makespan * (1.005 + 2e-4)
        left += leaving_node(plan, 4), leaving_node(best, 4)
    assert left[0] < left[1]


@pytest.mark.parametrize("spec", ["g1n8+g8n1", "g2n4+g8n1", "g1n4+g4n3"])
def test_a_tolerance_saves_tokens_on_bags_of_several_kinds(spec: str) -> None:
    cluster = Cluster(2, 8, 1e12, 1e9, 1e9, 1e8, 0.0)
    saved = np.zeros(2)
    for seed in range(5):
        batch = random_batch(seed, 16, most=16)
        best = plan_batch(batch, spec, COST, cluster=cluster, locality_tolerance=0.0)
        near = plan_batch(batch, spec, COST, cluster=cluster, locality_tolerance=0.02)
        assert near.makespan <= best.makespan * (1.02 + 2e-4)
        saved += leaving_node(best, 8) - leaving_node(near, 8), best.moved_tokens
    assert saved[0] > 0.1 * saved[1]


def test_limits_hold_at_home_too() -> None:
    batch = [[900, 900], [100], [100], [100]]
    limits = Limits(tokens=1000)
    for tolerance in (None, 10.0):
        plan = plan_batch(batch, "g1n4", COST, limits=limits, locality_tolerance=tolerance)
        assert plan.tokens.max() <= 1000


def test_a_batch_does_not_stay_as_loaded_above_a_limit_of_items() -> None:
    """Rank 0 has three short sequences, which take as long as the one of rank 1."""
    cost, batch = PolynomialCost(0.0, 1.0, 0.0), [[2, 2, 2], [6]]
    assert plan_batch(batch, "g1n2", cost).moved_tokens == 0
    assert plan_batch(batch, "g1n2", cost, limits=Limits(items=3)).moved_tokens == 0
    for tolerance in (None, 0.5):
        plan = plan_batch(batch, "g1n2", cost, limits=Limits(items=2), locality_tolerance=tolerance)
        assert np.bincount(plan.bag_of).tolist() == [2, 2]


@pytest.mark.parametrize("seed", range(3))
def test_long_and_short_sequences_stay_at_home_alike(seed: int) -> None:
    """A few long ones decide on the time of a rank; they stay, and short ones even it out."""
    rng = np.random.default_rng(seed)
    batch = np.maximum(rng.lognormal(6.0, 1.0, (16, 32)), 1).astype(int).tolist()
    best = plan_batch(batch, "g1n16", COST)
    near = plan_batch(batch, "g1n16", COST, locality_tolerance=0.01)
    assert near.makespan <= best.makespan * (1.01 + 2e-4)
    assert near.moved_tokens < best.moved_tokens / 5


def test_tokens_away_of_each_sequence() -> None:
    """Those that leave their node count; of others, those that leave their rank."""
    cluster = Cluster(2, 2, 1e12, 1e9, 1e9, 1e8, 0.0)
    topology = Topology.parse("g1n2+g2n1")
    ranks, lens = np.array([0, 0, 0, 2, 2]), np.array([10, 20, 30, 40, 50])
    source = locality.Source(ranks, lens, topology, cluster)
    away = source.homes(np.inf).away(np.arange(5), np.array([0, 1, 2, 2, 0]))
    assert np.floor(away).tolist() == [0.0, 0.0, 30.0, 0.0, 50.0]
    assert away[0] == 0.0 < away[3] == away[1] < 0.5  # half of 40 tokens, and 20 tokens
