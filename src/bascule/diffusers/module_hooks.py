"""Torch hooks of modules that copies and pickles of these modules do not have."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class Hook:
    """What copies and pickles of a model have in its place does nothing: they are not split."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self._act = act

    def __call__(self, *args: Any) -> Any:
        """What torch calls."""
        return self._act(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Gone, ()


class _Gone:
    """The hook of a copy."""

    def __call__(self, *args: Any) -> None: ...


Register = Callable[[nn.Module], RemovableHandle]


def before(act: Callable[..., Any], **options: Any) -> Register:
    """What adds a hook before a module's forward; the options are torch's."""
    return lambda module: module.register_forward_pre_hook(Hook(act), **options)


def after(act: Callable[..., Any], **options: Any) -> Register:
    """What adds a hook after a module's forward; the options are torch's."""
    return lambda module: module.register_forward_hook(Hook(act), **options)
