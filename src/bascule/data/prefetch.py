"""The thread that prepares steps of a balanced loader, its process group, and how it is left.

**The group.** The thread of an iteration needs a process group that nobody else uses meanwhile: two
threads in one group of gloo get each other's bytes. Torch keeps every group, with its threads and
connections, until all are destroyed. So an iteration borrows a group, and gives it back when its
thread is done. All ranks must borrow the same one, but they give back at unlike moments. So as an
iteration begins, each rank says in one small gather which groups are free with it, and all take the
first that is free with everyone, or make another one. The pools of all ranks hold the same groups
in the same places, because groups are made only as the outcome of this gather. It runs on a group
of its own, on which loaders are also constructed; both are done by all ranks, in the same order, by
the thread that trains. There are never more groups than iterations that went on at once, and one.

**Leaving.** The thread of a rank that leaves takes part in one more gather, and says so there. But
threads that have made enough steps ahead wait for their training, not in the gather, and the
training may wait for the rank that left. So who leaves also writes a note into the store, which
these threads look for, once a second and only while they wait; then they come to the gather as
well. The note says after which microbatch the rank left. Up to there the others may go on, because
ranks may leave alike, one later than the other. Who has heard hands out nothing of what was made
beyond.
"""

import atexit
import itertools
import json
import logging
import secrets
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bascule.comm.agree import Statement, agree
from bascule.comm.groups import RankGroup, set_timeout
from bascule.comm.guard import notes
from bascule.comm.guard.failures import is_ended, tell
from bascule.comm.new_groups import new_group
from bascule.comm.world import this_world
from bascule.data.source import Reading
from bascule.data.steps import (
    ClosedError,
    Handlers,
    Offer,
    Redistributor,
    Saved,
    StepData,
    StepKey,
    load,
    named,
)
from bascule.errors import CommError, ConfigError, PlanError

Interval = tuple[float, float]
"""Start and end, in seconds of `time.perf_counter`."""

_CAPACITY = 9  # integers a rank that the first gather has room for: eight groups


@dataclass(slots=True, eq=False)
class _Place:
    """A group of a pool.

    Attributes:
        group: The group.
        is_lent: Whether this rank uses it.
    """

    group: RankGroup
    is_lent: bool = False

    @property
    def is_free(self) -> bool:
        """Whether this rank could use it."""
        return not self.is_lent and self.group.calls.ended is None


@dataclass(frozen=True, slots=True)
class Lease:
    """A group that nobody else uses.

    Attributes:
        group: The group.
        use: A random number, the same on all ranks, that tells this use of the group from others.
        give_back: Says that this rank's thread makes no further calls of it.
    """

    group: RankGroup
    use: int
    give_back: Callable[[], None]


class Pool:
    """The groups of some ranks that loaders share. All of these ranks construct it.

    Args:
        members: Global ranks.
        timeout_s: Longest wait for a member.

    Attributes:
        control: What the thread that trains uses, to construct loaders and to borrow.
    """

    def __init__(self, members: Sequence[int], timeout_s: float) -> None:
        self.control = new_group(members, "loader", timeout_s, backend="gloo")
        self._places: list[_Place] = []
        self._num_loaders = 0

    def next_name(self) -> str:
        """What tells a loader from the others of these ranks; the same on all of them."""
        self._num_loaders += 1
        return f"number {self._num_loaders} of those made"

    def borrow(
        self, settings: Mapping[str, str], error: Exception | None, timeout_s: float
    ) -> Lease:
        """A group that is free on all ranks. All call it, in the same order.

        Args:
            settings: What must be the same on all ranks for them to begin.
            error: Why this rank cannot begin; all ranks then raise it, and none borrows.
            timeout_s: Longest wait for a rank, here and in calls of the group.

        Raises:
            RemoteConfigError: A rank cannot begin because of bad input.
            CommError: A rank cannot begin, the settings differ, or a rank did not come.
        """
        set_timeout(self.control, timeout_s)
        free = [place.is_free for place in self._places]
        own = np.array([secrets.randbits(62), *free], dtype=np.int64)
        said = agree(
            self.control,
            Statement(settings, own, error),
            what="beginning an iteration",
            step=0,
            capacity=max(_CAPACITY, own.size),
        )
        free_everywhere = np.flatnonzero(np.stack(said)[:, 1:].all(axis=0)).tolist()
        if not free_everywhere:
            group = new_group(self.control.ranks, "loader", timeout_s, backend="gloo")
            self._places.append(_Place(group))
        place = self._places[free_everywhere[0] if free_everywhere else -1]
        set_timeout(place.group, timeout_s)
        place.is_lent = True

        def give_back() -> None:
            place.is_lent = False

        return Lease(place.group, int(said[0][0]), give_back)


def pool_of(members: Sequence[int], timeout_s: float) -> Pool:
    """The pool of these global ranks, made where there is none that works. All of them call it.

    Raises:
        CommError: A member did not come.
    """
    world, key = this_world(), (Pool, tuple(members))
    pool = world.kept(key, lambda: Pool(members, timeout_s))
    if is_ended(pool.control):
        world.forget(key)
        pool = world.kept(key, lambda: Pool(members, timeout_s))
    set_timeout(pool.control, timeout_s)
    return pool


_SETTLING_S = 0.5  # within a `with`, the error follows when the loop was left
_TICK_S = 0.02

Position = tuple[int, int]
"""Step of the epoch and microbatch of the step."""

NOWHERE: Position = (-1, -1)
"""Before the first microbatch."""


@dataclass(frozen=True, slots=True)
class Departure:
    """That a rank left an iteration.

    Attributes:
        use: Which use of the group the iteration is.
        rank: Of the group.
        after: The last microbatch that it was handed.
        reason: The error with which it left; "" if it is unknown, or none.
        is_final: Whether that is all that it will say.
    """

    use: int
    rank: int
    after: Position
    reason: str = ""
    is_final: bool = True

    def __str__(self) -> str:
        if self.reason:
            return f"left the iteration with {self.reason}"
        where = f"after microbatch {self.after[1]} of step {self.after[0]}"
        where = "before the first microbatch" if self.after == NOWHERE else where
        return f"closed the loader {where}: all ranks must leave an iteration at the same step"


class Departures:
    """Who left an iteration first.

    Never raises: where the store is gone with its host, the connections to that rank are, too.

    Args:
        group: The group of the iteration.
        use: Which use of it.
    """

    def __init__(self, group: RankGroup, use: int) -> None:
        self._name = group.process_group.group_name
        self._use = use

    def announce(self, own: Departure) -> None:
        """Say that this rank leaves; the first of all counts, and may add its reason."""
        text, known = self._read()
        is_new = known is None or (known.rank == own.rank and not known.is_final)
        if is_new:
            self._replace(text, own)

    def read(self) -> Departure | None:
        """Who left, if somebody did."""
        return self._read()[1]

    def settle(self) -> Departure | None:
        """The same with the reason, which may take a moment; alike on all ranks from then on."""
        deadline = time.monotonic() + _SETTLING_S
        while True:
            text, known = self._read()
            if known is None or known.is_final:
                return known
            if time.monotonic() > deadline:
                own = Departure(known.use, known.rank, known.after, known.reason)
                self._replace(text, own)
            time.sleep(_TICK_S)

    def _read(self) -> tuple[str, Departure | None]:
        """The note as it stands, and what it says of this iteration."""
        try:
            text = notes.read(notes.LEFT, self._name) or ""
        except (RuntimeError, ValueError):
            return "", None
        if not text:
            return "", None
        given = json.loads(text)
        departure = Departure(**{**given, "after": tuple(given["after"])})
        return text, departure if departure.use == self._use else None

    def _replace(self, before: str, departure: Departure) -> None:
        """Write the note, unless somebody else did meanwhile."""
        try:
            notes.replace(notes.LEFT, self._name, before, json.dumps(asdict(departure)))
        except (RuntimeError, ValueError):
            return


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
        with self._changed:
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
            if self._redistributor.rules.ends == "drop_last":
                self.num_dropped += len(offer.lens) + self._reading.num_unread
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
