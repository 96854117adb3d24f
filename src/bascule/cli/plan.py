"""`bascule plan --lengths 4096,300/512/512,2048 --topology auto`: plan one batch."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bascule.cli.inputs import BatchOptions, topology_ranks
from bascule.options import Group, NewFile, Outputs, refuse
from bascule.report.charts import draw_lengths, draw_loads
from bascule.report.page import Chart, Fact, Report, Rows, columns, ms

if TYPE_CHECKING:
    from bascule.arrays import Floats
    from bascule.machine.cluster import Cluster
    from bascule.machine.costs import Cost
    from bascule.plan.plan import Plan
    from bascule.plan.topology import Topology

_WIRE_OPTIONS = "tflops", "intra_gbs", "inter_gbs", "latency_us", "ranks_per_node"
_WIRE_SHARE = 0.05  # of a bag's time: from here on wires are named as what binds
_EVEN = 1.01  # imbalance: up to here the total work is named as what binds


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Outputs, BatchOptions):
    """Plan one batch and show who computes what.

    Attributes:
        topology: Compute bags, such as g1n8+g8n3 or g4r2n1, or auto; one rank a bag by default.
        wires: Count the cluster's wires and launches too, in seconds; auto always does.
        inter_gbs: GB that a rank sends in a second to other nodes, in place of the profile's.
        locality_tolerance: By how much the makespan may grow so that more tokens stay where they
            were loaded, 0.01 is 1 %; 0 gives up evenness alone.
        compare: Compare with the greedy of the KnapFormer paper, and with plans without limits and
            tolerance.
        picture: Where to draw the step before and after balancing, as an SVG.
    """

    topology: Annotated[str | None, Group("Plan")] = None
    wires: bool = False
    inter_gbs: Annotated[float | None, Group("Machine")] = None
    locality_tolerance: Annotated[float | None, Group("Plan")] = None
    compare: bool = False
    picture: Annotated[Path | None, NewFile(), Group("Output")] = None


def run(options: PlanOptions, arguments: list[str]) -> None:
    """Plan, and publish the plan."""
    from bascule.cli.command import publish, write
    from bascule.plan.plan import Plan, plan_batch, plan_greedily
    from bascule.plan.topology import Topology
    from bascule.report.step_picture import draw_step

    lens = options.read(topology_ranks(options.topology))
    cost, topology = options.cost, options.topology or f"g1n{len(lens)}"
    if not (is_priced := options.wires or topology == "auto"):
        refuse(options, _WIRE_OPTIONS, "changes nothing without --wires, which counts seconds")
    cluster = options.machines(len(lens)) if is_priced else None
    rules = {"limits": options.limits, "locality_tolerance": options.locality_tolerance}

    def timed(
        name: str, make: Callable[..., Plan], bags: Topology | str, **keywords: Any
    ) -> tuple[str, Plan, float]:
        start = time.perf_counter()
        plan = make(lens, bags, cost, cluster=cluster, **keywords)
        return name, plan, time.perf_counter() - start

    plans = [timed("lpt", plan_batch, topology, **rules)]
    plan = plans[0][1]
    if options.compare:
        name = "knapsack" if options.limits is None else "knapsack, without the limit"
        plans.append(timed(name, plan_greedily, plan.topology))  # the greedy has no limits
        for rule, name in (("limits", "limit"), ("locality_tolerance", "tolerance")):
            if rules[rule] is not None:
                without = rules | {rule: None}
                plans.append(timed(f"without the {name}", plan_batch, plan.topology, **without))
    notes = options.notes(is_priced=is_priced)
    report = report_of(plan, cost, cluster, notes, plans if options.compare else ())
    console = publish(options, report)
    if options.picture is not None:
        picture = draw_step(plan, cost, cluster, "TFLOP" if cluster is None else "s")
        write(console, "--picture", options.picture, picture)


def report_of(
    plan: "Plan",
    cost: "Cost",
    cluster: "Cluster | None",
    notes: Sequence[str],
    compared: "Sequence[tuple[str, Plan, float]]" = (),
) -> Report:
    """Report one batch as loaded and as planned; `compared` are name, plan, planning seconds."""
    from bascule.report.step_picture import draw_step

    unit = "TFLOP" if cluster is None else "s"
    before = plan.unbalanced_loads(cost, cluster)
    speedup = float(before.max() / plan.makespan) if plan.makespan > 0 else 1.0
    waiting = [float((loads.max() - loads).sum()) for loads in (before, plan.loads)]
    load, total = f"{{:.6g}} {unit}", int(plan.seq_lens.sum())
    bags = plan.topology.bag_of_rank.tolist()
    names = [f"{bag} ({_bag_spec(plan.topology, bag)})" for bag in bags]
    loads = plan.tokens.tolist(), plan.loads.tolist(), before.tolist()
    rows = list(zip(range(plan.num_ranks), names, *loads, strict=True))
    formats = columns("rank", "bag", "tokens: {:,}", f"{unit}: {{:.4g}}", "as loaded: {:.4g}")
    return Report(
        title=f"One batch on {plan.num_ranks} ranks, bags {plan.topology}",
        answer=f"Balanced, this batch is predicted to run {speedup:.2f}x as fast as it was loaded.",
        facts=(
            Fact("speedup", "predicted speed-up", speedup, "{:.2f}x"),
            Fact("makespan", "slowest rank", plan.makespan, load),
            Fact("lower_bound", "no plan on these bags is below", plan.lower_bound, load),
            Fact("gap", "from the best plan at most", plan.gap, "{:.3%}"),
            Fact("imbalance", "imbalance, max / mean", plan.imbalance, "{:.4f}"),
            Fact("wir", "WIR, max / min", plan.wir, "{:.4f}"),
            Fact("waiting_before", "all ranks wait, as loaded", waiting[0], load),
            Fact("waiting", "all ranks wait, balanced", waiting[1], load),
            Fact("moved_tokens", "tokens that move", plan.moved_tokens, "{:,}"),
            Fact("tokens", "tokens", total, "{:,}"),
        ),
        parts=(
            *([_compared(compared, before, unit)] if compared else []),
            draw_loads(before, plan.loads, unit),
            Chart(
                "The step, rank by rank",
                "Above as loaded, below as planned: one bar a rank, one field a sequence.",
                lambda: draw_step(plan, cost, cluster, unit),
            ),
            draw_lengths(plan.seq_lens),
            Rows("All ranks", formats, rows, bars=loads[1]),
        ),
        notes=(
            f"binds: {_binding(plan, cost, cluster)}",
            f"Certificate: the plan is at most {plan.gap:.3%} above a lower bound that every plan "
            "of these bags obeys.",
            "Loads count the forward pass by the cost model; a backward pass has the same ratios.",
            *notes,
        ),
        values=json.loads(plan.to_json()),
    )


def _bag_spec(topology: "Topology", bag: int) -> str:
    ring = int(topology.ring_degrees[bag])
    degree = int(topology.bag_sizes[bag]) // ring
    return f"g{degree}" if ring == 1 else f"g{degree}r{ring}"


def _compared(plans: "Sequence[tuple[str, Plan, float]]", before: "Floats", unit: str) -> Rows:
    from bascule.plan import metrics

    names = "", f"makespan, {unit}: {{:.6g}}", "gap: {:.3%}", "imbalance: {:.4f}", "WIR: {:.4f}"
    formats = columns(*names, "tokens moved: {:,}") | {"planning": ms}
    rows: list[tuple[Any, ...]] = [
        (name, plan.makespan, plan.gap, plan.imbalance, plan.wir, plan.moved_tokens, seconds)
        for name, plan, seconds in plans
    ]
    loaded = float(before.max()), None, metrics.imbalance(before), metrics.wir(before), 0, None
    return Rows("Plans compared", formats, [*rows, ("as loaded", *loaded)])


def _binding(plan: "Plan", cost: "Cost", cluster: "Cluster | None") -> str:
    """Name what keeps the step from ending earlier."""
    from bascule.machine.costs import in_bag

    if plan.makespan == 0:
        return "nothing, the batch is idle"
    reasons: list[str] = []
    if plan.binding is not None:
        enough = plan.binding.enough_ranks
        left = f"+g1n{plan.num_ranks - enough}" if enough < plan.num_ranks else ""
        reasons.append(f"{plan.binding}, as with --topology g{enough}n1{left}")
    if cluster is not None:
        bag, *_, degree = plan.topology.place_of(int(plan.loads.argmax()))
        lens = plan.seq_lens[plan.bag_of == bag]
        compute = float(cluster.compute_seconds(in_bag(cost, degree), lens).sum())
        share = 1.0 - compute / int(plan.topology.bag_sizes[bag]) / plan.makespan
        if share > _WIRE_SHARE:
            reasons.append(
                f"wires: {share:.0%} of the time of the slowest bag; smaller bags have less"
            )
    if not reasons and plan.imbalance > _EVEN:
        reasons.append(
            f"whole sequences, which do not divide evenly over {plan.topology.num_bags} bags: "
            "larger bags can be faster, which --topology auto looks for"
        )
    return "; ".join(reasons) or "the total work, spread evenly"
