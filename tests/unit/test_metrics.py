"""Imbalance and WIR of loads, by hand."""

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
        *(([load] * num, 1.0, 1.0) for load in (0.1, 1e-300, 1e300 / 7) for num in (3, 69)),
    ],
)
def test_by_hand(loads: list[float], imbalance: float, wir: float) -> None:
    assert metrics.imbalance(np.array(loads)) == pytest.approx(imbalance, abs=1e-12)
    assert metrics.imbalance(np.array(loads)) >= 1.0
    assert metrics.wir(np.array(loads)) == wir
    assert type(metrics.wir(np.array(loads))) is type(metrics.imbalance(np.array(loads))) is float
