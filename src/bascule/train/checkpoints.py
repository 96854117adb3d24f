"""Checkpoints of a run, for any number of ranks; a rename makes each one whole or absent."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
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
from bascule.train.options import Schedule

_FACTS = "run.json"
_FORMAT = {"bascule": "checkpoint", "version": 1}


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the last whole checkpoint of a folder; None without one, or without the folder."""
    return max(_whole(folder), key=step_of, default=None)


def _whole(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return [one for one in folder.iterdir() if re.fullmatch("step-[0-9]{8,}", one.name)]
    return []


def step_of(checkpoint: Path) -> int:
    """Return the number of steps before it was saved."""
    return int(checkpoint.name.removeprefix("step-"))


def check_facts(checkpoint: Path, settings: Mapping[str, str], schedule: Schedule) -> None:
    """Refuse to resume if settings that decide the losses differ, or samples would be left out."""
    try:
        stored = json.loads((checkpoint / _FACTS).read_text())
        saved, num_samples = dict[str, str](stored["settings"]), int(stored["num_samples"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{checkpoint} is no checkpoint of bascule train: {error!r}") from error
    # A digest of photos differs with other settings too, so it comes last.
    for name in sorted({**settings, **saved}, key=lambda name: name == "--photos"):
        before, now = (_setting(name, one) for one in (saved, settings))
        if before != now:
            raise ConfigError(
                f"--resume: {checkpoint} was saved with {before}, and this run has {now}: give the "
                "same, or another --out"
            )
    if num_samples < schedule.samples_until(step_of(checkpoint)):
        raise ConfigError(
            f"--resume: {checkpoint} ends a run of {num_samples} samples with a smaller step, so a "
            "longer run would leave samples out: give the same --epochs, or another --out"
        )


def _setting(name: str, settings: Mapping[str, str]) -> str:
    return f"{name} {settings[name]}" if name in settings else f"no {name}"


class Checkpoints:
    """The newest checkpoints in a folder that all ranks see; all ranks save and load together."""

    def __init__(
        self,
        folder: Path,
        group: RankGroup,
        settings: Mapping[str, str],
        schedule: Schedule,
        keep: int,
    ) -> None:
        self.folder, self._group, self._keep = folder, group, keep
        self._settings, self._schedule = settings, schedule
        self._on_first_rank("make the folder", 0, lambda: folder.mkdir(parents=True, exist_ok=True))
        error = ConfigError(f"{folder}: give a folder that all ranks can see")
        agree(group, {}, None if folder.is_dir() else error, what="the folder for checkpoints")

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> Path:
        """Save and return a checkpoint, remove the oldest; all raise CommError if a rank cannot."""
        whole = self.folder / f"step-{step:08d}"
        part = whole.with_suffix(".tmp")
        self._on_first_rank("begin to save", step, lambda: self._prepare(part))
        try:
            with shared(f"step {step}: save"):
                weights, states = get_state_dict(model, optimizer)
                state = {"model": weights, "optimizer": states}
                state_dict_saver.save(state, storage_writer=_Writer(part))
            self._on_first_rank("save", step, lambda: self._publish(part, whole, step))
        except (CheckpointException, RuntimeError) as error:
            if self._group.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            if isinstance(error, CheckpointException):
                raise CommError(f"step {step}: {part} was not saved: {_cause(error)}") from None
            raise
        return whole

    def load(self, checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
        """Load a whole checkpoint, the same on all ranks; CommError if a rank cannot read it."""
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states}
        try:
            state_dict_loader.load(state, checkpoint_id=checkpoint)
        except CheckpointException as error:
            raise CommError(f"{checkpoint} cannot be loaded: {_cause(error)}") from None
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)

    def _on_first_rank(self, what: str, step: int, work: Callable[[], None]) -> None:
        """Let one rank work for all; its error is raised on all."""
        error = None
        if self._group.rank == 0:
            try:
                work()
            except OSError as failure:
                path = failure.filename or self.folder
                error = ConfigError(f"{path}: {failure.strerror or failure}")
        agree(self._group, {}, error, what=what, step=step)

    def _prepare(self, part: Path) -> None:
        for old in self.folder.glob("step-*.tmp"):  # of a save that was killed
            shutil.rmtree(old)
        part.mkdir()

    def _publish(self, part: Path, whole: Path, step: int) -> None:
        num_samples = self._schedule.samples_until(step)
        facts = {**_FORMAT, "num_samples": num_samples, "settings": dict(self._settings)}
        with (part / _FACTS).open("w") as file:
            json.dump(facts, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        _sync(part)
        part.rename(whole)
        _sync(self.folder)
        for old in sorted(_whole(self.folder), key=step_of)[: -self._keep]:
            shutil.rmtree(old.rename(old.with_suffix(".tmp")))


class _Writer(FileSystemWriter):
    """Torch's writer, with the error of the disk: closing a broken archive hides it (2.13)."""

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
    rank, (failure, _) = min(error.failures.items())
    lines = str(failure).strip().splitlines() or [type(failure).__name__]
    return f"rank {rank}: {lines[0]}"
