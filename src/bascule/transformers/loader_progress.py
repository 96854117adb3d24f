"""Where a balanced loader is, in the checkpoints of a Trainer."""

from typing import Any, cast

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from bascule.errors import ConfigError
from bascule.transformers.train_loader import TrainLoader


class LoaderProgress(TrainerCallback, ExportableState):
    """Saves where the loader is with each checkpoint, in ``trainer_state.json``, and goes on there.

    `BalancedTrainerMixin` adds it. The progress is the same on all processes.
    """

    def __init__(self) -> None:
        self._loader: TrainLoader | None = None

    def state(self) -> dict[str, Any]:
        """What is saved, as the Trainer wants it."""
        attributes: dict[str, Any] = {}
        if self._loader is not None:
            progress = self._loader.balanced.state_dict()
            num_microbatches = self._loader.num_microbatches
            attributes = {"progress": progress, "num_microbatches": num_microbatches}
            if self._loader.tracker is not None:
                attributes["costs"] = self._loader.tracker.state_dict()
        return {"args": {}, "attributes": attributes}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Go on where the checkpoint was written, if there is one.

        Raises:
            ConfigError: The checkpoint cannot be gone on with.
        """
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
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Count epochs as the loader does: the Trainer knows neither resumed ones nor packs."""
        if self._loader is not None:
            state.epoch = self._loader.num_epochs

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """End the thread of an epoch that was left early."""
        if self._loader is not None:
            self._loader.balanced.close()


def _resume(loader: TrainLoader, saved: dict[str, Any], num_trained: int) -> None:
    """Go on where `saved` says, after this many steps.

    Raises:
        ConfigError: The checkpoint is of another number of microbatches, or says nothing.
    """
    num_microbatches = loader.num_microbatches
    if not saved:
        # Without a length, nobody knows where an epoch ends.
        num_steps = (num_microbatches or 0) // loader.balanced.rules.accumulate
        if num_trained % num_steps if num_steps else num_trained:
            raise ConfigError(
                f"the checkpoint of step {num_trained} was written in the middle of an "
                "epoch without balancing: resume it without, or from the end of an epoch"
            )
        return
    if saved["num_microbatches"] != num_microbatches:
        was, now = (
            "packs, which nobody counted" if number is None else f"{number} microbatches an epoch"
            for number in (saved["num_microbatches"], num_microbatches)
        )
        raise ConfigError(
            f"the checkpoint was written with {was}, now there are {now}: keep the number of "
            "processes, the batch size, the accumulation and the dataset, because the Trainer "
            "counts epochs by steps, and whether there are packs"
        )
    loader.resume(saved["progress"])
    if loader.tracker is not None and "costs" in saved:
        loader.tracker.load_state_dict(saved["costs"])
