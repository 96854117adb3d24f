"""Balanced training on any number of ranks, in bags with and without rings, gives what one process
gives on the whole batch: also under activation checkpointing, with several plans alive, and under
FSDP2."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bascule.attention import PackedSequences, attend_packed
from bascule.models import LocalExchange, MMDiT
from bascule.parallel import SequenceParallel
from tests.helpers.cases import (
    COST,
    Batch,
    all_batches,
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
    sharded_gradients,
)
from tests.helpers.ranks import by_one_rank, on_ranks, run_ranks

Layouts = dict[tuple[int, int], list[str]]
# World size: (query heads, key-value heads): topologies. Some heads do not divide among the ranks.
LAYOUTS: dict[int, Layouts] = {
    1: {(3, 3): ["g1n1"], (4, 2): ["g1n1"]},
    2: {(3, 3): ["g1n2", "g2n1", "g1r2n1"], (6, 3): ["g1n1", "g2n1"], (4, 1): ["g1r2n1"]},
    3: {
        (4, 4): ["g1n3", "g3n1", "g1n1+g2n1", "g1r2n1+g1n1"],
        (10, 5): ["g3n1", "g2n1+g1n1"],
        (4, 1): ["g1r3n1"],
    },
    4: {
        (5, 5): ["g1n4", "g4n1", "g1n2+g2n1", "g2r2n1", "g1n2+g1r2n1"],
        (14, 7): ["g4n1", "g1n1+g3n1", "g2n1"],
        (4, 2): ["g2r2n1", "g1r4n1", "g1r2n2", "g2n1+g1r2n1"],
    },
    6: {(3, 3): ["g2r2n1+g1n2", "g3r2n1"], (6, 2): ["g2r3n1", "g1r2n1", "g2n1+g2r2n1"]},
    8: {
        (9, 9): ["g1n8", "g8n1", "g1n2+g2n1+g4n1", "g4r2n1", "g3r2n1+g1r2n1"],
        (20, 10): ["g8n1", "g3n1+g5n1", "g4n1", "g4r2n1", "g2r4n1", "g2r3n1+g2n1"],
    },
}


def train_everywhere(layouts: Layouts, batches: dict[str, Batch], every: int = 1) -> int:
    """Compare every so-manieth topology, another one for each batch; return how many."""
    compared = 0
    for (num_heads, num_kv_heads), topologies in layouts.items():
        grouped = num_kv_heads < num_heads
        model = make_model(config_of(num_heads, num_kv_heads, head_dim=2 if grouped else 4))
        parallels = [SequenceParallel(None, spec, COST) for spec in topologies]
        for place, (name, batch) in enumerate(batches.items()):
            own = parallels[place % every :: every]
            want = reference_step(model, batch) if own and dist.get_rank() == 0 else None
            for parallel in own:
                got = rank_step(model, batch, parallel)
                if want is not None:
                    assert_same(got, want, f"{name}, {parallel.topology}, {num_heads} heads")
                    compared += 1
    return compared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "every", "num_random"),
    [(3, 3, 1), *(pytest.param(n, 1, 60, marks=pytest.mark.stress) for n in LAYOUTS)],
)
def test_loss_and_gradients_equal_one_process(world_size: int, every: int, num_random: int) -> None:
    layouts, batches = LAYOUTS[world_size], all_batches(world_size, num_random)
    compared = run_ranks(train_everywhere, world_size, layouts, batches, every, timeout_s=1500.0)
    places = [n % every for n in range(len(batches))]
    assert compared[0] == sum(
        len(specs[place::every]) for place in places for specs in layouts.values()
    )


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
        want = by_one_rank(reference_step, exact, batch, torch.float32)[1]
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


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "topology", ["g1n2", "g2r2n1", "g2n1", "g1n1+g3n1", "g1n2+g2n1 FSDP2", "g2n1 FSDP2"]
)
def test_bf16_is_as_near_to_float32_as_without_balancing(topology: str) -> None:
    bags, _, wrapper = topology.partition(" ")
    size = 2 if bags in ("g1n2", "g2n1") else 4
    balanced, unbalanced = run_ranks(errors_in_bf16, size, bags, 3, bool(wrapper))[0]
    assert 0 < balanced <= 1.5**2 * unbalanced


CONFIG = config_of(5, 5)


def batches_of(num_ranks: int) -> dict[str, Batch]:
    edges = edge_batches(num_ranks)
    names = ("each rank another kind", "one rank has everything", "no sequence at all")
    return {name: edges[name] for name in names} | {"random": random_batch(num_ranks, 50)}


def change_blocks(model: MMDiT, change: Callable[..., Any], every: int = 1) -> None:
    """Change every so-manieth block, the first included."""
    both = model.double_blocks, model.single_blocks
    places = [(blocks, place) for blocks in both for place in range(len(blocks))]
    for blocks, place in places[::every]:
        blocks[place] = change(blocks[place])


def recorded(is_sharded: bool, is_whole: bool) -> None:
    """Checkpoints of all blocks or of every other one, and FSDP2 with checkpoints or without.

    All batches in both topologies, or each in one.
    """
    batches, plain = batches_of(dist.get_world_size()), make_model(CONFIG)
    wanted = {name: by_one_rank(reference_step, plain, one) for name, one in batches.items()}
    topologies = "g2r2n1" if is_sharded else "g4n1", "g1n2+g2n1"
    for first, (topology, every) in enumerate(zip(topologies, (1, 2), strict=True)):
        model = make_model(CONFIG)
        if every == 1 or not is_sharded:
            change_blocks(model, checkpoint_wrapper, every)
        if is_sharded:
            change_blocks(model, fully_shard)
            fully_shard(model)
        parallel = SequenceParallel(None, topology, COST)
        for name in batches if is_whole else list(batches)[first::2]:
            batch = batches[name]
            model.zero_grad()
            loss = rank_loss(model, batch, parallel)
            loss.backward()
            grads = sharded_gradients(model) if is_sharded else averaged(named_gradients(model))
            assert_same((loss.item(), grads), wanted[name], f"{name}, {topology}")


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.stress)])
@pytest.mark.parametrize("is_sharded", [False, True], ids=["checkpoint", "FSDP2"])
def test_recorded_and_sharded_blocks_have_the_same_gradients(
    is_sharded: bool, is_whole: bool
) -> None:
    run_ranks(recorded, 4, is_sharded, is_whole)


def two_plans_alive(topology: str, checkpoint: bool) -> None:
    plain, model = make_model(CONFIG), make_model(CONFIG)
    if checkpoint:
        change_blocks(model, checkpoint_wrapper)
    parallel = SequenceParallel(None, topology, COST)
    batches = [random_batch(dist.get_world_size(), seed) for seed in (60, 61)]
    want = by_one_rank(lambda: [reference_step(plain, batch) for batch in batches])
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


@on_ranks(3)
def test_two_plans_alive() -> None:
    for topology, checkpoint in (("g3n1", False), ("g1n1+g2n1", True), ("g1r3n1", True)):
        two_plans_alive(topology, checkpoint)
