"""The thread that prepares steps of a balanced loader ahead, while the training computes."""

import atexit
import itertools
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bascule.comm.guard.failures import end_all, tell
from bascule.comm.guard.watch import watch_of_world
from bascule.data.departures import NOWHERE, Departure, Departures, Position
from bascule.data.leases import Lease
from bascule.data.loader_batch import Interval
from bascule.data.redistribute import ClosedError, Redistributor, StepData, StepKey
from bascule.data.samples.loaded import Offer
from bascule.data.samples.offers import Handlers, Saved, load, named
from bascule.data.source import Reading
from bascule.errors import CommError, ConfigError, PlanError

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""How long a rank that has an error of its own waits for the loaders of the others."""

_LOOK_S = 1.0  # between looks for ranks that left, while there is nothing to do


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
    saved: Saved
    exchange: Interval


class Prefetcher:
    """Makes steps in a thread of its own until the data end, an error, or a rank leaves.

    Args:
        reading: This rank's microbatches.
        handlers: What is done with samples.
        redistributor: Makes steps of what all ranks loaded, in the group of the lease.
        lease: The thread's process group; given back when the thread ends.
        keys: Of the steps, in their order.
        depth: Steps that may be ready before one is taken.
        loads: Whether this rank loads samples; otherwise it only computes.
    """

    def __init__(
        self,
        reading: Reading,
        handlers: Handlers,
        redistributor: Redistributor,
        lease: Lease,
        keys: Callable[[int], StepKey],
        *,
        first_step: int,
        depth: int,
        loads: bool,
    ) -> None:
        self._reading = reading
        self._handlers = handlers
        self._redistributor = redistributor
        self._lease = lease
        self._departures = Departures(lease.group, lease.use)
        self._keys = keys
        self._first_step = first_step
        self._depth = depth
        self._loads = loads
        self._changed = threading.Condition()
        self._ready: deque[ReadyStep] = deque()
        self._bytes = 0
        self._end: BaseException | None = None
        self._left: Departure | None = None
        self._ended = self._closing = self._heard = False
        self._is_settled = True
        self._handed = NOWHERE
        self.num_dropped = 0
        self._watch = watch_of_world(end_all)
        self._user = threading.current_thread()
        self._thread = threading.Thread(target=self._run, name="bascule loader", daemon=True)
        atexit.register(self._close_at_exit)
        self._thread.start()

    def take(self) -> tuple[ReadyStep | None, Interval]:
        """The next step, None at the end; and when this thread waited for it.

        Raises:
            ConfigError: The iteration was closed.
            Whatever ended the thread: the same on all ranks.
        """
        start = time.perf_counter()
        with self._watch.waiting_for(self._thread, "the wait for its loader"), self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            waited = start, time.perf_counter()
            self._check_open()
            if self._ready:
                return self._ready.popleft(), waited
        if self._end is not None:
            raise self._end
        return None, waited

    def hand_out(self, position: Position) -> None:
        """Say that a microbatch of the step that was taken is about to be used.

        Raises:
            ConfigError: The iteration was closed.
            CommError: Another rank left before it.
        """
        with self._changed:
            self._check_open()
            if self._left is not None and position > self._left.after and self._end is not None:
                raise self._end
            self._handed = position

    def release(self, step: ReadyStep) -> None:
        """Say that a step that was taken is no longer needed, so that another may be made."""
        with self._changed:
            self._bytes -= step.data.received_bytes
            self._changed.notify_all()

    def leave(self, reason: str = "", *, is_final: bool = True) -> None:
        """Want no further step, and let the other ranks know; waits for nothing.

        Args:
            reason: The error with which this rank leaves.
            is_final: Whether no reason is to follow.
        """
        if not self._ended or not self._is_settled:
            self._is_settled = is_final
            own = self._lease.group.rank
            departure = Departure(self._lease.use, own, self._handed, reason, is_final)
            self._departures.announce(departure)
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join(self, patience_s: float | None = None) -> bool:
        """Wait for the thread, which ends with those of the other ranks; whether it did.

        Args:
            patience_s: How long to wait. None: as long as its collectives do.
        """
        if self._thread is threading.current_thread():  # the garbage of an iteration is found there
            return False
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended, patience_s):
                logger.warning("the loaders of the other ranks did not end within %g s", patience_s)
                return False
        self._thread.join()  # what is left to do is this rank's own
        return True

    @property
    def left_by_another(self) -> BaseException | None:
        """The error of a rank that left first, if that is how the thread ended."""
        is_other = self._left is not None and self._left.rank != self._lease.group.rank
        return self._end if is_other else None

    def _check_open(self) -> None:
        """Raise what must not wait for what is ready."""
        if self._closing:
            raise ConfigError(
                "this iteration was ended by close(), or by another iteration of the same loader: "
                "leave the loop first, or make a loader for each"
            )
        if self._left is not None and self._left.reason and self._end is not None:
            raise self._end

    def _close_at_exit(self) -> None:
        """At the end of the interpreter, for an iteration that was left nowhere."""
        error = getattr(sys, "last_value", None)
        self.leave("" if error is None else text_of(error))
        self.join(PATIENCE_S)

    def _run(self) -> None:
        is_alike = True
        try:
            for step in itertools.count(self._first_step):
                if not self._make(self._keys(step)):
                    break
        except ClosedError as error:
            self._end = self._named(error)
        except (CommError, PlanError) as error:
            self._end = error
        except BaseException as error:
            # The others wait in a call that it never makes. So nobody uses the group again.
            is_alike = False
            self._end = error
            tell(error, "the thread of the loader")
        if is_alike:
            self._lease.give_back()
        _forget_locals(self._end)
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        # Iterators with workers end here: as garbage they would end in any thread, for seconds.
        self._reading.close()
        atexit.unregister(self._close_at_exit)

    def _named(self, error: ClosedError) -> CommError:
        """The error with who left first, where, and why."""
        left = self._departures.read() if self._closing else self._departures.settle()
        if left is None:
            return error
        self._left = left
        group = self._lease.group
        named = CommError(f"step {error.step}: rank {left.rank} of group {group.name!r} {left}")
        if left.reason and left.rank != group.rank:
            # The training may end in a collective of its own, which does not say why.
            logger.error("%s", named)
        return named

    def _make(self, key: StepKey) -> bool:
        """One step; whether there was one."""
        self._wait_until(lambda: len(self._ready) < self._depth)
        offer, saved = self._load()
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
        except BaseException as error:
            failed = named(error, "collate_fn")
        self._redistributor.confirm(key, failed)
        with self._changed:
            self._ready.append(ReadyStep(key, data, collated, saved, exchange))
            self._changed.notify_all()
        return True

    def _load(self) -> tuple[Offer, Saved]:
        version = len(self._redistributor.costs) - 1
        if self._closing or self._heard:
            return Offer(is_closing=True, cost_version=version), []
        accumulate = self._redistributor.rules.accumulate
        return load(
            self._reading, self._handlers, accumulate, loads=self._loads, cost_version=version
        )

    def _reserve(self, num_bytes: int) -> None:
        """Wait until so many bytes may arrive. The first step always finds room."""
        limit = self._redistributor.rules.max_bytes
        if limit is not None:
            self._wait_until(lambda: self._bytes == 0 or self._bytes + num_bytes <= limit)
        with self._changed:
            self._bytes += num_bytes

    def _wait_until(self, is_possible: Callable[[], bool]) -> None:
        """Wait for the training to use what is ready, or for a rank to leave."""
        with self._watch.waiting_for(self._user, "the wait of its loader for the training"):
            while True:
                with self._changed:
                    if self._changed.wait_for(
                        lambda: self._closing or self._heard or is_possible(), _LOOK_S
                    ):
                        return
                self._heard = self._departures.read() is not None


def _forget_locals(error: BaseException | None) -> None:
    """Let an error, and those it came from, keep no objects of the functions that they left."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        traceback.clear_frames(error.__traceback__)
        seen.append(error)
        error = error.__cause__ or error.__context__


def text_of(error: BaseException) -> str:
    """An error as one line."""
    lines = str(error).strip().splitlines()
    return type(error).__name__ + (f": {lines[0]}" if lines else "")
