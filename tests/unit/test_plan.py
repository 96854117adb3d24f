import dataclasses
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from bascule.errors import ConfigError, PlanError
from bascule.plan.costs import TransformerCost
from bascule.plan.limits import Limits, in_tokens
from bascule.plan.machine import Cluster
from bascule.plan.plan import Plan, plan_batch
from bascule.plan.step import plan_step
from bascule.plan.topology import Topology
from bascule.plan.topology_search import suggest_topology
from tests.helpers.simulation import assert_certificate, assert_sound, squares

COST = TransformerCost(3072, gamma=0.426)
PLANNERS = ["lpt", "knapsack"]

both_planners = pytest.mark.parametrize("planner", PLANNERS)


# What KnapFormer's code does not survive (its failure table), and every other edge of "legal".


@both_planners
@pytest.mark.parametrize(
    ("topology", "lens"),
    [
        pytest.param("g1n4", [[100], [200], [], []], id="1: a rank gets no chunk"),
        pytest.param("g1n4+g4n1", [[9000]] * 8, id="1: only long sequences"),
        pytest.param("g1n4", [[50, 60, 70, 80, 90], [], [100], []], id="4: nothing loaded"),
        pytest.param("g2n2", [[], [], [], [300]], id="4: one rank loads"),
        pytest.param("g1n4", [[0, 0], [0], [0], [0]], id="5: all lengths 0"),
        pytest.param("g1n4", [[], [], [], []], id="5: no sequences"),
        pytest.param("g2n1+g4n1", [[1], [], [], [1], [], []], id="6: shorter than every bag"),
        pytest.param("g8n2", [[3, 0, 5]] * 16, id="6: shorter than the bag"),
        pytest.param("g4n1", [[120], [100], [100], [100]], id="11: chunks of text only"),
        pytest.param("g1n3", [[0, 5, 0], [0], [7]], id="zero-length among others"),
        pytest.param("g1n6", [[10], [], [20], [], [], []], id="fewer sequences than ranks"),
        pytest.param("g1n2+g2n1", [[100_000], [10, 20], [30], [40]], id="one giant"),
        pytest.param("g2n4", [[256] * 4] * 8, id="all equal"),
        pytest.param("g1n1", [[3, 0, 4]], id="one rank"),
        pytest.param("g5n1", [[3, 1], [], [4], [11], [5]], id="one bag"),
        pytest.param("g1n1+g2n1", [[7, 8], [9], [], [10], [11, 12], [13]], id="two replicas"),
        pytest.param("g3n1+g1n2+g3n1", [[41]] * 8, id="sizes in any order"),
    ],
)
def test_every_legal_batch_has_a_plan(topology: str, lens: list[list[int]], planner: str) -> None:
    assert_sound(plan_batch(lens, topology, COST, planner=planner), lens, COST)


@both_planners
@pytest.mark.parametrize("topology", ["g1n2+g2n1+g4n1", "g1n8+g8n3"])
def test_row_2_equal_lengths_on_bags_of_different_size(topology: str, planner: str) -> None:
    num_ranks = Topology.parse(topology).num_ranks
    for length in [*range(1, 287), 4096, 16_384, 65_536]:
        lens = [[length]] * num_ranks
        plan = plan_batch(lens, topology, COST, planner=planner)
        assert_certificate(plan, COST)
        if length % 41 == 2:  # 207 is the example of the table
            assert_sound(plan, lens, COST)


def test_row_12_a_plan_cannot_change() -> None:
    lens = [[100, 200], [300], [40], [50]]
    plan = plan_batch(lens, "g1n2+g2n1", COST)
    for name in ("source_counts", "seq_lens", "bag_of", "loads", "tokens", "source_ranks"):
        array = getattr(plan, name)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(AttributeError):
            setattr(plan, name, array)
    digest, local = plan.digest, plan.local(1)
    local.positions[:] = 0
    local.seq_ids[:] = 0
    route = plan.route(1)
    route.send_splits[:] = 0
    plan_batch([[7]] * 4, "g1n2+g2n1", COST)
    assert_sound(plan, lens, COST)
    assert plan.digest == digest


def test_the_digest_is_the_same_in_every_process() -> None:
    program = (
        "from bascule.plan.plan import plan_batch; from bascule.plan.costs import *;"
        "print(plan_batch([[7 * i % 50 + 1] * 3 for i in range(8)], 'g1n2+g2n1+g4n1',"
        "TransformerCost()).digest)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_an_idle_batch_is_even() -> None:
    for lens in ([[], [], [], []], [[0], [], [0, 0], []]):
        plan = plan_batch(lens, "g1n2+g2n1", COST)
        assert (plan.imbalance, plan.wir, plan.gap) == (1.0, 1.0, 0.0)
        assert (plan.makespan, plan.lower_bound, plan.moved_tokens) == (0.0, 0.0, 0)
        assert plan.tokens.tolist() == [0, 0, 0, 0]


def test_remainders_go_round_the_ranks_of_a_bag() -> None:
    plan = plan_batch([[5, 5], [5], [5], []], "g4n1", COST)
    assert plan.bag_lens(0).tolist() == [[2, 1, 1, 1], [1, 2, 1, 1], [1, 1, 2, 1], [1, 1, 1, 2]]
    assert plan.tokens.tolist() == [5, 5, 5, 5]
    assert plan.local(1).positions.tolist() == [2, 1, 2, 1, 1]
    assert plan.local(1).slots.tolist() == [0, 1, 1, 2, 3]


@both_planners
def test_a_rank_that_holds_more_tokens_than_cu_seqlens_can_count(planner: str) -> None:
    for lens in ([[2**31], [1]], [[1], [2**31]], [[2**30] * 4, []]):
        with pytest.raises(PlanError, match=r"rank \d would hold 2147483648 tokens.*2147483647"):
            plan_batch(lens, "g1n2", COST, planner=planner)
    assert plan_batch([[2**31 - 1], [1]], "g1n2", COST, planner=planner).local(1).seq_ids.size == 1
    shared = plan_batch([[2**31], [1]], "g2n1", COST, planner=planner)
    assert shared.tokens.tolist() == [2**30 + 1, 2**30]
    with pytest.raises(PlanError, match="microbatch 1: rank 0 would hold 2147483648 tokens"):
        plan_step([[[1], [1]], [[2**31], [1]]], "g1n2", COST, planner=planner)


# Illegal input: the rank, the place and the value are named.


@pytest.mark.parametrize(
    ("bad", "shown"),
    [
        (-5, "-5"),
        (3.5, "3.5"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (2**40 + 1, "1099511627777"),
        (2**70, "1180591620717411303424"),
        ("8", "'8'"),
        (None, "None"),
        (8j, "8j"),
    ],
)
def test_an_illegal_length_is_named(bad: object, shown: str) -> None:
    lens: list[list] = [[5, 6], [], [7, bad, 9], [10]]
    with pytest.raises(ConfigError) as error:
        plan_batch(lens, "g1n4", COST)
    assert str(error.value).startswith(f"rank 2, sequence 1: length {shown}")


def test_whole_numbers_of_other_types_are_legal() -> None:
    expected = plan_batch([[1, 2], [3]], "g1n2", COST).digest
    for kind in (np.uint8, np.int32, np.float32, np.float64):
        assert plan_batch([kind([1, 2]), (3.0,)], "g1n2", COST).digest == expected  # type: ignore[arg-type]


def test_carried_loads_steer_the_next_microbatch() -> None:
    plan = plan_batch([[10], [10]], "g1n2", squares, initial_loads=[300.0, 0.0])
    assert plan.bag_of.tolist() == [1, 1]
    assert plan.loads.tolist() == [300.0, 200.0]
    assert plan.lower_bound == plan.makespan == 300.0


# Plans as text.


def _plan() -> Plan:
    return plan_batch([[100, 200], [300], [], [50]], "g1n2+g2n1", COST)


def test_json_holds_the_whole_plan() -> None:
    lens = [[100, 200], [300], [], [50]]
    plan = Plan.from_json(plan_batch(lens, "g1n2+g2n1", COST).to_json())
    assert_sound(plan, lens, COST)
    data = json.loads(plan.to_json())
    assert data["version"] == 1
    assert data["seq_lens"] == lens
    assert data["digest"] == plan.digest
    replicas = plan_batch([[4], [5]], "g1n1", COST)
    assert Plan.from_json(replicas.to_json()).topology.num_replicas == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("version", None),
        ("topology", "g1n4junk"),
        ("topology", 5),
        ("topology", "g1n4"),
        ("num_replicas", 0),
        ("num_replicas", 1.0),
        ("num_replicas", "1"),
        ("seq_lens", [[100, 200], [300], []]),
        ("seq_lens", [[100, 201], [300], [], [50]]),
        ("seq_lens", [[100, 200], [300], [50], []]),
        ("seq_lens", [[100, -200], [300], [], [50]]),
        ("seq_lens", None),
        ("bag_of", [0, 0, 0, 0]),
        ("bag_of", [0, 1, 2]),
        ("bag_of", [0, 1, 2, 3]),
        ("bag_of", [0, 1, 2, -1]),
        ("bag_of", ["x"] * 4),
        ("bag_of", [[0], [1, 2], 3]),
        ("bag_of", [2**80] * 4),
        ("loads", [1.0, 1.0, 1.0]),
        ("loads", [math.nan] * 4),
        ("loads", ["x"] * 4),
        ("lower_bound", 1e9),
        ("lower_bound", -1.0),
        ("lower_bound", math.nan),
        ("lower_bound", "x"),
        ("digest", "0" * 32),
    ],
)
def test_a_damaged_field_is_refused(field: str, value: object) -> None:
    data = json.loads(_plan().to_json())
    for damaged in ({**data, field: value}, {k: v for k, v in data.items() if k != field}):
        with pytest.raises(ConfigError):
            Plan.from_json(json.dumps(damaged))


@pytest.mark.parametrize("text", ["", "[]", "null", "5", '"plan"', "{", "{}", "[" * 10_000, "\0"])
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="plan"):
        Plan.from_json(text)


def test_text_cut_short_is_refused() -> None:
    text = _plan().to_json()
    for end in range(0, len(text), 7):
        with pytest.raises(ConfigError):
            Plan.from_json(text[:end])


def test_limits_are_kept_or_refused() -> None:
    lens = [[500, 500], [100] * 10, [], [300]]
    plan = plan_batch(lens, "g1n2+g2n1", COST, limits=Limits(tokens=600, items=7))
    assert_sound(plan, lens, COST)
    assert plan.tokens.max() <= 600
    assert np.bincount(plan.bag_of, minlength=3).max() <= 7  # a rank has a part of each
    with pytest.raises(PlanError, match="tokens"):
        plan_batch(lens, "g1n2+g2n1", COST, limits=Limits(tokens=200))
    with pytest.raises(ConfigError, match="knapsack"):
        plan_batch(lens, "g1n4", COST, planner="knapsack", limits=Limits(tokens=600))


def test_memory_is_a_limit_in_tokens() -> None:
    lens = [[500, 500], [100] * 10, [], [300]]
    cost = TransformerCost(64, bytes_per_token=1000.0)
    by_bytes = plan_batch(lens, "g1n2+g2n1", cost, limits=Limits(num_bytes=600_999))
    plain = TransformerCost(64)
    assert by_bytes == plan_batch(lens, "g1n2+g2n1", plain, limits=Limits(tokens=600))
    assert by_bytes.tokens.max() <= 600
    both = plan_batch(lens, "g1n4", cost, limits=Limits(tokens=700, num_bytes=620_000))
    assert both.tokens.max() <= 620
    tighter = Limits(tokens=600, items=7, num_bytes=620_000)
    assert in_tokens(tighter, cost, None) == Limits(tokens=600, items=7)
    assert in_tokens(Limits(items=7, num_bytes=620_999), cost, None) == Limits(tokens=620, items=7)
    with pytest.raises(ConfigError, match="bytes_per_token"):
        plan_batch(lens, "g1n4", COST, limits=Limits(num_bytes=600_000))
    with pytest.raises(ConfigError, match="hold no token"):
        plan_batch(lens, "g1n4", cost, limits=Limits(num_bytes=999))
    with pytest.raises(PlanError, match="500 tokens miss"):
        plan_batch(lens, "g1n4", cost, limits=Limits(num_bytes=499_999))


def test_the_memory_of_a_cluster_is_a_limit() -> None:
    lens = [[500, 500], [100] * 10, [], [300]]
    cluster = Cluster(1, 4, 1e12, 600_000.0, 1e11, 1e10, 0.0)
    cost = TransformerCost(64, gamma=1000.0, bytes_per_token=1000.0)
    assert plan_batch(lens, "g1n2+g2n1", cost, cluster=cluster).tokens.max() <= 600
    free = plan_batch(lens, "g1n2+g2n1", TransformerCost(64, gamma=1000.0), cluster=cluster)
    assert free.tokens.max() > 600
    more = Limits(num_bytes=10**7)  # a limit that is given goes before the cluster's memory
    assert plan_batch(lens, "g1n2+g2n1", cost, cluster=cluster, limits=more) == free
    tight = dataclasses.replace(cluster, memory_bytes=5.8e5)
    assert plan_batch(lens, "auto", cost, cluster=tight).tokens.max() <= 580
    ranking = suggest_topology([lens], cost, tight)
    # Whole sequences leave 80 tokens of each rank empty: 4 * 500 tokens hold too few.
    assert "g1n4" not in [row.spec for row in ranking.rows]
    assert "g1n4" in [row.spec for row in suggest_topology([lens], cost, cluster).rows]


def test_what_a_plan_was_made_from_may_change() -> None:
    lens, carried = np.array([5, 9]), np.array([1.0, 2.0])
    plan = plan_batch([lens, [6, 7]], "g1n2", COST, initial_loads=carried)
    before = plan.to_json()
    lens[:], carried[:] = 99, 99.0
    assert plan.to_json() == before and plan == plan_batch(
        [[5, 9], [6, 7]], "g1n2", COST, initial_loads=[1, 2]
    )


def test_settings_at_the_end_of_their_range_still_plan() -> None:
    tiny = TransformerCost(64, bytes_per_token=1e-30)
    limits = Limits(tokens=2**53, num_bytes=2**53, items=2**53)
    plan = plan_batch([[5, 9], [6, 7]], "g2n1", tiny, limits=limits, locality_tolerance=1e30)
    assert plan.loads == pytest.approx([tiny([5, 6, 7, 9]).sum() / 2] * 2)
    wide = [[5], [], [5], []]
    assert plan_batch(wide, "g2n2", COST, limits=Limits(tokens=2**53)).bag_of.tolist() == [0, 1]
    largest = TransformerCost(2**31, gamma=1e30, num_layers=2**31, seconds_per_unit=1e30)
    assert np.isfinite(largest([2**40])).all() and np.isfinite(largest.seconds([2**40])).all()
    slow = Cluster(1, 2, 1e-30, 1e-30, 1e-30, 1e-30, 1e30)
    assert np.isfinite(plan_batch([[2**20], []], "g2n1", COST, cluster=slow).loads).all()
