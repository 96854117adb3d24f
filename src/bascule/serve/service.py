"""Requests of users: taken to disk, done on the ranks of an engine, and answered."""

import errno
import inspect
import io
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from PIL import Image

from bascule.errors import ConfigError
from bascule.generate.generating import arguments_of, check_prompt, write_media
from bascule.generate.options import Prompt
from bascule.plan.requests import NEVER, Policy
from bascule.serve.jobs import Jobs, Sink
from bascule.serve.orders import Event, Orders
from bascule.serve.scheduling import Scheduler, Task
from bascule.serve.spool import Entry, Spool, flush
from bascule.serve.status import Busy, Closing, Late, Status, Unknown
from bascule.serve.times import Times

_SHOWN = 20  # requests that have ended, in a list
_RETRY_S = 1.0  # between tries to write to a disk that is full
_SWEEP_S = 600.0  # between looks for what is too old
_DAY_S = 86400.0
_MOST_STARTS = 2  # of a request; at the last one it runs alone
_DISK_FULL = errno.ENOSPC, errno.EDQUOT

logger = logging.getLogger(__name__)


class Service(Sink):
    """Takes requests and lets an engine do them; any thread may call it.

    A thread of its own runs the loop, whose news comes here with the lock. Requests of the spool
    that have not ended begin anew. One whose ranks ended while it ran comes after the others, and
    runs alone; if they end again, it has failed.

    Args:
        pipeline: Of the engine.
        orders: Of the engine.
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
        on_change: Is called with the status of a request that has changed, and calls nothing here.
    """

    def __init__(
        self,
        pipeline: Any,
        orders: Orders,
        spool: Spool,
        *,
        policy: Policy,
        times: Times,
        most_waiting: int = 1000,
        fps: int = 16,
        keep_days: float = NEVER,
        keep_bytes: float = NEVER,
    ) -> None:
        self._pipeline, self._orders, self._spool, self._times = pipeline, orders, spool, times
        self._takes = inspect.signature(pipeline.__call__).parameters
        self.kind = "video" if "num_frames" in self._takes else "image"
        self.num_ranks, self.takes_image = orders.num_ranks, "image" in self._takes
        self.on_change: Callable[[Status], None] | None = None
        self._most_waiting, self._fps = most_waiting, fps
        self._keep_days, self._keep_bytes = keep_days, keep_bytes
        self.lock = threading.Lock()
        self._reason = ""  # why no more requests are taken
        self._full = ""  # why the disk does not take ends
        self._no_room = ""  # why it does not take outputs
        self._error: Exception | None = None  # of the thread
        self._unwritten: dict[str, Status] = {}  # ends that the disk did not take
        self._numbers, self._sweep_at = count(), 0.0
        self._scheduler = Scheduler(orders, policy, times)
        self._jobs = Jobs(self._scheduler, self)
        for entry in sorted(spool.waiting(), key=lambda entry: entry.starts):
            reason = entry.status.reason  # of a row that cannot be read
            if entry.starts >= _MOST_STARTS:
                often = f"{entry.starts} times while it ran, at last alone"
                reason = f"its ranks ended {often}: see why in the log, or ask for less"
            if reason:
                status = replace(entry.status, state="failed", reason=reason)
                self._unwritten[status.id] = status
            else:
                self._scheduler.add(self._task(entry))
        self._thread = threading.Thread(target=self._run, name="bascule service", daemon=True)

    def start(self) -> None:
        """Start the thread, first with the requests of the spool."""
        self._thread.start()

    def stop(self) -> None:
        """Let the engine end after the steps that run.

        That ranks which take too long to stop may be killed counts against nobody. But launchers
        stop a job where a rank has died, too, and that counts.
        """
        with self.lock:
            self._reason = self._reason or "the server is ending"
            self._scheduler.close()
        if self._orders.are_alive():
            with self.lock:
                self._forgive()

    def close(self) -> None:
        """Wait for the thread, when the engine has ended; raises what the thread failed with."""
        self._thread.join()
        self._spool.close()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._jobs.run()
        except Exception as error:
            self._error = error

    # --- for users --------------------------------------------------------------------------------

    def submit(
        self,
        prompts: Sequence[Prompt],
        image: bytes | None = None,
        deadline_s: float | None = None,
        *,
        must_meet_deadline: bool = False,
    ) -> list[Status]:
        """Take a request for each prompt, all or none; they are on disk when it returns.

        They begin with an image, which was checked and encoded here as PNG, and should be done in
        `deadline_s` from now; with `must_meet_deadline` they are refused if one would be late.

        Raises:
            ConfigError: The pipeline does not take a setting, or more come than may wait.
            Busy: Too many wait.
            Late: A deadline that must be met would be missed.
            Closing: The server is ending, or its disk takes nothing.
        """
        for prompt in prompts:
            check_prompt(self._pipeline, prompt, self._takes, picture=image is not None)
        if image is not None and not self.takes_image:
            raise ConfigError("this pipeline takes no image: leave it out")
        facts: dict[str, Any] = {"kind": self.kind, "state": "waiting", "created_at": time.time()}
        deadline_at = None if deadline_s is None else facts["created_at"] + deadline_s
        news = [Status(id=uuid4().hex, prompt=prompt, **facts) for prompt in prompts]
        entries = [Entry(status, image, deadline_at) for status in news]
        with self.lock:
            if reason := self._health():
                raise Closing(reason)
            tasks = list(map(self._task, entries))
            self._check_room(len(tasks))
            if must_meet_deadline and deadline_s is not None:
                ends_s = max(self._scheduler.ends_s(tasks).values())
                if ends_s > deadline_s:
                    raise Late(ends_s)
            try:
                self._spool.add(entries)
            except sqlite3.Error as error:
                raise Closing(f"the spool takes no more requests: {error}") from error
            for task in tasks:
                self._scheduler.add(task)
            statuses = self._statuses([task.id for task in tasks])
        self._orders.tell("asked")
        return statuses

    def status(self, request_id: str) -> Status:
        """Return the status of a request, also of one that has ended; Unknown if there is none."""
        with self.lock:
            return self._statuses([request_id])[0]

    def statuses(self) -> list[Status]:
        """Return open requests in the order of arrival, then the latest that have ended."""
        with self.lock:
            tasks = self._scheduler.tasks.values()
            here = [task.id for task in tasks if not task.is_cancelled]
            return [*self._statuses([*here, *self._unwritten]), *self._spool.ended(_SHOWN)]

    def cancel(self, request_id: str) -> Status:
        """End a request, unless it has ended or its output is there; Unknown if there is none."""
        with self.lock:
            status = self._cancel(self._statuses([request_id])[0])
        self._orders.tell("asked")
        return status

    def delete(self, request_id: str) -> Status:
        """Cancel a request, or remove it and its output if it has ended; return its status.

        Raises:
            Unknown: There is no such request.
            Closing: The disk does not remove it.
        """
        with self.lock:
            status = self._statuses([request_id])[0]
            if status.has_ended:
                self._remove(status)
            else:
                status = self._cancel(status)
        self._orders.tell("asked")
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
        with self.lock:
            return self._health()

    # --- news, with the lock ----------------------------------------------------------------------

    def turn(self) -> bool:
        """Retry to write ends that the disk refused, and look at times for what is too old."""
        unwritten = list(self._unwritten.values())
        for status in unwritten:
            self._end(status, status.state, status.reason)
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + _SWEEP_S
            if not self._reason:
                self._jobs.writer.submit(self._sweep)
        return bool(unwritten)

    def changed(self, task: Task, event: Event | None) -> None:
        """Report a change of a request."""
        if event is not None and event.kind == "done":
            self._forgive(task.id)  # others run while its output is written
        if self.on_change is not None:
            self.on_change(self._statuses([task.id])[0])

    def ended(self, task: Task, state: str, reason: str) -> None:
        """Record the end of a request, and let outputs beyond the limits be removed soon."""
        self._end(self._status(task), state, reason)
        self._sweep_at = 0.0

    def over(self, reason: str) -> None:
        """Take no more requests."""
        self._reason = self._reason or reason or "the server is ending"
        if not reason:
            self._forgive()

    # --- in the thread of the writer --------------------------------------------------------------

    def write(self, task: Task, output: Any) -> str | None:
        """Write an output as soon as the disk has room for it; None if the server ends before."""
        path = self._spool.output(self._status(task))
        while True:
            reason = no_room = ""
            try:
                write_media(path, output[0] if self.kind == "video" else output, self._fps)
                path.chmod(0o600)
                flush(path)
            except Exception as error:
                cause: Any = error.__cause__ or error
                why = getattr(cause, "strerror", None) or f"{type(cause).__name__}: {cause}"
                reason = f"its output cannot be written: {why}"
                if getattr(cause, "errno", None) in _DISK_FULL:
                    no_room = f"the disk takes no outputs: {why}"
            self._no_room = no_room
            if not no_room:
                return reason
            if self._reason:
                return None  # it begins anew at the next start
            self._sweep()  # which may make room
            time.sleep(_RETRY_S)

    def _sweep(self) -> None:
        """Remove ended requests, the oldest first, until the others keep the limits."""
        too_many, oldest = 0.0, time.time() - self._keep_days * _DAY_S
        if self._keep_bytes < NEVER:
            too_many = self._spool.num_bytes() - self._keep_bytes
        with suppress(Closing):  # a later look tries again
            while not self._reason:
                with self.lock:
                    status = next(iter(self._spool.ended(1, first=True)), None)
                    if status is None or (too_many <= 0 and (status.ended_at or 0.0) >= oldest):
                        return
                    too_many -= self._remove(status)

    # --- with the lock ----------------------------------------------------------------------------

    def _cancel(self, status: Status) -> Status:
        """Cancel a request, unless it has ended, or is ending; return its status."""
        task = self._scheduler.tasks.get(status.id)
        if task is None or not task.is_open:
            return status
        self._scheduler.cancel(task)
        return self._end(status, "cancelled")

    def _forgive(self, request_id: str | None = None) -> None:
        """Forget how often a request began, or each one, if the disk takes it."""
        with suppress(sqlite3.Error):
            self._spool.forgive(request_id)

    def _end(self, status: Status, state: str, reason: str = "") -> Status:
        """Record the end of a request, and report it."""
        ended_at = status.ended_at or max(status.created_at, time.time())  # clocks are set back
        status = replace(status, state=state, reason=reason, ended_at=ended_at)
        status = replace(status, ranks=(), ends_in_s=None)
        try:
            self._spool.end(status)
        except sqlite3.Error as error:
            self._unwritten[status.id] = status
            self._full = f"the spool takes no ends of requests: {error}"
            return status
        self._unwritten.pop(status.id, None)
        if state == "failed":
            logger.warning("request %s failed: %s", status.id, reason.partition("\n")[0])
        if self.on_change is not None:
            self.on_change(status)
        return status

    def _remove(self, status: Status) -> int:
        """Remove a request that has ended; return how many bytes its output had."""
        path = self._spool.output(status)
        num_bytes = path.stat().st_size if path.is_file() else 0
        try:
            self._spool.remove(status)
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise Closing(f"request {status.id} cannot be removed: {reason}") from error
        return num_bytes

    def _health(self) -> str:
        return self._reason or (self._full if self._unwritten else "") or self._no_room

    def _task(self, entry: Entry) -> Task:
        status, deadline_s = entry.status, NEVER
        if entry.deadline_at is not None:
            deadline_s = time.monotonic() + entry.deadline_at - time.time()
        ways = self._takes, self._times, partial(self._arguments, status), deadline_s
        task = Task.of(next(self._numbers), status.id, status.prompt, *ways)
        task.created_at, task.runs_alone = status.created_at, entry.starts > 0
        return task

    def _arguments(self, status: Status) -> dict[str, Any]:
        """Return what ranks get; first note on disk, if it has room, that ranks may die of it."""
        with suppress(sqlite3.Error):
            self._spool.begin(status.id)
        arguments = arguments_of(status.prompt, self._takes) | {"output_type": "pil"}
        if self.takes_image and (image := self._spool.image(status.id)) is not None:
            arguments["image"] = Image.open(io.BytesIO(image)).convert("RGB")
        return arguments

    def _check_room(self, num: int) -> None:
        if num > self._most_waiting:
            raise ConfigError(
                f"{num} requests at once, of which at most {self._most_waiting} may wait"
            )
        too_many = num + len(self._scheduler.state.waiting) - self._most_waiting
        if too_many > 0:
            here = [task for task in self._scheduler.tasks.values() if task.is_open]
            ends_s = sorted(self._scheduler.ends_s(here).values())
            raise Busy(max(1.0, ends_s[too_many - 1]))

    def _statuses(self, request_ids: Sequence[str]) -> list[Status]:
        tasks = [self._scheduler.tasks.get(request_id) for request_id in request_ids]
        ends_s = self._scheduler.ends_s([task for task in tasks if task and task.is_open])
        return [
            self._ended(request_id)
            if task is None or task.is_cancelled
            else self._status(task, ends_s.get(task))
            for request_id, task in zip(request_ids, tasks, strict=True)
        ]

    def _ended(self, request_id: str) -> Status:
        if (status := self._unwritten.get(request_id)) is not None:
            return replace(status, state="running", ended_at=None)
        return self._spool.status(request_id)

    def _status(self, task: Task, ends_in_s: float | None = None) -> Status:
        state = {"new": "waiting", "paused": "paused"}.get(task.phase, "running")
        return Status(
            id=task.id,
            kind=self.kind,
            state=state,
            step=0 if task.last is None else task.last.step,
            num_steps=(task.last and task.last.num_steps) or task.request.steps,
            ranks=() if task.at is None else tuple(task.at.ranks),
            created_at=task.created_at,
            ends_in_s=ends_in_s,
            prompt=task.prompt,
        )
