"""The Trace Event Format, as viewers such as Perfetto read it.

Written from "Trace Event Format" (Google, 2016): the JSON object format, with complete (X), instant
(i), flow (s, t, f) and metadata (M) events. Stricter where a viewer would draw something else than
what happened: slices of a thread nest, flows begin and end in a slice, what has slices has a name.
"""

import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Slices = dict[Any, list[tuple[float, float]]]
_NANOSECOND = 1.001e-3  # of the microseconds that times are in


def check_format(path: Path, *, is_ours: bool) -> dict[str, int]:
    """Assert that a file obeys the format; return how many events it has, by phase.

    Ours have whole numbers of processes and threads, times in order, and names: torch names some
    processes by text, and writes events in any order.
    """

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    trace: Any = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    events: list[Event] = trace["traceEvents"]
    assert trace.get("displayTimeUnit", "ms") in ("ms", "ns")
    slices: Slices = defaultdict(list)
    for event in events:
        _check_fields(event, is_ours)
        if event["ph"] == "X":
            row = event["ts"], event["ts"] + event["dur"]
            slices[event["pid"], event["tid"]].append(row)
    for rows in slices.values():
        _check_nested(rows)
    _check_flows([event for event in events if event["ph"] in "stf"], slices)
    if is_ours:
        times = [event["ts"] for event in events if event["ph"] != "M"]
        assert times == sorted(times) and min(times) >= 0
        processes = {event["pid"] for event in events if event["name"] == "process_name"}
        threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
        assert {pid for pid, _ in slices} <= processes and slices.keys() <= threads
    return dict(Counter(event["ph"] for event in events))


def _check_fields(event: Event, is_ours: bool) -> None:
    def is_a(value: object, *kinds: type) -> bool:
        is_finite = not isinstance(value, float) or math.isfinite(value)
        return isinstance(value, kinds) and not isinstance(value, bool) and is_finite

    phase = event["ph"]
    assert phase in "XistfM" and is_a(event["name"], str), event
    for name in ("pid",) if event["name"].startswith("process_") else ("pid", "tid"):
        assert is_a(event[name], int) or (is_a(event[name], str) and not is_ours), event
    assert is_a(event.get("args", {}), dict) and ("args" in event or phase != "M"), event
    if phase != "M":
        assert is_a(event["ts"], int, float) and is_a(event.get("cat", ""), str), event
    if phase == "X":
        assert is_a(event["dur"], int, float) and event["dur"] >= 0 and event["cat"], event
    elif phase in "stf":
        assert is_a(event["id"], int, str) and event["cat"], event


def _check_nested(rows: list[tuple[float, float]]) -> None:
    """No slice of a thread ends within another one that began within it."""
    stack: list[float] = []
    for begin, end in sorted(rows, key=lambda row: (row[0], -row[1])):
        while stack and stack[-1] <= begin + _NANOSECOND:
            stack.pop()
        assert not stack or end <= stack[-1] + _NANOSECOND, f"{begin} to {end} is cut off"
        stack.append(end)


def _check_flows(flows: list[Event], slices: Slices) -> None:
    """Each arrow begins once and ends later, both in a slice of their thread."""
    begins = {(e["cat"], e["id"]): e["ts"] for e in flows if e["ph"] == "s"}
    assert len(begins) == sum(event["ph"] == "s" for event in flows), "a flow begins twice"
    for event in flows:
        rows, time = slices[event["pid"], event["tid"]], event["ts"]
        assert any(a - _NANOSECOND <= time <= b + _NANOSECOND for a, b in rows), event
        assert begins[event["cat"], event["id"]] <= time + _NANOSECOND, event
