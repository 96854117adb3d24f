"""Runs `bascule bench`."""

import json
import subprocess
from pathlib import Path
from typing import Any

from bascule.cli import main
from tests.helpers.jobs import in_a_job

SMALL = "--ranks 2 --d-model 32 --num-heads 2 --num-single 1 --warmup 1".split()


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `bascule bench` with a tiny model on the two ranks of a job."""
    return in_a_job(_main, "bench", *SMALL, "--out", str(folder), *arguments)


def _main(*arguments: str) -> None:
    main(list(arguments))


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())
