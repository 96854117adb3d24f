"""A rank that fails ends the calls of all: soon, with its error, and with who is missing.

A rank that meets an error alone leaves a note of it, which those that wait for it find (`watch`).
Whoever fails in a call says so in the store and closes its connections, so that every rank that
waits for it fails as well, reads why, and does the same. So a failure travels through any chain of
groups in milliseconds, at no cost while all goes well. What it ended stays ended.
"""

import functools
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.utils.checkpoint

from bascule.comm.groups import (
    OtherCalls,
    RankGroup,
    calls_in_use,
    other_calls,
    process_groups_in_use,
)
from bascule.comm.guard import notes
from bascule.comm.guard.calls import Begun
from bascule.comm.guard.notes import Failure
from bascule.comm.guard.ranges import begin_range
from bascule.comm.guard.verdicts import Verdict
from bascule.comm.guard.watch import Watch, watch_of_world
from bascule.errors import CommError, ConfigError, PlanError, RemoteConfigError

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger(__name__)

ROLL_CALL_S = 2.0
"""How long survivors of a failed collective wait for each other's sign of life."""

_CAUSE_S = 0.5  # how long the error that ended a connection may take to appear in the store
_CLOSING_MARK = 0x7FFFFFFF
_BROKEN_OFF = re.compile(
    "gloo.*(Connection (closed|reset) by peer|Timed out waiting)|Application timeout caused"
)
_GONE = "no roll call, the store is gone with its host: {}"
IS_ENOUGH: tuple[type[Exception], ...] = tuple(
    filter(None, [getattr(torch.utils.checkpoint, "_StopRecomputationError", None)])
)


# Context managers that every call enters are classes: a generator takes twice as long.


class Ongoing:
    """A call that this rank has begun, and a context in which it waits for the other members.

    Made by `begin`.

    Attributes:
        begun: The call.
    """

    __slots__ = ("_group", "_range", "_wait", "_watch", "begun")

    def __init__(self, group: RankGroup, begun: Begun, watch: Watch) -> None:
        self._group, self.begun, self._watch = group, begun, watch

    def __enter__(self) -> None:
        group = self._group
        self._range = begin_range(self.begun.where)
        self._wait = self._watch.begin(group.key, self.begun.number, group.ranks)

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watch.end(self._wait, is_done=error is None)
        if self._range is not None:
            self._range.__exit__(kind, error, traceback)
        if isinstance(error, RuntimeError) and not isinstance(error, CommError):
            raise failure(self._group, self.begun.where, error, self._wait.verdict) from error


def begin(group: RankGroup, where: str) -> Ongoing:
    """Number the next call of a group, see `Calls.begin`.

    Raises:
        CommError: The group was destroyed, or ended. ConfigError: as there.
    """
    _ = group.process_group  # one that was destroyed refuses, before anything of it is begun
    watch = watch_of_world(end_all)
    if group.calls.ended is not None:  # others may have groups that have not ended
        watch.tell_failure(Failure(where, (), f"its groups were ended: {group.calls.ended}"))
    begun = group.calls.begin(where)
    watch.go_on(group.key, begun.number)
    return Ongoing(group, begun, watch)


@contextmanager
def call(group: RankGroup, where: str) -> Iterator[Begun]:
    """Make the next call of a group: number it, watch over it, and name what goes wrong.

    Raises:
        CommError: The call failed, or can never end. RemoteConfigError: by a rank's bad input.
        ConfigError: Another thread is in a call of the group.
    """
    ongoing, is_done = begin(group, where), False
    try:
        with ongoing:
            yield ongoing.begun
        is_done = True
    finally:
        group.calls.finish(is_done=is_done)


class telling:  # noqa: N801 - it is called as a function is
    """An error that this rank meets within ends the others, too, if they wait for it.

    While torch's profiler runs, it is a range of that name.
    """

    __slots__ = ("_range", "_where")

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        self._range = begin_range(self._where)

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._range is not None:
            self._range.__exit__(kind, error, traceback)
        if error is not None:
            tell(error, self._where)


@contextmanager
def explained(where: str) -> Iterator[None]:
    """`telling`, around collectives of torch: which ranks are missing is the error, not a note.

    Raises:
        CommError: A collective was broken off, or ran out of time.
    """
    try:
        with telling(where):
            yield
    except RuntimeError as error:
        notes: list[str] | None = getattr(error, "__notes__", None)
        if notes is None or isinstance(error, CommError):
            raise
        raise CommError(f"{where}: {notes[0]}") from error


def told(where: str) -> Callable[[F], F]:
    """Decorates a function that all ranks call: `telling` around it, where it is not compiled."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call_and_tell(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            with telling(where):
                return function(*args, **kwargs)

        return cast(F, call_and_tell)

    return decorate


def tell(error: BaseException, where: str, *, leaves: bool = False, goes_on: bool = False) -> None:
    """Leave a note of an error: ranks that wait for this one end with it, in about two seconds.

    Where all ranks meet the same error, none waits, and all can go on. Errors that came from other
    ranks are known to them; checkpointing ends a recomputation early by an exception, which counts
    as no error.

    Args:
        error: What went wrong.
        where: What this rank was doing.
        leaves: Whether it leaves what others may go on with, by whatever error: one that all ranks
            were given is known to them, but not that this one does not go on.
        goes_on: Whether it goes on with bascule's calls, so that only who waits elsewhere ends.
    """
    if isinstance(error, IS_ENOUGH) or not dist.is_initialized():
        return
    is_over = any(calls.ended for calls in calls_in_use().values())
    if isinstance(error, CommError) and (is_over or not leaves):
        return
    try:
        failed = _caused_elsewhere(error, where) or _own(error, where)
        watch_of_world(end_all).tell_failure(replace(failed, goes_on=goes_on))
    except RuntimeError as lost:  # the store is gone with its host, and so are the others
        if type(error) is RuntimeError and _BROKEN_OFF.search(_first_line(error)):
            _note(error, _GONE.format(type(lost).__name__))


def _own(error: BaseException, where: str) -> Failure:
    is_input = isinstance(error, ConfigError | PlanError)
    cause = _first_line(error) if is_input else f"{type(error).__name__}: {_first_line(error)}"
    return Failure(where, (), cause, is_input)


def _caused_elsewhere(error: BaseException, where: str) -> Failure | None:
    """What another rank said, or that one is gone, if that may have ended a collective of torch.

    Its error does not say why, so that is added to it as a note.
    """
    if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
        return None
    caused = {rank: one for rank, one in notes.last_failures().items() if one.cause}
    if caused:
        rank = min(caused, key=lambda rank: bool(caused[rank].ranks))  # its own, if one has it
        text = caused[rank].told_of(rank)
        _note(error, text)
        return Failure(where, (rank,), text, caused[rank].is_input)
    if not _BROKEN_OFF.search(_first_line(error)):
        return None
    every = tuple(range(dist.get_world_size()))
    watch_of_world(end_all).tell_failure(Failure(where, every))
    # Who waits for this rank in the same collective has no other way to know that it is over.
    end_all(f"a collective was broken off in {where}", other_calls())
    who = roll_call(every, where)
    _note(error, who)
    return Failure(where, every, who)


def _note(error: BaseException, text: str) -> None:
    """Add a note, once: an error may leave several blocks."""
    if text not in getattr(error, "__notes__", ()):
        error.add_note(text)


def _first_line(error: BaseException) -> str:
    """Of the text of an error, which may be none, or fail itself."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = ["its text cannot be had"]
    return lines[0] if lines else ""


def end_all(reason: str, others: Sequence[OtherCalls] = ()) -> None:
    """Close this rank's connections in every group on the host; those that wait for it fail.

    The back ends of devices end waits themselves, by their timeouts.

    Args:
        reason: Why.
        others: Calls of other code to end, too.
    """
    ended = [calls for calls in calls_in_use().values() if calls.ended is None]
    for calls in ended:
        calls.ended = reason
    for group in process_groups_in_use() if ended else ():
        with suppress(RuntimeError, ValueError):  # the store is gone with its host
            notes.write(notes.ENDED, group.group_name, reason)
        _close(group)
    for one in others:
        _close(one.group)


def is_ended(group: RankGroup) -> bool:
    """Whether a failure ended the group on any rank; one request to the store.

    A rank that failed alone, and goes on, has not noticed that the others ended their groups.
    """
    if group.calls.ended is None:
        group.calls.ended = notes.read(notes.ENDED, group.process_group.group_name)
    return group.calls.ended is not None


def _close(group: dist.ProcessGroup) -> None:
    """Gloo closes all connections of a group in which a wait runs out of time."""
    if "gloo" not in dist.get_backend(group):
        return
    for rank in dist.get_process_group_ranks(group):
        if rank != dist.get_rank() and _runs_out(group, rank):
            return


def _runs_out(group: dist.ProcessGroup, rank: int) -> bool:
    """Whether a wait for a rank ran out of time, and was not ended by a connection that is gone."""
    try:
        nothing = dist.irecv(torch.empty(1), rank, group=group, tag=_CLOSING_MARK)
        if nothing is not None:
            nothing.wait(timedelta(milliseconds=1))
    except (RuntimeError, ValueError) as error:
        return "Timed out" in str(error)
    return False


def failure(
    group: RankGroup, where: str, error: BaseException, verdict: Verdict | None = None
) -> CommError:
    """The error to raise when a call failed: why, or else who is missing; logged.

    Args:
        group: Whose call.
        where: The call.
        error: What torch raised.
        verdict: Why the call could not end, if that is known.
    """
    found, ended_before = verdict or Verdict(""), group.calls.ended
    _sign(Failure(where, group.ranks, found.text, found.is_input))
    if verdict is None:
        end_all(f"{where} failed on group {group.name!r}")
        is_input, who = _cause(group) or (False, ended_before or roll_call(group.ranks, where))
    else:
        is_input, who = verdict.is_input, verdict.text
    message = f"{where} failed on group {group.name!r} of ranks {list(group.ranks)} ({who})"
    if verdict is None:  # else what torch says is how the call was ended here
        lines = str(error).strip().splitlines() or [repr(error)]
        message = f"{message}: {lines[0]}"
    if group.calls.ended is not None:  # what follows in it says why, too
        group.calls.ended = message
    logger.error("%s", message)
    return RemoteConfigError(message) if is_input else CommError(message)


def _sign(own: Failure) -> None:
    """Say in the store how this rank failed."""
    try:
        watch_of_world(end_all).tell_failure(own, is_over=True)
    except (RuntimeError, ValueError):  # the store is gone with its host
        return


def _cause(group: RankGroup) -> tuple[bool, str] | None:
    """Whether the first error found is bad input, and whose it is; None if no rank gave one."""
    deadline = time.monotonic() + _CAUSE_S
    while True:
        try:
            signed = _signed(group.ranks)
        except (RuntimeError, ValueError):
            return None
        for rank, one in signed.items():
            if one.cause:
                return one.is_input, one.told_of(rank)
        if time.monotonic() > deadline or len(signed) == len(_concerned(group.ranks, signed)):
            return None
        time.sleep(0.02)


def roll_call(ranks: Sequence[int], where: str) -> str:
    """Who else noticed, and where: each survivor signs in the store and waits a moment."""
    deadline = time.monotonic() + ROLL_CALL_S
    try:
        while True:
            signed = _signed(ranks)
            missing = notes.without_failure(sorted(_concerned(ranks, signed)))
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    except (RuntimeError, ValueError) as error:
        return _GONE.format(type(error).__name__)
    said = "every rank reported the failure"
    if missing:
        said = f"missing: no report from ranks {missing} within {ROLL_CALL_S:g} s"
        said += "; if they are only slow, raise timeout_s, or the timeout of init_process_group"
    elsewhere = [
        f"rank {rank} last failed in {one.where}"
        for rank, one in signed.items()
        if one.where != where
    ]
    return "; ".join([said, *elsewhere])


def _signed(ranks: Sequence[int]) -> dict[int, Failure]:
    """The failures of these ranks, and of those that they waited for, and so on."""
    signed: dict[int, Failure] = {}
    looked: set[int] = set()
    left = list(ranks)
    while left:
        looked.update(left)
        for rank in left:
            one = notes.read_failure(rank)
            if one is not None:
                signed[rank] = one
        left = sorted(_concerned(ranks, signed) - looked)
    return signed


def _concerned(ranks: Sequence[int], signed: dict[int, Failure]) -> set[int]:
    return {*ranks, *(rank for one in signed.values() for rank in one.ranks)}
