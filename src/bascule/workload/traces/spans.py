"""Operations on sets of time spans. A set is (n, 2) starts and ends, sorted, without overlap."""

import numpy as np
import numpy.typing as npt

from bascule.arrays import Bools

Spans = npt.NDArray[np.float64]


def spans_of(starts: npt.ArrayLike, ends: npt.ArrayLike) -> Spans:
    """Stack starts and ends to (n, 2)."""
    return np.stack([np.asarray(starts, np.float64), np.asarray(ends, np.float64)], axis=1)


def union(spans: Spans) -> Spans:
    """Make a set from spans in any order, which may overlap. O(n log n)."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    if not len(spans):
        return spans
    ends = np.maximum.accumulate(spans[:, 1])
    is_first = np.r_[True, spans[1:, 0] > ends[:-1]]
    is_last = np.r_[is_first[1:], True]
    return spans_of(spans[is_first, 0], ends[is_last])


def minus(spans: Spans, others: Spans) -> Spans:
    """Return the times of a set that are not in the others. O(n log n)."""
    edges = np.unique(np.concatenate([spans.ravel(), others.ravel()]))
    middles = (edges[:-1] + edges[1:]) / 2
    left = _holds(spans, middles) & ~_holds(others, middles)
    return union(spans_of(edges[:-1][left], edges[1:][left]))


def within(spans: Spans, start: float, end: float) -> Spans:
    """Clip a set to the time from start to end. O(log n + spans that remain)."""
    first, last = np.searchsorted(spans[:, 1], start, "right"), np.searchsorted(spans[:, 0], end)
    return np.clip(spans[first:last], start, end)


def seconds_within(spans: Spans, windows: Spans) -> npt.NDArray[np.float64]:
    """Return the (w,) seconds of a set within each window. O((n + w) log n)."""
    if not len(spans):
        return np.zeros(len(windows))
    before = np.r_[0.0, np.cumsum(spans[:, 1] - spans[:, 0])]
    total = np.stack([before[:-1], before[1:]], axis=1).ravel()
    inside = np.interp(windows.ravel(), spans.ravel(), total).reshape(-1, 2)
    return np.maximum(inside[:, 1] - inside[:, 0], 0.0)


def _holds(spans: Spans, times: npt.NDArray[np.float64]) -> Bools:
    begun, ended = (np.searchsorted(spans[:, side], times, "right") for side in (0, 1))
    return begun > ended
