"""Runs `bascule bench`."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bascule.cli import main
from tests.helpers.jobs import in_a_job

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
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same on the two ranks of a job that runs already: torch is loaded once for all tests."""
    return in_a_job(_main, *_arguments(folder, arguments))


def _main(*arguments: str) -> None:
    main(list(arguments))


def _arguments(folder: Path, arguments: Sequence[str]) -> list[str]:
    return ["bench", *SMALL, "--out", str(folder), *arguments]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())
