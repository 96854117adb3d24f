"""The traces of a run's ranks, read from the JSON that torch.profiler writes: one file a rank.

Of a rank with kernels of a device, these are its compute and its collectives. Of one without, its
operators are compute, and the events of gloo's threads are collectives.
"""

import gzip
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from bascule.errors import ConfigError
from bascule.plan.checks import MAX_RANKS, is_int, shown
from bascule.plan.files import check_regular, parse_json, to_path
from bascule.workload.traces.rank_events import RankEvents, events_of

MAX_BYTES = 2**32
"""Most bytes of a trace, unpacked."""

_RANK_IN_NAME = re.compile(r"rank[-_. ]?([0-9]{1,6})(?![0-9])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank did.

    Attributes:
        rank: Which one.
        world_size: Ranks of the run, if the trace says so.
        events: Its steps, compute, collectives and lengths.
        num_left_out: Events without a usable time.
    """

    rank: int
    world_size: int | None
    events: RankEvents
    num_left_out: int


def read_traces(path: str | Path) -> tuple[tuple[RankTrace, ...], tuple[str, ...]]:
    """Read the traces of a run.

    Args:
        path: A folder with files ``*.json`` or ``*.json.gz``, one a rank, or several of a rank with
            other steps each; or one such file. The rank is that of `distributedInfo`, or else the
            number behind "rank" in the file's name.

    Returns:
        The ranks in their order, and sentences on what was left out.

    Raises:
        ConfigError: There is no trace, a file is damaged, two files have the same step of a rank,
            or a rank's trace does not show steps. Names the file.
    """
    path = to_path(path)
    found: dict[int, RankTrace] = {}
    files: dict[int, Path] = {}
    notes: list[str] = []
    names = _files(path)
    for file in names:
        data = _load(file)
        if data is None:
            notes.append(f"{shown(file.name)} is no trace, it has no traceEvents: left out")
            continue
        trace = _rank_trace(file, data, is_alone=len(names) == 1)
        if trace.rank in found:
            trace = _joined(found[trace.rank], trace, files[trace.rank], file)
        found[trace.rank], files[trace.rank] = trace, file
    if not found:
        raise ConfigError(
            f"{path}: no trace in it: give the folder into which torch.profiler wrote one "
            ".json or .json.gz file a rank"
        )
    traces = tuple(found[rank] for rank in sorted(found))
    return traces, (*notes, *_missing(traces))


def _files(path: Path) -> list[Path]:
    try:
        if not path.is_dir():
            return [path]
        return sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _load(file: Path) -> dict[str, Any] | None:
    """The content of a file; None if it is not a trace."""
    try:
        check_regular(file)
        with (gzip.open if file.name.endswith(".gz") else open)(file, "rb") as opened:
            content = cast(bytes, opened.read(MAX_BYTES + 1))
    except (OSError, EOFError, ValueError, zlib.error, MemoryError) as error:
        raise ConfigError(f"cannot read {file}: {error or 'too large for the memory'}") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{file} has more than {MAX_BYTES} bytes: profile fewer steps")
    data = parse_json(content.decode("utf-8", "replace"), str(file))
    if isinstance(data, list):  # the other form of the format: events alone
        data = {"traceEvents": data}
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        return None
    return cast(dict[str, Any], data)


def _rank_trace(file: Path, data: dict[str, Any], *, is_alone: bool) -> RankTrace:
    info = data.get("distributedInfo")
    info = cast(dict[str, object], info) if isinstance(info, dict) else {}
    rank, size = info.get("rank"), info.get("world_size")
    if rank is None:
        named = _RANK_IN_NAME.search(file.name)
        rank = int(named[1]) if named else 0 if is_alone else None
    if not is_int(rank) or not 0 <= rank < MAX_RANKS:
        told = "no rank" if rank is None else f"rank {shown(rank)}"
        raise ConfigError(
            f"{file} names {told}: its distributedInfo needs a rank from 0 to {MAX_RANKS - 1}, or "
            "its name one, as in rank3.json"
        )
    if size is not None and (not is_int(size) or not rank < size <= MAX_RANKS):
        raise ConfigError(f"{file}: rank {rank} of a world_size of {shown(size)}: damaged")
    try:
        events, num_left_out = events_of(data["traceEvents"])
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    return RankTrace(rank, size, events, num_left_out)


def _joined(first: RankTrace, second: RankTrace, *files: Path) -> RankTrace:
    """Two cycles of a profiler, of one rank."""
    one, two = first.events, second.events
    twice = np.intersect1d(one.numbers, two.numbers)
    if twice.size or one.numbered_by != two.numbered_by or one.on_device != two.on_device:
        told = f"both have step {twice[0]}" if twice.size else "they show steps in unlike ways"
        raise ConfigError(
            f"{files[0]} and {files[1]} are of rank {first.rank}, and {told}: keep the files of "
            "one run in the folder"
        )
    events = RankEvents.joined([one, two])
    return replace(first, events=events, num_left_out=first.num_left_out + second.num_left_out)


def _missing(traces: Sequence[RankTrace]) -> Iterable[str]:
    """What is said of ranks without a trace, and of events without a time."""
    sizes = {trace.world_size for trace in traces if trace.world_size is not None}
    if len(sizes) > 1:
        raise ConfigError(
            f"the traces are of worlds of {', '.join(map(str, sorted(sizes)))} ranks: keep the "
            "files of one run in the folder"
        )
    ranks = [trace.rank for trace in traces]
    missing = sorted(set(range(max(sizes, default=max(ranks) + 1))) - set(ranks))
    if missing:
        told = ", ".join(map(str, missing[:8])) + (" .." if len(missing) > 8 else "")
        yield (
            f"{len(missing)} of {len(missing) + len(ranks)} ranks have no trace ({told}): the "
            "slowest may be among them"
        )
    num = sum(trace.num_left_out for trace in traces)
    if num:
        yield f"{num} events have no usable time and were left out"
