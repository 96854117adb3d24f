"""The traces of a run's ranks, read from the JSON that torch.profiler writes: one file a rank.

Of a rank with kernels of a device, these are its compute and its collectives. Of one without, its
operators are compute, and the events of gloo's threads are collectives.
"""

import gzip
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeGuard, cast

import numpy as np

from bascule.arrays import Ints
from bascule.errors import ConfigError
from bascule.plan.checks import MAX_RANKS, is_int, shown
from bascule.plan.files import check_regular, parse_json, to_path
from bascule.plan.marks import LengthMark, read_mark
from bascule.workload.traces.spans import Spans, minus, spans_of, union

NumberedBy = Literal["ProfilerStep", "bascule's train_step", "Optimizer.step"]

TRAIN_STEP = "bascule::a training step"

_STEP = re.compile(r"ProfilerStep\s*#\s*([0-9]{1,15})")
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_HOST_CALL = re.compile(
    r"(?:gloo|ucc|mpi):"
    # bascule's own, which are messages to gloo; not those of a bag, whose ranks no name tells.
    r"|bascule::(?:all_to_all|all_gather|all_reduce|reduce_scatter|barrier) \((?!tokens|heads)"
)
_DISPATCH = re.compile(r"(?:c10d|_c10d_functional|c10d_functional|fsdp|symm_mem|bascule)::")
_WRAPPER = re.compile(r"autograd::engine::|.*Backward[0-9]*$")
_COMPILED = "## Call CompiledFxGraph"
_MOST_US = 1e17
_MOST_LASTING_US = 1e12

Event = tuple[str, float, float]
"""Name, start and end in seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class RankEvents:
    """One rank's part of a trace. Times are seconds of its own clock.

    Attributes:
        numbered_by: What shows where steps begin and end.
        on_device: Whether compute and collectives are those of a device.
        numbers: (S,) of the steps, ascending.
        host: (S, 2) when each began and ended on the host.
        windows: (S, 2) the same where compute and collectives are: on the device or the host.
        compute: (n, 2) union of what it computed.
        calls: (c, 2) its collectives, by their start.
        call_keys: (c,) what each is: those of other ranks with the same key are the same calls.
        marks: Lengths, and when they were said, on the host.
    """

    numbered_by: NumberedBy
    on_device: bool
    numbers: Ints
    host: Spans
    windows: Spans
    compute: Spans
    calls: Spans
    call_keys: tuple[str, ...]
    marks: tuple[tuple[float, LengthMark], ...]

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Those of two cycles of a profiler, with other steps each."""
        host = np.concatenate([part.host for part in parts])
        order = np.argsort(np.concatenate([part.numbers for part in parts]), kind="stable")
        calls = np.concatenate([part.calls for part in parts])
        keys = [key for part in parts for key in part.call_keys]
        by_start = np.argsort(calls[:, 0], kind="stable")
        return cls(
            parts[0].numbered_by,
            parts[0].on_device,
            np.concatenate([part.numbers for part in parts])[order],
            host[order],
            np.concatenate([part.windows for part in parts])[order],
            union(np.concatenate([part.compute for part in parts])),
            calls[by_start],
            tuple(keys[place] for place in by_start),
            tuple(mark for part in parts for mark in part.marks),
        )


@dataclass(slots=True)
class _Found:
    """Events by what they are; spans in seconds."""

    steps: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])
    device_steps: dict[int, tuple[float, float]] = field(
        default_factory=dict[int, tuple[float, float]]
    )
    trains: list[Event] = field(default_factory=list[Event])
    optimizers: list[Event] = field(default_factory=list[Event])
    kernels: list[Event] = field(default_factory=list[Event])
    device_calls: list[Event] = field(default_factory=list[Event])
    host_calls: list[Event] = field(default_factory=list[Event])
    operators: list[tuple[object, float, float]] = field(
        default_factory=list[tuple[object, float, float]]
    )
    dispatches: list[tuple[object, float, float]] = field(
        default_factory=list[tuple[object, float, float]]
    )
    threads: set[object] = field(default_factory=set[object])
    marks: list[tuple[float, LengthMark]] = field(default_factory=list[tuple[float, LengthMark]])

    def add(self, category: str, name: str, thread: object, span: Event, args: object) -> None:
        """Sort in one event."""
        if category in _DEVICE:
            is_call = category == "kernel" and "nccl" in name.lower()
            if is_call:
                self.device_calls.append((_key_of(name, args), *span[1:]))
            else:
                self.kernels.append(span)
        elif _HOST_CALL.match(name):
            self.host_calls.append(span)
        elif category == "cpu_op":
            self._add_operator(name, thread, span)
        elif category == "user_annotation":
            self._add_range(name, thread, span)
        elif category == "gpu_user_annotation" and (step := _STEP.fullmatch(name)):
            _, start, end = span
            known = self.device_steps.get(int(step[1]), (start, end))
            self.device_steps[int(step[1])] = min(known[0], start), max(known[1], end)

    def _add_operator(self, name: str, thread: object, span: Event) -> None:
        if _DISPATCH.match(name):
            self.dispatches.append((thread, *span[1:]))
        elif _WRAPPER.match(name):
            self.threads.add(thread)
        else:
            self.operators.append((thread, *span[1:]))

    def _add_range(self, name: str, thread: object, span: Event) -> None:
        if step := _STEP.fullmatch(name):
            if int(step[1]) in self.steps:
                raise ConfigError(f"step {int(step[1])} is in it twice: it is of several runs")
            self.steps[int(step[1])] = span[1:]
            self.threads.add(thread)
        elif name == TRAIN_STEP:
            self.trains.append(span)
            self.threads.add(thread)
        elif name.startswith("Optimizer.step#"):
            self.optimizers.append(span)
            self.threads.add(thread)
        elif name.startswith(_COMPILED):
            self.operators.append((thread, *span[1:]))
        elif mark := read_mark(name):
            self.marks.append((span[1], mark))


def events_of(events: Iterable[object]) -> tuple[RankEvents, int]:
    """Sort the events of a trace.

    Args:
        events: As in `traceEvents`; what is not of the format is passed over.

    Returns:
        The events, and how many of them had no usable time.

    Raises:
        ConfigError: They do not show steps.
    """
    found, num_left_out = _Found(), 0
    for event in events:
        if not isinstance(event, dict):
            continue
        event = cast(dict[str, Any], event)
        category, name, thread = event.get("cat"), event.get("name"), event.get("tid")
        if event.get("ph") != "X" or not isinstance(category, str) or not isinstance(name, str):
            continue
        start, lasting = event.get("ts"), event.get("dur")
        if (
            _is_number(start)
            and _is_number(lasting)
            and isinstance(thread, int | str)
            and -_MOST_US < start < _MOST_US
            and 0 <= lasting < _MOST_LASTING_US
        ):
            span = name, start * 1e-6, (start + lasting) * 1e-6
            found.add(category, name, thread, span, event.get("args"))
        else:
            num_left_out += 1
    return _sorted(found), num_left_out


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) is float or type(value) is int


def _sorted(found: _Found) -> RankEvents:
    numbered_by, numbers, host = _steps(found)
    on_device = bool(found.kernels or found.device_calls)
    windows = host
    if on_device:
        compute, calls = union(_spans(found.kernels)), found.device_calls
        if numbered_by == "ProfilerStep" and set(found.device_steps) >= set(found.steps):
            # Of a last step only the last kernel is known; it takes the host as long in all.
            spans = [found.device_steps[n] for n in numbers.tolist()]
            lasting = (host[:, 1] - host[:, 0]).tolist()
            spans = [(a, max(b, a + s)) for (a, b), s in zip(spans, lasting, strict=True)]
            windows = _until_the_next(numbers, spans)
    else:
        compute, calls = _host_compute(found), found.host_calls
    calls = sorted(calls, key=lambda call: call[1:])
    return RankEvents(
        numbered_by,
        on_device,
        numbers,
        host,
        windows,
        compute,
        _spans(calls),
        tuple(call[0] for call in calls),
        tuple(found.marks),
    )


def _spans(events: Sequence[tuple[Any, float, float]]) -> Spans:
    return spans_of([event[1] for event in events], [event[2] for event in events])


def _host_compute(found: _Found) -> Spans:
    """Operators of the threads that train, without those that only hand work to others.

    What a loader's or a collective's thread does is not what the step waits for.
    """
    operators, dispatches = (
        _spans([one for one in events if one[0] in found.threads])
        for events in (found.operators, found.dispatches)
    )
    return minus(union(operators), union(dispatches))


def _steps(found: _Found) -> tuple[NumberedBy, Ints, Spans]:
    """What shows the steps, their numbers, and when they were."""
    if found.steps:
        numbers = np.array(sorted(found.steps), np.int64)
        return "ProfilerStep", numbers, _until_the_next(numbers, [found.steps[n] for n in numbers])
    if found.trains:
        spans = [span[1:] for span in sorted(found.trains, key=lambda span: span[1])]
        numbers = np.arange(len(spans), dtype=np.int64)
        return "bascule's train_step", numbers, _until_the_next(numbers, spans)
    if len({span[0] for span in found.optimizers}) == 1 and len(found.optimizers) > 1:
        ends = np.sort([span[2] for span in found.optimizers])
        return (
            "Optimizer.step",
            np.arange(ends.size - 1, dtype=np.int64),
            spans_of(ends[:-1], ends[1:]),
        )
    raise ConfigError(
        "it does not show where steps begin: profile with a schedule, and call profiler.step() "
        "after each step, so that it has ProfilerStep ranges"
    )


def _until_the_next(numbers: Ints, spans: Sequence[tuple[float, float]]) -> Spans:
    """Each step lasts until the next one begins, if that was recorded too."""
    windows = np.array(spans, np.float64).reshape(-1, 2)
    follows = np.diff(numbers) == 1
    ends = np.where(follows, windows[1:, 0], windows[:-1, 1])
    windows[:-1, 1] = ends
    if (np.diff(windows[:, 0]) < 0).any():
        raise ConfigError("its steps do not follow each other in the order of their numbers")
    return windows


def _key_of(name: str, args: object) -> str:
    """What a collective of NCCL is: its name, and the group if the trace says so."""
    known = cast(dict[str, object], args) if isinstance(args, dict) else {}
    fields = (known.get(key) for key in ("Process Group Name", "Process Group Ranks"))
    what = known.get("Collective name")
    parts = [what if isinstance(what, str) and what else name.partition("(")[0]]
    return "|".join([*parts, *(str(value) for value in fields if isinstance(value, str | list))])


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
