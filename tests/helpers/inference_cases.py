"""What split models are compared by: meshes, float64 within a model, and differences."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.helpers.split_models import CASES as CASES
from tests.helpers.split_models import CHANNELS as CHANNELS
from tests.helpers.split_models import TEXT_DIM as TEXT_DIM
from tests.helpers.split_models import Case as Case
from tests.helpers.split_models import Inputs as Inputs
from tests.helpers.split_models import make_inputs as make_inputs
from tests.helpers.split_models import make_model as make_model

Gradients = dict[str, Tensor]

_IN_FLOAT32: list[tuple[Any, str]] = [
    *((Tensor, "to"), (torch, "arange"), (torch, "linspace")),
    (torch.linalg, "vector_norm"),
]
"""Functions that models give a dtype to."""


def make_mesh(ring: int, ulysses: int) -> Any:
    return init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))


@contextmanager
def in_float64(dtype: torch.dtype) -> Iterator[None]:
    """Models compute angles, norms and gates in float32: for float64, that means float64 within."""

    def widened(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wide(*args: Any, **kwargs: Any) -> Tensor:
            args = tuple(torch.float64 if one is torch.float32 else one for one in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            return function(*args, **kwargs)

        return wide

    with ExitStack() as stack:
        if dtype == torch.float64:
            stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
            for owner, name in _IN_FLOAT32:
                wide = widened(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, wide))
        yield


def difference(found: Tensor, wanted: Tensor) -> float:
    """Relative L2."""
    return float((found - wanted).detach().norm() / wanted.detach().norm().clamp(min=1e-300))


def worst(model: nn.Module, wanted: Gradients) -> float:
    """The largest error of a parameter's gradient over what is allowed."""
    every = float(torch.cat([grad.flatten() for grad in wanted.values()]).norm())
    errors = [0.0]
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is None:
            assert name not in wanted or not parameter.requires_grad, name
            continue
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        reference = wanted.get(name, torch.zeros_like(grad))
        allowed = 1e-10 * float(reference.norm()) + 1e-13 * every
        errors.append(float((grad - reference).norm()) / allowed)
    return max(errors)
