"""All microbatches of a step at once, against brute force."""

import itertools
from typing import Any

import numpy as np
import pytest

from bascule.errors import ConfigError, PlanError
from bascule.plan.costs import TransformerCost
from bascule.plan.limits import Limits
from bascule.plan.machine import Cluster
from bascule.plan.step import Sync, plan_step, step_makespan
from tests.helpers.simulation import assert_sound, squares

SYNCS: list[Sync] = ["microbatch", "step"]


def tokens(seq_lens: Any) -> np.ndarray:
    return np.asarray(seq_lens, dtype=np.float64)


def random_step(seed: int, num_microbatches: int, num_ranks: int, most: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(1, 60, rng.integers(0, most)).tolist() for _ in range(num_ranks)]
        for _ in range(num_microbatches)
    ]


def all_loads(microbatch: list[list[int]], num_ranks: int) -> np.ndarray:
    """Loads of the ranks under every assignment of a microbatch's sequences."""
    lens = [length for rank in microbatch for length in rank]
    choices = itertools.product(range(num_ranks), repeat=len(lens))
    return np.array(
        [np.bincount(c, lens, num_ranks) if lens else np.zeros(num_ranks) for c in choices]
    )


@pytest.mark.parametrize("seed", range(15))
def test_the_best_of_all_assignments(seed: int) -> None:
    step = random_step(seed, 2, 2, 4)
    first, second = (all_loads(microbatch, 2) for microbatch in step)
    best = {
        "microbatch": float(first.max(axis=1).min() + second.max(axis=1).min()),
        "step": float((first[:, None] + second).max(axis=2).min()),
    }
    for sync in SYNCS:
        plans = plan_step(step, "g1n2", tokens, sync=sync)
        assert best[sync] <= step_makespan(plans, sync=sync) <= best[sync] * 1.06


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("spec", ["g1n4", "g1n2+g2n1", "g4n1"])
def test_every_plan_is_sound_and_of_its_microbatch(spec: str, sync: Sync) -> None:
    step = random_step(7, 3, 4, 5)
    plans = plan_step(step, spec, squares, sync=sync)
    assert len(plans) == 3
    for microbatch, plan in zip(step, plans, strict=True):
        assert_sound(plan, microbatch, squares)


def test_a_giant_in_each_microbatch() -> None:
    """Ranks that meet once a step share out the giants; on its own, each microbatch is as slow."""
    step = [[[90], [10, 10], [10], []] for _ in range(4)]
    plans = plan_step(step, "g1n4", tokens, sync="step")
    assert step_makespan(plans, sync="step") == 120.0
    assert step_makespan(plans, sync="microbatch") >= 360.0
    assert step_makespan(plan_step(step, "g1n4", tokens), sync="microbatch") == 360.0


@pytest.mark.parametrize("seed", range(3))
def test_planning_for_the_wrong_sync_costs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    step: Any = rng.lognormal(np.log(2048), 1.2, (4, 32, 4)).astype(int).tolist()
    micro = plan_step(step, "g1n32", tokens, sync="microbatch")
    joint = plan_step(step, "g1n32", tokens, sync="step")
    for sync, right, wrong in zip(SYNCS, (micro, joint), (joint, micro), strict=True):
        assert step_makespan(right, sync=sync) <= step_makespan(wrong, sync=sync)
    mean = sum(plan.loads.sum() for plan in joint) / 32
    longest = max(plan.seq_lens.max() for plan in joint)
    assert step_makespan(joint, sync="step") <= max(mean, longest) * 1.1


def test_limits_hold_in_each_microbatch() -> None:
    step = [[[50, 50], [20]], [[30, 30], [40]]]
    for sync in SYNCS:
        for plan in plan_step(step, "g1n2", tokens, sync=sync, limits=Limits(tokens=70)):
            assert plan.tokens.max() <= 70
    with pytest.raises(PlanError, match=r"microbatch 1: rank 1, sequence 0: 80 tokens"):
        plan_step([[[50], [20]], [[30], [80]]], "g1n2", tokens, limits=Limits(tokens=70))


@pytest.mark.parametrize("sync", SYNCS)
def test_automatic_topologies(sync: Sync) -> None:
    cluster = Cluster(1, 4, 4e14, 8e10, 1.5e11, 2.5e10, 1e-5)
    cost = TransformerCost(1024, num_layers=4)
    step = [[[500] * 4] * 4, [[60_000], [500], [500], [500]]]
    plans = plan_step(step, "auto", cost, sync=sync, cluster=cluster)
    assert str(plans[0].topology) == "g1n4"
    assert plans[1].topology.bag_sizes.max() > 1


def test_edges_and_errors() -> None:
    assert plan_step([], "g1n2", tokens) == ()
    assert step_makespan((), sync="step") == 0.0
    empty: list[list[int]] = [[], []]
    assert step_makespan(plan_step([empty, empty], "g1n2", tokens, sync="step"), sync="step") == 0
    with pytest.raises(ConfigError, match="microbatch 1: rank 0, sequence 0: length -1"):
        plan_step([[[1], [2]], [[-1], [2]]], "g1n2", tokens)
    with pytest.raises(ConfigError, match="same world"):
        plan_step([[[1], [2]], [[1]]], "g1n1", tokens)
    with pytest.raises(ConfigError, match='"microbatch" or "step"'):
        plan_step([], "g1n2", tokens, sync="never")  # pyright: ignore[reportArgumentType]


def test_a_bound_is_that_of_the_microbatch_alone() -> None:
    """Planned on top of others a plan may be later, but its bound stays what it is alone."""
    step = random_step(3, 3, 4, 5)
    for plan, alone in zip(
        plan_step(step, "g1n4", tokens, sync="step"), plan_step(step, "g1n4", tokens), strict=True
    ):
        assert plan.lower_bound == alone.lower_bound <= alone.makespan <= plan.makespan
    late = plan_step([[[90], [10, 10], [10], []]] * 4, "g1n4", tokens, sync="step")
    assert [plan.lower_bound for plan in late] == [90.0] * 4
