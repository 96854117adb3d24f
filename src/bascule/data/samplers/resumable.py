"""Samples dealt over ranks in turn, and what an earlier run left over any number of ranks."""

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

from bascule.arrays import Ints
from bascule.errors import ConfigError
from bascule.plan.checks import listed, whole, wholes
from bascule.plan.epoch.order import epoch_order

History = Sequence[Sequence[int]]
"""Samples that each source rank had delivered when a run stopped; one entry a run of an epoch."""


class ResumableSampler(Sampler[int]):
    """Deals a dataset over ranks, and deals what an earlier run left over any number of ranks.

    The order of an epoch depends on seed and epoch alone; rank r of N takes every N-th index from
    the r-th on. Nothing is padded or dropped: `BalancedLoader` knows how to end.

    Args:
        num_samples: Samples of the dataset.
        rank: Which share is this rank's.
        num_ranks: Shares.
        shuffle: Whether the order is random.
        seed: Of the order.

    Raises:
        ConfigError: The rank is not one of the ranks, or there are negative samples.
    """

    def __init__(
        self, num_samples: int, *, rank: int, num_ranks: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        self._num_samples = whole("ResumableSampler(num_samples", num_samples, 0)
        self._num_ranks = whole("ResumableSampler(num_ranks", num_ranks, 1)
        self._rank = whole("ResumableSampler(rank", rank, 0, self._num_ranks - 1)
        self._shuffle, self._seed = bool(shuffle), whole("ResumableSampler(seed", seed, 0)
        self._epoch = 0
        self._history: History = ()

    @property
    def deal(self) -> tuple[int, int, int, int, int]:
        """Rank, num_ranks, num_samples, shuffle and seed: what decides who gets what."""
        return self._rank, self._num_ranks, self._num_samples, self._shuffle, self._seed

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is dealt next.

        Raises:
            ConfigError: It is no whole number from 0.
        """
        self._epoch = whole("epoch", epoch, 0)

    def resume(self, history: History) -> None:
        """Deal only what is left after these runs of the epoch.

        Raises:
            ConfigError: They delivered more than there is, or this is no history.
        """
        history = _checked(history)
        delivered = sum(map(sum, history))
        if delivered > self._num_samples:
            raise too_many(delivered, self._num_samples)
        self._history = history

    def __len__(self) -> int:
        return len(range(self._rank, self._left().size, self._num_ranks))

    def __iter__(self) -> Iterator[int]:
        return iter(self._left()[self._rank :: self._num_ranks].tolist())

    def _left(self) -> Ints:
        order = epoch_order(
            self._num_samples, shuffle=self._shuffle, seed=self._seed, epoch=self._epoch
        )
        for delivered in self._history:
            place = np.arange(order.size)
            counts = np.asarray(delivered, dtype=np.int64)
            order = order[place // counts.size >= counts[place % counts.size]]
        return order


def _checked(history: object) -> History:
    """A history as plain numbers."""
    runs = listed("what the runs of an epoch delivered", history)
    return [wholes("what each source rank delivered", run).tolist() for run in runs]


def too_many(num_delivered: int, num_samples: int) -> ConfigError:
    """The error of a state of more samples than there are."""
    return ConfigError(
        f"{num_delivered} samples were delivered when the state was saved, and there are "
        f"{num_samples}: resume with the samples that the state was saved with"
    )
