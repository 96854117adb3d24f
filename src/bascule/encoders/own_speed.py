"""Seconds of a unit of cost, from the encoder's own calls."""

from collections.abc import Sequence

import numpy as np

from bascule.comm.clocks import Clock

_LEFT_OUT = 1  # calls that compile and allocate


class OwnSpeed:
    """What the calls of an encoder took on this rank, and what they should cost on all of them."""

    def __init__(self) -> None:
        self._num, self._ns, self._units = 0, 0, 0.0
        self._running: list[Clock] = []

    def keep(self, clocks: Sequence[Clock], units: float) -> None:
        """A call of all ranks.

        Args:
            clocks: Of this rank's part; read at the next call.
            units: What the items of all ranks cost.
        """
        self._num += 1
        if self._num > _LEFT_OUT:
            self._running += clocks
            self._units += units

    def spent_ns(self) -> int:
        """Nanoseconds of this rank in all that was kept."""
        self._ns += sum(round(1e9 * clock.seconds()) for clock in self._running)
        self._running = []
        return self._ns

    def unit_s(self, spent_ns: Sequence[int]) -> float | None:
        """Seconds of a unit, from what all ranks spent; None where nothing was timed yet.

        To the nearest power of two, so that runs on the same machines agree.
        """
        total = sum(spent_ns)
        if not total or not self._units:
            return None
        return float(2.0 ** np.rint(np.log2(1e-9 * total / self._units)))
