"""`bascule serve --model tiny --ranks 2`: images and videos over HTTP."""

import gc
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING

from bascule.serve.options import ServeOptions

if TYPE_CHECKING:
    import torch


def run(options: ServeOptions, arguments: list[str]) -> None:
    """Serve on all ranks until a signal; unfinished requests stay in the spool.

    If a rank dies, torch's launcher starts all ranks again, which go on with the spool.
    """
    if options.advise:
        from bascule.cli.advise import advise

        return advise(options)
    options.check()
    gc.disable()  # until a rank has loaded all, which is then faster at each restart
    # Before torch loads: its store would log each second without a message.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from bascule.cli.command import on_ranks
    from bascule.cli.launch import forwarding_stops, in_a_job, stop_asked

    if not in_a_job():
        gc.enable()
        options.listen().close()  # a taken port is told before minutes of loading

    def serve(device: "torch.device") -> None:
        from bascule.serve.serving import run_server

        with stop_asked() as is_stopping:
            run_server(options, device, is_stopping)

    with nullcontext() if in_a_job() else forwarding_stops():
        on_ranks(options, arguments, serve, lambda _: None, max_restarts=options.max_restarts)
