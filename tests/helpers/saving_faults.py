"""Places at which a fault strikes a run of `bascule train` while it saves or resumes.

As a program, under a launcher: `bascule train` with such a fault, given as JSON.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from bascule.train import checkpoints, training_run
from bascule.train.checkpoints import Checkpoints
from bascule.train.training_run import TrainingRun
from tests.helpers.faults import Fault, Striker
from tests.helpers.train_runs import run

BEFORE: dict[str, tuple[Any, str]] = {
    "prepare": (Checkpoints, "_prepare"),
    "write": (FileSystemWriter, "write_data"),
    "metadata": (FileSystemWriter, "finish"),
    "sync": (checkpoints, "_sync"),  # of the shards, then of the renamed folder
    "rename": (Path, "rename"),  # of the metadata, the new checkpoint, those that are too old
    "remove": (checkpoints.shutil, "rmtree"),
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


@contextmanager
def saving_places(striker: Striker) -> Iterator[None]:
    """Within, what runs save and load is a place, in the step that was done last; 0 at a start."""
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
        for place, (home, name) in BEFORE.items():
            function = striker.hits(getattr(home, name), place, lambda: now[0])
            stack.enter_context(mock.patch.object(home, name, function))
        yield


def struck_run(settings: dict[str, Any], fault: Fault, striker: Striker) -> None:
    """A run on this rank of a world, which the fault ends."""
    with saving_places(striker):
        run(settings)


def main() -> None:
    from bascule.cli import main as command

    fault, folder, *arguments = sys.argv[1:]
    striker = Striker(Fault(**json.loads(fault)), Path(folder), int(os.environ["RANK"]))
    with saving_places(striker):
        command(arguments)


if __name__ == "__main__":
    main()
