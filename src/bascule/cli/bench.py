"""`bascule bench`: measure what balancing is worth, on local ranks or in a job that runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bascule.bench.options import BenchOptions
from bascule.cli.command import quietly
from bascule.cli.writing import check_outputs, tell_written, write_report, write_text
from bascule.errors import ConfigError
from bascule.plan.checks import MAX_NUMBER, number, shown
from bascule.report.reports import STAGE_KINDS, of_bench, stage_rows
from bascule.report.step_picture import draw_stages
from bascule.workload.codes import parse_data_codes

if TYPE_CHECKING:
    from bascule.bench.comparison import Comparison, StepRecord

_MAX_TOKENS = 2**22
_MOST = {
    "ranks": 256,
    "steps": 10**6,
    "warmup": 10**6,
    "accumulate": 10**4,
    "batch_size": 10**4,
    "clip_frames": 10**4,
    "max_tokens": _MAX_TOKENS,
    "d_model": 2**16,
    "num_heads": 2**12,
    "num_double": 10**3,
    "num_single": 10**3,
    "seed": 2**63 - 1,
}
"""Largest values of options."""


def run(options: BenchOptions, arguments: list[str]) -> None:
    """Launch the local ranks, or be one.

    Raises:
        ConfigError: The options do not fit the data or each other.
        CommError: A rank failed.
    """
    from bascule.cli.launch import default_num_ranks, in_a_job, launch

    _check_numbers(options)
    check_outputs(
        photos=options.photos,
        out=options.out,
        report=options.report,
        picture=options.picture,
    )
    if in_a_job():
        _run_rank(options)
        return
    num_ranks = options.ranks or default_num_ranks()
    _check(options, num_ranks)
    launch(num_ranks, arguments)


def _check_numbers(options: BenchOptions) -> None:
    """Refuse numbers that are too large for any run, before ranks are started.

    Raises:
        ConfigError: Names the option and its range.
    """
    for name, most in _MOST.items():
        value = getattr(options, name)
        if value is not None and value > most:
            raise ConfigError(f"--{name.replace('_', '-')} {shown(value)}: must be at most {most}")
    for name, most in (("gamma", MAX_NUMBER), ("lr", 1e6), ("timeout_s", 1e7)):
        if (value := getattr(options, name)) is not None:
            number(f"--{name.replace('_', '-')}", value, most=most)
    for code in () if options.data is None else parse_data_codes(options.data):
        if (tokens := code.batch_size * code.image_tokens) > _MAX_TOKENS:
            raise ConfigError(
                f"--data {code}: a rank has {tokens:,} visual tokens, and no rank trains on more "
                f"than {_MAX_TOKENS:,}: use fewer samples, pixels or frames"
            )


def _check(options: BenchOptions, num_ranks: int) -> None:
    """Find a user's error before any rank starts, where it can be told in one sentence."""
    from bascule.bench.ways import open_stream
    from bascule.train.encoders import load_encoders
    from bascule.train.model import check_kernel, model_config

    options.check(num_ranks)
    with quietly():  # rank 0 will warn of the same photos
        stream = open_stream(options, load_encoders(options), 0, num_ranks)
    check_kernel(options, model_config(options, stream))
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {options.out}: cannot be made: {error.strerror}") from error


def _run_rank(options: BenchOptions) -> None:
    from bascule.bench.comparison import Comparison, median_step, summarize
    from bascule.cli.launch import joined

    with joined(options.timeout_s) as device:
        comparison = Comparison(options, device)
        records = _followed(comparison, options.steps)
        summary = summarize(records, comparison.setting, options)
        if comparison.samples.group.rank == 0:
            if options.picture is not None:
                picture = draw_stages(*median_step(records).more["stages"].values())
                write_text(Console(), "--picture", options.picture, picture)
            console = Console()
            _print(console, summary)
            steps = [record.to_dict() for record in records]
            tell_written(console, *_write(options.out, summary, steps))
            if options.report is not None:
                page = of_bench(summary, steps, warnings(summary))
                write_report(console, options.report, page)


def _followed(comparison: "Comparison", num_steps: int) -> "list[StepRecord]":
    """All records; the first rank shows how far it is."""
    gathered: list[StepRecord] = []
    with _progress(Console(quiet=comparison.samples.group.rank > 0)) as progress:
        bar = progress.add_task("training both ways", total=num_steps)
        for record in comparison.run():
            gathered.append(record)
            progress.advance(bar)
    return gathered


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


def _write(
    folder: Path, summary: dict[str, Any], steps: Sequence[dict[str, Any]]
) -> tuple[Path, Path]:
    """The numbers of the run and of its steps; where they stand."""
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "summary.json", folder / "steps.jsonl"
    files[0].write_text(json.dumps(summary, indent=2) + "\n")
    files[1].write_text("".join(json.dumps(step) + "\n" for step in steps))
    return files


def _print(console: Console, summary: dict[str, Any]) -> None:
    setting = summary["setting"]
    way = "data loader" if "loader" in summary else f"bags {setting['topology']}"
    title = f"{setting['world_size']} ranks ({setting['device']}), {way}"
    table = Table(title=f"{title}, {summary['steps']} steps")
    for name in ("", "without", "with bascule"):
        table.add_column(name, justify="left" if not name else "right")
    arms = summary["unbalanced"], summary["balanced"]
    for label, text in _ROWS:
        table.add_row(label, *(text(arm) for arm in arms))
    if all(arm["hfu"] is not None for arm in arms):  # the peak of the device is known
        table.add_row("hardware FLOP utilisation (HFU)", *(f"{arm['hfu']:.1%}" for arm in arms))
    first, last = summary["loss_first"], summary["loss_last"]
    table.add_row("loss, first step", *(f"{loss:.6f}" for loss in first))
    table.add_row("loss, last step", *(f"{loss:.6f}" for loss in last))
    console.print(table)
    if "stages" in summary:
        console.print(*(_stages(summary["stages"], kind) for kind in STAGE_KINDS), sep="\n")
    loader = summary.get("loader")
    sent = f"{summary['sent_bytes_per_step'] / 2**20:.1f} MiB"
    low, high = summary["measured_ratio_spread"]
    fit = setting["fit_error"]
    tokens = ", ".join(f"{tokens:,.0f}" for tokens in summary["tokens_per_rank"][:16])
    console.print(
        f"speed-up: measured {summary['measured_ratio']:.2f}x (steps {low:.2f} to {high:.2f}), "
        f"predicted {summary['predicted_ratio']:.2f}x "
        f"(gamma {setting['gamma']:.2f}{'' if fit is None else f', fitted within {fit:.0%}'})\n"
        f"the prediction counts compute only, not the {'exchange' if loader else 'wires'}\n"
        f"same maths: losses differ by {summary['loss_difference']:.1e} at most, gradients by "
        f"{summary['grad_difference_first']:.1e} at the first step and "
        f"{summary['grad_difference']:.1e} at most (relative)\n"
        f"tokens a rank with balancing: {tokens}{' ...' if setting['world_size'] > 16 else ''}; "
        f"sent a step{'' if loader else ', forward'}, all ranks: {sent}\n"
        + (_loader_lines(loader, summary["steps"]) if loader else "")
        + (f"photos skipped: {setting['skipped_photos']}\n" if setting["skipped_photos"] else ""),
        end="",
    )
    for warning in warnings(summary):
        console.print(f"warning: {warning}", soft_wrap=True)


def _stages(stages: dict[str, Any], kind: str) -> Table:
    """Imbalance, seconds and speed-up of each stage."""
    heading, *rows = stage_rows(stages, kind)
    table = Table(title=f"stages, {kind}")
    for place, name in enumerate(heading):
        table.add_column(name, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _loader_lines(loader: dict[str, Any], num_steps: int) -> str:
    others = (f"{n} {reason}" for reason, n in loader["reasons"].items() if reason != "balanced")
    skipped = ", ".join(others)
    return (
        f"exchange, slowest rank, a step: {loader['exchange_s_per_step'] * 1e3:.1f} ms, hidden "
        f"{loader['hidden_s_per_step'] * 1e3:.1f} ms, exposed "
        f"{loader['exposed_s_per_step'] * 1e3:.1f} ms ({loader['exposed_share']:.1%} of the step)\n"
        f"samples moved in {loader['applied_steps']} of {num_steps} steps"
        f"{f' (others: {skipped})' if skipped else ''}\n"
    )


def warnings(summary: dict[str, Any]) -> list[str]:
    """Reasons why the numbers of a summary are low or should not be trusted, one line each."""
    lines: list[str] = []
    setting = summary["setting"]
    if setting["fit_error"] is not None and setting["gamma"] == 0.0:
        lines.append(
            "the fitted gamma is 0, attention's time did not show, so plans count linear layers "
            "only: measure longer sequences or a quieter machine, or give --gamma"
        )
    if summary["single_binds_steps"]:
        told = f"in {summary['single_binds_steps']} of {summary['steps']} steps one sequence alone "
        if "loader" in summary:
            advice = (
                "moving whole samples can shorten: larger bags can, with --topology, not --loader"
            )
        else:
            advice = (
                f"balancing on bags {setting['topology']} can shorten: give larger bags with "
                "--topology"
            )
        lines.append(f"{told}takes as long as its step, which no {advice}")
    return lines


_ROWS = (
    ("workload imbalance (WIR), max/min load", lambda arm: f"{arm['wir']:.2f}"),
    ("imbalance (max/mean load)", lambda arm: f"{arm['imbalance']:.3f}"),
    ("forward and backward (FBL), median", lambda arm: f"{arm['fbl_median_s']:.3f} s"),
    (
        "forward and backward (FBL), 10% to 90%",
        lambda arm: "{:.3f} to {:.3f} s".format(*arm["fbl_spread_s"]),
    ),
    ("tokens a second", lambda arm: f"{arm['tokens_per_s']:,.0f}"),
    ("GFLOP a second", lambda arm: f"{arm['flops_per_s'] / 1e9:,.1f}"),
)
