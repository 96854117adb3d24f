"""State that a pipeline, its guiders and its schedulers carry from step to step.

It is read as plain values with their paths, and written to the same paths on another rank. Models
are left out, as caches of steps are refused. So are objects of other libraries: tokenizers have no
state of steps, and accelerate's hooks belong to one device.
"""

import copy
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
_STATELESS_LIBRARIES = "transformers", "tokenizers", "accelerate"
_CONFIG = "_internal_dict"  # of diffusers' objects; no step changes it

Path = list[str | int]


def read_state(root: Any) -> list[tuple[Path, Any]]:
    """Return paths and plain values within an object; ConfigError names a value of another kind."""
    return list(_values(root, [], {id(root)}))


def write_state(root: Any, state: list[tuple[Path, Any]]) -> None:
    """Write values to the same paths of another rank's object; ConfigError if a path is missing."""
    for path, value in state:
        owner = root
        try:
            for key in path[:-1]:
                owner = _items(owner)[key]
            _items(owner)[path[-1]] = value
        except (LookupError, TypeError) as error:
            name = type(owner).__name__
            raise ConfigError(f"a {name} lacks {path} on this rank: another rank has it") from error


def with_own_state(value: Any, made: dict[int, Any]) -> Any:
    """Return a copy of an object with state of its own, and the same models; `made` is for copies.

    Tensors are shared: steps replace them.
    """
    if id(value) in made:
        return made[id(value)]
    is_plain = isinstance(value, Tensor | dict | list | tuple) or not hasattr(value, "__dict__")
    if _is_stateless(value) or (is_plain and type(value) not in (list, dict)):
        return value
    twin = made[id(value)] = copy.copy(value)
    items = _items(twin)
    for key, entry in list(enumerate(items) if isinstance(items, list) else items.items()):
        if key != _CONFIG:
            items[key] = with_own_state(entry, made)
    return twin


def _is_stateless(value: Any) -> bool:
    is_of_library = type(value).__module__.partition(".")[0] in _STATELESS_LIBRARIES
    return is_of_library or isinstance(value, _FIXED) or inspect.isroutine(value)


def _values(owner: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    items = _items(owner)
    for key, value in enumerate(items) if isinstance(items, list) else items.items():
        if key == _CONFIG or _is_stateless(value):
            continue
        if _is_plain(value):
            yield [*path, key], value
        elif isinstance(value, list | dict) or hasattr(value, "__dict__"):
            if id(value) not in seen:
                seen.add(id(value))
                yield from _values(value, [*path, key], seen)
        else:
            what = f"a {type(owner).__name__} keeps a {type(value).__name__} as {key!r}"
            raise ConfigError(f"{what}, which cannot be sent: keep such requests where they start")


def _items(owner: Any) -> Any:
    return owner if isinstance(owner, list | dict) else vars(owner)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if type(value) in (list, tuple) else isinstance(value, _PLAIN)
