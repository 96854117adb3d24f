"""Samplers of any worlds: nothing is lost or repeated, steps are those of the plain order, and no
deal beats the bound."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bascule.data import BalancedSampler, SamplerOptions
from bascule.plan.epoch.deal import Deal, DealRules, deal_in_turn, deal_step
from bascule.plan.epoch.order import StepShape, epoch_order
from bascule.plan.step import Sync

SYNCS: list[Sync] = ["microbatch", "step"]
LENGTHS = st.one_of(st.integers(0, 9), st.integers(1, 500), st.just(20_000))


def squares(seq_lens: Any) -> np.ndarray:
    return np.asarray(seq_lens, dtype=np.float64) ** 2


@dataclass(frozen=True)
class World:
    """Ranks that share an epoch."""

    num_ranks: int
    batch_size: int
    accumulate: int

    @property
    def shape(self) -> StepShape:
        return StepShape(self.batch_size, self.num_ranks, self.accumulate)

    def samplers(self, lengths: list[int], options: SamplerOptions) -> list[BalancedSampler]:
        return [
            BalancedSampler(
                lengths,
                squares,
                batch_size=self.batch_size,
                num_ranks=self.num_ranks,
                rank=rank,
                seed=5,
                accumulate=self.accumulate,
                options=options,
            )
            for rank in range(self.num_ranks)
        ]


WORLDS = st.builds(World, st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
OPTIONS = st.builds(
    SamplerOptions,
    sync=st.sampled_from(SYNCS),
    even_counts=st.booleans(),
    padded=st.booleans(),
    shuffle=st.booleans(),
)


def makespan_of(costs: np.ndarray, cells: np.ndarray, rules: DealRules) -> float:
    shape = rules.shape
    loads = np.bincount(cells, costs, shape.num_cells)
    if rules.padded:
        counts = np.bincount(cells, minlength=shape.num_cells)
        tops = [costs[cells == k].max(initial=0.0) for k in range(shape.num_cells)]
        loads = counts * np.array(tops)
    table = loads.reshape(shape.accumulate, shape.num_ranks)
    return float(table.max(axis=1).sum() if rules.sync == "microbatch" else table.sum(0).max())


def check_step(deal: Deal, lengths: list[int], world: World, options: SamplerOptions) -> None:
    shape, num = world.shape, deal.samples.size
    rules = DealRules(shape, options.sync, None, options.even_counts, options.padded)
    cells = deal.microbatch_of * world.num_ranks + deal.rank_of
    costs = squares(np.array(lengths)[deal.samples])
    assert np.isclose(deal.makespan, makespan_of(costs, cells, rules), rtol=1e-12)
    plain = makespan_of(costs, deal_in_turn(num, shape), rules)
    assert deal.lower_bound <= deal.makespan <= plain * (1 + 1e-12)
    counts = np.bincount(cells, minlength=shape.num_cells)
    assert counts.min() >= 1
    if options.even_counts:
        assert counts.max() <= -(-num // shape.num_cells)
        assert num < shape.full or counts.max() <= max(world.batch_size, 2)


@given(st.lists(LENGTHS, min_size=1, max_size=60), WORLDS, OPTIONS, st.integers(0, 3))
@settings(deadline=None, max_examples=150)
def test_an_epoch_is_whole_and_its_steps_are_those_of_the_plain_order(
    lengths: list[int], world: World, options: SamplerOptions, epoch: int
) -> None:
    assume(len(lengths) >= world.shape.num_cells)
    samplers = world.samplers(lengths, options)
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
        scales = [
            sampler.loss_scale(number * world.accumulate + microbatch)
            for sampler in samplers
            for microbatch in range(world.accumulate)
        ]
        assert np.isclose(np.mean(scales), 1.0)
    assert all(batch for row in batches for batch in row)


@given(st.lists(LENGTHS, min_size=6, max_size=60), WORLDS, WORLDS, st.integers(0, 100))
@settings(deadline=None, max_examples=100)
def test_a_run_of_other_ranks_finishes_the_epoch(
    lengths: list[int], first: World, second: World, stop: int
) -> None:
    assume(len(lengths) >= max(first.shape.num_cells, second.shape.num_cells))
    samplers = first.samplers(lengths, SamplerOptions())
    taken = [list(itertools.islice(sampler, stop)) for sampler in samplers]
    states = [sampler.state_dict() for sampler in samplers]
    assert all(state == states[0] for state in states)
    whole_steps = len(taken[0]) // first.accumulate * first.accumulate
    done = {index for batches in taken for batch in batches[:whole_steps] for index in batch}
    left = len(lengths) - len(done)
    assert states[0]["delivered"] == len(done)
    assume(left == 0 or left >= second.shape.num_cells)
    again = second.samplers(lengths, SamplerOptions())
    for sampler in again:
        sampler.load_state_dict(states[0])
    rest = [index for sampler in again for batch in sampler for index in batch]
    assert sorted([*rest, *done]) == list(range(len(lengths)))
    if first == second:
        own = [list(sampler) for sampler in first.samplers(lengths, SamplerOptions())]
        for sampler, batches in zip(again, own, strict=True):
            sampler.load_state_dict(states[0])
            assert list(sampler) == batches[whole_steps:]


SMALL = st.sampled_from([(1, 2, 2), (2, 2, 1), (3, 2, 1), (2, 1, 3), (1, 3, 1), (1, 2, 3)])


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
    SMALL,
    st.sampled_from(SYNCS),
    st.booleans(),
    st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_no_deal_beats_the_bound(
    lengths: list[int], size: tuple[int, int, int], sync: Sync, even: bool, padded: bool
) -> None:
    shape = StepShape(*size)
    assume(shape.num_cells <= len(lengths))
    costs = np.array(lengths, dtype=np.float64)
    rules = DealRules(shape, sync, None, even, padded)
    deal = deal_step(costs, costs.astype(np.int64), rules)
    most = -(-len(lengths) // shape.num_cells) if even else len(lengths)
    best = np.inf
    for option in itertools.product(range(shape.num_cells), repeat=len(lengths)):
        cells = np.array(option)
        counts = np.bincount(cells, minlength=shape.num_cells)
        if counts.min() >= 1 and counts.max() <= most:
            best = min(best, makespan_of(costs, cells, rules))
    assert deal.lower_bound <= best * (1 + 1e-9) and deal.makespan >= best * (1 - 1e-12)
