"""Which sequence keeps a step from ending earlier, and what would help."""

import numpy as np
import numpy.typing as npt
import pytest

from bascule.plan.plan import plan_batch

BATCH = [[10], [4000, 10], [12, 11], []]


def squares(lens: npt.ArrayLike, /) -> npt.NDArray[np.float64]:
    return np.asarray(lens, dtype=np.float64) ** 2


def linear(lens: npt.ArrayLike, /) -> npt.NDArray[np.float64]:
    return np.asarray(lens, dtype=np.float64)


def test_one_sequence_binds() -> None:
    plan = plan_batch(BATCH, "g1n4", squares)
    found = plan.binding
    assert found is not None
    assert (found.seq_id, found.num_tokens, found.bag_size) == (1, 4000, 1)
    assert found.bag == plan.bag_of[1]
    assert found.enough_ranks == 4 and "a bag of 4 ranks would help" in str(found)


def test_a_bag_as_large_as_it_says_ends_the_wait() -> None:
    batch = [[900], [100, 100], [100, 100], [100], [100]]
    found = plan_batch(batch, "g1n5", linear).binding
    assert found is not None and found.enough_ranks == 3
    plan = plan_batch(batch, f"g{found.enough_ranks}n1+g1n2", linear)
    assert plan.imbalance == pytest.approx(1.0) and plan.binding is None


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_lone_sequence_wants_all_ranks(num_ranks: int) -> None:
    batch = [[9000], *[[]] * (num_ranks - 1)]
    found = plan_batch(batch, f"g{num_ranks - 1}n1+g1n1", squares).binding
    assert found is not None and found.enough_ranks == num_ranks


@pytest.mark.parametrize(
    ("batch", "topology", "binds"),
    [
        ([[], []], "g1n2", False),
        ([[0, 0], [0], [], []], "g2n2", False),
        ([[10], [10], [10], [10]], "g2n2", False),
        ([[10, 10, 10, 10], [10], [10, 10], [10]], "g2n2", False),
        ([[500, 500, 500, 500, 500], [], [], []], "g2n2", False),
        ([[1000], [10]], "g1n2", True),
        ([[1000], [10], []], "g1n1+g2n1", True),
        ([[1000, 500], [500, 10]], "g1n2", True),
        ([[500, 500, 10], [10]], "g1n2", False),
        ([[1000], [1000]], "g1n2", False),  # nobody waits
        ([[1000], []], "g2n1", False),  # there are no larger bags
    ],
)
def test_whether_one_sequence_binds(batch: list[list[int]], topology: str, binds: bool) -> None:
    assert (plan_batch(batch, topology, squares).binding is not None) is binds


def test_two_equal_halves_of_the_work_bind_no_sequence() -> None:
    plan = plan_batch([[30, 30], [30, 30], [30, 30], [30]], "g1n4", linear)
    assert plan.imbalance > 1.1 and plan.binding is None
