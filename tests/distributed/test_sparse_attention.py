"""Block-sparse attention over meshes against dense masked attention in one process, float64."""

import itertools
from collections.abc import Iterable
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
from tests.helpers.inference_cases import same
from tests.helpers.mesh_cases import Three, draw, make_mesh, reference, three
from tests.helpers.ranks import on_ranks, raised_by
from tests.helpers.rows import FORMATS, there_and_back
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
    planner = SparsePlanner(ring, ulysses, method=case.get("method", "minimal_move"))
    q = kv = make(lens, ring, ulysses)
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


def random_three(case: dict[str, Any], batch: int, num_tokens: int, seed: int) -> Three:
    """Queries, keys and values of the heads of a case."""
    heads = case.get("heads", 4)
    shape = batch, heads, case.get("kv_heads", heads), 8
    return three(x.requires_grad_() for x in draw(shape, num_tokens, seed))


def own_part(tensors: Iterable[Tensor], own: Tensor) -> Three:
    return three(x.detach()[:, :, own].requires_grad_() for x in tensors)


def same_parts(found: Iterable[Tensor], wanted: Iterable[Tensor], own: Tensor, *how: Any) -> None:
    """Assert that a rank's outputs and gradients are those of one process, of its own tokens."""
    for a, b in zip(found, wanted, strict=True):
        same(a, b[:, :, own], *how)


def compare(mesh: AttentionMesh, case: dict[str, Any], wire: Quantized | None = None) -> None:
    (ring, ulysses), rank = mesh.degrees, dist.get_rank()
    plan, masks = make_plan(ring, ulysses, case)
    batch, size = case.get("batch", 1), int(plan.q.lens.sum())
    whole = random_three(case, batch, size, seed=0)
    grad = torch.randn(whole[0].shape, generator=torch.Generator().manual_seed(1)).double()
    keys = make_keys(case, batch, size)
    seen = torch.from_numpy(dense_masks(plan, masks))
    seen = seen if keys is None else seen & torch.from_numpy(keys)[:, None, None]
    if wire is None:
        expected = reference(*whole, seen, False)
        wanted = [expected, *torch.autograd.grad(expected, whole, grad)]
    else:
        wanted = straight_through(whole, grad, seen, plan, wire)
    own = own_tokens(plan, rank)
    mine = own_part(whole, own)
    options: Any = {"keys": keys, "comm_dtype": wire}
    out = sparse_attention(*mine, mesh, plan, rows_of(masks), **options)
    grads = torch.autograd.grad(out, mine, grad[:, :, own])
    # Rows arrive as float32 from a wire.
    same_parts((out, *grads), wanted, own, 1e-6 if wire else 1e-10, (mesh.degrees, case, wire))
    counts = block_counts(
        masks, kv_lens=plan.kv.lens, kv_of=plan.kv.home // ulysses, ring_degree=ring
    )
    gathered = gather_counts(mesh, plan, masks[None, *np.nonzero(plan.rank_of == rank)])
    assert (gathered == counts).all(), (mesh.degrees, case)


def compare_samples(mesh: AttentionMesh) -> None:
    """Masks that differ between the samples of a batch; and a second derivative is refused."""
    plan, masks = make_plan(*mesh.degrees, {})
    both = np.stack([masks, ~masks])
    x, _, _ = random_three({}, 2, 33, seed=1)
    own = own_tokens(plan, dist.get_rank())
    mine = x.detach()[:, :, own].requires_grad_()
    out = sparse_attention(
        mine, mine, mine, mesh, plan, lambda rows: both[:, rows.heads, rows.blocks]
    )
    twice = raised_by(torch.autograd.grad, out.square().sum(), mine, create_graph=True)
    assert "no second derivative" in twice[1]
    expected = reference(x, x, x, torch.from_numpy(dense_masks(plan, both)), False)
    same_parts([out], [expected], own, 1e-10, mesh.degrees)


def compare_rule(mesh: AttentionMesh, more: dict[str, Any]) -> None:
    """Masks from pooled queries and keys, with blocks of unequal lengths and fewer key heads."""
    rank = dist.get_rank()
    case = {"heads": 6, "kv_heads": 3, "segments": (5, 30), "kind": "heavy", **more}
    plan, _ = make_plan(*mesh.degrees, case)
    q, k, v = random_three(case, 2, 35, seed=1)
    own = own_tokens(plan, rank)
    rule = BlockRule(lambda q, k, at: keep_top_k(q @ k.mT * at.scale, 3))
    keys = make_keys(case, 2, 35)
    out, masks = attend_sparse(*own_part((q, k, v), own), mesh, plan, rule, keys=keys)
    share = torch.ones(2, 1, 35, 1).double()
    if keys is not None:  # the mean of those that are seen, 0 of none
        share = torch.from_numpy(keys)[:, None, :, None].double()
    mean_q, mean_k = (
        means(in_order(x.detach() * share, layout), lens)
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
    same_parts([out], [reference(q, k, v, dense, False)], own, 1e-10, (mesh.degrees, case))


def compare_clusters(mesh: AttentionMesh, case: dict[str, Any]) -> None:
    """Outputs, gradients and counts of clusters, which one process has, too."""
    ring, ulysses = mesh.degrees
    plan, _ = make_plan(ring, ulysses, case)
    whole_plan, _ = make_plan(1, 1, case)
    rule, keys = Clusters(3, 4, 0.6), make_keys(case, 2, 33)
    whole = random_three(case, 2, 33, seed=2)
    alone = AttentionMesh(None, None, None)
    wanted, number = attend_sparse(*whole, alone, whole_plan, rule, keys=keys)
    own = own_tokens(plan, dist.get_rank())
    mine = own_part(whole, own)
    out, counts = attend_sparse(*mine, mesh, plan, rule, keys=keys)
    number = gather_counts(alone, whole_plan, number)[..., 0]
    for by_rank in (False, True):
        gathered = gather_counts(mesh, plan, counts, by_rank=by_rank)
        # Means are rounded by the rank that has the keys at home.
        assert np.abs(gathered.sum(axis=2) - number).max() <= (ring * ulysses + 1) / 2
    grads = torch.autograd.grad(out.square().sum(), mine)
    grads_wanted = torch.autograd.grad(wanted.square().sum(), whole)
    same_parts((out, *grads), (wanted, *grads_wanted), own, 1e-10, (mesh.degrees, case))


def means(x: Tensor, lens: list[int]) -> Tensor:
    """(B, H, N, D)."""
    return torch.stack([part.mean(dim=2) for part in x.split(lens, dim=2)], dim=2)


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

    for place, case in enumerate(list(CASES.values())[some]):
        turn = place // len(meshes) % len(FORMATS)
        formats = FORMATS if is_whole else FORMATS[turn : turn + 1]
        for mesh in chosen(place):
            compare(mesh, case)
            for fmt in formats if mesh.degrees != (1, 1) else ():
                compare(mesh, case, Quantized(fmt))
    rules = {}, {"order": "random"}, {"keys": 0.5}, {"keys": 0.5, "order": "random"}
    cut = {"heads": 3, "kind": "heavy"}
    every = cut, {**cut, "keys": 0.5}, {"heads": 6, "kv_heads": 3}, {**cut, "order": "random"}
    for place, (by_means, by_clusters) in enumerate(zip(rules, every, strict=True)):
        for mesh in chosen(place):
            compare_rule(mesh, by_means)
            compare_clusters(mesh, by_clusters)
    for mesh in meshes:
        compare_samples(mesh)
