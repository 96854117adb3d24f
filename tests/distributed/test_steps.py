"""Plans of steps: of all microbatches at once, behind the current step, with bags that follow the
batch, and for slow ranks."""

import threading
from collections.abc import Callable
from functools import partial
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

from bascule import (
    BalancedLoader,
    Cluster,
    LoaderOptions,
    PolynomialCost,
    SequenceParallel,
    TransformerCost,
    plan_step,
)
from bascule.errors import CommError, ConfigError
from bascule.plan.step import Sync, step_makespan
from bascule.training import measure_speeds, sync_of, train_step
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
)
from tests.helpers.oracle import packed_attention
from tests.helpers.ranks import raised_by, run_ranks

LENS: list[list[list[int]]] = [[[9, 1], [5]], [[], [7, 7, 2]], [[3], []], [[1], [12]]]


def lengths_of(rank: int) -> list[list[int]]:
    return [micro[rank] for micro in LENS]


def planned(sync: Sync, spec: str) -> dict[str, Any]:
    """The plans of a step, against those of `plan_step`; numbers, and what was gathered."""
    parallel, rank = SequenceParallel(None, spec, COST), dist.get_rank()
    parallel.plan([1])
    with calls_made() as made:
        steps = parallel.plan_step(lengths_of(rank), sync=sync)
    again = parallel.plan([4])
    wanted = plan_step(LENS, spec, COST, sync=sync)
    return {
        "same": [step.plan == want for step, want in zip(steps, wanted, strict=True)],
        "numbers": [step.number for step in (*steps, again)],
        "gathers": dict(made.counts),
        "makespan": step_makespan([step.plan for step in steps], sync=sync),
    }


@pytest.mark.parametrize("spec", ["g2n1", "g1n2"])
def test_a_step_is_planned_from_one_gather(spec: str) -> None:
    makespans: dict[str, float] = {}
    for sync in ("microbatch", "step"):
        for found in run_ranks(planned, 2, sync, spec):
            assert all(found["same"]) and found["numbers"] == [2, 3, 4, 5, 6]
            assert found["gathers"] == {"all_gather": 1}
            makespans[sync] = found["makespan"]
    assert makespans["step"] <= makespans["microbatch"]


def planned_again() -> None:
    """Microbatches of a generator count each; a step that is only looked at builds no bag."""
    asked = list[int]()

    def cost(lens: Any) -> Any:
        asked.append(len(lens))
        return COST(lens)

    parallel = SequenceParallel(None, "g1n2", cost)
    before = len(asked)
    steps = parallel.plan_step([one] for one in (3, 5, 2))
    assert [step.number for step in steps] == [1, 2, 3]
    planning = len(asked) - before
    before = len(asked)
    assert parallel.plan([4]).number == 4
    assert len(asked) - before == planning // 3  # it was not described again
    assert all("_bag" not in vars(step) for step in steps)


def test_what_planning_takes_once() -> None:
    run_ranks(planned_again, 2)


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
    grads = {
        name: grad.full_tensor() if is_sharded else grad  # pyright: ignore
        for name, grad in named_gradients(model).items()
    }
    total = {name: sum(one[1][name] for one in want) for name in grads}
    assert_same((loss.item(), grads), (sum(one[0] for one in want), total), "four microbatches")  # pyright: ignore


@pytest.mark.parametrize("is_sharded", [False, True])
def test_training_on_them_has_the_gradients_of_one_process(is_sharded: bool) -> None:
    run_ranks(trained, 2, is_sharded)


def mixed() -> None:
    """Sequences change microbatch: each is routed once, and gradients are those of all of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel = SequenceParallel(None, "g2n2" if size == 4 else "g1n2", COST)
    lens = [[[40, 1], [2], [], [2]], [[1], [38], [], [3, 1]], [[39], [1], [], []]]
    torch.manual_seed(0)
    linear = nn.Linear(8, 24, dtype=torch.float64)
    xs = [
        [[torch.randn(n, 8, dtype=torch.float64) for n in own] for own in micro] for micro in lens
    ]
    flat = [x for micro in xs for own in micro[:size] for x in own]
    whole = linear(torch.cat(flat)).unflatten(-1, (3, 2, 4)).unbind(1)
    wanted = (
        packed_attention(whole[0], whole[1], whole[2], [len(x) for x in flat])[0].square().mean()
    )
    wanted.backward()
    assert linear.weight.grad is not None
    want, linear.weight.grad = linear.weight.grad, None
    steps = parallel.plan_step([micro[rank] for micro in lens], mixes=True)
    later = parallel.plan_later([micro[rank] for micro in lens], mixes=True).get()
    assert [step.plan for step in later] == [step.plan for step in steps]
    seen = sorted(tuple(pair) for step in steps for pair in step.sources.tolist())
    assert seen == [(m, place) for m, micro in enumerate(lens) for place in range(len(micro[rank]))]
    plans = [step.plan for step in steps]
    alone = plan_step([micro[:size] for micro in lens], parallel.topology, COST)
    assert step_makespan(plans, sync="microbatch") < 0.8 * step_makespan(alone, sync="microbatch")
    total = sum(int(plan.seq_lens.sum()) for plan in plans)
    loss = torch.zeros(())
    for step, plan in zip(steps, plans, strict=True):
        own = [xs[micro][rank][place] for micro, place in step.sources.tolist()]
        x = step.route(x=torch.cat([torch.zeros(0, 8, dtype=torch.float64), *own]))["x"]
        out = step.restore(step.attend(*linear(x).unflatten(-1, (3, 2, 4)).unbind(1)))
        loss = loss + step.mean(out.square()) * (int(plan.seq_lens.sum()) / total)
    loss.backward()
    grad = linear.weight.grad
    assert grad is not None
    dist.all_reduce(grad)
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(grad / size, want, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("world_size", [2, 4])
def test_sequences_may_change_microbatch(world_size: int) -> None:
    run_ranks(mixed, world_size)


def planned_behind() -> dict[str, Any]:
    """Steps planned behind others, mixed with plans made now; what the main thread sent itself."""
    parallel, rank = SequenceParallel(None, "g2n1", COST), dist.get_rank()
    first = parallel.plan_later([[3 + rank]])
    second = parallel.plan_later(lengths_of(rank), sync="step")
    now = parallel.plan([8])
    third = parallel.plan_later([[rank]])
    (one,), several, (last,) = first.get(), second.get(), third.get()
    assert first.get()[0] is one and first.is_ready
    for step in (last, now, *reversed(several), one):  # all are alive
        x = torch.arange(float(step.plan.seq_lens[step.plan.source_ranks == rank].sum()))
        assert torch.equal(step.restore(step.route(x=x)["x"]), x)
    # Every rank waits for the slow one in its thread alone.
    if rank:
        dist.barrier()
    waiting = parallel.plan_later([[5]])
    was_ready = waiting.is_ready
    if rank == 0:
        dist.barrier()
    waiting.get()
    return {
        "numbers": [step.number for step in (one, *several, now, last)],
        "same": [step.plan for step in several] == list(plan_step(LENS, "g2n1", COST, sync="step")),
        "was_ready": was_ready,
        "threads": [one.name for one in threading.enumerate() if one.name == "bascule plan"],
    }


def test_steps_are_planned_behind_the_current_one() -> None:
    for rank, found in enumerate(run_ranks(planned_behind, 2)):
        assert found["numbers"] == [1, 2, 3, 4, 5, 6, 7] and found["same"], found
        assert found["threads"] == [], found
        assert rank or not found["was_ready"]


def failing_behind(kind: str) -> str:
    """The error where a plan is asked for, when rank 1 fails behind its step or in it."""
    rank = dist.get_rank()

    def cost(lens: Any) -> Any:
        if rank and np.max(lens, initial=0) == 7:
            raise ZeroDivisionError("no such cost")
        return np.asarray(lens, dtype=np.float64)

    parallel = SequenceParallel(None, "g1n1", cost, timeout_s=100.0)
    parallel.plan_later([[1]]).get()
    wrong = {"a length": -1, "the cost": 7}.get(kind, 1)
    text = ""
    try:
        with parallel.plan([3]) as step:
            if kind == "the user's code" and rank:
                raise ZeroDivisionError("no such sample")
            later = parallel.plan_later([[wrong if rank or kind == "the cost" else 1]])
            later.get()
            step.mean(torch.ones(1))
            parallel.plan_later([[1]]).get()
    except (ZeroDivisionError, CommError, ConfigError) as error:
        text = str(error)
    if kind == "a length":
        assert parallel.plan_later([[2]]).get()[0].plan.num_ranks == 2
    return text


@pytest.mark.parametrize(
    ("kind", "words"),
    [("a length", "-1"), ("the user's code", "no such sample"), ("the cost", "no such cost")],
)
def test_an_error_reaches_those_that_plan_behind(kind: str, words: str) -> None:
    for text in run_ranks(failing_behind, 2, kind):
        assert words in text


def test_what_ranks_wait_for_follows_from_the_wrapper() -> None:
    assert sync_of(nn.Linear(2, 2)) == "step"


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


def bags_of_batches() -> tuple[list[str], tuple[list[str], str]]:
    """The bags of each batch, within which attention is exact; and the error of too few heads."""
    rank = dist.get_rank()
    cost = TransformerCost(256, num_layers=4)
    parallel = SequenceParallel(None, "auto", cost, cluster=NODE, timeout_s=15)
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
    attends: list[Callable[[], torch.Tensor]] = []
    for lens, topology in ((BATCHES[0], "g1n4"), ([[3000], [2000], [2000], []], "g2n1+g1n2")):
        step = parallel.plan(lens[rank])
        assert str(step.plan.topology) == topology
        q, kv = (torch.zeros(step.local.positions.size, heads, 8) for heads in (4, 1))
        attends.append(partial(step.attend, q, kv, kv))
    attends[0]()
    return topologies, raised_by(attends[1])


def test_bags_follow_the_batch() -> None:
    """A bag that becomes too large for the heads is refused on all ranks."""
    first, *others = run_ranks(bags_of_batches, 4)
    assert all(one == first for one in others)
    topologies, (classes, text) = first
    assert topologies[:2] == ["g1n4", "g4n1"] and len(set(topologies)) >= 3
    assert "ConfigError" in classes
    assert "1 key-value heads" in text and "at most 1 ranks" in text


UNEVEN = [[900, 100, 300], [650, 640]]


def measured() -> dict[str, Any]:
    rank, now = dist.get_rank(), [0.0]

    def work() -> None:
        now[0] += 0.09 if rank == 1 else 0.03

    with mock.patch("bascule.training.rank_speeds.time.perf_counter", lambda: now[0]):
        speeds = measure_speeds(work=work)
    parallel = SequenceParallel(None, "g1n2", TransformerCost(64))
    alike = parallel.plan(UNEVEN[rank]).plan
    parallel.set_speeds(speeds)
    step = parallel.plan(UNEVEN[rank])
    rows = torch.arange(sum(UNEVEN[rank]), dtype=torch.float64)[:, None]
    back = step.restore(step.route(x=rows)["x"])
    parallel.set_speeds(None)
    return {
        "speeds": speeds,
        "tokens": (alike.tokens.tolist(), step.plan.tokens.tolist()),
        "same": torch.equal(back, rows),
        "default": measure_speeds(),
        "again": parallel.plan(UNEVEN[rank]).plan == alike,
    }


def test_a_slow_rank_is_measured_and_gets_less() -> None:
    first, second = run_ranks(measured, 2)
    assert first["speeds"] == second["speeds"]
    fast, slow = first["speeds"]
    assert slow == pytest.approx(fast / 3)
    alike, slowed = first["tokens"]
    assert slowed[1] < 0.8 * alike[1]
    for found in (first, second):
        assert found["same"]
        assert found["again"]
        assert len(found["default"]) == 2
        assert all(speed > 0 for speed in found["default"])


def loaded() -> list[int]:
    cost = PolynomialCost(0.0, 1e-3, 0.0)
    samples: Any = [torch.zeros(10 + number) for number in range(8)]
    options = LoaderOptions(batch_size=8, collate_fn=list)
    loader = BalancedLoader(samples, length_fn=len, cost=cost, options=options)
    wrong = raised_by(loader.set_cost, cost, speeds=[1.0])[1]
    assert "for each of the 2 ranks" in wrong
    loader.set_cost(cost, speeds=[1.0, 0.5])
    with loader:
        (batch,) = list(loader)
    return [int(batch.plan.seq_lens[batch.plan.bag_of == place].sum()) for place in range(2)]


def test_a_loader_gives_a_slow_rank_less() -> None:
    first, second = run_ranks(loaded, 2)
    assert first == second
    assert first[0] == pytest.approx(2 * first[1], rel=0.1)
