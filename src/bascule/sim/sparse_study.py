"""Compare ways to plan block-sparse attention on meshes, over layers and steps.

Legend: H heads, Q query blocks, K key blocks. A mesh is (R, U): ring and Ulysses degree.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain

import numpy as np

from bascule.arrays import Bools, Ints
from bascule.machine.cluster import HardwareProfile
from bascule.plan.sparse import BlockLayout, PlanReuse, SparsePlan, SparsePlanner
from bascule.plan.sparse.choose import CallSize, Strategies, StrategyChoice
from bascule.plan.topology import Degrees as Mesh

BEFORE = "in order"
WAYS = (BEFORE, "stripe", "minimal_move", "paper")
DEFAULT = "minimal_move"


def mesh_name(mesh: Mesh) -> str:
    """Return the name of a mesh, such as U4R2."""
    ring, ulysses = mesh
    return f"U{ulysses}R{ring}"


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of a study: meshes, block lengths, machine and options of the planner."""

    meshes: tuple[Mesh, ...]  # (ring, Ulysses) degrees that are compared
    q_lens: Ints  # (Q,) tokens of each query block
    kv_lens: Ints  # (K,) tokens of each key block
    machine: HardwareProfile  # predicts the seconds of calls
    head_dim: int
    itemsize: int  # bytes of a value, as it travels
    target: float  # imbalance that moves are to reach
    reward: float  # of the paper's greedy
    tolerance: float  # excess of imbalance over 1 up to which a plan is reused

    def planner(self, way: str, mesh: Mesh) -> SparsePlanner:
        """Make the planner of one of `WAYS` on a mesh."""
        method = way.replace(" ", "_")
        return SparsePlanner(*mesh, method=method, target=self.target, reward=self.reward)

    def plan(self, way: str, masks: Bools, mesh: Mesh) -> SparsePlan:
        """Plan a layer of (H, Q, K) masks in one of `WAYS`; blocks are striped for two of them."""
        is_striped = way in ("stripe", "minimal_move")
        make = BlockLayout.striped if is_striped else BlockLayout.contiguous
        layouts = make(self.q_lens, *mesh), make(self.kv_lens, *mesh)
        return self.planner(way, mesh).plan(masks, *layouts)

    @property
    def size(self) -> CallSize:
        """The sizes of a call of one sequence."""
        return CallSize(1, self.head_dim, self.head_dim * self.itemsize)

    def seconds(self, plan: SparsePlan) -> float:
        """Predict the seconds of an attention call under a plan."""
        return self.size.seconds(plan, self.machine)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The measures of a layer's plan on a mesh."""

    mesh: Mesh
    way: str  # one of `WAYS`
    imbalance: float  # rho by the paper's barriers
    critical_path_imbalance: float  # rho where ranks wait for their neighbours alone
    q_moved: float  # share of the (head, block) rows of queries that leave their ring rank
    kv_moved: float  # share of the rows of keys that do
    sent_bytes: float  # before and after attention, of all ranks
    planning_s: float  # with counting the masks
    predicted_s: float  # of the call


def outcome(way: str, masks: Bools, mesh: Mesh, setting: Setting) -> Outcome:
    """Plan a layer of (H, Q, K) masks in one of `WAYS`, and measure the plan."""
    start = time.perf_counter()
    plan = setting.plan(way, masks, mesh)
    planning_s = 0.0 if way == BEFORE else time.perf_counter() - start
    rho, sent = plan.imbalance, plan.wire_bytes(setting.head_dim, setting.itemsize)
    took = planning_s, setting.seconds(plan)
    return Outcome(mesh, way, rho, plan.critical_path_imbalance, *plan.moved, sent, *took)


@dataclass(frozen=True, slots=True)
class Reuse:
    """The reuse of a layer's plan over the steps, on one mesh at one tolerance."""

    state: PlanReuse  # the last plan, and counters
    imbalances: tuple[float, ...] = ()  # of each step, under the plan that it ran with


@dataclass(frozen=True, slots=True)
class LayerRun:
    """The plans and meshes of a layer over the steps."""

    reuses: dict[tuple[Mesh, float], Reuse]  # by mesh and tolerance
    choices: tuple[StrategyChoice, ...]  # mesh of each step, at the setting's tolerance


@dataclass(frozen=True, slots=True)
class Study:
    """The results of a study."""

    name: str  # where the masks come from
    setting: Setting
    masks: Bools  # (H, Q, K) of the first layer in the first step
    outcomes: tuple[Outcome, ...]  # of every layer's first step, on every mesh, in all `WAYS`
    runs: tuple[LayerRun, ...]  # of every layer
    rewards: tuple[tuple[float, Outcome], ...]  # of the paper's greedy, in the first layer

    @property
    def best(self) -> Mesh:
        """The mesh on which attention is fastest with the default plan, by prediction."""
        return min(self.setting.meshes, key=lambda mesh: self.mean(mesh, DEFAULT).predicted_s)

    def mean(self, mesh: Mesh, way: str) -> Outcome:
        """Return an outcome with means over the layers."""
        rows = [astuple(row)[2:] for row in self.outcomes if (row.mesh, row.way) == (mesh, way)]
        return Outcome(mesh, way, *np.mean(rows, axis=0).tolist())


def study(
    name: str,
    layers: Iterable[Iterable[Bools]],
    setting: Setting,
    tolerances: Sequence[float] = (),
    rewards: Sequence[float] = (),
) -> Study:
    """Plan all layers over their steps; the first layer also at other tolerances and rewards."""
    outcomes, runs = list[Outcome](), list[LayerRun]()
    first: Bools | None = None
    for steps in map(iter, layers):
        masks = next(steps)
        outcomes += [outcome(way, masks, mesh, setting) for mesh in setting.meshes for way in WAYS]
        runs.append(run_layer(chain([masks], steps), setting, tolerances if first is None else ()))
        first = masks if first is None else first
    assert first is not None
    by_reward = tuple(
        (reward, outcome("paper", first, mesh, replace(setting, reward=reward)))
        for mesh in setting.meshes
        for reward in rewards
    )
    return Study(name, setting, first, tuple(outcomes), tuple(runs), by_reward)


def run_layer(steps: Iterable[Bools], setting: Setting, tolerances: Sequence[float]) -> LayerRun:
    """Plan a layer with (H, Q, K) masks per step; a step runs with the plan made before it."""
    states: dict[tuple[Mesh, float], PlanReuse] = {}
    imbalances: dict[tuple[Mesh, float], list[float]] = {}
    strategies, choices = Strategies(setting.machine), list[StrategyChoice]()
    for masks in steps:
        if states:
            states = {key: state.after(masks) for key, state in states.items()}
        else:
            for mesh in setting.meshes:
                planner, plan = setting.planner(DEFAULT, mesh), setting.plan(DEFAULT, masks, mesh)
                for tolerance in (setting.tolerance, *tolerances):
                    states[mesh, tolerance] = PlanReuse(planner, plan, tolerance)
        ran = {key: state.ran or state.plan for key, state in states.items()}
        for key, plan in ran.items():
            imbalances.setdefault(key, []).append(plan.imbalance)
        plans = {mesh: ran[mesh, setting.tolerance] for mesh in setting.meshes}
        seconds_of = strategies.seconds_of(plans, setting.size)
        choices.append(strategies.choose(seconds_of, choices[-1] if choices else None))
    reuses = {key: Reuse(state, tuple(imbalances[key])) for key, state in states.items()}
    return LayerRun(reuses, tuple(choices))
