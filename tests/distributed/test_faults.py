"""A fault at each place of a step, a wrapper and a loader: all other ranks end, and say why.

`make stress` has all of them, the tests of every day those with `DAILY` alone. What happens to a
run while it saves and resumes is in `test_faults_saving.py`.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

from bascule.comm.guard.failures import ROLL_CALL_S
from bascule.parallel import SequenceParallel
from bascule.training import train_step
from tests.helpers.cases import COST, config_of, make_model, own_samples
from tests.helpers.faults import Fault, Striker, check_fault
from tests.helpers.loader_cases import PER_RANK, sample_of
from tests.helpers.loader_checks import loader_of
from tests.helpers.ranks import COLLECTIVE_TIMEOUT_S

TIMEOUT_S = 5.0
GRACE_S = 10.0
"""On a busy machine. A request to a store that is gone ends within as long, too."""

NUM_STEPS = 5
BATCH = [[(2, 9), (1, 4)], [(0, 5)], [(3, 8)], [(1, 1), (2, 6)]]
U, R, B = "g3n1", "g1r3n1", "g2r2n1"
TO_HEADS, FROM_HEADS = "all_to_all (tokens to heads)", "all_to_all (heads to tokens)"
ROUND_1, ROUND_2 = "ring (keys and values, round 1)", "ring (keys and values, round 2)"
ROUTE, BACK = "all_to_all (route)", "all_to_all (route back)"
PLAN, MEAN = "all_gather (plan)", "all_reduce (mean)"
SAMPLES = "reduce_scatter (samples' gradients)"

STEP_FAULTS = [
    # before the first step
    Fault("kill", "meeting", 1, 3, step=0, topology=U),
    Fault("stop", "meeting", 0, 4, step=0, topology=B),
    Fault("kill", "all_gather (construction)", 0, 3, step=0, topology=U),
    Fault("stop", "all_gather (construction)", 1, 2, step=0, topology="g2n1"),
    # planning
    Fault("kill", PLAN, 0, 3, topology=U),
    Fault("kill", f"{PLAN} posted", 1, 2, topology="g2n1"),
    Fault("stop", PLAN, 2, 3, topology="g1n1+g2n1"),
    Fault("stop", f"{PLAN} posted", 0, 4, topology=B),
    Fault("raise", "cost", 1, 3, topology=U),
    # agreement on what is new
    Fault("kill", "all_gather (route)", 1, 3, step=1, topology=U),
    Fault("kill", "all_gather (restore) posted", 3, 4, step=1, topology=B),
    Fault("stop", "all_gather (attend)", 0, 2, step=1, topology="g2n1"),
    Fault("raise", "block", 2, 3, step=1, topology=R),
    # route
    Fault("kill", ROUTE, 0, 4, topology="g4n1"),
    Fault("kill", f"{ROUTE} posted", 3, 4, topology="g1n1+g1n1+g2n1"),
    Fault("stop", ROUTE, 1, 3, topology=R),
    Fault("kill", "all_gather (samples)", 1, 3, topology=U),
    # attention in Ulysses bags
    Fault("kill", TO_HEADS, 2, 3, topology=U),
    Fault("kill", f"{TO_HEADS} posted", 0, 4, topology="g4n1"),
    Fault("kill", FROM_HEADS, 1, 2, nth=2, topology="g2n1"),
    Fault("kill", TO_HEADS, 2, 3, topology="g1n1+g2n1"),
    Fault("stop", FROM_HEADS, 1, 4, topology="g4n1"),
    Fault("raise", "block", 1, 3, topology=U),
    # in rings
    Fault("kill", ROUND_1, 1, 2, topology="g1r2n1"),
    Fault("kill", ROUND_2, 0, 3, topology=R),
    Fault("stop", f"{ROUND_1} posted", 3, 4, topology="g1r4n1"),
    Fault("raise", "block", 0, 3, topology=R),
    # in both
    Fault("kill", TO_HEADS, 0, 4, topology=B),
    Fault("kill", ROUND_1, 3, 4, nth=2, topology=B),
    Fault("stop", FROM_HEADS, 2, 4, topology=B),
    Fault("raise", "block", 3, 4, topology=B),
    # restore, loss
    Fault("kill", BACK, 0, 3, topology=U),
    Fault("stop", f"{BACK} posted", 1, 2, topology="g1r2n1"),
    Fault("raise", "loss", 2, 3, topology=U),
    Fault("kill", MEAN, 1, 3, topology=R),
    Fault("stop", MEAN, 3, 4, topology=B),
    # backward of restore, attention, route and gathered samples
    Fault("kill", ROUTE, 2, 3, nth=2, topology=U),
    Fault("kill", TO_HEADS, 1, 3, nth=3, topology=U),
    Fault("stop", FROM_HEADS, 0, 4, nth=4, topology="g4n1"),
    Fault("kill", "ring (gradients, round 1)", 2, 4, topology=B),
    Fault("stop", "ring (gradients, round 2)", 1, 2, nth=2, topology="g1r2n1"),
    Fault("kill", f"{BACK} posted", 0, 3, nth=2, topology=R),
    Fault("stop", BACK, 3, 4, nth=2, topology=B),
    Fault("kill", SAMPLES, 1, 2, topology="g2n1"),
    Fault("stop", SAMPLES, 2, 3, topology=U),
    Fault("raise", "gradient", 0, 3, topology=U),
    Fault("raise", "gradient", 3, 4, topology=B),
    # gradients, parameters and the optimiser
    Fault("kill", "all-reduce", 1, 2, topology="g2n1", wrapper="ddp"),
    Fault("stop", "all-reduce", 0, 3, topology=U, wrapper="ddp"),
    Fault("raise", "all-reduce", 2, 3, topology=U, wrapper="ddp"),
    Fault("kill", TO_HEADS, 3, 4, topology=B, wrapper="ddp"),
    Fault("kill", "unshard", 0, 3, nth=2, topology=U, wrapper="fsdp"),
    Fault("stop", "unshard", 1, 2, nth=2, topology="g2n1", wrapper="fsdp"),
    Fault("kill", "reduce", 3, 4, topology=B, wrapper="fsdp"),
    Fault("stop", "reduce", 1, 3, topology=U, wrapper="fsdp"),
    Fault("raise", "block", 1, 3, topology="g1n3", wrapper="fsdp"),
    Fault("raise", "optimiser", 2, 3, topology=U, wrapper="ddp"),
    Fault("kill", "optimiser", 3, 4, topology=B, wrapper="fsdp"),
    Fault("stop", "optimiser", 0, 2, topology="g2n1", wrapper="fsdp"),
]
LOADER_FAULTS = [
    Fault("kill", "all_gather (beginning an iteration)", 1, 3, step=0),
    Fault("kill", "load", 2, 3),
    Fault("stop", "load", 0, 2),
    Fault("raise", "load", 3, 4),
    Fault("kill", "all_gather (epoch 0, loading) posted", 0, 3),
    Fault("kill", "all_to_all (samples)", 1, 2),
    Fault("kill", "all_to_all (samples) posted", 3, 4),
    Fault("stop", "all_to_all (samples)", 1, 3),
    Fault("raise", "collate", 0, 3),
    Fault("stop", "all_gather (epoch 0, making batches)", 2, 3),
    Fault("kill", "training", 0, 4),
    Fault("stop", "training", 1, 2),
    Fault("raise", "training", 1, 3),
]
DAILY = {
    Fault("raise", "block", 3, 4, topology=B),
    Fault("kill", "reduce", 3, 4, topology=B, wrapper="fsdp"),
    Fault("kill", "all_to_all (samples)", 1, 2),
}


def seldom(faults: Sequence[Fault]) -> list[Any]:
    marks = pytest.mark.stress
    return [pytest.param(one, id=str(one), marks=() if one in DAILY else marks) for one in faults]


@pytest.mark.some(1)
@pytest.mark.parametrize("fault", seldom(STEP_FAULTS))
def test_a_fault_in_training_ends_the_others_with_the_cause(fault: Fault, tmp_path: Path) -> None:
    # A wrapper's collectives wait as long as the group of the world.
    wait_s = COLLECTIVE_TIMEOUT_S if fault.wrapper else TIMEOUT_S
    check_fault(fault, tmp_path, train, wait_s + ROLL_CALL_S + GRACE_S)


@pytest.mark.parametrize("fault", seldom(LOADER_FAULTS))
def test_a_fault_in_a_loader_ends_the_others_with_the_cause(fault: Fault, tmp_path: Path) -> None:
    check_fault(fault, tmp_path, load, COLLECTIVE_TIMEOUT_S + ROLL_CALL_S + GRACE_S)


def test_there_are_sixty_faults_of_each_kind_at_each_rank() -> None:
    faults = [*STEP_FAULTS, *LOADER_FAULTS]
    assert len({str(one) for one in faults}) == len(faults) >= 60
    assert {one.kind for one in faults} == {"kill", "stop", "raise"}
    places = {(one.ranks, one.victim) for one in faults}
    assert places == {(ranks, rank) for ranks in (2, 3, 4) for rank in range(ranks)}
    assert set(faults) >= DAILY


def train(fault: Fault, striker: Striker) -> None:
    """Some steps of a small model, where every call, and some of the user's code, is a place."""
    now = [0]

    def step_now() -> int:
        return now[0]

    def cost(seq_lens: Any) -> Any:
        striker.at("cost", now[0])
        return COST(seq_lens)

    bare = make_model(config_of(12, 12))
    bare.single_blocks[0].register_forward_pre_hook(lambda *_: striker.at("block", now[0]))
    model = wrapped(bare, fault.wrapper, striker, step_now)
    optimizer = torch.optim.AdamW(model.parameters())
    update = striker.hits(optimizer.step, "optimiser", step_now)
    batch = BATCH[: fault.ranks]
    with striker.in_calls(), places_of_fsdp(striker, step_now):
        striker.at("meeting", 0)
        parallel = SequenceParallel(None, fault.topology, cost, timeout_s=TIMEOUT_S)
        samples = own_samples(batch, bare.config, parallel.rank)
        for number in range(1, NUM_STEPS + 1):
            now[0] = number
            step = parallel.plan(samples.seq_lens)

            def loss_of(model: nn.Module, step: Any = step) -> Tensor:
                losses = samples.losses(model(samples.inputs, step))
                losses.register_hook(lambda _: striker.at("gradient", now[0]))
                striker.at("loss", now[0])
                return step.mean(losses)

            with step:
                train_step(model, [loss_of])
                update()
                optimizer.zero_grad()


def wrapped(
    bare: nn.Module, wrapper: str, striker: Striker, step_now: Callable[[], int]
) -> nn.Module:
    if wrapper == "ddp":
        model = DistributedDataParallel(bare)
        model.register_comm_hook(None, striker.hits(allreduce_hook, "all-reduce", step_now))
        return model
    if wrapper == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in (*bare.double_blocks, *bare.single_blocks):  # pyright: ignore
            fully_shard(block, mesh=mesh)
        fully_shard(bare, mesh=mesh)
    return bare


def places_of_fsdp(striker: Striker, step_now: Callable[[], int]) -> Any:
    return mock.patch.multiple(
        FSDPParamGroup,
        unshard=striker.hits(FSDPParamGroup.unshard, "unshard", step_now),
        post_backward=striker.hits(FSDPParamGroup.post_backward, "reduce", step_now),
    )


def load(fault: Fault, striker: Striker) -> None:
    """Batches, each of which is used in a collective, while a thread loads ahead."""

    def samples() -> Iterator[Any]:
        for number in range(NUM_STEPS):
            striker.at("load", number)
            first = PER_RANK * dist.get_rank() + 3 * number
            long = dist.get_rank() == number % fault.ranks  # so that samples travel in each step
            yield [sample_of(first + k, 40 if long else 2) for k in range(3)]

    collated = itertools.count(1)

    def collate(group: list[Any]) -> list[Any]:
        striker.at("collate", next(collated))
        return group

    with striker.in_calls():
        loader = loader_of(samples(), timeout_s=TIMEOUT_S, collate_fn=collate)
        with loader:
            for number, _ in enumerate(loader):
                striker.at("training", number)
                dist.all_reduce(torch.ones(1))
