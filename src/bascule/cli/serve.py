"""`bascule serve --model tiny --ranks 2`: images and videos over HTTP."""

import gc
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING

from bascule.errors import ConfigError
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
    from bascule.cli.launch import forwarding_stops, in_a_job, num_ranks_here, stop_asked

    # Before minutes of loading.
    size = int(os.environ["WORLD_SIZE"]) if in_a_job() else options.ranks or num_ranks_here(None)
    legal = [1 << k for k in range(1 if options.mesh else size.bit_length())]
    if (degree := max(options.degrees, default=1)) > legal[-1]:
        fix = f"give degrees up to {legal[-1]}, or --ranks {degree}"
        raise ConfigError(f"--degrees {degree}: a request has at most the {size} ranks here: {fix}")
    options.make_policy(options.degrees or legal)
    if not in_a_job():
        gc.enable()
        options.listen().close()

    def serve(device: "torch.device") -> None:
        from bascule.serve.serving import run_server

        with stop_asked() as is_stopping:
            run_server(options, device, is_stopping)

    with nullcontext() if in_a_job() else forwarding_stops():
        on_ranks(options, arguments, serve, lambda _: None, max_restarts=options.max_restarts)
