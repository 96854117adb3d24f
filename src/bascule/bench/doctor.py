"""`bascule doctor`: gather facts of all ranks; time compute, links, collectives; report findings.

Shapes: N rounds, R ranks.
"""

import importlib.metadata
import json
import platform
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch
import torch.cuda.nccl
import torch.distributed as dist
from torch import Tensor

from bascule.arrays import Bools, Floats
from bascule.attention import PackedSequences, attend_packed
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
from bascule.machine.cluster import FLOPS_PER_VALUE, HardwareProfile
from bascule.quantities import amount, num_bytes, number, percent, seconds, times

STORE, WORK, COLLECTIVE, LINK = "store", "work", "collective", "link"

_FORMAT = {"bascule": "doctor report", "version": 1}
_CAPACITY = 128  # integers of a rank's facts, 1 KiB; ranks gather a second time if one has more
_SIZES = (2**10, 2**18)  # bytes of messages, besides the largest
_STORE_REQUESTS = 10
_WORK = {  # some milliseconds: dtype, width of matrices, heads, head_dim and lengths of attention
    "cpu": (torch.float32, 512, 4, 64, (512, 256, 256)),
    "cuda": (torch.bfloat16, 8192, 24, 128, (4096, 2048, 2048)),
}
_SAME = "install the same version everywhere"
_SAME_BUILD = "install the same build of torch everywhere"
_ALIKE = {  # facts that all ranks must share: title and advice
    **{name.lower(): (name, _SAME) for name in ("Python", "torch", "bascule", "numpy")},
    "cuda": ("CUDA of torch", _SAME_BUILD),
    "nccl": ("NCCL", _SAME_BUILD),
    "backend": ("the back end", "see that every rank finds its GPU (CUDA_VISIBLE_DEVICES)"),
    "device": ("the device", "take hosts of one kind: the slowest one decides"),
    "num_threads": ("threads of torch", "set OMP_NUM_THREADS alike on all hosts"),
    "timeout_s": ("the timeout in seconds", "give --timeout-s alike on all hosts"),
}
_ADVICE = {  # by kind of finding
    "memory": "take devices of one kind, or set the memory limit of plans for the smallest",
    "slow rank": "look on its host for other processes, clocks, heat and power, and for threads on "
    "the same cores, or leave it out",
    "slow link": "look at the cable, the adapter and its driver, the interface "
    "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) and who else uses it",
    "profile": "see what slows it, or plan with a profile of these machines",
    "store": "put its host (MASTER_ADDR) near the ranks, and on one with idle cores",
    "short timeout": "give a longer --timeout-s, and as long a timeout to init_process_group",
    "long timeout": "give a shorter --timeout-s",
}
_MEMORY_SHARE = 0.9  # of the median memory, below which a device is a finding
_STORE_LIMIT_S = 0.05  # of a request to the store
_CALLS_IN_TIMEOUT = 100  # slowest calls that must fit into the timeout
_LONGEST_TIMEOUT_S = 3600.0
_MOST_NAMED = 8  # runs of ranks in a sentence
_STEADY_SHARE = 0.75  # of the rounds in which a finding must show: noise is less steady


@dataclass(frozen=True, slots=True, eq=False)
class Timing:
    """The seconds of a probe in all rounds, on all ranks."""

    kind: str  # STORE, WORK, COLLECTIVE or LINK
    name: str
    on: str  # where its tensors are: "cpu" or "cuda"
    size: int  # bytes that a rank holds, or of a message; 0 for work
    amount: float  # FLOPs of a rank, or bytes that it has to send
    seconds: Floats  # (N, R); of a link (N, 1), of its slower end
    ends: tuple[int, int] = (0, 0)  # ranks of a link

    @property
    def slowest_s(self) -> float:
        """Seconds of each round's slowest rank, median over the rounds."""
        return float(np.median(self.seconds.max(axis=1)))

    @property
    def rank_seconds(self) -> Floats:
        """(R,) seconds of each rank, median over the rounds."""
        return np.median(self.seconds, axis=0)

    @property
    def ratios(self) -> Floats:
        """(R,) seconds of each rank over the round's median rank, median over the rounds."""
        return np.median(to_median(self.seconds), axis=0)

    @property
    def rate(self) -> float:
        """FLOPs or bytes per second of the slowest rank."""
        return self.amount / self.slowest_s


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """The facts and timings of all ranks, from which doctor derives findings."""

    facts: Sequence[Mapping[str, Any]]  # of each rank: versions, device, memory, and `_ALIKE`
    timings: Sequence[Timing]  # those of a name, or of a link, ascend by size

    def of(self, kind: str) -> list[Timing]:
        """Return the timings of a kind."""
        return [timing for timing in self.timings if timing.kind == kind]

    def largest_links(self) -> list[Timing]:
        """Return the timing of each link's largest message, which shows its bandwidth."""
        return list({(link.ends, link.on): link for link in self.of(LINK)}.values())

    def is_near(self, link: Timing) -> bool:
        """Return whether both ranks of a link are on one host."""
        return len({self.facts[rank]["host"] for rank in link.ends}) == 1

    def place_of(self, link: Timing) -> str:
        """Say whether a link is within a host."""
        return "within a host" if self.is_near(link) else "between hosts"

    def describe(self, link: Timing) -> str:
        """Name the ranks and the bandwidth of a link."""
        ends = " and ".join(f"rank {rank} on {self.facts[rank]['host']}" for rank in link.ends)
        return f"{ends} exchange {amount(link.rate, 'B/s')}"


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of the cluster to check before a run."""

    kind: str  # "difference", "memory", "slow rank", "slow link", "profile", "store" or "timeout"
    ranks: tuple[int, ...]
    text: str  # what is wrong, its value, the limit, and what to do


Rule = Iterator[tuple[str, Iterable[int], str, str]]  # key of `_ADVICE`, ranks, violation, limit


def judge(
    measured: Measured,
    tolerance: float,
    link_tolerance: float,
    profile: HardwareProfile | None = None,
) -> list[Finding]:
    """Return all findings; with a profile, also ranks and links below its rates."""
    rules = (
        _memory(measured.facts),
        _slow_ranks(measured, 1.0 + tolerance),
        _slow_links(measured, 1.0 - link_tolerance),
        () if profile is None else _below(measured, profile, 1.0 + tolerance, 1.0 - link_tolerance),
        _store(measured),
        _timeout(measured),
    )
    return [
        *differences(measured.facts),
        *(
            Finding(
                kind.removeprefix("short ").removeprefix("long "),
                tuple(ranks),
                f"{what}; the limit is {limit}: {_ADVICE[kind]}",
            )
            for kind, ranks, what, limit in chain(*rules)
        ),
    ]


def differences(facts: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield a finding for each fact that must be the same on all ranks, but differs."""
    for name, (title, advice) in _ALIKE.items():
        ranks_of: dict[str, list[int]] = {}
        for rank, fact in enumerate(facts):
            ranks_of.setdefault(str(fact.get(name)), []).append(rank)
        if len(ranks_of) == 1:
            continue
        most = max(ranks_of.values(), key=len)  # the first one of the largest
        others = sorted(rank for ranks in ranks_of.values() if ranks is not most for rank in ranks)
        values = "; ".join(f"{value} on {named(ranks)}" for value, ranks in ranks_of.items())
        text = f"{title} must be the same on all ranks, but differs: {values}; {advice}"
        yield Finding("difference", tuple(others), text)


def named(ranks: Iterable[int]) -> str:
    """Name ranks in a sentence, with runs shortened: "rank 3", "ranks 0 to 3, 7"."""
    ranks = sorted(ranks)
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    ]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    more = f" and {sum(map(len, runs[_MOST_NAMED:]))} more" if len(runs) > _MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts[:_MOST_NAMED])}{more}"


def to_median(seconds: Floats) -> Floats:
    """Divide (N, n) seconds by the median of each round, so that a load on all ranks cancels."""
    # The lower middle: with the mean of two ranks, one 22 % slower would be 10 % above the median.
    middle = (seconds.shape[1] - 1) // 2
    return seconds / np.sort(seconds, axis=1)[:, middle : middle + 1]


def _memory(facts: Sequence[Mapping[str, Any]]) -> Rule:
    sizes = {rank: fact["memory_bytes"] for rank, fact in enumerate(facts) if fact["memory_bytes"]}
    limit = _MEMORY_SHARE * float(np.median(list(sizes.values()))) if sizes else 0.0
    if small := {rank: size for rank, size in sizes.items() if size < limit}:
        what = f"{named(small)}: {num_bytes(min(small.values()))} of memory, less than others"
        yield "memory", small, what, f"{num_bytes(limit)} ({percent(_MEMORY_SHARE)} of the median)"


def _slow_ranks(measured: Measured, limit: float) -> Rule:
    for work in measured.of(WORK):
        is_slow = to_median(work.seconds) > limit
        for rank in _often(is_slow):
            longer, host = times(float(work.ratios[rank])), measured.facts[rank]["host"]
            what = f"rank {rank} on {host} takes {longer} the median rank's time for the same "
            what += f"{work.name}, and was too slow in {_rounds(is_slow[:, rank])}"
            yield "slow rank", [rank], what, times(limit)


def _slow_links(measured: Measured, limit: float) -> Rule:
    kinds: dict[tuple[str, str], list[Timing]] = {}
    for link in measured.largest_links():
        kinds.setdefault((link.on, measured.place_of(link)), []).append(link)
    for (on, where), links in kinds.items():
        shares = 1.0 / to_median(np.concatenate([link.seconds for link in links], axis=1))
        for place in _often(shares < limit):
            link, share = links[place], shares[:, place]
            what = f"{measured.describe(link)} in messages of {num_bytes(link.size)} on {on}, "
            what += f"{times(float(np.median(share)))} the median link {where}, and were too slow "
            what += f"in {_rounds(share < limit)}"
            yield "slow link", link.ends, what, times(limit)


def _below(measured: Measured, profile: HardwareProfile, slower: float, share: float) -> Rule:
    for work in measured.of(WORK):
        expected = getattr(profile, f"{work.name}_flops_per_s")
        if expected is None:
            continue
        limit, source = expected / slower, profile.provenance_of(f"{work.name}_flops_per_s")
        if slow := _often(work.amount / work.seconds < limit):
            rate = work.amount / work.rank_seconds[slow].max()
            what = f"{named(slow)}: {amount(rate, 'FLOP/s')} in {work.name}, the profile of "
            what += f"{profile.device} ({source}) has {amount(expected, 'FLOP/s')}"
            yield "profile", slow, what, amount(limit, "FLOP/s")
    for link in measured.largest_links():
        name = "intra_bytes_per_s" if measured.is_near(link) else "inter_bytes_per_s"
        expected = getattr(profile, name)
        if expected is None or link.on != measured.of(WORK)[0].on:
            continue
        if _often(link.amount / link.seconds < share * expected):
            source = profile.provenance_of(name)
            what = f"{measured.describe(link)}, the profile of {profile.device} ({source}) has "
            what += f"{amount(expected, 'B/s')} {measured.place_of(link)}"
            yield "profile", link.ends, what, amount(share * expected, "B/s")


def _store(measured: Measured) -> Rule:
    took = measured.of(STORE)[0].rank_seconds
    if slow := np.flatnonzero(took > _STORE_LIMIT_S).tolist():
        what = f"{named(slow)}: a request to the store takes {seconds(float(took.max()))}"
        yield "store", slow, what, seconds(_STORE_LIMIT_S)


def _timeout(measured: Measured) -> Rule:
    # A hang must show on the same day, and a slow call must not count as one.
    timeouts = [fact["timeout_s"] for fact in measured.facts if fact["timeout_s"] is not None]
    if not timeouts:
        return
    calls, ranks = [*measured.of(STORE), *measured.of(COLLECTIVE)], range(len(measured.facts))
    slowest = max(calls, key=lambda call: call.slowest_s)
    took, shortest, longest = slowest.slowest_s, min(timeouts), max(timeouts)
    if shortest < _CALLS_IN_TIMEOUT * took:
        what = f"the timeout of {number(shortest)} s is short: {slowest.name} takes {seconds(took)}"
        limit = f"{number(_CALLS_IN_TIMEOUT * took)} s, {_CALLS_IN_TIMEOUT} times as long"
        yield "short timeout", ranks, what, limit
    if longest > _LONGEST_TIMEOUT_S:
        what = f"the timeout of {number(longest)} s is long: if one rank hangs, all wait so long"
        yield "long timeout", ranks, what, f"{number(_LONGEST_TIMEOUT_S)} s"


def _often(is_slow: Bools) -> list[int]:
    """Return the columns of (N, n) that are True in most rounds."""
    return np.flatnonzero(is_slow.mean(axis=0) >= _STEADY_SHARE).tolist()


def _rounds(is_slow: Bools) -> str:
    return f"{int(is_slow.sum())} of {is_slow.size} rounds"


def check_up(
    options: DoctorOptions, device: torch.device, advance: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Check the ranks of the default group; return a report of plain values, the same on all.

    Collectives: a gather of facts, then the probes in a warm-up round and in each round. If a rank
    fails, the error also names the facts in which the ranks differ.
    """
    group = member_of(resolve(None), "doctor")
    facts, profile = _gather(group, options, device)
    try:
        with shared("bascule doctor"):
            measured = _measure(group, device, facts, options, advance)
    except CommError as error:
        if not (texts := "; ".join(difference.text for difference in differences(facts))):
            raise
        raise CommError(f"{error}. These differences may be the cause: {texts}") from error
    findings = judge(measured, options.tolerance, options.link_tolerance, profile)
    return plain_values(options, measured, findings)


def _gather(
    group: RankGroup, options: DoctorOptions, device: torch.device
) -> tuple[list[Mapping[str, Any]], HardwareProfile | None]:
    values, profile, error = np.zeros(0, np.int64), None, None
    try:
        profile = None if options.profile is None else HardwareProfile.load(options.profile)
        text = json.dumps(_facts(group, device)).encode()
        padded = text.ljust(-(-len(text) // 8) * 8)  # with spaces, which JSON ignores
        values = np.frombuffer(padded, dtype="<i8").astype(np.int64)
    except Exception as refusal:  # the other ranks must not wait
        error = refusal
    settings, what = options.settings | {"numbers of --profile": repr(profile)}, "bascule doctor"
    rows = agree(group, settings, error, what=what, values=values, capacity=_CAPACITY)
    return [json.loads(row.astype("<i8").tobytes()) for row in rows], profile


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
    time_round(group, device, probes)  # warms up connections, memory and kernels
    advance()
    rounds = np.empty((options.rounds, group.size, len(probes)))
    for place in range(options.rounds):
        rounds[place] = time_round(group, device, probes)
        advance()
    timings, links = list[Timing](), list[Timing]()
    for place, probe in enumerate(probes):
        seconds = rounds[:, :, place]
        timing = Timing(probe.kind, probe.name, probe.on, probe.size, probe.amount, seconds)
        if probe.kind != LINK:
            timings.append(timing)
        for ends in probe.ends:
            slower_s = seconds[:, ends].max(axis=1, keepdims=True)
            links.append(replace(timing, seconds=slower_s, ends=ends))
    links.sort(key=lambda link: (link.on, link.ends, link.size))
    return Measured(facts, timings + links)


def _probes(group: RankGroup, device: torch.device, largest: int) -> list[Probe]:
    """Make all probes, in the same order on all ranks. No collective."""
    request = partial(ask, lambda store: read(store, "doctor"))  # a note that no rank writes
    probes = [Probe(STORE, "store", "cpu", 0, 0, request, _STORE_REQUESTS), *_work(device)]
    if group.size == 1:
        return probes
    for where in dict.fromkeys((device, torch.device("cpu"))):
        for size in sorted({*_SIZES, largest}):
            probes += collectives(group, where, size)
            probes += _links(group, where, probes[-1].size)
    return probes


def _work(device: torch.device) -> list[Probe]:
    dtype, width, num_heads, head_dim, seq_lens = _WORK[device.type]
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
        outgoing, incoming = dict.fromkeys(peers, sent), dict.fromkeys(peers, received)
        Transfers(group, "exchange of neighbours (timing)", outgoing, incoming).wait()

    return [
        Probe(LINK, "link", where.type, size, size, partial(exchange, links), in_a_row(size), links)
        for links in matchings(group.size)
    ]


def matchings(num_ranks: int) -> list[tuple[tuple[int, int], ...]]:
    """Return the links of the ring of all ranks, in sets of links that share no rank."""
    if num_ranks < 3:
        return [((0, 1),)][: num_ranks - 1]
    links = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
    even, odd = tuple(links[0 : num_ranks - 1 : 2]), tuple(links[1:num_ranks:2])
    return [even, odd] if num_ranks % 2 == 0 else [even, odd, (links[-1],)]


def plain_values(
    options: DoctorOptions, measured: Measured, findings: Sequence[Finding]
) -> dict[str, Any]:
    """Return a check-up as plain values for JSON."""
    (store,) = measured.of(STORE)
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
                "store_s": float(store.rank_seconds[rank]),
                "work": {
                    work.name: {
                        "seconds": (seconds := float(work.rank_seconds[rank])),
                        "flops_per_s": work.amount / seconds,
                        "times_median": float(work.ratios[rank]),
                    }
                    for work in measured.of(WORK)
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
                "seconds": call.slowest_s,
                "bytes_per_s": call.rate,
                "slowest_rank": int(call.rank_seconds.argmax()),
            }
            for call in measured.of(COLLECTIVE)
        ],
        "links": [
            {
                "ranks": list(link.ends),
                "same_host": measured.is_near(link),
                "on": link.on,
                "num_bytes": link.size,
                "seconds": link.slowest_s,
                "bytes_per_s": link.rate,
            }
            for link in measured.of(LINK)
        ],
        "findings": [asdict(finding) for finding in findings],
    }
