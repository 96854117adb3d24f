"""Moves and swaps between bags of different kinds, where a sequence has a price a kind."""

import numpy as np
import numpy.typing as npt

from bascule.plan.limits import Limits
from bascule.plan.routes import Ints

Floats = npt.NDArray[np.float64]

_MIN_GAIN = 1e-9


def exchange(  # noqa: PLR0913  (of one search)
    times: Floats,
    kinds: Ints,
    carried: Floats,
    bag_of: Ints,
    *,
    tokens: Ints,
    room: Floats | None,
    limits: Limits | None,
    target: float,
    max_steps: int,
) -> Ints:
    """Unload the slowest bag, the best move or swap at a time, until the target or no gain.

    A step leaves both of its bags below the makespan. O(sequences of the slowest bag * sequences of
    all) a step.

    Args:
        times: (num_kinds, num_seqs) load of each sequence on a bag of each kind.
        kinds: (num_bags,) kind of each bag.
        carried: (num_bags,) load of each bag before any sequence.
        bag_of: An assignment within the limits.
        tokens: (num_seqs,) tokens, which `room` restricts.
        room: (num_bags,) most tokens of each bag; None if unlimited.
        limits: Most sequences a bag.
        target: Makespan at which the search stops.
        max_steps: Most steps.
    """
    bag_of = bag_of.copy()
    every, num_bags = np.arange(bag_of.size), kinds.size
    most = np.inf if limits is None or limits.items is None else limits.items
    for _ in range(max_steps):
        loads = carried + np.bincount(bag_of, times[kinds[bag_of], every], num_bags)
        slowest = int(loads.argmax())
        own = np.flatnonzero(bag_of == slowest)
        if loads[slowest] <= target or not own.size:
            break
        here = times[kinds[slowest]]
        # Swaps with every sequence, and moves: a swap with nothing on each bag.
        bags = np.concatenate([bag_of, np.arange(num_bags)])
        back = np.concatenate([here, np.zeros(num_bags)])
        gone = np.concatenate([times[kinds[bag_of], every], np.zeros(num_bags)])
        left = loads[slowest] - here[own, None] + back
        there = loads[bags] - gone + times[kinds[bags][None, :], own[:, None]]
        worst = np.maximum(left, there)
        worst[:, bags == slowest] = np.inf
        if room is not None:
            size = np.concatenate([tokens, np.zeros(num_bags, np.int64)])
            used = np.bincount(bag_of, tokens, num_bags)
            change = tokens[own, None] - size
            worst[used[bags] + change > room[bags]] = np.inf
            worst[used[slowest] - change > room[slowest]] = np.inf
        if most < np.inf:
            full = np.bincount(bag_of, minlength=num_bags) >= most
            worst[:, bag_of.size :][:, full] = np.inf
        best = int(worst.argmin())
        if worst.flat[best] >= loads[slowest] * (1 - _MIN_GAIN):
            break
        item, partner = int(own[best // bags.size]), best % bags.size
        bag_of[item] = bags[partner]
        if partner < every.size:
            bag_of[partner] = slowest
    return bag_of
