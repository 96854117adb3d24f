"""Reading one rank's samples in microbatches, from where an earlier run stopped."""

import copy
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, default_collate

from bascule.data.samplers import History, ResumableSampler, too_many
from bascule.errors import ConfigError

Sample = Any

_MOST = 2**40  # sums of many stay below 2^63


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
    """Groups samples that come one by one: a number of them, or as many as fit into some tokens."""

    num_samples: int | None
    num_tokens: int | None  # a longer sample comes alone
    length_fn: Callable[[Sample], int]

    def split(self, samples: Iterator[Sample]) -> Generator[list[Sample], None, None]:
        """Group them in the order in which they come."""
        if self.num_tokens is None:
            while group := list(itertools.islice(samples, self.num_samples)):
                yield group
            return
        group: list[Sample] = []
        total = 0
        for sample in samples:
            length = whole_number(self.length_fn(sample), "length_fn")
            if group and total + length > self.num_tokens:
                yield group
                group, total = [], 0
            group.append(sample)
            total += length
        if group:
            yield group


class Source:
    """The microbatches of one rank, of its loader; None on a rank that only computes."""

    def __init__(self, loader: Iterable[Any] | None, grouping: Microbatches | None) -> None:
        self.is_empty = loader is None
        self.collate_fn: Callable[[list[Sample]], Any] = default_collate
        if isinstance(loader, DataLoader):
            loader = copy.copy(loader)
            loader.pin_memory = False  # tensors are pinned after the exchange
            if loader.batch_size is not None or loader.batch_sampler is not None:
                # It gives lists of samples where it gave batches.
                self.collate_fn, loader.collate_fn = loader.collate_fn, list
        self._loader: Iterable[Any] = () if loader is None else loader
        self._grouping = grouping
        of_batches = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        self._sampler = of_batches or getattr(loader, "sampler", None)

    @property
    def deal(self) -> tuple[int, int, int, int, int]:
        """Rank, num_ranks, num_samples, shuffle and seed of a `ResumableSampler`; else zeros."""
        sampler = self._sampler
        return sampler.deal if isinstance(sampler, ResumableSampler) else (0, 0, 0, 0, 0)

    @property
    def num_microbatches(self) -> int:
        """Those of an epoch; -1 where the loader does not know, or samples are grouped anew."""
        if self.is_empty or self._grouping is None:
            with suppress(TypeError, NotImplementedError):
                return len(self._loader)  # pyright: ignore[reportArgumentType]
        return -1

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of whatever shuffles."""
        for part in (self._loader, self._sampler, getattr(self._loader, "dataset", None)):
            set_epoch = getattr(part, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)

    def begin(
        self, history: History, index: int, num_sources: int, saved: dict[str, Any] | None
    ) -> "Reading":
        """Start to read the rest of an epoch; `saved` is `Reading.saved` of the last run."""
        if self.is_empty:
            return Reading((), None)
        if isinstance(self._sampler, ResumableSampler):
            self._sampler.resume(history)
            return Reading(self._loader, self._grouping)
        others = [len(counts) for counts in history if len(counts) != num_sources]
        if others:
            raise ConfigError(
                f"a run with {others[0]} loaders stopped in mid-epoch, and this one has "
                f"{num_sources}: give the DataLoader a ResumableSampler"
            )
        load_state = getattr(self._loader, "load_state_dict", None)
        if saved is not None and load_state is not None:
            load_state(saved["loader"])
            return Reading(self._loader, self._grouping, int(saved["offset"]))
        return Reading(self._loader, self._grouping, sum(counts[index] for counts in history))


class Reading:
    """One pass over a loader, without `skip` samples at the start. Iterates over microbatches."""

    def __init__(self, loader: Iterable[Any], grouping: Microbatches | None, skip: int = 0) -> None:
        has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._stateful: Any = loader if has_state else None
        self._num_left = 0 if has_state else _num_samples(loader) - skip
        self._items, self._skip = iter(loader), skip
        self._newest: tuple[int, Any] = (0, None)
        self._taken = 0
        lists = self._lists()
        self._groups: Generator[list[Sample], None, None] = (
            lists if grouping is None else grouping.split(itertools.chain.from_iterable(lists))
        )

    def __iter__(self) -> Iterator[list[Sample]]:
        return self

    def __next__(self) -> list[Sample]:
        samples = next(self._groups)
        self._taken += len(samples)
        return samples

    @property
    def num_unread(self) -> int:
        """Samples that were not taken so far; 0 where the loader does not know."""
        return max(self._num_left - self._taken, 0)

    def close(self) -> None:
        """Refer to the loader's iterator no longer, so that its workers end here and now."""
        self._groups.close()
        self._items = iter(())

    def saved(self) -> dict[str, Any] | None:
        """Return the state of a loader that has one, after the microbatches so far."""
        if self._stateful is None:
            return None
        first, state = self._newest
        return {"loader": state, "offset": self._taken - first}

    def _lists(self) -> Generator[list[Sample], None, None]:
        """Yield the loader's lists from the start; a sample that comes alone is a list of one."""
        first, skip = -self._skip, self._skip
        self._keep(first)
        for item in self._items:
            samples = item if isinstance(item, list) else [item]
            first += len(samples)
            if first > 0 or skip == 0:
                yield samples[max(len(samples) - first, 0) :] if skip else samples
                skip = 0
            self._keep(first)
        if first < 0:
            raise too_many(self._skip, self._skip + first)

    def _keep(self, first: int) -> None:
        """Keep the loader's state before its batch that begins with sample `first`."""
        if self._stateful is not None:
            self._newest = first, self._stateful.state_dict()


def _num_samples(loader: Iterable[Any]) -> int:
    """Return the samples of a pass over a loader; 0 if it does not know."""
    if isinstance(loader, list | tuple):
        return sum(len(item) if isinstance(item, list) else 1 for item in loader)
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return 0
    with suppress(TypeError, NotImplementedError):
        num = len(loader.sampler)  # pyright: ignore[reportArgumentType]
        return num - num % (loader.batch_size or 1) if loader.drop_last else num
    return 0
