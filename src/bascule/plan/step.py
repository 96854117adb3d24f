"""Plans all microbatches of an optimiser step together.

Where ranks meet in every microbatch, the step takes the sum of the makespans, so each microbatch is
planned on its own. Where they meet once a step, the largest sum of a rank's loads counts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats
from bascule.checks import choice
from bascule.errors import ConfigError, PlanError
from bascule.machine.cluster import Cluster
from bascule.machine.costs import Cost
from bascule.plan.limits import Limits
from bascule.plan.plan import Plan, PlanSetup
from bascule.plan.prices import RankState, price
from bascule.plan.sequences import Batch, Sequences
from bascule.plan.topology import Topology

Sync = Literal["microbatch", "step"]

_MAX_ROUNDS = 3
_CLOSE = 1.0 + 1e-4


def plan_step(
    microbatches: Sequence[Sequence[npt.ArrayLike | Sequences]],
    topology: Topology | str,
    cost: Cost,
    *,
    sync: Sync = "microbatch",
    planner: str = "lpt",
    limits: Limits | None = None,
    speeds: npt.ArrayLike | None = None,
    cluster: Cluster | None = None,
    locality_tolerance: float | None = None,
) -> tuple[Plan, ...]:
    """Plan all microbatches of an optimiser step at once.

    Args:
        microbatches: Of each, what each source rank loaded, as for `plan_batch`.
        topology: As for `plan_batch`; "auto" chooses bags for each microbatch.
        cost: As for `plan_batch`.
        sync: When ranks wait for each other: "microbatch" (FSDP that reshards; minimises the sum of
            the makespans) or "step" (DDP under `no_sync`; minimises the largest sum of a rank).
        planner: As for `plan_batch`.
        limits: Most that a rank can hold in one microbatch.
        speeds: As for `plan_batch`.
        cluster: As for `plan_batch`.
        locality_tolerance: As for `plan_batch`.

    Returns:
        One plan a microbatch, in their order, with its own loads and bound. A step takes
        `step_makespan(plans, sync=sync)`.

    Raises:
        ConfigError: An argument is wrong; an illegal length names its microbatch.
        PlanError: The limits cannot be kept; names the microbatch.
    """
    setup = PlanSetup(topology, cost, planner, limits, speeds, cluster, locality_tolerance)
    return plan_microbatches(microbatches, setup, check_sync(sync))


def plan_microbatches(
    microbatches: Sequence[Batch | Sequence[npt.ArrayLike | Sequences]],
    setup: PlanSetup,
    sync: Sync,
) -> tuple[Plan, ...]:
    """Plan the microbatches of a step; see `plan_step`."""
    alone: list[Plan] = []
    for number, seq_lens in enumerate(microbatches):
        try:
            alone.append(setup.plan(seq_lens))
        except (ConfigError, PlanError) as error:
            raise type(error)(f"microbatch {number}: {error}") from None
    worlds = {plan.num_ranks for plan in alone}
    if len(worlds) > 1:
        raise ConfigError(f"microbatches for {sorted(worlds)} ranks: all need the same world")
    if sync == "microbatch" or len(alone) < 2:
        return tuple(alone)
    return min((tuple(alone), _jointly(alone, setup)), key=_largest_sum)


def step_makespan(plans: Sequence[Plan], *, sync: Sync) -> float:
    """Return the sum of the makespans, or the largest sum of a rank's loads."""
    if check_sync(sync) == "microbatch":
        return sum(plan.makespan for plan in plans)
    return _largest_sum(plans)


def check_sync(sync: str) -> Sync:
    """Return when ranks wait for each other, if it is one of the two."""
    return "step" if choice("sync", sync, "microbatch", "step") == "step" else "microbatch"


def _largest_sum(plans: Sequence[Plan]) -> float:
    return float(np.sum([plan.loads for plan in plans], axis=0).max()) if plans else 0.0


def _jointly(alone: Sequence[Plan], setup: PlanSetup) -> tuple[Plan, ...]:
    """Plan the longest microbatch first, each on top of those before; then on top of all others."""
    plans = list(alone)
    order = sorted(range(len(plans)), key=lambda k: (-alone[k].makespan, k))
    total = np.zeros(alone[0].num_ranks)
    for k in order:
        plans[k] = _replan(alone[k], total, setup)
        total = total + plans[k].loads
    for _ in range(_MAX_ROUNDS):
        before = _largest_sum(plans)
        if before <= float(total.mean()) * _CLOSE:
            break
        for k in order:
            trial = list(plans)
            others = np.sum([plan.loads for plan in plans if plan is not plans[k]], axis=0)
            trial[k] = _replan(plans[k], others, setup)
            plans = min(plans, trial, key=_largest_sum)
        if _largest_sum(plans) * _CLOSE >= before:
            break
    return tuple(plans)


def _replan(plan: Plan, carried: Floats, setup: PlanSetup) -> Plan:
    """Plan a microbatch on top of carried loads, on its bags; with loads and bound of its own."""
    topology = plan.topology
    result = replace(setup, topology=topology).plan(plan.loaded, carried)
    idle = RankState.of(topology.num_ranks, speeds=setup.speeds)
    prices = price(plan.loaded, topology, setup.cost, setup.cluster, idle)
    loads = prices.loads(result.bag_of)[topology.bag_of_rank]
    return replace(result, loads=loads, lower_bound=min(plan.lower_bound, float(loads.max())))
