"""Flux, Qwen-Image, Wan and CogVideoX on meshes against one process, forward and backward."""

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from bascule.integrations.diffusers import parallelize
from tests.helpers.inference_cases import (
    CASES,
    Case,
    difference,
    make_inputs,
    make_mesh,
    make_model,
)
from tests.helpers.ranks import run_ranks

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow

MESHES = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]  # ring, Ulysses
Found = dict[tuple[str, int, int, torch.dtype], dict[str, Any]]


def gradients(model: Any, output: Tensor) -> dict[str, Tensor]:
    """Of a loss in which no token weighs as another."""
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    model.zero_grad()
    (output * weights + output.square()).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(case: Case, meshes: list[tuple[int, int, Any]], dtype: torch.dtype) -> Found:
    model, inputs = make_model(case, dtype), make_inputs(case, dtype)
    wanted = model(**inputs).sample
    wanted_grads = gradients(model, wanted)
    total = torch.cat([grad.flatten() for grad in wanted_grads.values()]).norm()
    found: Found = {}
    for ring, ulysses, mesh in meshes:
        with parallelize(model, mesh=mesh) as handle:
            output = model(**inputs, return_dict=False)[0]
            gradients(model, output)
            handle.average_gradients()
        grads = {name: p.grad for name, p in model.named_parameters()}
        misses = {n: (grads[n] - g).norm() - 1e-10 * g.norm() for n, g in wanted_grads.items()}
        square = torch.stack([(grads[n] - g).square().sum() for n, g in wanted_grads.items()])
        found[str(case), ring, ulysses, dtype] = {
            "out": difference(output, wanted),
            "grads": float(square.sum().sqrt() / total),
            "worst": float(max(misses.values()) / total),
            "same set": {n for n, g in grads.items() if g is not None} == set(wanted_grads),
            "undone": torch.equal(model(**inputs).sample, wanted),
        }
    return found


def compare_all() -> Found:
    torch.set_num_threads(1)
    world = torch.distributed.get_world_size()
    meshes = [(r, u, make_mesh(r, u)) for r, u in MESHES if r * u == world]
    found: Found = {}
    for case in CASES:
        found |= compare(case, meshes, torch.float32)
        # The models compute angles, norms and gates in float32: here `.float()` means float64.
        with mock.patch.object(Tensor, "float", Tensor.double):
            found |= compare(case, meshes, torch.float64)
    return found


@cache
def results(world: int) -> list[Found]:
    """By rank. Importing diffusers takes six seconds a rank, so all meshes share a world."""
    return run_ranks(compare_all, world)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"ring{mesh[0]}-ulysses{mesh[1]}")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_same_as_one_process(case: Case, mesh: tuple[int, int], dtype: torch.dtype) -> None:
    limit = 1e-6 if dtype == torch.float32 else 1e-10
    for by_case in results(mesh[0] * mesh[1]):
        found = by_case[str(case), *mesh, dtype]
        assert found["out"] <= limit, found
        assert found["grads"] <= limit, found
        assert found["same set"] and found["undone"], found
        if dtype == torch.float64:
            assert found["worst"] <= 1e-13, found
