"""torch.compile of a split model in place, as one graph, in modes that its ranks can run.

Inductor's `reorder_for_compute_comm_overlap` is not offered: it moves torch's own collectives, and
the operators of `attention.usp` overlap theirs themselves.
"""

import logging
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from bascule.comm.mesh import AttentionMesh
from bascule.errors import ConfigError

Mode = Literal["default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune"]

# Modes that record CUDA graphs, and the nearest modes that do not.
_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; the CPU if it has none or they are offloaded."""
    first = next(model.parameters(), None)
    if first is None or first.device.type == "meta":
        return torch.device("cpu")
    return first.device


def check_mode(mode: str, dynamic: bool | None, mesh: AttentionMesh, device: torch.device) -> None:
    """Refuse modes of torch.compile that the ranks of a mesh cannot run.

    A CUDA graph can record NCCL since NCCL 2.9 (its user guide, "Using NCCL with CUDA Graphs"), and
    from torch since NCCL 2.9.6 (pytorch/pytorch#64440).
    """
    if mode not in get_args(Mode):
        raise ConfigError(f"compile: mode {mode!r} is not one of {', '.join(get_args(Mode))}")
    if (nearest := _WITHOUT_GRAPHS.get(mode)) is None:
        return
    reason = _why_not_recorded(mesh, device.type)
    if reason is not None:
        raise ConfigError(
            f"compile: mode {mode!r} records CUDA graphs, but {reason}: use mode={nearest!r}"
        )
    if dynamic:
        raise ConfigError(
            f"compile: mode {mode!r} excludes dynamic=True: use dynamic=False, or mode={nearest!r}"
        )


def compile_in_place(
    model: nn.Module, mode: Mode, dynamic: bool | None, prepare: Callable[..., object]
) -> Callable[[], None]:
    """Compile a model and its hooks; calls run `prepare` first. Return a function to undo it."""
    before = model._compiled_call_impl
    logging.getLogger(__name__).info("the next call compiles %s: it is slow", type(model).__name__)

    # Unlike `model.compile()`, this takes the hooks that cut inputs into the graph.
    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    # dynamo limits the graphs of a code object: each model gets its own copy.
    call.__code__ = call.__code__.replace()

    def undo() -> None:
        model._compiled_call_impl = before

    # A share of one token takes another graph, so with `dynamic` ranks would not record together.
    dynamic = False if mode in _WITHOUT_GRAPHS else dynamic
    compiled = torch.compile(call, fullgraph=True, mode=mode, dynamic=dynamic)

    def prepared(*args: Any, **kwargs: Any) -> Any:
        prepare(args, kwargs)
        return compiled(*args, **kwargs)

    model._compiled_call_impl = prepared
    return undo


def _why_not_recorded(mesh: AttentionMesh, device_type: str) -> str | None:
    if device_type != "cuda":
        return f"a model on {device_type} has none"
    for group in (mesh.ring, mesh.ulysses, mesh.whole):
        if group is None:
            continue
        config = dist.get_backend_config(group.process_group)  # as "cpu:gloo,cuda:nccl"
        backend = dict(entry.split(":") for entry in config.split(","))[device_type]
        if backend == "gloo":
            return "gloo exchanges on the host, which a graph cannot record"
        if backend != "nccl":
            return f"a graph can record collectives of nccl, not of {backend}"
    return None
