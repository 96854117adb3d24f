"""What balancing would be worth in a run: its steps' times and lengths, a cost model, a plan.

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
from bascule.plan.files import parse_json, read_lines
from bascule.plan.fits import TYPICAL_CROSSOVER_TOKENS, fit_iterations
from bascule.plan.marks import LengthMark, Origin, What
from bascule.plan.plan import Plan, plan_batch
from bascule.plan.sequences import check_lengths
from bascule.plan.topology import Topology
from bascule.workload.traces.reading import RankTrace
from bascule.workload.traces.steps import StepParts

Lengths = Mapping[tuple[int, int], Sequence[int]]
"""Tokens of each sequence, by the numbers of step and rank."""


MAX_ERROR = 0.3
"""Error with which steps may predict each other; it is told with the result. A profile has few
steps, and single ones are noisy where machines are shared; their mean is less so."""

MAX_MODEL_ERROR = 0.15
"""Share by which the model may miss the mean step as it was run."""


CONFIDENCE = 0.95
"""Of the interval of a predicted speed-up."""

_DRAWS = 200


@dataclass(frozen=True, slots=True)
class RunLengths:
    """What ranks computed on, and what they had loaded.

    Attributes:
        computed: Of each step and rank.
        loaded: The same, where something else was loaded than computed.
    """

    computed: Lengths
    loaded: Lengths


@dataclass(frozen=True, slots=True)
class Worth:
    """What a plan would make of the steps whose lengths are known.

    Attributes:
        cost: Seconds of a sequence on a rank; its `fit` says how well the steps agree.
        topology: The bags that were planned for.
        num_steps: S, of which lengths are known.
        measured_s: Mean seconds of a step, as measured.
        model_s: The same by the cost model.
        as_loaded_s: By the model, if every rank had computed what it loaded.
        balanced_s: By the model, with the plan.
        imbalance: Max over mean of the model's loads, as run; mean over the steps.
        balanced_imbalance: The same with the plan.
        moved_share: Share of the tokens that the plan moves.
        speedup_range: 95 % of what the speed-up may be, by what noise and few steps leave open of
            the cost model, and the fit's assumptions with them; not by what the model leaves out.
    """

    cost: PolynomialCost
    topology: str
    num_steps: int
    measured_s: float
    model_s: float
    as_loaded_s: float
    balanced_s: float
    imbalance: float
    balanced_imbalance: float
    moved_share: float
    speedup_range: tuple[float, float]

    @property
    def assumed(self) -> tuple[str, ...]:
        """Coefficients that the steps do not tell, so that assumptions of the fit decide."""
        fit = self.cost.fit
        return () if fit is None else fit.unidentified

    @property
    def assumed_in_words(self) -> str | None:
        """A sentence on them; None if the steps tell all."""
        if not self.assumed:
            return None
        crossover = f", attention to outweigh the rest from {TYPICAL_CROSSOVER_TOKENS:,} tokens on"
        return (
            f"the steps do not tell how much of the time is {', '.join(self.assumed)}: the fit "
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
        """By what share the model's steps as run are longer than measured."""
        return self.model_s / self.measured_s - 1.0


def lengths_of(traces: Sequence[RankTrace]) -> RunLengths:
    """Lengths from the names of ranges in the traces, see `LengthMark`; many in a step add up.

    Those that a step of `SequenceParallel` said count before those of a loader's batches, and these
    before a user's.

    Raises:
        ConfigError: Ranks shared sequences.
    """
    origins = {mark.origin for trace in traces for _, mark in trace.events.marks}
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
        events = trace.events
        said = [
            (time, mark)
            for time, mark in events.marks
            if (mark.origin, mark.what) == (origin, what)
        ]
        place = np.searchsorted(events.host[:, 0], [time for time, _ in said], "right") - 1
        for (time, mark), step in zip(said, place.tolist(), strict=True):
            if step >= 0 and time < events.host[step, 1]:
                _check_alone(mark, trace.rank)
                lens.setdefault((int(events.numbers[step]), trace.rank), []).extend(mark.lens)
    return lens


def _check_alone(mark: LengthMark, rank: int) -> None:
    if mark.shared_by > 1:
        raise ConfigError(
            f"rank {rank} shared its sequences with {mark.shared_by - 1} others, and a cost model "
            "is fitted to ranks that compute alone: trace a run with bags of one rank"
        )


def read_lens(path: str | Path) -> RunLengths:
    """Read a JSONL file with rows such as ``{"step": 3, "rank": 0, "lens": [512, 64]}``.

    Several rows of a step and rank, such as its microbatches, add up.

    Raises:
        ConfigError: Names the file, the line and the bad value.
    """
    lens: dict[tuple[int, int], list[int]] = {}
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        row = parse_json(line, where)
        if not isinstance(row, dict) or not {"step", "rank", "lens"} <= row.keys():
            raise ConfigError(
                f'{where} is {shown(row)}: give {{"step": 0, "rank": 0, "lens": [..]}}'
            )
        row = cast(dict[str, object], row)
        step = whole(f"{where}: step", row["step"])
        rank = whole(f"{where}: rank", row["rank"], 0, MAX_RANKS - 1)
        try:
            _, found = check_lengths([cast(list[int], row["lens"])], 1)
        except ConfigError as error:
            raise ConfigError(f"{where}: {str(error).removeprefix('rank 0, ')}") from None
        lens.setdefault((step, rank), []).extend(found.tolist())
    return RunLengths(lens, lens)


def balancing_worth(parts: StepParts, lens: RunLengths, topology: str | None = None) -> Worth:
    """Fit the cost model to the ranks' own seconds, plan the steps again, and compare.

    A step is taken to be as long as its slowest rank, so as where ranks wait for each other once a
    step. What moving would cost is not in it, nor are the wires of bags.

    Args:
        parts: The steps.
        lens: What ranks computed; steps in which that of a rank is not known are left out.
        topology: Bags to plan for. Default: one rank each.

    Raises:
        ConfigError: No lengths are known, they do not explain the seconds (`fit_iterations`, or the
            mean step is missed by more than `MAX_MODEL_ERROR`), or the topology does not fit.
    """
    if parts.num_missing:
        raise ConfigError(f"{parts.num_missing} ranks have no trace: give those of all ranks")
    ranks = parts.ranks.tolist()
    places = [
        place
        for place, step in enumerate(parts.steps.tolist())
        if all((step, rank) in lens.computed for rank in ranks)
    ]
    if not places and lens.computed:
        steps, rows = parts.steps.tolist(), sorted(lens.computed)
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
    found = Worth(
        cost,
        str(bags),
        len(places),
        float(parts.step_seconds[places].mean()),
        mean[0],
        mean[1],
        mean[2],
        float(np.mean([metrics.imbalance(loads) for loads in as_run])),
        float(np.mean([metrics.imbalance(loads) for loads in balanced])),
        sum(plan.moved_tokens for plan in plans) / tokens if tokens else 0.0,
        _range(cost, _work(computed), np.stack([_planned_work(plan) for plan in plans])),
    )
    if abs(found.model_error) > MAX_MODEL_ERROR:
        raise ConfigError(
            f"by the lengths, a step would be {found.model_error:+.0%} off what was measured: they "
            "do not explain these seconds; profile more steps, with more unlike lengths, on ranks "
            "that nothing else uses"
        )
    return found


def _work(seq_lens: Sequence[Sequence[Sequence[int]]]) -> Floats:
    """(S, R, 3) sums of L^2 and of L, and number of the sequences of each rank."""
    return np.array(
        [
            [_sums(np.asarray(lens, dtype=np.float64)).sum(axis=0) for lens in step]
            for step in seq_lens
        ]
    )


def _sums(lens: Floats) -> Floats:
    """(n, 3) what the coefficients of a cost multiply, of each sequence."""
    return np.stack([lens**2, lens, np.ones_like(lens)], axis=1)


def _planned_work(plan: Plan) -> Floats:
    """(R, 3) the same as planned: ranks of a bag have equal parts of its sequences."""
    topology = plan.topology
    each = _sums(plan.seq_lens.astype(np.float64))
    sums = [np.bincount(plan.bag_of, column, topology.num_bags) for column in each.T]
    return (np.stack(sums, axis=1) / topology.bag_sizes[:, None])[topology.bag_of_rank]


def _range(cost: PolynomialCost, run: Floats, planned: Floats) -> tuple[float, float]:
    """The interval of the speed-up of a given plan, by drawing what the fit leaves open.

    Coefficients are drawn from the normal distribution of the fit and cut off at 0; the plan stays
    as it is, since it was made for the fitted ones.

    Args:
        cost: Fitted.
        run: (S, R, 3) as run, see `_work`.
        planned: (S, R, 3) as planned.
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
