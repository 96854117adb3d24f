"""Seconds by hand: compute, wires and launches of a sequence in a bag."""

import numpy as np
import pytest

from bascule.errors import ConfigError
from bascule.plan.costs import TransformerCost
from bascule.plan.machine import Cluster
from bascule.plan.plan import plan_batch
from bascule.plan.topology import Topology

MACHINE = {
    "num_nodes": 2,
    "ranks_per_node": 4,
    "flops_per_s": 1e12,
    "memory_bytes": 80e9,
    "intra_bytes_per_s": 1e6,
    "inter_bytes_per_s": 1e5,
    "latency_s": 0.25,
}
CLUSTER = Cluster(**MACHINE)  # pyright: ignore[reportArgumentType]
WIDTH, LAYERS, TOKENS = 100, 3, 1000
COST = TransformerCost(WIDTH, num_layers=LAYERS)
COMPUTE_S = LAYERS * (24 * TOKENS * WIDTH**2 + 4 * TOKENS**2 * WIDTH) / 1e12
BYTES = LAYERS * TOKENS * 4 * WIDTH * 2  # q, k, v and out of the whole sequence, in bf16


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_nodes", 0),
        ("num_nodes", True),
        ("ranks_per_node", 1.5),
        ("flops_per_s", 0.0),
        ("memory_bytes", float("nan")),
        ("intra_bytes_per_s", -1.0),
        ("inter_bytes_per_s", float("inf")),
        ("latency_s", -1e-9),
    ],
)
def test_an_illegal_value_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"Cluster.{name}="):
        Cluster(**{**MACHINE, name: value})  # pyright: ignore[reportArgumentType]


def test_compute_is_measured_or_converted_or_seconds_already() -> None:
    assert CLUSTER.compute_seconds(COST, [TOKENS]) == pytest.approx([COMPUTE_S])
    measured = TransformerCost(WIDTH, num_layers=LAYERS, seconds_per_unit=7.0)
    assert CLUSTER.compute_seconds(measured, [TOKENS]) == pytest.approx([COMPUTE_S * 7])
    assert CLUSTER.compute_seconds(np.sqrt, [4.0]) == pytest.approx([2.0])


def test_a_bag_in_a_node_sends_what_is_not_its_own() -> None:
    # Each of 4 ranks holds a quarter of the sequence and sends three quarters of it.
    expected = COMPUTE_S / 4 + BYTES / 4 * 3 / 4 / 1e6
    assert CLUSTER.bag_seconds(COST, [TOKENS], 4) == pytest.approx([expected])
    assert CLUSTER.bag_seconds(COST, [TOKENS], 1) == pytest.approx([COMPUTE_S])


def test_a_bag_across_nodes_uses_both_wires() -> None:
    # Each of 8 ranks holds an eighth, sends 3 / 8 of it in its node and 4 / 8 to the other.
    expected = COMPUTE_S / 8 + BYTES / 8 * (3 / 8 / 1e6 + 4 / 8 / 1e5)
    assert CLUSTER.bag_seconds(COST, [TOKENS], 8) == pytest.approx([expected])


def test_nodes_of_bags_that_are_not_aligned() -> None:
    nodes, local = CLUSTER.nodes_of(Topology.parse("g1n3+g2n1+g3n1"))
    assert nodes.tolist() == [0, 0, 0, 0, 1]
    assert local.tolist() == [1, 1, 1, 1, 3]
    nodes, local = CLUSTER.nodes_of(Topology.parse("g1n2+g3n2"))  # ranks 2, 3 and 4
    assert nodes.tolist() == [0, 0, 0, 1]
    assert local.tolist() == [1, 1, 1, 3]


def test_loads_are_seconds_with_launches() -> None:
    lens = [[TOKENS], [], [], [], [], [], [], []]
    plan = plan_batch(lens, "g4n2", COST, cluster=CLUSTER)
    launches = 2 * LAYERS * 0.25
    busy = launches + COMPUTE_S / 4 + BYTES / 4 * 3 / 4 / 1e6
    assert plan.loads == pytest.approx([busy] * 4 + [launches] * 4)
    assert plan.gap == 0.0
    single = plan_batch(lens, "g1n8", COST, cluster=CLUSTER)
    assert single.makespan == pytest.approx(COMPUTE_S)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"8 ranks, not 4"):
        plan_batch([[1]] * 4, "g1n4", COST, cluster=CLUSTER)
    with pytest.raises(ConfigError, match="width of the model"):
        plan_batch([[1]] * 8, "g4n2", np.sqrt, cluster=CLUSTER)
    assert plan_batch([[4]] * 8, "g1n8", np.sqrt, cluster=CLUSTER).makespan == 2.0
