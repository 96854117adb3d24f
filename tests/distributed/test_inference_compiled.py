"""Split models that are compiled, and then compiled again, interrupted, changed or cast."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

from bascule.diffusers import parallelize
from tests.helpers.inference_cases import difference, make_mesh
from tests.helpers.inference_toy import CHANNELS, TABLE, WIDTH, make_toy, toy_inputs
from tests.helpers.ranks import on_ranks, run_ranks


class Adapted(nn.Module):
    """What an adapter puts in the place of a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.more = base, nn.Linear(WIDTH, CHANNELS).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.more(x)


def compiled_twice() -> list[bool]:
    """What is compiled is not kept when something else is; nothing is called, so nothing traced."""
    model = make_toy()
    with parallelize(model, mesh=make_mesh(1, 2), table=TABLE) as handle:
        found: list[bool] = []
        for mode in ("default", "max-autotune-no-cudagraphs", "default"):
            handle.compile(mode)
            kept = weakref.ref(model._compiled_call_impl)
            found.append(kept() is not None)
            handle.compile()
            gc.collect()
            found.append(kept() is None)
    return [*found, model._compiled_call_impl is None]


def test_compiling_again_does_not_keep_what_was_compiled() -> None:
    for found in run_ranks(compiled_twice, 2):
        assert all(found), found


_interrupts = [False]


@torch.library.custom_op("bascule_tests::interrupted", mutates_args=())
def interrupted(x: Tensor) -> Tensor:
    """What a compiled graph calls when somebody presses a key."""
    if _interrupts[0]:
        raise KeyboardInterrupt
    return x.clone()


@interrupted.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def attention_of_others() -> float:
    x = torch.randn(1, 2, 9, 4, dtype=torch.float64)
    wanted = (x @ x.mT / 2).softmax(-1) @ x
    return difference(functional.scaled_dot_product_attention(x, x, x), wanted)


@pytest.mark.stress
@on_ranks(2)
def test_compiled_models_are_interrupted_and_changed() -> None:
    """By the user in place, by the user around it, and by the handle."""
    torch.set_num_threads(1)
    mesh, found = make_mesh(1, 2), dict[str, Any]()
    inputs = toy_inputs()
    for name in ("in place", "around"):
        torch._dynamo.reset()
        model = make_toy(num_blocks=1)
        model.run = lambda block, *args: tuple(interrupted(x) for x in block(*args))
        with torch.no_grad(), parallelize(model, mesh=mesh, table=TABLE):
            wanted = model(**inputs)
            call: Any = model
            if name == "in place":
                model.compile(backend="aot_eager", fullgraph=True)
            else:
                call = torch.compile(model, backend="aot_eager")
            found[name] = difference(call(**inputs), wanted)
            _interrupts[0] = True
            with pytest.raises(KeyboardInterrupt):
                call(**inputs)
            _interrupts[0] = False
            found[f"{name}, others after an interrupt"] = attention_of_others()
            found[f"{name}, after an interrupt"] = difference(call(**inputs), wanted)
        found[f"{name}, modes"] = float(len(_get_current_function_mode_stack()))
    torch._dynamo.reset()
    model = make_toy(num_blocks=1)
    head = model.head
    with torch.no_grad(), parallelize(model, mesh=mesh, table=TABLE) as handle:
        handle.compile()
        plain = model(**inputs)
        torch.manual_seed(0)
        model.head = adapter = Adapted(head)  # pyright: ignore[reportAttributeAccessIssue]
        adapted = model(**inputs)
        model.head = head
    with torch.no_grad():
        found["compiled"] = difference(plain, model(**inputs))
        model.head = adapter  # pyright: ignore[reportAttributeAccessIssue]
        found["compiled, adapted"] = difference(adapted, model(**inputs))
    assert max(found.values()) < 1e-12, found


def cast_and_compiled() -> tuple[float, float, int]:
    torch.set_num_threads(1)
    model = make_toy(num_blocks=1).float()
    inputs = {name: x.float() for name, x in toy_inputs().items()}
    with torch.no_grad(), parallelize(model, mesh=make_mesh(2, 1), table=TABLE):
        with torch.autocast("cpu", torch.bfloat16):
            wanted = model(**inputs)
        counters = torch._dynamo.utils.counters
        counters.clear()

        def call(**given: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(**given)

        found = torch.compile(call, backend="aot_eager", fullgraph=True)(**inputs)
        exact = model(**inputs)
    graphs = counters["stats"]["unique_graphs"]
    return difference(found, wanted), difference(found, exact), graphs


@pytest.mark.slow
def test_autocast_is_compiled_into_the_graph() -> None:
    for error, effect, graphs in run_ranks(cast_and_compiled, 2):
        assert error < 1e-2 and effect > 1e-3 and graphs == 1
