"""Predict the speed-up of balancing in a run, by a cost model fitted to its times and lengths.

Shapes: S steps, R ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from bascule.checks import MAX_RANKS, check_lengths, shown, whole
from bascule.errors import ConfigError
from bascule.files import read_json_lines
from bascule.machine.costs import PolynomialCost
from bascule.machine.fits import TYPICAL_CROSSOVER_TOKENS, fit_iterations
from bascule.marks import What
from bascule.plan import metrics
from bascule.plan.plan import plan_batch
from bascule.plan.topology import Topology
from bascule.quantities import percent
from bascule.workload.traces.reading import RankTrace
from bascule.workload.traces.steps import StepParts

Lengths = Mapping[tuple[int, int], Sequence[int]]  # tokens of sequences, by step and rank

MAX_ERROR = 0.3  # of a step that the fit leaves out: steps are few, and noisy on shared machines
MAX_MODEL_ERROR = 0.15  # share by which the model may miss the mean step as it was run


@dataclass(frozen=True, slots=True)
class RunLengths:
    """The lengths that each rank computed and loaded in each step."""

    computed: Lengths
    loaded: Lengths


@dataclass(frozen=True, slots=True)
class Worth:
    """The mean time of steps with known lengths: measured, by the cost model, and with a plan."""

    cost: PolynomialCost  # seconds of a sequence on a rank; its `fit` has the errors
    topology: str  # the bags that were planned for
    num_steps: int  # S, steps of known lengths
    measured_s: float  # mean seconds of a step, as measured
    model_s: float  # mean seconds of a step, by the model
    as_loaded_s: float  # mean seconds by the model, if every rank had computed what it loaded
    balanced_s: float  # mean seconds by the model, with the plan
    imbalance: float  # max over mean of the model's loads, as run; mean over the steps
    balanced_imbalance: float  # max over mean of the model's loads, with the plan
    moved_share: float  # share of the tokens that the plan moves

    @property
    def assumed(self) -> tuple[str, ...]:
        """Coefficients that the fit assumes because the steps do not determine them."""
        return () if self.cost.fit is None else self.cost.fit.unidentified

    @property
    def assumed_in_words(self) -> str | None:
        """Sentences that name `assumed`; None if the steps determine all coefficients."""
        if not self.assumed:
            return None
        is_split = bool({"quadratic", "linear"} & set(self.assumed))
        crossover = f": attention dominates above {TYPICAL_CROSSOVER_TOKENS:,} tokens"
        what = f"{', '.join(self.assumed)}; assumed{crossover * is_split}"
        alike = "These lengths are too alike to measure which part of the time is"
        return f"{alike} {what}. Trace more varied lengths."

    @property
    def speedup(self) -> float:
        """Predicted time of the steps as run over balanced; moving tokens costs nothing here."""
        return self.model_s / self.balanced_s

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of a balanced step: the measured seconds over the speed-up."""
        return self.measured_s / self.speedup

    @property
    def model_error(self) -> float:
        """Share by which the model's time of the steps exceeds the measured time."""
        return self.model_s / self.measured_s - 1.0


def lengths_of(traces: Sequence[RankTrace]) -> RunLengths:
    """Read lengths from ranges of `SequenceParallel`; without any, of loaders; then of the user."""
    origins = {mark.origin for trace in traces for _, mark in trace.marks}
    origin = next((name for name in ("step", "batch") if name in origins), "")
    lens: dict[What, dict[tuple[int, int], list[int]]] = {"lens": {}, "loaded": {}}
    for trace in traces:
        for time, mark in trace.marks:
            step = int(np.searchsorted(trace.host[:, 0], time, "right")) - 1
            if mark.origin != origin or step < 0 or time >= trace.host[step, 1]:
                continue
            if mark.shared_by > 1:
                wrong = f"rank {trace.rank} shared its sequences with {mark.shared_by - 1} others"
                raise ConfigError(f"{wrong}: to fit a cost model, trace a run without shared ones")
            key = int(trace.numbers[step]), trace.rank
            lens[mark.what].setdefault(key, []).extend(mark.lens)
    return RunLengths(lens["lens"], lens["lens"] | lens["loaded"])


def read_lens(path: str | Path) -> RunLengths:
    """Read a JSONL file of rows ``{"step": 3, "rank": 0, "lens": [512, 64]}``; rows add up."""
    lens: dict[tuple[int, int], list[int]] = {}
    for where, row in read_json_lines(path):
        match row:
            case {"step": step, "rank": rank, "lens": tokens}:
                key = whole(f"{where}: step", step), whole(f"{where}: rank", rank, 0, MAX_RANKS - 1)
            case _:
                fix = 'give {"step": 0, "rank": 0, "lens": [..]}'
                raise ConfigError(f"{where} is {shown(row)}: {fix}")
        try:
            _, tokens = check_lengths([cast(list[int], tokens)], 1)
        except ConfigError as error:
            raise ConfigError(f"{where}: {str(error).removeprefix('rank 0, ')}") from None
        lens.setdefault(key, []).extend(tokens.tolist())
    return RunLengths(lens, lens)


def balancing_worth(parts: StepParts, lens: RunLengths, topology: str | None = None) -> Worth:
    """Fit a cost model to the ranks' own seconds, plan the steps again, and compare.

    A step takes as long as its slowest rank; moving tokens costs nothing here. Steps that lack a
    rank's lengths are left out. `topology` has the bags; by default, each has one rank.
    """
    if parts.num_missing:
        raise ConfigError(f"{parts.missing}; give the traces of all ranks")
    ranks, places = parts.ranks.tolist(), _known_places(parts, lens.computed)
    steps = parts.steps[places].tolist()
    computed, loaded = (
        [[by_rank[step, rank] for rank in ranks] for step in steps]
        for by_rank in (lens.computed, lens.loaded)
    )
    cost = fit_iterations(computed, parts.own[places], max_loo_error=MAX_ERROR)
    bags = Topology.parse(topology or f"g1n{len(ranks)}", world_size=len(ranks))
    plans = [plan_batch(step, bags, cost) for step in loaded]
    as_run, as_loaded = (
        np.array([[float(cost(seq_lens).sum()) for seq_lens in step] for step in lens_of_steps])
        for lens_of_steps in (computed, loaded)
    )
    balanced = np.array([plan.loads for plan in plans])
    as_run_s, as_loaded_s, balanced_s = (
        float(loads.max(axis=1).mean()) + cost.overhead for loads in (as_run, as_loaded, balanced)
    )
    if not balanced_s > 0:
        raise ConfigError("the cost model predicts 0 s for every step: trace steps that compute")
    tokens = sum(int(plan.seq_lens.sum()) for plan in plans)
    worth = Worth(
        cost=cost,
        topology=str(bags),
        num_steps=len(places),
        measured_s=float(parts.step_seconds[places].mean()),
        model_s=as_run_s,
        as_loaded_s=as_loaded_s,
        balanced_s=balanced_s,
        imbalance=float(np.mean([metrics.imbalance(loads) for loads in as_run])),
        balanced_imbalance=float(np.mean([metrics.imbalance(loads) for loads in balanced])),
        moved_share=sum(plan.moved_tokens for plan in plans) / tokens if tokens else 0.0,
    )
    if abs(worth.model_error) > MAX_MODEL_ERROR:
        wrong = f"lengths do not explain the times: the model is {percent(worth.model_error)} off"
        raise ConfigError(f"{wrong} the measured step; trace more steps, of more varied lengths")
    return worth


def _known_places(parts: StepParts, computed: Lengths) -> list[int]:
    """Return the indices of the steps with known lengths of all ranks."""
    ranks, steps = parts.ranks.tolist(), parts.steps.tolist()
    places = [p for p, step in enumerate(steps) if all((step, rank) in computed for rank in ranks)]
    if not places:
        advice = 'give --lens, or name ranges of steps: record_function("bascule::lens [512,64]")'
        if computed:
            lengths = f"lengths are given of steps {min(computed)[0]} to {max(computed)[0]}"
            have = f"steps {steps[0]} to {steps[-1]} of ranks {ranks[0]} to {ranks[-1]}"
            advice = f"the traces have {have}, and {lengths}"
        raise ConfigError(f"no step has the lengths of all ranks: {advice}")
    return places
