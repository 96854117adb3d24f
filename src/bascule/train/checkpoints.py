"""Checkpoints of a run: written beside each other, published by a rename, so whole or not there.

The ranks write their shards into `step-00000120.tmp`. When all are done, and what they wrote is on
the disk, the first rank renames the folder: a kill at any moment leaves the earlier checkpoints,
and at most a folder that the next save or resume removes. Any number of ranks can load them.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from bascule.comm.agree import agree
from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup
from bascule.errors import CommError, ConfigError
from bascule.train.train_options import Schedule

_WHOLE = re.compile("step-[0-9]{8,}")
_FACTS = "run.json"
_FORMAT = {"bascule": "checkpoint", "version": 1}


def newest_checkpoint(folder: Path) -> Path | None:
    """The last whole checkpoint of a folder; None if it has none, or does not exist."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found = [path for path in folder.iterdir() if _WHOLE.fullmatch(path.name)]
        return max(found, key=step_of, default=None)
    return None


def step_of(checkpoint: Path) -> int:
    """The steps that were done when it was saved."""
    return int(checkpoint.name.removeprefix("step-"))


@dataclass(frozen=True, slots=True)
class Facts:
    """What a run must share with the one that it goes on from.

    Attributes:
        settings: What decides the losses, by option.
        schedule: Which samples are in which step.
    """

    settings: Mapping[str, str]
    schedule: Schedule


def check_facts(checkpoint: Path, facts: Facts) -> None:
    """Refuse to go on with what would be another run, or would leave samples out.

    Args:
        checkpoint: A whole one.
        facts: Of this run.

    Raises:
        ConfigError: A setting differs, or this is no checkpoint of `bascule train`.
    """
    try:
        said = json.loads((checkpoint / _FACTS).read_text())
        saved, num_samples = dict[str, str](said["settings"]), int(said["num_samples"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{checkpoint} is no checkpoint of bascule train: {error!r}") from error
    every = {**facts.settings, **saved}
    for name in sorted(every, key=lambda name: name == "--photos"):  # others change their tokens
        before, now = (_setting(name, all_of) for all_of in (saved, facts.settings))
        if before != now:
            raise ConfigError(
                f"--resume: {checkpoint} was saved with {before}, and this run has {now}: give the "
                "same, or another --out"
            )
    if num_samples < facts.schedule.samples_until(step_of(checkpoint)):
        raise ConfigError(
            f"--resume: {checkpoint} ends a run of {num_samples} samples with a smaller step, so a "
            "longer run would leave samples out: give the same --epochs, or another --out"
        )


def _setting(name: str, settings: Mapping[str, str]) -> str:
    return f"{name} {settings[name]}" if name in settings else f"no {name}"


class Checkpoints:
    """The checkpoints in a folder, which all ranks can see.

    Args:
        folder: Made here if it does not exist.
        group: The ranks, on the host; all of them construct it, save and load together.
        facts: Go into every checkpoint.
        keep: Checkpoints that are kept.

    Raises:
        CommError: A rank cannot see the folder, or the first one cannot write to it.
    """

    def __init__(self, folder: Path, group: RankGroup, facts: Facts, keep: int) -> None:
        self.folder, self._group, self._facts, self._keep = folder, group, facts, keep
        self._by_first_rank("make the folder", 0, self._make_folder)
        sees = folder.is_dir()
        error = None if sees else ConfigError(f"{folder}: give a folder that all ranks can see")
        agree(group, {}, error, what="the folder for checkpoints")

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> Path:
        """Save after so many steps, and remove what is too many.

        Returns:
            The checkpoint.

        Raises:
            CommError: A rank could not write, on all ranks; the earlier checkpoints are as before.
        """
        whole = self.folder / f"step-{step:08d}"
        part = whole.with_suffix(".tmp")
        self._by_first_rank("begin to save", step, lambda: self._prepare(part))
        try:
            with shared(f"step {step}: save"):
                weights, states = get_state_dict(model, optimizer)
                state = {"model": weights, "optimizer": states}
                state_dict_saver.save(state, storage_writer=_Writer(part))
            self._by_first_rank("save", step, lambda: self._publish(part, whole, step))
        except (CheckpointException, RuntimeError) as error:
            if self._group.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            if isinstance(error, CheckpointException):
                raise CommError(f"step {step}: {part} was not saved: {_cause(error)}") from None
            raise
        return whole

    def load(self, checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
        """Load a whole checkpoint, saved by any number of ranks.

        Raises:
            ConfigError: Its settings differ. CommError: Ranks chose others, or cannot read it.
        """
        error = None
        try:
            check_facts(checkpoint, self._facts)
        except ConfigError as met:
            error = met
        agree(self._group, {"checkpoint": checkpoint.name}, error, what="resume")
        weights, states = get_state_dict(model, optimizer)
        try:
            state_dict_loader.load(
                {"model": weights, "optimizer": states}, checkpoint_id=checkpoint
            )
        except CheckpointException as met:
            raise CommError(f"{checkpoint} cannot be loaded: {_cause(met)}") from None
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)

    def _by_first_rank(self, what: str, step: int, work: Callable[[], None]) -> None:
        """Do what one rank does for all; an error of it is known to all."""
        error = None
        if self._group.rank == 0:
            try:
                work()
            except OSError as met:
                error = ConfigError(f"{met.filename or self.folder}: {met.strerror or met}")
        agree(self._group, {}, error, what=what, step=step)

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def _prepare(self, part: Path) -> None:
        for left in self.folder.glob("step-*.tmp"):
            shutil.rmtree(left)
        part.mkdir()

    def _publish(self, part: Path, whole: Path, step: int) -> None:
        num_samples = self._facts.schedule.samples_until(step)
        facts = {**_FORMAT, "num_samples": num_samples, "settings": dict(self._facts.settings)}
        with (part / _FACTS).open("w") as file:
            json.dump(facts, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        _sync(part)
        part.rename(whole)
        _sync(self.folder)
        found = (path for path in self.folder.iterdir() if _WHOLE.fullmatch(path.name))
        for old in sorted(found, key=step_of)[: -self._keep]:
            shutil.rmtree(old.rename(old.with_suffix(".tmp")))


class _Writer(FileSystemWriter):
    """Torch's, that says what the disk said: closing a broken archive hides it (torch 2.13)."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: CheckpointException) -> str:
    """Which rank failed first, and how."""
    rank, (met, _) = min(error.failures.items())
    lines = str(met).strip().splitlines() or [type(met).__name__]
    return f"rank {rank}: {lines[0]}"
