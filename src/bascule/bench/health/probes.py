"""What is timed on the ranks: round trips to the store, work of the model's kind, every collective.

All probes of a round follow each other, and the rounds too, so that what disturbs the machine for
a moment disturbs one round of many.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bascule.attention import PackedSequences, attend_packed
from bascule.bench.health.measured import Floats
from bascule.comm.groups import RankGroup
from bascule.comm.guard import notes
from bascule.comm.guard.calls import Call
from bascule.comm.transfers import (
    Transfers,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from bascule.plan.costs.hardware import FLOPS_PER_VALUE

STORE, WORK, COLLECTIVE, LINK = "store", "work", "collective", "link"

_SIZES = (2**10, 2**18)  # bytes; the largest one is given
_ITEM_BYTES = 4  # float32
_MOST_IN_A_ROW = 10
_STORE_REQUESTS = 10


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Something to time.

    Attributes:
        kind: "store", "work", "collective" or "link".
        name: In reports.
        on: Where its tensors are, by torch's name.
        size: Bytes that a rank holds; 0 for work and the store.
        amount: FLOPs of a rank, or bytes that it has to send.
        run: Does it once; all ranks call it, also those with no part in it.
        in_a_row: Runs of one measurement, so that ranks that begin apart matter less.
        ends: Of links, the pairs of ranks that exchange at the same time.
    """

    kind: str
    name: str
    on: str
    size: int
    amount: float
    run: Callable[[], object]
    in_a_row: int = 1
    ends: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class WorkSize:
    """How much work is timed: some milliseconds on a device of its kind.

    Attributes:
        dtype: Of all tensors.
        width: Rows and columns of the matrices.
        num_heads: Of attention.
        head_dim: Of attention.
        seq_lens: Packed sequences of attention.
    """

    dtype: torch.dtype
    width: int
    num_heads: int
    head_dim: int
    seq_lens: tuple[int, ...]


SIZE_OF_WORK = {
    "cpu": WorkSize(torch.float32, 512, 4, 64, (512, 256, 256)),
    "cuda": WorkSize(torch.bfloat16, 8192, 24, 128, (4096, 2048, 2048)),
}
"""By type of device."""


def make_probes(group: RankGroup, device: torch.device, largest: int) -> tuple[Probe, ...]:
    """Everything that is timed, in the same order on all ranks. No collective.

    Args:
        group: The ranks; their group carries tensors of the host and of the device.
        device: Of this rank.
        largest: Bytes of the largest message.
    """
    request = partial(notes.read, "doctor", group.rank)  # of a note that nobody leaves
    probes = [Probe(STORE, "store", "cpu", 0, 0, request, _STORE_REQUESTS), *_work(device)]
    if group.size == 1:
        return tuple(probes)
    for where in dict.fromkeys((device, torch.device("cpu"))):
        for size in sorted({*_SIZES, largest}):
            probes += _messages(group, where, size)
    return tuple(probes)


def time_round(group: RankGroup, device: torch.device, probes: Sequence[Probe]) -> Floats:
    """(ranks, probes) seconds of one run of each probe, alike on all ranks.

    One small all-gather before each probe, and one of the seconds, besides what the probes do.

    Raises:
        CommError: A rank failed, or did not come in time.
    """
    own = np.zeros(len(probes))
    for place, probe in enumerate(probes):
        together = torch.zeros(1)
        all_gather(group, Call("all_gather (doctor, to begin together)"), together)
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(probe.in_a_row):
            probe.run()
        _synchronize(device)
        own[place] = (time.perf_counter() - start) / probe.in_a_row
    return all_gather(group, Call("all_gather (doctor, seconds)"), torch.from_numpy(own)).numpy()


def matchings(num_ranks: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The links of the ring of all ranks, in sets in which no rank has two.

    So all links of a set are busy at once, and none waits for another: a slow one slows itself.
    """
    if num_ranks < 2:
        return ()
    if num_ranks == 2:
        return (((0, 1),),)
    links = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
    even, odd = links[0 : num_ranks - 1 : 2], links[1:num_ranks:2]
    if num_ranks % 2 == 0:
        return tuple(even), tuple(odd)
    return tuple(even), tuple(odd), (links[-1],)


def _work(device: torch.device) -> list[Probe]:
    size = SIZE_OF_WORK[device.type]
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=size.dtype, generator=generator)

    matrix, other = random(size.width, size.width), random(size.width, size.width)
    out = torch.empty_like(matrix)
    q, k, v = (random(sum(size.seq_lens), size.num_heads, size.head_dim) for _ in range(3))
    packed = PackedSequences.build(size.seq_lens, device)
    width, pairs = size.num_heads * size.head_dim, sum(length**2 for length in size.seq_lens)
    multiply = partial(torch.mm, matrix, other, out=out)
    attend = partial(attend_packed, q, k, v, packed)
    return [
        Probe(WORK, "matmul", device.type, 0, 2 * size.width**3, multiply, _MOST_IN_A_ROW),
        Probe(WORK, "attention", device.type, 0, FLOPS_PER_VALUE * width * pairs, attend, 5),
    ]


def _messages(group: RankGroup, where: torch.device, size: int) -> list[Probe]:
    """Collectives and links of one size.

    Bytes to send are those of the best algorithm, as nccl-tests counts its bus bandwidth.
    """
    share = -(-size // (group.size * _ITEM_BYTES))  # items of a rank's part
    size = share * group.size * _ITEM_BYTES
    sent = torch.ones(group.size * share, device=where)
    received = torch.empty_like(sent)
    splits = [share] * group.size
    in_a_row = max(2, min(_MOST_IN_A_ROW, 2**20 // size))
    part = size * (group.size - 1) / group.size

    def call(name: str) -> Call:
        return Call(f"{name} (doctor)", form=f"{size} bytes on {where.type}")

    def ring() -> None:
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        what = call("point-to-point")
        Transfers(group, what, {after: sent}, {before: received}).wait()

    def exchange(links: tuple[tuple[int, int], ...]) -> None:
        peers = [b if group.rank == a else a for a, b in links if group.rank in (a, b)]
        to, come = dict.fromkeys(peers, sent), dict.fromkeys(peers, received)
        Transfers(group, call("exchange of neighbours"), to, come).wait()

    runs: dict[str, tuple[float, Callable[[], object]]] = {
        "all-to-all": (
            part,
            lambda: all_to_all(group, call("all_to_all"), received, sent, splits, splits),
        ),
        "all-gather": (part, lambda: all_gather(group, call("all_gather"), sent[:share])),
        "reduce-scatter": (
            part,
            lambda: reduce_scatter(group, call("reduce_scatter"), sent.view(group.size, -1)),
        ),
        "all-reduce": (2 * part, lambda: all_reduce(group, call("all_reduce"), sent)),
        "to the next rank": (size, ring),
    }
    on = where.type
    probes = [Probe(COLLECTIVE, n, on, size, b, run, in_a_row) for n, (b, run) in runs.items()]
    for links in matchings(group.size):
        run = partial(exchange, links)
        probes.append(Probe(LINK, "link", on, size, size, run, in_a_row, links))
    return probes


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
