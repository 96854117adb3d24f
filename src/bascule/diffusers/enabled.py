"""The context parallelism of diffusers: its configuration as arguments, and its split set aside."""

import importlib
from contextlib import ExitStack
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bascule.errors import ConfigError

_KNOWN = {"ring_degree", "ulysses_degree", "mesh"}
# Any lengths and heads are exact, and a ring merges in float32, whatever these say.
_KNOWN |= {"convert_to_fp32", "rotate_method", "ulysses_anything", "ring_anything"}


@runtime_checkable
class ContextParallel(Protocol):
    """A `ContextParallelConfig` of diffusers: degrees, perhaps with a mesh that has them."""

    ring_degree: int
    ulysses_degree: int
    mesh: DeviceMesh | None


def check_known(config: ContextParallel) -> None:
    """Refuse a configuration with an option that is unknown here and not at its default."""
    for name, value in vars(config).items():
        if name not in _KNOWN and name[0] != "_" and value != getattr(type(config), name, None):
            wrong = f"parallelize does not know {type(config).__name__}({name}={value!r})"
            raise ConfigError(f"{wrong}: leave it out, or use enable_parallelism alone")


def set_aside(model: nn.Module, undo: ExitStack) -> None:
    """Disable the split of `enable_parallelism` on a model, until `undo`."""
    if (config := getattr(model, "_parallel_config", None)) is None:
        return
    diffusers: Any = importlib.import_module("diffusers.hooks")
    for module in model.modules():
        undo.callback(_configure, module, config)
        _configure(module, None)
        hooks = getattr(vars(module).get("_diffusers_hook"), "hooks", {})
        for name in [name for name in hooks if name.startswith(("cp_input---", "cp_output---"))]:
            undo.callback(_replace, hooks, name, hooks[name])
            _replace(hooks, name, diffusers.ModelHook())  # which does nothing


def _configure(module: Any, config: Any) -> None:
    if hasattr(getattr(module, "processor", None), "_parallel_config"):
        module.processor._parallel_config = config


def _replace(hooks: dict[str, Any], name: str, hook: Any) -> None:
    hook.fn_ref, hooks[name] = hooks[name].fn_ref, hook
    hook.fn_ref.pre_forward, hook.fn_ref.post_forward = hook.pre_forward, hook.post_forward
