"""Runs `bascule bench`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `bascule bench` with a tiny model."""
    command = [sys.executable, "-m", "bascule.cli", "bench", *SMALL, "--out", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=110, env=environment
    )


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())
