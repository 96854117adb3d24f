"""Results of simulated training, and their report."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.checks import choice
from bascule.machine.cluster import HardwareProfile
from bascule.machine.costs import TransformerCost
from bascule.plan import metrics
from bascule.report.charts import draw_bars
from bascule.report.page import Fact, Report, Rows, columns
from bascule.sim.seconds import HIDDEN, KINDS, SimulationOptions

_WIDTH = 120  # of a table as text
_4G = "{:,.4g}"


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRun:
    """A simulation of one policy: N ranks, M microbatches, of which `accumulate` make a step."""

    name: str  # of the policy
    accumulate: int
    seconds: Floats  # (M, len(KINDS), N) of each rank, by kind
    hidden: Floats  # (M, len(HIDDEN), N) seconds of exchanges that no rank waited for
    stage_s: Floats  # (M, len(stages), N) of each encoder; their sum is the kind "encoders"
    tokens: Ints  # (M,) without padding
    flops: Floats  # (M,) of all passes, without padding, attention in full, as KnapFormer, 4.2
    workloads: Floats  # (M, N) cost of each rank by the model: forward, without wires
    activation_bytes: Floats  # (M, N) kept until the backward pass
    peak_flops_per_s: float | None  # of all ranks; None if the profile has none
    stages: tuple[str, ...]  # names of the encoders

    @property
    def means(self) -> dict[str, float]:
        """Mean seconds of a rank and step by kind, encoders one by one."""
        kinds = dict(zip(KINDS, self._mean(self.seconds), strict=True))
        if not self.stages:
            return kinds
        del kinds["encoders"]
        return dict(zip(self.stages, self._mean(self.stage_s), strict=True)) | kinds

    def _mean(self, seconds: Floats) -> list[float]:
        """Return (K,) mean seconds of a rank and step from (M, K, N) of microbatches."""
        return (seconds.mean(axis=(0, 2)) * self.accumulate).tolist()

    def spent_on(self, kind: str) -> Floats:
        """Return the (M, N) seconds of a kind."""
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
        """Tokens in a second, over all ranks."""
        return float(self.tokens.sum() / self.microbatch_s.sum())

    @property
    def hfu(self) -> float | None:
        """FLOPs over those at the peak of all ranks; None if the profile has no peak."""
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
        """Return metrics and mean seconds of a rank and step; an infinite `wir` is None."""
        slowest = self.stage_s.max(axis=2).mean(axis=0) * self.accumulate
        imbalances = [
            float(np.mean([metrics.imbalance(seconds) for seconds in spent]))
            for spent in self.stage_s.swapaxes(0, 1)
        ]
        stages = zip(self.stages, imbalances, slowest.tolist(), strict=True)
        return {
            "name": self.name,
            "wir": self.wir if np.isfinite(self.wir) else None,
            "fbl_s": self.fbl_s,
            "tokens_per_s": self.tokens_per_s,
            "hfu": self.hfu,
            "idle_share": self.idle_share,
            "activation_bytes": self.most_activation_bytes,
            "seconds": dict(zip(KINDS, self._mean(self.seconds), strict=True)),
            "hidden_seconds": dict(zip(HIDDEN, self._mean(self.hidden), strict=True)),
            "stages": {
                name: {"imbalance": imbalance, "seconds": seconds}
                for name, imbalance, seconds in stages
            },
        }


@dataclass(frozen=True, slots=True, eq=False)
class SimulationResult:
    """Runs of the same data under each policy, which are compared with the first run."""

    profile: HardwareProfile
    runs: tuple[SimulatedRun, ...]
    model: TransformerCost
    options: SimulationOptions
    sequences: float  # mean number on a rank in a microbatch
    num_steps: int

    @property
    def num_ranks(self) -> int:
        """Ranks of the simulated cluster."""
        return self.runs[0].seconds.shape[2]

    @property
    def num_params(self) -> int:
        """Parameters of the model."""
        return self.options.sharding.params_of(self.model)

    def speedup(self, run: SimulatedRun) -> float:
        """Return a run's tokens a second over those of the first run."""
        return run.tokens_per_s / self.runs[0].tokens_per_s

    def gpu_hours(self, run: SimulatedRun) -> float:
        """Return GPU-hours for the tokens on which the first run trains in `train_steps`."""
        seconds = self.options.train_steps * self.runs[0].fbl_s / self.speedup(run)
        return seconds * self.num_ranks / 3600

    def saved_gpu_hours(self, run: SimulatedRun) -> float:
        """Return the GPU-hours that a run saves against the first run."""
        return self.gpu_hours(self.runs[0]) - self.gpu_hours(run)

    def saved_money(self, run: SimulatedRun) -> float | None:
        """Return the price of these hours; None if it is not known."""
        price = self.options.gpu_hour_price
        return None if price is None else self.saved_gpu_hours(run) * price

    def fits(self, run: SimulatedRun) -> bool | None:
        """Return whether activations alone fit into a rank's memory; None if that is not known."""
        memory = self.profile.memory_bytes
        return None if memory is None else run.most_activation_bytes <= memory

    @property
    def warnings(self) -> list[str]:
        """A sentence on the runs that exceed the memory and on what would help, if any do."""
        memory = self.profile.memory_bytes
        large = [run for run in self.runs if self.fits(run) is False]
        if memory is None or not large:
            return []
        fitting = ", ".join(run.name for run in self.runs if self.fits(run))
        return [
            f"{', '.join(run.name for run in large)}: the activations of a rank, up to "
            f"{max(run.most_activation_bytes for run in large) / 1e9:.4g} GB, exceed its memory of "
            f"{memory / 1e9:.4g} GB ({self.profile.provenance_of('memory_bytes')}), so this would "
            "not run: give a rank fewer samples at once, and accumulate them; or larger bags, "
            "whose ranks share each sequence; or --kb-per-token, if a token of yours holds less"
            + (f"; {fitting} would fit" if fitting else "")
        ]

    def to_report(self) -> Report:
        """Return a report of what each policy takes."""
        runs, first = self.runs, self.runs[0]
        fitting, options = [run for run in runs if self.fits(run) is not False], self.options
        best = max(fitting or runs, key=lambda run: run.tokens_per_s)
        ratio, price = self.speedup(best), options.gpu_hour_price
        money = (
            () if price is None else (Fact("saved_money", "worth", self.saved_money(best), _4G),)
        )
        kinds = [name for name in first.means if any(run.means[name] > 0 for run in runs)]
        # Steps that hold a million tokens, by run.
        steps = [run.tokens.size / run.accumulate / run.tokens.sum() * 1e6 for run in runs]
        answer = f"{best.name}: {ratio:.2f}x the tokens a second of what you do now, {first.name}."
        if best is first:
            answer = f"Nothing here is faster than what you do now, {first.name}."
        if not fitting:
            answer = f"Nothing here fits into the memory of a rank. If it did: {answer}"
        return Report(
            title=f"Training simulated on {self.num_ranks} ranks",
            answer=answer,
            facts=(
                Fact("best", "most tokens a second", best.name),
                Fact("over_first", f"as fast as {first.name}", ratio, "{:.2f}x"),
                Fact("fbl_s", "a step takes", best.fbl_s, "{:.3g} s"),
                Fact("tokens_per_s", "tokens a second", best.tokens_per_s, "{:,.0f}"),
                Fact("idle_share", "ranks wait", best.idle_share, "{:.1%}"),
                Fact(
                    "saved_gpu_hours",
                    f"GPU-hours saved in {options.train_steps:,} steps",
                    self.saved_gpu_hours(best),
                    f"{_4G} of {self.gpu_hours(first):,.4g}",
                ),
                *money,
            ),
            parts=(
                draw_bars(
                    "Seconds for a million tokens",
                    "Means over ranks and steps: where the time of a rank goes. Steps of packs and "
                    "buckets hold other numbers of tokens, so that steps would not compare.",
                    [run.name for run in runs],
                    {
                        kind: [run.means[kind] * s for run, s in zip(runs, steps, strict=True)]
                        for kind in kinds
                    },
                    "s",
                ),
                _worth_rows(self),
                _metric_rows(self),
                Rows(
                    "Seconds",
                    {"seconds of": "{}"} | {name.replace("_", " "): "{:.3g}" for name in kinds},
                    [(run.name, *(run.means[name] or None for name in kinds)) for run in runs],
                ),
            ),
            notes=(
                *(f"warning: {line}" for line in self.warnings),
                f"Simulated, not measured, on {self.num_ranks} ranks of {self.profile}.",
                *([self.profile.note] if self.profile.note else []),
                f"Model and data: {self.model.shape}, {self.num_params / 1e9:.3g} billion "
                f"parameters; {self.sequences:.3g} sequences a rank and microbatch in the mean; "
                f"steps simulated: {self.num_steps}, microbatches of each: {options.accumulate}.",
                f"GPU-hours are what {options.train_steps:,} steps of your run (--train-steps) "
                f"take, times {self.num_ranks} ranks. A way whose steps hold more or fewer tokens "
                "is counted for as many steps as train on the same tokens.",
            ),
            values=self.to_dict(),
        )

    def table(self) -> str:
        """Return the report as text, with its tables."""
        from rich.console import Console

        text = StringIO()
        self.to_report().show(Console(file=text, width=_WIDTH, color_system=None))
        return text.getvalue()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "profile": str(self.profile),
            "num_ranks": self.num_ranks,
            "memory_bytes": self.profile.memory_bytes,
            "num_params": self.num_params,
            "sequences": self.sequences,
            "num_steps": self.num_steps,
            "accumulate": self.options.accumulate,
            "train_steps": self.options.train_steps,
            "gpu_hour_price": self.options.gpu_hour_price,
            **{name: getattr(self.model, name) for name in ("d_model", "num_layers", "gamma")},
            "compared_with": self.runs[0].name,
            "runs": [
                run.to_dict()
                | {
                    "speedup": self.speedup(run),
                    "gpu_hours": self.gpu_hours(run),
                    "saved_gpu_hours": self.saved_gpu_hours(run),
                    "saved_money": self.saved_money(run),
                    "fits": self.fits(run),
                }
                for run in self.runs
            ],
            "warnings": self.warnings,
        }


def _worth_rows(result: SimulationResult) -> Rows:
    options = result.options
    hours = f"GPU-hours, {options.train_steps:,} steps: {_4G}", f"saved: {_4G}"
    formats = columns("against the first", "speed-up: {:.2f}x", *hours)
    if (price := options.gpu_hour_price) is not None:
        formats[f"saved, at {price:g} an hour"] = _4G
    rows: list[Sequence[Any]] = []
    for run in result.runs:
        name = f"{run.name}: what you do now" if run is result.runs[0] else run.name
        amounts = result.gpu_hours(run), result.saved_gpu_hours(run), result.saved_money(run)
        rows.append((name, result.speedup(run), *amounts)[: len(formats)])
    return Rows("What it is worth", formats, rows)


def _metric_rows(result: SimulationResult) -> Rows:
    speeds = "FBL, s: {:.3g}", "TPS, k: {:.4g}", "HFU: {:.1%}", "idle: {:.1%}"
    formats = columns("", "WIR: {:.2f}", *speeds, "activations, GB")
    rows: list[Sequence[Any]] = []
    for run in result.runs:
        large = " (too much)" if result.fits(run) is False else ""
        memory = f"{run.most_activation_bytes / 1e9:.3g}{large}"
        speed = run.fbl_s, run.tokens_per_s / 1e3, run.hfu, run.idle_share
        rows.append((run.name, run.wir, *speed, memory))
    return Rows("Metrics", formats, rows)
