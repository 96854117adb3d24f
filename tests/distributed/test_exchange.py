"""Rows move between ranks bit for bit, and sums and means over ranks are taken wide."""

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bascule.attention.api import AttentionMesh, attention, gather
from bascule.attention.layout import SequenceLayout
from bascule.comm.groups import member_of, resolve
from bascule.comm.route import BoundRoute, move
from bascule.parallel import SequenceParallel, Step
from bascule.plan.routes import Route
from tests.helpers.cases import COST, LENGTHS
from tests.helpers.ranks import run_ranks

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
TOPOLOGIES = {
    1: ["g1n1"],
    4: ["g4n1", "g1n2", "g1n1+g3n1", "g2r2n1"],
    3: ["g1n3", "g2n1+g1n1", "g1r3n1"],
}
BIG, ONE = 256.0, 1.0  # in bfloat16, BIG + ONE is BIG


def ring_of_three() -> AttentionMesh:
    return AttentionMesh.of(init_device_mesh("cpu", (3, 1), mesh_dim_names=("ring", "ulysses")))


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


def rows_of_all_kinds(num_rows: int, seed: int) -> dict[str, Tensor]:
    """All bits in all dtypes and shapes, and views that are not contiguous."""
    pair = torch.randn(num_rows, 3, 2, dtype=torch.complex64)
    return {
        **{
            f"{str(dtype).removeprefix('torch.')}_{place}": random_bits(
                num_rows, shape, dtype, seed + place
            )
            for dtype in DTYPES
            for place, shape in enumerate(SHAPES)
        },
        "transposed": torch.randn(4, num_rows).T,
        "expanded": torch.arange(num_rows)[:, None].expand(-1, 3),
        "strided": torch.randn(num_rows, 6)[:, ::2],
        "conjugate": pair.conj(),
        "negative": pair.conj().imag,
    }


def move_everything(topologies: list[str]) -> int:
    rank, world_size, moved = dist.get_rank(), dist.get_world_size(), 0
    for topology in topologies:
        parallel = SequenceParallel(None, topology, COST)
        for seed in range(3):
            lens = lengths_of(rank, seed, world_size)
            step = parallel.plan(lens)
            tensors = rows_of_all_kinds(sum(lens), 1000 * rank + 10 * seed)
            tensors["id"] = 2**40 + 1000 * rank + torch.arange(sum(lens))
            arrived = step.route(**tensors)
            ids = everywhere(tensors["id"].tolist())
            assert arrived["id"].tolist() == expected_rows(step, ids, rank)
            moved += step.plan.moved_tokens
            # Where next to nothing is there, one of eight: of each dtype and each shape.
            for name, x in list(tensors.items())[:: 1 if seed == 2 else 8]:
                assert arrived[name].dtype == x.dtype and arrived[name].shape[1:] == x.shape[1:]
                back = step.restore(arrived[name])
                assert back.shape == x.shape and bits_of(back) == bits_of(x), name
                if seed == 2 and topology == topologies[-1]:  # a tensor alone is not packed
                    assert bits_of(step.route(x=x)["x"]) == bits_of(arrived[name]), name
            for name in ("bfloat16_3", "uint8_2", "bool_0"):
                rows = everywhere([bits_of(row) for row in tensors[name]])
                got = [bits_of(row) for row in arrived[name]]
                assert got == expected_rows(step, rows, rank), name
            assert step.count_routed(tensors["bool_0"]) == int(arrived["bool_0"].sum())
            if topology in ("g2r2n1", "g1r3n1") and seed == 2:
                count = torch.compile(
                    lambda x, step=step: x.new_ones(step.count_routed(x)).sum(), backend="aot_eager"
                )
                assert int(count(tensors["bool_0"])) == int(arrived["bool_0"].sum())
    return moved


@pytest.mark.some(2)
@pytest.mark.parametrize("world_size", TOPOLOGIES)
def test_rows_move_and_come_back_bit_for_bit(world_size: int) -> None:
    moved = run_ranks(move_everything, world_size, TOPOLOGIES[world_size])
    assert (moved[0] > 0) == (world_size > 1)


def gradients_of_rows() -> None:
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


def graphs_without_steps() -> None:
    """A graph keeps the routes that its backward takes, and not their step."""
    parallel = SequenceParallel(None, "g3n1", COST)
    step, x = parallel.plan([3]), torch.ones(3, requires_grad=True)
    loss = step.route(x=x)["x"].sum() + step.gather_samples(x[:1]).sum()
    gone = weakref.ref(step)
    del step
    for _ in range(2):  # those of the last two plans are kept
        parallel.plan([1])
    assert gone() is None
    loss.backward()
    assert x.grad is not None and x.grad.tolist() == [4.0, 1.0, 1.0]


def gather_vectors() -> None:
    """Every rank gets the vectors of all samples."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel = SequenceParallel(None, "g1n1+g2n1", COST)
    for lens in ([[3, 1], [], [0, 5]], [[]] * size, [[], [0, 0], []]):
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


def wide_gradients() -> None:
    """Gradients of copies, gathered samples, and tokens are summed without rounding."""
    rank, group = dist.get_rank(), member_of(resolve(None), "all")
    # Every row goes to both other ranks: a gradient of three copies, of BIG, ONE and ONE.
    num = group.size
    route = Route(np.tile(np.arange(2), num), np.full(num, 2), np.full(num, 2), recv_index=None)
    leaf = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    where = group, torch.device("cpu"), (2, 2 * num), 0, ("rows", "back")
    bound = BoundRoute(route, *where, has_copies=True)
    (copies,) = move(bound, [leaf])
    copies.backward(torch.full_like(copies, BIG if rank == 0 else ONE))
    assert leaf.grad is not None and bool((leaf.grad == BIG + 2 * ONE).all())

    step = SequenceParallel(None, "g1n1", COST).plan([3, 1])
    samples = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    gathered = step.gather_samples(samples)
    gathered.backward(torch.full_like(gathered, BIG if rank == 0 else ONE))
    assert samples.grad is not None and bool((samples.grad == BIG + 2 * ONE).all())

    mesh, x = ring_of_three(), torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    whole = gather(x, mesh, SequenceLayout((3,), 3, 1), 0)
    whole.backward(torch.full_like(whole, BIG if rank == 0 else ONE))
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert bool((x.grad == BIG + 2 * ONE).all())

    # Of the value of this rank's one token, of which all tokens see as much.
    q = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    v = torch.zeros_like(q, requires_grad=True)
    out = attention(q, q, v, mesh)
    out.backward(torch.full_like(out, 3 * (BIG if rank == 0 else ONE)))
    assert v.grad is not None and bool((v.grad == BIG + 2 * ONE).all())


VALUES: dict[str, tuple[list[int], tuple[int, ...], tuple[int, ...] | None]] = {
    "each": ([7, 0, 3], (2,), (2,)),
    "one a row": ([7, 0, 3], (2,), (1,)),
    "one a column": ([4, 4, 4], (2,), (2,)),
    "none": ([7, 0, 3], (2,), None),
    "rows": ([0, 5, 1], (), ()),
    "no rows": ([0, 0, 0], (2,), (1,)),
    "zeros": ([7, 0, 3], (2,), (2,)),
}
"""Rows of each rank, the shape of a row, and that of its weights."""
MEANS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KINDS = [torch.float64, torch.float32, torch.float16, torch.bool, torch.int64]


def weights_of(name: str, draw: torch.Generator, kind: torch.dtype) -> list[Tensor]:
    """Of each rank; float16 holds no more than 65504, and bfloat16 three digits."""
    rows, _, of_row = VALUES[name]
    assert of_row is not None
    scale = 0.0 if name == "zeros" else 3.0 if kind in (torch.bool, torch.int64) else 70.123
    shapes = [of_row if name == "one a column" else (num, *of_row) for num in rows]
    return [(torch.rand(shape, generator=draw) * scale).to(kind) for shape in shapes]


def mean_of(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and gradient of all ranks' values in float64, as one process takes them."""
    wide, total = values.double().requires_grad_(), weights.sum()
    loss = (wide * weights).sum() / total if total else (wide * 0).sum()
    (grad,) = torch.autograd.grad(loss, wide)
    return loss.detach(), grad


def all_means(gradients: Any) -> float:
    """Largest error, in units of the rounding of the dtype."""
    rank, num, worst = dist.get_rank(), dist.get_world_size(), 0.0
    step = SequenceParallel(None, "g1n1", COST, gradients=gradients).plan([1])
    for (seed, name), dtype, kind in itertools.product(enumerate(VALUES), MEANS, KINDS):
        rows, of_row, of_weights = VALUES[name]
        draw = torch.Generator().manual_seed(seed)
        parts = [torch.randn(count, *of_row, generator=draw).to(dtype) for count in rows]
        weights = [None] * num if of_weights is None else weights_of(name, draw, kind)
        mine = parts[rank].clone().requires_grad_()
        loss = step.mean(mine, weights=weights[rank])
        loss.backward()
        wide = [
            (torch.ones(()) if weight is None else weight).double().expand(part.shape)
            for weight, part in zip(weights, parts, strict=True)
        ]
        wanted, grads = mean_of(torch.cat(parts), torch.cat(wide))
        own = grads.split(rows)[rank] * (1 if gradients == "sum" else num)
        assert mine.grad is not None and mine.grad.dtype == loss.dtype == dtype
        unit = torch.finfo(dtype).eps
        worst = max(
            worst,
            float((loss.double() - wanted).abs() / (wanted.abs() + 1e-3)) / unit,
            float((mine.grad.double() - own).norm() / (own.norm() + 1e-9)) / unit,
        )
    return worst


def means() -> None:
    """Means count every weight once, in any dtype, and also those of far values.

    These are 2^25 and 1 here and -2^25 and 1 there, and weights up to 70,000: float32 has no
    2^25 + 1, and float16, which the values have, no 70,000.
    """
    assert max(all_means("mean"), all_means("sum")) < 2.0
    step, rank = SequenceParallel(None, "g1n1", COST).plan([2]), dist.get_rank()
    far = 2.0**25 * (0, 1, -1)[rank]
    assert float(step.mean(torch.tensor([far, ONE] if rank else []))) == 0.5
    for kind in (torch.int64, torch.float64):
        values = torch.ones(2, dtype=torch.float16, requires_grad=True)
        step.mean(values, weights=torch.tensor([70_000, 1], dtype=kind)).backward()
        assert values.grad is not None
        heavy = pytest.approx([70_000 / 70_001, 1 / 70_001], rel=1e-3, abs=1e-7)
        assert values.grad.tolist() == heavy


@pytest.mark.parametrize(
    "check", [gradients_of_rows, graphs_without_steps, gather_vectors, means, wide_gradients]
)
def test_on_three_ranks(check: Callable[[], None]) -> None:
    run_ranks(check, 3)
