"""Balanced training in the wrappers and on the meshes that people train with: as one process.

Every case takes two optimiser steps of four microbatches, clips gradients, and compares all
parameters with those of one process that has every sample.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from bascule.models import MMDiT
from bascule.parallel import SequenceParallel
from bascule.plan.plan import Sync
from bascule.train import train_step
from tests.helpers.cases import (
    COST,
    Batch,
    Samples,
    config_of,
    edge_batches,
    make_model,
    random_batch,
    reference_step,
)
from tests.helpers.ranks import by_one_rank, run_ranks

CONFIG = config_of(4, 4)
NUM_STEPS, NUM_MICROBATCHES, MAX_NORM = 2, 4, 0.3

Step = list[Batch]


def steps_of(num_ranks: int) -> list[Step]:
    """Some microbatches in which ranks have nothing, and one in which nobody has anything."""
    drawn = [random_batch(num_ranks, seed) for seed in range(NUM_STEPS * NUM_MICROBATCHES)]
    edges = edge_batches(num_ranks)
    drawn[1], drawn[6] = edges["one rank has everything"], edges["no sequence at all"]
    return [drawn[n : n + NUM_MICROBATCHES] for n in range(0, len(drawn), NUM_MICROBATCHES)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Adam divides by the size of the gradients; eps keeps roundings of tiny ones small.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def alone(steps: list[Step], *, clips: bool = True) -> dict[str, Tensor]:
    """Parameters of one process after all steps."""
    model = make_model(CONFIG)
    optimizer = optimizer_of(model)
    for batches in steps:
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for batch in batches:
            for name, grad in reference_step(model, batch)[1].items():
                total[name] += grad / NUM_MICROBATCHES
        for name, parameter in model.named_parameters():
            parameter.grad = total[name]
        if clips:
            clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def blocks_of(model: MMDiT) -> list[nn.Module]:
    return [*model.double_blocks, *model.single_blocks]


def sharded(model: MMDiT, mesh: DeviceMesh, **settings: Any) -> MMDiT:
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


Made = tuple[nn.Module, SequenceParallel]


def ddp() -> Made:
    return DistributedDataParallel(make_model(CONFIG)), SequenceParallel(None, "g2n1", COST)


def fsdp2(*, reshards: bool) -> Made:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = sharded(make_model(CONFIG), mesh, reshard_after_forward=reshards)
    return model, SequenceParallel(mesh, "g2n1", COST)


def summing() -> Made:
    """FSDP2 that adds up gradients, as torchtitan's trainers do."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = sharded(make_model(CONFIG), mesh)
    for module in (*blocks_of(model), model):
        module.set_gradient_divide_factor(1.0)  # pyright: ignore[reportCallIssue]
    return model, SequenceParallel(mesh, "g2n1", COST, gradients="sum")


def hsdp(*, is_isolated: bool) -> Made:
    """Two replicas of two shards; each balanced in itself, or all four ranks together."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = sharded(make_model(CONFIG), mesh)
    if not is_isolated:
        return model, SequenceParallel(None, "g1n2+g2n1", COST)
    return model, SequenceParallel(mesh["shard"], "g2n1", COST, data_group=dist.group.WORLD)


def tensor_parallel() -> Made:
    """Two ranks share each layer, and two such pairs share the sequences."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("balance", "tp"))
    model = make_model(CONFIG)
    plan = {"mlp_in": ColwiseParallel(), "mlp_out": RowwiseParallel()}
    for block in model.double_blocks:
        for stream in ("text", "image"):
            parallelize_module(block.get_submodule(stream), mesh["tp"], plan)
    model = sharded(model, mesh["balance"])
    return model, SequenceParallel(mesh["balance"], "g2n1", COST)


def trained(make: Callable[[], Made], steps: list[Step], sync: Sync, clips: bool) -> float:
    """The largest difference of a parameter from one process."""
    model, parallel = make()
    optimizer = optimizer_of(model)
    place = parallel.data_group.rank if parallel.data_group is not parallel.group else parallel.rank
    first = place - parallel.rank  # of this replica among all that load

    def loss_of(batch: Batch) -> Callable[[nn.Module], Tensor]:
        own = batch[first : first + parallel.group.size]
        before = sum(map(len, batch[:first]))

        def loss(model: nn.Module) -> Tensor:
            return loss_from(model, own, before, parallel) / NUM_MICROBATCHES

        return loss

    for batches in steps:
        train_step(model, list(map(loss_of, batches)), sync=sync)
        if clips:
            clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    got = {name.removeprefix("module."): whole(p) for name, p in model.named_parameters()}
    want = by_one_rank(lambda: alone(steps, clips=clips))
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).abs().max()) for name in want)


def loss_from(
    model: nn.Module, batch: Batch, num_before: int, parallel: SequenceParallel
) -> Tensor:
    """As `rank_loss`, of samples that are numbered from `num_before` on."""
    first = num_before + sum(len(sizes) for sizes in batch[: parallel.rank])
    samples = Samples.draw(batch[parallel.rank], CONFIG, first_id=first)
    step = parallel.plan(samples.seq_lens)
    return step.mean(samples.losses(model(samples.inputs, step)))


CASES: dict[str, tuple[int, Callable[[], Made], int, Sync]] = {
    "ddp": (2, ddp, 2, "step"),
    "ddp, averaging every microbatch": (2, ddp, 2, "microbatch"),
    "fsdp2": (2, lambda: fsdp2(reshards=True), 2, "microbatch"),
    "fsdp2 that keeps parameters": (2, lambda: fsdp2(reshards=False), 2, "step"),
    "fsdp2 that sums": (2, summing, 2, "microbatch"),
    "hsdp": (4, lambda: hsdp(is_isolated=False), 4, "microbatch"),
    "hsdp with replicas of their own": (4, lambda: hsdp(is_isolated=True), 4, "step"),
    "tensor parallel": (4, tensor_parallel, 2, "microbatch"),
}


def case(name: str) -> float:
    _, make, num_loading, sync = CASES[name]
    # torch 2.13 takes no norm over parameters on meshes of unlike axes.
    return trained(make, steps_of(num_loading), sync, clips=name != "tensor parallel")


@pytest.mark.some(3)
@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_one_process(name: str) -> None:
    assert max(run_ranks(case, CASES[name][0], name)) < 1e-10
