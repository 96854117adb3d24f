"""Plans of steps: of all microbatches at once, behind the current step, with bags that follow the
batch, and for slow ranks."""

import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bascule import BalancedLoader, LoaderOptions, SequenceParallel, TransformerCost
from bascule.costs import Cluster, PolynomialCost
from bascule.errors import CommError, ConfigError
from bascule.plan import plan_step
from bascule.plan.plan import Sync, step_makespan
from bascule.train import measure_speeds, sync_of, train_step
from tests.helpers.calls_made import calls_made
from tests.helpers.cases import (
    COST,
    Batch,
    assert_same,
    config_of,
    edge_batches,
    make_model,
    named_gradients,
    own_samples,
    random_batch,
    reference_step,
    sharded_gradients,
)
from tests.helpers.oracle import packed_attention
from tests.helpers.ranks import on_ranks, raised_by, run_ranks

LENS: list[list[list[int]]] = [[[9, 1], [5]], [[], [7, 7, 2]], [[3], []], [[1], [12]]]


SYNCS: tuple[Sync, Sync] = ("microbatch", "step")


def lengths_of(rank: int) -> list[list[int]]:
    return [micro[rank] for micro in LENS]


def planned() -> None:
    """A step is planned from one gather, with the plans of `plan_step`."""
    rank = dist.get_rank()
    for spec in ("g2n1", "g1n2"):
        makespans = list[float]()
        for sync in SYNCS:
            parallel = SequenceParallel(None, spec, COST)
            parallel.plan([1])
            with calls_made() as made:
                steps = parallel.plan_step(lengths_of(rank), sync=sync)
            assert dict(made.counts) == {"all_gather": 1}
            assert [step.plan for step in steps] == list(plan_step(LENS, spec, COST, sync=sync))
            assert [step.number for step in (*steps, parallel.plan([4]))] == [2, 3, 4, 5, 6]
            makespans.append(step_makespan([step.plan for step in steps], sync=sync))
        assert makespans[1] <= makespans[0]


def trained(is_sharded: bool) -> None:
    """Gradients of four microbatches that were planned together, as of one process."""
    model, plain = make_model(config_of(4, 4)), make_model(config_of(4, 4))
    batches: list[Batch] = [random_batch(2, seed) for seed in range(3)]
    batches.append(edge_batches(2)["one rank has everything"])
    wrapped: nn.Module = model
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        wrapped = DistributedDataParallel(model)
    parallel = SequenceParallel(None, "g2n1" if is_sharded else "g1n2", COST)
    samples = [own_samples(batch, model.config, parallel.rank) for batch in batches]
    steps = parallel.plan_step([one.seq_lens for one in samples], sync=sync_of(wrapped))
    losses = [
        lambda model, one=one, step=step: step.mean(one.losses(model(one.inputs, step)))
        for one, step in zip(samples, steps, strict=True)
    ]
    loss = train_step(wrapped, losses)
    want = [reference_step(plain, batch) for batch in batches]
    grads = sharded_gradients(model) if is_sharded else named_gradients(model)
    total = {name: sum(one[1][name] for one in want) for name in grads}
    assert_same((loss.item(), grads), (sum(one[0] for one in want), total), "four microbatches")  # pyright: ignore


def planned_behind() -> None:
    """Steps planned behind others, mixed with plans made now; no thread is left."""
    parallel, rank = SequenceParallel(None, "g2n1", COST), dist.get_rank()
    first = parallel.plan_async([[3 + rank]])
    second = parallel.plan_async(lengths_of(rank), sync="step")
    now = parallel.plan([8])
    third = parallel.plan_async([[rank]])
    (one,), several, (last,) = first.result(), second.result(), third.result()
    assert first.result()[0] is one and first.done()
    for step in (last, now, *reversed(several), one):  # all are alive
        x = torch.arange(float(step.plan.seq_lens[step.plan.source_ranks == rank].sum()))
        assert torch.equal(step.restore(step.route(x=x)["x"]), x)
    # Every rank waits for the slow one in its thread alone.
    if rank:
        dist.barrier()
    waiting = parallel.plan_async([[5]])
    was_ready = waiting.done()
    if rank == 0:
        dist.barrier()
    waiting.result()
    assert [step.number for step in (one, *several, now, last)] == [1, 2, 3, 4, 5, 6, 7]
    wanted = plan_step(LENS, "g2n1", COST, sync="step")
    assert [step.plan for step in several] == list(wanted)
    assert rank or not was_ready
    assert "bascule plan" not in [one.name for one in threading.enumerate()]


@pytest.mark.parametrize(
    ("kind", "words"), [("the user's code", "no such sample"), ("the cost", "no such cost")]
)
@on_ranks(2)
def test_an_error_reaches_those_that_plan_behind(kind: str, words: str) -> None:
    """Where a plan is asked for, when rank 1 fails behind its step or in it."""
    rank = dist.get_rank()

    def cost(lens: Any) -> Any:
        if kind == "the cost" and rank and np.max(lens, initial=0) == 7:
            raise ZeroDivisionError("no such cost")
        return np.asarray(lens, dtype=np.float64)

    parallel = SequenceParallel(None, "g1n1", cost, timeout_s=100.0)
    parallel.plan_async([[1]]).result()
    of_length = raised_by(parallel.plan_async([[-1 if rank else 1]]).result)[1]
    assert "-1" in of_length and parallel.plan_async([[2]]).result()[0].plan.num_ranks == 2
    with (  # all went on after the wrong length
        pytest.raises((ZeroDivisionError, CommError, ConfigError), match=words),
        parallel.plan([3]) as step,
    ):
        if kind == "the user's code" and rank:
            raise ZeroDivisionError("no such sample")
        parallel.plan_async([[7]]).result()
        step.mean(torch.ones(1))
        parallel.plan_async([[1]]).result()


NODE = Cluster(1, 4, 1e12, 8e10, 1e10, 1e9, 1e-7)
BATCHES = (
    [[40, 40], [40, 40], [40, 40], [40, 40]],
    [[1600], [], [], []],
    [[800], [800], [30, 30, 30], []],
    [[], [], [], []],
)


def bags_of_batches() -> list[str]:
    """Bags follow the batch; within those of each, attention is exact."""
    rank, topologies = dist.get_rank(), list[str]()
    cost = TransformerCost(256, num_layers=4)
    parallel = SequenceParallel(None, "auto", cost, cluster=NODE, timeout_s=100)
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
        wanted, _ = packed_attention(q[own], k[own], v[own], lens[rank])
        torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-12)
        metrics = step.metrics()
        assert metrics["makespan"] <= metrics["makespan_unbalanced"] * (1 + 1e-9)
        topologies.append(str(step.plan.topology))
    return topologies


def test_sequences_change_microbatch_and_bags_follow_the_batch() -> None:
    first, *others = run_ranks(bags_of_batches, 4)
    assert all(one == first for one in others)
    assert first[:2] == ["g1n4", "g4n1"] and len(set(first)) >= 3


UNEVEN = [[900, 100, 300], [650, 640]]


def measured() -> None:
    """A slow rank is measured and gets less."""
    rank, now = dist.get_rank(), [0.0]

    def work() -> None:
        now[0] += 0.09 if rank == 1 else 0.03

    with mock.patch("bascule.calibrate.timed.time.perf_counter", lambda: now[0]):
        speeds = measure_speeds(work=work)
    assert speeds[1] == pytest.approx(speeds[0] / 3)
    parallel = SequenceParallel(None, "g1n2", TransformerCost(64))
    alike = parallel.plan(UNEVEN[rank]).plan
    parallel.set_speeds(speeds)
    step = parallel.plan(UNEVEN[rank])
    assert step.plan.tokens[1] < 0.8 * alike.tokens[1]
    rows = torch.arange(sum(UNEVEN[rank]), dtype=torch.float64)[:, None]
    assert torch.equal(step.restore(step.route(x=rows)["x"]), rows)
    parallel.set_speeds(None)
    assert parallel.plan(UNEVEN[rank]).plan == alike
    by_default = measure_speeds()
    assert len(by_default) == 2 and all(speed > 0 for speed in by_default)


def loaded() -> None:
    """A loader gives a slow rank less."""
    cost = PolynomialCost(0.0, 1e-3, 0.0)
    samples: Any = [torch.zeros(10 + number) for number in range(8)]
    options = LoaderOptions(batch_size=8, collate_fn=list)
    loader = BalancedLoader(samples, length_fn=len, cost=cost, options=options)
    wrong = raised_by(loader.set_cost, cost, speeds=[1.0])[1]
    assert "for each of the 2 ranks" in wrong
    loader.set_cost(cost, speeds=[1.0, 0.5])
    with loader:
        (batch,) = list(loader)
    fast, slow = (batch.plan.seq_lens[batch.plan.bag_of == place].sum() for place in range(2))
    assert fast == pytest.approx(2 * slow, rel=0.1)


@on_ranks(2)
def test_steps_of_two_ranks() -> None:
    planned()
    planned_behind()
    measured()
    loaded()
    assert sync_of(nn.Linear(2, 2)) == "step"
    for is_sharded in (False, True):
        trained(is_sharded)
