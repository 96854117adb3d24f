"""Fits: planted coefficients come back, noise is told, outliers and gaps do no harm."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bascule.errors import ConfigError
from bascule.plan.costs import IterationFit, PolynomialCost, TransformerCost
from bascule.plan.fits import (
    fit_attention_latency,
    fit_item_latency,
    fit_iterations,
    fit_latency,
)
from bascule.plan.machine import AttentionLatency, AttentionLoad
from tests.helpers.sparse_studies import even_load

# Latencies of sequences

RATE = 1.7e-3  # seconds a TFLOP
D_MODEL = 3072


def latencies(lens: np.ndarray, gamma: float, *, d_model: int = D_MODEL, layers: int = 1):
    return TransformerCost(d_model, gamma=gamma, num_layers=layers, seconds_per_unit=RATE).seconds(
        lens
    )


@pytest.mark.parametrize("gamma", [0.0, 0.2, 0.426, 1.0, 3.0])
@pytest.mark.parametrize("layers", [1, 57])
def test_exact_latencies_give_exact_coefficients(gamma: float, layers: int) -> None:
    lens = np.array([64, 256, 1024, 4096, 16384, 65536])
    fit = fit_latency(lens, latencies(lens, gamma, layers=layers), D_MODEL, num_layers=layers)
    assert fit.gamma == pytest.approx(gamma, rel=1e-9, abs=1e-9)
    assert fit.seconds_per_unit == pytest.approx(RATE, rel=1e-9)
    assert (fit.d_model, fit.num_layers) == (D_MODEL, layers)
    assert fit.fit_error is not None
    assert fit.fit_error < 1e-9
    np.testing.assert_allclose(fit.seconds(lens), latencies(lens, gamma, layers=layers), rtol=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gamma", [0.426, 1.3])
def test_noise_of_five_percent(seed: int, gamma: float) -> None:
    rng = np.random.default_rng(seed)
    lens = np.geomspace(256, 65536, 40).astype(np.int64)
    noise = rng.lognormal(0.0, 0.05, lens.size)
    fit = fit_latency(lens, latencies(lens, gamma) * noise, D_MODEL)
    assert fit.seconds_per_unit == pytest.approx(RATE, rel=0.05)
    assert fit.gamma == pytest.approx(gamma, rel=0.15)
    assert fit.fit_error == pytest.approx(0.05, rel=0.5)


def test_many_short_sequences_and_few_long_ones() -> None:
    """Short lengths outnumber long ones, and their times are thousands of times smaller."""
    rng = np.random.default_rng(0)
    lens = np.concatenate([rng.integers(16, 512, 500), [8192, 16384, 32768, 65536]])
    noise = rng.lognormal(0.0, 0.03, lens.size)
    fit = fit_latency(lens, latencies(lens, 0.426) * noise, D_MODEL)
    assert fit.seconds_per_unit == pytest.approx(RATE, rel=0.01)
    assert fit.gamma == pytest.approx(0.426, rel=0.1)


def test_short_sequences_count_when_the_long_ones_are_noisy() -> None:
    """The paper's unweighted fit follows the longest measurement; this one does not."""
    lens = np.array([256, 512, 1024, 2048, 4096, 65536])
    seconds = latencies(lens, 0.426)
    seconds[-1] *= 1.1
    fit = fit_latency(lens, seconds, D_MODEL)
    np.testing.assert_allclose(fit.seconds(lens[:4]), seconds[:4], rtol=0.03)


def test_gamma_is_never_negative() -> None:
    lens = np.array([256, 1024, 4096, 16384])
    fit = fit_latency(lens, 1e-6 * lens**0.9, D_MODEL)
    assert fit.gamma == 0.0
    assert fit.fit_error is not None
    assert fit.fit_error > 0.01


def test_an_item_that_is_a_call_has_a_constant() -> None:
    lens = np.array([8, 64, 512, 2048])
    pairs = 32.0 * lens
    seconds = 2e-9 * lens**2 + 1e-6 * lens + 5e-3
    found = fit_item_latency(lens, seconds)
    np.testing.assert_allclose([found.quadratic, found.linear, found.constant], [2e-9, 1e-6, 5e-3])
    windowed = fit_item_latency([8, 64, 100], [1.0, 1.5, 3.0], num_pairs=[64, 64, 1000])
    np.testing.assert_allclose(windowed([8, 64, 100], [64, 64, 1000]), [1.0, 1.5, 3.0])
    assert fit_item_latency(lens, 2e-9 * pairs + 1e-3, num_pairs=pairs).constant > 9e-4
    with pytest.raises(ConfigError, match="at least 3 different lengths"):
        fit_item_latency([8, 64, 64], [1.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("lens", "seconds", "words"),
    [
        ([], [], "different lengths"),
        ([100, 100, 100], [1.0, 1.1, 0.9], "different lengths"),
        ([100, 200], [1.0], "one latency for each length"),
        ([[100, 200]], [[1.0, 2.0]], "one latency for each length"),
        ([100, 200, 300], [1.0, 2.0, math.nan], "positive and finite"),
        ([100, 200, 300], [1.0, 2.0, 0.0], "positive and finite"),
        ([0, 200, 300], [1.0, 2.0, 3.0], "positive and finite"),
        ([100, 200, math.inf], [1.0, 2.0, 3.0], "positive and finite"),
    ],
)
def test_bad_measurements_are_refused(lens: list, seconds: list, words: str) -> None:
    for fit in (
        lambda: fit_latency(lens, seconds, D_MODEL),
        lambda: fit_item_latency(lens, seconds),
    ):
        with pytest.raises(ConfigError, match=rf"fit_(item_)?latency.*{words}"):
            fit()


def test_latencies_that_leave_nothing_to_the_linear_layers() -> None:
    lens = np.array([256, 1024, 4096, 16384])
    with pytest.raises(ConfigError, match="faster than the square"):
        fit_latency(lens, 1e-12 * lens**3.0, D_MODEL)
    with pytest.raises(ConfigError, match="d_model"):
        fit_latency([100, 200], [1.0, 2.0], 0)


# Iterations of training

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
    again = fit_iterations(lens, rank_seconds(lens, truth).max(axis=1))
    assert again == fit != truth and hash(again) == hash(fit)
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
        ([], [], "0 measurements"),
        (GOOD[:2], [1.0, 1.0], "2 measurements"),
        (GOOD, [1.0, 1.0, 1.0], r"shape \(3,\)"),
        (GOOD, np.ones((4, 3)), r"shape \(4, 3\)"),
        (GOOD, np.ones((2, 4)), r"shape \(2, 4\)"),
        (GOOD, 1.0, r"shape \(\)"),
        (GOOD, [[1.0], [1.0, 1.0], [1.0], [1.0]], "cannot be read"),
        (GOOD, ["a", "b", "c", "d"], "real numbers"),
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
    with pytest.raises(ConfigError, match=f"fit_iterations.*{match}") as caught:
        fit_iterations(lens, seconds)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


# Calls of attention

A800 = AttentionLatency(40e-6, 6e-12, 15e-6, 9e-12, 2e-12, 30e-6, 2e-12)
CPU = AttentionLatency(4e-4, 4e-10, 3e-4, 6e-10, 3e-9, 2e-4, 5e-10)
MESHES = ((8, 1), (4, 2), (2, 4), (1, 8))


def written_out(model: AttentionLatency, load: AttentionLoad) -> float:
    """Equation 4, a period at a time, after what a rank lays out."""
    seconds = model.copy_s_per_byte * load.copied_bytes
    if load.all_to_all_bytes:
        for _ in ("to the ranks", "back"):
            seconds += model.all_to_all_latency_s
            seconds += model.all_to_all_s_per_byte * load.all_to_all_bytes / 2
    for period in range(load.ring_degree):
        compute = model.launch_s + model.compute_s_per_work * load.work / load.ring_degree
        exchange = model.p2p_latency_s + model.p2p_s_per_byte * load.p2p_bytes
        seconds += compute if period == load.ring_degree - 1 else max(compute, exchange)
    return seconds


def measured_loads(scale: float, repeats: int = 10) -> list[AttentionLoad]:
    """Dense calls of some lengths, and calls without work, as a calibration would take them."""
    loads = [
        even_load(mesh, seq_len=int(scale * length), num_heads=40, head_dim=128)
        for mesh in ((1, 1), *MESHES)
        for length in (2048, 8192, 32768, 65536)
    ]
    return (loads + [replace(load, work=0.0) for load in loads]) * repeats


def sparse_loads(scale: float) -> list[AttentionLoad]:
    return [
        even_load(
            mesh,
            seq_len=int(scale * length),
            num_heads=40,
            head_dim=128,
            density=density,
            imbalance=rho,
        )
        for mesh in ((1, 1), *MESHES, (3, 2))
        for length in (4096, 20000, 75600)
        for density in (0.1, 0.41, 0.68)
        for rho in (1.0, 1.4)
    ]


def test_a_load_written_out() -> None:
    load = even_load(
        (2, 3), seq_len=60, num_heads=8, head_dim=5, density=0.5, imbalance=1.2, bytes_per_value=4
    )
    pairs = 60 * 60 * 8  # of all ranks, dense
    rows = 60 // 6 * 8  # (token, head) of a rank at home
    assert load.degrees == (2, 3)
    assert load.work == pytest.approx(1.2 * 0.5 * pairs / 6)
    assert load.all_to_all_bytes == 4 * (rows // 2) * 5 * 4  # q, k, v and output; half stays
    assert load.p2p_bytes == 2 * (60 // 3) * (8 // 2) * 5 * 4  # k and v of a third, half the heads
    assert load.copied_bytes == 4 * rows * 5 * 4  # q, k, v and output
    whole = even_load((1, 1), seq_len=60, num_heads=8, head_dim=5)
    assert (whole.work, whole.all_to_all_bytes, whole.p2p_bytes) == (pairs, 0.0, 0.0)


@pytest.mark.parametrize("model", [A800, CPU])
def test_predictions_follow_the_equation(model: AttentionLatency) -> None:
    for load in sparse_loads(0.1) + measured_loads(0.1, 1):
        assert model(load) == pytest.approx(written_out(model, load), rel=1e-12)


def test_both_sides_of_the_maximum_occur() -> None:
    """Else the tests of the fit would show little."""
    for model, scale in ((A800, 1.0), (CPU, 0.05)):
        free = replace(model, p2p_latency_s=0.0, p2p_s_per_byte=0.0)
        rings = [load for load in measured_loads(scale, 1) if load.ring_degree > 1]
        hidden = [load for load in rings if model(load) == free(load)]
        assert 0.25 < len(hidden) / len(rings) < 0.75


@pytest.mark.parametrize(("model", "scale"), [(A800, 1.0), (CPU, 0.05)])
def test_exact_times_give_the_coefficients_back(model: AttentionLatency, scale: float) -> None:
    loads = measured_loads(scale, 1)
    fit = fit_attention_latency(loads, [model(load) for load in loads])
    assert fit.fit_error is not None
    assert fit.fit_error < 1e-6
    np.testing.assert_allclose(dataclasses.astuple(fit)[:7], dataclasses.astuple(model)[:7], 1e-5)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("model", "scale"), [(A800, 1.0), (CPU, 0.05)])
def test_ten_percent_of_noise(model: AttentionLatency, scale: float, seed: int) -> None:
    loads = measured_loads(scale)
    noise = 1.0 + 0.1 * np.random.default_rng(seed).standard_normal(len(loads))
    fit = fit_attention_latency(loads, noise * [model(load) for load in loads])
    assert fit.fit_error == pytest.approx(0.1, rel=0.3)
    errors = [fit(load) / model(load) - 1.0 for load in sparse_loads(scale)]
    assert max(map(abs, errors)) < 0.05


def test_no_bias_under_noise() -> None:
    """Errors relative to the measured time would predict 2 % less than the mean of the times."""
    loads = measured_loads(1.0, repeats=60)
    exact = np.array([A800(load) for load in loads])
    noise = 1.0 + 0.1 * np.random.default_rng(0).standard_normal(len(loads))
    fit = fit_attention_latency(loads, exact * noise)
    predicted = np.array([fit(load) for load in loads])
    assert np.mean(predicted / exact) == pytest.approx(1.0, abs=0.005)


def test_the_order_and_the_unit_do_not_matter() -> None:
    loads = measured_loads(1.0)
    noise = np.random.default_rng(3).lognormal(0.0, 0.1, len(loads))
    seconds = noise * [A800(load) for load in loads]
    fit = fit_attention_latency(loads, seconds)
    assert fit_attention_latency(loads, seconds) == fit
    order = np.random.default_rng(4).permutation(len(loads))
    shuffled = fit_attention_latency([loads[i] for i in order], seconds[order])
    in_blocks = [replace(load, work=load.work / 64**2) for load in loads]
    blocks = fit_attention_latency(in_blocks, seconds)
    for load, other in zip(loads, in_blocks, strict=True):
        assert shuffled(load) == pytest.approx(fit(load), rel=1e-6)
        assert blocks(other) == pytest.approx(fit(load), rel=1e-6)


def test_illegal_measurements() -> None:
    loads = measured_loads(1.0, 1)
    seconds = np.array([A800(load) for load in loads])
    with pytest.raises(ConfigError, match=r"40 loads and seconds of shape \(39,\)"):
        fit_attention_latency(loads, seconds[:-1])
    with pytest.raises(ConfigError, match=r"5 loads.*at least 7"):
        fit_attention_latency(loads[:5], seconds[:5])
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="positive and finite"):
            fit_attention_latency(loads, np.where(np.arange(40) == 7, bad, seconds))
    flat = [load for load in loads if load.ring_degree == 1]
    with pytest.raises(ConfigError, match="no call with a ring"):
        fit_attention_latency(flat, [A800(load) for load in flat])
    rings = [load for load in loads if load.ulysses_degree == 1]
    with pytest.raises(ConfigError, match="no call with all-to-alls"):
        fit_attention_latency(rings, [A800(load) for load in rings])
    hidden = replace(A800, p2p_latency_s=0.0, p2p_s_per_byte=0.0)
    with pytest.raises(ConfigError, match="no call waits for the exchange"):
        fit_attention_latency(loads, [hidden(load) for load in loads])
