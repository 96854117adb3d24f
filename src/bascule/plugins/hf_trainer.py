"""A callback for transformers' Trainer that deals the samples of each step evenly."""

import inspect
from typing import Any

import numpy.typing as npt
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler
from transformers import DataCollatorWithFlattening

from bascule.errors import ConfigError
from bascule.machine.costs import Cost, TransformerCost
from bascule.plan.epoch import DealRules, StepShape
from bascule.plugins.dealt_batches import DealtBatches
from bascule.plugins.gain_log import GainLog


class BalanceCallback(GainLog):
    """A callback that gives processes even work; a step keeps its samples and its loss.

    Args:
        lengths: Tokens of each sample. None: read the lengths of all "input_ids" at the start.
        cost: Cost model of samples. None: a transformer with the model's width and layers.
    """

    def __init__(self, lengths: npt.ArrayLike | None = None, cost: Cost | None = None) -> None:
        super().__init__()
        self._lengths, self._cost = lengths, cost
        self._replaced: tuple[Any, Any, Any] = (None, None, None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Replace the Trainer's batch sampler until training ends."""
        super().on_train_begin(args, state, control)
        model, loader = kwargs["model"], kwargs["train_dataloader"]
        shard: Any = getattr(loader, "batch_sampler", None)
        if args.world_size == 1:
            return
        is_even = isinstance(shard, BatchSamplerShard) and shard.even_batches
        if not is_even or shard.split_batches or type(shard.batch_sampler) is not BatchSampler:
            what = "--report_to bascule needs a dataset with a length, and even_batches without"
            others = "split_batches, dispatch_batches and batch_rebalance"
            raise ConfigError(f"{what} {others}; else use BalancedTrainerMixin")
        collate: Any = getattr(loader.collate_fn, "data_collator", loader.collate_fn)
        lengths = self._lengths
        if lengths is None:
            lengths = [len(sample["input_ids"]) for sample in loader.dataset]
        padded = not isinstance(collate, DataCollatorWithFlattening)
        rules = rules_of(args, model, num_ranks=shard.num_processes, padded=padded)
        plain = shard.batch_sampler
        self.dealt = DealtBatches(plain, lengths, self._cost or cost_of(model), rules)
        self._replaced = shard, plain, shard.batch_size
        shard.batch_sampler, shard.batch_size = self.dealt, None  # batches of any size

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the Trainer's batch sampler."""
        if self.dealt is not None:
            shard, shard.batch_sampler, shard.batch_size = self._replaced
            self.dealt = None


def rules_of(args: Any, model: Any, *, num_ranks: int, padded: bool) -> DealRules:
    """Return the rules by which samples may be dealt, given a Trainer's arguments and model."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kinds = [parameter.kind for parameter in inspect.signature(base.forward).parameters.values()]
    # The Trainer decides in the same way whether to divide the loss by all labels.
    counts_labels = getattr(base, "accepts_loss_kwargs", inspect.Parameter.VAR_KEYWORD in kinds)
    if counts_labels and not args.average_tokens_across_devices:
        what = "average_tokens_across_devices=False divides the loss by the labels of one process"
        raise ConfigError(f"{what}, whose samples balancing chose: set it to True")
    return DealRules(
        StepShape(args.train_batch_size, num_ranks, args.gradient_accumulation_steps),
        sync="microbatch" if args.fsdp or args.deepspeed else "step",
        even_counts=not counts_labels,  # else the loss is a mean over each batch
        padded=padded,
    )


def cost_of(model: Any) -> TransformerCost:
    """Return a cost model with the width and the number of layers of a model's config."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    width, depth = (getattr(text, name, None) for name in ("hidden_size", "num_hidden_layers"))
    if not width or not depth:
        what = f"{type(model).__name__} has no config with hidden_size and num_hidden_layers"
        fix = "give callbacks=[BalanceCallback(cost=..)] in place of --report_to bascule"
        raise ConfigError(f"{what}: {fix}")
    return TransformerCost(width, num_layers=depth)
