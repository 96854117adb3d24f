"""The gain of balancing in a run: predicted by the cost model, and fitted to measured seconds."""

from dataclasses import dataclass, field

import numpy as np

from bascule.arrays import Floats

_FEWEST_STEPS = 20  # timed steps before a line is fitted


@dataclass(slots=True)
class Gain:
    """Sums over the steps of a run, from which it estimates the gain.

    Only balanced steps are measured. Least squares fit a line to their seconds over predicted work;
    its value at the work before balancing is the time without. The cost of balancing is left out.
    """

    _work: Floats = field(default_factory=lambda: np.zeros(3))  # before, after, mean of ranks
    _timed: Floats = field(default_factory=lambda: np.zeros(7))
    _last: float | None = None

    def add(self, before: float, after: float, mean: float, now: float) -> None:
        """Add a step that ended `now` (seconds): makespans before and after, and mean work."""
        self._work += (before, after, mean)
        if self._last is not None:
            s = now - self._last
            self._timed += (1.0, before, after, s, after * after, after * s, s * s)
        self._last = now

    def pause(self) -> None:
        """Leave out the time until the next step ends, which is not training alone."""
        self._last = None

    def metrics(self) -> dict[str, float]:
        """Return imbalance (max/mean), predicted gain; from step 20 on, fitted gain and error."""
        before, after, mean = self._work.tolist()
        if min(before, after, mean) <= 0.0:
            return {}
        values = {"imbalance": after / mean, "predicted_gain": before / after}
        num, before, after, seconds, squares, products, of_seconds = self._timed.tolist()
        spread = num * squares - after * after
        if num >= _FEWEST_STEPS and spread > 1e-9 * num * squares:
            rate = (num * products - after * seconds) / spread
            missed = max(num * of_seconds - seconds**2 - rate**2 * spread, 0.0)
            saved = (before - after) / seconds  # as a multiple of the rate
            values["fitted_gain"] = 1.0 + rate * saved
            values["fitted_gain_error"] = (missed / spread / (num - 2)) ** 0.5 * abs(saved)
        return values
