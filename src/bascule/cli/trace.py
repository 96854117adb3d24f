"""`bascule trace`: what ranks of a profiled run waited for, and what balancing would be worth."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from bascule.errors import ConfigError, PlanError
from bascule.options import NewFolder, Outputs

if TYPE_CHECKING:
    from bascule.workload.traces import StepParts, Worth

_PARTS = ("compute", "communication", "waiting", "rest", "hidden")


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

    folder: tyro.conf.Positional[Path]
    lens: Path | None = None
    topology: str | None = None
    out: Annotated[Path | None, NewFolder()] = None


def run(options: TraceOptions, arguments: list[str]) -> None:
    """Read and compare, and publish the comparison."""
    from bascule.cli.command import publish, saved
    from bascule.plan.topology import Topology
    from bascule.report.reports import of_trace
    from bascule.workload.traces import balancing_worth, read_traces, step_parts, write_steps
    from bascule.workload.traces.steps import segments_of
    from bascule.workload.traces.worth import RunLengths, lengths_of, read_lens

    source = options.folder if options.folder.is_dir() else options.folder.parent
    if options.out is not None and options.out.resolve() == source.resolve():
        raise ConfigError(
            f"--out {options.out}: the traces are read from there, and would be written over; give "
            "another folder"
        )
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
    report = of_trace(parts, worth, unknown)
    console = publish(options, report, _to_dict(parts, worth, unknown))
    if options.out is not None:
        sizes = [one.world_size for one in traces if one.world_size is not None]
        world_size = max([*sizes, int(parts.ranks.max()) + 1])
        saved(console, *write_steps(options.out, segments_of(parts, lens.computed), world_size))


def _to_dict(parts: "StepParts", worth: "Worth | None", unknown: str) -> dict[str, Any]:
    is_known = not parts.num_missing
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
        **({} if is_known else {"waiting": None}),
        "imbalance": parts.imbalance,
        "slowest": parts.slowest.tolist() if is_known else None,
        "slowest_rank": parts.slowest_rank if is_known else None,
        "notes": list(parts.notes),
        "worth": json.loads(json.dumps(priced)),
        "worth_unknown": unknown or None,
    }
