"""Layers that choose their mesh in every step by measured latencies: still exact."""

from contextlib import suppress
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bascule.attention.sparse import timing
from bascule.attention.sparse.timing import CallShape, measure_attention_latency
from bascule.comm.mesh import AttentionMesh, meshes_over
from bascule.errors import ConfigError
from bascule.machine.cluster import AttentionLatency, AttentionLoad
from bascule.plan.sparse.choose import Strategies
from bascule.plan.topology import all_degrees
from tests.helpers.inference_cases import make_mesh
from tests.helpers.ranks import run_ranks
from tests.helpers.sparse_reference import Bools, lens_of
from tests.helpers.sparse_studies import even_load
from tests.helpers.sparse_toy import BLOCK, LAYERS, run_steps

SEGMENTS = (0, 32)
DENSE_STEPS = (True, False, False, True)


def latency_for(num_ranks: int) -> AttentionLatency:
    """With much work a ring hides what it passes on; with little, all-to-alls are cheaper."""
    all_to_all, p2p = (0.03, 700.0) if num_ranks == 2 else (0.06, 250.0)
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
    strategies = Strategies(latency_for(ring * ulysses))
    # So uneven a target that nothing moves: then all-to-alls are those of Ulysses alone.
    settings: dict[str, Any] = {"target": 9.0, "strategies": strategies, "rule": rule}
    settings["recomputes"] = ring * ulysses == 2
    return run_steps(make_mesh(ring, ulysses), SEGMENTS, masks=make_masks(), **settings)


def used_in(found: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """(Ulysses, ring) of the layers, step by step; all is exact and alike."""
    assert max(found["errors"]) < 1e-10 and all(found["ok"]), found
    return [[state[1:3] for state in layers] for layers in found["states"]]


@pytest.mark.parametrize(
    ("ring", "ulysses"),
    [
        *[(1, 2), (4, 1)],
        *(pytest.param(*mesh, marks=pytest.mark.stress) for mesh in [(2, 1), (2, 2), (1, 4)]),
    ],
)
def test_layers_change_meshes_as_their_work_changes(ring: int, ulysses: int) -> None:
    num_ranks = ring * ulysses
    by_rank = run_ranks(over_steps, num_ranks, ring, ulysses, None)
    for found in by_rank:
        dense, *sparse, again = used_in(found)
        assert dense == again == [(1, num_ranks)] * LAYERS
        assert sparse == [[(2, num_ranks // 2)] * LAYERS] * 2
        assert found["states"] == by_rank[0]["states"]
        assert [state[-1] for state in found["states"][-1]] == [2] * LAYERS
        assert (
            f"{LAYERS} on ring {num_ranks} x Ulysses 1; {2 * LAYERS} mesh switches so far"
            in found["explained"]
        )


@pytest.mark.parametrize("ulysses", [2, pytest.param(4, marks=pytest.mark.stress)])
def test_a_rule_is_followed_from_the_second_step(ulysses: int) -> None:
    for found in run_ranks(over_steps, ulysses, 1, ulysses, {"keep": 0.9}):
        first, *others = used_in(found)
        assert first == [(ulysses, 1)] * LAYERS
        assert all(ring > 1 for layers in others for _, ring in layers), others
        assert [state[-1] for state in found["states"][-1]] == [1] * LAYERS


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
