"""Tensors of CUDA over gloo, with ones of the host that say that they are not: values and refusals.

On a device: `tests/gpu/test_cuda_ranks.py`.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bascule.comm import collectives, stage_cuda
from bascule.comm.collectives import (
    Transfers,
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
    start_all_to_all,
)
from bascule.comm.groups import RankGroup, new_group
from bascule.parallel import SequenceParallel
from tests.helpers.cases import (
    COST,
    Samples,
    assert_same,
    averaged,
    config_of,
    edge_batches,
    make_model,
    named_gradients,
    own_samples,
    reference_step,
)
from tests.helpers.ranks import raised_by, run_ranks


class OnDevice(Tensor):
    """A tensor of the host that says that it is one of CUDA; so is all that comes from it."""

    is_cpu = property(lambda _: False)  # pyright: ignore[reportAssignmentType]
    is_cuda = property(lambda _: True)  # pyright: ignore[reportAssignmentType]


def on_device(x: Tensor) -> Tensor:
    return x.as_subclass(OnDevice)


def count_waits() -> list[Tensor]:
    """No stream is there to wait for: what would have been waited for."""
    waited = list[Tensor]()
    changed: Any = collectives
    changed._wait_for_stream = waited.append
    return waited


def everything(group: RankGroup, own: Tensor) -> list[Tensor]:
    """What each collective gives this rank; `own` is (size, 3)."""
    call, size, rank = "test", group.size, group.rank
    # Rank r gives rank s one row for s = 0, two for s = 1, ..
    counts = list(range(1, size + 1))
    sent = torch.cat([own[:1] + place for place, num in enumerate(counts) for _ in range(num)])
    received = own.new_empty(size * counts[rank], 3)
    start_all_to_all(group, call, received, sent, [counts[rank]] * size, counts)()
    come = own.new_empty(own.shape)
    to, of = (rank + 1) % size, (rank - 1) % size
    Transfers(group, call, {to: own}, {of: come}).wait()
    large = own.repeat(3000, 1)
    sums = all_reduce(group, call, own), all_reduce(group, call, large)
    gathered, scattered = all_gather(group, call, own), reduce_scatter(group, call, own)
    return [received, come, *sums, gathered, scattered, broadcast(group, call, own)]


def both_ways() -> int:
    """On all ranks, and on some of them; with tensors of the host, and of the device."""
    waited = count_waits()
    stage_cuda()
    world = new_group(range(dist.get_world_size()), "test", 15.0)
    groups = [world]
    if world.rank < 2:
        groups.append(world.part([1, 0], "part"))
    for group in groups:
        own = torch.arange(3.0 * group.size).view(-1, 3) + 100 * dist.get_rank()
        wanted, num_waited = everything(group, own), len(waited)
        found = everything(group, on_device(own.clone()))
        assert len(waited) > num_waited
        for one, other in zip(found, wanted, strict=True):
            assert type(one) is OnDevice and torch.equal(one.as_subclass(Tensor), other)
    return len(waited)


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_moves_the_same(size: int) -> None:
    assert min(run_ranks(both_ways, size)) > 0


class OnHost(Tensor):
    """A copy on the host."""


def stage_everything() -> list[Tensor]:
    """Operators hide that a tensor is `OnDevice`: here all travel as copies but what is one."""
    changed: Any = collectives
    changed._on_host = lambda x: torch.empty(x.shape, dtype=x.dtype).as_subclass(OnHost)
    changed.is_staged = lambda _, x: not isinstance(x, OnHost)
    return count_waits()


def train(topology: str) -> int:
    waited = stage_everything()
    config = config_of(4, 4)
    sp = SequenceParallel(None, topology, COST)
    model, whole = make_model(config), make_model(config)
    for name, batch in edge_batches(dist.get_world_size()).items():
        drawn = own_samples(batch, config, sp.rank)
        samples = Samples(drawn.inputs, drawn.target, drawn.seq_lens)
        model.zero_grad()
        step = sp.plan(samples.seq_lens)
        loss = step.mean(samples.losses(model(samples.inputs, step)))
        loss.backward()
        grads = {of: x.as_subclass(Tensor) for of, x in named_gradients(model).items()}
        assert_same((loss.item(), averaged(grads)), reference_step(whole, batch), name)
    return len(waited)


@pytest.mark.some(2)
@pytest.mark.parametrize("topology", ["g1n2", "g2n1", "g1r2n1"])
def test_a_training_step_is_that_of_one_process(topology: str) -> None:
    assert min(run_ranks(train, 2, topology)) > 0


def not_chosen() -> list[tuple[list[str], str]]:
    group = new_group(range(2), "test", 15.0)
    x: Any = on_device(torch.zeros(2, 3))
    refused = [
        raised_by(all_gather, group, "test", x),
        raised_by(Transfers, group, "test", {1 - group.rank: x}, {}),
    ]
    assert all_gather(group, "test", torch.zeros(1)).shape == (2, 1)
    return refused


def test_without_the_choice_they_are_refused_and_the_group_goes_on() -> None:
    for refused in run_ranks(not_chosen, 2):
        for classes, text in refused:
            assert "ConfigError" in classes
            assert "call bascule.comm.stage_cuda() on every rank" in text
