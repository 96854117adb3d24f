"""Samplers of all ranks, side by side in one process."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from bascule.data import BalancedSampler, SamplerOptions
from bascule.data import samplers as dealt
from bascule.errors import ConfigError, PlanError
from bascule.machine.costs import TransformerCost
from bascule.plan.epoch import Deal, DealRules, StepShape, deal_step, epoch_order
from bascule.plan.limits import Limits
from bascule.plan.plan import Sync
from tests.helpers.simulation import squares

COST = TransformerCost(64)
Array = np.ndarray
SYNCS: list[Sync] = ["microbatch", "step"]


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


def test_the_samples_of_a_step_are_the_same_whatever_the_ranks() -> None:
    lengths = drawn(100)
    worlds = [(1, 2, 8), (2, 2, 4), (4, 2, 2), (8, 2, 1), (2, 8, 1), (4, 1, 4), (16, 1, 1)]
    found: list[list[list[int]]] = []
    for ranks, size, each in worlds:
        steps = steps_of(ranks_of(lengths, ranks, batch_size=size, accumulate=each))
        found.append([sorted(flat([step])) for step in steps])
    for other in found[1:]:
        assert other[:5] == found[0][:5] and sorted(itertools.chain(*other)) == list(range(100))
    assert [len(step) for step in found[0]] == [16, 16, 16, 16, 16, 10, 10]
    assert [len(step) for step in found[-1]] == [16] * 5 + [20]


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
        assert takes <= 1.06 * deal.lower_bound
        cells = np.arange(64) % 16
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
    assert deal.makespan == 130.0 and deal.makespan <= deal.lower_bound * (1 + 1e-9)
    assert deal.microbatch_of[0] == deal.microbatch_of[1]


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
    shards, lengths = np.arange(64) % 4, drawn(64)
    options = SamplerOptions(shards=shards, shuffle=False)
    deal = ranks_of([100] * 64, 4, tokens, batch_size=4, options=options)[0].deal(0)
    assert deal.makespan <= deal.lower_bound * (1 + 1e-9)
    assert (deal.rank_of == shards[deal.samples]).mean() > 0.9
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
    uneven, weighted = SamplerOptions(even_counts=False), SamplerOptions(weights=weights)
    for options in (SamplerOptions(), uneven, weighted):
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
        options: dict[str, Any] = {"num_workers": num_workers, "collate_fn": list}
        return StatefulDataLoader(range(40), batch_sampler=sampler, **options)  # pyright: ignore

    loader = make()
    iterator = iter(loader)
    first = [next(iterator) for _ in range(7)]
    state = loader.state_dict()
    rest = list(iterator)
    assert sorted(itertools.chain(*first, *rest)) == list(range(40))
    again = make()
    again.load_state_dict(state)
    assert list(again) == rest


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 1}, "the state has seed=1, this sampler has 0"),
        ({"num_samples": 9}, "the state has num_samples=9, this sampler has 10"),
        ({"shuffle": False}, "shuffle=False"),
        ({"version": 1}, "version=1"),
        ({"delivered": 11}, "11 samples were delivered .* but there are 10"),
        ({"delivered": -1}, "delivered of the state is -1"),
        ({"epoch": "x"}, "epoch of the state is 'x'"),
        ({"more": 1}, "has the entries"),
        (
            {"delivered": 9},
            r"1 samples of epoch 0 are left, too few for a step of 2 .*set_epoch\(1\)",
        ),
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
    for sync, padded in itertools.product(SYNCS, (False, True)):
        rules: dict[str, Any] = {"sync": sync, "padded": padded, "even_counts": not padded}
        options = SamplerOptions(limits=Limits(tokens=800), **rules)
        steps = steps_of(ranks_of(lengths, 3, accumulate=2, batch_size=3, options=options))
        assert sorted(flat(steps)) == list(range(120))
        for batch in (lengths[batch] for step in steps for row in step for batch in row):
            assert (batch.max() * batch.size if padded else batch.sum()) <= 800


def test_limits_that_cannot_be_kept() -> None:
    for padded in (False, True):
        options = SamplerOptions(limits=Limits(tokens=50), padded=padded)
        sampler = ranks_of([40] * 8, 2, options=options)[0]
        with pytest.raises(PlanError, match="epoch 0, step 0 from resume: "):
            next(iter(sampler))
    options = SamplerOptions(limits=Limits(tokens=50), padded=True, even_counts=False)
    with pytest.raises(PlanError, match="8 samples of a step do not fit into 2 padded batches"):
        next(iter(ranks_of([40] * 8, 2, batch_size=4, options=options)[0]))


# --- hostile input


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


# Worlds of any size


LENGTHS = st.one_of(st.integers(0, 9), st.integers(1, 500), st.just(20_000))


def samplers_of(world: StepShape, lengths: list[int], **options: Any) -> list[BalancedSampler]:
    """Samplers of ranks that share an epoch."""
    sizes = {"batch_size": world.batch_size, "accumulate": world.accumulate, "seed": 5}
    return ranks_of(lengths, world.num_ranks, squares, **sizes, **options)


WORLDS = st.builds(StepShape, st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
SWITCHES = dict.fromkeys(("even_counts", "padded", "shuffle"), st.booleans())
OPTIONS = st.builds(SamplerOptions, sync=st.sampled_from(SYNCS), **SWITCHES)


def outcomes_of(costs: Array, cells: Array, rules: DealRules) -> tuple[Array, Array]:
    """When a step ends, and how many samples each cell has, by each row of `cells`."""
    shape = rules.shape
    is_in = cells[..., None] == np.arange(shape.num_cells)
    counts, each = is_in.sum(axis=-2), is_in * costs[:, None]
    loads = counts * each.max(axis=-2, initial=0.0) if rules.padded else each.sum(axis=-2)
    table = loads.reshape(*cells.shape[:-1], shape.accumulate, shape.num_ranks)
    by_step = table.sum(axis=-2).max(axis=-1)
    return table.max(axis=-1).sum(axis=-1) if rules.sync == "microbatch" else by_step, counts


def check_step(deal: Deal, lengths: list[int], world: StepShape, options: SamplerOptions) -> None:
    num = deal.samples.size
    rules = DealRules(world, options.sync, None, options.even_counts, options.padded)
    cells = deal.microbatch_of * world.num_ranks + deal.rank_of
    costs = squares(np.array(lengths)[deal.samples])
    ends, counts = outcomes_of(costs, cells, rules)
    assert np.isclose(deal.makespan, ends, rtol=1e-12)
    plain, _ = outcomes_of(costs, np.arange(num) % world.num_cells, rules)
    assert deal.lower_bound <= deal.makespan <= plain * (1 + 1e-12)
    assert counts.min() >= 1
    if options.even_counts:
        assert counts.max() <= -(-num // world.num_cells)
        assert num < world.full or counts.max() <= max(world.batch_size, 2)


@given(st.lists(LENGTHS, min_size=1, max_size=60), WORLDS, OPTIONS, st.integers(0, 3))
@settings(deadline=None, max_examples=75)
def test_an_epoch_is_whole_and_its_steps_are_those_of_the_plain_order(
    lengths: list[int], world: StepShape, options: SamplerOptions, epoch: int
) -> None:
    assume(len(lengths) >= world.num_cells)
    samplers = samplers_of(world, lengths, options=options)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    order = epoch_order(len(lengths), shuffle=options.shuffle, seed=5, epoch=epoch)
    deals = [samplers[0].deal(step) for step in range(len(samplers[0]) // world.accumulate)]
    assert np.array_equal(np.concatenate([deal.samples for deal in deals]), order)
    batches = list(zip(*samplers, strict=True))
    assert len(batches) == len(deals) * world.accumulate
    for number, deal in enumerate(deals):
        check_step(deal, lengths, world, options)
        step = batches[number * world.accumulate :][: world.accumulate]
        dealt = [index for row in step for batch in row for index in batch]
        assert sorted(dealt) == sorted(deal.samples.tolist())
        places = range(number * world.accumulate, (number + 1) * world.accumulate)
        scales = [sampler.loss_scale(place) for sampler in samplers for place in places]
        assert np.isclose(np.mean(scales), 1.0)
    assert all(batch for row in batches for batch in row)


@given(st.lists(LENGTHS, min_size=6, max_size=60), WORLDS, WORLDS, st.integers(0, 100))
@settings(deadline=None, max_examples=60)
def test_a_run_of_other_ranks_finishes_the_epoch(
    lengths: list[int], first: StepShape, second: StepShape, stop: int
) -> None:
    assume(len(lengths) >= max(first.num_cells, second.num_cells))
    samplers = samplers_of(first, lengths)
    taken = [list(itertools.islice(sampler, stop)) for sampler in samplers]
    states = [sampler.state_dict() for sampler in samplers]
    assert all(state == states[0] for state in states)
    whole_steps = len(taken[0]) // first.accumulate * first.accumulate
    done = {index for batches in taken for batch in batches[:whole_steps] for index in batch}
    left = len(lengths) - len(done)
    assert states[0]["delivered"] == len(done)
    assume(left == 0 or left >= second.num_cells)
    again = samplers_of(second, lengths)
    for sampler in again:
        sampler.load_state_dict(states[0])
        sampler.set_epoch(0)  # as a training loop does; the epoch of the state goes on
    rest = [index for sampler in again for batch in sampler for index in batch]
    assert sorted([*rest, *done]) == list(range(len(lengths)))
    if first == second:
        own = [list(sampler) for sampler in samplers_of(first, lengths)]
        for sampler, batches in zip(again, own, strict=True):
            sampler.load_state_dict(states[0])
            assert list(sampler) == batches[whole_steps:]


SMALL = st.sampled_from([(1, 2, 2), (2, 2, 1), (3, 2, 1), (2, 1, 3), (1, 3, 1), (1, 2, 3)])


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), SMALL, OPTIONS)
@settings(deadline=None, max_examples=75)
def test_no_deal_beats_the_bound(
    lengths: list[int], size: tuple[int, int, int], choice: SamplerOptions
) -> None:
    shape = StepShape(*size)
    assume(shape.num_cells <= len(lengths))
    costs = np.array(lengths, dtype=np.float64)
    rules = DealRules(shape, choice.sync, None, choice.even_counts, choice.padded)
    deal = deal_step(costs, costs.astype(np.int64), rules)
    most = -(-len(lengths) // shape.num_cells) if choice.even_counts else len(lengths)
    options = np.array([*itertools.product(range(shape.num_cells), repeat=len(lengths))])
    ends, counts = outcomes_of(costs, options, rules)
    best = ends[(counts.min(axis=1) >= 1) & (counts.max(axis=1) <= most)].min()
    assert deal.lower_bound <= best * (1 + 1e-9) and deal.makespan >= best * (1 - 1e-12)
