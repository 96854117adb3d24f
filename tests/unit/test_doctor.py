"""What `bascule doctor` finds in invented measurements, and what it refuses; without ranks."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
from rich.console import Console

from bascule.arrays import Floats
from bascule.bench.checkup import Report
from bascule.bench.doctor_options import DoctorOptions
from bascule.bench.findings import Finding, differences, judge, named
from bascule.bench.measured import LinkTiming, Measured, RankFacts, Timing, to_median
from bascule.bench.probes import matchings
from bascule.cli.doctor import show
from bascule.plan.machine import HardwareProfile
from tests.helpers.cli import run

ROUNDS = 8
FACTS = RankFacts(
    host="a",
    device="H100",
    memory_bytes=80 * 10**9,
    num_threads=8,
    python="3.12.1",
    torch="2.13.0",
    bascule="0.1.0",
    numpy="2.4.0",
    cuda="12.9",
    nccl="2.27.3",
    backend="cpu:gloo,cuda:nccl",
    timeout_s=120.0,
)
OPTIONS = DoctorOptions(rounds=ROUNDS)


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
) -> Measured:
    """Ranks with work of a TFLOP, and the links of their ring with messages of a megabyte."""
    size = len(hosts)
    ones = np.ones(size)
    facts = tuple(replace(FACTS, host=host) for host in hosts)
    of_links = seconds(link_s)
    links = [
        LinkTiming((rank, (rank + 1) % size), "cuda", num_bytes, scale * of_links[:, rank])
        for rank in range(size)
        for num_bytes, scale in ((1000, 0.01), (10**6, 1.0))
    ]
    return Measured(
        facts,
        Timing("store", "cpu", 0, 0.0, seconds(store_s * ones)),
        (
            Timing("matmul", "cuda", 0, 1e12, seconds(work_s)),
            Timing("attention", "cuda", 0, 1e12, seconds(1e-3 * ones)),
        ),
        (Timing("all-to-all", "cuda", 10**6, 75e4, seconds(1e-3 * ones)),),
        tuple(links),
    )


def only(found: Sequence[Finding], kind: str) -> Finding:
    (one,) = found
    assert one.kind == kind
    assert "; the limit is" in one.text or "the limit of" in one.text
    assert ": " in one.text and "\n" not in one.text
    return one


def test_nothing_is_found_in_ranks_that_are_alike() -> None:
    assert judge(measured(), OPTIONS) == ()
    assert judge(measured(), OPTIONS, HardwareProfile(device="H100")) == ()


def test_a_slow_rank_is_named() -> None:
    found = only(judge(measured(work_s=(1e-3, 1e-3, 1.3e-3, 1e-3)), OPTIONS), "slow rank")
    assert found.ranks == (2,)
    assert "rank 2 on b takes 1.3" in found.text and "matmul" in found.text
    assert "8 of 8 rounds" in found.text and "limit of 1.10" in found.text
    assert judge(measured(work_s=(1e-3, 1e-3, 1.3e-3, 1e-3)), replace(OPTIONS, tolerance=0.4)) == ()


def test_of_two_ranks_the_faster_one_is_the_median() -> None:
    two = measured(work_s=(1.15e-3, 1e-3), link_s=(1e-3,) * 2, hosts="aa")
    assert only(judge(two, OPTIONS), "slow rank").ranks == (0,)


@pytest.mark.parametrize(("num_slow", "is_found"), [(5, False), (6, True)])
def test_what_is_slow_in_some_rounds_is_noise(num_slow: int, is_found: bool) -> None:
    given = measured()
    times = np.full((ROUNDS, 4), 1e-3)
    times[:num_slow, 1] = 1.2e-3
    work = (replace(given.work[0], seconds=times),)
    assert bool(judge(replace(given, work=work), OPTIONS)) is is_found


def test_a_slow_link_is_compared_with_links_of_its_kind() -> None:
    far = 8e-3  # links between hosts are slower, which is no finding
    assert judge(measured(link_s=(1e-3, far, 1e-3, far)), OPTIONS) == ()
    found = only(judge(measured(link_s=(1e-3, far, 3e-3, far)), OPTIONS), "slow link")
    assert found.ranks == (2, 3)
    assert "rank 2 on b and rank 3 on b exchange" in found.text and "within a host" in found.text
    found = only(judge(measured(link_s=(1e-3, far, 1e-3, 3 * far)), OPTIONS), "slow link")
    assert found.ranks == (3, 0) and "between hosts" in found.text
    assert judge(measured(link_s=(1e-3, 1.9e-3, 1e-3, 1e-3), hosts="aaaa"), OPTIONS) == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("python", "3.11.2"),
        ("torch", "2.12.0"),
        ("bascule", "0.0.9"),
        ("numpy", "2.2.0"),
        ("cuda", "none"),
        ("nccl", "2.26.2"),
        ("backend", "gloo"),
        ("device", "A100"),
        ("num_threads", 4),
        ("timeout_s", 600.0),
    ],
)
def test_what_differs_is_named_with_its_ranks(field: str, value: object) -> None:
    facts = (FACTS, FACTS, replace(FACTS, **{field: value}), FACTS)
    (found,) = differences(facts)
    assert found.kind == "difference" and found.ranks == (2,)
    assert f"{getattr(FACTS, field)} on ranks 0 to 1, 3" in found.text
    assert f"{value} on rank 2" in found.text


def test_less_memory_is_found_and_a_little_less_is_not() -> None:
    given = measured()
    for size, is_found in ((40 * 10**9, True), (79 * 10**9, False), (None, False)):
        facts = (*given.facts[:3], replace(given.facts[3], memory_bytes=size))
        found = judge(replace(given, facts=facts), OPTIONS)
        assert [one.kind for one in found] == ["memory"] * is_found
        assert all(one.ranks == (3,) and "40.0 GB" in one.text for one in found)


def test_a_profile_that_ranks_or_links_do_not_reach() -> None:
    fast = HardwareProfile(device="H200", matmul_flops_per_s=2e15, attention_flops_per_s=1e15)
    found = only(judge(measured(), OPTIONS, fast), "profile")
    assert found.ranks == (0, 1, 2, 3)
    assert "ranks 0 to 3" in found.text and "H200 (given, not measured) says 2000" in found.text
    wires = HardwareProfile(device="H200", intra_bytes_per_s=1.5e9, inter_bytes_per_s=2.5e9)
    far = judge(measured(), OPTIONS, wires)
    assert [one.ranks for one in far] == [(1, 2), (3, 0)]
    assert all(one.kind == "profile" and "between hosts" in one.text for one in far)


def test_the_store_and_the_timeout() -> None:
    assert only(judge(measured(store_s=0.08), OPTIONS), "store").ranks == (0, 1, 2, 3)
    for timeout_s, said in ((0.05, "short"), (7200.0, "long")):
        given = measured()
        facts = tuple(replace(one, timeout_s=timeout_s) for one in given.facts)
        assert said in only(judge(replace(given, facts=facts), OPTIONS), "timeout").text


def test_one_rank_has_nobody_to_be_compared_with() -> None:
    given = measured(work_s=(1.0,), link_s=(1.0,), hosts="a")
    assert judge(replace(given, links=(), collectives=()), OPTIONS) == ()


def test_ratios_cancel_what_slows_all_ranks() -> None:
    ratios = to_median(seconds((1.0, 2.0, 3.0, 4.0)))
    assert ratios.mean(axis=0) == pytest.approx([0.5, 1.0, 1.5, 2.0], rel=0.05)
    assert ratios[3] == pytest.approx([0.5, 1.0, 1.5, 2.0], rel=0.05)


def test_ranks_are_named_in_runs() -> None:
    assert named([3]) == "rank 3"
    assert named([7, 0, 1, 2]) == "ranks 0 to 2, 7"
    assert named(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"


@pytest.mark.parametrize("num_ranks", range(1, 10))
def test_every_link_of_the_ring_is_in_one_matching(num_ranks: int) -> None:
    sets = matchings(num_ranks)
    links = [frozenset(link) for links in sets for link in links]
    wanted = {frozenset({rank, (rank + 1) % num_ranks}) for rank in range(num_ranks)}
    assert set(links) == (wanted if num_ranks > 1 else set()) and len(links) == len(set(links))
    assert all(len({rank for link in one for rank in link}) == 2 * len(one) for one in sets)


def test_a_report_is_json_and_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    given = measured(work_s=(1e-3, 1e-3, 1.3e-3, 1e-3))
    report = Report(OPTIONS, given, judge(given, OPTIONS)).to_dict()
    assert json.loads(json.dumps(report)) == report | {
        "findings": [one | {"ranks": list(one["ranks"])} for one in report["findings"]]
    }
    assert report["ranks"][1] | asdict(FACTS) == report["ranks"][1]
    show(Console(width=120), report)
    out = capsys.readouterr().out
    assert "found (slow rank): rank 2 on b" in out and "H100" in out and "all-to-all" in out


def test_of_many_ranks_and_links_the_slow_ones_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = np.full(70, 1e-3)
    times[[3, 69]] = 1.7e-3
    given = measured(work_s=times.tolist(), link_s=times.tolist(), hosts="a" * 70)
    show(Console(width=120), Report(OPTIONS, given, judge(given, OPTIONS)).to_dict())
    out = capsys.readouterr().out
    assert "70 ranks, 6 fast ones left out" in out and "neighbours, 6 fast ones left out" in out
    assert "1.7" in out and "69 and 0" in out and "3 and 4" in out
    assert out.count("found (slow rank)") == 2 and out.count("found (slow link)") == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ranks", "0"), "--ranks 0"),
        (("--ranks", "999999999"), "--ranks"),
        (("--rounds", "0"), "--rounds 0"),
        (("--mib", "0"), "--mib 0"),
        (("--mib", "100000"), "at most 1024"),
        (("--tolerance", "-1"), "--tolerance -1"),
        (("--tolerance", "nan"), "--tolerance nan"),
        (("--link-tolerance", "1"), "--link-tolerance 1"),
        (("--timeout-s", "0"), "--timeout-s 0"),
        (("--profile", "/nonexistent/profile.json"), "/nonexistent/profile.json"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, error = run(capsys, "doctor", *arguments)
    assert code == 2 and not out
    assert said in error and error.startswith("bascule: ") and "\n" not in error.strip()


def test_a_number_of_ranks_that_the_job_does_not_have() -> None:
    with pytest.raises(ValueError, match="--ranks 3: the launcher of this job started 2 ranks"):
        DoctorOptions(ranks=3).check(2)
    DoctorOptions(ranks=2).check(2)
