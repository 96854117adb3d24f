"""What matters of the events of one trace: steps, compute, collectives, lengths."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeGuard, cast

import numpy as np

from bascule.arrays import Ints
from bascule.errors import ConfigError
from bascule.plan.loaded.length_marks import LengthMark, read_mark
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
