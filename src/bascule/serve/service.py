"""Requests of users: taken to disk, done on the ranks of an engine, and answered."""

import errno
import inspect
import io
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any
from uuid import uuid4

from PIL import Image

from bascule.errors import ConfigError
from bascule.generate.generating import arguments_of, check_prompt, write_media
from bascule.plan.requests import NEVER, Policy
from bascule.serve.blocks import Block, Event
from bascule.serve.controller import Controller
from bascule.serve.scheduling import Scheduler, Task
from bascule.serve.spool import Entry, Spool, flush
from bascule.serve.status import Busy, Closing, Late, Status, Submission, Unknown
from bascule.serve.times import Times

_SHOWN = 20  # requests that have ended, in a list
_AGAIN_S = 1.0  # between tries to write to a disk that is full
_SWEEP_S = 600.0  # between looks for what is too old
_DAY_S = 86400.0
_MOST_STARTS = 2  # of a request; at the last one it runs alone
_NO_ROOM = errno.ENOSPC, errno.EDQUOT

logger = logging.getLogger(__name__)


class Service:
    """Takes requests and lets an engine do them; any thread may call it.

    A thread of its own takes the news of the engine, decides by the policy, and calls `on_change`.
    Requests of the spool that have not ended begin anew. One whose ranks ended while it ran comes
    after the others, and runs alone; if they end again, it has failed.

    Args:
        pipeline: Of the engine.
        controller: Of the engine.
        spool: Keeps requests and outputs.
        policy: Decides which requests run where.
        times: Predicts seconds of steps.
        most_waiting: Requests that may wait.
        fps: Frames a second of videos.
        keep_days: Days after which a request that has ended is removed, with its output.
        keep_bytes: Bytes of outputs, of which the oldest are removed beyond.

    Attributes:
        kind: "image" or "video".
        num_ranks: Of the engine.
        takes_image: True if a request may begin with an image.
        on_change: Is called with the status of a request that has changed.
    """

    def __init__(
        self,
        pipeline: Any,
        controller: Controller,
        spool: Spool,
        *,
        policy: Policy,
        times: Times,
        most_waiting: int = 1000,
        fps: int = 16,
        keep_days: float = NEVER,
        keep_bytes: float = NEVER,
    ) -> None:
        self._pipeline, self._controller, self._events = pipeline, controller, controller.events
        self._spool, self._times = spool, times
        self._takes = inspect.signature(pipeline.__call__).parameters
        self.kind = "video" if "num_frames" in self._takes else "image"
        self.num_ranks, self.takes_image = controller.num_ranks, "image" in self._takes
        self.on_change: Callable[[Status], None] | None = None
        self._most_waiting, self._fps = most_waiting, fps
        self._keep_days, self._keep_bytes = keep_days, keep_bytes
        self._lock = threading.Lock()
        self._reason = ""  # why no more requests are taken
        self._ends_well: bool | None = None  # of the ranks, once they have ended
        self._full = ""  # why the disk does not take ends
        self._no_room = ""  # why it does not take outputs
        self._error: Exception | None = None  # of the thread
        self._entries: dict[str, Status] = {}  # of requests that have not ended, as they came
        self._leaving: dict[str, Status] = {}  # those of them whose output is written now
        self._unwritten: list[Status] = []  # ends that the disk did not take
        self._changed: dict[str, Status | None] = {}  # changes to report; how requests ended
        self._count = 0
        self._scheduler = Scheduler(controller, policy, times)
        for entry in sorted(spool.waiting(), key=lambda one: one.starts):
            self._entries[entry.status.id] = status = entry.status
            reason = status.reason  # of a row that cannot be read
            if entry.starts >= _MOST_STARTS:
                often = f"{entry.starts} times while it ran, at last alone"
                reason = f"its ranks ended {often}: see why in the log, or ask for less"
            if reason:
                self._end(status, "failed", reason)
            else:
                self._add(self._task(entry), entry)
        self._writer = ThreadPoolExecutor(1, "bascule outputs")
        self._thread = threading.Thread(target=self._run, name="bascule service", daemon=True)

    def start(self) -> None:
        """Begin with the requests that there are."""
        self._changed |= dict.fromkeys(self._entries)
        self._thread.start()
        self._writer.submit(self._sweep)
        self._tell("asked")

    def stop(self) -> None:
        """Let the engine end after the steps that run; signals may call it."""
        self._tell("stop")

    def close(self) -> None:
        """Wait for the thread, when the engine has ended; raises what the thread failed with."""
        self._thread.join()
        self._spool.close()
        if self._error is not None:
            raise self._error

    # --- for users --------------------------------------------------------------------------------

    def submit(self, submissions: Sequence[Submission]) -> list[Status]:
        """Take requests, all or none; they are on disk when it returns.

        Raises:
            ConfigError: The pipeline does not take a setting, or more come than may wait.
            Busy: Too many wait.
            Late: A deadline that must be met would be missed.
            Closing: The server is ending, or its disk takes nothing.
        """
        for one in submissions:
            self._check(one)
        now = time.time()
        entries = [self._entry(one, now) for one in submissions]
        with self._lock:
            if reason := self._health():
                raise Closing(reason)
            tasks = [self._task(entry, place) for place, entry in enumerate(entries)]
            self._check_room(submissions, tasks)
            try:
                self._spool.add(entries)
            except sqlite3.Error as error:
                raise Closing(f"the spool takes no more requests: {error}") from error
            for task, entry in zip(tasks, entries, strict=True):
                self._add(task, entry)
            self._changed |= dict.fromkeys(task.id for task in tasks)
            statuses = self._statuses([task.id for task in tasks])
        self._tell("asked")
        return statuses

    def status(self, request_id: str) -> Status:
        """Return the status of a request, also of one that has ended; Unknown if there is none."""
        with self._lock:
            return self._statuses([request_id])[0]

    def statuses(self) -> list[Status]:
        """Return all that have not ended in the order of arrival, then the latest that have."""
        with self._lock:
            return [*self._statuses(list(self._entries)), *self._spool.ended(_SHOWN)]

    def cancel(self, request_id: str) -> Status:
        """End a request, unless it has ended or its output is there; Unknown if there is none."""
        with self._lock:
            status = self._cancel(request_id)
        self._tell("asked")
        return status

    def delete(self, request_id: str) -> Status:
        """Cancel a request, or remove it and its output if it has ended; return its status.

        Raises:
            Unknown: There is no such request.
            Closing: The disk does not remove it.
        """
        with self._lock:
            if request_id in self._entries:
                status = self._cancel(request_id)
            else:
                status = self._spool.status(request_id)
                self._remove(status)
        self._tell("asked")
        return status

    def result(self, request_id: str) -> Path:
        """Return the output of a request that is done, PNG or MP4; else Unknown."""
        status = self.status(request_id)
        path = self._spool.output(status)
        if status.state != "done" or not path.is_file():
            raise Unknown(f"request {request_id!r} is {status.state}, and has no output")
        return path

    def health(self) -> str:
        """Return why requests are not taken, or done; empty if all is well."""
        with self._lock:
            return self._health()

    # --- news, in the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._take():
                pass
            self._writer.shutdown()
            if self._ends_well:
                self._forgive()
            self._tell("ended")
            self._take()
        except Exception as error:
            self._error, self._reason = error, f"the service failed by a {type(error).__name__}"
            self._controller.close()

    def _take(self) -> bool:
        """Take the news that there is, and act; return whether the engine has ended."""
        events = list[Event]()
        with suppress(Empty):
            events.append(self._events.get(timeout=_AGAIN_S if self._unwritten else _SWEEP_S))
            while True:
                events.append(self._events.get_nowait())
        with self._lock:
            unwritten, self._unwritten = self._unwritten, []
            for status in unwritten:
                self._end(status, status.state, status.reason)
            asks = [self._handle(event) for event in events]
            if (any(asks) or unwritten) and not self._reason and not self._controller.is_closed:
                has_room = len(self._leaving) <= self.num_ranks  # else they would fill the memory
                ordered = self._scheduler.decide(may_start=has_room)
                self._changed |= dict.fromkeys(ordered)
            on_change, ended = self.on_change, [one for one in self._changed.values() if one]
            others = [request_id for request_id, one in self._changed.items() if one is None]
            statuses = [*ended, *self._statuses(others)] if on_change is not None else []
            self._changed.clear()
        if not events:
            self._writer.submit(self._sweep)
        for status in statuses:
            assert on_change is not None
            on_change(status)
        return any(event.kind == "ended" for event in events)

    def _handle(self, event: Event) -> bool:
        """Take an event; return whether the policy should be asked."""
        request_id = event.request_id
        if event.kind in ("stop", "ended"):
            ended = "the ranks of the server have ended" if event.reason else ""
            self._reason = self._reason or ended or "the server is ending"
            if event.kind == "ended" and self._ends_well is None:
                self._ends_well = not event.reason
            elif event.kind == "stop":
                self._forgive()  # ranks that take too long to stop may be killed
            self._controller.close()
            return False
        if event.kind == "asked":
            return True
        if request_id in self._entries:
            self._changed[request_id] = None
        if event.kind == "written":
            status = self._leaving[request_id]
            self._end(status, "failed" if event.reason else "done", event.reason)
            return True
        asks = self._scheduler.handle(event)
        if request_id in self._entries and request_id not in self._leaving:  # nor was cancelled
            status = replace(self._entries[request_id], state="running")
            status = replace(status, step=event.step, num_steps=event.num_steps)
            if event.kind == "done":
                self._forgive(request_id)  # others run while its output is written
                self._leaving[request_id] = status
                self._writer.submit(self._write, status, event)
            elif event.kind == "failed":
                self._end(status, "failed", event.reason)
        return asks

    # --- in the thread of the writer --------------------------------------------------------------

    def _write(self, status: Status, event: Event) -> None:
        """Write an output as soon as the disk has room for it."""
        output, path = event.output, self._spool.output(status)
        while True:
            reason = no_room = ""
            try:
                write_media(path, output[0] if self.kind == "video" else output, self._fps)
                path.chmod(0o600)
                flush(path)
            except Exception as error:
                cause: Any = error.__cause__ or error
                said = getattr(cause, "strerror", None) or f"{type(cause).__name__}: {cause}"
                reason = f"its output cannot be written: {said}"
                if getattr(cause, "errno", None) in _NO_ROOM:
                    no_room = f"the disk takes no outputs: {said}"
            self._no_room = no_room
            if not no_room:
                break
            if self._reason:
                return  # it begins anew at the next start
            self._sweep()  # which may make room
            time.sleep(_AGAIN_S)
        self._tell("written", status.id, reason)
        self._sweep()

    def _sweep(self) -> None:
        """Remove ended requests, the oldest first, until the others are to be kept."""
        too_many, oldest = 0.0, time.time() - self._keep_days * _DAY_S
        if self._keep_bytes < NEVER:
            too_many = self._spool.num_bytes() - self._keep_bytes
        with suppress(Closing):  # a later look tries again
            while not self._reason:
                with self._lock:
                    status = next(iter(self._spool.ended(1, first=True)), None)
                    if status is None or (too_many <= 0 and (status.ended_at or 0.0) >= oldest):
                        return
                    too_many -= self._remove(status)

    # --- with the lock ----------------------------------------------------------------------------

    def _cancel(self, request_id: str) -> Status:
        """Cancel a request, unless it has ended, or is ending; return its status."""
        status, task = self._statuses([request_id])[0], self._scheduler.tasks.get(request_id)
        if request_id not in self._entries or request_id in self._leaving or task is None:
            return status
        self._scheduler.cancel(task)
        return self._end(status, "cancelled")

    def _forgive(self, request_id: str | None = None) -> None:
        """Forget how often a request began, or each one, if the disk takes it."""
        with suppress(sqlite3.Error):
            self._spool.forgive(request_id)

    def _end(self, status: Status, state: str, reason: str = "") -> Status:
        """Keep the end of a request."""
        ended_at = status.ended_at or max(status.created_at, time.time())  # clocks are set back
        status = replace(status, state=state, reason=reason, ended_at=ended_at)
        status = replace(status, ranks=(), ends_in_s=None)
        try:
            self._spool.end(status)
            self._entries.pop(status.id, None)
            self._leaving.pop(status.id, None)
            self._changed[status.id] = status
        except sqlite3.Error as error:
            self._unwritten.append(status)
            self._leaving[status.id] = replace(status, state="running", ended_at=None)
            self._full = f"the spool takes no ends of requests: {error}"
        else:
            if state == "failed":
                logger.warning("request %s failed: %s", status.id, reason.partition("\n")[0])
        return status

    def _remove(self, status: Status) -> int:
        """Remove a request that has ended; return how many bytes its output had."""
        path = self._spool.output(status)
        num_bytes = path.stat().st_size if path.is_file() else 0
        try:
            self._spool.remove(status)
        except (OSError, sqlite3.Error) as error:
            said = getattr(error, "strerror", None) or error
            raise Closing(f"request {status.id} cannot be removed: {said}") from error
        return num_bytes

    def _health(self) -> str:
        return self._reason or (self._full if self._unwritten else "") or self._no_room

    def _tell(self, kind: str, request_id: str = "", reason: str = "") -> None:
        """Put news of our own to that of the engine."""
        block = Block(0, self.num_ranks)
        self._events.put(Event(kind, request_id, time.monotonic(), block, reason=reason))

    def _check(self, submission: Submission) -> None:
        picture = submission.image is not None
        check_prompt(self._pipeline, submission.prompt, self._takes, picture=picture)
        if submission.image is not None and not self.takes_image:
            raise ConfigError("this pipeline takes no image: leave it out")

    def _entry(self, submission: Submission, now: float) -> Entry:
        deadline_at = None if submission.deadline_s is None else now + submission.deadline_s
        status = Status(
            id=uuid4().hex,
            kind=self.kind,
            state="waiting",
            created_at=now,
            prompt=submission.prompt,
        )
        return Entry(status, submission.image, deadline_at)

    def _task(self, entry: Entry, place: int = 0) -> Task:
        status, deadline_s = entry.status, NEVER
        if entry.deadline_at is not None:
            deadline_s = time.monotonic() + entry.deadline_at - time.time()
        arguments, number = partial(self._arguments, status), self._count + place
        ways = self._takes, self._times, arguments, deadline_s
        task = Task.of(number, status.id, status.prompt, *ways)
        task.runs_alone = entry.starts > 0
        return task

    def _arguments(self, status: Status) -> dict[str, Any]:
        """Return what ranks get; first note on disk, if it has room, that ranks may die of it."""
        with suppress(sqlite3.Error):
            self._spool.begin(status.id)
        arguments = arguments_of(status.prompt, self._takes) | {"output_type": "pil"}
        if self.takes_image and (image := self._spool.image(status.id)) is not None:
            arguments["image"] = Image.open(io.BytesIO(image)).convert("RGB")
        return arguments

    def _add(self, task: Task, entry: Entry) -> None:
        self._count += 1
        self._entries[task.id] = entry.status
        self._scheduler.add(task)

    def _check_room(self, submissions: Sequence[Submission], tasks: Sequence[Task]) -> None:
        if len(tasks) > self._most_waiting:
            raise ConfigError(
                f"{len(tasks)} requests at once, of which at most {self._most_waiting} may wait"
            )
        here = list(self._scheduler.tasks.values())
        too_many = len(tasks) + len(self._scheduler.state.waiting) - self._most_waiting
        if too_many > 0:
            raise Busy(max(1.0, sorted(self._scheduler.ends_s(here).values())[too_many - 1]))
        if any(one.must_meet_deadline for one in submissions):
            ends = self._scheduler.ends_s(tasks)
            for one, task in zip(submissions, tasks, strict=True):
                latest_s = NEVER if one.deadline_s is None else one.deadline_s
                if one.must_meet_deadline and ends[task] > latest_s:
                    raise Late(ends[task])

    def _statuses(self, request_ids: Sequence[str]) -> list[Status]:
        tasks = self._scheduler.tasks
        ends = self._scheduler.ends_s([tasks[one] for one in request_ids if one in tasks])
        return [self._status(one, tasks.get(one), ends) for one in request_ids]

    def _status(self, request_id: str, task: Task | None, ends: Mapping[Task, float]) -> Status:
        if request_id in self._leaving:
            return self._leaving[request_id]
        if request_id not in self._entries:
            return self._spool.status(request_id)
        status = self._entries[request_id]
        if task is None:  # the engine has ended
            return status
        state = {"new": "waiting", "paused": "paused"}.get(task.phase, "running")
        return replace(
            status,
            state=state,
            step=0 if task.last is None else task.last.step,
            num_steps=(task.last and task.last.num_steps) or task.request.steps,
            ranks=() if task.at is None else tuple(task.at.ranks),
            ends_in_s=ends[task],
        )
