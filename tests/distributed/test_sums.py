"""Sums over ranks and copies are taken wide: none is rounded to 16 bits on its way."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bascule.attention import ops
from bascule.attention.api import AttentionMesh, attention
from bascule.attention.call_spec import CallSpec
from bascule.comm import mean as means
from bascule.comm.collectives import all_reduce
from bascule.comm.exchange import BoundRoute, spread
from bascule.comm.groups import member_of, resolve
from bascule.comm.guard.calls import Call
from bascule.errors import ConfigError
from bascule.parallel import SequenceParallel
from bascule.plan.routes import Route
from tests.helpers.calls_made import ALL_TO_ALL, calls_made
from tests.helpers.cases import COST
from tests.helpers.ranks import run_ranks

BIG, ONE = 256.0, 1.0  # in bfloat16, BIG + ONE is BIG


def gradients() -> None:
    rank, group = dist.get_rank(), member_of(resolve(None), "all")
    # Every row goes to both other ranks: a gradient of three copies, of BIG, ONE and ONE.
    num = group.size
    route = Route(np.tile(np.arange(2), num), np.full(num, 2), np.full(num, 2), recv_index=None)
    leaf = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    copies = spread(BoundRoute(route, group, torch.device("cpu"), 0, "rows"), [leaf])
    copies.backward(torch.full_like(copies, BIG if rank == 0 else ONE))
    assert leaf.grad is not None and bool((leaf.grad == BIG + 2 * ONE).all())

    step = SequenceParallel(None, "g1n1", COST).plan([3, 1])
    samples = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    gathered = step.gather_samples(samples)
    gathered.backward(torch.full_like(gathered, BIG if rank == 0 else ONE))
    assert samples.grad is not None and bool((samples.grad == BIG + 2 * ONE).all())

    names = ("ring", "ulysses")
    mesh = AttentionMesh.of(init_device_mesh("cpu", (3, 1), mesh_dim_names=names))
    x = torch.full((3, 2), BIG if rank == 0 else ONE, dtype=torch.bfloat16)
    own = ops.reduce_tokens(x, [3], CallSpec(mesh.name).text)
    assert own.dtype == torch.bfloat16 and bool((own == BIG + 2 * ONE).all())


def test_gradients_of_many_ranks_are_summed_wide() -> None:
    run_ranks(gradients, 3)


def gradients_around_a_ring() -> float:
    """Of the value of this rank's one token, of which all tokens see as much."""
    names = ("ring", "ulysses")
    mesh = AttentionMesh.of(init_device_mesh("cpu", (3, 1), mesh_dim_names=names))
    q = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    v = torch.zeros_like(q, requires_grad=True)
    out = attention(q, q, v, mesh)
    out.backward(torch.full_like(out, 3 * (BIG if dist.get_rank() == 0 else ONE)))
    assert v.grad is not None and bool((v.grad == v.grad[0, 0, 0, 0]).all())
    return float(v.grad[0, 0, 0, 0])


def test_gradients_of_values_are_summed_wide_around_a_ring() -> None:
    assert run_ranks(gradients_around_a_ring, 3) == [BIG + 2 * ONE] * 3


def large_sum() -> None:
    x = torch.arange(5000.0).view(50, 100)
    total = all_reduce(member_of(resolve(None), "all"), Call("all_reduce"), x)
    assert torch.equal(total, 3 * x)


def test_a_large_sum_is_right_where_ranks_do_not_divide_it() -> None:
    run_ranks(large_sum, 3)


Weights = tuple[str, Any]
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "each": ((7, 2), (7, 2)),
    "one a row": ((7, 2), (7, 1)),
    "one a column": ((7, 2), (2,)),
    "a number": ((7, 2), ()),
    "none": ((7, 2), None),
    "rows": ((7,), (7,)),
    "no rows": ((0, 2), (0, 1)),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def mean_of(values: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and gradient of all ranks' values in float64, as one process takes them."""
    wide = values.double().detach().requires_grad_()
    counted = torch.ones_like(wide) if weights is None else weights.double().expand_as(wide)
    total = counted.sum()
    loss = (wide * counted).sum() / total if total else (wide * 0).sum()
    loss.backward()
    assert wide.grad is not None
    return loss.detach(), wide.grad


def all_means() -> float:
    """Largest error, in units of the rounding of the dtype."""
    rank, num = dist.get_rank(), dist.get_world_size()
    step = SequenceParallel(None, "g1n1", COST).plan([1])
    worst = 0.0
    for seed, (shape, of_weights) in enumerate(SHAPES.values()):
        for dtype in DTYPES:
            for kind in (torch.float64, torch.float32, torch.float16, torch.bool, torch.int64):
                draw = torch.Generator().manual_seed(seed)
                parts = [torch.randn(shape, generator=draw).to(dtype) for _ in range(num)]
                weights: list[Tensor] | list[None] = [None] * num
                if of_weights is not None:
                    # float16 holds no more than 65504, and bfloat16 three digits.
                    scale = 3.0 if kind in (torch.bool, torch.int64) else 70.123
                    given = [torch.rand(of_weights, generator=draw) * scale for _ in range(num)]
                    weights = [one.to(kind) for one in given]
                mine = parts[rank].clone().requires_grad_()
                loss = step.mean(mine, weights=weights[rank])
                loss.backward()
                whole = None
                if of_weights is not None:
                    expanded = [w.expand(shape) for w in weights if w is not None]
                    whole = torch.cat(expanded)
                wanted, grads = mean_of(torch.cat(parts), whole)
                own = grads.split(shape[0])[rank] * num if shape[0] else grads
                assert mine.grad is not None and mine.grad.dtype == loss.dtype == dtype
                unit = torch.finfo(dtype).eps
                worst = max(
                    worst,
                    float((loss.double() - wanted).abs() / (wanted.abs() + 1e-3)) / unit,
                    float((mine.grad.double() - own).norm() / (own.norm() + 1e-9)) / unit,
                )
    return worst


def test_means_count_every_weight_once_in_any_dtype() -> None:
    assert max(run_ranks(all_means, 2)) < 2.0


def mean_of_far_values() -> float:
    """Of 2^25 and 1 on one rank and -2^25 and 1 on the other; float32 has no 2^25 + 1."""
    far = 2.0**25 * (-1.0) ** dist.get_rank()
    return float(SequenceParallel(None, "g1n1", COST).plan([2]).mean(torch.tensor([far, ONE])))


def test_the_values_of_a_mean_are_added_up_without_rounding() -> None:
    assert run_ranks(mean_of_far_values, 2) == [0.5, 0.5]


def heavy_mean(kind: torch.dtype) -> list[float]:
    values = torch.ones(2, dtype=torch.float16, requires_grad=True)
    weights = torch.tensor([70_000, 1], dtype=kind)
    SequenceParallel(None, "g1n1", COST).plan([2]).mean(values, weights=weights).backward()
    assert values.grad is not None
    return values.grad.tolist()


@pytest.mark.parametrize("kind", [torch.int64, torch.float64])
def test_weights_beyond_the_range_of_the_values_give_finite_gradients(kind: torch.dtype) -> None:
    wanted = pytest.approx([70_000 / 70_001, 1 / 70_001], rel=1e-3, abs=1e-7)
    assert run_ranks(heavy_mean, 1, kind) == [wanted]


@pytest.mark.parametrize(
    ("values", "weights", "said"),
    [
        (torch.ones(()), None, "scalar"),
        (torch.ones(3, dtype=torch.int64), None, "torch.int64"),
        (torch.ones(3, dtype=torch.bool), None, "torch.bool"),
        (torch.ones(3, dtype=torch.complex64), None, "torch.complex64"),
        (torch.ones(3), torch.ones(3, dtype=torch.complex64), "torch.complex64"),
        (torch.ones(3), torch.ones(4), "(4,)"),
        (torch.ones(3, 2), torch.ones(3), "(3,)"),
        (torch.ones(3), torch.ones(2, 3), "(2, 3)"),
        (torch.ones(3), torch.ones(3, requires_grad=True), "detach"),
        (torch.ones(3), torch.ones(3, device="meta"), "meta"),
    ],
)
def test_what_has_no_mean_is_refused(values: Tensor, weights: Tensor | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        means.check(values, weights)
    assert said in str(caught.value)


def bytes_told() -> None:
    """Rows that stay on their rank are not counted as sent."""
    lens = [[30, 9, 2], [4], [7]][dist.get_rank()]
    step = SequenceParallel(None, "g1n3", COST).plan(lens)
    with calls_made() as made:
        moved = step.route(x=torch.ones(sum(lens), 4), ids=torch.arange(sum(lens)))
        step.restore(moved["x"])
    assert step.traffic.total == made.sent_bytes[ALL_TO_ALL]
    num_bytes = torch.tensor([step.traffic.total])
    dist.all_reduce(num_bytes)
    assert int(num_bytes) == step.plan.moved_tokens * (16 + 8 + 16) > 0


def test_bytes_sent_are_those_that_leave_the_rank() -> None:
    run_ranks(bytes_told, 3)
