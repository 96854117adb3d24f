import math

import numpy as np
import pytest

from bascule.plan import metrics


@pytest.mark.parametrize(
    ("loads", "imbalance", "wir"),
    [
        ([2.0, 4.0, 6.0], 1.5, 3.0),
        ([1.0], 1.0, 1.0),
        ([0.0, 1.0], 2.0, math.inf),
        ([0.0, 0.0], 1.0, 1.0),
        ([], 1.0, 1.0),
        ([5.0, 5.0, 5.0, 5.0], 1.0, 1.0),
        ([0.0, 0.0, 0.0, 8.0], 4.0, math.inf),
    ],
)
def test_by_hand(loads: list[float], imbalance: float, wir: float) -> None:
    assert metrics.imbalance(np.array(loads)) == imbalance
    assert metrics.wir(np.array(loads)) == wir


def test_even_loads_are_even_whatever_their_mean_rounds_to() -> None:
    for load in (0.1, 0.3, 1e-300, 1e300 / 7):
        for count in range(1, 70):
            loads = np.full(count, load)
            assert 1.0 <= metrics.imbalance(loads) < 1.0 + 1e-12
            assert metrics.wir(loads) == 1.0


def test_results_are_plain_numbers() -> None:
    for value in (metrics.imbalance(np.array([1.0, 2.0])), metrics.wir(np.array([1.0, 2.0]))):
        assert type(value) is float
