"""Reading one rank's samples in microbatches, from where an earlier run stopped."""

import copy
import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from bascule.arrays import Ints
from bascule.comm.items import mapped, parcel, read
from bascule.data.samplers import History, ResumableSampler, too_many
from bascule.errors import ConfigError

logger = logging.getLogger(__name__)

Sample = Any

Saved = tuple[int, Ints]
"""Number of samples before a loader's state, and the state as integers; empty without a state."""

_MOST = 2**40  # of a length or weight: sums of many stay below 2^63


def whole_number(value: Any, what: str) -> int:
    """Return a length or weight of a user's function as an integer from 0 to 2^40."""
    is_truth = "bool" in str(getattr(value, "dtype", type(value)))  # a comparison, not a length
    try:
        number = int(value)
        if not is_truth and number == value and 0 <= number <= _MOST:
            return number
    except Exception:  # of whatever it is
        pass
    raise ConfigError(f"{what} gave {value!r}: it must be a whole number from 0 to 2^40")


@dataclass(frozen=True, slots=True)
class Microbatches:
    """Groups of samples from a loader that gives them one by one, by number or by tokens."""

    num_samples: int | None
    num_tokens: int | None  # most tokens of a group; a longer sample is a group of its own
    length_fn: Callable[[Sample], int]

    def split(self, samples: Iterator[Sample]) -> Generator[list[Sample], None, None]:
        """Group samples in their order."""
        if self.num_tokens is None:
            while group := list(itertools.islice(samples, self.num_samples)):
                yield group
            return
        group: list[Sample] = []
        total = 0
        for sample in samples:
            is_missing = sample is None  # left out later, but counted as read
            length = 0 if is_missing else whole_number(self.length_fn(sample), "length_fn")
            if group and total + length > self.num_tokens:
                yield group
                group, total = [], 0
            group.append(sample)
            total += length
        if group:
            yield group


def words_of(state: Any) -> Ints:
    """Return the state of a loader as integers to exchange; no integers for None."""
    if state is None:
        return np.zeros(0, np.int64)
    local = parcel(state)
    buffer = torch.zeros(local.num_bytes, dtype=torch.uint8)
    local.write(buffer)
    return buffer.view(torch.int64).numpy()


def state_of(words: Ints) -> Any:
    """Return the state that `words_of` wrote, in new tensors: torch's generators refuse views."""
    if not words.size:
        return None
    return mapped(read(torch.from_numpy(words.copy()).view(torch.uint8)), torch.clone)


class Uncollated:
    """An uncollated batch, for use as a `collate_fn`.

    It and each of its fields have the length of the samples: some loaders count them.
    """

    __iter__ = None

    def __init__(self, samples: Iterable[Sample]) -> None:
        self.samples = list(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, field: object) -> "Uncollated":
        return self


class Source:
    """One rank's loader, read in microbatches; the loader is None on a rank that only computes.

    Without `grouping`, the loader must give lists, unless it gives ready-made packs (`has_packs`).
    """

    def __init__(
        self, loader: Iterable[Any] | None, grouping: Microbatches | None, has_packs: bool = False
    ) -> None:
        self.is_empty = loader is None
        self.collate_fn: Callable[[list[Sample]], Any] = default_collate
        self._gives = "packs" if has_packs else "lists" if grouping is None else "samples"
        if isinstance(loader, DataLoader):
            loader = copy.copy(loader)
            loader.pin_memory = False  # tensors are pinned after the exchange
            # Persistent workers that the user's own loop started would go on collating.
            loader._iterator = None  # pyright: ignore[reportPrivateUsage]
            if loader.batch_size is not None or loader.batch_sampler is not None:
                self.collate_fn, loader.collate_fn = loader.collate_fn, Uncollated
                self._gives = "lists"
            elif loader.collate_fn is default_convert:  # which makes lists of tuples
                loader.collate_fn = _converted
        self._loader: Iterable[Any] = () if loader is None else loader
        self._grouping = grouping
        of_batches = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        self._sampler = of_batches or getattr(loader, "sampler", None)
        self._last: Reading | None = None

    @property
    def deal(self) -> tuple[int, int, int, int, int]:
        """Rank, num_ranks, num_samples, shuffle and seed of a `ResumableSampler`; else zeros."""
        sampler = self._sampler
        return sampler.deal if isinstance(sampler, ResumableSampler) else (0, 0, 0, 0, 0)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of an epoch; -1 if the loader does not know, or samples are regrouped."""
        if self.is_empty or self._grouping is None:
            with suppress(TypeError, NotImplementedError):
                return len(self._loader)  # pyright: ignore[reportArgumentType]
        return -1

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader, its samplers and its dataset, if they have one."""
        parts = (getattr(self._loader, name, None) for name in ("batch_sampler", "dataset"))
        for part in (self._loader, self._sampler, *parts):
            set_epoch = getattr(part, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)

    def begin(
        self, history: History, index: int, num_sources: int, saved: Saved | None
    ) -> "Reading":
        """Start to read the rest of an epoch; `saved` is `Reading.saved` of the last run."""
        if self.is_empty:
            return Reading((), None)
        loader: Any = self._loader
        is_again = self._last is not None and self._last.has_ended
        reading = partial(Reading, loader, self._grouping, self._samples_of, is_again)
        if isinstance(self._sampler, ResumableSampler):
            self._sampler.resume(history)
            return reading()
        others = [len(counts) for counts in history if len(counts) != num_sources]
        if others:
            raise ConfigError(
                f"a run with {others[0]} loaders stopped in mid-epoch, and this run has "
                f"{num_sources}: give the DataLoader a ResumableSampler"
            )
        skip = sum(counts[index] for counts in history)
        has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        if saved is not None and saved[1].size and has_state:
            loader.load_state_dict(state_of(saved[1]))
            skip = -saved[0]
        elif skip and isinstance(self._sampler, _DRAWN) and not hasattr(self._sampler, "set_epoch"):
            raise ConfigError(
                f"a run stopped in mid-epoch, and a {type(self._sampler).__name__} draws another "
                "order in each run, so samples would be lost or repeated: give the DataLoader a "
                "ResumableSampler, or begin the next epoch with set_epoch"
            )
        self._last = reading(skip, has_state)
        return self._last

    def _samples_of(self, item: Any) -> list[Sample]:
        """Return the samples of an item of the loader; refuse one that may be a batch."""
        if isinstance(item, Uncollated):
            return item.samples
        is_list = isinstance(item, list)
        if not is_list and self._gives != "lists":
            return [item]
        bare = [entry for entry in item if isinstance(entry, _BARE)] if is_list else [item]
        if not bare or self._gives == "packs":
            return item
        raise ConfigError(
            f"the loader yields a {'list with a ' * is_list}{type(bare[0]).__name__}, maybe a "
            "collated batch: give lists of samples (collate_fn=list), or set "
            "LoaderOptions(unpack=..), or batch_size=.. if samples come one by one"
        )


def _converted(item: Any) -> Any:
    """Convert as torch does, but leave a tuple a tuple: a list would mean samples."""
    return tuple(map(default_convert, item)) if type(item) is tuple else default_convert(item)


_DRAWN = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Reading:
    """One pass over a loader, without `skip` samples at the start. Iterates over microbatches."""

    def __init__(
        self,
        loader: Iterable[Any],
        grouping: Microbatches | None,
        samples_of: Callable[[Any], list[Sample]] = list,  # takes an item of the loader
        is_again: bool = False,  # after a pass that ended
        skip: int = 0,
        has_state: bool = False,
    ) -> None:
        self._stateful: Any = loader if has_state else None
        self._num_left = 0 if has_state else _num_samples(loader) - skip
        self._items, self._skip, self._samples_of = iter(loader), skip, samples_of
        self._kind = type(loader).__name__
        self._is_again, self.has_ended = is_again and isinstance(loader, Iterator), False
        self._newest: tuple[int, Any] = (0, None)
        self._taken = 0
        lists = self._lists()
        self._groups: Generator[list[Sample], None, None] = (
            lists if grouping is None else grouping.split(itertools.chain.from_iterable(lists))
        )
        self._keep(-skip)

    def __iter__(self) -> Iterator[list[Sample]]:
        return self

    def __next__(self) -> list[Sample]:
        samples = next(self._groups)
        self._taken += len(samples)
        return samples

    @property
    def num_unread(self) -> int:
        """Number of samples not yet read; 0 where the loader does not know."""
        return max(self._num_left - self._taken, 0)

    def close(self) -> None:
        """Drop the loader's iterator, so that its workers end now."""
        self._groups.close()
        self._items = iter(())

    def saved(self) -> Saved:
        """Return the loader's state before the next sample, or before an earlier sample."""
        first, state = self._newest
        try:
            return first, words_of(state)
        except ConfigError as error:
            logger.warning(
                "state_dict() of the %s cannot be saved, so a resumed run skips samples by their "
                "number: %s",
                *(type(self._stateful).__name__, error),
            )
            self._stateful, self._newest = None, (0, None)
            return 0, words_of(None)

    def _lists(self) -> Generator[list[Sample], None, None]:
        """Yield the loader's items as lists of samples, after the skipped samples."""
        first, skip = -self._skip, self._skip
        for item in self._items:
            samples = self._samples_of(item)
            first += len(samples)
            if first > 0 or skip == 0:
                yield samples[max(len(samples) - first, 0) :] if skip else samples
                skip = 0
            self._keep(first)
        if first < 0:
            raise too_many(self._skip, self._skip + first)
        if self._is_again and first == -self._skip:
            raise ConfigError(
                f"the loader is a {self._kind}, which yields its samples once and is used up: "
                "give a DataLoader, a list, or an object whose __iter__ begins anew"
            )
        self.has_ended = True

    def _keep(self, first: int) -> None:
        """Keep the loader's state before its batch that begins with sample `first`."""
        if self._stateful is not None:
            self._newest = first, self._stateful.state_dict()


_BARE = (Tensor, np.ndarray, list)


def _num_samples(loader: Iterable[Any]) -> int:
    """Return the samples of a pass over a loader; 0 if it does not know."""
    if isinstance(loader, list | tuple):
        return sum(len(item) if isinstance(item, list) else 1 for item in loader)
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return 0
    with suppress(TypeError, NotImplementedError):
        batches = loader.batch_sampler
        num = len(batches.sampler)  # pyright: ignore[reportArgumentType]
        return num - num % batches.batch_size if batches.drop_last else num
    return 0
