"""Policies, each with what it needs of a case: theirs and ours."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from bascule.data import BalancedSampler, SamplerOptions
from bascule.machine.cluster import Cluster
from bascule.plan.plan import plan_batch
from bascule.plan.topology_search import suggest_topology
from bascule.plugins.megatron_packing import DynamicPackingScheduler
from baselines.algorithms import (
    DynamicContext,
    HybridContext,
    Ints,
    Price,
    Step,
    as_loaded,
    batch_rebalance,
    bucket_steps,
    cached,
    karmarkar_karp,
    next_fit,
)
from baselines.cases import (
    GROUPED,
    GROUPED_BATCHES,
    Case,
    Epoch,
    Policy,
    Rebalance,
    epoch_of,
    makespan,
    shared_makespan,
)

MOST_REAL, MOST_AUTO = 8, 256
"""Ranks up to which batch_rebalance itself, and bags of each step, are decided: seconds a step."""

MICROBATCHES = 8
"""Of the steps that accumulate."""


def whole(case: Case, num_steps: int) -> Iterator[Policy]:
    """Whole samples, no padding, any counts."""
    kind, ranks = "whole samples", case.num_ranks
    yield Policy("nothing", kind, partial(loaded, case), epoch=repeats(case))
    yield buckets(case, kind, num_steps)
    rebalanced = partial(one_batch, case, lambda batch: batch_rebalance(case.costs[batch], ranks))
    yield Policy("batch_rebalance", kind, rebalanced, epoch=drops_last(case))
    free = partial(
        one_batch, case, lambda batch: karmarkar_karp(case.costs[batch], ranks, equal_size=False)
    )
    yield Policy("Karmarkar-Karp", kind, free, moves=True)
    yield Policy("DpBalanced", kind, best_next_fit(case, (1,), whole_cost), moves=True)
    yield Policy("BalancedSampler", kind, sampled(case), is_ours=True)
    close = sampled(case, tolerance=1e-4)
    yield Policy("BalancedSampler, tolerance 1e-4", kind, close, is_ours=True)
    yield Policy(
        "BalancedLoader", kind, planned(case, f"g1n{ranks}", None), is_ours=True, moves=True
    )


def equal_counts(case: Case, num_steps: int) -> Iterator[Policy]:
    """Whole samples, no padding, as many on all ranks."""
    kind, ranks = "equal counts", case.num_ranks
    even = partial(
        one_batch, case, lambda batch: karmarkar_karp(case.costs[batch], ranks, equal_size=True)
    )
    yield Policy("nothing", kind, partial(loaded, case), epoch=repeats(case))
    yield buckets(case, kind, num_steps)
    yield Policy("Karmarkar-Karp, equal", kind, even, moves=True)
    ours = sampled(case, even_counts=True)
    yield Policy("BalancedSampler, even", kind, ours, is_ours=True)
    close = sampled(case, even_counts=True, tolerance=1e-4)
    yield Policy("BalancedSampler, even, 1e-4", kind, close, is_ours=True)


def padded(case: Case, num_steps: int) -> Iterator[Policy]:
    """Batches are padded to their longest."""
    kind, ranks = "padded", case.num_ranks
    rebalanced = partial(one_batch, case, lambda batch: batch_rebalance(case.costs[batch], ranks))
    yield Policy("nothing", kind, partial(loaded, case), epoch=repeats(case))
    yield buckets(case, kind, num_steps)
    yield Policy("batch_rebalance", kind, rebalanced, epoch=drops_last(case))
    yield Policy("BalancedSampler, padded", kind, sampled(case, padded=True), is_ours=True)


def accumulated(case: Case, num_steps: int) -> Iterator[Policy]:
    """The same in steps of several microbatches: only their sum, and the samples, are given."""
    kind, ranks, each = "padded, accumulated", case.num_ranks, MICROBATCHES
    yield Policy("nothing", kind, lambda k: together(partial(loaded, case), k), repeats(case))
    single = buckets(case, kind, num_steps * each)
    yield Policy(single.name, kind, lambda k: together(single.step, k), single.epoch)
    if ranks <= MOST_REAL:
        yield Policy("batch_rebalance", kind, partial(real_rebalance, case), drops_last(case, each))
    ours = sampled(case, padded=True, accumulate=each)
    yield Policy("BalancedSampler, padded", kind, ours, is_ours=True)


def together(step: Callable[[int], Step], number: int) -> Step:
    """Several steps of one microbatch as one step."""
    first = number * MICROBATCHES
    return [ranks for k in range(first, first + MICROBATCHES) for ranks in step(k)]


def real_rebalance(case: Case, number: int) -> Step:
    """transformers' own, with the cost of all."""
    size = case.full * MICROBATCHES
    batch = np.arange(number * size, (number + 1) * size)
    given = Rebalance(case.lens[batch].tolist(), size, case.num_ranks, MICROBATCHES)
    given.cost = case.cost
    return given.step(batch.tolist())


def bags(case: Case, num_steps: int) -> Iterator[Policy]:
    """Ranks may share a sequence."""
    kind, ranks = "bags", case.num_ranks
    yield Policy("nothing", kind, partial(loaded, case), epoch=repeats(case))
    yield Policy(
        "DpBalanced, groups",
        kind,
        best_next_fit(case, (1, 2, 4, 8), shared_makespan),
        moves=True,
    )
    yield Policy("BalancedCP", kind, best_hybrid(case), moves=True)
    first = [by_rank(case, number) for number in range(3)]
    best = str(suggest_topology(first, case.cost, case.cluster).best)
    yield Policy(
        "SequenceParallel, fixed", kind, planned(case, best, case.cluster), is_ours=True, moves=True
    )
    if ranks <= MOST_AUTO:
        auto = planned(case, "auto", case.cluster)
        yield Policy("SequenceParallel, auto", kind, auto, is_ours=True, moves=True)


def grouped(case: Case, num_steps: int) -> Iterator[Policy]:
    """Groups of ranks share packs, in as many microbatches as a limit of tokens makes."""
    for kind, degree in GROUPED.items():
        most = case.most_tokens(degree)
        prices: list[Price] = [cached(case.seconds), lambda length, size: length * length / size]
        theirs = [DynamicContext(case.num_ranks, most, price).steps for price in prices]
        choices = [partial(several, case, steps) for steps in theirs]
        yield Policy("DynamicCP", kind, best_of(case, choices, shared_makespan), moves=True)
        scheduler = DynamicPackingScheduler(
            most, 1, case.num_ranks, None, case.cost, cluster=case.cluster
        )
        plan = partial(several, case, partial(_scheduled_groups, scheduler))
        yield Policy("DynamicPackingScheduler", kind, plan, is_ours=True, moves=True)


def _scheduled_groups(scheduler: DynamicPackingScheduler, lens: Ints) -> Step:
    return scheduler.get_groups_and_subsamples(list(enumerate(lens.tolist())))


def several(case: Case, steps: Callable[[Ints], Step], number: int) -> Step:
    """A policy that knows several global batches."""
    first = number * GROUPED_BATCHES
    batch = np.concatenate([case.batch(first + k) for k in range(GROUPED_BATCHES)])
    return placed(steps(case.lens[batch]), batch)


def loaded(case: Case, number: int) -> Step:
    """What ranks loaded, unchanged."""
    return placed(as_loaded(case.full, case.num_ranks), case.batch(number))


def one_batch(case: Case, give: Callable[[Ints], Step], number: int) -> Step:
    """A policy that knows one global batch."""
    batch = case.batch(number)
    return placed(give(batch), batch)


def placed(step: Step, batch: Ints) -> Step:
    """The samples of a batch as those of the epoch."""
    return [[batch[np.array(r, dtype=np.int64)].tolist() for r in ranks] for ranks in step]


def buckets(case: Case, kind: str, num_steps: int) -> Policy:
    """Some of the steps of an epoch in buckets, evenly spaced."""
    steps = list(bucket_steps(case.bucket_of, case.num_ranks, case.batch_size, seed=0))
    chosen = np.linspace(0, len(steps) - 1, num_steps).astype(int).tolist()
    return Policy(
        "one bucket a step", kind, lambda k: steps[chosen[k]], epoch=epoch_of(case, steps)
    )


def repeats(case: Case) -> Epoch:
    """torch's DistributedSampler: the last step is filled with the first samples."""
    return Epoch(repeated=(-case.lens.size % case.num_ranks) / case.lens.size)


def drops_last(case: Case, num_batches: int = 1) -> Epoch:
    """Without the last step, as batch_rebalance does unless told otherwise."""
    return Epoch(dropped=(case.lens.size % (num_batches * case.full)) / case.lens.size)


Measure = Callable[[Case, Step], float]


def whole_cost(case: Case, step: Step) -> float:
    return makespan(case, step, padded=False)


def best_next_fit(case: Case, degrees: Sequence[int], measure: Measure) -> Callable[[int], Step]:
    """The group size and the token limit that suit it best, of those that hold all sequences."""
    mean = case.lens[: 3 * case.full].mean() * case.batch_size
    longest = int(case.lens.max())

    def steps(degree: int, tokens: int) -> Callable[[int], Step]:
        return partial(
            one_batch,
            case,
            lambda batch: next_fit(case.lens[batch], case.num_ranks, tokens, degree),
        )

    choices = [
        steps(degree, max(int(factor * mean), -(-longest // degree)))
        for degree in degrees
        for factor in (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
    ]
    return best_of(case, choices, measure)


def best_hybrid(case: Case) -> Callable[[int], Step]:
    """The token limit that suits it best: the longest sequence gets 1 to 8 ranks."""
    price, longest = cached(case.seconds), int(case.lens.max())
    choices: list[Callable[[int], Step]] = []
    for degree in (1, 2, 4, 8):
        scheduler = HybridContext(case.num_ranks, -(-longest // degree), price)
        steps = partial(one_batch, case, partial(_scheduled, case, scheduler))
        choices.append(steps)
    return best_of(case, choices, shared_makespan)


def _scheduled(case: Case, scheduler: HybridContext, batch: Ints) -> Step:
    return scheduler.steps(case.lens[batch])


def best_of(
    case: Case, choices: Sequence[Callable[[int], Step]], measure: Measure
) -> Callable[[int], Step]:
    """The one with the least makespan over three global batches."""
    return min(choices, key=lambda steps: sum(measure(case, steps(k)) for k in range(3)))


def sampled(
    case: Case,
    *,
    even_counts: bool = False,
    padded: bool = False,
    tolerance: float = 0.01,
    accumulate: int = 1,
) -> Callable[[int], Step]:
    """Steps of a BalancedSampler."""
    options = SamplerOptions(
        shuffle=False, even_counts=even_counts, padded=padded, tolerance=tolerance
    )
    size, ranks = case.batch_size, case.num_ranks
    sampler = BalancedSampler(
        case.lens,
        case.cost,
        batch_size=size,
        num_ranks=ranks,
        rank=0,
        accumulate=accumulate,
        options=options,
    )

    def step(number: int) -> Step:
        deal = sampler.deal(number)
        cells = deal.microbatch_of * ranks + deal.rank_of
        ends = np.cumsum(np.bincount(cells, minlength=accumulate * ranks))
        order = np.argsort(cells, kind="stable")
        given = [part.tolist() for part in np.split(deal.samples[order], ends[:-1])]
        return [given[first : first + ranks] for first in range(0, len(given), ranks)]

    return step


def by_rank(case: Case, number: int) -> list[Ints]:
    """Lengths of a global batch, as ranks loaded them."""
    return list(case.lens[case.batch(number)].reshape(case.num_ranks, -1))


def planned(case: Case, topology: str, cluster: Cluster | None) -> Callable[[int], Step]:
    """Plans of a loader, which knows no cluster, or of SequenceParallel."""

    def step(number: int) -> Step:
        plan = plan_batch(by_rank(case, number), topology, case.cost, cluster=cluster)
        batch = case.batch(number)
        members = [batch[plan.bag_of == bag].tolist() for bag in range(plan.topology.num_bags)]
        return [[members[bag] for bag in plan.topology.bag_of_rank.tolist()]]

    return step
