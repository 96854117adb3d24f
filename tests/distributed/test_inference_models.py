"""Models of diffusers on meshes against one process, forward and backward."""

import math
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from tests.helpers.inference_cases import (
    CASES,
    Case,
    in_float64,
    make_inputs,
    make_mesh,
    make_model,
    same_as_one_process,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.split_models import PLAN_CASES, plan_of

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow

# A world of all cases would not end in time. The first parts have the last case of each model,
# which is no plain one, and `make test` compares these, on a mesh each, and few of them in float32
# and on more ranks; `make nightly` some by the plans of diffusers; `make stress` all on all.
_LAST = {case.model: case for case in CASES if case not in PLAN_CASES}
_LAST_BY_PLAN = {case.model: case for case in PLAN_CASES}
_FIRST = [*_LAST.values(), *_LAST_BY_PLAN.values()]
ORDERED = [*_FIRST, *(case for case in CASES if case not in _FIRST)]
PART, FEW = 7, 3
DAILY = {  # by world and precision, which cases
    (2, torch.float64): range(len(_LAST)),
    (2, torch.float32): range(FEW),
    (3, torch.float64): range(PART, PART + FEW),
    (4, torch.float64): range(2 * PART, 2 * PART + FEW),
}
NIGHTLY = {(2, torch.float64): range(len(_LAST), len(_FIRST))}
MESHES = [(1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (1, 4), (4, 1)]  # ring, Ulysses


def how_often(place: int, mesh: tuple[int, int], dtype: torch.dtype) -> str:
    """Return the run that compares a case on a mesh."""
    alike = [other for other in MESHES if math.prod(other) == math.prod(mesh)]
    if alike[place % PART % len(alike)] == mesh:
        for name, places in (("daily", DAILY), ("nightly", NIGHTLY)):
            if place in places.get((math.prod(mesh), dtype), ()):
                return name
    return "stress"


def compare_part(part: int, dtype: torch.dtype, often: str) -> dict[Any, str]:
    """Return what differs from one process, by case and mesh."""
    torch.set_num_threads(1)
    world, errors = torch.distributed.get_world_size(), dict[Any, str]()
    meshes = {mesh: make_mesh(*mesh) for mesh in MESHES if math.prod(mesh) == world}
    is_wide = dtype == torch.float64
    with in_float64(dtype):
        for place in range(PART * part, min(PART * (part + 1), len(ORDERED))):
            case, inputs = ORDERED[place], make_inputs(ORDERED[place], dtype)
            for degrees, mesh in meshes.items():
                if often != how_often(place, degrees, dtype):
                    continue
                model, errors[str(case), degrees] = make_model(case, dtype), ""
                try:
                    same_as_one_process(
                        model,
                        inputs | ({"return_dict": False} if place % 2 else {}),
                        limit=1e-10 if is_wide else 1e-6,
                        grads_limit=1e-10 if is_wide else 3e-6,
                        verifies=degrees[0] > 1,
                        mesh=mesh,
                        table=plan_of(case, model),
                    )
                except AssertionError as error:
                    errors[str(case), degrees] = str(error)
    return errors


@cache
def results(world: int, part: int, dtype: torch.dtype, often: str) -> list[dict[Any, str]]:
    """Return by rank what a part of the cases gives. All its meshes share a world."""
    return run_ranks(compare_part, world, part, dtype, often)


def runs() -> list[Any]:
    """Return a case of every model on two ranks in float64, some in float32, or on more ranks."""
    result = list[Any]()
    for dtype, mesh, (place, case) in product(
        (torch.float32, torch.float64), MESHES, enumerate(ORDERED)
    ):
        often = how_often(place, mesh, dtype)
        name = f"{case}-{dtype}-ring{mesh[0]}-ulysses{mesh[1]}".replace("torch.", "")
        marks = [] if often == "daily" else [getattr(pytest.mark, often)]
        run = case, mesh, place // PART, dtype, often
        result.append(pytest.param(*run, id=name, marks=marks))
    return result


@pytest.mark.parametrize(("case", "mesh", "part", "dtype", "often"), runs())
def test_same_as_one_process(
    case: Case, mesh: tuple[int, int], part: int, dtype: torch.dtype, often: str
) -> None:
    for errors in results(math.prod(mesh), part, dtype, often):
        assert not errors[str(case), mesh]
