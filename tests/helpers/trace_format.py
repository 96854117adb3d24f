"""The Trace Event Format, as its document says what viewers such as Perfetto take.

Written from "Trace Event Format" (Google, 2016): the JSON object format, and the phases that traces
of training hold: complete (X), duration (B, E), instant (i), flow (s, t, f), counter (C) and
metadata (M) events. Stricter where a viewer would draw something else than what happened: slices of
a thread nest, flows begin and end in a slice, whatever has slices has a name.
"""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

_PHASES = set("XBEistfCMI")
_METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
_NANOSECOND = 1.001e-3  # of the microseconds that times are in


def check_format(path: Path, *, is_ours: bool) -> dict[str, int]:
    """Assert that a file obeys the format; gives how many events it has, by phase.

    Args:
        path: Of the file.
        is_ours: Whether numbers must be whole and times in order, too: torch names some processes
            by text, and writes what it has as it comes.
    """
    trace: Any = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    assert isinstance(trace, dict) and isinstance(trace["traceEvents"], list)
    assert trace.get("displayTimeUnit", "ms") in ("ms", "ns")
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        _check_fields(event, is_ours)
    if is_ours:
        times = [event["ts"] for event in events if event["ph"] != "M"]
        assert times == sorted(times) and min(times) >= 0
    slices = _slices(events)
    for rows in slices.values():
        _check_nested(rows)
    _check_flows(events, slices)
    if is_ours:
        _check_names(events, slices)
    counts: dict[str, int] = defaultdict(int)
    for event in events:
        counts[event["ph"]] += 1
    return dict(counts)


def _no_constant(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_fields(event: dict[str, Any], is_ours: bool) -> None:
    phase = event["ph"]
    assert phase in _PHASES, event
    assert isinstance(event["name"], str), event
    kinds = (int,) if is_ours else (int, str)
    per_process = phase == "M" and event["name"].startswith("process_")
    for name in ("pid",) if per_process else ("pid", "tid"):
        assert isinstance(event[name], kinds) and not isinstance(event[name], bool), event
    assert isinstance(event.get("args", {}), dict), event
    assert isinstance(event.get("cat", ""), str), event
    if phase == "M":
        if event["name"] in _METADATA:
            key, kind = _METADATA[event["name"]]
            assert isinstance(event["args"][key], kind), event
        return
    assert _is_number(event["ts"]), event
    if phase == "X":
        assert _is_number(event["dur"]) and event["dur"] >= 0, event
        assert event.get("cat"), event
    elif phase in "iI":
        assert event.get("s", "t") in ("g", "p", "t"), event
    elif phase in "stf":
        assert isinstance(event["id"], int | str) and event.get("cat"), event
        assert event.get("bp", "e") == "e", event
    elif phase == "C":
        assert all(map(_is_number, event["args"].values())), event


Thread = tuple[Any, Any]


def _slices(events: list[dict[str, Any]]) -> dict[Thread, list[tuple[float, float]]]:
    """(begin, end) of every slice of each thread; B and E pair up."""
    found: dict[Thread, list[tuple[float, float]]] = defaultdict(list)
    is_open: dict[Thread, list[float]] = defaultdict(list)
    for event in events:
        thread = event["pid"], event.get("tid")
        if event["ph"] == "X":
            found[thread].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "B":
            is_open[thread].append(event["ts"])
        elif event["ph"] == "E":
            assert is_open[thread], f"an end without a begin: {event}"
            found[thread].append((is_open[thread].pop(), event["ts"]))
    assert not any(is_open.values()), "a begin without an end"
    return found


def _check_nested(rows: list[tuple[float, float]]) -> None:
    """No slice of a thread ends within another one that began within it."""
    stack: list[float] = []
    for begin, end in sorted(rows, key=lambda row: (row[0], -row[1])):
        while stack and stack[-1] <= begin + _NANOSECOND:
            stack.pop()
        assert not stack or end <= stack[-1] + _NANOSECOND, f"{begin} to {end} is cut off"
        stack.append(end)


def _check_flows(
    events: list[dict[str, Any]], slices: dict[Thread, list[tuple[float, float]]]
) -> None:
    """Each arrow begins once and ends later, both in a slice of their thread."""
    begins: dict[tuple[str, Any], float] = {}
    for event in events:
        if event["ph"] not in ("s", "t", "f"):
            continue
        rows, time = slices[event["pid"], event["tid"]], event["ts"]
        assert any(a - _NANOSECOND <= time <= b + _NANOSECOND for a, b in rows), event
        if event["ph"] == "s":
            assert (event["cat"], event["id"]) not in begins, f"begins twice: {event}"
            begins[event["cat"], event["id"]] = time
    for event in events:
        if event["ph"] in ("t", "f"):
            assert begins[event["cat"], event["id"]] <= event["ts"] + _NANOSECOND, event


def _check_names(
    events: list[dict[str, Any]], slices: dict[Thread, list[tuple[float, float]]]
) -> None:
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {pid for pid, _ in slices} <= processes, "a process without a name"
    assert slices.keys() <= threads, f"threads without names: {slices.keys() - threads}"
