"""Read steps, compute and collectives from the JSON of torch.profiler, one file per rank.

With a GPU, its kernels are compute or collectives. Without a GPU, operators are compute, and
events of gloo's threads are collectives.
"""

import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from bascule.arrays import Ints
from bascule.checks import MAX_RANKS, is_int, shown
from bascule.errors import ConfigError
from bascule.files import check_regular, parse_json
from bascule.marks import LengthMark, read_mark
from bascule.workload.traces.spans import Spans, minus, spans_of, union

NumberedBy = Literal["ProfilerStep", "bascule's train_step", "Optimizer.step"]

TRAIN_STEP = "bascule::a training step"
MAX_BYTES = 2**32  # of a trace, decompressed

_RANK_IN_NAME = re.compile(r"rank[-_. ]?([0-9]{1,6})(?![0-9])", re.IGNORECASE)
_STEP = re.compile(r"ProfilerStep\s*#\s*([0-9]{1,15})")
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_HOST_CALL = re.compile(
    r"(?:gloo|ucc|mpi):"
    # collectives of bascule made of messages; not those of a bag, whose ranks their names omit
    r"|bascule::(?:all_to_all|all_gather|all_reduce|reduce_scatter|barrier) \((?!tokens|heads)"
)
_DISPATCH = re.compile(r"(?:c10d|_c10d_functional|c10d_functional|fsdp|symm_mem|bascule)::")
_WRAPPER = re.compile(r"autograd::engine::|.*Backward[0-9]*$")
_COMPILED = "## Call CompiledFxGraph"
_ON_TRAINING_THREADS = {"wrapper", "step", "train step", "optimizer"}
_ENDINGS = (".json", ".json.gz", ".json.zst")
_MOST_US, _MOST_LASTING_US = 1e17, 1e12

Event = tuple[Any, float, float]  # a value that depends on the kind; start and end in seconds


@dataclass(frozen=True, slots=True, eq=False)
class RankTrace:
    """The steps of a rank, in seconds of its clock."""

    rank: int
    world_size: int | None  # ranks of the run, if the trace has it
    num_left_out: int  # events without a usable time
    numbered_by: NumberedBy  # the ranges that show the steps
    on_device: bool  # True if compute and collectives are those of a device
    numbers: Ints  # (S,) of the steps, ascending
    host: Spans  # (S, 2) when each step began and ended on the host
    windows: Spans  # (S, 2) when each step began and ended on the device, if there is one
    compute: Spans  # (n, 2)
    calls: Spans  # (c, 2) collectives, by their start
    call_keys: tuple[str, ...]  # (c,) equal on all ranks of a collective
    marks: tuple[tuple[float, LengthMark], ...]  # lengths, and the time of their mark on the host


def read_traces(path: str | Path) -> tuple[tuple[RankTrace, ...], tuple[str, ...]]:
    """Read a run's folder of ``*.json``, ``*.json.gz`` or ``*.json.zst`` files, or one such file.

    Files may be in subfolders. A rank may have several files of different steps, if ProfilerStep
    ranges mark these. The rank's number is in `distributedInfo`, or else follows "rank" in the name
    of the file or of its folder; a single file needs no number. Returns the ranks in order, and
    sentences that say what could not be used.
    """
    by_rank, notes, path = dict[int, list[RankTrace]](), list[str](), Path(path)
    for files in _files(path):
        for file in () if by_rank else files:
            data = _load(file)
            if data is None:
                notes.append(f"{shown(file.name)} has no traceEvents, so it was left out")
                continue
            named = _RANK_IN_NAME.search(file.name)
            if named is None and file.parent != path:
                named = _RANK_IN_NAME.search(file.parent.name)
            rank = int(named[1]) if named else 0 if len(files) == 1 else None
            try:
                trace = _rank_trace(data, rank)
            except ConfigError as error:
                raise ConfigError(f"{file}: {error}") from None
            by_rank.setdefault(trace.rank, []).append(trace)
    if not by_rank:
        wrong = f"{path} {'has no trace' if path.exists() else 'does not exist'}"
        fix = "give the folder with one .json, .json.gz or .json.zst file per rank"
        raise ConfigError(f"{wrong}: {fix}; docs/traces.md shows how to record them")
    traces = tuple(_join(by_rank[rank]) for rank in sorted(by_rank))
    return traces, (*notes, *_missing(traces))


def _files(path: Path) -> tuple[list[Path], ...]:
    """Return the files of a folder, and the files of folders within, for want of traces in it."""
    try:
        if not path.is_dir():
            return ([path] if path.exists() else [],)
        places = path.iterdir(), path.rglob("*/*")
        return tuple(
            sorted(file for file in files if file.name.endswith(_ENDINGS)) for files in places
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _open(file: Path) -> Any:
    if file.suffix == ".zst":
        import pyarrow as pa

        return pa.input_stream(str(file), compression="zstd")
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")


def _load(file: Path) -> dict[str, Any] | None:
    """Return the content of a file; None if it is not a trace."""
    try:
        check_regular(file)
        with _open(file) as stream:
            content = cast(bytes, stream.read(MAX_BYTES + 1))
    except (OSError, EOFError, ValueError, zlib.error, MemoryError) as error:
        raise ConfigError(f"cannot read {file}: {error or 'too large for the memory'}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{file} has more than {MAX_BYTES} bytes: profile fewer steps")
    match parse_json(content.decode("utf-8", "replace"), str(file)):
        case {"traceEvents": list()} as data:
            return cast(dict[str, Any], data)
        case list() as events:  # the format allows events alone
            return {"traceEvents": events}
        case _:
            return None


def _rank_trace(data: dict[str, Any], rank: object) -> RankTrace:
    """Parse the content of a file; `rank` is for one without a rank in its `distributedInfo`."""
    info = data.get("distributedInfo")
    info = cast(dict[str, object], info) if isinstance(info, dict) else {}
    rank, size = info.get("rank", rank), info.get("world_size")
    if not is_int(rank) or not 0 <= rank < MAX_RANKS:
        wrong = f"names {'no rank' if rank is None else f'rank {shown(rank)}'}"
        raise ConfigError(
            f"{wrong}: its distributedInfo needs a rank, or its file a name as rank3.json"
        )
    if size is not None and (not is_int(size) or not rank < size <= MAX_RANKS):
        raise ConfigError(f"damaged: rank {rank} of world_size {shown(size)}; profile again")
    events, threads, num_left_out = _sorted(data["traceEvents"])
    numbered_by, numbers, host = _steps(events)
    on_device, windows = bool(events["kernel"] or events["device call"]), host
    if on_device:
        compute, calls = union(_spans(events["kernel"])), events["device call"]
        if numbered_by == "ProfilerStep":
            windows = _device_windows(events["device step"], numbers, host)
    else:
        # Operators that only dispatch do not count, nor those of threads of loaders or collectives,
        # for which a step does not wait.
        operators, dispatches = (
            union(_spans([event for event in events[kind] if event[0] in threads]))
            for kind in ("operator", "dispatch")
        )
        compute, calls = minus(operators, dispatches), events["host call"]
    calls = sorted(calls, key=lambda call: call[1:])
    return RankTrace(
        rank=rank,
        world_size=size,
        num_left_out=num_left_out,
        numbered_by=numbered_by,
        on_device=on_device,
        numbers=numbers,
        host=host,
        windows=windows,
        compute=compute,
        calls=_spans(calls),
        call_keys=tuple(call[0] for call in calls),
        marks=tuple((start, mark) for mark, start, _ in events["mark"]),
    )


def _sorted(events: Iterable[Any]) -> tuple[dict[str, list[Event]], set[object], int]:
    """Sort events by kind; return also the threads that train, and the number without a time."""
    kinds: dict[str, list[Event]] = defaultdict(list)
    threads, num_left_out = set[object](), 0
    for event in events:
        match event:
            case {"ph": "X", "cat": str(category), "name": str(name)}:
                start, lasting, thread = event.get("ts"), event.get("dur"), event.get("tid")
            case _:
                continue
        is_timed = {type(start), type(lasting)} <= {int, float} and isinstance(thread, int | str)
        if not (is_timed and abs(start) < _MOST_US and 0 <= lasting < _MOST_LASTING_US):
            num_left_out += 1
            continue
        kind, what = _kind_of(category, name, thread, event.get("args"))
        kinds[kind].append((what, start * 1e-6, (start + lasting) * 1e-6))
        if kind in _ON_TRAINING_THREADS:
            threads.add(thread)
    return kinds, threads, num_left_out


def _kind_of(category: str, name: str, thread: object, args: object) -> tuple[str, Any]:
    """Return the kind of an event and its value: a name, step number, thread or mark."""
    step = _STEP.fullmatch(name)
    if category in _DEVICE:
        is_call = category == "kernel" and "nccl" in name.lower()
        return ("device call", _key_of(name, args)) if is_call else ("kernel", name)
    if _HOST_CALL.match(name):
        return "host call", name
    if category == "cpu_op":
        if _DISPATCH.match(name):
            return "dispatch", thread
        return "wrapper" if _WRAPPER.match(name) else "operator", thread
    if category == "gpu_user_annotation" and step:
        return "device step", int(step[1])
    if category == "user_annotation":
        if step:
            return "step", int(step[1])
        if name == TRAIN_STEP:
            return "train step", name
        if name.startswith("Optimizer.step#"):
            return "optimizer", name
        if name.startswith(_COMPILED):
            return "operator", thread
        if mark := read_mark(name):
            return "mark", mark
    return "other", name


def _key_of(name: str, args: object) -> str:
    """Identify a collective of NCCL by its name, and its group if the trace has it."""
    facts = cast(dict[str, object], args) if isinstance(args, dict) else {}
    group = (facts.get(key) for key in ("Process Group Name", "Process Group Ranks"))
    what = facts.get("Collective name")
    parts = [what if isinstance(what, str) and what else name.partition("(")[0]]
    return "|".join([*parts, *(str(value) for value in group if isinstance(value, str | list))])


def _spans(events: Sequence[Event]) -> Spans:
    return spans_of([event[1] for event in events], [event[2] for event in events])


def _steps(events: dict[str, list[Event]]) -> tuple[NumberedBy, Ints, Spans]:
    """Return which ranges show the steps, and the steps' numbers and times."""
    names = {event[0] for event in events["optimizer"]}
    if steps := sorted(events["step"], key=lambda event: event[0]):
        numbers = np.array([event[0] for event in steps], np.int64)
        if (twice := numbers[1:][np.diff(numbers) == 0]).size:
            raise ConfigError(f"has step {twice[0]} twice: profile one run per file")
        return "ProfilerStep", numbers, _extend_to_next(numbers, _spans(steps))
    numbered_by: NumberedBy = "bascule's train_step"
    spans = _spans(sorted(events["train step"], key=lambda event: event[1]))
    if not len(spans) and len(names) == 1 and len(events["optimizer"]) > 1:
        ends = np.sort([event[2] for event in events["optimizer"]])
        numbered_by, spans = "Optimizer.step", spans_of(ends[:-1], ends[1:])
    if not len(spans):
        wrong = "it does not show where steps begin: profile with a schedule"
        raise ConfigError(f"{wrong}, and call profiler.step() after each step")
    numbers = np.arange(len(spans), dtype=np.int64)
    return numbered_by, numbers, _extend_to_next(numbers, spans)


def _device_windows(events: Sequence[Event], numbers: Ints, host: Spans) -> Spans:
    """Return the times of steps on the device, or on the host if the range of a step is missing."""
    starts, ends = dict[int, float](), dict[int, float]()
    for number, start, end in events:
        starts[number] = min(start, starts.get(number, start))
        ends[number] = max(end, ends.get(number, end))
    steps = numbers.tolist()
    if not starts.keys() >= set(steps):
        return host
    windows = spans_of([starts[step] for step in steps], [ends[step] for step in steps])
    # The last step has no next step that bounds it: it lasts at least as long as on the host.
    windows[:, 1] = np.maximum(windows[:, 1], windows[:, 0] + (host[:, 1] - host[:, 0]))
    return _extend_to_next(numbers, windows)


def _extend_to_next(numbers: Ints, windows: Spans) -> Spans:
    """Let each step last until the next step begins, if that was recorded too."""
    starts, ends = windows.T
    if (np.diff(starts) < 0).any():
        raise ConfigError("its steps are not in order of their numbers: profile one run per file")
    follows = np.append(np.diff(numbers) == 1, False)
    return spans_of(starts, np.where(follows, np.roll(starts, -1), ends))


def _join(cycles: Sequence[RankTrace]) -> RankTrace:
    """Join the files of a rank, one for each cycle of its profiler."""
    cycles = sorted(cycles, key=lambda cycle: cycle.numbers[0])
    first, kinds = cycles[0], {(cycle.numbered_by, cycle.on_device) for cycle in cycles}
    numbers, host, windows, compute, calls = (
        np.concatenate([getattr(cycle, name) for cycle in cycles])
        for name in ("numbers", "host", "windows", "compute", "calls")
    )
    if len(kinds) > 1 or (np.diff(numbers) <= 0).any() or (np.diff(host[:, 0]) < 0).any():
        wrong = f"files of rank {first.rank} have the same steps, or mark steps in different ways"
        raise ConfigError(f"{wrong}: keep the files of one run in the folder")
    return replace(
        first,
        num_left_out=sum(cycle.num_left_out for cycle in cycles),
        numbers=numbers,
        host=host,
        windows=windows,
        compute=union(compute),
        calls=calls,
        call_keys=tuple(chain.from_iterable(cycle.call_keys for cycle in cycles)),
        marks=tuple(chain.from_iterable(cycle.marks for cycle in cycles)),
    )


def _missing(traces: Sequence[RankTrace]) -> Iterator[str]:
    """Yield sentences on ranks without a trace, and on events that were left out."""
    sizes = {trace.world_size for trace in traces if trace.world_size is not None}
    if len(sizes) > 1:
        worlds = ", ".join(map(str, sorted(sizes)))
        raise ConfigError(f"the traces have world sizes {worlds}: keep the files of one run")
    ranks = {trace.rank for trace in traces}
    if missing := sorted(set(range(max(sizes, default=max(ranks) + 1))) - ranks):
        named = ", ".join(map(str, missing[:8])) + (" .." if len(missing) > 8 else "")
        have = f"{'has' if len(missing) == 1 else 'have'} no trace ({named})"
        num_ranks = len(missing) + len(ranks)
        yield f"{len(missing)} of {num_ranks} ranks {have}: the slowest may be among them"
    if num := sum(trace.num_left_out for trace in traces):
        have, were = ("event has", "was") if num == 1 else ("events have", "were")
        yield f"{num} {have} no usable time and {were} left out"
