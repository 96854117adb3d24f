"""NeMo AutoModel by its YAML: ``recipe: bascule.plugins.nemo_recipe.BalancedFinetuneRecipe``."""

# pyright: reportMissingImports=false

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy.typing as npt
from nemo_automodel.components.datasets.loader import DataloaderConfig
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

from bascule.data import BalancedSampler, SamplerOptions
from bascule.errors import ConfigError
from bascule.plan.costs import Cost, TransformerCost


class EpochAfterEpoch(BalancedSampler):
    """A balanced batch sampler that goes on to the next epoch by itself."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from super().__iter__()
        self.set_epoch(self.state_dict()["epoch"] + 1)


@dataclass
class BalancedBatchSampler:
    """A `BatchSamplerConfig`: batches of like work on all data-parallel ranks.

    Attributes:
        lengths: Tokens of each sample.
        cost: Cost of a sample.
        batch_size: Samples of a batch, in the mean: the loss must be divided by all labels.
        accumulate: Batches of an optimiser step on a rank.
        seed: Seed of the order.
        padded: The collator pads a batch to its longest sample.
    """

    lengths: npt.ArrayLike
    cost: Cost
    batch_size: int = 1
    accumulate: int = 1
    seed: int = 42
    shuffle: bool = True
    padded: bool = True

    def build(self, *, dataset_len: int, rank: int, world_size: int) -> BalancedSampler:
        """Return the batch sampler of a rank."""
        sampler = EpochAfterEpoch(
            self.lengths,
            self.cost,
            batch_size=self.batch_size,
            num_ranks=world_size,
            rank=rank,
            seed=self.seed,
            accumulate=self.accumulate,
            options=SamplerOptions(shuffle=self.shuffle, padded=self.padded, even_counts=False),
        )
        return sampler


@dataclass
class BalancedDataloaderConfig(DataloaderConfig):
    """The loader of NeMo with a `BalancedBatchSampler` for the samples of its dataset."""

    cost: Cost = field(default_factory=TransformerCost)
    global_batch_size: int = 1

    def build(self, *, dp_rank: int, dp_world_size: int, **kwargs: Any) -> Any:
        """Build the loader of a rank."""
        self._num_ranks = dp_world_size
        return super().build(dp_rank=dp_rank, dp_world_size=dp_world_size, **kwargs)

    def _build_dataset(self, **kwargs: Any) -> Any:
        dataset: Any = super()._build_dataset(**kwargs)
        if self.packing is not None or not hasattr(dataset, "__len__"):
            raise ConfigError(
                "the recipe of bascule deals samples of a dataset with a length: leave out "
                "packed_sequence, and streaming"
            )
        self.batch_sampler_config = BalancedBatchSampler(
            [len(dataset[index]["input_ids"]) for index in range(len(dataset))],
            self.cost,
            batch_size=self.batch_size or 1,
            accumulate=max(self.global_batch_size // ((self.batch_size or 1) * self._num_ranks), 1),
            seed=self.seed,
            shuffle=self.shuffle is not False,
            padded=not self.emits_thd,
        )
        return dataset


class BalancedFinetuneRecipe(TrainFinetuneRecipeForNextTokenPrediction):
    """NeMo's recipe, whose data-parallel ranks have the same work in each step.

    A section ``bascule: {d_model: .., num_layers: ..}`` of the YAML gives the cost.
    """

    def setup(self) -> None:
        """Set all up as NeMo does, with the balanced loader."""
        cfg, plain = self.cfg, self.cfg.dataloader
        own = {one.name: getattr(plain, one.name) for one in fields(DataloaderConfig)}
        own["global_batch_size"] = cfg.get("step_scheduler.global_batch_size", 1)
        cost = cfg.get("bascule", None)
        own["cost"] = TransformerCost(
            **(cost.to_dict() if hasattr(cost, "to_dict") else cost or {})
        )
        cfg.dataloader = BalancedDataloaderConfig(**own)
        super().setup()
