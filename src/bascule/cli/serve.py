"""`bascule serve`: a pipeline behind HTTP, on local ranks or in a job that runs."""

import os
import signal
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING

from bascule.serve.options import ServeOptions

if TYPE_CHECKING:
    import torch

_LOOK_S = 0.5


def run(options: ServeOptions, arguments: list[str]) -> None:
    """Serve on all ranks until a signal; what is not done then is in the spool."""
    options.check()
    # Before torch loads: its store would log each second in which no message comes.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from bascule.cli.command import on_ranks
    from bascule.cli.launch import forwarding_stops, in_a_job

    stops = nullcontext() if in_a_job() else forwarding_stops(signal.SIGTERM, signal.SIGINT)
    with stops:
        on_ranks(options, arguments, lambda device: _work(options, device), lambda _: None)


def _work(options: ServeOptions, device: "torch.device") -> None:
    from bascule.cli.launch import stop_asked
    from bascule.serve.serving import run_server

    is_over = threading.Event()
    with stop_asked() as is_stopping:

        def watch() -> None:
            """Repeat a signal that came before the server had its handlers, or could not come."""
            while not is_over.wait(_LOOK_S):
                if is_stopping():
                    os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=watch, name="bascule stops")
        thread.start()
        try:
            run_server(options, device)
        finally:
            is_over.set()
            thread.join()
