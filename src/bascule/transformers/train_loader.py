"""Batches of a balanced loader as a Trainer takes them, and their place in its checkpoints."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from bascule.data.cost_tracker import CostTracker
from bascule.data.loader import BalancedLoader
from bascule.data.packs import Pack, make_pack
from bascule.data.steps import Batch
from bascule.errors import ConfigError
from bascule.transformers.packs import Inputs

ASIDE = "bascule_aside"  # travels among the inputs from the loader to `training_step`

_log = logging.getLogger(__name__)
_IGNORED = -100  # the Trainer counts labels that differ from it


@dataclass(frozen=True, slots=True, eq=False)
class Aside:
    """Facts of a microbatch that `training_step` needs and the model does not take."""

    loss_scale: float  # factor of its mean loss
    labels: Inputs  # of padding: hidden from the count of labels, but a mean needs some


@dataclass(eq=False)
class TrainLoader:
    """The batches of a balanced loader as a Trainer takes them."""

    dataset: Dataset[Any]
    balanced: BalancedLoader
    tracker: CostTracker | None  # learns what samples cost
    pack: Pack | None
    inputs_of: Callable[[Any], Inputs]
    counts_labels: bool  # by the Trainer, over all processes
    # Without a length, the Trainer counts epochs from 0 in every resumed run, and knows no end.
    _first_epoch: int = field(default=0, init=False)
    _may_be_over: bool = field(default=False, init=False)
    _has_warned: bool = field(default=False, init=False)

    def __len__(self) -> int:
        return len(self.balanced)

    @property
    def num_microbatches(self) -> int | None:
        """Microbatches of a whole epoch, if their number is known."""
        try:
            return len(self)
        except TypeError:
            return None

    @property
    def num_epochs(self) -> float:
        """Epochs so far, with the share of this one's steps, or of its samples (packs)."""
        progress, num_microbatches = self.balanced.state_dict(), self.num_microbatches
        if num_microbatches is not None:
            num_steps = num_microbatches // self.balanced.rules.accumulate
            return progress["epoch"] + progress["step"] / max(num_steps, 1)
        num_read = sum(map(sum, progress["history"])) + sum(progress["counts"])
        return progress["epoch"] + num_read / len(self.dataset)  # pyright: ignore[reportArgumentType]

    def __iter__(self) -> Iterator[Inputs]:
        may_be_over, self._may_be_over = self._may_be_over, False
        for inputs in self._epoch():
            may_be_over = False
            yield inputs
        if may_be_over:
            self._first_epoch += 1
            yield from self._epoch()

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Go to the place of a checkpoint, by the `state_dict` of its loader."""
        self.balanced.load_state_dict(progress)
        if self.num_microbatches is None:
            self._first_epoch, self._may_be_over = progress["epoch"], True

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next iteration; keep the place in it, if it was resumed."""
        self.balanced.close()
        self.balanced.set_epoch(self._first_epoch + epoch)

    def _epoch(self) -> Iterator[Inputs]:
        return map(self._inputs, self.balanced if self.tracker is None else self.tracker)

    def _inputs(self, batch: Batch) -> Inputs:
        data, is_padding = batch.data, batch.is_padding
        if self.pack is not None:
            if self.balanced.rules.ends == "finish" and "labels" not in data:
                raise ConfigError(
                    "LoaderOptions(ends='finish') with packs without labels: the padding of a "
                    "process without samples has labels; give labels, or ends='pad_empty'"
                )
            if not data["positions"].shape[0]:
                # Models cannot compute none. Of two tokens, a causal model predicts the second.
                tokens, is_padding = torch.full((2,), self.pack.pad_id), True
                padding = [{"input_ids": tokens, "labels": tokens}]
                data = make_pack(padding, replace(self.pack, tokens=2, fixed=False))
            elif not is_padding:
                self._warn_of_no_label(data, self.pack.ignore_index)
        inputs, labels = self.inputs_of(data), Inputs()
        if is_padding and self.counts_labels:
            for name in ("labels", "shift_labels"):
                if isinstance(inputs.get(name), Tensor):
                    labels[name] = inputs[name]
                    inputs[name] = torch.full_like(inputs[name], _IGNORED)
        inputs[ASIDE] = Aside(batch.loss_scale, labels)
        return inputs

    def _warn_of_no_label(self, packed: Mapping[str, Any], ignored: int) -> None:
        """Warn once: one pack may have no label by chance, and a run of them learns nothing."""
        labels = packed.get("shift_labels")
        if labels is None or self._has_warned or bool((labels != ignored).any()):
            return
        self._has_warned = True
        _log.warning(
            "a pack of %d samples has no label to learn: all are %d, but for first tokens, which "
            "a causal model does not predict; its loss is 0",
            packed["num_samples"],
            ignored,
        )


class LoaderProgress(TrainerCallback, ExportableState):
    """Saves the loader's place with each checkpoint, in ``trainer_state.json``; resumes there."""

    def __init__(self) -> None:
        self._loader: TrainLoader | None = None

    def state(self) -> dict[str, Any]:
        """Return the place, in the form that the Trainer saves."""
        attributes: dict[str, Any] = {}
        if (loader := self._loader) is not None:
            attributes["progress"] = loader.balanced.state_dict()
            attributes["num_microbatches"] = loader.num_microbatches
            if loader.tracker is not None:
                attributes["costs"] = loader.tracker.state_dict()
        return {"args": {}, "attributes": attributes}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Resume at the place of the checkpoint, if there is one; refuse one that does not fit."""
        loader = kwargs["train_dataloader"]
        states = cast(dict[str, Any], state.stateful_callbacks)
        saved = states.setdefault(type(self).__name__, {"args": {}, "attributes": {}})["attributes"]
        if isinstance(loader, TrainLoader):
            self._loader = loader
            _resume(loader, saved, state.global_step)
        elif saved:
            raise ConfigError(
                "the checkpoint was written by several processes with balancing, and this is "
                "one alone: keep the number of processes"
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count epochs as the loader does: the Trainer counts neither resumed ones nor packs."""
        if self._loader is not None:
            state.epoch = self._loader.num_epochs

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the thread of an unfinished epoch."""
        if self._loader is not None:
            self._loader.balanced.close()


def _resume(loader: TrainLoader, saved: dict[str, Any], num_trained: int) -> None:
    """Go to the place that was saved after this many steps, unless steps are counted otherwise."""
    num_microbatches = loader.num_microbatches
    if not saved:
        num_steps = (num_microbatches or 0) // loader.balanced.rules.accumulate
        if num_trained % num_steps if num_steps else num_trained:
            raise ConfigError(
                f"the checkpoint of step {num_trained} was written in the middle of an "
                "epoch without balancing: resume it without, or from the end of an epoch"
            )
        return
    if saved["num_microbatches"] != num_microbatches:
        before, now = (
            "packs of unknown number" if number is None else f"{number} microbatches an epoch"
            for number in (saved["num_microbatches"], num_microbatches)
        )
        raise ConfigError(
            f"the checkpoint was written with {before}, now there are {now}: the Trainer counts "
            "epochs by steps, so keep processes, batch size, accumulation, dataset and packs"
        )
    loader.resume(saved["progress"])
    if loader.tracker is not None and "costs" in saved:
        loader.tracker.load_state_dict(saved["costs"])


class Columns(Dataset[Any]):
    """A dataset whose samples have the named columns only."""

    def __init__(self, dataset: Dataset[Any], names: frozenset[str]) -> None:
        self._dataset, self._names = dataset, names

    def __len__(self) -> int:
        return len(self._dataset)  # pyright: ignore[reportArgumentType]

    def __getitem__(self, index: int) -> Any:
        return _kept(self._dataset[index], self._names)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        read = getattr(self._dataset, "__getitems__", None)  # as DataLoader looks for it
        samples = [self._dataset[index] for index in indices] if read is None else read(indices)
        return [_kept(sample, self._names) for sample in samples]

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to a dataset that takes it."""
        if hasattr(self._dataset, "set_epoch"):
            cast(Any, self._dataset).set_epoch(epoch)


def unpacked_columns(
    unpack: Callable[[Any], list[Any]], names: frozenset[str]
) -> Callable[[Any], list[Any]]:
    """Return an `unpack` whose samples have the named columns only; it reads the others itself."""

    @wraps(unpack)  # ranks compare its name
    def unpacked(item: Any) -> list[Any]:
        return [_kept(sample, names) for sample in unpack(item)]

    return unpacked


def _kept(sample: Any, names: frozenset[str]) -> Any:
    if not isinstance(sample, Mapping):
        return sample
    return {name: value for name, value in sample.items() if name in names}
