"""Batches of buckets: each sample once an epoch, like work in a step, and a mean over samples."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bascule.data import BalancedSampler
from bascule.errors import ConfigError
from bascule.machine.costs import TransformerCost
from bascule.plugins.buckets import BalancedBuckets

COST = TransformerCost(8)


def samplers(counts: list[int], num_ranks: int, batch_size: int) -> list[BalancedBuckets]:
    ends = np.cumsum(counts)
    buckets = [list(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]
    shapes = [(16 * (number + 1), 32) for number in range(len(counts))]
    theirs = SimpleNamespace(
        bucket_indices=buckets, batch_size=batch_size, dataset=SimpleNamespace(buckets=shapes)
    )
    return [BalancedBuckets(theirs, num_ranks, rank, seed=3) for rank in range(num_ranks)]


def accumulates(num_steps: int, monkeypatch: pytest.MonkeyPatch, **more: bool) -> None:
    """Let accelerate accumulate over so many batches, until the test ends."""
    accelerate = pytest.importorskip("accelerate.state")
    settings = {"num_steps": num_steps, **more}
    monkeypatch.setattr(accelerate.GradientState, "_shared_state", {"plugin_kwargs": settings})


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("counts", [[1], [8, 0, 3], [17, 5, 1, 1], [1, 1, 1, 1, 1], [24, 24], [3]])
def test_each_sample_counts_once(
    counts: list[int], num_ranks: int, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulates(accumulate, monkeypatch)
    ranks = samplers(counts, num_ranks, 2)
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
            for batch, _ in batches:
                assert 0 < len(batch) <= 2 and len(set(bucket_of[batch])) == 1
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


def test_epochs_end_with_a_step_of_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulates(2, monkeypatch)
    (buckets,) = samplers([3, 2], 1, 1)
    assert len(buckets) == len(list(buckets)) == 6
    place: Any = {"batch_size": 1, "num_ranks": 1, "rank": 0}
    known = BalancedSampler([1] * 5, COST, **place)
    assert known.accumulate == 2 and len(list(known)) == 4  # one has two short samples
    assert BalancedSampler([1] * 5, COST, accumulate=1, **place).accumulate == 1
    accumulates(2, monkeypatch, sync_with_dataloader=False)  # as transformers' Trainer
    assert BalancedSampler([1] * 5, COST, **place).accumulate == 1


def test_without_buckets_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="bucket_indices"):
        BalancedBuckets(SimpleNamespace(batch_size=1), 2, 0)
