"""A rank that fails ends the waits of all others, within seconds and with its reason.

An error that leaves `shared` becomes a note in the store of the job, which the watch, a thread of
each rank, reads once a second. If a rank began a call that the failed rank never began, its wait
cannot end: its watch closes the connections of gloo, and the wait raises CommError with the note. A
rank that dies leaves no note: the others sign in the store, and the error names the ranks that do
not. If a rank lives, but is late on a busy machine, its watch signs for it.
"""

import functools
import json
import logging
import queue
import re
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed import distributed_c10d as c10d

from bascule.comm import threads
from bascule.errors import CommError, ConfigError, PlanError, RemoteConfigError
from bascule.quantities import seconds

is_profiled = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
"""Return true while a profiler runs on this thread."""


def begin_range(where: str) -> "torch.profiler.record_function":
    """Begin and return a range of the profiler: "bascule::route" for "step 3: route"."""
    step, _, what = where.rpartition(": ")
    begun = torch.profiler.record_function(f"bascule::{what}", step)
    begun.__enter__()
    return begun


F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the store; shorter waits are not watched
ROLL_CALL_S = 2.0  # longest wait for other ranks' signs of life
ANSWER_S = 10.0  # longest wait for an answer of the store
_LOOKS_A_S = 4000  # most looks a second, of all ranks
_ALL = 2**62  # as many calls as there can be
_LAST = 8  # calls of a group that waiting ranks compare
_READS = 8  # reads of what other ranks wait for, in one look
_CLOSING_TAG = 0x7FFFFFFF
_BROKEN_OFF = re.compile(
    "gloo.*(Connection (closed|reset) by peer|Timed out waiting)|Application timeout caused"
)
STOPS_RECOMPUTING: Any = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())
"""By which checkpointing ends a recomputation early: no error."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Note of a rank that failed."""

    rank: int
    text: str = ""  # empty: the rank only noticed that others are gone
    is_input: bool = False  # whether bad input was the reason
    at: dict[str, int] = field(default_factory=dict[str, int])  # calls by group when it failed
    now: dict[str, int] = field(default_factory=dict[str, int])  # calls by group by now

    def error(self, message: str) -> CommError:
        """Return the error of a rank that waited for this one."""
        return RemoteConfigError(message) if self.is_input else CommError(message)


class shared:  # noqa: N801 - called as a function, and a decorator
    """A block or function that all ranks run: an error that leaves it ends the others' waits.

    A collective that is broken off in it raises CommError. torch's profiler shows it as a range.
    """

    __slots__ = ("_range", "_where")

    def __init__(self, where: str) -> None:
        self._where = where

    def __call__(self, function: F) -> F:
        """Return a function that runs in such a block, except in compiled code."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            with shared(self._where):
                return function(*args, **kwargs)

        return cast(F, call)

    def __enter__(self) -> None:
        self._range = begin_range(self._where) if is_profiled() else None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._range is not None:
            self._range.__exit__(kind, error, traceback)
        failed = None if error is None else leave(error, self._where)
        if failed is not None:
            raise failed.error(f"{self._where}: {failed.text}") from error


class Calls:
    """Calls of a process group, or of a part of it, on this rank: each is posted, then awaited.

    Messages carry the number of their call as tag, so two calls in flight never mix messages.
    """

    def __init__(self, key: str = "", ranks: Sequence[int] = (), name: str = "") -> None:
        self.key, self.ranks, self.name = key, tuple(ranks), name
        self.number = 0  # of calls begun
        self.last = deque[str](maxlen=_LAST)  # what the last calls were
        self.num_messages = 0  # over gloo, which counts each as a collective
        self.ended: str | None = None  # why there can be no more
        self.thread: int | None = None  # that made the last one
        self.since: float | None = None  # when this rank began to wait in one
        self._first_tag = zlib.crc32(f"bascule {key.partition(' ')[2]}".encode())

    @functools.cached_property
    def _watch(self) -> "Watch":
        return watch_of_world()

    def begin(self, where: str) -> int:
        """Number the next call and return its tag; `wait` ends it."""
        if self.ended is not None:
            raise CommError(f"{where}: its process group was ended before: {self.ended}")
        self.thread = threading.get_ident()
        self.number += 1
        self.last.append(where)
        return (self._first_tag + self.number) & 0x7FFFFFFF

    def post(self, where: str, post: Callable[[int], T]) -> T:
        """Begin a call; return the result of `post(tag)`, or raise CommError if it fails."""
        tag = self.begin(where)
        try:
            return post(tag)
        except RuntimeError as error:
            raise self._failure(where, error) from error

    def wait(self, where: str, wait: Callable[[], object]) -> None:
        """Wait until the other ranks make this call, too; CommError if they do not."""
        waited = begin_range(where) if is_profiled() else None
        watch, self.since = self._watch, time.monotonic()
        try:
            wait()
        except CommError:
            raise
        except RuntimeError as error:
            raise self._failure(where, error) from error
        finally:
            self.since = None
            if waited is not None:
                waited.__exit__(None, None, None)
        if watch.failed_in == threading.get_ident():  # it went on: no note stays
            with suppress(RuntimeError):
                watch.forget()

    def _failure(self, where: str, error: RuntimeError) -> CommError:
        """Return the error of a call that was broken off: why, or else who is missing; logged."""
        watch = self._watch
        what, is_explained = _first_line(error), watch.reason is not None
        failed = watch.broken_off(where, self.ranks)
        is_explained |= not failed.text.startswith(("missing", "no roll call", "every rank"))
        # Of "[/pytorch/../pair.cc:538] Connection closed by peer [..]. This may ..": what happened.
        what = what.partition("] ")[2].partition(". ")[0] if what.startswith("[/") else what
        end = "" if is_explained else f": {what}"
        on = f"failed on group {self.name!r} of ranks {list(self.ranks)}"
        self.ended = f"{where} {on} ({failed.text}){end}"
        logger.error("%s", self.ended)
        return failed.error(self.ended)


def leave(error: BaseException, where: str, *, ends_all: bool = False) -> Failure | None:
    """Leave a note of an error: ranks that wait for this one end with it.

    A CommError, which all ranks raise, needs no note, unless others may go on (`ends_all`). If a
    collective of torch was broken off, the reason is added to the error as a note, and returned.
    """
    if isinstance(error, STOPS_RECOMPUTING) or not dist.is_initialized():
        return None
    watch = watch_of_world()
    is_plain = type(error) is RuntimeError and _BROKEN_OFF.search(_first_line(error)) is not None
    if is_plain or isinstance(error, dist.DistError):  # a collective of torch, broken off or late
        failed = watch.broken_off(where, range(dist.get_world_size()))
        if failed.text not in getattr(error, "__notes__", ()):
            error.add_note(failed.text)
        return failed
    is_over = any(calls.ended for calls in watch.calls)
    if isinstance(error, CommError) and (is_over or not ends_all):
        return None
    is_input = isinstance(error, ConfigError | PlanError)
    cause = _first_line(error) if is_input else f"{type(error).__name__}: {_first_line(error)}"
    with suppress(RuntimeError):  # the store is gone with its host, and so are the others
        text = f"rank {dist.get_rank()} failed in {where}: {cause}"
        watch.fail(text, threading.get_ident(), is_input=is_input)
    return None


def ask(request: Callable[[Any], T]) -> T:
    """Return the answer of the job's store to a request; RuntimeError if it is silent."""
    return watch_of_world().ask(request)


def read(store: Any, key: str) -> str | None:
    """Return the text of a key in the store, or None; one request, which never waits."""
    text = store.compare_set(f"bascule/{key}", "-", "-").decode()
    return None if text == "-" else text


def write(store: Any, key: str, text: str) -> None:
    """Write a text to a key; escape bytes, as of file names, that no store takes."""
    store.set(f"bascule/{key}", text.encode(errors="backslashreplace").decode())


class Watch:
    """A thread that looks after the waits of this rank while the world has process groups."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Calls]]
        self.groups = weakref.WeakKeyDictionary()  # calls by part of the group
        self.objects: dict[Any, Any] = {}  # objects that other modules tie to this process group
        self.reason: Failure | None = None  # why the calls of this rank were ended
        # thread that failed and has not gone on; None: none, or all
        self.failed_in: int | None = None
        self._failed: Failure | None = None
        self._waits: list[Any] = []  # the state of this rank that the store has
        self._turns = count()
        self._suspects: Counter[tuple[str, int]] = Counter()
        self._world, self._rank = weakref.ref(world), dist.get_rank()
        self._look_s = max(LOOK_S, dist.get_world_size() / _LOOKS_A_S)
        self._requests = queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None]()
        self._is_silent = False
        self._thread = threads.start(self._run, "bascule watch", self._end)

    @functools.cached_property
    def _store(self) -> Any:
        """A second connection to the store: other code may wait on the first."""
        job: Any = c10d._get_default_store()
        return job.clone()

    @property
    def calls(self) -> list[Calls]:
        """Calls of all groups and their parts."""
        return [calls for parts in list(self.groups.values()) for calls in list(parts.values())]

    def fail(self, text: str, thread: int | None, *, is_input: bool = False) -> Failure:
        """Leave a note on a thread, or on all threads; without text it is only a sign of life."""
        counts = self._begun(thread)
        failed = Failure(self._rank, text, is_input, counts, counts)
        self._failed, self.failed_in = failed, thread
        self.ask(lambda store: self._note(store, failed))
        if text:
            self.ask(lambda store: write(store, "failed/last", str(self._rank)))
        elif self.ask(self._last) is None:  # keep a failure noted meanwhile
            last = self.ask(lambda store: read(store, "failed/last")) or ""
            self.ask(lambda store: store.compare_set("bascule/failed/last", last, str(self._rank)))
        return failed

    def forget(self) -> None:
        """Erase the note of this rank."""
        self._failed = self.failed_in = self.reason = None
        self.ask(lambda store: store.delete_key(f"bascule/failed/{self._rank}"))

    def broken_off(self, where: str, ranks: Sequence[int]) -> Failure:
        """End all calls of this rank after a call broke off; return why, or the missing ranks."""
        if self.reason is not None:
            return self.reason
        self.end_all(f"{where} was broken off")
        try:
            if self._failed is None:
                self.fail("", None)
            cause = self._cause(ranks)
            self.reason = self.fail(cause.text, None, is_input=cause.is_input)
        except (RuntimeError, ValueError) as error:
            text = f"no roll call, the store is gone with its host: {type(error).__name__}"
            self.reason = Failure(self._rank, text)
        return self.reason

    def end_all(self, reason: str) -> None:
        """End all calls of this rank, and close its connections of gloo."""
        for calls in self.calls:
            calls.ended = calls.ended or reason
        for group in list(self.groups):
            key = f"ended/{group.group_name}"
            with suppress(RuntimeError, ValueError):  # the store is gone
                self.ask(functools.partial(write, key=key, text=reason))
        for group in _gloo_groups():
            _close(group)

    def ask(self, request: Callable[[Any], T]) -> T:
        """Return the answer to a request; RuntimeError if the store does not answer in time."""
        if threading.current_thread() is self._thread:
            return request(self._store)
        answer: Future[T] = Future()
        self._requests.put((request, answer))
        try:  # after one wait in vain, later ones are short
            result = answer.result(0.1 if self._is_silent else ANSWER_S)
        except TimeoutError:
            self._is_silent = True
            raise RuntimeError(f"the job's store did not answer in {seconds(ANSWER_S)}") from None
        self._is_silent = False
        return result

    def _end(self) -> float:
        self._requests.put(None)
        return 0.1 if self._is_silent else ANSWER_S

    def _run(self) -> None:
        next_look = 0.0
        while self._world() is dist.group.WORLD is not None:
            with suppress(queue.Empty):
                item = self._requests.get(timeout=max(next_look - time.monotonic(), 0.01))
                if item is None:
                    break
                request, answer = item
                try:
                    answer.set_result(request(self._store))
                except BaseException as error:
                    answer.set_exception(error)
            if time.monotonic() >= next_look:
                with suppress(RuntimeError, ValueError):  # the store is gone: calls fail, too
                    self._look()
                next_look = time.monotonic() + self._look_s

    def _look(self) -> None:
        """Write how far this rank came, if it failed, and end what waits for one that did."""
        if self._failed is not None:
            self._note(self._store, replace(self._failed, now=self._begun(self.failed_in)))
        failed = self._last(self._store)
        if failed is not None and not failed.text:  # a rank calls the roll
            write(self._store, f"alive/{self._rank}", "")
            failed = None
        if failed is None:
            self._end_unlike()
        behind = [] if failed is None else self._behind(failed)
        self._suspects = Counter({call: self._suspects[call] + 1 for call in behind})
        if failed is None or max(self._suspects.values(), default=0) < 3:
            return
        self.reason = failed
        logger.error("ended waits that no other rank will meet: %s", failed.text)
        self.end_all(failed.text)

    def _end_unlike(self) -> None:
        """End the waits of this rank and another one if the two will never meet.

        A waiting rank writes to the store the group, its last calls there, and how many calls its
        thread began in each group. Two ranks will not meet if their calls of one number differ,
        or if they made two calls in opposite orders.
        """
        before = time.monotonic() - LOOK_S
        waits = ((each, since) for each in self.calls if (since := each.since) and since < before)
        calls, since = next(waits, (None, None))
        if calls is None or len(calls.ranks) < 2:
            return
        begun = {each.key: each.number for each in self.calls if each.thread == calls.thread}
        state = [calls.key, begun, list(calls.last)]
        if calls.since != since:  # it goes on
            return
        if state != self._waits:
            self._waits = state
            write(self._store, f"waits/{self._rank}", json.dumps(state))
        others = [rank for rank in calls.ranks if rank != self._rank]
        first = next(self._turns) * _READS % len(others)
        for other in (others * 2)[first : first + min(_READS, len(others))]:
            text = read(self._store, f"waits/{other}")
            pair = None if text is None else _unlike(state, json.loads(text))
            if pair is not None:
                self.reason = self.fail(
                    f"rank {self._rank} waits in {pair[0]!r} and rank {other} in {pair[1]!r}: "
                    "these ranks run different code, for example because a cache of steps skips "
                    "by each rank's own tokens: let all ranks decide alike, or turn the cache off",
                    None,
                )
                logger.error("ended waits that no other rank will meet: %s", self.reason.text)
                self.end_all(self.reason.text)
                return

    def _behind(self, failed: Failure) -> list[tuple[str, int]]:
        """Return keys of groups, and calls begun here that the failed rank has not begun."""
        before, at = time.monotonic() - LOOK_S, {} if self._failed is None else self._failed.at
        begun = [
            (calls.key, calls.number, 0)
            for calls in self.calls
            if failed.rank in calls.ranks and (calls.since or before) < before
        ]
        begun += [(key, number, _ALL) for key, number in _begun_in_torch(self.calls).items()]
        return [
            (key, number)
            for key, number, unknown in begun
            if number > failed.now.get(key, unknown)
            # Where both had begun as many when they failed, they met what all did.
            and not (at and at.get(key, 0) == failed.at.get(key, 0))
        ]

    def _begun(self, thread: int | None) -> dict[str, int]:
        """Return calls begun by group; `_ALL` for a group that another living thread uses."""
        others = {living.ident for living in threading.enumerate() if thread} - {thread}
        begun = {c.key: _ALL if c.thread in others else c.number for c in self.calls}
        if thread in (None, threading.main_thread().ident):
            begun |= _begun_in_torch(self.calls)
        return begun

    def _note(self, store: Any, failed: Failure) -> None:
        write(store, f"failed/{self._rank}", json.dumps(asdict(failed)))

    def _last(self, store: Any) -> Failure | None:
        """Return the note of the rank that last failed or called the roll; None if it went on."""
        last = read(store, "failed/last")
        text = None if last in (None, str(self._rank)) else read(store, f"failed/{last}")
        return None if text is None else Failure(**json.loads(text))

    def _cause(self, ranks: Sequence[int]) -> Failure:
        """Return why another rank failed, or which of the ranks give no sign."""
        start, missing = time.monotonic(), list(ranks)
        while time.monotonic() - start < (ROLL_CALL_S if missing else ROLL_CALL_S / 4):
            if (failed := self.ask(self._last)) is not None and failed.text:
                return failed
            missing = self.ask(functools.partial(_without, "failed", missing))
            time.sleep(0.05)
        text = "every rank reported the failure"
        if missing:  # ranks without a sign of life; if none is, all that did not report
            missing = self.ask(functools.partial(_without, "alive", missing)) or missing
            text = (
                f"missing: no report from ranks {missing} within {seconds(ROLL_CALL_S)}; if they "
                "are only slow, raise timeout_s, or the timeout of init_process_group"
            )
        return Failure(self._rank, text)


_watches: "weakref.WeakKeyDictionary[dist.ProcessGroup, Watch]" = weakref.WeakKeyDictionary()


def watch_of_world() -> Watch:
    """Return the watch of this process, which has all its threads and groups."""
    world = dist.group.WORLD
    if world is None:
        raise ConfigError("torch.distributed is not initialised: call init_process_group first")
    watch = _watches.get(world)
    if watch is None:
        watch = _watches[world] = Watch(world)
    return watch


def _unlike(mine: Sequence[Any], theirs: Sequence[Any]) -> tuple[str, str] | None:
    """Return two calls of waiting ranks that will never meet; None if they may meet."""
    (key, begun, last), (their_key, their_begun, their_last) = mine, theirs
    if key == their_key:
        here = dict(zip(range(begun[key], 0, -1), reversed(last), strict=False))
        there = dict(zip(range(their_begun[key], 0, -1), reversed(their_last), strict=False))
        for number in sorted(here.keys() & there.keys()):
            if here[number] != there[number]:
                return here[number], there[number]
    is_ahead = their_begun.get(key, _ALL) < begun[key]
    is_behind = begun.get(their_key, _ALL) < their_begun[their_key]
    return (last[-1], their_last[-1]) if is_ahead and is_behind else None


def _first_line(error: BaseException) -> str:
    try:
        return next(iter(str(error).strip().splitlines()), "")
    except Exception:
        return "its text cannot be had"


def _gloo_groups() -> list[dist.ProcessGroup]:
    return [group for group in list(c10d._world.pg_map) if "gloo" in dist.get_backend(group)]


def _begun_in_torch(all_calls: Sequence[Calls]) -> dict[str, int]:
    """Return collectives begun by group of gloo, of any code; without the messages of parts."""
    messages: Counter[str] = Counter()
    for calls in all_calls:
        messages[calls.key.partition(" ")[0]] += calls.num_messages
    begun: dict[str, int] = {}
    for group in _gloo_groups():
        ranks = zlib.crc32(str(dist.get_process_group_ranks(group)).encode())
        number = cast(Any, group)._get_sequence_number_for_group()
        begun[f"{group.group_name} in torch {ranks}"] = number - messages[group.group_name]
    return begun


def _close(group: dist.ProcessGroup) -> None:
    """Close all connections of a group of gloo, by a wait in it that runs out of time."""
    for rank in dist.get_process_group_ranks(group):
        if rank == dist.get_rank():
            continue
        try:
            nothing = dist.irecv(torch.empty(1), rank, group=group, tag=_CLOSING_TAG)
            if nothing is not None:
                nothing.wait(timedelta(milliseconds=1))
        except (RuntimeError, ValueError) as error:
            if "Timed out" in str(error):  # and not a connection that was closed before
                return


def _without(sign: str, ranks: list[int], store: Any) -> list[int]:
    """Return the ranks that left no such sign; it takes one request if all left one."""
    if not ranks or store.check([f"bascule/{sign}/{rank}" for rank in ranks]):
        return []
    return [rank for rank in ranks if not store.check([f"bascule/{sign}/{rank}"])]
