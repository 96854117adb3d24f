"""Plans all microbatches of an optimiser step together.

Where ranks meet in every microbatch, the step takes the sum of the makespans, so each microbatch is
planned on its own. Where they meet once a step, the largest sum of a rank's loads counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints, cumulative
from bascule.errors import ConfigError, PlanError
from bascule.plan.checks import choice
from bascule.plan.costs import Cost
from bascule.plan.limits import Limits
from bascule.plan.machine import Cluster
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


@dataclass(frozen=True, slots=True, eq=False)
class Mixed:
    """Microbatches whose sequences were dealt anew."""

    batches: list[Batch]
    sources: list[list[Ints]]  # by source rank, (n, 2) microbatch that loaded it, and place there


def mix_microbatches(batches: Sequence[Batch], setup: PlanSetup, sync: Sync) -> Mixed:
    """Deal the sequences of an optimiser step to its microbatches, so that these are even.

    All are planned as one, wires aside; bags that are alike then go to the microbatches by their
    loads, giants side by side. If a step would be no faster, all stay where they are.
    """
    if setup.topology == "auto":
        raise ConfigError('mixes=True with topology "auto": give the bags of a microbatch')
    num_ranks = batches[0].counts.size
    unit = Topology.parse(setup.topology, world_size=num_ranks)
    whole = replace(unit, num_replicas=unit.num_replicas * len(batches))
    fast = None if setup.speeds is None else np.tile(np.asarray(setup.speeds), len(batches))
    limits, times = setup.limits or Limits(), len(batches)
    limits = limits.mapped(lambda room: np.tile(room, times), num_ranks)
    plan = PlanSetup(whole, setup.cost, limits=limits, speeds=fast).plan(Batch.joined(batches))
    bag_speeds = RankState.of(whole.num_ranks, speeds=fast).bag_speeds(whole)
    of_bags = limits.of_bags(whole.first_ranks, whole.num_ranks)
    rooms = [of_bags.room(name, whole.num_bags) for name in ("tokens", "items", "num_bytes")]
    alike = [whole.bag_sizes, whole.ring_degrees, bag_speeds, *rooms]
    kinds = np.stack(alike, axis=1, dtype=np.float64)
    dealt = _by_load(kinds, plan, len(batches))[plan.bag_of]
    options = [_dealt(plan, micro, num_ranks) for micro in (plan.source_ranks // num_ranks, dealt)]

    def makespan(mixed: Mixed) -> float:
        try:
            plans = plan_microbatches(mixed.batches, setup, sync)
        except PlanError:  # as loaded, a microbatch may be too large
            return float("inf")
        return step_makespan(plans, sync=sync)

    return min(options, key=makespan)


def _dealt(plan: Plan, micro_of: Ints, num_ranks: int) -> Mixed:
    """Part a plan for all microbatches; each sequence goes to that of `micro_of`."""
    loaded, rank_of = np.divmod(plan.source_ranks, num_ranks)
    place = np.arange(micro_of.size) - cumulative(plan.source_counts)[plan.source_ranks]
    mixed = Mixed([], [])
    for micro in range(plan.num_ranks // num_ranks):
        at = [np.flatnonzero((micro_of == micro) & (rank_of == rank)) for rank in range(num_ranks)]
        mixed.batches.append(Batch.joined([plan.loaded.take(seqs) for seqs in at]))
        mixed.sources.append([np.stack([loaded[seqs], place[seqs]], axis=1) for seqs in at])
    return mixed


def _by_load(kinds: Floats, plan: Plan, num_micro: int) -> Ints:
    """(num_bags,) the microbatch of each bag: those of one kind with the largest loads together."""
    loads = plan.loads[plan.topology.first_ranks]
    micro_of = np.zeros_like(plan.topology.bag_sizes)
    of_kind = np.unique(kinds, axis=0, return_inverse=True)[1].ravel()
    for kind in range(int(of_kind.max()) + 1):
        bags = np.flatnonzero(of_kind == kind)
        order = bags[np.argsort(-loads[bags], kind="stable")]
        micro_of[order] = np.arange(order.size) // (order.size // num_micro)
    return micro_of


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
