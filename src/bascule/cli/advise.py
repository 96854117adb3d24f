"""`bascule serve --advise --model flux.1 --mix 1024x1024@28 --ranks 8`: options by simulation.

Options are chosen one after another: each value is simulated with the values that are chosen
already, and the server's default stays unless another one is clearly better.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from shlex import join
from typing import Any

from bascule.cli.simulate_requests import SimulateRequestsOptions, best_of, compared
from bascule.errors import ConfigError
from bascule.machine.mesh_choice import mesh_of_block
from bascule.options import flag, refuse
from bascule.plan.requests import POLICIES, SERVED
from bascule.quantities import Scale, number, percent
from bascule.report.page import Fact, Format, Report, Rows
from bascule.serve.options import ServeOptions
from bascule.sim.requests import Row, compare
from bascule.workload.tokens import model_shape

_LOAD = 0.8  # if no rate is given
_SEEDS = 3
_DEGREES = 1, 2, 4, 8  # of predictions
_FIGURES = "mean_s", "p95_s", "on_time"


def advise(options: ServeOptions) -> None:
    """Simulate the requests with each value of each option; publish the best command line."""
    from bascule.cli.command import publish, waiting

    if options.ranks is None:
        raise ConfigError("--advise: give the number of GPUs, for example --ranks 8")
    if not options.arrivals and not options.mix:
        raise ConfigError("give one of --arrivals and --mix, for example --mix 1024x1024@28")
    names = "arrivals", "mix", "model", "deadline", "passes", "ranks", "profile"
    others = options.__dataclass_fields__.keys() - {*names, "advise", "rate", "json", "report"}
    refuse(options, sorted(others), "--advise starts no server: leave it out")
    asked = SimulateRequestsOptions(**{name: getattr(options, name) for name in names})
    usual = 1.0 if options.arrivals else asked.read().scale(_LOAD, options.ranks)
    with waiting("simulating"):
        publish(options, _report(asked, options.rate or usual))


def _report(asked: SimulateRequestsOptions, rate: float) -> Report:
    """Choose each option at a rate, and report its values and the command."""
    degrees = tuple(degree for degree in _DEGREES if degree <= asked.ranks)
    fewer = [degrees[:num] for num in range(1, len(degrees))]
    choices: dict[str, Sequence[Any]] = {  # the server's default first
        "guidance_ranks": [degree for degree in degrees if degree <= asked.passes],
        "degrees": [degrees, *fewer, *((degree,) for degree in degrees[1:])],
        "policy": [SERVED, *(policy for policy in POLICIES if policy != SERVED)],
    }
    chosen: dict[str, Any] = {name: values[0] for name, values in choices.items()}
    best, cells = _simulated(asked, chosen, rate), list[Sequence[Any]]()
    for name, values in choices.items():
        rows = [best, *(_simulated(asked, chosen | {name: value}, rate) for value in values[1:])]
        best = best_of(rows[0], rows[1:])
        for value, row in zip(values, rows, strict=True):
            figures = [row.figures[figure] for figure in _FIGURES]
            why = f"chosen: {compared(rows[0], row) or 'no other is better'}" if row is best else ""
            cells.append((flag(name), _text(value), *figures, why))
        chosen[name] = values[rows.index(best)]
    settings = {"model": "FOLDER", "ranks": asked.ranks, **chosen}
    words = [
        word for name, value in settings.items() for word in (flag(name), *_text(value).split())
    ]
    command, unit = join(["bascule", "serve", *words]), Scale.of([cell[2] for cell in cells], "s")
    columns: dict[str, Format] = {"option": str, "value": str, f"mean, {unit.unit}": unit}
    columns |= {f"P95, {unit.unit}": unit, "on time": percent, "why": str}
    keys = "option", "value", *_FIGURES, "why"
    label = "speed-up of the arrivals" if asked.arrivals else "requests per second"
    num_heads, most = model_shape(asked.model).num_heads, max(chosen["degrees"])
    mesh = mesh_of_block(most, num_heads, chosen["guidance_ranks"])
    return Report(
        title=f"bascule serve on {asked.ranks} GPUs: {asked.arrivals or ' '.join(asked.mix)}",
        answer=command,
        facts=(Fact("rate", label, rate, number),),
        parts=(Rows("Values of each option, with those chosen before it", columns, cells),),
        notes=(
            f"Simulated, not measured: {asked.model} on {asked.profile}. FOLDER has the pipeline.",
            "On time: by the deadline, or else within three times the time on the fewest GPUs. A "
            "difference counts if each draw has it, by 1 % of the requests or 5 % of the seconds.",
            f"A request on {most} GPUs: {mesh}, for {num_heads} heads. One degree alone is what a "
            f"mesh with --replicas does. {'No' if mesh.ring == 1 else 'A'} ring is long enough for "
            "--longest-ring 1 to change it.",
            "Not simulated: --compile, which takes time at each new size; --offload, which saves "
            "memory; --sparse, --wire, --cache and --tiles, which change pixels.",
        ),
        values={"command": command, "options": chosen, "rate": rate}
        | {"rows": [dict(zip(keys, cell, strict=True)) for cell in cells]},
    )


def _simulated(asked: SimulateRequestsOptions, values: Mapping[str, Any], rate: float) -> Row:
    settings = {name: value for name, value in values.items() if name != "policy"}
    draw, policies = replace(asked, **settings).read().draw, [values["policy"]]
    return compare(draw, [rate], policies, num_ranks=asked.ranks, num_seeds=_SEEDS)[0]


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
