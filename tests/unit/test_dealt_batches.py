"""Dealt batches keep the samples of each step, and end an epoch as accelerate does."""

from typing import Any

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from bascule.errors import ConfigError
from bascule.machine.costs import TransformerCost
from bascule.plan.epoch import DealRules, StepShape
from bascule.plugins.dealt_batches import DealtBatches

COST = TransformerCost(32)


def shards(batches: BatchSampler, num_ranks: int, of_any_size: bool) -> list[list[list[int]]]:
    made: Any = [BatchSamplerShard(batches, num_ranks, rank) for rank in range(num_ranks)]
    for one in made:
        one.batch_size = None if of_any_size else one.batch_size
    return [list(one) for one in made]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num", [1, 5, 23, 24, 25, 31, 96])
@pytest.mark.parametrize(("padded", "even"), [(True, False), (False, False), (False, True)])
def test_steps_keep_their_samples(num: int, padded: bool, even: bool, drop_last: bool) -> None:
    num_ranks, accumulate, size = 2, 2, 3
    lengths = np.random.default_rng(num).integers(1, 99, num)
    order = np.random.default_rng(1).permutation(num).tolist()
    rules = DealRules(StepShape(size, num_ranks, accumulate), even_counts=even, padded=padded)
    plain = BatchSampler(order, size, drop_last)
    dealt = DealtBatches(plain, lengths, COST, rules)
    ours = shards(dealt, num_ranks, of_any_size=True)
    theirs = shards(plain, num_ranks, of_any_size=False)
    assert [len(one) for one in ours] == [len(one) for one in theirs]
    assert len(dealt) == len(plain) and all(batch for rank in ours for batch in rank)
    for first in range(0, len(ours[0]), accumulate):
        step = slice(first, first + accumulate)
        of_step = [
            sorted(i for rank in run for b in rank[step] for i in b) for run in (ours, theirs)
        ]
        assert of_step[0] == of_step[1]
    assert not even or {len(batch) for rank in ours for batch in rank} <= {size}
    for number, (before, after, mean) in enumerate(dealt.steps):
        step = slice(number * accumulate, (number + 1) * accumulate)
        costs = [[COST(lengths[batch]) for batch in rank[step]] for rank in ours]
        by_rank = np.array([[x.max() * x.size if padded else x.sum() for x in y] for y in costs])
        assert after == pytest.approx(by_rank.max(axis=0).sum()) and after <= before
        assert mean == pytest.approx(by_rank.sum() / num_ranks)


def test_each_sample_has_a_length() -> None:
    plain = BatchSampler(range(6), 2, drop_last=False)
    with pytest.raises(ConfigError, match="lengths"):
        DealtBatches(plain, [1, 2, 3], COST, DealRules(StepShape(2, 2, 1)))
