"""The benchmarks of a GPU run on a CPU, tiny: nothing of what they find is a number of a GPU."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
TOPICS = ["device", "blocks", "kernels", "sparse", "host", "latency", "against_diffusers"]
TOPICS.append("inference")
MEASURED = {"what", "unit", "value", "quartiles", "target", "at_least", "is_met"}


def run(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "benchmarks/bench_gpu.py", *options]
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return lambda name: import_module(name)


@pytest.mark.stress
@pytest.mark.slow
def test_every_topic_runs_tiny_and_writes_what_it_found(tmp_path: Path) -> None:
    ended = run("--device", "cpu", "--tiny", "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["benchmark"] == "gpu" and found["is_tiny"]
    assert {"commit", "device", "torch"} <= set(found["environment"])
    assert list(found["topics"]) == TOPICS
    for name, topic in found["topics"].items():
        assert set(topic["card_afterwards"]) == {"copy", "matmul"}
        assert (topic["card"] is None) == (name == "device")
        assert topic["rows"], name
        for row in topic["rows"]:
            check_row(row)
            assert name in ended.stdout
    measured = {
        name: [row for row in topic["rows"] if "value" in row]
        for name, topic in found["topics"].items()
    }
    assert all(measured.values())
    assert all(
        any(row["target"] is not None for row in measured[name])
        for name in TOPICS[1:]
        if name != "host"
    )
    left_out = [
        row["what"]
        for topic in found["topics"].values()
        for row in topic["rows"]
        if "reason" in row
    ]
    assert any("CUDA graphs" in what for what in left_out)
    assert any("triton" in what for what in left_out)
    assert any("waits of the host" in what for what in left_out)


def check_row(row: dict[str, Any]) -> None:
    """A number, or why there is none: CUDA's, not installed, or not for blocks of that size."""
    if "reason" in row:
        assert set(row) == {"what", "reason"}
        assert "failed" not in row["reason"] and "minutes" not in row["reason"], row
        reasons = "CUDA", "CPU", "not installed", "pads blocks to 128 tokens"
        assert any(words in row["reason"] for words in reasons), row
        return
    assert set(row) >= MEASURED
    assert row["value"] >= 0.0
    assert row["quartiles"] is None or row["quartiles"][0] <= row["value"] <= row["quartiles"][1]
    assert (row["is_met"] is None) == (row["target"] is None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no CUDA device"),
        (["--device", "cpu"], "--tiny"),
        (["--device", "cpu", "--tiny"], "--out"),
    ],
)
def test_what_would_measure_nothing_is_refused(
    module: Any,
    options: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = module("bench_gpu")
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", *options])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_what_fails_or_comes_too_late_is_told_and_the_rest_goes_on(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, measuring = module("bench_gpu"), module("gpu.measuring")
    setting = measuring.Setting(torch.device("cpu"), True)

    def fails() -> Any:
        raise ValueError("a part  that\nfails")

    def cases(setting: Any) -> Any:
        yield measuring.Case("first", fails)
        yield measuring.Case("second", lambda: [measuring.Row.of("fine", "s", [1.0, 2.0, 4.0])])
        monkeypatch.setattr(bench.time, "monotonic", lambda: 1e9)
        yield measuring.Case("third", fails)

    monkeypatch.setitem(bench.TOPICS, "kernels", cases)
    results = bench.Results(tmp_path, is_tiny=False)
    rows = bench.measure("kernels", setting, 60.0, results)
    assert [row.value for row in rows] == [None, 2.0, None]
    assert "ValueError: a part that fails" in rows[0].reason
    assert "minutes" in rows[2].reason
    written = json.loads((tmp_path / "gpu.json").read_text())["topics"]["kernels"]["rows"]
    assert written == json.loads(json.dumps([row.to_json() for row in rows]))
    later = bench.Results(tmp_path, is_tiny=False)
    later.put("sparse", [], 1.0)
    kept = json.loads((tmp_path / "gpu.json").read_text())["topics"]
    assert kept["kernels"]["rows"] == written and kept["sparse"]["rows"] == []


def test_operations_of_a_step_by_hand(module: Any) -> None:
    """Two samples, one block of each kind: 24 L d^2 + 4 L^2 d each, and four forward passes."""
    shapes, measuring = module("gpu.shapes"), module("gpu.measuring")
    setting = measuring.Setting(torch.device("cpu"), True)
    config = shapes.config_of(setting, 1, 1)
    pack, width = shapes.equal_pack(16, 2), config.d_model
    forward = 2 * 2 * (24 * 16 * width**2 + 4 * 16**2 * width)
    assert pack.forward_flops(config) == pytest.approx(forward)
    assert pack.step_flops(config) == pytest.approx(4 * forward)


def test_a_rank_of_the_mixes(module: Any) -> None:
    """Every mix of Table 1; whom the others wait for has the most to do."""
    shapes, measuring = module("gpu.shapes"), module("gpu.measuring")
    setting = measuring.Setting(torch.device("cpu"), False)
    config = shapes.config_of(setting, 19, 38)
    pairs = zip(shapes.mixes(setting), shapes.mixes(setting, heaviest=True), strict=True)
    for middle, most in pairs:
        assert middle.forward_flops(config) <= most.forward_flops(config)
    assert 14_000 < shapes.mixes(setting)[0].num_tokens < 15_000  # 32 samples of about 450


@pytest.mark.parametrize(
    ("value", "at_least", "is_met"), [(0.6, True, True), (0.59, True, False), (0.61, False, False)]
)
def test_targets(module: Any, value: float, at_least: bool, is_met: bool) -> None:
    measuring = module("gpu.measuring")
    row = measuring.Row("x", value=value, target=measuring.Target(0.6, at_least))
    assert row.is_met is is_met
