"""By how much uneven tiles stretch attention on a mesh of rings.

A tile is what ring rank i computes on the keys that live on ring rank j. Keys travel from rank to
rank + 1, so in round t rank i works on those of rank (i - t) mod R.

Legend: U rings, R ranks of a ring.
"""

import numpy as np

from bascule.arrays import Floats


def rounds_of(tiles: Floats) -> Floats:
    """(..., R, R) work of each ring rank in each round, from (..., R, R) tiles."""
    size: int = tiles.shape[-1]
    rank = np.arange(size)[:, None]
    return tiles[..., rank, (rank - np.arange(size)) % size]


def barrier_ends(tiles: Floats) -> Floats:
    """(...) when a ring ends whose ranks wait for each other after every round."""
    return rounds_of(tiles).max(-2, initial=0.0).sum(-1)


def coupled_ends(tiles: Floats) -> Floats:
    """(...) when a ring ends whose ranks wait for their neighbours' transfers alone.

    A transfer is posted when its round starts, at both ends, so a rank starts a round when its own
    work of the round before is done and both neighbours have started that one:
    S_i(t+1) = max(S_i(t) + w_i(t), S_{i-1}(t), S_{i+1}(t)). Transfers themselves take no time.
    """
    work = rounds_of(tiles)
    start = np.zeros(work.shape[:-1])
    for turn in range(work.shape[-1] - 1):
        neighbours = np.maximum(np.roll(start, 1, -1), np.roll(start, -1, -1))
        start = np.maximum(start + work[..., turn], neighbours)
    return (start + work[..., -1]).max(-1)


def barrier_imbalance(tiles: Floats) -> float:
    """Rho of db-SP on a mesh, as its public code has it: (U, R, R) tiles.

    Max over rings of the sum over rounds of the slowest rank's work, over the mean work of a rank.
    With R = 1 it is equation 2, with U = 1 equation 3; 1 where nothing is to do. With both above 1
    it is not equation 1 taken literally, by which all ranks would wait for each other after every
    round: here those of a ring do, and rings wait for each other at the end only.
    """
    return _over_mean(barrier_ends(tiles), tiles)


def coupled_imbalance(tiles: Floats) -> float:
    """The same where ranks of a ring wait for their neighbours alone: at most `barrier_imbalance`.

    Equation 3 overstates what a ring loses: a rank that is late in one round and early in the next
    delays nobody.
    """
    return _over_mean(coupled_ends(tiles), tiles)


def _over_mean(ends: Floats, tiles: Floats) -> float:
    mean = float(tiles.sum()) / (tiles.shape[0] * tiles.shape[1])
    return max(float(ends.max()) / mean, 1.0) if mean > 0.0 else 1.0
