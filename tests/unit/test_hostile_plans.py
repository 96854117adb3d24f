"""Planning under hostile use: an answer that is right, or one sentence; never another exception.

Other exceptions of one rank would leave the other ranks waiting for it.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# What the types forbid is what is tried here.

import json
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from bascule.errors import PlanError
from bascule.plan.checks import shown
from bascule.plan.costs import PolynomialCost, TransformerCost, describe_cost
from bascule.plan.fits import fit_iterations, fit_latency
from bascule.plan.limits import Limits
from bascule.plan.machine import Cluster
from bascule.plan.plan import Plan, plan_batch
from bascule.plan.sequences import check_lengths
from bascule.plan.solver.solve import assign
from bascule.plan.step import plan_step, step_makespan
from bascule.plan.topology import Topology
from bascule.plan.topology_search import suggest_topology
from tests.helpers.refusals import NO_NUMBERS, NO_VECTORS, UNREADABLE, refusal, refused, title

COST = TransformerCost(64)
BATCH = [[5, 9], [6, 7]]
MACHINE: dict[str, Any] = {
    "num_nodes": 1,
    "ranks_per_node": 2,
    "flops_per_s": 1e12,
    "memory_bytes": 1e9,
    "intra_bytes_per_s": 1e9,
    "inter_bytes_per_s": 1e9,
    "latency_s": 1e-6,
}
NODE = Cluster(**MACHINE)
SINGLES = Cluster(**{**MACHINE, "num_nodes": 2, "ranks_per_node": 1})  # no wires in a bag
ITERATIONS = [[[5], [6]], [[7], [8]], [[9], [10]], [[3], [4]]]


def with_cost(cost: Any) -> list[Callable[[], object]]:
    """Every way in which planning calls a cost model."""
    return [
        lambda: plan_batch(BATCH, "g1n2", cost),
        lambda: plan_batch(BATCH, "g1n2", cost, cluster=SINGLES),
        lambda: plan_batch(BATCH, "auto", cost, cluster=SINGLES),
        lambda: plan_step([BATCH, BATCH], "g1n2", cost, sync="step"),
        lambda: plan_batch(BATCH, "g1n2", COST).unbalanced_loads(cost),
    ]


# Lengths


@pytest.mark.parametrize("lens", NO_VECTORS, ids=title)
def test_lengths_that_are_none(lens: Any) -> None:
    told = refusal(lambda: plan_batch([[3], lens], "g1n2", COST))
    assert told.startswith("rank 1")
    refused(
        lambda: plan_step([BATCH, [[3], lens]], "g1n2", COST),
        lambda: suggest_topology([[[3], lens]], COST, NODE),
        lambda: fit_iterations([[[3], lens]] * 4, [1.0, 2.0, 3.0, 4.0]),
    )


def test_the_tensor_that_cannot_be_read_is_named_with_the_way_out() -> None:
    for lens in UNREADABLE[:4]:
        told = refusal(lambda lens=lens: check_lengths([[3], lens], 2))
        assert "rank 1: lengths of type Tensor cannot be read" in told and ".tolist()" in told
    ones = torch.ones((), dtype=torch.bfloat16)
    assert "rank 0, sequence 1: length tensor" in refusal(lambda: check_lengths([[3, ones]], 1))


@pytest.mark.parametrize(
    "length",
    [10**400, 10**5000, 2**63, -(2**63), 2**64 - 1, 1e30, math.nan, "8", True, None, 8j],
    ids=title,
)
def test_a_length_beyond_every_range_is_named(length: Any) -> None:
    for lens in ([4, length], (4, length), np.array([4, length], object)):
        told = refusal(lambda lens=lens: plan_batch([[3], lens], "g1n2", COST))
        assert told.startswith("rank 1, sequence 1: length ")


def test_lengths_of_every_kind_that_means_whole_numbers() -> None:
    expected = plan_batch(BATCH, "g1n2", COST).digest
    read_only = np.array([5, 9])
    read_only.flags.writeable = False
    for first in (
        torch.tensor([5, 9]),
        torch.tensor([5.0, 9.0], dtype=torch.float16),
        np.array([5, 0, 9, 0])[::2],
        np.array([5, 9], object),
        [np.int8(5), Fraction(9)],
        [torch.tensor(5), torch.tensor(9)],
        read_only,
    ):
        assert plan_batch([first, [6, 7]], "g1n2", COST).digest == expected
    assert plan_batch(np.array(BATCH), "g1n2", COST).digest == expected
    assert plan_batch(torch.tensor(BATCH), "g1n2", COST).digest == expected


@pytest.mark.parametrize(
    "batch", [None, 5, "56", b"56", {0: [5], 1: [6]}, {(5,), (6,)}, np.array(5), [], object()]
)
def test_a_batch_that_is_no_list_of_lists(batch: Any) -> None:
    refused(
        lambda: plan_batch(batch, "g1n2", COST),
        lambda: plan_batch(batch, "auto", COST, cluster=NODE),
        lambda: plan_step([batch], "g1n2", COST),
        lambda: suggest_topology([batch], COST, NODE),
        lambda: fit_iterations([batch] * 4, [1.0, 2.0, 3.0, 4.0]),
    )
    refused(lambda: plan_batch((x for x in BATCH), "g1n2", COST))


@pytest.mark.parametrize("batches", [None, 5, "ab", {0: BATCH}, [None], np.array(5)])
def test_batches_that_are_no_list(batches: Any) -> None:
    refused(
        lambda: suggest_topology(batches, COST, NODE),
        lambda: plan_step(batches, "g1n2", COST),
        lambda: fit_iterations(batches, [1.0]),
        lambda: step_makespan(batches, sync="step"),
    )


def test_what_a_plan_was_made_from_may_change() -> None:
    lens, carried = np.array([5, 9]), np.array([1.0, 2.0])
    plan = plan_batch([lens, [6, 7]], "g1n2", COST, carried_loads=carried)
    before = plan.to_json()
    lens[:], carried[:] = 99, 99.0
    assert plan.to_json() == before and plan == plan_batch(
        BATCH, "g1n2", COST, carried_loads=[1, 2]
    )


# Topologies, planners, limits, clusters


@pytest.mark.parametrize(
    "spec",
    [
        None,
        2,
        [1, 2],
        b"g1n2",
        np.array(["g1n2"]),
        math.nan,
        Topology,
        "",
        "g1n２",
        "g1n2\n",
        "AUTO",
    ],
)
def test_a_topology_that_is_none(spec: Any) -> None:
    assert "topology" in refusal(lambda: Topology.parse(spec))
    assert "topology" in refusal(lambda: plan_batch(BATCH, spec, COST))
    assert Topology.parse(np.str_("g1n2")) == Topology.parse("g1n2")


def test_worlds_beyond_what_can_be_planned_for() -> None:
    for spec in ("g1n999999999", "g999999999n999999999", "g999999999r999999999n1", "g131073n1"):
        assert "131072" in refusal(lambda spec=spec: Topology.parse(spec))
    assert Topology.parse("g131072n1").num_ranks == 2**17
    for world in (2.0, "2", True, math.nan, 10**400, 10**5000, -(10**400)):
        refused(lambda world=world: Topology.parse("g1n1", world_size=world))
    for replicas in (10**12, 0, -1, True, 1.0, None):
        refused(lambda replicas=replicas: Topology(((1, 1),), replicas))
    for terms in ((), ((1, 2, 3),), 5, None, ((np.int64(1), 2),), ((True, 1),), "g1", ((1, 0),)):
        refused(lambda terms=terms: Topology(terms))
    for rings in (None, 2, (0,), (3,), (1, 1), (True,)):
        refused(lambda rings=rings: Topology(((2, 1),), 1, rings))
    listed: Any = [[1, 2]]
    assert Topology(listed).terms == ((1, 2),)  # a value, whatever it was made from
    refused(
        lambda: Cluster(**{**MACHINE, "num_nodes": 2**17}),
    )


@pytest.mark.parametrize("value", NO_NUMBERS, ids=title)
def test_settings_that_are_no_numbers_in_range(value: Any) -> None:
    for name in MACHINE:
        assert f"Cluster({name}=" in refusal(lambda name=name: Cluster(**{**MACHINE, name: value}))
    for name in ("d_model", "gamma", "num_layers"):
        refused(lambda name=name: TransformerCost(**{name: value}))
    refused(lambda: PolynomialCost(value, 1.0, 1.0))
    if value is not None:  # no limit
        for name in ("tokens", "items", "num_bytes"):
            refused(lambda name=name: Limits(**{name: value}))
        for name in ("seconds_per_unit", "bytes_per_token", "fit_error"):
            refused(lambda name=name: TransformerCost(**{name: value}))
        refused(
            lambda: plan_batch(BATCH, "g1n2", COST, home_tolerance=value),
            lambda: assign([1, 2], 2, tolerance=value),
        )
    refused(
        lambda: assign([1, 2], 2, home=[0, 1], home_tolerance=value),
        lambda: assign([1, 2], value),
        lambda: fit_latency([100, 200], [1, 2.1], value),
    )


def test_settings_of_the_wrong_type() -> None:
    wrong: Any
    for wrong in (5, "x", {}, [NODE], Cluster):
        assert "cluster is " in refusal(lambda w=wrong: plan_batch(BATCH, "g1n2", COST, cluster=w))
        assert "cluster is " in refusal(lambda w=wrong: suggest_topology([BATCH], COST, w))
    for wrong in (5, {"tokens": 5}, (5,)):
        assert "limits is " in refusal(lambda w=wrong: plan_batch(BATCH, "g1n2", COST, limits=w))
        assert "limits is " in refusal(lambda w=wrong: assign([1], 1, sizes=[1], limits=w))
    for wrong in (None, 5, ["lpt"], b"lpt", "LPT", object()):
        assert "planner" in refusal(lambda w=wrong: plan_batch(BATCH, "g1n2", COST, planner=w))
        assert "sync" in refusal(lambda w=wrong: plan_step([BATCH], "g1n2", COST, sync=w))
        assert "sync" in refusal(lambda w=wrong: step_makespan([], sync=w))


def test_settings_at_the_end_of_their_range_still_plan() -> None:
    tiny = TransformerCost(64, bytes_per_token=1e-30)
    limits = Limits(tokens=2**53, num_bytes=2**53, items=2**53)
    plan = plan_batch(BATCH, "g2n1", tiny, limits=limits, home_tolerance=1e30)
    assert plan.loads == pytest.approx([tiny([5, 6, 7, 9]).sum() / 2] * 2)
    wide = [[5], [], [5], []]
    assert plan_batch(wide, "g2n2", COST, limits=Limits(tokens=2**53)).bag_of.tolist() == [0, 1]
    largest = TransformerCost(2**31, gamma=1e30, num_layers=2**31, seconds_per_unit=1e30)
    assert np.isfinite(largest([2**40])).all() and np.isfinite(largest.seconds([2**40])).all()
    slow = Cluster(1, 2, *[1e-30] * 4, 1e30)
    assert np.isfinite(plan_batch([[2**20], []], "g2n1", COST, cluster=slow).loads).all()


# Costs


def test_cost_models_that_fail_or_give_nonsense() -> None:
    def fails(_: Any) -> Any:
        raise ZeroDivisionError("x")

    def in_place(lens: Any) -> Any:
        lens *= 2
        return lens

    nonsense: dict[str, Any] = {
        "raised ZeroDivisionError": fails,
        "raised ValueError": in_place,  # it would have changed the batch
        "function of token counts": None,
        "function": 5,
        "gave ()": lambda x: 1.0,
        "gave (1,)": lambda x: np.ones(1),
        "gave (4, 1)": lambda x: np.ones((len(x), 1)),
        "complex": lambda x: np.ones(len(x)) * 1j,
        "real numbers": lambda x: np.array([object()] * len(x)),
        "numbers": lambda x: np.array(["1"] * len(x)),
        "gave nan": lambda x: np.full(len(x), math.nan),
        "gave -1": lambda x: -np.ones(len(x)),
        "gave inf": lambda x: np.full(len(x), math.inf),
        "cost model gives": lambda x: {1: 2},
        "cost model": lambda x: (1.0 for _ in x),
        "bfloat16": lambda x: torch.ones(len(x), dtype=torch.bfloat16),
        "grad": lambda x: torch.ones(len(x), requires_grad=True),
        "not [1": lambda x: np.array([10**400] * len(x), object),
        "overflow": lambda x: np.full(len(x), 1e308),
    }
    for said, cost in nonsense.items():
        for call in with_cost(cost)[:-1]:
            told = refusal(call)
            assert said.lower() in told.lower() or "cost model" in told, (said, told)
        if said.startswith(("raised", "function", "complex", "real", "numbers")):
            refused(with_cost(cost)[-1], lambda cost=cost: describe_cost(cost))
    counts_flops: Any = TransformerCost(64).seconds
    assert "counts FLOPs" in refusal(lambda: plan_batch(BATCH, "g1n2", counts_flops))


def test_cost_models_of_every_kind_that_means_numbers() -> None:
    shared = np.ones(4)

    def same_array(lens: Any) -> Any:
        shared[:] = lens
        return shared

    kinds: list[Any] = [
        lambda x: [float(y) for y in x],
        lambda x: torch.as_tensor(np.array(x, float)),
        lambda x: np.asarray(x),
        lambda x: np.asarray(x, np.float32),
        same_array,
    ]
    for cost in kinds:
        for call in with_cost(cost)[:3]:
            plan: Any = call()
            assert sorted(plan.loads.tolist()) == [13.0, 14.0]
        assert plan_batch(BATCH, "g1n2", COST).unbalanced_loads(cost).tolist() == [14.0, 13.0]


@pytest.mark.parametrize("values", NO_VECTORS, ids=title)
def test_vectors_that_are_none(values: Any) -> None:
    limits = Limits(tokens=5)
    refused(
        lambda: assign(values, 2),
        lambda: assign([1, 2], 2, sizes=values, limits=limits),
        lambda: fit_latency(values, [1.0, 2.0], 64),
        lambda: fit_latency([100, 200], values, 64),
        lambda: fit_iterations(ITERATIONS, values),
    )
    if shown(values) != "None":
        refused(
            lambda: assign([1, 2], speeds=values),
            lambda: assign([1, 2], 2, carried_loads=values),
            lambda: assign([1, 2], 2, home=[-2, 0] if str(values) == "[-1, 1]" else values),
            lambda: assign([1, 2], 2, ranks_per_bin=values, sizes=[1, 1], limits=limits),
            lambda: plan_batch(BATCH, "g1n2", COST, carried_loads=values),
        )


def test_extreme_vectors() -> None:
    refused(
        lambda: assign([1e308] * 4, 2),
        lambda: assign([1, 2], speeds=[1e308, 1.0]),
        lambda: assign([1, 2], speeds=[5e-324, 1.0]),
        lambda: assign([1], 10**12),
        lambda: fit_latency([1e300, 2e300], [1, 2], 64),
        lambda: fit_latency([1, 2], [5e-324, 1e-320], 64),
        lambda: fit_iterations(ITERATIONS, [5e-324] * 4),
        lambda: fit_iterations(ITERATIONS, [1e308] * 4),
        lambda: fit_iterations([[[2**40] * 99, []]] * 4, [[1, 2], [3, 4], [5, 6], [math.inf, 1]]),
    )
    assert assign([5e-324] * 3, 2).makespan == 1e-323
    assert assign([1e-300, 1e300], 2).makespan == 1e300
    strided = assign(np.arange(10.0)[::3], 2)
    assert strided.makespan == 9.0 and not strided.loads.flags.writeable


# Plans from text

DATA = json.loads(plan_batch(BATCH, "g1n2", COST).to_json())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", True),
        ("version", 1.0),
        ("topology", None),
        ("topology", [1]),
        ("topology", "g1n999999999"),
        ("num_replicas", 10**12),
        ("num_replicas", True),
        ("seq_lens", [["5", 9], [6, 7]]),
        ("seq_lens", [[True, 9], [6, 7]]),
        ("seq_lens", {"0": [5, 9], "1": [6, 7]}),
        ("bag_of", [0.5, 1, 1, 0]),
        ("bag_of", ["0", "1", "1", "0"]),
        ("bag_of", [True, 0, 0, 1]),
        ("bag_of", [2**70, 0, 0, 1]),
        ("bag_of", None),
        ("loads", ["1", "2"]),
        ("loads", [-1, 5]),
        ("loads", [[1, 2]]),
        ("loads", None),
        ("loads", [10**400, 1]),
        ("lower_bound", "0.0"),
        ("lower_bound", None),
        ("lower_bound", 10**400),
        ("lower_bound", True),
        ("planner", None),
        ("planner", {}),
    ],
)
def test_a_field_that_another_program_wrote(field: str, value: object) -> None:
    told = refusal(lambda: Plan.from_json(json.dumps({**DATA, field: value})))
    assert "plan" in told


@pytest.mark.parametrize("text", [None, 5, b"\xff", "9" * 5000, "[" * 100_000, '{"version": 1}'])
def test_text_that_is_no_plan(text: Any) -> None:
    assert "plan" in refusal(lambda: Plan.from_json(text))
    assert Plan.from_json(json.dumps(DATA)) == plan_batch(BATCH, "g1n2", COST)


def test_ranks_of_a_plan() -> None:
    plan = plan_batch(BATCH, "g1n2", COST)
    for rank in (0.5, "0", None, True, math.nan, 10**400, np.array([0, 1])):
        refused(
            lambda rank=rank: plan.local(rank),
            lambda rank=rank: plan.route(rank),
            lambda rank=rank: plan.bag_lens(rank),
        )
    np.testing.assert_array_equal(plan.local(np.int64(1)).seq_ids, plan.local(1).seq_ids)


def test_a_limit_that_cannot_be_kept_is_another_error() -> None:
    with pytest.raises(PlanError, match="rank 0, sequence 1: 9 tokens"):
        plan_batch(BATCH, "g1n2", COST, limits=Limits(tokens=8))
