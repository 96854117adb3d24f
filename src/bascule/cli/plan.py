"""`bascule plan`: plan one batch, and show who computes what."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from bascule.cli.inputs import BatchOptions, topology_ranks
from bascule.options import NewFile, Outputs, refuse

_OF_WIRES = "tflops", "intra_gbs", "inter_gbs", "latency_us", "ranks_per_node"


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

    topology: str | None = None
    wires: bool = False
    inter_gbs: float | None = None
    locality_tolerance: float | None = None
    compare: bool = False
    picture: Annotated[Path | None, NewFile()] = None


def run(options: PlanOptions, arguments: list[str]) -> None:
    """Plan, and publish the plan."""
    from bascule.cli.command import publish, write
    from bascule.plan.plan import Plan, plan_batch, plan_greedily
    from bascule.plan.topology import Topology
    from bascule.report.reports import of_plan
    from bascule.report.step_picture import draw_step

    lens = options.read(topology_ranks(options.topology))
    cost, topology = options.cost, options.topology or f"g1n{len(lens)}"
    if not (is_priced := options.wires or topology == "auto"):
        refuse(options, _OF_WIRES, "changes nothing without --wires, which counts seconds")
    cluster = options.machines(len(lens)) if is_priced else None
    chosen = {
        "limits": options.limits,
        "locality_tolerance": options.locality_tolerance,
    }

    def timed(
        name: str, make: Callable[..., Plan], bags: Topology | str, **keywords: Any
    ) -> tuple[str, Plan, float]:
        start = time.perf_counter()
        plan = make(lens, bags, cost, cluster=cluster, **keywords)
        return name, plan, time.perf_counter() - start

    plans = [timed("lpt", plan_batch, topology, **chosen)]
    plan = plans[0][1]
    if options.compare:
        name = "knapsack" if options.limits is None else "knapsack, without the limit"
        plans.append(timed(name, plan_greedily, plan.topology))  # it knows no limits
        plans += [
            timed(name, plan_batch, plan.topology, **chosen | x) for name, x in _changes(options)
        ]
    notes = options.notes(is_priced=is_priced)
    report = of_plan(plan, cost, cluster, notes, plans if options.compare else ())
    console = publish(options, report, json.loads(plan.to_json()))
    if options.picture is not None:
        picture = draw_step(plan, cost, cluster, "TFLOP" if cluster is None else "s")
        write(console, "--picture", options.picture, picture)


def _changes(options: PlanOptions) -> Iterator[tuple[str, dict[str, Any]]]:
    if options.limits is not None:
        yield "without the limit", {"limits": None}
    if options.locality_tolerance is not None:
        yield "without the tolerance", {"locality_tolerance": None}
