"""The examples, as a user starts them."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.jobs import run_example

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
TOY, FLUX, RESUMABLE = (
    ROOT / "examples" / f"train_{name}.py" for name in ("toy_dit", "flux_balanced", "resumable")
)


def steps_of(done: subprocess.CompletedProcess[str]) -> list[tuple[float, float, float]]:
    """Loss, imbalance with and imbalance without balancing of each step."""
    assert done.returncode == 0, done.stderr
    line = re.compile(r"step \d+: loss ([\d.]+), imbalance .* ([\d.]+) instead of ([\d.]+)")
    return [(float(a), float(b), float(c)) for a, b, c in line.findall(done.stdout)]


BOTH = ["g1n2", "g2n1"]


def test_a_run_goes_on_with_the_same_losses_on_other_ranks(tmp_path: Path) -> None:
    """Also over what a kill left of a checkpoint, and on other bags."""
    arguments = ["--steps", "4", "--save-every", "2", "--dtype", "float64", "--out", str(tmp_path)]

    def losses(num_ranks: int, *more: str) -> list[float]:
        done = run_example(RESUMABLE, *arguments, *more, num_ranks=num_ranks)
        assert done.returncode == 0, done.stderr
        return [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]

    whole = losses(2)
    assert len(whole) == 4 and whole[3] < 0.8 * whole[0]
    for num_ranks, bags in ((1, "g1n1"), (5, "g2n1+g1n3")):  # 4 samples a microbatch
        (tmp_path / "step-000004").rename(tmp_path / "step-000004.tmp")
        assert losses(num_ranks, "--topology", bags) == pytest.approx(whole[2:], rel=1e-10)
    assert losses(2) == []  # nothing is left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "num_steps", "topologies"),
    [
        *[(TOY, 20, BOTH[:1]), (FLUX, 15, BOTH[:1])],
        pytest.param(TOY, 20, BOTH, marks=pytest.mark.stress),
        pytest.param(FLUX, 15, BOTH, marks=pytest.mark.stress),
    ],
)
def test_an_example_trains_alike_on_all_bags(
    example: Path, num_steps: int, topologies: list[str]
) -> None:
    if example == FLUX:
        pytest.importorskip("diffusers")
    single, *shared = (steps_of(run_example(example, topology)) for topology in topologies)
    losses = [loss for loss, _, _ in single]
    assert len(losses) == num_steps
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses
    assert all(after < before for _, after, before in single)
    assert example == TOY or all(after < 1.3 < before for _, after, before in single)
    for other in shared:
        for (ours, after, _), (theirs, even, _) in zip(single, other, strict=True):
            assert abs(ours - theirs) < 1e-3 * ours
            assert even == 1.0 <= after
