"""From measurements to findings: what is wrong, with its value, its limit and what to do. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from bascule.bench.doctor_options import DoctorOptions
from bascule.bench.measured import LinkTiming, Measured, RankFacts, to_median
from bascule.plan.machine import HardwareProfile

_ALIKE = {
    "python": ("Python", "install the same version everywhere"),
    "torch": ("torch", "install the same version everywhere"),
    "bascule": ("bascule", "install the same version everywhere"),
    "numpy": ("numpy", "install the same version everywhere"),
    "cuda": ("CUDA of torch", "install the same build of torch everywhere"),
    "nccl": ("NCCL", "install the same build of torch everywhere"),
    "backend": ("the back end", "see that every rank finds its GPU (CUDA_VISIBLE_DEVICES)"),
    "device": ("the device", "take hosts of one kind: the slowest one decides"),
    "num_threads": ("threads of torch", "set OMP_NUM_THREADS alike on all hosts"),
    "timeout_s": ("the timeout in seconds", "give --timeout-s alike on all hosts"),
}
"""By field that ranks must share: what it is, and what to do."""

_MEMORY_TOLERANCE = 0.1
_STORE_LIMIT_S = 0.05
_CALLS_IN_TIMEOUT = 100
_LONGEST_TIMEOUT_S = 3600.0
_MOST_NAMED = 8
_OFTEN = 0.75
"""Share of the rounds in which something must be slow to be found: noise is seldom that steady."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that should be looked at before a run.

    Attributes:
        kind: "difference", "memory", "slow rank", "slow link", "profile", "store" or "timeout".
        ranks: Those that it is about.
        text: What is wrong, its value, the limit, and what to do.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str


def judge(
    measured: Measured, options: DoctorOptions, profile: HardwareProfile | None = None
) -> tuple[Finding, ...]:
    """Everything that was found; the same for the same measurements.

    Args:
        measured: By all ranks.
        options: The tolerances. What is slower must be so in three quarters of the rounds.
        profile: Rates that ranks and links must reach; None: they are compared with each other.
    """
    found = [*differences(measured.facts), *_memory(measured.facts)]
    found += _slow_ranks(measured, options)
    found += _slow_links(measured, options)
    if profile is not None:
        found += _against_profile(measured, options, profile)
    return (*found, *_store(measured), *_timeout(measured))


def differences(facts: Sequence[RankFacts]) -> tuple[Finding, ...]:
    """What ranks must share and do not; ranks that differ from most are those of a finding."""
    found: list[Finding] = []
    for name, (title, advice) in _ALIKE.items():
        ranks_of: dict[str, list[int]] = {}
        for rank, one in enumerate(facts):
            ranks_of.setdefault(str(getattr(one, name)), []).append(rank)
        if len(ranks_of) == 1:
            continue
        most = max(ranks_of.values(), key=len)  # the first one of the largest
        others = tuple(rank for ranks in ranks_of.values() if ranks is not most for rank in ranks)
        said = "; ".join(f"{value} on {named(ranks)}" for value, ranks in ranks_of.items())
        text = f"{title} must be the same on all ranks, and differs: {said}; {advice}"
        found.append(Finding("difference", tuple(sorted(others)), text))
    return tuple(found)


def named(ranks: Iterable[int]) -> str:
    """Ranks for a sentence, runs of them as such: "rank 3", "ranks 0 to 3, 7"."""
    ranks = sorted(ranks)
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    ]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    more = f" and {sum(map(len, runs[_MOST_NAMED:]))} more" if len(runs) > _MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts[:_MOST_NAMED])}{more}"


def _memory(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    known = {rank: x.memory_bytes for rank, x in enumerate(facts) if x.memory_bytes is not None}
    if not known:
        return
    limit = (1.0 - _MEMORY_TOLERANCE) * float(np.median(list(known.values())))
    few = {rank: size for rank, size in known.items() if size < limit}
    if few:
        yield Finding(
            "memory",
            tuple(few),
            f"{named(few)}: {min(few.values()) / 1e9:.1f} GB of memory, and the others have more; "
            f"the limit is {limit / 1e9:.1f} GB ({1 - _MEMORY_TOLERANCE:.0%} of the median): take "
            "devices of one kind, or set the memory limit of plans for the smallest",
        )


def _slow_ranks(measured: Measured, options: DoctorOptions) -> Iterator[Finding]:
    limit = 1.0 + options.tolerance
    for work in measured.work:
        is_slow = to_median(work.seconds) > limit
        for rank in _often(is_slow):
            yield Finding(
                "slow rank",
                (rank,),
                f"rank {rank} on {measured.facts[rank].host} takes {work.ratios[rank]:.2f} times "
                f"as long as the median rank for the same {work.name}, and is above the limit of "
                f"{limit:.2f} in {_rounds(is_slow[:, rank])}: look on its host for other "
                "processes, clocks, heat and power, and for threads on the same cores, or leave "
                "it out",
            )


def _slow_links(measured: Measured, options: DoctorOptions) -> Iterator[Finding]:
    """Links of one kind are compared: those within a host, those between hosts."""
    kinds: dict[tuple[str, bool], list[LinkTiming]] = {}
    for link in largest_links(measured):
        kinds.setdefault((link.on, measured.is_near(link.ends)), []).append(link)
    limit = 1.0 - options.link_tolerance
    for (on, is_near), links in kinds.items():
        shares = 1.0 / to_median(np.stack([link.seconds for link in links], axis=1))
        is_slow = shares < limit
        for place in _often(is_slow):
            link = links[place]
            yield Finding(
                "slow link",
                link.ends,
                f"{_ends(measured, link)} exchange {link.bytes_per_s / 1e9:.3g} GB/s in messages "
                f"of {link.num_bytes / 2**20:.3g} MiB on {on}, "
                f"{np.median(shares[:, place]):.2f} times the median link {_kind(is_near)}, and "
                f"are below the limit of {limit:.2f} in {_rounds(is_slow[:, place])}: look at the "
                "cable, the adapter and its driver, the interface (NCCL_SOCKET_IFNAME, "
                "GLOO_SOCKET_IFNAME) and who else uses it",
            )


def _against_profile(
    measured: Measured, options: DoctorOptions, profile: HardwareProfile
) -> Iterator[Finding]:
    rates = {
        "matmul": "matmul_flops_per_s",
        "attention": "attention_flops_per_s",
    }
    for work in measured.work:
        name = rates[work.name]
        expected = getattr(profile, name)
        if expected is None:
            continue
        limit = expected / (1.0 + options.tolerance)
        if slow := _often(work.amount / work.seconds < limit):
            reached = (work.amount / work.of_ranks[slow]).min()
            yield Finding(
                "profile",
                tuple(slow),
                f"{named(slow)}: {reached / 1e12:.4g} TFLOP/s in {work.name}, the profile of "
                f"{profile.device} ({profile.provenance_of(name)}) says {expected / 1e12:.4g}; the "
                f"limit is {limit / 1e12:.4g}: {_OF_PROFILE}",
            )
    for link in largest_links(measured):
        is_near = measured.is_near(link.ends)
        name = "intra_bytes_per_s" if is_near else "inter_bytes_per_s"
        expected = getattr(profile, name)
        if expected is None or link.on != measured.work[0].on:
            continue
        limit = (1.0 - options.link_tolerance) * expected
        if _often(link.num_bytes / link.seconds[:, None] < limit):
            yield Finding(
                "profile",
                link.ends,
                f"{_ends(measured, link)} exchange {link.bytes_per_s / 1e9:.3g} GB/s, the profile "
                f"of {profile.device} ({profile.provenance_of(name)}) says {expected / 1e9:.3g} "
                f"{_kind(is_near)}; the limit is {limit / 1e9:.3g}: {_OF_PROFILE}",
            )


_OF_PROFILE = "see what slows it, or plan with a profile of these machines"


def largest_links(measured: Measured) -> list[LinkTiming]:
    """The largest messages of each link: those that tell its bandwidth."""
    last = {(link.ends, link.on): link for link in measured.links}
    return list(last.values())


def _store(measured: Measured) -> Iterator[Finding]:
    slow = np.flatnonzero(measured.store.of_ranks > _STORE_LIMIT_S).tolist()
    if slow:
        yield Finding(
            "store",
            tuple(slow),
            f"{named(slow)}: a request to the store takes "
            f"{measured.store.of_ranks.max() * 1e3:.1f} ms; the limit is "
            f"{_STORE_LIMIT_S * 1e3:g} ms: put its host (MASTER_ADDR) near the ranks, and on one "
            "with idle cores",
        )


def _timeout(measured: Measured) -> Iterator[Finding]:
    """A hang must be noticed on the same day, a slow call must not count as one."""
    known = [one.timeout_s for one in measured.facts if one.timeout_s is not None]
    if not known:
        return
    calls = [measured.store, *measured.collectives]
    slowest = max(calls, key=lambda call: call.of_slowest)
    least = _CALLS_IN_TIMEOUT * slowest.of_slowest
    ranks = tuple(range(len(measured.facts)))
    if min(known) < least:
        yield Finding(
            "timeout",
            ranks,
            f"the timeout of {min(known):g} s is short: {slowest.name} alone takes "
            f"{slowest.of_slowest:.3g} s here; the limit is {least:.3g} s, "
            f"{_CALLS_IN_TIMEOUT} times that: give a longer --timeout-s, and as long a timeout to "
            "init_process_group",
        )
    if max(known) > _LONGEST_TIMEOUT_S:
        yield Finding(
            "timeout",
            ranks,
            f"the timeout of {max(known):g} s is long: a rank that hangs holds all others for as "
            f"long; the limit is {_LONGEST_TIMEOUT_S:g} s: give a shorter --timeout-s",
        )


def _ends(measured: Measured, link: LinkTiming) -> str:
    a, b = link.ends
    hosts = measured.facts[a].host, measured.facts[b].host
    return f"rank {a} on {hosts[0]} and rank {b} on {hosts[1]}"


def _kind(is_near: bool) -> str:
    return "within a host" if is_near else "between hosts"


def _often(is_slow: npt.NDArray[np.bool_]) -> list[int]:
    """Columns of (rounds, n) that are so in most rounds."""
    return np.flatnonzero(is_slow.mean(axis=0) >= _OFTEN).tolist()


def _rounds(is_slow: npt.NDArray[np.bool_]) -> str:
    return f"{int(is_slow.sum())} of {is_slow.size} rounds"
