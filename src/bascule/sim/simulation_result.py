"""What a simulation found: metrics of each policy, and where the seconds of each rank went."""

from dataclasses import dataclass, fields
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bascule.arrays import Floats, Ints
from bascule.errors import ConfigError
from bascule.plan import metrics
from bascule.plan.costs.cost_models import TransformerCost
from bascule.plan.costs.hardware import HardwareProfile
from bascule.plan.files import to_path
from bascule.sim.step_seconds import HIDDEN, KINDS

_WIDTH = 120


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRun:
    """A run of some steps. N ranks; M microbatches, of which `accumulate` make a step.

    Attributes:
        name: Of the policy.
        accumulate: Microbatches of a step.
        seconds: (M, len(KINDS), N) of each rank, by what they are spent on.
        hidden: (M, len(HIDDEN), N) seconds of exchanges that nobody waited for.
        tokens: (M,) without padding.
        flops: (M,) of all passes, without padding, attention in full. With recomputation four
            times those of the forward pass, as in KnapFormer, section 4.2.
        workloads: (M, N) what the cost model says of each rank: forward, without wires.
        activation_bytes: (M, N) held until the backward pass.
        peak_flops_per_s: Of all ranks; None if the profile has none.
        stages: Names of the encoders.
        stage_s: (M, len(stages), N) seconds of each; "encoders" among the kinds is their sum.
    """

    name: str
    accumulate: int
    seconds: Floats
    hidden: Floats
    tokens: Ints
    flops: Floats
    workloads: Floats
    activation_bytes: Floats
    peak_flops_per_s: float | None
    stages: tuple[str, ...]
    stage_s: Floats

    @property
    def means(self) -> dict[str, float]:
        """Mean seconds of a rank and step by kind, encoders one by one."""
        spent = self.seconds.mean(axis=(0, 2)) * self.accumulate
        kinds = dict(zip(KINDS, spent.tolist(), strict=True))
        if not self.stages:
            return kinds
        of_stages = (self.stage_s.mean(axis=(0, 2)) * self.accumulate).tolist()
        del kinds["encoders"]
        return dict(zip(self.stages, of_stages, strict=True)) | kinds

    def spent_on(self, kind: str) -> Floats:
        """(M, N) seconds of each rank.

        Raises:
            ConfigError: There is no such kind; names what there is.
        """
        if kind not in KINDS:
            raise ConfigError(f"kind {kind!r}: choose one of {', '.join(KINDS)}")
        return self.seconds[:, KINDS.index(kind)]

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
        """FLOPs over what the ranks could compute at their peak; None if that is not known."""
        if self.peak_flops_per_s is None:
            return None
        return float(self.flops.sum() / self.microbatch_s.sum()) / self.peak_flops_per_s

    @property
    def wir(self) -> float:
        """Mean of max over min of the ranks' workloads; infinite if a rank is ever idle."""
        return float(np.mean([metrics.wir(loads) for loads in self.workloads]))

    @property
    def idle_share(self) -> float:
        """Share of all seconds in which a rank waits for another one."""
        return float(self.spent_on("waiting").sum() / self.seconds.sum())

    @property
    def most_activation_bytes(self) -> float:
        """Most that a rank ever holds."""
        return float(self.activation_bytes.max())

    def to_dict(self) -> dict[str, Any]:
        """The metrics, and the mean seconds of a rank and step by kind, as plain values.

        `wir` is None where it is infinite, which JSON cannot say.
        """
        means = self.seconds.mean(axis=(0, 2)) * self.accumulate
        hidden = self.hidden.mean(axis=(0, 2)) * self.accumulate
        return {
            "name": self.name,
            "wir": self.wir if np.isfinite(self.wir) else None,
            "fbl_s": self.fbl_s,
            "tokens_per_s": self.tokens_per_s,
            "hfu": self.hfu,
            "idle_share": self.idle_share,
            "activation_bytes": self.most_activation_bytes,
            "seconds": dict(zip(KINDS, means.tolist(), strict=True)),
            "hidden_seconds": dict(zip(HIDDEN, hidden.tolist(), strict=True)),
            "stages": {name: self._stage(place) for place, name in enumerate(self.stages)},
        }

    def _stage(self, place: int) -> dict[str, float]:
        """Mean over steps: imbalance of an encoder, and seconds of its slowest rank."""
        spent = self.stage_s[:, place]
        return {
            "imbalance": float(np.mean([metrics.imbalance(one) for one in spent])),
            "seconds": float(spent.max(axis=1).mean()) * self.accumulate,
        }


@dataclass(frozen=True, slots=True)
class Setting:
    """What was simulated, for whoever reads the numbers.

    Attributes:
        model: Its width, layers and gamma.
        num_params: Its parameters.
        sequences: Of a rank and microbatch, in the mean.
        num_steps: That were simulated.
        accumulate: Microbatches of a step.
        train_steps: Of the run for which GPU-hours are told.
        gpu_hour_price: Of one; None: no money is told.
    """

    model: TransformerCost
    num_params: int
    sequences: float
    num_steps: int
    accumulate: int
    train_steps: int
    gpu_hour_price: float | None

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.model.shape}, {self.num_params / 1e9:.3g} billion parameters; "
            f"{self.sequences:.3g} sequences a rank and microbatch in the mean; "
            f"steps: {self.num_steps}, microbatches of each: {self.accumulate}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class SimulationResult:
    """What every policy makes of the same data.

    Attributes:
        profile: The machine, and from where its numbers are.
        num_ranks: N.
        runs: One a policy, in the order that was asked for; the first one is what the others are
            compared with.
        setting: What was simulated.
    """

    profile: HardwareProfile
    num_ranks: int
    runs: tuple[SimulatedRun, ...]
    setting: Setting

    def speedup(self, run: SimulatedRun) -> float:
        """Tokens a second over those of the first run."""
        return run.tokens_per_s / self.runs[0].tokens_per_s

    def gpu_hours(self, run: SimulatedRun) -> float:
        """Of all ranks, for as many tokens as the first run trains on in `train_steps` steps."""
        seconds = self.setting.train_steps * self.runs[0].fbl_s / self.speedup(run)
        return seconds * self.num_ranks / 3600

    def saved_gpu_hours(self, run: SimulatedRun) -> float:
        """GPU-hours of the first run less those of this one."""
        return self.gpu_hours(self.runs[0]) - self.gpu_hours(run)

    def saved_money(self, run: SimulatedRun) -> float | None:
        """What these cost; None if no price is known."""
        price = self.setting.gpu_hour_price
        return None if price is None else self.saved_gpu_hours(run) * price

    def fits(self, run: SimulatedRun) -> bool | None:
        """Whether activations alone fit into the memory of a rank; None if that is not known."""
        memory = self.profile.memory_bytes
        return None if memory is None else run.most_activation_bytes <= memory

    @property
    def warnings(self) -> list[str]:
        """What cannot run as simulated, and what would help; a sentence each."""
        if not (large := [run for run in self.runs if self.fits(run) is False]):
            return []
        profile = self.profile
        assert profile.memory_bytes is not None
        most = max(run.most_activation_bytes for run in large)
        fitting = [run.name for run in self.runs if self.fits(run)]
        return [
            f"{', '.join(run.name for run in large)}: the activations of a rank, up to "
            f"{most / 1e9:.4g} GB, exceed its memory of {profile.memory_bytes / 1e9:.4g} GB "
            f"({profile.provenance_of('memory_bytes')}), so this would not run: give a rank fewer "
            "samples at once, and accumulate them; or larger bags, whose ranks share each "
            f"sequence; or --kb-per-token, if a token of yours holds less"
            + (f"; {', '.join(fitting)} would fit" if fitting else "")
        ]

    def worth_rows(self) -> list[tuple[str, ...]]:
        """What each run is worth against the first one: a heading and a row a run."""
        setting, first = self.setting, self.runs[0]
        price = setting.gpu_hour_price
        hours = f"GPU-hours, {setting.train_steps:,} steps"
        money = () if price is None else (f"saved, at {price:g} an hour",)
        rows = [("against the first", "speed-up", hours, "saved", *money)]
        for run in self.runs:
            name = f"{run.name}: what you do now" if run is first else run.name
            saved = f"{self.saved_gpu_hours(run):,.4g}"
            paid = self.saved_money(run)
            told = () if paid is None else (f"{paid:,.4g}",)
            hours = f"{self.gpu_hours(run):,.4g}"
            rows.append((name, f"{self.speedup(run):.2f}x", hours, saved, *told))
        return rows

    def rows(self) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """Metrics, and mean seconds of a rank and step by kind; each a heading and a row a run.

        Kinds on which no run spends anything are left out.
        """
        metric_rows = [("", "WIR", "FBL, s", "TPS, k", "HFU, %", "idle, %", "activations, GB")]
        means = [run.means for run in self.runs]
        kinds = [name for name in means[0] if any(one[name] > 0 for one in means)]
        second_rows = [("seconds of", *(name.replace("_", " ") for name in kinds))]
        for run, spent in zip(self.runs, means, strict=True):
            hfu = "" if run.hfu is None else f"{100 * run.hfu:.1f}"
            rates = f"{run.wir:.2f}", f"{run.fbl_s:.3g}", f"{run.tokens_per_s / 1e3:.4g}", hfu
            large = " (too much)" if self.fits(run) is False else ""
            held = f"{run.most_activation_bytes / 1e9:.3g}{large}"
            shares = f"{100 * run.idle_share:.1f}", held
            metric_rows.append((run.name, *rates, *shares))
            second_rows.append((run.name, *(_short(spent[name]) for name in kinds)))
        return metric_rows, second_rows

    def tables(self) -> list[Table]:
        """`worth_rows` and `rows`, to be printed."""
        made: list[Table] = []
        for rows in (self.worth_rows(), *self.rows()):
            table = Table()
            for place, name in enumerate(rows[0]):
                table.add_column(
                    name.replace("_", " "), justify="right" if place else "left", no_wrap=not place
                )
            for row in rows[1:]:
                table.add_row(*row)
            made.append(table)
        return made

    def table(self) -> str:
        """Everything as text."""
        text = StringIO()
        console = Console(file=text, width=_WIDTH, color_system=None)
        console.print(*self.tables(), sep="\n")
        for line in self.told:
            console.print(line, soft_wrap=True, markup=False, highlight=False)
        return text.getvalue()

    @property
    def told(self) -> list[str]:
        """What stands below the tables: what was assumed, and what cannot be as simulated."""
        return [
            f"simulated: {self.setting}",
            f"{self.num_ranks} ranks of {self.profile}",
            *(f"warning: {line}" for line in self.warnings),
        ]

    def report(self, path: str | Path) -> None:
        """Write a page of it all, as `bascule simulate --report` does.

        Raises:
            ConfigError: It cannot be written there; says why.
        """
        from bascule.report.page import check_report, render
        from bascule.report.reports import of_simulation

        path = to_path(path)
        check_report(path)
        try:
            path.write_text(render(of_simulation(self), "bascule.simulate(..)"), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        model = self.setting.model
        setting = {one.name: getattr(self.setting, one.name) for one in fields(Setting)[1:]}
        shape = {name: getattr(model, name) for name in ("d_model", "num_layers", "gamma")}
        return {
            "profile": str(self.profile),
            "num_ranks": self.num_ranks,
            "memory_bytes": self.profile.memory_bytes,
            **setting,
            **shape,
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


def _short(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds > 0 else ""
