"""The loop of `bascule serve` and `bascule generate`: from events to orders and outputs."""

from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty
from typing import Any

from torch import Tensor

from bascule.serve.orders import Event
from bascule.serve.scheduling import Scheduler, Task

_POLL_S = 1.0


class Sink(ABC):
    """Receiver of outputs and of changed tasks; callers hold `lock`, except for `write`."""

    lock: AbstractContextManager[Any] = nullcontext()

    def poll(self) -> bool:
        """Do periodic work, at least once per second; return whether to ask the policy."""
        return False

    @abstractmethod
    def changed(self, task: Task, event: Event | None) -> None:
        """Handle a changed task; without an event, the task got ranks."""

    def saved(self, task: Task, packed: Tensor) -> None:  # noqa: B027 - optional
        """Handle a copy of a running task's state."""

    @abstractmethod
    def write(self, task: Task, output: Any) -> str | None:
        """Write an output, in a thread; return "", why it failed, or None to keep the task."""

    @abstractmethod
    def ended(self, task: Task, state: str, reason: str) -> None:
        """Handle the end of a task, "done" or "failed"."""

    def heard(self, event: Event) -> None:  # noqa: B027 - optional
        """Handle a rank's answer to an order about adapters."""

    def stopped(self, reason: str) -> None:  # noqa: B027 - optional
        """Handle the end of the engine or of this loop; `reason` is empty if it was asked for."""


class Jobs:
    """Loop over a scheduler's tasks, until the engine ends or, with `until_idle`, none is left."""

    def __init__(self, scheduler: Scheduler, sink: Sink, *, until_idle: bool = False) -> None:
        self._scheduler, self._sink, self._until_idle = scheduler, sink, until_idle
        self._orders = scheduler.orders
        self.writer = ThreadPoolExecutor(1, "bascule outputs")  # the thread that writes outputs
        self._writes: dict[str, Future[str | None]] = {}

    def run(self) -> None:
        """Handle events until the engine has ended and outputs are written; an error ends it."""
        try:
            self._orders.tell("asked")
            while self._turn(_POLL_S):
                pass
            self.writer.shutdown()
            self._turn(0.0)
        except Exception as error:
            reason = f"the service failed with a {type(error).__name__}"
            with self._sink.lock:
                self._sink.stopped(reason)
                self._orders.abort(reason)
            raise

    def _turn(self, wait_s: float) -> bool:
        """Handle all queued events, and act; return whether the engine goes on."""
        events = list[Event]()
        with suppress(Empty):
            events.append(self._orders.events.get(timeout=wait_s))
            while True:
                events.append(self._orders.events.get_nowait())
        with self._sink.lock:
            asks = [self._sink.poll(), *map(self._handle, events)]
            for task in self._scheduler.decide() if any(asks) else ():
                self._sink.changed(task, None)
            if self._until_idle and not self._scheduler.tasks:
                self._scheduler.close()
        return all(event.kind != "ended" for event in events)

    def _handle(self, event: Event) -> bool:
        """Handle an event; return whether to ask the policy."""
        if event.kind == "ended":
            self._sink.stopped("the ranks of the server have ended" if event.reason else "")
        if event.kind == "adapter":
            self._sink.heard(event)
        if (task := self._scheduler.tasks.get(event.request_id)) is None:
            return event.kind == "asked"
        if event.kind == "written":
            if (reason := self._writes.pop(task.id).result()) is not None:
                self._scheduler.remove(task)
                self._sink.ended(task, "failed" if reason else "done", reason)
            return True
        if event.kind == "saved":
            if not task.is_cancelled:
                self._sink.saved(task, event.output)
            return False
        events = event.by_request()
        tasks = [self._scheduler.tasks[each.request_id] for each in events]
        asks = self._scheduler.handle(event)
        for task, each in zip(tasks, events, strict=True):
            if not task.is_cancelled:
                self._pass_on(task, each)
        return asks

    def _pass_on(self, task: Task, event: Event) -> None:
        if event.kind == "done":
            write = self.writer.submit(self._sink.write, task, event.output)
            self._writes[task.id] = write
            write.add_done_callback(lambda _: self._orders.tell("written", task.id))
        if event.kind == "failed":
            self._sink.ended(task, "failed", event.reason)
        else:
            self._sink.changed(task, event)  # which waits for the disk, too
