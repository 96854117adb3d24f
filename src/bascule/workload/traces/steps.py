"""Divide each step of each rank into compute, communication, waiting and the rest.

**Compute** is time in kernels that are no collectives (on a host: in operators). Of the time in
collectives only that counts which no compute hides. A rank that begins a collective early
**waits** until the last of its ranks begins; from then on it is **communication**: we assume that
a collective moves nothing before all are there, and that the last rank waits for nobody. What is
left is the **rest**: launches, Python, data. So the slowest rank is the one that arrives last, and
a rank's *own* time is that of its step without the waiting.

The clocks of ranks differ. A collective ends everywhere at once, so clocks are aligned by the
median difference of ends; those of broadcasts, whose root may end before, and of messages between
two ranks only count where there is nothing else.

Which calls belong together: the k-th of a name and group in a step. gloo's events do not say their
group; those of one name are taken to be of one. Where the counts of a step differ, its calls of
that name count as communication.

Legend: S steps, R ranks, C calls of all ranks.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints, num_before
from bascule.errors import ConfigError
from bascule.plan import metrics
from bascule.plan.checks import shown
from bascule.plan.marks import LengthMark
from bascule.workload.traces.reading import RankTrace
from bascule.workload.traces.spans import Spans, minus, seconds_within, spans_of, union, within
from bascule.workload.traces.writing import Kind, Segment

_DUST = 1e-9
"""Share of a step below which a difference is rounding."""

_ONE_SIDED = re.compile(r"broadcast|reduce(?!_?scatter)|scatter|gather|send|recv", re.IGNORECASE)
_ALL_SIDED = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier", re.I)
_TWO_RANKS = re.compile(r"(?:gloo:|nccl:)?(?:send|recv)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False)
class RankSpans:
    """A `RankTrace` on the clock of all, windows (S, 2) of the common steps.

    `waiting` is the union of the parts of its collectives before all of their ranks had begun them.
    """

    windows: Spans
    compute: Spans
    calls: Spans
    call_keys: tuple[str, ...]
    waiting: Spans


@dataclass(frozen=True, eq=False)
class StepParts:
    """The parts of all steps that all ranks have."""

    ranks: Ints  # (R,) their numbers
    steps: Ints  # (S,) their numbers
    seconds: Floats  # (S, R) how long each step took
    compute: Floats  # (S, R) seconds of it
    communication: Floats  # (S, R) seconds in collectives that no compute hides, without waiting
    waiting: Floats  # (S, R) seconds in which the rank waited for others
    hidden: Floats  # (S, R) seconds in collectives behind compute; within `compute`
    spans: tuple[RankSpans, ...]  # (R,) where these parts are
    on_device: bool  # they are those of a device
    numbered_by: str  # what shows the steps
    notes: tuple[str, ...]  # sentences on what could not be used
    num_missing: int = 0  # ranks of the run that have no trace

    @property
    def rest(self) -> Floats:
        """(S, R) seconds of a step that are in no other part."""
        left = self.seconds - self.compute - self.communication - self.waiting
        return np.where(left > _DUST * self.seconds, left, 0.0)

    @property
    def missing(self) -> str:
        """A sentence on the ranks without a trace."""
        verb = "rank has" if self.num_missing == 1 else "ranks have"
        return f"{self.num_missing} {verb} no trace"

    @property
    def own(self) -> Floats:
        """(S, R) seconds that a step takes a rank by itself: without waiting for others."""
        return self.seconds - self.waiting

    @cached_property
    def step_seconds(self) -> Floats:
        """(S,) seconds of a step: the mean over its ranks, which meet in every step."""
        return self.seconds.mean(axis=1)

    @property
    def waited(self) -> float | None:
        """Share of the time in which ranks waited; None where ranks have no trace."""
        if self.num_missing:
            return None
        return float(self.waiting.sum() / max(float(self.seconds.sum()), 1e-30))

    @property
    def imbalance(self) -> float | None:
        """Max over mean of the compute of the ranks, mean over the steps; None as for `waited`."""
        if self.num_missing:
            return None
        return float(np.mean([metrics.imbalance(loads) for loads in self.compute]))

    @cached_property
    def slowest(self) -> Ints:
        """(S,) number of the rank with the most time of its own in each step."""
        return self.ranks[self.own.argmax(axis=1)]

    @property
    def slowest_rank(self) -> int:
        """The rank with the most time of its own, over all steps."""
        return int(self.ranks[self.own.sum(axis=0).argmax()])


@dataclass(frozen=True, slots=True, eq=False)
class _Calls:
    """The collectives of all ranks in common steps, each on its rank's clock."""

    rank: Ints  # (C,) place of the rank
    together: Ints  # (C,) the same number: the same collective
    times: Spans  # (C, 2)
    is_aligning: npt.NDArray[np.bool_]  # (C,) whether all of its ranks end at once


def step_parts(traces: Sequence[RankTrace], notes: Sequence[str] = ()) -> StepParts:
    """Divide the steps that all ranks have. O(events log events).

    Args:
        traces: Of the ranks, at least one, from `read_traces`.
        notes: Sentences to add to those on what could not be used.
    """
    steps = _common_steps(traces)
    places = [np.searchsorted(trace.numbers, steps) for trace in traces]
    calls, unmatched = _matched(traces, places)
    offsets, last = _aligned(calls, len(traces)), np.zeros(calls.rank.size)
    times = calls.times - offsets[calls.rank, None]
    if calls.rank.size:
        latest = np.full(int(calls.together.max()) + 1, -np.inf)
        np.maximum.at(latest, calls.together, times[:, 0])
        last = np.minimum(latest[calls.together], times[:, 1])
    spans = tuple(
        RankSpans(
            windows=trace.windows[place] - offset,
            compute=trace.compute - offset,
            calls=trace.calls - offset,
            call_keys=trace.call_keys,
            waiting=union(spans_of(times[calls.rank == rank, 0], last[calls.rank == rank])),
        )
        for rank, (trace, place, offset) in enumerate(zip(traces, places, offsets, strict=True))
    )
    seconds = np.stack([one.windows[:, 1] - one.windows[:, 0] for one in spans], axis=1)
    compute, exposed, waiting, hidden = (
        np.stack(part, axis=1) for part in zip(*map(_divided, spans), strict=True)
    )
    return StepParts(
        ranks=np.array([trace.rank for trace in traces], np.int64),
        steps=steps,
        seconds=seconds,
        compute=compute,
        communication=np.maximum(exposed - waiting, 0.0),
        waiting=waiting,
        hidden=hidden,
        spans=spans,
        on_device=traces[0].on_device,
        numbered_by=traces[0].numbered_by,
        notes=(*notes, *unmatched),
        num_missing=max(max(one.world_size or 0, one.rank + 1) for one in traces) - len(traces),
    )


def _divided(spans: RankSpans) -> tuple[Floats, Floats, Floats, Floats]:
    """Return (S,) seconds of compute, of collectives beside it, of waiting in these, and hidden."""
    windows, compute = spans.windows, seconds_within(spans.compute, spans.windows)
    either = seconds_within(union(np.concatenate([spans.compute, spans.calls])), windows)
    waits = seconds_within(union(np.concatenate([spans.compute, spans.waiting])), windows)
    exposed, waiting = np.maximum(either - compute, 0.0), np.maximum(waits - compute, 0.0)
    hidden = seconds_within(union(spans.calls), windows) - exposed
    hidden = np.where(hidden > _DUST * (windows[:, 1] - windows[:, 0]), hidden, 0.0)
    return compute, exposed, waiting, hidden


def _common_steps(traces: Sequence[RankTrace]) -> Ints:
    first, steps = traces[0], traces[0].numbers
    for trace in traces[1:]:
        ways, kinds = (first.numbered_by, trace.numbered_by), (first.on_device, trace.on_device)
        if ways[0] != ways[1]:
            raise ConfigError(
                f"rank {first.rank} shows steps by {ways[0]}, rank {trace.rank} by {ways[1]}: "
                "profile all ranks alike"
            )
        if ways[0] != "ProfilerStep" and first.numbers.size != trace.numbers.size:
            raise ConfigError(
                f"rank {first.rank} has {first.numbers.size} steps, rank {trace.rank} "
                f"{trace.numbers.size}, and {ways[0]} does not number them: call profiler.step() "
                "after each step"
            )
        if kinds[0] != kinds[1]:
            ranks = (first.rank, trace.rank) if kinds[0] else (trace.rank, first.rank)
            raise ConfigError(
                f"rank {ranks[0]} has kernels of a device, rank {ranks[1]} has none: profile all "
                "ranks with the same activities"
            )
        steps = np.intersect1d(steps, trace.numbers)
    if not steps.size:
        raise ConfigError("no step is in the traces of all ranks: profile the same steps on each")
    return steps


def _matched(traces: Sequence[RankTrace], places: Sequence[Ints]) -> tuple[_Calls, list[str]]:
    """Return the calls of common steps that all of their ranks made, and sentences on others."""
    names = sorted({key for trace in traces for key in trace.call_keys})
    number = {name: place for place, name in enumerate(names)}
    parts: list[Ints] = []
    times: list[Spans] = []
    for rank, (trace, place) in enumerate(zip(traces, places, strict=True)):
        windows = trace.windows[place]
        step = np.searchsorted(windows[:, 0], trace.calls[:, 0], "right") - 1
        kind = np.array([number[key] for key in trace.call_keys], np.int64)
        inside = (step >= 0) & (trace.calls[:, 0] < windows[step, 1])
        step, kind = step[inside], kind[inside]
        row = np.stack([np.full_like(step, rank), step, kind, num_before(step * len(names) + kind)])
        parts.append(row)
        times.append(trace.calls[inside])
    rank, step, kind, order = np.concatenate(parts, axis=1)
    # Ranks that have a call of this name in the step must have as many of them.
    call = step * max(len(names), 1) + kind
    num = np.zeros((len(traces), int(call.max(initial=-1)) + 1), np.int64)
    np.add.at(num, (rank, call), 1)
    is_even = ((num == 0) | (num == num.max(axis=0, initial=0))).all(axis=0)[call]
    of_two, ends_at_once = (
        np.array([test(name) for name in names], np.bool_)[kind]
        for test in (_is_of_two, _ends_at_once)
    )
    keep = is_even & ~of_two
    uneven = np.unique(kind[~is_even & ~of_two])[:3].tolist()
    notes = [
        f"ranks made unlike numbers of calls of {shown(names[one].partition('|')[0])} in a step: "
        "waiting in these counts as communication"
        for one in uneven
    ]
    _, together = np.unique(np.stack([call[keep], order[keep]]), axis=1, return_inverse=True)
    spans = np.concatenate(times)[keep]
    return _Calls(rank[keep], together.reshape(-1), spans, ends_at_once[keep]), notes


def _is_of_two(name: str) -> bool:
    return bool(_TWO_RANKS.match(name))


def _ends_at_once(name: str) -> bool:
    return bool(_ALL_SIDED.search(name)) or not _ONE_SIDED.search(name)


def _aligned(calls: _Calls, num_ranks: int) -> Floats:
    """Return (R,) seconds that each clock is ahead of the first that it shares calls with.

    Ranks are aligned in rounds, by the calls that they share with aligned ones.
    """
    offsets, is_known = np.zeros(num_ranks), np.zeros(num_ranks, np.bool_)
    use = calls.is_aligning if calls.is_aligning.any() else np.ones_like(calls.is_aligning)
    rank, together, ends = calls.rank[use], calls.together[use], calls.times[use, 1]
    if not rank.size:
        return offsets
    num = int(together.max()) + 1
    while not is_known.all():
        is_known[int(np.flatnonzero(~is_known)[0])] = True  # begins a part of its own
        while True:
            known, new = is_known[rank], ~is_known[rank]
            count = np.bincount(together[known], minlength=num)
            total = np.bincount(together[known], (ends - offsets[rank])[known], minlength=num)
            new &= count[together] > 0
            if not new.any():
                break
            ahead = ends[new] - (total[together[new]] / count[together[new]])
            for one in np.unique(rank[new]):
                offsets[one] = np.median(ahead[rank[new] == one])
                is_known[one] = True
    return offsets


def segments_of(
    parts: StepParts, lens: Mapping[tuple[int, int], Sequence[int]]
) -> Iterator[Segment]:
    """Yield the segments of each rank and step, on one clock that begins with the first step.

    Collectives are as they were, also where compute hides them; waiting is what it does not hide.
    Lengths of the sequences that were computed are by step and rank, where they are known.
    """
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
            for kind, every in shown:
                for begin, stop in within(every, start, end).tolist():
                    yield Segment(rank, kind, kind, begin - first, stop - begin)
            one, last = np.searchsorted(spans.calls[:, 0], [start, end])
            for key, (begin, stop) in zip(
                spans.call_keys[one:last], spans.calls[one:last].tolist(), strict=True
            ):
                yield Segment(rank, "communication", key, begin - first, stop - begin)
