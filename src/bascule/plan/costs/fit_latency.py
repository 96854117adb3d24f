"""Cost models from measurements."""

import numpy as np
import numpy.typing as npt

from bascule.errors import ConfigError
from bascule.plan.checks import MAX_NUMBER, floats
from bascule.plan.costs.cost_models import TransformerCost
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
    tokens = floats("fit_latency: seq_lens", seq_lens)
    latency = floats("fit_latency: seconds", seconds)
    if tokens.ndim != 1 or tokens.shape != latency.shape or np.unique(tokens).size < 2:
        raise ConfigError(
            f"fit_latency: {tokens.shape} lengths and {latency.shape} seconds; give one latency "
            "for each length, and at least two different lengths"
        )
    given = np.concatenate([tokens, latency])
    if not np.all((given >= 1.0 / MAX_NUMBER) & (given <= MAX_NUMBER)):
        raise ConfigError(
            "fit_latency: lengths and seconds must be positive and finite, at most "
            f"{MAX_NUMBER:g}: leave the measurement out"
        )
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
