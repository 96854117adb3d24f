"""`bascule topology --data g16b4i256f1s0,g16b1i1024f1s0`: rank the topologies."""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from bascule.cli.inputs import BatchOptions
from bascule.cli.plan import WORTH
from bascule.errors import ConfigError
from bascule.machine.cluster import BYTES_PER_VALUE, FORWARD, Cluster, passes_of
from bascule.machine.costs import TransformerCost
from bascule.options import Group, Outputs, Range
from bascule.plan import metrics
from bascule.plan.topology import Topology
from bascule.quantities import Scale, count, number, percent, seconds, times
from bascule.report.charts import draw_bars, draw_lengths
from bascule.report.page import Fact, Format, Report, Rows

if TYPE_CHECKING:
    from bascule.plan.plan import Plan
    from bascule.plan.topology_search import TopologyRanking

_DEFAULT_STEPS = 20
_DEFAULT_SEQUENCES = 20_000
_MAX_SEQUENCES = 2**18


@dataclass(frozen=True, kw_only=True)
class TopologyOptions(Outputs, BatchOptions):
    """Rank the topologies of a cluster for a stream of batches.

    Attributes:
        steps: Number of batches of --data or --manifest to rank for. Default: up to 20.
        rows: Number of topologies to print.
        passes: Predict a training step with or without recompute, or only a forward pass.
    """

    steps: Annotated[int | None, Range(1), Group("Ranking")] = None
    rows: Annotated[int, Range(1)] = 10
    passes: Literal["step", "step-without-recompute", "forward"] = "step"


def run(options: TopologyOptions, arguments: list[str]) -> None:
    """Rank topologies, and publish the ranking."""
    from bascule.cli.command import publish, waiting
    from bascule.plan.offer import offer_of
    from bascule.plan.plan import Terms
    from bascule.plan.topology_search import suggest_topology

    batches = _read_batches(options)
    passes = passes_of(options.passes, options.hardware())
    cluster = replace(options.machines(len(batches[0])), passes=passes)
    with waiting("comparing topologies"):
        ranking = suggest_topology(batches, options.cost, cluster, limits=options.limits)
        best = Terms(ranking.best, options.cost, options.limits, cluster=cluster)
        plans = [best.priced(offer_of(batch)).plan() for batch in batches]
    publish(options, report_of(options, ranking, plans, cluster))


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


def _moving_seconds(plan: "Plan", cost: TransformerCost, cluster: Cluster) -> float:
    """Predict the seconds of moving a plan's tokens to their bags and back, in all passes."""
    from bascule.sim.placements import Placement
    from bascule.sim.seconds import NUM_ROUTES, exchange_seconds

    routes = NUM_ROUTES // 2 if cluster.passes == FORWARD else NUM_ROUTES
    cluster = replace(cluster, passes=FORWARD)  # exchanges in bags are another number of passes
    lens = plan.seq_lens
    placed = Placement(plan.topology, plan.source_ranks, lens, lens, plan.bag_of)
    sent = exchange_seconds(placed, cluster, routes * BYTES_PER_VALUE * cost.d_model).max()
    return float(sent + routes * cluster.latency_s * (sent > 0))


def report_of(
    options: TopologyOptions, ranking: "TopologyRanking", plans: "list[Plan]", cluster: Cluster
) -> Report:
    """Report a ranking with reasons, and the unbalanced batches; `plans` use the first topology."""
    cost = options.cost
    moving_s = float(np.mean([_moving_seconds(plan, cost, cluster) for plan in plans]))
    loaded = [plan.unbalanced_loads(cost, cluster) for plan in plans]
    loaded_s = float(np.mean([loads.max() for loads in loaded]))
    imbalance = float(np.mean([metrics.imbalance(loads) for loads in loaded]))
    table = [("as loaded", loaded_s, loaded_s, imbalance, ("nothing moves",))]
    table += [(x.spec, x.seconds, x.seconds, x.imbalance, x.reasons) for x in ranking.rows]
    first, names, taken = ranking.rows[0], [row[0] for row in table], [row[1] for row in table]
    total, num_ranks = first.seconds + moving_s, ranking.best.num_ranks
    gain = loaded_s / total if total > 0 else 1.0
    scale = Scale.of(taken, "s")
    unit = Topology.parse(first.spec).num_ranks
    best = first.spec + (f" (repeated for each {unit} ranks)" if unit < num_ranks else "")
    makes, reasons = f"makes the step {times(gain)} as fast as loaded", "; ".join(first.reasons)
    answer = f"{best} {makes}, moving counted. {reasons}."
    if gain < WORTH:
        answer = f"Leave the batches as they are: the fastest topology, {best}, {makes}."
    formats: dict[str, Format] = {"topology": str, f"step, {scale.unit}": scale}
    formats["speed-up"] = lambda took: times(loaded_s / took if took else 1.0)
    formats |= {"imbalance": number, "why": "\n".join}
    return Report(
        title=f"Topologies for these batches on {count(num_ranks, 'rank')}",
        answer=answer if total > 0 else "The batches have no tokens: leave them as they are.",
        facts=(
            Fact("best", "fastest topology", best),
            Fact("seconds", "a step on it takes", first.seconds, seconds),
            Fact("moving", "moving tokens to it and back takes", moving_s, seconds),
            Fact("gain", "predicted speed-up", gain, times),
            Fact("gap", "distance from the optimum, at most", first.gap, percent),
            Fact("candidates", "topologies compared", ranking.num_candidates, number),
        ),
        parts=(
            draw_bars(
                "Time of a step",
                f"{seconds(first.seconds)} on {first.spec}, {seconds(loaded_s)} as loaded.",
                names,
                {"step": taken},
                "s",
            ),
            Rows("Ranking", formats, table, num_shown=options.rows + 1),
            draw_lengths(plans[0].seq_lens),
        ),
        notes=(
            *options.notes(),
            f"Compared: {count(len(plans), 'batch', 'es')} on nodes of "
            f"{count(cluster.ranks_per_node, 'rank')}, passes: {options.passes}.",
            "The table does not count the moving of tokens between ranks; the answer does.",
            "Every row was planned in full. Topologies within 0.5 % of each other count as equally "
            "fast; the one with the fewest bags comes first.",
        ),
        values={
            "best": str(ranking.best),
            "rows": [asdict(row) for row in ranking.rows],
            "machine": str(options.hardware()),
        },
    )
