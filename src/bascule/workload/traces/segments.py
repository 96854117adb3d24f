"""Measured steps as segments, for the same format as simulated ones."""

from collections.abc import Iterator

import numpy as np

from bascule.plan.loaded.length_marks import LengthMark
from bascule.workload.traces.spans import Spans, minus, within
from bascule.workload.traces.step_parts import StepParts
from bascule.workload.traces.trace_writing import Kind, Segment
from bascule.workload.traces.worth import RunLengths


def segments_of(parts: StepParts, lens: RunLengths) -> Iterator[Segment]:
    """What each rank did in each step, on one clock that begins with the first step.

    Collectives are as they were, also where compute hides them; waiting is what it does not hide.

    Args:
        parts: The steps.
        lens: What ranks computed, where it is known.
    """
    first = min(float(spans.windows.min()) for spans in parts.spans)
    for rank, spans in zip(parts.ranks.tolist(), parts.spans, strict=True):
        shown: tuple[tuple[Kind, Spans], ...] = (
            ("compute", spans.compute),
            ("waiting", minus(spans.waiting, spans.compute)),
        )
        for step, (start, end) in zip(parts.steps.tolist(), spans.windows.tolist(), strict=True):
            yield Segment(rank, "step", str(step), start - first, end - start)
            if (step, rank) in lens.computed:
                mark = LengthMark(tuple(lens.computed[step, rank]))
                yield Segment(rank, "lengths", str(mark), start - first, 0.0)
            for kind, every in shown:
                for begin, stop in within(every, start, end).tolist():
                    yield Segment(rank, kind, kind, begin - first, stop - begin)
            one, last = np.searchsorted(spans.calls[:, 0], [start, end])
            for key, (begin, stop) in zip(
                spans.call_keys[one:last], spans.calls[one:last].tolist(), strict=True
            ):
                yield Segment(rank, "communication", key, begin - first, stop - begin)
