"""A server on all ranks of a job: the engine on each, the service and its HTTP server on rank 0."""

import gc
import inspect
import os
import threading
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np
import torch

import bascule
from bascule.comm.agree import agree, agree_on
from bascule.comm.groups import member_of, resolve
from bascule.comm.values import values_digest
from bascule.diffusers.request import models_of
from bascule.errors import ConfigError
from bascule.serve.adapters import load_on_all
from bascule.serve.options import ServeOptions
from bascule.serve.service import Service
from bascule.serve.spool import Spool
from bascule.serve.starting import dtype_of, start_engine, start_pipeline
from bascule.serve.times import Times
from bascule.workload.tables import load_av

if TYPE_CHECKING:
    from bascule.serve.door import Door

_POLL_S = 0.1
_ENDS_S = 0.5  # from the end of a rank that ends well to the ends of the others
_START = "the start of bascule serve"


def run_server(
    options: ServeOptions, device: torch.device, is_stopping: Callable[[], bool]
) -> None:
    """Serve on all ranks until rank 0 is told to stop, and end after the running steps.

    Raises:
        ConfigError: The model cannot be served, another server uses the spool, or the address is
            not free.
        CommError: A rank is gone; requests that are not done stay in the spool. If the launcher
            tells this rank to stop because another one has died, the process exits with 1.
    """
    world, has_ended = member_of(resolve(None), "world"), threading.Event()
    with ExitStack() as stack:
        launcher = zlib.crc32(f"{os.uname().nodename} {os.getppid()}".encode())
        here = np.array([launcher, os.getpid()])
        ranks = agree(world, {}, what=_START, values=here, capacity=2)
        neighbours = [int(pid) for started_by, pid in ranks if started_by == launcher]
        opened = list["tuple[Service, Door]"]()

        def watch() -> None:
            """Stop the service when this rank is told to stop."""
            while not is_stopping():
                if has_ended.wait(_POLL_S):
                    return
            # Launchers also stop ranks if one has died. Then nothing is to be saved any more, and
            # the running steps may take long.
            if not all(map(_is_alive, neighbours)) and not has_ended.wait(_ENDS_S):
                try:
                    for service, door in opened:
                        with service.lock:
                            service.stopped("a rank of the server has ended")
                        door.stop()
                finally:
                    os._exit(1)
            while world.rank == 0 and not has_ended.wait(_POLL_S):
                for service, _ in opened:
                    return service.stop()

        thread = threading.Thread(target=watch, name="bascule stops")
        thread.start()

        def end_watch() -> None:
            has_ended.set()
            thread.join()

        stack.callback(end_watch)
        # A request must not go on with other pixels.
        open_spool = partial(Spool, options.spool, options.outputs_of(dtype_of(options, device)))
        spool = agree_on(world, lambda: open_spool() if world.rank == 0 else None, what=_START)
        pipeline, num_groups = start_pipeline(options, device), options.guidance_ranks or 1
        gc.collect()
        gc.freeze()  # later collections leave out what was loaded
        gc.enable()  # the command has disabled it
        engine = start_engine(options, pipeline, num_groups, save_every=options.save_every)
        loras = load_on_all(engine.adapters, options.loras, world, _START)

        def open_door() -> "tuple[Service, Door] | None":
            if engine.orders is None or spool is None:  # not on rank 0
                return None
            from bascule.serve.door import Door

            if "num_frames" in inspect.signature(pipeline.__call__).parameters:
                load_av(f"--model {options.model}")  # refuses if it is not installed
            degrees = options.degrees or engine.degrees
            if set(degrees) - set(engine.degrees):
                asked, legal = (" ".join(map(str, many)) for many in (degrees, engine.degrees))
                raise ConfigError(f"--degrees {asked}: requests have {legal} ranks here: give some")
            # What a saved state depends on.
            libraries = f"torch {torch.__version__}, diffusers {version('diffusers')}"
            digests = ", ".join(map(values_digest, models_of(pipeline)))
            service = Service(
                pipeline,
                engine.orders,
                spool,
                options,
                policy=options.make_policy(degrees),
                times=Times(pipeline, degrees, num_groups, options.batch, compiles=options.compile),
                stays=engine.stays,
                saved_by=f"bascule {bascule.__version__}, {libraries}, {digests}",
                loras=loras,
            )
            door = Door(service, options)
            door.start()
            service.start()
            stack.callback(service.close)
            stack.callback(engine.orders.end, "its ranks did not start")
            stack.callback(door.stop)
            name = options.model_name
            print(f"{name} at {door.address}, requests in {options.spool}", flush=True)
            return service, door

        if (pair := agree_on(world, open_door, what=_START)) is not None:
            opened.append(pair)
            stack.callback(end_watch)  # first of all
        engine.run()


def _is_alive(pid: int) -> bool:
    """Return whether a process of this user is there; a launcher has buried what it reports."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
