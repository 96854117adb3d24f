"""Batches of buckets: each sample once an epoch, like work in a step, and a mean over samples."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bascule.data import BalancedSampler
from bascule.errors import ConfigError
from bascule.plan.costs import TransformerCost
from bascule.plugins.buckets import BalancedBuckets

COST = TransformerCost(8)


def samplers(
    counts: list[int], num_ranks: int, batch_size: int, accumulate: int | None = None
) -> list[BalancedBuckets]:
    ends = np.cumsum(counts)
    buckets = [list(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]
    shapes = [(16 * (number + 1), 32) for number in range(len(counts))]
    theirs = SimpleNamespace(
        bucket_indices=buckets, batch_size=batch_size, dataset=SimpleNamespace(buckets=shapes)
    )
    settings = {"seed": 3, "accumulate": accumulate}
    return [BalancedBuckets(theirs, num_ranks, rank, **settings) for rank in range(num_ranks)]


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("counts", [[1], [8, 0, 3], [17, 5, 1, 1], [1, 1, 1, 1, 1], [24, 24], [3]])
def test_each_sample_counts_once(counts: list[int], num_ranks: int, accumulate: int) -> None:
    ranks = samplers(counts, num_ranks, 2, accumulate)
    bucket_of = np.repeat(np.arange(len(counts)), counts)
    orders = []
    for _ in range(2):
        epochs = [list(sampler) for sampler in ranks]
        orders.append(epochs)
        assert {len(epoch) for epoch in epochs} == {len(sampler) for sampler in ranks}
        assert len(ranks[0]) % accumulate == 0
        scales = np.array([[one.loss_scale(k) for one in ranks] for k in range(len(ranks[0]))])
        weight = np.zeros(sum(counts))
        for first in range(0, len(scales), accumulate):  # an optimizer step
            steps = [*zip(*epochs, strict=True)][first : first + accumulate]
            pairs = zip(steps, scales[first : first + accumulate], strict=True)
            batches = [pair for step, own in pairs for pair in zip(step, own, strict=True)]
            assert all(
                0 < len(batch) <= 2 and len(set(bucket_of[batch])) == 1 for batch, _ in batches
            )
            counted = sum(len(batch) for batch, scale in batches if scale)
            assert sum(scale for _, scale in batches) == pytest.approx(
                num_ranks * accumulate if counted else 0
            )
            for batch, scale in batches:
                weight[batch] += scale / len(batch) * counted / num_ranks / accumulate
            for step in steps:
                if max(map(len, step)) > 1:
                    assert len({bucket for batch in step for bucket in bucket_of[batch]}) == 1
        assert weight == pytest.approx(1.0)
    assert sum(counts) < 8 or orders[0] != orders[1]


@pytest.fixture
def accumulation() -> Iterator[None]:
    """An Accelerator that accumulates over 2 batches, and none afterwards."""
    state = pytest.importorskip("accelerate.state").GradientState
    before = dict(state._shared_state)
    state(SimpleNamespace(to_kwargs=lambda: {"num_steps": 2, "sync_with_dataloader": True}))
    yield
    state._shared_state.clear()
    state._shared_state.update(before)


@pytest.mark.usefixtures("accumulation")
def test_epochs_end_with_an_optimizer_step_of_the_accelerator() -> None:
    (buckets,) = samplers([3, 2], 1, 1)
    assert buckets.accumulate == 2 and len(buckets) == len(list(buckets)) == 6
    known = BalancedSampler([1, 2, 3], COST, batch_size=1, num_ranks=1, rank=0)
    with pytest.raises(ConfigError, match=r"accumulates over 2 batches: .* set accumulate=2"):
        next(iter(known))
    place: Any = {"num_ranks": 1, "rank": 0, "accumulate": 4}
    assert len(list(BalancedSampler([1] * 9, COST, batch_size=1, **place))) == 8


def test_without_buckets_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="bucket_indices"):
        BalancedBuckets(SimpleNamespace(batch_size=1), 2, 0)
