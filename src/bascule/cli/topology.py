"""`bascule topology`: which bags suit batches like these, and why."""

from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from bascule.cli.inputs import ClusterOptions, InputOptions
from bascule.cli.writing import STDOUT, check_outputs, write_json, write_report
from bascule.errors import ConfigError
from bascule.plan.checks import whole
from bascule.plan.machine import in_passes, passes_of
from bascule.plan.topology_search import suggest_topology
from bascule.report.reports import of_topologies

_DEFAULT_STEPS = 20
_DEFAULT_SEQUENCES = 20_000
_MAX_SEQUENCES = 2**18


@dataclass(frozen=True, kw_only=True)
class TopologyOptions(InputOptions, ClusterOptions):
    """Rank the topologies of a cluster for a stream of batches.

    Attributes:
        steps: Batches to look at; more than one only with --data. By default 20 of --data, or fewer
            where they have many sequences.
        rows: Topologies to print.
        json: Where to write the ranking; - for standard output.
        report: Where to write a page of it all, .html.
        passes: What to count: a training step, which recomputes or does not, or a forward pass.
    """

    steps: int | None = None
    rows: int = 10
    json: Path | None = None
    report: Path | None = None
    passes: Literal["step", "step-without-recompute", "forward"] = "step"


def run(options: TopologyOptions, arguments: list[str]) -> None:
    """Rank and print.

    Raises:
        ConfigError: The input is malformed or does not fit.
        PlanError: No topology keeps the limit.
    """
    check_outputs(
        file=options.file, manifest=options.manifest, json=options.json, report=options.report
    )
    for name in ("steps", "rows"):
        if (value := getattr(options, name)) is not None:
            whole(f"--{name}", value, 1)
    if options.steps is not None and options.steps > 1 and not options.has_steps:
        raise ConfigError(
            f"--steps {options.steps}: only --data and --batch-size have more than one batch"
        )
    batches = _batches(options)
    steps = len(batches)
    cluster = options.machines(len(batches[0]))
    cost, cluster = in_passes(options.cost, cluster, passes_of(options.passes, options.hardware()))
    with Console(stderr=True).status("solving topologies"):
        ranking = suggest_topology(batches, cost, cluster, limits=options.limits)
    console = Console(stderr=options.json == STDOUT)
    table = Table(
        title=f"{cluster.num_nodes} nodes of {cluster.ranks_per_node} ranks, {steps} batches, "
        f"{len(ranking.rows)} of {ranking.num_candidates} topologies solved"
    )
    for name in ("topology", f"{options.passes}, s", "imbalance", "gap", "why"):
        table.add_column(name, justify="left" if name in ("topology", "why") else "right")
    for row in ranking.rows[: options.rows]:
        table.add_row(
            row.spec,
            f"{row.seconds:.4g}",
            f"{row.imbalance:.4f}",
            f"{row.gap:.2%}",
            "\n".join(row.reasons),
        )
    console.print(table)
    console.print(f"model: {options.cost.shape}", highlight=False)
    console.print(f"predicted for {options.hardware()}", markup=False)
    if (memory := options.memory) is not None:
        console.print(memory, markup=False)
    found = {"best": str(ranking.best), "rows": [asdict(row) for row in ranking.rows]}
    write_json(console, options.json, found | {"machine": str(options.hardware())})
    if options.report is not None:
        lens = list(chain.from_iterable(batches[0]))
        page = of_topologies(ranking, lens, str(options.hardware()))
        write_report(console, options.report, page)
    first, last = ranking.rows[0], ranking.rows[-1]
    if first.seconds > 0:
        ratio = last.seconds / first.seconds
        console.print(f"best: {first.spec}, {ratio:.2f}x as fast as {last.spec}")
    else:
        console.print("best: any, the batches are idle")


def _batches(options: TopologyOptions) -> list[list[list[int]]]:
    """As many as are asked for; by default as many as are ranked in some seconds."""
    first = options.read()
    each = max(sum(map(len, first)), 1)
    steps = options.steps
    if steps is None:
        steps = min(_DEFAULT_STEPS, max(_DEFAULT_SEQUENCES // each, 1)) if options.has_steps else 1
    if steps * each > _MAX_SEQUENCES:
        raise ConfigError(
            f"{steps} steps of {each} sequences: at most {_MAX_SEQUENCES} in all can be ranked, so "
            "use fewer --steps, or smaller batches"
        )
    return [first, *(options.read(steps_after=step) for step in range(1, steps))]
