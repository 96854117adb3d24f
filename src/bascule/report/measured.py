"""Reports of what was measured on ranks: a comparison, a check-up, a calibration."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bascule.plan.calibration import BYTES, TOKENS, Fit
from bascule.plan.machine import HardwareProfile
from bascule.report.charts import draw_lines
from bascule.report.page import Chart, Fact, Report, Rows, mib
from bascule.report.step_picture import draw_stages

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_ARMS = {"unbalanced": "without", "balanced": "with bascule"}
_MISSED = 0.9  # share of the predicted speed-up, below which a report says why
_CURVE_POINTS = 100
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"), (1e-12, "ps"), (1e-15, "fs"))


def of_bench(summary: dict[str, Any], steps: Sequence[dict[str, Any]]) -> Report:
    """Report training without and with balancing, of summary.json and the rows of steps.jsonl."""
    setting, before, after = summary["setting"], *(summary[arm] for arm in _ARMS)
    measured, predicted = summary["measured_ratio"], summary["predicted_ratio"]
    way = "data loader" if "loader" in summary else f"bags {setting['topology']}"
    lines = {
        key: {name: [step[f"{key}_{arm}"] for step in steps] for arm, name in _ARMS.items()}
        for key in ("seconds", "loss")
    }
    without, balanced = (sum(seconds) for seconds in lines["seconds"].values())
    rows = [
        (label, *(form.format(*np.atleast_1d(arm[key])) for arm in (before, after)))
        for label, key, form in _ROWS
        if before[key] is not None
    ]
    rows += [
        (f"loss, {place} step", *(f"{loss:.6f}" for loss in summary[f"loss_{place}"]))
        for place in ("first", "last")
    ]
    low, high = summary["measured_ratio_spread"]
    sent = "sent a step" if "loader" in summary else "sent a step, forward"
    return Report(
        title=f"{setting['world_size']} ranks ({setting['device']}), {way}, {len(steps)} steps",
        answer=(
            f"With bascule, training ran {measured:.2f}x as fast (steps {low:.2f}x to "
            f"{high:.2f}x); predicted were {predicted:.2f}x."
        ),
        facts=(
            Fact("measured_ratio", "measured speed-up", measured, "{:.2f}x"),
            Fact("predicted_ratio", "predicted, compute only", predicted, "{:.2f}x"),
            Fact(
                "prediction_error", "measured over predicted", measured / predicted - 1, "{:+.1%}"
            ),
            Fact("seconds_saved", "saved in all", without - balanced, "{:.2f} s"),
            Fact("wir_unbalanced", "WIR without", before["wir"], "{:.2f}"),
            Fact("wir_balanced", "WIR with", after["wir"], "{:.2f}"),
            Fact("fbl_unbalanced", "a step without", before["fbl_median_s"], "{:.3f} s"),
            Fact("fbl_balanced", "a step with", after["fbl_median_s"], "{:.3f} s"),
            Fact("sent_bytes", f"{sent}, all ranks", summary["sent_bytes_per_step"], mib),
            Fact("loss_difference", "losses differ by", summary["loss_difference"], "{:.1e}"),
        ),
        parts=(
            Rows("Both ways", {name: "{}" for name in ("", *_ARMS.values())}, rows),
            *_stages(summary, steps),
            draw_lines(
                "Seconds of each step",
                "Forward and backward of the slowest rank; planning and exchanges are in the "
                "second line.",
                ("step", "s"),
                lines["seconds"],
            ),
            draw_lines(
                "Loss", "The curves of both lie on each other.", ("step", "loss"), lines["loss"]
            ),
        ),
        notes=tuple(_notes(summary)),
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


def _stages(summary: dict[str, Any], steps: Sequence[dict[str, Any]]) -> list[Chart | Rows]:
    if "stages" not in summary:
        return []
    parts = list[Chart | Rows]()
    for kind in ("predicted", "measured"):
        columns = {"": "{}", "imbalance without": "{:.2f}", "imbalance with": "{:.2f}"}
        columns |= {"s without": "{:.3g}", "s with": "{:.3g}", "speed-up": "{:.2f}x"}
        rows = [
            (
                name.replace("_", " "),
                *(stage[arm].get(f"imbalance_{kind}") for arm in _ARMS),
                *(stage[arm][f"seconds_{kind}"] for arm in _ARMS),
                stage[f"{kind}_ratio"],
            )
            for name, stage in summary["stages"].items()
        ]
        parts.append(Rows(f"Stages, {kind}", columns, rows))
    words = "Above without, below with bascule: one bar a rank, its stages after each other."
    picture = partial(draw_stages, *(steps[-1]["stages"][arm] for arm in _ARMS))
    return [*parts, Chart("The last step, stage by stage", words, picture)]


def _notes(summary: dict[str, Any]) -> list[str]:
    setting, loader, num_steps = summary["setting"], summary.get("loader"), summary["steps"]
    fit, wires = setting["fit_error"], "exchange" if loader else "wires"
    tokens = ", ".join(f"{tokens:,.0f}" for tokens in summary["tokens_per_rank"][:16])
    notes = [
        f"the prediction counts compute only, not the {wires}: gamma {setting['gamma']:.2f}"
        + ("" if fit is None else f", fitted within {fit:.0%}"),
        f"same maths: losses differ by {summary['loss_difference']:.1e} at most, gradients by "
        f"{summary['grad_difference_first']:.1e} at the first step and "
        f"{summary['grad_difference']:.1e} at most (relative)",
        f"tokens a rank with balancing: {tokens}{' ...' if setting['world_size'] > 16 else ''}",
    ]
    if loader:
        others = (f"{n} {why}" for why, n in loader["reasons"].items() if why != "balanced")
        skipped = ", ".join(others)
        seconds = ", ".join(
            f"{name} {loader[f'{key}_s_per_step'] * 1e3:.1f} ms"
            for name, key in (
                ("exchange", "exchange"),
                ("hidden", "hidden"),
                ("exposed", "exposed"),
            )
        )
        notes += [
            f"the slowest rank, a step: {seconds} ({loader['exposed_share']:.1%} of the step)",
            f"samples moved in {loader['applied_steps']} of {num_steps} steps"
            + (f" (others: {skipped})" if skipped else ""),
        ]
    if setting["skipped_photos"]:
        notes.append(f"photos skipped: {setting['skipped_photos']}")
    if summary["measured_ratio"] < _MISSED * summary["predicted_ratio"]:
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
    if summary["single_binds_steps"]:
        advice = (
            "moving whole samples can shorten: larger bags can, with --topology, not --loader"
            if loader is not None
            else f"balancing on bags {setting['topology']} can shorten: give larger bags with "
            "--topology"
        )
        notes.append(
            f"warning: in {summary['single_binds_steps']} of {num_steps} steps one sequence alone "
            f"takes as long as its step, which no {advice}"
        )
    return notes


def of_doctor(report: dict[str, Any]) -> Report:
    """Report a check-up of ranks; of many ranks and links, the slow ones stand first."""
    first, findings = report["ranks"][0], report["findings"]
    works = list(first["work"])
    ranks = [
        (
            *(row[name] for name in ("rank", "host", "device")),
            row["memory_bytes"] and row["memory_bytes"] / 1e9,
            row["num_threads"],
            row["store_s"] * 1e3,
            *(
                x
                for work in works
                for x in (row["work"][work]["flops_per_s"] / 1e9, row["work"][work]["times_median"])
            ),
        )
        for row in sorted(
            report["ranks"], key=lambda row: -max(x["times_median"] for x in row["work"].values())
        )
    ]
    columns = {"rank": "{}", "host": "{}", "device": "{}", "GB": "{:.1f}", "threads": "{}"}
    columns |= {"store, ms": "{:.2f}"}
    for work in works:
        columns |= {f"{work}, GFLOP/s": "{:,.1f}", f"{work}, over median": "{:.2f}x"}
    order = [row["name"] for row in report["collectives"]]
    calls = [
        (
            row["name"],
            row["on"],
            *(row[x] for x in ("size_bytes", "seconds")),
            row["bytes_per_s"] / 1e9,
            row["slowest_rank"],
        )
        for row in sorted(
            report["collectives"], key=lambda row: (row["on"], order.index(row["name"]))
        )
    ]
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
            last["bytes_per_s"] / 1e9,
        )
        for small, *_, last in sorted(links.values(), key=lambda sizes: sizes[-1]["bytes_per_s"])
    ]
    shared = ("Python", "torch", "bascule", "numpy", "CUDA", "NCCL")
    versions = ", ".join(f"{name} {first[name.lower()]}" for name in shared)
    return Report(
        title=f"{report['num_ranks']} ranks, medians of {report['rounds']} rounds",
        answer=f"{len(findings)} findings." if findings else "nothing was found",
        facts=(),
        parts=(
            Rows("Ranks", columns, ranks),
            Rows(
                "Collectives",
                {
                    "": "{}",
                    "on": "{}",
                    "a rank holds": _size,
                    "time": _time,
                    "GB/s": "{:.3g}",
                    "slowest rank": "{}",
                },
                calls,
            ),
            Rows(
                "Neighbours",
                {
                    "ranks": "{}",
                    "on": "{}",
                    "where": "{}",
                    "message": _size,
                    "time": _time,
                    "large message": _size,
                    "GB/s": "{:.3g}",
                },
                neighbours,
            ),
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
            Fact(
                f"held_out {fit.what}",
                f"{fit.what}, held out missed by",
                fit.held_out_error,
                "{:.1%}",
            )
            for fit in made.fits
            if fit.held_out_error is not None
        ),
        parts=(
            Rows(
                "Curves, seconds with half their 95 % intervals",
                {name: "{}" for name in ("", "a call", "a token, byte", "a pair")},
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
    from plotly.graph_objects import Figure

    figure, colors = Figure(), qualitative.Plotly
    for number, fit in enumerate(fits):
        color = colors[number % len(colors)]
        sizes = np.geomspace(min(fit.sizes), max(fit.sizes), _CURVE_POINTS)
        figure.add_scatter(
            x=sizes, y=fit(sizes), name=fit.what, legendgroup=fit.what, line={"color": color}
        )
        symbols = ["circle-open" if out else "circle" for out in fit.held_out]
        figure.add_scatter(
            x=fit.sizes,
            y=fit.seconds,
            mode="markers",
            name=fit.what,
            legendgroup=fit.what,
            showlegend=False,
            marker={"color": color, "symbol": symbols, "size": 9},
        )
    figure.update_xaxes(title=fits[0].unit, type="log")
    figure.update_yaxes(title="seconds", type="log", exponentformat="SI")
    figure.update_layout(template="plotly_white", height=420)
    return figure


def _points(fits: Sequence[Fit]) -> Rows:
    columns = {"": "{}", "size": "{:,.0f}", "unit": "{}", "measured, s": "{:.4g}"}
    columns |= {"predicted, s": "{:.4g}", "missed by": "{:+.1%}", "held out": "{}"}
    rows = [
        (fit.what, size, fit.unit, seconds, seconds * (1.0 + miss), miss, "yes" if out else None)
        for fit in fits
        for size, seconds, miss, out in zip(
            fit.sizes, fit.seconds, fit.misses.tolist(), fit.held_out, strict=True
        )
    ]
    return Rows("All points", columns, rows)
