"""Training in balance, compared with one process."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from bascule.attention import PackedSequences, attend_packed
from bascule.models import LocalExchange, MMDiT
from bascule.parallel import SequenceParallel
from tests.helpers.cases import (
    COST,
    Batch,
    Gradients,
    assert_same,
    averaged,
    config_of,
    edge_batches,
    make_model,
    named_gradients,
    own_samples,
    random_batch,
    rank_loss,
    rank_step,
    reference_step,
)

# World size: (query heads, key-value heads): topologies. Some heads do not divide among the bag.
Layouts = dict[tuple[int, int], list[str]]


def train_everywhere(layouts: Layouts, batches: dict[str, Batch]) -> int:
    compared = 0
    for (num_heads, num_kv_heads), topologies in layouts.items():
        grouped = num_kv_heads < num_heads
        model = make_model(config_of(num_heads, num_kv_heads, head_dim=2 if grouped else 4))
        planner = "knapsack" if grouped else "lpt"
        parallels = [SequenceParallel(None, spec, COST, planner=planner) for spec in topologies]
        for name, batch in batches.items():
            want = reference_step(model, batch) if dist.get_rank() == 0 else None
            for parallel in parallels:
                got = rank_step(model, batch, parallel)
                if want is not None:
                    assert_same(got, want, f"{name}, {parallel.topology}, {num_heads} heads")
                    compared += 1
    return compared


def errors_in_bf16(topology: str, num_batches: int, is_sharded: bool) -> tuple[float, float]:
    """Squared relative errors against float32, summed over batches: balanced, and unbalanced.

    The model is of bfloat16, or of float32 parameters that FSDP2 gathers as bfloat16.
    """
    config, dtype = config_of(5, 5, head_dim=8), torch.float32 if is_sharded else torch.bfloat16
    exact, rough = make_model(config, torch.float32), make_model(config, dtype)
    if is_sharded:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        change_blocks(rough, lambda block: fully_shard(block, mp_policy=policy))
        fully_shard(rough, mp_policy=policy)
    else:
        exact.load_state_dict(rough.state_dict())
    parallel, sums = SequenceParallel(None, topology, COST), [0.0, 0.0]
    for seed in range(num_batches):
        batch = random_batch(dist.get_world_size(), 100 + seed)
        batch[-1].append((4, 9))
        want = reference_step(exact, batch, torch.float32)[1]
        for place, loss_of in enumerate((rank_loss, _own_loss)):
            rough.zero_grad()
            loss_of(rough, batch, parallel, torch.bfloat16).backward()
            grads = sharded_gradients(rough) if is_sharded else averaged(named_gradients(rough))
            error = sum(float((grads[name] - ref).square().sum()) for name, ref in want.items())
            sums[place] += error / sum(float(ref.square().sum()) for ref in want.values())
    return sums[0], sums[1]


def _own_loss(model: MMDiT, batch: Batch, parallel: object, dtype: torch.dtype) -> torch.Tensor:
    """The loss of a rank that trains on its own samples, with the same attention kernel."""
    samples = own_samples(batch, model.config, dist.get_rank(), dtype)
    seqs = PackedSequences.build(samples.seq_lens, torch.device("cpu"))
    exchange = LocalExchange(samples.seq_lens, attend=lambda q, k, v: attend_packed(q, k, v, seqs))
    losses = samples.losses(model(samples.inputs, exchange))
    num_tokens = torch.tensor(float(losses.numel()))
    dist.all_reduce(num_tokens)
    return losses.sum() * (dist.get_world_size() / num_tokens)


CONFIG = config_of(5, 5)


def batches_of(num_ranks: int) -> dict[str, Batch]:
    edges = edge_batches(num_ranks)
    names = ("each rank another kind", "one rank has everything", "text only", "no sequence at all")
    drawn = {f"random {seed}": random_batch(num_ranks, 50 + seed) for seed in range(3)}
    return {name: edges[name] for name in names} | drawn


def change_blocks(model: MMDiT, change: Callable[..., Any], every: int = 1) -> None:
    """Change every so-manieth block, the first included."""
    both = model.double_blocks, model.single_blocks
    places = [(blocks, place) for blocks in both for place in range(len(blocks))]
    for blocks, place in places[::every]:
        blocks[place] = change(blocks[place])


def checkpointed(topology: str, every: int) -> None:
    plain, model = make_model(CONFIG), make_model(CONFIG)
    change_blocks(model, checkpoint_wrapper, every)
    parallel = SequenceParallel(None, topology, COST)
    for name, batch in batches_of(dist.get_world_size()).items():
        want = reference_step(plain, batch)
        assert_same(rank_step(model, batch, parallel), want, f"{name}, {topology}")


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
