"""Positions of the samples of a pack, as the model itself counts them.

Legend of shapes: T tokens of a pack.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bascule.data.packs import unpack
from bascule.errors import ConfigError

_GRIDS = ("image_grid_thw", "video_grid_thw")
_TAKEN = (*_GRIDS, "second_per_grid_ts")


def positions_of_pack(packed: Mapping[str, Any], model: nn.Module) -> Tensor:
    """What a model finds samples by, and turns queries and keys by.

    Models with positions in time, height and width (Qwen-VL and what is made like it) count them
    with their `get_rope_index`, here of each sample alone; and tell samples apart by a fourth row.

    Args:
        packed: Of `make_pack`.
        model: Wrapped or not.

    Returns:
        (1, T), or (4, 1, T) of a model that has three: places in the sample, then these.

    Raises:
        ConfigError: A sample with images or videos has no ``mm_token_type_ids``.
    """
    places = packed["positions"]
    found = (getattr(part, "get_rope_index", None) for part in model.modules())
    index_of = next((one for one in found if callable(one)), None)
    if index_of is None:
        return places[None]
    parts = [_of_sample(sample, index_of) for sample in unpack(packed)]
    num_padding = places.shape[0] - sum(part.shape[2] for part in parts)
    padding = places[places.shape[0] - num_padding :].expand(3, 1, -1)
    return torch.cat([places.expand(1, 1, -1), torch.cat([*parts, padding], dim=2)])


def _of_sample(sample: Mapping[str, Any], index_of: Any) -> Tensor:
    """(3, 1, tokens of the sample)."""
    ids, types = sample["input_ids"], sample.get("mm_token_type_ids")
    if not any(sample.get(name) is not None and len(sample[name]) for name in _GRIDS):
        return torch.arange(len(ids), device=ids.device).expand(3, 1, -1)
    if types is None:
        raise ConfigError(
            "a sample with images or videos has no mm_token_type_ids, by which its model counts "
            "positions: give what the processor of the model gives"
        )
    given = {name: sample[name] for name in _TAKEN if sample.get(name) is not None}
    positions, _ = index_of(ids[None], mm_token_type_ids=types[None], **given)
    return positions
