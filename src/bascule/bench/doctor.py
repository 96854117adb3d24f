"""The check-up of the ranks of a job: gather facts, time work, links and collectives, judge."""

import importlib.metadata
import json
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.cuda.nccl
import torch.distributed as dist
from torch import Tensor

from bascule.attention import PackedSequences, attend_packed
from bascule.bench.findings import (
    COLLECTIVE,
    LINK,
    STORE,
    WORK,
    Finding,
    Measured,
    Timing,
    differences,
    judge,
)
from bascule.bench.options import DoctorOptions
from bascule.calibrate.timed import (
    MOST_IN_A_ROW,
    Probe,
    collectives,
    device_name,
    in_a_row,
    memory_bytes,
    time_round,
)
from bascule.comm.agree import agree
from bascule.comm.collectives import Transfers
from bascule.comm.failures import ask, read, shared
from bascule.comm.groups import RankGroup, member_of, resolve, timeout_of
from bascule.errors import CommError
from bascule.plan.machine import FLOPS_PER_VALUE, HardwareProfile

_FORMAT = {"bascule": "doctor report", "version": 1}
_CAPACITY = 128  # 1 KiB of text; the ranks gather a second time if one has more
_SIZES = (2**10, 2**18)  # bytes of messages, besides the largest
_STORE_REQUESTS = 10
_HEAD_DIM = {"cpu": 64, "cuda": 128}
_WORK = {  # dtype, width of matrices, heads and lengths of attention: milliseconds of work
    "cpu": (torch.float32, 512, 4, (512, 256, 256)),
    "cuda": (torch.bfloat16, 8192, 24, (4096, 2048, 2048)),
}


def check_up(
    options: DoctorOptions, device: torch.device, advance: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Check the ranks of the default group; return a report of plain values, the same on all.

    Collectives: a gather of facts; then in each round, and in one that does not count, the probes.
    The error of a failed rank says also what differs between the ranks.
    """
    group = member_of(resolve(None), "doctor")
    facts, profile = _gather(group, options, device)
    try:
        with shared("bascule doctor"):
            measured = _measure(group, device, facts, options, advance)
    except CommError as error:
        if not (texts := "; ".join(one.text for one in differences(facts))):
            raise
        raise CommError(f"{error}. A cause may be what ranks do not share: {texts}") from error
    findings = judge(measured, options.tolerance, options.link_tolerance, profile)
    return report_of(options, measured, findings)


def _gather(
    group: RankGroup, options: DoctorOptions, device: torch.device
) -> tuple[list[Mapping[str, Any]], HardwareProfile | None]:
    values, profile, error = np.zeros(0, np.int64), None, None
    settings = options.settings
    try:
        profile = None if options.profile is None else HardwareProfile.load(options.profile)
        settings["numbers of --profile"] = repr(profile)
        values = _to_integers(json.dumps(_facts(group, device)))
    except Exception as refusal:  # whatever it is, the others must not wait
        error = refusal
        settings["numbers of --profile"] = "not read"
    what = "bascule doctor"
    rows = agree(group, settings, error, what=what, values=values, capacity=_CAPACITY)
    return [json.loads(row.astype("<i8").tobytes()) for row in rows], profile


def _to_integers(text: str) -> np.ndarray:
    """Pad ASCII with spaces, which JSON ignores, and read it as integers."""
    encoded = text.encode()
    return np.frombuffer(encoded.ljust(-(-len(encoded) // 8) * 8), dtype="<i8").astype(np.int64)


def _facts(group: RankGroup, device: torch.device) -> dict[str, Any]:
    timeout, is_cuda = timeout_of(group.process_group, torch.device("cpu")), device.type == "cuda"
    return {
        "host": socket.gethostname(),
        "device": device_name(device),
        "memory_bytes": memory_bytes(device),
        "num_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "bascule": importlib.metadata.version("bascule"),
        "numpy": np.__version__,
        "cuda": torch.version.cuda or "none",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_cuda else "none",
        "backend": dist.get_backend_config(group.process_group),
        "timeout_s": None if timeout is None else timeout.total_seconds(),
    }


def _measure(
    group: RankGroup,
    device: torch.device,
    facts: Sequence[Mapping[str, Any]],
    options: DoctorOptions,
    advance: Callable[[], object],
) -> Measured:
    probes = _probes(group, device, options.mib * 2**20)
    time_round(group, device, probes)  # connections, memory and kernels: does not count
    advance()
    rounds = np.empty((options.rounds, group.size, len(probes)))
    for number in range(options.rounds):
        rounds[number] = time_round(group, device, probes)
        advance()
    timings = list[Timing]()
    for place, probe in enumerate(probes):
        seconds = rounds[:, :, place]
        made = partial(Timing, probe.kind, probe.name, probe.on, probe.size, probe.amount)
        if probe.kind == LINK:
            slower = {ends: seconds[:, ends].max(axis=1, keepdims=True) for ends in probe.ends}
            timings += [made(worst, ends) for ends, worst in slower.items()]
        else:
            timings.append(made(seconds))
    timings.sort(key=lambda one: (one.on, one.ends, one.size) if one.kind == LINK else ("", (), 0))
    return Measured(facts, timings)


def _probes(group: RankGroup, device: torch.device, largest: int) -> list[Probe]:
    """Make everything that is timed, in the same order on all ranks. No collective."""
    request = partial(ask, lambda store: read(store, "doctor"))  # of a note that no rank writes
    probes = [Probe(STORE, "store", "cpu", 0, 0, request, _STORE_REQUESTS), *_work(device)]
    if group.size == 1:
        return probes
    for where in dict.fromkeys((device, torch.device("cpu"))):
        for size in sorted({*_SIZES, largest}):
            probes += collectives(group, where, size)
            probes += _links(group, where, probes[-1].size)
    return probes


def _work(device: torch.device) -> list[Probe]:
    (dtype, width, num_heads, seq_lens), head_dim = _WORK[device.type], _HEAD_DIM[device.type]
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)

    matrix, other = random(width, width), random(width, width)
    multiply = partial(torch.mm, matrix, other, out=torch.empty_like(matrix))
    q, k, v = (random(sum(seq_lens), num_heads, head_dim) for _ in range(3))
    attend = partial(attend_packed, q, k, v, PackedSequences.build(seq_lens, device))
    flops = FLOPS_PER_VALUE * num_heads * head_dim * sum(length**2 for length in seq_lens)
    return [
        Probe(WORK, "matmul", device.type, 0, 2 * width**3, multiply, MOST_IN_A_ROW),
        Probe(WORK, "attention", device.type, 0, flops, attend, 5),
    ]


def _links(group: RankGroup, where: torch.device, size: int) -> list[Probe]:
    sent = torch.ones(size, dtype=torch.uint8, device=where)
    received = torch.empty_like(sent)

    def exchange(links: tuple[tuple[int, int], ...]) -> None:
        peers = [b if group.rank == a else a for a, b in links if group.rank in (a, b)]
        to, come = dict.fromkeys(peers, sent), dict.fromkeys(peers, received)
        Transfers(group, "exchange of neighbours (timing)", to, come).wait()

    return [
        Probe(LINK, "link", where.type, size, size, partial(exchange, links), in_a_row(size), links)
        for links in matchings(group.size)
    ]


def matchings(num_ranks: int) -> list[tuple[tuple[int, int], ...]]:
    """Return the links of the ring of all ranks, in sets in which no link waits for another."""
    if num_ranks < 3:
        return [((0, 1),)][: num_ranks - 1]
    links = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
    even, odd = tuple(links[0 : num_ranks - 1 : 2]), tuple(links[1:num_ranks:2])
    return [even, odd] if num_ranks % 2 == 0 else [even, odd, (links[-1],)]


def report_of(
    options: DoctorOptions, measured: Measured, findings: Sequence[Finding]
) -> dict[str, Any]:
    """Return a check-up as plain values."""
    works, (store,) = measured.of(WORK), measured.of(STORE)
    return {
        **_FORMAT,
        "num_ranks": len(measured.facts),
        "rounds": options.rounds,
        "tolerance": options.tolerance,
        "link_tolerance": options.link_tolerance,
        "profile": options.profile,
        "ranks": [
            {
                "rank": rank,
                **facts,
                "store_s": float(store.of_ranks[rank]),
                "work": {
                    work.name: {
                        "seconds": float(work.of_ranks[rank]),
                        "flops_per_s": work.amount / float(work.of_ranks[rank]),
                        "times_median": float(work.ratios[rank]),
                    }
                    for work in works
                },
            }
            for rank, facts in enumerate(measured.facts)
        ],
        "collectives": [
            {
                "name": call.name,
                "on": call.on,
                "size_bytes": call.size,
                "sent_bytes": call.amount,
                "seconds": call.of_slowest,
                "bytes_per_s": call.rate,
                "slowest_rank": int(call.of_ranks.argmax()),
            }
            for call in measured.of(COLLECTIVE)
        ],
        "links": [
            {
                "ranks": list(link.ends),
                "same_host": measured.is_near(link),
                "on": link.on,
                "num_bytes": link.size,
                "seconds": link.of_slowest,
                "bytes_per_s": link.rate,
            }
            for link in measured.of(LINK)
        ],
        "findings": [asdict(finding) for finding in findings],
    }
