"""What a simulation found: metrics of each policy, and where the seconds of each rank went."""

from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bascule.errors import ConfigError
from bascule.plan import metrics
from bascule.plan.costs.cluster import Floats
from bascule.plan.costs.hardware import HardwareProfile
from bascule.plan.files import to_path
from bascule.plan.routes import Ints
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


@dataclass(frozen=True, slots=True, eq=False)
class SimulationResult:
    """What every policy makes of the same data.

    Attributes:
        profile: The machine, and from where its numbers are.
        num_ranks: N.
        runs: One a policy, in the order that was asked for.
    """

    profile: HardwareProfile
    num_ranks: int
    runs: tuple[SimulatedRun, ...]

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
            shares = f"{100 * run.idle_share:.1f}", f"{run.most_activation_bytes / 1e9:.3g}"
            metric_rows.append((run.name, *rates, *shares))
            second_rows.append((run.name, *(_short(spent[name]) for name in kinds)))
        return metric_rows, second_rows

    def tables(self) -> tuple[Table, Table]:
        """`rows`, to be printed."""
        made: list[Table] = []
        for rows in self.rows():
            table = Table()
            for place, name in enumerate(rows[0]):
                table.add_column(name, justify="right" if place else "left", no_wrap=not place)
            for row in rows[1:]:
                table.add_row(*row)
            made.append(table)
        return made[0], made[1]

    def table(self) -> str:
        """`rows` as text."""
        text = StringIO()
        console = Console(file=text, width=_WIDTH, color_system=None)
        console.print(*self.tables(), sep="\n")
        console.print(f"{self.num_ranks} ranks of {self.profile}", soft_wrap=True)
        return text.getvalue()

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
        return {
            "profile": str(self.profile),
            "num_ranks": self.num_ranks,
            "runs": [run.to_dict() for run in self.runs],
        }


def _short(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds > 0 else ""
