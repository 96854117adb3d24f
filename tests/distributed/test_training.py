"""The same gradients under activation checkpointing, with several plans alive, and under FSDP2."""

import pytest

from tests.helpers.ranks import run_fresh_ranks
from tests.helpers.training import checkpointed, errors_of_mixed_precision, sharded, two_plans_alive


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("topology", "every"), [("g1n4", 1), ("g4n1", 1), ("g1n2+g2n1", 1), ("g1n2+g2n1", 2)]
)
def test_checkpointing_gives_the_same_gradients(topology: str, every: int) -> None:
    run_fresh_ranks(checkpointed, 4, topology, every)


def test_mixed_precision_of_fsdp2_is_as_near_to_float32_as_without_balancing() -> None:
    balanced, unbalanced = run_fresh_ranks(errors_of_mixed_precision, 4, "g1n2+g2n1", 8)[0]
    assert 0 < balanced <= 1.5**2 * unbalanced


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("topology", ["g3n1", "g1n1+g2n1"])
def test_two_plans_alive(topology: str, checkpoint: bool) -> None:
    run_fresh_ranks(two_plans_alive, 3, topology, checkpoint)


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
    run_fresh_ranks(sharded, world_size, topology, checkpoint)
