"""The gain of balancing in a run, as the cost model predicts it."""

from dataclasses import dataclass, field

import numpy as np

from bascule.arrays import Floats


@dataclass(slots=True)
class Gain:
    """Sums of predicted work over the steps of a run."""

    _work: Floats = field(default_factory=lambda: np.zeros(3))  # before, after, mean of ranks

    def add(self, before: float, after: float, mean: float) -> None:
        """Add a step: its makespans before and after balancing, and ranks' mean work."""
        self._work += (before, after, mean)

    def metrics(self) -> dict[str, float]:
        """Return imbalance (max/mean) and predicted gain."""
        before, after, mean = self._work.tolist()
        if min(before, after, mean) <= 0.0:
            return {}
        return {"imbalance": after / mean, "predicted_gain": before / after}
