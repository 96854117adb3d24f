import numpy as np
import pytest

from bascule.errors import ConfigError
from bascule.plan.costs import TransformerCost
from bascule.plan.fits import fit_item_latency, fit_latency

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


@pytest.mark.parametrize(
    ("lens", "seconds"),
    [
        ([], []),
        ([100], [1.0]),
        ([100, 100, 100], [1.0, 1.1, 0.9]),
        ([100, 200], [1.0]),
        ([[100, 200]], [[1.0, 2.0]]),
        ([100, 200], [1.0, float("nan")]),
        ([100, 200], [1.0, float("inf")]),
        ([100, 200], [1.0, 0.0]),
        ([100, 200], [1.0, -1.0]),
        ([0, 200], [1.0, 2.0]),
        ([-100, 200], [1.0, 2.0]),
        ([float("nan"), 200], [1.0, 2.0]),
        ([float("inf"), 200], [1.0, 2.0]),
    ],
)
def test_bad_measurements_are_refused(lens: list, seconds: list) -> None:
    with pytest.raises(ConfigError, match="fit_latency"):
        fit_latency(lens, seconds, D_MODEL)
    with pytest.raises(ConfigError, match="fit_item_latency"):
        fit_item_latency(lens, seconds)


def test_an_item_that_is_a_call_has_a_constant() -> None:
    lens = np.array([8, 64, 512, 2048])
    pairs = 32.0 * lens
    seconds = 2e-9 * lens**2 + 1e-6 * lens + 5e-3
    found = fit_item_latency(lens, seconds)
    np.testing.assert_allclose([found.quadratic, found.linear, found.constant], [2e-9, 1e-6, 5e-3])
    windowed = fit_item_latency([8, 64, 100], [1.0, 1.5, 3.0], num_pairs=[64, 64, 1000])
    np.testing.assert_allclose(windowed([8, 64, 100], [64, 64, 1000]), [1.0, 1.5, 3.0])
    assert fit_item_latency(lens, 2e-9 * pairs + 1e-3, num_pairs=pairs).constant > 9e-4
    with pytest.raises(ConfigError, match="at least three different lengths"):
        fit_item_latency([8, 64, 64], [1.0, 2.0, 2.0])


def test_latencies_that_leave_nothing_to_the_linear_layers() -> None:
    lens = np.array([256, 1024, 4096, 16384])
    with pytest.raises(ConfigError, match="faster than the square"):
        fit_latency(lens, 1e-12 * lens**3.0, D_MODEL)


def test_a_bad_width_is_refused() -> None:
    with pytest.raises(ConfigError, match="d_model"):
        fit_latency([100, 200], [1.0, 2.0], 0)
