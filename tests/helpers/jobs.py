"""Runs a program on the two ranks of a job, as a launcher would, without importing torch again."""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from bascule.cli import launch, main
from tests.helpers.ranks import run_ranks

NUM_RANKS = 2
_STORES: list[TCPStore] = []  # they serve as long as the process lives


def in_a_job(
    program: Callable[..., object],
    *arguments: str,
    num_ranks: int = NUM_RANKS,
    timeout_s: float = 100.0,
) -> subprocess.CompletedProcess[str]:
    """Exit code of the worst rank, what the first rank printed, and the errors of all.

    Args:
        program: Called with the arguments on each rank, which has no process group yet.
        *arguments: As they stand on a command line.
        num_ranks: Ranks of the job.
        timeout_s: Longest time.
    """
    of_rank = run_ranks(_as_rank, num_ranks, program, arguments, timeout_s=timeout_s)
    codes, outs, errors = zip(*of_rank, strict=True)
    return subprocess.CompletedProcess([], max(codes), outs[0], "".join(errors))


@contextlib.contextmanager
def forked_launches() -> Iterator[None]:
    """Within, commands that launch their own ranks get them from the fork server."""

    def launched(arguments: list[str]) -> None:
        given = {key: value for key, value in os.environ.items() if key.startswith("BASCULE_")}
        command = arguments[arguments.index("bascule.cli") + 1 :]
        done = in_a_job(_command, json.dumps(given), *command)
        print(done.stdout, end="")
        print(done.stderr, end="", file=sys.stderr)
        assert done.returncode == 0

    with mock.patch.object(launch.run, "main", launched):
        yield


def _command(variables: str, *arguments: str) -> None:
    os.environ |= json.loads(variables)
    main(list(arguments))


def script(path: str, *arguments: str) -> None:
    """Run a file as `python FILE ARGUMENTS` does."""
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def run_example(
    path: Path, *arguments: str, num_ranks: int = NUM_RANKS
) -> subprocess.CompletedProcess[str]:
    """Run an example on the ranks of a job."""
    return in_a_job(script, str(path), *arguments, num_ranks=num_ranks)


def set_variables() -> None:
    """What torchrun would have set on this rank, with a store of the launcher's that listens."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    port = [0]
    if rank == "0":  # a port that is chosen first, and listened to later, may be taken by then
        _STORES.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        port = [_STORES[-1].port]
    dist.broadcast_object_list(port)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0])}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def join_trainer_world() -> None:
    """The same for a Trainer: accelerate reads it."""
    set_variables()
    os.environ["ACCELERATE_USE_CPU"] = "true"


def _as_rank(program: Callable[..., object], arguments: tuple[str, ...]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one rank."""
    set_variables()
    dist.destroy_process_group()  # a program makes its own, as in any job
    out, error, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            program(*arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue(), error.getvalue()
