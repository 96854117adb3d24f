"""Balanced training on any number of ranks gives what one process gives on the whole batch."""

import pytest
import torch
import torch.distributed as dist

from bascule.attention import PackedSequences, attend_packed
from bascule.models import LocalExchange, MMDiT
from bascule.parallel import SequenceParallel
from tests.distributed.cases import (
    COST,
    Batch,
    Gradients,
    all_batches,
    assert_same,
    averaged,
    config_of,
    make_model,
    named_gradients,
    own_samples,
    random_batch,
    rank_step,
    reference_step,
)
from tests.distributed.harness import run_ranks

# World size: (query heads, key-value heads): topologies. Some heads do not divide among the bag.
Layouts = dict[tuple[int, int], list[str]]
LAYOUTS: dict[int, Layouts] = {
    1: {(3, 3): ["g1n1"], (4, 2): ["g1n1"]},
    2: {(3, 3): ["g1n2", "g2n1"], (6, 3): ["g1n1", "g2n1"]},
    3: {(4, 4): ["g1n3", "g3n1", "g1n1+g2n1"], (10, 5): ["g3n1", "g2n1+g1n1"]},
    4: {(5, 5): ["g1n4", "g4n1", "g1n2+g2n1"], (14, 7): ["g4n1", "g1n1+g3n1", "g2n1"]},
    8: {(9, 9): ["g1n8", "g8n1", "g1n2+g2n1+g4n1"], (20, 10): ["g8n1", "g3n1+g5n1", "g4n1"]},
}


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


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_loss_and_gradients_equal_one_process(world_size: int) -> None:
    layouts, batches = (
        LAYOUTS[world_size],
        all_batches(world_size, num_random=6 if world_size < 8 else 2),
    )
    compared = run_ranks(train_everywhere, world_size, layouts, batches)
    assert compared[0] == len(batches) * sum(map(len, layouts.values()))


@pytest.mark.stress
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_loss_and_gradients_equal_one_process_at_length(world_size: int) -> None:
    batches = all_batches(world_size, num_random=300)
    run_ranks(train_everywhere, world_size, LAYOUTS[world_size], batches, timeout_s=1500.0)


def without_balancing(model: MMDiT, batch: Batch, dtype: torch.dtype) -> Gradients:
    """Every rank trains on its own samples, with the same attention kernel."""
    samples = own_samples(batch, model.config, dist.get_rank(), dtype)
    seqs = PackedSequences.build(samples.seq_lens, torch.device("cpu"))
    exchange = LocalExchange(samples.seq_lens, attend=lambda q, k, v: attend_packed(q, k, v, seqs))
    losses = samples.losses(model(samples.inputs, exchange))
    num_tokens = torch.tensor(float(losses.numel()))
    dist.all_reduce(num_tokens)
    model.zero_grad()
    (losses.sum() * (dist.get_world_size() / num_tokens)).backward()
    return averaged(named_gradients(model))


def errors_in_bf16(topology: str, num_batches: int) -> tuple[float, float]:
    """Squared relative errors against float32, summed over batches: balanced, and unbalanced."""
    config = config_of(5, 5, head_dim=8)
    exact, rough = make_model(config, torch.float32), make_model(config, torch.bfloat16)
    exact.load_state_dict(rough.state_dict())
    parallel = SequenceParallel(None, topology, COST)
    sums = [0.0, 0.0]
    for seed in range(num_batches):
        batch = random_batch(dist.get_world_size(), 100 + seed)
        batch[-1].append((4, 9))
        want = reference_step(exact, batch, torch.float32)[1]
        balanced = rank_step(rough, batch, parallel, torch.bfloat16)[1]
        unbalanced = without_balancing(rough, batch, torch.bfloat16)
        for place, grads in enumerate((balanced, unbalanced)):
            error = sum(float((grads[name] - ref).square().sum()) for name, ref in want.items())
            sums[place] += error / sum(float(ref.square().sum()) for ref in want.values())
    return sums[0], sums[1]


@pytest.mark.parametrize(("world_size", "topology"), [(2, "g1n2"), (2, "g2n1"), (4, "g1n1+g3n1")])
def test_bf16_is_as_near_to_float32_as_without_balancing(world_size: int, topology: str) -> None:
    balanced, unbalanced = run_ranks(errors_in_bf16, world_size, topology, 12)[0]
    assert 0 < balanced <= 1.5**2 * unbalanced
