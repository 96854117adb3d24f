"""A sampler for scripts with buckets of shapes: in each step, all ranks use the same bucket."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler

from bascule.arrays import Ints
from bascule.checks import whole
from bascule.data.samplers import accumulation_of_accelerate
from bascule.errors import ConfigError


class BalancedBuckets(BatchSampler):
    """A sampler of this rank's batches from a script's buckets; no sample is dropped.

    In a step, all ranks have batches of one bucket, as in diffusers' dreambooth. Samples left over
    go into steps of similar shapes. A rank without a sample repeats a sample, which `loss_scale`
    leaves out. Seed and epoch number decide the order. An epoch ends with a whole optimizer step of
    the script's Accelerator; if needed, the largest batches are halved.

    Args:
        batches: The script's sampler: ``bucket_indices`` has the samples of each bucket,
            ``dataset.buckets`` its height and width.
        num_ranks: Number of processes.
        rank: Rank of this process.
        seed: Seed of the order.
    """

    def __init__(self, batches: Any, num_ranks: int, rank: int, *, seed: int = 0) -> None:
        buckets = getattr(batches, "bucket_indices", ())
        if not any(buckets):
            what = f"{type(batches).__name__} has no samples in bucket_indices"
            raise ConfigError(f"{what}: give the script's sampler, which lists each bucket there")
        self.batch_size, self._seed = batches.batch_size, seed
        self._num_ranks = whole("BalancedBuckets(num_ranks", num_ranks, 1)
        self._rank = whole("BalancedBuckets(rank", rank, 0, num_ranks - 1)
        sizes = [height * width for height, width in batches.dataset.buckets]
        by_size = sorted(zip(sizes, buckets, strict=True), key=lambda pair: -pair[0])
        self._buckets = [np.array(bucket, dtype=np.int64) for _, bucket in by_size if bucket]
        self._epoch, self._scales = 0, list[float]()

    def __len__(self) -> int:
        return len(self._steps(np.random.default_rng(0)))

    def __iter__(self) -> Iterator[list[int]]:
        random = np.random.default_rng([self._seed, self._epoch])
        self._epoch, self._scales = self._epoch + 1, []
        steps, size = self._steps(random), accumulation_of_accelerate()
        order = random.permutation(len(steps)).reshape(-1, size)
        for accumulated in [[steps[index] for index in indices] for indices in order]:
            total = max(1, sum(batch.size for by_rank in accumulated for batch in by_rank))
            for by_rank in accumulated:
                batch = by_rank[self._rank]
                self._scales.append(batch.size * self._num_ranks * size / total)
                repeated = by_rank[0] if by_rank[0].size else self._buckets[-1]
                yield (batch if batch.size else repeated[:1]).tolist()

    def loss_scale(self, number: int) -> float:
        """Return the factor for the mean loss of a batch, by its number since the epoch began.

        With it, averaging over the batches of an optimizer step and over ranks gives the gradient
        of the mean loss of all samples of the step.
        """
        return self._scales[number]

    def _steps(self, random: np.random.Generator) -> list[list[Ints]]:
        """Return the samples of each rank in each batch, of whole optimizer steps."""
        num, full = self._num_ranks, self.batch_size * self._num_ranks
        steps, few = list[list[Ints]](), list[Ints]()
        for bucket in self._buckets:
            order = random.permutation(bucket)
            groups = np.split(order, range(full, order.size, full))
            if groups[-1].size < num:
                few.append(groups.pop())
            steps += [np.array_split(group, num) for group in groups]
        rest = np.concatenate([*few, np.zeros(0, dtype=np.int64)])
        # A rank has at most one sample of the rest; the last ranks may have none.
        steps += [
            np.array_split(rest[first : first + num], num) for first in range(0, rest.size, num)
        ]
        while len(steps) % accumulation_of_accelerate():
            largest = max(range(len(steps)), key=lambda place: sum(map(len, steps[place])))
            halves = np.array_split(np.concatenate(steps.pop(largest)), 2)
            steps += [np.array_split(half, num) for half in halves]
        return steps
