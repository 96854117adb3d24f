"""What moving items takes and saves, in seconds: numpy only, the same answer on every rank."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from bascule.arrays import Ints
from bascule.plan.machine import WITHOUT_RECOMPUTING, Cluster


@dataclass(frozen=True, slots=True)
class Wires:
    """What an all-to-all takes.

    Attributes:
        launch_s: Seconds, whatever it carries.
        near_s: Seconds more of a byte that a rank sends to one of its node.
        far_s: The same, to one of another node.
        ranks_per_node: Ranks of a node.
    """

    launch_s: float
    near_s: float
    far_s: float
    ranks_per_node: int

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        """Those of a cluster."""
        bytes_s = 1.0 / cluster.intra_bytes_per_s, 1.0 / cluster.inter_bytes_per_s
        return cls(cluster.latency_s, *bytes_s, cluster.ranks_per_node)

    def seconds(self, source: Ints, dest: Ints, num_bytes: npt.NDArray[np.float64]) -> float:
        """Of an all-to-all of items, until the rank that sends or gets the most has done so."""
        is_near = source // self.ranks_per_node == dest // self.ranks_per_node
        each = np.where(is_near, self.near_s, self.far_s) * num_bytes * (source != dest)
        busiest = max(np.bincount(ends, each).max(initial=0.0) for ends in (source, dest))
        return self.launch_s + float(busiest)


@dataclass(frozen=True, slots=True)
class Prices:
    """What turns plans of items into seconds.

    Attributes:
        wires: Those between the ranks.
        unit_s: Seconds that the forward pass of an item takes a unit of its cost; None where that
            is not known yet: then moving is taken to pay.
        feature_bytes: Bytes on the wire of the features of a token; None where that is not known
            yet: then an item has as many as came in.
        cluster: Turns costs into seconds, where it was given.
    """

    wires: Wires
    unit_s: float | None = None
    feature_bytes: float | None = None
    cluster: Cluster | None = None


def step_factor(has_backward: bool) -> float:
    """Seconds of an encoder in a step, in those of its forward pass."""
    return WITHOUT_RECOMPUTING.linear if has_backward else 1.0
