from typing import Any

import numpy as np
import pytest

from bascule.errors import ConfigError
from bascule.plan.costs import (
    IterationFit,
    PolynomialCost,
    TransformerCost,
    describe_cost,
    unit_seconds,
)
from bascule.plan.limits import Limits, in_tokens


@pytest.mark.parametrize(
    ("seq_len", "linear_tflops", "attention_tflops"),
    [
        # d = 3072: 24 d^2 = 226,492,416 FLOPs a token, 4 d = 12,288 FLOPs a pair of tokens.
        (1, 0.000226492416, 0.000000012288),
        (512, 0.115964116992, 0.003221225472),
        (4608, 1.043677052928, 0.260919263232),
        (16384, 3.710851743744, 3.298534883328),
    ],
)
def test_flux_block_by_hand(seq_len: int, linear_tflops: float, attention_tflops: float) -> None:
    assert TransformerCost(3072)(seq_len) == pytest.approx(
        linear_tflops + attention_tflops, rel=1e-12
    )
    assert TransformerCost(3072, gamma=0.0)(seq_len) == pytest.approx(linear_tflops, rel=1e-12)
    assert TransformerCost(gamma=0.426)(seq_len) == pytest.approx(
        linear_tflops + 0.426 * attention_tflops, rel=1e-12
    )
    assert TransformerCost(num_layers=57)(seq_len) == pytest.approx(
        57 * (linear_tflops + attention_tflops), rel=1e-12
    )


def test_attention_costs_as_much_as_the_linear_layers_at_six_widths() -> None:
    both, linear = TransformerCost(512), TransformerCost(512, gamma=0.0)
    assert both(6 * 512) == pytest.approx(2 * linear(6 * 512))


def test_the_longest_length_neither_overflows_nor_loses_precision() -> None:
    for lens in (np.array([2**40]), np.array([2**40], dtype=np.float32), [2**40]):
        exact = (24 * 2**40 * 3072**2 + 4 * 2**80 * 3072) / 10**12
        result = TransformerCost(3072)(lens)
        assert result.dtype == np.float64
        assert result[0] == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int64, np.float32])
def test_small_integer_types_do_not_wrap(dtype: type) -> None:
    lens = np.array([[60_000], [0]], dtype=dtype)
    expected = (24 * 60_000 * 3072**2 + 4 * 60_000**2 * 3072) / 1e12
    np.testing.assert_allclose(TransformerCost(3072)(lens), [[expected], [0.0]], rtol=1e-14)


def test_no_sequences_cost_nothing() -> None:
    assert TransformerCost()([]).shape == (0,)
    assert TransformerCost()([0, 0]).tolist() == [0.0, 0.0]


def test_seconds_are_flops_times_the_measured_rate() -> None:
    cost = TransformerCost(3072, gamma=0.5, seconds_per_unit=2e-3)
    np.testing.assert_allclose(cost.seconds([100, 5000]), cost([100, 5000]) * 2e-3, rtol=1e-15)
    with pytest.raises(ConfigError, match="fit_latency"):
        TransformerCost(3072).seconds([100])


@pytest.mark.parametrize(
    "arguments",
    [
        {"d_model": 0},
        {"d_model": -1},
        {"d_model": 3072.0},
        {"d_model": True},
        {"num_layers": 0},
        {"num_layers": 1.5},
        {"gamma": -0.1},
        {"gamma": float("nan")},
        {"gamma": float("inf")},
        {"seconds_per_unit": 0.0},
        {"seconds_per_unit": -1.0},
        {"seconds_per_unit": float("nan")},
        {"seconds_per_unit": float("inf")},
    ],
)
def test_values_out_of_range_are_named(arguments: dict) -> None:
    (name,) = arguments
    with pytest.raises(ConfigError, match=rf"TransformerCost\({name}="):
        TransformerCost(**arguments)


def test_a_cost_is_a_frozen_value() -> None:
    cost = TransformerCost(3072, gamma=0.5)
    assert cost == TransformerCost(3072, gamma=0.5)
    assert cost != TransformerCost(3072, gamma=0.6)
    with pytest.raises(AttributeError):
        cost.gamma = 1.0  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        TransformerCost(3072, 0.5)  # pyright: ignore[reportCallIssue]


def test_what_ranks_compare_of_a_fitted_cost_is_what_they_plan_by() -> None:
    fits = [
        IterationFit((error, error, error, error), (), error, 9, 0, ((error,) * 4,) * 4)
        for error in (0.1, 0.1 + 1e-15)
    ]
    own, other = (PolynomialCost(1e-9, 1e-6, 0.0, fit=fit) for fit in fits)
    assert own.fit != other.fit
    assert describe_cost(own) == describe_cost(other)
    assert describe_cost(own) != describe_cost(PolynomialCost(1e-9, 2e-6, 0.0))


@pytest.mark.parametrize(
    "kind",
    [
        lambda n: TransformerCost(8, bytes_per_token=n),
        lambda n: PolynomialCost(1, 1, 1, bytes_per_token=n),
    ],
)
def test_limits_on_bytes_are_in_tokens(kind: Any) -> None:
    assert in_tokens(Limits(num_bytes=10**6), kind(100), None) == Limits(tokens=10**4)


def test_a_unit_of_cost_takes_seconds_where_the_model_says_so() -> None:
    assert unit_seconds(PolynomialCost(0.0, 1.0, 0.0)) == 1.0
    assert unit_seconds(TransformerCost(8, seconds_per_unit=0.5)) == 0.5
    assert unit_seconds(TransformerCost(8)) is None
    assert unit_seconds(np.sqrt) is None
