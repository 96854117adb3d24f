"""The same steps dealt by BalancedSampler and by the `batch_rebalance` of transformers."""

from typing import Any

import numpy as np
import pytest

from bascule.data import BalancedSampler, SamplerOptions

peers = pytest.importorskip("transformers.trainer_pt_utils")
if not hasattr(peers, "BatchRebalanceSampler"):
    pytest.skip("this version of transformers has no batch_rebalance", allow_module_level=True)

SHAPES = [(8, 1, 4), (64, 1, 8), (8, 4, 4), (4, 2, 2), (16, 2, 1)]
NUM_STEPS = 6


def cost(seq_lens: Any) -> np.ndarray:
    """Of one sample, as `batch_rebalance` prices it."""
    lens = np.asarray(seq_lens, dtype=np.float64)
    return lens + peers.BatchRebalanceSampler.QUADRATIC_COST_COEF * lens**2


def makespan(batches: list[list[np.ndarray]], lengths: np.ndarray, *, padded: bool) -> float:
    """Sum over microbatches of the slowest rank; batches[microbatch][rank]."""
    if padded:
        loads = [[batch.size * cost(lengths[batch].max()) for batch in row] for row in batches]
    else:
        loads = [[cost(lengths[batch]).sum() for batch in row] for row in batches]
    return float(np.max(loads, axis=1).sum())


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_end_as_early(shape: tuple[int, int, int], padded: bool) -> None:
    """With one microbatch never later; with several, padded, not later on the mean."""
    num_ranks, accumulate, batch_size = shape
    whole = num_ranks * accumulate * batch_size
    drawn = np.random.default_rng(0).lognormal(7.0, 0.7, NUM_STEPS * whole)
    lengths = drawn.clip(1, 16_000).astype(int)
    sampler = BalancedSampler(
        lengths,
        cost,
        batch_size=batch_size,
        num_ranks=num_ranks,
        rank=0,
        accumulate=accumulate,
        options=SamplerOptions(even_counts=False, padded=padded),
    )
    peer = peers.BatchRebalanceSampler(lengths.tolist(), whole, num_ranks, accumulate)
    ratios: list[float] = []
    for step in range(NUM_STEPS):
        deal = sampler.deal(step)
        own = [[deal.batch(r, m) for r in range(num_ranks)] for m in range(accumulate)]
        given = peer._assign(deal.samples.tolist(), lengths[deal.samples].tolist())
        theirs = [[np.array(rank[m]) for rank in given] for m in range(accumulate)]
        ratios.append(
            makespan(own, lengths, padded=padded) / makespan(theirs, lengths, padded=padded)
        )
    if accumulate == 1:
        assert max(ratios) <= (1.0001 if padded else 1.01)
    assert np.mean(ratios) <= (1.01 if padded else 1.0001)


def test_nothing_is_dropped_where_the_peer_drops() -> None:
    lengths = list(range(1, 24))
    peer = [peers.BatchRebalanceSampler(lengths, 8, 4, 1, rank=rank) for rank in range(4)]
    assert sum(len(batch) for rank in peer for batch in rank) == 16
    own = [
        BalancedSampler(lengths, cost, batch_size=2, num_ranks=4, rank=rank) for rank in range(4)
    ]
    assert sorted(i for rank in own for batch in rank for i in batch) == list(range(23))
