"""The service: stores users' requests on disk, runs them by an engine, and reports on them."""

import errno
import inspect
import io
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from opentelemetry.context import Context
from PIL import Image
from torch import Tensor

from bascule.errors import ConfigError
from bascule.generate.generating import arguments_of, check_prompt, media_of, write_media
from bascule.generate.options import Prompt
from bascule.plan.requests import NEVER, Policy
from bascule.quantities import seconds
from bascule.serve.adapters import Shelf, check_names, digest_of
from bascule.serve.jobs import Jobs, Sink
from bascule.serve.metrics import Metrics
from bascule.serve.options import ServeOptions
from bascule.serve.orders import Event, Orders
from bascule.serve.scheduling import Scheduler, Task
from bascule.serve.spool import Entry, Spool, flush
from bascule.serve.status import Busy, Closing, Key, Late, Refusal, Status, Unknown
from bascule.serve.times import Times
from bascule.serve.tracing import Trace

_MOST_LISTED = 20  # ended requests in a list
_RETRY_S = 1.0  # between tries to write to a full disk
_SWEEP_S = 600.0  # between removals of old requests
_DAY_S = 86400.0
_MOST_STARTS = 2  # of a request; at the last start it runs alone
_DISK_FULL = errno.ENOSPC, errno.EDQUOT

logger = logging.getLogger(__name__)


class Service(Sink):
    """Queue of requests that an engine runs; any thread may call it.

    The loop has a thread of its own. Requests of the spool that have not ended start again. If
    ranks died during a request, it runs after the others, and alone; if they die again, it fails.

    Args:
        pipeline: Pipeline of the engine, to which `orders` go.
        stays: Whether requests keep their ranks; see `Engine.stays`.
        saved_by: What made the saved states that may be used: versions and weights.
        loras: Digests of the adapters that all ranks have loaded, by name.
    """

    def __init__(
        self,
        pipeline: Any,
        orders: Orders,
        spool: Spool,
        options: ServeOptions,
        *,
        policy: Policy,
        times: Times,
        stays: bool = False,
        saved_by: str = "",
        loras: Mapping[str, str] | None = None,
    ) -> None:
        self._pipeline, self._orders, self._spool, self._times = pipeline, orders, spool, times
        self._takes = inspect.signature(pipeline.__call__).parameters
        self.kind = "video" if "num_frames" in self._takes else "image"
        self.num_ranks, self.takes_image = orders.num_ranks * orders.size, "image" in self._takes
        # Called with the status of a changed request; must not call the service.
        self.on_change: Callable[[Status], None] = lambda _: None
        self._options, self._stays = options, stays
        self.lock = threading.RLock()
        self._closed = ""  # why no more requests are accepted
        self._full = ""  # why the disk does not store ends
        self._no_room = ""  # why the disk does not store outputs
        self._unwritten: dict[str, Status] = {}  # ends that the disk did not store
        self._numbers, self._sweep_at = count(), 0.0
        self._traces: dict[str, Trace] = {}  # of requests that have not ended
        self._metrics = Metrics(self.num_ranks)
        self._states, self._saved_by = dict[str, Tensor](), saved_by  # states to write, the newest
        self._shelf = Shelf(orders, loras or {}, options.lora_folder, spool.remember)
        self.heard = self._shelf.heard
        self._scheduler = Scheduler(orders, policy, times, most_batch=options.batch)
        self._jobs = Jobs(self._scheduler, self)
        for name in spool.loras():
            if reason := self._shelf.reload([name]):
                logger.warning("%s", reason)
        for entry in sorted(spool.waiting(), key=lambda entry: entry.starts):
            reason = entry.status.reason  # of an unreadable row
            if entry.starts >= _MOST_STARTS:
                reason = f"its ranks ended {entry.starts} times while it ran, at last alone"
                reason += ": see why in the log, or ask for less"
            reason = reason or self._shelf.reload(lora.name for lora in entry.status.prompt.lora)
            if reason:
                status = replace(entry.status, state="failed", reason=reason)
                self._unwritten[status.id] = status
            else:
                self._scheduler.add(self._task(entry))
                self._traces[entry.status.id] = Trace(orders.ranks_of)
        self._pool = ThreadPoolExecutor(1, "bascule service")

    def start(self) -> None:
        """Start the thread, which begins with the requests of the spool."""
        self._loop = self._pool.submit(self._jobs.run)

    def stop(self) -> None:
        """Let the engine end after the running steps.

        If all ranks are alive, this start does not count against running requests: a kill during a
        slow stop is not their fault. Launchers also stop a job whose rank has died: then it counts.
        """
        with self.lock:
            logger.info("stopping: running requests end their present step ..")
            self._closed = self._closed or "the server is ending"
            self._scheduler.close()
        if self._orders.are_alive():
            with self.lock:
                self._spool.forgive()

    def close(self) -> None:
        """Wait for the thread, after the engine's end; raise its error, if it failed."""
        self._pool.shutdown()
        self._spool.close()
        logger.info("stopped: requests that have not ended resume at the next start")
        self._loop.result()

    # --- for users --------------------------------------------------------------------------------

    def submit(
        self,
        prompts: Sequence[Prompt],
        images: Sequence[bytes] = (),
        deadline_s: float | None = None,
        *,
        must_meet_deadline: bool = False,
        key: Key | None = None,
        parent: Context | None = None,
    ) -> list[Status]:
        """Accept a request for each prompt, all or none; they are on disk when it returns.

        `images` are checked PNGs, the input of each. They should be done within `deadline_s`; with
        `must_meet_deadline`, all are refused if one would be late. If a call with this `key` was
        accepted before, its requests are returned instead. `parent` has the client's span.

        Raises:
            ConfigError: The pipeline does not accept a setting, or more prompts than may wait.
            Busy: Too many requests wait.
            Late: A deadline that must be met would be missed.
            Reused: The key came with a call that asked for something else.
            Closing: The server is ending, or its disk is full.
        """
        for prompt in prompts:
            check_prompt(self._pipeline, prompt, self._takes, num_pictures=len(images))
        facts: dict[str, Any] = {"kind": self.kind, "state": "waiting", "created_at": time.time()}
        deadline_at = None if deadline_s is None else facts["created_at"] + deadline_s
        entries = [
            Entry(Status(id=uuid4().hex, prompt=prompt, **facts), len(images), deadline_at)
            for prompt in prompts
        ]
        with self.lock, self._metrics.counting_refusals():
            if key is not None and (ids := self._spool.asked(key.name, key.digest)):
                return self._statuses(ids)
            if reason := self.health():
                raise Closing(reason)
            try:
                for prompt in prompts:
                    check_names(prompt.lora, self._shelf.digests)
            except ConfigError as error:  # a router may know a job that has them
                raise Refusal(400, str(error), "lora", "lora_not_loaded") from None
            tasks = list(map(self._task, entries))
            if len(tasks) > (most := self._options.most_waiting):
                what = f"{len(tasks)} requests at once: at most {most} may wait"
                raise ConfigError(f"{what}: send fewer")
            if (excess := len(tasks) + len(self._scheduler.state.waiting) - most) > 0:
                others = [task for task in self._scheduler.tasks.values() if task.is_open]
                ends_s = sorted(self._scheduler.ends_s(others).values())
                raise Busy(max(1.0, ends_s[excess - 1]))
            if must_meet_deadline and deadline_s is not None:
                if (ends_s := max(self._scheduler.ends_s(tasks).values())) > deadline_s:
                    raise Late(ends_s)
            try:
                self._spool.add(entries, images, key)
            except sqlite3.Error as error:
                raise Closing(f"the spool cannot store requests: {error}") from error
            for task in tasks:
                self._scheduler.add(task)
                self._traces[task.id] = Trace(self._orders.ranks_of, parent)
            statuses = self._statuses([task.id for task in tasks])
            self._metrics.accept(statuses)
        self._orders.tell("asked")
        return statuses

    def status(self, request_id: str) -> Status:
        """Return the status of a request, open or ended; Unknown if there is none."""
        with self.lock:
            return self._statuses([request_id])[0]

    def statuses(self, key: str | None = None) -> list[Status]:
        """Return open requests by arrival, then the latest ended ones; or the requests of a key."""
        with self.lock:
            if key is not None:
                return self._statuses(self._spool.asked(key))
            tasks = self._scheduler.tasks.values()
            ids = [task.id for task in tasks if not task.is_cancelled]
            return [*self._statuses([*ids, *self._unwritten]), *self._spool.ended(_MOST_LISTED)]

    def page(self, num: int, after: str | None = None, oldest_first: bool = False) -> list[Status]:
        """Return so many requests that follow another, open or ended; Unknown if it is unknown."""
        with self.lock:
            return self._statuses(self._spool.page(self.kind, num, after, oldest_first))

    def metrics(self) -> bytes:
        """Return `Metrics.text`."""
        with self.lock:
            return self._metrics.text(self.statuses(), self._scheduler, self.loras())

    def cancel(self, request_id: str) -> Status:
        """Cancel a request, unless it has ended or its output is made; Unknown if there is none."""
        with self.lock:
            status, task = self.status(request_id), self._scheduler.tasks.get(request_id)
            if task is not None and task.is_open:
                self._scheduler.cancel(task)
                status = self._end(status, "cancelled")
        self._orders.tell("asked")
        return status

    def delete(self, request_id: str) -> Status:
        """Cancel a request, or remove it from disk if it has ended; else Unknown, or Closing."""
        with self.lock:
            if not (status := self.status(request_id)).has_ended:
                return self.cancel(request_id)
            self._remove(status)
        return status

    def loras(self) -> list[str]:
        """Return the names of the adapters that requests may choose."""
        with self.lock:
            return sorted(self._shelf.digests)

    def load_lora(self, name: str) -> Future[None]:
        """Let all ranks load an adapter of the folder, as `Shelf.load`."""
        path = self._shelf.find(name)
        digest = digest_of(path)  # without the lock, as files are large
        with self.lock:
            return self._shelf.load(name, path, digest)

    def remove_lora(self, name: str) -> Future[None]:
        """Let all ranks remove an adapter; Refusal if there is none, or a request needs it."""
        with self.lock:
            for task in self._scheduler.tasks.values():
                if task.phase != "made" and name in [lora.name for lora in task.prompt.lora]:
                    text = f"request {task.id} needs LoRA {name!r}: try again when it has ended"
                    raise Refusal(409, text, "name", "lora_in_use")
            return self._shelf.remove(name)

    def result(self, request_id: str) -> Path:
        """Return the path of a done request's output, PNG or MP4; else raise Unknown."""
        status = self.status(request_id)
        path = self._spool.output(status)
        if status.state != "done" or not path.is_file():
            raise Unknown(f"request {request_id!r} is {status.state}, and has no output")
        return path

    def health(self) -> str:
        """Return why requests are not accepted or done; empty if all is well."""
        with self.lock:
            return self._closed or (self._full if self._unwritten else "") or self._no_room

    # --- a sink of the loop, with the lock --------------------------------------------------------

    def poll(self) -> bool:
        """Store ends that the disk refused before; from time to time, remove old requests."""
        unwritten = list(self._unwritten.values())
        for status in unwritten:
            self._end(status, status.state, status.reason)
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + _SWEEP_S
            if not self._closed:
                self._jobs.writer.submit(self._sweep)
        return bool(unwritten)

    def changed(self, task: Task, event: Event | None) -> None:
        """Report a changed request."""
        self._traces[task.id].follow(task, event)
        if event is not None and event.kind == "done":
            self._spool.forgive(task.id)  # a later death of ranks is not its fault
        self.on_change(self._statuses([task.id])[0])

    def ended(self, task: Task, state: str, reason: str) -> None:
        """Store the end of a request; outputs beyond the limits are removed soon."""
        self._end(self._status(task), state, reason)
        self._sweep_at = 0.0

    def stopped(self, reason: str) -> None:
        """Accept no more requests."""
        self._closed = self._closed or reason or "the server is ending"
        self._shelf.end(Closing(self._closed))
        if not reason:
            self._spool.forgive()

    def saved(self, task: Task, packed: Tensor) -> None:
        """Let the writer store a state, instead of an older one that it has not stored yet."""
        if self._states.get(task.id) is None:
            self._jobs.writer.submit(self._save, task)
        self._states[task.id] = packed

    # --- in the thread of the writer --------------------------------------------------------------

    def write(self, task: Task, output: Any) -> str | None:
        """Write an output as soon as the disk has room; None if the server ends before."""
        path = self._spool.output(status := self._status(task))
        while True:
            try:
                frames, sound = media_of(self._pipeline, output, is_video=self.kind == "video")
                write_media(path, frames, status.prompt.fps or self._options.fps, sound)
                path.chmod(0o600)
                flush(path)
                reason = self._no_room = ""
            except Exception as error:
                cause: Any = error.__cause__ or error
                why = getattr(cause, "strerror", None) or f"{type(cause).__name__}: {cause}"
                reason, is_full = why, getattr(cause, "errno", None) in _DISK_FULL
                self._no_room = f"the disk cannot store outputs: {why}" if is_full else ""
            if not self._no_room:
                return reason and f"its output cannot be written: {reason}"
            if self._closed:
                return None  # the request starts again with the next server
            self._sweep()  # which may make room
            time.sleep(_RETRY_S)

    def _save(self, task: Task) -> None:
        """Store the newest state of a request, unless it has ended."""
        with self.lock:
            packed, made_by = self._states.pop(task.id), self._made_by(task.prompt)
        try:
            self._spool.save(task.id, packed, made_by)
        except OSError as error:
            logger.warning("request %s: its state is not saved: %s", task.id, error.strerror)
        with self.lock:
            if self._scheduler.tasks.get(task.id) is not task or task.is_cancelled:
                self._spool.forget(task.id)

    def _sweep(self) -> None:
        """Remove ended requests, the oldest first, until the rest is within the limits."""
        days, most = self._options.keep_days, self._options.keep_gb
        oldest = 0.0 if days is None else time.time() - days * _DAY_S
        excess_bytes = 0.0 if most is None else self._spool.num_bytes() - most * 1e9
        with suppress(Closing):  # a later sweep tries again
            while not self._closed:
                with self.lock:
                    status = next(iter(self._spool.ended(1, first=True)), None)
                    if status is None or (excess_bytes <= 0 and (status.ended_at or 0.0) >= oldest):
                        return
                    excess_bytes -= self._remove(status)

    # --- with the lock ----------------------------------------------------------------------------

    def _end(self, status: Status, state: str, reason: str = "") -> Status:
        """Store the end of a request, and report it."""
        ended_at = status.ended_at or max(status.created_at, time.time())  # clocks are set back
        ended = {"state": state, "reason": reason, "ended_at": ended_at}
        status = replace(status, ranks=(), ends_in_s=None, **ended)
        try:
            self._spool.end(status)
        except sqlite3.Error as error:
            self._unwritten[status.id] = status
            self._full = f"the spool cannot store ends of requests: {error}"
            return status
        self._unwritten.pop(status.id, None)
        text = f"request {status.id}: {state} after {seconds(ended_at - status.created_at)}"
        text += f", {status.size}, {status.step} of {status.num_steps} steps"
        if (trace := self._traces.pop(status.id, None)) is not None:
            trace.end(status)
            text += f", {trace}"
        level = logging.WARNING if state == "failed" else logging.INFO
        logger.log(level, "%s%s", text, f": {reason}".partition("\n")[0] if reason else "")
        self._metrics.count(status, trace)
        self.on_change(status)
        return status

    def _remove(self, status: Status) -> int:
        """Remove an ended request; return the bytes of its output."""
        path = self._spool.output(status)
        num_bytes = path.stat().st_size if path.is_file() else 0
        try:
            self._spool.remove(status)
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise Closing(f"request {status.id} cannot be removed: {reason}") from error
        return num_bytes

    def _task(self, entry: Entry) -> Task:
        status, deadline_s = entry.status, NEVER
        if entry.deadline_at is not None:
            deadline_s = time.monotonic() + entry.deadline_at - time.time()
        arguments = partial(self._arguments, status)
        request = next(self._numbers), status.id, status.prompt
        facts = self._takes, self._times, arguments, deadline_s
        task = Task.of(*request, *facts, num_pictures=entry.num_images)
        task.created_at, task.runs_alone = status.created_at, entry.starts > 0
        task.stays, task.count_start = self._stays, partial(self._spool.count_start, task.id)
        if task.runs_alone or task.stays:
            task.request = replace(task.request, batch_key=None)
        return task

    def _arguments(self, status: Status) -> dict[str, Any] | Tensor:
        """Return the saved state or the arguments."""
        packed = self._spool.saved(status.id, self._made_by(status.prompt))
        if packed is not None:
            logger.info("request %s goes on from its saved state", status.id)
            return packed
        prompt = replace(status.prompt, fps=status.prompt.fps or self._options.fps)
        arguments = arguments_of(prompt, self._takes) | {"output_type": "pil"}
        stored = map(io.BytesIO, self._spool.images(status.id))
        if pictures := [Image.open(image).convert("RGB") for image in stored]:
            arguments["image"] = pictures if len(pictures) > 1 else pictures[0]
        return arguments

    def _made_by(self, prompt: Prompt) -> str:
        """Return what a saved state of a request depends on."""
        digests = [self._shelf.digests.get(lora.name, "no file") for lora in prompt.lora]
        rate = f"{prompt.fps or self._options.fps} fps"  # which some models of videos take
        return ", ".join([self._saved_by, rate, *digests])

    def _statuses(self, request_ids: Sequence[str]) -> list[Status]:
        tasks = [self._scheduler.tasks.get(request_id) for request_id in request_ids]
        ends_s = self._scheduler.ends_s([task for task in tasks if task and task.is_open])
        statuses = list[Status]()
        for request_id, task in zip(request_ids, tasks, strict=True):
            if task is not None and not task.is_cancelled:
                statuses.append(self._status(task, ends_s.get(task)))
            elif (status := self._unwritten.get(request_id)) is not None:
                statuses.append(replace(status, state="running", ended_at=None))
            else:
                statuses.append(self._spool.status(request_id))
        return statuses

    def _status(self, task: Task, ends_in_s: float | None = None) -> Status:
        return Status(
            id=task.id,
            kind=self.kind,
            state={"new": "waiting", "paused": "paused"}.get(task.phase, "running"),
            step=0 if task.last is None else task.last.step,
            num_steps=(task.last and task.last.num_steps) or task.request.steps,
            ranks=tuple(self._orders.ranks_of(task.at)),
            created_at=task.created_at,
            ends_in_s=ends_in_s,
            prompt=task.prompt,
        )
