"""How fast the ranks of a group exchange bytes, measured once."""

import time
from dataclasses import dataclass

import numpy as np
import torch

from bascule.comm.groups import RankGroup
from bascule.comm.guard.calls import Call
from bascule.comm.transfers import all_gather, all_to_all

_PROBE_BYTES = 1 << 20
_NUM_PROBES = 4
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ExchangeSpeed:
    """What an all-to-all takes; the same on all ranks.

    Attributes:
        launch_s: Seconds of one of next to no bytes.
        byte_s: Seconds more of a byte which a rank sends.
    """

    launch_s: float
    byte_s: float


def measure_exchange(group: RankGroup, device: torch.device = _HOST) -> ExchangeSpeed:
    """Time a few all-to-alls of a byte, and of a mebibyte a rank.

    Of each the best, on the rank where it took longest; rounded up to a power of two, so that runs
    on the same machines agree.

    Args:
        group: The ranks.
        device: Where the bytes lie.
    """
    share = -(-_PROBE_BYTES // group.size)
    few, many = (_slowest(group, device, num_bytes) for num_bytes in (1, share))
    return ExchangeSpeed(_power_of_two(few), _power_of_two(many / (share * group.size)))


def _slowest(group: RankGroup, device: torch.device, num_bytes: int) -> float:
    """Seconds until the slowest rank has sent so many bytes to each; best of a few."""
    splits = [num_bytes] * group.size
    buffers = torch.zeros(2, sum(splits), dtype=torch.uint8, device=device)
    best = torch.full((1,), np.inf, dtype=torch.float64, device=device)
    for _ in range(_NUM_PROBES):
        float(all_gather(group, Call("all_gather (measuring)"), best).max())  # to begin together
        start = time.perf_counter()
        all_to_all(group, Call("all_to_all (measuring)"), buffers[0], buffers[1], splits, splits)
        int(buffers[0, 0])  # has arrived, on a device too
        best[0] = min(float(best), time.perf_counter() - start)
    return float(all_gather(group, Call("all_gather (measured)"), best).max())


def _power_of_two(value: float) -> float:
    return float(2.0 ** np.ceil(np.log2(value)))
