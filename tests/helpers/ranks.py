"""Runs a function on the ranks of a fresh world, each in a process of its own.

A fork server that has torch loaded makes a world of eight cost less than a second. Ranks never run
in the pytest process: a collective with mismatched sizes aborts its process.
"""

import math
import multiprocessing
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

COLLECTIVE_TIMEOUT_S = 15.0
_WAIT_S = 0.5  # waits are counted, not clocked: a virtual machine that was paused lost no time
_GRACE_S = 20.0  # after the first failure, the others have this long to notice
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
_PRELOAD = [
    "diffusers.models.transformers.transformer_flux",
    "pytest",
    "torch._inductor.compile_fx",
    "torch._dynamo",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "bascule.bench.compare",
    "bascule.data.loader",
    "bascule.encoders.tiled_vae",
    "bascule.integrations.diffusers.handle",
    "bascule.integrations.diffusers.training.balanced_model",
    "bascule.integrations.transformers",
    "bascule.models",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.trainer",
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended.

    Attributes:
        value: What the function returned.
        error: Its traceback, if it raised; or how the process ended, if it reported nothing.
        exit_code: Of a process that reported nothing; negative for a signal.
        is_called: Whether the function was called: gloo does not always connect on a busy machine.
    """

    value: Any = None
    error: str | None = None
    exit_code: int | None = None
    is_called: bool = True


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: object,
    timeout_s: float = 100.0,
    backend: str = "gloo",
) -> list[Any]:
    """Call `fn(*args)` on every rank of a new world; return the results in rank order.

    Raises:
        AssertionError: A rank raised, died or did not end; holds the tracebacks in that order.
    """
    outcomes, order = _run(fn, world_size, args, timeout_s, backend)
    failed = [rank for rank in order if outcomes[rank].error is not None]
    if failed:
        said: dict[str | None, list[int]] = {}
        for rank in failed:
            said.setdefault(outcomes[rank].error, []).append(rank)
        texts = [f"--- ranks {ranks} of {world_size}\n{text}" for text, ranks in said.items()]
        raise AssertionError("\n".join(["ranks failed, the first one first:", *texts]))
    return [outcome.value for outcome in outcomes]


def run_to_the_end(
    fn: Callable[..., Any],
    world_size: int,
    *args: object,
    timeout_s: float = 60.0,
    stopped: Collection[int] = (),
) -> list[Outcome]:
    """As `run_ranks`, but ranks may die: how each of them ended, in rank order.

    Those that were stopped are not waited for, and killed when all others have ended.
    """
    return _run(fn, world_size, args, timeout_s, "gloo", stopped)[0]


def raised_by(fn: Callable[..., object], *args: Any, **kwargs: Any) -> tuple[list[str], str]:
    """Call what must raise: the names of the error's classes, and its text."""
    try:
        fn(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        return [cls.__name__ for cls in type(error).__mro__], str(error)
    raise AssertionError(f"{fn} raised nothing")


def _run(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[object],
    timeout_s: float,
    backend: str,
    stopped: Collection[int] = (),
) -> tuple[list[Outcome], list[int]]:
    """Outcomes in rank order, and the ranks in the order in which they ended.

    A world that a rank could not join is made once more.
    """
    outcomes, order = _run_once(fn, world_size, args, timeout_s, backend, stopped)
    if all(outcome.is_called for outcome in outcomes):
        return outcomes, order
    return _run_once(fn, world_size, args, timeout_s, backend, stopped)


def _run_once(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[object],
    timeout_s: float,
    backend: str,
    stopped: Collection[int],
) -> tuple[list[Outcome], list[int]]:
    with tempfile.TemporaryDirectory() as folder, _environment(), warnings.catch_warnings():
        # Python 3.12 warns of forks in a process with threads; the server forks before it has any.
        warnings.simplefilter("ignore", DeprecationWarning)
        processes: list[BaseProcess] = []
        readers: list[Connection] = []
        for rank in range(world_size):
            reader, writer = _context.Pipe()
            world = rank, world_size, backend, f"file://{folder}/store"
            target_args = (fn, args, world, writer)
            process = _context.Process(target=_rank_main, args=target_args, daemon=True)
            process.start()
            writer.close()
            processes.append(process)
            readers.append(reader)
        try:
            return _collect(processes, readers, timeout_s, stopped)
        finally:
            _end(processes, readers)


def _collect(
    processes: list[BaseProcess],
    readers: list[Connection],
    timeout_s: float,
    stopped: Collection[int],
) -> tuple[list[Outcome], list[int]]:
    num_waits = math.ceil(timeout_s / _WAIT_S)
    outcomes, order = [Outcome(error="did not end in time, killed")] * len(readers), list[int]()
    while len({*order, *stopped}) < len(readers) and num_waits > 0:
        left = [reader for rank, reader in enumerate(readers) if rank not in order]
        ready = wait(left, timeout=_WAIT_S)
        num_waits -= not ready
        for rank in (rank for rank, reader in enumerate(readers) if reader in ready):
            outcomes[rank] = _outcome(processes[rank], readers[rank])
            order.append(rank)
            if outcomes[rank].error is not None:
                num_waits = min(num_waits, math.ceil(_GRACE_S / _WAIT_S))
    order += [rank for rank in range(len(readers)) if rank not in order]
    return outcomes, order


def _outcome(process: BaseProcess, reader: Connection) -> Outcome:
    try:
        return Outcome(*pickle.loads(reader.recv_bytes()))
    except (EOFError, ConnectionError):
        process.join(5.0)
        return Outcome(error=f"ended without a word: {process}", exit_code=process.exitcode)


def _end(processes: Sequence[BaseProcess], readers: Sequence[Connection]) -> None:
    for process, reader in zip(processes, readers, strict=True):
        process.kill()
        reader.close()
        process.join()
        process.close()


def _rank_main(
    fn: Callable[..., Any],
    args: Sequence[object],
    world: tuple[int, int, str, str],
    writer: Connection,
) -> None:
    import torch.distributed as dist

    value, error, is_called = None, None, False
    try:
        rank, world_size, backend, store = world
        if backend == "gloo":
            warnings.filterwarnings("error", module="bascule")
        dist.init_process_group(
            backend,
            init_method=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        is_called = True
        value = fn(*args)
    except BaseException:
        error = traceback.format_exc()
    writer.send_bytes(pickle.dumps((value, error, None, is_called)))
    if error is None:
        writer.poll(None)  # until the others are done too: a peer may still be connecting
    os._exit(0 if error is None else 1)  # a failed group would wait for its peers


@contextmanager
def _environment() -> Iterator[None]:
    """What the fork server and its children see; the server starts with the first world."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
