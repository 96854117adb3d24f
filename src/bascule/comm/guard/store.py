"""Requests to the store of the job, which end also where its host does not answer.

A store of torch waits for an answer without a limit: where a link is cut, a quarter of an hour.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import (
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
)

from bascule.comm.world import this_world

T = TypeVar("T")

ANSWER_S = 10.0
"""Longest time that an answer may take. A store answers in less than a millisecond."""


class StoreSilentError(RuntimeError):
    """The store does not answer: its host is gone, or the way to it."""


class _Requests:
    """Those that have no answer yet: when each of them began."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def ask(self, request: Callable[[], T]) -> T:
        answer: list[T] = []
        error: list[BaseException] = []

        def run() -> None:
            try:
                answer.append(request())
            except BaseException as met:
                error.append(met)
            finally:
                self._since.pop(threading.get_ident(), None)

        thread = threading.Thread(target=run, name="bascule store", daemon=True)
        now = time.monotonic()
        first = min([now, *list(self._since.values())])
        thread.start()
        self._since[thread.ident or 0] = now
        thread.join(max(first + ANSWER_S - now, 0.01))
        if answer:
            self._since.pop(thread.ident or 0, None)
            return answer[0]
        if error:
            self._since.pop(thread.ident or 0, None)
            raise error[0]
        raise StoreSilentError(
            f"the store of the job has not answered for {ANSWER_S:g} s: its host, or the link to "
            "it, is gone"
        )


def ask(request: Callable[[Any], T]) -> T:
    """What a request gives. Each has a thread of its own, which this one joins if it ends.

    Raises:
        StoreSilentError: There was no answer in time, to this one or to one before it.
        What the request raises.
    """
    store: Any = _get_default_store()
    return this_world().kept(_Requests, _Requests).ask(lambda: request(store))
