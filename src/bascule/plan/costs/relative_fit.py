"""Least squares of relative errors: small measurements count as much as large ones."""

from dataclasses import dataclass
from typing import cast

import numpy as np
from scipy.optimize import nnls
from scipy.special import ndtri, stdtrit

from bascule.arrays import Floats

CONFIDENCE = 0.95
"""Of the intervals that errors are half of."""


@dataclass(frozen=True, slots=True, eq=False)
class RelativeFit:
    """Coefficients of a fit.

    Attributes:
        coefficients: (K,) at least 0.
        errors: (K,) half the widths of their confidence intervals, of 95 %; infinite where there
            are no more points than coefficients, or where the points do not tell one from others.
        residuals: (n,) predicted over measured, minus 1.
    """

    coefficients: Floats
    errors: Floats
    residuals: Floats

    @property
    def rms(self) -> float:
        """Root mean square of the residuals."""
        return float(np.sqrt(np.mean(self.residuals**2)))


def relative_fit(columns: Floats, seconds: Floats, noise: Floats | None = None) -> RelativeFit:
    """Non-negative coefficients whose sums of columns are nearest to measured times, relatively.

    Errors follow from the scatter about the fit (Student's t: points are few), and are never below
    what the noise of the points themselves says: few points may lie on a curve by luck. They do not
    know of what shifted all points alike.

    Args:
        columns: (n, K) at least 0.
        seconds: (n,) positive.
        noise: (n,) relative standard error of each, if known.
    """
    rows = columns / seconds[:, None]
    means = rows.mean(axis=0)
    units = np.divide(1.0, means, out=np.zeros_like(means), where=means > 0)
    rows = rows * units
    scaled, _ = nnls(rows, np.ones_like(seconds))
    residuals = rows @ scaled - 1.0
    return RelativeFit(units * scaled, units * _half_widths(rows, residuals, noise), residuals)


def _half_widths(rows: Floats, residuals: Floats, noise: Floats | None) -> Floats:
    """(K,) of the unconstrained coefficients, as if those at 0 had been free."""
    freedom = rows.shape[0] - rows.shape[1]
    if freedom < 1 or np.linalg.matrix_rank(rows) < rows.shape[1]:
        return np.repeat(np.float64(np.inf), rows.shape[1])
    spread = cast(Floats, np.linalg.pinv(rows))
    by_scatter = float(residuals @ residuals) / freedom * (spread**2).sum(axis=1)
    wide = cast(float, stdtrit(freedom, 0.5 + CONFIDENCE / 2)) ** 2 * by_scatter
    if noise is not None:
        normal = cast(float, ndtri(0.5 + CONFIDENCE / 2)) ** 2
        wide = np.maximum(wide, normal * (spread**2 @ noise**2))
    return cast(Floats, wide**0.5)
