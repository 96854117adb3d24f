"""One step of training: when ranks average gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bascule.errors import ConfigError
from bascule.train import train_step
from tests.helpers.ranks import run_ranks

WIDTH, NUM_MICROBATCHES = 6, 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    return model.double()


def rows(rank: int, micro: int) -> Tensor:
    random = torch.Generator().manual_seed(10 * micro + rank)
    return torch.randn(4, WIDTH, generator=random).double()


def wrapped(wrapper: str) -> nn.Module:
    model = make_model()
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2], model):  # pyright: ignore
            fully_shard(layer, mesh=mesh)
    return model


def whole_grads(model: nn.Module) -> list[Tensor]:
    grads = [parameter.grad for parameter in model.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads if g is not None]


def trained(wrapper: str, sync: str) -> dict[str, Any]:
    model, had_grads = wrapped(wrapper), list[bool]()
    averages: list[int] = []
    if isinstance(model, DistributedDataParallel):

        def count(_: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            averages.append(len(had_grads))
            buffer = bucket.buffer() / dist.get_world_size()
            work = dist.all_reduce(buffer, async_op=True)
            assert work is not None
            return work.get_future().then(lambda future: future.value()[0])

        model.register_comm_hook(None, count)

    def loss_of(micro: int, model: nn.Module) -> Tensor:
        had_grads.append(all(parameter.grad is not None for parameter in model.parameters()))
        return model(rows(dist.get_rank(), micro)).square().mean()

    micros = [lambda model, k=k: loss_of(k, model) for k in range(NUM_MICROBATCHES)]
    loss = train_step(model, micros, sync=sync)  # pyright: ignore[reportArgumentType]
    assert not loss.requires_grad
    return {"loss": loss, "grads": whole_grads(model), "had": had_grads, "averages": averages}


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize("sync", ["microbatch", "step"])
def test_gradients_are_those_of_one_process(wrapper: str, sync: str) -> None:
    alone = make_model()
    every = [alone(rows(rank, micro)).square().mean() for rank in (0, 1) for micro in range(3)]
    (torch.stack(every).sum() / 2).backward()
    found = run_ranks(trained, 2, wrapper, sync)
    for rank, got in enumerate(found):
        torch.testing.assert_close(got["grads"], whole_grads(alone), rtol=1e-12, atol=1e-14)
        own = sum(loss.item() for loss in every[3 * rank :][:3])
        assert got["loss"].item() == pytest.approx(own)
        if wrapper == "fsdp2":  # sharded gradients exist once they were averaged
            assert got["had"] == [False, sync == "microbatch", sync == "microbatch"]
        else:
            assert sorted(set(got["averages"])) == ([1, 2, 3] if sync == "microbatch" else [3])


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError):
        train_step(make_model(), [torch.sum], sync="batch")  # pyright: ignore[reportArgumentType]
    late = [lambda model: model(rows(0, k)).mean() for k in range(3)]  # noqa: B023
    with pytest.raises(ConfigError, match="1 and 2 are functions of one loop"):
        train_step(make_model(), late)


def test_one_process_needs_no_group() -> None:
    model, alone = make_model(), make_model()
    loss = train_step(model, [lambda model, k=k: model(rows(0, k)).mean() for k in range(2)])
    want = alone(rows(0, 0)).mean() + alone(rows(0, 1)).mean()
    want.backward()
    assert torch.equal(loss, want.detach())
    torch.testing.assert_close(whole_grads(model), whole_grads(alone), rtol=1e-12, atol=0.0)
