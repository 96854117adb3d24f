"""Traces of a run: the parts of its steps, its lengths, what balancing would be worth."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from bascule.machine.costs import PolynomialCost
from bascule.marks import LengthMark, marks_of, read_mark
from bascule.quantities import percent
from bascule.workload.traces import StepParts, balancing_worth, read_traces, step_parts, write_steps
from bascule.workload.traces.spans import minus, seconds_within, spans_of, union, within
from bascule.workload.traces.steps import segments_of
from bascule.workload.traces.worth import lengths_of, read_lens
from tests.helpers.cli import Console, run
from tests.helpers.trace_cases import GAP_S, TRANSFER_S, Run, event

OWN = ((0.10, 0.30, 0.20), (0.25, 0.15, 0.20), (0.12, 0.36, 0.24), (0.10, 0.20, 0.30))
COST = PolynomialCost(2e-8, 1e-4, 1e-3, overhead=0.02)
LENS = [
    [[512, 64], [1024, 700], [300]],
    [[100], [2000], [64, 64, 64]],
    [[900, 800], [128], [256, 256]],
    [[1500], [700, 700], [32]],
]


def parts_of(folder: Path) -> StepParts:
    traces, notes = read_traces(folder)
    return step_parts(traces, notes)


def close(found: object, expected: object) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=2e-6)


@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
@pytest.mark.parametrize("clocks", [(), (0.0, 3.0, -0.7)], ids=["one clock", "unlike clocks"])
def test_the_parts_of_steps(tmp_path: Path, on_device: bool, clocks: tuple[float, ...]) -> None:
    parts = parts_of(Run(OWN, clocks, on_device).write(tmp_path))
    own = np.array(OWN)
    last = own.max(axis=1, keepdims=True)
    close(parts.compute, own)
    close(parts.waiting, last - own)
    for found, seconds in (("communication", TRANSFER_S), ("rest", GAP_S), ("hidden", 0.0)):
        close(getattr(parts, found), np.full_like(own, seconds))
    close(parts.own, parts.compute + parts.communication + parts.rest)
    assert parts.slowest.tolist() == own.argmax(axis=1).tolist()
    assert parts.slowest_rank == int(own.sum(axis=0).argmax())
    assert parts.imbalance == pytest.approx((own.max(axis=1) / own.mean(axis=1)).mean())
    assert (parts.steps.tolist(), parts.on_device, parts.notes) == ([5, 6, 7, 8], on_device, ())


def test_communication_behind_compute_is_hidden(tmp_path: Path) -> None:
    run = Run(((0.2, 0.2),) * 2)
    begin = run.starts()[0]
    for rank, early in ((0, 0.05), (1, 0.15)):
        name = "ncclDevKernel_AllGather_RING(x)"
        run.extra[rank] = [event("kernel", name, begin + early, begin + 0.19, 21)]
    parts = parts_of(run.write(tmp_path))
    close(parts.hidden, [[0.14, 0.04], [0.0, 0.0]])
    close(parts.compute, [[0.2, 0.2]] * 2)
    close(parts.waiting, np.zeros((2, 2)))


def test_groups_wait_apart(tmp_path: Path) -> None:
    """Ranks 0, 1 and ranks 2, 3 reduce among themselves; the trace names the groups."""
    own = np.array([[0.1, 0.3, 0.5, 0.2]])
    run = Run(own.tolist())
    for rank in range(4):
        trace = run.trace(rank)
        pair = own[0, rank // 2 * 2 : rank // 2 * 2 + 2]
        for one in trace["traceEvents"]:
            if one["name"].startswith("nccl"):
                one["dur"] = (pair.max() + TRANSFER_S - own[0, rank]) * 1e6
                one["args"] |= {"Process Group Name": str(rank // 2), "Collective name": "x"}
        (tmp_path / f"{rank}.json").write_text(json.dumps(trace))
    close(parts_of(tmp_path).waiting, [[0.2, 0.0, 0.0, 0.3]])


def test_unlike_numbers_of_calls_are_communication(tmp_path: Path) -> None:
    run = Run(OWN)
    run.extra[1] = [event("kernel", "ncclDevKernel_AllReduce_Sum_f32(x)", 100.0, 100.001, 20)]
    parts = parts_of(run.write(tmp_path))
    own, last = np.array(OWN), np.array(OWN).max(axis=1, keepdims=True)
    close(parts.waiting, np.r_[np.zeros((1, 3)), (last - own)[1:]])
    close(parts.communication[0], last[0] - own[0] + TRANSFER_S)
    assert any("unlike numbers of calls of 'ncclDevKernel_AllReduce" in one for one in parts.notes)


def test_what_is_written_reads_the_same(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    run = Run(OWN, (0.0, 5.0, -9.0), lens=LENS)
    traces, _ = read_traces(run.write(tmp_path / "in"))
    first = step_parts(traces)
    files = write_steps(tmp_path / "out", segments_of(first, lengths_of(traces).computed), 3)
    assert [file.name for file in files] == ["rank0.json", "rank1.json", "rank2.json"]
    traces, notes = read_traces(tmp_path / "out")
    second = step_parts(traces, notes)
    for name in ("steps", "seconds", "compute", "communication", "waiting", "rest", "hidden"):
        close(getattr(second, name), getattr(first, name))
    assert lengths_of(traces).computed == {
        (step, rank): LENS[step - 5][rank] for step in range(5, 9) for rank in range(3)
    }


def test_compressed_files_and_two_cycles_of_a_profiler(tmp_path: Path) -> None:
    for first, name, clock in ((5, "b", 0.0), (9, "a", 50.0)):
        run = Run(OWN, (clock,) * 3, first=first)
        for rank in range(3):
            with gzip.open(tmp_path / f"{rank}.{name}.pt.trace.json.gz", "wt") as file:
                json.dump(run.trace(rank), file)
    (tmp_path / "metrics.json").write_text('{"loss": 1}')
    parts = parts_of(tmp_path)
    assert parts.steps.tolist() == list(range(5, 13))
    close(parts.waiting[4:], parts.waiting[:4])
    assert parts.notes == ("'metrics.json' has no traceEvents, so it was left out",)


def test_a_folder_for_each_rank_and_files_of_zstandard(tmp_path: Path) -> None:
    """Whose name says the rank; they do not count beside traces."""
    run, runs = Run(OWN), tmp_path / "runs"
    for rank in range(3):
        (runs / f"rank_{rank}").mkdir(parents=True)
        trace = {"traceEvents": run.trace(rank)["traceEvents"]}
        path = str(runs / f"rank_{rank}" / "a.json.zst")
        with pa.output_stream(path, compression="zstd") as file:
            file.write(json.dumps(trace).encode())
    (runs / "settings.json").write_text('{"lr": 1}')
    parts = parts_of(runs)
    assert parts.ranks.tolist() == [0, 1, 2]
    close(parts.waiting, parts_of(run.write(tmp_path)).waiting)  # and not those of runs


def test_steps_by_bascules_ranges_and_by_the_optimizer(tmp_path: Path) -> None:
    for name, steps, seconds in (
        ("bascule::a training step", 3, (2.0, 2.0, 1.0)),
        ("Optimizer.step#SGD.step", 2, (2.0, 2.0)),
    ):
        spans = [event("user_annotation", name, 2.0 * n, 2.0 * n + 1.0, 1) for n in range(3)]
        (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": spans}))
        parts = parts_of(tmp_path)
        assert (parts.steps.tolist(), parts.ranks.tolist()) == (list(range(steps)), [0])
        close(parts.seconds[:, 0], seconds)


def test_nothing_is_told_that_needs_the_traces_of_missing_ranks(
    tmp_path: Path, capsys: Console
) -> None:
    folder, run_of_three = tmp_path / "traces", Run(OWN)
    folder.mkdir()
    for rank in (0, 2):
        trace = run_of_three.trace(rank)
        if rank == 2:
            del trace["distributedInfo"]  # the name of the file has its rank
        (folder / f"trace_rank{rank}.json").write_text(json.dumps(trace))
    parts = parts_of(folder)
    assert parts.ranks.tolist() == [0, 2]
    assert parts.notes == ("1 of 3 ranks has no trace (1): the slowest may be among them",)
    assert (parts.num_missing, parts.imbalance, parts.waited) == (1, None, None)
    page, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    files = "--json", str(numbers), "--report", str(page)
    status, out, _ = run(capsys, "trace", str(folder), *files)
    assert status == 0 and "1 rank has no trace" in out
    for text in (out, page.read_text()):
        assert not re.search(r"largest */ *mean[^|\n]*\d", text.replace("not known", "|"))
    data = json.loads(numbers.read_text())
    for name in ("imbalance", "waiting", "slowest", "slowest_rank", "worth"):
        assert data[name] is None, name


@pytest.mark.parametrize("from_file", [False, True], ids=["names", "manifest"])
def test_what_balancing_is_worth_where_the_cost_model_holds(
    tmp_path: Path, from_file: bool
) -> None:
    seconds = [[float(COST(lens).sum()) for lens in step] for step in LENS]
    run = Run(seconds, lens=() if from_file else LENS)
    traces, _ = read_traces(run.write(tmp_path))
    if from_file:
        rows = [
            {"step": 5 + step, "rank": rank, "lens": LENS[step][rank][half::2]}
            for step in range(4)
            for rank in range(3)
            for half in range(2)  # two microbatches
        ]
        (tmp_path / "lens.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
        lens = read_lens(tmp_path / "lens.jsonl")
    else:
        lens = lengths_of(traces)
    parts = step_parts(traces)
    worth = balancing_worth(parts, lens)
    assert worth.cost.fit is not None and worth.cost.fit.loo_error < 1e-3
    assert worth.num_steps == 4 and worth.topology == "g1n3"
    assert worth.model_s == pytest.approx(worth.measured_s, rel=0.01)
    assert worth.as_loaded_s == worth.model_s
    # Of 12 sequences a step at most, the longest alone is a bound on any assignment.
    bound = np.mean([max(float(COST([max(rank)]).sum()) for rank in step) for step in LENS])
    most = np.mean([max(step) for step in seconds])
    rest = TRANSFER_S + GAP_S
    assert worth.speedup <= (most + rest) / (bound + rest) * 1.01
    assert worth.speedup > 1.1 and worth.balanced_imbalance < worth.imbalance
    assert worth.predicted_s == pytest.approx(worth.measured_s / worth.speedup)


def test_a_run_that_is_balanced_says_what_it_gained(tmp_path: Path) -> None:
    """A step of bascule says what ranks computed, and what they loaded."""
    computed = [[[500, 500], [1000]], [[900], [450, 450]], [[100, 700], [800]]]
    loaded = [[[1000, 500, 500], []], [[], [900, 450, 450]], [[100, 700, 800], []]]
    run = Run([[float(COST(lens).sum()) for lens in step] for step in computed])
    starts = run.starts()
    for rank in range(2):
        marks = [
            (starts[step], name)
            for step in range(3)
            for name in marks_of("step", computed[step][rank], loaded[step][rank])
        ]
        marks.append((starts[1], "bascule::batch lens [7]"))
        run.extra[rank] = [event("user_annotation", name, at, at + 1e-6, 1) for at, name in marks]
    traces, _ = read_traces(run.write(tmp_path))
    worth = balancing_worth(step_parts(traces), lengths_of(traces))
    assert worth.as_loaded_s > 1.5 * worth.model_s
    assert worth.speedup == pytest.approx(1.0, abs=0.05)


def test_marks_are_read_as_they_are_written() -> None:
    marks = LengthMark((3, 2**40), "lens", "step", 4), LengthMark((5,), "loaded", "batch")
    for mark in (LengthMark(()), *marks):
        assert read_mark(str(mark)) == mark
    assert marks_of("step", [2, 1], [1, 2]) == ["bascule::step lens [2,1]"]
    both = ["bascule::step lens/2 [2]", "bascule::step loaded [1,1]"]
    assert marks_of("step", [2], [1, 1], 2) == both
    assert read_mark("bascule::lens [512, 64]") == LengthMark((512, 64))
    for wrong in ("lens [1]", "bascule::lens [-1]", "bascule::lens [1 2]", "bascule::lens [1.5]"):
        assert read_mark(wrong) is None
    assert read_mark("bascule::lens [" + "9" * 9999 + "]") is None


def test_spans_against_a_grid() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        first, second = (
            spans_of(start := rng.integers(0, 60, size), start + rng.integers(0, 9, size))
            for size in rng.integers(0, 12, 2)
        )
        grids = [np.zeros(80, bool) for _ in range(2)]
        for grid, spans in zip(grids, (first, second), strict=True):
            for start, end in spans.astype(int):
                grid[start:end] = True
        left = minus(union(first), union(second))
        windows = spans_of(begin := rng.integers(0, 60, 5), begin + rng.integers(0, 20, 5))
        for found, grid in ((union(first), grids[0]), (left, grids[0] & ~grids[1])):
            expected = [grid[int(a) : int(b)].sum() for a, b in windows]
            assert seconds_within(found, windows).tolist() == expected
            cut = [(b - a).sum() for a, b in (within(found, *w).T[:2] for w in windows.tolist())]
            assert cut == expected
            assert (found[1:, 0] > found[:-1, 1]).all()


def test_the_command(tmp_path: Path, capsys: Console) -> None:
    seconds = [[float(COST(lens).sum()) for lens in step] for step in LENS]
    folder = str(Run(seconds, lens=LENS).write(tmp_path))
    code, out, _ = run(capsys, "trace", folder, "--out", str(tmp_path / "out"))
    assert code == 0 and re.search(r"slowest rank +1", out) and "predicted speed-up" in out
    code, out, err = run(capsys, "trace", str(tmp_path / "out"), "--json", "-")
    found = json.loads(out)
    assert code == 0 and "a step balanced on g1n3" in err
    assert found["worth"]["speedup"] > 1.1
    assert found["worth"]["cost"]["fit"]["num_observations"] == 12
    close(found["compute"], seconds)
    code, out, _ = run(capsys, "trace", str(Run(OWN).write(tmp_path)))
    assert code == 0 and "is not known: no step" in " ".join(out.split())
    for arguments, said in (
        (
            (str(tmp_path / "none"),),
            f"bascule: {tmp_path / 'none'} does not exist: give the folder",
        ),
        ((folder, "--topology", "g2n1"), "or g1n3, where each rank"),
        ((folder, "--lens", str(tmp_path / "out")), "cannot read"),
        ((folder, "--json", str(tmp_path)), "is a folder"),
    ):
        code, _, err = run(capsys, "trace", *arguments)
        assert code == 2 and said in err


def test_what_the_fit_assumes_is_said(tmp_path: Path, capsys: Console) -> None:
    """All sequences are alike, so that no step tells attention from the rest."""
    lens = [[[1000] * n for n in step] for step in ((3, 2), (4, 1), (2, 2), (5, 1))]
    own = [[float(COST(rank).sum()) + COST.overhead for rank in step] for step in lens]
    folder, report = Run(own, lens=lens).write(tmp_path), tmp_path / "a.html"
    code, out, err = run(capsys, "trace", str(folder), "--json", "-", "--report", str(report))
    found, printed = json.loads(out)["worth"], " ".join(err.split())
    assert code == 0 and {"quadratic", "linear"} <= set(found["assumed"])
    error, side = found["model_error"], "under" if found["model_error"] < 0 else "over"
    for text in (printed, report.read_text()):
        assert f"{side}estimates the measured step by {percent(abs(error))}" in text
        assert "too alike to measure which part of the time is quadratic, linear" in text
        assert "attention dominates above 24,576 tokens" in text


def test_what_is_read_is_not_written_over(capsys: Console, tmp_path: Path) -> None:
    folder = Run(OWN).write(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for given in (folder, next(folder.iterdir())):
        code, _, err = run(capsys, "trace", str(given), "--out", str(folder))
        assert code == 2 and "would be overwritten" in err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
