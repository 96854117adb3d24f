"""The whole check-up of the ranks of a job: gather what they are, time them, judge."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from bascule.bench.doctor_options import DoctorOptions
from bascule.bench.findings import Finding, differences, judge
from bascule.bench.measured import LinkTiming, Measured, RankFacts, Timing
from bascule.bench.probes import LINK, STORE, WORK, make_probes
from bascule.bench.rank_facts import gather_facts, own_facts
from bascule.calibrate.timed import COLLECTIVE, Probe, time_round
from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup, member_of, resolve
from bascule.errors import CommError
from bascule.plan.machine import HardwareProfile

_FORMAT = {"bascule": "doctor report", "version": 1}
"""What a report begins with."""


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """A check-up, the same on all ranks.

    Attributes:
        options: The tolerances.
        measured: What the ranks are and what they measured.
        findings: What should be looked at; empty if all is well.
    """

    options: DoctorOptions
    measured: Measured
    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        options, measured = self.options, self.measured
        return {
            **_FORMAT,
            "num_ranks": len(measured.facts),
            "rounds": options.rounds,
            "tolerance": options.tolerance,
            "link_tolerance": options.link_tolerance,
            "profile": options.profile,
            "ranks": [_rank_row(measured, rank) for rank in range(len(measured.facts))],
            "collectives": [_collective_row(timing) for timing in measured.collectives],
            "links": [_link_row(measured, link) for link in measured.links],
            "findings": [asdict(finding) for finding in self.findings],
        }


def check_up(
    options: DoctorOptions,
    device: torch.device,
    advance: Callable[[], object] = lambda: None,
) -> Report:
    """Check the ranks of the default group. All of them call it.

    Collectives: one gather of facts; then in each round, and one before that does not count, the
    probes, an all-gather before each, and one of the seconds.

    Args:
        options: Alike on all ranks.
        device: Of this rank.
        advance: Called after each round.

    Raises:
        RemoteConfigError: A rank met bad input, such as a profile that it cannot read.
        CommError: A rank met another error, has other options, died, or did not come in time; says
            also what differed between the ranks.
    """
    group = member_of(resolve(None), "doctor")
    facts, profile = _meet(group, options, device)
    try:
        with shared("bascule doctor"):
            measured = _measure(group, device, facts, options, advance)
    except CommError as error:
        if not (found := differences(facts)):
            raise
        told = "; ".join(finding.text for finding in found)
        raise CommError(f"{error}. It may come from what was found before: {told}") from error
    return Report(options, measured, judge(measured, options, profile))


def _meet(
    group: RankGroup, options: DoctorOptions, device: torch.device
) -> tuple[tuple[RankFacts, ...], HardwareProfile | None]:
    """Facts of all ranks, and the profile, once all are known to have one."""
    facts, profile, error, settings = None, None, None, options.settings
    try:
        options.check(group.size)
        profile = None if options.profile is None else HardwareProfile.load(options.profile)
        settings["numbers of --profile"] = repr(profile)
        facts = own_facts(group, device)
    except Exception as met:  # whatever it is, the others must not wait
        error = met
        settings["numbers of --profile"] = "not read"
    return gather_facts(group, facts, settings, error), profile


def _measure(
    group: RankGroup,
    device: torch.device,
    facts: tuple[RankFacts, ...],
    options: DoctorOptions,
    advance: Callable[[], object],
) -> Measured:
    probes = make_probes(group, device, options.mib * 2**20)
    time_round(group, device, probes)  # connections, memory and kernels: does not count
    advance()
    rounds = np.empty((options.rounds, group.size, len(probes)))
    for number in range(options.rounds):
        rounds[number] = time_round(group, device, probes)
        advance()
    timings = [
        (probe, Timing(probe.name, probe.on, probe.size, probe.amount, rounds[:, :, place]))
        for place, probe in enumerate(probes)
    ]
    of_kind = {
        kind: tuple(timing for probe, timing in timings if probe.kind == kind)
        for kind in (STORE, WORK, COLLECTIVE)
    }
    links = [link for one in timings if one[0].kind == LINK for link in _links(*one)]
    return Measured(facts, of_kind[STORE][0], of_kind[WORK], of_kind[COLLECTIVE], _in_order(links))


def _links(probe: Probe, timing: Timing) -> list[LinkTiming]:
    return [
        LinkTiming(ends, probe.on, probe.size, timing.seconds[:, list(ends)].max(axis=1))
        for ends in probe.ends
    ]


def _in_order(links: Sequence[LinkTiming]) -> tuple[LinkTiming, ...]:
    return tuple(sorted(links, key=lambda link: (link.on, link.ends, link.num_bytes)))


def _rank_row(measured: Measured, rank: int) -> dict[str, Any]:
    work = {
        timing.name: {
            "seconds": float(timing.of_ranks[rank]),
            "flops_per_s": timing.amount / float(timing.of_ranks[rank]),
            "times_median": float(timing.ratios[rank]),
        }
        for timing in measured.work
    }
    store_s = float(measured.store.of_ranks[rank])
    return {"rank": rank, **asdict(measured.facts[rank]), "store_s": store_s, "work": work}


def _collective_row(timing: Timing) -> dict[str, Any]:
    return {
        "name": timing.name,
        "on": timing.on,
        "size_bytes": timing.size,
        "sent_bytes": timing.amount,
        "seconds": timing.of_slowest,
        "bytes_per_s": timing.amount / timing.of_slowest,
        "slowest_rank": timing.slowest_rank,
    }


def _link_row(measured: Measured, link: LinkTiming) -> dict[str, Any]:
    return {
        "ranks": list(link.ends),
        "same_host": measured.is_near(link.ends),
        "on": link.on,
        "num_bytes": link.num_bytes,
        "seconds": link.median_s,
        "bytes_per_s": link.bytes_per_s,
    }
