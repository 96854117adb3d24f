"""Balanced training on any number of ranks gives what one process gives on the whole batch: also
under activation checkpointing, with several plans alive, and under FSDP2."""

import pytest

from tests.helpers.cases import all_batches
from tests.helpers.ranks import run_ranks
from tests.helpers.training import (
    Layouts,
    checkpointed,
    errors_in_bf16,
    errors_of_mixed_precision,
    sharded,
    train_everywhere,
    two_plans_alive,
)

LAYOUTS: dict[int, Layouts] = {
    1: {(3, 3): ["g1n1"], (4, 2): ["g1n1"]},
    2: {(3, 3): ["g1n2", "g2n1"], (6, 3): ["g1n1", "g2n1"]},
    3: {(4, 4): ["g1n3", "g3n1", "g1n1+g2n1"], (10, 5): ["g3n1", "g2n1+g1n1"]},
    4: {(5, 5): ["g1n4", "g4n1", "g1n2+g2n1"], (14, 7): ["g4n1", "g1n1+g3n1", "g2n1"]},
    8: {(9, 9): ["g1n8", "g8n1", "g1n2+g2n1+g4n1"], (20, 10): ["g8n1", "g3n1+g5n1", "g4n1"]},
}


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("world_size", [2, 3, 4, pytest.param(8, marks=pytest.mark.stress)])
def test_loss_and_gradients_equal_one_process(world_size: int) -> None:
    layouts = LAYOUTS[world_size]
    batches = all_batches(world_size, num_random=3 if world_size < 8 else 1)
    compared = run_ranks(train_everywhere, world_size, layouts, batches)
    assert compared[0] == len(batches) * sum(map(len, layouts.values()))


@pytest.mark.stress
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_loss_and_gradients_equal_one_process_at_length(world_size: int) -> None:
    batches = all_batches(world_size, num_random=300)
    run_ranks(train_everywhere, world_size, LAYOUTS[world_size], batches, timeout_s=1500.0)


@pytest.mark.some(1)
@pytest.mark.parametrize(("world_size", "topology"), [(2, "g1n2"), (2, "g2n1"), (4, "g1n1+g3n1")])
def test_bf16_is_as_near_to_float32_as_without_balancing(world_size: int, topology: str) -> None:
    balanced, unbalanced = run_ranks(errors_in_bf16, world_size, topology, 12)[0]
    assert 0 < balanced <= 1.5**2 * unbalanced


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("topology", "every"), [("g1n4", 1), ("g4n1", 1), ("g1n2+g2n1", 1), ("g1n2+g2n1", 2)]
)
def test_checkpointing_gives_the_same_gradients(topology: str, every: int) -> None:
    run_ranks(checkpointed, 4, topology, every)


def test_mixed_precision_of_fsdp2_is_as_near_to_float32_as_without_balancing() -> None:
    balanced, unbalanced = run_ranks(errors_of_mixed_precision, 4, "g1n2+g2n1", 8)[0]
    assert 0 < balanced <= 1.5**2 * unbalanced


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("topology", ["g3n1", "g1n1+g2n1"])
def test_two_plans_alive(topology: str, checkpoint: bool) -> None:
    run_ranks(two_plans_alive, 3, topology, checkpoint)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("world_size", "topology", "checkpoint"),
    [
        (2, "g1n2", False),
        (2, "g2n1", False),
        (2, "g2n1", True),
        (4, "g1n2+g2n1", False),
        (4, "g4n1", True),
        pytest.param(2, "g1n2", True, marks=pytest.mark.stress),
        pytest.param(4, "g1n2+g2n1", True, marks=pytest.mark.stress),
        pytest.param(4, "g4n1", False, marks=pytest.mark.stress),
    ],
)
def test_fsdp2_gives_the_same_gradients(world_size: int, topology: str, checkpoint: bool) -> None:
    run_ranks(sharded, world_size, topology, checkpoint)
