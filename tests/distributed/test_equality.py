"""Balanced training on any number of ranks, in bags with and without rings, gives what one process
gives on the whole batch: also under activation checkpointing, with several plans alive, and under
FSDP2."""

import pytest

from tests.helpers.cases import all_batches
from tests.helpers.ranks import run_ranks
from tests.helpers.training import (
    Layouts,
    checkpointed,
    errors_in_bf16,
    sharded,
    train_everywhere,
    two_plans_alive,
)

# World size: (query heads, key-value heads): topologies. Some heads do not divide among the ranks.
LAYOUTS: dict[int, Layouts] = {
    1: {(3, 3): ["g1n1"], (4, 2): ["g1n1"]},
    2: {(3, 3): ["g1n2", "g2n1", "g1r2n1"], (6, 3): ["g1n1", "g2n1"], (4, 1): ["g1r2n1"]},
    3: {
        (4, 4): ["g1n3", "g3n1", "g1n1+g2n1", "g1r2n1+g1n1"],
        (10, 5): ["g3n1", "g2n1+g1n1"],
        (4, 1): ["g1r3n1"],
    },
    4: {
        (5, 5): ["g1n4", "g4n1", "g1n2+g2n1", "g2r2n1", "g1n2+g1r2n1"],
        (14, 7): ["g4n1", "g1n1+g3n1", "g2n1"],
        (4, 2): ["g2r2n1", "g1r4n1", "g1r2n2", "g2n1+g1r2n1"],
    },
    6: {(3, 3): ["g2r2n1+g1n2", "g3r2n1"], (6, 2): ["g2r3n1", "g1r2n1", "g2n1+g2r2n1"]},
    8: {
        (9, 9): ["g1n8", "g8n1", "g1n2+g2n1+g4n1", "g4r2n1", "g3r2n1+g1r2n1"],
        (20, 10): ["g8n1", "g3n1+g5n1", "g4n1", "g4r2n1", "g2r4n1", "g2r3n1+g2n1"],
    },
}


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(
    "world_size", [2, 3, 4, *(pytest.param(n, marks=pytest.mark.stress) for n in (6, 8))]
)
def test_loss_and_gradients_equal_one_process(world_size: int) -> None:
    layouts = LAYOUTS[world_size]
    batches = all_batches(world_size, num_random=2 if world_size < 6 else 1)
    compared = run_ranks(train_everywhere, world_size, layouts, batches)
    assert compared[0] == len(batches) * sum(map(len, layouts.values()))


@pytest.mark.stress
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_loss_and_gradients_equal_one_process_at_length(world_size: int) -> None:
    batches = all_batches(world_size, num_random=60)
    run_ranks(train_everywhere, world_size, LAYOUTS[world_size], batches, timeout_s=1500.0)


@pytest.mark.some(2)
@pytest.mark.parametrize("topology", ["g1n2", "g2r2n1", "g2n1", "g1n1+g3n1", "g1n2+g2n1 FSDP2"])
def test_bf16_is_as_near_to_float32_as_without_balancing(topology: str) -> None:
    bags, _, wrapper = topology.partition(" ")
    size = 2 if bags in ("g1n2", "g2n1") else 4
    balanced, unbalanced = run_ranks(errors_in_bf16, size, bags, 12, bool(wrapper))[0]
    assert 0 < balanced <= 1.5**2 * unbalanced


def recorded(is_sharded: bool) -> None:
    """Checkpoints of all blocks or of every other one, and FSDP2 with checkpoints or without."""
    for topology, every in (("g4n1", 1), ("g1n2+g2n1", 2), ("g2r2n1", 1)):
        if is_sharded:
            sharded(topology, checkpoint=every == 1)
        else:
            checkpointed(topology, every)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["checkpoint", "FSDP2"])
def test_recorded_and_sharded_blocks_have_the_same_gradients(is_sharded: bool) -> None:
    run_ranks(recorded, 4, is_sharded)


def several_plans() -> None:
    for topology, checkpoint in (("g3n1", False), ("g1n1+g2n1", True), ("g1r3n1", True)):
        two_plans_alive(topology, checkpoint)


def test_two_plans_alive() -> None:
    run_ranks(several_plans, 3)
