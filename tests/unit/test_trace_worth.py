"""How sure the prediction of a trace is: its interval, and what the fit had to assume."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bascule.plan.costs import PolynomialCost
from bascule.plan.plan import plan_batch
from bascule.workload.traces import balancing_worth
from bascule.workload.traces.worth import RunLengths
from tests.helpers.cli import run
from tests.helpers.trace_cases import Run

TRUE = PolynomialCost(3e-9, 4e-5, 1e-4, overhead=0.01)


def noisy(seed: int, noise: float, num_steps: int = 12) -> tuple[Any, RunLengths]:
    """Steps of two ranks whose true cost is known, with noise in every time."""
    chance = np.random.default_rng(seed)
    drawn = np.maximum(chance.lognormal(7.5, 1.1, (num_steps, 2, 4)).astype(int), 1)
    lens = {(s, r): drawn[s, r].tolist() for s in range(num_steps) for r in range(2)}
    own = TRUE(drawn).sum(axis=2) + TRUE.overhead
    own = own * np.exp(noise * chance.standard_normal(own.shape))
    steps = np.arange(num_steps)
    parts = SimpleNamespace(
        num_missing=0, ranks=np.arange(2), steps=steps, own=own, step_seconds=own.max(axis=1)
    )
    return parts, RunLengths(lens, lens)


def true_speedup(cost: PolynomialCost, lens: RunLengths) -> float:
    """What the plans by a cost model make of the steps in truth."""
    seconds = []
    for step in range(len(lens.computed) // 2):
        plan = plan_batch([lens.loaded[step, rank] for rank in range(2)], "g1n2", cost)
        as_run = [float(TRUE(lens.computed[step, rank]).sum()) for rank in range(2)]
        balanced = np.bincount(plan.bag_of, TRUE(plan.seq_lens), 2)
        seconds.append([max(as_run) + TRUE.overhead, float(balanced.max()) + TRUE.overhead])
    return float(np.divide(*np.mean(seconds, axis=0)))


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_the_interval_holds_the_true_speed_up(noise: float) -> None:
    """Of 95 %: of 40 runs at least 34 (with chance 0.997); and noise makes it wider."""
    inside, widths = 0, []
    for seed in range(40):
        parts, lens = noisy(seed, noise)
        worth = balancing_worth(parts, lens)
        low, high = worth.speedup_range
        inside += low <= true_speedup(worth.cost, lens) <= high
        widths.append(high / low - 1)
    assert inside >= 34
    assert 0.1 * noise < np.median(widths) < noise


def test_what_the_fit_assumes_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All sequences are alike, so that no step tells attention from the rest."""
    lens = [[[1000] * n for n in step] for step in ((3, 2), (4, 1), (2, 2), (5, 1))]
    own = [[float(TRUE(rank).sum()) + TRUE.overhead for rank in step] for step in lens]
    folder = Run(own, lens=lens).write(tmp_path)
    code, out, _ = run(capsys, "trace", str(folder))
    out = " ".join(out.split())
    assert code == 0 and "(95% confidence)" in out
    assert "the steps do not show how much of the time is quadratic, linear" in out
    assert "attention to outweigh the rest from 24,576 tokens on" in out
    report = tmp_path / "a.html"
    code, out, _ = run(capsys, "trace", str(folder), "--json", "-", "--report", str(report))
    found = json.loads(out)["worth"]
    assert {"quadratic", "linear"} <= set(found["assumed"])
    low, high = found["speedup_range"]
    assert low <= found["speedup"] <= high
    page = report.read_text()
    assert f"{low:.2f}x to {high:.2f}x" in page and "the fit assumes it" in page
