"""Choose what a loader balances beside an encoder: the sum of both parts, or each on its own."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bascule.checks import choice
from bascule.encoders.encoder import BalancedEncoder, Installed
from bascule.encoders.items import Item
from bascule.errors import ConfigError
from bascule.machine.costs import Cost, PolynomialCost

_log = logging.getLogger(__name__)
_FINE = 2**20  # units of work in a sample of 1,024 tokens


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Arguments of a BalancedLoader, and the encoder in the model where it has its own cost."""

    cost: Cost
    length_fn: Callable[[Any], int]
    installed: Installed | None


def step_costs(
    model: nn.Module,
    encoder: BalancedEncoder,
    *,
    cost: Cost,
    length_fn: Callable[[Any], int] = lambda sample: len(sample["input_ids"]),
    items_of: Callable[[Any], Sequence[Item]] | None = None,
    costs: Literal["auto", "one", "two"] = "auto",
) -> StepCosts:
    """Return what the loader balances; install the encoder if it has a cost of its own.

    Ranks of a sharded model wait in each module, so each part is balanced ("two"). Ranks of DDP
    wait once a step, so the loader balances the sum of both parts ("one").

    Args:
        model: The whole model, sharded or wrapped.
        encoder: Of a part of the model.
        cost: Predicts a sample's forward pass in the rest of the model, in the encoder's unit.
        length_fn: Counts a sample's tokens in the model. Default: the length of its "input_ids".
        items_of: Returns the encoder's items in a sample. Default: photos and videos of Qwen-VL.
        costs: Another choice than "auto" that is predicted to be slower is logged once.
    """
    choice("costs", costs, "auto", "one", "two")
    waits = any(isinstance(x, FSDPModule | FullyShardedDataParallel) for x in model.modules())
    waits |= any(isinstance(x, DTensor) for x in model.parameters())
    best = "two" if waits else "one"
    if costs == "auto" and not waits and not isinstance(model, DistributedDataParallel):
        _warn(
            "step_costs cannot tell where ranks wait for each other, and takes one cost as for "
            'DDP: wrap or shard the model before, or give costs="one" or costs="two"'
        )
    if costs not in ("auto", best):
        where = "in each module of a sharded model" if waits else "once a step, as under DDP"
        _warn(f'step_costs(costs="{costs}"): ranks wait {where}, so costs="{best}" is faster')
    if (best if costs == "auto" else costs) == "two":
        return StepCosts(cost, length_fn, encoder.install(model))
    find, unit = items_of or functools.partial(_photos, encoder), float(cost(1024)) / _FINE

    def work(sample: Any) -> int:
        return max(1, round((float(cost(length_fn(sample))) + encoder.work(find(sample))) / unit))

    return StepCosts(PolynomialCost(0.0, unit, 0.0), work, None)


@functools.cache
def _warn(text: str) -> None:
    _log.warning(text)


def _photos(encoder: BalancedEncoder, sample: Mapping[str, Any]) -> list[Item]:
    if encoder.table.packed != ("hidden_states",):
        raise ConfigError("no table knows where samples have this encoder's items: give items_of")
    items = list[Item]()
    for patches, grid in (("", "image"), ("_videos", "video")):
        if (values := sample.get(f"pixel_values{patches}")) is not None:
            parts = {"hidden_states": values, "grid_thw": sample[f"{grid}_grid_thw"]}
            items += encoder.table.cut(parts)
    return items
