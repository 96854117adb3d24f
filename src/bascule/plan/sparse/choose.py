"""On which mesh a layer attends in its next step: plans on all that are allowed, and the choice.

db-SP chooses the Ulysses and ring degrees of every layer in every step by a latency model (section
4.3). Here plans on all meshes are kept as `PlanReuse` keeps one, so what is compared is what each
mesh would take with the plan that it would in fact use.

Legend: U Ulysses degree, R ring degree, N = U R ranks; H heads, Q query blocks, K key blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Ints
from bascule.errors import ConfigError
from bascule.plan.checks import is_int, listed, number, of_type, shown, whole
from bascule.plan.machine import AttentionLatency, AttentionLoad
from bascule.plan.sparse.layout import MAX_MESH_RANKS
from bascule.plan.sparse.plan import SparsePlan
from bascule.plan.sparse.planner import SparsePlanner, plan_under

Degrees = tuple[int, int]
"""(U, R)"""

_FITTED = "an AttentionLatency, as measure_attention_latency fits it"


@dataclass(frozen=True, slots=True)
class PlanReuse:
    """A layer's plan, kept across denoising steps while it is even enough. Immutable.

    A step runs with `plan`; then `after` takes that step's work and gives the state for the next
    one. So planning is off the critical path, and a plan is one step old when it is used.

    Attributes:
        planner: Makes plans.
        plan: The plan for the next step.
        tolerance: It is kept while its imbalance under the new work is at most 1 + tolerance. The
            paper has 0.10.
        num_planned: Plans made so far.
        num_kept: How often the plan was kept.
        ran: The plan of the last step, that step's work in its tiles; None before the first.
    """

    planner: SparsePlanner
    plan: SparsePlan
    tolerance: float = 0.05
    num_planned: int = 1
    num_kept: int = 0
    ran: SparsePlan | None = None

    def __post_init__(self) -> None:
        of_type("planner", self.planner, SparsePlanner, "a SparsePlanner")
        of_type("plan", self.plan, SparsePlan, "a SparsePlan, as SparsePlanner.plan makes them")
        number("tolerance", self.tolerance, most=np.inf)

    @property
    def ahead(self) -> SparsePlan:
        """The plan for the next step, the last known work in its tiles."""
        if self.ran is None or self.ran.ring_of is not self.plan.ring_of:
            return self.plan
        return self.ran

    def after(self, work: npt.ArrayLike) -> "PlanReuse":
        """The state after a step with this work: masks, or counts, as for `SparsePlanner.plan`.

        The plan is also kept if its imbalance has not grown since it was made, because planning
        again by the same method would not improve it.

        Raises:
            ConfigError: The work does not fit the plan.
        """
        plan = self.plan
        ran = plan_under(plan, work)
        if ran.imbalance <= max(1.0 + self.tolerance, plan.imbalance):
            return replace(self, num_kept=self.num_kept + 1, ran=ran)
        made = self.planner.plan(work, plan.q, plan.kv, num_kv_heads=plan.num_kv_heads)
        return replace(self, plan=made, num_planned=self.num_planned + 1, ran=ran)


def all_degrees(num_ranks: int) -> list[Degrees]:
    """The meshes of a number of ranks, most Ulysses ranks first.

    Raises:
        ConfigError: It is no number of ranks, or more than a mesh can have.
    """
    num_ranks = whole("num_ranks", num_ranks, 1, MAX_MESH_RANKS)
    return [(num_ranks // ring, ring) for ring in range(1, num_ranks + 1) if num_ranks % ring == 0]


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """The mesh of one layer in one step, and what the next choice needs to know.

    Attributes:
        degrees: (U, R).
        predicted_s: Seconds of the call.
        foregone_s: Predicted seconds lost since the last switch, by not being on the fastest mesh.
        num_switches: Choices so far that left the mesh of the one before.
    """

    degrees: Degrees
    predicted_s: float
    foregone_s: float = 0.0
    num_switches: int = 0


@dataclass(frozen=True, slots=True)
class Strategies:
    """How each layer chooses its mesh in each step: the fastest, but no switch for nothing.

    A gain that is at most `min_gain` of the current prediction is less than the model can tell, and
    does not count. Those that count are summed as long as the layer stays where it is; once the sum
    pays for a switch, it switches to what is fastest then.

    Args:
        latency: What a call takes, the same on every rank: `measure_attention_latency` fits it.
        meshes: (Ulysses, ring) degrees to choose from, besides the mesh on which layers start.
            Default: all of as many ranks.
        min_gain: Least relative gain that counts. Default: the error of the latency's fit, and 0.03
            at least.
        switch_s: Seconds that a switch costs: new plans and index tables, cold caches.

    Raises:
        ConfigError: A value is out of range.
    """

    latency: AttentionLatency
    meshes: tuple[Degrees, ...] | None = None
    min_gain: float | None = None
    switch_s: float = 0.0

    def __post_init__(self) -> None:
        of_type("Strategies: latency", self.latency, AttentionLatency, _FITTED)
        if self.min_gain is not None and number("Strategies(min_gain", self.min_gain) >= 1.0:
            raise ConfigError(
                f"Strategies(min_gain={self.min_gain!r}): must be at least 0 and below 1"
            )
        number("Strategies(switch_s", self.switch_s, most=np.inf)
        for mesh in () if self.meshes is None else listed("Strategies: meshes", self.meshes):
            degrees = cast(list[object], mesh) if isinstance(mesh, list | tuple) else []
            legal = [is_int(degree) and 1 <= degree <= MAX_MESH_RANKS for degree in degrees]
            if len(degrees) != 2 or not all(legal):
                raise ConfigError(
                    f"Strategies(meshes=..): {shown(cast(object, mesh))} is not a mesh: give "
                    "(Ulysses, ring) degrees, as in ((4, 2), (8, 1))"
                )

    def choose(
        self, loads: Sequence[AttentionLoad], last: StrategyChoice | None = None
    ) -> StrategyChoice:
        """The mesh of a layer in its next step. Of equal predictions: the first.

        Args:
            loads: Of the layer in that step on every allowed mesh, with the imbalance of each.
            last: The choice for the step before; None in the first.

        Raises:
            ConfigError: No mesh, one of them twice, or the current one is not among them.
        """
        loads = [
            of_type("Strategies: a load", load, AttentionLoad, "an AttentionLoad")
            for load in listed("Strategies: loads", loads)
        ]
        of_type("Strategies: last", last, (StrategyChoice, NoneType), "the last choice, or None")
        seconds_of = {load.degrees: self.latency(load) for load in loads}
        if not loads or len(seconds_of) < len(loads):
            raise ConfigError(
                f"Strategies: loads of {[load.degrees for load in loads]} (Ulysses, ring); give "
                "each allowed mesh once, and at least one"
            )
        best = min(seconds_of, key=lambda degrees: seconds_of[degrees])
        if last is None:
            return StrategyChoice(best, seconds_of[best])
        if last.degrees not in seconds_of:
            raise ConfigError(
                f"Strategies: the last mesh {last.degrees} is not among {list(seconds_of)}: give "
                "its load too, or last=None to start anew"
            )
        least = max(self.latency.fit_error or 0.0, 0.03) if self.min_gain is None else self.min_gain
        current_s = seconds_of[last.degrees]
        gain_s = current_s - seconds_of[best]
        counts = gain_s > least * current_s
        foregone_s = last.foregone_s + (gain_s if counts else 0.0)
        if counts and foregone_s >= self.switch_s:
            return StrategyChoice(best, seconds_of[best], 0.0, last.num_switches + 1)
        return StrategyChoice(last.degrees, current_s, foregone_s, last.num_switches)


@dataclass(frozen=True, slots=True)
class LayerPlans:
    """The plans of a layer for its next step. Immutable; the same on every rank.

    Attributes:
        reuses: By (U, R), on each mesh that the layer may use.
        strategies: How the mesh is chosen; None: there is one.
        choice: The mesh of the next step; None where there is no choice.
    """

    reuses: Mapping[Degrees, PlanReuse]
    strategies: Strategies | None = None
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
        """For the first step.

        Args:
            reuses: By (U, R).
            strategies: How a mesh is chosen.
            start: The mesh of the first step; None chooses it, by plans from the work of that step.
            batch: Sequences that are attended alike.
            row_bytes: Of one token of one head of one of them.
        """
        if strategies is None:
            return cls(reuses)
        loads = {d: AttentionLoad.of_plan(x.ahead, batch, row_bytes) for d, x in reuses.items()}
        if start is None:
            return cls(reuses, strategies, strategies.choose(list(loads.values()), None))
        choice = StrategyChoice(start, strategies.latency(loads[start]))
        return cls(reuses, strategies, choice)

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

    def after(self, work: npt.NDArray[np.bool_] | Ints, batch: int, row_bytes: int) -> "LayerPlans":
        """After a step with this work, as `PlanReuse.after` on each mesh; then the next choice.

        Args:
            work: (H, Q, K) masks; or (H, Q, N) counts by the rank where keys are at home.
            batch: As for `first`.
            row_bytes: As for `first`.
        """
        reuses = {
            degrees: reuse.after(columns_of(work, degrees))
            for degrees, reuse in self.reuses.items()
        }
        if self.strategies is None:
            return replace(self, reuses=reuses)
        loads = [AttentionLoad.of_plan(x.ahead, batch, row_bytes) for x in reuses.values()]
        return replace(self, reuses=reuses, choice=self.strategies.choose(loads, self.choice))


def columns_of(
    work: npt.NDArray[np.bool_] | Ints, degrees: Degrees
) -> npt.NDArray[np.bool_] | Ints:
    """Work as a mesh counts it: masks as they are, counts by ring rank from counts by rank."""
    if work.dtype == np.bool_:
        return work
    ulysses, ring = degrees
    return work.reshape(*work.shape[:2], ring, ulysses).sum(axis=3)
