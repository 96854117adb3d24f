"""Step caches of diffusers for guidance groups, each of which sees some of the branches only.

A cache keeps what earlier steps gave: one for each `cache_context` of the pipeline, or one for all.
Groups leave out what one process leaves out where they keep, and look at, the same as it does.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from bascule.errors import ConfigError

_SEE_ALL = "faster_cache", "fbc_", "sea_cache"
"""Beginnings of names of hooks that look at all samples of a batch together."""


def branch_of(
    model: nn.Module, blocks: Iterable[nn.Module], num_parts: int, num_groups: int
) -> str | None:
    """The branch that a call is for, as a cache knows it; None without a cache.

    Args:
        model: What is called.
        blocks: Its blocks.
        num_parts: Groups that share the samples of the call.
        num_groups: All of them; where these are more, calls go to groups in turn.

    Raises:
        ConfigError: Groups would keep something else than one process.
    """
    is_enabled = bool(getattr(model, "is_cache_enabled", False))
    for name, hook in _stateful(model.modules() if is_enabled else (model, *blocks)):
        manager = getattr(hook, "state_manager", None)
        if num_parts > 1 and name.startswith(_SEE_ALL):
            raise _refusal(model, hook, "decides by all samples of a batch, which groups share")
        if num_parts < num_groups and manager is None:
            raise _refusal(model, hook, "keeps one state for all guidance branches")
        context = None if manager is None else manager._context
        if context is not None:
            return context.name
    return None


def _stateful(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Any]]:
    """The hooks of diffusers that keep something from step to step, by name."""
    for module in modules:
        registry = module.__dict__.get("_diffusers_hook")
        for name, hook in () if registry is None else registry.hooks.items():
            if hook._is_stateful:
                yield name, hook


def _refusal(model: nn.Module, hook: Any, why: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} with guidance over ranks and a cache ({type(hook).__name__}) that "
        f"{why}: call disable_cache(), use guidance_degree=1, or take TaylorSeer or MagCache"
    )
