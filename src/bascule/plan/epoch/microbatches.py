"""Which samples of a step share a microbatch, where ranks meet in each of them.

A microbatch takes as long as its slowest rank. So long samples belong together: beside a giant, the
other ranks have room for the next longest samples, and its own rank for the shortest.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.plan.epoch.order import StepShape


def split_by_room(costs: Floats, shape: StepShape, *, even_counts: bool) -> list[Ints]:
    """Samples of each microbatch: filled one after the other, from what is longest.

    Each rank is given the longest sample that is left, and then such samples as bring it to the
    level that the microbatch needs: the longest sample with its company, or the mean of what is
    left if that is more. O(n) searches in a sorted list, n the samples of the step.

    Args:
        costs: (n,) cost of each sample, n at least the number of cells.
        shape: Ranks and microbatches.
        even_counts: Whether microbatches get as many samples each as can be; else at least one a
            rank.
    """
    pool, chosen = _Pool.of(costs), list[Ints]()
    sizes = [part.size for part in np.array_split(costs, shape.accumulate)]
    for number, size in enumerate(sizes[:-1]):
        later = shape.accumulate - number
        even = pool.total() / (shape.num_ranks * later)
        if even_counts:
            chosen.append(pool.take_even(size, shape.num_ranks, even))
        else:
            chosen.append(pool.take(shape.num_ranks, even, shape.num_ranks * (later - 1)))
    return [*chosen, np.array(pool.items, dtype=np.int64)]


@dataclass(slots=True)
class _Pool:
    """Samples that no microbatch has, by ascending cost."""

    items: list[int]
    costs: list[float]

    @staticmethod
    def of(costs: Floats) -> "_Pool":
        order = np.argsort(costs, kind="stable")
        return _Pool(order.tolist(), costs[order].tolist())

    def total(self) -> float:
        return sum(self.costs)

    def take_even(self, num: int, num_ranks: int, even: float) -> Ints:
        """So many samples, as many on each rank as can be."""
        each, extra = divmod(num, num_ranks)
        company = sum(self.costs[: each - 1])
        level = max(self.costs[-1] + company, even)
        taken, rooms = self._seeds(num_ranks, level)
        for left in range(each - 1, 0, -1):
            for rank in sorted(range(num_ranks), key=lambda rank: (-rooms[rank], rank)):
                rooms[rank] -= self._nearest(rooms[rank] / left, taken)
        for rank in sorted(range(num_ranks), key=lambda rank: (-rooms[rank], rank))[:extra]:
            self._nearest(rooms[rank], taken)
        return np.array(taken, dtype=np.int64)

    def take(self, num_ranks: int, even: float, reserved: int) -> Ints:
        """Any number of samples, one a rank at least, so that the reserved number is left."""
        taken, rooms = self._seeds(num_ranks, max(self.costs[-1], even))
        for room in rooms:
            while len(self.items) > reserved:
                place = bisect_right(self.costs, room) - 1
                if place < 0:
                    break
                room -= self._pop(place, taken)
        return np.array(taken, dtype=np.int64)

    def _seeds(self, num_ranks: int, level: float) -> tuple[list[int], list[float]]:
        """The longest sample for each rank, and what room it leaves below the level."""
        taken: list[int] = []
        return taken, [level - self._pop(-1, taken) for _ in range(num_ranks)]

    def _nearest(self, wanted: float, taken: list[int]) -> float:
        """Take the sample whose cost is nearest."""
        place = bisect_left(self.costs, wanted)
        last = len(self.costs) - 1
        if place > last or (
            place > 0 and wanted - self.costs[place - 1] <= self.costs[place] - wanted
        ):
            place = min(place, last + 1) - 1
        return self._pop(place, taken)

    def _pop(self, place: int, taken: list[int]) -> float:
        taken.append(self.items.pop(place))
        return self.costs.pop(place)
