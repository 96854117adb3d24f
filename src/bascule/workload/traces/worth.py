"""The worth of balancing in a run: its steps' times and lengths, a cost model, a plan.

Legend: S steps, R ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from bascule.arrays import Floats
from bascule.errors import ConfigError
from bascule.plan import metrics
from bascule.plan.checks import MAX_RANKS, shown, whole
from bascule.plan.costs import PolynomialCost, evaluate
from bascule.plan.files import read_json_lines
from bascule.plan.fits import TYPICAL_CROSSOVER_TOKENS, fit_iterations
from bascule.plan.marks import Origin, What
from bascule.plan.plan import Plan, plan_batch
from bascule.plan.sequences import check_lengths
from bascule.plan.topology import Topology
from bascule.workload.traces.reading import RankTrace
from bascule.workload.traces.steps import StepParts

Lengths = Mapping[tuple[int, int], Sequence[int]]
"""Tokens of each sequence, by the numbers of step and rank."""

MAX_ERROR = 0.3
"""Error with which steps may predict each other; it is shown with the result. A profile has few
steps, and single ones are noisy where machines are shared; their mean is less so."""

MAX_MODEL_ERROR = 0.15
"""Share by which the model may miss the mean step as it was run."""

CONFIDENCE = 0.95
"""Probability that the interval of a predicted speed-up holds it."""

_DRAWS = 200


@dataclass(frozen=True, slots=True)
class RunLengths:
    """Lengths that ranks computed on, and those that they had loaded, by step and rank."""

    computed: Lengths
    loaded: Lengths


@dataclass(frozen=True, slots=True)
class Worth:
    """The steps whose lengths are known, as measured, by the model, and with a plan."""

    cost: PolynomialCost  # seconds of a sequence on a rank; its `fit` says how well the steps agree
    topology: str  # the bags that were planned for
    num_steps: int  # S, of which lengths are known
    measured_s: float  # mean seconds of a step, as measured
    model_s: float  # the same by the cost model
    as_loaded_s: float  # by the model, if every rank had computed what it loaded
    balanced_s: float  # by the model, with the plan
    imbalance: float  # max over mean of the model's loads, as run; mean over the steps
    balanced_imbalance: float  # the same with the plan
    moved_share: float  # share of the tokens that the plan moves
    # 95 % of what the speed-up may be, by what noise and few steps leave open of the cost model,
    # and the fit's assumptions with them; not by what the model leaves out
    speedup_range: tuple[float, float]

    @property
    def assumed(self) -> tuple[str, ...]:
        """Coefficients that the steps do not show, so that assumptions of the fit decide."""
        fit = self.cost.fit
        return () if fit is None else fit.unidentified

    @property
    def assumed_in_words(self) -> str | None:
        """A sentence on them; None if the steps show all."""
        if not self.assumed:
            return None
        crossover = f", attention to outweigh the rest from {TYPICAL_CROSSOVER_TOKENS:,} tokens on"
        return (
            f"the steps do not show how much of the time is {', '.join(self.assumed)}: the fit "
            f"assumes it{crossover if {'quadratic', 'linear'} & set(self.assumed) else ''}; the "
            "interval counts what that may be off by, and more unlike lengths narrow it"
        )

    @property
    def speedup(self) -> float:
        """Measured step over predicted step; moving is not priced."""
        return self.model_s / self.balanced_s

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of a balanced step: what the model leaves open is scaled with it."""
        return self.measured_s / self.speedup

    @property
    def model_error(self) -> float:
        """The share by which the model's steps as run are longer than measured."""
        return self.model_s / self.measured_s - 1.0


def lengths_of(traces: Sequence[RankTrace]) -> RunLengths:
    """Read lengths from the names of ranges, see `LengthMark`; many in a step add up.

    Those of a step of `SequenceParallel` count before those of a loader's batches, and these before
    a user's.
    """
    origins = {mark.origin for trace in traces for _, mark in trace.marks}
    for origin in cast(tuple[Origin, ...], ("step", "batch", "")):
        if origin in origins:
            computed, loaded = (_by_step(traces, origin, what) for what in ("lens", "loaded"))
            return RunLengths(computed, computed | loaded)
    return RunLengths({}, {})


def _by_step(
    traces: Sequence[RankTrace], origin: Origin, what: What
) -> dict[tuple[int, int], list[int]]:
    lens: dict[tuple[int, int], list[int]] = {}
    for trace in traces:
        marks = [one for one in trace.marks if (one[1].origin, one[1].what) == (origin, what)]
        place = np.searchsorted(trace.host[:, 0], [time for time, _ in marks], "right") - 1
        for (time, mark), step in zip(marks, place.tolist(), strict=True):
            if step < 0 or time >= trace.host[step, 1]:
                continue
            if mark.shared_by > 1:
                raise ConfigError(
                    f"rank {trace.rank} shared its sequences with {mark.shared_by - 1} others, and "
                    "a cost model is fitted to ranks that compute alone: trace a run with bags of "
                    "one rank"
                )
            lens.setdefault((int(trace.numbers[step]), trace.rank), []).extend(mark.lens)
    return lens


def read_lens(path: str | Path) -> RunLengths:
    """Read a JSONL file with rows such as ``{"step": 3, "rank": 0, "lens": [512, 64]}``.

    Several rows of a step and rank, such as its microbatches, add up.
    """
    lens: dict[tuple[int, int], list[int]] = {}
    for where, row in read_json_lines(path):
        if not isinstance(row, dict) or not {"step", "rank", "lens"} <= row.keys():
            raise ConfigError(
                f'{where} is {shown(row)}: give {{"step": 0, "rank": 0, "lens": [..]}}'
            )
        row = cast(dict[str, object], row)
        step = whole(f"{where}: step", row["step"])
        rank = whole(f"{where}: rank", row["rank"], 0, MAX_RANKS - 1)
        try:
            _, tokens = check_lengths([cast(list[int], row["lens"])], 1)
        except ConfigError as error:
            raise ConfigError(f"{where}: {str(error).removeprefix('rank 0, ')}") from None
        lens.setdefault((step, rank), []).extend(tokens.tolist())
    return RunLengths(lens, lens)


def balancing_worth(parts: StepParts, lens: RunLengths, topology: str | None = None) -> Worth:
    """Fit the cost model to the ranks' own seconds, plan the steps again, and compare.

    A step is taken to be as long as its slowest rank, so as where ranks wait for each other once a
    step. What moving would cost is not in it, nor are the wires of bags.

    Args:
        parts: The steps.
        lens: What ranks computed; steps in which that of a rank is not known are left out.
        topology: Bags to plan for. Default: one rank each.
    """
    if parts.num_missing:
        raise ConfigError(f"{parts.missing}: give those of all ranks")
    ranks, places = parts.ranks.tolist(), _known_places(parts, lens.computed)
    steps = parts.steps[places].tolist()
    computed, loaded = (
        [[known[step, rank] for rank in ranks] for step in steps]
        for known in (lens.computed, lens.loaded)
    )
    cost = fit_iterations(computed, parts.own[places], max_loo_error=MAX_ERROR)
    bags = Topology.parse(topology or f"g1n{len(ranks)}", world_size=len(ranks))
    plans = [plan_batch(each, bags, cost) for each in loaded]
    as_run = np.array([[evaluate(cost, one).sum() for one in each] for each in computed])
    as_loaded = np.array([plan.unbalanced_loads(cost) for plan in plans])
    balanced = np.array([plan.loads for plan in plans])
    tokens = sum(int(plan.seq_lens.sum()) for plan in plans)
    mean = [
        float(loads.max(axis=1).mean()) + cost.overhead for loads in (as_run, as_loaded, balanced)
    ]
    if not mean[2] > 0:
        raise ConfigError("the cost model gives every step 0 s: measure steps that compute")
    worth = Worth(
        cost=cost,
        topology=str(bags),
        num_steps=len(places),
        measured_s=float(parts.step_seconds[places].mean()),
        model_s=mean[0],
        as_loaded_s=mean[1],
        balanced_s=mean[2],
        imbalance=float(np.mean([metrics.imbalance(loads) for loads in as_run])),
        balanced_imbalance=float(np.mean([metrics.imbalance(loads) for loads in balanced])),
        moved_share=sum(plan.moved_tokens for plan in plans) / tokens if tokens else 0.0,
        speedup_range=_speedup_range(
            cost, _work(computed), np.stack([_planned_work(plan) for plan in plans])
        ),
    )
    if abs(worth.model_error) > MAX_MODEL_ERROR:
        raise ConfigError(
            f"by the lengths, a step would be {worth.model_error:+.0%} off what was measured: they "
            "do not explain these seconds; profile more steps, with more unlike lengths, on ranks "
            "that nothing else uses"
        )
    return worth


def _known_places(parts: StepParts, computed: Lengths) -> list[int]:
    """Return the places of the steps of which the lengths of all ranks are known."""
    ranks, steps = parts.ranks.tolist(), parts.steps.tolist()
    places = [p for p, step in enumerate(steps) if all((step, rank) in computed for rank in ranks)]
    if not places and computed:
        rows = sorted(computed)
        raise ConfigError(
            "lengths of all ranks are known of none of the steps in the traces: those are "
            f"{steps[0]} to {steps[-1]} of ranks {ranks[0]} to {ranks[-1]}, and lengths are given "
            f"of steps {rows[0][0]} to {rows[-1][0]}"
        )
    if not places:
        raise ConfigError(
            "of no step are the lengths of all ranks known: give --lens, or name a range in each "
            'step, as in record_function("bascule::lens [512,64]")'
        )
    return places


def _work(seq_lens: Sequence[Sequence[Sequence[int]]]) -> Floats:
    """Return (S, R, 3) sums of L^2 and of L, and number of the sequences of each rank."""
    return np.array(
        [[_sums(np.asarray(lens, np.float64)).sum(axis=0) for lens in step] for step in seq_lens]
    )


def _sums(lens: Floats) -> Floats:
    """Return (n, 3): what the coefficients of a cost multiply, of each sequence."""
    return np.stack([lens**2, lens, np.ones_like(lens)], axis=1)


def _planned_work(plan: Plan) -> Floats:
    """Return (R, 3), the same as planned: ranks of a bag have equal parts of its sequences."""
    topology = plan.topology
    each = _sums(plan.seq_lens.astype(np.float64))
    sums = [np.bincount(plan.bag_of, column, topology.num_bags) for column in each.T]
    return (np.stack(sums, axis=1) / topology.bag_sizes[:, None])[topology.bag_of_rank]


def _speedup_range(cost: PolynomialCost, run: Floats, planned: Floats) -> tuple[float, float]:
    """Return the interval of a plan's speed-up, from work (S, R, 3) as run and as planned.

    Coefficients are drawn from the normal distribution of the fit and cut off at 0; the plan stays
    as it is, since it was made for the fitted ones.
    """
    assert cost.fit is not None
    mean = np.array([cost.quadratic, cost.linear, cost.constant, cost.overhead])
    covariance = np.array(cost.fit.covariance)
    # Seconds a square token are 1e-9, seconds a step 0.1: only correlations can be decomposed.
    errors = np.sqrt(covariance.diagonal())
    unit = np.where(errors > 0, errors, 1.0)
    correlation = covariance / np.outer(unit, unit)
    chance = np.random.default_rng(0)
    none = np.zeros(mean.size)
    drawn = chance.multivariate_normal(
        none, correlation, _DRAWS, check_valid="ignore", method="eigh"
    )
    drawn = np.maximum(mean + unit * drawn, 0.0)
    seconds = np.array(
        [[(work @ one[:3]).max(axis=1).mean() + one[3] for work in (run, planned)] for one in drawn]
    )
    ratios = seconds[:, 0] / np.maximum(seconds[:, 1], np.finfo(float).tiny)
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return low, high
