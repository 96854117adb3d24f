"""Reports of commands: one function from a result to its `Report`."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from bascule.arrays import Floats
from bascule.machine.cluster import Cluster
from bascule.machine.costs import Cost, in_bag
from bascule.plan import metrics
from bascule.plan.plan import Plan
from bascule.plan.topology import Topology
from bascule.plan.topology_search import TopologyRanking
from bascule.report.charts import draw_bars, draw_lengths, draw_lines, draw_loads
from bascule.report.page import Chart, Fact, Report, Rows, columns, mib, ms
from bascule.report.sparse_picture import draw
from bascule.report.step_picture import draw_step
from bascule.sim.requests import BOUND, Row
from bascule.sim.simulation import SimulationResult
from bascule.sim.sparse_study import BEFORE, DEFAULT, WAYS, Study, mesh_name
from bascule.workload.manifest import Manifest
from bascule.workload.traces import StepParts, Worth

_MOST_BARS, _MOST_RANKS, _NUM_BINS = 200, 64, 12
_PARTS = ("compute", "communication", "waiting", "rest", "hidden")
_4G = "{:,.4g}"
_WIRE_SHARE = 0.05
_EVEN = 1.01  # imbalance up to which ranks are said to have the same work


def of_plan(
    plan: Plan,
    cost: Cost,
    cluster: Cluster | None,
    notes: Sequence[str],
    compared: Sequence[tuple[str, Plan, float]] = (),
) -> Report:
    """Report one batch as loaded and as planned; `compared` are name, plan, planning seconds."""
    unit = "TFLOP" if cluster is None else "s"
    before = plan.unbalanced_loads(cost, cluster)
    speedup = float(before.max() / plan.makespan) if plan.makespan > 0 else 1.0
    waiting = [float((loads.max() - loads).sum()) for loads in (before, plan.loads)]
    load, total = f"{{:.6g}} {unit}", int(plan.seq_lens.sum())
    bags = plan.topology.bag_of_rank.tolist()
    names = [f"{bag} ({_bag_spec(plan.topology, bag)})" for bag in bags]
    loads = plan.tokens.tolist(), plan.loads.tolist(), before.tolist()
    rows = list(zip(range(plan.num_ranks), names, *loads, strict=True))
    forms = columns("rank", "bag", "tokens: {:,}", f"{unit}: {{:.4g}}", "as loaded: {:.4g}")
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
            Rows("All ranks", forms, rows, bars=loads[1]),
        ),
        notes=(
            f"binds: {_binding(plan, cost, cluster)}",
            f"Certificate: the plan is at most {plan.gap:.3%} above a lower bound that every plan "
            f"of these bags obeys. Planner: lpt.",
            "Loads count the forward pass by the cost model; a backward pass has the same ratios.",
            *notes,
        ),
    )


def _bag_spec(topology: Topology, bag: int) -> str:
    ring = int(topology.ring_degrees[bag])
    degree = int(topology.bag_sizes[bag]) // ring
    return f"g{degree}" if ring == 1 else f"g{degree}r{ring}"


def _compared(plans: Sequence[tuple[str, Plan, float]], before: Floats, unit: str) -> Rows:
    names = "", f"makespan, {unit}: {{:.6g}}", "gap: {:.3%}", "imbalance: {:.4f}", "WIR: {:.4f}"
    forms = columns(*names, "tokens moved: {:,}") | {"planning": ms}
    rows: list[tuple[Any, ...]] = [
        (name, one.makespan, one.gap, one.imbalance, one.wir, one.moved_tokens, seconds)
        for name, one, seconds in plans
    ]
    loaded = float(before.max()), None, metrics.imbalance(before), metrics.wir(before), 0, None
    return Rows("Plans compared", forms, [*rows, ("as loaded", *loaded)])


def _binding(plan: Plan, cost: Cost, cluster: Cluster | None) -> str:
    """Return why the step cannot end earlier."""
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


def of_manifest(manifest: Manifest) -> Report:
    """Report the lengths of a data set, and how its table was understood."""
    lens = manifest.lens
    edges = np.geomspace(max(lens.min(), 1), lens.max() + 1, _NUM_BINS + 1).round().astype(int)
    edges = np.unique([lens.min(), *edges[1:]])
    counts = np.histogram(lens, edges)[0].tolist()
    total = int(lens.sum())
    longest = np.sort(lens)[-max(len(lens) // 10, 1) :].sum() / max(total, 1)
    bins = zip(edges[:-1].tolist(), (edges[1:] - 1).tolist(), counts, strict=True)
    forms = columns("tokens from: {:,}", "to: {:,}", "samples: {:,}")
    return Report(
        title=f"Samples of {manifest.path}",
        answer=f"The longest tenth of the samples has {longest:.0%} of the tokens.",
        facts=(
            Fact("samples", "samples", len(manifest), "{:,}"),
            Fact("tokens", "tokens", total, "{:,}"),
            Fact("text_tokens", "of text", int(manifest.text_tokens.sum()), "{:,}"),
            Fact("longest", "longest sample", int(lens.max()), "{:,}"),
            Fact(
                "over_mean", "longest over mean", float(lens.max() / max(lens.mean(), 1)), "{:.1f}x"
            ),
        ),
        parts=(draw_lengths(lens), Rows("Lengths", forms, list(bins), bars=counts)),
        data=tuple(manifest.summary()),
    )


def of_topologies(
    ranking: TopologyRanking, lens: Sequence[int], notes: Sequence[str], num_shown: int
) -> Report:
    """Report a ranking of bags for batches with sequences like `lens`, and why."""
    first, last = ranking.rows[0], ranking.rows[-1]
    ratio = last.seconds / first.seconds if first.seconds > 0 else 1.0
    forms = columns("bags", "seconds: {:.4g}", "imbalance: {:.4f}", "gap: {:.2%}", "why")
    forms["why"] = "\n".join
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
                [row.spec for row in ranking.rows[:_MOST_BARS]],
                {"seconds": [row.seconds for row in ranking.rows[:_MOST_BARS]]},
                "s",
            ),
            Rows("Ranking", forms, rows, num_shown=num_shown),
            draw_lengths(lens),
        ),
        notes=(
            *notes,
            "Every row was planned, not only bounded. Bags within 0.5 % of each other count as "
            "equally fast; of these the fewest and largest stand first.",
        ),
    )


def of_simulation(result: SimulationResult) -> Report:
    """Report simulated training steps: what each policy takes, and on what."""
    runs, first = result.runs, result.runs[0]
    fitting, options = [run for run in runs if result.fits(run) is not False], result.options
    best = max(fitting or runs, key=lambda run: run.tokens_per_s)
    ratio, price = result.speedup(best), options.gpu_hour_price
    money = () if price is None else (Fact("saved_money", "worth", result.saved_money(best), _4G),)
    kinds = [name for name in first.means if any(run.means[name] > 0 for run in runs)]
    per_token = [run.tokens.size / run.accumulate / run.tokens.sum() * 1e6 for run in runs]
    answer = f"{best.name}: {ratio:.2f}x the tokens a second of what you do now, {first.name}."
    if best is first:
        answer = f"Nothing here is faster than what you do now, {first.name}."
    if not fitting:
        answer = f"Nothing here fits into the memory of a rank. If it did: {answer}"
    return Report(
        title=f"Training simulated on {result.num_ranks} ranks",
        answer=answer,
        facts=(
            Fact("best", "most tokens a second", best.name),
            Fact("over_first", f"as fast as {first.name}", ratio, "{:.2f}x"),
            Fact("fbl_s", "a step takes", best.fbl_s, "{:.3g} s"),
            Fact("tokens_per_s", "tokens a second", best.tokens_per_s, "{:,.0f}"),
            Fact("idle_share", "ranks wait", best.idle_share, "{:.1%}"),
            Fact(
                "saved_gpu_hours",
                f"GPU-hours saved in {options.train_steps:,} steps",
                result.saved_gpu_hours(best),
                f"{_4G} of {result.gpu_hours(first):,.4g}",
            ),
            *money,
        ),
        parts=(
            draw_bars(
                "Seconds for a million tokens",
                "Means over ranks and steps: where the time of a rank goes. Steps of packs and "
                "buckets hold other numbers of tokens, so that steps would not compare.",
                [run.name for run in runs],
                {
                    k: [run.means[k] * x for run, x in zip(runs, per_token, strict=True)]
                    for k in kinds
                },
                "s",
            ),
            _worth_rows(result),
            _metric_rows(result),
            Rows(
                "Seconds",
                {"seconds of": "{}"} | {name.replace("_", " "): "{:.3g}" for name in kinds},
                [(run.name, *(run.means[name] or None for name in kinds)) for run in runs],
            ),
        ),
        notes=(
            *(f"warning: {line}" for line in result.warnings),
            f"Simulated, not measured, on {result.num_ranks} ranks of {result.profile}.",
            *([result.profile.note] if result.profile.note else []),
            f"Model and data: {result.setting}.",
            f"GPU-hours are what {options.train_steps:,} steps of your run (--train-steps) take, "
            f"times {result.num_ranks} ranks. A way whose steps hold more or fewer tokens is "
            "counted for as many steps as train on the same tokens.",
        ),
    )


def _worth_rows(result: SimulationResult) -> Rows:
    options = result.options
    hours = f"GPU-hours, {options.train_steps:,} steps: {_4G}", f"saved: {_4G}"
    forms = columns("against the first", "speed-up: {:.2f}x", *hours)
    if (price := options.gpu_hour_price) is not None:
        forms[f"saved, at {price:g} an hour"] = _4G
    rows: list[Sequence[Any]] = []
    for run in result.runs:
        name = f"{run.name}: what you do now" if run is result.runs[0] else run.name
        amounts = result.gpu_hours(run), result.saved_gpu_hours(run), result.saved_money(run)
        rows.append((name, result.speedup(run), *amounts)[: len(forms)])
    return Rows("What it is worth", forms, rows)


def _metric_rows(result: SimulationResult) -> Rows:
    speeds = "FBL, s: {:.3g}", "TPS, k: {:.4g}", "HFU: {:.1%}", "idle: {:.1%}"
    forms = columns("", "WIR: {:.2f}", *speeds, "activations, GB")
    rows: list[Sequence[Any]] = []
    for run in result.runs:
        large = " (too much)" if result.fits(run) is False else ""
        memory = f"{run.most_activation_bytes / 1e9:.3g}{large}"
        speed = run.fbl_s, run.tokens_per_s / 1e3, run.hfu, run.idle_share
        rows.append((run.name, run.wir, *speed, memory))
    return Rows("Metrics", forms, rows)


def of_requests(rows: Sequence[Row], source: str, num_ranks: int, axis: str) -> Report:
    """Report what policies reach at loads, and which to choose; `axis` is "load" or "rate"."""
    loads = list(dict.fromkeys(row.load for row in rows))
    names = [row.policy for row in rows if row.load == loads[0] and row.policy != BOUND]
    at = {(row.policy, row.load): row.figures for row in rows}

    def line(name: str, figure: str) -> list[float]:
        return [at[name, load][figure] for load in loads]

    best = max(names, key=lambda name: (sum(line(name, "on_time")), -sum(line(name, "p95_s"))))
    load = max((load for load in loads if load <= 1), default=loads[0])
    shown, bound = at[best, load], at[BOUND, load]
    kinds = [key.removeprefix("degree of ") for key in shown if key.startswith("degree of ")]
    ranks = ", ".join(f"{kind} {shown[f'degree of {kind}']:.2g}" for kind in kinds)
    first = columns(axis + ": {:.4g}", "policy")

    def table(title: str, figures: dict[str, str]) -> Rows:
        known = [row for row in rows if row.figures.keys() & figures.keys()]
        cells = [(row.load, row.policy, *map(row.figures.get, figures)) for row in known]
        return Rows(title, first | columns(*figures.values()), cells)

    return Report(
        title=f"Requests on {num_ranks} ranks: {source}",
        answer=f"Choose {best}: at {axis} {load:g} {shown['on_time']:.1%} are on time, where no "
        f"policy exceeds {bound['on_time']:.1%}, and P95 is {shown['p95_s']:.3g} s. It runs them "
        f"on so many ranks in the mean: {ranks}.",
        facts=(
            Fact("best", "best policy", best),
            Fact(axis, f"at {axis}", load, "{:g}"),
            Fact("on_time", "on time", shown["on_time"], "{:.1%}"),
            Fact("on_time_bound", "no policy exceeds", bound["on_time"], "{:.1%}"),
            Fact("mean_s", "latency in the mean", shown["mean_s"], "{:.4g} s"),
            Fact("mean_bound_s", "no policy is below", bound["mean_s"], "{:.4g} s"),
            Fact("p95_s", "P95", shown["p95_s"], "{:.4g} s"),
            Fact("p99_s", "P99", shown["p99_s"], "{:.4g} s"),
        ),
        parts=(
            draw_lines(
                "On time",
                f"The share of requests that are done in time, by {axis}, and its upper bound.",
                (axis, "share"),
                {name: line(name, "on_time") for name in (*names, BOUND)},
                loads,
            ),
            draw_lines(
                "P95",
                f"Seconds within which 95 % of the requests are done, by {axis}.",
                (axis, "s"),
                {name: line(name, "p95_s") for name in names},
                loads,
            ),
            table(
                "Latency",
                {
                    "on_time": "on time: {:.1%}",
                    "mean_s": "mean, s: {:.4g}",
                    "p50_s": "P50: {:.4g}",
                    "p95_s": "P95: {:.4g}",
                    "p99_s": "P99: {:.4g}",
                    "slowdown": "slowdown: {:.3g}",
                },
            ),
            table("On time", {f"on_time of {kind}": f"{kind}: {{:.1%}}" for kind in kinds}),
            table(
                "Ranks",
                {"rank_s": "rank-s each: {:.4g}", "idle": "idle: {:.1%}", "moves": "moves: {:.2f}"}
                | {f"degree of {kind}": f"ranks of {kind}: {{:.2g}}" for kind in kinds},
            ),
        ),
        notes=(
            "Simulated, not measured. Best is the policy with most requests on time over all rows, "
            "of equals the one of the least P95.",
            "The bound takes all ranks as one machine that does the cheapest work of a request in "
            "parts, so that no policy exceeds it, and maybe none reaches it.",
            "Slowdown: the largest latency over the seconds alone at the fastest degree. Moves: "
            "how often a request goes on with other ranks.",
        ),
    )


def of_sparse(study: Study, head: int, notes: Sequence[str]) -> Report:
    """Report block masks on meshes by way of planning, and draw the mask of a head."""
    setting, num_steps = study.setting, len(study.runs[0].choices)
    best = min(setting.meshes, key=lambda mesh: study.mean(mesh, DEFAULT).predicted_s)
    before, after = study.mean(best, BEFORE), study.mean(best, DEFAULT)
    speedup = before.predicted_s / after.predicted_s
    heads, q_blocks, kv_blocks = study.masks.shape
    return Report(
        title=f"Block-sparse attention: {study.name}",
        answer=f"On {mesh_name(best)}, balancing makes the call {speedup:.2f}x as fast.",
        facts=(
            Fact("speedup", "predicted speed-up of the call", speedup, "{:.3f}x"),
            Fact("mesh", "fastest mesh", mesh_name(best)),
            Fact("rho_before", "rho in order", before.imbalance, "{:.4f}"),
            Fact("rho", "rho balanced", after.imbalance, "{:.4f}"),
            Fact("call_s", "the call takes", after.predicted_s, ms),
            Fact("planning_s", "planning", after.planning_s, ms),
            Fact("sent_bytes", "sent", after.sent_bytes, mib),
            Fact("density", "blocks computed", float(study.masks.mean()), "{:.1%}"),
        ),
        parts=(
            Chart(
                "Masks and plans",
                "The mask, who computes what, the chosen meshes, and what tolerance and reward "
                "cost.",
                lambda: draw(study, head),
            ),
            *_ways(study),
            *([_kept(study)] if num_steps > 1 else []),
            *([_strategies(study)] if len(setting.meshes) > 1 else []),
        ),
        notes=(
            f"Masks: {heads} heads, {q_blocks:,} x {kv_blocks:,} blocks of "
            f"{setting.q_lens.max():,} tokens; layers: {len(study.runs)}, steps: {num_steps}.",
            "rho is the slowest rank's work over the mean, where ranks of a ring wait for all "
            "others after each round; critical path is where they wait for their neighbours alone.",
            f'Speed-ups are over "{BEFORE}": heads in their order, blocks in runs; of compute '
            "alone, the ratio of rho.",
            *notes,
        ),
    )


def _ways(study: Study) -> tuple[Rows, Rows]:
    balance: list[Sequence[Any]] = []
    exchange: list[Sequence[Any]] = []
    for mesh in study.setting.meshes:
        before = study.mean(mesh, BEFORE)
        for way in WAYS:
            row = study.mean(mesh, way)
            name = mesh_name(mesh), f"{way} {study.setting.reward:g}" if way == "paper" else way
            rho, planning_s = row.imbalance, None if way == BEFORE else row.planning_s
            gain = before.imbalance / rho
            balance.append((*name, rho, row.critical_path_imbalance, gain, planning_s))
            gain, moved = before.predicted_s / row.predicted_s, (row.q_moved, row.kv_moved)
            exchange.append((*name, *moved, row.sent_bytes / 2**20, row.predicted_s * 1e3, gain))
    names, gains = columns("mesh", "plan"), columns("speed-up: {:.3f}x")
    rho = columns("rho: {:.4f}", "critical path: {:.4f}") | gains | {"planning": ms}
    moved = columns("Q rows moved: {:.1%}", "KV: {:.1%}", "sent, MiB: {:,.2f}", "call, ms: {:.3f}")
    return (
        Rows("Balance in the first step, compute alone", names | rho, balance),
        Rows("Rows on other ring ranks, and the whole call", names | moved | gains, exchange),
    )


def _kept(study: Study) -> Rows:
    tolerance = study.setting.tolerance
    forms = columns("mesh", "plans made", "kept", "rho, mean: {:.4f}", "rho, max: {:.4f}")
    rows: list[Sequence[Any]] = []
    for mesh in study.setting.meshes:
        reuses = [run.reuses[mesh, tolerance] for run in study.runs]
        rho = [value for reuse in reuses for value in reuse.imbalances]
        made = sum(reuse.state.num_planned for reuse in reuses)
        kept = sum(reuse.state.num_kept for reuse in reuses)
        rows.append((mesh_name(mesh), made, kept, sum(rho) / len(rho), max(rho)))
    return Rows(f"{DEFAULT} over the steps, plans kept within {tolerance:g}", forms, rows)


def _strategies(study: Study) -> Rows:
    rows: list[Sequence[Any]] = []
    for layer, run in enumerate(study.runs):
        stretches: list[str] = []
        for mesh, steps in groupby(enumerate(run.choices), lambda step: step[1].degrees):
            first, *rest = (number for number, _ in steps)
            last = f" to {rest[-1]}" if rest else ""
            stretches.append(f"{mesh_name(mesh)} {first}{last}")
        rows.append((layer, ", ".join(stretches), run.choices[-1].num_switches))
    title = "Mesh with the lowest prediction, by layer and step"
    return Rows(title, columns("layer", "steps", "switches"), rows)


def of_trace(parts: StepParts, worth: Worth | None, unknown: str) -> Report:
    """Report what ranks waited for, and the worth of balancing, or why it is `unknown`."""
    num_steps, num_ranks = parts.seconds.shape
    is_known = parts.waited is not None
    if is_known:
        answer = f"Ranks wait {parts.waited:.1%} of the time"
    else:
        answer = f"{parts.missing}, so what ranks wait and their imbalance are not known"
    if worth is None:
        answer += f". What balancing would be worth is not known: {unknown}."
    else:
        answer += (
            f"; balanced on {worth.topology}, steps are predicted to run {worth.speedup:.2f}x as "
            f"fast, by a model that is {worth.model_error:+.1%} off in the steps as run."
        )
    names = [name for name in _PARTS if name != "waiting" or is_known]
    means = [getattr(parts, name).mean(axis=0) * 1e3 for name in ("seconds", *names)]
    forms = {"rank": "{}"} | dict.fromkeys(("step", *names), "{:.4g}")
    if is_known:
        means.append(np.array([np.sum(parts.slowest == rank) for rank in parts.ranks]))
        forms["slowest"] = "{:.0f} steps"
    rows = list(zip(*(column.tolist() for column in (parts.ranks, *means)), strict=True))
    compute = "kernels of a device" if parts.on_device else "operators of the host"
    return Report(
        title=f"{num_steps} measured steps of {num_ranks} ranks",
        answer=answer,
        facts=(
            Fact("step_s", "a step takes", float(parts.step_seconds.mean()), ms),
            Fact("waiting", "ranks wait", parts.waited, "{:.1%}"),
            Fact("imbalance", "compute, max / mean", parts.imbalance, "{:.4f}"),
            Fact("slowest_rank", "slowest rank", parts.slowest_rank if is_known else None),
            *_worth_facts(worth),
        ),
        parts=(
            draw_bars(
                "Seconds of a step by rank",
                f"Means of {num_steps} steps."
                + (f" Rank {parts.slowest_rank} is the slowest." if is_known else ""),
                [f"rank {rank}" for rank in parts.ranks[:_MOST_RANKS]],
                {name: getattr(parts, name).mean(axis=0)[:_MOST_RANKS] for name in names[:-1]},
                "s",
            ),
            draw_lines(
                "Each step",
                "What the slowest rank needs by itself, and what the mean rank does.",
                ("step", "s"),
                {"slowest rank": parts.own.max(axis=1), "mean": parts.own.mean(axis=1)},
            ),
            Rows("All ranks, ms a step", forms, rows),
            *([] if worth is None else [_worth_of_steps(worth)]),
        ),
        notes=(
            f"Steps are numbered by {parts.numbered_by}. Compute: {compute}.",
            "Waiting is what a rank spends in a collective before the last rank begins it; hidden, "
            "communication behind compute, within compute.",
            "The prediction prices no moving of tokens.",
            *([f"{worth.assumed_in_words}."] if worth is not None and worth.assumed else []),
            *parts.notes,
        ),
    )


def _worth_facts(worth: Worth | None) -> list[Fact]:
    if worth is None:
        return []
    assert worth.cost.fit is not None
    return [
        Fact("speedup", "predicted speed-up", worth.speedup, "{:.2f}x"),
        Fact("predicted_s", f"a step balanced on {worth.topology}", worth.predicted_s, ms),
        Fact("fit_error", "off where not fitted to", worth.cost.fit.loo_error, "{:.1%}"),
        Fact("model_error", "off in the mean step as run", worth.model_error, "{:+.1%}"),
        Fact("moved_share", "tokens that move", worth.moved_share, "{:.0%}"),
    ]


def _worth_of_steps(worth: Worth) -> Rows:
    times = "step, ms: {:.4g}", "by the model, ms: {:.4g}"
    forms = columns("", *times, "model's imbalance: {:.4f}")
    rows: list[Sequence[Any]] = [
        ("as run", worth.measured_s * 1e3, worth.model_s * 1e3, worth.imbalance)
    ]
    if worth.as_loaded_s != worth.model_s:
        rows.append(("without the run's own plan", None, worth.as_loaded_s * 1e3, None))
    times = worth.predicted_s * 1e3, worth.balanced_s * 1e3
    rows.append(("balanced, predicted", *times, worth.balanced_imbalance))
    return Rows(f"What balancing is worth, {worth.num_steps} steps", forms, rows)
