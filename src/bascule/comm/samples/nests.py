"""Nested values: the tensors in them, and the same nest around other tensors."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def _is_tensor(nest: object) -> bool:
    return isinstance(nest, Tensor)


def mapped(
    nest: Any, change: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = _is_tensor
) -> Any:
    """The same nest with every tensor, or whatever else is a leaf, changed; all else as it is.

    Dicts, lists, tuples, named tuples, dataclasses (the outputs of transformers and diffusers among
    them), and distributions of diffusers, which are made from their `parameters`.
    """
    if is_leaf(nest):
        return change(nest)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        fields = [field.name for field in dataclasses.fields(nest) if field.init]
        changed = {name: mapped(getattr(nest, name), change, is_leaf) for name in fields}
        return dataclasses.replace(nest, **changed)
    make: Any = type(nest)
    if isinstance(nest, Mapping):
        return make({key: mapped(value, change, is_leaf) for key, value in nest.items()})
    if isinstance(nest, tuple | list):
        parts = [mapped(value, change, is_leaf) for value in nest]
        return make(*parts) if hasattr(nest, "_fields") else make(parts)
    parameters: Any = getattr(nest, "parameters", None)
    if isinstance(parameters, Tensor) and hasattr(nest, "deterministic"):
        return make(change(parameters), deterministic=nest.deterministic)  # pyright: ignore
    return nest


def leaves_of(nest: Any) -> list[Tensor]:
    """The tensors of a nest, in the order of `mapped`."""
    leaves: list[Tensor] = []

    def keep(leaf: Tensor) -> Tensor:
        leaves.append(leaf)
        return leaf

    mapped(nest, keep)
    return leaves


def rebuilt(nest: Any, leaves: Iterator[Tensor]) -> Any:
    """The same nest around the next of these tensors."""
    return mapped(nest, lambda _: next(leaves))


def joined(nests: Sequence[Any]) -> Any:
    """One nest whose tensors are those of all, one after another along their first dim."""
    columns = zip(*map(leaves_of, nests), strict=True)
    return rebuilt(nests[0], iter([torch.cat(column) for column in columns]))
