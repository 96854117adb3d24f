"""Bags with a ring: the same training as in one process, with as many collectives as they need."""

import os
import random
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bascule.parallel import ParallelOptions, SequenceParallel, Step
from bascule.plan.topology import Topology
from tests.helpers.bench import bench, summary
from tests.helpers.calls_made import ALL_GATHER, ALL_TO_ALL, RING, calls_made
from tests.helpers.cases import COST, LENGTHS, all_batches
from tests.helpers.oracle import packed_attention
from tests.helpers.ranks import raised_by, run_ranks, run_to_the_end
from tests.helpers.training import (
    Layouts,
    checkpointed,
    errors_in_bf16,
    sharded,
    train_everywhere,
    two_plans_alive,
)

# World size: (query heads, key-value heads): topologies. Some heads do not divide among the groups.
LAYOUTS: dict[int, Layouts] = {
    2: {(3, 3): ["g1r2n1"], (4, 1): ["g1r2n1"]},
    3: {(2, 2): ["g1r3n1", "g1r2n1+g1n1", "g2n1+g1n1"], (4, 1): ["g1r3n1"]},
    4: {(3, 3): ["g2r2n1", "g1r2n2", "g1n2+g1r2n1"], (4, 2): ["g2r2n1", "g1r4n1", "g2n1+g1r2n1"]},
    6: {(3, 3): ["g2r2n1+g1n2", "g3r2n1"], (6, 2): ["g2r3n1", "g1r2n1", "g2n1+g2r2n1"]},
    8: {(5, 5): ["g4r2n1", "g3r2n1+g1r2n1"], (8, 4): ["g4r2n1", "g2r4n1", "g2r3n1+g2n1"]},
}


@pytest.mark.some(2)
@pytest.mark.parametrize("world_size", [size for size in LAYOUTS if size < 6])
def test_loss_and_gradients_equal_one_process(world_size: int) -> None:
    layouts, batches = (
        LAYOUTS[world_size],
        all_batches(world_size, num_random=2 if world_size < 6 else 1),
    )
    compared = run_ranks(train_everywhere, world_size, layouts, batches)
    assert compared[0] == len(batches) * sum(map(len, layouts.values()))


@pytest.mark.stress
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_loss_and_gradients_equal_one_process_at_length(world_size: int) -> None:
    batches = all_batches(world_size, num_random=300)
    run_ranks(train_everywhere, world_size, LAYOUTS[world_size], batches, timeout_s=1500.0)


def test_bf16_is_as_near_to_float32_as_without_balancing() -> None:
    balanced, unbalanced = run_ranks(errors_in_bf16, 4, "g2r2n1", 12)[0]
    assert 0 < balanced <= 1.5**2 * unbalanced


def test_checkpointing_gives_the_same_gradients() -> None:
    run_ranks(checkpointed, 4, "g2r2n1", 1)


def test_two_plans_alive() -> None:
    run_ranks(two_plans_alive, 3, "g1r3n1", True)


def test_fsdp2_gives_the_same_gradients() -> None:
    run_ranks(sharded, 4, "g1r2n1+g2n1", True)


# Attention alone: causal, other scales, other kernels, lengths that no model trains on.

Lengths = list[list[int]]


def lengths_of(num_ranks: int) -> list[Lengths]:
    """Sequences shorter than a ring among long ones, none at all, one giant, and drawn ones."""
    draw = random.Random(num_ranks)
    nothing: Lengths = [[] for _ in range(num_ranks)]
    drawn = [
        [[draw.choice((*LENGTHS, 40)) for _ in range(draw.choice((0, 1, 3)))] for _ in nothing]
        for _ in range(2)
    ]
    return [nothing, [[1] for _ in nothing], [[0, 131, 1], *nothing[1:]], *drawn]


def attend_everywhere(spec: str, num_heads: int, num_kv_heads: int) -> int:
    """Output and gradients of random tensors against all tokens in one process."""
    rank, compared = dist.get_rank(), 0
    for kernel in ("plain", "cpu_flash"):
        parallel = SequenceParallel(None, spec, COST, options=ParallelOptions(kernel=kernel))
        for lens in lengths_of(dist.get_world_size()):
            step = parallel.plan(lens[rank])
            for causal, scale in ((False, None), (True, 0.7)):
                compare(step, lens, (num_heads, num_kv_heads), causal, scale)
                compared += 1
    return compared


def compare(
    step: Step, lens: Lengths, heads: tuple[int, int], causal: bool, scale: float | None
) -> None:
    flat = [length for part in lens for length in part]
    generator = torch.Generator().manual_seed(sum(flat))

    def normal(num_heads: int) -> Tensor:
        shape = sum(flat), num_heads, 6
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    tensors = normal(heads[0]), normal(heads[1]), normal(heads[1])
    grad = normal(heads[0]).detach()
    wanted, _ = packed_attention(*tensors, flat, causal=causal, scale=scale)
    wanted_grads = torch.autograd.grad(wanted, tensors, grad)
    first = sum(map(sum, lens[: dist.get_rank()]))
    own = slice(first, first + sum(lens[dist.get_rank()]))
    leaves = [x[own].detach().requires_grad_() for x in tensors]
    moved = step.route(q=leaves[0], k=leaves[1], v=leaves[2])
    out = step.restore(step.attend(*moved.values(), causal=causal, scale=scale))
    grads = torch.autograd.grad(out, leaves, grad[own])
    for found, want in zip((out, *grads), (wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(found, want[own], rtol=1e-10, atol=1e-12)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("spec", "num_heads", "num_kv_heads"),
    [
        ("g1r2n1", 2, 1),
        ("g1r3n1", 3, 3),
        ("g2r2n1", 6, 3),
        pytest.param("g1r4n1", 1, 1, marks=pytest.mark.stress),
        ("g2r2n1+g1n2", 3, 3),
        ("g2r3n1", 5, 5),
        pytest.param("g4r2n1", 8, 4, marks=pytest.mark.stress),
        pytest.param("g2r4n1", 6, 3, marks=pytest.mark.stress),
    ],
)
def test_attention_equals_one_process(spec: str, num_heads: int, num_kv_heads: int) -> None:
    world_size = Topology.parse(spec).num_ranks
    compared = run_ranks(attend_everywhere, world_size, spec, num_heads, num_kv_heads)
    assert compared == [2 * 2 * 5] * world_size


# Collectives, and bytes.


def count_collectives(spec: str) -> list[tuple[dict[str, int], ...]]:
    """Forward and backward of the first and the second attention; bytes counted and told."""
    parallel = SequenceParallel(None, spec, COST)
    counts: list[tuple[dict[str, int], ...]] = []
    more = [1] * (dist.get_rank() == 0)  # so that ring ranks have unlike numbers of tokens
    for lens in ([3, 1], [5, 3, 9, 0, 1, 7, 2, *more]):
        step = parallel.plan(lens)
        num_tokens = step.local.positions.size
        q, k, v = (torch.randn(num_tokens, heads, 2, requires_grad=True) for heads in (6, 3, 3))
        with calls_made() as forward:
            out = step.attend(q, k, v)
        with calls_made() as backward:
            out.sum().backward()
        counted = forward.sent_bytes[ALL_TO_ALL] + forward.sent_bytes[RING]
        told = {"counted": counted, "told": step.traffic.total}
        counts.append((dict(forward.counts), dict(backward.counts), told))
    return counts


@pytest.mark.parametrize(
    ("spec", "ulysses", "ring"), [("g1r2n1", 1, 2), ("g2r2n1", 2, 2), ("g1r3n1", 1, 3)]
)
def test_collectives_do_not_depend_on_the_batch(spec: str, ulysses: int, ring: int) -> None:
    around, back = {RING: ring - 1}, {RING: 2 * ring - 1}
    heads = {ALL_TO_ALL: 2} if ulysses > 1 else {}
    for first, second in run_ranks(count_collectives, ulysses * ring, spec):
        assert first[0] == {ALL_GATHER: 1} | heads | around  # agreed on when it is new
        assert second[0] == heads | around
        assert first[1] == second[1] == heads | back
        for *_, told in (first, second):
            assert told["told"] == told["counted"]
        assert second[2]["told"] > 0


def count_in_mixed_bags() -> list[tuple[dict[str, int], ...]]:
    return count_collectives("g2r2n1+g1n2")


def test_ranks_outside_the_ring_exchange_nothing() -> None:
    for rank, (_, second) in enumerate(run_ranks(count_in_mixed_bags, 6)):
        expected = {ALL_TO_ALL: 2, RING: 1} if rank < 4 else {}
        assert second[0] == expected


# What is refused, and what fails.


def attend_with_four_heads(spec: str) -> tuple[list[str], str] | None:
    step = SequenceParallel(None, spec, COST).plan([6, 5])
    num_tokens = step.local.positions.size
    q, kv = torch.zeros(num_tokens, 8, 2), torch.zeros(num_tokens, 4, 2)
    if spec == "g8n1":
        return raised_by(step.attend, q, kv, kv)
    assert step.attend(q, kv, kv).shape == q.shape
    return None


def test_a_bag_with_more_ranks_than_heads_needs_a_ring() -> None:
    refused = run_ranks(attend_with_four_heads, 8, "g8n1")
    assert all(error == refused[0] for error in refused)
    classes, text = refused[0]
    assert "ConfigError" in classes
    assert "8 ranks of a bag cannot share 4 key-value heads" in text
    assert text.endswith("use g4r2n1")
    run_ranks(attend_with_four_heads, 8, "g4r2n1")


def too_few_heads_or_no_blocks() -> list[tuple[list[str], str]]:
    spec = "g2r2n1+g1n2"
    errors: list[tuple[list[str], str]] = []
    for kernel, heads in ((None, 1), ("cudnn", 2)):
        step = SequenceParallel(None, spec, COST, options=ParallelOptions(kernel=kernel)).plan([6])
        x = torch.zeros(step.local.positions.size, heads, 2)
        errors.append(raised_by(step.attend, x, x, x))
    return errors


def test_what_one_bag_cannot_do_is_refused_on_all_ranks() -> None:
    of_rank = run_ranks(too_few_heads_or_no_blocks, 6)
    assert all(errors == of_rank[0] for errors in of_rank)
    (few_classes, few), (kernel_classes, kernel) = of_rank[0]
    assert "ConfigError" in few_classes and "use g1r4n1+g1n2" in few
    assert (
        "ConfigError" in kernel_classes
        and "kernel 'cudnn' runs on CUDA devices, not on cpu" in kernel
    )


def die_in_the_ring(timeout_s: float) -> tuple[list[str], str]:
    step = SequenceParallel(None, "g1r2n1", COST, timeout_s=timeout_s).plan([6, 2])
    x = torch.ones(step.local.positions.size, 2, 4)
    step.attend(x, x, x)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return raised_by(step.attend, x, x, x)


def test_a_killed_rank_ends_the_ring() -> None:
    survivor, victim = run_to_the_end(die_in_the_ring, 2, 8.0)
    assert victim.exit_code == -signal.SIGKILL
    assert survivor.error is None, survivor.error
    classes, text = survivor.value
    assert "CommError" in classes and "ring (keys and values" in text
    assert "missing: no report from ranks [1]" in text


def many_groups() -> None:
    """Topologies one after the other, on ranks that are in rings and on ranks that are not."""
    world = dist.get_world_size()
    for spec in ("g1r2n1+g1n2", "g2n2", "g2r2n1", "g1n2+g1r2n1", "g1r2n1+g1n2", "g1r4n1"):
        step = SequenceParallel(None, spec, COST).plan([5])
        x = torch.ones(step.local.positions.size, 2, 2)
        torch.testing.assert_close(step.attend(x, x, x), x)
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == world


def test_groups_can_be_made_again_and_again() -> None:
    run_ranks(many_groups, 4)


@pytest.mark.stress
def test_bench(tmp_path: Path) -> None:
    data = ("--data", "g2b2i256f1s0", "--steps", "2", "--topology", "g1r2n1")
    done = bench(tmp_path, *data, "--no-checkpoint")
    assert done.returncode == 0, done.stderr
    assert "bags g1r2n1" in done.stdout
    assert summary(tmp_path)["loss_difference"] < 1e-5
