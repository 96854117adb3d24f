"""The same gradients under activation checkpointing, with several plans alive, and under FSDP2."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bascule.models import MMDiT
from bascule.parallel import SequenceParallel
from tests.distributed.cases import (
    COST,
    Batch,
    Gradients,
    assert_same,
    averaged,
    config_of,
    edge_batches,
    make_model,
    named_gradients,
    random_batch,
    rank_loss,
    rank_step,
    reference_step,
)
from tests.distributed.harness import run_ranks

CONFIG = config_of(5, 5)


def batches_of(num_ranks: int) -> dict[str, Batch]:
    edges = edge_batches(num_ranks)
    names = ("each rank another kind", "one rank has everything", "text only", "no sequence at all")
    drawn = {f"random {seed}": random_batch(num_ranks, 50 + seed) for seed in range(3)}
    return {name: edges[name] for name in names} | drawn


def change_blocks(model: MMDiT, change: Callable[..., Any]) -> None:
    for blocks in (model.double_blocks, model.single_blocks):
        for place, block in enumerate(blocks):
            blocks[place] = change(block)


def checkpointed(topology: str) -> None:
    plain, model = make_model(CONFIG), make_model(CONFIG)
    change_blocks(model, checkpoint_wrapper)
    parallel = SequenceParallel(None, topology, COST)
    for name, batch in batches_of(dist.get_world_size()).items():
        want = reference_step(plain, batch)
        assert_same(rank_step(model, batch, parallel), want, f"{name}, {topology}")


@pytest.mark.parametrize("topology", ["g1n4", "g4n1", "g1n2+g2n1"])
def test_checkpointing_gives_the_same_gradients(topology: str) -> None:
    run_ranks(checkpointed, 4, topology)


def two_plans_alive(topology: str, checkpoint: bool) -> None:
    plain, model = make_model(CONFIG), make_model(CONFIG)
    if checkpoint:
        change_blocks(model, checkpoint_wrapper)
    parallel = SequenceParallel(None, topology, COST)
    batches = [random_batch(dist.get_world_size(), seed) for seed in (60, 61)]
    want = [reference_step(plain, batch) for batch in batches]
    for order in ((0, 1), (1, 0)):
        losses = [rank_loss(model, batch, parallel) for batch in batches]
        for place in order:
            model.zero_grad()
            losses[place].backward()
            got = losses[place].item(), averaged(named_gradients(model))
            assert_same(got, want[place], f"batch {place} of {order}")
    model.zero_grad()
    sum(rank_loss(model, batch, parallel) for batch in batches).backward()  # pyright: ignore
    both = {name: grad + want[1][1][name] for name, grad in want[0][1].items()}
    assert_same((0.0, averaged(named_gradients(model))), (0.0, both), "both at once")


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("topology", ["g3n1", "g1n1+g2n1"])
def test_two_plans_alive(topology: str, checkpoint: bool) -> None:
    run_ranks(two_plans_alive, 3, topology, checkpoint)


def sharded_gradients(model: torch.nn.Module) -> Gradients:
    grads: Gradients = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), f"{name} got no gradient"
        grads[name.replace("_checkpoint_wrapped_module.", "")] = parameter.grad.full_tensor()
    return grads


def sharded(topology: str, checkpoint: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain, model = make_model(CONFIG), make_model(CONFIG)
    change_blocks(
        model,
        lambda block: fully_shard(checkpoint_wrapper(block) if checkpoint else block, mesh=mesh),
    )
    fully_shard(model, mesh=mesh)
    parallel = SequenceParallel(mesh, topology, COST)
    for name, batch in batches_of(dist.get_world_size()).items():
        model.zero_grad()
        loss = rank_loss(model, batch, parallel)
        loss.backward()
        got = loss.item(), sharded_gradients(model)
        assert_same(got, reference_step(plain, batch), f"{name}, {topology}")


@pytest.mark.parametrize(
    ("world_size", "topology", "checkpoint"),
    [
        (2, "g1n2", False),
        (2, "g2n1", False),
        (2, "g2n1", True),
        (4, "g1n2+g2n1", False),
        (4, "g4n1", True),
    ],
)
def test_fsdp2_gives_the_same_gradients(world_size: int, topology: str, checkpoint: bool) -> None:
    run_ranks(sharded, world_size, topology, checkpoint)
