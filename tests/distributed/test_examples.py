"""The examples, as a user starts them."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.jobs import run_example

ROOT = Path(__file__).parents[2]
TOY, FLUX = (ROOT / "examples" / name for name in ("train_toy_dit.py", "train_flux_balanced.py"))


def steps_of(done: subprocess.CompletedProcess[str]) -> list[tuple[float, float, float]]:
    """Loss, imbalance with and imbalance without balancing of each step."""
    assert done.returncode == 0, done.stderr
    line = re.compile(r"step \d+: loss ([\d.]+), imbalance .* ([\d.]+) instead of ([\d.]+)")
    return [(float(a), float(b), float(c)) for a, b, c in line.findall(done.stdout)]


@pytest.mark.slow
def test_the_example_trains_alike_on_all_bags() -> None:
    single, shared = (steps_of(run_example(TOY, topology)) for topology in ("g1n2", "g2n1"))
    losses = [loss for loss, _, _ in single]
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses
    assert all(after < before for _, after, before in single)
    for (ours, after, _), (theirs, even, _) in zip(single, shared, strict=True):
        assert abs(ours - theirs) < 1e-3 * ours
        assert even == 1.0 <= after


@pytest.mark.slow
def test_flux_trains_alike_on_all_bags() -> None:
    pytest.importorskip("diffusers")
    single, shared = (steps_of(run_example(FLUX, topology)) for topology in ("g1n2", "g2n1"))
    losses = [loss for loss, _, _ in single]
    assert len(losses) == 15
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses
    assert all(after < 1.3 < before for _, after, before in single)
    for (ours, _, _), (theirs, even, _) in zip(single, shared, strict=True):
        assert abs(ours - theirs) < 1e-3 * ours
        assert even == 1.0
