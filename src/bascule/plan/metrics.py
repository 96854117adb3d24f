"""Measures of how even ranks' loads are. Idle ranks count; if all are idle, loads are even."""

from bascule.arrays import Floats


def imbalance(loads: Floats) -> float:
    """Return the largest load over the mean, at least 1: how much the slowest rank costs a step."""
    mean = float(loads.mean()) if loads.size else 0.0
    return max(float(loads.max()) / mean, 1.0) if mean > 0 else 1.0


def wir(loads: Floats) -> float:
    """Return KnapFormer's imbalance ratio, max over min; inf if a rank is idle, 1 if all are."""
    most = float(loads.max()) if loads.size else 0.0
    least = float(loads.min()) if loads.size else 0.0
    if most == 0.0:
        return 1.0
    return most / least if least > 0 else float("inf")
