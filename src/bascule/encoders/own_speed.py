"""What plans of items are priced by, learned from the first calls of an encoder, then kept."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from bascule.comm.clocks import Clock
from bascule.comm.groups import RankGroup
from bascule.comm.items import measure_exchange
from bascule.encoders.item_prices import Prices, Wires
from bascule.encoders.plan import Loaded
from bascule.plan.machine import Cluster

_LEFT_OUT = 1  # calls that compile and allocate
_NUM_TIMED = 8
_IN_FLIGHT = 64
"""Calls after which none is recomputed that was planned by the first prices."""


def first_prices(cluster: Cluster | None, group: RankGroup, device: torch.device) -> Prices:
    """By the cluster, or by exchanges that are timed: then all ranks of the group call it."""
    if cluster is not None:
        return Prices(Wires.of(cluster), unit_s=1.0, cluster=cluster)
    found = measure_exchange(group, device, of_items=True)
    return Prices(Wires(found.launch_s, found.byte_s, found.byte_s, group.size))


class OwnSpeed:
    """Prices before and after the first calls.

    They change once, so that steps on the same machines plan alike. A call that is recomputed in
    the backward pass is planned as it was the first time, also if they changed in between.

    Args:
        first: Without what is learned.
    """

    def __init__(self, first: Prices) -> None:
        self._first, self._known = first, first
        self._is_known = False
        self._num, self._ns, self._units, self._bytes, self._tokens = 0, 0, 0.0, 0, 0
        self._running: list[Clock] = []
        self._early: Counter[str] = Counter()  # calls that were planned by the first prices

    def prices(self, loaded: Loaded) -> Prices:
        """Those of a call; the same on all ranks."""
        form = loaded.digest
        if _recomputes():
            is_early = self._early[form] > 0
            self._early[form] -= is_early
            return self._first if is_early else self._known
        wanted = 1 if self._first.cluster is not None else _LEFT_OUT + _NUM_TIMED
        if not self._is_known and self._num >= wanted:
            self._learn(sum(loaded.spent_ns))
        if not self._is_known:
            self._early[form] += torch.is_grad_enabled()
        elif self._early:
            self._num += 1
            if self._num > wanted + _IN_FLIGHT:
                self._early.clear()
        return self._known

    def keep(self, clocks: Sequence[Clock], loaded: Loaded, units: float, num_bytes: int) -> None:
        """A call of all ranks.

        Args:
            clocks: Of this rank's part; read at the next call.
            loaded: Its items.
            units: What they cost.
            num_bytes: Bytes on the wire of their features.
        """
        if self._is_known or _recomputes():
            return
        self._num += 1
        self._bytes += num_bytes
        self._tokens += int(loaded.lens.sum())
        if self._num > _LEFT_OUT:
            self._running += clocks
            self._units += units

    def spent_ns(self) -> int:
        """Nanoseconds of this rank in all that was kept."""
        self._ns += sum(round(1e9 * clock.seconds()) for clock in self._running)
        self._running = []
        return self._ns

    def _learn(self, spent_ns: int) -> None:
        """Seconds of a unit to the nearest power of two, so that other runs agree."""
        unit_s = self._first.unit_s
        if unit_s is None and spent_ns and self._units:
            unit_s = float(2.0 ** np.rint(np.log2(1e-9 * spent_ns / self._units)))
        feature_bytes = self._bytes / self._tokens
        self._known = replace(self._first, unit_s=unit_s, feature_bytes=feature_bytes)
        self._is_known = True


def _recomputes() -> bool:
    """Whether this is a backward pass, in which calls are those of the forward pass once more."""
    return torch._C._current_graph_task_id() != -1
