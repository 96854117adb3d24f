"""choose_mesh: the fastest mesh of all factorizations, and an honest rule without a profile."""

import itertools
from typing import Any

import pytest

from bascule.errors import ConfigError
from bascule.plan.machine import HardwareProfile
from bascule.plan.mesh_choice import (
    DenoisingStep,
    InferenceMesh,
    choose_mesh,
    step_seconds,
)

STEP = DenoisingStep(num_tokens=4608, num_heads=24, head_dim=128, num_layers=57, num_passes=2)
H100 = HardwareProfile.load("h100-datasheet")


def profile(**others: Any) -> HardwareProfile:
    numbers: dict[str, Any] = {
        "matmul_flops_per_s": 4e14,
        "attention_flops_per_s": 3e14,
        "launch_s": 1e-5,
    }
    wires = {"launch_s": 1e-5, "intra_bytes_per_s": 2e11, "inter_bytes_per_s": 2e10}
    return HardwareProfile(device="test", **{**numbers, **wires, **others})


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6, 8, 12, 16])
@pytest.mark.parametrize("tokens", [77, 4608, 118_800])
@pytest.mark.parametrize(("heads", "passes", "most"), [(24, 2, None), (5, 3, 4), (12, 1, 2)])
def test_the_choice_is_the_fastest_of_all_factorizations(
    num_ranks: int, tokens: int, heads: int, passes: int, most: int | None
) -> None:
    step = DenoisingStep(tokens, heads, 128, 30, passes)
    degrees = range(1, num_ranks + 1)
    possible = [
        InferenceMesh(*mesh)
        for mesh in itertools.product(degrees, repeat=3)
        if mesh[0] * mesh[1] * mesh[2] == num_ranks
        and mesh[0] <= passes
        and mesh[1] <= (most or num_ranks)
        and mesh[2] <= heads
    ]
    if not possible:
        with pytest.raises(ConfigError, match="raise max_ring_degree"):
            choose_mesh(step, num_ranks, max_ring_degree=most)
        return
    choice = choose_mesh(step, num_ranks, ranks_per_node=8, max_ring_degree=most, profile=profile())
    seconds = [step_seconds(step, mesh, 8, profile()) for mesh in possible]
    assert len(choice.meshes) == len(possible)
    assert choice.chosen.seconds == min(seconds)
    assert [mesh.seconds for mesh in choice.meshes] == sorted(seconds)
    assert len(str(choice).splitlines()) == 1 + len(possible)


def test_the_seconds_of_a_step_follow_the_formulas() -> None:
    width, alone = 24 * 128, step_seconds(STEP, InferenceMesh(1, 1, 1), 8, profile())
    layer = 24 * 4608 * width**2 / 4e14 + 4 * 4608**2 * width / 3e14
    assert alone == pytest.approx(2 * 57 * layer)
    guided = step_seconds(STEP, InferenceMesh(2, 1, 1), 8, profile())
    assert guided == pytest.approx(alone / 2 + 1e-5)
    sent = 8 * width * 4608 / 4 / 4  # bytes of a rank to each other one
    near = 57 * 2 * (layer / 4 + 2e-5 + 3 * sent / 2e11)
    assert step_seconds(STEP, InferenceMesh(1, 1, 4), 8, profile()) == pytest.approx(near)
    far = 57 * 2 * (layer / 4 + 2e-5 + sent / 2e11 + 2 * sent / 2e10)
    assert step_seconds(STEP, InferenceMesh(1, 1, 4), 2, profile()) == pytest.approx(far)
    slow = profile(intra_bytes_per_s=1e9)  # what a ring passes on is longer than its round
    attention = 4 * 4608**2 / 2 * width / 3e14
    turn = 1e-5 + 4 * width * 4608 / 2 / 1e9 - attention / 2
    ring = 57 * 2 * (layer / 2 + turn)
    assert step_seconds(STEP, InferenceMesh(1, 2, 1), 8, slow) == pytest.approx(ring)


def test_without_a_profile_guidance_comes_first_then_heads_in_a_node_then_a_ring() -> None:
    def chosen(num_ranks: int, **others: Any) -> tuple[int, int, int]:
        mesh = choose_mesh(STEP, num_ranks, **others).chosen
        return mesh.guidance, mesh.ring, mesh.ulysses

    assert chosen(2) == (2, 1, 1) and chosen(8) == (2, 1, 4)
    assert chosen(3) == (1, 1, 3)
    assert chosen(16, ranks_per_node=4) == (2, 2, 4)
    assert chosen(64) == (2, 2, 16)
    said = str(choose_mesh(STEP, 8))
    assert said.startswith("guidance 2 x ring 1 x Ulysses 4: guidance groups first")
    uneven = DenoisingStep(num_tokens=99, num_heads=8, head_dim=64, num_layers=2, num_passes=3)
    assert choose_mesh(uneven, 4).chosen == InferenceMesh(1, 1, 4)  # 2 groups would wait


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no matmul_flops_per_s"):
        choose_mesh(STEP, 2, profile=HardwareProfile(device="none"))
    with pytest.raises(ConfigError, match="num_tokens"):
        DenoisingStep(num_tokens=0, num_heads=1, head_dim=1, num_layers=1)
    assert choose_mesh(STEP, 8, profile=H100).chosen.guidance == 2
