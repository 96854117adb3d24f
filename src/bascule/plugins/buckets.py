"""Scripts with buckets of shapes, as diffusers' dreambooth: all ranks get one bucket in a step."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler

from bascule.arrays import Ints
from bascule.checks import whole
from bascule.data.samplers import accumulation_of_accelerate
from bascule.errors import ConfigError


class BalancedBuckets(BatchSampler):
    """Yields this rank's batches of a script's bucket sampler; no sample is dropped.

    The ranks of a step have batches of one bucket, of as many samples where they suffice. Samples
    left of several buckets meet in steps of like shapes. A rank without a sample repeats one, which
    `loss_scale` leaves out. The order of an epoch depends on the seed and its number. An epoch
    ends with an optimizer step of the script's Accelerator: the largest batches are halved for it.

    Args:
        batches: The script's sampler: ``bucket_indices`` has the samples of each bucket,
            ``dataset.buckets`` its height and width.
        num_ranks: Processes.
        rank: This one.
        seed: Seed of the order.
    """

    def __init__(self, batches: Any, num_ranks: int, rank: int, *, seed: int = 0) -> None:
        buckets = getattr(batches, "bucket_indices", ())
        if not any(buckets):
            raise ConfigError(
                f"{type(batches).__name__} has no samples in bucket_indices: give the script's "
                "sampler, which lists the indices of each bucket there"
            )
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
        for together in [[steps[place] for place in places] for places in order]:
            total = max(1, sum(part.size for parts in together for part in parts))
            for parts in together:
                own = parts[self._rank]
                self._scales.append(own.size * self._num_ranks * size / total)
                repeated = parts[0] if parts[0].size else self._buckets[-1]
                yield (own if own.size else repeated[:1]).tolist()

    def loss_scale(self, number: int) -> float:
        """Return the factor of the mean loss of a batch, by its number since the epoch began.

        With it, the division by the batches of an optimizer step and the mean of gradients over
        ranks, the gradient of a step is that of the mean over all its samples.
        """
        return self._scales[number]

    def _steps(self, random: np.random.Generator) -> list[list[Ints]]:
        """Return the samples of each rank in each batch; the batches fill whole steps."""
        num, full = self._num_ranks, self.batch_size * self._num_ranks
        steps, few = list[list[Ints]](), list[Ints]()
        for bucket in self._buckets:
            order = random.permutation(bucket)
            groups = np.split(order, range(full, order.size, full))
            if groups[-1].size < num:
                few.append(groups.pop())
            steps += [np.array_split(group, num) for group in groups]
        rest = np.concatenate([*few, np.zeros(0, dtype=np.int64)])
        # Each sample of a small group is alone on its rank; the last ranks have none.
        steps += [
            np.array_split(rest[first : first + num], num) for first in range(0, rest.size, num)
        ]
        while len(steps) % accumulation_of_accelerate():
            largest = max(range(len(steps)), key=lambda place: sum(map(len, steps[place])))
            halves = np.array_split(np.concatenate(steps.pop(largest)), 2)
            steps += [np.array_split(half, num) for half in halves]
        return steps
