"""Fit cost models to measurements by least squares of relative errors.

Legend: O observations, K coefficients, R ranks. The *share* of a term is its part of the slowest
ranks' time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Bools, Floats, Ints
from bascule.checks import MAX_NUMBER, check_lengths, floats, listed
from bascule.errors import ConfigError
from bascule.machine.calibration import NUM_COEFFICIENTS, Fit, is_held_out
from bascule.machine.costs import IterationFit, PolynomialCost, TransformerCost
from bascule.quantities import amount, percent

CONFIDENCE = 0.95
"""Confidence of the intervals; errors are half their width."""


def relative_fit(columns: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Fit coefficients >= 0 of columns (n, K) to times (n,), by least squares of relative errors.

    Return the (K,) coefficients, and (n,) relative errors: predicted over measured times, minus 1.
    """
    from scipy.optimize import nnls

    rows, units = _in_units(columns / seconds[:, None])
    scaled, _ = nnls(rows, np.ones_like(seconds))
    return units * scaled, rows @ scaled - 1.0


def _in_units(rows: Floats) -> tuple[Floats, Floats]:
    """Scale columns to a mean of 1, except zero columns; return them and (K,) their units."""
    means = rows.mean(axis=0)
    units = np.divide(1.0, means, out=np.zeros_like(means), where=means > 0)
    return rows * units, units


def _half_widths(rows: Floats, residuals: Floats, noise: Floats) -> Floats:
    """Return half of the (K,) intervals, as if the coefficients at 0 had been free; or infinity.

    They follow from the scatter about the fit (Student's t), and are never below the noise of the
    points, (n,) relative standard errors: few points may lie on a curve by luck.
    """
    from scipy.special import ndtri, stdtrit

    rows, units = _in_units(rows)
    freedom = rows.shape[0] - rows.shape[1]
    if freedom < 1 or np.linalg.matrix_rank(rows) < rows.shape[1]:
        return np.full_like(units, np.inf)
    spread = cast(Floats, np.linalg.pinv(rows)) ** 2
    by_scatter = float(residuals @ residuals) / freedom * spread.sum(axis=1)
    students = cast(float, stdtrit(freedom, 0.5 + CONFIDENCE / 2)) ** 2
    normal = cast(float, ndtri(0.5 + CONFIDENCE / 2)) ** 2
    return units * np.sqrt(np.maximum(students * by_scatter, normal * (spread @ noise**2)))


def fit_curve(what: str, unit: str, sizes: Sequence[int], seconds: Floats, noise: Floats) -> Fit:
    """Fit a curve over (n,) ascending sizes; every third tests it. `noise` is relative."""
    held_out = is_held_out(len(sizes))
    x, fitted = np.asarray(sizes, dtype=np.float64), ~held_out
    columns = x[:, None] ** np.arange(NUM_COEFFICIENTS[unit])
    coefs, residuals = relative_fit(columns[fitted], seconds[fitted])
    rows = columns[fitted] / seconds[fitted, None]
    errors = _half_widths(rows, residuals, noise[fitted])
    return Fit(
        what=what,
        unit=unit,
        coefficients=tuple(coefs.tolist()),
        errors=tuple(x if np.isfinite(x) else None for x in errors.tolist()),
        sizes=tuple(x.tolist()),
        seconds=tuple(seconds.tolist()),
        held_out=tuple(held_out.tolist()),
    )


def fit_latency(
    seq_lens: npt.ArrayLike,
    seconds: npt.ArrayLike,
    d_model: int,
    *,
    num_layers: int = 1,
    num_pairs: npt.ArrayLike | None = None,
) -> TransformerCost:
    """Fit `k (24 L d^2 + gamma 4 L^2 d)` to measured latencies of sequences, alone or in packs.

    It minimises relative errors with k >= 0 and gamma >= 0; the paper's unweighted fit depends on
    only the longest sequences. Source: KnapFormer, equation 2.

    Args:
        seq_lens: (n,) tokens of each measured sequence, at least two different lengths.
        seconds: (n,) forward latency of each.
        d_model: Model width.
        num_layers: Number of blocks that the latencies cover.
        num_pairs: (n,) numbers of (query, key) pairs in a block; None: the square of the tokens.

    Raises:
        ConfigError: Too few points, a value that is not positive, or latencies with no time left
            for linear layers.
    """
    tokens, latency = _latencies("fit_latency", seq_lens, seconds, 2)
    linear = TransformerCost(d_model, gamma=0.0, num_layers=num_layers)(tokens)
    attention = TransformerCost(d_model, num_layers=num_layers)(tokens, num_pairs) - linear
    coefs, residuals = relative_fit(np.stack([linear, attention], axis=1), latency)
    linear_s, attention_s = coefs.tolist()
    if linear_s <= 0.0:
        wrong = "fit_latency: the latencies grow faster than the square of the length"
        raise ConfigError(f"{wrong}; measure shorter lengths too, and repeat each measurement")
    return TransformerCost(
        d_model,
        gamma=attention_s / linear_s,
        num_layers=num_layers,
        seconds_per_unit=linear_s,
        fit_error=float(np.sqrt(np.mean(residuals**2))),
    )


def fit_item_latency(
    item_lens: npt.ArrayLike, seconds: npt.ArrayLike, *, num_pairs: npt.ArrayLike | None = None
) -> PolynomialCost:
    """Fit `quadratic L^2 + linear L + constant` to measured latencies of items, one call per item.

    Use it for encoders that are called item by item. The constant covers launches and the reading
    of weights. The fit minimises relative errors, with coefficients >= 0.

    Args:
        item_lens: (n,) tokens of each measured item, at least three different lengths.
        seconds: (n,) forward latency of each.
        num_pairs: As in `fit_latency`.
    """
    tokens, latency = _latencies("fit_item_latency", item_lens, seconds, 3)
    pairs = tokens**2 if num_pairs is None else floats("fit_item_latency: num_pairs", num_pairs)
    columns = np.stack([pairs, tokens, np.ones_like(tokens)], axis=1)
    return PolynomialCost(*relative_fit(columns, latency)[0].tolist())


def _latencies(
    what: str, seq_lens: npt.ArrayLike, seconds: npt.ArrayLike, num_lengths: int
) -> tuple[Floats, Floats]:
    """Check latencies; refuse fewer than `num_lengths` different lengths."""
    tokens, latency = floats(f"{what}: seq_lens", seq_lens), floats(f"{what}: seconds", seconds)
    few = tokens.ndim != 1 or np.unique(tokens).size < num_lengths
    if few or tokens.shape != latency.shape:
        wrong = f"{what}: {tokens.shape} lengths and {latency.shape} seconds; give one latency"
        raise ConfigError(f"{wrong} for each length, and at least {num_lengths} different lengths")
    if not (_is_time(tokens) & _is_time(latency)).all():
        wrong = f"{what}: lengths and seconds must be positive and finite"
        raise ConfigError(f"{wrong}, at most {amount(MAX_NUMBER, '')}: leave the measurement out")
    return tokens, latency


def _is_time(values: Floats) -> Bools:
    return (values >= 1.0 / MAX_NUMBER) & (values <= MAX_NUMBER)


TERMS = ("quadratic", "linear", "constant", "overhead")

MIN_OBSERVATIONS = 3
MAX_LOO_ERROR = 0.1  # a fit that predicts worse than this is refused, if nothing else is said
WORST_PART = 10  # one measurement in so many, rounded up, does not count in that error
MAX_ROUNDS = 60

TYPICAL_CROSSOVER_TOKENS = 24576
"""Assumed length at which the quadratic term reaches the linear one, up to `CROSSOVER_LOG_SD`: by
KnapFormer's equation 1, `24 L d^2 + 4 L^2 d`, it is 6 d, so this is a width of 4096."""

CROSSOVER_LOG_SD = 0.65
"""One standard deviation is a factor of 1.9, two are widths of 1,100 to 15,000."""

OVERHEAD_SHARE = (0.2, 0.15)
"""Assumed share of the overhead, and its standard deviation."""

CONSTANT_SHARE = (0.005, 0.01)
"""Assumed share of the constant, launches of packed sequences, and its standard deviation."""

FREEDOM = 8.0
"""Degrees of freedom of Student's t distribution, which we assume the noise to have: nearly normal
for small residuals, while one of 20 standard deviations gets 2 % of the weight."""

MIN_NOISE = 1e-6
"""Relative noise below which the assumptions no longer fade, so that they decide what is open."""

MIN_SCALE = 0.1
"""Residuals are relative to the measured time, but at least to this share of the median time: an
idle rank may have taken no time at all."""

STARTS_K = ((0.3, 0.5, 0.0, 0.2), (1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0))
"""Shares that decide which ranks are taken to be the slowest at first."""


@dataclass(frozen=True)
class _Solution:
    """Coefficients, and the linear problem of the slowest ranks that they solve."""

    coefs: Floats  # (K,)
    slowest: Ints  # (O,) ranks
    design: Floats  # (O, K) relative to the measured time, per unit of share
    scale: Floats  # (K,) coefficient per unit of share
    loo: Floats  # (O,) relative errors of each observation, predicted by the others
    weights: Floats  # (O,)
    noise: float  # relative, one standard deviation


def _shares(
    design: Floats, target: Floats, weights: Floats, assumed: tuple[Floats, Floats], noise: float
) -> tuple[Floats, Floats, Floats]:
    """Solve for shares (K,) >= 0; return them, residuals (O,), and 1 - leverage (O,).

    The leverage is how much of an observation's prediction is the observation itself; without it,
    the residual would be residual / (1 - leverage). Noise sets the weight of the assumptions.
    """
    from scipy.optimize import nnls

    root = np.sqrt(weights)
    rows, extra = root[:, None] * design, noise * assumed[0]
    target_of_all = np.concatenate([root * target, noise * assumed[1]])
    shares, _ = nnls(np.vstack([rows, extra]), target_of_all)
    free = shares > 0
    rows, extra = rows[:, free], extra[:, free]
    # The last part is for a term that no slowest rank has: nothing else holds it.
    normal = rows.T @ rows + extra.T @ extra + 1e-15 * np.eye(rows.shape[1])
    leverage = np.einsum("ok,ko->o", rows, np.linalg.solve(normal, rows.T))
    return shares, design @ shares - target, np.maximum(1.0 - leverage, 1e-9)


def fit_iterations(
    seq_lens: Sequence[Sequence[npt.ArrayLike]],
    seconds: npt.ArrayLike,
    *,
    max_loo_error: float = MAX_LOO_ERROR,
) -> PolynomialCost:
    """Fit seconds per sequence, and per rank and step, to the times of training iterations.

    Iteration t takes `overhead + max over ranks of sum over sequences of cost(L)`, with `cost(L) =
    quadratic L^2 + linear L + constant`. From several starts, the fit alternates between finding
    the slowest ranks and least squares with coefficients >= 0. Source of the model: LoongForge,
    without overhead, with a smooth maximum (`logsumexp(20 load) / 20`, in ms) and absolute squares.

    It minimises relative residuals under Student's t distribution, so that a stall hardly counts.
    Weak assumptions (`TYPICAL_CROSSOVER_TOKENS`, `OVERHEAD_SHARE`, `CONSTANT_SHARE`) settle what
    measurements leave open; they weigh more if the measurements are noisier.

    Args:
        seq_lens: ``seq_lens[iteration][rank]`` lists the tokens of each sequence that the rank
            computed in the iteration, over all its microbatches. Ranks and iterations may be empty.
        seconds: (iterations,) times of iterations, which the slowest ranks decide; or
            (iterations, ranks) compute times of each rank, NaN where not measured.
        max_loo_error: Leave-one-out error above which the fit is refused.

    Returns:
        The cost model. Its `fit` has standard errors, the unidentified coefficients, and the
        leave-one-out error (in closed form, with fixed weights and slowest ranks).

    Raises:
        ConfigError: Lengths and seconds do not match or are illegal, there are fewer than 3
            measurements, or the leave-one-out error is above the limit.
    """
    work_ORK, seconds_O = _observe(seq_lens, seconds)
    # Where each rank has a time of its own, there is nothing to search.
    starts = STARTS_K if work_ORK.shape[1] > 1 else STARTS_K[:1]
    solutions = [
        _alternate(work_ORK, seconds_O, *begin) for begin in product(starts, (False, True))
    ]
    # Rounded, so that of equally good solutions the first is taken, not the luckiest rounding.
    best = min(solutions, key=lambda fit: round(float(np.abs(fit.loo).mean()), 6))
    errors_K, known_K = _uncertainty(best)
    errors = np.sort(np.abs(best.loo))  # the worst are stalls
    fit = IterationFit(
        standard_errors=cast(tuple[float, float, float, float], tuple(errors_K.tolist())),
        unidentified=tuple(term for term, known in zip(TERMS, known_K, strict=True) if not known),
        loo_error=float(errors[: errors.size - -(-errors.size // WORST_PART)].mean()),
        num_observations=best.loo.size,
        num_outliers=int(np.count_nonzero(best.weights < 0.5)),
    )
    if fit.loo_error > max_loo_error:
        raise ConfigError(
            "fit_iterations: the lengths do not explain the seconds: a fit to all but one of "
            f"{fit.num_observations} measurements misses that one by {percent(fit.loo_error)} on "
            f"average, and the limit is {percent(max_loo_error)}; check that lengths and seconds "
            "are of the same steps and that timers wait for the device, or measure more iterations"
        )
    quadratic, linear, constant, overhead = best.coefs.tolist()
    return PolynomialCost(quadratic, linear, constant, overhead, fit=fit)


def _alternate(
    work_ORK: Floats, seconds_O: Floats, start_K: Sequence[float], robust: bool
) -> _Solution:
    """Alternate between the slowest ranks and the coefficients, until both stay.

    If not `robust`, weights stay 1 until the slowest ranks do: while some are wrong, their
    iterations look like outliers. The other way finds its way around true outliers.
    """
    even_O = np.ones_like(seconds_O)
    mean_K = work_ORK.mean(axis=(0, 1))
    coefs_K = np.divide(start_K, mean_K, out=np.zeros(len(TERMS)), where=mean_K > 0)
    slowest_O = (work_ORK @ coefs_K).argmax(axis=1)
    solution = _solve(work_ORK, seconds_O, slowest_O, even_O, noise=0.0)
    for turn in range(MAX_ROUNDS):
        last = solution
        slowest_O = (work_ORK @ last.coefs).argmax(axis=1)
        same = np.array_equal(last.slowest, slowest_O)
        robust = robust or same or turn == MAX_ROUNDS // 2
        weights_O, noise = (last.weights, last.noise) if robust else (even_O, 0.0)
        solution = _solve(work_ORK, seconds_O, slowest_O, weights_O, noise)
        if same and np.allclose(last.coefs, solution.coefs, rtol=1e-9, atol=0.0):
            break
    return solution


def _solve(
    work_ORK: Floats, seconds_O: Floats, slowest_O: Ints, weights_O: Floats, noise: float
) -> _Solution:
    """Find coefficients >= 0 by weighted least squares, and the weights and noise that follow."""
    unit_O = np.maximum(seconds_O, MIN_SCALE * float(np.median(seconds_O)))
    rows_OK = work_ORK[np.arange(slowest_O.size), slowest_O] / unit_O[:, None]
    design_OK, scale_K = _in_units(rows_OK)
    problem = design_OK, seconds_O / unit_O, weights_O, _assumptions(scale_K)[:2]
    shares_K, residual_O, left_O = _shares(*problem, max(noise, MIN_NOISE))
    # Noise and outliers are found without the assumptions: where these are wrong, their residuals
    # would look like noise, which would make them weigh more still.
    _, free_residual_O, free_left_O = _shares(*problem, MIN_NOISE)
    # The standard deviation by the median: the same for a normal distribution.
    noise = 1.4826 * float(np.median(np.abs(free_residual_O / free_left_O)))
    ratio_O = free_residual_O**2 / (free_left_O * max(noise, MIN_NOISE) ** 2)
    return _Solution(
        coefs=shares_K * scale_K,
        slowest=slowest_O,
        design=design_OK,
        scale=scale_K,
        loo=residual_O / left_O,
        weights=(FREEDOM + 1.0) / (FREEDOM + ratio_O),
        noise=noise,
    )


def _assumptions(scale_K: Floats) -> tuple[Floats, Floats, Floats]:
    """Return rows (3, K) and values (3,) of assumed shares, and the deviations (K,) of each.

    In units of these: 1. quadratic : linear = mean length : crossover, up to a factor (the length
    is weighted by tokens); 2. the constant; 3. the overhead. The sum of the shares is left free.
    """
    length = scale_K[1] / scale_K[0] if scale_K[0] > 0 else TYPICAL_CROSSOVER_TOKENS
    part = float(length / (length + TYPICAL_CROSSOVER_TOKENS))  # quadratic in both
    spread = CROSSOVER_LOG_SD * part * (1.0 - part)  # to first order
    (constant, constant_sd), (overhead, overhead_sd) = CONSTANT_SHARE, OVERHEAD_SHARE
    rows = np.array(
        [
            [(1.0 - part) / spread, -part / spread, 0.0, 0.0],
            [0.0, 0.0, 1.0 / constant_sd, 0.0],
            [0.0, 0.0, 0.0, 1.0 / overhead_sd],
        ]
    ) * (scale_K > 0)
    deviations = np.array([spread, spread, constant_sd, overhead_sd])
    return rows, rows @ [0.0, 0.0, constant, overhead], deviations


def _uncertainty(solution: _Solution) -> tuple[Floats, Bools]:
    """Return (K,) standard errors by the measurements, and if each is below the assumed error."""
    rows = np.sqrt(solution.weights)[:, None] * solution.design
    noise = max(solution.noise, MIN_NOISE)
    # Rows of zeros give fewer observations than terms all their axes.
    padded = np.vstack([rows, np.zeros((len(TERMS),) * 2)])
    _, sizes, axes = np.linalg.svd(padded, full_matrices=False)
    blind = sizes < 1e-9 * sizes[0]
    variance_K = (axes[~blind] ** 2).T @ sizes[~blind] ** -2.0
    variance_K[(axes[blind] ** 2).sum(axis=0) > 1e-9] = np.inf
    share_errors_K = noise * np.sqrt(variance_K)
    scale_K = solution.scale
    errors_K = share_errors_K * np.where(scale_K > 0, scale_K, 1.0)  # without a unit: infinite
    return errors_K, share_errors_K < _assumptions(scale_K)[2]


def _observe(
    seq_lens: Sequence[Sequence[npt.ArrayLike]], seconds: npt.ArrayLike
) -> tuple[Floats, Floats]:
    """Return (O, R, K) sum of L^2, sum of L, sequences, and 1; and (O,) seconds of the slowest."""
    work_TRK, times = _work(seq_lens), floats("fit_iterations: seconds", seconds)
    shape = work_TRK.shape[:2]
    if times.shape not in (shape[:1], shape):
        wrong = f"fit_iterations: seconds have shape {times.shape}, the lengths are of {shape}"
        raise ConfigError(
            f"{wrong} iterations and ranks; give seconds of shape {shape[:1]} or {shape}"
        )
    is_missing = np.isnan(times) & (times.ndim == 2)
    if not (legal := (times == 0) | _is_time(times) | is_missing).all():
        place = np.argwhere(~legal)[0].tolist()
        wrong = f"fit_iterations: seconds{place} is {times[tuple(place)]}"
        raise ConfigError(f"{wrong}; times must be finite and >= 0: leave the iteration out")
    places = np.argwhere(~is_missing)
    if times.ndim == 2:
        work_ORK = work_TRK[~is_missing][:, None, :]
    else:
        # Most tokens first: of ranks with equal loads that one is the slowest, in any order.
        order_TR = np.lexsort([-work_TRK[:, :, term] for term in (2, 0, 1)], axis=1)
        work_ORK = np.take_along_axis(work_TRK, order_TR[:, :, None], axis=1)
    times = times[~is_missing]
    if times.size < MIN_OBSERVATIONS:
        wrong = f"fit_iterations: {times.size} measurements, at least {MIN_OBSERVATIONS} are needed"
        raise ConfigError(f"{wrong}, and ten are better: measure more iterations")
    # A timer that did not run gives zeros, and any fit of zeros is perfect.
    stopped = (times == 0.0) & (work_ORK[:, :, 2] > 0).any(axis=1)
    if stopped.any():
        place = ", rank ".join(map(str, places[int(stopped.argmax())].tolist()))
        wrong = f"fit_iterations: iteration {place} took 0 s with sequences to compute"
        raise ConfigError(f"{wrong}; times must be above 0: leave it out, or time every iteration")
    if not work_ORK[:, :, 1].any():
        wrong = "fit_iterations: no measured iteration has a token, at least one is needed"
        raise ConfigError(f"{wrong}: measure iterations that compute")
    return work_ORK, times


def _work(seq_lens: Sequence[Sequence[npt.ArrayLike]]) -> Floats:
    """Return (iterations, ranks, K) sum of L^2, sum of L, number of sequences, and 1."""
    seq_lens = listed("fit_iterations: seq_lens", seq_lens)
    ranks = [listed("fit_iterations: lengths of an iteration", lens) for lens in seq_lens]
    num_ranks = len(ranks[0]) if ranks else 0
    work = np.ones((len(ranks), num_ranks, len(TERMS)))
    for iteration, per_rank in enumerate(ranks):
        try:
            counts, lens = check_lengths(per_rank, num_ranks)
        except ConfigError as error:
            raise ConfigError(f"fit_iterations: iteration {iteration}: {error}") from None
        tokens = lens.astype(np.float64)  # the square of 65,536 tokens is 0 as an int32
        rank_of = np.repeat(np.arange(num_ranks), counts)
        for term, values in enumerate((tokens**2, tokens, None)):
            work[iteration, :, term] = np.bincount(rank_of, values, num_ranks)
    return work
