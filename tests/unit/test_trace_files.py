"""Traces that are written: Perfetto's format, and the same parts by HolisticTraceAnalysis.

HTA runs in a process of its own, since it warns and logs as it likes.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from bascule.workload.traces import Segment, read_traces, step_parts, write_steps
from bascule.workload.traces.steps import segments_of
from tests.helpers.cli import Console, run
from tests.helpers.trace_cases import Run
from tests.helpers.trace_format import check_format

needs_hta = pytest.mark.skipif(
    None in map(importlib.util.find_spec, ("hta", "pandas")),
    reason="NOT TESTED: pip install pandas && pip install --no-deps HolisticTraceAnalysis",
)

BY_HTA = """
import json, sys
from hta.analyzers.breakdown_analysis import BreakdownAnalysis
from hta.common.trace import Trace
trace = Trace(trace_dir=sys.argv[1])
trace.load_traces(
    include_last_profiler_step=True, use_multiprocessing=False, use_memory_profiling=False
)
parts = BreakdownAnalysis.get_temporal_breakdown(trace, visualize=False).set_index("rank")
names = trace.symbol_table.get_sym_table()
waits = [
    float(events[events["name"].map(lambda one: names[one] == "waiting")]["dur"].sum())
    for _, events in sorted(trace.traces.items())
]
column = lambda name: [parts[f"{name}_time(us)"][rank] for rank in sorted(trace.traces)]
print(json.dumps({
    "ranks": trace.get_ranks(),
    "steps": [int(step) for step in trace.get_iterations()],
    "idle": column("idle"),
    "compute": column("compute"),
    "other": column("non_compute"),
    "waiting": waits,
}))
"""


def check_by_hta(folder: Path, **seconds: list[float]) -> dict[str, list[float]]:
    """Compare with what HTA finds in a folder; it rounds the ends of events to microseconds."""
    command = [sys.executable, "-W", "ignore", "-c", BY_HTA, str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    parts = json.loads(process.stdout)
    for name, expected in seconds.items():
        np.testing.assert_allclose(parts[name], np.array(expected) * 1e6, atol=30.0, err_msg=name)
    return parts


@needs_hta
@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
def test_hta_finds_the_same_in_measured_steps(tmp_path: Path, on_device: bool) -> None:
    own = ((0.10, 0.30, 0.20), (0.25, 0.15, 0.20), (0.12, 0.36, 0.24))
    (tmp_path / "in").mkdir()
    traces, _ = read_traces(Run(own, (0.0, 4.0, 1.0), on_device).write(tmp_path / "in"))
    parts = step_parts(traces)
    write_steps(tmp_path / "out", segments_of(parts, {}), 3)
    exposed = parts.communication + parts.waiting
    by_hta = check_by_hta(
        tmp_path / "out",
        compute=parts.compute.sum(axis=0).tolist(),
        other=exposed.sum(axis=0).tolist(),
        waiting=parts.waiting.sum(axis=0).tolist(),
        idle=parts.rest[:-1].sum(axis=0).tolist(),  # from the first kernel to the last
    )
    assert (by_hta["ranks"], by_hta["steps"]) == ([0, 1, 2], [5, 6, 7])


@needs_hta
def test_hta_finds_the_same_in_a_simulation(tmp_path: Path) -> None:
    """Two ranks; the second is late in the first step, and hides half of its collective."""
    segments = [
        Segment(0, "step", "0", 0.0, 1.0),
        Segment(0, "lengths", "bascule::lens [64,64]", 0.0, 0.0),
        Segment(0, "compute", "blocks", 0.0, 0.4),
        Segment(0, "communication", "all_reduce", 0.4, 0.5),
        Segment(0, "waiting", "waiting", 0.4, 0.3),
        Segment(1, "step", "0", 0.0, 1.0),
        Segment(1, "lengths", "bascule::lens [256]", 0.0, 0.0),
        Segment(1, "compute", "blocks", 0.0, 0.8),
        Segment(1, "communication", "all_reduce", 0.7, 0.2),
    ]
    write_steps(tmp_path, segments, 2)
    parts = step_parts(read_traces(tmp_path)[0])
    np.testing.assert_allclose(parts.waiting, [[0.3, 0.0]], atol=1e-6)
    np.testing.assert_allclose(parts.communication, [[0.2, 0.1]], atol=1e-6)
    np.testing.assert_allclose(parts.hidden, [[0.0, 0.1]], atol=1e-6)
    check_by_hta(tmp_path, compute=[0.4, 0.8], other=[0.5, 0.1])


def test_a_real_trace_and_what_is_written_of_it(capsys: Console, tmp_path: Path) -> None:
    weight = torch.randn(16, 16, requires_grad=True)
    real, ours = tmp_path / "real" / "rank0.json", tmp_path / "ours"
    real.parent.mkdir()
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(real)),
    ) as profiler:
        for step in range(4):
            with record_function(f"bascule::lens [{16 + step}]"):
                (torch.randn(16 + step, 16) @ weight).square().sum().backward()
            profiler.step()
    counts = check_format(real, is_ours=False)
    assert counts["X"] > 20 and counts["s"] == counts["f"] > 0  # forward to backward
    code, _, err = run(capsys, "trace", str(real.parent), "--out", str(ours))
    assert code == 0, err
    assert check_format(ours / "rank0.json", is_ours=True)["X"] > 3


def test_a_simulated_trace(capsys: Console, tmp_path: Path) -> None:
    options = ("--steps", "3", "--accumulate", "2", "--topologies", "none", "g2n2", "loader")
    data = ("--data", "g3b3i256f1s0,g1b1i1024f1s0", "--traces", str(tmp_path))
    code, _, err = run(capsys, "simulate", *data, *options)
    assert code == 0, err
    files = sorted(tmp_path.glob("*/*.json"))
    assert len(files) == 12
    assert all(check_format(file, is_ours=True)["X"] >= 3 * 3 for file in files)


def test_collectives_at_the_same_time_have_rows_with_names(tmp_path: Path) -> None:
    both = [Segment(0, "communication", name, 0.1, 0.5) for name in ("all_reduce", "all_gather")]
    files = write_steps(tmp_path, [Segment(0, "step", "0", 0.0, 1.0), *both], 1)
    check_format(files[0], is_ours=True)
