"""`bascule topology`: rank the bags that suit batches like these."""

from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Annotated, Literal

from bascule.cli.inputs import BatchOptions
from bascule.errors import ConfigError
from bascule.options import Outputs, Range

_DEFAULT_STEPS = 20
_DEFAULT_SEQUENCES = 20_000
_MAX_SEQUENCES = 2**18


@dataclass(frozen=True, kw_only=True)
class TopologyOptions(Outputs, BatchOptions):
    """Rank the topologies of a cluster for a stream of batches.

    Attributes:
        steps: Batches of --data or --manifest; by default 20, fewer with many sequences.
        rows: Topologies to print.
        passes: Passes to count: a training step, which recomputes or does not, or a forward pass.
    """

    steps: Annotated[int | None, Range(1)] = None
    rows: Annotated[int, Range(1)] = 10
    passes: Literal["step", "step-without-recompute", "forward"] = "step"


def run(options: TopologyOptions, arguments: list[str]) -> None:
    """Rank, and publish the ranking."""
    from bascule.cli.command import publish, waiting
    from bascule.machine.cluster import passes_of
    from bascule.plan.topology_search import suggest_topology
    from bascule.report.reports import of_topologies

    batches, hardware = _batches(options), options.hardware()
    passes = passes_of(options.passes, hardware)
    cluster = replace(options.machines(len(batches[0])), passes=passes)
    with waiting("solving topologies"):
        ranking = suggest_topology(batches, options.cost, cluster, limits=options.limits)
    notes = [
        *options.notes(),
        f"Nodes: {cluster.num_nodes}, of {cluster.ranks_per_node} ranks; batches: {len(batches)}; "
        f"passes: {options.passes}.",
    ]
    report = of_topologies(ranking, list(chain.from_iterable(batches[0])), notes, options.rows)
    rows = [asdict(row) for row in ranking.rows]
    publish(options, report, {"best": str(ranking.best), "rows": rows, "machine": str(hardware)})


def _batches(options: TopologyOptions) -> list[list[list[int]]]:
    options.check_steps(steps=options.steps)
    first, steps = options.read(), options.steps
    each = max(sum(map(len, first)), 1)
    if steps is None:
        steps = min(_DEFAULT_STEPS, max(_DEFAULT_SEQUENCES // each, 1)) if options.has_steps else 1
    if steps * each > _MAX_SEQUENCES:
        raise ConfigError(
            f"{steps} steps of {each} sequences: at most {_MAX_SEQUENCES} in all can be ranked, so "
            "use fewer --steps, or smaller batches"
        )
    return [first, *(options.read(steps_after=step) for step in range(1, steps))]
