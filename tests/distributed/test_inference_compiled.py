"""Split models that are compiled, and then compiled again, interrupted, changed or cast."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

from bascule.diffusers import parallelize
from tests.helpers.inference_cases import difference, make_mesh, same
from tests.helpers.inference_toy import TABLE, Adapted, make_toy, toy_inputs
from tests.helpers.ranks import on_ranks


@on_ranks(2)
def test_compiling_again_does_not_keep_what_was_compiled() -> None:
    """Nothing is called, so nothing is traced."""
    model = make_toy()
    with parallelize(model, mesh=make_mesh(1, 2), table=TABLE) as handle:
        for mode in ("default", "max-autotune-no-cudagraphs", "default"):
            handle.compile(mode)
            kept = weakref.ref(model._compiled_call_impl)
            assert kept() is not None, mode
            handle.compile()
            gc.collect()
            assert kept() is None, mode
    assert model._compiled_call_impl is None


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


def check_attention_of_others() -> None:
    x = torch.randn(1, 2, 9, 4, dtype=torch.float64)
    same(functional.scaled_dot_product_attention(x, x, x), (x @ x.mT / 2).softmax(-1) @ x)


@pytest.mark.stress
@on_ranks(2)
def test_compiled_models_are_interrupted_and_changed() -> None:
    """By the user in place, by the user around it, and by the handle."""
    mesh, inputs = make_mesh(1, 2), toy_inputs()
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
            same(call(**inputs), wanted, what=name)
            _interrupts[0] = True
            with pytest.raises(KeyboardInterrupt):
                call(**inputs)
            _interrupts[0] = False
            check_attention_of_others()
            same(call(**inputs), wanted, what=(name, "after an interrupt"))
        assert not _get_current_function_mode_stack(), name
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
        same(plain, model(**inputs))
        model.head = adapter  # pyright: ignore[reportAttributeAccessIssue]
        same(adapted, model(**inputs), what="adapted")


@pytest.mark.slow
@on_ranks(2)
def test_autocast_is_compiled_into_the_graph() -> None:
    model, counters = make_toy(num_blocks=1).float(), torch._dynamo.utils.counters
    inputs = {name: x.float() for name, x in toy_inputs().items()}

    def call(**given: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**given)

    with torch.no_grad(), parallelize(model, mesh=make_mesh(2, 1), table=TABLE):
        wanted = call(**inputs)
        counters.clear()
        found = torch.compile(call, backend="aot_eager", fullgraph=True)(**inputs)
        same(found, wanted, 1e-2)
        assert difference(found, model(**inputs)) > 1e-3
    assert counters["stats"]["unique_graphs"] == 1
