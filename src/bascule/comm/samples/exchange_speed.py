"""How fast the ranks of a group exchange bytes, measured once."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bascule.comm.collectives import all_gather, all_to_all
from bascule.comm.groups import RankGroup
from bascule.comm.guard.calls import Call
from bascule.comm.samples.sample_bytes import parcel
from bascule.comm.samples.sample_moves import ItemMove, move_items, num_rows

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


def measure_exchange(
    group: RankGroup, device: torch.device = _HOST, *, of_items: bool = False
) -> ExchangeSpeed:
    """Time a few all-to-alls of a byte, and of a mebibyte a rank.

    Of each the best, on the rank where it took longest; rounded up to a power of two, so that runs
    on the same machines agree.

    Args:
        group: The ranks.
        device: Where the bytes lie.
        of_items: Whether it is `move_items` that is timed: what the host does besides counts, too.
    """
    share = -(-_PROBE_BYTES // group.size)
    exchange = _move_item if of_items else _move_bytes
    few, many = (_slowest(group, device, exchange, num_bytes) for num_bytes in (1, share))
    return ExchangeSpeed(_power_of_two(few), _power_of_two(many / (share * group.size)))


def _slowest(
    group: RankGroup, device: torch.device, exchange: "_Exchange", num_bytes: int
) -> float:
    """Seconds until the slowest rank has sent so many bytes for each; best of a few."""
    sent = torch.zeros(group.size * num_bytes, dtype=torch.uint8, device=device)
    best = torch.full((1,), np.inf, dtype=torch.float64, device=device)
    for _ in range(_NUM_PROBES):
        float(all_gather(group, Call("all_gather (measuring)"), best).max())  # to begin together
        start = time.perf_counter()
        int(exchange(group, sent)[0])  # has arrived, on a device too
        best[0] = min(float(best), time.perf_counter() - start)
    return float(all_gather(group, Call("all_gather (measured)"), best).max())


_Exchange = Callable[[RankGroup, Tensor], Tensor]


def _move_bytes(group: RankGroup, sent: Tensor) -> Tensor:
    """As many to each rank."""
    splits, received = [sent.numel() // group.size] * group.size, torch.empty_like(sent)
    all_to_all(group, Call("all_to_all (measuring)"), received, sent, splits, splits)
    return received


def _move_item(group: RankGroup, sent: Tensor) -> Tensor:
    """All to the next rank, as an item."""
    source, one = np.arange(group.size), parcel([sent], sent.device)
    move = ItemMove(source, (source + 1) % group.size, group, sent.device, 0, "measuring")
    ((received,),) = move_items(move, [one], np.full(group.size, num_rows(one)))
    return received


def _power_of_two(value: float) -> float:
    return float(2.0 ** np.ceil(np.log2(value)))
