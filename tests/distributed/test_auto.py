"""`topology="auto"` on real processes: bags change from step to step, the attention stays exact."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bascule import Cluster, CommError, SequenceParallel, TransformerCost
from tests.helpers.oracle import packed_attention
from tests.helpers.ranks import raised_by, run_ranks

NODE = Cluster(
    num_nodes=1,
    ranks_per_node=4,
    flops_per_s=1e12,
    memory_bytes=8e10,
    intra_bytes_per_s=1e10,
    inter_bytes_per_s=1e9,
    latency_s=1e-7,
)
BATCHES = (
    [[40, 40], [40, 40], [40, 40], [40, 40]],
    [[4000], [], [], []],
    [[1500], [1500], [30, 30, 30], []],
    [[], [], [], []],
)


def _attend_on_every_batch() -> list[str]:
    rank = dist.get_rank()
    parallel = SequenceParallel(
        None, "auto", TransformerCost(256, num_layers=4), cluster=NODE, timeout_s=15
    )
    topologies: list[str] = []
    for number, lens in enumerate(BATCHES):
        step = parallel.plan(lens[rank])
        all_lens = [length for part in lens for length in part]
        generator = torch.Generator().manual_seed(number)
        q, k, v = (
            torch.randn(sum(all_lens), 4, 8, generator=generator, dtype=torch.float64)
            for _ in range(3)
        )
        first = sum(map(sum, lens[:rank]))
        own = slice(first, first + sum(lens[rank]))
        moved = step.route(q=q[own], k=k[own], v=v[own])
        out = step.restore(step.attend(moved["q"], moved["k"], moved["v"]))
        if lens[rank]:
            wanted, _ = packed_attention(q, k, v, all_lens)
            torch.testing.assert_close(out, wanted[own], rtol=1e-10, atol=1e-12)
        metrics = step.metrics()
        assert metrics["makespan"] <= metrics["makespan_unbalanced"] * (1 + 1e-9)
        topologies.append(str(step.plan.topology))
    return topologies


def test_bags_follow_the_batch() -> None:
    results: list[Any] = run_ranks(_attend_on_every_batch, 4)
    assert all(result == results[0] for result in results)
    assert results[0][0] == "g1n4"
    assert results[0][1] == "g4n1"
    assert len(set(results[0])) >= 3


def _attend_with_one_head() -> tuple[list[str], str]:
    """In bags of one rank, and then in bags of which one has two."""
    rank = dist.get_rank()
    parallel = SequenceParallel(
        None, "auto", TransformerCost(256, num_layers=4), cluster=NODE, timeout_s=15
    )
    attends: list[Callable[[], torch.Tensor]] = []
    for lens, topology in ((BATCHES[0], "g1n4"), ([[3000], [2000], [2000], []], "g2n1+g1n2")):
        step = parallel.plan(lens[rank])
        assert str(step.plan.topology) == topology
        q, kv = (torch.zeros(step.local.positions.size, heads, 8) for heads in (4, 1))
        attends.append(partial(step.attend, q, kv, kv))
    attends[0]()
    return raised_by(attends[1])


def test_a_bag_that_becomes_too_large_for_the_heads_is_refused_on_all_ranks() -> None:
    heard = run_ranks(_attend_with_one_head, 4)
    assert all(one == heard[0] for one in heard), heard
    classes, text = heard[0]
    assert "ConfigError" in classes
    assert "1 key-value heads" in text and "at most 1 ranks" in text


def _without_cluster() -> str:
    with pytest.raises(CommError, match="auto") as caught:
        SequenceParallel(None, "auto", TransformerCost(256), timeout_s=15)
    return str(caught.value)


def _wrong_world() -> str:
    with pytest.raises(CommError) as caught:
        SequenceParallel(None, "auto", TransformerCost(256), cluster=NODE, timeout_s=15)
    return str(caught.value)


def test_auto_needs_a_cluster_of_the_right_size() -> None:
    assert len(set(run_ranks(_without_cluster, 2))) == 1
    (message,) = set(run_ranks(_wrong_world, 2))
    assert "4" in message and "2" in message
