"""Scripts with buckets of shapes, as diffusers' dreambooth: all ranks get one bucket in a step."""

from collections.abc import Iterator, Sequence
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
        batches: The script's sampler, with the indices of each bucket as ``bucket_indices`` and its
            ``batch_size``.
        num_ranks: Processes.
        rank: This one.
        sizes: Pixels or tokens of a sample of each bucket. None: heights times widths of
            ``batches.dataset.buckets``.
        seed: Seed of the order.
    """

    def __init__(
        self,
        batches: Any,
        num_ranks: int,
        rank: int,
        *,
        sizes: Sequence[float] | None = None,
        seed: int = 0,
    ) -> None:
        buckets = getattr(batches, "bucket_indices", None)
        if buckets is None or not any(buckets):
            raise ConfigError(
                f"{type(batches).__name__} has no samples in bucket_indices: give the script's "
                "sampler, which lists the indices of each bucket there"
            )
        self._buckets = [np.array(one, dtype=np.int64) for one in buckets]
        self.batch_size = whole("batch_size of the script's sampler", batches.batch_size, 1)
        self._num_ranks = whole("BalancedBuckets(num_ranks", num_ranks, 1)
        self._rank = whole("BalancedBuckets(rank", rank, 0, num_ranks - 1)
        self._sizes = [h * w for h, w in batches.dataset.buckets] if sizes is None else list(sizes)
        self._seed, self._epoch = whole("BalancedBuckets(seed", seed), 0
        self._scales: list[float] = []

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is dealt next; without it they follow each other."""
        self._epoch = whole("epoch", epoch)

    def __len__(self) -> int:
        return len(self._steps(np.random.default_rng(0)))

    def __iter__(self) -> Iterator[list[int]]:
        random = np.random.default_rng([self._seed, self._epoch])
        self._epoch, self._scales = self._epoch + 1, []
        steps = self._steps(random)
        for place in random.permutation(len(steps)):
            parts, own = steps[place], steps[place][self._rank]
            count = sum(map(len, parts))
            self._scales.append(len(own) * self._num_ranks / count)
            yield [int(index) for index in (own if len(own) else parts[0][:1])]

    def loss_scale(self, number: int) -> float:
        """Return the factor of the mean loss of a batch, by its number since the epoch began.

        With it, the gradient averaged over ranks is that of the mean over all samples of the step.
        """
        return self._scales[number]

    def _steps(self, random: np.random.Generator) -> list[list[Ints]]:
        """Return the samples of each rank in each step."""
        full, steps = self.batch_size * self._num_ranks, list[list[Ints]]()
        few: list[Ints] = []  # less than one a rank
        for bucket in sorted(range(len(self._buckets)), key=lambda one: -self._sizes[one]):
            order = random.permutation(self._buckets[bucket])
            cuts = range(full, order.size + 1, full)
            *groups, rest = np.split(order, cuts) if order.size else [order]
            steps += [np.array_split(group, self._num_ranks) for group in groups]
            if rest.size >= self._num_ranks:
                steps.append(np.array_split(rest, self._num_ranks))
            else:
                few += np.split(rest, rest.size) if rest.size else []
        for first in range(0, len(few), self._num_ranks):
            group = few[first : first + self._num_ranks]
            steps.append(group + [few[0][:0]] * (self._num_ranks - len(group)))
        return steps
