"""Runs a function on the ranks of a world, each in a process of its own.

A fork server that has torch and diffusers loaded makes the processes, so that a world starts in a
tenth of a second. Ranks never run in the pytest process: a collective with mismatched sizes aborts
its process.
"""

import contextlib
import functools
import gc
import importlib
import math
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, cast

COLLECTIVE_TIMEOUT_S = 15.0
"""Of worlds in which ranks die."""

_LONG_TIMEOUT_S = 100.0  # of other worlds: a test ends sooner, and no machine is that busy
_WAIT_S = 0.5  # waits are counted, not clocked: a virtual machine that was paused lost no time
_GRACE_S = 20.0  # after the first failure, the others have this long to notice
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
_PRELOAD = [
    "diffusers.pipelines.flux.pipeline_flux",
    "diffusers.pipelines.wan.pipeline_wan",
    "pytest",
    "torch._inductor.compile_fx",
    "torch._dynamo",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "bascule.bench.comparison",
    "bascule.data.loader",
    "bascule.encoders.tiled_vae",
    "bascule.diffusers.parallelize",
    "bascule.diffusers.balanced_model",
    "bascule.transformers",
    "bascule.models",
    "bascule.report.page",
    "bascule.train",
    "bascule.sim",
    "rich.progress",
    "sympy.physics.units",  # a rank that compiles would import both
    "sympy.tensor.tensor",
    "tests.helpers.inference_cases",
    "tests.helpers.pipeline_cases",
    "tests.helpers.serving",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.trainer",
]
Test = TypeVar("Test", bound=Callable[..., None])
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
    timeout_s: float = 500.0,
    backend: str = "gloo",
) -> list[Any]:
    """Call `fn(*args)` on every rank of a world; return the results in rank order.

    Raises:
        AssertionError: A rank raised, died or did not end; holds the tracebacks in that order.
    """
    return _values(*_Run(fn, args, world_size, timeout_s, _LONG_TIMEOUT_S, backend).outcomes())


def on_ranks(world_size: int | Callable[..., int]) -> Callable[[Test], Test]:
    """Run the body of a test on every rank of a world, with the arguments of the test.

    Args:
        world_size: Ranks; or a function of those arguments that gives their number.
    """

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def on_all(**arguments: Any) -> None:
            size = world_size(**arguments) if callable(world_size) else world_size
            run_ranks(_run_body, size, test.__module__, test.__name__, arguments)

        return cast(Test, on_all)

    return decorate


def _run_body(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def run_to_the_end(
    fn: Callable[..., Any],
    world_size: int,
    *args: object,
    timeout_s: float = 500.0,
    collectives_s: float = COLLECTIVE_TIMEOUT_S,
    stopped: Collection[int] = (),
) -> list[Outcome]:
    """As `run_ranks`, but ranks may die: how each of them ended, in rank order.

    Collectives end after `collectives_s`. Ranks that were stopped are not waited for, and
    killed when all others have ended.
    """
    run = _Run(fn, args, world_size, timeout_s, collectives_s, stopped=stopped)
    return run.outcomes()[0]


def by_one_rank(fn: Callable[..., Any], *args: Any) -> Any:
    """Return on all ranks what the first one computes alone, as a reference."""
    import torch.distributed as dist

    results = [fn(*args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(results)
    return results[0]


def raised_by(fn: Callable[..., object], *args: Any, **kwargs: Any) -> tuple[list[str], str]:
    """Call what must raise: the names of the error's classes, and its text."""
    try:
        fn(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        return [cls.__name__ for cls in type(error).__mro__], str(error)
    raise AssertionError(f"{fn} raised nothing")


def _values(outcomes: list[Outcome], order: list[int]) -> list[Any]:
    failed = [rank for rank in order if outcomes[rank].error is not None]
    if failed:
        said: dict[str | None, list[int]] = {}
        for rank in failed:
            said.setdefault(outcomes[rank].error, []).append(rank)
        texts = [f"--- ranks {ranks} of {len(order)}\n{text}" for text, ranks in said.items()]
        raise AssertionError("\n".join(["ranks failed, the first one first:", *texts]))
    return [outcome.value for outcome in outcomes]


class _Rank:
    """A process that calls one function, and the connection to it."""

    def __init__(self) -> None:
        self.connection, other_end = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(other_end,), daemon=True)
        with _environment(), warnings.catch_warnings():
            # Python 3.12 warns of forks in a process with threads; the server has none.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        other_end.close()

    def outcome(self) -> Outcome:
        """Return what the function did, which has ended."""
        try:
            return Outcome(*pickle.loads(self.connection.recv_bytes()))
        except (EOFError, ConnectionError):
            self.process.join(5.0)
            exit_code = self.process.exitcode
            return Outcome(error=f"ended without a word: {self.process}", exit_code=exit_code)

    def kill(self) -> None:
        self.process.kill()
        self.connection.close()
        self.process.join()
        self.process.close()


@dataclass(frozen=True, slots=True)
class _Run:
    """One call of a function on all ranks of a world."""

    fn: Callable[..., Any]
    args: tuple[object, ...]
    world_size: int
    timeout_s: float
    collective_timeout_s: float
    backend: str = "gloo"
    stopped: Collection[int] = ()

    def outcomes(self) -> tuple[list[Outcome], list[int]]:
        """Return the outcomes in rank order, and the ranks in the order in which they ended.

        A world that a rank could not join is made once more.
        """
        outcomes, order = self._once()
        if all(outcome.is_called for outcome in outcomes):
            return outcomes, order
        return self._once()

    def _once(self) -> tuple[list[Outcome], list[int]]:
        ranks: list[_Rank] = []
        with tempfile.TemporaryDirectory() as folder:
            try:
                ranks += [_Rank() for _ in range(self.world_size)]
                for rank, one in enumerate(ranks):
                    place = rank, self.world_size, f"file://{folder}/store"
                    group = *place, self.backend, self.collective_timeout_s
                    one.connection.send_bytes(pickle.dumps((sys.path, group, self.fn, self.args)))
                return self._collect(ranks)
            finally:
                for one in ranks:
                    one.kill()

    def _collect(self, ranks: list[_Rank]) -> tuple[list[Outcome], list[int]]:
        num_waits = math.ceil(self.timeout_s / _WAIT_S)
        outcomes, order = [Outcome(error="did not end in time, killed")] * len(ranks), list[int]()
        while len({*order, *self.stopped}) < len(ranks) and num_waits > 0:
            left = {one.connection: rank for rank, one in enumerate(ranks) if rank not in order}
            ready = wait(list(left), timeout=_WAIT_S)
            num_waits -= not ready
            for rank in (rank for connection, rank in left.items() if connection in ready):
                outcomes[rank] = ranks[rank].outcome()
                order.append(rank)
                if outcomes[rank].error is not None:
                    num_waits = min(num_waits, math.ceil(_GRACE_S / _WAIT_S))
        order += [rank for rank in range(len(ranks)) if rank not in order]
        return outcomes, order


def _serve(connection: Connection) -> None:
    """Call a function in this process, and live on until the others are done too."""
    gc.freeze()  # all of torch is never garbage
    # Gloo's thread polls while another thread of the rank has its lock. Else it would interrupt
    # that one, again and again: a collective of 4 ranks then takes twice as much of a CPU.
    with contextlib.suppress(AttributeError, OSError):  # some systems have no such threads
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        if _answer(connection, connection.recv_bytes()):
            os._exit(1)  # a failed group would wait for its peers
        connection.recv_bytes()  # a peer may still be connecting
    except (EOFError, ConnectionError):
        os._exit(0)


def _answer(connection: Connection, received: bytes) -> str | None:
    """Call a function and send its outcome; return its traceback, if it raised."""
    import torch.distributed as dist

    value, error, is_called = None, None, False
    try:
        sys.path[:], group, fn, args = pickle.loads(received)
        rank, world_size, store, backend, timeout_s = group
        with warnings.catch_warnings():
            if backend == "gloo":
                warnings.filterwarnings("error", module="bascule")
            dist.init_process_group(
                backend,
                init_method=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
            is_called = True
            value = fn(*args)
        answer = pickle.dumps((value, None, None, True))
    except BaseException:
        error = traceback.format_exc()
        answer = pickle.dumps((None, error, None, is_called))
    connection.send_bytes(answer)
    return error


@contextlib.contextmanager
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
