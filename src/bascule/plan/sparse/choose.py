"""Reuse the plans of a layer over denoising steps, and choose the mesh of its next step.

db-SP chooses the Ulysses and ring degrees by a latency model (section 4.3). Here each mesh has a
plan, and a hardware profile predicts its seconds. Legend: see `sparse`; N = U R ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from bascule.checks import each, fields, number, of_type, shown, whole
from bascule.errors import ConfigError
from bascule.machine.cluster import (
    FLOPS_PER_VALUE,
    NUM_ALL_TO_ALLS,
    BagShape,
    HardwareProfile,
    Work,
)
from bascule.plan.sparse.layout import MAX_MESH_RANKS, Counts
from bascule.plan.sparse.plan import SparsePlan
from bascule.plan.sparse.planner import SparsePlanner, plan_under
from bascule.plan.topology import Degrees


@dataclass(frozen=True, slots=True)
class PlanReuse:
    """A layer's plan, reused across denoising steps while it is even enough. Immutable.

    A step runs with `plan`; then `after` receives the step's work and returns the next state.

    Args:
        planner: Makes plans.
        plan: The plan of the next step.
        tolerance: A plan is kept while its imbalance is at most 1 + tolerance; 0.10 in the paper.
    """

    planner: SparsePlanner
    plan: SparsePlan
    tolerance: float = 0.05
    num_planned: int = 1
    num_kept: int = 0
    ran: SparsePlan | None = None  # plan of the last step, with that step's work in its tiles

    def __post_init__(self) -> None:
        fields(self, tolerance=(number, 0.0, np.inf))

    @property
    def ahead(self) -> SparsePlan:
        """The plan of the next step, whose tiles have the latest work."""
        if self.ran is None or self.ran.ring_of is not self.plan.ring_of:
            return self.plan
        return self.ran

    def after(self, work: npt.ArrayLike) -> "PlanReuse":
        """Return the state after a step whose work was `work`; see `SparsePlanner.plan`.

        A plan whose imbalance has not grown is kept: the same method would not improve it.
        """
        plan = self.plan
        ran = plan_under(plan, work)
        if ran.imbalance <= max(1.0 + self.tolerance, plan.imbalance):
            return replace(self, num_kept=self.num_kept + 1, ran=ran)
        made = self.planner.plan(work, plan.q, plan.kv, num_kv_heads=plan.num_kv_heads)
        return replace(self, plan=made, num_planned=self.num_planned + 1, ran=ran)


@dataclass(frozen=True, slots=True)
class CallSize:
    """The sizes of an attention call besides its blocks and its mesh."""

    batch: int  # sequences with the same masks
    head_dim: int
    row_bytes: int  # bytes on the wire of a token of a head

    def seconds(
        self, plan: SparsePlan, machine: HardwareProfile, ranks_per_node: int | None = None
    ) -> float:
        """Predict the seconds of a call, by the slowest rank's attention; None: one node."""
        (flops_per_s,) = machine.numbers_of("attention_flops_per_s")
        degrees, num_ranks = (plan.ring_degree, plan.ulysses_degree), plan.num_ranks
        pairs = plan.imbalance * float(plan.tiles.sum()) / num_ranks
        attention_s = self.batch * pairs * FLOPS_PER_VALUE * self.head_dim / flops_per_s
        per_node = ranks_per_node or num_ranks
        near_rows, far_rows = plan.rows_sent(per_node)
        row_bytes, num_rounds = self.batch * self.row_bytes, plan.ring_degree - 1
        work = Work(
            compute_s=attention_s,
            attention_s=attention_s,
            near_bytes=near_rows * row_bytes / num_ranks,
            far_bytes=far_rows * row_bytes / num_ranks,
            ring_bytes=2 * plan.most_kv_tokens * row_bytes * num_rounds,
            num_exchanges=0 if plan.is_local else NUM_ALL_TO_ALLS,
            num_rounds=num_rounds,
            num_kernels=plan.ring_degree,
        )
        return float(machine.forward_seconds([work], BagShape.aligned(*degrees, per_node)).total)


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """The mesh of one layer in one step, with the predicted seconds of its call."""

    degrees: Degrees
    predicted_s: float
    foregone_s: float = 0.0  # lost since the last switch, by not being on the fastest mesh
    num_switches: int = 0


@dataclass(frozen=True, slots=True)
class Strategies:
    """Choose the mesh of each layer in each step: the fastest mesh, once a switch to it pays.

    While a layer stays on its mesh, gains above `min_gain` of faster meshes are summed. Once the
    sum exceeds `switch_s`, the layer switches to the mesh that is fastest in that step.

    Args:
        machine: The profile that predicts calls, the same on every rank.
        meshes: (ring, Ulysses) degrees to choose from, besides the mesh on which layers start.
            Default: all meshes with as many ranks.
        min_gain: Least relative gain that counts.
        switch_s: Seconds that a switch costs, for new plans and index tables, and cold caches.
        ranks_per_node: Ranks in a node. Default: all.
    """

    machine: HardwareProfile
    meshes: tuple[Degrees, ...] | None = None
    min_gain: float = 0.03
    switch_s: float = 0.0
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        fields(self, machine=(of_type, HardwareProfile, "a HardwareProfile"), meshes=(each, _mesh))
        fields(self, min_gain=(number, 0.0, 1.0), switch_s=(number, 0.0, np.inf))
        fields(self, ranks_per_node=(whole, 1))
        far = () if self.ranks_per_node is None else ("inter_bytes_per_s",)
        self.machine.numbers_of("attention_flops_per_s", "intra_bytes_per_s", "launch_s", *far)

    def prices(self, size: CallSize) -> dict[str, float]:
        """Return what moves cost on the machine, `row_work` and `exchange_work` of planners."""
        names = "attention_flops_per_s", "intra_bytes_per_s", "launch_s"
        flops_per_s, bytes_per_s, launch_s = self.machine.numbers_of(*names)
        pairs_per_s = flops_per_s / (FLOPS_PER_VALUE * size.head_dim)
        exchange_s = NUM_ALL_TO_ALLS * launch_s / size.batch
        prices_s = {"row_work": size.row_bytes / bytes_per_s, "exchange_work": exchange_s}
        return {name: seconds * pairs_per_s for name, seconds in prices_s.items()}

    def seconds_of(
        self, plans: Mapping[Degrees, SparsePlan], size: CallSize
    ) -> dict[Degrees, float]:
        """Predict the seconds of a layer's call on each mesh."""
        where = self.machine, self.ranks_per_node
        return {degrees: size.seconds(plan, *where) for degrees, plan in plans.items()}

    def choose(
        self, seconds_of: Mapping[Degrees, float], last: StrategyChoice | None = None
    ) -> StrategyChoice:
        """Choose a mesh by its predicted seconds; `last` is the choice of the step before."""
        best = min(seconds_of, key=lambda degrees: seconds_of[degrees])
        if last is None:
            return StrategyChoice(best, seconds_of[best])
        current_s = seconds_of[last.degrees]
        gain_s = current_s - seconds_of[best]
        counts = gain_s > self.min_gain * current_s
        foregone_s = last.foregone_s + (gain_s if counts else 0.0)
        if counts and foregone_s >= self.switch_s:
            return StrategyChoice(best, seconds_of[best], 0.0, last.num_switches + 1)
        return StrategyChoice(last.degrees, current_s, foregone_s, last.num_switches)


def _mesh(name: str, value: object) -> Degrees:
    degrees = cast(Sequence[object], value) if isinstance(value, list | tuple) else ()
    if len(degrees) != 2:
        wrong = f"{name}={shown(cast(object, value))})"
        raise ConfigError(f"{wrong}: give (ring, Ulysses) degrees, as in (2, 4)")
    ring, ulysses = (whole(name, degree, 1, MAX_MESH_RANKS) for degree in degrees)
    return ring, ulysses


@dataclass(frozen=True, slots=True)
class LayerPlans:
    """A layer's plans for the next step, one per mesh; immutable, the same on every rank."""

    reuses: Mapping[Degrees, PlanReuse]
    size: CallSize
    strategies: Strategies | None = None  # None where there is one mesh
    choice: StrategyChoice | None = None

    @classmethod
    def first(
        cls,
        reuses: Mapping[Degrees, PlanReuse],
        size: CallSize,
        strategies: Strategies | None,
        *,
        start: Degrees | None = None,
    ) -> "LayerPlans":
        """Make the plans of the first step, on the mesh `start` if set."""
        made = cls(reuses, size, strategies)
        if strategies is None:
            return made
        seconds_of = made._seconds_of(strategies)
        choice = StrategyChoice(start, seconds_of[start]) if start else None
        return replace(made, choice=choice or strategies.choose(seconds_of))

    @property
    def degrees(self) -> Degrees:
        """(R, U), the mesh of the next step."""
        if self.choice is None:
            (only,) = self.reuses
            return only
        return self.choice.degrees

    @property
    def chosen(self) -> PlanReuse:
        """The plan of the next step on the chosen mesh, and its history."""
        return self.reuses[self.degrees]

    def after(self, work: Counts) -> "LayerPlans":
        """Return the plans after a step with (H, Q, K) masks, or (H, Q, N) counts by home rank."""
        reuses = {mesh: old.after(columns_of(work, mesh)) for mesh, old in self.reuses.items()}
        made = replace(self, reuses=reuses)
        if self.strategies is None:
            return made
        seconds_of = made._seconds_of(self.strategies)
        return replace(made, choice=self.strategies.choose(seconds_of, self.choice))

    def _seconds_of(self, strategies: Strategies) -> dict[Degrees, float]:
        plans = {mesh: reuse.ahead for mesh, reuse in self.reuses.items()}
        return strategies.seconds_of(plans, self.size)


def columns_of(work: Counts, degrees: Degrees) -> Counts:
    """Sum counts by rank into counts by ring rank of a mesh; return masks unchanged."""
    if work.dtype == np.bool_:
        return work
    return work.reshape(*work.shape[:2], *degrees).sum(axis=3)
