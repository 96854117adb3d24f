"""Launch local ranks by torch's launcher, or join a running job as one of its ranks."""

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, run  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from bascule.errors import CommError, ConfigError, RemoteConfigError

USER_ERROR = 2  # exit code
_PIDS_IN = "BASCULE_PIDS_IN"  # environment variable: folder of the local ranks' process ids
_RESULT_TO = "BASCULE_RESULT_TO"  # environment variable: file for the result of rank 0
_STOP = "stop"  # file in the folder of process ids
_REFUSED = "refused"  # file beside the result: why ranks refused to start, with exit code 0
_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT  # torchrun handles these
_HOST = "127.0.0.1"
_DEFAULTS = signal.SIG_DFL, signal.default_int_handler
# Libraries that diffusers imports, which warn of parts that nobody asked for.
_FOREIGN = "torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer"


def in_a_job() -> bool:
    """Return whether a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def device_type() -> str:
    """Return the device type of local ranks."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def num_ranks_here(num_ranks: int | None) -> int:
    """Return how many ranks to launch: one per GPU; without GPUs one per core, at least two."""
    num_gpus = torch.cuda.device_count()
    if num_gpus and num_ranks is not None and num_ranks > num_gpus:
        raise ConfigError(f"--ranks {num_ranks}: give at most {num_gpus}, one per GPU of this host")
    return num_ranks or num_gpus or max(2, _num_cores())


def _num_cores() -> int:
    """Return how many physical cores this process may use, whatever OMP_NUM_THREADS says."""
    cores = set[str]()
    for number in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.is_file() else str(number))
    return len(cores)


def result_of_ranks(num_ranks: int, arguments: list[str], max_restarts: int = 0) -> str:
    """Run `python -m bascule.cli ARGUMENTS` in local ranks; return the result of rank 0.

    If a rank dies, torch's launcher starts all of them again, `max_restarts` times at most. The
    ranks connect over loopback only, because torch's store asks for no password.
    """
    print(f"starting {num_ranks} ranks ..", file=sys.stderr, flush=True)
    # Unset, torchrun would choose 1 and warn.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // num_ranks)))
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    listening = socket.socket()
    listening.bind((_HOST, 0))
    port = listening.getsockname()[1]
    # torchrun uses this store while it lives, instead of opening one on all addresses.
    shared: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    _store = TCPStore(_HOST, port, **shared, master_listen_fd=listening.detach())
    launcher = ["--nproc-per-node", str(num_ranks), "--master-addr", _HOST]
    launcher += ["--max-restarts", str(max_restarts), "--master-port", str(port)]
    names = [number.name for number in _SIGNALS if signal.getsignal(number) in _DEFAULTS]
    # Under nohup in a script there may be none, and torchrun would warn of an empty list.
    launcher += ["--signals-to-handle", ",".join(names) or signal.SIGUSR2.name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result"
        os.environ[_RESULT_TO] = str(path)
        try:
            run.main([*launcher, "-m", "bascule.cli", *arguments])
        except (KeyboardInterrupt, SignalException) as error:
            raise CommError("stopped by a signal, and so were its ranks") from error
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            kind = ConfigError if failure.exitcode == USER_ERROR else CommError
            note, text = path.with_name(str(rank)), f"failed with exit code {failure.exitcode}"
            if note.exists():  # of `joined`; it may name another rank, which hangs
                text = f"ended: {note.read_text(encoding='utf-8')}"
            raise kind(f"rank {rank} {text}") from error
        finally:
            del os.environ[_RESULT_TO]
        if (refusal := path.with_name(_REFUSED)).exists() and not path.exists():
            raise ConfigError(refusal.read_text(encoding="utf-8"))
        return path.read_text(encoding="utf-8")


def hand_over(result: str) -> bool:
    """Give the result to `result_of_ranks`; return False if another launcher started this job."""
    if (path := os.environ.get(_RESULT_TO)) is None:
        return False
    Path(path).write_text(result, encoding="utf-8")
    return True


@contextmanager
def joined(timeout_s: float) -> Iterator[torch.device]:
    """Join the job that RANK and WORLD_SIZE describe; yield this rank's device."""
    for name in _FOREIGN:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("bascule").setLevel("INFO" if os.environ["RANK"] == "0" else "WARNING")
    if (handler := logging.lastResort) is not None:  # unlike others it prints above a bar
        handler.setLevel(logging.INFO)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.getLogger("bascule.comm.failures").setLevel(logging.CRITICAL)  # `main` prints errors
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if (nth := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
        logging.getLogger("bascule").info("a rank ended: restart %s of at most %s", nth, restarts)
    result = os.environ.get(_RESULT_TO)
    note = None if result is None else Path(result).with_name(os.environ["RANK"])
    if note is not None:
        note.unlink(missing_ok=True)  # of a rank before a restart
    device, backend = torch.device("cpu"), "gloo"
    if device_type() == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    try:
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, timeout=timeout, **_meeting(timeout))
    except dist.DistError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        what = f"the ranks of this job did not meet within {timeout_s:g} s: {reason}"
        advice = "check that all of them start, or give a longer --timeout-s"
        raise CommError(f"{what}: {advice}") from error
    try:
        yield device
    except (CommError, ConfigError) as error:
        if note is not None and isinstance(error, CommError):
            note.write_text(str(error), encoding="utf-8")
        if note is None or restarts == "0" or not isinstance(error, ConfigError):
            raise
        if not isinstance(error, RemoteConfigError):  # which quotes another rank
            note.with_name(_REFUSED).write_text(str(error), encoding="utf-8")
        raise SystemExit(0) from None  # else the launcher would start the ranks again, in vain
    finally:
        dist.destroy_process_group()


def _meeting(timeout: timedelta) -> dict[str, Any]:
    """Return this rank, the number of ranks, and a store with the keys of this start alone.

    A launcher that starts ranks again keeps its store, with the addresses of ranks that are gone.
    Neither it nor the environment has a name for the start that is the same on all nodes, so each
    rank tells a name of its own, and rank 0 answers with the name for all.
    """
    starts = dist.rendezvous("env://", timeout=timeout)  # pyright: ignore[reportPrivateImportUsage]
    store, rank, num_ranks = next(starts)
    store.set_timeout(timeout)
    name, end = uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank > 0:
        store.set(f"bascule/came/{rank}", name)
        name = store.get(f"bascule/start/{name}").decode()
        store.set(f"bascule/{name}/{rank}", "")
    for other in range(1, num_ranks if rank == 0 else 1):
        came, there = f"bascule/came/{other}", f"bascule/{name}/{other}"
        while time.monotonic() < end and not store.check([there]):
            if store.check([came]):  # perhaps of an earlier start, which harms nobody
                store.set(f"bascule/start/{store.get(came).decode()}", name)
            time.sleep(0.01)
        store.wait([there], timedelta(seconds=1.0))
    return {"store": PrefixStore(name, store), "rank": rank, "world_size": num_ranks}


@contextmanager
def _on_stops(handler: Callable[..., None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM by a function, within the `with`."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def stopping_quietly() -> AbstractContextManager[None]:
    """Within the `with` block, exit on SIGINT or SIGTERM at once and without a traceback."""
    return _on_stops(lambda *_: os._exit(130))


@contextmanager
def forwarding_stops() -> Iterator[None]:
    """Forward SIGINT and SIGTERM to the ranks launched within: torch would kill them after 30 s.

    While no rank is ready, torch kills them at once.
    """
    with tempfile.TemporaryDirectory() as folder:

        def forward(number: int, _: object) -> None:
            Path(folder, _STOP).touch()
            num_told = 0
            for path in Path(folder).glob("*.*"):
                with suppress(ProcessLookupError):  # it is gone, and starts again
                    os.kill(int(path.suffix[1:]), signal.SIGTERM)
                    num_told += 1
            if not num_told:
                raise SignalException("stopped before the ranks were ready", signal.Signals(number))

        os.environ[_PIDS_IN] = folder
        try:
            with _on_stops(forward):
                yield
        finally:
            del os.environ[_PIDS_IN]


@contextmanager
def stop_asked() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once this rank got a signal, or its launcher ended."""
    asked, launcher, folder = threading.Event(), os.getppid(), os.environ.get(_PIDS_IN)
    with _on_stops(lambda *_: asked.set()):
        if folder is not None:
            for path in Path(folder).glob(f"{os.environ['RANK']}.*"):  # from before a restart
                path.unlink()
            Path(folder, f"{os.environ['RANK']}.{os.getpid()}").touch()
            if Path(folder, _STOP).exists():
                asked.set()
        yield lambda: asked.is_set() or (folder is not None and os.getppid() != launcher)
