"""The example of a vision-language model, as a user runs it; and the benchmark of its model."""

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.jobs import run_example
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.nightly

pytest.importorskip("transformers")
pytest.importorskip("skimage")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_vlm.py"


def train(*flags: str) -> tuple[list[tuple[float, float, float]], str]:
    """Loss, imbalance with and imbalance as loaded of each step on two ranks; and the summary."""
    done = run_example(EXAMPLE, *flags)
    assert done.returncode == 0, done.stderr
    line = re.compile(
        r"step \d+: loss ([\d.]+), imbalance .* ([\d.]+) instead of ([\d.]+), waited .* ms"
    )
    steps = [(float(a), float(b), float(c)) for a, b, c in line.findall(done.stdout)]
    return steps, done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("compares", [False, pytest.param(True, marks=pytest.mark.stress)])
def test_the_example_trains(compares: bool) -> None:
    balanced, said = train()
    losses = [loss for loss, _, _ in balanced]
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), losses
    assert all(after <= before for _, after, before in balanced)
    mean = sum(after for _, after, _ in balanced) / 20
    assert mean - 1 < 0.6 * (sum(before for _, _, before in balanced) / 20 - 1)
    assert not said.startswith("samples moved in 0 ")
    if not compares:
        return
    plain, said_plain = train("--no-balance")
    for (ours, _, before), (theirs, same, loaded) in zip(balanced, plain, strict=True):
        assert abs(ours - theirs) < 1e-4 * theirs
        assert before == same == loaded
    assert "samples moved in 0 of 20 steps" in said_plain


def quick_benchmark() -> dict[str, Any]:
    """What `benchmarks/run.py vlm --quick` finds, on ranks that are there."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    benchmark = import_module("vlm")
    with mock.patch.object(benchmark, "on_ranks", lambda function, *args: function(*args)):
        return benchmark.vlm(quick=True)["cases"]


@pytest.mark.stress
def test_all_ways_of_the_benchmark_have_the_gradients_of_samples_that_stay() -> None:
    one, other = run_ranks(quick_benchmark, 2)
    assert list(one) == list(other) == ["DDP", "FSDP2"]
    for case in (*one.values(), *other.values()):
        assert [way.split(",")[0] for way in case] == [
            "samples stay",
            *["one cost"] * 2,
            "two costs",
        ]
        apart = [way["difference"] for way in case.values()]
        assert apart[0] == 0.0 and all(0.0 < one < 1e-5 for one in apart[1:])
        assert all(way["language"] >= 1.0 and way["tower"] >= 1.0 for way in case.values())
