"""The thread that makes a balanced loader's steps behind the compute, some of them ahead."""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bascule.data.batch import Interval
from bascule.data.loaded import Offer, Sample
from bascule.data.redistribute import Redistributor, StepData, StepKey
from bascule.data.source import Reading
from bascule.data.wire import parcel
from bascule.errors import CommError, ConfigError, PlanError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Handlers:
    """What the user, or the loader for them, does with samples.

    Attributes:
        length_fn: Tokens of a sample.
        weight_fn: What a sample counts in the global mean: a whole number.
        unpack: Samples of an item of the loader.
        collate: A microbatch from its samples; called with none for an empty one.
    """

    length_fn: Callable[[Sample], int]
    weight_fn: Callable[[Sample], int]
    unpack: Callable[[Any], list[Sample]] | None
    collate: Callable[[list[Sample]], Any]


@dataclass(frozen=True, slots=True, eq=False)
class ReadyStep:
    """A step as the main thread takes it.

    Attributes:
        key: Which step.
        data: What it is made of.
        collated: Each microbatch, as the model takes it.
        saved: After each microbatch, where a loader with a state of its own would go on.
        exchange: When the thread agreed, planned and exchanged.
    """

    key: StepKey
    data: StepData
    collated: list[Any]
    saved: list[dict[str, Any] | None]
    exchange: Interval


class Prefetcher:
    """Makes steps in a thread of its own until the data end, an error, or `close`.

    Args:
        reading: This rank's microbatches.
        handlers: What is done with samples.
        redistributor: Makes steps of what all ranks loaded.
        keys: Of the steps, in their order.
        depth: Steps that may be ready before one is taken.
        max_bytes: Most bytes received in steps that were not taken yet; None if unlimited.
        loads: Whether this rank loads samples; otherwise it only computes.
    """

    def __init__(
        self,
        reading: Reading,
        handlers: Handlers,
        redistributor: Redistributor,
        keys: Callable[[int], StepKey],
        *,
        first_step: int,
        depth: int,
        max_bytes: int | None,
        loads: bool,
    ) -> None:
        self._reading = reading
        self._handlers = handlers
        self._redistributor = redistributor
        self._keys = keys
        self._first_step = first_step
        self._depth = depth
        self._max_bytes = max_bytes
        self._loads = loads
        self._changed = threading.Condition()
        self._ready: deque[ReadyStep] = deque()
        self._bytes = 0
        self._end: BaseException | None = None
        self._ended = self._closing = False
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="bascule loader", daemon=True)
        self._thread.start()

    def take(self) -> tuple[ReadyStep | None, Interval]:
        """The next step, None at the end; and when this thread waited for it.

        Raises:
            Whatever ended the thread: the same on all ranks.
        """
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            waited = start, time.perf_counter()
            if self._ready:
                return self._ready.popleft(), waited
        if self._end is not None:
            raise self._end
        return None, waited

    def release(self, step: ReadyStep) -> None:
        """Say that a step that was taken is no longer needed, so that another may be made."""
        with self._changed:
            self._bytes -= step.data.received_bytes
            self._changed.notify_all()

    def close(self, patience_s: float | None = None) -> None:
        """End the thread with those of the other ranks, and join it.

        Args:
            patience_s: How long to wait for the other ranks. None: as long as their collectives do.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(patience_s)
        if self._thread.is_alive():
            logger.warning(
                "the other ranks did not end their loaders within %g s; the thread of this one "
                "ends with its process",
                patience_s,
            )

    def _run(self) -> None:
        try:
            for step in itertools.count(self._first_step):
                if not self._make(self._keys(step)):
                    break
        except BaseException as error:
            self._end = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _make(self, key: StepKey) -> bool:
        """One step; whether there was one."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or len(self._ready) < self._depth)
        offer, saved = self._load(key)
        start = time.perf_counter()
        try:
            data = self._redistributor.step(key, offer, self._reserve)
        except CommError as error:
            if offer.error is not None:
                raise error from offer.error
            raise
        if data is None:
            self.num_dropped += len(offer.lens)
            return False
        exchange = start, time.perf_counter()
        collated: list[Any] = []
        failed: Exception | None = None
        try:
            collated = [self._handlers.collate(part.samples) for part in data.microbatches]
        except Exception as error:
            failed = _named(error, "collate_fn")
        self._redistributor.confirm(key, failed)
        with self._changed:
            self._ready.append(ReadyStep(key, data, collated, saved, exchange))
            self._changed.notify_all()
        return True

    def _reserve(self, num_bytes: int) -> None:
        """Wait until so many bytes may arrive. The first step always finds room."""
        limit = self._max_bytes
        with self._changed:
            if limit is not None:
                self._changed.wait_for(
                    lambda: self._closing or self._bytes == 0 or self._bytes + num_bytes <= limit
                )
            self._bytes += num_bytes

    def _load(self, key: StepKey) -> tuple[Offer, list[dict[str, Any] | None]]:
        """This rank's samples of a step; what fails becomes part of the offer."""
        accumulate = self._redistributor.rules.accumulate
        version = len(self._redistributor.costs) - 1
        if self._closing:
            return Offer(is_closing=True, cost_version=version), []
        items: list[list[Any]] = []
        saved: list[dict[str, Any] | None] = []
        place = f"microbatch {len(items)}"
        try:
            for micro in range(accumulate):
                place = f"microbatch {micro}"
                taken = next(self._reading, None)
                if taken is not None:
                    items.append(taken)
                saved.append(self._reading.saved())
        except Exception as error:
            return Offer(error=_named(error, place)), saved
        try:
            return self._offer(items), saved
        except Exception as error:
            return Offer(error=error), saved

    def _offer(self, items: Sequence[list[Any]]) -> Offer:
        handlers, unpack = self._handlers, self._handlers.unpack
        samples: list[list[Sample]] = []
        flat: list[tuple[int, int, Any]] = []
        for micro, taken in enumerate(items):
            try:
                group = taken if unpack is None else [one for item in taken for one in unpack(item)]
            except Exception as error:
                raise _named(error, f"microbatch {micro}, unpack") from error
            samples.append(group)
            flat += [(micro, place, sample) for place, sample in enumerate(group)]
        lens, weights, parcels = [], [], []
        for micro, place, sample in flat:
            try:
                lens.append(_whole(handlers.length_fn(sample), "length_fn"))
                weights.append(_whole(handlers.weight_fn(sample), "weight_fn"))
                parcels.append(parcel(sample))
            except Exception as error:
                raise _named(error, f"microbatch {micro}, sample {place}") from error
        return Offer(
            samples=samples,
            lens=lens,
            weights=weights,
            parcels=parcels,
            num_items=[len(taken) for taken in items],
            is_short=self._loads and len(items) < self._redistributor.rules.accumulate,
            is_closing=self._closing,
            cost_version=len(self._redistributor.costs) - 1,
        )


def _whole(value: Any, what: str) -> int:
    """A length or weight as an integer.

    Raises:
        ConfigError: It is none from 0 to 2^40.
    """
    if isinstance(value, bool) or int(value) != value or not 0 <= value <= 2**40:
        raise ConfigError(f"{what} gave {value!r}: it must be a whole number from 0 to 2^40")
    return int(value)


def _named(error: Exception, place: str) -> Exception:
    """The error with its place; one line, since it travels to all ranks."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} .. {lines[-1]}"
    if isinstance(error, ConfigError | PlanError):
        return ConfigError(f"{place}: {text}")
    named = RuntimeError(f"{place}: {type(error).__name__}: {text}")
    named.__cause__ = error
    return named
