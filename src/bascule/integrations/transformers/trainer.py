"""Balanced data loading for Hugging Face's Trainer, with one keyword argument.

Needs ``pip install bascule[transformers]``. Only extension points of the Trainer are overridden;
nothing of it is patched.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import seed_worker

from bascule.data.cost_tracker import CostTracker
from bascule.data.loader import BalancedLoader
from bascule.data.loader_batch import Batch
from bascule.data.samplers.resumable import ResumableSampler
from bascule.errors import ConfigError
from bascule.integrations.transformers.balance_config import BalanceConfig
from bascule.integrations.transformers.dataset_columns import Columns
from bascule.plan.checks import of_type
from bascule.plan.step import Sync

_SCALE = "bascule_loss_scale"  # travels among the inputs from the loader to `training_step`
_IGNORED = -100  # the Trainer counts labels that differ from it

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class BalancedTrainerMixin(_Base):
    """Balances the training samples of a Trainer over its processes.

    Gives each optimiser step the same samples as without, in another order, and the same mean loss:

    * Where the Trainer divides by ``num_items_in_batch`` (models of transformers with labels), it
      counts labels over all processes, and the mean is exact wherever the samples are.
    * Elsewhere the loss is multiplied by `loss_scale`, which makes it the mean over all samples of
      the step, weighted by `LoaderOptions.weight_fn`.

    Samples are dealt by a `ResumableSampler` seeded by ``data_seed`` or ``seed``, lose the columns
    that the model does not take (as ``remove_unused_columns`` says), move, and are collated by
    ``data_collator``. A run that resumes from a checkpoint goes on with the next sample without
    reading those before, so ``ignore_data_skip`` is set. With one process, nothing changes, and
    ``balanced_loader`` is None. The longest wait for other processes is ``ddp_timeout``.

    Args:
        *args: As the Trainer takes them.
        balance: How to balance.
        **kwargs: As the Trainer takes them.

    Raises:
        ConfigError: When training starts: an argument of the Trainer does not go with balancing.

    Example:
        >>> class MyTrainer(BalancedTrainerMixin, Trainer): ...  # doctest: +SKIP
        >>> trainer = MyTrainer(..., balance=BalanceConfig(cost=cost))  # doctest: +SKIP
    """

    def __init__(self, *args: Any, balance: BalanceConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.balance = of_type("balance", balance, BalanceConfig, "BalanceConfig(cost=..)")
        self.balanced_loader: BalancedLoader | None = None
        self.cost_tracker: CostTracker | None = None
        self._scale: float | None = None
        self._scale_was_used = False
        self.add_callback(LoaderProgress())

    @property
    def loss_scale(self) -> float:
        """Factor of the mean loss of the microbatch in training; 1 in evaluation.

        For a `compute_loss` of one's own that does not call this class's.
        """
        self._scale_was_used = True
        return 1.0 if self._scale is None else self._scale

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This process's balanced batches. All processes call it.

        Raises:
            ConfigError: An argument of the Trainer does not go with balancing.
            CommError: The processes were given different settings.
        """
        if self.args.world_size == 1:
            return super().get_train_dataloader()
        dataset = _check(self)
        args = self.args
        if args.remove_unused_columns:
            self._set_signature_columns_if_needed()
            dataset = Columns(dataset, frozenset(self._signature_columns or ()))
        loader = self._local_loader(dataset)
        counts_labels = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        balanced = BalancedLoader(
            loader,
            cost=_tokens if self.balance.cost is None else self.balance.cost,
            length_fn=self.balance.length_fn,
            accumulate=args.gradient_accumulation_steps,
            sync=_sync(self),
            options=replace(
                self.balance.options,
                ends="drop_last" if args.dataloader_drop_last else "pad_empty",
                collate_fn=self.data_collator,
                pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
                timeout_s=float(args.ddp_timeout),
            ),
        )
        args.ignore_data_skip = True  # the loader does it, exactly and without reading
        self.balanced_loader = balanced
        if self.balance.learns:
            self.cost_tracker = CostTracker(balanced, timeout_s=float(args.ddp_timeout))
        return _TrainLoader(loader, balanced, self.cost_tracker, ignore_padding=counts_labels)  # pyright: ignore[reportReturnType]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. Others hear of an error of this process when they ask for a batch.

        One that waits in a collective of the model ends when this process does.
        """
        try:
            return super().train(*args, **kwargs)
        except BaseException as error:
            # The error keeps the Trainer's loop alive, and in it the iteration.
            if self.balanced_loader is not None:
                self.balanced_loader.leave(error)
            raise

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """As the Trainer's.

        Raises:
            ConfigError: A `compute_loss` of one's own left out the scale of the loss.
        """
        self._scale, self._scale_was_used = inputs.pop(_SCALE, None), False
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
            is_mean = num_items_in_batch is None or self.loss_is_scaled_for_ga is False
            if self._scale is not None and is_mean and not self._scale_was_used:
                raise ConfigError(
                    f"{type(self).__name__}.compute_loss gives the mean of a microbatch, whose "
                    "samples balancing chose: multiply it by self.loss_scale, or call "
                    "super().compute_loss"
                )
        finally:
            self._scale = None
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """As the Trainer's, times `loss_scale` where the Trainer does not count labels."""
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if num_items_in_batch is None:
            loss = loss * self.loss_scale
        return (loss, outputs) if return_outputs else loss

    def _local_loader(self, dataset: Dataset[Any]) -> DataLoader[Any]:
        """A loader of the samples that this process reads."""
        args = self.args
        sampler = ResumableSampler(
            len(dataset),  # pyright: ignore[reportArgumentType]
            rank=args.process_index,
            num_ranks=args.world_size,
            shuffle=args.train_sampling_strategy == "random",
            seed=args.seed if args.data_seed is None else args.data_seed,
        )
        num_workers = args.dataloader_num_workers
        return DataLoader(
            dataset,
            batch_size=self._train_batch_size,
            sampler=sampler,
            drop_last=args.dataloader_drop_last,
            num_workers=num_workers,
            worker_init_fn=partial(seed_worker, num_workers=num_workers, rank=args.process_index),
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
            in_order=args.dataloader_in_order,
        )


class LoaderProgress(TrainerCallback, ExportableState):
    """Saves where the loader is with each checkpoint, in ``trainer_state.json``, and goes on there.

    `BalancedTrainerMixin` adds it. The progress is the same on all processes.
    """

    def __init__(self) -> None:
        self._loader: _TrainLoader | None = None
        self._trained = 0.0  # share of the resumed epoch that an earlier run trained

    def state(self) -> dict[str, Any]:
        """What is saved, as the Trainer wants it."""
        attributes: dict[str, Any] = {}
        if self._loader is not None:
            progress = self._loader.balanced.state_dict()
            attributes = {"progress": progress, "num_microbatches": len(self._loader)}
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
        if not isinstance(loader, _TrainLoader):
            if saved:
                raise ConfigError(
                    "the checkpoint was written by several processes with balancing, and this is "
                    "one alone: keep the number of processes"
                )
            return
        self._loader, self._trained = loader, 0.0
        num_steps = len(loader) // args.gradient_accumulation_steps
        if not saved:
            if state.global_step % max(num_steps, 1):
                raise ConfigError(
                    f"the checkpoint of step {state.global_step} was written in the middle of an "
                    "epoch without balancing: resume it without, or from the end of an epoch"
                )
            return
        if saved["num_microbatches"] != len(loader):
            raise ConfigError(
                f"the checkpoint was written with {saved['num_microbatches']} microbatches an "
                f"epoch, now there are {len(loader)}: keep the number of processes, the batch "
                "size, the accumulation and the dataset, because the Trainer counts epochs by steps"
            )
        loader.balanced.load_state_dict(saved["progress"])
        if loader.tracker is not None and "costs" in saved:
            loader.tracker.load_state_dict(saved["costs"])
        self._trained = saved["progress"]["step"] % num_steps / num_steps

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Count what was trained of the epoch before it was resumed; the Trainer does not."""
        if self._trained and state.epoch is not None:
            state.epoch += self._trained

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """The next epoch is counted whole."""
        self._trained = 0.0

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


class _TrainLoader:
    """The batches of a balanced loader as a Trainer takes them.

    Args:
        loader: What it balances.
        balanced: The loader.
        tracker: Learns what its samples cost, if it is to.
        ignore_padding: Whether labels of padding are to be left out because they are counted.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        balanced: BalancedLoader,
        tracker: CostTracker | None,
        *,
        ignore_padding: bool,
    ) -> None:
        self.dataset = loader.dataset
        self.balanced, self.tracker = balanced, tracker
        self._ignore_padding = ignore_padding

    def __len__(self) -> int:
        """Microbatches of a whole epoch; the same on all processes."""
        return len(self.balanced)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.balanced if self.tracker is None else self.tracker:
            yield self._inputs(batch)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next iteration; keeps what was resumed in it."""
        self.balanced.close()
        self.balanced.set_epoch(epoch)

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        inputs = batch.data
        if batch.is_padding and self._ignore_padding:
            for name in ("labels", "shift_labels"):
                if isinstance(inputs.get(name), Tensor):
                    inputs[name] = torch.full_like(inputs[name], _IGNORED)
        inputs[_SCALE] = batch.loss_scale
        return inputs


def _tokens(seq_lens: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """What samples cost before anything is known: their tokens."""
    return np.asarray(seq_lens, dtype=np.float64)


def _sync(trainer: BalancedTrainerMixin) -> Sync:
    """What the processes of a trainer wait for.

    Raises:
        ConfigError: Costs are to be learned of what is not timed.
    """
    meets_often = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    found: Sync = "microbatch" if meets_often else "step"
    sync = trainer.balance.sync or found
    if trainer.balance.learns and sync != "step" and trainer.args.gradient_accumulation_steps > 1:
        raise ConfigError(
            "BalanceConfig(learns=True) with processes that wait for each other in each of "
            f"{trainer.args.gradient_accumulation_steps} microbatches: the Trainer takes them all "
            "at once, so only steps can be timed; give a cost, or sync='step'"
        )
    return sync


def _check(trainer: Trainer) -> Dataset[Any]:
    """Refuse settings that do not go with balancing; returns the dataset.

    Raises:
        ConfigError: Names the argument, and the nearest that does.
    """
    args, dataset = trainer.args, trainer.train_dataset
    peers = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
    counts_labels = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    refused: str | None = None
    if dataset is None or isinstance(dataset, IterableDataset):
        refused = (
            "balancing deals the samples of a train_dataset with a length: for streams, use "
            "BalancedLoader in a training loop"
        )
    elif not len(dataset):  # pyright: ignore[reportArgumentType]
        refused = "train_dataset has no sample: give one at least"
    elif args.train_sampling_strategy not in ("random", "sequential"):
        refused = (
            f"train_sampling_strategy={args.train_sampling_strategy!r} groups samples by "
            'length, and so does balancing: use "random" or "sequential"'
        )
    elif peers > 1 or args.n_gpu > 1:
        refused = (
            "balancing takes every process of the Trainer for a data-parallel rank with one "
            "device: with tensor, context or sequence parallelism, use BalancedLoader with "
            "LoaderOptions(axis=...) in a training loop; instead of DataParallel, start with "
            "torchrun"
        )
    elif counts_labels and not args.average_tokens_across_devices:
        refused = (
            "average_tokens_across_devices=False divides the loss by the labels of one process, "
            "whose samples balancing chose: set it to True"
        )
    if refused is not None or dataset is None:
        raise ConfigError(refused or "")
    return dataset
