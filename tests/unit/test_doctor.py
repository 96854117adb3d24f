"""Findings of `bascule doctor` in invented measurements, and the options it refuses; no ranks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bascule.arrays import Floats
from bascule.bench import doctor
from bascule.bench.doctor import Finding, Measured, Timing, judge, named
from bascule.bench.options import DoctorOptions
from bascule.cli.doctor import report_of
from bascule.machine.cluster import HardwareProfile
from bascule.report.page import Rows

ROUNDS = 8
FACTS = {"host": "a", "device": "H100", "memory_bytes": 80 * 10**9, "num_threads": 8}
FACTS |= {"python": "3.12.1", "torch": "2.13.0", "bascule": "0.1.0", "numpy": "2.4.0"}
FACTS |= {"cuda": "12.9", "nccl": "2.27.3", "backend": "cpu:gloo,cuda:nccl", "timeout_s": 120.0}
FAR = 8e-3
"""Seconds of a link between hosts, which is slower than one within a host: no finding."""


def seconds(of_ranks: Sequence[float] | Floats) -> Floats:
    """(rounds, ranks) with a percent of noise, and one round in which everything is slow."""
    noise = np.random.default_rng(0).uniform(0.99, 1.01, (ROUNDS, len(of_ranks)))
    noise[3] *= 5.0
    return noise * np.array(of_ranks)


def measured(
    work_s: Sequence[float] = (1e-3,) * 4,
    link_s: Sequence[float] = (1e-3,) * 4,
    hosts: str = "aabb",
    store_s: float = 1e-4,
    last: dict[str, object] | None = None,
    **facts: object,
) -> Measured:
    """Ranks with work of a TFLOP, and links of their ring with messages of a megabyte.

    Some facts of all ranks, and of the last one, may be others.
    """
    size = len(hosts)
    ones, of_links = np.ones(size), seconds(link_s)
    of_ranks = [FACTS | {"host": host} | facts for host in hosts]
    of_ranks[-1] |= last or {}
    return Measured(
        of_ranks,
        [
            Timing("store", "store", "cpu", 0, 0.0, seconds(store_s * ones)),
            Timing("work", "matmul", "cuda", 0, 1e12, seconds(work_s)),
            Timing("work", "attention", "cuda", 0, 1e12, seconds(1e-3 * ones)),
            Timing("collective", "all-to-all", "cuda", 10**6, 75e4, seconds(1e-3 * ones)),
            *(
                Timing("link", "link", "cuda", num_bytes, num_bytes, own, (rank, (rank + 1) % size))
                for rank in range(size)
                for num_bytes, part in ((1000, 0.01), (10**6, 1.0))
                for own in (part * of_links[:, [rank]],)
            ),
        ],
    )


def found(given: Measured, profile: Any = None, tolerance: float = 0.1) -> list[Finding]:
    return judge(given, tolerance, 0.5, profile)


H100 = HardwareProfile(device="H100")
FAST = HardwareProfile(device="H200", matmul_flops_per_s=2e15, attention_flops_per_s=1e15)
NEAR = "rank 2 on b and rank 3 on b exchange*within a host"
WIRES = HardwareProfile(device="H200", intra_bytes_per_s=1.5e9, inter_bytes_per_s=2.5e9)


SLOW = (1e-3, 1e-3, 1.3e-3, 1e-3)
FOUND: list[tuple[Measured, HardwareProfile | None, str, list[tuple[int, ...]], str]] = [
    *((measured(), profile, "", [], "") for profile in (None, H100)),
    (measured(SLOW), None, "slow rank", [(2,)], "rank 2 on b takes 1.3*matmul*8 of 8 rounds; the"),
    # of two ranks the faster one is the median
    (measured((1.15e-3, 1e-3), (1e-3,) * 2, "aa"), None, "slow rank", [(0,)], "the limit is 1.10"),
    # links are compared with others of their kind
    (measured(link_s=(1e-3, FAR, 1e-3, FAR)), None, "", [], ""),
    (measured(link_s=(1e-3, FAR, 3e-3, FAR)), None, "slow link", [(2, 3)], NEAR),
    (measured(link_s=(1e-3, FAR, 1e-3, 3 * FAR)), None, "slow link", [(3, 0)], "between hosts"),
    (measured(link_s=(1e-3, 1.9e-3, 1e-3, 1e-3), hosts="aaaa"), None, "", [], ""),
    (measured(last={"memory_bytes": 40 * 10**9}), None, "memory", [(3,)], "40.0 GB*72.0 GB"),
    (measured(last={"memory_bytes": 79 * 10**9}), None, "", [], ""),
    (measured(last={"memory_bytes": None}), None, "", [], ""),
    (
        measured(),
        FAST,
        "profile",
        [(0, 1, 2, 3)],
        "ranks 0 to 3*H200 (given, not measured) has 2.00 PFLOP/s",
    ),
    (measured(), WIRES, "profile", [(1, 2), (3, 0)], "between hosts*1.25"),
    (measured(store_s=0.08), None, "store", [(0, 1, 2, 3)], "80.*ms; the limit is 50.0 ms"),
    (measured(timeout_s=0.05), None, "timeout", [(0, 1, 2, 3)], "short*all-to-all"),
    (measured(timeout_s=7200.0), None, "timeout", [(0, 1, 2, 3)], "long*3,600 s"),
    (measured((1.0,), (1.0,), "a"), None, "", [], ""),  # alone
]


@pytest.mark.parametrize(("given", "profile", "kind", "ranks", "words"), FOUND)
def test_findings(
    given: Measured,
    profile: HardwareProfile | None,
    kind: str,
    ranks: list[tuple[int, ...]],
    words: str,
) -> None:
    findings = found(given, profile)
    assert [one.ranks for one in findings] == ranks
    for one in findings:
        assert one.kind == kind and "\n" not in one.text
        assert "; the limit is " in one.text and ": " in one.text
        assert all(word in one.text for word in words.split("*")), one.text


def test_a_tolerance_that_is_kept() -> None:
    assert not found(measured(work_s=(1e-3, 1e-3, 1.3e-3, 1e-3)), tolerance=0.4)


@pytest.mark.parametrize(("num_slow", "is_found"), [(5, False), (6, True)])
def test_what_is_slow_in_some_rounds_is_noise(num_slow: int, is_found: bool) -> None:
    given, times = measured(), np.full((ROUNDS, 4), 1e-3)
    times[:num_slow, 1] = 1.2e-3
    store, matmul, *others = given.timings
    given = Measured(given.facts, [store, replace(matmul, seconds=times), *others])
    assert bool(found(given)) is is_found


@pytest.mark.parametrize("field", [name for name in FACTS if name not in ("host", "memory_bytes")])
def test_what_differs_is_named_with_its_ranks(field: str) -> None:
    facts = (FACTS, FACTS, FACTS | {field: "other"}, FACTS)
    (finding,) = doctor.differences(facts)
    assert finding.kind == "difference" and finding.ranks == (2,)
    assert f"{FACTS[field]} on ranks 0 to 1, 3; other on rank 2" in finding.text


def test_ratios_cancel_what_slows_all_ranks() -> None:
    ratios = doctor.to_median(seconds((1.0, 2.0, 3.0, 4.0)))
    for one in (ratios.mean(axis=0), ratios[3]):
        assert one == pytest.approx([0.5, 1.0, 1.5, 2.0], rel=0.05)


def test_ranks_are_named_in_runs() -> None:
    assert named([3]) == "rank 3"
    assert named([7, 0, 1, 2]) == "ranks 0 to 2, 7"
    assert named(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"


@pytest.mark.parametrize("num_ranks", range(1, 10))
def test_every_link_of_the_ring_is_in_one_matching(num_ranks: int) -> None:
    sets = doctor.matchings(num_ranks)
    links = [frozenset(link) for links in sets for link in links]
    ring = {frozenset({rank, (rank + 1) % num_ranks}) for rank in range(num_ranks)}
    assert set(links) == (ring if num_ranks > 1 else set()) and len(links) == len(set(links))
    assert all(len({rank for link in one for rank in link}) == 2 * len(one) for one in sets)


def test_a_report_begins_with_ranks_and_links_that_are_slow() -> None:
    times = np.full(70, 1e-3)
    times[[3, 69]] = 1.7e-3
    given = measured(work_s=times.tolist(), link_s=times.tolist(), hosts="a" * 70)
    report = doctor.plain_values(DoctorOptions(), given, found(given))
    assert report["ranks"][1] | FACTS == report["ranks"][1]
    shown = report_of(report)
    assert shown.answer == "2 findings."
    assert [note.startswith("found (slow rank): rank") for note in shown.notes[:2]] == [True] * 2
    ranks, _, calls, links = (part for part in shown.parts if isinstance(part, Rows))
    assert {row[0] for row in ranks.rows[:2]} == {3, 69}
    assert calls.rows[0][0] == "all-to-all"
    assert {row[0] for row in links.rows[:2]} == {"3 and 4", "69 and 0"}
