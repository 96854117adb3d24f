"""What is timed on the ranks: trips to the store, work of the model's kind, collectives, links."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bascule.attention import PackedSequences, attend_packed
from bascule.calibrate.timed import MOST_IN_A_ROW, Probe, collectives, in_a_row
from bascule.comm.collectives import Transfers
from bascule.comm.failures import ask, read
from bascule.comm.groups import RankGroup
from bascule.plan.machine import FLOPS_PER_VALUE

STORE, WORK, LINK = "store", "work", "link"

_SIZES = (2**10, 2**18)  # bytes; the largest one is given
_STORE_REQUESTS = 10


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
    request = partial(ask, lambda store: read(store, "doctor"))  # of a note that nobody leaves
    probes = [Probe(STORE, "store", "cpu", 0, 0, request, _STORE_REQUESTS), *_work(device)]
    if group.size == 1:
        return tuple(probes)
    for where in dict.fromkeys((device, torch.device("cpu"))):
        for size in sorted({*_SIZES, largest}):
            probes += collectives(group, where, size)
            probes += _links(group, where, probes[-1].size)
    return tuple(probes)


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
        Probe(WORK, "matmul", device.type, 0, 2 * size.width**3, multiply, MOST_IN_A_ROW),
        Probe(WORK, "attention", device.type, 0, FLOPS_PER_VALUE * width * pairs, attend, 5),
    ]


def _links(group: RankGroup, where: torch.device, size: int) -> list[Probe]:
    """Messages of one size between neighbours."""
    sent = torch.ones(size, dtype=torch.uint8, device=where)
    received = torch.empty_like(sent)

    def exchange(links: tuple[tuple[int, int], ...]) -> None:
        peers = [b if group.rank == a else a for a, b in links if group.rank in (a, b)]
        to, come = dict.fromkeys(peers, sent), dict.fromkeys(peers, received)
        Transfers(group, "exchange of neighbours (timing)", to, come).wait()

    found: list[Probe] = []
    for links in matchings(group.size):
        run = partial(exchange, links)
        found.append(Probe(LINK, "link", where.type, size, size, run, in_a_row(size), links))
    return found
