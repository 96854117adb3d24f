"""Runs `bascule bench`."""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bascule.cli import main
from tests.helpers.ranks import run_ranks

SMALL = [
    "--ranks",
    "2",
    "--d-model",
    "32",
    "--num-heads",
    "2",
    "--num-single",
    "1",
    "--warmup",
    "1",
]


def launched(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `bascule bench` with a tiny model as a user does: it starts the ranks."""
    command = [sys.executable, "-m", "bascule.cli", *_arguments(folder, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same on the two ranks of a job that runs already: torch is loaded once for all tests."""
    of_rank = run_ranks(_as_rank, 2, _arguments(folder, arguments), _free_port())
    codes, outs, errors = zip(*of_rank, strict=True)
    return subprocess.CompletedProcess([], max(codes), outs[0], "".join(errors))


def _arguments(folder: Path, arguments: Sequence[str]) -> list[str]:
    return ["bench", *SMALL, "--out", str(folder), *arguments]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _as_rank(arguments: list[str], port: int) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # the command makes its own, as in any job
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    out, error, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            main(arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue(), error.getvalue()


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())
