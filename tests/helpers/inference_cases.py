"""What split models are compared by: meshes, float64 within a model, and differences."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bascule.diffusers import parallelize
from tests.helpers.inference_toy import grads_of
from tests.helpers.inference_toy import loss_of as loss_of
from tests.helpers.split_models import CASES as CASES
from tests.helpers.split_models import CHANNELS as CHANNELS
from tests.helpers.split_models import TEXT_DIM as TEXT_DIM
from tests.helpers.split_models import Case as Case
from tests.helpers.split_models import Inputs as Inputs
from tests.helpers.split_models import make_inputs as make_inputs
from tests.helpers.split_models import make_model as make_model

Gradients = dict[str, Tensor]
USED = [
    Case("flux", 4, 2, 7, (3, 5)),
    Case("qwen", 4, 2, 7, (3, 5), ("mask",)),
    Case("wan", 4, 2, 7, (3, 5)),
    Case("cogvideox", 4, 2, 7, (3, 5)),
]
"""Models that people use in many ways."""

_IN_FLOAT32: list[tuple[Any, str]] = [
    *((Tensor, "to"), (torch, "arange"), (torch, "linspace")),
    (torch.linalg, "vector_norm"),
]
"""Functions that models give a dtype to."""


needs_diffusers = pytest.mark.skipif(find_spec("diffusers") is None, reason="needs diffusers")


def make_mesh(ring: int, ulysses: int) -> Any:
    return init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))


def seeded_model(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """Return the same for every call, also the biases that its class draws."""
    torch.manual_seed(0)
    return make_model(case, dtype)


def shard(model: nn.Module, mesh: Any = None) -> None:
    """Shard a model's blocks, and what is left of it, by a mesh or over all ranks."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for blocks in (one for one in model.children() if isinstance(one, nn.ModuleList)):
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def wrapped(kind: str, model: nn.Module, finds_unused: bool = True) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=finds_unused)
    if kind == "fsdp2":
        shard(model)
    return model


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


def joined(output: Any) -> Tensor:
    """Return one row of all that a model returns."""
    if isinstance(output, Tensor):
        return output.flatten()
    values = output.values() if isinstance(output, Mapping) else output
    return torch.cat([joined(value) for value in values if value is not None])


def step_of(model: nn.Module, inputs: Inputs) -> tuple[Tensor, Gradients]:
    """Return all outputs, and gradients of a loss in which no token weighs as another."""
    model.zero_grad()
    output = joined(model(**inputs))
    loss_of(output.to(torch.promote_types(output.dtype, torch.float32))).backward()
    return output.detach(), grads_of(model)


def same_as_one_process(
    model: Any,
    inputs: Inputs,
    *,
    limit: float = 1e-12,
    grads_limit: float | None = None,
    verifies: bool = True,
    **split: Any,
) -> None:
    """Assert that a model over ranks gives what it gives in one process, and is whole after it.

    Outputs and gradients by their relative L2 error; `verify()` agrees; undone, to the bit. In
    float64 also the error of each parameter: at most 1e-10 of its gradient and 1e-13 of all.
    """
    hooks = num_hooks(model)
    wanted, wanted_grads = step_of(model, inputs)
    with parallelize(model, **split) as handle:
        output, _ = step_of(model, inputs)
        handle.average_gradients()
        is_verified = not verifies or handle.verify(**inputs).ok
    same(output, wanted, limit, "outputs")
    same_gradients(grads_of(model), wanted_grads, grads_limit or limit)
    assert is_verified, "verify found a difference"
    assert num_hooks(model) == hooks and torch.equal(joined(model(**inputs)), wanted), "undone"


def same_gradients(found: Gradients, wanted: Gradients, limit: float = 1e-12) -> None:
    """Assert that gradients are alike, together and, in float64, of each parameter."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    total = float(torch.cat([grad.flatten() for grad in wanted.values()]).norm())
    errors = {name: float((found[name] - grad).norm()) for name, grad in wanted.items()}
    assert math.hypot(*errors.values()) <= limit * total, (errors, total)
    for name, grad in wanted.items():
        allowed = 1e-10 * float(grad.norm()) + 1e-13 * total
        assert grad.dtype != torch.float64 or errors[name] <= allowed, (name, errors[name])


def same(found: Tensor, wanted: Tensor, limit: float = 1e-12, what: object = "") -> None:
    """Assert that tensors are alike, by their relative L2 difference."""
    error = difference(found, wanted)
    assert error <= limit, (what, error)


def num_hooks(model: nn.Module) -> int:
    """Return the number of forward hooks in a model."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


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
