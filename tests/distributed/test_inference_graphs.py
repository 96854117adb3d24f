"""Models of diffusers, split and compiled, against the same models compiled in one process."""

from dataclasses import replace
from functools import cache
from operator import le
from typing import Any

import pytest
import torch
from torch import Tensor

from bascule.diffusers import parallelize
from bascule.diffusers.verify import leaves_of
from tests.helpers.inference_cases import (
    Case,
    Inputs,
    make_inputs,
    make_mesh,
    make_model,
    same,
)
from tests.helpers.ranks import on_ranks, run_ranks

pytest.importorskip("diffusers")
pytestmark = pytest.mark.stress  # one graph of Flux: docs/sequence_parallel.md, in test_pages

# An odd number of text tokens, which four ranks share as 2, 2, 2 and 1.
MODELS = {
    "flux": Case("flux", 4, 2, 7, (4, 5)),
    "flux2": Case("flux2", 4, 2, 7, (4, 5)),
    "qwen": Case("qwen", 4, 2, 7, (4, 5), ("mask",)),
    "qwen-edit": Case("qwen", 4, 2, 7, (4, 5), ("mask", "edit")),
    "sd3": Case("sd3", 4, 2, 7, (4, 5)),
    "wan2.1": Case("wan", 4, 2, 7, (4, 5)),
    "wan2.2": Case("wan", 4, 2, 7, (4, 5), ("token_times",)),
    "vace": Case("vace", 4, 2, 7, (4, 5)),
    "cogvideox": Case("cogvideox", 4, 2, 7, (4, 5)),
    "hunyuan": Case("hunyuan", 4, 2, 7, (4, 5)),
    "hunyuan1.5": Case("hunyuan1.5", 4, 2, 7, (4, 5)),
    "ltx": Case("ltx", 4, 2, 7, (4, 5)),
    "ltx2": Case("ltx2", 4, 2, 7, (4, 5)),
    "ltx2.3": Case("ltx2", 4, 2, 7, (4, 5), ("2.3", "coordinates")),
    "z_image": Case("z_image", 4, 2, 7, (4, 5)),
    "minimax": Case("minimax", 4, 2, 7, (4, 5)),
}
# From four rows and columns of each image on: Qwen-Image's angles are of half as many, and torch
# compiles anew for one. Edit's first image has two rows less.
GRIDS = (6, 5), (7, 8), (10, 4), (11, 6)
MESHES = (2, 1), (1, 2), (2, 2)  # ring, Ulysses
IN_PARTS = ("hunyuan1.5",)  # its forward branches on whether the image it is given is all zeros


Counts = list[tuple[int, int]]
"""By size: the graphs so far, and the breaks so far."""


def parts_of(model: Any, inputs: Inputs) -> list[Tensor]:
    """All tensors that a model returns."""
    return leaves_of(model(**inputs, return_dict=False))


def compiled(model: Any, name: str) -> Counts:
    """Compile a model anew, and compare it with eager mode at each size."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    graph = torch.compile(
        lambda **inputs: model(**inputs), fullgraph=name not in IN_PARTS, backend="aot_eager"
    )
    counts = Counts()
    for grid in GRIDS:
        inputs = make_inputs(replace(MODELS[name], grid=grid))
        for found, wanted in zip(parts_of(graph, inputs), parts_of(model, inputs), strict=True):
            same(found, wanted, 1e-5, (name, grid))
        breaks = counters["graph_break"].total()  # pyright: ignore[reportAttributeAccessIssue]
        counts.append((counters["stats"]["unique_graphs"], breaks))
    return counts


@cache
def alone(name: str) -> Counts:
    """What one process compiles, the same for all meshes."""
    return run_ranks(in_one_process, 1, name)[0]


def in_one_process(name: str) -> Counts:
    model = make_model(MODELS[name])
    with torch.no_grad():
        model(**make_inputs(MODELS[name]))  # Z-Image makes its angles at its first call
        return compiled(model, name)


def on_mesh(name: str, ring: int, ulysses: int) -> Counts:
    model = make_model(MODELS[name])
    with torch.no_grad(), parallelize(model, make_mesh(ring, ulysses)):
        model(**make_inputs(MODELS[name]))
        return compiled(model, name)


@on_ranks(2)
def test_qwen_image_is_compiled_by_inductor_around_a_ring() -> None:
    """By the handle, against one process."""
    torch._dynamo.reset()
    case, model = MODELS["qwen"], make_model(MODELS["qwen"])
    every = [make_inputs(replace(case, grid=grid)) for grid in GRIDS[:2]]
    with torch.no_grad():
        wanted = [parts_of(model, inputs) for inputs in every]
        with parallelize(model, make_mesh(2, 1)) as handle:
            handle.compile()
            for inputs, (whole,) in zip(every, wanted, strict=True):
                (found,) = parts_of(model, inputs)
                same(found, whole, 1e-5)
    assert torch._dynamo.utils.counters["inductor"]


@pytest.mark.parametrize(
    ("name", "ring", "ulysses"), [(name, *mesh) for name in MODELS for mesh in MESHES]
)
def test_ranks_compile_as_one_process_does(name: str, ring: int, ulysses: int) -> None:
    graphs, breaks = zip(*alone(name), strict=True)
    for counts in run_ranks(on_mesh, ring * ulysses, name, ring, ulysses):
        found, found_breaks = zip(*counts, strict=True)
        assert all(map(le, found_breaks, breaks)), (breaks, found_breaks)
        if name in IN_PARTS:  # hooks outside of the parts are graphs of their own
            assert len(set(found[1:])) == 1, (graphs, found)
            continue
        assert not any(found_breaks) and all(map(le, found, graphs)), (graphs, found)
        assert graphs == (1, 2, 2, 2), graphs
