"""`bascule simulate-requests`: workloads, figures against those by hand, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bascule.cli.simulate_requests import report_of
from bascule.machine.cluster import HardwareProfile
from bascule.sim.requests import BOUND, Row
from bascule.workload.requests import Recorded, predicted
from bascule.workload.tokens import model_shape
from benchmarks.published import NAMED, qwen_h20, synthetic_wan
from tests.helpers.cli import Console, run
from tests.helpers.pages import ROOT

LINES = [
    {"width": 512, "height": 512, "steps": 20, "kind": "small", "deadline_s": 4},
    {"width": 1024, "height": 1024, "steps": 10, "arrival_s": 1.0},
]


def simulated(capsys: Console, *words: str) -> dict[str, list[dict[str, float]]]:
    code, out, err = run(capsys, "simulate-requests", *words, "--json", "-")
    assert code == 0, err
    return json.loads(out)


def test_requests_of_a_file_by_hand(capsys: Console, tmp_path: Path) -> None:
    """Steps of 1,024 tokens, and of 4,096, on one rank."""
    rates = {"matmul_flops_per_s": 1.2e14, "attention_flops_per_s": 1.2e14}
    machine = replace(HardwareProfile.load("h100-datasheet"), **rates)
    step_s = predicted(machine, replace(model_shape("flux.1").cost, gamma=machine.gamma))
    path = tmp_path / "arrivals.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    words = "--arrivals", str(path), "--tflops", "120", "--ranks", "1", "--rates", "1"
    one = simulated(capsys, *words, "--policies", "fifo", "--seeds", "1")
    balanced, fifo, bound = one["rows"]
    small, large = 20 * step_s(1024)[1], 10 * step_s(4096)[1]
    assert balanced["policy"] == "balanced"  # what the server would do is always there
    assert fifo["mean_s"] == pytest.approx((small + small + large - 1) / 2)
    assert fifo["slowdown"] == pytest.approx((small + large - 1) / large)
    assert fifo["on_time"] == bound["on_time"] == 1.0  # the second within three times its own
    assert fifo["on_time of 1024x1024"] == fifo["on_time of small"] == 1.0
    assert fifo["rank_s"] == pytest.approx((small + large) / 2)
    assert fifo["idle"] == pytest.approx(0.0) and fifo["degree of small"] == 1
    # At twice the speed the second one waits for half a second more.
    twice = simulated(capsys, *words[:-1], "2", "--policies", "fifo", "--slo", "0.5")["rows"][1]
    assert twice["mean_s"] == pytest.approx((small + small + large - 0.5) / 2)
    assert twice["on_time of small"] == 0.0


@pytest.mark.parametrize("name", NAMED)
def test_named_workloads_have_their_load(name: str) -> None:
    mix = NAMED[name]()
    works, lasts = list[float](), list[float]()
    for seed in range(60):
        requests = mix.draw(mix.scale(0.8, 8), seed)
        works.append(sum(one.work_s for one in requests))
        whole = sum(seconds for seconds, _, _ in mix.phases)
        lasts.append(whole if mix.most is None else requests[-1].arrival_s)
    assert mix.draw(1.0, 0) == mix.draw(1.0, 0)
    assert sum(works) / sum(lasts) / 8 == pytest.approx(0.8, rel=0.05)
    recorded = Recorded(mix.draw(1.0, 0))
    again = recorded.draw(recorded.scale(0.5, 8), 1, slo=2.0)
    lasts_s = again[-1].arrival_s - again[0].arrival_s
    assert sum(one.work_s for one in again) == pytest.approx(0.5 * 8 * lasts_s)
    waits = [one.deadline_s - one.arrival_s for one in recorded.requests]
    twice = [one.deadline_s - one.arrival_s for one in again]
    assert np.allclose(twice, 2 * np.array(waits)) or np.inf in waits


def lines_of(results: dict[str, Any]) -> list[str]:
    """Lines of the tables in docs/requests.md."""
    four = {(row["load"], row["policy"]): row for row in results["random4"]}
    lines = []
    for load in (0.4, 0.5):
        rows = [four[load, policy] for policy in ("least-work", "sjf", "balanced")]
        cells = [f"{x['p95_s']:.0f} / {x['p99_s']:.0f} / {x['on_time']:.1%}" for x in rows]
        lines.append(f"| {load:g} | {' | '.join(cells)} | {four[load, BOUND]['on_time']:.1%} |")
    for row in results["gf-dit-qwen"]:
        if row["load"] == 0.8 and row["policy"] in QUOTED:
            kinds = [f"{row[x]:.0%}" for x in map("on_time of {}".format, "SML") if x in row]
            shares = f"{row['on_time']:.1%} | {' / '.join(kinds)} | {row['mean_s']:.0f}"
            lines.append(f"| `{row['policy']}` | {shares} |")
    return lines


QUOTED = "tetriserve", "pause", "balanced", BOUND


def test_the_page_quotes_the_results() -> None:
    page = (ROOT / "docs" / "requests.md").read_text()
    results = json.loads((ROOT / "benchmarks" / "results" / "requests.json").read_text())
    assert [line for line in lines_of(results) if line not in page.splitlines()] == []
    for policy in ("balanced", "tetriserve"):
        for name in ("tetriserve-uniform", "tetriserve-skewed"):
            (row,) = (x for x in results[name] if (x["load"], x["policy"]) == (0.4, policy))
            assert f"{row['on_time']:.1%}" in page
    speed = results["speed"]
    assert f"in {speed['load 0.8']:.0f} seconds" in " ".join(page.split())
    assert f"{speed['decision_ms']:.1f} ms" in page and speed["requests"] == 100_000


def test_the_page_quotes_the_policies() -> None:
    page = " ".join((ROOT / "docs" / "requests.md").read_text().split())
    results = json.loads((ROOT / "benchmarks" / "results" / "policies.json").read_text())
    sets = [results["dominated"][name] for name in ("tried", "held_out")]
    totals = [each["settings"] for each in sets]
    lost = {name: [len(each[name]) for each in sets] for name in ("balanced", "quick", "advised")}
    assert all(f"{lost['balanced'][k]} of {totals[k]}" in page for k in (0, 1))
    assert "against `quick` in {} and {}.".format(*lost["quick"]) in page
    assert "one has it in {} and {}:".format(*lost["advised"]) in page
    for name, words in (("tail-aware", "order"), ("declared-cost", "cost"), ("balanced", "")):
        (row,) = (x for x in results["random4"] if (x["load"], x["policy"]) == (0.4, name))
        words = words or "`balanced`"
        assert f"{words} {row['p95_s']:.0f} / {row['p99_s']:.0f}" in page
    cuts = [np.mean([row[key] for row in results["llm_d"]]) for key in ("cut", "published_cut")]
    assert "P99 is {:.0f} %, published {:.0f} %".format(*(100 * float(cut) for cut in cuts)) in page
    rows = results["llm_d"]
    off = [abs(row["cost_s"] / row["published_cost_s"] - 1) for row in rows]
    points = max(abs(row["cut"] - row["published_cut"]) for row in rows)
    assert max(off) <= 0.04 and f"one is {100 * points:.0f} points off" in page


def test_costs_are_those_published() -> None:
    assert [round(1e3 * s) for s in qwen_h20(1024).values()] == [155, 161, 172]
    assert [round(1e3 * s) for s in qwen_h20(9216).values()] == [1557, 880, 464]
    assert synthetic_wan(75_600)[1] == pytest.approx(10.0, rel=1e-3)


def test_what_batches_are_worth(capsys: Console, tmp_path: Path) -> None:
    """Seconds of two are those of one: twice the requests; three are not given, but lie between."""
    words = "--mix 512x512@4 --requests 60 --ranks 2 --seeds 1 --degrees 1".split()
    curve = "--batch-s", "512x512=1,1,4:2"
    one = simulated(capsys, *words, *curve, "--rates", "0.8")
    assert one["batch_worth"] == 2.0 and "without_batches" in one
    ours, alone = one["rows"][0], one["without_batches"][0]
    assert ours["mean_s"] < 4.7 < 10 < alone["mean_s"]
    page = tmp_path / "page.html"
    more = "--deadline", "2", "--loads", "0.5", "1", "--report", str(page), "--passes", "2"
    code, out, err = run(capsys, "simulate-requests", *words, *curve, *more)
    assert code == 0 and "Batches are worth 2.00x the requests per second at most; here" in out, err
    assert "At load 1, bascule serve as it is (policy balanced) finishes" in out
    assert page.read_text().count('class="chart"') == 2
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(LINES[0]))
    words = "--arrivals", str(path), "--degrees", "1", "--rates", "1", "--batch-s", "512x512=1,2,3"
    one = simulated(capsys, *words)
    assert one["batch_worth"] == 1.0 and one["rows"][0]["mean_s"] == 20.0
    assert "batch_worth" not in simulated(capsys, *words[:-2])


@pytest.mark.parametrize(
    ("on_time", "mean_s", "best", "said"),
    [
        ((0.9, 0.86), 10, "sjf", "--policy sjf: on time 88.0 instead of 80.0 %"),
        ((0.9, 0.86), 30, "sjf", "but mean 30.0 instead of 10.0 s"),
        ((0.8, 0.8), 9, "sjf", "sjf: mean 9.00 instead of 10.0 s."),
        ((0.808, 0.808), 10, "balanced", "No other policy here"),  # below a request in 100
        ((0.79, 0.95), 10, "balanced", "No other policy here"),  # one draw says otherwise
    ],
)
def test_another_policy_is_advised_beyond_noise_alone(
    on_time: tuple[float, float], mean_s: float, best: str, said: str
) -> None:
    def row(name: str, shares: tuple[float, float], seconds: float) -> Row:
        figures = dict.fromkeys(("mean_s", "p95_s", "p99_s", "rank_s"), seconds) | {"p95_s": 20.0}
        return Row(1, name, [figures | {"on_time": share, "p99_s": 40.0} for share in shares])

    rows = [row("balanced", (0.8, 0.8), 10), row("sjf", on_time, mean_s), row(BOUND, (1, 1), 1)]
    report = report_of(rows, "", 8, "load")
    assert said in report.answer and report.facts[0].value == best


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give one of --arrivals and --mix"),
        ("--mix 64x64@5 --arrivals a", "give one of --arrivals and --mix"),
        ("--mix 64x64@5 --policies sjf:16", "the degree of all requests can be 1, 2, 4, 8"),
        ("--mix 64x64@5 --policies srpt", "policy 'srpt' is not known: give one of fifo, sjf"),
        ("--mix 64x64@5 --policies balanced:2", "the first three may have a degree"),
        ("--mix 64x64@5 --degrees 3", "a request can run on 1, 2, 4, 8 ranks; --ranks is 8"),
        ("--mix 64x64@5 --loads 0", "--loads"),
        ("--mix 64x64@5 --loads", "--loads: give one at least"),
        ("--mix 512@20", "'512@20': write a size, steps and a share"),
        ("--mix 512x512@20=0", "all shares are 0"),
        ("--mix 8x8@20", "8x8: has no token"),
        ("--mix 64x64@5 --batch-s 512x512=1,2", "--batch-s: no request has the size 512x512"),
        ("--mix 64x64@5 --batch-s 64x64=2:1", "as 512x512=0.167,0.183,4:0.240"),
        ("--mix 64x64@5 --batch-s 64x64=1,4:2,3:1", "--batch-s 64x64=1,4:2,3:1: write a size"),
        ("--mix 64x64@5 --batch-s 64x64=1,a", "--batch-s 64x64=1,a: write a size"),
        ("--mix 64x64@5 --batch-s 64=1", "--batch-s 64=1: write a size"),
        ("--mix 64x64@5 --batch-s 64x64=1,0", "--batch-s 64x64 0.0: must be finite"),
        ("--arrivals no.jsonl", "cannot read no.jsonl"),
    ],
)
def test_what_the_command_refuses(capsys: Console, words: str, message: str) -> None:
    code, _, err = run(capsys, "simulate-requests", *words.split())
    assert code == 2 and message in err


def test_lines_that_are_refused(capsys: Console, tmp_path: Path) -> None:
    for line, message in (
        ("[]", "line 1: a request needs width, height and steps"),
        ('{"width": 64, "height": 64, "steps": 2, "size": 1}', "and kind, not width"),
        ('{"width": 64, "height": 64, "steps": 0}', "line 1: steps is 0"),
        ('{"width": 64, "height": "a", "steps": 1}', "line 1: height is 'a'"),
        ('{"width": 64, "height": 64, "steps": 1, "arrival_s": -1}', "line 1: arrival_s is -1"),
        ("", "has no requests"),
        ('{"width": 64, "height": 64, "steps": 1}', "all requests arrive at once, so"),
    ):
        path = tmp_path / "a.jsonl"
        path.write_text(line)
        code, _, err = run(capsys, "simulate-requests", "--arrivals", str(path))
        assert code == 2 and message in err
