"""Traces as Perfetto takes them: real ones of torch, ours of them, and those of a simulation."""

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from bascule.workload.traces import Segment, write_steps
from tests.helpers.cli import run
from tests.helpers.trace_format import check_format


def profiled(folder: Path) -> Path:
    """Three steps of training in this process, by torch.profiler."""
    folder.mkdir()
    weight = torch.randn(16, 16, requires_grad=True)
    plan = schedule(wait=0, warmup=1, active=3, repeat=1)

    def save(profiler: profile) -> None:
        profiler.export_chrome_trace(str(folder / "rank0.json"))

    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=save) as profiler:
        for step in range(4):
            with record_function(f"bascule::lens [{16 + step}]"):
                (torch.randn(16 + step, 16) @ weight).square().sum().backward()
            profiler.step()
    return folder


def test_a_real_trace_and_what_is_written_of_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = profiled(tmp_path / "real")
    counts = check_format(folder / "rank0.json", is_ours=False)
    assert counts["X"] > 20 and counts["s"] == counts["f"] > 0  # forward to backward
    code, _, err = run(capsys, "trace", str(folder), "--out", str(tmp_path / "ours"))
    assert code == 0, err
    assert check_format(tmp_path / "ours" / "rank0.json", is_ours=True)["X"] > 3


def test_a_simulated_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--steps", "3", "--accumulate", "2", "--topologies", "none", "g2n2", "loader")
    data = ("--data", "g3b3i256f1s0,g1b1i1024f1s0", "--traces", str(tmp_path))
    code, _, err = run(capsys, "simulate", *data, *options)
    assert code == 0, err
    files = sorted(tmp_path.glob("*/*.json"))
    assert len(files) == 12
    for file in files:
        assert check_format(file, is_ours=True)["X"] >= 3 * 3


def test_collectives_at_the_same_time_have_rows_with_names(tmp_path: Path) -> None:
    both = [Segment(0, "communication", name, 0.1, 0.5) for name in ("all_reduce", "all_gather")]
    files = write_steps(tmp_path, [Segment(0, "step", "0", 0.0, 1.0), *both], 1)
    check_format(files[0], is_ours=True)
