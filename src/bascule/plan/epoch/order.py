"""The order of an epoch, and where it is cut into optimiser steps."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bascule.arrays import Ints
from bascule.errors import ConfigError
from bascule.plan.checks import MAX_RANKS, MAX_WHOLE, whole

_MAX_COUNT = 2**31


def epoch_order(num_samples: int, *, shuffle: bool, seed: int, epoch: int) -> Ints:
    """(num_samples,) every index once, in an order that seed and epoch alone decide. O(n)."""
    order = np.arange(num_samples)
    if shuffle:
        np.random.default_rng([seed, epoch]).shuffle(order)
    return order


@dataclass(frozen=True, slots=True)
class StepShape:
    """Numbers of an optimiser step. A (rank, microbatch) is a *cell*: one batch, never empty."""

    batch_size: int  # samples of a cell in a full step; where counts vary, their mean
    num_ranks: int
    accumulate: int  # microbatches of a step

    def __post_init__(self) -> None:
        most = {"batch_size": _MAX_COUNT, "num_ranks": MAX_RANKS, "accumulate": _MAX_COUNT}
        for name, highest in most.items():
            count = whole(f"BalancedSampler({name}", getattr(self, name), 1, highest)
            object.__setattr__(self, name, count)
        if self.full > MAX_WHOLE:
            raise ConfigError(f"{self}: {self.full} samples make a step; give smaller numbers")

    @property
    def num_cells(self) -> int:
        """Batches of a step, over all ranks and microbatches."""
        return self.num_ranks * self.accumulate

    @property
    def full(self) -> int:
        """Samples of a full step: the global batch."""
        return self.batch_size * self.num_cells

    def next_size(self, left: int) -> int:
        """Return the samples of the next step where so many are left of the epoch.

        A rest too small for all cells is joined with the last full step, and both are halved if
        each half then fills its cells. Only `left` decides, so a resumed run cuts alike.
        """
        over = left - self.full
        if over <= 0 or over >= self.num_cells:
            return min(left, self.full)
        return left if self.batch_size == 1 else -(-left // 2)

    def sizes(self, left: int) -> Iterator[int]:
        """Samples of each step that is left."""
        while left > 0:
            size = self.next_size(left)
            yield size
            left -= size

    def _steps(self, left: int) -> tuple[int, list[int]]:
        """Steps that are full for sure, and the sizes of the few after them."""
        num_full = max(left // self.full - 1, 0)
        return num_full, list(self.sizes(left - num_full * self.full))

    def num_steps(self, left: int) -> int:
        """Steps in so many samples."""
        num_full, rest = self._steps(left)
        return num_full + len(rest)

    def samples_in(self, left: int, num_steps: int) -> int:
        """Samples of the first steps, where so many samples are left before them."""
        num_full, rest = self._steps(left)
        return self.full * min(num_full, num_steps) + sum(rest[: max(num_steps - num_full, 0)])

    def most_in_a_cell(self, left: int) -> int:
        """Samples of the largest cell of any step, where counts are even."""
        num_full, rest = self._steps(left)
        return -(-max([self.full] * (num_full > 0) + rest, default=0) // self.num_cells)
