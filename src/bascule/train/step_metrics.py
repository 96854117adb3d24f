"""What is told of a step: seconds, what was predicted, and which rank the others waited for."""

import importlib
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bascule.arrays import Floats
from bascule.errors import ConfigError
from bascule.plan.metrics import imbalance
from bascule.plan.plan import Plan

PARTS = (
    "data",
    "plan",
    "samples",
    "route",
    "attend",
    "restore",
    "waiting",
    "forward",
    "backward",
    "optimizer",
    "total",
)
"""Whose seconds are told. "samples" to "restore" are of the forward."""

_NUM_RATES = 20
_EVEN = 1.05


class StepReports:
    """Compares the steps of a run with their plans.

    What a plan predicts becomes seconds by the median rate of the last steps, so the first step has
    no prediction.

    Args:
        parts: Whose seconds are told.
    """

    def __init__(self, parts: Sequence[str] = PARTS) -> None:
        self._parts = parts
        self._rates: deque[float] = deque(maxlen=_NUM_RATES)

    def report(
        self, step: int, loss: float, plans: Sequence[Plan], seconds: Floats, work: Floats
    ) -> dict[str, Any]:
        """The record of a step, as plain values.

        Args:
            step: Its number, from 1.
            loss: Mean over all image tokens.
            plans: Of its microbatches.
            seconds: (ranks, parts) of each part.
            work: (ranks, microbatches) seconds in the model's blocks, forward and backward.
        """
        loads = np.stack([plan.loads for plan in plans], axis=1)
        rate = median(self._rates) if self._rates else None
        predicted, measured = float(loads.max(axis=0).sum()), float(work.max(axis=0).sum())
        if loads.sum() > 0:
            self._rates.append(float(work.sum() / loads.sum()))
        return {
            "step": step,
            "loss": loss,
            "sequences": sum(int(plan.seq_lens.size) for plan in plans),
            "tokens": sum(int(plan.seq_lens.sum()) for plan in plans),
            "topology": " ".join(dict.fromkeys(str(plan.topology) for plan in plans)),
            "mean_s": dict(zip(self._parts, seconds.mean(axis=0).tolist(), strict=True)),
            "max_s": dict(zip(self._parts, seconds.max(axis=0).tolist(), strict=True)),
            "makespan_s": {
                "predicted": None if rate is None else predicted * rate,
                "measured": measured,
            },
            "imbalance": {
                "predicted": imbalance(loads.sum(axis=1)),
                "measured": imbalance(work.sum(axis=1)),
            },
            "slowest": _slowest(loads.sum(axis=1), work.sum(axis=1)),
        }


def _slowest(loads: Floats, work: Floats) -> dict[str, Any]:
    """The rank that worked longest, and whether its plan or its speed is why."""
    rank = int(work.argmax())
    planned = float(loads[rank] / max(loads.mean(), 1e-300))
    took = float(work[rank] / max(work.mean(), 1e-300))
    if took < _EVEN:
        why = "ranks are even"
    elif planned - 1 >= (took - 1) / 2:
        why = "more work was planned for it"
    else:
        why = "slower than planned"
    return {"rank": rank, "planned": planned, "took": took, "why": why}


class MetricsLog:
    """Writes the records of a run: a line each in `metrics.jsonl`, and events of TensorBoard.

    Args:
        folder: Where.
        first_step: Steps before this run; what is told of later ones is of a run that was stopped
            before it saved them, and is removed.

    Raises:
        ConfigError: The files cannot be written.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self._path = folder / "metrics.jsonl"
        new = self._path.with_suffix(".tmp")
        with _writing(self._path):
            kept = _lines_until(self._path, first_step)
            new.write_text("".join(f"{line}\n" for line in kept))
            new.replace(self._path)
            self._file = self._path.open("a")
            self._board = _board(folder, first_step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Tell of a step.

        Raises:
            ConfigError: It cannot be written.
        """
        with _writing(self._path):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            if self._board is not None:
                for name, value in _scalars(record):
                    self._board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Close the files.

        Raises:
            ConfigError: What is left cannot be written.
        """
        with _writing(self._path):
            self._file.close()
            if self._board is not None:
                self._board.close()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


def _lines_until(path: Path, step: int) -> list[str]:
    """Whole records up to a step."""
    kept: list[str] = []
    for line in path.read_text().splitlines() if step and path.exists() else ():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except ValueError:  # the last line of a run that was killed
            continue
    return kept


def _board(folder: Path, first_step: int) -> Any:
    """A writer of TensorBoard; None where it is not installed."""
    try:
        module = importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        return None
    return module.SummaryWriter(folder / "tensorboard", purge_step=first_step + 1)


def _scalars(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """The numbers of a record, by names such as "imbalance/measured"."""
    found: list[tuple[str, float]] = []
    for name, value in record.items():
        if isinstance(value, Mapping):
            found += _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            found.append((prefix + name, float(value)))
    return found
