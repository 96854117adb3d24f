"""Metrics of a step: its seconds, the plan's prediction, and the rank that others waited for."""

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

PARTS = tuple(
    "data plan samples route attend restore waiting forward backward optimizer total".split()
)
"""Parts of a step that are timed; "samples" to "restore" are of the forward."""

_NUM_RATES = 20
_EVEN = 1.05


class StepReports:
    """Compares steps with plans; the median rate of earlier steps gives a prediction in seconds."""

    def __init__(self, parts: Sequence[str] = PARTS) -> None:
        self._parts = parts
        self._rates: deque[float] = deque(maxlen=_NUM_RATES)

    def report(
        self, step: int, loss: float, plans: Sequence[Plan], seconds: Floats, work: Floats
    ) -> dict[str, Any]:
        """Return a record from seconds (ranks, parts) and work in blocks (ranks, microbatches)."""
        loads = np.stack([plan.loads for plan in plans], axis=1)
        rate = median(self._rates) if self._rates else None
        predicted, measured = float(loads.max(axis=0).sum()), float(work.max(axis=0).sum())
        if loads.sum() > 0:
            self._rates.append(float(work.sum() / loads.sum()))
        loads, work = loads.sum(axis=1), work.sum(axis=1)
        mean_s, max_s = seconds.mean(axis=0).tolist(), seconds.max(axis=0).tolist()
        return {
            "step": step,
            "loss": loss,
            "sequences": sum(int(plan.seq_lens.size) for plan in plans),
            "tokens": sum(int(plan.seq_lens.sum()) for plan in plans),
            "topology": " ".join(dict.fromkeys(str(plan.topology) for plan in plans)),
            "mean_s": dict(zip(self._parts, mean_s, strict=True)),
            "max_s": dict(zip(self._parts, max_s, strict=True)),
            "makespan_s": {"predicted": rate and predicted * rate, "measured": measured},
            "imbalance": {"predicted": imbalance(loads), "measured": imbalance(work)},
            "slowest": _slowest(loads, work),
        }


def _slowest(loads: Floats, work: Floats) -> dict[str, Any]:
    """Find the slowest rank, and the reason: its plan or its speed."""
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
    """Records of a run in `metrics.jsonl` and TensorBoard; those after `first_step` are removed."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._path, self._board = folder / "metrics.jsonl", None
        new = self._path.with_suffix(".tmp")
        with _writing(self._path):
            new.write_text("".join(_lines_until(self._path, first_step)))
            new.replace(self._path)
            self._file = self._path.open("a")
            try:
                board: Any = importlib.import_module("torch.utils.tensorboard")
            except ImportError:
                return
            self._board = board.SummaryWriter(folder / "tensorboard", purge_step=first_step + 1)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the record of a step."""
        with _writing(self._path):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            if self._board is not None:
                for name, value in _scalars(record):
                    self._board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Write what is buffered, and close the files."""
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


def _lines_until(path: Path, step: int) -> Iterator[str]:
    """Yield the whole lines up to a step; a kill may have cut the last one."""
    for line in path.read_text().splitlines() if step and path.exists() else ():
        try:
            if json.loads(line)["step"] <= step:
                yield f"{line}\n"
        except ValueError:
            continue


def _scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record by names such as "imbalance/measured"."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            yield prefix + name, float(value)
