"""Ends waits that can never end: ranks that wait for each other, in calls that do not fit.

A thread looks at waits that take longer than a moment. It tells the other ranks where this one is,
reads where those are that it waits for, and ends the wait if it finds that no rank in a circle will
ever come. Slow ranks are waited for as long as the group's timeout says.

It also ends waits in the collectives of other code, as DDP's, for a rank that failed before them.
"""

import atexit
import itertools
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from bascule.comm.groups import OtherCalls, calls_in_use, other_calls, resolve
from bascule.comm.guard import notes
from bascule.comm.guard.calls import Begun
from bascule.comm.guard.notes import Failure, Position, Waiting
from bascule.comm.guard.stuck import Stuck, stuck_behind_failure
from bascule.comm.world import this_world

logger = logging.getLogger(__name__)

PATIENCE_S = 1.0
_TICK_S = 0.4
_ALL = 2**62  # calls
_MOST_READ = 64  # notes of other ranks that one look may read
_LOOKS_A_S = 4000  # of all ranks together at the store, while all goes well


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a wait can never end.

    Attributes:
        text: As errors say it.
        evidence: (rank, id of its wait) along a way of waits, (rank, None) at its end if that rank
            failed; what must be found twice to be certain. Empty if it is.
        is_input: Whether a rank was given bad input.
    """

    text: str
    evidence: tuple[tuple[int, int | None], ...] = ()
    is_input: bool = False


@dataclass(slots=True, eq=False)
class Wait:
    """A wait of a thread of this rank.

    Attributes:
        id: Tells the waits of this rank apart.
        group: Key of the group.
        begun: The call.
        needs: Global ranks whose part it waits for; this one may be among them.
        label: How errors call the group.
        thread: Which waits.
        since: When it began.
        verdict: Why it can never end; None while it may.
        is_told: Whether others may have read of it.
        suspicion: What the last look found.
    """

    id: int
    group: str
    begun: Begun
    needs: tuple[int, ...]
    label: str
    thread: int = field(default_factory=threading.get_ident)
    since: float = field(default_factory=time.monotonic)
    verdict: Verdict | None = None
    is_told: bool = False
    suspicion: Verdict | None = None

    @property
    def note(self) -> Waiting:
        """What it tells others."""
        own, begun = dist.get_rank(), self.begun
        needs = tuple(rank for rank in self.needs if rank != own)
        text = f"{begun.call} on {self.label}"
        return Waiting(self.id, self.thread, self.group, needs, begun.number, begun.mark, text)


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
        self._told = ""
        self._failures: dict[int, Failure] = {}  # by thread, until it goes on
        self._stuck: dict[int, Stuck] = {}  # by rank that failed, where it was found first
        self._next_look = 0.0
        self._meetings: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, group: str, begun: Begun, needs: tuple[int, ...], label: str) -> Wait:
        """This thread waits for others in a call, until `end`. Arguments as for `Wait`."""
        self._ensure_thread()
        wait = Wait(next(self._ids), group, begun, needs, label)
        self._waits[wait.id] = wait
        return wait

    def end(self, wait: Wait, *, is_done: bool) -> None:
        """It waits no longer; done, if the others came."""
        del self._waits[wait.id]
        if wait.is_told:  # at once: others must not take this rank for one that waits
            self._tell()
        if is_done and wait.thread in self._failures:  # it went on, and the others with it
            del self._failures[wait.thread]
            notes.erase(notes.FAILED, self._rank)

    def num_met(self, name: str) -> int:
        """How many meetings of that name came about."""
        return self._meetings[name]

    def count_meeting(self, name: str) -> None:
        """Say that one more did."""
        self._meetings[name] += 1

    def tell_failure(self, failure: Failure) -> None:
        """Tell those that will wait for this rank that this thread failed, until it goes on.

        They may wait in calls of other code, which are the main thread's.
        """
        done = _calls_done() if failure.ranks else _done_by_this_thread()
        is_main = threading.current_thread() is threading.main_thread()
        failure = replace(failure, done=done, others=_others_begun() if is_main else {})
        if is_main or not failure.ranks:
            self._failures[threading.get_ident()] = failure
        notes.write_failure(self._rank, failure)
        self._ensure_thread()

    def go_on(self) -> None:
        """This thread begins a call: that it failed before concerns those in it no more."""
        failure = self._failures.get(threading.get_ident()) if self._failures else None
        if failure is not None:
            notes.write_failure(self._rank, replace(failure, done=_done_by_this_thread()))

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
        if not late:
            return
        for wait in late:
            wait.is_told = True
        self._tell()
        own = self._position(tuple(wait.note for wait in late))
        found: dict[int, Position | None] = {self._rank: own}

        def position_of(rank: int) -> Position | None:
            if rank not in found:
                found[rank] = notes.read_position(rank) if len(found) < _MOST_READ else None
            return found[rank]

        def failure_of(rank: int) -> Failure | None:
            own = next(iter(list(self._failures.values())), None)
            return own if rank == self._rank else notes.read_failure(rank)

        for wait in late:
            verdict = judge(self._rank, wait.note, position_of, failure_of)
            # Twice the same: all waits on the way were going on at one moment between.
            if verdict is not None and (not verdict.evidence or verdict == wait.suspicion):
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
        for thread, failure in list(self._failures.items()):
            if failure.others:
                version = failure.version + 1
                failure = replace(failure, others=_others_begun(), version=version)
                self._failures[thread] = failure
                notes.write_failure(self._rank, failure)
        stuck = None if self._failures else stuck_behind_failure()
        if stuck is None:
            return
        before = self._stuck.setdefault(stuck.rank, stuck)
        if before.calls != stuck.calls or before.version > stuck.version:
            self._stuck[stuck.rank] = stuck
        elif before.version < stuck.version:  # since the first look neither has come any further
            del self._stuck[stuck.rank]
            logger.error("ended what waits for rank %d: %s", stuck.rank, stuck.text)
            self._end_all(stuck.text, stuck.calls)

    def _tell(self) -> None:
        """Write where this rank is, or take it back."""
        with self._lock:
            waits = tuple(wait.note for wait in list(self._waits.values()) if wait.is_told)
            text = self._position(waits).to_json() if waits else ""
            if text == self._told:
                return
            if text:
                notes.write(notes.WAITING, self._rank, text)
            else:
                notes.erase(notes.WAITING, self._rank)
            self._told = text

    def _position(self, waits: tuple[Waiting, ...]) -> Position:
        threads: dict[str, int] = {}
        begun: dict[str, tuple[tuple[int, int, str], ...]] = {}
        for key, calls in calls_in_use().items():
            if calls.thread is not None:
                threads[key] = calls.thread
                recent = [(one.number, one.mark, str(one.call)) for one in list(calls.recent)]
                begun[key] = tuple(recent)
        main = threading.main_thread().ident
        return Position(0 if main is None else main, threads, begun, waits)


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


def judge(
    rank: int,
    wait: Waiting,
    position_of: Callable[[int], Position | None],
    failure_of: Callable[[int], Failure | None],
) -> Verdict | None:
    """Why a wait can never end, or None if it may.

    Certain at once if a rank that is needed made another call in place of this one. Otherwise a
    rank that is needed failed before this call, and has not made it since; or a way from rank to
    rank, each waiting in a call that the next has not made, comes back to this one. These are
    certain if they are found twice. A rank that fails where this one failed, too, met what all did;
    and one that waits for a rank that failed will not wait for ever.

    Args:
        rank: Whose wait it is.
        wait: The wait.
        position_of: Where a rank is, this one included; None for another that does not wait.
        failure_of: How a rank failed, this one included; None for one that did not, or went on.
    """
    seen: set[tuple[int, int]] = set()

    def failure_before(at: Waiting, other: int) -> Failure | None:
        failed, own = failure_of(other), failure_of(rank)
        if failed is None or not failed.cause or failed.done.get(at.group, 0) > at.number:
            return None
        is_alike = (
            other != rank
            and own is not None
            and own.done.get(at.group) == failed.done.get(at.group)
        )
        return None if is_alike else failed

    def follow(of: int, at: Waiting, way: list[tuple[int, Waiting]]) -> Verdict | None:
        way = [*way, (of, at)]
        evidence = tuple((who, where.id) for who, where in way)
        for other in at.needs:
            position = position_of(other)
            begun = (
                {one[0]: one[1:] for one in position.begun.get(at.group, ())} if position else {}
            )
            if at.number in begun and begun[at.number][0] != at.mark:
                return Verdict(_unlike(of, at, other, begun, position_of(of)))
            if begun and max(begun) >= at.number:
                continue  # it came; its part is on the way
            failed = failure_before(at, other)
            if failed is not None and of == rank:
                return Verdict(failed.told_of(other), (*evidence, (other, None)), failed.is_input)
            if failed is not None or position is None:
                continue
            thread = position.threads.get(at.group, position.main)
            for after in (one for one in position.waits if one.thread == thread):
                if (other, after.id) == (rank, wait.id):
                    others = ((at, who) for _, at in way[1:] for who in at.needs[:_MOST_READ])
                    is_broken = any(failure_before(at, who) is not None for at, who in others)
                    return None if is_broken else Verdict(_circle(way), evidence)
                if (other, after.id) not in seen:
                    seen.add((other, after.id))
                    found = follow(other, after, way)
                    if found is not None:
                        return found
        return None

    return follow(rank, wait, [])


def _unlike(
    rank: int,
    wait: Waiting,
    other: int,
    theirs: Mapping[int, tuple[int, str]],
    position: Position | None,
) -> str:
    """Names the first calls that differ: marks tell of all calls before, too."""
    own = {wait.number: (wait.mark, wait.text)}
    if position is not None:
        own |= {one[0]: one[1:] for one in position.begun.get(wait.group, ())}
    both = sorted(own.keys() & theirs.keys())
    first = next((number for number in both if own[number][0] != theirs[number][0]), wait.number)
    mine, other_one = own[first][1], theirs[first][1]
    if mine == other_one.partition(" on ")[0] or mine.partition(" on ")[0] == other_one:
        other_one += " of another form (shapes, dtypes, a mask, a scale, a kernel)"
    return (
        f"ranks make unlike calls: rank {rank} made {mine} where rank {other} made "
        f"{other_one}: all ranks must make the same calls, with the same settings, in the "
        "same order"
    )


def _circle(way: list[tuple[int, Waiting]]) -> str:
    said = "; ".join(f"rank {rank} in {wait.text}" for rank, wait in way)
    return (
        f"ranks wait for each other for ever: {said}: all ranks must make the same calls in the "
        "same order"
    )


def watch_of_world(end_all: Callable[[str, Sequence[OtherCalls]], None]) -> Watch:
    """The one of this process: a rank is where all its threads and groups are."""
    return this_world().kept(Watch, lambda: Watch(resolve(None), end_all))
