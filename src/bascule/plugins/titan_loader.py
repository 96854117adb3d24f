"""A loader for torchtitan that moves documents, so that ranks spend equal time on attention."""

# pyright: reportMissingImports=false

import itertools
import logging
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader

from bascule.data import BalancedLoader, LoaderOptions
from bascule.errors import ConfigError
from bascule.machine.costs import TransformerCost
from bascule.plan.limits import Limits

logger = logging.getLogger(__name__)

_IGNORED = -100  # torchtitan's IGNORE_INDEX
_MULTIPLE = 128  # to which rows that changed are padded: a block of flex attention
_MIN_GAIN = 0.02  # share of a step, beside the padding


class BalancedDataLoader(BaseDataLoader):
    """A loader that deals the documents of another loader over the data-parallel ranks.

    A batch is one row (1, T) of documents, which "positions" separate, for flex and varlen
    attention. The loss does not change, because torchtitan divides its sum by the labels of all
    ranks. Loaded rows have equal tokens; a step keeps them if moving documents gains too little.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """The loader, the model's size, and a rank's most tokens over its loaded tokens.

        `gamma` is as in `TransformerCost`; 0.5, because causal attention computes half the pairs.
        """

        inner: BaseDataLoader.Config = field(default_factory=BaseDataLoader.Config)
        d_model: int = 4096
        num_layers: int = 32
        gamma: float = 0.5
        room: float = 1.25

    def __init__(self, config: Config, **runtime: Any) -> None:
        rank, num_ranks = runtime["dp_rank"], runtime["dp_world_size"]
        if num_ranks != dist.get_world_size():
            what = f"dp_world_size={num_ranks} of {dist.get_world_size()} processes"
            raise ConfigError(f"{what}: use BalancedDataLoader only with data parallelism")
        tokens = runtime["seq_len"] * runtime["local_batch_size"]
        self._name, self._is_silent = f"dp_rank_{rank}", rank > 0
        self._min_gain = min(_MIN_GAIN + (_MULTIPLE - 1) / tokens, 1.0)
        self._loader = BalancedLoader(
            config.inner.build(**runtime),
            cost=TransformerCost(config.d_model, gamma=config.gamma, num_layers=config.num_layers),
            length_fn=lambda document: len(document["input"]),
            options=LoaderOptions(
                unpack=documents,
                as_loaded=row_of,
                collate_fn=partial(row, tokens),
                limits=Limits(tokens=int(config.room * tokens)),
                min_gain=self._min_gain,
            ),
        )

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for batch in self._loader:
            if not (self._is_silent or batch.verdict.applied):
                self._is_silent = True
                logger.info(
                    "bascule leaves the rows of step %d as they are, and of all others where "
                    "moving documents gains less than %.1f%%: here it could gain %.1f%%",
                    batch.step,
                    100.0 * self._min_gain,
                    100.0 * (1.0 - batch.verdict.after / batch.verdict.before),
                )
            yield batch.data

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's place in the data, as torchtitan saves it."""
        return {self._name: pickle.dumps(self._loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore this rank's place in the data."""
        if state_dict:
            self._loader.load_state_dict(pickle.loads(state_dict[self._name]))


def documents(item: tuple[dict[str, Tensor], Tensor]) -> list[dict[str, Tensor]]:
    """Split a row (S,) into documents with their labels, without positions."""
    fields = item[0] | {"labels": item[1]}
    starts = torch.nonzero(fields.pop("positions") == 0).flatten().tolist()
    bounds = [*([0] if starts[:1] != [0] else []), *starts, len(item[1])]
    parts = itertools.pairwise(bounds)
    return [{name: value[a:b] for name, value in fields.items()} for a, b in parts]


def row_of(item: tuple[dict[str, Tensor], Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Return a loaded row (S,) as (1, S)."""
    return {name: value[None] for name, value in item[0].items()}, item[1][None]


def row(loaded: int, samples: list[dict[str, Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    """Join documents to a row (1, T), padded without labels unless it has `loaded` tokens."""
    sizes = [len(sample["labels"]) for sample in samples]
    num = 0 if sum(sizes) == loaded else -sum(sizes) % _MULTIPLE
    padding = {name: torch.zeros(num, dtype=sample.dtype) for name, sample in samples[0].items()}
    parts = [*samples, padding | {"labels": torch.full((num,), _IGNORED)}]
    fields = {name: torch.cat([part[name] for part in parts])[None] for name in padding}
    fields["positions"] = torch.cat([torch.arange(size) for size in (*sizes, num)])[None]
    return fields, fields.pop("labels")
