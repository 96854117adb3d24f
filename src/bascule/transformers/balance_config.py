"""What a user says of balancing to Hugging Face's Trainer, and what its own arguments say."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bascule.data.loader import DEFAULT_OPTIONS, LoaderOptions
from bascule.data.packs import Pack
from bascule.errors import ConfigError
from bascule.plan.checks import of_type
from bascule.plan.costs import Cost
from bascule.plan.step import Sync, check_sync

_DECIDED = {
    "axis": "every process is a data-parallel rank; use BalancedLoader in a training loop",
    "batch_size": "set per_device_train_batch_size of the TrainingArguments",
    "collate_fn": "give the Trainer a data_collator",
    "pin_memory": "set dataloader_pin_memory of the TrainingArguments",
    "timeout_s": "set ddp_timeout of the TrainingArguments",
}
"""Options that follow from the Trainer's arguments, and what to give where they are wanted."""


@dataclass(frozen=True, slots=True)
class BalanceConfig:
    """How a Trainer's samples are balanced. All processes are given the same.

    Attributes:
        cost: Predicts what a sample of so many tokens costs. May be None if it `learns`: then
            samples cost their tokens until it knows better.
        length_fn: Tokens of a sample. Default: those of its "input_ids".
        sync: What processes wait for, as for `plan_step`. None: each "microbatch" with FSDP and
            DeepSpeed, else (DDP averages once) the "step".
        pack: Makes each microbatch one pack, as for `BalancedLoader`; an integer is its tokens. The
            model gets what `BalancedTrainerMixin.packed_inputs` makes of it, ``data_collator`` is
            for evaluation alone, and ``max_steps`` says when training ends.
        learns: Whether costs are learned from the steps of the run (`CostTracker`, which the
            trainer has as `cost_tracker`), and saved with its checkpoints.
        options: How samples are weighed and moved. `weight_fn` is for losses that the Trainer does
            not divide by ``num_items_in_batch``. The Trainer decides on axis, batch_size,
            collate_fn, pin_memory and timeout_s, by its own arguments, and on `ends` unless it is
            "pad_empty" or, with packs, "finish".

    Raises:
        ConfigError: One is of a wrong type, or in the options what the Trainer's arguments say.
    """

    cost: Cost | None = None
    length_fn: Callable[[Any], int] | None = None
    sync: Sync | None = None
    pack: Pack | int | None = None
    learns: bool = False
    options: LoaderOptions = DEFAULT_OPTIONS

    def __post_init__(self) -> None:
        of_type("options", self.options, LoaderOptions, "LoaderOptions(..)")
        for name in ("cost", "length_fn"):
            value = getattr(self, name)
            if not callable(value) and value is not None:
                raise ConfigError(f"BalanceConfig({name}={value!r}): must be a function")
        if self.cost is None and of_type("learns", self.learns, bool, "True or False") is False:
            raise ConfigError(
                "BalanceConfig(cost=None): give a cost, as TransformerCost(d_model, "
                "num_layers=..), or learns=True"
            )
        if self.sync is not None:
            check_sync(self.sync)
        if not isinstance(self.pack, Pack | None):
            object.__setattr__(self, "pack", Pack(tokens=self.pack))
        if self.options.ends == "finish" and self.pack is None:
            raise ConfigError(
                "LoaderOptions(ends='finish') in a BalanceConfig without a pack: a process without "
                "samples must still run the model, since the others wait for its gradients, and "
                "nothing but a pack can be padding alone; give a pack, or ends='pad_empty'"
            )
        for name, advice in _DECIDED.items():
            value = getattr(self.options, name)
            if value != getattr(DEFAULT_OPTIONS, name):
                raise ConfigError(f"LoaderOptions({name}={value!r}) in a BalanceConfig: {advice}")
