"""A batch sampler for other trainers, which deals the samples of a step evenly over ranks."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler

from bascule.arrays import Ints
from bascule.checks import amounts, ints
from bascule.machine.costs import Cost, evaluate
from bascule.plan.epoch import DealRules, StepTable, deal_step


class DealtBatches(BatchSampler):
    """A sampler that yields the batches of `rank`, or of all ranks, microbatch by microbatch.

    A step keeps its samples. The epoch's first samples fill up its last microbatch, as in
    accelerate; microbatches after the last whole step are not dealt.
    """

    def __init__(
        self,
        plain: BatchSampler,
        lengths: npt.ArrayLike,
        cost: Cost,
        rules: DealRules,
        rank: int | None = None,
    ) -> None:
        super().__init__(plain.sampler, plain.batch_size, plain.drop_last)  # pyright: ignore[reportArgumentType]
        num = len(plain.sampler)  # pyright: ignore[reportArgumentType]
        self._lengths, self._rules, self._rank = ints("lengths", lengths, num), rules, rank
        self._costs = amounts("costs of the samples", evaluate(cost, self._lengths))
        self.steps: list[tuple[float, float, float]] = []  # makespans before, after; mean load

    @property
    def num_steps(self) -> int:
        """Steps of an epoch; the last one may have fewer microbatches."""
        return -(-self._num_groups // self._rules.shape.accumulate)

    @property
    def _num_groups(self) -> int:
        """Batches of a rank in an epoch."""
        group = self.batch_size * self._rules.shape.num_ranks
        num = len(self.sampler)  # pyright: ignore[reportArgumentType]
        return num // group if self.drop_last else -(-num // group)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the wrapped sampler, if it has `set_epoch`."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]

    def __len__(self) -> int:
        return super().__len__() if self._rank is None else self._num_groups

    def __iter__(self) -> Iterator[list[int]]:
        self.steps, shape = [], self._rules.shape
        order = np.fromiter(self.sampler, dtype=np.int64)
        order = np.resize(order, self._num_groups * self.batch_size * shape.num_ranks)
        for first in range(0, order.size, shape.full):
            batches = self._deal(order[first : first + shape.full])
            yield from batches if self._rank is None else batches[self._rank :: shape.num_ranks]

    def _deal(self, samples: Ints) -> list[list[int]]:
        """Return the batches of samples in order; those of a full step are dealt evenly."""
        shape = self._rules.shape
        cells = np.arange(samples.size) // shape.batch_size
        if samples.size == shape.full:
            costs, lengths = self._costs[samples], self._lengths[samples]
            table = StepTable(costs, lengths, self._rules, None)
            deal, before = deal_step(costs, lengths, self._rules), table.makespan(cells)
            if deal.makespan < before:
                cells = deal.microbatch_of * shape.num_ranks + deal.rank_of
            after, mean = table.makespan(cells), float(table.loads(cells).sum()) / shape.num_ranks
            self.steps.append((before, after, mean))
        return [
            samples[cells == cell].tolist() for cell in range(-(-samples.size // shape.batch_size))
        ]
