"""Divide each step of each rank into compute, communication, waiting and other time.

**Compute** is time in kernels that are not collectives (without a GPU, in operators). Collectives
count while no compute hides them: **waiting** until the last rank begins, then **communication**.
The **rest** is launches, Python and data. A rank's *own* time is its step without the waiting.

A collective ends on all ranks at once, so clocks are aligned by the median difference of ends. The
k-th calls with the same name and group in a step are one collective. Shapes: S steps, R ranks.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.checks import shown
from bascule.errors import ConfigError
from bascule.marks import LengthMark
from bascule.plan import metrics
from bascule.workload.traces.reading import RankTrace
from bascule.workload.traces.spans import Spans, minus, seconds_within, union, within
from bascule.workload.traces.writing import Kind, Segment

_ROUNDING = 1e-9  # share of a step below which a difference is zero
_ONE_SIDED = re.compile(r"broadcast|reduce(?!_?scatter)|scatter|gather|send|recv", re.IGNORECASE)
_ALL_SIDED = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier", re.I)
_TWO_RANKS = re.compile(r"(?:gloo:|nccl:)?(?:send|recv)", re.IGNORECASE)

Call = tuple[int, float, float]  # index of the rank, begin and end of a collective on its clock
Meeting = tuple[str, tuple[Call, ...]]  # the key of a collective, and its calls by rank


@dataclass(frozen=True, slots=True, eq=False)
class RankSpans:
    """Spans of a rank, on the clock that all ranks share."""

    windows: Spans  # (S, 2) of the common steps
    compute: Spans  # (n, 2)
    calls: Spans  # (c, 2)
    call_keys: tuple[str, ...]
    waiting: Spans  # parts of calls before the last rank began


@dataclass(frozen=True, eq=False)
class StepParts:
    """The time of each step that all ranks have, divided into parts."""

    ranks: Ints  # (R,) numbers of ranks
    steps: Ints  # (S,) numbers of steps
    seconds: Floats  # (S, R) of each step
    compute: Floats  # (S, R) seconds of compute
    communication: Floats  # (S, R) seconds in collectives that no compute hides, without waiting
    waiting: Floats  # (S, R) seconds in which the rank waited for others
    hidden: Floats  # (S, R) seconds in collectives behind compute; within `compute`
    spans: tuple[RankSpans, ...]  # (R,) of these parts
    on_device: bool  # True if compute and collectives are those of a device
    numbered_by: str  # the ranges that show the steps
    notes: tuple[str, ...]  # sentences on calls and files that could not be used
    num_missing: int = 0  # ranks of the run without a trace

    @property
    def rest(self) -> Floats:
        """(S, R) seconds of a step that belong to no other part."""
        left = self.seconds - self.compute - self.communication - self.waiting
        return np.where(left > _ROUNDING * self.seconds, left, 0.0)

    @property
    def missing(self) -> str:
        """The number of ranks without a trace, in words."""
        verb = "rank has" if self.num_missing == 1 else "ranks have"
        return f"{self.num_missing} {verb} no trace"

    @property
    def own(self) -> Floats:
        """(S, R) seconds of a step without waiting for other ranks."""
        return self.seconds - self.waiting

    @property
    def step_seconds(self) -> Floats:
        """(S,) seconds of each step, averaged over the ranks."""
        return self.seconds.mean(axis=1)

    @property
    def waited(self) -> float | None:
        """Share of the time that ranks waited; None if a rank has no trace."""
        if self.num_missing:
            return None
        return float(self.waiting.sum() / max(float(self.seconds.sum()), 1e-30))

    @property
    def imbalance(self) -> float | None:
        """Largest compute over mean of ranks, averaged over steps; None if a trace is missing."""
        if self.num_missing:
            return None
        return float(np.mean([metrics.imbalance(loads) for loads in self.compute]))

    @cached_property
    def slowest(self) -> Ints:
        """(S,) number of the rank with the most own time in each step."""
        return self.ranks[self.own.argmax(axis=1)]

    @property
    def slowest_rank(self) -> int:
        """Number of the rank with the most own time over all steps."""
        return int(self.ranks[self.own.sum(axis=0).argmax()])


def step_parts(traces: Sequence[RankTrace], notes: Sequence[str] = ()) -> StepParts:
    """Divide the steps that all ranks have into parts; append to the notes. O(n log n)."""
    steps = _common_steps(traces)
    windows = [trace.windows[np.searchsorted(trace.numbers, steps)] for trace in traces]
    meetings, unmatched = _meetings(traces, windows)
    ahead = _clocks(meetings, len(traces))
    waits: list[list[tuple[float, float]]] = [[] for _ in traces]
    for _, calls in meetings:
        last = max(begin - ahead[rank] for rank, begin, _ in calls)
        for rank, begin, end in calls:
            waits[rank].append((begin - ahead[rank], min(last, end - ahead[rank])))
    spans = tuple(
        RankSpans(
            windows=windows[rank] - ahead[rank],
            compute=trace.compute - ahead[rank],
            calls=trace.calls - ahead[rank],
            call_keys=trace.call_keys,
            waiting=union(np.array(waits[rank]).reshape(-1, 2)),
        )
        for rank, trace in enumerate(traces)
    )
    compute, exposed, waiting, hidden = (
        np.stack(part, axis=1) for part in zip(*map(_divide, spans), strict=True)
    )
    return StepParts(
        ranks=np.array([trace.rank for trace in traces], np.int64),
        steps=steps,
        seconds=np.stack([span.windows[:, 1] - span.windows[:, 0] for span in spans], axis=1),
        compute=compute,
        communication=np.maximum(exposed - waiting, 0.0),
        waiting=waiting,
        hidden=hidden,
        spans=spans,
        on_device=traces[0].on_device,
        numbered_by=traces[0].numbered_by,
        notes=(*notes, *unmatched),
        num_missing=max(max(x.world_size or 0, x.rank + 1) for x in traces) - len(traces),
    )


def _divide(spans: RankSpans) -> tuple[Floats, Floats, Floats, Floats]:
    """Return (S,) seconds of compute, of exposed collectives, of waiting, of hidden collectives."""
    compute, called, either, waits = (
        seconds_within(union(np.concatenate(parts)), spans.windows)
        for parts in (
            [spans.compute],
            [spans.calls],
            [spans.compute, spans.calls],
            [spans.compute, spans.waiting],
        )
    )
    exposed, waiting = np.maximum(either - compute, 0.0), np.maximum(waits - compute, 0.0)
    hidden = called - exposed
    seconds = spans.windows[:, 1] - spans.windows[:, 0]
    hidden = np.where(hidden > _ROUNDING * seconds, hidden, 0.0)
    return compute, exposed, waiting, hidden


def _common_steps(traces: Sequence[RankTrace]) -> Ints:
    first, steps = traces[0], traces[0].numbers
    for trace in traces[1:]:
        if _kind_of(first) != _kind_of(trace):
            wrong = f"rank {first.rank} marks steps by {_kind_of(first)}, rank {trace.rank} by"
            raise ConfigError(f"{wrong} {_kind_of(trace)}: profile all with the same activities")
        if first.numbered_by != "ProfilerStep" and first.numbers.size != trace.numbers.size:
            sizes = f"{first.numbers.size} steps, rank {trace.rank} {trace.numbers.size}"
            wrong = f"rank {first.rank} has {sizes}, and {first.numbered_by} does not number them"
            raise ConfigError(f"{wrong}: call profiler.step() after each step")
        steps = np.intersect1d(steps, trace.numbers)
    if not steps.size:
        raise ConfigError("the ranks' traces have no common step: profile the same steps on each")
    return steps


def _kind_of(trace: RankTrace) -> str:
    kernels = " with" if trace.on_device else ", without"
    return f"{trace.numbered_by}{kernels} kernels of a device"


def _meetings(
    traces: Sequence[RankTrace], windows: Sequence[Spans]
) -> tuple[list[Meeting], list[str]]:
    """Return the collectives of common steps, and sentences on calls that do not match."""
    calls: dict[tuple[int, str], dict[int, list[Call]]] = {}
    for rank, (trace, spans) in enumerate(zip(traces, windows, strict=True)):
        steps = np.searchsorted(spans[:, 0], trace.calls[:, 0], "right") - 1
        is_inside = (steps >= 0) & (trace.calls[:, 0] < spans[steps, 1])
        rows = zip(trace.call_keys, trace.calls.tolist(), steps.tolist(), is_inside, strict=True)
        for key, (begin, end), step, inside in rows:
            if inside and not _TWO_RANKS.match(key):
                calls.setdefault((step, key), {}).setdefault(rank, []).append((rank, begin, end))
    meetings, uneven = list[Meeting](), set[str]()
    for (_, key), by_rank in calls.items():
        if len(set(map(len, by_rank.values()))) > 1:
            uneven.add(key)
        else:
            meetings += [(key, group) for group in zip(*by_rank.values(), strict=True)]
    return meetings, [
        f"ranks made unlike numbers of calls of {shown(key.partition('|')[0])} in a step: waiting "
        "in these counts as communication"
        for key in sorted(uneven)[:3]
    ]


def _clocks(meetings: Sequence[Meeting], num_ranks: int) -> list[float]:
    """Return (R,) seconds that each clock is ahead of the first rank it is aligned with."""
    # The root of a broadcast may end before the others: it counts where there is nothing else.
    sure = [
        meeting
        for meeting in meetings
        if _ALL_SIDED.search(meeting[0]) or not _ONE_SIDED.search(meeting[0])
    ]
    ahead: dict[int, float] = {}
    for first in range(num_ranks):
        seen = {} if first in ahead else {first: [0.0]}  # the reference of those it shares with
        while seen:
            ahead |= {rank: float(np.median(seconds)) for rank, seconds in seen.items()}
            seen = dict[int, list[float]]()
            for _, calls in sure or meetings:
                ends = [end - ahead[rank] for rank, _, end in calls if rank in ahead]
                for rank, _, end in calls if ends else ():
                    if rank not in ahead:
                        seen.setdefault(rank, []).append(end - sum(ends) / len(ends))
    return [ahead[rank] for rank in range(num_ranks)]


def segments_of(
    parts: StepParts, lens: Mapping[tuple[int, int], Sequence[int]]
) -> Iterator[Segment]:
    """Yield the segments of each rank and step, on one clock; collectives are not divided."""
    first = min(float(spans.windows.min()) for spans in parts.spans)
    for rank, spans in zip(parts.ranks.tolist(), parts.spans, strict=True):
        shown: tuple[tuple[Kind, Spans], ...] = (
            ("compute", spans.compute),
            ("waiting", minus(spans.waiting, spans.compute)),
        )
        for step, (start, end) in zip(parts.steps.tolist(), spans.windows.tolist(), strict=True):
            yield Segment(rank, "step", str(step), start - first, end - start)
            if (step, rank) in lens:
                mark = LengthMark(tuple(lens[step, rank]))
                yield Segment(rank, "lengths", str(mark), start - first, 0.0)
            for kind, times in shown:
                for begin, stop in within(times, start, end).tolist():
                    yield Segment(rank, kind, kind, begin - first, stop - begin)
            here = slice(*np.searchsorted(spans.calls[:, 0], [start, end]).tolist())
            calls = zip(spans.call_keys[here], spans.calls[here].tolist(), strict=True)
            for key, (begin, stop) in calls:
                yield Segment(rank, "communication", key, begin - first, stop - begin)
