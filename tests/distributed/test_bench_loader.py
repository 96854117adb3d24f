"""`bascule bench --loader`, as a user starts it: whole samples change ranks, the maths stays."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bascule.bench.comparison import Comparison, join_samples, split_samples
from bascule.bench.options import BenchOptions
from bascule.train.streams import SampleBatch, SampleStream, SyntheticStream
from tests.helpers.bench import benched
from tests.helpers.cli import run
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.nightly

LONG_AND_SHORT = "g1b4i128f1s0,g1b3i256f1s0"


def stressed(*values: Any) -> Any:
    """A case of another combination of the same parts, for `make stress`."""
    return pytest.param(*values, marks=pytest.mark.stress)


def bench_loader(folder: Path, *arguments: str) -> Any:
    return benched(folder, "--loader", "--gamma", "0.5", *arguments)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("data", "options", "tolerance"),
    [
        stressed(LONG_AND_SHORT, ("--accumulate", "2"), 1e-5),
        (LONG_AND_SHORT, ("--dtype", "float64", "--checkpoint", "--accumulate", "2"), 1e-11),
        stressed(LONG_AND_SHORT, ("--dtype", "bfloat16"), 3e-2),
        stressed("g1b0i64f1s0,g1b5i128f1s0", (), 1e-5),
        ("g1b0i64f1s0,g1b1i128f1s0", (), 1e-5),  # a rank has nothing to train on
    ],
)
def test_samples_move_and_the_maths_stays(
    tmp_path: Path, data: str, options: tuple[str, ...], tolerance: float
) -> None:
    done, result, steps = bench_loader(tmp_path, "--data", data, "--steps", "4", *options)
    assert len(steps) == 4
    for step in steps:
        difference = abs(step["loss_balanced"] - step["loss_unbalanced"])
        assert difference <= tolerance * step["loss_unbalanced"]
        exchange = step["exchange"]
        assert exchange["exposed_s"] <= exchange["exchange_s"]
        assert step["plan"]["makespan"] <= step["plan"]["makespan_unbalanced"]
    # Both arms have the same weights in the first measured step, up to one step of training.
    assert result["grad_difference_first"] < 10 * tolerance
    loader = result["loader"]
    assert loader["accumulate"] == (2 if "--accumulate" in options else 1)
    assert result["options"]["loader"] is True
    assert sum(loader["reasons"].values()) == 4
    assert 0.0 <= loader["exposed_share"] < 1.0
    assert "exposed" in done.stdout and "samples moved in" in done.stdout
    if "b1" in data:  # one sample for two ranks
        assert loader["applied_steps"] == 0
        assert "warning: in 4 of 4 steps one sequence alone" in done.stdout
        return
    assert loader["applied_steps"] >= 3
    assert result["sent_bytes_per_step"] > 1000
    assert result["balanced"]["imbalance"] < result["unbalanced"]["imbalance"]
    assert result["predicted_ratio"] > 1.0
    assert sum(step["plan"]["moved_tokens"] > 0 for step in steps) >= 3


def test_photos_train_alike(photos: Path, tmp_path: Path) -> None:
    arguments = ("--photos", str(photos), "--batch-size", "3", "--steps", "16", "--lr", "0.003")
    _, result, steps = bench_loader(tmp_path, *arguments)
    assert result["loader"]["applied_steps"] > 8
    assert result["loss_difference"] < 1e-4
    assert result["grad_difference_first"] < 1e-5
    losses = [step["loss_balanced"] for step in steps]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4]), losses
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--loader", "--topologies", "g2n1"), "--topologies g2n1"),
        (
            ("--loader", "--topologies", "g1n2", "g2n1"),
            "--topologies g1n2 g2n1: --loader moves whole",
        ),
        (("--accumulate", "2"), "--accumulate 2: only with --loader"),
        (("--loader", "--data", "g2b0i64f1s0"), "no rank loads a sample"),
    ],
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    """Before any rank starts."""
    arguments = ("bench", "--out", str(tmp_path), "--data", LONG_AND_SHORT, *options)
    code, _, err = run(capsys, *arguments)
    assert code == 2 and said in err and err.count("\n") == 1


class Failing:
    """A stream that one rank cannot read from some step on."""

    def __init__(self, stream: SampleStream, first: int) -> None:
        self.in_channels, self.text_dim = stream.in_channels, stream.text_dim
        self.vec_dim = stream.vec_dim
        self._stream, self._first = stream, first

    def batch(self, step: int) -> SampleBatch:
        if step >= self._first:
            raise OSError("the disk is gone")
        return self._stream.batch(step)


def fail(first: int) -> tuple[int, str]:
    options = BenchOptions(
        data=LONG_AND_SHORT,
        loader=True,
        gamma=0.5,
        d_model=32,
        num_heads=2,
        num_single=1,
        warmup=0,
        steps=5,
        timeout_s=100.0,
    )
    comparison = Comparison(options, torch.device("cpu"))
    samples = comparison.samples
    if samples.group.rank == 1:
        samples.stream = Failing(samples.stream, first)
    records = []
    try:
        records.extend(comparison.run())
    except Exception as error:
        return len(records), f"{type(error).__name__}: {error}"
    return len(records), ""


@pytest.mark.parametrize("first", [0, 2])
def test_a_rank_that_cannot_load_ends_all_ranks(first: int) -> None:
    for _, said in run_ranks(fail, 2, first):
        assert "rank 1" in said and "the disk is gone" in said
        assert f"step {first + 1}, loading a batch" in said


def test_samples_survive_being_taken_apart() -> None:
    batch = SyntheticStream("g1b3i64f1s0,g1b2i128f1s0", rank=1, world_size=2).batch(3)
    again = join_samples(split_samples(batch))
    for name in ("image", "text", "is_image", "pos", "pooled", "sample_ids"):
        assert torch.equal(getattr(batch, name), getattr(again, name)), name
    assert (again.seq_lens, again.image_lens) == (batch.seq_lens, batch.image_lens)
    turned = join_samples(split_samples(batch)[::-1])
    assert turned.seq_lens == batch.seq_lens[::-1]
