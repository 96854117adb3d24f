"""Decisions of the loader and of cost tracking, one rank's part at a time."""

import itertools
import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from bascule.comm.groups import RankGroup
from bascule.data.cost_tracker import CostTracker, _drift
from bascule.data.loader import LoaderMetrics
from bascule.data.steps import (
    DataRanks,
    Deliveries,
    ReadyStep,
    Verdict,
    without_idle_ranks,
)
from bascule.plan.costs import PolynomialCost
from bascule.plan.items import Items
from bascule.plan.limits import Limits
from bascule.plan.plan import Plan
from bascule.plan.topology import Topology


def test_the_overhead_of_a_step_is_no_drift() -> None:
    cost = PolynomialCost(0.0, 1e-3, 0.0, 0.5)
    lens = [[np.array([100, 50]), np.array([30])]]
    seconds = np.array([[0.15 + 0.5, 0.03 + 0.5]])
    assert _drift(cost, lens, seconds) < 1e-9
    assert _drift(cost, lens, seconds.max(axis=1)) < 1e-9


def ranks_of(places: list[int]) -> DataRanks:
    group = RankGroup(lambda: None, 0, tuple(range(len(places))), (), "loader")
    return DataRanks(group, np.array(places), group)


def tracker_of(places: list[int]) -> Any:
    """A tracker of costs on rank 0 of a group, as it is once all ranks have agreed on it."""
    tracker: Any = CostTracker.__new__(CostTracker)
    tracker._ranks = ranks_of(places)
    tracker._left_out, tracker._wanted, tracker._units = 0, 99, []
    tracker._num_gathered, tracker._device = 0, torch.device("cpu")
    return tracker


def test_a_step_with_padding_in_any_microbatch_teaches_nothing() -> None:
    counts, lens, bag_of = np.array([[1, 1], [4, 6], [0, 1]])
    plan = Plan(Topology(((1, 1),), 2), counts, lens, bag_of, lens * 1.0, 0.0, "none")
    tracker = tracker_of([0, 1])
    for padded in itertools.product((False, True), repeat=3):
        batches = [SimpleNamespace(plan=plan, is_padding=one) for one in padded]
        tracker._observe(batches, [(1.0, 1.25)] * 3)
        unit = tracker._units[-1]
        assert [lens.tolist() for lens in unit.seq_lens] == [[4] * 3, [6] * 3]
        assert math.isnan(unit.seconds()) if any(padded) else unit.seconds() == 0.75


def test_a_data_parallel_rank_takes_as_long_as_the_slowest_of_its_peers() -> None:
    places, times = [1, 0, 1, 0, 0], torch.rand(5, 7, dtype=torch.float64)
    tracker = tracker_of(places)
    tracker._units = [SimpleNamespace(seconds=lambda: 0.0)] * 7
    with mock.patch("bascule.data.cost_tracker.all_gather", lambda *_: times):
        found = tracker._gather()
    wanted = [times[[1, 3, 4]].amax(0), times[[0, 2]].amax(0)]
    assert found.tolist() == torch.stack(wanted, dim=1).tolist()


def test_an_idle_rank_gets_a_sample_only_within_limits() -> None:
    lens, bag_of = np.array([8, 8, 16]), np.array([0, 0, 1])
    loads, costs = np.array([16.0, 16.0]), lens.astype(float)
    plan = Plan(Topology(((1, 1),), 2), np.array([2, 1]), lens, bag_of, loads, 0.0, "none")
    for tokens, wanted in ((24, [1, 0, 1]), (16, [0, 0, 1])):
        found = without_idle_ranks(plan, np.array([1, 1, 0]), costs, Limits(tokens=tokens))
        assert found.bag_of.tolist() == wanted
        assert found.loads.tolist() == np.bincount(wanted, lens).tolist()


@pytest.mark.parametrize(
    ("weights", "pads"), [([0, 1, 1], 2), ([0, 2, 0], 1), ([0, 0, 0], 0), ([1, 0, 5], 0)]
)
def test_what_pads_is_the_shortest_sample_that_counts(weights: list[int], pads: int) -> None:
    own = Items.own([3], [1, 7, 3], [16] * 3, weights=weights), Items.own([0], [], [])
    items = Items.from_words([one.to_words() for one in own])
    found = Deliveries.of(items, np.zeros(3, np.int64), ranks_of([0, 1]), pad=True)
    assert found.ids.tolist() == [0, 1, 2, pads] and found.dest.tolist() == [0, 0, 0, 1]
    assert found.is_padding.tolist() == [False] * 3 + [True]


def test_steps_are_counted_with_what_the_training_waited_for() -> None:
    def step(num_padded: int, verdict: Verdict, *num_bytes: int, start: float, end: float) -> Any:
        batches = [SimpleNamespace(verdict=verdict, is_padding=k < num_padded) for k in range(2)]
        return ReadyStep(batches, np.ones((1, 2)), [], *num_bytes, (start, end))  # pyright: ignore

    balanced, even = Verdict(True, "balanced", 10.0, 6.0), Verdict(False, "even", 5.0, 3.0)
    metrics = LoaderMetrics()
    # Waited for the middle of an exchange, its end, nothing of it, and until long after it.
    for waited in ((2.0, 3.0), (4.0, 7.0), (5.5, 8.0), (0.0, 9.0)):
        metrics.count(step(1, balanced, 16, 48, start=1.0, end=5.0), waited)
    metrics.count(step(0, even, 1, 2, start=10.0, end=12.0), (2.0, 3.0))
    metrics.count(step(0, even, 0, 0, start=10.0, end=12.0), (9.0, 10.5))
    assert metrics == LoaderMetrics(
        steps=6,
        applied=4,
        skipped={"even": 2},
        padded=4,
        sent_bytes=65,
        received_bytes=194,
        exchange_s=20.0,
        exposed_s=1.0 + 1.0 + 0.0 + 4.0 + 0.0 + 0.5,
        hidden_s=20.0 - 6.5,
        predicted_before=50.0,
        predicted_after=4 * 6.0 + 2 * 5.0,
    )
