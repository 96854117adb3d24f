"""What a fit of iteration times must not depend on, over drawn workloads."""

import math

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bascule.errors import ConfigError
from bascule.plan.costs import PolynomialCost
from bascule.plan.fits import TERMS, fit_iterations

Lens = list[list[list[int]]]
Case = tuple[Lens, np.ndarray]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A workload, and its noisy iteration times or rank times under a drawn truth."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    iterations, ranks = draw(st.integers(8, 20)), draw(st.integers(1, 12))
    most = draw(st.integers(2, 12))
    lens = [
        [
            np.clip(rng.lognormal(7.5, 1.2, rng.integers(0, most + 1)), 1, 2**16)
            .astype(np.int64)
            .tolist()
            for _ in range(ranks)
        ]
        for _ in range(iterations)
    ]
    truth = PolynomialCost(
        draw(st.sampled_from([0.0, 1e-11, 3e-10])),
        draw(st.sampled_from([1e-6, 1e-5])),
        draw(st.sampled_from([0.0, 1e-4, 1e-2])),
        draw(st.sampled_from([1e-3, 0.3, 3.0])),
    )
    exact = np.array([[truth.overhead + math.fsum(truth(r)) for r in batch] for batch in lens])
    noise = 1.0 + draw(st.sampled_from([0.0, 0.02])) * rng.standard_normal(exact.shape)
    return lens, exact * noise if draw(st.booleans()) else (exact * noise).max(axis=1)


def fitted(lens: Lens, seconds: np.ndarray) -> PolynomialCost:
    """The fit; cases that are refused are drawn anew."""
    try:
        return fit_iterations(lens, seconds)
    except ConfigError:
        assume(False)
        raise


def predictions(cost: PolynomialCost, lens: Lens) -> np.ndarray:
    return np.array([[cost.overhead + math.fsum(cost(r)) for r in batch] for batch in lens])


@given(cases())
@settings(max_examples=40, deadline=None)
def test_same_input_same_fit_and_legal_values(case: Case) -> None:
    lens, seconds = case
    fit = fitted(lens, seconds)
    assert fit == fit_iterations(lens, seconds.tolist())
    report = fit.fit
    assert report is not None
    assert set(report.unidentified) <= set(TERMS)
    assert 0.0 <= report.loo_error <= 0.1
    assert not any(math.isnan(error) or error < 0 for error in report.standard_errors)
    assert 0 <= report.num_outliers <= report.num_observations == seconds.size


@given(cases(), st.sampled_from([1e-6, 1e-3, 1e3]))
@settings(max_examples=40, deadline=None)
def test_another_unit_of_time(case: Case, factor: float) -> None:
    lens, seconds = case
    fit = fitted(lens, seconds)
    other = fit_iterations(lens, seconds * factor)
    np.testing.assert_allclose(predictions(other, lens), predictions(fit, lens) * factor, rtol=1e-5)
    assert other.fit is not None
    assert fit.fit is not None
    np.testing.assert_allclose(other.fit.loo_error, fit.fit.loo_error, rtol=1e-3, atol=1e-6)


@given(cases(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_order_of_ranks_and_iterations(case: Case, random) -> None:
    """Ranks change places within each iteration, sequences within each rank, and iterations."""
    lens, seconds = case
    fit = fitted(lens, seconds)
    rows = random.sample(range(len(lens)), len(lens))
    columns = [random.sample(range(len(lens[0])), len(lens[0])) for _ in lens]
    shuffled = [
        [random.sample(lens[row][rank], len(lens[row][rank])) for rank in order]
        for row, order in zip(rows, columns, strict=True)
    ]
    if seconds.ndim == 2:
        times = np.array([seconds[row][order] for row, order in zip(rows, columns, strict=True)])
    else:
        times = seconds[rows]
    other = fit_iterations(shuffled, times)
    np.testing.assert_allclose(predictions(other, lens), predictions(fit, lens), rtol=1e-5)
