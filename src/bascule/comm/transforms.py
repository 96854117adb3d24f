"""Refuse transforms of torch: only reverse-mode gradients pass through exchanges."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import (
    _get_dispatch_mode,  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    _get_tracing_state,  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    _len_torch_dispatch_stack,  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    _TorchDispatchModeKey,  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
)
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import (
    _CachedTorchDispatchMode,  # pyright: ignore[reportPrivateUsage]
    _CachingTorchDispatchMode,  # pyright: ignore[reportPrivateUsage]
)

from bascule.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

NO_SECOND = (
    "attention, sums and samples over ranks have no second derivative: leave out create_graph, or "
    "compute what needs one in one process"
)
_REFUSED = {
    TransformType.Vmap: "under torch.vmap: give the batch as a dim of the tensors",
    TransformType.Grad: "within torch.func.grad or vjp: use torch.autograd.grad",
    TransformType.Jvp: "has no forward-mode derivative (torch.func.jvp, forward_ad): use reverse "
    "mode, or compute this part in one process",
}


def refuse_second(grad: Tensor) -> None:
    """Refuse a graph of a gradient: torch does not see the tensors that the forward saved."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_fake(grad):
        raise ConfigError(NO_SECOND)


def refuse_derivatives(what: str, *tensors: Any) -> None:
    """Refuse forward-mode derivatives, vmap and torch.func, which operators would silently drop."""
    transform = None if torch.compiler.is_compiling() else peek_interpreter_stack()
    refused = None if transform is None else _REFUSED.get(transform.key())
    for x in tensors:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            refused = refused or _REFUSED[TransformType.Jvp]
    if refused is not None:
        raise ConfigError(f"{what} {refused}")


def refuse_transforms(what: str, *tensors: Any) -> None:
    """Refuse these, and tracing and functionalize, whose programs would lose an exchange."""
    refuse_derivatives(what, *tensors)
    if torch.compiler.is_compiling():
        return
    transform, recorder = peek_interpreter_stack(), None
    if transform is not None and transform.key() == TransformType.Functionalize:
        recorder = "torch.func.functionalize"
    elif _get_tracing_state() is not None:
        recorder = "torch.jit.trace"
    elif _get_dispatch_mode(_TorchDispatchModeKey.PROXY) is not None:
        recorder = "make_fx"
    if recorder is not None:
        wrong = f"{what} within {recorder}, which cannot record the exchange between ranks"
        raise ConfigError(f"{wrong}: call it outside, or compile the model with torch.compile")


def wants_gradients(xs: Sequence[object]) -> list[bool]:
    """Return for each tensor whether it requires a gradient here."""
    has_grad = torch.is_grad_enabled()
    return [has_grad and isinstance(x, Tensor) and x.requires_grad for x in xs]


def constant_result(function: F) -> F:
    """Mark a function as torch.compiler.assume_constant_result does, which imports all of dynamo.

    The import takes over a second, also where nothing is compiled.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def is_recorded() -> bool:
    """Return true while torch records operators: in compilers, make_fx, selective checkpoints."""
    if torch.compiler.is_compiling() or _get_tracing_state() is not None:
        return True
    if not _len_torch_dispatch_stack():
        return False
    if _get_dispatch_mode(_TorchDispatchModeKey.PROXY) is not None:
        return True
    choosing = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
    return any(isinstance(mode, choosing) for mode in _get_current_dispatch_mode_stack())
