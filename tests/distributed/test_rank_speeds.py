"""Slow ranks: measured, and given less."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bascule import BalancedLoader, PolynomialCost, SequenceParallel, TransformerCost
from bascule.training import measure_speeds
from tests.helpers.ranks import raised_by, run_ranks

LENS = [[900, 100, 300], [650, 640]]


def measured() -> dict[str, Any]:
    rank, now = dist.get_rank(), [0.0]

    def work() -> None:
        now[0] += 0.09 if rank == 1 else 0.03

    with mock.patch("bascule.training.rank_speeds.time.perf_counter", lambda: now[0]):
        speeds = measure_speeds(work=work)
    parallel = SequenceParallel(None, "g1n2", TransformerCost(64))
    alike = parallel.plan(LENS[rank]).plan
    parallel.set_speeds(speeds)
    step = parallel.plan(LENS[rank])
    rows = torch.arange(sum(LENS[rank]), dtype=torch.float64)[:, None]
    back = step.restore(step.route(x=rows)["x"])
    parallel.set_speeds([1.0, 0.5 + rank / 4])
    unlike = raised_by(parallel.plan, LENS[rank])[1]
    wrong = raised_by(parallel.set_speeds, [1.0])[1]
    parallel.set_speeds(None)
    return {
        "speeds": speeds,
        "tokens": (alike.tokens.tolist(), step.plan.tokens.tolist()),
        "same": torch.equal(back, rows),
        "unlike": unlike,
        "wrong": wrong,
        "default": measure_speeds(),
        "again": parallel.plan(LENS[rank]).plan == alike,
    }


def test_a_slow_rank_is_measured_and_gets_less() -> None:
    first, second = run_ranks(measured, 2)
    assert first["speeds"] == second["speeds"]
    fast, slow = first["speeds"]
    assert slow == pytest.approx(fast / 3)
    alike, told = first["tokens"]
    assert told[1] < 0.8 * alike[1]
    for said in (first, second):
        assert said["same"]
        assert said["again"]
        assert "disagree on speeds" in said["unlike"]
        assert "for each of the 2 ranks" in said["wrong"]
        assert len(said["default"]) == 2
        assert all(speed > 0 for speed in said["default"])


def loaded() -> list[int]:
    rank = dist.get_rank()
    samples = [torch.zeros(10 + number) for number in range(8)]
    loader: Any = torch.utils.data.DataLoader(samples, batch_size=8, collate_fn=list)  # pyright: ignore
    balanced = BalancedLoader(
        loader, length_fn=len, cost=PolynomialCost(0.0, 1e-3, 0.0), mesh_or_group=None
    )
    balanced.set_cost(PolynomialCost(0.0, 1e-3, 0.0), speeds=[1.0, 0.5])
    told = raised_by(balanced.set_cost, PolynomialCost(0.0, 1e-3, 0.0), speeds=[1.0])[1]
    assert "for each of the 2 ranks" in told
    with balanced:
        (batch,) = list(balanced)
    assert rank == dist.get_rank()
    return [int(batch.plan.seq_lens[batch.plan.bag_of == place].sum()) for place in range(2)]


def test_a_loader_gives_a_slow_rank_less() -> None:
    first, second = run_ranks(loaded, 2)
    assert first == second
    assert first[0] == pytest.approx(2 * first[1], rel=0.1)
