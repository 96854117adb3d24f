"""Ends waits that can never end, because a rank failed.

A thread looks at waits that take longer than a moment, and ends one if it finds twice that a rank
failed before it came. Slow ranks are waited for as long as the group's timeout says.

It also ends waits in the collectives of other code, as DDP's, for a rank that failed before them.
"""

import atexit
import itertools
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache

import torch.distributed as dist

from bascule.comm.groups import OtherCalls, calls_in_use, other_calls, resolve
from bascule.comm.guard import notes
from bascule.comm.guard.notes import Failure
from bascule.comm.guard.store import StoreSilentError
from bascule.comm.guard.stuck import Stuck, stuck_behind_failure
from bascule.comm.guard.verdicts import Verdict, judge
from bascule.comm.world import this_world

logger = logging.getLogger(__name__)

PATIENCE_S = 1.0
_TICK_S = 0.4
_ALL = 2**62  # calls
_LOOKS_A_S = 4000  # of all ranks together at the store, while all goes well


@dataclass(slots=True, eq=False)
class Wait:
    """A wait of a thread of this rank.

    Attributes:
        id: Tells the waits of this rank apart.
        group: Key of the group.
        number: Of the call.
        needs: Global ranks whose part it waits for; this one may be among them.
        thread: Which waits.
        since: When it began.
        verdict: Why it can never end; None while it may.
        suspicion: What the last look found.
    """

    id: int
    group: str
    number: int
    needs: tuple[int, ...]
    thread: int = field(default_factory=threading.get_ident)
    since: float = field(default_factory=time.monotonic)
    verdict: Verdict | None = None
    suspicion: Verdict | None = None


_UNREAD = StoreSilentError, dist.DistNetworkError
"""The host of the store is gone, as the one that ended first: nobody can read a note."""


class Watch:
    """Looks after the waits of this rank, in a thread of its own.

    The thread ends with the process groups of the world, or with the interpreter, which joins it.

    Args:
        world: The default process group.
        end_all: Ends all calls of this rank, and those given of other code; what waits in one
            fails.
    """

    def __init__(
        self, world: dist.ProcessGroup, end_all: Callable[[str, Sequence[OtherCalls]], None]
    ) -> None:
        self._world = weakref.ref(world)
        self._rank = dist.get_rank()
        self._end_all = end_all
        self._waits: dict[int, Wait] = {}
        self._ids = itertools.count()
        self._failures: dict[int, Failure] = {}  # by thread, until it goes on
        self._failing = threading.Lock()  # these and the note of them change together
        self._stuck: dict[int, Stuck] = {}  # by rank that failed, where it was found first
        self._next_look = 0.0
        self._meetings: Counter[str] = Counter()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, group: str, number: int, needs: tuple[int, ...]) -> Wait:
        """This thread waits for others in a call, until `end`. Arguments as for `Wait`."""
        self._ensure_thread()
        wait = Wait(next(self._ids), group, number, needs)
        self._waits[wait.id] = wait
        return wait

    def end(self, wait: Wait, *, is_done: bool) -> None:
        """It waits no longer; done, if the others came."""
        del self._waits[wait.id]
        with suppress(*_UNREAD):  # what others made of a call counts, not what they read
            if is_done and wait.thread in self._failures:  # it went on, and the others with it
                with self._failing:
                    del self._failures[wait.thread]
                    notes.erase(notes.FAILED, self._rank)

    def num_met(self, name: str) -> int:
        """How many meetings of that name came about."""
        return self._meetings[name]

    def count_meeting(self, name: str) -> None:
        """Say that one more did."""
        self._meetings[name] += 1

    def tell_failure(self, failure: Failure, *, is_over: bool = False) -> None:
        """Tell those that will wait for this rank that this thread failed, until it goes on.

        They may wait in calls of other code, which are the main thread's.

        Args:
            failure: What went wrong.
            is_over: Whether the calls of all threads end with it, as their connections do.
        """
        before = self._failures.get(threading.get_ident())
        if before is not None and before.goes_on and not failure.cause:
            cause = before.told_of(self._rank)  # the others had to come to agree on it
            failure = replace(failure, cause=cause, is_input=before.is_input)
        done = _calls_done() if is_over else _done_by_this_thread()
        is_main = threading.current_thread() is threading.main_thread()
        failure = replace(failure, done=done, others=_others_begun() if is_main else {})
        with self._failing:
            if is_main or not is_over:
                self._failures[threading.get_ident()] = failure
            notes.write_failure(self._rank, failure)
        self._ensure_thread()

    def go_on(self, group: str, number: int) -> None:
        """This thread begins a call: that it failed before concerns those in it no more."""
        own = threading.get_ident()
        if own not in self._failures:
            return
        with self._failing:
            failure = self._failures[own]
            came = {**failure.came, group: number + 1}
            failure = replace(failure, done=_done_by_this_thread(), came=came)
            self._failures[own] = failure
            notes.write_failure(self._rank, failure)

    def close(self) -> None:
        """End the thread, and join it."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _ensure_thread(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._run, name="bascule watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _run(self) -> None:
        while not self._stop.wait(_TICK_S) and self._world() is dist.group.WORLD is not None:
            try:
                self._look()
                self._look_beyond()
            except (RuntimeError, ValueError):  # the store is gone: collectives fail, too
                continue
        atexit.unregister(self.close)

    def _look(self) -> None:
        now = time.monotonic()
        late = [wait for wait in list(self._waits.values()) if now - wait.since > PATIENCE_S]
        if not late or not notes.is_any_failed():
            return
        own = next(iter(list(self._failures.values())), None)
        failure_of = cache(notes.read_failure)
        for wait in late:
            needs = [rank for rank in wait.needs if rank != self._rank]
            verdict = judge(wait.group, wait.number, needs, own, failure_of)
            if verdict is not None and verdict == wait.suspicion:
                wait.verdict = verdict
                self._end_all(verdict.text, ())
                return
            wait.suspicion = verdict

    def _look_beyond(self) -> None:
        """End calls of other code that wait for a rank that failed, and came no further.

        While this rank has failed itself, it says how far it came.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + max(PATIENCE_S, dist.get_world_size() / _LOOKS_A_S)
        main = threading.main_thread().ident or 0
        with self._failing:
            of_main = self._failures.get(main)
            if of_main is not None:
                version = of_main.version + 1
                said = replace(of_main, others=_others_begun(), version=version)
                self._failures[main] = said
                notes.write_failure(self._rank, said)
        stuck = stuck_behind_failure() if of_main is None else None
        if stuck is None:
            return
        before = self._stuck.setdefault(stuck.rank, stuck)
        if before.calls != stuck.calls or before.version > stuck.version:
            self._stuck[stuck.rank] = stuck
        elif before.version < stuck.version:  # since the first look neither has come any further
            del self._stuck[stuck.rank]
            logger.error("ended what waits for rank %d: %s", stuck.rank, stuck.text)
            self._end_all(stuck.text, stuck.calls)


def _others_begun() -> dict[str, int]:
    return {one.key: one.num_begun for one in other_calls()}


def _calls_done() -> dict[str, int]:
    return {key: calls.num_done for key, calls in calls_in_use().items()}


def _done_by_this_thread() -> dict[str, int]:
    """Calls done by group; all where another thread makes them, because it did not fail."""
    own = threading.get_ident()
    return {
        key: _ALL if calls.is_of_another(own) else calls.num_done
        for key, calls in calls_in_use().items()
    }


def watch_of_world(end_all: Callable[[str, Sequence[OtherCalls]], None]) -> Watch:
    """The one of this process: a rank is where all its threads and groups are."""
    return this_world().kept(Watch, lambda: Watch(resolve(None), end_all))
