"""Plans all microbatches of an optimiser step together.

Every sequence stays in its microbatch, unless `mix_microbatches` deals them anew before: a plan
covers what its microbatch's loaders delivered. Where ranks meet in every microbatch, the step takes
the sum of the microbatches' makespans, so each is planned on its own, near its bound. Where they
meet once a step, a rank may be slow in one microbatch if it is fast in another: what counts is the
largest sum of its loads.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints, cumulative
from bascule.errors import ConfigError, PlanError
from bascule.plan.checks import by_rank, listed, of_type, shown
from bascule.plan.costs import Cost
from bascule.plan.limits import Limits
from bascule.plan.machine import Cluster
from bascule.plan.plan import Plan, plan_batch
from bascule.plan.prices import RankState, price
from bascule.plan.sequences import Sequences, batch_of
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
    home_tolerance: float | None = None,
) -> tuple[Plan, ...]:
    """Plan all microbatches of an optimiser step at once.

    Args:
        microbatches: Of each, what each source rank loaded, as for `plan_batch`.
        topology: As for `plan_batch`; "auto" chooses bags for each microbatch.
        cost: As for `plan_batch`.
        sync: When ranks wait for each other: "microbatch" (FSDP that reshards; minimises the sum of
            the makespans) or "step" (DDP under `no_sync`; minimises the largest sum of a rank).
        planner: As for `plan_batch`.
        limits: What a rank can hold in one microbatch.
        speeds: As for `plan_batch`.
        cluster: As for `plan_batch`.
        home_tolerance: As for `plan_batch`.

    Returns:
        One plan a microbatch, in their order. Its loads and its bound are those of the microbatch
        alone, so a step takes `step_makespan(plans, sync=sync)`.

    Raises:
        ConfigError: An argument is wrong; an illegal length names its microbatch.
        PlanError: The limits cannot be kept; names the microbatch.
    """
    check_sync(sync)
    alone: list[Plan] = []
    for number, seq_lens in enumerate(listed("microbatches", microbatches)):
        try:
            alone.append(
                plan_batch(
                    seq_lens,
                    topology,
                    cost,
                    planner=planner,
                    limits=limits,
                    speeds=speeds,
                    cluster=cluster,
                    home_tolerance=home_tolerance,
                )
            )
        except (ConfigError, PlanError) as error:
            raise type(error)(f"microbatch {number}: {error}") from None
    worlds = {plan.num_ranks for plan in alone}
    if len(worlds) > 1:
        raise ConfigError(f"microbatches for {sorted(worlds)} ranks: all need the same world")
    if sync == "microbatch" or len(alone) < 2:
        return tuple(alone)
    again = _Again(cost, planner, limits, speeds, cluster, home_tolerance)
    return min((tuple(alone), again.jointly(alone)), key=lambda plans: _largest_sum(plans))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Mixed:
    """Microbatches whose sequences were dealt anew.

    Attributes:
        microbatches: Of each, what each source rank brings to it.
        sources: Of each, by source rank, (n, 2) the microbatch in which a sequence was loaded, and
            its place there.
    """

    microbatches: list[list[Sequences]]
    sources: list[list[Ints]]


def mix_microbatches(
    microbatches: Sequence[Sequence[npt.ArrayLike | Sequences]],
    topology: Topology | str,
    cost: Cost,
    *,
    sync: Sync = "microbatch",
    planner: str = "lpt",
    limits: Limits | None = None,
    speeds: npt.ArrayLike | None = None,
    cluster: Cluster | None = None,
    home_tolerance: float | None = None,
) -> Mixed:
    """Deal the sequences of an optimiser step to its microbatches, so that these are even.

    Where ranks meet in every microbatch, one that holds a giant makes all wait while the rank that
    has it works. Dealt together, giants of several microbatches are computed side by side. All are
    planned as one, on as many bags as they have together, wires aside; then bags that are alike go
    to the microbatches by their loads, so that the sum of the makespans is small.

    Args:
        microbatches: As for `plan_step`.
        topology: The bags of a microbatch.
        cost: As for `plan_step`, as all that follows.
        sync: If `plan_step` would be no faster for what was dealt, all stay where they are.
        planner: See there.
        limits: What a rank can hold in one microbatch.
        speeds: See there.
        cluster: See there.
        home_tolerance: See there.

    Raises:
        As `plan_step`; ConfigError: the topology is "auto".
    """
    if topology == "auto":
        raise ConfigError('mixes=True with topology "auto": give the bags of a microbatch')
    given = listed("microbatches", microbatches)
    num_ranks = len(by_rank("sequence lengths", given[0])) if given else 0
    batches = [batch_of(one, num_ranks) for one in given]
    joined = [batch for one in batches for batch in one.by_rank()]
    unit = Topology.parse(topology, world_size=num_ranks)
    whole = dataclasses.replace(unit, num_replicas=unit.num_replicas * len(batches))
    fast = None if speeds is None else np.tile(np.asarray(speeds), len(batches))
    plan = plan_batch(joined, whole, cost, limits=limits, speeds=fast)
    bag_speeds = RankState.of(whole.num_ranks, speeds=fast).bag_speeds(whole)
    kinds = np.stack([whole.bag_sizes, whole.ring_degrees, bag_speeds], axis=1, dtype=np.float64)
    dealt = _by_load(kinds, plan, len(batches))[plan.bag_of]
    found = [_dealt(plan, micro, num_ranks) for micro in (plan.source_ranks // num_ranks, dealt)]

    def makespan(mixed: Mixed) -> float:
        try:
            plans = plan_step(
                mixed.microbatches,
                unit,
                cost,
                sync=sync,
                planner=planner,
                limits=limits,
                speeds=speeds,
                cluster=cluster,
                home_tolerance=home_tolerance,
            )
        except PlanError:  # as loaded, a microbatch may be too large
            return float("inf")
        return step_makespan(plans, sync=sync)

    return min(found, key=makespan)


def _dealt(plan: Plan, micro_of: Ints, num_ranks: int) -> Mixed:
    """The microbatches of a plan for all of them, in which each sequence goes to the one given."""
    loaded, rank_of = np.divmod(plan.source_ranks, num_ranks)
    place = np.arange(micro_of.size) - cumulative(plan.source_counts)[plan.source_ranks]
    mixed = Mixed([], [])
    for micro in range(plan.num_ranks // num_ranks):
        at = [np.flatnonzero((micro_of == micro) & (rank_of == rank)) for rank in range(num_ranks)]
        mixed.microbatches.append([plan.loaded.take(seqs) for seqs in at])
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
    """The cost of a step: the sum of the makespans, or the largest sum of a rank's loads.

    Raises:
        ConfigError: `sync` is neither.
    """
    check_sync(sync)
    for plan in listed("plans", plans):
        of_type("a plan", plan, Plan, "the plans of plan_step")
    if sync == "microbatch":
        return sum(plan.makespan for plan in plans)
    return _largest_sum(plans)


def check_sync(sync: str) -> None:
    """Refuse what says nothing of when ranks wait for each other.

    Raises:
        ConfigError: It is not "microbatch" or "step".
    """
    if of_type("sync", sync, str, '"microbatch" or "step"') not in ("microbatch", "step"):
        raise ConfigError(f'sync {shown(sync)}: choose "microbatch" or "step"')


def _largest_sum(plans: Sequence[Plan]) -> float:
    return float(np.sum([plan.loads for plan in plans], axis=0).max()) if plans else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Again:
    """Plans a microbatch on top of what the others make the ranks do."""

    cost: Cost
    planner: str
    limits: Limits | None
    speeds: npt.ArrayLike | None
    cluster: Cluster | None
    home_tolerance: float | None

    def jointly(self, alone: Sequence[Plan]) -> tuple[Plan, ...]:
        """Longest microbatch first, each on top of those before; then each on top of all others."""
        plans = list(alone)
        order = sorted(range(len(plans)), key=lambda k: (-alone[k].makespan, k))
        total = np.zeros(alone[0].num_ranks)
        for k in order:
            plans[k] = self._replan(alone[k], total)
            total = total + plans[k].loads
        for _ in range(_MAX_ROUNDS):
            before = _largest_sum(plans)
            if before <= float(total.mean()) * _CLOSE:
                break
            for k in order:
                trial = list(plans)
                others = np.sum([plan.loads for plan in plans if plan is not plans[k]], axis=0)
                trial[k] = self._replan(plans[k], others)
                plans = min(plans, trial, key=_largest_sum)
            if _largest_sum(plans) * _CLOSE >= before:
                break
        return tuple(plans)

    def _replan(self, plan: Plan, carried: Floats) -> Plan:
        """The microbatch on the same bags, with loads and bound of its own."""
        found = plan_batch(
            plan.loaded.by_rank(),
            plan.topology,
            self.cost,
            planner=self.planner,
            limits=self.limits,
            carried_loads=carried,
            speeds=self.speeds,
            cluster=self.cluster,
            home_tolerance=self.home_tolerance,
        )
        topology = plan.topology
        idle = RankState.of(topology.num_ranks, speeds=self.speeds)
        prices = price(plan.loaded, topology, self.cost, self.cluster, idle)
        loads = prices.loads(found.bag_of)[topology.bag_of_rank]
        bound = min(plan.lower_bound, float(loads.max()))
        return dataclasses.replace(found, loads=loads, lower_bound=bound)
