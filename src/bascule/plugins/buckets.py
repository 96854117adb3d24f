"""Scripts with buckets of shapes, as diffusers' dreambooth: all ranks get one bucket in a step."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler

from bascule.arrays import Ints
from bascule.errors import ConfigError
from bascule.plan.checks import whole


class BalancedBuckets(BatchSampler):
    """Yields this rank's batches of a script's bucket sampler; no sample is dropped.

    The ranks of a step have batches of one bucket, of as many samples where they suffice. Samples
    left of several buckets meet in steps of like shapes. A rank without a sample repeats one, which
    `loss_scale` leaves out. The order of an epoch depends on the seed and its number.

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
        by_size = sorted(zip(sizes, buckets, strict=True), key=lambda one: -one[0])
        self._buckets = [np.array(one, dtype=np.int64) for _, one in by_size]
        self._epoch, self._scales = 0, list[float]()

    def __len__(self) -> int:
        return len(self._steps(np.random.default_rng(0)))

    def __iter__(self) -> Iterator[list[int]]:
        random = np.random.default_rng([self._seed, self._epoch])
        self._epoch, self._scales = self._epoch + 1, []
        steps = self._steps(random)
        for place in random.permutation(len(steps)):
            parts, own = steps[place], steps[place][self._rank]
            self._scales.append(own.size * self._num_ranks / sum(part.size for part in parts))
            yield (own if own.size else parts[0][:1]).tolist()

    def loss_scale(self, number: int) -> float:
        """Return the factor of the mean loss of a batch, by its number since the epoch began.

        With it, the gradient averaged over ranks is that of the mean over all samples of the step.
        """
        return self._scales[number]

    def _steps(self, random: np.random.Generator) -> list[list[Ints]]:
        """Return the samples of each rank in each step."""
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
        return steps + [
            np.array_split(rest[first : first + num], num) for first in range(0, rest.size, num)
        ]
