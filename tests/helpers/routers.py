"""A router that listens, before jobs that listen or that a transport stands in for."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from bascule.serve import route
from bascule.serve.guard import guarded
from bascule.serve.options import RouteOptions
from bascule.serve.route import Router
from tests.helpers.door import Open


@dataclass
class Routed(Open):
    """A router that listens."""

    router: Any

    def reasons(self) -> list[bool]:
        """Whether each job is out."""
        return [bool(job.reason) for job in self.router.jobs]


@contextmanager
def opened_router(
    *urls: str, transport: Any = None, soon_s: float | None = None, **options: Any
) -> Iterator[Routed]:
    """A router on a free port, which asks its jobs at its start and, by default, not again."""
    settings = RouteOptions(urls=urls, **{"port": 0, "poll_s": 60.0} | options)
    settings.check()
    router = Router(settings, transport)
    server, listener, address = guarded(router.app, settings, 100, 1, keeps=True)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        with ExitStack() as clients:
            clients.enter_context(patch.object(route, "_SOON_S", soon_s or settings.poll_s))
            door: Any = SimpleNamespace(address=address)
            yield Routed(door, cast(Any, None), clients, router)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    """Wait until something is true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
