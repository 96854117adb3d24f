"""Settings of balancing in Hugging Face's Trainer, beside those that its own arguments decide."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import Trainer
from transformers.trainer_utils import seed_worker

from bascule.data.loader import DEFAULT_OPTIONS, BalancedLoader, LoaderOptions
from bascule.data.packs import Pack
from bascule.data.samplers import ResumableSampler
from bascule.errors import ConfigError
from bascule.plan.checks import choice, fields, function, of_type
from bascule.plan.costs import Cost
from bascule.plan.step import Sync
from bascule.transformers.train_loader import Columns, unpacked_columns

_DECIDED = {  # options that follow from the Trainer's arguments
    "axis": "every process is a data-parallel rank; use BalancedLoader in a training loop",
    "batch_size": "set per_device_train_batch_size",
    "collate_fn": "give the Trainer a data_collator",
    "pin_memory": "set dataloader_pin_memory",
    "timeout_s": "set ddp_timeout",
}


@dataclass(frozen=True, slots=True)
class BalanceConfig:
    """Settings of balancing, the same on all processes of a Trainer.

    Attributes:
        cost: Predicted cost of a sample by its tokens. None, with `learns`: its tokens at first.
        length_fn: Tokens of a sample. Default: those of its "input_ids".
        sync: As for `plan_step`. None: each "microbatch" with FSDP and DeepSpeed, else the "step".
        pack: Makes each microbatch one pack, of this many tokens; ``max_steps`` ends training.
        learns: Fits costs to the steps of the run (`BalancedTrainerMixin.cost_tracker`).
        options: Options of the loader that the Trainer's arguments do not decide. Of `ends`, only
            "pad_empty" and "finish" count.
    """

    cost: Cost | None = None
    length_fn: Callable[[Any], int] | None = None
    sync: Sync | None = None
    pack: Pack | int | None = None
    learns: bool = False
    options: LoaderOptions = DEFAULT_OPTIONS

    def __post_init__(self) -> None:
        fields(
            self,
            cost=function,
            length_fn=function,
            sync=(choice, "microbatch", "step"),
            options=(of_type, LoaderOptions, "LoaderOptions(..)"),
        )
        if self.cost is None and not self.learns:
            raise ConfigError(
                "BalanceConfig(cost=None): give a cost, as TransformerCost(d_model, "
                "num_layers=..), or learns=True"
            )
        if not isinstance(self.pack, Pack | None):
            object.__setattr__(self, "pack", Pack(tokens=self.pack))
        if self.options.ends == "finish" and self.pack is None:
            raise ConfigError(
                "LoaderOptions(ends='finish') in a BalanceConfig without a pack: a process without "
                "samples must still run the model, and only a pack can be padding alone; give a "
                "pack, or ends='pad_empty'"
            )
        for name, advice in _DECIDED.items():
            value = getattr(self.options, name)
            if value != getattr(DEFAULT_OPTIONS, name):
                raise ConfigError(f"LoaderOptions({name}={value!r}) in a BalanceConfig: {advice}")

    @property
    def fills_packs(self) -> bool:
        """True where samples are loaded until a pack is full: an epoch has no known length."""
        return self.pack is not None and self.options.unpack is None


def checked_dataset(trainer: Trainer, balance: BalanceConfig) -> Dataset[Any]:
    """Return the dataset of a trainer whose arguments go with balancing; refuse others."""
    args, dataset = trainer.args, trainer.train_dataset
    if dataset is None or isinstance(dataset, IterableDataset) or not len(dataset):  # pyright: ignore[reportArgumentType]
        raise ConfigError(
            "balancing needs a train_dataset with a length and at least one sample: for streams, "
            "use BalancedLoader in a training loop"
        )
    if args.train_sampling_strategy not in ("random", "sequential"):
        raise ConfigError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} groups samples by length, "
            'and so does balancing: use "random" or "sequential"'
        )
    if trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1 or args.n_gpu > 1:
        raise ConfigError(
            "balancing needs processes that are data-parallel ranks with one device: with tensor, "
            "context or sequence parallelism, use BalancedLoader with LoaderOptions(axis=...) in a "
            "training loop; instead of DataParallel, start with torchrun"
        )
    if counts_labels(trainer) and not args.average_tokens_across_devices:
        raise ConfigError(
            "average_tokens_across_devices=False divides the loss by the labels of one process, "
            "whose samples balancing chose: set it to True"
        )
    if balance.fills_packs and args.max_steps <= 0:
        raise ConfigError(
            f"max_steps={args.max_steps} with BalanceConfig(pack=..): the number of packs in an "
            "epoch is known only at its end, and the learning rate depends on it; set max_steps"
        )
    return dataset


def counts_labels(trainer: Trainer) -> bool:
    """Return True if the Trainer divides the loss by the labels of all processes."""
    return trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None


def sync_of(trainer: Trainer, balance: BalanceConfig) -> Sync:
    """Return what the processes wait for; refuse to learn costs where no step can be timed."""
    meets_often = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    sync = balance.sync or ("microbatch" if meets_often else "step")
    accumulate = trainer.args.gradient_accumulation_steps
    if balance.learns and sync != "step" and accumulate > 1:
        raise ConfigError(
            "BalanceConfig(learns=True) with processes that wait for each other in each of "
            f"{accumulate} microbatches: the Trainer takes them all at once, so only steps can be "
            "timed; give a cost, or sync='step'"
        )
    return sync


def options_of(trainer: Trainer, balance: BalanceConfig) -> LoaderOptions:
    """Return the options of the loader, with those that the Trainer's arguments decide."""
    args, ends = trainer.args, balance.options.ends
    if ends == "drop_last":  # the default
        ends = "drop_last" if args.dataloader_drop_last else "pad_empty"
    elif args.dataloader_drop_last:
        raise ConfigError(
            f"LoaderOptions(ends={ends!r}) with dataloader_drop_last=True, which drops the end of "
            "an epoch: leave out one of them"
        )
    return replace(
        balance.options,
        ends=ends,
        collate_fn=None if balance.pack else trainer.data_collator,
        pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
        timeout_s=float(args.ddp_timeout),
    )


def balanced_loader(
    trainer: Trainer, balance: BalanceConfig, columns: frozenset[str] | None
) -> BalancedLoader:
    """Return the loader of this process; its samples have these columns only, or all."""
    args, options = trainer.args, options_of(trainer, balance)
    dataset = checked_dataset(trainer, balance)
    if columns is not None and options.unpack is None:
        dataset = Columns(dataset, columns)
    elif columns is not None and options.unpack is not None:
        options = replace(options, unpack=unpacked_columns(options.unpack, columns))
    sampler = ResumableSampler(
        len(dataset),  # pyright: ignore[reportArgumentType]
        rank=args.process_index,
        num_ranks=args.world_size,
        shuffle=args.train_sampling_strategy == "random",
        seed=args.seed if args.data_seed is None else args.data_seed,
    )
    num_workers = args.dataloader_num_workers
    local = DataLoader(
        dataset,
        batch_size=trainer._train_batch_size,
        sampler=sampler,
        # Packs take samples from batches of any size, so the last one counts as well.
        drop_last=args.dataloader_drop_last and not balance.fills_packs,
        num_workers=num_workers,
        worker_init_fn=partial(seed_worker, num_workers=num_workers, rank=args.process_index),
        persistent_workers=args.dataloader_persistent_workers,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        prefetch_factor=args.dataloader_prefetch_factor,
        in_order=args.dataloader_in_order,
    )
    return BalancedLoader(
        local,
        cost=balance.cost or _tokens,
        length_fn=balance.length_fn,
        accumulate=args.gradient_accumulation_steps,
        sync=sync_of(trainer, balance),
        pack=balance.pack,
        options=options,
    )


def _tokens(seq_lens: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the tokens, as the cost of samples of which no step is known yet."""
    return np.asarray(seq_lens, dtype=np.float64)
