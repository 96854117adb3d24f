"""Runs `bascule bench`."""

import json
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

from bascule.arrays import Floats
from bascule.cli import main
from bascule.machine.costs import TransformerCost
from bascule.machine.fits import fit_latency
from bascule.train import model
from tests.helpers.jobs import in_a_job

SMALL = "--ranks 2 --d-model 32 --num-heads 2 --num-single 1 --warmup 1".split()


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `bascule bench` with a tiny model on the two ranks of a job."""
    return in_a_job(_main, "bench", *SMALL, "--out", str(folder), *arguments)


def benched(
    folder: Path, *arguments: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any], list[dict[str, Any]]]:
    """A run without an error, its summary and its steps."""
    done = bench(folder, *arguments)
    assert done.returncode == 0, done.stderr
    lines = (folder / "steps.jsonl").read_text().splitlines()
    result = json.loads((folder / "summary.json").read_text())
    return done, result, [json.loads(line) for line in lines]


def _main(*arguments: str) -> None:
    """Fit the cost model to blocks' times that no other process disturbs; the blocks do run."""

    def fitted(lens: list[int], seconds: Floats, width: int) -> TransformerCost:
        assert (seconds > 0).all()
        return fit_latency(lens, [1e-6 * length for length in lens], width)

    with mock.patch.object(model, "fit_latency", fitted):
        main(list(arguments))
