"""HolisticTraceAnalysis loads the traces that bascule writes, and finds the same parts in them.

It runs in a process of its own, since it warns and logs as it likes.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bascule.workload.traces import Segment, read_traces, step_parts, write_steps
from bascule.workload.traces.steps import segments_of
from tests.helpers.trace_cases import Run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hta") is None or importlib.util.find_spec("pandas") is None,
    reason="NOT TESTED: HolisticTraceAnalysis is not installed "
    "(pip install pandas && pip install --no-deps HolisticTraceAnalysis)",
)

PROGRAM = """
import json, sys
from hta.analyzers.breakdown_analysis import BreakdownAnalysis
from hta.common.trace import Trace
trace = Trace(trace_dir=sys.argv[1])
trace.load_traces(
    include_last_profiler_step=True, use_multiprocessing=False, use_memory_profiling=False
)
parts = BreakdownAnalysis.get_temporal_breakdown(trace, visualize=False).set_index("rank")
names = trace.symbol_table.get_sym_table()
waits = {
    rank: float(events[events["name"].map(lambda one: names[one] == "waiting")]["dur"].sum())
    for rank, events in trace.traces.items()
}
print(json.dumps({
    "ranks": trace.get_ranks(),
    "steps": [int(step) for step in trace.get_iterations()],
    "idle": parts["idle_time(us)"].to_dict(),
    "compute": parts["compute_time(us)"].to_dict(),
    "other": parts["non_compute_time(us)"].to_dict(),
    "waiting": waits,
}))
"""
ROUNDING_US = 30.0
"""HTA rounds the ends of each event to whole microseconds."""


def by_hta(folder: Path) -> dict[str, dict[int, float]]:
    """What HTA finds in a folder of traces."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    return {
        name: {int(rank): value for rank, value in part.items()} if isinstance(part, dict) else part
        for name, part in found.items()
    }


@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
def test_measured_steps(tmp_path: Path, on_device: bool) -> None:
    own = ((0.10, 0.30, 0.20), (0.25, 0.15, 0.20), (0.12, 0.36, 0.24))
    (tmp_path / "in").mkdir()
    traces, _ = read_traces(Run(own, (0.0, 4.0, 1.0), on_device).write(tmp_path / "in"))
    parts = step_parts(traces)
    write_steps(tmp_path / "out", segments_of(parts, {}), 3)
    found = by_hta(tmp_path / "out")
    assert (found["ranks"], found["steps"]) == ([0, 1, 2], [5, 6, 7])
    exposed = parts.communication + parts.waiting
    for place in range(3):
        for name, part in (
            ("compute", parts.compute),
            ("other", exposed),
            ("waiting", parts.waiting),
        ):
            expected = part[:, place].sum() * 1e6
            assert found[name][place] == pytest.approx(expected, abs=ROUNDING_US), name
        # It counts from the first kernel to the last.
        idle = parts.rest[:-1, place].sum() * 1e6
        assert found["idle"][place] == pytest.approx(idle, abs=ROUNDING_US)


def test_steps_of_a_simulation(tmp_path: Path) -> None:
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
    found = by_hta(tmp_path)
    parts = step_parts(read_traces(tmp_path)[0])
    np.testing.assert_allclose(parts.waiting, [[0.3, 0.0]], atol=1e-6)
    np.testing.assert_allclose(parts.communication, [[0.2, 0.1]], atol=1e-6)
    np.testing.assert_allclose(parts.hidden, [[0.0, 0.1]], atol=1e-6)
    assert found["compute"] == pytest.approx({0: 4e5, 1: 8e5}, abs=ROUNDING_US)
    assert found["other"] == pytest.approx({0: 5e5, 1: 1e5}, abs=ROUNDING_US)
