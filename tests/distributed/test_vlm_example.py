"""The example of a vision-language model, as a user runs it."""

import re
from pathlib import Path

import pytest

from tests.helpers.jobs import run_example

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
@pytest.mark.parametrize("is_compared", [False, pytest.param(True, marks=pytest.mark.stress)])
def test_the_example_trains_alike_without_balancing(is_compared: bool) -> None:
    balanced, said = train()
    losses = [loss for loss, _, _ in balanced]
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), losses
    assert all(after <= before for _, after, before in balanced)
    mean = sum(after for _, after, _ in balanced) / 20
    assert mean - 1 < 0.6 * (sum(before for _, _, before in balanced) / 20 - 1)
    assert not said.startswith("samples moved in 0 ")
    if not is_compared:
        return
    plain, said_plain = train("--no-balance")
    for (ours, _, before), (theirs, same, loaded) in zip(balanced, plain, strict=True):
        assert abs(ours - theirs) < 1e-4 * theirs
        assert before == same == loaded
    assert "samples moved in 0 of 20 steps" in said_plain
