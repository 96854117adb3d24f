"""A server on all ranks of a job: the engine on each, the service and its HTTP server on rank 0."""

import inspect
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

from bascule.comm.agree import agree_on
from bascule.comm.groups import member_of, resolve
from bascule.errors import ConfigError
from bascule.plan.requests import NEVER
from bascule.serve.options import ServeOptions
from bascule.serve.service import Service
from bascule.serve.spool import Spool
from bascule.serve.starting import dtype_of, start_engine, start_pipeline
from bascule.serve.times import Times
from bascule.workload.tables import load_av

_POLL_S = 0.5
_START = "the start of bascule serve"


def run_server(
    options: ServeOptions, device: torch.device, is_stopping: Callable[[], bool]
) -> None:
    """Serve on all ranks until rank 0 is told to stop, and end after the running steps.

    Raises:
        ConfigError: The model cannot be served, another server uses the spool, or the address is
            not free.
        CommError: A rank is gone; requests that are not done stay in the spool.
    """
    world, has_ended = member_of(resolve(None), "world"), threading.Event()
    with ExitStack() as stack:
        # A request must not go on with other pixels.
        open_spool = partial(Spool, options.spool, options.outputs_of(dtype_of(options, device)))
        spool = agree_on(world, lambda: open_spool() if world.rank == 0 else None, what=_START)
        pipeline, num_groups = start_pipeline(options, device), options.guidance_ranks or 1
        engine = start_engine(options, pipeline, num_groups)

        def open_door() -> Service | None:
            if engine.orders is None or spool is None:  # not on rank 0
                return None
            from bascule.serve.door import Door

            if "num_frames" in inspect.signature(pipeline.__call__).parameters:
                load_av(f"--model {options.model}")  # refuses if it is not installed
            degrees = options.degrees or engine.degrees
            if set(degrees) - set(engine.degrees):
                asked, legal = (" ".join(map(str, many)) for many in (degrees, engine.degrees))
                raise ConfigError(f"--degrees {asked}: requests have {legal} ranks here: give some")
            service = Service(
                pipeline,
                engine.orders,
                spool,
                policy=options.make_policy(degrees),
                times=Times(pipeline, degrees, num_groups, compiles=options.compile),
                stays=engine.stays,
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
            name = options.model_name
            print(f"{name} at {door.address}, requests in {options.spool}", flush=True)
            return service

        def watch(service: Service) -> None:
            while not has_ended.wait(_POLL_S):
                if is_stopping():
                    return service.stop()

        if (service := agree_on(world, open_door, what=_START)) is not None:
            thread = threading.Thread(target=watch, args=(service,), name="bascule stops")
            thread.start()
            stack.callback(thread.join)
            stack.callback(has_ended.set)
        engine.run()
