"""A server on all ranks of a job: the engine on each, the service and its door on the first."""

import inspect
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from bascule.comm.agree import agree_on
from bascule.comm.groups import member_of, resolve
from bascule.errors import ConfigError
from bascule.generate.generating import load_pipeline
from bascule.plan.requests import NEVER, Balanced
from bascule.serve.engine import Engine
from bascule.serve.options import ServeOptions
from bascule.serve.service import Service
from bascule.serve.spool import Spool
from bascule.serve.times import Times
from bascule.workload.tables import load_av

_POLL_S = 0.5
_START = "the start of bascule serve"


def run_server(
    options: ServeOptions, device: torch.device, is_stopping: Callable[[], bool]
) -> None:
    """Serve on all ranks until the first is told to stop; end after the steps that run then.

    Raises:
        ConfigError: The model cannot be served, the spool is another server's, or the address is
            taken.
        CommError: A rank is gone; requests that are not done are in the spool.
    """
    world, is_over = member_of(resolve(None), "world"), threading.Event()
    dtype = options.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    with ExitStack() as stack:
        weights = ", ".join(filter(None, (options.model_name, options.variant, dtype)))
        made = partial(Spool, options.spool, weights)
        spool = agree_on(world, lambda: made() if world.rank == 0 else None, what=_START)
        pipeline = load_pipeline(options.model, getattr(torch, dtype), device, options.variant)
        engine = Engine(pipeline, timeout_s=options.timeout_s)

        def open_door() -> Service | None:
            if engine.orders is None or spool is None:  # not on the first rank
                return None
            from bascule.serve.door import Door

            times = _times(pipeline, options, world.size)
            service = Service(
                pipeline,
                engine.orders,
                spool,
                policy=Balanced(),
                times=times,
                most_waiting=options.most_waiting,
                fps=options.fps,
                keep_days=NEVER if options.keep_days is None else options.keep_days,
                keep_bytes=NEVER if options.keep_gb is None else options.keep_gb * 1e9,
            )
            door = Door(service, options)
            door.start()
            service.start()
            stack.callback(service.close)
            stack.callback(engine.orders.end, "its ranks did not start")
            stack.callback(door.stop)
            print(
                f"{options.model_name} at {door.address}, requests in {options.spool}", flush=True
            )
            return service

        def watch(service: Service) -> None:
            while not is_over.wait(_POLL_S):
                if is_stopping():
                    return service.stop()

        if (service := agree_on(world, open_door, what=_START)) is not None:
            thread = threading.Thread(target=watch, args=(service,), name="bascule stops")
            thread.start()
            stack.callback(thread.join)
            stack.callback(is_over.set)
        engine.run()


def _times(pipeline: Any, options: ServeOptions, num_ranks: int) -> Times:
    if "num_frames" in inspect.signature(pipeline.__call__).parameters:
        load_av(f"--model {options.model}")  # or refuse at once
    degrees = options.degrees or [1 << k for k in range(num_ranks.bit_length())]
    if max(degrees) > num_ranks:
        raise ConfigError(f"--degrees {max(degrees)}: this job has {num_ranks} ranks")
    return Times(pipeline, degrees)
