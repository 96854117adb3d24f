"""The gain of balancing in a run: predicted by the cost model, and scaled by measured seconds."""

from dataclasses import dataclass, field

import numpy as np

from bascule.arrays import Floats


@dataclass(slots=True)
class Gain:
    """Sums over the steps of a run.

    A run shows only balanced steps. Their seconds are fitted, by least squares, to their predicted
    work times a rate, plus a constant; both also say what the steps would have taken.
    """

    _work: Floats = field(default_factory=lambda: np.zeros(3))  # before, after, mean of ranks
    _timed: Floats = field(default_factory=lambda: np.zeros(6))
    _last: float | None = None

    def add(self, before: float, after: float, mean: float, now: float) -> None:
        """Add makespans of a step that ended now, by a clock in seconds, and its mean work."""
        self._work += (before, after, mean)
        if self._last is not None:
            seconds = now - self._last
            self._timed += (1.0, before, after, seconds, after * after, after * seconds)
        self._last = now

    def pause(self) -> None:
        """Leave out the time until the next step ends: it is not of training alone."""
        self._last = None

    def metrics(self) -> dict[str, float]:
        """Return imbalance (max/mean), predicted gain and, after some steps, the measured one."""
        before, after, mean = self._work.tolist()
        if min(before, after, mean) <= 0.0:
            return {}
        values = {"imbalance": after / mean, "predicted_gain": before / after}
        num, before, after, seconds, squares, products = self._timed.tolist()
        spread = num * squares - after * after
        if num > 2 and spread > 1e-9 * num * squares:
            rate = max((num * products - after * seconds) / spread, 0.0)
            constant = seconds - rate * after  # of all steps
            if constant < 0.0:
                rate, constant = products / squares, 0.0
            values["measured_gain"] = (rate * before + constant) / (rate * after + constant)
        return values
