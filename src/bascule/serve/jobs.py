"""The loop of `bascule serve` and `bascule generate`: from news of ranks to orders and outputs."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty
from typing import Any

from bascule.serve.orders import Event
from bascule.serve.scheduling import Scheduler, Task

_TURN_S = 1.0


class Sink:
    """A place for outputs, which hears what becomes of tasks; all but `write` with the lock."""

    lock: AbstractContextManager[Any] = nullcontext()

    def turn(self) -> bool:
        """Do what is due by itself, once a second at least; return whether to ask the policy."""
        return False

    def changed(self, task: Task, event: Event | None) -> None:
        """Take news of a task; None: it gets ranks."""

    def write(self, task: Task, output: Any) -> str | None:
        """Write an output, in a thread; return why it cannot be, or "", or None: it stays."""
        raise NotImplementedError

    def ended(self, task: Task, state: str, reason: str) -> None:
        """Take the end of a task, "done" or "failed"."""
        raise NotImplementedError

    def over(self, reason: str) -> None:
        """Take the end of the ranks or of this loop; no reason: it was asked for."""


class Jobs:
    """Works off the tasks of a scheduler until the engine ends: by others, or if none is left.

    Attributes:
        writer: The thread that writes.
    """

    def __init__(self, scheduler: Scheduler, sink: Sink, *, until_idle: bool = False) -> None:
        self._scheduler, self._sink, self._until_idle = scheduler, sink, until_idle
        self._orders = scheduler.orders
        self.writer = ThreadPoolExecutor(1, "bascule outputs")
        self._written: dict[str, Future[str | None]] = {}

    def run(self) -> None:
        """Take news and act until the engine has ended and all outputs are written.

        An error, which would be one of ours, ends the engine.
        """
        try:
            self._orders.tell("asked")
            while self._take(_TURN_S):
                pass
            self.writer.shutdown()
            self._take(0.0)
        except Exception as error:
            reason = f"the service failed by a {type(error).__name__}"
            with self._sink.lock:
                self._sink.over(reason)
                self._orders.abort(reason)
            raise

    def _take(self, wait_s: float) -> bool:
        """Take the news that there is, and act; return whether the engine goes on."""
        events = list[Event]()
        with suppress(Empty):
            events.append(self._orders.events.get(timeout=wait_s))
            while True:
                events.append(self._orders.events.get_nowait())
        with self._sink.lock:
            asks = [self._sink.turn(), *map(self._handle, events)]
            for task in self._scheduler.decide() if any(asks) else ():
                self._sink.changed(task, None)
            if self._until_idle and not self._scheduler.tasks:
                self._scheduler.close()
        return all(event.kind != "ended" for event in events)

    def _handle(self, event: Event) -> bool:
        """Take an event; return whether the policy should be asked."""
        if event.kind == "ended":
            self._sink.over("the ranks of the server have ended" if event.reason else "")
        if (task := self._scheduler.tasks.get(event.request_id)) is None:
            return event.kind == "asked"
        if event.kind == "written":
            if (reason := self._written.pop(task.id).result()) is not None:
                self._scheduler.remove(task)
                self._sink.ended(task, "failed" if reason else "done", reason)
            return True
        asks = self._scheduler.handle(event)
        if not task.is_cancelled:
            if event.kind == "failed":
                self._sink.ended(task, "failed", event.reason)
            else:
                self._sink.changed(task, event)
            if event.kind == "done":
                write = self.writer.submit(self._sink.write, task, event.output)
                self._written[task.id] = write
                write.add_done_callback(lambda _: self._orders.tell("written", task.id))
        return asks
