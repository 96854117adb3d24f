"""Moving rows between ranks: bit for bit, for any dtype, with gradients where they are needed."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bascule.parallel import ParallelOptions, SequenceParallel, Step
from tests.helpers.cases import COST, LENGTHS
from tests.helpers.ranks import raised_by, run_ranks

FLOAT8 = [
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
]
DTYPES = [
    *(
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
    *FLOAT8,
]
SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (3, 5), (2, 0), (0,), (2, 1, 3)]
TOPOLOGIES = {1: ["g1n1"], 3: ["g1n3", "g3n1", "g2n1+g1n1"], 4: ["g4n1", "g1n2", "g1n1+g3n1"]}


def lengths_of(rank: int, seed: int, world_size: int) -> list[int]:
    """Lengths of every kind; seed 0 leaves all ranks without data, seed 1 all but the last."""
    if seed == 0 or (seed == 1 and rank < world_size - 1):
        return []
    generator = torch.Generator().manual_seed(100 * seed + rank)
    count = int(torch.randint(0, 5, (1,), generator=generator)) + (seed == 1)
    picks = torch.randint(0, len(LENGTHS), (count,), generator=generator)
    return [LENGTHS[int(place)] for place in picks]


def random_bits(num_rows: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bit pattern, NaNs with payloads included; booleans stay 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(num_rows, *shape, generator=generator) < 0.5
    num_bytes = num_rows * math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype).view(num_rows, *shape)


def bits_of(x: Tensor) -> bytes:
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    return x.reshape(-1).view(torch.uint8).numpy().tobytes()


def everywhere(x: Any) -> list[Any]:
    """The objects of all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, x)
    return gathered


def expected_rows(step: Step, rows_of: list[list[Any]], rank: int) -> list[Any]:
    """What a rank computes on, from the whole batch and the positions that the plan tells."""
    local = step.plan.local(rank)
    rows = [row for part in rows_of for row in part]
    first = [0, *step.plan.seq_lens.cumsum().tolist()]
    return [
        rows[first[seq_id] + position]
        for seq_id, position in zip(
            local.seq_ids[local.slots].tolist(), local.positions.tolist(), strict=True
        )
    ]


def move_everything(topologies: list[str]) -> int:
    rank, world_size, moved = dist.get_rank(), dist.get_world_size(), 0
    for topology in topologies:
        parallel = SequenceParallel(None, topology, COST)
        for seed in range(4):
            lens = lengths_of(rank, seed, world_size)
            step = parallel.plan(lens)
            tensors = {
                f"{str(dtype).removeprefix('torch.')}_{place}": random_bits(
                    sum(lens), shape, dtype, 1000 * rank + 10 * seed + place
                )
                for dtype in DTYPES
                for place, shape in enumerate(SHAPES)
            }
            tensors["id"] = 2**40 + 1000 * rank + torch.arange(sum(lens))
            arrived = step.route(**tensors)
            ids = everywhere(tensors["id"].tolist())
            assert arrived["id"].tolist() == expected_rows(step, ids, rank)
            moved += step.plan.moved_tokens
            for name, x in tensors.items():
                assert arrived[name].dtype == x.dtype and arrived[name].shape[1:] == x.shape[1:]
                back = step.restore(arrived[name])
                assert back.shape == x.shape and bits_of(back) == bits_of(x), name
            for name in ("bfloat16_3", "uint8_2", "bool_0"):
                rows = everywhere([bits_of(row) for row in tensors[name]])
                got = [bits_of(row) for row in arrived[name]]
                assert got == expected_rows(step, rows, rank), name
    return moved


@pytest.mark.some(1)
@pytest.mark.parametrize("world_size", TOPOLOGIES)
def test_route_then_restore_is_bit_exact(world_size: int) -> None:
    moved = run_ranks(move_everything, world_size, TOPOLOGIES[world_size])
    assert (moved[0] > 0) == (world_size > 1)


def route_alone() -> None:
    """One tensor takes a shorter path than several."""
    rank = dist.get_rank()
    step = SequenceParallel(None, "g1n1+g2n1", COST).plan([5, 3] if rank < 2 else [])
    num_rows = 8 if rank < 2 else 0
    for dtype in DTYPES:
        for place, shape in enumerate(SHAPES):
            x = random_bits(num_rows, shape, dtype, 10 * rank + place)
            assert bits_of(step.restore(step.route(x=x)["x"])) == bits_of(x), (dtype, shape)
    pair = torch.randn(num_rows, 3, 2, dtype=torch.complex64)
    awkward = {
        "transposed": torch.randn(4, num_rows).T,
        "expanded": torch.arange(num_rows)[:, None].expand(-1, 3),
        "strided": torch.randn(num_rows, 6)[:, ::2],
        "conjugate": pair.conj(),
        "negative": pair.conj().imag,
    }
    for name, x in awkward.items():
        assert bits_of(step.restore(step.route(x=x)["x"])) == bits_of(x), name
    assert "at least one tensor" in raised_by(step.route)[1]


def test_a_tensor_alone_and_awkward_views() -> None:
    run_ranks(route_alone, 3)


def route_gradients() -> None:
    """The gradient of a row is what its copy elsewhere got; nothing comes to what needs none."""
    rank = dist.get_rank()
    step = SequenceParallel(None, "g1n1+g2n1", COST).plan([[4, 0, 3], [], [1]][rank])
    num_rows = step.plan.seq_lens[step.plan.source_ranks == rank].sum()
    x = torch.randn(num_rows, 3, dtype=torch.bfloat16, requires_grad=True)
    y = torch.randn(num_rows, 2, 2, dtype=torch.float64, requires_grad=True)
    pos = torch.randn(num_rows, 2)
    moved = step.route(pos=pos, x=x, ids=torch.arange(num_rows), y=y)
    assert moved["x"].requires_grad and moved["y"].requires_grad
    assert not moved["pos"].requires_grad and not moved["ids"].requires_grad
    ((moved["x"].float().square().sum() * 0.5) + moved["y"].pow(3).sum()).backward()
    assert x.grad is not None and y.grad is not None and pos.grad is None
    assert x.grad.dtype == torch.bfloat16
    assert torch.equal(x.grad, x.detach())
    torch.testing.assert_close(y.grad, 3 * y.detach().square(), rtol=1e-15, atol=0)
    unused = step.route(x=x, y=y)
    (unused["x"].float().sum()).backward()
    assert torch.equal(x.grad, x.detach() + 1)
    with torch.no_grad():
        assert not step.route(x=x, y=y)["x"].requires_grad
    back = step.restore(step.route(x=x, y=y)["y"])
    assert back.requires_grad and torch.equal(back, y)


def test_gradients_come_back_to_what_needs_them() -> None:
    run_ranks(route_gradients, 3)


def gather_vectors() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel = SequenceParallel(None, "g1n2+g2n1", COST)
    for lens in ([[3, 1], [], [0], [5]], [[]] * size, [[], [], [0, 0], []]):
        step = parallel.plan(lens[rank])
        counts = list(map(len, lens))
        ids = sum(counts[:rank]) + torch.arange(counts[rank])
        everyone = torch.arange(sum(counts))
        assert torch.equal(step.gather_samples(ids + 2**40), everyone + 2**40)
        assert torch.equal(step.gather_samples(ids % 2 == 0), everyone % 2 == 0)
        vec = torch.stack([ids, ids + 0.5], dim=1).double().requires_grad_()
        gathered = step.gather_samples(vec)
        assert torch.equal(gathered[:, 0], everyone.double())
        (gathered * (rank + 1)).sum().backward()
        assert vec.grad is not None and bool((vec.grad == size * (size + 1) / 2).all())
        rough = vec.detach().to(torch.bfloat16).requires_grad_()
        total = step.gather_samples(rough).float().sum() * (1 + 2**-7)
        total.backward()
        assert rough.grad is not None and rough.grad.dtype == torch.bfloat16
        assert bool((rough.grad == size * (1 + 2**-7)).all())


def test_vectors_of_all_samples_reach_every_rank() -> None:
    run_ranks(gather_vectors, 4)


def global_means() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    step = SequenceParallel(None, "g1n1", COST).plan([])
    values = torch.arange(3.0 * rank, dtype=torch.float64, requires_grad=True)
    everything = torch.cat([torch.arange(3.0 * r, dtype=torch.float64) for r in range(size)])
    mean = step.mean(values)
    assert mean.item() == everything.mean().item()
    mean.backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.full_like(values, size / everything.numel()))
    values.grad = None
    of_sums = SequenceParallel(None, "g1n1", COST, options=ParallelOptions(gradients="sum"))
    of_sums.plan([]).mean(values).backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.full_like(values, 1 / everything.numel()))
    weights = torch.full((3 * rank,), rank, dtype=torch.float64)
    weighted = step.mean(values, weights=weights)
    of_all = torch.cat([torch.full((3 * r,), r, dtype=torch.float64) for r in range(size)])
    torch.testing.assert_close(weighted, (everything * of_all).sum() / of_all.sum())
    nothing = torch.zeros(0, 4, requires_grad=True)
    empty = step.mean(nothing)
    empty.backward()
    assert empty.item() == 0.0 and nothing.grad is not None
    assert step.mean(values, weights=torch.zeros_like(values)).item() == 0.0


def test_mean_over_all_ranks() -> None:
    run_ranks(global_means, 3)
