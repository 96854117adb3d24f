"""What balancing gains in a run: predicted by the cost model, and scaled by measured seconds."""

from dataclasses import dataclass


@dataclass(slots=True)
class Gain:
    """Sums over the steps of a run; `metrics` describes them.

    A run shows only balanced steps. The seconds of steps are fitted, by least squares, to a rate of
    their predicted work plus a constant; both also say what the steps would have taken.
    """

    before: float = 0.0  # predicted makespans of steps, without balancing
    after: float = 0.0  # with it
    mean: float = 0.0  # of ranks that all have the same work
    _timed: tuple[float, ...] = (0.0,) * 6  # n, before, after, seconds, after^2, after * seconds
    _last: float | None = None

    def add(self, before: float, after: float, mean: float, now: float) -> None:
        """Add a step that ended now, by a clock in seconds."""
        self.before += before
        self.after += after
        self.mean += mean
        if self._last is not None:
            seconds = now - self._last
            one = 1.0, before, after, seconds, after * after, after * seconds
            self._timed = tuple(a + b for a, b in zip(self._timed, one, strict=True))
        self._last = now

    def pause(self) -> None:
        """Leave out the time until the next step ends: it is not of training alone."""
        self._last = None

    def metrics(self) -> dict[str, float]:
        """Return imbalance (max/mean), predicted gain and, after some steps, the measured one."""
        values = dict[str, float]()
        if self.mean > 0.0 and self.after > 0.0:
            values["imbalance"] = self.after / self.mean
            values["predicted_gain"] = self.before / self.after
        num, before, after, seconds, squares, products = self._timed
        spread = num * squares - after * after
        if num > 2 and spread > 1e-9 * num * squares:
            rate = max((num * products - after * seconds) / spread, 0.0)
            constant = (seconds - rate * after) / num
            if constant < 0.0:
                rate, constant = products / squares, 0.0
            fitted = rate * after + constant * num
            values["measured_gain"] = (rate * before + constant * num) / fitted
        return values
