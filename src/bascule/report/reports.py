"""Reports of commands: one function from a result to its `Report`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bascule.arrays import Floats
from bascule.plan import metrics
from bascule.plan.costs import Cost
from bascule.plan.machine import Cluster
from bascule.plan.plan import Plan
from bascule.plan.topology import Topology
from bascule.plan.topology_search import TopologyRanking
from bascule.report.charts import draw_bars, draw_lengths, draw_lines, draw_loads
from bascule.report.page import Chart, Fact, Report, Rows, ms
from bascule.report.sparse_picture import draw
from bascule.report.step_picture import draw_stages, draw_step
from bascule.sim.simulation import SimulationResult
from bascule.sim.sparse_study import BEFORE, DEFAULT, WAYS, Study, mesh_name

_MOST_BARS = 200
_WIRE_SHARE = 0.05
_EVEN = 1.01
"""Imbalance up to which ranks are said to have the same work."""


def of_plan(
    plan: Plan,
    cost: Cost,
    cluster: Cluster | None,
    notes: Sequence[str],
    compared: Sequence[tuple[str, Plan, float]] = (),
) -> Report:
    """Report one batch: who computes what as loaded, who does as planned, and the certificate.

    Args:
        plan: The plan.
        cost: The cost model that it was made with.
        cluster: The cluster that it was made with.
        notes: What the numbers were predicted for.
        compared: Name, plan and seconds of planning, of plans to list beside each other.
    """
    unit = "TFLOP" if cluster is None else "s"
    before = plan.unbalanced_loads(cost, cluster)
    speedup = float(before.max() / plan.makespan) if plan.makespan > 0 else 1.0
    waiting = [float((loads.max() - loads).sum()) for loads in (before, plan.loads)]
    load, total = f"{{:.6g}} {unit}", int(plan.seq_lens.sum())
    bags = plan.topology.bag_of_rank.tolist()
    names = [f"{bag} ({_bag_spec(plan.topology, bag)})" for bag in bags]
    loads = plan.tokens.tolist(), plan.loads.tolist(), before.tolist()
    rows = list(zip(range(plan.num_ranks), names, *loads, strict=True))
    columns = {"rank": "{}", "bag": "{}", "tokens": "{:,}", unit: "{:.4g}", "as loaded": "{:.4g}"}
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
            Rows("All ranks", columns, rows, loads[1]),
        ),
        notes=(
            f"binds: {_binding(plan, cost, cluster)}",
            f"Certificate: the plan is at most {plan.gap:.3%} above a lower bound that every plan "
            f"of these bags obeys. Planner: {plan.planner}.",
            "Loads count the forward pass by the cost model; a backward pass has the same ratios.",
            *notes,
        ),
    )


def _bag_spec(topology: Topology, bag: int) -> str:
    ring = int(topology.ring_degrees[bag])
    degree = int(topology.bag_sizes[bag]) // ring
    return f"g{degree}" if ring == 1 else f"g{degree}r{ring}"


def _compared(plans: Sequence[tuple[str, Plan, float]], before: Floats, unit: str) -> Rows:
    """List plans, and the batch as loaded."""
    columns = {
        "": "{}",
        f"makespan, {unit}": "{:.6g}",
        "gap": "{:.3%}",
        "imbalance": "{:.4f}",
        "WIR": "{:.4f}",
        "tokens moved": "{:,}",
        "planning": ms,
    }
    rows: list[tuple[Any, ...]] = [
        (name, one.makespan, one.gap, one.imbalance, one.wir, one.moved_tokens, seconds)
        for name, one, seconds in plans
    ]
    loaded = float(before.max()), None, metrics.imbalance(before), metrics.wir(before), 0, None
    return Rows("Plans compared", columns, [*rows, ("as loaded", *loaded)])


def _binding(plan: Plan, cost: Cost, cluster: Cluster | None) -> str:
    """Return why the step cannot end earlier."""
    if plan.makespan == 0:
        return "nothing, the batch is idle"
    reasons = [] if plan.binding is None else [str(plan.binding)]
    if cluster is not None:
        bag = int(plan.topology.bag_of_rank[plan.loads.argmax()])
        lens = plan.seq_lens[plan.bag_of == bag]
        compute = float(cluster.compute_seconds(cost, lens).sum())
        share = 1.0 - compute / int(plan.topology.bag_sizes[bag]) / plan.makespan
        if share > _WIRE_SHARE:
            reasons.append(
                f"wires: {share:.0%} of the time of the slowest bag; smaller bags have less"
            )
    if not reasons and plan.imbalance > _EVEN:
        reasons.append(
            f"whole sequences, which do not divide evenly over {plan.topology.num_bags} bags: "
            "larger bags can be faster"
        )
    return "; ".join(reasons) or "the total work, spread evenly"


def of_topologies(ranking: TopologyRanking, lens: Sequence[int], machine: str) -> Report:
    """Which bags suit batches like these, and why.

    Args:
        ranking: Best first; at least one.
        lens: Tokens of the sequences of a batch.
        machine: Where the cluster's numbers are from.
    """
    first, last = ranking.rows[0], ranking.rows[-1]
    ratio = last.seconds / first.seconds if first.seconds > 0 else 1.0
    columns = {
        "bags": "{}",
        "seconds": "{:.4g}",
        "imbalance": "{:.4f}",
        "gap": "{:.2%}",
        "why": "\n".join,
    }
    rows = [(row.spec, row.seconds, row.imbalance, row.gap, row.reasons) for row in ranking.rows]
    return Report(
        title="Which bags suit these batches",
        answer=f"{first.spec} is the fastest: {'; '.join(first.reasons)}.",
        facts=(
            Fact("best", "best bags", first.spec),
            Fact("seconds", "a step takes", first.seconds, "{:.4g} s"),
            Fact("imbalance", "imbalance, max / mean", first.imbalance, "{:.4f}"),
            Fact("gap", "from the best plan at most", first.gap, "{:.2%}"),
            Fact("over_worst", f"as fast as {last.spec}", ratio, "{:.2f}x"),
            Fact("candidates", "looked at", ranking.num_candidates, "{:,}"),
        ),
        parts=(
            draw_bars(
                "Seconds of a step",
                f"{first.spec} takes {first.seconds:.4g} s, {last.spec} {last.seconds:.4g} s.",
                [row.spec for row in ranking.rows[:_MOST_BARS]],
                {"seconds": [row.seconds for row in ranking.rows[:_MOST_BARS]]},
                "s",
            ),
            Rows("Ranking", columns, rows),
            draw_lengths(lens),
        ),
        notes=(
            f"Predicted for {machine}.",
            "Every row was planned, not only bounded. Bags within 0.5 % of each other count as "
            "equally fast; of these the fewest and largest stand first.",
        ),
    )


def of_bench(
    summary: dict[str, Any], steps: Sequence[dict[str, Any]], notes: Sequence[str]
) -> Report:
    """A measured comparison of training without and with balancing.

    Args:
        summary: As in summary.json.
        steps: As in steps.jsonl.
        notes: Reasons to read the numbers with care.
    """
    setting, before, after = summary["setting"], summary["unbalanced"], summary["balanced"]
    measured, predicted = summary["measured_ratio"], summary["predicted_ratio"]
    error, sent = measured / predicted - 1.0, summary["sent_bytes_per_step"]
    low, high = summary["measured_ratio_spread"]
    lost = [float(np.sum([step[f"seconds_{arm}"] for step in steps])) for arm in _ARMS]
    facts = (
        Fact("measured_ratio", "measured speed-up", measured, f"{measured:.2f}x"),
        Fact("predicted_ratio", "predicted", predicted, f"{predicted:.2f}x"),
        Fact("prediction_error", "measured over predicted", error, f"{error:+.1%}"),
        Fact("seconds_saved", "saved in all", lost[0] - lost[1], f"{lost[0] - lost[1]:.2f} s"),
        Fact("wir_unbalanced", "WIR without", before["wir"], f"{before['wir']:.2f}"),
        Fact("wir_balanced", "WIR with", after["wir"], f"{after['wir']:.2f}"),
        Fact("fbl_unbalanced", "a step without", before["fbl_median_s"], _s(before)),
        Fact("fbl_balanced", "a step with", after["fbl_median_s"], _s(after)),
        Fact("sent_bytes", "sent a step", sent, f"{sent / 2**20:.1f} MiB"),
        Fact(
            "loss_difference",
            "losses differ by",
            summary["loss_difference"],
            f"{summary['loss_difference']:.1e}",
        ),
    )
    seconds = {
        name: [step[f"seconds_{arm}"] for step in steps]
        for name, arm in zip(("without", "with bascule"), _ARMS, strict=True)
    }
    losses = {
        name: [step[f"loss_{arm}"] for step in steps]
        for name, arm in zip(("without", "with bascule"), _ARMS, strict=True)
    }
    return Report(
        title=f"Measured on {setting['world_size']} ranks ({setting['device']})",
        answer=(
            f"With bascule, training ran {measured:.2f}x as fast (steps {low:.2f}x to "
            f"{high:.2f}x); predicted were {predicted:.2f}x."
        ),
        facts=facts,
        parts=(
            draw_lines(
                "Seconds of each step",
                "Forward and backward of the slowest rank; planning and exchanges are in the "
                "second line.",
                ("step", "s"),
                seconds,
            ),
            draw_lines("Loss", "The curves of both lie on each other.", ("step", "loss"), losses),
            *_stage_parts(summary, steps),
        ),
        notes=(
            "The prediction counts compute only, not the wires.",
            f"Gradients differ by {summary['grad_difference']:.1e} at most (relative).",
            *notes,
        ),
    )


_ARMS = ("unbalanced", "balanced")
STAGE_KINDS = ("predicted", "measured")
"""What is told of the stages of a step, twice."""


def _stage_parts(
    summary: dict[str, Any], steps: Sequence[dict[str, Any]]
) -> tuple[Chart | Rows, ...]:
    """Of steps that begin with encoders: the stages of the last step, and what each takes."""
    if "stages" not in summary:
        return ()
    tables = [(kind, *stage_rows(summary["stages"], kind)) for kind in STAGE_KINDS]
    stages = steps[-1]["stages"]
    words = "Above without, below with bascule: one bar a rank, its stages after each other."
    return (
        Chart(
            "The last step, stage by stage",
            words,
            lambda: draw_stages(*(stages[arm] for arm in _ARMS)),
        ),
        *(
            Rows(f"Stages, {kind}", dict.fromkeys(heading, "{}"), rows)
            for kind, heading, *rows in tables
        ),
    )


def stage_rows(stages: dict[str, Any], kind: str) -> list[tuple[str, ...]]:
    """A heading, and what a summary says of each stage and of the step.

    Args:
        stages: Of the summary.
        kind: One of `STAGE_KINDS`.
    """
    heading = ("", "imbalance without", "imbalance with", "s without", "s with", "speed-up")
    rows: list[tuple[str, ...]] = [heading]
    for name, stage in stages.items():
        cells = [name.replace("_", " ")]
        for measure, form in (("imbalance", ".2f"), ("seconds", ".3g")):
            for arm in _ARMS:
                value = stage[arm].get(f"{measure}_{kind}")
                cells.append("" if value is None else f"{value:{form}}")
        cells.append(f"{stage[f'{kind}_ratio']:.2f}x")
        rows.append(tuple(cells))
    return rows


def _s(arm: dict[str, Any]) -> str:
    return f"{arm['fbl_median_s']:.3f} s"


def of_simulation(found: SimulationResult) -> Report:
    """Simulated training steps: what each policy takes, and on what.

    Args:
        found: The result.
    """
    first, best = found.runs[0], min(found.runs, key=lambda run: 1.0 / run.tokens_per_s)
    ratio, saved, money = found.speedup(best), found.saved_gpu_hours(best), found.saved_money(best)
    kinds = {
        name: [
            run.means[name] / run.accumulate * run.tokens.size / run.tokens.sum() * 1e6
            for run in found.runs
        ]
        for name in first.means
    }
    metric_rows, second_rows = found.rows()
    facts = (
        Fact("best", "most tokens a second", best.name, best.name),
        Fact("over_first", f"as fast as {first.name}", ratio, f"{ratio:.2f}x"),
        Fact("fbl_s", "a step takes", best.fbl_s, f"{best.fbl_s:.3g} s"),
        Fact("tokens_per_s", "tokens a second", best.tokens_per_s, f"{best.tokens_per_s:,.0f}"),
        Fact("idle_share", "ranks wait", best.idle_share, f"{best.idle_share:.1%}"),
        Fact(
            "saved_gpu_hours",
            f"GPU-hours saved in {found.options.train_steps:,} steps",
            saved,
            f"{saved:,.4g} of {found.gpu_hours(first):,.4g}",
        ),
        *(() if money is None else (Fact("saved_money", "worth", money, f"{money:,.4g}"),)),
    )
    bars = draw_bars(
        "Seconds for a million tokens",
        "Means over ranks and steps: where the time of a rank goes. Steps of packs and buckets "
        "hold other numbers of tokens, so that steps would not compare.",
        [run.name for run in found.runs],
        {name: values for name, values in kinds.items() if any(values)},
        "s",
    )
    return Report(
        title=f"Training simulated on {found.num_ranks} ranks",
        answer=f"{best.name}: {ratio:.2f}x the tokens a second of what you do now, {first.name}.",
        facts=facts,
        parts=(
            bars,
            *(
                Rows(title, dict.fromkeys(rows[0], "{}"), tuple(rows[1:]))
                for title, rows in (
                    ("What it is worth", found.worth_rows()),
                    ("Metrics", metric_rows),
                    ("Seconds", second_rows),
                )
            ),
        ),
        notes=(
            *found.warnings,
            f"Simulated, not measured. Machine: {found.profile}.",
            found.profile.note,
            f"Model and data: {found.setting}.",
            "GPU-hours are those of all ranks, for as many tokens as the first row trains on in so "
            "many steps.",
        ),
    )


def of_sparse(study: Study, head: int, machine: str) -> Report:
    """Block masks on meshes: what each way of planning makes of them.

    Args:
        study: With tolerances and rewards.
        head: Whose mask is drawn.
        machine: Where the machine's numbers are from.
    """
    meshes = study.setting.meshes
    best = min(meshes, key=lambda mesh: study.mean(mesh, DEFAULT).predicted_s)
    before, after = study.mean(best, BEFORE), study.mean(best, DEFAULT)
    speedup = before.predicted_s / after.predicted_s
    density = float(study.masks.mean())
    facts = (
        Fact("speedup", "predicted speed-up of the call", speedup, f"{speedup:.3f}x"),
        Fact("mesh", "fastest mesh", mesh_name(best), mesh_name(best)),
        Fact("rho_before", "rho in order", before.imbalance, f"{before.imbalance:.4f}"),
        Fact("rho", "rho balanced", after.imbalance, f"{after.imbalance:.4f}"),
        Fact("call_s", "the call takes", after.predicted_s, f"{after.predicted_s * 1e3:.3f} ms"),
        Fact("planning_s", "planning", after.planning_s, f"{after.planning_s * 1e3:.1f} ms"),
        Fact("sent_bytes", "sent", after.sent_bytes, f"{after.sent_bytes / 2**20:,.0f} MiB"),
        Fact("density", "blocks computed", density, f"{density:.1%}"),
    )
    rows = tuple(
        (
            mesh_name(mesh),
            way,
            f"{row.imbalance:.4f}",
            f"{row.critical_path_imbalance:.4f}",
            f"{row.q_moved:.1%}",
            f"{row.kv_moved:.1%}",
            f"{row.predicted_s * 1e3:.3f}",
        )
        for mesh in meshes
        for way in WAYS
        for row in [study.mean(mesh, way)]
    )
    columns = ("mesh", "plan", "rho", "critical path", "Q moved", "KV moved", "call, ms")
    words = "The mask, who computes what, the chosen meshes, and what tolerance and reward cost."
    return Report(
        title=f"Block-sparse attention: {study.name}",
        answer=f"On {mesh_name(best)}, balancing makes the call {speedup:.2f}x as fast.",
        facts=facts,
        parts=(
            Chart("Masks and plans", words, lambda: draw(study, head)),
            Rows("Ways of planning", dict.fromkeys(columns, "{}"), rows),
        ),
        notes=(
            f"Predicted for {machine}.",
            "rho is the slowest rank's work over the mean, where ranks of a ring wait for all "
            "others after each round; critical path is where they wait for their neighbours alone.",
            f'Speed-ups are over "{BEFORE}": heads in their order, blocks in runs.',
        ),
    )
