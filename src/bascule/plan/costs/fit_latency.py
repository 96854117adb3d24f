"""Cost models from measurements."""

import numpy as np
import numpy.typing as npt

from bascule.errors import ConfigError
from bascule.plan.checks import MAX_NUMBER, floats
from bascule.plan.costs.cost_models import PolynomialCost, TransformerCost
from bascule.plan.costs.relative_fit import relative_fit


def fit_latency(
    seq_lens: npt.ArrayLike,
    seconds: npt.ArrayLike,
    d_model: int,
    *,
    num_layers: int = 1,
    num_pairs: npt.ArrayLike | None = None,
) -> TransformerCost:
    """Fit `k (24 L d^2 + gamma 4 L^2 d)` to measured latencies of a sequence, alone or in a pack.

    Relative errors are minimised, so that short sequences count as much as long ones (the paper's
    unweighted fit sees only the longest), under k >= 0 and gamma >= 0. Source: KnapFormer, equation
    2.

    Args:
        seq_lens: (n,) tokens of each measured sequence, at least two different lengths.
        seconds: (n,) forward latency of each.
        d_model: Model width.
        num_layers: Blocks that the latencies cover.
        num_pairs: (n,) pairs of a query and a key that a block computes for each, as an encoder
            with windows says; None: the square of its tokens.

    Raises:
        ConfigError: Too few points, a value that is not positive, or latencies that leave the
            linear layers no time. Whether the rest fits is for the caller to see in `fit_error`.
    """
    tokens, latency = _checked("fit_latency", seq_lens, seconds, num_lengths=2)
    attention_free = TransformerCost(d_model, gamma=0.0, num_layers=num_layers)(tokens)
    plain = TransformerCost(d_model, gamma=1.0, num_layers=num_layers)
    attention = plain(tokens, num_pairs) - attention_free
    fitted = relative_fit(np.stack([attention_free, attention], axis=1), latency)
    linear_s, attention_s = fitted.coefficients.tolist()
    if linear_s <= 0.0:
        raise ConfigError(
            "fit_latency: the latencies grow faster than the square of the length, so the "
            "linear layers get no time; measure shorter lengths too, and repeat each measurement"
        )
    return TransformerCost(
        d_model,
        gamma=attention_s / linear_s,
        num_layers=num_layers,
        seconds_per_unit=linear_s,
        fit_error=fitted.rms,
    )


def fit_item_latency(
    item_lens: npt.ArrayLike, seconds: npt.ArrayLike, *, num_pairs: npt.ArrayLike | None = None
) -> PolynomialCost:
    """Fit `quadratic L^2 + linear L + constant` to measured latencies of items, a call each.

    For encoders that are called item by item: short items then take mostly launches and the reading
    of weights, which the constant holds. Relative errors are minimised, under coefficients >= 0.

    Args:
        item_lens: (n,) tokens of each measured item, at least three different lengths.
        seconds: (n,) forward latency of each.
        num_pairs: (n,) pairs of a query and a key, as in `fit_latency`, in place of the squares.

    Raises:
        ConfigError: Too few points, or a value that is not positive.
    """
    tokens, latency = _checked("fit_item_latency", item_lens, seconds, num_lengths=3)
    pairs = tokens**2 if num_pairs is None else floats("fit_item_latency: num_pairs", num_pairs)
    columns = np.stack([pairs, tokens, np.ones_like(tokens)], axis=1)
    return PolynomialCost(*relative_fit(columns, latency).coefficients.tolist())


def _checked(
    what: str, seq_lens: npt.ArrayLike, seconds: npt.ArrayLike, *, num_lengths: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Lengths and latencies of so many different lengths at least, positive and finite."""
    tokens = floats(f"{what}: seq_lens", seq_lens)
    latency = floats(f"{what}: seconds", seconds)
    few = tokens.ndim != 1 or np.unique(tokens).size < num_lengths
    if few or tokens.shape != latency.shape:
        least = "two" if num_lengths == 2 else "three"
        raise ConfigError(
            f"{what}: {tokens.shape} lengths and {latency.shape} seconds; give one latency for "
            f"each length, and at least {least} different lengths"
        )
    given = np.concatenate([tokens, latency])
    if not np.all((given >= 1.0 / MAX_NUMBER) & (given <= MAX_NUMBER)):
        raise ConfigError(
            f"{what}: lengths and seconds must be positive and finite, at most {MAX_NUMBER:g}: "
            "leave the measurement out"
        )
    return tokens, latency
