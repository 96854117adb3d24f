"""`bascule trace`: what ranks of a profiled run waited for, and what balancing would be worth."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from bascule.cli.writing import STDOUT, check_outputs, tell_written, write_json, write_report
from bascule.errors import ConfigError, PlanError
from bascule.plan.topology import Topology
from bascule.report.trace_page import of_trace
from bascule.workload.traces import StepParts, Worth, read_traces, step_parts
from bascule.workload.traces.steps import segments_of
from bascule.workload.traces.worth import (
    RunLengths,
    balancing_worth,
    lengths_of,
    read_lens,
)
from bascule.workload.traces.writing import write_steps

_MAX_ROWS = 64
_PARTS = ("compute", "communication", "waiting", "rest", "hidden")


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Read the traces that torch.profiler wrote in any trainer, one file a rank.

    Attributes:
        folder: Folder of the .json or .json.gz files, or one file.
        lens: JSONL with rows such as {"step": 3, "rank": 0, "lens": [512, 64]}, where the traces do
            not say the lengths themselves.
        topology: Compute bags to plan for, for example g2n1; one rank a bag if not given.
        json: Where to write the numbers; "-" is standard output.
        out: Folder for the steps as traces with one clock, for Perfetto and HolisticTraceAnalysis.
        report: Where to write a page of it all, .html.
    """

    folder: tyro.conf.Positional[Path]
    lens: Path | None = None
    topology: str | None = None
    json: Path | None = None
    out: Path | None = None
    report: Path | None = None


def run(options: TraceOptions, arguments: list[str]) -> None:
    """Read, compute and print.

    Raises:
        ConfigError: A trace or an option is malformed, or they do not fit together.
    """
    check_outputs(lens=options.lens, json=options.json, out=options.out, report=options.report)
    _check_out(options)
    traces, notes = read_traces(options.folder)
    parts = step_parts(traces, notes)
    if options.topology is not None:
        Topology.parse(options.topology, world_size=parts.ranks.size)
    manifest = None if options.lens is None else read_lens(options.lens)
    worth: Worth | None = None
    unknown = ""
    try:
        lens = manifest or lengths_of(traces)
        worth = balancing_worth(parts, lens, options.topology)
    except (ConfigError, PlanError) as error:
        lens, unknown = manifest or RunLengths({}, {}), str(error)
    console = Console(stderr=options.json == STDOUT, highlight=False)
    _show(console, parts)
    _show_worth(console, worth, unknown)
    for note in parts.notes:
        console.print(f"note: {note}", markup=False)
    write_json(console, options.json, _as_dict(parts, worth, unknown))
    if options.out is not None:
        sizes = [one.world_size for one in traces if one.world_size is not None]
        world_size = max([*sizes, int(parts.ranks.max()) + 1])
        tell_written(
            console, *write_steps(options.out, segments_of(parts, lens.computed), world_size)
        )
    if options.report is not None:
        write_report(console, options.report, of_trace(parts, worth, unknown))


def _check_out(options: TraceOptions) -> None:
    """Refuse to write over what is read.

    Raises:
        ConfigError: Says so.
    """
    if options.out is None:
        return
    source = options.folder if options.folder.is_dir() else options.folder.parent
    if options.out.resolve() == source.resolve():
        raise ConfigError(
            f"--out {options.out}: the traces are read from there, and would be written over; give "
            "another folder"
        )


def _show(console: Console, parts: StepParts) -> None:
    num_steps, num_ranks = parts.seconds.shape
    where = "kernels of a device" if parts.on_device else "operators of the host"
    title = f"{num_steps} steps of {num_ranks} ranks, by {parts.numbered_by}; compute: {where}"
    table = Table(title=title)
    for name in ("rank", "step ms", "compute", "commun.", "waiting", "rest", "hidden", "slowest"):
        table.add_column(name, justify="right", no_wrap=True)
    means = [getattr(parts, name).mean(axis=0) * 1e3 for name in ("seconds", *_PARTS)]
    for place, rank in enumerate(parts.ranks[:_MAX_ROWS].tolist()):
        cells = [f"{float(mean[place]):.4g}" for mean in means]
        cells.append(f"{np.count_nonzero(parts.slowest == rank)} of {num_steps}")
        if parts.num_missing:  # those of ranks without a trace decide these
            cells[1 + _PARTS.index("waiting")] = cells[-1] = "-"
        table.add_row(str(rank), *cells)
    console.print(table)
    if num_ranks > _MAX_ROWS:
        console.print(f"({num_ranks - _MAX_ROWS} more ranks)")
    console.print("hidden: communication behind compute, within compute")
    console.print(f"a step takes {parts.step_seconds.mean() * 1e3:.4g} ms; {_compared(parts)}")


def _compared(parts: StepParts) -> str:
    """What only the traces of all ranks tell."""
    if parts.waited is None:
        return f"{parts.missing}, so what ranks wait and their imbalance are not known"
    return (
        f"ranks wait {parts.waited:.1%} of it; measured imbalance (max/mean compute) "
        f"{parts.imbalance:.4f}; slowest: rank {parts.slowest_rank}"
    )


def _show_worth(console: Console, worth: Worth | None, unknown: str) -> None:
    if worth is None:
        console.print(f"what balancing would be worth is not known: {unknown}", markup=False)
        return
    table = Table(title=f"what balancing would be worth: {worth.num_steps} steps, {worth.topology}")
    for name in ("", "step ms", "model ms", "model's imbalance"):
        table.add_column(name, justify="right" if name else "left")
    row = f"{worth.measured_s * 1e3:.4g}", f"{worth.model_s * 1e3:.4g}", f"{worth.imbalance:.4f}"
    table.add_row("as run, measured", *row)
    if worth.as_loaded_s != worth.model_s:
        table.add_row("without the run's own plan", "", f"{worth.as_loaded_s * 1e3:.4g}", "")
    row = worth.predicted_s * 1e3, worth.balanced_s * 1e3, worth.balanced_imbalance
    table.add_row("balanced, predicted", f"{row[0]:.4g}", f"{row[1]:.4g}", f"{row[2]:.4f}")
    console.print(table)
    assert worth.cost.fit is not None
    console.print(
        f"predicted speed-up: {worth.speedup:.2f}x, moving {worth.moved_share:.0%} of the tokens, "
        f"which is not priced; the model is off by {worth.model_error:+.1%} in the steps as run, "
        f"and by {worth.cost.fit.loo_error:.1%} in measurements that it was not fitted to"
    )
    if worth.assumed_in_words is not None:
        console.print(f"note: {worth.assumed_in_words}", markup=False)


def _as_dict(parts: StepParts, worth: Worth | None, unknown: str) -> dict[str, Any]:
    """What is printed, and each step of each rank."""
    found: dict[str, Any] = {
        "ranks": parts.ranks.tolist(),
        "steps": parts.steps.tolist(),
        "numbered_by": parts.numbered_by,
        "on_device": parts.on_device,
        "step_seconds": parts.step_seconds.tolist(),
        "seconds": parts.seconds.tolist(),
        **{name: getattr(parts, name).tolist() for name in _PARTS},
        **({"waiting": None} if parts.num_missing else {}),
        "imbalance": parts.imbalance,
        "slowest": None if parts.num_missing else parts.slowest.tolist(),
        "slowest_rank": None if parts.num_missing else parts.slowest_rank,
        "notes": list(parts.notes),
        "worth": None,
        "worth_unknown": unknown or None,
    }
    if worth is not None:
        extra = {
            name: getattr(worth, name)
            for name in ("speedup", "predicted_s", "model_error", "assumed")
        }
        found["worth"] = json.loads(json.dumps(asdict(worth) | extra))
    return found
