"""transformers' Trainer by arguments alone: a callback deals the samples of each step again."""

import inspect
import time
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler
from transformers import DataCollatorWithFlattening, TrainerCallback

from bascule.data.gain import Gain
from bascule.errors import ConfigError
from bascule.plan.costs import Cost, TransformerCost
from bascule.plan.epoch import DealRules, StepShape
from bascule.plugins.dealt_batches import DealtBatches


@dataclass(eq=False)
class BalanceCallback(TrainerCallback):
    """Gives all processes of a Trainer the same work; each step keeps its samples and its loss.

    Attributes:
        lengths: Tokens of each sample. None: of its "input_ids"; all are read once, at the start.
        cost: Cost of a sample. None: of a transformer of the model's width and layers.
    """

    lengths: npt.ArrayLike | None = None
    cost: Cost | None = None
    _gain: Gain = field(default_factory=Gain, init=False)
    _shard: Any = field(default=None, init=False)  # of the Trainer, while its batches are dealt
    _plain: tuple[Any, Any] = field(default=(None, None), init=False)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put dealt batches in the place of the Trainer's own, until training ends."""
        model, loader = kwargs["model"], kwargs["train_dataloader"]
        shard: Any = getattr(loader, "batch_sampler", None)
        collate: Any = getattr(loader, "collate_fn", None)
        if args.world_size == 1:
            return
        is_known = isinstance(shard, BatchSamplerShard) and shard.even_batches
        if not is_known or shard.split_batches or type(shard.batch_sampler) is not BatchSampler:
            raise ConfigError(
                "--report_to bascule deals the batches of a dataset with a length, with "
                "even_batches and without split_batches, dispatch_batches and batch_rebalance: "
                "set these so, or use BalancedTrainerMixin"
            )
        counts_labels = _counts_labels(model)
        if counts_labels and not args.average_tokens_across_devices:
            raise ConfigError(
                "average_tokens_across_devices=False divides the loss by the labels of one "
                "process, whose samples balancing chose: set it to True"
            )
        collate = getattr(collate, "data_collator", collate)  # without unused columns
        rules = DealRules(
            StepShape(args.train_batch_size, shard.num_processes, args.gradient_accumulation_steps),
            sync="microbatch" if args.fsdp or args.deepspeed else "step",
            even_counts=not counts_labels,  # else the loss is the mean of a batch
            padded=not isinstance(collate, DataCollatorWithFlattening),
        )
        lengths, cost = self.lengths, self.cost or _cost(model)
        if lengths is None:
            lengths = [len(sample["input_ids"]) for sample in loader.dataset]
        self._shard, self._plain = shard, (shard.batch_sampler, shard.batch_size)
        shard.batch_sampler = DealtBatches(shard.batch_sampler, lengths, cost, rules)
        if counts_labels:
            shard.batch_size = None  # batches of any size
        self._gain = Gain()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the Trainer its own batches back."""
        if self._shard is not None:
            self._shard.batch_sampler, self._shard.batch_size = self._plain
            self._shard = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step that ends now."""
        if self._shard is not None:
            steps = self._shard.batch_sampler.steps
            steps_an_epoch = -(-len(self._shard) // args.gradient_accumulation_steps)
            place = (state.global_step - 1) % steps_an_epoch
            if place < len(steps):
                before, after, mean = steps[place]
                self._gain.add(before, after, mean, time.perf_counter())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave out the time of saving, evaluating, and between epochs."""
        self._gain.pause()

    on_evaluate = on_epoch_begin = on_save

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add what balancing does to the log of training, and for the callbacks after this one."""
        if self._shard is not None and "loss" in kwargs["logs"]:
            did = {f"bascule_{name}": value for name, value in self._gain.metrics().items()}
            kwargs["logs"].update(did)
            state.log_history[-1].update(did)


def _counts_labels(model: Any) -> bool:
    """Return True if the model divides its loss by the labels of all processes, as the Trainer."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kinds = [p.kind for p in inspect.signature(base.forward).parameters.values()]
    return getattr(base, "accepts_loss_kwargs", inspect.Parameter.VAR_KEYWORD in kinds)


def _cost(model: Any) -> TransformerCost:
    """Return the cost of a transformer of the model's width and layers."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    width, depth = (getattr(text, name, None) for name in ("hidden_size", "num_hidden_layers"))
    if not width or not depth:
        raise ConfigError(
            f"{type(model).__name__} has no config with hidden_size and num_hidden_layers: give a "
            "cost, callbacks=[BalanceCallback(cost=..)] in place of --report_to bascule"
        )
    return TransformerCost(width, num_layers=depth)
