"""A cost model from the times of training iterations, in which only the slowest rank shows.

The model: iteration t takes T_t = overhead + max over ranks r of sum over sequences of cost(L),
with cost(L) = quadratic L^2 + linear L + constant. Once it is known which rank was the slowest in
each iteration, T is linear in the coefficients. So we alternate: predict, take the slowest ranks,
solve a least-squares problem of four non-negative unknowns, until the slowest ranks stay the same;
from several starts. Source of the model: LoongForge, which has no overhead, smooths the maximum
(`logsumexp(20 load) / 20`, loads in ms) and minimises squared seconds from one start, all zero.

Legend: O observations (iterations, or single ranks of them), R ranks among which the slowest is
looked for, K = 4 terms: quadratic, linear, constant, overhead. The *share* of a term is its part of
the time of the slowest ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from bascule.arrays import Floats, Ints
from bascule.errors import ConfigError
from bascule.plan.checks import MAX_NUMBER, by_rank, floats, listed
from bascule.plan.costs.cost_models import IterationFit, PolynomialCost
from bascule.plan.loaded.lengths import check_lengths

TERMS = ("quadratic", "linear", "constant", "overhead")

MIN_OBSERVATIONS = 3

MAX_LOO_ERROR = 0.1
"""A fit that predicts worse than this is refused, if nothing else is said."""

WORST_PART = 10
"""One measurement in so many, rounded up, does not count in the leave-one-out error."""

TYPICAL_CROSSOVER_TOKENS = 24576
"""Assumed length at which the quadratic term reaches the linear one, up to `CROSSOVER_LOG_SD`: by
KnapFormer's equation 1, `24 L d^2 + 4 L^2 d`, it is 6 d, so this is a width of 4096."""

CROSSOVER_LOG_SD = 0.65
"""One standard deviation is a factor of 1.9, two are widths of 1,100 to 15,000."""

OVERHEAD_SHARE = (0.2, 0.15)
"""Assumed share of the overhead, and its standard deviation."""

CONSTANT_SHARE = (0.005, 0.01)
"""The same for the launches of sequences, which are packed."""

FREEDOM = 8.0
"""Degrees of freedom of Student's t distribution, which we assume the noise to have: nearly normal
for small residuals, while one of 20 standard deviations gets 2 % of the weight."""

MIN_NOISE = 1e-6
"""Relative noise below which the assumptions no longer fade, so that they decide what is open."""

MIN_SCALE = 0.1
"""Residuals are relative to the measured time, but at least to this share of the median time: an
idle rank may have taken no time at all."""

MAX_ROUNDS = 60

STARTS_K = (
    (0.3, 0.5, 0.0, 0.2),
    (1.0, 0.0, 0.0, 0.0),
    (0.0, 1.0, 0.0, 0.0),
    (0.0, 0.0, 1.0, 0.0),
)
"""Shares that decide which ranks are taken to be the slowest at first."""


@dataclass(frozen=True)
class _Observed:
    """What was measured: each time belongs to the slowest of R ranks."""

    work: Floats  # (O, R, K) sum of L^2, sum of L, sequences, 1
    seconds: Floats  # (O,)


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


@dataclass(frozen=True)
class _Problem:
    """Least squares over shares >= 0, given the slowest ranks."""

    design: Floats  # (O, K)
    target: Floats  # (O,)
    weights: Floats  # (O,)
    assumed_rows: Floats  # (A, K)
    assumed: Floats  # (A,)

    def solve(self, noise: float) -> tuple[Floats, Floats, Floats]:
        """Shares (K,), residuals (O,), and 1 - leverage (O,) of each observation.

        The leverage is how much of an observation's prediction is the observation itself; without
        it, the residual would be residual / (1 - leverage).
        """
        root = np.sqrt(self.weights)
        rows, assumed = root[:, None] * self.design, noise * self.assumed_rows
        shares, _ = nnls(
            np.vstack([rows, assumed]), np.concatenate([root * self.target, noise * self.assumed])
        )
        free = shares > 0
        rows, assumed = rows[:, free], assumed[:, free]
        # The last part is for a term that no slowest rank has: nothing else holds it.
        normal = rows.T @ rows + assumed.T @ assumed + 1e-15 * np.eye(rows.shape[1])
        leverage = np.einsum("ok,ko->o", rows, np.linalg.solve(normal, rows.T))
        return shares, self.design @ shares - self.target, np.maximum(1.0 - leverage, 1e-9)


def fit_iterations(
    seq_lens: Sequence[Sequence[npt.ArrayLike]],
    seconds: npt.ArrayLike,
    *,
    max_loo_error: float = MAX_LOO_ERROR,
) -> PolynomialCost:
    """Fit seconds per sequence, and per rank and step, to the times of training iterations.

    Relative residuals are minimised under Student's t distribution, so that an iteration that took
    five times as long (a checkpoint, a stall) hardly counts, with all coefficients >= 0. What the
    measurements leave open is settled by weak assumptions, the same in any unit of time: they weigh
    as much as the noise of the measurements allows, so exact times give exact coefficients. They
    are `TYPICAL_CROSSOVER_TOKENS`, `OVERHEAD_SHARE` and `CONSTANT_SHARE`.

    Args:
        seq_lens: ``seq_lens[iteration][rank]`` lists the tokens of each sequence that the rank
            computed in the iteration, over all its microbatches. Ranks and iterations may be empty.
        seconds: (iterations,) time of each iteration, which is that of its slowest rank; or
            (iterations, ranks) each rank's own compute time, NaN where it was not measured.
        max_loo_error: Leave-one-out error above which the fit is refused.

    Returns:
        The cost model. Its `fit` holds standard errors, the names of the coefficients that the
        measurements leave open, and the leave-one-out error (in the closed form for least squares:
        weights and slowest ranks stay).

    Raises:
        ConfigError: Lengths and seconds do not match or are illegal, there are fewer than 3
            measurements, or the leave-one-out error is above the limit.
    """
    observed = _observe(seq_lens, seconds)
    # Where each rank has a time of its own, there is nothing to search.
    starts = STARTS_K if observed.work.shape[1] > 1 else STARTS_K[:1]
    solutions = [_alternate(observed, *way) for way in product(starts, (False, True))]
    # Rounded, so that of equally good solutions the first is taken, not the luckiest rounding.
    best = min(solutions, key=lambda found: round(float(np.abs(found.loo).mean()), 6))
    errors_K, known_K = _standard_errors(best)
    fit = IterationFit(
        standard_errors=cast(tuple[float, float, float, float], tuple(errors_K.tolist())),
        unidentified=tuple(term for term, known in zip(TERMS, known_K, strict=True) if not known),
        loo_error=_loo_error(best.loo),
        num_observations=best.loo.size,
        num_outliers=int(np.count_nonzero(best.weights < 0.5)),
        covariance=tuple(map(tuple, _covariance(best).tolist())),
    )
    if fit.loo_error > max_loo_error:
        raise ConfigError(
            "fit_iterations: the lengths do not explain the seconds: the error with which "
            f"{fit.num_observations} measurements predict each other is {fit.loo_error:.1%}, and "
            f"the limit is {max_loo_error:.0%}; check that lengths and seconds are of the same "
            "steps and that timers wait for the device, or measure more iterations"
        )
    quadratic, linear, constant, overhead = best.coefs.tolist()
    return PolynomialCost(quadratic, linear, constant, overhead, fit=fit)


def _alternate(observed: _Observed, start_K: Sequence[float], robust: bool) -> _Solution:
    """Slowest ranks by the coefficients, coefficients by the slowest ranks, until both stay.

    If not `robust`, all weights stay 1 until the slowest ranks do: as long as some of these are
    wrong, their iterations look like outliers, and without them the rest fits too well. The other
    way finds its way around outliers, which may decide on the slowest ranks if they count.
    """
    even_O = np.ones_like(observed.seconds)
    mean_K = observed.work.mean(axis=(0, 1))
    coefs_K = np.divide(start_K, mean_K, out=np.zeros(len(TERMS)), where=mean_K > 0)
    found = _solve(observed, (observed.work @ coefs_K).argmax(axis=1), even_O, noise=0.0)
    for turn in range(MAX_ROUNDS):
        last = found
        slowest_O = (observed.work @ last.coefs).argmax(axis=1)
        same = np.array_equal(last.slowest, slowest_O)
        robust = robust or same or turn == MAX_ROUNDS // 2
        weights_O, noise = (last.weights, last.noise) if robust else (even_O, 0.0)
        found = _solve(observed, slowest_O, weights_O, noise)
        if same and np.allclose(last.coefs, found.coefs, rtol=1e-9, atol=0.0):
            break
    return found


def _solve(observed: _Observed, slowest_O: Ints, weights_O: Floats, noise: float) -> _Solution:
    """Weighted least squares over coefficients >= 0, and the weights and the noise that follow."""
    median_s = float(np.median(observed.seconds))
    unit_O = np.maximum(observed.seconds, MIN_SCALE * median_s)
    rows_OK = observed.work[np.arange(slowest_O.size), slowest_O] / unit_O[:, None]
    mean_K = rows_OK.mean(axis=0)
    scale_K = np.divide(1.0, mean_K, out=np.zeros_like(mean_K), where=mean_K > 0)
    design_OK, target_O = rows_OK * scale_K, observed.seconds / unit_O
    problem = _Problem(design_OK, target_O, weights_O, *_assumptions(scale_K))
    shares_K, residual_O, left_O = problem.solve(max(noise, MIN_NOISE))
    # Noise and outliers are told without the assumptions: where these are wrong, their residuals
    # would look like noise, which would make them weigh more still.
    _, free_residual_O, free_left_O = problem.solve(MIN_NOISE)
    noise = _spread(free_residual_O / free_left_O)
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


def _spread(errors_O: Floats) -> float:
    """Standard deviation by the median, which is the same for a normal distribution."""
    return 1.4826 * float(np.median(np.abs(errors_O)))


def _assumptions(scale_K: Floats) -> tuple[Floats, Floats]:
    """Rows over shares, and what they should be, in units of the standard deviation of each.

    1. quadratic : linear = mean length : crossover, up to a factor (the length is weighted by
       tokens);
    2. the share of the constant; 3. the share of the overhead. The sum of the shares is left free.
    """
    quadratic, spread = _crossover(scale_K)
    known_K = scale_K > 0
    rows = np.array(
        [
            [(1.0 - quadratic) / spread, -quadratic / spread, 0.0, 0.0],
            [0.0, 0.0, 1.0 / CONSTANT_SHARE[1], 0.0],
            [0.0, 0.0, 0.0, 1.0 / OVERHEAD_SHARE[1]],
        ]
    )
    return rows * known_K, (rows * known_K) @ [0.0, 0.0, CONSTANT_SHARE[0], OVERHEAD_SHARE[0]]


def _crossover(scale_K: Floats) -> tuple[float, float]:
    """Assumed part of the quadratic term in quadratic plus linear, and its standard deviation."""
    length = scale_K[1] / scale_K[0] if scale_K[0] > 0 else TYPICAL_CROSSOVER_TOKENS
    part = float(length / (length + TYPICAL_CROSSOVER_TOKENS))
    return part, CROSSOVER_LOG_SD * part * (1.0 - part)  # to first order


def _loo_error(loo_O: Floats) -> float:
    """Mean error, without the worst tenth: stalls say nothing about the model."""
    errors = np.sort(np.abs(loo_O))
    return float(errors[: errors.size - -(-errors.size // WORST_PART)].mean())


def _standard_errors(found: _Solution) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """(K,) standard errors by the measurements alone, and which are smaller than assumed ones."""
    # Rows of zeros give fewer observations than terms all their axes.
    rows = np.vstack([np.sqrt(found.weights)[:, None] * found.design, np.zeros((len(TERMS),) * 2)])
    _, sizes, axes = np.linalg.svd(rows, full_matrices=False)
    blind = sizes < 1e-9 * sizes[0]
    variance_K = (axes[~blind] ** 2).T @ sizes[~blind] ** -2.0
    variance_K[(axes[blind] ** 2).sum(axis=0) > 1e-9] = np.inf
    share_errors_K = max(found.noise, MIN_NOISE) * np.sqrt(variance_K)
    _, spread = _crossover(found.scale)
    assumed_K = np.array([spread, spread, CONSTANT_SHARE[1], OVERHEAD_SHARE[1]])
    errors_K = np.full(len(TERMS), np.inf)
    seen_K = found.scale > 0
    errors_K[seen_K] = share_errors_K[seen_K] * found.scale[seen_K]
    return errors_K, share_errors_K < assumed_K


def _covariance(found: _Solution) -> Floats:
    """(K, K) of the coefficients, by the measurements and the assumptions (normal, to first order).

    Constraints at 0 are left out of it: who draws coefficients must cut them off there.
    """
    rows = np.sqrt(found.weights)[:, None] * found.design / max(found.noise, MIN_NOISE)
    assumed, _ = _assumptions(found.scale)
    shares = np.linalg.pinv(rows.T @ rows + assumed.T @ assumed, hermitian=True)
    return shares * np.outer(found.scale, found.scale)


def _observe(seq_lens: Sequence[Sequence[npt.ArrayLike]], seconds: npt.ArrayLike) -> _Observed:
    """Check and sum up. Raises what `fit_iterations` says, but for the leave-one-out error."""
    work_TRK = _work(seq_lens)
    times = _times(seconds, work_TRK.shape[0], work_TRK.shape[1])
    if times.ndim == 2:
        measured = ~np.isnan(times)
        work_ORK, times = work_TRK[measured][:, None, :], times[measured]
        places = [f"iteration {t}, rank {r}" for t, r in np.argwhere(measured).tolist()]
    else:
        # Most tokens first: of ranks with equal loads that one is the slowest, in any order.
        order_TR = np.lexsort([-work_TRK[:, :, term] for term in (2, 0, 1)], axis=1)
        work_ORK = np.take_along_axis(work_TRK, order_TR[:, :, None], axis=1)
        places = [f"iteration {t}" for t in range(times.size)]
    if times.size < MIN_OBSERVATIONS:
        raise ConfigError(
            f"fit_iterations: {times.size} measurements, at least {MIN_OBSERVATIONS} are needed, "
            "and ten are better: measure more iterations"
        )
    # A timer that did not run gives zeros, and any fit of zeros is perfect.
    stopped = (times == 0.0) & (work_ORK[:, :, 2] > 0).any(axis=1)
    if stopped.any():
        place = places[int(stopped.argmax())]
        raise ConfigError(
            f"fit_iterations: {place} took 0 s with sequences to compute; times must be above 0: "
            "leave the iteration out, or log the time of every iteration"
        )
    if not work_ORK[:, :, 1].any():
        raise ConfigError(
            "fit_iterations: no measured iteration has a token, at least one is needed: measure "
            "iterations that compute"
        )
    return _Observed(work_ORK, times)


def _work(seq_lens: Sequence[Sequence[npt.ArrayLike]]) -> Floats:
    """(iterations, ranks, K) sum of L^2, sum of L, number of sequences, and 1."""
    seq_lens = listed("fit_iterations: seq_lens", seq_lens)
    if len(seq_lens) == 0:
        raise ConfigError(
            f"fit_iterations: no iterations, at least {MIN_OBSERVATIONS} are needed: give the "
            "lengths of each rank in each iteration"
        )
    num_ranks = len(by_rank("fit_iterations: iteration 0: sequence lengths", seq_lens[0]))
    if num_ranks == 0:
        raise ConfigError("fit_iterations: iteration 0 has no ranks: give a list a rank")
    work = np.ones((len(seq_lens), num_ranks, len(TERMS)))
    for iteration, per_rank in enumerate(seq_lens):
        try:
            counts, lens = check_lengths(per_rank, num_ranks)
        except ConfigError as error:
            raise ConfigError(f"fit_iterations: iteration {iteration}: {error}") from error
        tokens = lens.astype(np.float64)  # the square of 65,536 tokens is 0 as an int32
        ranks = np.repeat(np.arange(num_ranks), counts)
        for term, values in enumerate((tokens**2, tokens, None)):
            work[iteration, :, term] = np.bincount(ranks, values, num_ranks)
    return work


def _times(seconds: npt.ArrayLike, num_iterations: int, num_ranks: int) -> Floats:
    """(iterations,) or (iterations, ranks) seconds, finite and >= 0, or NaN in the second form."""
    try:
        times = floats("seconds", seconds)
    except ConfigError as error:
        raise ConfigError(
            "fit_iterations: seconds are not numbers of equal rows; give one time an iteration, or "
            f"one a rank in each iteration with NaN where it is missing: {error}"
        ) from error
    if times.shape not in ((num_iterations,), (num_iterations, num_ranks)):
        raise ConfigError(
            f"fit_iterations: seconds have shape {times.shape}, the lengths are of "
            f"{num_iterations} iterations on {num_ranks} ranks; give seconds of shape "
            f"({num_iterations},) or ({num_iterations}, {num_ranks})"
        )
    legal = (times == 0) | ((times >= 1.0 / MAX_NUMBER) & (times <= MAX_NUMBER))
    if times.ndim == 2:
        legal |= np.isnan(times)
    if not legal.all():
        place = tuple(np.argwhere(~legal)[0].tolist())
        raise ConfigError(
            f"fit_iterations: seconds{list(place)} is {times[place]}; times must be finite and "
            ">= 0: leave the iteration out"
        )
    return times
