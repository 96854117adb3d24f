"""`bascule plan`: plan lengths from the command line, a file or data codes, and draw the loads."""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from bascule.cli.inputs import ClusterOptions, InputOptions, topology_ranks
from bascule.cli.writing import STDOUT, check_outputs, write_json, write_report, write_text
from bascule.plan.costs import Cost
from bascule.plan.limits import Limits
from bascule.plan.machine import Cluster
from bascule.plan.plan import Plan, plan_batch
from bascule.plan.topology import Topology
from bascule.report.reports import of_plan
from bascule.report.step_picture import draw_step

_MAX_ROWS = 64
_BAR_WIDTH = 28
_WIRE_SHARE = 0.05
_EVEN = 1.01
"""Imbalance up to which ranks are said to have the same work."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(InputOptions, ClusterOptions):
    """Plan one batch and show who computes what.

    Attributes:
        topology: Compute bags, for example g1n8+g8n3 or g4r2n1, or auto; one rank a bag if not
            given.
        planner: lpt, or the greedy of the KnapFormer paper.
        wires: Count the cluster's wires and launches too, in seconds; auto always does.
        locality_tolerance: By how much the makespan may grow so that more tokens stay where they
            were loaded, 0.01 is 1 %; 0 gives up evenness alone. Shows what that costs in WIR.
        compare: Compare the planners instead of drawing the loads.
        json: Where to write the plan; - for standard output.
        picture: Where to draw the step before and after balancing, as an SVG.
        report: Where to write a page of it all, .html.
    """

    topology: str | None = None
    planner: Literal["lpt", "knapsack"] = "lpt"
    wires: bool = False
    locality_tolerance: float | None = None
    compare: bool = False
    json: Path | None = None
    picture: Path | None = None
    report: Path | None = None


@dataclass(frozen=True)
class _Batch:
    """The inputs of a plan."""

    lens: list[list[int]]
    topology: str
    cost: Cost
    cluster: Cluster | None
    limits: Limits | None
    locality_tolerance: float | None = None

    @property
    def unit(self) -> str:
        """What loads are counted in."""
        return "TFLOP" if self.cluster is None else "s"

    def plan(self, planner: str, limits: Limits | None) -> Plan:
        """The plan by another planner or without limits."""
        return plan_batch(
            self.lens,
            self.topology,
            self.cost,
            planner=planner,
            limits=limits,
            cluster=self.cluster,
            locality_tolerance=self.locality_tolerance,
        )


def plan(options: PlanOptions) -> None:
    """Plan and print.

    Raises:
        ConfigError: The input is malformed or does not fit.
        PlanError: The limit cannot be kept.
    """
    check_outputs(
        file=options.file,
        manifest=options.manifest,
        json=options.json,
        picture=options.picture,
        report=options.report,
    )
    lens = options.read(topology_ranks(options.topology))
    topology = options.topology or f"g1n{len(lens)}"
    if topology != "auto":
        Topology.parse(topology, world_size=len(lens))
    cluster = options.machines(len(lens)) if options.wires or topology == "auto" else None
    batch = _Batch(
        lens, topology, options.cost, cluster, options.limits, options.locality_tolerance
    )
    made = batch.plan(options.planner, batch.limits)
    console = Console(stderr=options.json == STDOUT)
    if options.compare:
        _compare(console, batch)
    else:
        _draw(console, made, batch)
    _summarize(console, made, batch)
    console.print(f"model: {options.cost.shape}", highlight=False)
    if cluster is not None:
        console.print(f"predicted for {options.hardware()}", markup=False)
    if (memory := options.memory) is not None:
        console.print(memory, markup=False)
    write_json(console, options.json, json.loads(made.to_json()))
    if options.picture is not None:
        picture = draw_step(made, batch.cost, batch.cluster, batch.unit)
        write_text(console, "--picture", options.picture, picture)
    if options.report is not None:
        machine = None if cluster is None else str(options.hardware())
        write_report(console, options.report, of_plan(made, batch.cost, cluster, machine))


def _as_loaded(plan: Plan, batch: _Batch) -> list[float]:
    """Load of each rank if every sequence stayed where it was loaded."""
    return plan.unbalanced_loads(batch.cost, batch.cluster).tolist()


def _draw(console: Console, plan: Plan, batch: _Batch) -> None:
    before = _as_loaded(plan, batch)
    table = Table(title=f"{plan.topology} on {plan.num_ranks} ranks, planner {plan.planner}")
    for name, side in (("rank", "right"), ("bag", "right"), ("tokens", "right"), ("load", "left")):
        table.add_column(name, justify=side)  # pyright: ignore[reportArgumentType]
    table.add_column(batch.unit, justify="right")
    table.add_column("as loaded", justify="right")
    scale = _BAR_WIDTH / plan.makespan if plan.makespan > 0 else 0.0
    for rank in range(min(plan.num_ranks, _MAX_ROWS)):
        load = float(plan.loads[rank])
        bag = int(plan.topology.bag_of_rank[rank])
        table.add_row(
            str(rank),
            f"{bag} ({_bag_spec(plan.topology, bag)})",
            f"{plan.tokens[rank]:,}",
            "█" * round(load * scale),
            f"{load:.4g}",
            f"{before[rank]:.4g}",
        )
    console.print(table)
    if plan.num_ranks > _MAX_ROWS:
        console.print(f"({plan.num_ranks - _MAX_ROWS} more ranks)")


def _bag_spec(topology: Topology, bag: int) -> str:
    ring = int(topology.ring_degrees[bag])
    degree = int(topology.bag_sizes[bag]) // ring
    return f"g{degree}" if ring == 1 else f"g{degree}r{ring}"


def _summarize(console: Console, plan: Plan, batch: _Batch) -> None:
    before = max(_as_loaded(plan, batch))
    speedup = before / plan.makespan if plan.makespan > 0 else 1.0
    console.print(
        f"makespan {plan.makespan:.6g} {batch.unit}, lower bound {plan.lower_bound:.6g}: "
        f"at most {plan.gap:.3%} from the best plan on these bags\n"
        f"imbalance (max/mean) {plan.imbalance:.4f}, WIR (max/min) {plan.wir:.4f}\n"
        f"predicted speed-up over the batch as loaded: {speedup:.2f}x\n"
        f"{plan.moved_tokens:,} of {int(plan.seq_lens.sum()):,} tokens move to another rank"
    )
    if batch.locality_tolerance is not None:
        even = replace(batch, locality_tolerance=None).plan(plan.planner, batch.limits)
        console.print(
            f"kept at home: the even plan moves {even.moved_tokens:,} tokens, with a makespan of "
            f"{even.makespan:.6g} {batch.unit} and a WIR of {even.wir:.4f}"
        )
    for line in _binding(plan, batch):
        console.print(f"binds: {line}")


def _binding(plan: Plan, batch: _Batch) -> list[str]:
    """The reasons why the step cannot end earlier, one line each."""
    if plan.makespan == 0:
        return ["nothing, the batch is idle"]
    lines: list[str] = []
    if batch.limits is not None:
        free = batch.plan(plan.planner, None)
        if plan.makespan > free.makespan * 1.001:
            lines.append(
                f"the limit of {batch.limits.tokens:,} tokens a rank: without it, the makespan is "
                f"{free.makespan:.6g} {batch.unit}"
            )
    if plan.binding is not None:
        lines.append(str(plan.binding))
    if batch.cluster is not None:
        bag = int(plan.topology.bag_of_rank[plan.loads.argmax()])
        size = int(plan.topology.bag_sizes[bag])
        held = plan.seq_lens[plan.bag_of == bag]
        compute = float(batch.cluster.compute_seconds(batch.cost, held).sum()) / size
        share = 1.0 - compute / plan.makespan
        if share > _WIRE_SHARE:
            lines.append(
                f"wires: {share:.0%} of the time of the slowest bag; smaller bags have less"
            )
    if not lines and plan.imbalance > _EVEN:
        lines.append(
            f"whole sequences, which do not divide evenly over {plan.topology.num_bags} bags: "
            "larger bags can be faster"
        )
    return lines or ["the total work, spread evenly"]


def _compare(console: Console, batch: _Batch) -> None:
    """The planners side by side."""
    table = Table(title="planners")
    for name in ("", f"makespan, {batch.unit}", "gap", "imbalance", "tokens moved", "planning"):
        table.add_column(name, justify="right" if name else "left")
    for planner in ("lpt", "knapsack"):
        limits = batch.limits if planner == "lpt" else None
        start = time.perf_counter()
        made = batch.plan(planner, limits)
        seconds = time.perf_counter() - start
        name = planner if limits is batch.limits else f"{planner}, without the limit"
        table.add_row(
            name,
            f"{made.makespan:.6g}",
            f"{made.gap:.3%}",
            f"{made.imbalance:.4f}",
            f"{made.moved_tokens:,}",
            f"{seconds * 1e3:.1f} ms",
        )
    loads = _as_loaded(made, batch)
    mean = sum(loads) / len(loads)
    even = max(loads) / mean if mean > 0 else 1.0
    table.add_row("as loaded", f"{max(loads):.6g}", "", f"{even:.4f}", "0", "")
    console.print(table)
