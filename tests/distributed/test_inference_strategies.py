"""Layers that choose their mesh in every step, and attention without balance: still exact."""

from contextlib import suppress
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bascule.attention.sparse import timing
from bascule.attention.sparse.timing import CallShape, measure_attention_latency
from bascule.comm.mesh import AttentionMesh, meshes_over
from bascule.diffusers import SparseConfig, parallelize
from bascule.diffusers.sparse_layers import SparseLayer
from bascule.errors import ConfigError
from bascule.plan.machine import AttentionLatency, AttentionLoad
from bascule.plan.sparse.choose import Strategies, all_degrees
from tests.helpers.inference_cases import difference, make_mesh
from tests.helpers.inference_toy import (
    TABLE,
    grads_of,
    make_toy,
    toy_gradients,
    toy_inputs,
    worst,
)
from tests.helpers.ranks import raised_by, run_ranks
from tests.helpers.sparse_reference import Bools, lens_of, one_process
from tests.helpers.sparse_studies import even_load

BLOCK, LAYERS, SEGMENTS = 4, 2, (0, 32)
DENSE_STEPS = (True, False, False, True)


def latency_for(num_ranks: int) -> AttentionLatency:
    """With much work a ring hides what it passes on; with little, all-to-alls are cheaper."""
    all_to_all, p2p = (0.03, 700.0) if num_ranks == 2 else (0.06, 350.0)
    return AttentionLatency(0.0, all_to_all, p2p, 0.0, 0.5, 0.0)


def make_masks() -> Bools:
    """Nearly all is seen, or nearly nothing, by one head more than by the others."""
    num_blocks = len(lens_of(SEGMENTS, BLOCK))
    drawn = np.random.default_rng(0).random((len(DENSE_STEPS), LAYERS, 6, num_blocks, num_blocks))
    densities = np.where(DENSE_STEPS, 0.95, 0.02)
    masks = drawn < densities[:, None, None, None, None]
    masks[:, :, 3] |= drawn[:, :, 3] < 0.3
    return masks


def over_steps(ring: int, ulysses: int, rule: dict[str, float] | None) -> dict[str, Any]:
    """Every step against one process, forward and backward; with what the layers used."""
    masks, model = make_masks(), make_toy(num_blocks=LAYERS)
    given: dict[str, Any] = rule or {"masks": masks}
    strategies = Strategies(latency_for(ring * ulysses))
    # So uneven a target that nothing moves: then all-to-alls are those of Ulysses alone.
    config = SparseConfig(block=BLOCK, tolerance=0.0, target=9.0, strategies=strategies, **given)
    found: dict[str, Any] = {"errors": [], "used": [], "ok": []}
    with parallelize(model, mesh=make_mesh(ring, ulysses), table=TABLE, sparse=config) as handle:
        for step in range(len(DENSE_STEPS)):
            inputs = toy_inputs(text=SEGMENTS[0], image=SEGMENTS[1], seed=step)
            with one_process(SEGMENTS, BLOCK, masks=None if rule else masks[step], rule=rule):
                output, grads = toy_gradients(make_toy(num_blocks=LAYERS), inputs)
            found["ok"].append(handle.verify(**inputs).ok)
            found["errors"].append(difference(toy_gradients(model, inputs)[0], output))
            handle.average_gradients()
            found["errors"].append(worst(grads_of(model), grads))
            found["used"].append([used_by(layer) for layer in handle.explain().sparse])
        found["said"] = str(handle.explain())
        found["switches"] = [layer.num_switches for layer in handle.explain().sparse]
        found["recomputed"] = recomputed(model, handle, rule, masks)
    return found


def used_by(layer: SparseLayer) -> tuple[int, int]:
    return layer.used.ulysses_degree, layer.used.ring_degree


def recomputed(model: Any, handle: Any, rule: dict[str, float] | None, masks: Bools) -> float:
    """Gradients with checkpointing: the mesh of the forward pass computes again."""
    handle.restart()
    model.run = handle.checkpoint
    inputs = toy_inputs(text=SEGMENTS[0], image=SEGMENTS[1], seed=0)
    with one_process(SEGMENTS, BLOCK, masks=None if rule else masks[0], rule=rule):
        _, grads = toy_gradients(make_toy(num_blocks=LAYERS), inputs)
    toy_gradients(model, inputs)
    handle.average_gradients()
    return worst(grads_of(model), grads)


@pytest.mark.parametrize(
    ("ring", "ulysses"),
    [(2, 1), (1, 2), (2, 2), pytest.param(1, 4, marks=pytest.mark.stress), (4, 1)],
)
def test_layers_change_meshes_as_their_work_changes(ring: int, ulysses: int) -> None:
    num_ranks = ring * ulysses
    by_rank = run_ranks(over_steps, num_ranks, ring, ulysses, None)
    for found in by_rank:
        assert max(found["errors"]) < 1e-10 and found["recomputed"] < 1e-10, found
        assert all(found["ok"]) and found["used"] == by_rank[0]["used"], found
        dense, *sparse, again = found["used"]
        assert dense == again == [(1, num_ranks)] * LAYERS, found["used"]
        assert sparse == [[(2, num_ranks // 2)] * LAYERS] * 2, found["used"]
        assert found["switches"] == [2] * LAYERS
        assert (
            f"{LAYERS} on ring {num_ranks} x Ulysses 1; {2 * LAYERS} mesh switches so far"
            in found["said"]
        )


@pytest.mark.parametrize("ulysses", [2, 4])
def test_a_rule_is_followed_from_the_second_step(ulysses: int) -> None:
    for found in run_ranks(over_steps, ulysses, 1, ulysses, {"keep": 0.9}):
        assert max(found["errors"]) < 1e-10 and found["recomputed"] < 1e-10, found
        assert all(found["ok"])
        first, *others = found["used"]
        assert first == [(ulysses, 1)] * LAYERS
        assert all(ring > 1 for layers in others for _, ring in layers), found["used"]
        assert found["switches"] == [1] * LAYERS


def unbalanced(ring: int, ulysses: int) -> list[tuple[float, float, tuple[int, ...]]]:
    """Error, mean imbalance and tokens of the ranks, without and with balance."""
    segments, found = (5, 19), list[tuple[float, float, tuple[int, ...]]]()
    num_blocks = len(lens_of(segments, BLOCK))
    masks = make_masks()[1:2, ..., :num_blocks, :num_blocks]
    inputs = toy_inputs(text=segments[0], image=segments[1], seed=0)
    with one_process(segments, BLOCK, masks=masks[0]):
        output: Tensor = toy_gradients(make_toy(num_blocks=LAYERS), inputs)[0]
    for settings in ({"method": "in_order", "stripe": 3 * BLOCK}, {}):
        config = SparseConfig(masks=masks, block=BLOCK, **settings)
        model = make_toy(num_blocks=LAYERS)
        mesh = make_mesh(ring, ulysses)
        with parallelize(model, mesh=mesh, table=TABLE, sparse=config) as handle:
            ok = handle.verify(**inputs).ok
            error = difference(toy_gradients(model, inputs)[0], output) if ok else 1.0
            said = handle.explain()
            rho = sum(layer.imbalance for layer in said.sparse) / LAYERS
            found.append((error, rho, said.chosen.tokens))
    return found


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_without_balance_it_is_as_exact_and_less_even(ring: int, ulysses: int) -> None:
    for without, balanced in run_ranks(unbalanced, 2, ring, ulysses):
        assert max(without[0], balanced[0]) < 1e-10
        assert without[1] > balanced[1] + 0.02
        assert without[2] == (5 + 12, 7)  # text and three blocks of the image, and the rest
        assert balanced[2] == (4 + 11, 1 + 8)


def measured() -> tuple[AttentionLatency, bool]:
    """A fit, and whether groups are those that strategies use."""
    mesh = make_mesh(2, 1)
    shape = CallShape(512, 4, 16, dtype=torch.float32)
    latency = None
    while latency is None:  # seconds of a busy machine may be such that no fit explains them
        with suppress(ConfigError):
            latency = measure_attention_latency(mesh, shape, device="cpu", rounds=2)
    one, other = (meshes_over(AttentionMesh.of(mesh)) for _ in range(2))
    return latency, all(one[key].name == other[key].name for key in all_degrees(2))


def test_the_fit_of_measured_calls_is_the_same_on_all_ranks() -> None:
    (first, is_kept), *others = run_ranks(measured, 2)
    assert is_kept and all(other == (first, True) for other in others)
    assert first.fit_error is not None
    assert first(even_load((2, 1), seq_len=512, num_heads=4, head_dim=16)) > 0


def timed(num_heads: int) -> tuple[list[AttentionLoad], list[float], set[int]]:
    """What calls would take, drawn by rank, round and call; with the tokens of a rank."""
    mesh, drawn = AttentionMesh.of(make_mesh(2, 1)), DRAWN[dist.get_rank(), :, :, num_heads - 1]
    num_calls, asked = (2 + min(num_heads, 2) - 1) * 6, list[Any]()

    def seconds(call: Any, *_: Any) -> float:
        asked.append(call)
        return drawn[(len(asked) - 1) // num_calls, (len(asked) - 1) % num_calls]

    shape = CallShape(num_tokens=512, num_heads=num_heads, head_dim=8, block=4)
    with mock.patch.object(timing, "_seconds", seconds):
        given = {"device": torch.device("cpu"), "rounds": 3}
        loads, found = timing.time_sparse_attention(mesh, shape, **given)
    assert len(asked) == 4 * num_calls == 4 * len(loads)
    return loads, found, {call.q[2] for call in asked}


DRAWN = np.random.default_rng(0).random((2, 4, 18, 2))  # by rank, round, call and heads
DRAWN[:, 0] += 100.0  # of the round that warms up


@pytest.mark.parametrize("num_heads", [1, 2])
def test_timed_are_the_slowest_ranks_with_as_many_tokens_on_every_mesh(num_heads: int) -> None:
    """Of 512 and 128 tokens, of which each sees none, an eighth or half, on two ranks; or alone."""
    meshes = [(1, 1), (2, 1), (1, 2)] if num_heads == 2 else [(1, 1), (1, 2)]
    for loads, seconds, tokens in run_ranks(timed, 2, num_heads):
        slowest = DRAWN[:, 1:, : len(loads), num_heads - 1].max(axis=0)
        assert seconds == np.median(slowest, axis=0).tolist()
        assert tokens == {256, 64}
        wanted = [
            (degrees, num_heads * share * seen)
            for degrees in meshes
            for share in (256, 64)
            for seen in (share * max(degrees) * density for density in (0, 1 / 8, 1 / 2))
        ]
        assert sorted((load.degrees, load.work) for load in loads) == sorted(wanted)


def refused() -> list[tuple[list[str], str]]:
    mesh, latency = make_mesh(2, 1), latency_for(2)
    one = AttentionLatency(float(dist.get_rank()), 0.0, 1.0, 0.0, 1.0, 0.0)
    configs = [
        SparseConfig(keep=0.5, strategies=Strategies(latency, meshes=((3, 1),))),
        SparseConfig(keep=0.5, strategies=Strategies(one)),
    ]
    return [
        raised_by(parallelize, make_toy(), mesh=mesh, table=TABLE, sparse=config)
        for config in configs
    ]


def test_what_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(refused, 2)
    assert first == second
    assert "3 x 1 ranks (Ulysses x ring) of 2: the product must be 2" in first[0][1]
    assert "disagree on sparse: strategies' latency" in first[1][1]
