"""`bascule topology`: which bags suit batches like these, and why."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bascule.cli.reading import ClusterOptions, InputOptions
from bascule.errors import ConfigError
from bascule.plan.search import suggest_topology


@dataclass(frozen=True, kw_only=True)
class TopologyOptions(InputOptions, ClusterOptions):
    """Rank the topologies of a cluster for a stream of batches.

    Attributes:
        steps: Batches to look at; more than one only with --data.
        rows: Topologies to print.
    """

    steps: int | None = None
    rows: int = 10


def topology(options: TopologyOptions) -> None:
    """Rank and print.

    Raises:
        ConfigError: The input is malformed or does not fit.
        PlanError: No topology keeps the limit.
    """
    steps = (20 if options.data is not None else 1) if options.steps is None else options.steps
    if steps < 1 or options.rows < 1:
        raise ConfigError(f"--steps {steps}, --rows {options.rows}: both must be at least 1")
    if steps > 1 and options.data is None:
        raise ConfigError(f"--steps {steps}: only --data has more than one batch")
    batches = [options.read(steps_after=step) for step in range(steps)]
    cluster = options.machines(len(batches[0]))
    ranking = suggest_topology(batches, options.cost, cluster, limits=options.limits)
    console = Console()
    table = Table(
        title=f"{cluster.num_nodes} nodes of {cluster.ranks_per_node} ranks, {steps} batches, "
        f"{len(ranking.rows)} of {ranking.num_candidates} topologies solved"
    )
    for name in ("topology", "forward, s", "imbalance", "gap", "why"):
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
    first, last = ranking.rows[0], ranking.rows[-1]
    if first.seconds > 0:
        ratio = last.seconds / first.seconds
        console.print(f"best: {first.spec}, {ratio:.2f}x as fast as {last.spec}")
    else:
        console.print("best: any, the batches are idle")
