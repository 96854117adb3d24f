"""Measures of how even the loads of ranks are. Idle ranks count; an idle batch is even."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from bascule.plan.batch import Plan
    from bascule.plan.costs import Cost
    from bascule.plan.machine import Cluster


def imbalance(loads: npt.NDArray[np.float64]) -> float:
    """Max over mean, at least 1: by how much the slowest rank stretches the step."""
    mean = float(loads.mean()) if loads.size else 0.0
    return max(float(loads.max()) / mean, 1.0) if mean > 0 else 1.0


def wir(loads: npt.NDArray[np.float64]) -> float:
    """KnapFormer's workload imbalance ratio, max over min; inf if a rank is idle, 1 if all are."""
    most = float(loads.max()) if loads.size else 0.0
    least = float(loads.min()) if loads.size else 0.0
    if most == 0.0:
        return 1.0
    return most / least if least > 0 else float("inf")


def of_plan(plan: "Plan", cost: "Cost", cluster: "Cluster | None") -> dict[str, Any]:
    """What a plan predicts, before balancing and after it, as plain values."""
    before = plan.unbalanced_loads(cost, cluster)
    return {
        "makespan": plan.makespan,
        "makespan_unbalanced": float(before.max()),
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "imbalance": plan.imbalance,
        "imbalance_unbalanced": imbalance(before),
        "wir": plan.wir,
        "wir_unbalanced": wir(before),
        "tokens": plan.tokens.tolist(),
        "moved_tokens": plan.moved_tokens,
    }
