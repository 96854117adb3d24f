"""`bascule simulate-requests --mix 512x512@20 1024x1024@28`: serve requests on paper."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bascule.cli.inputs import MachineOptions
from bascule.errors import ConfigError
from bascule.options import Group, Outputs, Range, refuse
from bascule.report.charts import draw_lines
from bascule.report.page import Fact, Report, Rows, columns

if TYPE_CHECKING:
    from bascule.plan.requests import Request
    from bascule.sim.requests import Row
    from bascule.workload.requests import Workload

_MAX_REQUESTS = 10**6


@dataclass(frozen=True, kw_only=True)
class SimulateRequestsOptions(Outputs, MachineOptions):
    """Serve requests on paper by several policies, beside what no policy can exceed.

    Attributes:
        arrivals: File of requests, a JSON object a line: width, height, steps, and maybe frames,
            arrival_s, deadline_s (seconds after its arrival) and kind.
        mix: Requests by chance: sizes, steps and shares, such as 1024x1024@25=0.6 832x480x49@50.
        model: Model that seconds of a step are predicted for: flux.1, wan2.1, ltx2, ..
        passes: Forward passes of a step, 2 with guidance.
        deadline: Requests of --mix are due after so many times their seconds on one rank.
        slo: Scale of all deadlines.
        within: Requests without a deadline are on time within so many times their seconds on the
            fewest ranks; policies do not know of it.
        requests: Requests of --mix.
        ranks: Ranks.
        degrees: Allowed ranks of a request; all by default.
        loads: Shares of what the ranks could do at the cheapest degrees.
        rates: Requests a second, or for --arrivals how many times as fast, in place of --loads.
        policies: fifo, sjf (the shortest first) and srtf (the shortest rest), on one rank or, as
            sjf:4, on four; greedy (the earliest deadline, on the fastest ranks); balanced.
        move_ms: Milliseconds that a request loses when it goes on with other ranks.
        seeds: Draws at each load.
    """

    arrivals: Annotated[Path | None, Group("Requests")] = None
    mix: tuple[str, ...] = ()
    model: str = "flux.1"
    passes: Annotated[int, Range(1, 16)] = 1
    deadline: Annotated[float | None, Range(1e-3, 1e6)] = None
    slo: Annotated[float, Range(1e-3, 1e6)] = 1.0
    within: Annotated[float, Range(1e-3, 1e6)] = 3.0
    requests: Annotated[int | None, Range(1, _MAX_REQUESTS)] = None
    ranks: Annotated[int, Range(1, 2**14), Group("Ranks and policies")] = 8
    degrees: tuple[int, ...] = ()
    loads: tuple[float, ...] = (0.4, 0.6, 0.8, 1.0, 1.2)
    rates: tuple[float, ...] = ()
    policies: tuple[str, ...] = ("fifo", "sjf", "srtf", "greedy", "balanced")
    move_ms: Annotated[float, Range(0, 1e6)] = 50.0
    seeds: Annotated[int, Range(1, 1000)] = 3

    def read(self) -> "Workload":
        """Return the workload of --arrivals or --mix, on allowed degrees alone."""
        from bascule.plan.requests import NEVER
        from bascule.workload.requests import Recorded, Sizes, predicted
        from bascule.workload.tokens import TokenRule, model_shape

        if (self.arrivals is None) != bool(self.mix):
            raise ConfigError("give one of --arrivals and --mix")
        profile = self.hardware()
        cost = replace(model_shape(self.model).cost, gamma=profile.gamma)
        sizes = Sizes(TokenRule.of_model(self.model), predicted(profile, cost, self.passes))
        if self.arrivals is None:
            mix = sizes.mix(self.mix, self.requests or 500, self.deadline)
            requests = [*map(self._restrict, mix.kinds)]
            workload = replace(mix, kinds=requests)
        else:
            refuse(self, ("deadline",), "only for --mix; others have deadlines of their own")
            refuse(self, ("requests",), "--arrivals lists all requests; leave it out")
            requests = [*map(self._restrict, sizes.read(self.arrivals).requests)]
            workload = Recorded(requests)
        due = [request.deadline_s < NEVER for request in requests]
        if not any(due):
            refuse(self, ("slo",), "no request has a deadline that it could scale; leave it out")
        if all(due):
            refuse(self, ("within",), "every request has a deadline of its own; leave it out")
        return workload

    def _restrict(self, request: "Request") -> "Request":
        """Leave out the degrees that are not allowed; ConfigError if none is left."""
        step_s = request.step_s
        degrees = [d for d in step_s if d in (self.degrees or (d,)) and d <= self.ranks]
        if not degrees:
            raise ConfigError(
                f"--degrees {' '.join(map(str, self.degrees))}: a request runs on "
                f"{', '.join(map(str, step_s))} ranks, and there are {self.ranks}"
            )
        return replace(request, step_s={degree: step_s[degree] for degree in degrees})


def run(options: SimulateRequestsOptions, arguments: list[str]) -> None:
    """Simulate, and publish what each policy reaches."""
    from bascule.checks import number
    from bascule.cli.command import publish, waiting
    from bascule.sim.requests import compare

    workload = options.read()
    name, loads = ("--rates", options.rates) if options.rates else ("--loads", options.loads)
    if options.rates:
        refuse(options, ("loads",), "--rates takes its place; give one of them")
    if not loads or not options.policies:
        raise ConfigError("give one of --loads at least, and one of --policies")
    for load in loads:
        number(name, load, 1e-6, 1e6)

    def draw(load: float, seed: int) -> "list[Request]":
        scale = load if options.rates else workload.scale(load, options.ranks)
        return workload.draw(scale, seed, slo=options.slo)

    with waiting("simulating"):
        rows = compare(
            draw,
            loads,
            options.policies,
            num_ranks=options.ranks,
            num_seeds=options.seeds,
            move_s=options.move_ms / 1e3,
            within=options.within,
        )
    source = options.arrivals or " ".join(options.mix)
    publish(options, report_of(rows, str(source), options.ranks, name.strip("-s")))


def report_of(rows: "Sequence[Row]", source: str, num_ranks: int, axis: str) -> Report:
    """Report what policies reach at loads, and which to choose; `axis` is "load" or "rate"."""
    from bascule.sim.requests import BOUND

    loads = list(dict.fromkeys(row.load for row in rows))
    names = [row.policy for row in rows if row.load == loads[0] and row.policy != BOUND]
    figures_of = {(row.policy, row.load): row.figures for row in rows}

    def line(name: str, figure: str) -> list[float]:
        return [figures_of[name, load][figure] for load in loads]

    best = max(names, key=lambda name: (sum(line(name, "on_time")), -sum(line(name, "p95_s"))))
    load = max((load for load in loads if load <= 1), default=loads[0])
    shown, bound = figures_of[best, load], figures_of[BOUND, load]
    kinds = [key.removeprefix("degree of ") for key in shown if key.startswith("degree of ")]
    ranks = ", ".join(f"{kind} {shown[f'degree of {kind}']:.2g}" for kind in kinds)
    first = columns(axis + ": {:.4g}", "policy")

    def table(title: str, figures: dict[str, str]) -> Rows:
        cells = [
            (row.load, row.policy, *map(row.figures.get, figures))
            for row in rows
            if row.figures.keys() & figures.keys()
        ]
        return Rows(title, first | columns(*figures.values()), cells)

    return Report(
        title=f"Requests on {num_ranks} ranks: {source}",
        answer=f"Choose {best}: at {axis} {load:g} {shown['on_time']:.1%} are on time, where no "
        f"policy exceeds {bound['on_time']:.1%}, and P95 is {shown['p95_s']:.3g} s. It runs them "
        f"on so many ranks in the mean: {ranks}.",
        facts=(
            Fact("best", "best policy", best),
            Fact(axis, f"at {axis}", load, "{:g}"),
            Fact("on_time", "on time", shown["on_time"], "{:.1%}"),
            Fact("on_time_bound", "no policy exceeds", bound["on_time"], "{:.1%}"),
            Fact("mean_s", "latency in the mean", shown["mean_s"], "{:.4g} s"),
            Fact("mean_bound_s", "no policy is below", bound["mean_s"], "{:.4g} s"),
            Fact("p95_s", "P95", shown["p95_s"], "{:.4g} s"),
            Fact("p99_s", "P99", shown["p99_s"], "{:.4g} s"),
        ),
        parts=(
            draw_lines(
                "On time",
                f"The share of requests that are done in time, by {axis}, and its upper bound.",
                (axis, "share"),
                {name: line(name, "on_time") for name in (*names, BOUND)},
                loads,
            ),
            draw_lines(
                "P95",
                f"Seconds within which 95 % of the requests are done, by {axis}.",
                (axis, "s"),
                {name: line(name, "p95_s") for name in names},
                loads,
            ),
            table(
                "Latency",
                {
                    "on_time": "on time: {:.1%}",
                    "mean_s": "mean, s: {:.4g}",
                    "p50_s": "P50: {:.4g}",
                    "p95_s": "P95: {:.4g}",
                    "p99_s": "P99: {:.4g}",
                    "slowdown": "slowdown: {:.3g}",
                },
            ),
            table("On time", {f"on_time of {kind}": f"{kind}: {{:.1%}}" for kind in kinds}),
            table(
                "Ranks",
                {"rank_s": "rank-s each: {:.4g}", "idle": "idle: {:.1%}", "moves": "moves: {:.2f}"}
                | {f"degree of {kind}": f"ranks of {kind}: {{:.2g}}" for kind in kinds},
            ),
        ),
        notes=(
            "Simulated, not measured. Best is the policy with most requests on time over all rows, "
            "of equals the one of the least P95.",
            "The bound takes all ranks as one machine that does the cheapest work of a request in "
            "parts, so that no policy exceeds it, and maybe none reaches it.",
            "Slowdown: the largest latency over the seconds alone at the fastest degree. Moves: "
            "how often a request goes on with other ranks.",
        ),
    )
