"""Damaged traces and lists of lengths: a result or one clear sentence, and soon."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# What is mutated has no type.

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bascule.errors import ConfigError, PlanError
from bascule.workload.traces import balancing_worth, read_traces, step_parts, write_steps
from bascule.workload.traces.steps import segments_of
from bascule.workload.traces.worth import RunLengths, lengths_of, read_lens
from tests.helpers import mutations
from tests.helpers.trace_cases import Run

NUM_CASES = 1000
NAMES = ("", "0", "ProfilerStep#6", "ProfilerStep#999999999999999", "gloo:all_reduce")
LENGTHS = "bascule::lens [9,9]", "bascule::step lens/9 [9]", "bascule::lens [99999999999999999]"
VALUES = [*mutations.VALUES, *NAMES, *LENGTHS]
OWN = ((0.1, 0.3), (0.3, 0.1), (0.2, 0.25), (0.1, 0.2))
LENS = [[[100], [300]], [[300, 10], [90]], [[200], [250]], [[50, 50], [200]]]


def damaged(chance: random.Random, content: bytes) -> bytes:
    """Cut off, with other bytes, or with a part twice."""
    place = chance.randrange(len(content))
    end = min(place + chance.randrange(1, 200), len(content))
    noise = bytes(chance.randrange(256) for _ in range(3))
    kept, other, twice = content[:place], content[:place] + noise, content[:end] + content[place:]
    return chance.choice((kept, other + content[place + 3 :], twice))


def write_case(rng: random.Random, folder: Path) -> str:
    """One damaged run; says what was done."""
    run = Run(OWN, on_device=rng.random() < 0.5, lens=LENS if rng.random() < 0.6 else ())
    traces: list[Any] = [run.trace(rank) for rank in range(2)]
    way = rng.choice(("values", "values", "values", "bytes", "packed", "files", "lens"))
    if way == "values":
        victim = rng.randrange(2)
        traces[victim] = mutations.mutated(rng, traces[victim], VALUES)
    for rank, trace in enumerate(traces):
        content = json.dumps(trace).encode()
        name = f"rank{rank}.json"
        if way == "bytes" and rank == 0:
            content = damaged(rng, content)
        if way == "packed":
            content, name = gzip.compress(content, 1), f"{name}.gz"
            content = damaged(rng, content) if rank == 0 else content
        if way == "files" and rank == 0:
            if rng.random() < 0.5:
                (folder / "copy.json").write_bytes(content)
            name = rng.choice(("rank1.json", "rank7.json", "x.json", "rank0.txt"))
        (folder / name).write_bytes(content)
    rows = [{"step": 5 + s, "rank": r, "lens": LENS[s][r]} for s in range(4) for r in range(2)]
    listed = "\n".join(
        map(json.dumps, mutations.mutated(rng, rows, VALUES) if way == "lens" else rows)
    )
    content = listed.encode("utf-8", "surrogatepass")
    (folder / "lens.jsonl").write_bytes(damaged(rng, content) if rng.random() < 0.1 else content)
    return way


def analysed(folder: Path, *, from_file: bool) -> tuple[bool, bool]:
    """Read and price one run, and check the results: is it read, is it priced?"""
    try:
        traces, notes = read_traces(folder)
        parts = step_parts(traces, notes)
    except ConfigError as error:
        check_sentence(error)
        return False, False
    for one in (parts.compute, parts.communication, parts.waiting, parts.hidden, parts.seconds):
        assert one.shape == (parts.steps.size, parts.ranks.size)
        assert np.isfinite(one).all() and (one >= 0).all()
    total = parts.compute + parts.communication + parts.waiting
    assert (total <= parts.seconds * (1 + 1e-6) + 1e-5).all()
    assert parts.imbalance is None if parts.num_missing else np.isfinite(parts.imbalance or 0.0)
    assert parts.slowest_rank in parts.ranks
    lens, is_priced = RunLengths({}, {}), False
    try:
        lens = read_lens(folder / "lens.jsonl") if from_file else lengths_of(traces)
        worth = balancing_worth(parts, lens)
        numbers = worth.speedup, worth.predicted_s, worth.model_s, worth.as_loaded_s
        assert np.isfinite(numbers).all() and min(numbers) > 0
        is_priced = True
    except (ConfigError, PlanError) as error:
        check_sentence(error)
    write_steps(folder / "out", segments_of(parts, lens.computed), 8)
    return True, is_priced


def check_sentence(error: Exception) -> None:
    assert "\n" not in str(error) and 10 < len(str(error)) < 1400, error


@pytest.mark.parametrize(
    "part", [0, 1, *(pytest.param(part, marks=pytest.mark.stress) for part in (2, 3))]
)
def test_a_result_or_one_sentence(part: int, tmp_path: Path) -> None:
    outcomes: list[tuple[bool, bool]] = []
    for case in range(part, NUM_CASES, 4):
        rng, folder = random.Random(case), tmp_path / str(case)
        folder.mkdir()
        way = write_case(rng, folder)
        try:
            outcomes.append(analysed(folder, from_file=rng.random() < 0.5))
        except Exception as error:
            raise AssertionError(f"case {case}, {way}") from error
    # A test whose cases are all refused, or all accepted, would test little.
    assert ((0.15 < (shares := np.mean(outcomes, axis=0))) & (shares < 0.95)).all(), shares


def test_a_trace_that_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.workload.traces.reading.MAX_BYTES", 2**20)
    (tmp_path / "rank0.json.gz").write_bytes(gzip.compress(b" " * 2**22))
    with pytest.raises(ConfigError, match="has more than 1048576 bytes"):
        read_traces(tmp_path)
