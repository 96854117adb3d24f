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
    """Requests over a connection of their own: other code may wait in the store on the job's.

    Those that have no answer yet are known by when they began.
    """

    def __init__(self) -> None:
        self._store: Any = None
        self._since: dict[int, float] = {}
        self._lock = threading.Lock()

    def ask(self, request: Callable[[Any], T]) -> T:
        now = time.monotonic()
        left = min([now, *list(self._since.values())]) + ANSWER_S - now
        if left <= 0:
            raise _silent()
        answer: list[T] = []
        error: list[BaseException] = []

        def run() -> None:
            self._since[threading.get_ident()] = now
            try:
                answer.append(request(self._connected()))
            except BaseException as met:
                error.append(met)
            finally:
                del self._since[threading.get_ident()]

        thread = threading.Thread(target=run, name="bascule store", daemon=True)
        thread.start()
        thread.join(left)
        if error:
            raise error[0]
        if not answer:
            raise _silent()
        return answer[0]

    def _connected(self) -> Any:
        with self._lock:
            if self._store is None:
                job: Any = _get_default_store()
                self._store = job.clone()
            return self._store


def _silent() -> StoreSilentError:
    return StoreSilentError(
        f"the store of the job has not answered for {ANSWER_S:g} s: its host, or the link to it, "
        "is gone"
    )


def ask(request: Callable[[Any], T], over: str = "requests") -> T:
    """What a request gives. Each has a thread of its own, which this one joins if it ends.

    Args:
        request: Takes the store.
        over: Connection that it uses: one that waits there holds up no request over another.

    Raises:
        StoreSilentError: There was no answer in time, to this one or to one before it.
        What the request raises.
    """
    return this_world().kept((_Requests, over), _Requests).ask(request)
