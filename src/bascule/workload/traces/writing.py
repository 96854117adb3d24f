"""Write steps as Chrome-trace JSON, one file per rank, as torch.profiler does for a GPU.

Perfetto, HolisticTraceAnalysis and `read_traces` read these files. Compute and collectives are
kernels of two streams, with launches on the host; waiting is a range within its collective.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from bascule.checks import MAX_RANKS, choice, fields, number, shown, whole
from bascule.errors import ConfigError

Kind = Literal["step", "compute", "communication", "waiting", "lengths"]

_HOST, _STEPS, _COMPUTE, _WAITS, _CALLS = 1, 6, 7, 15, 20
_NAMES = {
    _HOST: "host",
    _STEPS: "steps",
    _COMPUTE: "compute",
    _CALLS: "communication",
    _WAITS: "waiting",
}


@dataclass(frozen=True, slots=True)
class Segment:
    """A span of time in which a rank did one thing."""

    rank: int
    # "communication" is a whole collective, "waiting" its part before the last rank begins it, and
    # "lengths" name the sequences of the step around them.
    kind: Kind
    name: str  # a step's number; a `LengthMark`; or a collective's name, the same on all its ranks
    start: float  # seconds, on a clock that all ranks share
    seconds: float

    def __post_init__(self) -> None:
        fields(self, kind=(choice, *get_args(Kind)), rank=(whole, 0, MAX_RANKS - 1))
        fields(self, start=(number, -1e30), seconds=number)
        if self.kind == "step" and not self.name.isdecimal():
            raise ConfigError(f"Segment(name={shown(self.name)}): the name of a step is its number")


def write_steps(folder: str | Path, segments: Iterable[Segment], world_size: int) -> list[Path]:
    """Write `rank0.json`, `rank1.json`, ..: a file for each rank that has segments, in any order.

    It makes the folder if needed, and replaces files of these names. It refuses a folder with
    other traces.
    """
    events: dict[int, list[dict[str, Any]]] = {}
    busy: dict[int, list[float]] = {}
    for flow, segment in enumerate(sorted(segments, key=lambda segment: segment.start), 1):
        ends = busy.setdefault(segment.rank, [])
        lane = _free_lane(ends, segment) if segment.kind == "communication" else 0
        events.setdefault(segment.rank, []).extend(_events(segment, flow, lane))
    if events and max(events) >= world_size:
        raise ConfigError(f"a segment is of rank {max(events)}, and the run has {world_size} ranks")
    folder = Path(folder)
    files = [folder / f"rank{rank}.json" for rank in sorted(events)]
    others = {path.name for path in folder.glob("*.json*")} - {path.name for path in files}
    if others:
        wrong = f"cannot write traces to {folder}: it has {shown(min(others))}"
        raise ConfigError(f"{wrong}, which would be read with them; give an empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, file in zip(sorted(events), files, strict=True):
            file.write_text(_file(rank, world_size, events[rank]), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write traces to {folder}: {error}") from None
    return files


def _file(rank: int, world_size: int, events: list[dict[str, Any]]) -> str:
    """Return a rank's file; HolisticTraceAnalysis searches its text for the first "rank"."""
    used = {event["tid"] for event in events}
    lanes = {tid: f"{_NAMES[_CALLS]} {tid - _CALLS + 1}" for tid in used if tid > _CALLS}
    rows = [
        {"ph": "M", "name": "thread_name", "pid": _pid(tid), "tid": tid, "ts": 0}
        | {"args": {"name": name}}
        for tid, name in sorted((_NAMES | lanes).items())
    ]
    processes = {0: f"rank {rank}", _pid(_HOST): f"rank {rank}, host"}
    names = [
        {"ph": "M", "name": "process_name", "pid": pid, "ts": 0, "args": {"name": name}}
        for pid, name in processes.items()
    ]
    return json.dumps(
        {
            "schemaVersion": 1,
            "distributedInfo": {"rank": rank, "world_size": world_size, "backend": "nccl"},
            "displayTimeUnit": "ms",
            "traceEvents": [*names, *rows, *sorted(events, key=lambda event: event["ts"])],
        }
    )


def _free_lane(ends: list[float], call: Segment) -> int:
    """Return the first row that is free when a call starts, and occupy it until its end."""
    free = [lane for lane, end in enumerate(ends) if end <= call.start]
    lane = free[0] if free else len(ends)
    ends[lane : lane + 1] = [call.start + call.seconds]
    return lane


def _pid(tid: int) -> int:
    return 1 if tid == _HOST else 0


def _events(segment: Segment, number: int, lane: int) -> list[dict[str, Any]]:
    """Return the events of a segment; `number` ties a kernel to its launch."""
    start, lasting = segment.start * 1e6, segment.seconds * 1e6

    def event(category: str, name: str, tid: int, /, **args: object) -> dict[str, Any]:
        row = {"ph": "X", "cat": category, "name": name, "pid": _pid(tid), "tid": tid}
        return row | {"ts": start, "dur": lasting, "args": args}

    if segment.kind == "step":
        name = f"ProfilerStep#{segment.name}"
        host = event("user_annotation", name, _HOST)
        return [host, event("gpu_user_annotation", name, _STEPS)]
    if segment.kind == "lengths":
        return [event("user_annotation", segment.name, _HOST)]
    if segment.kind == "waiting":
        return [event("gpu_user_annotation", segment.name, _WAITS)]
    launch = event("cuda_runtime", "cudaLaunchKernel", _HOST, correlation=number) | {"dur": 0}
    args: dict[str, object] = {"device": 0, "correlation": number}
    if segment.kind == "communication":
        tid, name = _CALLS + lane, f"ncclDevKernel_{segment.name}"
        args["Collective name"] = segment.name
    else:
        tid, name = _COMPUTE, segment.name
    return [launch, event("kernel", name, tid, stream=tid, **args)]
