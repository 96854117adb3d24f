"""Plans for ranks of unlike speed."""

from typing import Any

import numpy as np
import pytest

from bascule import ConfigError, TransformerCost, plan_batch
from bascule.costs import PolynomialCost
from bascule.plan import Topology, plan_step
from bascule.plan.machine import Cluster
from bascule.plan.plan import Plan
from tests.helpers.simulation import assert_delivery

COST = TransformerCost(512)
LENS = [[900, 800, 700, 100], [650, 640, 500], [333, 222, 111, 90, 80], [1000, 20]]


def test_a_slow_rank_gets_less() -> None:
    speeds = [1.0, 1.0, 0.5, 1.0]
    plan = plan_batch(LENS, "g1n4", COST, speeds=speeds)
    costs = COST(plan.seq_lens)
    work = np.bincount(plan.bag_of, costs, 4)
    np.testing.assert_allclose(plan.loads, work / speeds, rtol=1e-12)
    assert work[2] < 0.7 * work[[0, 1, 3]].mean()
    assert plan.makespan <= 1.1 * costs.sum() / 3.5
    assert (
        plan.makespan < plan_batch(LENS, "g1n4", COST).makespan * 2 * 0.75
    )  # as if all were alike
    assert plan.lower_bound >= costs.sum() / 3.5 * (1 - 1e-9)
    assert plan.unbalanced_loads(COST)[2] == pytest.approx(2 * COST(LENS[2]).sum())
    assert_delivery(plan)


def test_a_bag_is_as_fast_as_its_slowest_rank() -> None:
    plan = plan_batch(LENS, "g2n2", COST, speeds=[1, 0.5, 1, 1])
    work = np.bincount(plan.bag_of, COST(plan.seq_lens), 2)
    np.testing.assert_allclose(plan.loads, np.repeat(work / [1, 2], 2), rtol=1e-12)
    assert work[0] < 0.6 * work[1]


def test_speeds_count_in_whole_steps_clusters_and_json() -> None:
    speeds = (1.0, 0.25, 1.0, 1.0)
    for plan in plan_step([LENS, LENS[::-1]], "g1n4", COST, sync="step", speeds=speeds):
        assert plan.speeds is not None
        assert plan.speeds.tolist() == list(speeds)
        assert Plan.from_json(plan.to_json()).unbalanced_loads(COST).tolist() == (
            plan.unbalanced_loads(COST).tolist()
        )
    cluster = Cluster(1, 4, 1e12, 1e12, 1e11, 1e10, 1e-6)
    auto = plan_batch(LENS, "auto", COST, cluster=cluster, speeds=speeds)
    best = min(
        plan_batch(LENS, spec, COST, cluster=cluster, speeds=speeds).makespan
        for spec in ("g1n4", "g2n2", "g4n1")
    )
    assert auto.makespan <= 1.05 * best


def test_even_speeds_change_nothing() -> None:
    for topology in ("g1n4", "g2n1+g1n2"):
        assert plan_batch(LENS, topology, COST, speeds=[1] * 4) == plan_batch(LENS, topology, COST)
    assert Topology.parse("g1n4").num_ranks == 4


@pytest.mark.parametrize("speeds", [[1, 1], [1, 1, 1, 0], [1, 1, 1, -1], [1, 1, 1, float("nan")]])
def test_illegal_speeds_are_refused(speeds: Any) -> None:
    with pytest.raises(ConfigError, match="speeds"):
        plan_batch(LENS, "g1n4", PolynomialCost(1e-9, 1e-6, 0.0), speeds=speeds)
