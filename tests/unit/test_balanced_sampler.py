"""Samplers of all ranks, side by side in one process."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from bascule.data import BalancedSampler, ResumableSampler, SamplerOptions
from bascule.data import samplers as dealt
from bascule.errors import ConfigError, PlanError
from bascule.plan.costs import TransformerCost
from bascule.plan.epoch.deal import DealRules, deal_in_turn, deal_step
from bascule.plan.epoch.order import StepShape
from bascule.plan.limits import Limits

COST = TransformerCost(64)


def tokens(seq_lens: Any) -> np.ndarray:
    return np.asarray(seq_lens, dtype=np.float64)


def drawn(num: int, seed: int = 0, spread: float = 0.8) -> list[int]:
    return np.random.default_rng(seed).lognormal(5.0, spread, num).astype(int).tolist()


def ranks_of(lengths: Any, num_ranks: int, cost: Any = COST, **given: Any) -> list[BalancedSampler]:
    given = {"batch_size": 2} | given
    return [
        BalancedSampler(lengths, cost, num_ranks=num_ranks, rank=rank, **given)
        for rank in range(num_ranks)
    ]


def steps_of(samplers: Sequence[BalancedSampler]) -> list[list[list[list[int]]]]:
    """[step][microbatch][rank] indices, of all that is left of the epoch."""
    lengths = {len(sampler) for sampler in samplers}
    batches = list(zip(*samplers, strict=True))  # the same number on all ranks
    each = samplers[0].accumulate
    assert len(batches) % each == 0 and lengths == {len(batches)}
    return [[list(row) for row in batches[k : k + each]] for k in range(0, len(batches), each)]


def flat(nested: Any) -> list[int]:
    return [index for step in nested for row in step for batch in row for index in batch]


def test_a_full_step_has_the_samples_of_the_plain_order_and_batches_of_one_size() -> None:
    lengths = drawn(96)
    plain = list(ResumableSampler(96, rank=0, num_ranks=1, seed=7))
    samplers = ranks_of(lengths, 4, seed=7, batch_size=3, accumulate=2)
    steps = steps_of(samplers)
    assert len(steps) == 4
    for number, step in enumerate(steps):
        assert sorted(flat([step])) == sorted(plain[24 * number : 24 * number + 24])
        assert {len(batch) for row in step for batch in row} == {3}


def test_the_samples_of_a_step_are_the_same_whatever_the_ranks() -> None:
    lengths = drawn(100)
    worlds = [(1, 2, 8), (2, 2, 4), (4, 2, 2), (8, 2, 1), (2, 8, 1), (4, 1, 4), (16, 1, 1)]
    found = [
        [
            sorted(flat([step]))
            for step in steps_of(ranks_of(lengths, ranks, batch_size=size, accumulate=each))
        ]
        for ranks, size, each in worlds
    ]
    for other in found[1:]:
        assert other[:5] == found[0][:5] and sorted(itertools.chain(*other)) == list(range(100))
    assert [len(step) for step in found[0]] == [16, 16, 16, 16, 16, 10, 10]
    assert [len(step) for step in found[-1]] == [16] * 5 + [20]


@pytest.mark.parametrize(
    ("shape", "left", "sizes"),
    [
        ((2, 2, 1), 8, [4, 4]),
        ((2, 2, 1), 11, [4, 4, 3]),
        ((2, 2, 1), 9, [4, 3, 2]),
        ((2, 2, 1), 5, [3, 2]),
        ((1, 4, 1), 9, [4, 5]),
        ((1, 4, 1), 7, [7]),
        ((1, 2, 2), 3, [3]),
        ((3, 1, 1), 1, [1]),
        ((3, 1, 1), 0, []),
        ((8, 4, 2), 130, [64, 33, 33]),
    ],
)
def test_where_an_epoch_is_cut(shape: tuple[int, int, int], left: int, sizes: list[int]) -> None:
    cut = StepShape(*shape)
    assert list(cut.sizes(left)) == sizes
    assert cut.num_steps(left) == len(sizes)
    assert [cut.samples_in(left, k) for k in range(len(sizes) + 1)] == [
        sum(sizes[:k]) for k in range(len(sizes) + 1)
    ]
    assert cut.most_in_a_cell(left) == max((-(-size // cut.num_cells) for size in sizes), default=0)


@pytest.mark.parametrize("sync", ["microbatch", "step"])
@pytest.mark.parametrize("even", [True, False])
def test_steps_are_even_and_their_bound_holds(sync: Any, even: bool) -> None:
    lengths = np.array(drawn(512, seed=1, spread=0.4))
    options = SamplerOptions(sync=sync, even_counts=even)
    sampler = ranks_of(lengths, 4, tokens, batch_size=4, accumulate=4, options=options)[1]
    total = 0.0
    for step in range(8):
        deal = sampler.deal(step)
        loads = np.zeros((4, 4))
        np.add.at(loads, (deal.microbatch_of, deal.rank_of), lengths[deal.samples])
        assert np.array_equal(loads, deal.loads)
        takes = loads.max(axis=1).sum() if sync == "microbatch" else loads.sum(axis=0).max()
        assert takes == deal.makespan and deal.lower_bound <= takes
        assert deal.gap < 0.06
        cells = deal_in_turn(64, StepShape(4, 4, 4))
        plain = np.bincount(cells, lengths[deal.samples], 16).reshape(4, 4)
        naive = plain.max(axis=1).sum() if sync == "microbatch" else plain.sum(axis=0).max()
        assert takes <= naive
        total += takes / naive / 8
    assert total < 0.95


def test_giants_share_a_microbatch_with_the_longest() -> None:
    """Apart, each would hold up its own microbatch."""
    costs = np.array([100.0, 90.0] + [10.0] * 6)
    shape = StepShape(1, 2, 4)
    deal = deal_step(costs, costs.astype(np.int64), DealRules(shape))
    assert deal.makespan == 130.0 and deal.gap < 1e-9
    assert deal.microbatch_of[0] == deal.microbatch_of[1]


def test_padded_batches_hold_samples_of_like_lengths() -> None:
    lengths = drawn(256, seed=2)
    (plain, *_) = ranks_of(lengths, 4, tokens, batch_size=8)
    options = {even: SamplerOptions(padded=True, even_counts=even) for even in (True, False)}
    found = {
        even: ranks_of(lengths, 4, tokens, batch_size=8, options=one)[0]
        for even, one in options.items()
    }
    for step in range(8):
        deals = {even: sampler.deal(step) for even, sampler in found.items()}
        for deal in deals.values():
            for rank in range(4):
                batch = deal.batch(rank, 0)
                longest = max(lengths[index] for index in batch)
                assert deal.loads[0, rank] == longest * batch.size
        padded = [max(lengths[k] for k in plain.deal(step).batch(r, 0)) * 8 for r in range(4)]
        assert deals[True].makespan <= max(padded)
        assert deals[False].gap <= 0.25 and deals[False].makespan < 0.6 * max(padded)


def test_the_best_padded_partition_of_one_microbatch() -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        costs = rng.integers(1, 30, 7).astype(float)
        rules = DealRules(StepShape(1, 3, 1), even_counts=False, padded=True, tolerance=0.0001)
        deal = deal_step(costs, costs.astype(np.int64), rules)
        best = min(
            max(costs[np.array(c) == k].max() * c.count(k) for k in range(3))
            for c in itertools.product(range(3), repeat=7)
            if len(set(c)) == 3
        )
        assert best <= deal.makespan <= best * 1.0001 and deal.lower_bound <= best


def test_all_ranks_deal_alike_and_twice_the_same() -> None:
    given: dict[str, Any] = {"batch_size": 2, "accumulate": 2, "seed": 3}
    samplers = ranks_of(drawn(50), 3, **given)
    deals = [[s.deal(k) for k in range(4)] for s in samplers]
    for other in deals[1:]:
        for one, two in zip(deals[0], other, strict=True):
            assert np.array_equal(one.samples, two.samples)
            assert np.array_equal(one.rank_of, two.rank_of)
    assert steps_of(samplers) == steps_of(ranks_of(drawn(50), 3, **given))
    assert steps_of(samplers) == steps_of(samplers)  # again, the same epoch


def test_epochs_have_orders_of_their_own() -> None:
    samplers = ranks_of(drawn(40), 2)
    first = steps_of(samplers)
    for sampler in samplers:
        sampler.set_epoch(1)
    second = steps_of(samplers)
    assert first != second and sorted(flat(second)) == list(range(40))
    for sampler in samplers:
        sampler.set_epoch(0)
    assert steps_of(samplers) == first
    options = SamplerOptions(shuffle=False)
    straight = steps_of(ranks_of(drawn(8), 2, options=options))
    assert [sorted(flat([step])) for step in straight] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_shards_stay_at_home_where_it_costs_nothing() -> None:
    lengths, shards = [100] * 64, np.arange(64) % 4
    for accumulate in (1, 2):
        for sync in ("microbatch", "step"):
            options = SamplerOptions(shards=shards, shuffle=False, sync=sync)  # type: ignore[arg-type]
            given: Any = {"batch_size": 4, "accumulate": accumulate, "options": options}
            deal = ranks_of(lengths, 4, tokens, **given)[0].deal(0)
            assert deal.gap < 1e-9
            assert (deal.rank_of == shards[deal.samples]).mean() > (0.9 if accumulate == 1 else 0.3)
    lengths = drawn(64)
    plain = ranks_of(lengths, 4, tokens, batch_size=4)[0]
    options = SamplerOptions(shards=shards.tolist())
    home = ranks_of(lengths, 4, tokens, batch_size=4, options=options)[0]
    for step in range(4):
        before, after = plain.deal(step), home.deal(step)
        at_home = [(deal.rank_of == shards[deal.samples]).sum() for deal in (before, after)]
        assert after.makespan <= before.lower_bound * 1.02 and at_home[1] >= at_home[0]


# --- the loss


def test_loss_scales_make_the_mean_over_the_step() -> None:
    """Mean over ranks of the sum over microbatches of mean * scale / accumulate."""
    lengths = drawn(53)
    values = np.random.default_rng(0).normal(size=53)
    weights = np.random.default_rng(1).integers(0, 4, 53)
    for options in (
        SamplerOptions(),
        SamplerOptions(even_counts=False),
        SamplerOptions(weights=weights),
    ):
        samplers = ranks_of(lengths, 3, accumulate=2, options=options)
        weight = np.ones(53) if options.weights is None else weights
        steps = steps_of(samplers)
        for number, step in enumerate(steps):
            got = 0.0
            for microbatch, row in enumerate(step):
                for sampler, batch in zip(samplers, row, strict=True):
                    total = weight[batch].sum()
                    mean = (values * weight)[batch].sum() / max(total, 1)
                    scale = sampler.loss_scale(2 * number + microbatch)
                    got += mean * scale / (2 * 3)
                    full = sum(len(batch) for row in step for batch in row) == 12
                    if full and options.weights is None and options.even_counts:
                        assert scale == 1.0
            every = flat([step])
            want = (values * weight)[every].sum() / weight[every].sum()
            assert got == pytest.approx(want, rel=1e-12)


def test_samples_that_count_nothing() -> None:
    (sampler,) = ranks_of([5] * 4, 1, options=SamplerOptions(weights=[0, 0, 0, 0]))
    list(sampler)
    assert [sampler.loss_scale(k) for k in range(2)] == [0.0, 0.0]


def test_a_loss_scale_of_a_batch_that_was_not_handed_out() -> None:
    (sampler,) = ranks_of(drawn(8), 1)
    with pytest.raises(ConfigError, match=r"loss_scale\(0\): 0 batches were handed out"):
        sampler.loss_scale(0)
    next(iter(sampler))
    assert sampler.loss_scale(0) == 1.0
    with pytest.raises(ConfigError, match=r"loss_scale\(1\): 1 batches"):
        sampler.loss_scale(1)


# --- resume


def test_resume_after_every_step_on_any_number_of_ranks() -> None:
    lengths = drawn(75)
    order = list(ResumableSampler(75, rank=0, num_ranks=1, seed=2))
    whole = steps_of(ranks_of(lengths, 2, seed=2, accumulate=2))
    for stop in range(len(whole) + 1):
        samplers = ranks_of(lengths, 2, seed=2, accumulate=2)
        for sampler in samplers:
            list(itertools.islice(sampler, 2 * stop))
        states = [json.loads(json.dumps(sampler.state_dict())) for sampler in samplers]
        assert states[0] == states[1]
        done = len(flat(whole[:stop]))
        assert states[0]["delivered"] == done
        again = ranks_of(lengths, 2, seed=2, accumulate=2)
        for sampler in again:
            sampler.load_state_dict(states[0])
            sampler.set_epoch(0)  # as a training loop does; the epoch of the state goes on
        assert steps_of(again) == whole[stop:]
        for num_ranks, size, each in ((1, 2, 1), (3, 1, 2), (4, 3, 1)):
            if 0 < 75 - done < num_ranks * each:
                continue
            others = ranks_of(lengths, num_ranks, seed=2, batch_size=size, accumulate=each)
            for sampler in others:
                sampler.load_state_dict(states[0])
            rest = steps_of(others)
            place = done
            for step in rest:  # the order goes on, step by step
                size = len(flat([step]))
                assert sorted(flat([step])) == sorted(order[place : place + size])
                place += size
            assert place == 75


def test_an_epoch_that_is_over_is_not_dealt_again_and_the_next_one_is_whole() -> None:
    samplers = ranks_of(drawn(16), 2)
    steps_of(samplers)
    state = samplers[0].state_dict()
    assert state["delivered"] == 16
    again = ranks_of(drawn(16), 2)
    for sampler in again:
        sampler.load_state_dict(state)
        assert len(sampler) == 0 and list(sampler) == []
    assert [len(sampler) for sampler in again] == [4, 4]
    assert sorted(flat(steps_of(again))) == list(range(16))


def test_a_step_that_was_begun_is_dealt_again() -> None:
    (sampler,) = ranks_of(drawn(32), 1, accumulate=4)
    batches = list(sampler)
    iterator = iter(sampler)
    taken = [next(iterator) for _ in range(6)]
    assert taken == batches[:6] and sampler.state_dict()["delivered"] == 8
    assert sampler.state_dict(3)["delivered"] == 0  # workers had read ahead
    with pytest.raises(ConfigError, match=r"num_batches is 7; .* at most 6"):
        sampler.state_dict(7)
    (again,) = ranks_of(drawn(32), 1, accumulate=4)
    again.load_state_dict(sampler.state_dict())
    assert list(again) == batches[4:]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_goes_on_where_it_was(num_workers: int) -> None:
    """torchdata keeps the state of the sampler, also where workers read ahead."""

    def make() -> StatefulDataLoader[Any]:
        (sampler,) = ranks_of(drawn(40), 1)
        return StatefulDataLoader(
            list(range(40)),  # pyright: ignore[reportArgumentType]
            batch_sampler=sampler,
            num_workers=num_workers,
            collate_fn=list,
        )

    loader = make()
    iterator = iter(loader)
    first = [next(iterator) for _ in range(7)]
    state = loader.state_dict()
    rest = list(iterator)
    assert sorted(itertools.chain(*first, *rest)) == list(range(40))
    again = make()
    again.load_state_dict(state)
    assert list(again) == rest


def test_a_plain_loader_with_workers() -> None:
    samplers = ranks_of(drawn(30), 2)
    loaders: list[DataLoader[Any]] = [
        DataLoader(range(30), batch_sampler=sampler, num_workers=1, collate_fn=list)  # type: ignore[arg-type]
        for sampler in samplers
    ]
    assert [len(loader) for loader in loaders] == [8, 8]
    assert sorted(index for loader in loaders for batch in loader for index in batch) == list(
        range(30)
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 1}, "the state has seed=1, and this sampler 0"),
        ({"num_samples": 9}, "the state has num_samples=9, and this sampler 10"),
        ({"shuffle": False}, "shuffle=False"),
        ({"version": 1}, "version=1"),
        ({"delivered": 11}, "11 samples were delivered .* and there are 10"),
        ({"delivered": -1}, "delivered of the state is -1"),
        ({"epoch": "x"}, "epoch of the state is 'x'"),
        ({"more": 1}, "has the entries"),
        ({"delivered": 9}, r"1 samples of epoch 0 are left, and a step has 2 .*set_epoch\(1\)"),
    ],
)
def test_states_that_are_refused(change: dict[str, Any], told: str) -> None:
    sampler = ranks_of(drawn(10), 2)[0]
    with pytest.raises(ConfigError, match=told):
        sampler.load_state_dict(sampler.state_dict() | change)
    assert sampler.state_dict()["delivered"] == 0
    permuted = ranks_of(drawn(10)[::-1], 2)[0]
    with pytest.raises(ConfigError, match="the state has lengths="):
        permuted.load_state_dict(sampler.state_dict())
    with pytest.raises(ConfigError, match="what state_dict"):
        sampler.load_state_dict([1])  # type: ignore[arg-type]


# --- limits


def test_limits_hold_in_every_batch() -> None:
    lengths = np.array(drawn(120, seed=5, spread=0.3))
    for sync in ("microbatch", "step"):
        for padded in (False, True):
            options = SamplerOptions(
                limits=Limits(tokens=800),
                sync=sync,
                padded=padded,
                even_counts=not padded,  # type: ignore[arg-type]
            )
            samplers = ranks_of(lengths, 3, accumulate=2, batch_size=3, options=options)
            steps = steps_of(samplers)
            assert sorted(flat(steps)) == list(range(120))
            for batch in (batch for step in steps for row in step for batch in row):
                own = lengths[batch]
                assert (own.max() * own.size if padded else own.sum()) <= 800


def test_limits_that_cannot_be_kept() -> None:
    with pytest.raises(ConfigError, match=r"sample 2 has 50 tokens, above the limit of 40"):
        ranks_of([1, 2, 50, 3], 2, options=SamplerOptions(limits=Limits(tokens=40)))
    with pytest.raises(ConfigError, match=r"Limits\(items=1\): batches have up to 2 samples"):
        ranks_of([1, 2, 3, 4], 2, options=SamplerOptions(limits=Limits(items=1)))
    for padded in (False, True):
        options = SamplerOptions(limits=Limits(tokens=50), padded=padded)
        sampler = ranks_of([40] * 8, 2, options=options)[0]
        with pytest.raises(PlanError, match="epoch 0, step 0 of the rest: "):
            next(iter(sampler))
    options = SamplerOptions(limits=Limits(tokens=50), padded=True, even_counts=False)
    with pytest.raises(PlanError, match="8 samples of a step do not fit into 2 padded batches"):
        next(iter(ranks_of([40] * 8, 2, batch_size=4, options=options)[0]))
    with pytest.raises(ConfigError, match="bytes"):
        ranks_of([1] * 8, 2, options=SamplerOptions(limits=Limits(num_bytes=5)))


# --- hostile input


@pytest.mark.parametrize("lengths", [torch.arange(1, 9), np.arange(1, 9, dtype=np.uint8)])
def test_lengths_of_other_types(lengths: Any) -> None:
    assert steps_of(ranks_of(lengths, 2)) == steps_of(ranks_of(list(range(1, 9)), 2))


def test_without_ranks_it_is_alone() -> None:
    sampler = BalancedSampler([3, 1, 2], COST, batch_size=2)
    assert len(sampler) == 2 and sampler.sampler is sampler and sampler.batch_size == 2
    assert sorted(itertools.chain(*sampler)) == [0, 1, 2]
    with pytest.raises(ConfigError, match="epoch is -1"):
        sampler.set_epoch(-1)
    with pytest.raises(ConfigError, match="step is 2"):
        sampler.deal(2)


def test_steps_are_planned_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []

    def counted(costs: Any, *rest: Any) -> Any:
        planned.append(costs.size)
        return deal_step(costs, *rest)

    monkeypatch.setattr(dealt, "deal_step", counted)
    sampler = ranks_of(np.full(1_000_000, 7), 4, tokens, accumulate=2)[0]
    sampler.set_epoch(3)
    assert len(sampler) == 125_000 and planned == []
    iterator = iter(sampler)
    assert planned == []
    for _ in range(5):
        next(iterator)
    assert planned == [16, 16, 16]
