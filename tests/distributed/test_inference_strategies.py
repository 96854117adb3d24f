"""Layers that choose their mesh in every step by predicted seconds: still exact."""

from typing import Any

import numpy as np
import pytest

from bascule.plan.sparse.choose import Strategies
from tests.helpers.inference_cases import make_mesh
from tests.helpers.ranks import run_ranks
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


def over_steps(ring: int, ulysses: int, rule: dict[str, float] | None) -> dict[str, Any]:
    strategies = Strategies(MACHINE)
    # So uneven a target that nothing moves: then all-to-alls are those of Ulysses alone.
    settings: dict[str, Any] = {"target": 9.0, "strategies": strategies, "rule": rule}
    settings["recomputes"] = ulysses == 1
    return run_steps(make_mesh(ring, ulysses), SEGMENTS, masks=make_masks(), **settings)


def used_in(found: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """(Ulysses, ring) of the layers, step by step; all is exact and alike."""
    assert max(found["errors"]) < 1e-10 and all(found["ok"]), found
    return [[state[1:3] for state in layers] for layers in found["states"]]


@pytest.mark.parametrize(
    ("ring", "ulysses"), [(4, 1), (1, 4), pytest.param(2, 2, marks=pytest.mark.stress)]
)
def test_layers_change_meshes_as_their_work_changes(ring: int, ulysses: int) -> None:
    num_ranks = ring * ulysses
    by_rank = run_ranks(over_steps, num_ranks, ring, ulysses, None)
    for found in by_rank:
        dense, *sparse, again = used_in(found)
        assert dense == again == [(1, num_ranks)] * LAYERS
        assert sparse == [[(num_ranks, 1)] * LAYERS] * 2
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
