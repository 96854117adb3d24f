"""For NeMo AutoModel's YAML: ``recipe: bascule.plugins.nemo_recipe.BalancedFinetuneRecipe``."""

# pyright: reportMissingImports=false

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy.typing as npt
from nemo_automodel.components.datasets.loader import DataloaderConfig
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

from bascule.data import BalancedSampler, SamplerOptions
from bascule.errors import ConfigError
from bascule.machine.costs import Cost, TransformerCost


class EpochAfterEpoch(BalancedSampler):
    """A balanced batch sampler that sets the next epoch at the end of each epoch."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from super().__iter__()
        self.set_epoch(self.state_dict()["epoch"] + 1)


@dataclass
class BalancedBatchSampler:
    """A `BatchSamplerConfig` of NeMo, for losses divided by the number of labels on all ranks."""

    lengths: npt.ArrayLike  # tokens of each sample
    cost: Cost
    batch_size: int  # mean samples of a batch
    global_batch_size: int
    seed: int
    options: SamplerOptions

    def build(self, *, dataset_len: int, rank: int, world_size: int) -> BalancedSampler:
        """Return the batch sampler of a rank."""
        place: Any = {"rank": rank, "num_ranks": world_size, "seed": self.seed}
        accumulate = max(self.global_batch_size // (self.batch_size * world_size), 1)
        place |= {"batch_size": self.batch_size, "accumulate": accumulate}
        return EpochAfterEpoch(self.lengths, self.cost, options=self.options, **place)


@dataclass
class BalancedDataloaderConfig(DataloaderConfig):
    """NeMo's loader configuration, with a `BalancedBatchSampler` for its dataset."""

    cost: Cost = field(default_factory=TransformerCost)
    global_batch_size: int = 1

    def _build_dataset(self, **kwargs: Any) -> Any:
        dataset: Any = super()._build_dataset(**kwargs)
        if self.packing is not None or not hasattr(dataset, "__len__"):
            fix = "leave out packed_sequence and streaming"
            raise ConfigError(f"the recipe of bascule needs a dataset with a length: {fix}")
        shuffle, padded = self.shuffle is not False, not self.emits_thd
        self.batch_sampler_config = BalancedBatchSampler(
            [len(dataset[index]["input_ids"]) for index in range(len(dataset))],
            self.cost,
            self.batch_size or 1,
            self.global_batch_size,
            self.seed,
            SamplerOptions(shuffle=shuffle, padded=padded, even_counts=False),
        )
        return dataset


class BalancedFinetuneRecipe(TrainFinetuneRecipeForNextTokenPrediction):
    """NeMo's recipe, with even work for the data-parallel ranks in each step.

    The YAML's section ``bascule: {d_model: .., num_layers: ..}`` gives the cost model.
    """

    def setup(self) -> None:
        """Set up the recipe with a balanced loader."""
        plain, cost = self.cfg.dataloader, self.cfg.get("bascule", None)
        self.cfg.dataloader = BalancedDataloaderConfig(
            **{option.name: getattr(plain, option.name) for option in fields(DataloaderConfig)},
            cost=TransformerCost(**cost.to_dict()) if cost else TransformerCost(),
            global_batch_size=self.cfg.get("step_scheduler.global_batch_size", 1),
        )
        super().setup()
