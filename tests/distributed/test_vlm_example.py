"""The example of a vision-language model, as a user runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("skimage")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_vlm.py"


def run_example(*flags: str) -> tuple[list[tuple[float, float, float]], str]:
    """Loss, imbalance with and imbalance as loaded of each step on two ranks; and the summary."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(EXAMPLE), *flags],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    line = re.compile(
        r"step \d+: loss ([\d.]+), imbalance .* ([\d.]+) instead of ([\d.]+), waited .* ms"
    )
    steps = [(float(a), float(b), float(c)) for a, b, c in line.findall(done.stdout)]
    return steps, done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_example_trains_alike_without_balancing() -> None:
    balanced, said = run_example()
    plain, said_plain = run_example("--no-balance")
    losses = [loss for loss, _, _ in balanced]
    assert len(losses) == len(plain) == 20
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), losses
    for (ours, after, before), (theirs, same, loaded) in zip(balanced, plain, strict=True):
        assert abs(ours - theirs) < 1e-4 * theirs
        assert before == same == loaded
        assert after <= before
    mean = sum(after for _, after, _ in balanced) / 20
    assert mean - 1 < 0.6 * (sum(before for _, _, before in balanced) / 20 - 1)
    assert "samples moved in 0 of 20 steps" in said_plain
    assert not said.startswith("samples moved in 0 ")
