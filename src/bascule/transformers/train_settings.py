"""What a Trainer's arguments say of loading and balancing, and what they must not say."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import Trainer
from transformers.trainer_utils import seed_worker

from bascule.data.loader import LoaderOptions
from bascule.data.samplers import ResumableSampler
from bascule.errors import ConfigError
from bascule.plan.step import Sync
from bascule.transformers.balance_config import BalanceConfig


def checked_dataset(trainer: Trainer, balance: BalanceConfig) -> Dataset[Any]:
    """Refuse settings that do not go with balancing; returns the dataset.

    Raises:
        ConfigError: Names the argument, and the nearest that does.
    """
    dataset = trainer.train_dataset
    refused = _refused_data(trainer) or _refused_arguments(trainer, balance)
    if refused is not None or dataset is None:
        raise ConfigError(refused or "")
    return dataset


def sync_of(trainer: Trainer, balance: BalanceConfig) -> Sync:
    """What the processes of a trainer wait for.

    Raises:
        ConfigError: Costs are to be learned of what is not timed.
    """
    meets_often = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    found: Sync = "microbatch" if meets_often else "step"
    sync = balance.sync or found
    if balance.learns and sync != "step" and trainer.args.gradient_accumulation_steps > 1:
        raise ConfigError(
            "BalanceConfig(learns=True) with processes that wait for each other in each of "
            f"{trainer.args.gradient_accumulation_steps} microbatches: the Trainer takes them all "
            "at once, so only steps can be timed; give a cost, or sync='step'"
        )
    return sync


def options_of(trainer: Trainer, balance: BalanceConfig) -> LoaderOptions:
    """The options of the loader, with those that the Trainer's arguments decide.

    Raises:
        ConfigError: The arguments and the options want unlike ends of an epoch.
    """
    args, options = trainer.args, balance.options
    ends = options.ends
    if ends == "drop_last":  # the default
        ends = "drop_last" if args.dataloader_drop_last else "pad_empty"
    elif args.dataloader_drop_last:
        raise ConfigError(
            f"LoaderOptions(ends={ends!r}) with dataloader_drop_last=True, which drops the end of "
            "an epoch: leave out one of them"
        )
    return replace(
        options,
        ends=ends,
        collate_fn=None if balance.pack else trainer.data_collator,
        pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
        timeout_s=float(args.ddp_timeout),
    )


def local_loader(
    trainer: Trainer, dataset: Dataset[Any], batch_size: int, *, is_grouped_anew: bool
) -> DataLoader[Any]:
    """A loader of the samples that this process reads.

    Args:
        trainer: Whose arguments say how.
        dataset: Of the samples.
        batch_size: Samples that are read at once.
        is_grouped_anew: Whether these are no microbatches, but what packs are filled from: then
            none is dropped because it is the last.
    """
    args = trainer.args
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
        batch_size=batch_size,
        sampler=sampler,
        drop_last=args.dataloader_drop_last and not is_grouped_anew,
        num_workers=num_workers,
        worker_init_fn=partial(seed_worker, num_workers=num_workers, rank=args.process_index),
        persistent_workers=args.dataloader_persistent_workers,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        prefetch_factor=args.dataloader_prefetch_factor,
        in_order=args.dataloader_in_order,
    )


def counts_labels(trainer: Trainer) -> bool:
    """Return whether the Trainer divides the loss by the labels of all processes."""
    return trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None


def fills_packs(balance: BalanceConfig) -> bool:
    """Whether samples are loaded until a pack is full, so that no one knows how many there are."""
    return balance.pack is not None and balance.options.unpack is None


def _refused_data(trainer: Trainer) -> str | None:
    args, dataset = trainer.args, trainer.train_dataset
    if dataset is None or isinstance(dataset, IterableDataset):
        return (
            "balancing deals the samples of a train_dataset with a length: for streams, use "
            "BalancedLoader in a training loop"
        )
    if not len(dataset):  # pyright: ignore[reportArgumentType]
        return "train_dataset has no sample: give one at least"
    if args.train_sampling_strategy not in ("random", "sequential"):
        return (
            f"train_sampling_strategy={args.train_sampling_strategy!r} groups samples by "
            'length, and so does balancing: use "random" or "sequential"'
        )
    return None


def _refused_arguments(trainer: Trainer, balance: BalanceConfig) -> str | None:
    args = trainer.args
    peers = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
    if peers > 1 or args.n_gpu > 1:
        return (
            "balancing takes every process of the Trainer for a data-parallel rank with one "
            "device: with tensor, context or sequence parallelism, use BalancedLoader with "
            "LoaderOptions(axis=...) in a training loop; instead of DataParallel, start with "
            "torchrun"
        )
    if counts_labels(trainer) and not args.average_tokens_across_devices:
        return (
            "average_tokens_across_devices=False divides the loss by the labels of one process, "
            "whose samples balancing chose: set it to True"
        )
    if fills_packs(balance) and args.max_steps <= 0:
        return (
            f"max_steps={args.max_steps} with BalanceConfig(pack=..): how many packs an epoch has "
            "is known only once its samples were read, and the learning rate depends on it; set "
            "max_steps"
        )
    return None
