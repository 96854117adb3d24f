"""Keep the plans of a layer over denoising steps, and choose the mesh of its next step.

db-SP chooses the Ulysses and ring degrees by a latency model (section 4.3). Here each mesh keeps
its plan, whose seconds the machine predicts. Legend: see `sparse`; N = U R ranks.
"""

from collections.abc import Mapping
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
    """A layer's plan, kept across denoising steps while it is even enough. Immutable.

    A step runs with `plan`; then `after` takes that step's work and gives the next state.

    Args:
        planner: Makes plans.
        plan: The plan for the next step.
        tolerance: It is kept while its imbalance under the new work is at most 1 + tolerance. The
            paper has 0.10.
    """

    planner: SparsePlanner
    plan: SparsePlan
    tolerance: float = 0.05
    num_planned: int = 1
    num_kept: int = 0
    ran: SparsePlan | None = None  # the plan of the last step, that step's work in its tiles

    def __post_init__(self) -> None:
        fields(self, tolerance=(number, 0.0, np.inf))

    @property
    def ahead(self) -> SparsePlan:
        """The plan for the next step, the last known work in its tiles."""
        if self.ran is None or self.ran.ring_of is not self.plan.ring_of:
            return self.plan
        return self.ran

    def after(self, work: npt.ArrayLike) -> "PlanReuse":
        """Return the state after a step with this work, as `SparsePlanner.plan` takes it.

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
    """Sizes of a call of attention that neither its blocks nor its mesh say."""

    batch: int  # sequences that are attended alike
    head_dim: int
    row_bytes: int  # of a token of a head, as it travels

    def seconds(
        self, plan: SparsePlan, machine: HardwareProfile, ranks_per_node: int | None = None
    ) -> float:
        """Predict the seconds of a call by a plan; work and keys are those of the slowest rank.

        Rows before and after attention are a mean over the ranks. All are in one node by default.
        """
        (flops_per_s,) = machine.numbers_of("attention_flops_per_s")
        degrees, num_ranks = (plan.ulysses_degree, plan.ring_degree), plan.num_ranks
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
    """Choose the mesh of each layer in each step: the fastest, but no switch for nothing.

    Gains above `min_gain` are summed as long as the layer stays where it is; once the sum pays for
    a switch, it switches to the mesh that is fastest then.

    Args:
        machine: The profile by which calls are predicted, the same on every rank.
        meshes: (Ulysses, ring) degrees to choose from, besides the mesh on which layers start.
            Default: all of as many ranks.
        min_gain: Least relative gain that counts.
        switch_s: Seconds that a switch costs: new plans and index tables, cold caches.
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

    def row_work(self, size: CallSize) -> float:
        """Return the pairs of tokens that a rank computes in the time that a row takes to come."""
        flops_per_s, bytes_per_s = self.machine.numbers_of(
            "attention_flops_per_s", "intra_bytes_per_s"
        )
        row_s = size.row_bytes / bytes_per_s
        return row_s * flops_per_s / (FLOPS_PER_VALUE * size.head_dim)

    def seconds_of(
        self, plans: Mapping[Degrees, SparsePlan], size: CallSize
    ) -> dict[Degrees, float]:
        """Predict the seconds of a layer's call on each mesh."""
        per_node = self.ranks_per_node
        return {
            degrees: size.seconds(plan, self.machine, per_node) for degrees, plan in plans.items()
        }

    def choose(
        self, seconds_of: Mapping[Degrees, float], last: StrategyChoice | None = None
    ) -> StrategyChoice:
        """Choose the fastest of all meshes by their seconds; `last` is the choice before."""
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


def _mesh(name: str, mesh: object) -> Degrees:
    if not isinstance(mesh, list | tuple) or len(cast(list[object], mesh)) != 2:
        raise ConfigError(
            f"{name}={shown(cast(object, mesh))}): give (Ulysses, ring) degrees, as in (4, 2)"
        )
    ulysses, ring = (whole(name, degree, 1, MAX_MESH_RANKS) for degree in cast(list[object], mesh))
    return ulysses, ring


@dataclass(frozen=True, slots=True)
class LayerPlans:
    """The plans of a layer for its next step, one a mesh; immutable, the same on every rank."""

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
        if strategies is None:
            return cls(reuses, size)
        made = cls(reuses, size, strategies)
        seconds_of = made._seconds_of(strategies)
        if start is None:
            return replace(made, choice=strategies.choose(seconds_of))
        return replace(made, choice=StrategyChoice(start, seconds_of[start]))

    @property
    def degrees(self) -> Degrees:
        """(U, R) of the next step."""
        if self.choice is None:
            (only,) = self.reuses
            return only
        return self.choice.degrees

    @property
    def chosen(self) -> PlanReuse:
        """The plan of the next step, and its history."""
        return self.reuses[self.degrees]

    def after(self, work: Counts) -> "LayerPlans":
        """Take a step's work, (H, Q, K) masks or (H, Q, N) counts by home rank; choose again."""
        reuses = {d: reuse.after(columns_of(work, d)) for d, reuse in self.reuses.items()}
        made = replace(self, reuses=reuses)
        if self.strategies is None:
            return made
        seconds_of = made._seconds_of(self.strategies)
        return replace(made, choice=self.strategies.choose(seconds_of, self.choice))

    def _seconds_of(self, strategies: Strategies) -> dict[Degrees, float]:
        return strategies.seconds_of({d: x.ahead for d, x in self.reuses.items()}, self.size)


def columns_of(work: Counts, degrees: Degrees) -> Counts:
    """Return work as a mesh counts it: masks as they are, counts by rank summed by ring rank."""
    if work.dtype == np.bool_:
        return work
    ulysses, ring = degrees
    return work.reshape(*work.shape[:2], ring, ulysses).sum(axis=3)
