"""Which of diffusers' step caches may be used by ranks that share a sequence.

A cache leaves out blocks, or their attention, and takes what an earlier step gave. Each rank has
that for its own tokens, which is right; but all must leave out the same, or some wait for others.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from bascule.errors import ConfigError
from bascule.integrations.diffusers.tables import SplitTable

# Names of hooks that count steps.
_BY_STEP = (
    "pyramid_attention_broadcast",
    "taylorseer_cache",
    "mag_cache_leader_block_hook",
    "mag_cache_block_hook",
)
_BY_VIDEO = "sea_cache_root"


def uses_cache(model: nn.Module, blocks: Iterable[nn.Module], table: SplitTable) -> bool:
    """Whether a cache may leave out blocks of a model in this forward pass.

    Raises:
        ConfigError: It decides by a rank's own tokens.
    """
    is_enabled = bool(getattr(model, "is_cache_enabled", False))
    found = _hooks_of(model.modules() if is_enabled else (model, *blocks))
    for name, hook in found.items():
        if not _is_alike(name, hook, table):
            raise ConfigError(
                f"{type(model).__name__} over ranks, with a cache ({type(hook).__name__}) that "
                "decides by the tokens of a rank what it leaves out, so that ranks may wait for "
                "each other: call disable_cache(), or take one that counts steps, as TaylorSeer, "
                "PyramidAttentionBroadcast and MagCache do"
            )
    return bool(found)


def _is_alike(name: str, hook: Any, table: SplitTable) -> bool:
    """Whether a hook decides alike on all ranks."""
    if name == _BY_VIDEO:  # by the video that the model is given, if it looks at one
        is_cut = "hidden_states" in table.inputs.get("", {})
        return not is_cut or hook.raw_vision_callback is None
    calibrates = getattr(getattr(hook, "config", None), "calibrate", False)
    return name in _BY_STEP and not calibrates


def _hooks_of(modules: Iterable[nn.Module]) -> dict[str, Any]:
    """The hooks of diffusers that keep something from step to step, by name."""
    registries = (module.__dict__.get("_diffusers_hook") for module in modules)
    return {
        name: hook
        for registry in registries
        if registry is not None
        for name, hook in registry.hooks.items()
        if hook._is_stateful
    }
