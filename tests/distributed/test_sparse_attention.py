"""Block-sparse attention over meshes against dense masked attention in one process, float64."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bascule.arrays import Ints
from bascule.attention.sparse import Clusters
from bascule.attention.sparse.attend import attend_sparse, gather_counts, rows_of, sparse_attention
from bascule.attention.sparse.rules import BlockRule, keep_top_k
from bascule.comm.mesh import AttentionMesh
from bascule.comm.quantized import Quantized
from bascule.plan.sparse import BlockLayout, SparsePlan, SparsePlanner, block_counts, block_lens
from tests.helpers.mesh_cases import Three, difference, make_mesh, reference, three
from tests.helpers.ranks import on_ranks, raised_by
from tests.helpers.rows import FORMATS, there_and_back
from tests.helpers.sparse_reference import means
from tests.helpers.sparse_simulation import dense_masks

Bools = np.ndarray[Any, np.dtype[np.bool_]]
MESHES = {
    1: [(1, 1)],
    3: [(1, 3), (3, 1)],
    4: [(2, 2), (4, 1), (1, 4)],
    8: [(2, 4), (4, 2), (8, 1), (1, 8)],
}

CASES: dict[str, dict[str, Any]] = {
    "random": {},
    "clustered, several samples": {"kind": "clustered", "batch": 2},
    "empty rows, keys of groups of heads": {"kind": "empty", "heads": 6, "kv_heads": 3},
    "one head does nearly all": {"kind": "heavy", "heads": 5},
    "a single head": {"heads": 1},
    "stripe": {"method": "stripe", "kind": "clustered"},
    "paper": {"method": "paper", "kind": "clustered", "heads": 8},
    "contiguous": {"home": "contiguous", "kind": "clustered"},
    "text that all see": {"kind": "text", "segments": (5, 30)},
    "fewer blocks than ranks": {"segments": (7,)},
    "nothing is seen": {"kind": "nothing"},
    "orders": {"order": "random"},
    "orders of a grid after text, several samples": {
        "order": "grid",
        "segments": (5, 30),
        "kind": "text",
        "batch": 2,
        "heads": 6,
    },
    "orders, keys of groups of heads": {"order": "random", "heads": 6, "kv_heads": 3, "batch": 2},
    "orders, a head that is cut": {"order": "random", "heads": 3, "kind": "heavy"},
    "keys that none sees": {"keys": 0.6, "batch": 2, "heads": 6, "kv_heads": 3},
    "a sample whose keys none sees, orders": {"keys": 0.0, "batch": 2, "order": "random"},
    "orders, paper": {"order": "grid", "method": "paper", "heads": 8, "segments": (30,)},
}


def make_masks(kind: str, heads: int, lens: Any) -> Bools:
    generator, size = np.random.default_rng(3), len(lens)
    masks = generator.random((heads, size, size)) < 0.3
    place = np.arange(size)
    near = np.abs(place[:, None] - place) < 2
    if kind == "clustered":
        masks[:, : size // 2] = near[: size // 2]
        masks[0] = True
    elif kind == "empty":
        masks[:, ::2] = False
        masks[1] = False
    elif kind == "heavy":
        masks[:] = near
        masks[2] = True
    elif kind == "text":
        masks[:, :2], masks[:, :, :2] = True, True
    elif kind == "nothing":
        masks[:] = False
    return masks


def make_orders(kind: str, heads: int, segments: tuple[int, ...], seed: int) -> Ints:
    """(heads, tokens): any, or the axes of a grid of 2 x 3 x 5 permuted, text staying in place."""
    tokens, generator = np.arange(sum(segments)), np.random.default_rng(seed)
    if kind == "random":
        return generator.permuted(np.tile(tokens, (heads, 1)), axis=1)
    text, grid = tokens[:-30], tokens[-30:].reshape(2, 3, 5)
    axes = list(itertools.permutations(range(3)))
    return np.stack(
        [
            np.concatenate([text, grid.transpose(axes[(head + seed) % 6]).ravel()])
            for head in range(heads)
        ]
    )


def make_plan(ring: int, ulysses: int, case: dict[str, Any]) -> tuple[SparsePlan, Bools]:
    segments = case.get("segments", (33,))
    lens = block_lens(segments, 4)
    heads = case.get("heads", 4)
    kv_heads = case.get("kv_heads", heads)
    masks = make_masks(case.get("kind", "random"), heads, lens)
    make = BlockLayout.contiguous if "home" in case else BlockLayout.striped
    planner = SparsePlanner(ulysses, ring, method=case.get("method", "minimal_move"))
    q = kv = make(lens, ulysses, ring)
    if "order" in case:  # queries and keys have different ones
        q = replace(q, order=make_orders(case["order"], heads, segments, 1))
        kv = replace(kv, order=make_orders(case["order"], kv_heads, segments, 2))
    return planner.plan(masks, q, kv, num_kv_heads=kv_heads), masks


def make_keys(case: dict[str, Any], batch: int, size: int) -> Bools | None:
    """(B, S) with a share of keys that are seen, of the first sample; a run of others is not."""
    if "keys" not in case:
        return None
    keys = np.random.default_rng(4).random((batch, size)) < case["keys"]
    keys[1:, size // 2 :] = True
    keys[1:, size - 9 :] = False
    return keys


def own_tokens(plan: SparsePlan, rank: int) -> Tensor:
    """Place in the sequence of each token that a rank has."""
    return torch.from_numpy(np.flatnonzero(np.repeat(plan.q.home, plan.q.lens) == rank))


def straight_through(
    whole: Three, grad: Tensor, seen: Tensor, plan: SparsePlan, wire: Quantized
) -> list[Tensor]:
    """Output and gradients of rows that arrive rounded; those that stay on a rank are exact."""
    far = three(there_and_back(wire, x.detach()) for x in whole)
    total = [torch.zeros_like(x) for x in (whole[0], *whole)]
    for rank in range(plan.num_ranks if plan.is_local else 1):
        mine = torch.zeros(grad.shape[2], 1, dtype=torch.bool)
        mine[own_tokens(plan, rank)] = plan.is_local
        here = [torch.where(mine, x, y) for x, y in zip(whole, far, strict=True)]
        leaves = three(x.detach().requires_grad_() for x in here)
        out = reference(*leaves, seen, False) * (mine | (not plan.is_local))
        parts = out.detach(), *torch.autograd.grad(out, leaves, grad)
        total = [a + b for a, b in zip(total, parts, strict=True)]
    if not plan.is_local:
        total[0] = there_and_back(wire, total[0])
    return total


def compare(
    mesh: AttentionMesh, case: dict[str, Any], wire: Quantized | None = None
) -> dict[str, float]:
    (ring, ulysses), rank = mesh.degrees, dist.get_rank()
    plan, masks = make_plan(ring, ulysses, case)
    batch, (heads, kv_heads) = case.get("batch", 1), (len(masks), plan.num_kv_heads)
    generator = torch.Generator().manual_seed(0)
    size = int(plan.q.lens.sum())

    def normal(num_heads: int) -> Tensor:
        shape = batch, num_heads, size, 8
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v, grad = normal(heads), normal(kv_heads), normal(kv_heads), normal(heads).detach()
    keys = make_keys(case, batch, size)
    seen = torch.from_numpy(dense_masks(plan, masks))
    seen = seen if keys is None else seen & torch.from_numpy(keys)[:, None, None]
    if wire is None:
        expected = reference(q, k, v, seen, False)
        wanted = torch.autograd.grad(expected, (q, k, v), grad)
    else:
        expected, *wanted = straight_through((q, k, v), grad, seen, plan, wire)
    own = own_tokens(plan, rank)
    own_q, own_k, own_v = (x.detach()[:, :, own].requires_grad_() for x in (q, k, v))
    options: Any = {"keys": keys, "comm_dtype": wire}
    out = sparse_attention(own_q, own_k, own_v, mesh, plan, rows_of(masks), **options)
    grads = torch.autograd.grad(out, (own_q, own_k, own_v), grad[:, :, own])
    pairs = zip(("out", "dq", "dk", "dv"), (out, *grads), (expected, *wanted), strict=True)
    found = {
        name: float((a - b[:, :, own]).norm().detach() / (b.norm().detach() + 1e-300))
        for name, a, b in pairs
    }
    counts = block_counts(
        masks, kv_lens=plan.kv.lens, kv_of=plan.kv.home // ulysses, ring_degree=ring
    )
    gathered = gather_counts(mesh, plan, masks[None, *np.nonzero(plan.rank_of == rank)])
    return found | {"counts": float((gathered != counts).sum())}


def other_samples(mesh: AttentionMesh) -> float:
    """Masks that differ between the samples of a batch; and a second derivative is refused."""
    plan, masks = make_plan(*mesh.degrees, {})
    both = np.stack([masks, ~masks])
    x = torch.randn(2, 4, 33, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = own_tokens(plan, dist.get_rank())
    mine = x[:, :, own].requires_grad_()
    out = sparse_attention(
        mine, mine, mine, mesh, plan, lambda rows: both[:, rows.heads, rows.blocks]
    )
    twice = raised_by(torch.autograd.grad, out.square().sum(), mine, create_graph=True)
    assert "no second derivative" in twice[1]
    expected = reference(x, x, x, torch.from_numpy(dense_masks(plan, both)), False)
    return difference(out, expected[:, :, own])


def by_rule(mesh: AttentionMesh, more: dict[str, Any]) -> float:
    """Masks from pooled queries and keys, with blocks of unequal lengths and fewer key heads."""
    rank = dist.get_rank()
    case = {"heads": 6, "kv_heads": 3, "segments": (5, 30), "kind": "heavy", **more}
    plan, _ = make_plan(*mesh.degrees, case)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, h, 35, 8, generator=generator).double() for h in (6, 3, 3))
    own = own_tokens(plan, rank)
    rule = BlockRule(lambda q, k, at: keep_top_k(q @ k.mT * at.scale, 3))
    mine = [x[:, :, own] for x in (q, k, v)]
    keys = make_keys(case, 2, 35)
    out, masks = attend_sparse(mine[0], mine[1], mine[2], mesh, plan, rule, keys=keys)
    share = torch.ones(2, 1, 35, 1).double()
    if keys is not None:  # the mean of those that are seen, 0 of none
        share = torch.from_numpy(keys)[:, None, :, None].double()
    mean_q, mean_k = (
        means(in_order(x * share, layout), lens)
        / means(in_order(share.expand_as(x), layout), lens).clamp(min=1e-9)
        for x, layout in ((q, plan.q), (k, plan.kv))
        for lens in [layout.lens.tolist()]
    )
    scores = mean_q @ mean_k.repeat_interleave(2, dim=1).mT * 8**-0.5
    seen = keep_top_k(scores, 3).numpy()
    heads, blocks = np.nonzero(plan.rank_of == rank)
    assert np.array_equal(masks, seen[:, heads, blocks])
    dense = torch.from_numpy(dense_masks(plan, seen))
    dense = dense if keys is None else dense & torch.from_numpy(keys)[:, None, None]
    return difference(out, reference(q, k, v, dense, False)[:, :, own])


def by_clusters(mesh: AttentionMesh, case: dict[str, Any]) -> float:
    """Outputs, gradients and counts of clusters, which one process has, too."""
    rank, (ring, ulysses) = dist.get_rank(), mesh.degrees
    plan, _ = make_plan(ring, ulysses, case)
    whole, _ = make_plan(1, 1, case)
    rule, keys, heads = Clusters(3, 4, 0.6), make_keys(case, 2, 33), case["heads"]
    generator, kv_heads = torch.Generator().manual_seed(2), plan.num_kv_heads
    q, k, v = (torch.randn(2, n, 33, 8, generator=generator) for n in (heads, kv_heads, kv_heads))
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    alone = AttentionMesh(None, None, None)
    wanted, number = attend_sparse(q, k, v, alone, whole, rule, keys=keys)
    own = own_tokens(plan, rank)
    mine = [x.detach()[:, :, own].requires_grad_() for x in (q, k, v)]
    out, counts = attend_sparse(*three(mine), mesh, plan, rule, keys=keys)
    number = gather_counts(alone, whole, number)[..., 0]
    for by_rank in (False, True):
        gathered = gather_counts(mesh, plan, counts, by_rank=by_rank)
        # Means are rounded by the rank that has the keys at home.
        assert np.abs(gathered.sum(axis=2) - number).max() <= (ring * ulysses + 1) / 2
    grads = torch.autograd.grad(out.square().sum(), mine)
    grads_wanted = torch.autograd.grad(wanted.square().sum(), (q, k, v))
    pairs = zip((out, *grads), (wanted, *grads_wanted), strict=True)
    return max(difference(a, b[:, :, own]) for a, b in pairs)


def in_order(x: Tensor, layout: BlockLayout) -> Tensor:
    """Tokens as the heads have them."""
    if layout.order is None:
        return x
    order = torch.from_numpy(layout.order)[None, :, :, None].expand_as(x)
    return x.gather(2, order)


@pytest.mark.parametrize(
    ("world_size", "is_whole"),
    [
        *[(1, True), (3, False), (4, False)],
        *(pytest.param(num, True, marks=pytest.mark.stress) for num in (3, 4, 8)),
    ],
)
@on_ranks(lambda world_size, **_: world_size)
def test_exact_in_float64(world_size: int, is_whole: bool) -> None:
    """Compare every case on every mesh and wire, or half of them on one each, in turn.

    Odd worlds have one half, and even ones the other.
    """
    world = dist.get_world_size()
    meshes = [make_mesh(*shape) for shape in MESHES[world]]  # each has its threads
    some = slice(None) if is_whole else slice(world % 2, None, 2)

    def chosen(place: int) -> list[AttentionMesh]:
        return meshes if is_whole else [meshes[place % len(meshes)]]

    for place, (name, case) in enumerate(list(CASES.items())[some]):
        turn = place // len(meshes) % len(FORMATS)
        formats = FORMATS if is_whole else FORMATS[turn : turn + 1]
        for mesh in chosen(place):
            errors = compare(mesh, case)
            assert max(errors.values()) < 1e-10, (mesh.degrees, name, errors)
            for fmt in formats if mesh.degrees != (1, 1) else ():  # rows arrive as float32
                errors = compare(mesh, case, Quantized(fmt))
                assert max(errors.values()) < 1e-6, (mesh.degrees, name, fmt, errors)
    rules = {}, {"order": "random"}, {"keys": 0.5}, {"keys": 0.5, "order": "random"}
    for place, case in enumerate(rules):
        for mesh in chosen(place):
            assert by_rule(mesh, case) < 1e-10, (mesh.degrees, case)
    cut = {"heads": 3, "kind": "heavy"}
    every = cut, {**cut, "keys": 0.5}, {"heads": 6, "kv_heads": 3}, {**cut, "order": "random"}
    for place, case in enumerate(every):
        for mesh in chosen(place):
            assert by_clusters(mesh, case) < 1e-10, (mesh.degrees, case)
    for mesh in meshes:
        assert other_samples(mesh) < 1e-10
