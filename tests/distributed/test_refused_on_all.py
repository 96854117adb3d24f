"""What one rank alone gives wrongly is refused on all, in the same words, and both go on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from bascule import (
    BalancedLoader,
    Cluster,
    CostTracker,
    Limits,
    LoaderOptions,
    ParallelOptions,
    PolynomialCost,
    SequenceParallel,
    TransformerCost,
)
from tests.helpers.ranks import raised_by, run_ranks

COST = TransformerCost(64)
CLUSTER = Cluster(1, 2, 1e12, 1 << 34, 1e11, 1e10, 1e-5)
SECONDS = TransformerCost(64, seconds_per_unit=1e-3)


def made(topology: str = "g1n1", cost: Any = COST, **settings: Any) -> SequenceParallel:
    return SequenceParallel(None, topology, cost, **settings)


def with_speeds(speeds: list[float]) -> object:
    parallel = made()
    parallel.set_speeds(speeds)
    return parallel.plan([1])


def loader(**settings: Any) -> BalancedLoader:
    options = LoaderOptions(batch_size=2, collate_fn=list, **settings)
    return BalancedLoader(iter(()), cost=PolynomialCost(0.0, 1.0, 0.0), options=options)


ROWS: dict[str, tuple[Callable[..., object], dict[str, Any], dict[str, Any], str]] = {
    "topology": (made, {}, {"topology": "g2n1"}, "disagree on topology"),
    "no topology": (made, {}, {"topology": "g1nx"}, "'g1nx'"),
    "cost": (made, {}, {"cost": TransformerCost(65)}, "disagree on cost"),
    "planner": (made, {}, {"options": ParallelOptions("knapsack")}, "disagree on planner"),
    "limits": (made, {}, {"limits": Limits(tokens=100)}, "disagree on limits"),
    "cluster": (made, {"cost": SECONDS}, {"cost": SECONDS, "cluster": CLUSTER}, "cluster"),
    "length below 0": (lambda lens: made().plan(lens), {"lens": [3]}, {"lens": [4, -1]}, "-1"),
    "half a token": (lambda lens: made().plan(lens), {"lens": [3]}, {"lens": [2.5]}, "2.5"),
    "speeds": (
        with_speeds,
        {"speeds": [1.0, 1.0]},
        {"speeds": [1.0, 0.5]},
        "disagree on speeds",
    ),
    "loader": (
        lambda **settings: next(iter(loader(**settings)), None),
        {},
        {"min_gain": 0.5},
        "disagree on",
    ),
    "tracker": (
        lambda **settings: CostTracker(loader(), **settings),
        {},
        {"warmup": 20},
        "warmup=20",
    ),
}


def refused(name: str) -> tuple[list[str], str]:
    call, usual, odd, _ = ROWS[name]
    heard = raised_by(call, **(odd if dist.get_rank() else usual))
    assert made().plan([3]).plan.seq_lens.tolist() == [3, 3]  # and goes on
    return heard


@pytest.mark.parametrize("name", ROWS)
def test_what_one_rank_gives_wrongly_is_refused_on_all(name: str) -> None:
    one, other = run_ranks(refused, 2, name)
    assert one == other
    assert ROWS[name][-1] in one[1], one
