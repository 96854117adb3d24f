"""`bascule train` on one CUDA device: times by events, and the same curve after a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bascule.train.options import TrainOptions
from bascule.train.training_run import TrainingRun
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: NOT TESTED"),
]


def train(folder: Path, num_steps: int, resume: bool) -> list[dict[str, Any]]:
    options = TrainOptions(
        data="g1b4i256f1s0,g1b1i512f1s0",
        dtype="bfloat16",
        out=folder,
        steps=num_steps,
        resume=resume,
        accumulate=2,
    )
    records: list[dict[str, Any]] = []
    TrainingRun(options, torch.device("cuda", 0), lambda: False).run(records.append)
    return records


def test_a_run_on_cuda(tmp_path: Path) -> None:
    (whole,) = run_ranks(train, 1, tmp_path / "whole", 4, False, backend="cpu:gloo,cuda:nccl")
    run_ranks(train, 1, tmp_path / "cut", 2, False, backend="cpu:gloo,cuda:nccl")
    (rest,) = run_ranks(train, 1, tmp_path / "cut", 4, True, backend="cpu:gloo,cuda:nccl")
    assert [one["loss"] for one in rest] == pytest.approx(
        [one["loss"] for one in whole[2:]], rel=1e-3
    )
    for one in json.loads(json.dumps(whole)):
        seconds = one["max_s"]
        assert 0 < seconds["attend"] < seconds["forward"] < seconds["total"]
        assert 0 < seconds["backward"] < seconds["total"]
