"""What a step decides, without processes: within limits, at the bound, each sample sent once."""

import dataclasses
import itertools
import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bascule.comm.groups import RankGroup
from bascule.data.cost_tracker import CostTracker
from bascule.data.loader import LoaderMetrics, LoaderOptions, _set_up, _Setup
from bascule.data.source import Microbatches, Source
from bascule.data.steps import (
    DataRanks,
    Decision,
    Ends,
    Load,
    Loaded,
    ReadyStep,
    Redistributor,
    Rules,
    load,
    num_input_ids,
    without_idle_ranks,
)
from bascule.errors import ConfigError, PlanError
from bascule.machine.costs import Cost, PolynomialCost, TransformerCost
from bascule.plan.limits import Limits
from bascule.plan.offer import Offer
from bascule.plan.plan import Plan, Sync, Terms, Verdict
from bascule.plan.topology import Topology

SECONDS = PolynomialCost(2.1e-10, 7.5e-6, 4e-4)
RULES = Rules(accumulate=1, sync="microbatch", ends="finish", min_gain=0.02)
Lens = list[list[list[int]]]
"""By rank, microbatch and sample."""


def ranks_of(num: int, peers: int = 1) -> DataRanks:
    group = RankGroup(lambda: None, 0, tuple(range(num * peers)), (), "loader")
    return DataRanks(group, np.arange(num * peers) // peers, group)


def loaded_of(lens: Lens, accumulate: int) -> Offer:
    """As all ranks know it after the gather; a sample of n tokens has 16 * (n + 1) bytes."""
    words = []
    for micros in lens:
        flat = [n for group in micros for n in group]
        counts = [*map(len, micros), *[0] * (accumulate - len(micros))]
        weights, num_bytes = [1 + n % 3 for n in flat], [16 * (n + 1) for n in flat]
        columns: dict[str, Any] = {"num_bytes": num_bytes, "weights": weights}
        words.append(Offer.of(np.array(counts)[:, None], flat, **columns).to_words())
    return Offer.from_words(words)


def decide(
    lens: Lens, cost: Cost = SECONDS, *, peers: int = 1, per_byte: float = 0.0, **changes: Any
) -> tuple[Offer, Any, Any, Redistributor]:
    redistributor = redistributor_of(ranks_of(len(lens), peers), cost, per_byte, **changes)
    items = loaded_of(lens, redistributor.rules.accumulate)
    decision = redistributor.decide(items)
    return items, decision.plans, decision.verdict, redistributor


def redistributor_of(
    ranks: DataRanks, cost: Cost = SECONDS, per_byte: float = 0.0, **changes: Any
) -> Redistributor:
    terms = Terms("g1n1", cost, changes.pop("limits", None))
    return Redistributor(ranks, dataclasses.replace(RULES, **changes), terms, per_byte)


def batches(accumulate: int) -> st.SearchStrategy[Lens]:
    lengths = st.one_of(st.integers(0, 40), st.sampled_from([0, 1, 512, 4096]))
    microbatch = st.lists(lengths, max_size=5)
    micros = st.lists(microbatch, max_size=accumulate)
    return st.integers(1, 5).flatmap(lambda n: st.lists(micros, min_size=n, max_size=n))


@settings(deadline=None, max_examples=75)
@given(st.data())
def test_every_sample_goes_to_one_rank_of_its_microbatch(data: st.DataObject) -> None:
    accumulate = data.draw(st.integers(1, 3))
    lens = data.draw(batches(accumulate))
    sync: Sync = data.draw(st.sampled_from(["microbatch", "step"]))
    ends: Ends = data.draw(st.sampled_from(["drop_last", "pad_empty", "finish"]))
    peers = data.draw(st.integers(1, 3))
    loaded, plans, verdict, redistributor = decide(
        lens, peers=peers, accumulate=accumulate, sync=sync, ends=ends, min_gain=0.0
    )
    flat = [n for m in range(accumulate) for micros in lens for of in micros[m : m + 1] for n in of]
    assert loaded.lens.tolist() == flat and len(plans) == accumulate
    assert verdict.after <= verdict.before * (1 + 1e-12) or not verdict.applied
    for micro, plan in enumerate(plans):
        here = loaded.lens[loaded.micro == micro]
        assert plan.loads == pytest.approx(np.bincount(plan.bag_of, SECONDS(here), len(lens)))
    if not flat:
        return
    decision = redistributor.decide(loaded)
    check_deliveries(decision, loaded, redistributor.ranks, pads=ends != "finish")
    check_mean(loaded, decision, redistributor.ranks)


def check_deliveries(decision: Decision, loaded: Offer, ranks: DataRanks, *, pads: bool) -> None:
    """All ranks of a place get its samples, from the first rank of who loaded them."""
    found, rank_of = decision.deliveries, np.concatenate([p.bag_of for p in decision.plans])
    rows = list(zip(rank_of.tolist(), loaded.micro.tolist(), range(rank_of.size), strict=True))
    idle = set(np.ndindex(ranks.num, len(decision.plans))) - {(rank, m) for rank, m, _ in rows}
    shortest = int(loaded.lens.argmin())
    rows += [(rank, micro, shortest) for rank, micro in idle if pads]
    first = [int(np.flatnonzero(ranks.place == owner)[0]) for owner in loaded.owner]
    expected = sorted(
        (receiver, micro, sample, first[sample], (rank, micro) in idle)
        for rank, micro, sample in rows
        for receiver in np.flatnonzero(ranks.place == rank).tolist()
    )
    columns = found.dest, found.micro, found.ids, found.source, found.is_padding
    assert sorted(zip(*(one.tolist() for one in columns), strict=True)) == expected
    sent, received = np.zeros_like(found.sent), np.zeros_like(found.received)
    for receiver, _, sample, sender, _ in expected:
        if sender != receiver:
            sent[sender] += loaded.num_bytes[sample]
            received[receiver] += loaded.num_bytes[sample]
    assert (sent == found.sent).all() and (received == found.received).all()


def check_mean(loaded: Offer, decision: Decision, ranks: DataRanks) -> None:
    """Scaled as batches say, the means of all microbatches add up to that of all samples."""
    values = np.cos(np.arange(loaded.lens.size))
    num_micro, num_ranks = loaded.counts.shape
    deliveries, total = decision.deliveries, 0.0
    for leader, micro in itertools.product(ranks.leaders.tolist(), range(num_micro)):
        rows, is_padding, loss_scale = deliveries.share(loaded, leader, micro)
        ids = deliveries.ids[rows]
        assert is_padding == (loss_scale == 0 and ids.size == 1)
        if ids.size:
            weights = loaded.weights[ids]
            mean = (values[ids] * weights).sum() / weights.sum()
            total += loss_scale * mean / (num_micro * num_ranks)
        else:
            assert loss_scale == 0
    assert total == pytest.approx((values * loaded.weights).sum() / loaded.weights.sum())


@settings(deadline=None, max_examples=60)
@given(batches(2), st.integers(1, 60), st.integers(1, 6), st.sampled_from((0, 9)))
def test_limits_are_kept_or_refused(lens: Lens, tokens: int, items: int, more: int) -> None:
    """Also where the batch as loaded breaks them; what it keeps is never refused."""
    most = [tokens + more * rank for rank in range(len(lens))]  # of each rank
    pairs = [(room, group) for room, groups in zip(most, lens, strict=True) for group in groups]
    is_legal = all(sum(group) <= room and len(group) <= items for room, group in pairs)
    limits = Limits(most if more else tokens, items)
    try:
        _, plans, verdict, _ = decide(lens, accumulate=2, limits=limits)
    except PlanError:
        assert not is_legal
        return
    for plan in plans:
        counts = np.bincount(plan.bag_of, minlength=len(lens))
        assert (plan.tokens <= most).all() and counts.max() <= items
    assert verdict.applied or is_legal


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_items_are_read_as_they_were_described(data: st.DataObject) -> None:
    """In the order of microbatches, then ranks; columns of default values do not travel."""
    num_micro, num_ranks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    whole, rows, words = st.integers(-(2**62), 2**62), list[tuple[int, int, Any]](), []
    for rank in range(num_ranks):
        counts = [data.draw(st.integers(0, 3)) for _ in range(num_micro)]
        draw = {"weights": st.integers(0, 9), "forms": whole, "pairs": st.floats(0, 1e30)}
        columns: dict[str, Any] = {
            name: data.draw(st.none() | st.lists(of, min_size=sum(counts), max_size=sum(counts)))
            for name, of in draw.items()
        }
        lens = [data.draw(st.integers(0, 2**40)) for _ in range(sum(counts))]
        offer = Offer.of(np.array(counts)[:, None], lens, num_bytes=[7] * len(lens), **columns)
        words.append(offer.to_words())
        defaults = {"weights": 1, "forms": 0, "pairs": -1.0}
        for place, micro in enumerate(np.repeat(np.arange(num_micro), counts).tolist()):
            own = [(columns[k] or [defaults[k]] * len(lens))[place] for k in defaults]
            rows.append((micro, rank, (lens[place], 7, *own)))
    items = Offer.from_words(words)
    table = zip(items.lens, items.num_bytes, items.weights, items.forms, items.pairs, strict=True)
    rows.sort(key=lambda row: row[:2])
    assert [tuple(x.item() for x in row) for row in table] == [row[2] for row in rows]
    assert items.micro.tolist() == [row[0] for row in rows]
    assert items.owner.tolist() == [row[1] for row in rows]


def test_a_fixed_overhead_counts_as_time_that_balancing_does_not_save() -> None:
    lens = [[[1000, 1000]], [[1000]], [[1000]]]
    lens[0][0] += [300]
    without = decide(lens, PolynomialCost(0.0, 1e-3, 0.0))[2]
    with_much = decide(lens, PolynomialCost(0.0, 1e-3, 0.0, overhead=1000.0))[2]
    assert without.applied and not with_much.applied and with_much.reason == "gain"
    assert with_much.before == pytest.approx(without.before + 1000.0)


def test_an_exchange_is_weighed_in_seconds_whatever_the_unit_of_the_cost() -> None:
    lens = [[[500, 400]], [[10]]]
    slow = TransformerCost(8, seconds_per_unit=1e6)
    free, told = decide(lens, slow)[2], decide(lens, slow, per_byte=1e6)[2]
    assert (free.reason, told.reason) == ("balanced", "exchange")
    assert decide(lens, TransformerCost(8), per_byte=1e6)[2].reason == "balanced"


@pytest.mark.parametrize(
    ("lens", "changes", "expected"),
    [  # ranks of 101 and 99 or so: at most 1 % could be gained
        ([[[101]], [[99]]], {}, (False, "gain", 101.0, 100.0)),  # not planned: the mean
        ([[[101]], [[99]]], {"min_gain": 0.0}, (False, "even", 101.0, 101.0)),
        ([[[51, 50]], [[50, 49]]], {"min_gain": 0.009}, (True, "balanced", 101.0, 100.0)),
        ([[[70, 30]], [[100]]], {}, (False, "even", 100.0, 100.0)),
        ([[[52, 50]], [[49, 49]]], {"limits": Limits(101)}, (True, "balanced", 102.0, 101.0)),
        ([[[101]], [[99]], [[100]]], {"sync": "step"}, (False, "gain", 101.0, 100.0)),
    ],
)
def test_a_step_is_planned_where_enough_could_be_gained(
    lens: Lens, changes: dict[str, Any], expected: tuple[bool, str, float, float]
) -> None:
    verdict = decide(lens, PolynomialCost(0.0, 1.0, 0.0), **changes)[2]
    assert dataclasses.astuple(verdict) == expected


def test_samples_of_none_are_left_out_and_counted() -> None:
    """In packs as well; a state counts them as read."""
    samples = [[4, None, 5], [None], [], [None, 6]]
    rules = dataclasses.replace(RULES, accumulate=4, length_fn=int, weight_fn=int)
    loaded = load(Source(samples, None).begin((), 0, 1, None), rules, loads=True)
    assert loaded.samples == [[4, 5], [], [], [6]] and [*map(len, loaded.items)] == [3, 1, 0, 2]
    assert loaded.num_missing == 3 and loaded.offer is not None
    assert loaded.offer.lens.tolist() == [4, 5, 6]
    assert loaded.offer.counts.T.tolist() == [[2, 0, 0, 1]]
    packs = Source(samples, Microbatches(None, 9, int)).begin((), 0, 1, None)
    loaded = load(packs, dataclasses.replace(rules, accumulate=2), loads=True)
    assert loaded.samples == [[4, 5], [6]] and [*map(len, loaded.items)] == [5, 1]
    items = Source([["ab", None, "c"]], None, has_packs=True).begin((), 0, 1, None)
    loaded = load(items, dataclasses.replace(RULES, length_fn=ord, unpack=list), loads=True)
    assert loaded.samples == [["a", "b", "c"]] and [*map(len, loaded.items)] == [3]


@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(4, 7),
        np.zeros((4, 7)),
        [[1, 2], [3]],
        [(1, 2)],
        torch.zeros(1, 7),
        np.zeros((0, 7)),
    ],
)
def test_a_batch_has_no_length_by_default(ids: Any) -> None:
    with pytest.raises(ConfigError, match=r'"input_ids" of \d rows, .* input_ids\[0\]'):
        num_input_ids({"input_ids": ids})
    for one in (torch.zeros(7), np.zeros(7), list(range(7)), tuple(range(7)), "abcdefg"):
        assert num_input_ids({"input_ids": one}) == 7
    assert num_input_ids({"input_ids": []}) == 0


@pytest.mark.parametrize(
    ("lens", "num_bytes"),
    [
        ([[[900, 90]], [[10]]], 16 * 91),
        ([[[100, 90]], [[100, 90]], [[]]], 2 * 16 * 91),  # from two ranks to one
        ([[[100, 90, 90]], [[]], [[]]], 2 * 16 * 91),  # and from one to two
    ],
)
def test_an_exchange_longer_than_what_it_saves_is_skipped(lens: Lens, num_bytes: int) -> None:
    """As long as for the rank that sends or receives most, but for what the step itself hides."""
    cost = PolynomialCost(0.0, 1e-3, 0.0)
    free = decide(lens, cost, min_gain=0.0)[2]
    assert free.reason == "balanced"
    for share, reason in ((0.99, "balanced"), (1.01, "exchange")):
        per_byte = (free.after + (free.before - free.after) * share) / num_bytes
        assert decide(lens, cost, per_byte=per_byte, min_gain=0.0)[2].reason == reason


@pytest.mark.parametrize("slowdown", [0.8, 1.25])
def test_steps_that_stay_measure_whether_moving_pays(
    slowdown: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps of two ranks, which report their seconds three steps later, as the loader does."""
    redistributor, random = redistributor_of(ranks_of(2)), np.random.default_rng(0)
    untried = redistributor_of(ranks_of(2), tries=False)
    seconds, reasons, most, longest = dict[int, float](), list[str](), 0, 0
    for step in range(120):
        if step == 60:
            redistributor.restore(redistributor.state())
        times = np.full((2, 7), math.nan)
        times[:, :2] = [[step - 3, seconds.get(step - 3, math.nan)]] * 2
        redistributor._judge(step, times)
        scale = 1.5 if step == 0 else random.uniform(0.8, 1.0)
        lens = [int(scale * length) for length in (2000, *random.integers(900, 1100, 7))]
        lens[0] += 2000 * (step == 100)
        offer = loaded_of([[lens[:4]], [lens[4:]]], 1)
        decided = redistributor.decide(offer)
        assert untried._with_trial(step, offer, decided) is decided
        decision = redistributor._with_trial(step, offer, decided)
        verdict, (plan,) = decision.verdict, decision.plans
        reasons.append(verdict.reason)
        seconds[step] = verdict.before * random.normal(1.0, 0.02)
        if verdict.applied:
            seconds[step] *= slowdown
        if verdict.reason == "trial":
            assert plan.bag_of.tolist() == [0] * 4 + [1] * 4
            assert plan.tokens.max() <= most and max(lens) <= longest  # no rank needs more memory
        most, longest = max(most, int(plan.tokens.max())), max(longest, *lens)
    assert (reasons[-1] == "slower") == (slowdown > 1.0)
    assert 8 <= reasons.count("trial") <= 24 and "trial" not in reasons[:4]
    gain, error = redistributor.trial.gain or (0.0, 0.0)
    assert gain == pytest.approx(1 / slowdown, abs=4 * error) and error < 0.05
    said = [record.message for record in caplog.records]
    assert len(said) == (slowdown > 1.0) and all("makes steps slower" in line for line in said)


def test_a_version_of_the_cost_that_all_ranks_know() -> None:
    said = [
        Load(offer=Offer.of([[1]], [n], num_bytes=[16]), items=[[None]]).words(version)
        for n, version in ((4, 3), (5, 2), (6, 3))
    ]
    loaded = Loaded.of(said, ranks_of(3), 1)
    assert loaded.cost_version == 2 and loaded.offer.lens.tolist() == [4, 5, 6]
    group = ranks_of(2).group
    peers = Loaded.of(said[:2], DataRanks(group, np.array([0, 0]), group), 1)
    assert peers.cost_version == 2 and peers.offer.lens.tolist() == [4]


def test_another_iteration_begins_with_the_newest_cost() -> None:
    loaded, _, before, redistributor = decide([[[4000, 100]], [[30]]])
    newest = PolynomialCost(0.0, 1.0, 0.0, 7.0)
    redistributor.set_cost(PolynomialCost(0.0, 3.0, 0.0))
    redistributor.set_cost(newest)
    assert redistributor.decide(loaded).verdict == before  # in this one ranks agree on it first
    redistributor.begin(redistributor.ranks.group, 1)
    assert redistributor.decide(loaded).verdict.before == 4000 + 100 + 7


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_no_rank_is_idle_where_there_are_enough_samples_of_any_weight(data: st.DataObject) -> None:
    """Where as many samples count as there are ranks, each rank gets one of these."""
    lens = data.draw(batches(2))
    num_ranks, loaded = len(lens), loaded_of(lens, 2)
    size = loaded.lens.size
    weights = data.draw(st.lists(st.sampled_from([0, 0, 0, 1, 5]), min_size=size, max_size=size))
    loaded.weights[:] = weights
    decision = redistributor_of(ranks_of(num_ranks), accumulate=2, min_gain=0.0).decide(loaded)
    for micro, plan in enumerate(decision.plans if decision.verdict.applied else ()):
        counted = loaded.weights[loaded.micro == micro] > 0
        if counted.size >= num_ranks:
            assert set(plan.bag_of.tolist()) == set(range(num_ranks))
        if np.count_nonzero(counted) >= num_ranks:
            assert set(plan.bag_of[counted].tolist()) == set(range(num_ranks))


# Decisions of the loader and of cost tracking, one rank's part at a time


def ranks_at(places: list[int]) -> DataRanks:
    group = RankGroup(lambda: None, 0, tuple(range(len(places))), (), "loader")
    return DataRanks(group, np.array(places), group)


def tracker_of(places: list[int]) -> Any:
    """A tracker of costs on rank 0 of a group, as it is once all ranks have agreed on it."""
    tracker: Any = CostTracker.__new__(CostTracker)
    tracker._ranks = ranks_at(places)
    tracker._num_discarded, tracker._num_wanted, tracker._units = 0, 99, []
    tracker._num_gathered, tracker._device = 0, torch.device("cpu")
    return tracker


def test_a_step_with_padding_in_any_microbatch_teaches_nothing() -> None:
    counts, lens, bag_of = np.array([[1, 1], [4, 6], [0, 1]])
    plan = Plan(Topology(((1, 1),), 2), counts, lens, bag_of, lens * 1.0, 0.0)
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
    plan = Plan(Topology(((1, 1),), 2), np.array([2, 1]), lens, bag_of, loads, 0.0)
    for tokens, wanted in ((24, [1, 0, 1]), (16, [0, 0, 1])):
        found = without_idle_ranks(plan, np.array([1, 1, 0]), costs, Limits(tokens=tokens))
        assert found.bag_of.tolist() == wanted
        assert found.loads.tolist() == np.bincount(wanted, lens).tolist()


def test_steps_are_counted_with_what_the_training_waited_for() -> None:
    def step(num_padded: int, verdict: Verdict, *num_bytes: int, start: float, end: float) -> Any:
        batches = [SimpleNamespace(verdict=verdict, is_padding=k < num_padded) for k in range(2)]
        return ReadyStep(batches, np.ones((1, 2)), 3, [], *num_bytes, (start, end), 0.0, ())  # pyright: ignore

    balanced, even = Verdict(True, "balanced", 10.0, 6.0), Verdict(False, "even", 5.0, 3.0)
    metrics = LoaderMetrics()
    # Waited for the middle of an exchange (1 s), its end (1 s), nothing of it, until long after it
    # (4 s); then for none of an exchange, and for half a second of it.
    for waited in ((2.0, 3.0), (4.0, 7.0), (5.5, 8.0), (0.0, 9.0)):
        metrics.count(step(1, balanced, 16, 48, start=1.0, end=5.0), waited)
    metrics.count(step(0, even, 1, 2, start=10.0, end=12.0), (2.0, 3.0))
    metrics.count(step(0, even, 0, 0, start=10.0, end=12.0), (9.0, 10.5))
    wanted: dict[str, Any] = {"exchange_s": 20.0, "exposed_s": 6.5, "hidden_s": 20.0 - 6.5}
    wanted |= {"steps": 6, "applied": 4, "skipped": {"even": 2}, "padded": 4, "none_samples": 18}
    wanted |= {"sent_bytes": 65, "received_bytes": 194}
    wanted |= {"predicted_before": 50.0, "predicted_after": 4 * 6.0 + 2 * 5.0}
    assert metrics == LoaderMetrics(**wanted)


# What a balanced loader makes of its arguments; no ranks. Wrong ones: `tests/refusals/data.py`


def made(**changes: Any) -> _Setup:
    """The settings with some of them changed."""
    names = LoaderOptions.__dataclass_fields__.keys() & changes.keys()
    options = LoaderOptions(**{name: changes.pop(name) for name in names})
    settings: dict[str, Any] = {"loader": (), "cost": PolynomialCost(0.0, 1.0, 0.0), "pack": None}
    settings |= {"length_fn": len, "accumulate": 1, "sync": "microbatch", **changes}
    return _set_up(**settings, options=options)


def test_all_settings_but_those_of_a_rank_alone_are_compared() -> None:
    """Ranks may load and collate as they like, and as many steps ahead."""
    changes = {"accumulate": 2, "sync": "step", "limits": Limits(tokens=5), "ends": "finish"}
    changes |= {"length_fn": sum, "weight_fn": len, "unpack": list, "timeout_s": 61.0}
    changes |= {"min_gain": 0.03, "bytes_per_s": 1e9, "as_loaded": list, "tries": False}
    changes |= {"cost": PolynomialCost(0.0, 2.0, 0.0)}
    base = made().settings
    for name, value in changes.items():
        settings = made(**{name: value}).settings
        assert settings.keys() == base.keys() and settings != base
    for free in ({"collate_fn": list}, {"prefetch": 3}, {"batch_size": 2}):
        assert made(**free).settings == base
