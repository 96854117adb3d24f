"""Values that a pipeline, its guiders and its schedulers keep from step to step.

Plain values are read with their places, and written to the same places on another rank.
Models are left out, as caches of steps are refused. So are objects of other libraries:
tokenizers know no steps, and accelerate's hooks belong to one device.
"""

import inspect
from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bascule.errors import ConfigError

_PLAIN = type(None), bool, int, float, str, bytes, Tensor, np.ndarray, np.generic
_FIXED = nn.Module, type, Enum, torch.device, torch.dtype
_OTHERS = "transformers", "tokenizers", "accelerate"
_CONFIG = "_internal_dict"  # of diffusers' objects, which no step changes

Place = list[str | int]


def read_kept(root: Any) -> list[tuple[Place, Any]]:
    """Return the plain values within an object, and their places; ConfigError names any other."""
    return list(_values(root, [], {id(root)}))


def write_kept(root: Any, kept: list[tuple[Place, Any]]) -> None:
    """Write values into the object of another rank; ConfigError if it has no such places."""
    for place, value in kept:
        owner = root
        try:
            for key in place[:-1]:
                owner = _items(owner)[key]
            _items(owner)[place[-1]] = value
        except (LookupError, TypeError) as error:
            name = type(owner).__name__
            raise ConfigError(f"a {name} does not keep the same on all ranks: {place}") from error


def _values(owner: Any, place: Place, seen: set[int]) -> Iterator[tuple[Place, Any]]:
    items = _items(owner)
    for key, value in enumerate(items) if isinstance(items, list) else items.items():
        is_others = type(value).__module__.partition(".")[0] in _OTHERS
        if key == _CONFIG or is_others or isinstance(value, _FIXED) or inspect.isroutine(value):
            continue
        if _is_plain(value):
            yield [*place, key], value
        elif isinstance(value, list | dict) or hasattr(value, "__dict__"):
            if id(value) not in seen:
                seen.add(id(value))
                yield from _values(value, [*place, key], seen)
        else:
            raise ConfigError(
                f"a {type(owner).__name__} keeps a {type(value).__name__} as {key!r}, which "
                "cannot travel: leave such requests where they start"
            )


def _items(owner: Any) -> Any:
    return owner if isinstance(owner, list | dict) else vars(owner)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if type(value) in (list, tuple) else isinstance(value, _PLAIN)
