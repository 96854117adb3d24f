"""What modules are called with: names of arguments, and tensors among them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn


def parameters_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a module, in order; what wraps one passes its arguments on."""
    return tuple(_parameters(module))


def required_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a module without which it cannot be called."""
    required = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return tuple(
        name
        for name, one in _parameters(module).items()
        if one.default is one.empty and one.kind in required
    )


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    parameters = inspect.signature(module.forward).parameters
    within = list(module.children())
    passes_on = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
    return _parameters(within[0]) if passes_on and len(within) == 1 else parameters


def changed(
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    change: Callable[[str, Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a module, each as `change` makes it of its name and value."""
    others = [f"argument {place}" for place in range(len(names), len(args))]
    named = [*names[: len(args)], *others]
    return (
        tuple(change(name, value) for name, value in zip(named, args, strict=True)),
        {name: change(name, value) for name, value in kwargs.items()},
    )


def holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or holds one in containers."""
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return any(holds_tensors(one) for one in value)
    return isinstance(value, Tensor)
