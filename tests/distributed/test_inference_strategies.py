"""Layers that choose their mesh in every step by predicted seconds: still exact."""

from typing import Any

import numpy as np
import pytest

from bascule.plan.sparse.choose import Strategies
from tests.helpers.inference_cases import make_mesh
from tests.helpers.ranks import on_ranks
from tests.helpers.sparse_reference import Bools, lens_of
from tests.helpers.sparse_studies import machine_of
from tests.helpers.sparse_toy import BLOCK, LAYERS, run_steps

SEGMENTS = (0, 32)
DENSE_STEPS = (True, False, False, True)


MACHINE = machine_of(1.5e9, 1e9, 0.0)
"""With much work a ring hides what it passes on; with little, all-to-alls are cheaper."""


def make_masks() -> Bools:
    """Nearly all is seen, or nearly nothing, by one head more than by the others."""
    num_blocks = len(lens_of(SEGMENTS, BLOCK))
    drawn = np.random.default_rng(0).random((len(DENSE_STEPS), LAYERS, 6, num_blocks, num_blocks))
    densities = np.where(DENSE_STEPS, 0.95, 0.02)
    masks = drawn < densities[:, None, None, None, None]
    masks[:, :, 3] |= drawn[:, :, 3] < 0.3
    return masks


def over_steps(
    ring: int, ulysses: int, rule: dict[str, float] | None
) -> tuple[list[list[tuple[int, int]]], list[int], str]:
    """(Ulysses, ring) of the layers by step, their switches at the end, and what is explained."""
    # So uneven a target that nothing moves: then all-to-alls are those of Ulysses alone.
    settings: dict[str, Any] = {"target": 9.0, "strategies": Strategies(MACHINE), "rule": rule}
    settings["recomputes"] = ulysses == 1
    mesh = make_mesh(ring, ulysses)
    states, explained = run_steps(mesh, SEGMENTS, masks=make_masks(), **settings)
    meshes = [[(state.ulysses, state.ring) for state in layers] for layers in states]
    return meshes, [state.num_switches for state in states[-1]], explained


@pytest.mark.parametrize(
    ("ring", "ulysses"), [(4, 1), (1, 4), pytest.param(2, 2, marks=pytest.mark.stress)]
)
@on_ranks(lambda ring, ulysses: ring * ulysses)
def test_layers_change_meshes_as_their_work_changes(ring: int, ulysses: int) -> None:
    num_ranks = ring * ulysses
    (dense, *sparse, again), switches, explained = over_steps(ring, ulysses, None)
    assert dense == again == [(1, num_ranks)] * LAYERS
    assert sparse == [[(num_ranks, 1)] * LAYERS] * 2 and switches == [2] * LAYERS
    said = f"{LAYERS} on ring {num_ranks} x Ulysses 1; {2 * LAYERS} mesh switches so far"
    assert said in explained


@pytest.mark.parametrize("ulysses", [2, pytest.param(4, marks=pytest.mark.stress)])
@on_ranks(lambda ulysses: ulysses)
def test_a_rule_is_followed_from_the_second_step(ulysses: int) -> None:
    (first, *others), switches, _ = over_steps(1, ulysses, {"keep": 0.9})
    assert first == [(ulysses, 1)] * LAYERS and switches == [1] * LAYERS
    assert all(ring > 1 for layers in others for _, ring in layers), others
