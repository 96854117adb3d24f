"""`bascule plan --lengths 4096,300/512/512,2048 --topology auto`: plan one batch."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bascule.cli.inputs import BatchOptions
from bascule.errors import PlanError
from bascule.machine.cluster import Cluster
from bascule.machine.costs import FLOPS_PER_UNIT, Cost, in_bag
from bascule.options import Group, NewFile, Outputs, refuse
from bascule.plan.topology import Topology
from bascule.quantities import Scale, count, flops, number, percent, seconds, times
from bascule.report.charts import draw_lengths, draw_lines
from bascule.report.page import Chart, Fact, Format, Report, Rows

if TYPE_CHECKING:
    from bascule.plan.plan import Plan

_WIRE_OPTIONS = "tflops", "intra_gbs", "inter_gbs", "latency_us", "ranks_per_node"
_WIRE_SHARE = 0.05  # of a bag's time: from here on communication is named as the limit
_EVEN = 1.01  # imbalance up to which ranks are called even
_MOST_TERMS = 4  # of a topology that the advice writes out
WORTH = 1.02  # speed-up below which the advice is to leave a step as it is


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Outputs, BatchOptions):
    """Plan one batch and show who computes what.

    Attributes:
        topology: Bags of ranks that share sequences, such as g1n8+g8n3 or g4r2n1; or auto for the
            fastest. By default, each rank computes alone, and the answer names a faster topology.
        picture: Draw the step before and after balancing into this SVG file.
        wires: Predict loads in seconds, with communication, not in FLOPs; auto always does so.
        inter_gbs: GB per second that a rank sends to other nodes. Default: the profile's.
    """

    topology: Annotated[str | None, Group("Plan")] = None
    wires: bool = False
    inter_gbs: Annotated[float | None, Group("Machine")] = None
    picture: Annotated[Path | None, NewFile(), Group("Output")] = None


def run(options: PlanOptions, arguments: list[str]) -> None:
    """Plan, and publish the plan."""
    from bascule.cli.command import publish, write
    from bascule.plan.offer import offer_of
    from bascule.plan.plan import Terms
    from bascule.report.step_picture import draw_step

    spec = options.topology
    lens = options.read(None if spec in (None, "auto") else Topology.parse(spec).num_ranks)
    cost, topology = options.cost, spec or f"g1n{len(lens)}"
    if not (is_priced := options.wires or topology == "auto"):
        refuse(options, _WIRE_OPTIONS, "changes nothing without --wires, which predicts seconds")
    limits, machines = options.limits, options.machines(len(lens))
    cluster = machines if is_priced else None
    terms = Terms(topology, cost, limits, cluster=cluster)
    plan = terms.priced(offer_of(lens)).plan()
    notes = options.notes(is_priced=is_priced)
    if not is_priced:
        notes.append(f"The advice counts communication in bags, on {options.hardware()}.")
    advice, priced = _advice(plan, options, machines)
    report = report_of(plan, cost, cluster, advice, notes)
    console = publish(options, replace(report, values=json.loads(plan.to_json()) | priced))
    if options.picture is not None:
        picture = draw_step(plan, cost, cluster, "TFLOP" if cluster is None else "s")
        write(console, "--picture", options.picture, picture)


def report_of(
    plan: "Plan", cost: Cost, cluster: Cluster | None, advice: str, notes: Sequence[str]
) -> Report:
    """Report one batch as loaded and as planned, with `advice` on what to do."""
    from bascule.report.step_picture import MOST_RANKS, draw_step

    per_unit, unit, amount = FLOPS_PER_UNIT, "FLOP", flops
    if cluster is not None:
        per_unit, unit, amount = 1.0, "s", seconds
    before, after = plan.unbalanced_loads(cost, cluster) * per_unit, plan.loads * per_unit
    speedup = float(before.max() / after.max()) if plan.makespan > 0 else 1.0
    waiting = [float((loads.max() - loads).sum()) for loads in (before, after)]
    of_ranks = {"as loaded": before, "balanced": after}
    words = "All ranks wait for the slowest; the picture below has the first ranks alone."
    lines = [draw_lines("Work of each rank", words, ("rank", unit), of_ranks)]
    lines = lines if plan.num_ranks > MOST_RANKS else []
    loads = plan.tokens.tolist(), after.tolist(), before.tolist()
    rows = zip(range(plan.num_ranks), plan.topology.bag_of_rank.tolist(), *loads, strict=True)
    scale = Scale.of([*loads[1], *loads[2]], unit)
    formats: dict[str, Format] = {"rank": str, "bag": str, "tokens": number}
    formats |= {"balanced": scale, "as loaded": scale}
    answer = f"{_limit(plan, cost, cluster)}: {advice}."
    if plan.makespan > 0 and plan.num_ranks > 1:
        predicted = f"this batch is predicted to run {times(speedup)} as fast as it was loaded"
        sentences = f"Balanced on {plan.topology}, {predicted}.", answer
        answer = " ".join(sentences if speedup >= WORTH else reversed(sentences))
    return Report(
        title=f"One batch on {count(plan.num_ranks, 'rank')}, topology {plan.topology}",
        answer=answer,
        facts=(
            Fact("speedup", "predicted speed-up", speedup, times),
            Fact("makespan", "work of the slowest rank", float(after.max()), amount),
            Fact("lower_bound", "lower bound of that work", plan.lower_bound * per_unit, amount),
            Fact("gap", "distance from the optimum, at most", plan.gap, percent),
            Fact("imbalance", "imbalance (largest load / mean)", plan.imbalance, number),
            Fact("wir", "WIR (largest load / smallest)", plan.wir, number),
            Fact("waiting_before", "idle work before (sum over ranks)", waiting[0], amount),
            Fact("waiting", "idle work balanced (sum over ranks)", waiting[1], amount),
            Fact("moved_tokens", "tokens that change ranks", plan.moved_tokens, number),
            Fact("tokens", "tokens of the batch", int(plan.seq_lens.sum()), number),
        ),
        parts=(
            *lines,
            Chart(
                "The step, rank by rank",
                "Above as loaded, below as planned: one bar per rank, one field per sequence.",
                lambda: draw_step(plan, cost, cluster, "TFLOP" if cluster is None else "s"),
            ),
            draw_lengths(plan.seq_lens),
            Rows(f"All ranks, {scale.unit}", formats, list(rows), bars=loads[1]),
        ),
        notes=(
            f"The slowest rank has at most {percent(plan.gap)} more work than in the best plan on "
            "these bags.",
            "Loads are those of the forward pass; the backward pass has the same ratios.",
            *notes,
        ),
    )


def _limit(plan: "Plan", cost: Cost, cluster: Cluster | None) -> str:
    """Say what keeps the step from ending earlier."""
    if plan.makespan == 0:
        return "The batch has no tokens"
    if plan.num_ranks == 1:
        return "One rank computes everything"
    if plan.binding is not None:
        return f"One sequence of {plan.binding.num_tokens:,} tokens sets the time"
    if cluster is not None:
        bag, *_, degree = plan.topology.place_of(int(plan.loads.argmax()))
        lens = plan.seq_lens[plan.bag_of == bag]
        compute = float(cluster.compute_seconds(in_bag(cost, degree), lens).sum())
        share = 1.0 - compute / int(plan.topology.bag_sizes[bag]) / plan.makespan
        if share > _WIRE_SHARE:
            return f"Communication takes {percent(share)} of the time of the slowest bag"
    if plan.imbalance > _EVEN:
        return f"Whole sequences do not divide evenly over {count(plan.topology.num_bags, 'bag')}"
    return "The ranks are even"


def _advice(
    plan: "Plan", options: PlanOptions, machines: Cluster
) -> tuple[str, dict[str, float | str]]:
    """Say what to do about the step, and with which seconds, communication in bags counted."""
    from bascule.plan.plan import Terms

    if plan.makespan == 0 or plan.num_ranks == 1:
        return "there is nothing to balance", {}
    cost, before = options.cost, float(plan.unbalanced_loads(options.cost, machines).max())
    prices = Terms(plan.topology, cost, cluster=machines).priced(plan.offer).prices
    now = float((prices.loads(plan.bag_of) + prices.exposed_host(plan.bag_of)).max())
    best, least = str(plan.topology), now
    with suppress(PlanError):  # auto has no bags as large as --topology may give
        auto = Terms("auto", cost, options.limits, cluster=machines).priced(plan.offer).plan()
        best, least = str(auto.topology), auto.makespan
    priced = {"advised": best, "advised_s": least, "planned_s": now, "as_loaded_s": before}
    if least * WORTH <= min(now, before):
        short = best if best.count("+") < _MOST_TERMS else "auto"
        words = f"with communication, --topology {short} makes the step {times(before / least)} as "
        return f"{words}fast as loaded, and this plan {times(before / now)}", priced
    gains = before >= now * WORTH
    if plan.imbalance <= _EVEN:
        idle = "only fewer tokens or more ranks shorten the step"
        return idle if gains else "leave it as it is", priced
    reason = "no other topology is faster" if gains else "no topology gains 2 %"
    if (samples := int((plan.seq_lens > 0).sum())) <= plan.num_ranks:
        reason = f"{count(samples, 'sample')} on {plan.num_ranks:,} ranks cannot be spread"
    keep = "keep this plan" if gains else "leave the batch as it is"
    return f"{reason}; {keep}, or give a rank more samples per step", priced
