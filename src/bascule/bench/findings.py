"""Findings on ranks and links: value, limit and what to do. Shapes: N rounds, R ranks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import numpy as np

from bascule.arrays import Bools, Floats
from bascule.plan.machine import HardwareProfile

STORE, WORK, COLLECTIVE, LINK = "store", "work", "collective", "link"

_SAME = "install the same version everywhere"
_SAME_BUILD = "install the same build of torch everywhere"
_ALIKE = {  # by fact that ranks must share: its name, and what to do
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
_MEMORY_SHARE = 0.9
_STORE_LIMIT_S = 0.05
_CALLS_IN_TIMEOUT = 100
_LONGEST_TIMEOUT_S = 3600.0
_MOST_NAMED = 8
_OFTEN = 0.75  # share of the rounds in which a finding must show: noise is less steady


@dataclass(frozen=True, slots=True, eq=False)
class Timing:
    """Seconds of one call or piece of work."""

    kind: str  # STORE, WORK, COLLECTIVE or LINK
    name: str
    on: str  # where its tensors are: "cpu" or "cuda"
    size: int  # bytes that a rank holds, or of a message; 0 for work
    amount: float  # FLOPs of a rank, or bytes that it has to send
    seconds: Floats  # (N, R); of a link (N, 1), of its slower end
    ends: tuple[int, int] = (0, 0)  # ranks of a link

    @property
    def of_slowest(self) -> float:
        """Seconds of the slowest rank of each round, in the median of the rounds."""
        return float(np.median(self.seconds.max(axis=1)))

    @property
    def of_ranks(self) -> Floats:
        """(R,) medians over the rounds."""
        return np.median(self.seconds, axis=0)

    @property
    def ratios(self) -> Floats:
        """(R,) seconds over those of the median rank of the round, medians over the rounds."""
        return np.median(to_median(self.seconds), axis=0)

    @property
    def rate(self) -> float:
        """FLOPs or bytes in a second, of the slowest rank."""
        return self.amount / self.of_slowest


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Everything about a cluster that findings follow from."""

    facts: Sequence[Mapping[str, Any]]  # of each rank: versions, device, memory, and `_ALIKE`
    timings: Sequence[Timing]  # sizes of a name, and of a link, ascend

    def of(self, kind: str) -> list[Timing]:
        """Return the timings of a kind."""
        return [timing for timing in self.timings if timing.kind == kind]

    def largest_links(self) -> list[Timing]:
        """Return the largest message of each link, which shows its bandwidth."""
        return list({(link.ends, link.on): link for link in self.of(LINK)}.values())

    def is_near(self, link: Timing) -> bool:
        """Return whether the ends of a link are on one host."""
        return len({self.facts[rank]["host"] for rank in link.ends}) == 1

    def where(self, link: Timing) -> str:
        """Return the kind of a link."""
        return "within a host" if self.is_near(link) else "between hosts"

    def rate_of(self, link: Timing) -> str:
        """Return ends and bandwidth of a link, for a sentence."""
        ends = " and ".join(f"rank {rank} on {self.facts[rank]['host']}" for rank in link.ends)
        return f"{ends} exchange {link.rate / 1e9:.3g} GB/s"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that should be looked at before a run."""

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
    """Return all findings; ranks and links must reach the profile's rates, if there is one."""
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
    """Yield facts that ranks must share and do not, with the ranks that differ from most."""
    for name, (title, advice) in _ALIKE.items():
        ranks_of: dict[str, list[int]] = {}
        for rank, one in enumerate(facts):
            ranks_of.setdefault(str(one.get(name)), []).append(rank)
        if len(ranks_of) == 1:
            continue
        most = max(ranks_of.values(), key=len)  # the first one of the largest
        others = sorted(rank for ranks in ranks_of.values() if ranks is not most for rank in ranks)
        values = "; ".join(f"{value} on {named(ranks)}" for value, ranks in ranks_of.items())
        text = f"{title} must be the same on all ranks, and differs: {values}; {advice}"
        yield Finding("difference", tuple(others), text)


def named(ranks: Iterable[int]) -> str:
    """Return ranks for a sentence, runs of them as such: "rank 3", "ranks 0 to 3, 7"."""
    ranks = sorted(ranks)
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    ]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    more = f" and {sum(map(len, runs[_MOST_NAMED:]))} more" if len(runs) > _MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts[:_MOST_NAMED])}{more}"


def to_median(seconds: Floats) -> Floats:
    """Return (N, n) seconds over the median of each round: what slows all down cancels."""
    # The lower middle: with the mean of two ranks, one 22 % slower would be 10 % above the median.
    middle = (seconds.shape[1] - 1) // 2
    return seconds / np.sort(seconds, axis=1)[:, middle : middle + 1]


def _memory(facts: Sequence[Mapping[str, Any]]) -> Rule:
    sizes = {rank: one["memory_bytes"] for rank, one in enumerate(facts) if one["memory_bytes"]}
    limit = _MEMORY_SHARE * float(np.median(list(sizes.values()))) if sizes else 0.0
    if small := {rank: size for rank, size in sizes.items() if size < limit}:
        what = f"{named(small)}: {min(small.values()) / 1e9:.1f} GB of memory, and others have more"
        yield "memory", small, what, f"{limit / 1e9:.1f} GB ({_MEMORY_SHARE:.0%} of the median)"


def _slow_ranks(measured: Measured, limit: float) -> Rule:
    for work in measured.of(WORK):
        is_slow = to_median(work.seconds) > limit
        for rank in _often(is_slow):
            what = (
                f"rank {rank} on {measured.facts[rank]['host']} takes {work.ratios[rank]:.2f} "
                f"times as long as the median rank for the same {work.name}, and too long in "
                f"{_rounds(is_slow[:, rank])}"
            )
            yield "slow rank", [rank], what, f"{limit:.2f}"


def _slow_links(measured: Measured, limit: float) -> Rule:
    kinds: dict[tuple[str, str], list[Timing]] = {}
    for link in measured.largest_links():
        kinds.setdefault((link.on, measured.where(link)), []).append(link)
    for (on, where), links in kinds.items():
        shares = 1.0 / to_median(np.concatenate([link.seconds for link in links], axis=1))
        for place in _often(shares < limit):
            link, share = links[place], shares[:, place]
            what = (
                f"{measured.rate_of(link)} in messages of {link.size / 2**20:.3g} MiB on {on}, "
                f"{np.median(share):.2f} times the median link {where}, and too little in "
                f"{_rounds(share < limit)}"
            )
            yield "slow link", link.ends, what, f"{limit:.2f}"


def _below(measured: Measured, profile: HardwareProfile, slower: float, share: float) -> Rule:
    for work in measured.of(WORK):
        expected = getattr(profile, f"{work.name}_flops_per_s")
        if expected is None:
            continue
        limit, source = expected / slower, profile.provenance_of(f"{work.name}_flops_per_s")
        if slow := _often(work.amount / work.seconds < limit):
            what = (
                f"{named(slow)}: {(work.amount / work.of_ranks[slow]).min() / 1e12:.4g} TFLOP/s in "
                f"{work.name}, the profile of {profile.device} ({source}) has {expected / 1e12:.4g}"
            )
            yield "profile", slow, what, f"{limit / 1e12:.4g}"
    for link in measured.largest_links():
        name = "intra_bytes_per_s" if measured.is_near(link) else "inter_bytes_per_s"
        expected = getattr(profile, name)
        if expected is None or link.on != measured.of(WORK)[0].on:
            continue
        if _often(link.amount / link.seconds < share * expected):
            what = (
                f"{measured.rate_of(link)}, the profile of {profile.device} "
                f"({profile.provenance_of(name)}) has {expected / 1e9:.3g} {measured.where(link)}"
            )
            yield "profile", link.ends, what, f"{share * expected / 1e9:.3g}"


def _store(measured: Measured) -> Rule:
    seconds = measured.of(STORE)[0].of_ranks
    if slow := np.flatnonzero(seconds > _STORE_LIMIT_S).tolist():
        what = f"{named(slow)}: a request to the store takes {seconds.max() * 1e3:.1f} ms"
        yield "store", slow, what, f"{_STORE_LIMIT_S * 1e3:g} ms"


def _timeout(measured: Measured) -> Rule:
    # A hang must show on the same day, and a slow call must not count as one.
    timeouts = [one["timeout_s"] for one in measured.facts if one["timeout_s"] is not None]
    if not timeouts:
        return
    calls, ranks = [*measured.of(STORE), *measured.of(COLLECTIVE)], range(len(measured.facts))
    slowest = max(calls, key=lambda call: call.of_slowest)
    seconds, shortest, longest = slowest.of_slowest, min(timeouts), max(timeouts)
    if shortest < _CALLS_IN_TIMEOUT * seconds:
        what = f"the timeout of {shortest:g} s is short: {slowest.name} alone takes {seconds:.3g} s"
        limit = f"{_CALLS_IN_TIMEOUT * seconds:.3g} s, {_CALLS_IN_TIMEOUT} times that"
        yield "short timeout", ranks, what, limit
    if longest > _LONGEST_TIMEOUT_S:
        what = f"the timeout of {longest:g} s is long: a rank that hangs holds all others so long"
        yield "long timeout", ranks, what, f"{_LONGEST_TIMEOUT_S:g} s"


def _often(is_slow: Bools) -> list[int]:
    """Return the columns of (N, n) that are so in most rounds."""
    return np.flatnonzero(is_slow.mean(axis=0) >= _OFTEN).tolist()


def _rounds(is_slow: Bools) -> str:
    return f"{int(is_slow.sum())} of {is_slow.size} rounds"
