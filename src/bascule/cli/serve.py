"""`bascule serve`: a pipeline behind HTTP, on local ranks or in a job that runs."""

import os
import signal
from contextlib import nullcontext
from typing import TYPE_CHECKING

from bascule.serve.options import ServeOptions

if TYPE_CHECKING:
    import torch


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

    with stop_asked(signal.SIGTERM, signal.SIGINT) as is_stopping:
        run_server(options, device, is_stopping)
