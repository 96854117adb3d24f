"""Stand-ins for `forward` of modules, with what else replaces or wraps it."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from bascule.stand_in import StandIn
from tests.helpers.ranks import run_ranks


class Net(nn.Module):
    """Two layers; the inner one interrupts what is negative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Both layers."""
        return self.outer(torch.relu(self.inner(x))) * scale


class Doubling(TorchFunctionMode):
    """Doubles what relu gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is torch.relu else out


class Scope:
    """Cuts the input of a model, runs it within a mode, and keeps that it runs."""

    def __init__(self, model: Net) -> None:
        self.mode, self.current, self.seen = Doubling(), 0, 0
        self.parts = [
            StandIn(model, "forward", self.call),
            StandIn(model.inner, "forward", self.inner),
        ]

    def call(self, forward: Any, x: Tensor, **kwargs: Any) -> Tensor:
        before, self.current = self.current, self.current + 1
        try:
            with self.mode:
                return forward(x[:, :4], **kwargs)
        finally:
            self.current = before

    def inner(self, forward: Any, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and x.isnan().any():
            raise KeyboardInterrupt
        return forward(x) + self.current

    def remove(self) -> None:
        for part in reversed(self.parts):
            part.remove()


def expected(model: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = x[:, :4]
        hidden = x @ model.inner.weight.T + model.inner.bias + 1
        return 2 * hidden.clamp(min=0) @ model.outer.weight.T + model.outer.bias


X = torch.linspace(-1, 1, 12).reshape(2, 6)


def test_an_interrupt_leaves_no_mode_and_remove_leaves_no_attribute() -> None:
    model = Net()
    before, wanted = dict(vars(model)), model(X[:, :4])
    scope = Scope(model)
    assert torch.allclose(model(X), expected(model, X))
    with pytest.raises(KeyboardInterrupt):
        model(X * torch.nan)
    assert scope.current == 0 and not _get_current_function_mode_stack()
    assert "scale" in inspect.signature(model.forward).parameters
    scope.remove()
    assert vars(model) == before and torch.equal(model(X[:, :4]), wanted)


def test_copies_and_pickles_are_whole() -> None:
    model = Net()
    wanted = model(X[:, :4])
    Scope(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(made(X[:, :4]), wanted)
        scope = Scope(made)
        made.inner.bias.data += 1.0  # its own
        assert torch.allclose(made(X), expected(made, X))
        scope.remove()
        assert "forward" not in vars(made)
    assert torch.allclose(model(X), expected(model, X))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.stress)]
)
def test_one_graph_is_compiled(backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Net()
    scope = Scope(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for x in (X, X + 0.5):
        x = x.clone().requires_grad_()
        out = compiled(x)
        assert torch.allclose(out, expected(model, x))
        out.sum().backward()
        assert x.grad is not None and not x.grad[:, 4:].any() and bool(x.grad[:, :4].any())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert scope.current == 0
    torch._dynamo.reset()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_undone_first", [True, False])
def test_accelerate_hooks_above_and_below(is_first: bool, is_undone_first: bool) -> None:
    model = Net()
    wanted = model(X[:, :4])
    if is_first:
        add_hook_to_module(model, ModelHook())
    scope = Scope(model)
    if not is_first:
        add_hook_to_module(model, ModelHook())
    assert torch.allclose(model(X), expected(model, X))
    copied = copy.deepcopy(model)
    assert torch.equal(copied(X[:, :4]), wanted)
    steps = [scope.remove, lambda: remove_hook_from_module(model)]
    for step in steps if is_undone_first else reversed(steps):
        step()
    assert torch.equal(model(X[:, :4]), wanted)
    again = Scope(model)
    assert torch.allclose(model(X), expected(model, X))
    again.remove()
    assert vars(model).get("forward", model.forward) == model.forward


def sharded(is_first: bool) -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, plain = Net(), Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    scope = None if is_first else Scope(model)
    fully_shard(model.inner, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    scope = scope or Scope(model)
    out = model(X)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    grad: Any = model.inner.weight.grad
    assert bool(grad.full_tensor().any())
    worst = float((out - expected(plain, X)).abs().max().detach())
    scope.remove()
    assert "forward" not in vars(model)
    return worst


@pytest.mark.parametrize("is_first", [True, False])
def test_a_model_sharded_by_fsdp(is_first: bool) -> None:
    assert max(run_ranks(sharded, 2, is_first)) < 0.05
