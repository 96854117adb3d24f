"""Runs of `bascule train` on the ranks of a world, and faults that strike them at a place.

As a program, under a launcher: `bascule train` with such a fault, given as JSON.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from bascule.comm.groups import member_of, resolve, set_timeout
from bascule.parallel import Step
from bascule.train import checkpoints, training_run
from bascule.train.checkpoints import Checkpoints
from bascule.train.options import TrainOptions
from bascule.train.training_run import TrainingRun
from tests.helpers.faults import Fault, Striker
from tests.helpers.ranks import raised_by

SMALL: dict[str, Any] = {
    "d_model": 32,
    "num_heads": 2,
    "num_single": 1,
    "gamma": 1.0,
    "dtype": "float64",
    "timeout_s": 100.0,
    "data": "g1b2i32f1s0,g1b1i64f1s0",
}
VICTIM = 1
IN_A_STEP: dict[str, tuple[Any, str]] = {
    "plan": (TrainingRun, "_begin"),
    "route": (Step, "route"),
    "attend": (Step, "attend"),
    "backward": (torch.Tensor, "backward"),
}
SAVING: dict[str, tuple[Any, str]] = {
    "prepare": (Checkpoints, "_prepare"),
    "write": (FileSystemWriter, "write_data"),
    "metadata": (FileSystemWriter, "finish"),
    "sync": (checkpoints, "_sync"),  # of the shards, then of the renamed folder
    "rename": (Path, "rename"),  # of the metadata, the new checkpoint, those that are too old
    "remove": (checkpoints.shutil, "rmtree"),
}
RESUMING: dict[str, tuple[Any, str]] = {
    "read facts": (training_run, "check_facts"),
    "read metadata": (FileSystemReader, "read_metadata"),
    "read": (FileSystemReader, "read_data"),
    "set": (checkpoints, "set_state_dict"),
}
AFTER: dict[str, tuple[Any, str]] = {
    "half of a file": (filesystem, "_write_item"),
    "half of the facts": (checkpoints.json, "dump"),
    "written": (FileSystemWriter, "write_data"),
}


def make_album(folder: Path, num_photos: int = 9) -> Path:
    """Photos and two clips of unlike sizes, some with captions."""
    draw = np.random.default_rng(0)
    folder.mkdir()

    def picture(width: int, height: int) -> Image.Image:
        return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))

    for k in range(num_photos):
        picture(16 + 16 * (k % 3), 16 + 16 * (k % 2)).save(folder / f"{k}.png")
    (folder / "0.txt").write_text("a cat 🐈")
    for clip, num_frames in (("walk", 3), ("run", 2)):
        (folder / clip).mkdir()
        for k in range(num_frames):
            picture(32, 16).save(folder / clip / f"frame{k + 8}.png")
        (folder / f"{clip}.txt").write_text(f"they {clip}")
    return folder


class Recorded(TrainingRun):
    """A run that writes down which samples each rank trains on in each step."""

    attempt = 0

    def _train(self, ahead: Any, *args: Any, **kwargs: Any) -> Any:
        micros = self._prepared.schedule.microbatches(self.done)
        own = [number for numbers in micros for number in self._own(numbers)]
        if not self._prepared.encoders:  # else it encodes, which happens once
            loaded = [n for flow in ahead.samples.result()().flows for n in flow.seq_lens]
            assert loaded == [shape.seq_len for shape in self._prepared.data.shapes(own)]
        line = {"attempt": self.attempt, "step": self.done + 1, "numbers": own}
        with (self.folder / f"samples-{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return super()._train(ahead, *args, **kwargs)


def run(settings: dict[str, Any], stop_after: int | None = None, attempt: int = 0) -> int:
    """Train on this rank; the steps done. One rank is asked to stop after a step."""

    def is_stopping() -> bool:
        is_asked = stop_after is not None and one.done + 1 >= stop_after
        return is_asked and dist.get_rank() == VICTIM

    one = Recorded(TrainOptions(**(SMALL | settings)), torch.device("cpu"), is_stopping)
    one.attempt = attempt
    one.run(lambda record: None)
    return one.done


def refused(settings: dict[str, Any]) -> tuple[list[str], str]:
    """How a run ends that must not end well: the error's classes, and its text."""
    return raised_by(run, settings)


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics, one step after the other."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return lines


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in records(folder)]


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


@contextmanager
def places(striker: Striker) -> Iterator[None]:
    """Within, what runs train, save and load with is a place, in the step that trained last."""
    now, train = [0], TrainingRun._train  # pyright: ignore[reportPrivateUsage]

    def count(self: Any, *args: Any) -> Any:
        now[0] = self.done + 1
        return train(self, *args)

    def followed(function: Callable[..., Any], place: str) -> Callable[..., Any]:
        def after(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            striker.at(place, now[0])
            return result

        return after

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(TrainingRun, "_train", count))
        for place, (home, name) in AFTER.items():
            function = followed(getattr(home, name), place)
            stack.enter_context(mock.patch.object(home, name, function))
        for place, (home, name) in (IN_A_STEP | SAVING | RESUMING).items():
            function = striker.hits(getattr(home, name), place, lambda: now[0])
            stack.enter_context(mock.patch.object(home, name, function))
        yield


def struck_run(settings: dict[str, Any], fault: Fault, striker: Striker) -> None:
    """A run on this rank of a world, which the fault ends. Its timeout holds for gradients too."""
    set_timeout(member_of(resolve(None), "test"), settings["timeout_s"])
    with places(striker):
        run(settings)


def killed_run(settings: dict[str, Any], place: str, step: int, attempt: int) -> None:
    """A run in which a rank is killed at a place of a step, if it comes there."""
    victim = 0 if place in ("metadata", "rename", "sync") else VICTIM
    fault = Fault("kill", place, victim, dist.get_world_size(), step=step)
    with places(Striker(fault, settings["out"].parent, dist.get_rank())):
        run(settings, attempt=attempt)


def main() -> None:
    from bascule.cli import main as command

    fault, folder, *arguments = sys.argv[1:]
    striker = Striker(Fault(**json.loads(fault)), Path(folder), int(os.environ["RANK"]))
    with places(striker), mock.patch("bascule.train.training_run.TrainingRun", Recorded):
        command(arguments)


if __name__ == "__main__":
    main()
