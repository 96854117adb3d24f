"""Fibers: functions that run in threads, but only while another thread waits for them.

So many calls of one pipeline are under way at once, and yet only one of them runs at a time. What
they ask for is computed by the thread that resumes them.
"""

import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_here = threading.local()  # `fiber`: of this thread


class Cancelled(BaseException):
    """A fiber ends early. No error, so that a pipeline does not handle it."""


class Fiber:
    """A function in a thread that runs only within `resume`; it parks where it calls `ask`.

    Attributes:
        asked: What it waits for; None before its first `resume` and after its end.
        is_over: Whether it has ended, with a `result` or an `error`.
    """

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self._function, self.asked, self.is_over = function, None, False
        self.result: Any = None
        self.error: BaseException | None = None
        self._asks = SimpleQueue[Any]()  # None: it has ended
        self._answers = SimpleQueue[tuple[Any, BaseException | None]]()
        self._is_cancelled = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def resume(self, answer: Any = None, error: BaseException | None = None) -> None:
        """Let it go on with the answer to what it asked, or raise the error there, until it parks.

        The first `resume` starts it. KeyboardInterrupt may end the wait; `cancel` then ends it.
        """
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._answers.put((answer, error))
        self.asked = self._asks.get()
        if self.asked is None:
            self._thread.join()
            self.is_over = True

    def cancel(self) -> None:
        """End it, by `Cancelled` where it asks now and wherever it asks later."""
        self._is_cancelled = True
        if self._thread.ident is None:
            self.is_over = True
        while not self.is_over:
            self.resume(error=Cancelled())

    def _run(self) -> None:
        _here.fiber = self
        try:
            self.result = self._function()
        except Cancelled:
            pass
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold tensors
            self.error = error
        del self._function  # which may refer to this fiber
        self._asks.put(None)

    def _ask(self, question: Any) -> Any:
        if self._is_cancelled:
            raise Cancelled
        self._asks.put(question)
        answer, error = self._answers.get()
        if error is not None:
            raise error
        return answer


def is_within() -> bool:
    """Return whether this thread is a fiber."""
    return getattr(_here, "fiber", None) is not None


def ask(question: Any) -> Any:
    """Park the fiber of this thread, and return the answer of `resume`; raise its error."""
    return _here.fiber._ask(question)
