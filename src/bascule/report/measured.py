"""Reports of what was measured on ranks: a comparison, a check-up, a calibration."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from bascule.machine.calibration import BYTES, TOKENS, Fit
from bascule.machine.cluster import HardwareProfile
from bascule.report.charts import draw_lines, new_figure
from bascule.report.page import Chart, Fact, Report, Rows, columns, mib

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_ARMS = {"unbalanced": "without", "balanced": "with bascule"}
_MISSED = 0.9  # share of the predicted speed-up, below which a report says why
_CURVE_POINTS = 100
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"), (1e-12, "ps"), (1e-15, "fs"))


def of_bench(summary: dict[str, Any], steps: Sequence[dict[str, Any]]) -> Report:
    """Report training without and with balancing, of summary.json and the rows of steps.jsonl.

    Of several topologies, the fastest is compared with training without, and all stand in a table.
    """
    setting, before, after = summary["setting"], *(summary[arm] for arm in _ARMS)
    best, ways = setting["topology"], summary["topologies"]
    by_way = {name: [one for one in steps if one["topology"] == name] for name in ways}
    measured, predicted = summary["measured_ratio"], summary["predicted_ratio"]
    error = measured / predicted - 1
    ranks = f"{setting['world_size']} ranks ({setting['device']})"
    is_loader, (low, high) = "loader" in summary, summary["measured_ratio_spread"]
    is_same = not any(one["moved_tokens"] for one in ways.values()) and "stages" not in summary
    way = "data loader" if is_loader else f"bags {', '.join(ways)}"
    labels = {name: name if len(ways) > 1 else _ARMS["balanced"] for name in ways}
    sent = "sent a step" if is_loader else "sent a step, forward"
    lines = {
        key: {_ARMS["unbalanced"]: [one[f"{key}_unbalanced"] for one in by_way[best]]}
        | {labels[name]: [one[f"{key}_balanced"] for one in by_way[name]] for name in ways}
        for key in ("seconds", "loss")
    }
    without, balanced = (
        sum(lines["seconds"][name]) for name in (_ARMS["unbalanced"], labels[best])
    )
    rows = [
        (label, *(form.format(*np.atleast_1d(arm[key])) for arm in (before, after)))
        for label, key, form in _ROWS
        if before[key] is not None
    ]
    rows += [
        (f"loss, {place} step", *(f"{loss:.6f}" for loss in summary[f"loss_{place}"]))
        for place in ("first", "last")
    ]
    answer = (
        f"With bascule, training ran {measured:.2f}x as fast (steps {low:.2f}x to {high:.2f}x); "
        f"predicted were {predicted:.2f}x."
    )
    gains = (
        Fact("measured_ratio", "measured speed-up", measured, "{:.2f}x"),
        Fact("prediction_error", "measured over predicted", error, "{:+.1%}"),
        Fact("seconds_saved", "saved in all", without - balanced, "{:.2f} s"),
    )
    if len(ways) > 1:
        answer = f"{best} was the fastest of {len(ways)} topologies. {answer}"
    if is_same:
        answer, gains = "Nothing was moved: both ways did the same, and differ by noise alone.", ()
    return Report(
        title=f"{ranks}, {way}, {len(by_way[best])} steps",
        answer=answer,
        facts=(
            *gains,
            Fact("predicted_ratio", "predicted, compute only", predicted, "{:.2f}x"),
            Fact("wir_unbalanced", "WIR without", before["wir"], "{:.2f}"),
            Fact("wir_balanced", "WIR with", after["wir"], "{:.2f}"),
            Fact("fbl_unbalanced", "a step without", before["fbl_median_s"], "{:.3f} s"),
            Fact("fbl_balanced", "a step with", after["fbl_median_s"], "{:.3f} s"),
            Fact("sent_bytes", f"{sent}, all ranks", summary["sent_bytes_per_step"], mib),
            Fact("loss_difference", "losses differ by", summary["loss_difference"], "{:.1e}"),
        ),
        parts=(
            *_topologies(summary, lines["seconds"]),
            Rows("Both ways", columns("", _ARMS["unbalanced"], labels[best]), rows),
            *_stages(summary),
            draw_lines(
                "Seconds of each step",
                "Forward and backward of the slowest rank; planning and exchanges are in all lines "
                "but the first.",
                ("step", "s"),
                lines["seconds"],
            ),
            draw_lines("Loss", "The curves lie on each other.", ("step", "loss"), lines["loss"]),
        ),
        notes=tuple(_notes(summary, is_same)),
        data=tuple(setting.get("data_lines", ())),
    )


_ROWS = (  # of either way: label, key in the summary, form
    ("workload imbalance (WIR), max/min load", "wir", "{:.2f}"),
    ("imbalance (max/mean load)", "imbalance", "{:.3f}"),
    ("forward and backward (FBL), median", "fbl_median_s", "{:.3f} s"),
    ("forward and backward (FBL), 10% to 90%", "fbl_spread_s", "{:.3f} to {:.3f} s"),
    ("tokens a second", "tokens_per_s", "{:,.0f}"),
    ("FLOP a second", "flops_per_s", "{:.3g}"),
    ("hardware FLOP utilisation (HFU)", "hfu", "{:.1%}"),
)


def _topologies(summary: dict[str, Any], seconds: Mapping[str, Sequence[float]]) -> list[Rows]:
    """Return a row for each way, of several topologies; by way the seconds of its steps."""
    if len(summary["topologies"]) == 1:
        return []
    firsts = Counter(
        min(zip(of_step, seconds, strict=True))[1]
        for of_step in zip(*seconds.values(), strict=True)
    )
    without = _ARMS["unbalanced"]
    rows: list[tuple[Any, ...]] = [
        (without, summary["unbalanced"]["imbalance"], None, None, None, firsts[without])
    ]
    rows += [
        (
            name,
            one["balanced"]["imbalance"],
            one["predicted_ratio"],
            "{:.2f}x ({:.2f} to {:.2f})".format(
                one["measured_ratio"], *one["measured_ratio_spread"]
            ),
            one["sent_bytes_per_step"],
            firsts[name],
        )
        for name, one in summary["topologies"].items()
    ]
    forms = columns("bags", "imbalance: {:.3f}", "predicted, compute only: {:.2f}x")
    forms |= columns("measured (10% to 90% of steps)") | {"sent a step, forward": mib}
    return [Rows("Topologies", forms | columns("steps won"), rows)]


def _stages(summary: dict[str, Any]) -> list[Rows]:
    if "stages" not in summary:
        return []
    names = "imbalance without: {:.2f}", "imbalance with: {:.2f}", "s without: {:.3g}"
    forms = columns("", *names, "s with: {:.3g}", "speed-up: {:.2f}x")
    return [
        Rows(
            f"Stages, {kind}",
            forms,
            [
                (
                    name.replace("_", " "),
                    *(stage[arm].get(f"imbalance_{kind}") for arm in _ARMS),
                    *(stage[arm][f"seconds_{kind}"] for arm in _ARMS),
                    stage[f"{kind}_ratio"],
                )
                for name, stage in summary["stages"].items()
            ],
        )
        for kind in ("predicted", "measured")
    ]


def _notes(summary: dict[str, Any], is_same: bool) -> list[str]:
    setting, loader, num_steps = summary["setting"], summary.get("loader"), summary["steps"]
    ways: dict[str, Any] = summary["topologies"]
    differences = {
        key: max(one[key] for one in ways.values())
        for key in ("loss_difference", "grad_difference_first", "grad_difference")
    }
    fit, wires = setting["fit_error"], "exchange" if loader else "wires"
    tokens = ", ".join(f"{tokens:,.0f}" for tokens in summary["tokens_per_rank"][:16])
    tokens += " ..." if setting["world_size"] > 16 else ""
    tokens += f" (bags {setting['topology']})" if len(ways) > 1 else ""
    notes = [
        f"the prediction counts compute only, not the {wires}: gamma {setting['gamma']:.2f}"
        + ("" if fit is None else f", fitted within {fit:.0%}"),
        "same maths: losses differ by {loss_difference:.1e} at most, gradients by "
        "{grad_difference_first:.1e} at the first step and {grad_difference:.1e} at most "
        "(relative)".format(**differences),
        f"tokens a rank with balancing: {tokens}",
    ]
    if len(ways) > 1 and setting["device"] == "cpu":
        shares = ", ".join(f"{name} {one['cpu_ratio']:.2f}x" for name, one in ways.items())
        notes.append(f"in CPU seconds of the busiest rank, in which nobody waits: {shares}")
    if loader:
        reasons = loader["reasons"].items()
        skipped = ", ".join(f"{n} {why}" for why, n in reasons if why != "balanced")
        seconds = ", ".join(
            f"{name} {loader[f'{name}_s_per_step'] * 1e3:.1f} ms"
            for name in ("exchange", "hidden", "exposed")
        )
        notes += [
            f"the slowest rank, a step: {seconds} ({loader['exposed_share']:.1%} of the step)",
            f"samples moved in {loader['applied_steps']} of {num_steps} steps"
            + (f" (others: {skipped})" if skipped else ""),
        ]
    if setting["skipped_photos"]:
        notes.append(f"photos skipped: {setting['skipped_photos']}")
    if not is_same and summary["measured_ratio"] < _MISSED * summary["predicted_ratio"]:
        low, high = summary["measured_ratio_spread"]
        notes.append(
            f"measured is below predicted: the {wires}, planning, and what both ways have in "
            "common (collectives of FSDP, launches) are not predicted, and steps this short may "
            f"differ by noise alone (they range from {low:.2f}x to {high:.2f}x)"
        )
    if fit is not None and setting["gamma"] == 0.0:
        notes.append(
            "warning: the fitted gamma is 0, attention's time did not show, so plans count linear "
            "layers only: measure longer sequences or a quieter machine, or give --gamma"
        )
    for name, one in ways.items():
        if not one["single_binds_steps"]:
            continue
        advice = (
            "moving whole samples can shorten: larger bags can, with --topology, not --loader"
            if loader is not None
            else f"balancing on bags {name} can shorten: give larger bags with --topology"
        )
        notes.append(
            f"warning: in {one['single_binds_steps']} of {num_steps} steps one sequence alone "
            f"takes as long as its step, which no {advice}"
        )
    return notes


def of_doctor(report: dict[str, Any]) -> Report:
    """Report a check-up of ranks; of many ranks and links, the slow ones stand first."""
    first, findings = report["ranks"][0], report["findings"]
    forms = columns("rank", "host", "device", "GB: {:.1f}", "threads", "store, ms: {:.2f}")
    for work in first["work"]:
        forms |= columns(f"{work}, GFLOP/s: {{:,.1f}}", f"{work}, over median: {{:.2f}}x")
    ranks = [
        (
            *(row[name] for name in ("rank", "host", "device")),
            row["memory_bytes"] and row["memory_bytes"] / 1e9,
            row["num_threads"],
            row["store_s"] * 1e3,
            *chain.from_iterable(
                (work["flops_per_s"] / 1e9, work["times_median"]) for work in row["work"].values()
            ),
        )
        for row in report["ranks"]
    ]
    ranks.sort(key=lambda row: -max(row[7::2]))
    sizes = {"a rank holds": _size, "time": _time}
    of_calls = columns("", "on") | sizes | {"GB/s": _giga} | columns("slowest rank")
    order = [row["name"] for row in report["collectives"]]
    fields = "name", "on", "size_bytes", "seconds", "bytes_per_s", "slowest_rank"
    calls = [[row[field] for field in fields] for row in report["collectives"]]
    calls.sort(key=lambda row: (row[1], order.index(row[0])))
    sizes = {"message": _size, "time": _time, "large message": _size}
    of_links = columns("ranks", "on", "where") | sizes | {"GB/s": _giga}
    links: dict[tuple[str, tuple[int, int]], list[dict[str, Any]]] = {}
    for row in report["links"]:
        links.setdefault((row["on"], tuple(row["ranks"])), []).append(row)
    neighbours = [
        (
            "{} and {}".format(*last["ranks"]),
            last["on"],
            "one host" if last["same_host"] else "two hosts",
            small["num_bytes"],
            small["seconds"],
            last["num_bytes"],
            last["bytes_per_s"],
        )
        for small, *_, last in links.values()
    ]
    neighbours.sort(key=lambda row: row[-1])
    shared = ("Python", "torch", "bascule", "numpy", "CUDA", "NCCL")
    versions = ", ".join(f"{name} {first[name.lower()]}" for name in shared)
    return Report(
        title=f"{report['num_ranks']} ranks, medians of {report['rounds']} rounds",
        answer=f"{len(findings)} findings." if findings else "nothing was found",
        facts=(),
        parts=(
            Rows("Ranks", forms, ranks),
            Rows("Collectives", of_calls, calls),
            Rows("Neighbours", of_links, neighbours),
        ),
        notes=(
            *(f"found ({one['kind']}): {one['text']}" for one in findings),
            f"rank 0: {versions}, back end {first['backend']}, timeout {first['timeout_s']} s",
            "GB/s count what a rank has to send at least, on the slowest rank",
        ),
    )


def _size(num_bytes: float) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:g} B"


def _giga(amount: float) -> str:
    return f"{amount / 1e9:.3g}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"


def of_calibration(profile: HardwareProfile, refused: Sequence[str]) -> Report:
    """Report curves of blocks and messages, measured and predicted, and what is wrong with them."""
    made = profile.calibration
    assert made is not None
    base = [name for name in profile.numbers if name not in made.measured]
    return Report(
        title=f"{made.name}: {profile.device}, {made.num_ranks} ranks",
        answer=f"Refused: {refused[0]}." if refused else f"{profile}.",
        facts=tuple(
            Fact(f"held_out {fit.what}", f"{fit.what}, held out missed by", error, "{:.1%}")
            for fit in made.fits
            if (error := fit.held_out_error) is not None
        ),
        parts=(
            Rows(
                "Curves, seconds with half their 95 % intervals",
                columns("", "a call", "a token, byte", "a pair"),
                [
                    (
                        fit.what,
                        *map(_with_error, fit.coefficients, fit.errors),
                        *[None] * (fit.unit == BYTES),
                    )
                    for fit in made.fits
                ],
            ),
            *_curves("Passes of a block", [fit for fit in made.fits if fit.unit == TOKENS]),
            *_curves("Messages", [fit for fit in made.fits if fit.unit == BYTES]),
            _points(made.fits),
        ),
        notes=(
            *(f"refused: {line}" for line in refused),
            *(f"{one.what}: {_with_error(one.seconds, one.error)}" for one in made.overheads),
            f"measured {made.date} with torch {made.torch}: {', '.join(made.measured)}; "
            f"{made.settings}",
            f"not measured, taken from {made.base}: {', '.join(base) or 'nothing'}",
            "every third size was held out of the fits; errors are medians over these",
        ),
    )


def _with_error(seconds: float, error: float | None) -> str:
    largest = max(seconds, error or 0.0)
    unit, name = next((x for x in _UNITS if largest >= x[0]), _UNITS[-1])
    spread = "unknown" if error is None else f"{error / unit:.2g}"
    return f"{seconds / unit:.3g} ± {spread} {name}"


def _curves(title: str, fits: list[Fit]) -> list[Chart]:
    if not fits:
        return []
    worst = max(fits, key=lambda fit: fit.held_out_error or 0.0)
    words = (
        "Points are measured, lines predicted; hollow points were held out of the fit. The worst "
        f"curve, {worst.what}, misses them by {worst.held_out_error or 0.0:.1%} in the median."
    )
    return [Chart(title, words, partial(_draw, fits))]


def _draw(fits: list[Fit]) -> "Figure":
    from plotly.colors import qualitative

    figure = new_figure(420, fits[0].unit, "seconds")
    for fit, color in zip(fits, cycle(qualitative.Plotly), strict=False):
        sizes, named = np.geomspace(min(fit.sizes), max(fit.sizes), _CURVE_POINTS), fit.what
        both = {"name": named, "legendgroup": named}
        figure.add_scatter(x=sizes, y=fit(sizes), line_color=color, **both)
        symbols = ["circle-open" if out else "circle" for out in fit.held_out]
        marker = {"color": color, "symbol": symbols, "size": 9}
        points = {"x": fit.sizes, "y": fit.seconds, "mode": "markers", "marker": marker}
        figure.add_scatter(**points, **both, showlegend=False)
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log", exponentformat="SI")
    return figure


def _points(fits: Sequence[Fit]) -> Rows:
    seconds = "measured, s: {:.4g}", "predicted, s: {:.4g}"
    forms = columns("", "size: {:,.0f}", "unit", *seconds, "missed by: {:+.1%}", "held out")
    rows = [
        (fit.what, size, fit.unit, took, took * (1.0 + miss), miss, "yes" if out else None)
        for fit in fits
        for size, took, miss, out in zip(
            fit.sizes, fit.seconds, fit.misses.tolist(), fit.held_out, strict=True
        )
    ]
    return Rows("All points", forms, rows)
