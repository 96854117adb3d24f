"""The thread that makes steps of a balanced loader ahead, its process group, and its end.

Two threads in one group of gloo get each other's bytes, and torch never frees a single group. So
each iteration borrows from a pool a group that is free on all ranks, found by a gather.

A rank that leaves sends a flag in its next gather, and a note to the store. Threads of other ranks
that are far ahead read the note once a second, and go on up to the microbatch in it.
"""

import itertools
import json
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bascule.comm import threads
from bascule.comm.agree import agree
from bascule.comm.failures import ask, leave, read
from bascule.comm.groups import RankGroup, new_group, set_timeout, this_world
from bascule.data.source import Reading
from bascule.data.step_timer import StepTimer
from bascule.data.steps import CLOSING, ClosedError, ReadyStep, Redistributor, load
from bascule.errors import CommError, ConfigError, PlanError

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Seconds that a rank with an error of its own waits for the loaders of the others."""

_LOOK_S = 1.0  # between looks for ranks that left, while there is nothing to do
_CAPACITY = 8  # groups a rank that the first gather has room for

Position = tuple[int, int]
"""Step of the epoch and microbatch of the step; (-1, -1) before the first."""


class Departure(NamedTuple):
    """A rank that left, the last microbatch that it got, and its error; "" for none."""

    rank: int
    after: Position
    reason: str

    def __str__(self) -> str:
        if self.reason:
            return f"left the iteration with {self.reason}"
        step, micro = self.after
        where = f"after microbatch {micro} of step {step}" if step >= 0 else "before the first one"
        return f"closed the loader {where}: all ranks must leave an iteration at the same step"


class Lease:
    """A group of a pool, and whether an iteration of this rank uses it."""

    def __init__(self, group: RankGroup) -> None:
        self.group, self.is_lent = group, False
        self.use = 0  # number of times it was lent, alike on all ranks

    @property
    def _note(self) -> str:
        return f"left/{self.group.process_group.group_name} {self.use}"

    def announce(self, reason: str, after: Position) -> None:
        """Write the note that this rank leaves, unless another rank's note is there already."""
        text = json.dumps([self.group.rank, after, reason])
        with suppress(RuntimeError, ValueError):  # the store is gone, and so are connections
            key = f"bascule/{self._note}"
            ask(lambda store: store.compare_set(key, "", text))

    def departure(self) -> Departure | None:
        """Return the first rank that left, if there is one."""
        text = None
        with suppress(RuntimeError, ValueError):
            text = ask(lambda store: read(store, self._note))
        if text is None:
            return None
        rank, (step, micro), reason = json.loads(text)
        return Departure(rank, (step, micro), reason)


class Pool:
    """Process groups of some global ranks, which loaders share. All these ranks construct it."""

    def __init__(self, members: Sequence[int], timeout_s: float) -> None:
        # The training thread constructs loaders and borrows in this group.
        self.control = new_group(members, "loader", timeout_s, backend="gloo")
        self.num_loaders = 0
        self._leases: list[Lease] = []

    def borrow(self, settings: dict[str, str], error: Exception | None, timeout_s: float) -> Lease:
        """Return a group that is free on all ranks. All call it, in the same order."""
        set_timeout(self.control, timeout_s)
        is_free = [not lease.is_lent and lease.group.calls.ended is None for lease in self._leases]
        what, capacity = "beginning an iteration", max(_CAPACITY, len(is_free))
        values = np.array(is_free, dtype=np.int64)
        gathered = agree(self.control, settings, error, what=what, values=values, capacity=capacity)
        free_everywhere = np.flatnonzero(np.stack(gathered).all(axis=0)).tolist()
        if not free_everywhere:
            group = new_group(self.control.ranks, "loader", timeout_s, backend="gloo")
            self._leases.append(Lease(group))
        lease = self._leases[free_everywhere[0] if free_everywhere else -1]
        set_timeout(lease.group, timeout_s)
        lease.is_lent, lease.use = True, lease.use + 1
        return lease


def pool_of(members: Sequence[int], timeout_s: float) -> Pool:
    """Return the pool of these global ranks; make one if there is none, or it has failed."""
    pool = this_world().cached(
        (Pool, tuple(members)),
        lambda: Pool(members, timeout_s),
        lambda pool: not pool.control.is_ended,
    )
    set_timeout(pool.control, timeout_s)
    return pool


class Prefetcher:
    """Makes steps in a thread, `depth` ahead; `loads` is False on a rank that only computes."""

    def __init__(
        self,
        reading: Reading,
        redistributor: Redistributor,
        lease: Lease,
        first: int,
        *,
        depth: int,
        loads: bool,
    ) -> None:
        self._reading, self._redistributor, self._lease = reading, redistributor, lease
        self._first, self._depth, self._loads = first, depth, loads
        self._changed = threading.Condition()  # of the fields below
        self._ready: deque[ReadyStep] = deque()
        self._handed: Position = (-1, -1)
        self._is_closing = self._has_ended = False
        self._error: BaseException | None = None  # that ended the thread
        self._left: Departure | None = None
        self.num_dropped = 0
        self.timer = StepTimer()
        self._thread = threads.start(self._run, "bascule loader", self._close_at_exit)

    # --- the thread that trains -------------------------------------------------------------------

    def take(self) -> tuple[ReadyStep | None, tuple[float, float]]:
        """Return the next step (None at the end), and when this thread's wait began and ended."""
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._has_ended)
            waited = start, time.perf_counter()
            self._check_open()
            taken = self._ready.popleft() if self._ready else None
            self._changed.notify_all()  # there is room for another step
            if taken is None and self._error is not None:
                raise self._error
            return taken, waited

    def hand_out(self, position: Position) -> None:
        """Note which microbatch is used next; raise as `take`, or if a rank left before it."""
        with self._changed:
            self._check_open()
            if self._left is not None and position > self._left.after and self._error is not None:
                raise self._error
            self._handed = position

    def _check_open(self) -> None:
        """Raise an error that must not wait until the steps that are ready are used."""
        if self._is_closing:
            raise ConfigError(
                "close(), or another iteration of the same loader, ended this iteration: make one "
                "loader per iteration"
            )
        if self._left is not None and self._left.reason and self._error is not None:
            raise self._error

    def leave(self, reason: str = "") -> None:
        """Ask for no further step, and tell the other ranks why, without waiting."""
        if not self._has_ended:
            self._lease.announce(reason, self._handed)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def join(self, patience_s: float | None = None) -> bool:
        """Wait for the thread, which ends when other ranks' threads do; return True if it ended."""
        if self._thread is threading.current_thread():  # which collects an iteration as garbage
            return False
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_ended, patience_s):
                logger.warning("the loaders of the other ranks did not end within %g s", patience_s)
                return False
        self._thread.join()  # the rest does not depend on other ranks
        return True

    @property
    def left_by_another(self) -> BaseException | None:
        """The error of a rank that left first, if that ended the thread."""
        is_other = self._left is not None and self._left.rank != self._lease.group.rank
        return self._error if is_other else None

    def _close_at_exit(self) -> float:
        error = getattr(sys, "last_value", None)
        self.leave("" if error is None else text_of(error))
        return PATIENCE_S if self.join(PATIENCE_S) else 0.0

    # --- the thread that makes steps --------------------------------------------------------------

    def _run(self) -> None:
        is_alike = True
        try:
            self._make_all()
        except ClosedError as error:
            self._error = self._who_left(error)
        except (CommError, PlanError) as error:
            self._error = _own_error(error)
        except BaseException as error:
            # Other ranks wait in a collective that this thread never enters: the group is lost.
            is_alike, self._error = False, error
            leave(error, "the thread of the loader")
        if is_alike:
            self._lease.is_lent = False
        _forget_locals(self._error)
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        # Ends the loader's workers here; garbage collection would end them in any thread.
        self._reading.close()

    def _make_all(self) -> None:
        rules, saves = self._redistributor.rules, self._redistributor.saves
        moving_s = np.nan
        for step in itertools.count(self._first):
            loaded = CLOSING
            if self._has_room():
                since = time.perf_counter()
                loaded = load(self._reading, rules, loads=self._loads, saves=saves(step))
                input_s = time.perf_counter() - since if self._loads else 0.0
                times = self.timer.take(input_s, moving_s)
                loaded = replace(loaded, times=times)
            made = self._redistributor.step(step, loaded)
            if made is None:
                if rules.ends == "drop_last" and loaded.offer is not None:
                    self.num_dropped = loaded.offer.lens.size + self._reading.num_unread
                return
            moving_s = made.moving_s
            with self._changed:
                self._ready.append(made)
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until the training has used a step; return False if a rank leaves instead."""

        def goes_on() -> bool:
            return self._is_closing or len(self._ready) < self._depth

        while True:
            with self._changed:
                if self._changed.wait_for(goes_on, _LOOK_S):
                    return not self._is_closing
            if self._lease.departure() is not None:
                return False

    def _who_left(self, error: ClosedError) -> CommError:
        """Return the error with the rank that left first, after which step, and why."""
        self._left, group = self._lease.departure(), self._lease.group
        if self._left is None:
            return error
        who = f"rank {self._left.rank} of group {group.name!r}"
        named = CommError(f"step {error.step}: {who} {self._left}")
        if self._left.reason and self._left.rank != group.rank:
            # The training may end in a collective of its own, which does not say why.
            logger.error("%s", named)
        return named


def _own_error(error: CommError | PlanError) -> Exception:
    """Return what this rank's own code raised, with the step as a note; else the error itself."""
    own = None if error.__cause__ is None else error.__cause__.__cause__  # see `steps.named`
    if not isinstance(own, Exception) or isinstance(own, StopIteration):
        return error
    own.add_note(str(error))
    return own


def _forget_locals(error: BaseException | None) -> None:
    """Free the locals in the frames of an error and its causes."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        traceback.clear_frames(error.__traceback__)
        seen.append(error)
        error = error.__cause__ or error.__context__


def text_of(error: BaseException) -> str:
    """Return an error as one line."""
    lines = str(error).strip().splitlines()
    return type(error).__name__ + (f": {lines[0]}" if lines else "")
