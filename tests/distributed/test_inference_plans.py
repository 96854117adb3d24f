"""The plans of block-sparse layers: what ranks agree on, and how long plans are kept."""

from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist

from bascule.diffusers import SparseConfig, parallelize
from bascule.diffusers.sparse_layers import NUM_FORMS
from tests.helpers.inference_cases import make_mesh
from tests.helpers.inference_toy import TABLE, make_toy, toy_inputs
from tests.helpers.ranks import raised_by, run_ranks
from tests.helpers.sparse_reference import lens_of
from tests.helpers.sparse_toy import BLOCK, LAYERS, STEPS, make_masks, split_toy

FIELDS: dict[str, tuple[Any, Any]] = {
    "keep": (0.5, 0.6),
    "block": (4, 8),
    "method": ("minimal_move", "stripe"),
    "stripe": (8, 16),
    "target": (1.005, 1.01),
    "tolerance": (0.05, 0.06),
    "dense_layers": ((0,), (1,)),
    "passes_per_step": (1, 2),
    "kernel": (None, "triton"),
}


def of_each_field() -> dict[str, str]:
    """What is said where one rank has another value."""
    mesh, said = make_mesh(1, 2), dict[str, str]()
    for name, values in FIELDS.items():
        settings: Any = {"keep": 0.5, "block": 4, name: values[dist.get_rank()]}
        config = SparseConfig(**settings)
        given: Any = {"mesh": mesh, "table": TABLE, "sparse": config}
        said[name] = raised_by(parallelize, make_toy(), **given)[1]
    for rank in range(2):
        settings = {"keep": 0.5} if dist.get_rank() == rank else {"mass": 0.5}
        given = {"mesh": mesh, "table": TABLE, "sparse": SparseConfig(**settings)}
        said[f"rule {rank}"] = raised_by(parallelize, make_toy(), **given)[1]
    return said


def test_ranks_agree_on_every_setting() -> None:
    assert {*FIELDS, "masks", "mass", "strategies"} == {one.name for one in fields(SparseConfig)}
    for said in run_ranks(of_each_field, 2):
        for name, (one, other) in FIELDS.items():
            parts = f"disagree on sparse: {name}: ranks [0]: {one}; ranks [1]: {other}"
            assert parts in said[name], said[name]
        assert "disagree on sparse: keep" in said["rule 0"] and "keep" in said["rule 1"]


def of_many_lengths() -> dict[str, Any]:
    """Plans that are kept while lengths come back, and not for ever."""
    mesh, found = make_mesh(2, 1), dict[str, Any]()
    with torch.no_grad(), split_toy(mesh, keep=0.5, tolerance=9.0) as (model, handle):
        layers = handle.parts[0].sparse
        assert layers is not None
        sizes: list[int] = []
        for image in range(8, 28):
            model(**toy_inputs(text=3, image=image))
            sizes.append(len(layers))
        found["sizes"] = sizes
        for image in (50, 51, 52, 53, 50, 54, 50):
            model(**toy_inputs(text=3, image=image))
        found["kept"] = [layer.num_kept for layer in handle.explain().sparse]
        planned: list[int] = []
        for turn in range(4):  # two prompts, at two resolutions
            for text in (3, 5):
                for image in (10, 19):
                    model(**toy_inputs(text=text, image=image, seed=turn))
                    said = handle.explain().sparse
                    planned.append(sum(layer.num_planned for layer in said))
        found["planned"] = planned
    return found


def test_plans_are_kept_for_the_lengths_that_were_met_last() -> None:
    for found in run_ranks(of_many_lengths, 2):
        most = NUM_FORMS * LAYERS
        assert found["sizes"] == [min(LAYERS * (n + 1), most) for n in range(20)], found
        assert found["kept"] == [3] * LAYERS, found  # in each of three passes
        assert found["planned"] == [LAYERS] * 16, found


def restarted() -> dict[str, Any]:
    """The first step of another image plans as the first of all did, with a rule and with masks."""
    found: dict[str, Any] = {}
    masks = make_masks(6, len(lens_of((5, 19), BLOCK)))
    rules: dict[str, Any] = {"rule": {"mass": 0.3}, "masks": {"masks": masks}}
    for name, settings in rules.items():
        with torch.no_grad(), split_toy(make_mesh(2, 1), **settings) as (model, handle):
            images: list[list[tuple[str, int]]] = []
            for _ in range(2):
                steps: list[tuple[str, int]] = []
                for seed in range(STEPS):
                    model(**toy_inputs(text=5, image=19, seed=seed))
                    layers = handle.explain().sparse
                    steps += [(layer.used.digest, layer.num_planned) for layer in layers]
                images.append(steps)
                handle.restart()
        found[name] = images
    return found


def test_restart_forgets_plans() -> None:
    for found in run_ranks(restarted, 2):
        for first, second in found.values():
            assert first == second, found
            assert len({digest for digest, _ in first}) > 1, found  # else nothing is shown
