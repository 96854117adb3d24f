"""Models with block-sparse attention on meshes against one process with dense masked attention."""

import json
import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

from bascule.attention.sparse import Clusters, RuleCall
from bascule.diffusers import Cut, ParallelHandle, SparseConfig, SplitTable, parallelize
from bascule.diffusers.sparse_layers import NUM_SIZES
from bascule.diffusers.verify import leaves_of
from bascule.errors import ConfigError
from bascule.plan.sparse import sparse_imbalance
from bascule.sparse import Strategies
from bascule.workload import load_masks, save_masks
from tests.helpers.calls_made import ALL_TO_ALL, calls_made
from tests.helpers.cli import Console, run
from tests.helpers.inference_cases import (
    Case,
    Gradients,
    Inputs,
    in_float64,
    joined,
    make_inputs,
    make_mesh,
    make_model,
    needs_diffusers,
    same,
    same_gradients,
    step_of,
)
from tests.helpers.inference_toy import TABLE, grads_of, make_toy, toy_gradients, toy_inputs
from tests.helpers.ranks import by_one_rank, on_ranks, raised_by, run_ranks
from tests.helpers.sparse_reference import Form, lens_of, one_process
from tests.helpers.sparse_rules import RULES, clusters
from tests.helpers.sparse_studies import MACHINE
from tests.helpers.sparse_toy import BLOCK, LAYERS, STEPS, make_masks, run_steps, split_toy

F64 = torch.float64
MESHES = [(1, 1), (2, 1), (1, 2), (2, 2)]  # ring, Ulysses
LARGE_MESHES = [(4, 1), (1, 4), (3, 1), (1, 3), (4, 2), (2, 4)]
ORDERS = np.random.default_rng(5).permuted(np.tile(np.arange(19), (6, 1)), axis=1)
BY_SHARE = {"rule": {"keep": 0.6}}
CLUSTERS = {
    "rule": {"rule": Clusters(4, 5, 0.5)},
    "brute": partial(clusters, 4, 5, 0.5, 2),
    "brute_block": 1,
}
TOYS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "masks": ((5, 19), {}),
    "masks, groups of heads": ((6, 13), {"kv_heads": 3}),
    "masks, paper": ((5, 19), {"method": "paper"}),
    "masks, stripe, no text": ((0, 18), {"method": "stripe"}),
    "fewer blocks than ranks": ((1, 3), {}),
    "keep": ((5, 19), BY_SHARE),
    "keep, groups of heads": ((5, 19), {"rule": {"keep": 0.7}, "kv_heads": 3}),
    "mass": ((3, 22), {"rule": {"mass": 0.5}}),
    "masks, orders": ((5, 19), {"orders": ORDERS}),
    "keep, orders, groups of heads": (
        (5, 19),
        {"orders": ORDERS[[0, 0, 2, 2, 4, 4]], "kv_heads": 3, **BY_SHARE},
    ),
    "masks, other blocks of keys": ((5, 19), {"block": (4, 8)}),
    "keep, other blocks of keys": ((5, 19), {"block": (4, 6), **BY_SHARE}),
    "keep, larger blocks of queries, orders": (
        (3, 19),
        {"block": (6, 3), "orders": ORDERS, **BY_SHARE},
    ),
    **{
        name: ((5, 24), {"rule": {"rule": rule}, "brute": brute})
        for name, (rule, brute) in RULES.items()
    },
    "spatial or temporal, groups of heads": (
        (5, 24),
        {"rule": {"rule": RULES["spatial or temporal"][0]}, "kv_heads": 3}
        | {"brute": RULES["spatial or temporal"][1]},
    ),
    "clusters": ((5, 24), CLUSTERS),
    "clusters, groups of heads": ((5, 19), {"kv_heads": 3, **CLUSTERS}),
}
RECOMPUTED = "masks", "keep, groups of heads", "keep, orders, groups of heads"
"""Toys that are recomputed daily."""
MODELS = [Case("wan", 5, 2, 7, (3, 5)), Case("cogvideox", 5, 2, 7, (3, 5))]
JOINT = [
    Case("qwen", 5, 2, 7, (3, 5), ("mask",)),
    Case("hunyuan", 5, 2, 14, (3, 5)),  # 4 ranks get blocks of 4 of its text
    Case("hunyuan1.5", 5, 2, 14, (3, 5), ("image",)),
    Case("flux", 5, 2, 7, (3, 5)),
    Case("ltx2", 5, 2, 6, (3, 5), ("token_times", "guided")),
    Case("lumina2", 4, 2, 7, (3, 3), ("mask",)),
]
SMALL = [Case("wan", 4, 1, 8, (1, 3)), Case("cogvideox", 4, 1, 1, (1, 2))]


def masks_for(segments: tuple[int, int], case: dict[str, Any]) -> Any:
    block = case.get("block", BLOCK)
    q, kv = (
        len(lens_of(segments, n)) for n in (block if isinstance(block, tuple) else (block,) * 2)
    )
    return make_masks(6, max(q, kv))[..., :q, :kv]


@pytest.mark.parametrize(
    ("ring", "ulysses", "toys", "num_steps"),
    [
        (2, 1, list(TOYS)[::2], 2),
        (1, 2, ["masks", *list(TOYS)[1::2]], 2),
        (
            2,
            2,
            ["masks", "fewer blocks than ranks", "keep, orders, groups of heads", "clusters"],
            2,
        ),
        *(
            pytest.param(*mesh, list(TOYS), STEPS, marks=pytest.mark.stress)
            for mesh in (*MESHES, *LARGE_MESHES)
        ),
    ],
)
@on_ranks(lambda ring, ulysses, **_: ring * ulysses)
def test_own_model_forward_backward_verify_recompute_and_undo(
    ring: int, ulysses: int, toys: list[str], num_steps: int
) -> None:
    """Compare so many steps of each toy, and of that with masks alone all."""
    mesh = make_mesh(ring, ulysses)
    for name in toys:
        segments, case = TOYS[name]
        masks = masks_for(segments, case)[: STEPS if name == "masks" else num_steps]
        is_whole = num_steps == STEPS or name in RECOMPUTED
        states, _ = run_steps(mesh, segments, masks=masks, recomputes=is_whole, what=name, **case)
        if name == "masks" and ring * ulysses > 1:
            assert max(state.num_planned for state in states[-1]) > 1


def compare_model(case: Case, mesh: Any, rule: dict[str, float] | None) -> None:
    """Compare three steps."""
    model = make_model(case, F64)
    steps = [make_inputs(case, F64, seed) for seed in range(STEPS)]
    tokens = 2 * case.grid[0] * case.grid[1]
    segments = (tokens,) if case.model == "wan" else (case.text, tokens)
    masks = make_masks(case.heads, len(lens_of(segments, BLOCK)))

    def run(within: Callable[[int], Any]) -> list[tuple[Tensor, Gradients]]:
        outputs = list[tuple[Tensor, Gradients]]()
        for step, inputs in enumerate(steps):
            with within(step):
                outputs.append(step_of(model, inputs))
        return outputs

    def alone(step: int) -> Any:
        return one_process(segments, BLOCK, masks=None if rule else masks[step], rule=rule)

    wanted = by_one_rank(run, alone)
    before = joined(model(**steps[0]))
    seen: dict[str, Any] = dict(rule or {"masks": masks})
    config = SparseConfig(**seen, block=BLOCK, tolerance=0.0, target=1.005)
    with parallelize(model, mesh=mesh, sparse=config) as handle:
        for step, (found, (output, _)) in enumerate(zip(run(nullcontext), wanted, strict=True)):
            same(found[0], output, 1e-9, (case, rule, step))
        handle.average_gradients()
        same_gradients(grads_of(model), wanted[-1][1], 1e-9)
        planned = sum(layer.num_planned for layer in handle.explain().sparse)
        assert planned > LAYERS or rule or case not in MODELS, case
        assert "sparse: 2 layers of density" in str(handle.explain())
        handle.restart()
        assert (verified := handle.verify(**steps[0])).ok, str(verified)
    assert torch.equal(joined(model(**steps[0])), before), (case, rule)


def in_turn(meshes: list[tuple[int, int]], place: int, is_whole: bool) -> list[tuple[int, int]]:
    """Return all meshes, or the one whose turn it is."""
    return meshes if is_whole else [meshes[place % len(meshes)]]


def first_size(meshes: list[tuple[int, int]], **_: Any) -> int:
    return meshes[0][0] * meshes[0][1]


@needs_diffusers
@pytest.mark.slow
@pytest.mark.parametrize(
    ("meshes", "is_whole"),
    [
        ([(2, 1), (1, 2)], False),
        *(
            pytest.param(meshes, True, marks=pytest.mark.stress)
            for meshes in ([(2, 1), (1, 2)], [(2, 2)], [(4, 1), (1, 4)])
        ),
    ],
    ids=str,
)
@on_ranks(first_size)
def test_wan_and_cogvideox_over_three_steps(meshes: list[tuple[int, int]], is_whole: bool) -> None:
    rules: list[dict[str, float] | None] = [None, {"keep": 0.5}]
    jobs = [(MODELS[0], rules[0]), (MODELS[0], rules[1]), (MODELS[1], rules[1])]
    jobs += [(MODELS[1], rules[0]), *((case, None) for case in SMALL)]
    made = {degrees: make_mesh(*degrees) for degrees in meshes}
    with in_float64(F64):
        for place, (case, rule) in enumerate(jobs):
            for degrees in in_turn(meshes, place, is_whole):
                compare_model(case, made[degrees], rule)


def dense_with_blocks(
    model: Any, inputs: Inputs, forms: list[Form], block: int, rule: Any
) -> list[Tensor]:
    """Return outputs of dense attention with the blocks and the model's own mask."""
    with torch.no_grad(), one_process(forms, block, rule=rule) as used:
        outputs = leaves_of(model(**inputs))
    assert len(used) == len(forms), (forms, [one.shape for one in used])
    assert min(float(one.double().mean()) for one in used) < 0.9
    return outputs


@needs_diffusers
@pytest.mark.parametrize(
    ("meshes", "is_whole"),
    [
        ([(2, 1), (1, 2)], False),
        *(
            pytest.param(meshes, True, marks=pytest.mark.stress)
            for meshes in ([(1, 1)], [(2, 1), (1, 2)], [(2, 2)])
        ),
    ],
    ids=str,
)
@on_ranks(first_size)
def test_models_with_masks_and_joint_text(meshes: list[tuple[int, int]], is_whole: bool) -> None:
    """Text sees all and is seen by all, pads are not seen; audio and video apart."""
    made = {degrees: make_mesh(*degrees) for degrees in meshes}
    by_clusters = CLUSTERS["rule"], 1, CLUSTERS["brute"]
    by_share: Any = {"keep": 0.4}, BLOCK, {"keep": 0.4}
    jobs = [*((case, by_share) for case in JOINT), (JOINT[0], by_clusters)]
    for place, (case, (seen, block, rule)) in enumerate(jobs):
        config = SparseConfig(block=BLOCK, **seen)
        for degrees in in_turn(meshes, place, is_whole):
            with in_float64(F64):
                model, inputs = make_model(case, F64), make_inputs(case, F64)
                split = parallelize(model, mesh=made[degrees], sparse=config)
                with torch.no_grad(), split as handle:
                    outputs = leaves_of(model(**inputs))
                    keys = [layer.key for layer in handle.explain().sparse]
                    assert (verified := handle.verify(**inputs)).ok, str(verified)
                forms = [Form(key.segments, tuple(n == "text" for n in key.names)) for key in keys]
                wanted = by_one_rank(dense_with_blocks, model, inputs, forms, block, rule)
            for found, whole in zip(outputs, wanted, strict=True):
                same(found, whole, 1e-9, (degrees, case, seen))


@pytest.mark.some(1)
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
@on_ranks(lambda ring, ulysses: ring * ulysses)
def test_layers_steps_resolutions_and_bytes(ring: int, ulysses: int) -> None:
    """A dense layer, two passes a step, one mask for all, resolutions, and bytes on the wire."""
    mesh, rank = make_mesh(ring, ulysses), dist.get_rank()
    inputs = [toy_inputs(text=5, image=19, seed=seed) for seed in range(2)]
    masks = make_masks(6, len(lens_of((5, 19), BLOCK)))

    def compare(model: nn.Module, given: dict[str, Tensor], **seen: Any) -> None:
        with torch.no_grad():
            with one_process((given["text"].shape[1], given["image"].shape[1]), BLOCK, **seen):
                wanted = make_toy(num_blocks=LAYERS)(**given)
            same(model(**given), wanted, 1e-10, seen)

    with split_toy(mesh, masks=masks, dense_layers=(1,)) as (model, handle):
        compare(model, inputs[0], masks=masks[0], dense_layers=(1,))
        assert len(handle.explain().sparse) == 1
    with split_toy(mesh, masks=masks, passes_per_step=2) as (model, handle):
        for number, step in enumerate((0, 0, 1, 1, 2)):
            compare(model, inputs[number % 2], masks=masks[step])
    with split_toy(mesh, masks=masks[2, 1]) as (model, handle):
        for given in inputs:
            compare(model, given, masks=masks[2, 1:])
        assert all(layer.num_planned == 1 for layer in handle.explain().sparse)
    with split_toy(mesh, keep=0.6) as (model, handle):
        for number, image in enumerate((10, 19, 10)):
            other = toy_inputs(text=5, image=image, seed=number)
            compare(model, other, rule={"keep": 0.6})
        with calls_made() as sent, torch.no_grad():
            model(**inputs[0])
        cost = handle.explain().chosen
        assert sent.moved_bytes == cost.traffic[rank].total and sum(cost.tokens) == 24
    # Rows that a plan moves travel with those of heads.
    ways: list[dict[str, Any]] = [{}, {"method": "stripe"}] if ulysses > 1 else []
    for settings in ways:
        with split_toy(mesh, masks=masks, **settings) as (model, handle), torch.no_grad():
            model(**inputs[0])
            with calls_made() as sent:
                model(**inputs[0])
            assert sent.counts[ALL_TO_ALL] == 2 * LAYERS, settings
            moved = sum(sum(layer.used.moved) for layer in handle.explain().sparse)
            assert (moved > 0) == (ring > 1), settings  # homes begin anew with each segment
    model, config = make_toy(num_blocks=LAYERS), SparseConfig(masks=masks, block=BLOCK)
    args: Any = {"mesh": mesh, "table": TABLE, "sparse": config, "comm_dtype": "int8"}
    with torch.no_grad(), parallelize(model, **args) as handle:
        model(**inputs[0])
        with calls_made() as sent:
            model(**inputs[0])
        assert sent.moved_bytes == handle.explain().chosen.traffic[rank].total
        assert 1e-4 < max(handle.verify(**inputs[0]).errors.values()) < 0.05


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
@on_ranks(2)
def test_without_balance_it_is_as_exact_and_less_even(ring: int, ulysses: int) -> None:
    segments, rhos = (5, 19), list[float]()
    masks = make_masks(6, len(lens_of(segments, BLOCK)), steps=1)
    inputs, mesh = toy_inputs(text=5, image=19, seed=0), make_mesh(ring, ulysses)
    with one_process(segments, BLOCK, masks=masks[0]):
        wanted = toy_gradients(make_toy(num_blocks=LAYERS), inputs)[0]
    # Text and three blocks of the image, and the rest; balanced on a ring, the third turn of the
    # image begins at rank 1.
    balanced = (4 + 8, 1 + 11) if ring == 2 else (4 + 11, 1 + 8)
    ways: list[tuple[dict[str, Any], tuple[int, int]]] = [
        ({"method": "in_order", "stripe": 3 * BLOCK}, (5 + 12, 7)),
        ({}, balanced),
    ]
    for settings, tokens in ways:
        with split_toy(mesh, masks=masks, **settings) as (model, handle):
            same(toy_gradients(model, inputs)[0], wanted, 1e-10, settings)
            explained = handle.explain()
            assert explained.chosen.tokens == tokens, settings
            rhos.append(sum(layer.imbalance for layer in explained.sparse) / LAYERS)
    assert rhos[0] > rhos[1] + 0.02


@on_ranks(2)
def test_plans_are_kept_for_the_latest_lengths() -> None:
    """Plans are kept while lengths come back, and not for ever."""
    most = NUM_SIZES * LAYERS
    with torch.no_grad(), split_toy(make_mesh(2, 1), keep=0.5, tolerance=9.0) as (model, handle):
        layers = handle.parts[0].sparse
        assert layers is not None
        for number, image in enumerate(range(8, 28)):
            model(**toy_inputs(text=3, image=image))
            assert len(layers) == min(LAYERS * (number + 1), most), number
        for image in (50, 51, 52, 53, 50, 54, 50):
            model(**toy_inputs(text=3, image=image))
        # In each of three passes.
        assert [layer.num_kept for layer in handle.explain().sparse] == [3] * LAYERS
        for turn in range(4):  # two prompts, at two resolutions
            for text, image in ((3, 10), (3, 19), (5, 10), (5, 19)):
                model(**toy_inputs(text=text, image=image, seed=turn))
                planned = sum(layer.num_planned for layer in handle.explain().sparse)
                assert planned == LAYERS, (turn, text, image)


@on_ranks(2)
def test_restart_forgets_plans() -> None:
    """The first step of another image plans as the first of all did, with a rule and with masks."""
    rules: list[dict[str, Any]] = [
        {"mass": 0.3},
        {"masks": make_masks(6, len(lens_of((5, 19), BLOCK)))},
    ]
    for settings in rules:
        with torch.no_grad(), split_toy(make_mesh(1, 2), **settings) as (model, handle):
            first, second = images = list[tuple[str, int]](), list[tuple[str, int]]()
            for states in images:
                for seed in range(STEPS):
                    model(**toy_inputs(text=5, image=19, seed=seed))
                    layers = handle.explain().sparse
                    states += [(layer.used.digest, layer.num_planned) for layer in layers]
                handle.restart()
        assert first == second, list(settings)
        assert len({digest for digest, _ in first}) > 1, list(settings)  # else nothing is shown


@on_ranks(2)
def test_ranks_without_tokens_are_told_of_once_and_not_by_each_layer() -> None:
    """A block leaves one of two ranks without tokens."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bascule.diffusers.sparse_layers").addHandler(handler)
    with torch.no_grad(), split_toy(make_mesh(2, 1), keep=0.5) as (model, _):
        for _ in range(2):
            model(**toy_inputs(text=0, image=BLOCK - 1))
    (said,) = heard
    assert said.startswith("sparse: 1 blocks, dealt 4 tokens at a time, leave some of 2")


class Causal(nn.Module):
    """Attends to what came before, as the mask of the whole sequence says if there is one."""

    def __init__(self, mask: Tensor | None = None) -> None:
        super().__init__()
        self.head, self.mask = nn.Linear(4, 4).double(), mask

    def forward(self, image: Tensor) -> Tensor:
        x = image[:, None].expand(-1, 6, -1, -1)
        mask, attend = self.mask, functional.scaled_dot_product_attention
        return self.head(attend(x, x, x, mask, is_causal=mask is None).mean(1))


CAUSAL = SplitTable(
    segments=("image",),
    inputs={"": {"image": Cut("image")}},
    gathers={"head": Cut("image")},
    blocks={},
)


def wrong(q: Tensor, k: Tensor, at: RuleCall) -> Tensor:
    return torch.ones(1, 2)


@on_ranks(2)
def test_refusals_on_all_ranks() -> None:
    mesh, inputs, rank = make_mesh(2, 1), toy_inputs(text=5, image=19), dist.get_rank()
    masks = make_masks(6, 7)

    def expect(words: str, call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        classes, text = raised_by(call, *args, **kwargs)
        assert words in text, text
        assert "ConfigError" in classes or "CommError" in classes, classes

    orders = "orders (heads, tokens) of shape (6, 18) for layer 0, whose segments ('text', 'image')"
    blocks = "masks of 6 heads and 6 x 6 blocks, but the model has 6 heads and 7 blocks of 4 tokens"
    in_a_pass: list[tuple[str, dict[str, Any]]] = [
        (blocks, {"masks": masks[..., :6, :6]}),
        ("masks of 5 heads and 7 x 7 blocks, but the model has 6", {"masks": masks[:, :, :5]}),
        ("masks of 3 layers for a model with 2 attention", {"masks": masks[:, [0, 0, 1]]}),
        (orders, {"keep": 0.5, "orders": ORDERS[:, :18]}),
        ("orders of 3 layers for a model with 2 attention", {"keep": 1, "orders": [ORDERS] * 3}),
        ("order[0] is not an order", {"keep": 0.5, "orders": ORDERS // 2}),
        ("in orders of the heads", {"rule": RULES["radial"][0], "orders": ORDERS}),
        ("the rule wrong gave a Tensor of shape (1, 2)", {"rule": wrong}),
        ('method "paper" moves keys', {"keep": 0.5, "method": "paper"}),
        ("kernel 'cpu_flash'", {"keep": 0.5, "kernel": "cpu_flash"}),
        ("dense_layers names 2, but the model has", {"keep": 0.5, "dense_layers": (0, 2)}),
    ]
    for words, settings in in_a_pass:
        with split_toy(mesh, **settings) as (model, _):
            expect(words, model, **inputs)
    with split_toy(mesh, masks=masks[:1].repeat(2, axis=0)) as (model, handle):
        for _ in range(2):
            model(**inputs)
        expect("step 2, but masks end at step 1: call handle.restart()", model, **inputs)
        expect("step 2, but masks", handle.verify, **inputs)
        handle.restart()
        model(**inputs)
    pairs, floats = torch.ones(19, 19, dtype=torch.bool).tril(), torch.zeros(2, 1, 1, 19).double()
    for words, mask in (
        ("is_causal=True: it accepts only masks of keys", None),
        ("a mask of [1, 1, 19, 19], torch.bool", pairs),
        ("a mask of [2, 1, 1, 19], torch.float64", floats),
    ):
        model = Causal(mask)
        with parallelize(model, mesh=mesh, table=CAUSAL, sparse=SparseConfig(keep=0.5)):
            expect(f"attention got {words}", model, inputs["image"])
    needs_text = replace(CAUSAL, nonempty=("image",))
    with parallelize(Causal(), mesh=mesh, table=needs_text, sparse=SparseConfig(keep=1)) as handle:
        words = "19 tokens of image, dealt 64 at a time, leave some of 2 ranks without any"
        expect(words, handle.model, inputs["image"])
        expect("use blocks of 18 or fewer tokens", handle.model, inputs["image"])
    unlike = masks.copy()
    unlike[-1, -1, -1, -1, -1] ^= rank == 1
    slower = replace(MACHINE, launch_s=(1.0 + 1e-9 * rank) * 1e-5)
    at_once: list[tuple[str, SparseConfig]] = [
        ("disagree on sparse: keep: ", SparseConfig(keep=0.5 + 0.1 * rank)),
        ("disagree on sparse: masks: ", SparseConfig(masks=unlike)),
        (
            "disagree on sparse: strategies' machine",
            SparseConfig(keep=1, strategies=Strategies(slower)),
        ),
        (
            "1 x 3 (ring x Ulysses) on 2 ranks: the product must be 2",
            SparseConfig(keep=0.5, strategies=Strategies(MACHINE, meshes=((1, 3),))),
        ),
    ]
    split: dict[str, Any] = {"mesh": mesh, "table": TABLE}
    for words, config in at_once:
        expect(words, parallelize, make_toy(), sparse=config, **split)
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "with nothing: give one of masks, keep, mass and rule"),
        ({"keep": 0.5, "mass": 0.5}, "with keep and mass"),
        ({"keep": 1.5}, "keep=1.5): must be"),
        ({"mass": float("nan")}, "mass=nan): must be"),
        ({"keep": 0.0}, "keep=0.0): must be"),
        ({"rule": 0.5}, "rule is 0.5; it must be a function"),
        ({"keep": 0.5, "dense_layers": (0, -1)}, "dense_layers[1]=-1): must be an integer"),
        ({"keep": 0.5, "block": 0}, "block=0): must be an integer, at least 1"),
        ({"keep": 0.5, "block": (64, 0)}, "block[1]=0): must be an integer, at least 1"),
        ({"keep": 0.5, "block": (64,)}, "block=(64,)): give one number, or one for queries"),
        ({"keep": 0.5, "block": (64, 96), "stripe": 96}, "must be a multiple of block, (64, 96)"),
        ({"keep": 0.5, "orders": np.ones((2, 4))}, "orders of shape (2, 4) and dtype float64"),
        ({"keep": 0.5, "passes_per_step": 1.5}, "passes_per_step=1.5): must be an integer"),
        ({"keep": 0.5, "tolerance": -0.1}, "tolerance=-0.1): must be"),
        ({"keep": 0.5, "target": 0.9}, "target=0.9): must be finite, at least 1"),
        ({"keep": 0.5, "stripe": 96}, "stripe=96): must be a multiple of block, 64"),
        ({"keep": 0.5, "method": "best"}, "method='best'): must be \"stripe\""),
        ({"keep": 0.5, "strategies": 3}, "strategies=3): give Strategies(machine)"),
        ({"masks": np.zeros((2, 3, 3), np.bool_)}, "0 of them True"),
        ({"masks": np.ones((2, 3, 3))}, "masks of shape (2, 3, 3) and dtype float64"),
        ({"masks": np.ones((3, 3), np.bool_)}, "masks of shape (3, 3) and dtype bool"),
        ({"masks": "nowhere.npz"}, "cannot read masks from nowhere.npz"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_settings_that_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        SparseConfig(**settings)


def save_and_use(path: Path, ring: int, ulysses: int) -> None:
    """Save what a rule chose in three steps, a layer of three being dense, and compute by it."""
    mesh, kinds = make_mesh(ring, ulysses), {"dense_layers": (1,)}
    inputs = [toy_inputs(text=5, image=19, seed=seed, batch=1) for seed in range(STEPS)]

    def refuse(words: str, handle: ParallelHandle, target: Any, *given: Inputs) -> None:
        def save() -> None:
            with handle.save_masks(target):
                for one in given:
                    handle.model(**one)

        text = raised_by(save)[1]
        assert words in text, text

    with torch.no_grad():
        with split_toy(mesh, 6, 3, mass=0.6, **kinds) as (model, handle):
            with handle.save_masks(path):
                outputs = [model(**one) for one in inputs]
                handle.verify(**inputs[0])  # is no step
            model(**inputs[0])
        with split_toy(mesh, 6, 3, masks=path, **kinds) as (model, _):
            for step, (given, wanted) in enumerate(zip(inputs, outputs, strict=True)):
                same(model(**given), wanted, 1e-10, step)
        with split_toy(mesh, 6, 3, **CLUSTERS["rule"]) as (_, handle):
            target = path.with_name("clusters.npz")
            refuse("Clusters form new blocks in each step", handle, target, inputs[0])
        with split_toy(mesh, 6, 3, mass=0.6) as (_, handle):
            both = toy_inputs(text=5, image=19, batch=2)
            refuse("samples of a batch see different blocks", handle, path, both)
            refuse("are an .npz file", handle, "masks.npy")
            refuse("cannot write masks to", handle, path.parent / "missing" / "x.npz")
            refuse("0 masks of shape (0, 0, 0) are no whole passes of 0 layers", handle, path)
            other = toy_inputs(text=5, image=9, batch=1)
            sizes = "a mask of shape (6, 5, 5) after masks of (6, 7, 7)"
            refuse(sizes, handle, path, inputs[0], other)


@pytest.mark.some(1)
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (1, 2), (2, 2)])
def test_masks_that_a_running_model_saves(
    capsys: Console, tmp_path: Path, ring: int, ulysses: int
) -> None:
    """They are those of one process, and give the outputs again; the command reads them."""
    path = tmp_path / "masks.npz"
    run_ranks(save_and_use, ring * ulysses, path, ring, ulysses)
    masks = load_masks(path)
    assert masks.shape == (STEPS, 3, 6, 7, 7) and not (tmp_path / "masks.npz.part").exists()
    for step in range(STEPS):
        inputs = toy_inputs(text=5, image=19, seed=step, batch=1)
        with (
            torch.no_grad(),
            one_process((5, 19), BLOCK, rule={"mass": 0.6}, dense_layers=(1,)) as used,
        ):
            make_toy(num_blocks=3)(**inputs)
        np.testing.assert_array_equal(masks[step], torch.cat(used).numpy())
    assert 0.2 < masks[:, 0].mean() < 0.9
    mesh = "--ulysses 2 --ring 2 --layers 1 --steps 1 --block 4 --json -"
    code, out, err = run(capsys, "sparse", "--masks", str(path), *mesh.split())
    assert code == 0, err
    facts = json.loads(out)
    assert facts["density"] == pytest.approx(masks[0, 0].mean())
    assert facts["rho_before"] == pytest.approx(sparse_imbalance(masks[0, 0], 2, 2))


def test_masks_of_a_file(tmp_path: Path) -> None:
    masks = make_masks(3, 5)
    save_masks(tmp_path / "masks.npz", masks[0])
    array = SparseConfig(masks=tmp_path / "masks.npz").array
    assert array is not None and (array == masks[:1]).all()
