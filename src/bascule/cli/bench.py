"""`bascule bench --data g2b4i128f1s0 --ranks 2`: measure what balancing is worth."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bascule.bench.options import BenchOptions
from bascule.report.charts import draw_lines
from bascule.report.page import Fact, Report, Rows, columns, mib

if TYPE_CHECKING:
    import torch

_ARMS = {"unbalanced": "without", "balanced": "with bascule"}
_MISSED = 0.9  # measured over predicted speed-up below which a note says why


def run(options: BenchOptions, arguments: list[str]) -> int | None:
    """Train with and without balancing, compare, and write the numbers of the run and its steps."""
    from bascule.cli.command import on_ranks, progress, publish, quietly, saved

    def compare(device: "torch.device") -> dict[str, Any]:
        from bascule.bench.comparison import Comparison, summarize

        comparison, records = Comparison(options, device), []
        with progress("training all ways", options.steps) as advance:
            for step_records in comparison.run():
                records.extend(step_records)
                advance()
        summary = summarize(records, comparison.setting, options)
        return {"summary": summary, "steps": records}

    def finish(result: dict[str, Any]) -> None:
        summary, steps = result["summary"], result["steps"]
        console = publish(options, report_of(summary, steps))
        options.out.mkdir(parents=True, exist_ok=True)
        files = options.out / "summary.json", options.out / "steps.jsonl"
        for path, backup in zip(files, _backups(*files), strict=True):
            if path.exists():
                path.replace(backup)
                console.print(f"kept: {backup}", markup=False, highlight=False, soft_wrap=True)
        files[0].write_text(json.dumps(summary, indent=2) + "\n")
        files[1].write_text("".join(json.dumps(step) + "\n" for step in steps))
        saved(console, *files)

    def prepare(num_ranks: int) -> None:
        from bascule.bench.comparison import open_stream
        from bascule.train.encoders import load_encoders
        from bascule.train.model import check_kernel, model_config

        options.check(num_ranks)
        with quietly():  # rank 0 warns of the same photos
            stream = open_stream(options, load_encoders(options), 0, num_ranks)
        check_kernel(options, model_config(options, stream))

    return on_ranks(options, arguments, compare, finish, prepare)


def _backups(*paths: Path) -> list[Path]:
    """Return names for an earlier run's files: summary.1.json, or with the next free number."""
    numbered = ([path.with_suffix(f".{n}{path.suffix}") for path in paths] for n in count(1))
    return next(backups for backups in numbered if not any(path.exists() for path in backups))


def report_of(summary: dict[str, Any], steps: Sequence[dict[str, Any]]) -> Report:
    """Report training without and with balancing, from summary.json and the rows of steps.jsonl.

    The fastest of several topologies is compared with training without; a table has all of them.
    """
    setting, before, after = summary["setting"], *(summary[arm] for arm in _ARMS)
    best, topologies = setting["topology"], summary["topologies"]
    steps_of = {name: [row for row in steps if row["topology"] == name] for name in topologies}
    measured, predicted = summary["measured_ratio"], summary["predicted_ratio"]
    error = measured / predicted - 1
    ranks = f"{setting['world_size']} ranks ({setting['device']})"
    is_loader, (low, high) = "loader" in summary, summary["measured_ratio_spread"]
    moved = any(topology["moved_tokens"] for topology in topologies.values())
    is_same = not moved and "stages" not in summary
    way = "data loader" if is_loader else f"bags {', '.join(topologies)}"
    labels = {name: name if len(topologies) > 1 else _ARMS["balanced"] for name in topologies}
    sent = "sent a step" if is_loader else "sent a step, forward"
    lines = {
        key: {_ARMS["unbalanced"]: [row[f"{key}_unbalanced"] for row in steps_of[best]]}
        | {labels[name]: [row[f"{key}_balanced"] for row in steps_of[name]] for name in topologies}
        for key in ("seconds", "loss")
    }
    arms = _ARMS["unbalanced"], labels[best]
    without, balanced = (sum(lines["seconds"][arm]) for arm in arms)
    rows = [
        (label, *(template.format(*np.atleast_1d(arm[key])) for arm in (before, after)))
        for label, key, template in _ROWS
        if before[key] is not None
    ]
    rows += [
        (f"loss, {which} step", *(f"{loss:.6f}" for loss in summary[f"loss_{which}"]))
        for which in ("first", "last")
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
    if len(topologies) > 1:
        answer = f"{best} was the fastest of {len(topologies)} topologies. {answer}"
    if is_same:
        answer, gains = "Nothing was moved: both ways did the same, and differ by noise alone.", ()
    return Report(
        title=f"{ranks}, {way}, {len(steps_of[best])} steps",
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
        values=summary,
    )


_ROWS = (  # label, key in an arm's summary, format
    ("workload imbalance (WIR), max/min load", "wir", "{:.2f}"),
    ("imbalance (max/mean load)", "imbalance", "{:.3f}"),
    ("forward and backward (FBL), median", "fbl_median_s", "{:.3f} s"),
    ("forward and backward (FBL), 10% to 90%", "fbl_spread_s", "{:.3f} to {:.3f} s"),
    ("tokens a second", "tokens_per_s", "{:,.0f}"),
    ("FLOP a second", "flops_per_s", "{:.3g}"),
    ("hardware FLOP utilisation (HFU)", "hfu", "{:.1%}"),
)


def _topologies(summary: dict[str, Any], seconds: Mapping[str, Sequence[float]]) -> list[Rows]:
    """Return the table of topologies, if there are several; `seconds` of their steps, by label."""
    if len(summary["topologies"]) == 1:
        return []
    firsts = Counter(
        min(zip(step_seconds, seconds, strict=True))[1]
        for step_seconds in zip(*seconds.values(), strict=True)
    )
    without = _ARMS["unbalanced"]
    rows: list[tuple[Any, ...]] = [
        (without, summary["unbalanced"]["imbalance"], None, None, None, firsts[without])
    ]
    rows += [
        (
            name,
            topology["balanced"]["imbalance"],
            topology["predicted_ratio"],
            "{:.2f}x ({:.2f} to {:.2f})".format(
                topology["measured_ratio"], *topology["measured_ratio_spread"]
            ),
            topology["sent_bytes_per_step"],
            firsts[name],
        )
        for name, topology in summary["topologies"].items()
    ]
    formats = columns("bags", "imbalance: {:.3f}", "predicted, compute only: {:.2f}x")
    formats |= columns("measured (10% to 90% of steps)") | {"sent a step, forward": mib}
    return [Rows("Topologies", formats | columns("steps won"), rows)]


def _stages(summary: dict[str, Any]) -> list[Rows]:
    if "stages" not in summary:
        return []
    names = "imbalance without: {:.2f}", "imbalance with: {:.2f}", "s without: {:.3g}"
    formats = columns("", *names, "s with: {:.3g}", "speed-up: {:.2f}x")
    return [
        Rows(
            f"Stages, {kind}",
            formats,
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
    topologies: dict[str, Any] = summary["topologies"]
    differences = {
        key: max(topology[key] for topology in topologies.values())
        for key in ("loss_difference", "grad_difference_first", "grad_difference")
    }
    fit, wires = setting["fit_error"], "exchange" if loader else "wires"
    tokens = ", ".join(f"{tokens:,.0f}" for tokens in summary["tokens_per_rank"][:16])
    tokens += " ..." if setting["world_size"] > 16 else ""
    tokens += f" (bags {setting['topology']})" if len(topologies) > 1 else ""
    notes = [
        f"the prediction counts compute only, not the {wires}: gamma {setting['gamma']:.2f}"
        + ("" if fit is None else f", fitted within {fit:.0%}"),
        "same maths: losses differ by {loss_difference:.1e} at most, gradients by "
        "{grad_difference_first:.1e} at the first step and {grad_difference:.1e} at most "
        "(relative)".format(**differences),
        f"tokens a rank with balancing: {tokens}",
    ]
    if len(topologies) > 1 and setting["device"] == "cpu":
        ratios = [f"{name} {topology['cpu_ratio']:.2f}x" for name, topology in topologies.items()]
        notes.append(f"in CPU seconds of the busiest rank, without waits: {', '.join(ratios)}")
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
    for name, topology in topologies.items():
        if not topology["single_binds_steps"]:
            continue
        advice = (
            "moving whole samples can shorten: larger bags can, with --topologies, not --loader"
            if loader is not None
            else f"balancing on bags {name} can shorten: give larger bags with --topologies"
        )
        notes.append(
            f"warning: in {topology['single_binds_steps']} of {num_steps} steps one sequence alone "
            f"takes as long as its step, which no {advice}"
        )
    return notes
