"""Batches of buckets: each sample once an epoch, like work in a step, and a mean over samples."""

from types import SimpleNamespace

import numpy as np
import pytest

from bascule.errors import ConfigError
from bascule.plugins.buckets import BalancedBuckets


def samplers(counts: list[int], num_ranks: int, batch_size: int) -> list[BalancedBuckets]:
    ends = np.cumsum(counts)
    buckets = [list(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]
    shapes = [(16 * (number + 1), 32) for number in range(len(counts))]
    theirs = SimpleNamespace(
        bucket_indices=buckets, batch_size=batch_size, dataset=SimpleNamespace(buckets=shapes)
    )
    return [BalancedBuckets(theirs, num_ranks, rank, seed=3) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("counts", [[1], [8, 0, 3], [17, 5, 1, 1], [1, 1, 1, 1, 1], [24, 24], [3]])
def test_each_sample_counts_once(counts: list[int], num_ranks: int) -> None:
    ranks = samplers(counts, num_ranks, batch_size=2)
    bucket_of = np.repeat(np.arange(len(counts)), counts)
    orders = []
    for _ in range(2):
        epochs = [list(sampler) for sampler in ranks]
        orders.append(epochs)
        assert {len(epoch) for epoch in epochs} == {len(sampler) for sampler in ranks}
        weight = np.zeros(sum(counts))
        for number, step in enumerate(zip(*epochs, strict=True)):
            scales = [sampler.loss_scale(number) for sampler in ranks]
            assert all(0 < len(batch) <= 2 and len(set(bucket_of[batch])) == 1 for batch in step)
            assert sum(scales) == pytest.approx(num_ranks)
            counted = sum(len(batch) for batch, scale in zip(step, scales, strict=True) if scale)
            for batch, scale in zip(step, scales, strict=True):
                weight[batch] += scale / len(batch) * counted / num_ranks
            if max(map(len, step)) > 1:
                assert len({bucket for batch in step for bucket in bucket_of[batch]}) == 1
        assert weight == pytest.approx(1.0)
    assert sum(counts) < 8 or orders[0] != orders[1]


def test_without_buckets_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="bucket_indices"):
        BalancedBuckets(SimpleNamespace(batch_size=1), 2, 0)
