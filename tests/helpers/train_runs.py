"""Runs of `bascule train` on the ranks of a world, and folders of photos and clips for them."""

import errno
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from bascule.comm.groups import member_of, resolve, set_timeout
from bascule.parallel import Step
from bascule.train.checkpoints import Checkpoints
from bascule.train.train_options import TrainOptions
from bascule.train.training_run import TrainingRun

SMALL: dict[str, Any] = {
    "d_model": 32,
    "num_heads": 2,
    "num_single": 1,
    "gamma": 1.0,
    "dtype": "float64",
    "timeout_s": 10.0,
    "data": "g1b2i32f1s0,g1b1i64f1s0",
}
VICTIM = 1
SAVING = ("write", "metadata", "publish", "published")
PLACES = ("plan", "route", "attend", "backward", *SAVING)
"""Where a rank can be killed in a step. In all but the first of `SAVING` it is the first rank."""


def make_album(folder: Path, num_photos: int = 9) -> Path:
    """Photos and two clips of unlike sizes, some with captions."""
    draw = np.random.default_rng(0)
    folder.mkdir()
    for k in range(num_photos):
        _picture(draw, 16 + 16 * (k % 3), 16 + 16 * (k % 2)).save(folder / f"{k}.png")
    (folder / "0.txt").write_text("a cat 🐈")
    for clip, num_frames in (("walk", 3), ("run", 2)):
        (folder / clip).mkdir()
        for k in range(num_frames):
            _picture(draw, 32, 16).save(folder / clip / f"frame{k + 8}.png")
        (folder / f"{clip}.txt").write_text(f"they {clip}")
    return folder


def _picture(draw: np.random.Generator, width: int, height: int) -> Image.Image:
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))


class Recorded(TrainingRun):
    """A run that writes down which samples each rank trained on in each step."""

    attempt = 0

    def _train(self, *args: Any) -> Any:
        micros = self._prepared.schedule.microbatches(self.done)
        own = [number for numbers in micros for number in self._own(numbers)]
        if not self._prepared.encoders:  # else it encodes, which happens once
            loaded = [n for flow in args[0].samples.result()().flows for n in flow.seq_lens]
            assert loaded == [shape.seq_len for shape in self._prepared.data.shapes(own)]
        line = {"attempt": self.attempt, "step": self.done + 1, "numbers": own}
        with (self.folder / f"samples-{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return super()._train(*args)


def run(settings: dict[str, Any], stop_after: int | None = None, attempt: int = 0) -> int:
    """Train on this rank; the steps done. One rank is asked to stop after a step."""

    def is_stopping() -> bool:
        is_asked = stop_after is not None and one.done + 1 >= stop_after
        return is_asked and dist.get_rank() == VICTIM

    options = TrainOptions(**(SMALL | settings))
    one = Recorded(options, torch.device("cpu"), is_stopping)
    one.attempt = attempt
    one.run(lambda record: None)
    return one.done


def losses(folder: Path) -> list[float]:
    """The loss curve, one step after the other."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def trained_numbers(folder: Path) -> Counter[int]:
    """How often each sample was trained on in the steps of the curve.

    A step that was trained again after a kill counts as it was the last time.
    """
    last: dict[int, tuple[int, list[int]]] = {}
    for path in folder.glob("samples-*.jsonl"):
        for one in map(json.loads, path.read_text().splitlines()):
            attempt, numbers = last.get(one["step"], (-1, []))
            if one["attempt"] >= attempt:
                kept = numbers if one["attempt"] == attempt else []
                last[one["step"]] = one["attempt"], [*kept, *one["numbers"]]
    return Counter(number for _, numbers in last.values() for number in numbers)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    """As a rank that was stopped: far longer than the others wait for it."""
    time.sleep(600.0)


def out_of_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing_run(
    settings: dict[str, Any], place: str, step: int, on_victim: Callable[[], None], attempt: int = 0
) -> int:
    """As `run`, but one rank does something else at a place in a step.

    A timeout that is given holds for gradients too.
    """
    if "timeout_s" in settings:
        set_timeout(member_of(resolve(None), "test"), settings["timeout_s"])
    homes: dict[str, tuple[Any, str]] = {
        "plan": (TrainingRun, "_begin"),
        "route": (Step, "route"),
        "attend": (Step, "attend"),
        "backward": (torch.Tensor, "backward"),
        "write": (FileSystemWriter, "write_data"),
        "metadata": (FileSystemWriter, "finish"),
        "publish": (Path, "rename"),
        "published": (Checkpoints, "save"),
    }
    home, name = homes[place]
    original, now = getattr(home, name), [0]

    def fail(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs) if place == "published" else None
        is_other = place == "publish" and not re.match("step-.*tmp", args[0].name)
        if now[0] >= step and not is_other:
            on_victim()
        return result if place == "published" else original(*args, **kwargs)

    def count(self: Any, *args: Any) -> Any:
        now[0] = self.done + 1
        return train(self, *args)

    train = Recorded._train  # pyright: ignore[reportPrivateUsage]
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == (0 if place in SAVING[1:] else VICTIM):
            patch.setattr(Recorded, "_train", count)
            patch.setattr(home, name, fail)
        return run(settings, attempt=attempt)
