"""Flux, Qwen-Image, Wan and CogVideoX on meshes against one process, forward and backward."""

from contextlib import nullcontext
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


def compare_all(dtype: torch.dtype) -> Found:
    torch.set_num_threads(1)
    world = torch.distributed.get_world_size()
    meshes = [(r, u, make_mesh(r, u)) for r, u in MESHES if r * u == world]
    # The models compute angles, norms and gates in float32: in float64 `.float()` means float64.
    wide = mock.patch.object(Tensor, "float", Tensor.double)
    found: Found = {}
    with wide if dtype == torch.float64 else nullcontext():
        for case in CASES:
            found |= compare(case, meshes, dtype)
    return found


@cache
def results(world: int, dtype: torch.dtype) -> list[Found]:
    """By rank. All meshes share a world, and what one process computes."""
    return run_ranks(compare_all, world, dtype)


def worlds(dtype: torch.dtype, name: str) -> list[Any]:
    """In float32, where errors hide, four ranks are for `make stress`."""
    return [
        pytest.param(
            dtype,
            (ring, ulysses),
            id=f"{name}-ring{ring}-ulysses{ulysses}",
            marks=[pytest.mark.stress] if name == "float32" and ring * ulysses > 2 else [],
        )
        for ring, ulysses in MESHES
    ]


@pytest.mark.parametrize(
    ("dtype", "mesh"), [*worlds(torch.float32, "float32"), *worlds(torch.float64, "float64")]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_as_one_process(case: Case, mesh: tuple[int, int], dtype: torch.dtype) -> None:
    limit = 1e-6 if dtype == torch.float32 else 1e-10
    for by_case in results(mesh[0] * mesh[1], dtype):
        found = by_case[str(case), *mesh, dtype]
        assert found["out"] <= limit, found
        assert found["grads"] <= limit, found
        assert found["same set"] and found["undone"], found
        if dtype == torch.float64:
            assert found["worst"] <= 1e-13, found
