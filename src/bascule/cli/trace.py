"""`bascule trace runs/traces --report trace.html`: read the traces of a profiled run."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from bascule.errors import ConfigError, PlanError
from bascule.options import POSITIONAL, Group, NewFolder, Outputs
from bascule.quantities import Scale, count, number, percent, seconds, times
from bascule.report.charts import draw_bars, draw_lines
from bascule.report.page import Fact, Format, Report, Rows

if TYPE_CHECKING:
    from bascule.workload.traces import StepParts, Worth

_PARTS = ("compute", "communication", "waiting", "rest", "hidden")
_MAX_BARS = 64  # ranks of a chart


@dataclass(frozen=True, kw_only=True)
class TraceOptions(Outputs):
    """Read the traces that torch.profiler wrote in any trainer, one file per rank.

    Attributes:
        folder: A folder of .json, .json.gz or .json.zst files, or of such folders; or one file.
        lens: JSONL file of lengths, for traces that do not have them. Each row looks like
            {"step": 3, "rank": 0, "lens": [512, 64]}.
        topology: Bags of ranks for balancing, such as g2n1. By default, each rank is its own bag.
        out: Write the steps here, aligned to one clock, for Perfetto and HolisticTraceAnalysis.
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
        reason = "the traces are read from there, and would be overwritten"
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
    arrays = "ranks", "steps", "step_seconds", "seconds", *_PARTS
    return {
        **{name: getattr(parts, name).tolist() for name in arrays},
        **({} if is_complete else {"waiting": None}),
        "numbered_by": parts.numbered_by,
        "on_device": parts.on_device,
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
    answer = f"{parts.missing}, so how long ranks wait is not known."
    if is_complete:
        answer = f"Ranks wait {percent(parts.waited)} of the time."
        if num_ranks > 1:
            num_last = np.sum(parts.slowest == parts.slowest_rank)
            often = f"{num_last:,} of {count(num_steps, 'step')}"
            answer += f" The slowest is rank {parts.slowest_rank}, in {often}."
    if worth is None:
        answer += f" What balancing would be worth is not known: {unknown}."
    else:
        error, under = percent(abs(worth.model_error)), worth.model_error < 0
        answer += (
            f" Balanced on {worth.topology}, steps are predicted to run {times(worth.speedup)} as "
            f"fast; the model {'under' if under else 'over'}estimates the measured step by {error}."
        )
    names = [name for name in _PARTS if name != "waiting" or is_complete]
    means = [getattr(parts, name).mean(axis=0) for name in ("seconds", *names)]
    scale = Scale.of(means[0].tolist(), "s")
    formats: dict[str, Format] = {"rank": str}
    formats |= dict.fromkeys(("step", *names), scale)
    if is_complete:
        means.append(np.array([np.sum(parts.slowest == rank) for rank in parts.ranks]))
        formats["slowest in steps"] = number
    rows = list(zip(*(column.tolist() for column in (parts.ranks, *means)), strict=True))
    compute = "kernels of a device" if parts.on_device else "operators of the host"
    return Report(
        title=f"{count(num_steps, 'measured step')} of {count(num_ranks, 'rank')}",
        answer=answer,
        facts=(
            Fact("step_s", "a step takes", float(parts.step_seconds.mean()), seconds),
            Fact("waiting", "share of the time in which ranks wait", parts.waited, percent),
            Fact("imbalance", "imbalance of compute (largest / mean)", parts.imbalance, number),
            Fact("slowest_rank", "slowest rank", parts.slowest_rank if is_complete else None),
            *_worth_facts(worth),
        ),
        parts=(
            draw_bars(
                "Time of a step by rank",
                "Averages over the steps.",
                [f"rank {rank}" for rank in parts.ranks[:_MAX_BARS]],
                {name: getattr(parts, name).mean(axis=0)[:_MAX_BARS] for name in names[:-1]},
                "s",
            ),
            draw_lines(
                "Each step",
                "What the slowest rank needs without waiting, and what ranks need on average.",
                ("step", "s"),
                {"slowest rank": parts.own.max(axis=1), "average": parts.own.mean(axis=1)},
            ),
            Rows(f"All ranks, average of a step in {scale.unit}", formats, rows),
        ),
        notes=(
            f"Steps are numbered by {parts.numbered_by}. Compute: {compute}.",
            "Waiting is what a rank spends in a collective before the last rank begins it. Hidden "
            "is communication behind compute, and is part of compute.",
            *([] if worth is None else ["The prediction does not count the moving of tokens."]),
            *([worth.assumed_in_words] if worth is not None and worth.assumed_in_words else []),
            *parts.notes,
            "Next: `bascule simulate --manifest TABLE`, with the table of your samples, compares "
            "ways to balance; `bascule topology` finds the best topology.",
        ),
        values=_to_dict(parts, worth, unknown),
    )


def _worth_facts(worth: "Worth | None") -> list[Fact]:
    if worth is None:
        return []
    assert worth.cost.fit is not None
    return [
        Fact("speedup", "predicted speed-up", worth.speedup, times),
        Fact("predicted_s", f"a step balanced on {worth.topology}", worth.predicted_s, seconds),
        Fact("fit_error", "error on steps left out of the fit", worth.cost.fit.loo_error, percent),
        Fact("model_error", "error on the average step", worth.model_error, percent),
        Fact("moved_share", "share of tokens that change ranks", worth.moved_share, percent),
    ]
