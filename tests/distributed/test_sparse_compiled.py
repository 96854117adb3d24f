"""Models with block-sparse attention, compiled, against themselves in eager mode."""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bascule.attention.sparse import Clusters
from bascule.diffusers import SparseConfig, parallelize
from bascule.diffusers.verify import leaves_of
from bascule.workload import load_masks
from tests.helpers.inference_cases import Case, difference, make_inputs, make_mesh, make_model
from tests.helpers.inference_toy import toy_gradients, toy_inputs, worst
from tests.helpers.ranks import raised_by, run_ranks
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


def compare(
    ring: int, ulysses: int, rules: list[str], ways: list[str], masked: bool
) -> dict[str, Any]:
    """By rule and way: errors, relative, of outputs and gradients of all steps, graphs by step."""
    mesh, found = make_mesh(ring, ulysses), dict[str, Any]()
    steps = [toy_inputs(text=5, image=19, seed=step, masked=masked) for step in range(STEPS)]
    for rule in rules:
        for way in ways:
            with split_toy(mesh, **RULES[rule]) as (model, handle), graphs() as counted:
                wanted = [toy_gradients(model, inputs) for inputs in steps]
                planned = sum(one.num_planned for one in handle.explain().sparse)
                handle.restart()
                call, errors, by_step = WAYS[way][0](model, handle), list[float](), list[Any]()
                for inputs, (output, grads) in zip(steps, wanted, strict=True):
                    model.zero_grad()
                    out = call(**inputs)
                    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
                    (out * weights + out.square()).mean().backward()
                    of = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
                    errors += [difference(out, output), worst(of, grads)]
                    by_step.append(counted())
            found[f"{rule}, {way}"] = max(errors), by_step, planned
    return found


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
def test_outputs_and_gradients_are_those_of_eager_mode(
    ring: int, ulysses: int, rules: list[str], ways: list[str], masked: bool
) -> None:
    """One graph of a model, or of each block, serves all steps, whose plans differ."""
    for found in run_ranks(compare, ring * ulysses, ring, ulysses, rules, ways, masked):
        for name, (error, by_step, planned) in found.items():
            assert error < 1e-10, (name, error)
            assert by_step == [(WAYS[name.rpartition(", ")[2]][1], 0)] * STEPS, (name, by_step)
            if ring * ulysses > 1 and "masks of each" in name:
                assert planned > 2, name


CASES = [Case("flux", 4, 2, 7, (4, 5)), Case("wan", 4, 2, 7, (4, 5))]


def compare_models(ring: int, ulysses: int) -> dict[str, float]:
    """Errors in float32, of the whole model and of its repeated blocks."""
    mesh, found = make_mesh(ring, ulysses), dict[str, float]()
    for case in CASES:
        steps = [make_inputs(case, seed=seed) for seed in range(STEPS)]
        for is_whole in (True, False):
            config, model = SparseConfig(keep=0.5, block=4), make_model(case)
            with torch.no_grad(), parallelize(model, mesh=mesh, sparse=config) as handle:
                wanted = [leaves_of(model(**inputs)) for inputs in steps]
                handle.restart()
                numbers = list[tuple[int, int]]()
                with graphs() as counted:
                    if is_whole:
                        call = torch.compile(model, fullgraph=True, backend="aot_eager")
                    else:
                        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
                        call = model
                    for place, (inputs, one) in enumerate(zip(steps, wanted, strict=True)):
                        pairs = zip(leaves_of(call(**inputs)), one, strict=True)
                        error = max(difference(*pair) for pair in pairs)
                        found[f"{case} {is_whole} {place}"] = error
                        numbers.append(counted())
                    found[f"{case} {is_whole}, more graphs"] = float(len(set(numbers)) - 1)
    return found


@pytest.mark.stress  # daily: blocks above, and Flux where a command generates in a graph
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_flux_and_wan(ring: int, ulysses: int) -> None:
    pytest.importorskip("diffusers")
    for found in run_ranks(compare_models, ring * ulysses, ring, ulysses):
        assert max(found.values()) < 1e-5, found


def others(path: Path, ring: int) -> dict[str, Any]:
    """What else there is: masks saved, a failed step, a verification, and what is refused."""
    found, inputs = dict[str, Any](), toy_inputs(text=5, image=19, batch=1)
    with (
        split_toy(make_mesh(ring, 1), masks=MASKS[:, :1], num_blocks=1) as (model, handle),
        torch.no_grad(),
    ):
        call = torch.compile(model, fullgraph=True, backend="aot_eager")
        with handle.save_masks(path):
            first = call(**inputs)
            call(**inputs)
        found["verified"] = handle.verify(**inputs).ok  # of the step that comes
        third = call(**inputs)
        found["past the file"] = raised_by(call, **inputs)[1]
        handle.restart()
        found["again"] = difference(call(**inputs), first)
        found["unlike"] = difference(third, first)
    with split_toy(make_mesh(ring, 1), keep=0.5, num_blocks=1) as (model, handle):
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        model.run = handle.checkpoint
        found["checkpoint"] = raised_by(lambda: model(**inputs).sum().backward())[1]
    return found


@pytest.mark.parametrize("ring", [1, pytest.param(2, marks=pytest.mark.stress)])
def test_masks_saved_steps_counted_and_what_is_refused(ring: int, tmp_path: Path) -> None:
    for found in run_ranks(others, ring, tmp_path / "masks.npz", ring):
        assert found["verified"] and found["again"] == 0 and found["unlike"] > 0.01, found
        assert "step 3 of masks for steps 0 to 2: call handle.restart()" in found["past the file"]
        assert "handle.checkpoint around compiled blocks" in found["checkpoint"], found
    masks = load_masks(tmp_path / "masks.npz")
    dense = np.zeros((7, 7), bool)
    dense[:2], dense[:, :2] = True, True  # text
    np.testing.assert_array_equal(masks, MASKS[:2, :1] | dense)


def two_passes() -> tuple[float, Any]:
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
            return max(map(difference, outputs, wanted)), counted()


@pytest.mark.stress
def test_two_passes_of_one_graph_are_two_steps() -> None:
    for error, numbers in run_ranks(two_passes, 2):
        assert error < 1e-10 and numbers == (1, 0), (error, numbers)


def test_graphs_of_cuda_leave_attention_out() -> None:
    from bascule.diffusers import recorded

    for op in (recorded.begin, recorded.attend, recorded.backward, recorded.end):
        assert torch.Tag.cudagraph_unsafe in op._opoverload.tags
