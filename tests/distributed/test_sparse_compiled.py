"""Models with block-sparse attention, compiled, against themselves in eager mode."""

from collections.abc import Callable
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bascule.attention.sparse import Clusters
from bascule.diffusers import SparseConfig, parallelize
from bascule.workload import load_masks
from tests.helpers.inference_cases import (
    Case,
    difference,
    joined,
    loss_of,
    make_inputs,
    make_mesh,
    make_model,
    needs_diffusers,
    same,
    same_gradients,
    step_of,
)
from tests.helpers.inference_toy import grads_of, toy_inputs
from tests.helpers.ranks import on_ranks, raised_by, run_ranks
from tests.helpers.sparse_toy import STEPS, make_masks, split_toy

pytestmark = pytest.mark.slow

MASKS = make_masks(6, 7)
RULES: dict[str, dict[str, Any]] = {
    "masks of each step": {"masks": MASKS},
    "keep": {"keep": 0.5},
    "clusters": {"rule": Clusters(4, 5, 0.5)},
    "two passes a step, a dense layer": {
        "masks": MASKS[:2],
        "passes_per_step": 2,
        "dense_layers": (1,),
    },
}


def whole(model: Any, _: Any) -> Callable[..., Tensor]:
    return torch.compile(model, fullgraph=True, backend="aot_eager")


def by_handle(model: Any, handle: Any) -> Callable[..., Tensor]:
    handle.compile()
    return model


def blocks(model: Any, _: Any) -> Callable[..., Tensor]:
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    return model


WAYS = {"whole": (whole, 1), "handle": (by_handle, 1), "blocks": (blocks, 2)}


@contextmanager
def graphs() -> Any:
    """Count graphs and breaks from here on; those of a function are few."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True):
        yield lambda: (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


@pytest.mark.parametrize(
    ("ring", "ulysses", "rules", "ways", "masked"),
    [
        (2, 1, ["two passes a step, a dense layer"], ["whole"], True),
        (1, 2, ["masks of each step"], ["blocks"], False),
        pytest.param(1, 1, list(RULES), list(WAYS), False, marks=pytest.mark.stress),
        *(
            pytest.param(*mesh, list(RULES), list(WAYS), True, marks=pytest.mark.stress)
            for mesh in ((1, 1), (2, 1), (1, 2), (2, 2))
        ),
    ],
)
@on_ranks(lambda ring, ulysses, **_: ring * ulysses)
def test_outputs_and_gradients_are_those_of_eager_mode(
    ring: int, ulysses: int, rules: list[str], ways: list[str], masked: bool
) -> None:
    """One graph of a model, or of each block, serves all steps, whose plans differ."""
    mesh = make_mesh(ring, ulysses)
    steps = [toy_inputs(text=5, image=19, seed=step, masked=masked) for step in range(STEPS)]
    for rule, way in product(rules, ways):
        compiled, num_graphs = WAYS[way]
        with split_toy(mesh, **RULES[rule]) as (model, handle), graphs() as counted:
            wanted = [step_of(model, inputs) for inputs in steps]
            planned = sum(one.num_planned for one in handle.explain().sparse)
            assert ring * ulysses == 1 or "masks of each" not in rule or planned > 2
            handle.restart()
            call = compiled(model, handle)
            for step, (inputs, (output, grads)) in enumerate(zip(steps, wanted, strict=True)):
                model.zero_grad()
                out = joined(call(**inputs))
                loss_of(out).backward()
                same(out, output, 1e-10, (rule, way, step))
                same_gradients(grads_of(model), grads, 1e-10)
                assert counted() == (num_graphs, 0), (rule, way, step)


CASES = [Case("flux", 4, 2, 7, (4, 5)), Case("wan", 4, 2, 7, (4, 5))]


@needs_diffusers
@pytest.mark.stress  # daily: blocks above, and Flux where a command generates in a graph
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
@on_ranks(lambda ring, ulysses: ring * ulysses)
def test_flux_and_wan(ring: int, ulysses: int) -> None:
    """In float32, the whole model and its repeated blocks; the first step makes all graphs."""
    mesh, config = make_mesh(ring, ulysses), SparseConfig(keep=0.5, block=4)
    for case, is_whole in product(CASES, (True, False)):
        steps, model = [make_inputs(case, seed=seed) for seed in range(STEPS)], make_model(case)
        with torch.no_grad(), parallelize(model, mesh=mesh, sparse=config) as handle:
            wanted = [joined(model(**inputs)) for inputs in steps]
            handle.restart()
            numbers = set[tuple[int, int]]()
            with graphs() as counted:
                if is_whole:
                    call = torch.compile(model, fullgraph=True, backend="aot_eager")
                else:
                    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
                    call = model
                for place, (inputs, output) in enumerate(zip(steps, wanted, strict=True)):
                    same(joined(call(**inputs)), output, 1e-5, (case, is_whole, place))
                    numbers.add(counted())
                assert len(numbers) == 1, (case, is_whole, numbers)


@pytest.mark.parametrize("ring", [1, pytest.param(2, marks=pytest.mark.stress)])
def test_masks_saved_steps_counted_and_what_is_refused(ring: int, tmp_path: Path) -> None:
    run_ranks(save_and_refuse, ring, tmp_path / "masks.npz", ring)
    masks = load_masks(tmp_path / "masks.npz")
    dense = np.zeros((7, 7), bool)
    dense[:2], dense[:, :2] = True, True  # text
    np.testing.assert_array_equal(masks, MASKS[:2, :1] | dense)


def save_and_refuse(path: Path, ring: int) -> None:
    """Masks saved, a failed step, a verification, and what is refused."""
    inputs, mesh = toy_inputs(text=5, image=19, batch=1), make_mesh(ring, 1)
    with (
        split_toy(mesh, masks=MASKS[:, :1], num_blocks=1) as (model, handle),
        torch.no_grad(),
    ):
        call = torch.compile(model, fullgraph=True, backend="aot_eager")
        with handle.save_masks(path):
            first = call(**inputs)
            call(**inputs)
        assert handle.verify(**inputs).ok  # of the step that comes
        assert difference(call(**inputs), first) > 0.01
        past = "step 3, but masks end at step 2: call handle.restart()"
        assert past in raised_by(call, **inputs)[1]
        handle.restart()
        assert torch.equal(call(**inputs), first)
    with split_toy(mesh, keep=0.5, num_blocks=1) as (model, handle):
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        model.run = handle.checkpoint
        said = raised_by(lambda: model(**inputs).sum().backward())[1]
        assert "handle.checkpoint around compiled blocks" in said


@pytest.mark.stress
@on_ranks(2)
def test_two_passes_of_one_graph_are_two_steps() -> None:
    """Inductor may order what does not depend on each other as it likes."""
    first, second = (toy_inputs(text=5, image=19, batch=1, seed=seed) for seed in range(2))
    masks = np.concatenate([MASKS, MASKS])[:, :1]
    with (
        split_toy(make_mesh(2, 1), masks=masks, num_blocks=1) as (model, handle),
        torch.inference_mode(),
    ):
        wanted = [model(**one) for one in (first, second, first, second)]
        handle.restart()
        call = torch.compile(lambda x, y: (model(**x), model(**y)), fullgraph=True)
        with graphs() as counted:
            outputs = *call(first, second), *call(first, second)
            for place, (output, whole) in enumerate(zip(outputs, wanted, strict=True)):
                same(output, whole, 1e-10, place)
            assert counted() == (1, 0)


def test_graphs_of_cuda_leave_attention_out() -> None:
    from bascule.diffusers import recorded

    for op in (recorded.begin, recorded.attend, recorded.backward, recorded.end):
        assert torch.Tag.cudagraph_unsafe in op._opoverload.tags
