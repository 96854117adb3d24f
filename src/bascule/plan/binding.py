"""What keeps a step from ending earlier, where that is one sequence."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bascule.arrays import Ints
from bascule.plan import metrics
from bascule.plan.topology import Topology

_SHARE = 0.99
"""Share of a bag's tokens from which on a sequence is all that the bag computes."""

_EVEN = 1.01
"""Imbalance up to which the whole work binds, not one sequence."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A sequence that alone keeps the slowest bag busy while other ranks wait.

    Attributes:
        seq_id: Its place in source order.
        num_tokens: Its length.
        bag: The bag that computes it.
        bag_size: Ranks of that bag.
        enough_ranks: Ranks of a bag in which it would take no longer than the mean load, wires
            aside.
    """

    seq_id: int
    num_tokens: int
    bag: int
    bag_size: int
    enough_ranks: int

    def __str__(self) -> str:
        ranks = "1 rank" if self.bag_size == 1 else f"{self.bag_size} ranks"
        return (
            f"sequence {self.seq_id} of {self.num_tokens:,} tokens alone fills bag {self.bag} of "
            f"{ranks}: a bag of {self.enough_ranks} ranks would help"
        )


def find_binding(
    topology: Topology, seq_lens: Ints, bag_of: Ints, loads: npt.NDArray[np.float64]
) -> Binding | None:
    """The sequence that binds a plan, or None if the whole work does. Arguments as for `Plan`."""
    if not seq_lens.size or metrics.imbalance(loads) <= _EVEN:
        return None
    slowest = int(loads.argmax())
    bag = int(topology.bag_of_rank[slowest])
    held = np.flatnonzero(bag_of == bag)
    longest = int(held[seq_lens[held].argmax()]) if held.size else -1
    if longest < 0 or seq_lens[longest] < _SHARE * seq_lens[held].sum() or not seq_lens[longest]:
        return None
    size = int(topology.bag_sizes[bag])
    enough = math.ceil(loads[slowest] * size / loads.mean() * (1.0 - 1e-9))
    return Binding(longest, int(seq_lens[longest]), bag, size, enough)
