"""Models of diffusers on meshes against one process, forward and backward."""

import math
from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from bascule.diffusers import parallelize
from tests.helpers.inference_cases import (
    CASES,
    Case,
    difference,
    in_float64,
    make_inputs,
    make_mesh,
    make_model,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.split_models import plan_of

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow

# A world of all cases would not end in time. The first parts have the last case of each model,
# which is no plain one, and `make test` compares these, on a mesh each, and few of them in float32
# and on more ranks; `make stress` all on all.
_LAST = {case.model: case for case in CASES}
ORDERED = [*_LAST.values(), *(case for case in CASES if case not in _LAST.values())]
PART, FEW = 7, 3
USUAL = {  # by world and precision, which cases
    (2, torch.float64): range(PART * -(-len(_LAST) // PART)),
    (2, torch.float32): range(FEW),
    (3, torch.float64): range(PART, PART + FEW),
    (4, torch.float64): range(2 * PART, 2 * PART + FEW),
}
MESHES = [(1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (1, 4), (4, 1)]  # ring, Ulysses
Found = dict[tuple[str, int, int, torch.dtype], dict[str, Any]]


def gradients(model: Any, output: Tensor) -> dict[str, Tensor]:
    """Of a loss in which no token weighs as another."""
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    model.zero_grad()
    (output * weights + output.square()).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def joined(output: Any) -> Tensor:
    """One tensor of all that a model returns."""
    if isinstance(output, Tensor):
        return output.flatten()
    values = output.values() if isinstance(output, Mapping) else output
    return torch.cat([joined(one) for one in values if one is not None])


def compare(case: Case, meshes: list[tuple[int, int, Any]], dtype: torch.dtype) -> Found:
    model, inputs = make_model(case, dtype), make_inputs(case, dtype)
    wanted = joined(model(**inputs))
    wanted_grads = gradients(model, wanted)
    total = torch.cat([grad.flatten() for grad in wanted_grads.values()]).norm()
    found: Found = {}
    for ring, ulysses, mesh in meshes:
        with parallelize(model, mesh=mesh, table=plan_of(case, model)) as handle:
            output = joined(model(**inputs, return_dict=False))
            gradients(model, output)
            handle.average_gradients()
            verdict = handle.verify(**inputs) if ring > 1 else None
        grads = {name: p.grad for name, p in model.named_parameters()}
        misses = {n: (grads[n] - g).norm() - 1e-10 * g.norm() for n, g in wanted_grads.items()}
        square = torch.stack([(grads[n] - g).square().sum() for n, g in wanted_grads.items()])
        found[str(case), ring, ulysses, dtype] = {
            "out": difference(output, wanted),
            "grads": float(square.sum().sqrt() / total),
            "worst": float(max(misses.values()) / total),
            "same set": {n for n, g in grads.items() if g is not None} == set(wanted_grads),
            "verified": verdict is None or verdict.ok,
            "undone": torch.equal(joined(model(**inputs)), wanted),
        }
    return found


def compare_part(part: int, dtype: torch.dtype, is_usual: bool) -> Found:
    torch.set_num_threads(1)
    world = torch.distributed.get_world_size()
    meshes = [(r, u, make_mesh(r, u)) for r, u in MESHES if r * u == world]
    found: Found = {}
    with in_float64(dtype):
        for place, case in enumerate(ORDERED[PART * part : PART * (part + 1)]):
            if not is_usual:
                found |= compare(case, meshes, dtype)
            elif PART * part + place in USUAL[world, dtype]:
                found |= compare(case, [meshes[place % len(meshes)]], dtype)
    return found


@cache
def results(world: int, part: int, dtype: torch.dtype, is_usual: bool) -> list[Found]:
    """By rank, of a part of the cases. All meshes share a world, and what one process computes."""
    return run_ranks(compare_part, world, part, dtype, is_usual)


def runs() -> list[Any]:
    """Return a case of every model on two ranks in float64, some in float32, or on more ranks."""
    result = list[Any]()
    for dtype, mesh, (place, case) in product(
        (torch.float32, torch.float64), MESHES, enumerate(ORDERED)
    ):
        alike = [one for one in MESHES if math.prod(one) == math.prod(mesh)]
        is_usual = place in USUAL.get((math.prod(mesh), dtype), ())
        is_usual &= alike[place % PART % len(alike)] == mesh
        name = f"{case}-{dtype}-ring{mesh[0]}-ulysses{mesh[1]}".replace("torch.", "")
        marks = [] if is_usual else [pytest.mark.stress]
        run = case, mesh, place // PART, dtype, is_usual
        result.append(pytest.param(*run, id=name, marks=marks))
    return result


@pytest.mark.parametrize(("case", "mesh", "part", "dtype", "is_usual"), runs())
def test_same_as_one_process(
    case: Case, mesh: tuple[int, int], part: int, dtype: torch.dtype, is_usual: bool
) -> None:
    limit = 1e-6 if dtype == torch.float32 else 1e-10
    for by_case in results(math.prod(mesh), part, dtype, is_usual):
        found = by_case[str(case), *mesh, dtype]
        assert found["out"] <= limit, found
        assert found["grads"] <= (3e-6 if dtype == torch.float32 else limit), found
        assert found["same set"] and found["verified"] and found["undone"], found
        if dtype == torch.float64:
            assert found["worst"] <= 1e-13, found
