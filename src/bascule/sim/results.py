"""Results of simulated training, and their report."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

import numpy as np

from bascule.arrays import Bools, Floats, Ints
from bascule.checks import choice
from bascule.machine.cluster import HardwareProfile
from bascule.machine.costs import TransformerCost
from bascule.plan import metrics
from bascule.quantities import Scale, money, num_bytes, number, percent, seconds, times
from bascule.report.charts import draw_bars
from bascule.report.page import Fact, Format, Report, Rows
from bascule.sim.seconds import HIDDEN, KINDS, SimulationOptions

_WIDTH = 120  # of a table as text
_LITTLE = 0.01  # share of a step's time that is not worth a word
_LEAST_GAIN = 1.05  # held-out steps of the published table are within 5 %
_EXCHANGES = ("ulysses", "ring", "routing", "all_gather", "reduce_scatter", "loader")
_WORDS = {
    "ulysses": "Ulysses",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "loader": "data loader",
}
_OURS, _DEALT = "bascule", ("buckets", "packs")
_REGROUPS = "changes which samples train together"

_Columns = dict[str, tuple[Format, Callable[["SimulatedRun"], Any]]]
"""Format, and value of a run, by heading."""


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRun:
    """A simulation of one policy, on N ranks: M microbatches, `accumulate` per step."""

    name: str  # of the policy
    accumulate: int
    seconds: Floats  # (M, len(KINDS), N) of each rank, by kind
    hidden: Floats  # (M, len(HIDDEN), N) seconds of exchanges that no rank waited for
    stage_s: Floats  # (M, len(stages), N) of each encoder; their sum is the kind "encoders"
    tokens: Ints  # (M,) without padding
    padding: Ints  # (M,) tokens that are computed beside them
    is_alone: Bools  # (M,) one sequence is nearly all work of the busiest ranks
    flops: Floats  # (M,) of all passes, without padding, attention in full, as KnapFormer, 4.2
    workloads: Floats  # (M, N) cost of each rank by the model: forward, without wires
    activation_bytes: Floats  # (M, N) kept until the backward pass
    peak_flops_per_s: float | None  # of all ranks; None if the profile has none
    stages: tuple[str, ...]  # names of the encoders
    parts: int = 1  # microbatches into which each given one was cut to fit into the memory
    given_bytes: float = 0.0  # most activations of a rank in a microbatch as given

    @property
    def whose(self) -> str:
        """The origin of the policy: bascule, today's practice, or KnapFormer."""
        if self.name.startswith("knapsack"):
            return "KnapFormer"
        is_theirs = self.name in ("none", "padded") or self.name.startswith(_DEALT)
        return "today's practice" if is_theirs else _OURS

    @property
    def means(self) -> dict[str, float]:
        """Mean seconds per rank and step, by kind of work, with each encoder as a kind."""
        kinds = dict(zip(KINDS, self._mean(self.seconds), strict=True))
        del kinds["encoders"]
        return dict(zip(self.stages, self._mean(self.stage_s), strict=True)) | kinds

    def _mean(self, seconds: Floats) -> list[float]:
        """Return (K,) mean seconds of a rank and step from (M, K, N) of microbatches."""
        return (seconds.mean(axis=(0, 2)) * self.accumulate).tolist()

    def spent_on(self, kind: str) -> Floats:
        """Return the (M, N) seconds of a kind of work."""
        return self.seconds[:, KINDS.index(choice("kind", kind, *KINDS))]

    @property
    def microbatch_s(self) -> Floats:
        """(M,) seconds of each microbatch, the same on all ranks."""
        return self.seconds[:, :, 0].sum(axis=1)

    @property
    def fbl_s(self) -> float:
        """Mean seconds of forward and backward of a step."""
        return float(self.microbatch_s.mean()) * self.accumulate

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, over all ranks."""
        return float(self.tokens.sum() / self.microbatch_s.sum())

    @property
    def hfu(self) -> float | None:
        """FLOPs over the FLOPs of all ranks at their peak; None if the profile has no peak."""
        if self.peak_flops_per_s is None:
            return None
        return float(self.flops.sum() / self.microbatch_s.sum()) / self.peak_flops_per_s

    @property
    def wir(self) -> float:
        """Mean of max over min of the ranks' workloads; infinite if a rank is ever idle."""
        return float(np.mean([metrics.wir(loads) for loads in self.workloads]))

    @property
    def idle_share(self) -> float:
        """Share of all seconds in which ranks wait for others."""
        return float(self.spent_on("waiting").sum() / self.seconds.sum())

    @property
    def most_activation_bytes(self) -> float:
        """Most bytes of activations that a rank holds in any microbatch."""
        return float(self.activation_bytes.max())

    def to_dict(self) -> dict[str, Any]:
        """Return metrics and mean seconds per rank and step; an infinite `wir` becomes None."""
        stages = dict[str, Any]()
        for name, spent in zip(self.stages, self.stage_s.swapaxes(0, 1), strict=True):  # (M, N)
            imbalance = float(np.mean([metrics.imbalance(seconds) for seconds in spent]))
            slowest = float(spent.max(axis=1).mean()) * self.accumulate
            stages[name] = {"imbalance": imbalance, "seconds": slowest}
        names = "name", "fbl_s", "tokens_per_s", "hfu", "idle_share", "parts", "whose"
        return {name: getattr(self, name) for name in names} | {
            "wir": self.wir if np.isfinite(self.wir) else None,
            "activation_bytes": self.most_activation_bytes,
            "given_activation_bytes": self.given_bytes,
            "why": _why(self),
            "seconds": dict(zip(KINDS, self._mean(self.seconds), strict=True)),
            "hidden_seconds": dict(zip(HIDDEN, self._mean(self.hidden), strict=True)),
            "stages": stages,
        }


@dataclass(frozen=True, slots=True, eq=False)
class SimulationResult:
    """Runs of the same data under each policy, compared with the first run that fits."""

    profile: HardwareProfile
    runs: tuple[SimulatedRun, ...]
    model: TransformerCost
    options: SimulationOptions
    sequences: float  # mean number on a rank in a microbatch
    num_steps: int
    tokens_per_step: float  # as loaded, on all ranks

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the simulated cluster."""
        return self.runs[0].seconds.shape[2]

    @property
    def num_params(self) -> int:
        """Number of parameters of the model."""
        return self.options.sharding.params_of(self.model)

    def fits(self, run: SimulatedRun) -> bool | None:
        """Return whether activations fit into a rank's memory; None if the memory is not known."""
        memory = self.profile.memory_bytes
        return None if memory is None else run.most_activation_bytes <= memory

    @property
    def reference(self) -> SimulatedRun | None:
        """The run that others are compared with: the first that fits; None if none does."""
        return next((run for run in self.runs if self.fits(run) is not False), None)

    def fastest(self, whose: str = "") -> SimulatedRun | None:
        """Return the fastest run that fits, of all or of one origin; never the reference."""
        fitting = [run for run in self.runs if self.fits(run) is not False and whose in run.whose]
        fitting = [run for run in fitting if run is not self.reference]
        return max(fitting, key=lambda run: run.tokens_per_s, default=None)

    def speedup(self, run: SimulatedRun) -> float | None:
        """Return a run's tokens per second over the reference's; None if it does not fit."""
        if self.reference is None or self.fits(run) is False:
            return None
        return run.tokens_per_s / self.reference.tokens_per_s

    def gpu_hours(self, run: SimulatedRun) -> float | None:
        """Return GPU-hours for the tokens of `train_steps` steps; None if the run does not fit.

        Steps of an epoch are as loaded, others are steps of the first run, which the user does now.
        """
        tokens, first = self.tokens_per_step, self.runs[0]
        if not self.options.is_epoch:
            tokens = float(first.tokens.mean()) * first.accumulate
        hours = tokens * self.options.train_steps / run.tokens_per_s * self.num_ranks / 3600
        return None if self.fits(run) is False else hours

    def saved_gpu_hours(self, run: SimulatedRun) -> float | None:
        """Return the GPU-hours that a run saves against the reference; None if it does not fit."""
        ratio, hours = self.speedup(run), self.gpu_hours(run)
        return None if ratio is None or hours is None else hours * ratio - hours

    def saved_money(self, run: SimulatedRun) -> float | None:
        """Return the price of the saved GPU-hours; None if hours or price are not known."""
        price, hours = self.options.gpu_hour_price, self.saved_gpu_hours(run)
        return None if price is None or hours is None else hours * price

    def label(self, run: SimulatedRun) -> str:
        """Name a run, with its number of microbatches if it needs more than were given to fit."""
        if self.fits(run) is False:
            return f"{run.name}, does not fit"
        return run.name if run.parts == 1 else f"{run.name} in {run.accumulate} microbatches"

    @property
    def warnings(self) -> list[str]:
        """A sentence that names runs that exceed the memory, and the remedy; empty if none do."""
        memory = self.profile.memory_bytes or math.inf
        large = [run for run in self.runs if run.given_bytes > memory]
        if not large:
            return []
        needs = ", ".join(f"{num_bytes(run.given_bytes)} in {run.name}" for run in large)
        return [
            f"as given, activations of a rank exceed its memory of {num_bytes(memory)} "
            f"({self.profile.provenance_of('memory_bytes')}): {needs}. Give a rank fewer samples "
            "at once, and accumulate them, as rows in microbatches do; or use larger bags, whose "
            "ranks share each sequence; or set --kb-per-token if your activations are smaller"
        ]

    @property
    def answer(self) -> str:
        """The answer in words: today's step, and the step with bascule."""
        first, reference, fastest = self.runs[0], self.reference, self.fastest()
        best, waits = self.fastest(_OURS) or fastest, percent(first.idle_share)
        what = f"With what you do now ({first.name})"
        if first.name == "none":  # the default, which the user may never have said
            what = "If each rank computes the samples that it loads (none)"
        needs = f"{what}, activations need {num_bytes(first.given_bytes)}, and a rank has "
        needs += num_bytes(self.profile.memory_bytes)
        if reference is None:
            return f"{needs}. Nothing here fits, even with one sample per rank at a time."
        keep = "Leave it as it is: " if first is reference else ""
        now = f"{what}, ranks wait {waits} of the time."
        if first is not reference:
            now = f"{needs}: one sample at a time does not fit either. "
            now += f"Speed-ups are over {self.label(reference)}, the first row that fits."
        elif first.parts > 1:
            now = f"{needs}; in {first.accumulate} microbatches they fit, and ranks wait {waits} "
            now += "of the time."
        if best is None or fastest is None:
            return f"{now} Nothing here is faster{keep and ': leave it as it is'}."
        ratio = best.tokens_per_s / reference.tokens_per_s
        who = f"bascule ({self.label(best)})" if best.whose == _OURS else self.label(best)
        gain = f"{who} is {times(ratio)} as fast"
        if ratio < _LEAST_GAIN:
            gain = f"{keep}{gain}{', and the simulation may be off by 5 %' * (ratio > 1)}."
        else:
            gain += f", which saves {number(self.saved_gpu_hours(best))} of "
            gain += f"{number(self.gpu_hours(reference))} GPU-hours"
            if (pay := self.saved_money(best)) is not None:
                gain += f" ({money(pay, self.options.currency)})"
            gain += f" in {self.options.period}."
        if (rival := times(self.speedup(fastest))) != times(ratio):
            gain += f" {self.label(fastest)} is {rival} as fast, without bascule"
            gain += f", and {_REGROUPS}" * fastest.name.startswith(_DEALT) + "."
        return f"{now} {gain}"

    def to_report(self) -> Report:
        """Return a report that compares the predicted times of the policies."""
        runs, options, period = self.runs, self.options, self.options.period
        best = self.fastest(_OURS) or self.fastest() or self.reference or runs[0]
        kinds = [name for name in runs[0].means if any(run.means[name] > 0 for run in runs)]
        # Steps that hold a million tokens, by run.
        steps = [run.tokens.size / run.accumulate / run.tokens.sum() * 1e6 for run in runs]
        spent = [(run.means, s) for run, s in zip(runs, steps, strict=True)]
        bars = {_word(kind): [means[kind] * s for means, s in spent] for kind in kinds}
        step = Scale.of([run.fbl_s for run in runs], "s")
        memory = Scale.of([run.most_activation_bytes for run in runs], "B")
        against = "nothing that fits" if self.reference is None else self.label(self.reference)
        against = f"compared with {against}"
        worth: _Columns = {
            against: ("{}", lambda run: self.label(run) + ": what you do now" * (run is runs[0])),
            "speed-up": (times, self.speedup),
            f"GPU-hours, {period}": (number, self.gpu_hours),
            "GPU-hours saved": (number, self.saved_gpu_hours),
        }
        label: _Columns = {"": ("{}", self.label)}
        why: _Columns = {**label, "whose": ("{}", lambda run: run.whose), "why": ("{}", _why)}
        metrics: _Columns = {
            **label,
            "max / min of work": (number, lambda run: run.wir),
            f"step, {step.unit}": (step, lambda run: run.fbl_s),
            "tokens per second": (number, lambda run: run.tokens_per_s),
            "share of peak FLOP/s": (percent, lambda run: run.hfu),
            f"activations, {memory.unit}": (memory, lambda run: run.most_activation_bytes),
        }
        shares = label.copy()
        shares |= {
            _word(kind): (percent, lambda run, kind=kind: run.means[kind] / run.fbl_s or None)
            for kind in kinds
        }
        hours = f"GPU-hours saved in {period}"
        which = "what you do now" if best is runs[0] else "fastest"
        which = "best of bascule" if best.whose == _OURS else which
        facts = (
            Fact("best", which, self.label(best)),
            Fact("over_first", f"speed-up, {against}", self.speedup(best), times),
            Fact("fbl_s", "a step takes", best.fbl_s, seconds),
            Fact("idle_share", "ranks wait", best.idle_share, percent),
            Fact("saved_gpu_hours", hours, self.saved_gpu_hours(best), number),
        )
        if (price := options.gpu_hour_price) is not None:
            pay = partial(money, currency=options.currency)
            facts += (Fact("saved_money", f"saved in {period}", self.saved_money(best), pay),)
            worth[f"saved, at {pay(price)} per GPU-hour"] = pay, self.saved_money
        is_guessed = options.sharding.num_params is None
        return Report(
            title=f"Training simulated on {self.num_ranks} ranks",
            answer=self.answer,
            facts=facts,
            parts=(
                self._rows("What it is worth", worth),
                self._rows("Why", why),
                draw_bars(
                    "Time to train on a million tokens",
                    "Where the time of a rank goes, on average over ranks and steps. All bars are "
                    "for as many tokens, since steps of packs and buckets may hold more or fewer.",
                    [self.label(run) for run in runs],
                    bars,
                    "s",
                ),
                self._rows("Metrics", metrics),
                self._rows("Shares of a step's time", shares),
            ),
            notes=(
                *(f"warning: {line}" for line in self.warnings),
                *([f"In all steps, {options.troubles}."] if options.troubles else []),
                f"Simulated, not measured, on {self.num_ranks} ranks of {self.profile}.",
                *([self.profile.note] if self.profile.note else []),
                f"Model and data: {self.model.shape}, {number(self.num_params / 1e9)} billion "
                f"parameters{' of plain blocks (else --params-b)' if is_guessed else ''}; "
                f"{number(self.sequences)} sequences per rank and microbatch on average; steps "
                f"simulated: {self.num_steps:,}, microbatches of each: {options.accumulate:,}. "
                "Memory counts activations alone, not weights and optimizer.",
                f"GPU-hours are for {period} of your run (--train-steps), times {self.num_ranks} "
                "ranks. All rows train on the same number of tokens, so the number of steps may "
                "differ.",
            ),
            values=self.to_dict(),
        )

    def _rows(self, title: str, table: "_Columns") -> Rows:
        formats = {heading: form for heading, (form, _) in table.items()}
        cells = [[value(run) for _, value in table.values()] for run in self.runs]
        return Rows(title, formats, cells)

    def table(self) -> str:
        """Return the report as text, with its tables."""
        from rich.console import Console

        text = StringIO()
        self.to_report().show(Console(file=text, width=_WIDTH, color_system=None))
        return text.getvalue()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        own = "num_ranks", "num_params", "sequences", "num_steps", "warnings"
        settings = "accumulate", "train_steps", "is_epoch", "gpu_hour_price", "currency"
        of_run = "speedup", "gpu_hours", "saved_gpu_hours", "saved_money", "fits"
        return {
            "profile": str(self.profile),
            "memory_bytes": self.profile.memory_bytes,
            "compared_with": None if self.reference is None else self.reference.name,
            "runs": [
                run.to_dict() | {name: getattr(self, name)(run) for name in of_run}
                for run in self.runs
            ],
            **{name: getattr(self.options, name) for name in settings},
            **{name: getattr(self.model, name) for name in ("d_model", "num_layers", "gamma")},
            **{name: getattr(self, name) for name in own},
        }


def _why(run: SimulatedRun) -> str:
    """Say in a few words what makes a run as fast as it is."""
    spent = dict(zip(KINDS, run.seconds.sum(axis=(0, 2)) / run.seconds.sum(), strict=True))
    reason = " for the rank with most work"
    if run.is_alone.mean() >= 0.5:
        reason = " for one long sequence"
        reason += ", which only sharing it among ranks makes faster" * (run.whose == _OURS)
    waits = f"ranks wait {percent(spent['waiting'])}{reason}"
    shares = {
        "exchanges take {}": sum(spent[kind] for kind in _EXCHANGES),
        "encoders take {}": spent["encoders"],
        "the host takes {}": spent["host"],
        "{} of the computed tokens are padding": run.padding.sum()
        / (run.padding + run.tokens).sum(),
    }
    said = [text.format(percent(share)) for text, share in shares.items() if share >= _LITTLE]
    said += [_REGROUPS] * run.name.startswith(_DEALT)
    return "; ".join([waits if spent["waiting"] >= _LITTLE else "ranks hardly wait", *said])


def _word(kind: str) -> str:
    return _WORDS.get(kind, kind.replace("_", " "))
