"""Fits: planted coefficients come back, noise is estimated, outliers and gaps do no harm."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from bascule.errors import ConfigError
from bascule.machine.costs import IterationFit, PolynomialCost, TransformerCost
from bascule.machine.fits import TERMS, fit_item_latency, fit_iterations, fit_latency

# Latencies of sequences

RATE = 1.7e-3  # seconds a TFLOP
LENS = np.array([64, 256, 1024, 4096, 16384, 65536])


def latencies(lens: np.ndarray, gamma: float = 0.426, layers: int = 1) -> np.ndarray:
    cost = TransformerCost(3072, gamma=gamma, num_layers=layers, seconds_per_unit=RATE)
    return cost.seconds(lens)


@pytest.mark.parametrize("gamma", [0.0, 0.426, 3.0])
@pytest.mark.parametrize("layers", [1, 57])
def test_exact_latencies_give_exact_coefficients(gamma: float, layers: int) -> None:
    fit = fit_latency(LENS, latencies(LENS, gamma, layers), 3072, num_layers=layers)
    assert fit.gamma == pytest.approx(gamma, rel=1e-9, abs=1e-9)
    assert fit.seconds_per_unit == pytest.approx(RATE, rel=1e-9)
    assert (fit.d_model, fit.num_layers) == (3072, layers)
    assert fit.fit_error is not None and fit.fit_error < 1e-9


def test_no_part_takes_less_than_no_time() -> None:
    fit = fit_latency(LENS, 1e-6 * LENS**0.9, 3072)
    assert fit.gamma == 0.0 and fit.fit_error is not None and fit.fit_error > 0.01
    with pytest.raises(ConfigError, match="faster than the square"):
        fit_latency(LENS, 1e-12 * LENS**3.0, 3072)


def test_an_item_that_is_a_call_has_a_constant() -> None:
    found = fit_item_latency(LENS, 2e-9 * LENS**2 + 1e-6 * LENS + 5e-3)
    np.testing.assert_allclose([found.quadratic, found.linear, found.constant], [2e-9, 1e-6, 5e-3])
    windowed = fit_item_latency([8, 64, 100], [1.0, 1.5, 3.0], num_pairs=[64, 64, 1000])
    np.testing.assert_allclose(windowed([8, 64, 100], [64, 64, 1000]), [1.0, 1.5, 3.0])


# Iterations of training

TRUTH = PolynomialCost(2.1e-10, 7.5e-6, 4e-4, 0.35)
Lens = list[list[list[int]]]
Ends = tuple[int, int]


def drawn(rng: np.random.Generator, iterations: int, ranks: int, count: Ends, ends: Ends) -> Lens:
    """Log-normal lengths between two ends, and from `count[0]` to `count[1]` of them a rank."""

    def rank() -> list[int]:
        lens = rng.lognormal(math.log(2048), 1.2, rng.integers(count[0], count[1] + 1))
        return np.clip(lens, *ends).astype(np.int64).tolist()

    return [[rank() for _ in range(ranks)] for _ in range(iterations)]


def draw(seed: int, *, iterations: int = 12, ranks: int = 8, count: Ends = (0, 24)) -> Lens:
    return drawn(np.random.default_rng(seed), iterations, ranks, count, (64, 32768))


def rank_seconds(lens: Lens, cost: PolynomialCost = TRUTH) -> np.ndarray:
    seconds = [[math.fsum(cost(rank)) for rank in iteration] for iteration in lens]
    return cost.overhead + np.array(seconds)


def noisy(seconds: np.ndarray, noise: float, seed: int = 0) -> np.ndarray:
    return seconds * (1 + noise * np.random.default_rng(seed).standard_normal(seconds.shape))


def coefs(cost: PolynomialCost) -> np.ndarray:
    return np.array([cost.quadratic, cost.linear, cost.constant, cost.overhead])


def diagnostics(cost: PolynomialCost) -> IterationFit:
    assert cost.fit is not None
    return cost.fit


def mean_error(fit: PolynomialCost, lens: Lens) -> float:
    """Of the predicted seconds of ranks."""
    return float(np.abs(rank_seconds(lens, fit) / rank_seconds(lens) - 1).mean())


@pytest.mark.parametrize("ranks", [1, 8, 64])
@pytest.mark.parametrize(
    "truth",
    [
        TRUTH,
        PolynomialCost(0.0, 1e-5, 0.0, 0.0),
        PolynomialCost(1e-9, 0.0, 0.0, 3.0),
        PolynomialCost(1e-10, 1e-6, 2e-2, 0.0),
        PolynomialCost(5e-12, 1e-5, 1e-4, 2.0),
    ],
)
def test_exact_times_give_exact_coefficients(ranks: int, truth: PolynomialCost) -> None:
    """From the maxima alone, also far from what the fit assumes."""
    lens = draw(1, iterations=16, ranks=ranks)
    fit = fit_iterations(lens, rank_seconds(lens, truth).max(axis=1))
    assert np.all(np.abs(coefs(fit) - coefs(truth)) <= 1e-6 * (coefs(truth) + coefs(TRUTH)))
    assert diagnostics(fit).unidentified == () and diagnostics(fit).loo_error < 1e-6
    assert max(np.array(diagnostics(fit).standard_errors) / coefs(TRUTH)) < 1e-2


def with_gaps(lens: Lens, seconds: np.ndarray) -> tuple[Lens, np.ndarray]:
    """Own times of ranks, of which some are missing, also a whole iteration."""
    seconds[np.random.default_rng(0).random(seconds.shape) < 0.4] = math.nan
    seconds[0] = math.nan
    return lens, seconds


def idle(lens: Lens, _: np.ndarray, of_ranks: bool = False) -> tuple[Lens, np.ndarray]:
    """An iteration of nothing, and a rank that never has anything."""
    lens = [
        [[] if rank == 2 or t == 0 else x for rank, x in enumerate(y)] for t, y in enumerate(lens)
    ]
    seconds = rank_seconds(lens)
    return lens, seconds if of_ranks else seconds.max(axis=1)


@pytest.mark.parametrize("change", [with_gaps, idle, partial(idle, of_ranks=True)])
def test_gaps_and_idle_ranks_do_no_harm(change: Callable[..., tuple[Lens, np.ndarray]]) -> None:
    lens = draw(4, ranks=4)
    lens, seconds = change(lens, rank_seconds(lens))
    fit = fit_iterations(lens, seconds)
    np.testing.assert_allclose(coefs(fit), coefs(TRUTH), rtol=1e-6)
    assert diagnostics(fit).num_observations == np.count_nonzero(~np.isnan(seconds))


@pytest.mark.parametrize(("ranks", "limit"), [(8, 0.04), (64, 0.08)])
def test_noise_of_three_percent(ranks: int, limit: float) -> None:
    """Twelve a rank: the median over seeds of the mean error of ranks of other batches."""
    errors = []
    for seed in range(20):
        lens, other = (draw(s, ranks=ranks, count=(12, 12)) for s in (seed, seed + 500))
        fit = fit_iterations(lens, noisy(rank_seconds(lens).max(axis=1), 0.03, 1000 + seed))
        errors.append(mean_error(fit, other))
        assert diagnostics(fit).loo_error < 0.06
    assert np.median(errors) < limit


def test_standard_errors_are_of_the_size_of_the_errors() -> None:
    lens = draw(3, iterations=60)
    ratios = []
    for seed in range(20):
        fit = fit_iterations(lens, noisy(rank_seconds(lens), 0.03, seed))
        ratios.append((coefs(fit) - coefs(TRUTH)) / diagnostics(fit).standard_errors)
    spread = np.sqrt(np.mean(np.square(ratios), axis=0))
    assert np.all((spread > 0.5) & (spread < 1.6)), spread


@pytest.mark.parametrize("factor", [5.0, 0.2])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_an_outlier_does_not_ruin_the_fit(factor: float, noise: float) -> None:
    lens = draw(6, iterations=16)
    seconds = noisy(rank_seconds(lens).max(axis=1), noise)
    seconds[5] *= factor
    fit = fit_iterations(lens, seconds)
    assert diagnostics(fit).num_outliers >= 1
    assert mean_error(fit, draw(7)) < (0.05 if noise else 1e-3)


EQUAL_COUNTS = draw(9, count=(12, 12))


@pytest.mark.parametrize(
    ("lens", "seconds", "unidentified", "known"),
    [
        (
            [[[4096] * 4] * 2] * 6,
            [2.0, 2.02, 1.98, 2.0, 2.01, 1.99],
            ("quadratic", "linear", "constant", "overhead"),
            {},
        ),
        (
            [[[512] * num, [512]] for num in range(1, 7)],
            [0.1 + 0.01 * num for num in range(1, 7)],
            ("quadratic", "linear", "constant"),
            {"overhead": 0.1},
        ),
        (
            EQUAL_COUNTS,
            rank_seconds(EQUAL_COUNTS).max(axis=1),
            ("constant", "overhead"),
            {"quadratic": TRUTH.quadratic, "linear": TRUTH.linear},
        ),
    ],
    ids=["equal lengths", "equal lengths in different numbers", "equal counts"],
)
def test_what_measurements_leave_open_is_named(
    lens: Lens, seconds: Any, unidentified: tuple[str, ...], known: dict[str, float]
) -> None:
    """And the sum, which is known, is predicted all the same."""
    fit = fit_iterations(lens, seconds)
    assert diagnostics(fit).unidentified == unidentified
    assert {name: getattr(fit, name) for name in known} == pytest.approx(known, rel=1e-6)
    np.testing.assert_allclose(rank_seconds(lens, fit).max(axis=1), seconds, rtol=0.02)
    assert fit([8192])[0] / fit([4096])[0] == pytest.approx(2.0, abs=0.5)  # not garbage
    assert fit.constant < 5 * TRUTH.constant or "linear" in unidentified  # in doubt it is overhead


def test_fewer_measurements_than_terms() -> None:
    lens = draw(10, iterations=3, ranks=2, count=(3, 24))
    seconds = rank_seconds(lens).max(axis=1)
    fit = fit_iterations(lens, seconds, max_loo_error=math.inf)
    np.testing.assert_allclose(rank_seconds(lens, fit).max(axis=1), seconds, rtol=0.1)
    assert diagnostics(fit).unidentified


@pytest.mark.parametrize("seed", range(4))
def test_times_without_relation_to_the_lengths_are_refused(seed: int) -> None:
    seconds = np.random.default_rng(seed).uniform(0.5, 2.0, 12)
    with pytest.raises(ConfigError, match=r"\d+\.\d % on average, and the limit is 10\.0 %; check"):
        fit_iterations(draw(seed), seconds)
    lens = draw(11, iterations=30)
    fit = fit_iterations(lens, noisy(rank_seconds(lens).max(axis=1), 0.06, seed))
    assert 0.02 < diagnostics(fit).loo_error < 0.08


# What a fit of iteration times must not depend on, over drawn workloads


Case = tuple[Lens, np.ndarray]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A workload, and its noisy iteration times or rank times under a drawn truth."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    iterations, ranks = draw(st.integers(8, 20)), draw(st.integers(1, 12))
    most = draw(st.integers(2, 12))
    lens = drawn(rng, iterations, ranks, (0, most), (1, 2**16))
    truth = PolynomialCost(
        draw(st.sampled_from([0.0, 1e-11, 3e-10])),
        draw(st.sampled_from([1e-6, 1e-5])),
        draw(st.sampled_from([0.0, 1e-4, 1e-2])),
        draw(st.sampled_from([1e-3, 0.3, 3.0])),
    )
    exact = rank_seconds(lens, truth)
    noise = 1.0 + draw(st.sampled_from([0.0, 0.02])) * rng.standard_normal(exact.shape)
    return lens, exact * noise if draw(st.booleans()) else (exact * noise).max(axis=1)


@given(cases(), st.sampled_from([1e-6, 1e-3, 1e3]))
@settings(max_examples=40, deadline=None)
def test_same_input_same_fit_and_legal_values_in_any_unit(case: Case, factor: float) -> None:
    lens, seconds = case
    try:
        fit = fit_iterations(lens, seconds)
    except ConfigError:
        reject()
    assert fit == fit_iterations(lens, seconds.tolist())
    report = diagnostics(fit)
    assert set(report.unidentified) <= set(TERMS)
    assert 0.0 <= report.loo_error <= 0.1
    assert not any(math.isnan(error) or error < 0 for error in report.standard_errors)
    assert 0 <= report.num_outliers <= report.num_observations == seconds.size
    other = fit_iterations(lens, seconds * factor)
    expected = rank_seconds(lens, fit) * factor
    np.testing.assert_allclose(rank_seconds(lens, other), expected, rtol=1e-5)
    np.testing.assert_allclose(diagnostics(other).loo_error, report.loo_error, 1e-3, 1e-6)
