"""`bascule bench --data g2b4i128f1s0 --ranks 2`: measure what balancing is worth."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bascule.bench.options import BenchOptions
from bascule.quantities import Scale, amount, count, num_bytes, number, percent, seconds, times
from bascule.report.charts import draw_lines
from bascule.report.page import Fact, Format, Report, Rows

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
    names = ([path.with_suffix(f".{n}{path.suffix}") for path in paths] for n in itertools.count(1))
    return next(backups for backups in names if not any(path.exists() for path in backups))


def report_of(summary: dict[str, Any], steps: Sequence[dict[str, Any]]) -> Report:
    """Report training without and with balancing, from summary.json and the rows of steps.jsonl.

    Of several topologies, the answer compares the fastest with training without; a table lists all.
    """
    setting, before, after = summary["setting"], *(summary[arm] for arm in _ARMS)
    best, topologies = setting["topology"], summary["topologies"]
    steps_of = {name: [row for row in steps if row["topology"] == name] for name in topologies}
    measured, predicted = summary["measured_ratio"], summary["predicted_ratio"]
    error = measured / predicted - 1
    ranks = f"{count(setting['world_size'], 'rank')} ({setting['device']})"
    is_loader, (low, high) = "loader" in summary, summary["measured_ratio_spread"]
    moved = any(topology["moved_tokens"] for topology in topologies.values())
    is_same = not moved and "stages" not in summary
    way = "data loader" if is_loader else f"bags {', '.join(topologies)}"
    labels = {name: name if len(topologies) > 1 else _ARMS["balanced"] for name in topologies}
    sent = "sent per step" if is_loader else "sent per step, forward"
    lines = {
        key: {_ARMS["unbalanced"]: [row[f"{key}_unbalanced"] for row in steps_of[best]]}
        | {labels[name]: [row[f"{key}_balanced"] for row in steps_of[name]] for name in topologies}
        for key in ("seconds", "loss")
    }
    arms = _ARMS["unbalanced"], labels[best]
    without, balanced = (sum(lines["seconds"][arm]) for arm in arms)
    rows = [
        (label, *(write(arm[key]) for arm in (before, after)))
        for label, key, write in _ROWS
        if before[key] is not None
    ]
    for which in ("first", "last"):
        rows.append((f"loss, {which} step", *map(number, summary[f"loss_{which}"])))
    answer = (
        f"With bascule, training ran {times(measured)} as fast (single steps {times(low)} to "
        f"{times(high)}); the prediction was {times(predicted)}."
    )
    gains = (
        Fact("measured_ratio", "measured speed-up", measured, times),
        Fact("prediction_error", "which is", error, _against_prediction),
        Fact("seconds_saved", "saved in all steps", without - balanced, seconds),
    )
    if len(topologies) > 1:
        answer = f"{best} was the fastest of {len(topologies)} topologies. {answer}"
    if is_same:
        answer, gains = "Nothing was moved: both runs did the same and differ by noise.", ()
    return Report(
        title=f"{ranks}, {way}, {count(len(steps_of[best]), 'step')}",
        answer=answer,
        facts=(
            *gains,
            Fact("predicted_ratio", "predicted speed-up, compute only", predicted, times),
            Fact("wir_unbalanced", "slowest/fastest rank (WIR), without", before["wir"], number),
            Fact("wir_balanced", "slowest/fastest rank (WIR), with", after["wir"], number),
            Fact("fbl_unbalanced", "a step takes, without", before["fbl_median_s"], seconds),
            Fact("fbl_balanced", "a step takes, with", after["fbl_median_s"], seconds),
            Fact("sent_bytes", f"{sent}, all ranks", summary["sent_bytes_per_step"], num_bytes),
            Fact("loss_difference", "losses differ by", summary["loss_difference"], number),
        ),
        parts=(
            *_topologies(summary, lines["seconds"]),
            Rows("Both ways", dict.fromkeys(("", *arms), str), rows),
            *_stages(summary),
            draw_lines(
                "Time of each step",
                "Forward and backward pass of the slowest rank. All lines but the first include "
                "planning and exchanges.",
                ("step", "s"),
                lines["seconds"],
            ),
            draw_lines("Loss", "The curves lie on each other.", ("step", "loss"), lines["loss"]),
        ),
        notes=tuple(_notes(summary, is_same)),
        data=tuple(setting.get("data_lines", ())),
        values=summary,
    )


def _against_prediction(error: float) -> str:
    return f"{percent(abs(error))} {'below' if error < 0 else 'above'} the prediction"


_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (  # label, key of an arm, format
    ("slowest/fastest rank's load (WIR)", "wir", number),
    ("slowest/mean rank's load (imbalance)", "imbalance", number),
    ("forward and backward (FBL), median", "fbl_median_s", seconds),
    ("FBL of 10 % to 90 % of steps", "fbl_spread_s", lambda ends: " to ".join(map(seconds, ends))),
    ("tokens per second", "tokens_per_s", number),
    ("FLOP per second", "flops_per_s", partial(amount, unit="FLOP/s")),
    ("hardware FLOP utilisation (HFU)", "hfu", percent),
)


def _topologies(summary: dict[str, Any], times_of: Mapping[str, Sequence[float]]) -> list[Rows]:
    """Return the table of topologies, if there are several; `times_of` steps are by label."""
    if len(summary["topologies"]) == 1:
        return []
    steps, without = zip(*times_of.values(), strict=True), _ARMS["unbalanced"]
    firsts = Counter(min(zip(step, times_of, strict=True))[1] for step in steps)
    rows: list[tuple[Any, ...]] = [
        (without, summary["unbalanced"]["imbalance"], None, None, None, firsts[without])
    ]
    for name, topology in summary["topologies"].items():
        spread = " to ".join(map(number, topology["measured_ratio_spread"]))
        predicted, sent_bytes = topology["predicted_ratio"], topology["sent_bytes_per_step"]
        measured = f"{times(topology['measured_ratio'])} ({spread})"
        imbalance = topology["balanced"]["imbalance"]
        rows.append((name, imbalance, predicted, measured, sent_bytes, firsts[name]))
    sent = Scale.of((row[4] for row in rows), "B")
    formats: dict[str, Format] = {"bags": str, "imbalance": number}
    formats |= {"predicted, compute only": times, "measured (10 % to 90 % of steps)": str}
    formats |= {f"sent per step, forward, {sent.unit}": sent, "steps won": str}
    return [Rows("Topologies", formats, rows)]


def _stages(summary: dict[str, Any]) -> list[Rows]:
    if "stages" not in summary:
        return []
    formats = {"": str, "imbalance without": number, "imbalance with": number}
    formats |= {"time without": seconds, "time with": seconds, "speed-up": times}
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
    differences = (
        max(topology[key] for topology in topologies.values())
        for key in ("loss_difference", "grad_difference_first", "grad_difference")
    )
    fit, wires = setting["fit_error"], "exchange" if loader else "wires"
    tokens = ", ".join(map(number, summary["tokens_per_rank"][:16]))
    tokens += " ..." if setting["world_size"] > 16 else ""
    tokens += f" (bags {setting['topology']})" if len(topologies) > 1 else ""
    notes = [
        f"the prediction counts compute only, not the {wires}: gamma {number(setting['gamma'])}"
        + ("" if fit is None else f", fitted within {percent(fit)}"),
        "same maths: losses differ by {} at most, gradients by {} at the first step and {} at most "
        "(relative)".format(*map(number, differences)),
        f"tokens per rank with balancing: {tokens}",
    ]
    if len(topologies) > 1 and setting["device"] == "cpu":
        ratios = [f"{name} {times(topology['cpu_ratio'])}" for name, topology in topologies.items()]
        notes.append(f"speed-up in CPU time, busiest rank, without waits: {', '.join(ratios)}")
    if loader:
        reasons = loader["reasons"].items()
        skipped = ", ".join(f"{n} {why}" for why, n in reasons if why != "balanced")
        names = "exchange", "hidden", "exposed"
        parts = ", ".join(f"{name} {seconds(loader[f'{name}_s_per_step'])}" for name in names)
        notes += [
            f"the slowest rank, per step: {parts} ({percent(loader['exposed_share'])} of the step)",
            f"samples moved in {number(loader['applied_steps'])} of {count(num_steps, 'step')}"
            + (f" (others: {skipped})" if skipped else ""),
        ]
    if setting["skipped_photos"]:
        notes.append(f"photos skipped: {setting['skipped_photos']}")
    if not is_same and summary["measured_ratio"] < _MISSED * summary["predicted_ratio"]:
        low, high = summary["measured_ratio_spread"]
        notes.append(
            f"measured is below predicted: the {wires}, planning, and what both runs share "
            "(collectives of FSDP, launches) are not predicted; and steps this short may differ "
            f"by noise alone (from {times(low)} to {times(high)})"
        )
    if fit is not None and setting["gamma"] == 0.0:
        notes.append(
            "warning: the fitted gamma is 0, because attention's time did not show; so plans count "
            "linear layers only: measure longer sequences or a quieter machine, or give --gamma"
        )
    for name, topology in topologies.items():
        if not (bound := topology["single_binds_steps"]):
            continue
        advice = f"balancing on bags {name} can shorten: give larger bags with --topologies"
        if loader is not None:
            advice = "moving whole samples can shorten: larger bags can, with --topologies, "
            advice += "not --loader"
        notes.append(
            f"warning: in {number(bound)} of {count(num_steps, 'step')} one sequence alone takes "
            f"as long as its step, which no {advice}"
        )
    return notes
