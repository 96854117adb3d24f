"""Whole pipelines with block-sparse attention, against dense masked attention in one process."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bascule.diffusers import SparseConfig, parallelize
from tests.helpers.pipeline_cases import generated, make_pipeline, prompt_of, seeded
from tests.helpers.ranks import on_ranks
from tests.helpers.sparse_reference import Form, lens_of, one_process

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow

BLOCK, STEPS, KEEP = 8, 3, 0.4
GUIDED = {"flux": 2, "wan": 2, "cogvideox": 1}  # calls of a step; the last: two samples in one


def masks_of(num_blocks: int, num_passes: int) -> Any:
    """(passes, layers, heads, blocks, blocks)."""
    generator = np.random.default_rng(7)
    return generator.random((num_passes, 2, 2, num_blocks, num_blocks)) < 0.4


def density_of(seen: Tensor, form: Form) -> float:
    """Share of the pairs of tokens in (1, H, N, N) blocks."""
    lens = torch.tensor(lens_of(form.segments, BLOCK), dtype=torch.float64)
    return float((seen[0] * lens[:, None] * lens).sum(dim=(1, 2)).mean() / lens.sum() ** 2)


def compare(name: str, settings: dict[str, Any], degrees: dict[str, Any]) -> None:
    """Compare pixels, and what plans say; each replica has a prompt of its own."""
    replica = dist.get_rank() * degrees.get("data_degree", 1) // dist.get_world_size()
    pipeline, prompt = make_pipeline(name), prompt_of(name, seed=replica)

    def generate() -> Tensor:
        steps = {"num_inference_steps": STEPS, "generator": seeded(replica)}
        return generated(name, pipeline, prompt, **steps)

    config = SparseConfig(**settings, block=BLOCK, tolerance=0.0)
    with parallelize(pipeline, sparse=config, **degrees) as handle:
        first = generate()  # of whose first call all groups learn what the model returns
        handle.restart()
        pixels = generate()
        layers, branches = handle.explain().sparse, handle.replica.branches
    keys = [layer.key for layer in layers]
    assert len(keys) == {"flux": 2}.get(name, 1)
    forms = [Form(key.segments, tuple(part == "text" for part in key.names)) for key in keys]
    masks = settings.get("masks")
    if masks is not None:  # of each call of an attention, in turn
        passes = np.arange(STEPS * GUIDED[name]) // settings.get("passes_per_step", 1)
        masks = masks[passes].reshape(-1, *masks.shape[2:])
    rule = None if "masks" in settings else {"keep": KEEP}
    with one_process(forms, BLOCK, masks=masks, rule=rule) as used:
        expected = generate()
    assert len(used) == STEPS * GUIDED[name] * len(keys)
    assert min(float(one.double().mean()) for one in used) < 0.9
    if masks is not None and name == "flux":  # plans are for the pass that this rank computed last
        last = 0 if branches is None else 1 - branches.rank
        begin = (STEPS * GUIDED[name] - 1 - last) * len(layers)
        for layer, seen in zip(layers, used[begin:], strict=False):
            assert layer.density == pytest.approx(density_of(seen, forms[0]))
    for images in (first, pixels):
        check(images, expected, 1e-5 if name == "flux" else 1e-4)  # of videos, sums are longer
    assert float((expected - generate()).abs().max()) > 1e-3  # it leaves blocks out


def check(pixels: Tensor, expected: Tensor, limit: float) -> None:
    assert pixels.shape == expected.shape
    assert float((pixels - expected).abs().max()) <= limit


CASES: list[tuple[str, dict[str, Any]]] = [
    ("flux", {"masks": masks_of(14, STEPS), "passes_per_step": 2}),  # of a step, for both branches
    ("flux", {"masks": masks_of(14, 2 * STEPS)}),  # each branch has its own
    ("flux", {"keep": KEEP}),
    ("wan", {"keep": KEEP, "passes_per_step": 2}),
    ("wan", {"masks": masks_of(60, STEPS)[:, :1], "passes_per_step": 2}),  # of two transformers
    ("cogvideox", {"keep": KEEP}),
]


WAYS: list[tuple[int, dict[str, int], list[int]]] = [  # ranks, and which cases run daily
    (1, {}, []),
    (2, {"ring_degree": 2}, [2, 5]),
    (2, {"guidance_degree": 2}, [0, 4]),
    (2, {"data_degree": 2}, []),
    (4, {"data_degree": 2, "guidance_degree": 2}, [1]),
    (4, {"ring_degree": 2, "ulysses_degree": 2}, []),
    (4, {"guidance_degree": 2, "ulysses_degree": 2}, [3]),
]


@pytest.mark.parametrize(
    ("num_ranks", "degrees", "places"),
    [
        *(way for way in WAYS if way[2]),
        *(
            pytest.param(num, degrees, list(range(len(CASES))), marks=pytest.mark.stress)
            for num, degrees, _ in WAYS
        ),
    ],
    ids=str,
)
@on_ranks(lambda num_ranks, **_: num_ranks)
def test_pixels_are_those_of_one_process(
    num_ranks: int, degrees: dict[str, int], places: list[int]
) -> None:
    for place in places:
        compare(*CASES[place], degrees)
