"""`bascule trace runs/traces --report trace.html`: read the traces of a profiled run."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from bascule.errors import ConfigError, PlanError
from bascule.options import POSITIONAL, Group, NewFolder, Outputs
from bascule.report.charts import draw_bars, draw_lines
from bascule.report.page import Fact, Report, Rows, columns, ms

if TYPE_CHECKING:
    from bascule.workload.traces import StepParts, Worth

_PARTS = ("compute", "communication", "waiting", "rest", "hidden")
_MAX_BARS = 64  # ranks of a chart


@dataclass(frozen=True, kw_only=True)
class TraceOptions(Outputs):
    """Read the traces that torch.profiler wrote in any trainer, one file a rank.

    Attributes:
        folder: Folder of the .json, .json.gz or .json.zst files, or of such folders; or one file.
        lens: JSONL with rows such as {"step": 3, "rank": 0, "lens": [512, 64]}, where the traces do
            not say the lengths themselves.
        topology: Compute bags to plan for, for example g2n1; one rank a bag if not given.
        out: Folder for the steps as traces with one clock, for Perfetto and HolisticTraceAnalysis.
    """

    folder: Annotated[Path, POSITIONAL, Group("Traces")]
    lens: Path | None = None
    topology: str | None = None
    out: Annotated[Path | None, NewFolder(), Group("Output")] = None


def run(options: TraceOptions, arguments: list[str]) -> None:
    """Read traces, and publish what ranks waited for and what balancing would be worth."""
    from bascule.cli.command import publish, saved
    from bascule.plan.topology import Topology
    from bascule.workload.traces import balancing_worth, read_traces, step_parts, write_steps
    from bascule.workload.traces.steps import segments_of
    from bascule.workload.traces.worth import RunLengths, lengths_of, read_lens

    source = options.folder if options.folder.is_dir() else options.folder.parent
    if options.out is not None and options.out.resolve() == source.resolve():
        reason = "the traces are read from there, and would be written over"
        raise ConfigError(f"--out {options.out}: {reason}; give another folder")
    traces, notes = read_traces(options.folder)
    parts = step_parts(traces, notes)
    if options.topology is not None:
        Topology.parse(options.topology, world_size=parts.ranks.size)
    manifest = None if options.lens is None else read_lens(options.lens)
    worth, unknown = None, ""
    try:
        lens = manifest or lengths_of(traces)
        worth = balancing_worth(parts, lens, options.topology)
    except (ConfigError, PlanError) as error:
        lens, unknown = manifest or RunLengths({}, {}), str(error)
    console = publish(options, report_of(parts, worth, unknown))
    if options.out is not None:
        sizes = [trace.world_size for trace in traces if trace.world_size is not None]
        world_size = max([*sizes, int(parts.ranks.max()) + 1])
        saved(console, *write_steps(options.out, segments_of(parts, lens.computed), world_size))


def _to_dict(parts: "StepParts", worth: "Worth | None", unknown: str) -> dict[str, Any]:
    is_complete = not parts.num_missing
    names = ("speedup", "predicted_s", "model_error", "assumed")
    priced = worth and asdict(worth) | {name: getattr(worth, name) for name in names}
    return {
        "ranks": parts.ranks.tolist(),
        "steps": parts.steps.tolist(),
        "numbered_by": parts.numbered_by,
        "on_device": parts.on_device,
        "step_seconds": parts.step_seconds.tolist(),
        "seconds": parts.seconds.tolist(),
        **{name: getattr(parts, name).tolist() for name in _PARTS},
        **({} if is_complete else {"waiting": None}),
        "imbalance": parts.imbalance,
        "slowest": parts.slowest.tolist() if is_complete else None,
        "slowest_rank": parts.slowest_rank if is_complete else None,
        "notes": list(parts.notes),
        "worth": json.loads(json.dumps(priced)),
        "worth_unknown": unknown or None,
    }


def report_of(parts: "StepParts", worth: "Worth | None", unknown: str) -> Report:
    """Report what ranks waited for, and the worth of balancing, or why it is `unknown`."""
    num_steps, num_ranks = parts.seconds.shape
    is_complete = parts.waited is not None
    answer = f"{parts.missing}, so what ranks wait and their imbalance are not known"
    if is_complete:
        answer = f"Ranks wait {parts.waited:.1%} of the time"
    if worth is None:
        answer += f". What balancing would be worth is not known: {unknown}."
    else:
        answer += (
            f"; balanced on {worth.topology}, steps are predicted to run {worth.speedup:.2f}x as "
            f"fast, by a model that is {worth.model_error:+.1%} off in the steps as run."
        )
    names = [name for name in _PARTS if name != "waiting" or is_complete]
    means = [getattr(parts, name).mean(axis=0) * 1e3 for name in ("seconds", *names)]
    formats = {"rank": "{}"} | dict.fromkeys(("step", *names), "{:.4g}")
    if is_complete:
        means.append(np.array([np.sum(parts.slowest == rank) for rank in parts.ranks]))
        formats["slowest"] = "{:.0f} steps"
    rows = list(zip(*(column.tolist() for column in (parts.ranks, *means)), strict=True))
    compute = "kernels of a device" if parts.on_device else "operators of the host"
    return Report(
        title=f"{num_steps} measured steps of {num_ranks} ranks",
        answer=answer,
        facts=(
            Fact("step_s", "a step takes", float(parts.step_seconds.mean()), ms),
            Fact("waiting", "ranks wait", parts.waited, "{:.1%}"),
            Fact("imbalance", "compute, max / mean", parts.imbalance, "{:.4f}"),
            Fact("slowest_rank", "slowest rank", parts.slowest_rank if is_complete else None),
            *_worth_facts(worth),
        ),
        parts=(
            draw_bars(
                "Seconds of a step by rank",
                f"Means of {num_steps} steps."
                + (f" Rank {parts.slowest_rank} is the slowest." if is_complete else ""),
                [f"rank {rank}" for rank in parts.ranks[:_MAX_BARS]],
                {name: getattr(parts, name).mean(axis=0)[:_MAX_BARS] for name in names[:-1]},
                "s",
            ),
            draw_lines(
                "Each step",
                "What the slowest rank needs by itself, and what the mean rank does.",
                ("step", "s"),
                {"slowest rank": parts.own.max(axis=1), "mean": parts.own.mean(axis=1)},
            ),
            Rows("All ranks, ms a step", formats, rows),
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
        values=_to_dict(parts, worth, unknown),
    )


def _worth_facts(worth: "Worth | None") -> list[Fact]:
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


def _worth_of_steps(worth: "Worth") -> Rows:
    times = "step, ms: {:.4g}", "by the model, ms: {:.4g}"
    formats = columns("", *times, "model's imbalance: {:.4f}")
    rows: list[Sequence[Any]] = [
        ("as run", worth.measured_s * 1e3, worth.model_s * 1e3, worth.imbalance)
    ]
    if worth.as_loaded_s != worth.model_s:
        rows.append(("without the run's own plan", None, worth.as_loaded_s * 1e3, None))
    times = worth.predicted_s * 1e3, worth.balanced_s * 1e3
    rows.append(("balanced, predicted", *times, worth.balanced_imbalance))
    return Rows(f"What balancing is worth, {worth.num_steps} steps", formats, rows)
