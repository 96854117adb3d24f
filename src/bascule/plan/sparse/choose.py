"""Keep the plans of a layer over denoising steps, and choose the mesh of its next step.

db-SP chooses the Ulysses and ring degrees by a latency model (section 4.3). Here each mesh keeps
its plan, and is judged by it. Legend: see `sparse`; N = U R ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from bascule.checks import each, fields, number, of_type, shown, whole
from bascule.errors import ConfigError
from bascule.machine.cluster import AttentionLatency, AttentionLoad
from bascule.plan.sparse.layout import MAX_MESH_RANKS, Work
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
        latency: Seconds of a call, the same on every rank: `measure_attention_latency` fits it.
        meshes: (Ulysses, ring) degrees to choose from, besides the mesh on which layers start.
            Default: all of as many ranks.
        min_gain: Least relative gain that counts. Default: the error of the latency's fit, and 0.03
            at least.
        switch_s: Seconds that a switch costs: new plans and index tables, cold caches.
    """

    latency: AttentionLatency
    meshes: tuple[Degrees, ...] | None = None
    min_gain: float | None = None
    switch_s: float = 0.0

    def __post_init__(self) -> None:
        fitted = "an AttentionLatency, as measure_attention_latency fits it"
        fields(self, latency=(of_type, AttentionLatency, fitted), meshes=(each, _mesh))
        fields(self, min_gain=(number, 0.0, 1.0), switch_s=(number, 0.0, np.inf))

    def choose(
        self, loads: Sequence[AttentionLoad], last: StrategyChoice | None = None
    ) -> StrategyChoice:
        """Choose the fastest of a layer's loads on all meshes; `last` is the choice before."""
        seconds_of = {load.degrees: self.latency(load) for load in loads}
        best = min(seconds_of, key=lambda degrees: seconds_of[degrees])
        if last is None:
            return StrategyChoice(best, seconds_of[best])
        least = max(self.latency.fit_error or 0.0, 0.03) if self.min_gain is None else self.min_gain
        current_s = seconds_of[last.degrees]
        gain_s = current_s - seconds_of[best]
        counts = gain_s > least * current_s
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
    strategies: Strategies | None = None  # None where there is one mesh
    choice: StrategyChoice | None = None

    @classmethod
    def first(
        cls,
        reuses: Mapping[Degrees, PlanReuse],
        strategies: Strategies | None,
        *,
        start: Degrees | None,
        batch: int,
        row_bytes: int,
    ) -> "LayerPlans":
        """Make the plans of the first step, for `batch` sequences, on the mesh `start` if set."""
        if strategies is None:
            return cls(reuses)
        loads = {d: AttentionLoad.of_plan(x.ahead, batch, row_bytes) for d, x in reuses.items()}
        if start is None:
            return cls(reuses, strategies, strategies.choose(list(loads.values())))
        return cls(reuses, strategies, StrategyChoice(start, strategies.latency(loads[start])))

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

    def after(self, work: Work, batch: int, row_bytes: int) -> "LayerPlans":
        """Take a step's work, (H, Q, K) masks or (H, Q, N) counts by home rank; choose again."""
        reuses = {d: reuse.after(columns_of(work, d)) for d, reuse in self.reuses.items()}
        if self.strategies is None:
            return replace(self, reuses=reuses)
        loads = [AttentionLoad.of_plan(x.ahead, batch, row_bytes) for x in reuses.values()]
        return replace(self, reuses=reuses, choice=self.strategies.choose(loads, self.choice))


def columns_of(work: Work, degrees: Degrees) -> Work:
    """Return work as a mesh counts it: masks as they are, counts by rank summed by ring rank."""
    if work.dtype == np.bool_:
        return work
    ulysses, ring = degrees
    return work.reshape(*work.shape[:2], ring, ulysses).sum(axis=3)
