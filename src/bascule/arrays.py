"""Types of numpy arrays, named after their entries, and functions used throughout."""

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ranks = npt.NDArray[np.integer[Any]]
"""Numbers of ranks, perhaps one per token: numpy sorts small integers in linear time."""


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return the concatenation of `arange(start, start + length)`."""
    used = lengths > 0
    starts, lengths = starts[used], lengths[used]
    ends = np.cumsum(lengths)
    # A running sum, in place, over steps of one with a jump to where each range begins.
    steps = np.ones(ends[-1] if ends.size else 0, dtype=np.int64)
    steps[:1] = starts[:1]
    steps[ends[:-1]] = starts[1:] - starts[:-1] - lengths[:-1] + 1
    return np.cumsum(steps, out=steps)


def cumulative(lengths: Ints) -> Ints:
    """Return (n + 1,) bounds of consecutive pieces of these lengths."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def sums_by(groups: Ranks, values: Ints, num_groups: int) -> Ints:
    """Return (num_groups,) the sum of the values in each group; exact below 2^53."""
    return np.bincount(groups, weights=values, minlength=num_groups).astype(np.int64)


def frozen(array: Ints) -> Ints:
    """Make an array read-only, and return it."""
    array.flags.writeable = False
    return array


def num_before(keys: Ints) -> Ints:
    """Return (n,) how many equal keys come before each."""
    by_key = np.argsort(keys, kind="stable")
    ordered = keys[by_key]
    num = np.empty_like(by_key)
    num[by_key] = np.arange(keys.size) - np.searchsorted(ordered, ordered)
    return num
