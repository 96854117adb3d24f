"""Gradients of parameters are right as their mean over all ranks, by whatever way."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from bascule import context_parallel, parallelize
from bascule.attention import SequenceLayout, gather, split
from tests.helpers.inference_cases import same_gradients
from tests.helpers.inference_toy import TABLE, grads_of, make_toy, toy_gradients, toy_inputs
from tests.helpers.mesh_cases import make_mesh
from tests.helpers.ranks import on_ranks


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.into(x).chunk(3, -1))
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("with_ddp", [False, True], ids=["by hand", "ddp"])
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1)])
@on_ranks(2)
def test_a_gathered_output(ring: int, ulysses: int, with_ddp: bool) -> None:
    """A loss of all tokens, on every rank: under DDP, or averaged by hand."""
    torch.set_default_dtype(torch.float64)
    mesh, layout = make_mesh(ring, ulysses), SequenceLayout((3, 10), ring, ulysses)
    x, model, alone = torch.randn(2, 13, 8), Layers(), Layers()
    dist.broadcast(x, 0)
    alone(x).square().mean().backward()
    trained = DistributedDataParallel(model) if with_ddp else model
    with context_parallel(mesh, layout):
        own = trained(split(x, mesh, layout, 1))
    gather(own, mesh, layout, 1).square().mean().backward()
    for parameter in model.parameters() if not with_ddp else ():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    same_gradients(grads_of(model), grads_of(alone))


@pytest.mark.parametrize(("data", "ulysses"), [(2, 1), (2, 2)])
@on_ranks(lambda data, ulysses: data * ulysses)
def test_replicas(data: int, ulysses: int) -> None:
    """Each replica has inputs of its own; one process averages the losses of all of them."""
    inputs = [toy_inputs(text=5, image=9, seed=seed) for seed in range(data)]
    model, alone = make_toy(), make_toy()
    wanted: dict[str, Tensor] = {}
    for given in inputs:
        _, grads = toy_gradients(alone, given)
        wanted = {name: wanted.get(name, 0) + grad / data for name, grad in grads.items()}
    with parallelize(model, table=TABLE, data_degree=data, ulysses_degree=ulysses) as handle:
        toy_gradients(model, inputs[dist.get_rank() // ulysses])
        handle.average_gradients()
    same_gradients(grads_of(model), wanted)
