"""Interim; replaced by solver."""

import numpy as np

from bascule.errors import ConfigError


def lower_bound(costs, speeds, carried):
    if costs.size == 0:
        return float(carried.max(initial=0.0))
    return max(
        float((costs.sum() + (carried * speeds).sum()) / speeds.sum()),
        float(costs.max() / speeds.max()),
        float(carried.max()),
    )


def run_planner(planner, costs, speeds, carried):
    order = np.argsort(-costs, kind="stable").tolist()
    bag_of = np.zeros(costs.size, np.int64)
    loads = (carried * speeds).astype(float)
    if planner == "lpt":
        for i in order:
            b = int(np.argmin((loads + costs[i]) / speeds))
            bag_of[i] = b
            loads[b] += costs[i]
    elif planner == "knapsack":
        cap = costs.sum() / speeds.sum() * speeds
        for i in order:
            fits = np.flatnonzero(cap - loads >= costs[i])
            if fits.size:
                b = int(fits[np.argmin((loads / np.maximum(cap, 1e-300))[fits])])
            else:
                b = int(np.argmin((loads + costs[i]) / speeds))
            bag_of[i] = b
            loads[b] += costs[i]
    else:
        raise ConfigError(f'planner {planner!r}: choose "lpt" or "knapsack"')
    return bag_of
