"""`bascule topology --data g16b4i256f1s0,g16b1i1024f1s0`: rank the topologies."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Literal

from bascule.cli.inputs import BatchOptions
from bascule.errors import ConfigError
from bascule.options import Group, Outputs, Range
from bascule.report.charts import draw_bars, draw_lengths
from bascule.report.page import Fact, Report, Rows, columns

if TYPE_CHECKING:
    from bascule.plan.topology_search import TopologyRanking

_DEFAULT_STEPS = 20
_DEFAULT_SEQUENCES = 20_000
_MAX_SEQUENCES = 2**18
_MAX_BARS = 200


@dataclass(frozen=True, kw_only=True)
class TopologyOptions(Outputs, BatchOptions):
    """Rank the topologies of a cluster for a stream of batches.

    Attributes:
        steps: Batches of --data or --manifest; by default 20, fewer with many sequences.
        rows: Topologies to print.
        passes: Passes to count: a training step, which recomputes or does not, or a forward pass.
    """

    steps: Annotated[int | None, Range(1), Group("Ranking")] = None
    rows: Annotated[int, Range(1)] = 10
    passes: Literal["step", "step-without-recompute", "forward"] = "step"


def run(options: TopologyOptions, arguments: list[str]) -> None:
    """Rank topologies, and publish the ranking."""
    from bascule.cli.command import publish, waiting
    from bascule.machine.cluster import passes_of
    from bascule.plan.topology_search import suggest_topology

    batches, hardware = _read_batches(options), options.hardware()
    passes = passes_of(options.passes, hardware)
    cluster = replace(options.machines(len(batches[0])), passes=passes)
    with waiting("solving topologies"):
        ranking = suggest_topology(batches, options.cost, cluster, limits=options.limits)
    notes = [
        *options.notes(),
        f"Nodes: {cluster.num_nodes}, of {cluster.ranks_per_node} ranks; batches: {len(batches)}; "
        f"passes: {options.passes}.",
    ]
    lens = list(chain.from_iterable(batches[0]))
    report = report_of(ranking, lens, notes, options.rows)
    rows = [asdict(row) for row in ranking.rows]
    values = {"best": str(ranking.best), "rows": rows, "machine": str(hardware)}
    publish(options, replace(report, values=values))


def _read_batches(options: TopologyOptions) -> list[list[list[int]]]:
    options.check_steps(steps=options.steps)
    first, steps = options.read(), options.steps
    size = max(sum(map(len, first)), 1)
    if steps is None:
        steps = min(_DEFAULT_STEPS, max(_DEFAULT_SEQUENCES // size, 1)) if options.has_steps else 1
    if steps * size > _MAX_SEQUENCES:
        what = f"{steps} steps of {size} sequences: at most {_MAX_SEQUENCES} in all can be ranked"
        raise ConfigError(f"{what}, so use fewer --steps, or smaller batches")
    return [first, *(options.read(steps_after=step) for step in range(1, steps))]


def report_of(
    ranking: "TopologyRanking", lens: Sequence[int], notes: Sequence[str], num_shown: int
) -> Report:
    """Report a ranking of topologies with reasons; `lens` are the sequences of a batch."""
    first, last = ranking.rows[0], ranking.rows[-1]
    ratio = last.seconds / first.seconds if first.seconds > 0 else 1.0
    formats = columns("bags", "seconds: {:.4g}", "imbalance: {:.4f}", "gap: {:.2%}", "why")
    formats["why"] = "\n".join
    rows = [(row.spec, row.seconds, row.imbalance, row.gap, row.reasons) for row in ranking.rows]
    best = f"{first.spec} is the fastest: {'; '.join(first.reasons)}."
    return Report(
        title="Which bags suit these batches",
        answer=best if first.seconds > 0 else "The batches are idle: any bags do.",
        facts=(
            Fact("best", "best bags", first.spec),
            Fact("seconds", "a step takes", first.seconds, "{:.4g} s"),
            Fact("imbalance", "imbalance, max / mean", first.imbalance, "{:.4f}"),
            Fact("gap", "from the best plan at most", first.gap, "{:.2%}"),
            Fact("over_worst", f"as fast as {last.spec}", ratio, "{:.2f}x"),
            Fact("planned", "topologies planned", len(ranking.rows), "{:,}"),
            Fact("candidates", "looked at", ranking.num_candidates, "{:,}"),
        ),
        parts=(
            draw_bars(
                "Seconds of a step",
                f"{first.spec} takes {first.seconds:.4g} s, {last.spec} {last.seconds:.4g} s.",
                [row.spec for row in ranking.rows[:_MAX_BARS]],
                {"seconds": [row.seconds for row in ranking.rows[:_MAX_BARS]]},
                "s",
            ),
            Rows("Ranking", formats, rows, num_shown=num_shown),
            draw_lengths(lens),
        ),
        notes=(
            *notes,
            "Every row was planned, not only bounded. Bags within 0.5 % of each other count as "
            "equally fast; of these the fewest and largest stand first.",
        ),
    )
