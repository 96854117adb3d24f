"""`bascule simulate-requests --mix 512x512@20 1024x1024@28`: serve requests on paper."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bascule.checks import number as check_number
from bascule.cli.inputs import MachineOptions
from bascule.errors import ConfigError
from bascule.options import Group, Outputs, Range, refuse
from bascule.plan.requests import NEVER, POLICIES, SERVED, Request
from bascule.quantities import Scale, number, percent, seconds, times
from bascule.report.charts import draw_lines
from bascule.report.page import Chart, Fact, Format, Report, Rows
from bascule.workload.tokens import TokenRule, model_shape

if TYPE_CHECKING:
    from bascule.sim.requests import Row
    from bascule.workload.requests import Workload

_MAX_REQUESTS = 10**6
_PERCENT = Scale(0.01, "%")
_LATENCIES = {"mean_s": "mean", "p50_s": "P50", "p95_s": "P95", "p99_s": "P99"}
_COLUMNS: dict[str, tuple[str, Format]] = {  # headings and formats of figures but latencies
    "on_time": ("on time", percent),
    "slowdown": ("worst slowdown", times),
    "rank_s": ("GPU-seconds per request", number),
    "idle": ("idle GPUs", percent),
    "moves": ("moves per request", number),
    "degree": ("GPUs", number),
}
_RULES = {
    "fifo": "as they came: short requests wait behind long ones",
    "sjf": "the shortest first: long requests wait for all others",
    "srtf": "the shortest rest first: it interrupts long requests",
    "greedy": "the earliest deadline first, on the most free GPUs: costs GPU-seconds",
    "balanced": "the fewest GPUs that meet each deadline; idle ones speed requests up",
    "quick": "as balanced, but the shortest rest first: long requests end later",
}


@dataclass(frozen=True, kw_only=True)
class SimulateRequestsOptions(Outputs, MachineOptions):
    """Predict how fast bascule serve would finish requests, and whether another policy is better.

    Attributes:
        arrivals: File of requests, one JSON object per line: width, height and steps; optionally
            frames, arrival_s, deadline_s (in seconds after the arrival) and kind.
        mix: Draw requests of these sizes, steps and shares: 1024x1024@25=0.6 832x480x49@50.
        model: Model whose step times are predicted: flux.1, wan2.1, ltx2, ..
        deadline: Deadline of --mix, as a multiple of a request's time on one GPU. Default: none.
        requests: Number of requests of --mix. Default: 500.
        passes: Forward passes of a step: 2 with guidance.
        guidance_ranks: Groups of a request's GPUs that share the passes, if it has as many.
        batch_s: Measured seconds of a step of 1, 2, .. requests in a batch on one GPU, by size:
            512x512=0.167,0.183,0.186,8:0.425. Requests of these sizes share batches.
        slo: Multiply all deadlines by this factor.
        within: A request without a deadline counts as on time within this multiple of its time on
            the fewest GPUs. Policies ignore this option.
        ranks: Number of GPUs.
        policies: Policies to compare with the server's: fifo, sjf (the shortest first) and srtf
            (the shortest remaining time), on one GPU or, as sjf:4, on four; greedy (the earliest
            deadline, on the fastest GPUs); balanced; quick (the least mean, with longer tails).
        loads: Loads to simulate; 1 keeps all GPUs busy if each request uses its cheapest degree.
        rates: Requests per second instead of --loads; for --arrivals, the speed-up of the arrivals.
        degrees: Numbers of GPUs that a request may run on. Default: all.
        move_ms: Milliseconds that a request loses when it moves to other GPUs.
        seeds: Number of random draws at each load.
    """

    arrivals: Annotated[Path | None, Group("Requests")] = None
    mix: tuple[str, ...] = ()
    model: str = "flux.1"
    deadline: Annotated[float | None, Range(1e-3, 1e6)] = None
    requests: Annotated[int | None, Range(1, _MAX_REQUESTS)] = None
    passes: Annotated[int, Range(1, 16)] = 1
    guidance_ranks: Annotated[int, Range(1, 16)] = 1
    batch_s: tuple[str, ...] = ()
    slo: Annotated[float, Range(1e-3, 1e6)] = 1.0
    within: Annotated[float, Range(1e-3, 1e6)] = 3.0
    ranks: Annotated[int, Range(1, 2**14), Group("Ranks and policies")] = 8
    policies: tuple[str, ...] = POLICIES
    loads: tuple[float, ...] = (0.4, 0.6, 0.8, 1.0, 1.2)
    rates: tuple[float, ...] = ()
    degrees: tuple[int, ...] = ()
    move_ms: Annotated[float, Range(0, 1e6)] = 50.0
    seeds: Annotated[int, Range(1, 1000)] = 3

    def read(self) -> "Workload":
        """Return the workload of --arrivals or --mix, restricted to the allowed degrees."""
        from bascule.workload.requests import Recorded, Sizes, curves_of, predicted

        if (self.arrivals is None) != bool(self.mix):
            raise ConfigError("give one of --arrivals and --mix")
        profile = self.hardware()
        cost = replace(model_shape(self.model).cost, gamma=profile.gamma)
        costs = predicted(profile, cost, self.passes, self.guidance_ranks)
        curves = curves_of(self.batch_s)
        sizes = Sizes(TokenRule.of_model(self.model), costs, curves)
        if self.arrivals is None:
            mix = sizes.mix(self.mix, self.requests or 500, self.deadline)
            requests = [*map(self._restrict, mix.kinds)]
            workload = replace(mix, kinds=requests)
        else:
            refuse(self, ("deadline",), "only for --mix; --arrivals has a deadline per request")
            refuse(self, ("requests",), "--arrivals lists all requests; leave it out")
            requests = [*map(self._restrict, sizes.read(self.arrivals).requests)]
            workload = Recorded(requests)
        if unused := curves.keys() - {request.batch_key for request in requests}:
            raise ConfigError(f"--batch-s: no request has the size {', '.join(sorted(unused))}")
        due = [request.deadline_s < NEVER for request in requests]
        if not any(due):
            refuse(self, ("slo",), "no request has a deadline that it could scale; leave it out")
        if all(due):
            refuse(self, ("within",), "every request has a deadline of its own; leave it out")
        return workload

    def _restrict(self, request: Request) -> Request:
        """Leave out the degrees that are not allowed; ConfigError if none is left."""
        step_s = request.step_s
        degrees = [d for d in step_s if d in (self.degrees or (d,)) and d <= self.ranks]
        if not degrees:
            legal = f"can run on {', '.join(map(str, step_s))} ranks; --ranks is {self.ranks}"
            raise ConfigError(f"--degrees {' '.join(map(str, self.degrees))}: a request {legal}")
        batch_s = {d: request.batch_s[d] for d in degrees if d in request.batch_s}
        return replace(request, step_s={d: step_s[d] for d in degrees}, batch_s=batch_s)


def run(options: SimulateRequestsOptions, arguments: list[str]) -> None:
    """Simulate each policy, and publish its latencies and the deadlines that it keeps."""
    from bascule.cli.command import publish, waiting
    from bascule.sim.requests import compare

    workload = options.read()
    name, loads = ("--rates", options.rates) if options.rates else ("--loads", options.loads)
    if options.rates:
        refuse(options, ("loads",), "--rates replaces it; give one of them")
    if not loads:
        raise ConfigError("--loads: give one at least, such as --loads 0.8")
    for load in loads:
        check_number(name, load, 1e-6, 1e6)

    def draw(load: float, seed: int) -> list[Request]:
        scale = load if options.rates else workload.scale(load, options.ranks)
        return workload.draw(scale, seed, slo=options.slo)

    size, move_s = {"num_ranks": options.ranks, "num_seeds": options.seeds}, options.move_ms / 1e3
    simulated = partial(compare, draw, loads, **size, move_s=move_s, within=options.within)
    requests = draw(loads[0], 0)
    most = max(len(curve) for request in requests for curve in request.batch_s.values() or [[0.0]])
    with waiting("simulating"):
        rows = simulated(list(dict.fromkeys((SERVED, *options.policies))), batch=most)
        singly = simulated([SERVED])[::2] if most > 1 else []  # without the bounds
    source = options.arrivals or " ".join(options.mix)
    alone_s = sum(replace(request, batch_key=None).work_s for request in requests)
    worth = alone_s / sum(request.work_s for request in requests)
    axis = name.strip("-s")
    publish(options, report_of(rows, str(source), options.ranks, axis, singly, worth))


def report_of(
    rows: "Sequence[Row]",
    source: str,
    num_ranks: int,
    axis: str,
    singly: "Sequence[Row]" = (),
    worth: float = 1.0,
) -> Report:
    """Report the server's figures, and how other policies change them; axis: "load" or "rate".

    `singly` has the figures without batches, if there are batches, and `worth` how many times the
    requests per second they let the GPUs do at most.
    """
    from bascule.sim.requests import BOUND

    loads = list(dict.fromkeys(row.load for row in rows))
    load = max((load for load in loads if load <= 1), default=loads[0])
    shown = {row.policy: row for row in rows if row.load == load}
    bound, ours = shown.pop(BOUND).figures, shown[SERVED]
    own, policies = ours.figures, list(shown.values())
    best = best_of(ours, policies)
    kinds = [key.removeprefix("degree of ") for key in own if key.startswith("degree of ")]
    gpus = ", ".join(f"{number(own[f'degree of {kind}'])} for {kind}" for kind in kinds)
    unit = Scale.of([row.figures["mean_s"] for row in rows], "s")
    better, worse = map(", ".join, _against(ours, best))
    advice = f"Better for this load is bascule serve --policy {best.policy}: {better}."
    if worse:
        advice = f"With bascule serve --policy {best.policy}: {better}, but {worse}."

    batching, extra = "", [Fact("batch_worth", "requests per second with batches", worth, times)]
    for alone in (row.figures for row in singly if row.load == load):
        batching = f"Batches are worth {times(worth)} the requests per second at most; here mean "
        batching += f"{seconds(own['mean_s'])} instead of {seconds(alone['mean_s'])}, P95 "
        batching += f"{seconds(own['p95_s'])} instead of {seconds(alone['p95_s'])}. "

    def table(title: str, *names: str) -> Rows:
        with_any = [row for row in rows if row.figures.keys() & set(names)]
        cells = [(row.load, row.policy, *map(row.figures.get, names)) for row in with_any]
        return Rows(title, {axis: "{:g}", "policy": "{}"} | _formats(names, unit), cells)

    def chart(title: str, words: str, figure: str, scale: Scale) -> Chart:
        lines: dict[str, list[float]] = {}
        for row in rows:
            if figure in row.figures:
                lines.setdefault(row.policy, []).append(row.figures[figure] / scale.factor)
        axes = axis, f"{title}, {scale.unit}"
        return draw_lines(title, f"{words}, by {axis}.", axes, lines, loads)

    facts = (
        Fact("best", "most on time, then the lowest mean", best.policy),
        Fact(axis, f"at {axis}", load, "{:g}"),
        Fact("on_time", f"on time with {SERVED}", own["on_time"], percent),
        Fact("on_time_bound", "upper bound for any policy", bound["on_time"], percent),
        Fact("mean_s", f"mean latency with {SERVED}", own["mean_s"], seconds),
        Fact("mean_bound_s", "lower bound for any policy", bound["mean_s"], seconds),
        Fact("p95_s", f"P95 with {SERVED}", own["p95_s"], seconds),
        Fact("p99_s", f"P99 with {SERVED}", own["p99_s"], seconds),
        *(extra if singly else ()),
    )
    return Report(
        title=f"Requests on {num_ranks} GPUs: {source}",
        answer=f"At {axis} {load:g}, bascule serve as it is (policy {SERVED}) finishes "
        f"{percent(own['on_time'])} of the requests on time; latency is {seconds(own['mean_s'])} "
        f"on average, P95 {seconds(own['p95_s'])}. "
        f"{'No other policy here is better.' if best is ours else advice} "
        f"{batching}GPUs per request on average: {gpus}.",
        facts=facts,
        parts=(
            _compared(f"Policies at {axis} {load:g}", ours, policies, unit),
            chart("On time", "Requests that end on time, and their bound", "on_time", _PERCENT),
            chart("P95", "Time within which 95 % of the requests are done", "p95_s", unit),
            table("Latency", "on_time", "mean_s", "p50_s", "p95_s", "p99_s", "slowdown"),
            table("On time", *(f"on_time of {kind}" for kind in kinds)),
            table("GPUs", "rank_s", "idle", "moves", *(f"degree of {kind}" for kind in kinds)),
        ),
        notes=(
            "Simulated, not measured. A policy is better if it has more requests on time, or as "
            "many with a lower mean. A difference counts if each draw has it, by 1 % of the "
            "requests or 5 % of the seconds at least.",
            "On time: by the deadline, or else within --within times the time on the fewest GPUs. "
            "Slowdown: latency over the time alone at the fastest number of GPUs. A move: a "
            "request goes on with other GPUs.",
            "The bound takes all GPUs as one machine that does the cheapest work of a request in "
            "parts, so that no policy exceeds it, and maybe none reaches it.",
        ),
        values={fact.key: fact.value for fact in facts}
        | {"rows": [{axis: row.load, "policy": row.policy} | row.figures for row in rows]}
        | {"without_batches": [{axis: row.load} | row.figures for row in singly]},
    )


def best_of(ours: "Row", others: "Sequence[Row]") -> "Row":
    """Return the row with the most requests on time, then the least mean; ours unless another is.

    A difference counts if every draw has it, and is clear; see `Row.difference`.
    """
    return max(
        (ours, *others),
        key=lambda row: (ours.difference(row, "on_time"), -ours.difference(row, "mean_s")),
    )


def _against(ours: "Row", other: "Row") -> tuple[list[str], list[str]]:
    """Return in which figures another row is better and worse beyond noise.

    Kinds of requests count only where they lose, since the share of all has what they gain.
    """
    changes = list[str](), list[str]()
    for figure, value in ours.figures.items():
        is_share, others = figure.startswith("on_time"), other.figures[figure]
        if not (is_share or figure in ("mean_s", "p95_s", "p99_s")):
            continue
        name = _LATENCIES.get(figure, figure.replace("on_time", "on time", 1))
        unit = _PERCENT if is_share else Scale.of([min(value, others)], "s")
        difference = ours.difference(other, figure)
        is_worse = (difference > 0) != is_share
        if difference and (is_worse or " of " not in figure):
            text = f"{name} {unit(others)} instead of {unit(value)} {unit.unit}"
            changes[is_worse].append(text)
    return changes


def compared(ours: "Row", other: "Row") -> str:
    """Say in which figures another row is better and worse; "" if in none."""
    words = zip(("better", "worse"), map(", ".join, _against(ours, other)), strict=True)
    return "; ".join(f"{how}: {figures}" for how, figures in words if figures)


def _compared(title: str, ours: "Row", rows: "Sequence[Row]", unit: Scale) -> Rows:
    """Compare policies at a load, the most requests on time first, and say why."""
    cells, names = list[Sequence[Any]](), ("on_time", "mean_s", "p95_s", "p99_s", "rank_s")
    for row in sorted(rows, key=lambda row: (-row.figures["on_time"], row.figures["mean_s"])):
        against, whose = compared(ours, row), f"bascule serve --policy {row.policy}"
        if row is ours:
            against, whose = "itself", "bascule serve's default"
        rule, values = _RULES[row.policy.partition(":")[0]], map(row.figures.get, names)
        cells.append((row.policy, *values, against or "as good", rule, whose))
    formats = {"policy": str, **_formats(names, unit), f"compared with {ours.policy}": str}
    return Rows(title, formats | {"why": str, "part of bascule": str}, cells)


def _formats(names: Sequence[str], unit: Scale) -> dict[str, Format]:
    """Return formats of figures by heading; seconds are in a unit."""
    formats: dict[str, Format] = {}
    for name in names:
        word, of, kind = name.partition(" of ")
        heading, how = _COLUMNS.get(word, (f"{_LATENCIES.get(word)}, {unit.unit}", unit))
        formats[heading + of + kind] = how
    return formats
