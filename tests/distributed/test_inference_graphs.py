"""Models of diffusers, split and compiled, against the same models compiled in one process."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from bascule.diffusers import parallelize
from tests.helpers.inference_cases import Case, difference, make_inputs, make_mesh, make_model
from tests.helpers.ranks import run_ranks

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


@dataclass(frozen=True)
class Compiled:
    """By size: the graphs so far, the breaks so far, and errors against eager mode."""

    graphs: tuple[int, ...]
    breaks: tuple[int, ...]
    errors: tuple[float, ...]


def parts_of(output: Any) -> list[Tensor]:
    """All tensors that a model returns."""
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output
    return [part for one in values if one is not None for part in parts_of(one)]


def compiled(model: Any, name: str) -> Compiled:
    """Compile a model anew and call it with each size."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()

    def call(**inputs: Any) -> list[Tensor]:
        return parts_of(model(**inputs, return_dict=False))

    graph = torch.compile(call, fullgraph=name not in IN_PARTS, backend="aot_eager")
    graphs, breaks, errors = list[int](), list[int](), list[float]()
    for grid in GRIDS:
        inputs = make_inputs(replace(MODELS[name], grid=grid))
        pairs = zip(graph(**inputs), call(**inputs), strict=True)
        errors.append(max(difference(found, wanted) for found, wanted in pairs))
        graphs.append(counters["stats"]["unique_graphs"])
        breaks.append(counters["graph_break"].total())  # pyright: ignore[reportAttributeAccessIssue]
    return Compiled(tuple(graphs), tuple(breaks), tuple(errors))


def no_more(these: tuple[int, ...], than: tuple[int, ...]) -> bool:
    """Whether numbers are at most others, size by size."""
    return all(one <= other for one, other in zip(these, than, strict=True))


def in_one_process(name: str) -> Compiled:
    torch.set_num_threads(1)
    model = make_model(MODELS[name])
    with torch.no_grad():
        model(**make_inputs(MODELS[name]))  # Z-Image makes its angles at its first call
        return compiled(model, name)


def on_ranks(name: str, ring: int, ulysses: int) -> Compiled:
    torch.set_num_threads(1)
    model = make_model(MODELS[name])
    with torch.no_grad(), parallelize(model, make_mesh(ring, ulysses)):
        model(**make_inputs(MODELS[name]))
        return compiled(model, name)


def by_inductor(ring: int) -> list[float]:
    """Errors of Qwen-Image, compiled by the handle around a ring, against one process, by size."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    case, model, errors = MODELS["qwen"], make_model(MODELS["qwen"]), list[float]()
    every = [make_inputs(replace(case, grid=grid)) for grid in GRIDS[:2]]
    with torch.no_grad():
        wanted = [parts_of(model(**inputs, return_dict=False)) for inputs in every]
        with parallelize(model, make_mesh(ring, 1)) as handle:
            handle.compile()
            for inputs, parts in zip(every, wanted, strict=True):
                found = parts_of(model(**inputs, return_dict=False))
                errors += [difference(*pair) for pair in zip(found, parts, strict=True)]
    assert torch._dynamo.utils.counters["inductor"]
    return errors


def test_qwen_image_is_compiled_by_inductor_around_a_ring() -> None:
    for errors in run_ranks(by_inductor, 2, 2):
        assert len(errors) == 2 and max(errors) < 1e-5, errors


@cache
def alone(name: str) -> Compiled:
    """What one process compiles, the same for all meshes."""
    return run_ranks(in_one_process, 1, name)[0]


@pytest.mark.parametrize(
    ("name", "ring", "ulysses"), [(name, *mesh) for name in MODELS for mesh in MESHES]
)
def test_ranks_compile_as_one_process_does(name: str, ring: int, ulysses: int) -> None:
    one = alone(name)
    for found in run_ranks(on_ranks, ring * ulysses, name, ring, ulysses):
        assert max(found.errors) < 1e-5, found
        assert no_more(found.breaks, one.breaks), (one, found)
        if name in IN_PARTS:  # hooks outside of the parts are graphs of their own
            assert len(set(found.graphs[1:])) == 1, (one, found)
            continue
        assert not any(found.breaks) and no_more(found.graphs, one.graphs), (one, found)
        assert one.graphs == (1, 2, 2, 2), one
