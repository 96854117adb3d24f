"""Models with block-sparse attention on meshes against one process with dense masked attention."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

from bascule.diffusers import Cut, SparseConfig, SplitTable, parallelize
from bascule.errors import ConfigError
from bascule.workload import save_masks
from tests.helpers.calls_made import calls_made
from tests.helpers.inference_cases import Case, difference, make_inputs, make_mesh, make_model
from tests.helpers.inference_toy import (
    CHANNELS,
    TABLE,
    grads_of,
    make_toy,
    toy_gradients,
    toy_inputs,
    worst,
)
from tests.helpers.ranks import raised_by, run_ranks
from tests.helpers.sparse_reference import Bools, lens_of, one_process
from tests.helpers.sparse_toy import BLOCK, LAYERS, STEPS, make_masks, split_toy

MESHES = [(1, 1), (2, 1), (1, 2), (2, 2)]  # ring, Ulysses
LARGE_MESHES = [(4, 1), (1, 4), (3, 1), (1, 3), (4, 2), (2, 4)]
TOYS: dict[str, dict[str, Any]] = {
    "masks": {"text": 5, "image": 19},
    "masks, groups of heads": {"text": 6, "image": 13, "kv_heads": 3},
    "masks, paper": {"text": 5, "image": 19, "method": "paper"},
    "masks, stripe, no text": {"text": 0, "image": 18, "method": "stripe"},
    "fewer blocks than ranks": {"text": 1, "image": 3},
    "keep": {"text": 5, "image": 19, "rule": {"keep": 0.6}},
    "keep, groups of heads": {"text": 5, "image": 19, "rule": {"keep": 0.7}, "kv_heads": 3},
    "mass": {"text": 3, "image": 22, "rule": {"mass": 0.5}},
}
MODELS = [Case("wan", 5, 2, 7, (3, 5)), Case("cogvideox", 5, 2, 7, (3, 5))]
SMALL = [Case("wan", 4, 1, 8, (1, 3)), Case("cogvideox", 4, 1, 1, (1, 2))]


def make_config(case: dict[str, Any], masks: Bools, **settings: Any) -> SparseConfig:
    settings = {"block": BLOCK, "tolerance": 0.0, "target": 1.005, **settings}
    if "method" in case:
        settings["method"] = case["method"]
    return SparseConfig(**(case.get("rule") or {"masks": masks}), **settings)


def compare_toy(ring: int, ulysses: int, case: dict[str, Any]) -> dict[str, Any]:
    kv_heads, rule = case.get("kv_heads", 6), case.get("rule")
    segments = case["text"], case["image"]
    masks = make_masks(6, len(lens_of(segments, BLOCK)))
    model = make_toy(heads=6, kv_heads=kv_heads, num_blocks=LAYERS)
    steps = [toy_inputs(text=segments[0], image=segments[1], seed=s) for s in range(STEPS)]
    wanted: list[tuple[Tensor, dict[str, Tensor]]] = []
    for step, inputs in enumerate(steps):
        with one_process(segments, BLOCK, masks=None if rule else masks[step], rule=rule):
            wanted.append(toy_gradients(model, inputs))
    before = model(**steps[0])
    found: dict[str, Any] = {"out": [], "grads": [], "ok": []}
    config = make_config(case, masks)
    with parallelize(model, mesh=make_mesh(ring, ulysses), table=TABLE, sparse=config) as handle:
        for inputs, (output, grads) in zip(steps, wanted, strict=True):
            if inputs is not steps[0]:  # as is, of the first step: a verification is not a step
                found["ok"].append(handle.verify(**inputs).ok)
            found["out"].append(difference(toy_gradients(model, inputs)[0], output))
            handle.average_gradients()
            found["grads"].append(worst(grads_of(model), grads))
        found["layers"] = handle.explain().sparse
    return found | {"undone": torch.equal(model(**steps[0]), before)}


def compare_toys(ring: int, ulysses: int) -> list[dict[str, Any]]:
    return [compare_toy(ring, ulysses, case) for case in TOYS.values()]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("ring", "ulysses"),
    [*MESHES, *(pytest.param(*mesh, marks=pytest.mark.stress) for mesh in LARGE_MESHES)],
)
def test_own_model_forward_backward_verify_and_undo(ring: int, ulysses: int) -> None:
    by_rank = run_ranks(compare_toys, ring * ulysses, ring, ulysses)
    for results in by_rank:
        for name, found in zip(TOYS, results, strict=True):
            assert max(found["out"]) < 1e-10 and max(found["grads"]) < 1e-10, (name, found)
            assert found["undone"] and all(found["ok"]), (name, found)
            assert [layer.layer for layer in found["layers"]] == list(range(LAYERS))
            others = [layer.used.digest for layer in by_rank[0][list(TOYS).index(name)]["layers"]]
            assert [layer.used.digest for layer in found["layers"]] == others, name
    if ring * ulysses > 1:
        assert max(layer.num_planned for layer in by_rank[0][0]["layers"]) > 1


def compare_model(case: Case, mesh: Any, rule: dict[str, float] | None) -> dict[str, Any]:
    """Three steps; the last one with gradients."""
    model = make_model(case, torch.float64)
    steps = [make_inputs(case, torch.float64, seed) for seed in range(STEPS)]
    tokens = 2 * case.grid[0] * case.grid[1]
    segments = (tokens,) if case.model == "wan" else (case.text, tokens)
    masks = make_masks(case.heads, len(lens_of(segments, BLOCK)))
    wanted: list[Tensor] = []
    for step, inputs in enumerate(steps):
        with one_process(segments, BLOCK, masks=None if rule else masks[step], rule=rule) as used:
            wanted.append(model(**inputs).sample)
        assert len(used) == LAYERS
    gradients(model, wanted[-1])
    grads = grads_of(model)
    with torch.no_grad():
        before = model(**steps[0]).sample
    found: dict[str, Any] = {"new plans are worth it": rule is None and case in MODELS}
    config = make_config({"rule": rule} if rule else {}, masks)
    with parallelize(model, mesh=mesh, sparse=config) as handle:
        outputs = [model(**inputs).sample for inputs in steps]
        found["out"] = [difference(*pair) for pair in zip(outputs, wanted, strict=True)]
        gradients(model, outputs[-1])
        handle.average_gradients()
        found["grads"] = worst(grads_of(model), grads)
        found["planned"] = sum(layer.num_planned for layer in handle.explain().sparse)
        found["said"] = str(handle.explain())
        handle.restart()
        found["verified"] = handle.verify(**steps[0])
    with torch.no_grad():
        return found | {"undone": torch.equal(model(**steps[0]).sample, before)}


def gradients(model: Any, output: Tensor) -> None:
    model.zero_grad()
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    (output * weights + output.square()).mean().backward()


def compare_models(meshes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """The models compute angles, norms and gates in float32: here `.float()` means float64."""
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    with mock.patch.object(Tensor, "float", Tensor.double):
        for mesh in [make_mesh(*degrees) for degrees in meshes]:
            for case in MODELS:
                found += [compare_model(case, mesh, rule) for rule in (None, {"keep": 0.5})]
            found += [compare_model(case, mesh, None) for case in SMALL]
    return found


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "meshes",
    [
        [(2, 1), (1, 2)],
        [(2, 2)],
        pytest.param([(4, 1), (1, 4)], marks=pytest.mark.stress),
    ],
    ids=str,
)
def test_wan_and_cogvideox_over_three_steps(meshes: list[tuple[int, int]]) -> None:
    pytest.importorskip("diffusers")
    for results in run_ranks(compare_models, meshes[0][0] * meshes[0][1], meshes):
        for found in results:
            assert max(found["out"]) < 1e-9 and found["grads"] < 1e-9, found
            assert found["undone"] and found["verified"].ok, str(found["verified"])
            assert "sparse: 2 layers of density" in found["said"], found["said"]
            if found["new plans are worth it"]:
                assert found["planned"] > LAYERS, found


def options(ring: int, ulysses: int) -> dict[str, Any]:
    """A dense layer, two passes a step, one mask for all, recomputation, and bytes on the wire."""
    mesh, found = make_mesh(ring, ulysses), dict[str, Any]()
    segments = 5, 19
    inputs = [toy_inputs(text=5, image=19, seed=seed) for seed in range(2)]
    masks = make_masks(6, len(lens_of(segments, BLOCK)))

    def wanted(seed: int, **settings: Any) -> tuple[Tensor, dict[str, Tensor]]:
        with one_process(segments, BLOCK, **settings):
            return toy_gradients(make_toy(num_blocks=LAYERS), inputs[seed])

    with split_toy(mesh, masks=masks, dense_layers=(1,)) as (model, handle):
        expected = wanted(0, masks=masks[0], dense_layers=(1,))
        found["dense layer"] = difference(toy_gradients(model, inputs[0])[0], expected[0])
        found["dense layer is none"] = float(len(handle.explain().sparse) - 1)
    with split_toy(mesh, masks=masks, passes_per_step=2) as (model, handle):
        for number, step in enumerate((0, 0, 1, 1, 2)):
            expected = wanted(number % 2, masks=masks[step])
            output = toy_gradients(model, inputs[number % 2])[0]
            found[f"pass {number}"] = difference(output, expected[0])
        handle.restart()
        expected = wanted(0, masks=masks[0])
        found["restarted"] = difference(toy_gradients(model, inputs[0])[0], expected[0])
    with split_toy(mesh, masks=masks[2, 1]) as (model, handle):
        for seed in range(2):
            expected = wanted(seed, masks=masks[2, 1:])
            found[f"one mask {seed}"] = difference(
                toy_gradients(model, inputs[seed])[0], expected[0]
            )
        found["kept"] = float(sum(layer.num_planned - 1 for layer in handle.explain().sparse))
    with split_toy(mesh, masks=masks) as (model, handle):
        model.run = handle.checkpoint
        for step in range(2):
            expected = wanted(step, masks=masks[step])
            toy_gradients(model, inputs[step])
            handle.average_gradients()
            found[f"recomputed {step}"] = worst(grads_of(model), expected[1])
    with split_toy(mesh, keep=0.6) as (model, handle):
        model.run = handle.checkpoint
        toy_gradients(model, inputs[0])
        handle.average_gradients()
        expected = wanted(0, rule={"keep": 0.6})
        found["rule, recomputed"] = worst(grads_of(model), expected[1])
        model.run = lambda block, *args: block(*args)
        for number, image in enumerate((10, 19, 10)):
            other = toy_inputs(text=5, image=image, seed=number)
            with one_process((5, image), BLOCK, rule={"keep": 0.6}), torch.no_grad():
                expected = make_toy(num_blocks=LAYERS)(**other)
            with torch.no_grad():
                found[f"resolution {number}"] = difference(model(**other), expected)
        with calls_made() as sent, torch.no_grad():
            model(**inputs[0])
        cost = handle.explain().chosen
        found["bytes"] = float(sent.moved_bytes - cost.traffic[dist.get_rank()].total)
        found["tokens"] = float(sum(cost.tokens) - 24)
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_layers_steps_recomputation_and_bytes(ring: int, ulysses: int) -> None:
    for found in run_ranks(options, ring * ulysses, ring, ulysses):
        assert max(map(abs, found.values())) < 1e-10, found


class Causal(nn.Module):
    """Attends to what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(CHANNELS, CHANNELS).double()

    def forward(self, image: Tensor) -> Tensor:
        x = image[:, None].expand(-1, 6, -1, -1)
        return self.head(functional.scaled_dot_product_attention(x, x, x, is_causal=True).mean(1))


CAUSAL = SplitTable(
    segments=("image",),
    inputs={"": {"image": Cut("image")}},
    gathers={"head": Cut("image")},
    blocks={},
)


def refused() -> list[tuple[list[str], str]]:
    mesh, inputs = make_mesh(2, 1), toy_inputs(text=5, image=19)
    masks = make_masks(6, 7)
    said: list[tuple[list[str], str]] = []
    for settings in (
        {"masks": masks[..., :6, :6]},
        {"masks": masks[:, :, :5]},
        {"masks": masks[:, [0, 0, 1]]},
        {"keep": 0.5, "method": "paper"},
        {"keep": 0.5, "kernel": "cpu_flash"},
        {"keep": 0.5, "dense_layers": (0, 2)},
    ):
        with split_toy(mesh, **settings) as (model, _):
            said.append(raised_by(model, **inputs))
    with split_toy(mesh, masks=masks[:1].repeat(2, axis=0)) as (model, handle):
        for _ in range(2):
            model(**inputs)
        said += [raised_by(model, **inputs), raised_by(handle.verify, **inputs)]
        handle.restart()
        model(**inputs)
        said.append(raised_by(handle.compile))
        said.append(raised_by(model, **inputs, text_mask=torch.ones(2, 5)))
    with parallelize(Causal(), mesh=mesh, table=CAUSAL, sparse=SparseConfig(keep=0.5)) as handle:
        said.append(raised_by(handle.model, inputs["image"]))
    give = {"mesh": mesh, "table": TABLE}
    config = SparseConfig(keep=0.5)
    said.append(raised_by(parallelize, make_toy(), comm_dtype="int8", sparse=config, **give))
    other = SparseConfig(keep=0.5 + 0.1 * dist.get_rank())
    said.append(raised_by(parallelize, make_toy(), sparse=other, **give))
    masks[-1, -1, -1, -1, -1] ^= dist.get_rank() == 1
    other = SparseConfig(masks=masks)
    said.append(raised_by(parallelize, make_toy(), sparse=other, **give))
    assert not _get_current_function_mode_stack()
    return said


def test_what_is_refused_on_all_ranks() -> None:
    parts = [
        "masks of 6 heads and 6 x 6 blocks, and the model has 6 heads and 7 blocks of 4 tokens, 2",
        "masks of 5 heads and 7 x 7 blocks, and the model has 6 heads",
        "masks of 3 layers for a model with 2 attention calls",
        'method "paper" moves keys',
        "kernel 'cpu_flash'",
        "layer 2 is to be dense, and the model has the attention calls 0 to 1",
        "step 2 of masks for steps 0 to 1: call handle.restart()",
        "step 2 of masks",
        "compile: block-sparse attention is planned in every step",
        "gives it a mask of shape (2, 1, 1, 24)",
        "gives it is_causal=True",
        "leave out comm_dtype or sparse",
        "disagree on sparse: keep: ",
        "disagree on sparse: masks: ",
    ]
    for said in run_ranks(refused, 2):
        for part, (classes, text) in zip(parts, said, strict=True):
            assert part in text, text
            assert "ConfigError" in classes or "CommError" in classes, classes


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "with nothing: give one of masks, keep and mass"),
        ({"keep": 0.5, "mass": 0.5}, "with keep and mass"),
        ({"keep": 1.5}, "keep=1.5): must be between 0 and 1"),
        ({"mass": float("nan")}, "must be between 0 and 1"),
        ({"keep": 0.0}, "keep=0.0): must be between 0 and 1, not 0"),
        ({"keep": "half"}, "keep='half'): must be between 0 and 1"),
        (
            {"keep": 0.5, "dense_layers": (0, -1)},
            "dense_layers=-1): must be an integer, at least 0",
        ),
        ({"keep": 0.5, "block": 16.5}, "block=16.5): must be an integer, at least 1"),
        ({"keep": 0.5, "block": 0}, "block=0): must be an integer, at least 1"),
        ({"keep": 0.5, "passes_per_step": 0}, "passes_per_step=0): must be an integer, at least 1"),
        ({"keep": 0.5, "tolerance": -0.1}, "tolerance=-0.1): must be finite, at least 0"),
        ({"keep": 0.5, "target": 0.9}, "target=0.9): must be finite, at least 1"),
        ({"keep": 0.5, "tolerance": -1}, "tolerance=-1): must be finite, at least 0"),
        ({"keep": 0.5, "block": "4"}, "block='4'): must be an integer, at least 1"),
        ({"keep": 0.5, "block": True}, "block=True): must be an integer"),
        ({"keep": 0.5, "passes_per_step": 1.5}, "passes_per_step=1.5): must be an integer"),
        ({"keep": 0.5, "passes_per_step": None}, "passes_per_step=None): must be an integer"),
        ({"keep": 0.5, "tolerance": "5 %"}, "tolerance='5 %'): must be finite"),
        ({"keep": 0.5, "target": float("nan")}, "target=nan): must be finite"),
        ({"keep": 0.5, "stripe": 64.0}, "stripe=64.0): must be a multiple of block, 64"),
        ({"keep": 0.5, "stripe": 96}, "stripe=96): must be a multiple of block, 64"),
        ({"masks": np.zeros((2, 3, 3), np.bool_)}, "shape (2, 3, 3)"),
        ({"keep": 0.5, "method": "best"}, "must be one of stripe, minimal_move, paper"),
        ({"masks": np.ones((2, 3, 3))}, "masks of shape (2, 3, 3) and dtype float64"),
        ({"masks": np.ones((3, 3), np.bool_)}, "masks of shape (3, 3) and dtype bool"),
        ({"masks": "nowhere.npz"}, "cannot read masks from nowhere.npz"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_settings_that_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        SparseConfig(**settings)


def test_masks_of_a_file(tmp_path: Path) -> None:
    masks = make_masks(3, 5)
    save_masks(tmp_path / "masks.npz", masks[0])
    array = SparseConfig(masks=tmp_path / "masks.npz").array
    assert array is not None and (array == masks[:1]).all()
