import math
from collections.abc import Sequence

import numpy as np
import pytest

from bascule.errors import ConfigError
from bascule.plan.costs import IterationFit, PolynomialCost
from bascule.plan.fits import fit_iterations
from bascule.plan.plan import plan_batch

TRUTH = PolynomialCost(2.1e-10, 7.5e-6, 4e-4, 0.35)

Lens = list[list[list[int]]]


def draw(
    seed: int, *, iterations: int = 12, ranks: int = 8, count: tuple[int, int] = (0, 24)
) -> Lens:
    """Log-normal lengths, and from `count[0]` to `count[1]` of them a rank."""
    rng = np.random.default_rng(seed)

    def rank() -> list[int]:
        num = rng.integers(count[0], count[1] + 1)
        lens = np.clip(rng.lognormal(math.log(2048), 1.2, num), 64, 32768)
        return lens.astype(np.int64).tolist()

    return [[rank() for _ in range(ranks)] for _ in range(iterations)]


def rank_seconds(lens: Lens, cost: PolynomialCost = TRUTH) -> np.ndarray:
    return np.array(
        [[cost.overhead + math.fsum(cost(rank)) for rank in iteration] for iteration in lens]
    )


def coefs(cost: PolynomialCost) -> np.ndarray:
    return np.array([cost.quadratic, cost.linear, cost.constant, cost.overhead])


def diagnostics(cost: PolynomialCost) -> IterationFit:
    assert cost.fit is not None
    return cost.fit


# The cost model.


def test_polynomial_by_hand() -> None:
    cost = PolynomialCost(quadratic=2.0, linear=3.0, constant=5.0, overhead=100.0)
    np.testing.assert_array_equal(cost([[0, 1], [2, 10]]), [[5.0, 10.0], [19.0, 235.0]])
    assert cost([]).dtype == np.float64
    assert PolynomialCost(1.0, 0.0, 0.0).overhead == 0.0


@pytest.mark.parametrize("tokens", [46341, 65536, 2**40])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64])
def test_polynomial_does_not_overflow(tokens: int, dtype: type) -> None:
    if tokens > np.iinfo(dtype).max:
        pytest.skip("the length itself does not fit")
    seconds = PolynomialCost(1.0, 0.0, 0.0)(np.array([tokens], dtype=dtype))
    assert seconds[0] == float(tokens**2)


@pytest.mark.parametrize("name", ["quadratic", "linear", "constant", "overhead"])
@pytest.mark.parametrize("value", [-1e-12, math.nan, math.inf, "1", None, True, [1.0]])
def test_polynomial_refuses(name: str, value: object) -> None:
    given = {"quadratic": 1.0, "linear": 1.0, "constant": 1.0, "overhead": 0.0, name: value}
    with pytest.raises(ConfigError, match=name):
        PolynomialCost(**given)  # type: ignore[arg-type]


def test_polynomial_is_a_value_and_plans() -> None:
    lens = draw(0)
    fits = [fit_iterations(lens, rank_seconds(lens).max(axis=1)) for _ in range(2)]
    assert fits[0] == fits[1]
    assert hash(fits[0]) == hash(fits[1])
    assert fits[0] != TRUTH
    numpy_floats = PolynomialCost(*(np.float32(x) for x in (1, 2, 3)))  # type: ignore[arg-type]
    assert numpy_floats == PolynomialCost(1, 2, 3)
    plan = plan_batch(lens[0], "g1n8", TRUTH)
    assert plan.makespan == pytest.approx(TRUTH(plan.seq_lens)[plan.bag_of == 0].sum(), rel=0.2)


# Recovery.


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
    assert diagnostics(fit).unidentified == ()
    assert diagnostics(fit).loo_error < 1e-6
    assert max(np.array(diagnostics(fit).standard_errors) / coefs(TRUTH)) < 1e-2


def test_long_sequences_do_not_overflow() -> None:
    lens = [[[65536] * k, [4096 * k, 131072]] for k in (1, 2, 3, 5, 8, 13)]
    arrays = [[np.array(rank, dtype=np.int32) for rank in iteration] for iteration in lens]
    for given in (lens, arrays):
        fit = fit_iterations(given, rank_seconds(lens).max(axis=1))
        assert fit.quadratic == pytest.approx(TRUTH.quadratic, rel=1e-3)


@pytest.mark.parametrize(("ranks", "limit"), [(8, 0.04), (64, 0.08)])
def test_noise_of_three_percent(ranks: int, limit: float) -> None:
    """Twelve a rank: the median over seeds of the mean error of ranks of other batches."""
    errors = []
    for seed in range(20):
        rng = np.random.default_rng(1000 + seed)
        lens, other = (
            draw(s, ranks=ranks, count=(12, 12), iterations=12) for s in (seed, seed + 500)
        )
        seconds = rank_seconds(lens).max(axis=1) * (1 + 0.03 * rng.standard_normal(12))
        fit = fit_iterations(lens, seconds)
        errors.append(np.abs(rank_seconds(other, fit) / rank_seconds(other) - 1).mean())
        assert diagnostics(fit).loo_error < 0.06
    assert np.median(errors) < limit


def test_standard_errors_are_of_the_size_of_the_errors() -> None:
    lens = draw(3, iterations=60)
    exact = rank_seconds(lens)
    ratios = []
    for seed in range(20):
        noise = 1 + 0.03 * np.random.default_rng(seed).standard_normal(exact.shape)
        fit = fit_iterations(lens, exact * noise)
        ratios.append((coefs(fit) - coefs(TRUTH)) / diagnostics(fit).standard_errors)
    spread = np.sqrt(np.mean(np.square(ratios), axis=0))
    assert np.all((spread > 0.5) & (spread < 1.6)), spread


def test_own_times_with_missing_ones() -> None:
    lens = draw(4, ranks=4)
    seconds = rank_seconds(lens)
    rng = np.random.default_rng(0)
    seconds[rng.random(seconds.shape) < 0.4] = math.nan
    seconds[0] = math.nan  # a whole iteration
    fit = fit_iterations(lens, seconds)
    np.testing.assert_allclose(coefs(fit), coefs(TRUTH), rtol=1e-6)
    assert diagnostics(fit).num_observations == np.count_nonzero(~np.isnan(seconds))


def test_a_truth_far_from_the_assumptions_is_found() -> None:
    """Short samples whose attention outweighs the linear layers, and hardly any overhead."""
    truth = PolynomialCost(2e-9, 1e-6, 1e-5, overhead=2e-4)
    for seed in range(40):
        random = np.random.default_rng(seed)
        lens = np.clip(random.lognormal(np.log(300), 1.0, (10, 2, 12)), 16, 3000).astype(int)
        true = truth(lens).sum(axis=2) + truth.overhead
        seconds = true * (1.01 + np.abs(random.normal(0.0, 0.01, true.shape)))
        found = fit_iterations(lens.tolist(), seconds)
        predicted = found(lens).sum(axis=2) + found.overhead
        assert np.abs(predicted / true - 1.0).mean() < 0.03


def test_own_times_of_idle_ranks_may_be_zero() -> None:
    lens = draw(5, ranks=6, count=(6, 24))
    truth = PolynomialCost(2.1e-10, 7.5e-6, 4e-4)
    for iteration in lens:
        iteration[2] = []
    fit = fit_iterations(lens, rank_seconds(lens, truth))
    np.testing.assert_allclose(coefs(fit), coefs(truth), rtol=1e-6, atol=1e-9)


# Robustness.


@pytest.mark.parametrize("factor", [5.0, 0.2])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_an_outlier_does_not_ruin_the_fit(factor: float, noise: float) -> None:
    lens, other = draw(6, iterations=16), draw(7)
    seconds = rank_seconds(lens).max(axis=1)
    seconds *= 1 + noise * np.random.default_rng(0).standard_normal(16)
    seconds[5] *= factor
    fit = fit_iterations(lens, seconds)
    assert diagnostics(fit).num_outliers >= 1
    error = np.abs(rank_seconds(other, fit) / rank_seconds(other) - 1)
    assert error.mean() < (0.05 if noise else 1e-3)


@pytest.mark.parametrize(("factor", "num_outliers"), [(1.0, 0), (1.06, 1), (1.5, 1)])
def test_outliers_are_counted(factor: float, num_outliers: int) -> None:
    """From about three standard deviations on, here of 1 %, a measurement weighs less than half."""
    lens = draw(6, iterations=40)
    seconds = rank_seconds(lens).max(axis=1)
    seconds *= 1 + 0.01 * np.random.default_rng(0).uniform(-1.5, 1.5, 40)
    seconds[5] *= factor
    assert diagnostics(fit_iterations(lens, seconds)).num_outliers == num_outliers


def test_empty_ranks_and_empty_iterations() -> None:
    lens = draw(8, ranks=4)
    lens[0] = [[], [], [], []]
    for iteration in lens[1:]:
        iteration[1] = []
    fit = fit_iterations(lens, rank_seconds(lens).max(axis=1))
    np.testing.assert_allclose(coefs(fit), coefs(TRUTH), rtol=1e-6)


# What the data leave open.


def test_equal_lengths_are_flagged_and_predicted() -> None:
    lens = [[[4096] * 4] * 2 for _ in range(6)]
    fit = fit_iterations(lens, [2.0, 2.02, 1.98, 2.0, 2.01, 1.99])
    assert diagnostics(fit).unidentified == ("quadratic", "linear", "constant", "overhead")
    assert np.all(np.isinf(diagnostics(fit).standard_errors))
    assert fit.overhead + fit([4096] * 4).sum() == pytest.approx(2.0, rel=0.01)
    assert coefs(fit).min() > 0
    assert fit([8192])[0] / fit([4096])[0] == pytest.approx(2.0, abs=0.5)  # not garbage


def test_equal_lengths_in_different_numbers() -> None:
    """Only overhead and the sum of the rest are known."""
    lens = [[[512] * num, [512]] for num in (1, 2, 3, 4, 5, 6)]
    fit = fit_iterations(lens, [0.1 + 0.01 * num for num in (1, 2, 3, 4, 5, 6)])
    assert diagnostics(fit).unidentified == ("quadratic", "linear", "constant")
    assert fit.overhead == pytest.approx(0.1, rel=1e-6)
    assert fit([512])[0] == pytest.approx(0.01, rel=1e-6)


def test_constant_and_overhead_with_equal_counts() -> None:
    lens = draw(9, count=(12, 12))
    fit = fit_iterations(lens, rank_seconds(lens).max(axis=1))
    assert diagnostics(fit).unidentified == ("constant", "overhead")
    assert fit.quadratic == pytest.approx(TRUTH.quadratic, rel=1e-6)
    assert fit.linear == pytest.approx(TRUTH.linear, rel=1e-6)
    together = TRUTH.overhead + 12 * TRUTH.constant
    assert fit.overhead + 12 * fit.constant == pytest.approx(together, rel=1e-6)
    assert fit.constant < 5 * TRUTH.constant  # in doubt it is overhead


def test_fewer_measurements_than_terms() -> None:
    lens = draw(10, iterations=3, ranks=2, count=(3, 24))
    seconds = rank_seconds(lens).max(axis=1)
    try:
        fit = fit_iterations(lens, seconds)
    except ConfigError as error:
        assert "limit is 10%" in str(error)
    else:
        np.testing.assert_allclose(rank_seconds(lens, fit).max(axis=1), seconds, rtol=0.1)
        assert diagnostics(fit).unidentified


# Refusals.


@pytest.mark.parametrize("seed", range(10))
def test_times_without_relation_to_the_lengths_are_refused(seed: int) -> None:
    seconds = np.random.default_rng(seed).uniform(0.5, 2.0, 12)
    with pytest.raises(ConfigError, match=r"\d+\.\d%, and the limit is 10%; check"):
        fit_iterations(draw(seed), seconds)


def test_noise_below_the_limit_is_accepted() -> None:
    lens = draw(11, iterations=30)
    noise = 1 + 0.06 * np.random.default_rng(1).standard_normal(30)
    fit = fit_iterations(lens, rank_seconds(lens).max(axis=1) * noise)
    assert 0.03 < diagnostics(fit).loo_error < 0.08


@pytest.mark.parametrize("shape", [(6,), (6, 2)])
def test_all_zero_times_are_refused(shape: tuple[int, ...]) -> None:
    """As a log interval longer than the warm-up gives them; zeros fit perfectly."""
    with pytest.raises(ConfigError, match=r"iteration 0.* took 0 s"):
        fit_iterations(draw(0, iterations=6, ranks=2, count=(2, 4)), np.zeros(shape))


GOOD = [[[100, 200], [300]]] * 4


@pytest.mark.parametrize(
    ("lens", "seconds", "match"),
    [
        ([], [], "no iterations"),
        (GOOD[:2], [1.0, 1.0], "2 measurements"),
        (GOOD, [1.0, 1.0, 1.0], r"shape \(3,\)"),
        (GOOD, np.ones((4, 3)), r"shape \(4, 3\)"),
        (GOOD, np.ones((2, 4)), r"shape \(2, 4\)"),
        (GOOD, 1.0, r"shape \(\)"),
        (GOOD, [[1.0], [1.0, 1.0], [1.0], [1.0]], "equal rows"),
        (GOOD, ["a", "b", "c", "d"], "not numbers"),
        (GOOD, [1.0, math.nan, 1.0, 1.0], r"seconds\[1\] is nan"),
        (GOOD, [1.0, 1.0, math.inf, 1.0], r"seconds\[2\] is inf"),
        (GOOD, [1.0, 1.0, 1.0, -2.0], r"seconds\[3\] is -2.0"),
        (GOOD, [[1.0, 1.0]] * 3 + [[1.0, -1.0]], r"seconds\[3, 1\]"),
        (GOOD, np.full((4, 2), math.nan), "0 measurements"),
        ([*GOOD[:3], [[100]]], [1.0] * 4, "iteration 3: 1 lists"),
        ([*GOOD[:3], [[100], [-5]]], [1.0] * 4, "iteration 3: rank 1.*-5"),
        ([*GOOD[:3], [[100], [1.5]]], [1.0] * 4, "iteration 3: rank 1.*1.5"),
        ([[[], []]] * 4, [1.0] * 4, "has a token"),
        ([[[0], []]] * 4, [1.0] * 4, "has a token"),
        (GOOD, [1.0, 0.0, 1.0, 1.0], "iteration 1 took 0 s"),
    ],
)
def test_malformed_input_is_refused(lens: Lens, seconds: Sequence[float], match: str) -> None:
    with pytest.raises(ConfigError, match=f"fit_iterations.*{match}"):
        fit_iterations(lens, seconds)


def test_one_clear_sentence() -> None:
    with pytest.raises(ConfigError) as caught:
        fit_iterations(draw(0), np.random.default_rng(0).uniform(0.5, 2.0, 12))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
