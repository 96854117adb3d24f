"""Traces as torch.profiler writes them: of a plain DDP script, and of the same data in balance."""

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader

from bascule import SequenceParallel
from bascule.costs import PolynomialCost
from bascule.data import BalancedLoader
from bascule.workload.traces import StepParts, read_traces, step_parts
from bascule.workload.traces.worth import RunLengths, lengths_of
from tests.helpers.cli import run
from tests.helpers.ranks import run_ranks

WIDTH, WARMUP, STEPS = 64, 1, 3
LENS = [
    [[40, 20], [900, 700]],
    [[30, 60], [800, 1000]],
    [[50, 10], [600, 900]],
    [[16, 24], [990, 400]],
]
"""Of each step and rank; the first step only warms up."""

COST = PolynomialCost(1e-9, 1e-6, 0.0)


def samples_of(step: int, rank: int) -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(length, WIDTH)} for length in LENS[step][rank]]


def profiler(folder: Path) -> profile:
    """Writes the trace of this rank into the folder."""
    file = str(folder / f"rank{dist.get_rank()}.json")
    return profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=WARMUP, active=STEPS, repeat=1),
        on_trace_ready=lambda one: one.export_chrome_trace(file),
    )


def plain(folder: Path) -> None:
    """A script that knows nothing of bascule."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, dropout=0.0, batch_first=True)
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with profiler(folder) as profiled:
        for step in range(WARMUP + STEPS):
            samples = samples_of(step, dist.get_rank())
            torch.stack([model(one["x"][None]).square().mean() for one in samples]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiled.step()


def with_steps(folder: Path, topology: str) -> None:
    """Tokens move, ranks attend, and tokens go back."""
    sp = SequenceParallel(None, topology, COST)
    weight = torch.randn(WIDTH, WIDTH)
    with profiler(folder) as profiled:
        for lens in LENS:
            own = lens[dist.get_rank()]
            with sp.plan(own) as step:
                x = step.route(x=torch.randn(sum(own), WIDTH))["x"]
                q = (x @ weight).unflatten(1, (2, -1))
                step.restore(step.attend(q, q, q).flatten(1))
            profiled.step()


def with_loader(folder: Path) -> None:
    """Samples move before they are computed on."""
    rank, weight = dist.get_rank(), torch.randn(WIDTH, WIDTH)
    data = [sample for step in range(len(LENS)) for sample in samples_of(step, rank)]
    loaded = DataLoader(data, 2, collate_fn=list)  # pyright: ignore[reportArgumentType]
    with BalancedLoader(loaded, cost=COST, length_fn=length_of) as loader, profiler(folder) as one:
        for batch in loader:
            y = torch.cat([sample["x"] for sample in batch.data]) @ weight
            dist.all_reduce(y.T @ y)
            one.step()


def length_of(sample: dict[str, Tensor]) -> int:
    return len(sample["x"])


def analysed(folder: Path) -> tuple[StepParts, RunLengths]:
    """The parts of the steps, which must sum up."""
    traces, notes = read_traces(folder)
    parts = step_parts(traces, notes)
    assert parts.steps.tolist() == [1, 2, 3] and parts.ranks.tolist() == [0, 1]
    assert not parts.on_device and parts.numbered_by == "ProfilerStep"
    total = parts.compute + parts.communication + parts.waiting + parts.rest
    np.testing.assert_allclose(total, parts.seconds, rtol=1e-9)
    for part in (parts.compute, parts.communication, parts.waiting, parts.rest, parts.hidden):
        assert (part > -1e-9).all()
    assert (parts.compute > 0).all()
    # Of each step, on some rank: another's exchange may lie wholly behind its compute.
    assert (parts.communication + parts.waiting > 0).any(axis=1).all()
    return parts, lengths_of(traces)


def test_a_plain_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(plain, 2, tmp_path)
    parts, lens = analysed(tmp_path)
    assert parts.slowest_rank == 1 and parts.notes == ()
    assert parts.imbalance is not None and parts.imbalance > 1.0
    assert parts.waiting[:, 0].sum() > parts.waiting[:, 1].sum()
    assert not lens.computed
    rows = [
        {"step": step, "rank": rank, "lens": LENS[step][rank]}
        for step in range(len(LENS))
        for rank in range(2)
    ]
    manifest = tmp_path / "lens.jsonl"
    manifest.write_text("\n".join(map(json.dumps, rows)))
    arguments = "--lens", str(manifest), "--json", str(tmp_path / "found.txt")
    code, out, _ = run(capsys, "trace", str(tmp_path), *arguments)
    assert code == 0 and re.search(r"slowest rank +1\b|slowest rank +rank 1\b", out)
    found: dict[str, Any] = json.loads((tmp_path / "found.txt").read_text())
    # With so few and so short steps the fit may be refused; it says so then.
    assert found["worth"] or "do not explain" in found["worth_unknown"]


def test_steps_say_their_lengths(tmp_path: Path) -> None:
    run_ranks(with_steps, 2, tmp_path, "g1n2")
    parts, lens = analysed(tmp_path)
    keys = set(parts.spans[0].call_keys)
    assert {f"bascule::all_to_all ({way})" for way in ("route", "route back")} <= keys
    assert parts.waiting.sum() > 0  # no two ranks arrive at once
    for step in (1, 2, 3):
        computed, loaded = (
            [part[step, rank] for rank in range(2)] for part in (lens.computed, lens.loaded)
        )
        assert [sorted(one) for one in loaded] == [sorted(one) for one in LENS[step]]
        assert sorted(chain(*computed)) == sorted(chain(*LENS[step]))
        assert max(map(sum, computed)) < max(map(sum, loaded))


def test_bags_say_that_they_share(tmp_path: Path) -> None:
    run_ranks(with_steps, 2, tmp_path, "g2n1")
    traces, _ = read_traces(tmp_path)
    for rank, trace in enumerate(traces):
        marks = [mark for _, mark in trace.marks]
        assert {mark.shared_by for mark in marks if mark.what == "lens"} == {2}
        loaded = [list(mark.lens) for mark in marks if mark.what == "loaded"]
        assert loaded == [lens[rank] for lens in LENS[1:]]


def test_batches_of_a_loader_say_their_lengths(tmp_path: Path) -> None:
    run_ranks(with_loader, 2, tmp_path)
    _, lens = analysed(tmp_path)
    for step in (1, 2, 3):
        assert [sorted(lens.loaded[step, rank]) for rank in range(2)] == [
            sorted(one) for one in LENS[step]
        ]
        assert max(sum(lens.computed[step, rank]) for rank in range(2)) < sum(LENS[step][1])
