"""Ranks that make other calls than the others: never each other's rows, never a wait, an error."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from bascule.attention.api import (
    AttentionMesh,
    AttentionOptions,
    SequenceLayout,
    attention,
    gather,
    split,
)
from bascule.attention.sparse.attend import rows_of, sparse_attention
from bascule.comm.collectives import (
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
    start_all_to_all,
)
from bascule.comm.groups import Part, RankGroup
from bascule.parallel import SequenceParallel
from bascule.plan.sparse import BlockLayout, SparsePlanner, block_lens
from bascule.sdpa import context_parallel
from tests.helpers.cases import COST
from tests.helpers.ranks import on_ranks, raised_by, run_ranks

Error = tuple[list[str], str]


def assert_known(of_rank: list[Error], *parts: str) -> None:
    """All ranks have an error that is no timeout; one of the texts has all parts."""
    for classes, text in of_rank:
        assert {"CommError", "ConfigError"} & set(classes), text
        assert "missing: " not in text, text
    assert any(all(part in text for part in parts) for _, text in of_rank), of_rank


# --- meshes ---------------------------------------------------------------------------------------


def mesh_of(*degrees: int) -> AttentionMesh:
    names = ("ring", "ulysses")
    return AttentionMesh.of(init_device_mesh("cpu", degrees, mesh_dim_names=names))


Settings = dict[str, Any]


DIAGONAL = torch.ones(8, 8).tril().bool()
SETTINGS: dict[str, tuple[Settings, Settings]] = {
    "causal": ({}, {"is_causal": True}),
    "scale": ({"scale": 1.0}, {"scale": 0.5}),
    "a mask or none": ({}, {"attn_mask": DIAGONAL}),
    "other values of a mask": ({"attn_mask": DIAGONAL}, {"attn_mask": DIAGONAL.T}),
    "other values of a bias": (
        {"attn_mask": torch.zeros(1, 4, 8, 8)},
        {"attn_mask": torch.ones(1, 4, 8, 8).triu()},
    ),
    "zigzag": ({"zigzag": True, "is_causal": True}, {"zigzag": False, "is_causal": True}),
    "stripe": ({"stripe": 2}, {"stripe": 1}),
    "kernel": ({"kernel": "plain"}, {"kernel": "cpu_flash"}),
    "causal and a mask": (
        {"attn_mask": DIAGONAL, "is_causal": True},
        {"attn_mask": ~DIAGONAL, "is_causal": True},
    ),
}


def unlike_settings(degrees: tuple[int, int]) -> list[Error]:
    mesh, q, errors = mesh_of(*degrees), torch.randn(1, 4, 4, 8), list[Error]()
    for both in SETTINGS.values():
        mine = dict(both[dist.get_rank() % 2])
        order = {name: mine.pop(name) for name in ("zigzag", "stripe") if name in mine}
        layout = SequenceLayout((8,), *degrees, **order) if order else None
        options = AttentionOptions(layout, mine.pop("kernel", None))
        errors.append(raised_by(attention, q, q, q, mesh, options=options, **mine))
    return errors


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)])
def test_unlike_settings_of_mesh_attention_end_all_ranks(degrees: tuple[int, int]) -> None:
    for of_rank in zip(*run_ranks(unlike_settings, 2, degrees), strict=True):
        assert_known(list(of_rank))


def replicated_on_one_rank() -> Error:
    """Each rank answers for four tokens; one of them has those of both in the first segment."""
    mesh, is_odd = mesh_of(1, 2), dist.get_rank() == 1
    layout = SequenceLayout((4, 4), 1, 2, replicated=(0,) if is_odd else ())
    q = torch.randn(1, 2, 6 if is_odd else 4, 8)
    return raised_by(lambda: attention(q, q, q, mesh, options=AttentionOptions(layout=layout)))


def test_tokens_replicated_on_one_rank_only_end_all_ranks() -> None:
    assert_known(run_ranks(replicated_on_one_rank, 2), "disagree", "replicated segments (0,)")


# --- meshes in any order --------------------------------------------------------------------------


def collectives_by_place(group: RankGroup, own: int) -> None:
    call = "test"
    assert all_gather(group, call, torch.tensor([own])).flatten().tolist() == [0, 1, 2, 3]
    x = torch.arange(4.0)[:, None] + 10 * own
    received = torch.empty(4, 1)
    start_all_to_all(group, call, received, x, [1] * 4, [1] * 4)()
    assert received.flatten().tolist() == [own + 10.0 * place for place in range(4)]
    assert reduce_scatter(group, call, x).tolist() == [4.0 * own + 60]
    assert all_reduce(group, call, torch.tensor([float(own)])).tolist() == [6.0]
    large = torch.full((5001,), float(own))
    assert torch.equal(all_reduce(group, call, large), torch.full((5001,), 6.0))
    given = torch.tensor([own])
    assert broadcast(group, call, given).tolist() == [0] and given.tolist() == [own]


@pytest.mark.parametrize("order", [[[0, 2], [1, 3]], [[3, 1], [0, 2]], [[3, 2], [1, 0]]])
@on_ranks(4)
def test_the_ranks_of_a_mesh_may_be_in_any_order(order: list[list[int]]) -> None:
    device_mesh = DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=("ring", "ulysses"))
    mesh = AttentionMesh.of(device_mesh)
    flat = [rank for row in order for rank in row]
    assert mesh.whole is not None
    own = flat.index(dist.get_rank())
    assert mesh.whole.ranks == tuple(flat) and mesh.whole.rank == own
    # As it is, and as on devices, where the back end's own collectives have another order.
    for group in (mesh.whole, replace(mesh.whole, calls=Part())):
        collectives_by_place(group, own)
    q = torch.randn(2, 3, 22, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layout = SequenceLayout((5, 17), *mesh.degrees)
    local = split(q, mesh, layout, 2)
    whole = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    for either in (mesh, device_mesh):
        out = attention(local, local, local, either, options=AttentionOptions(layout=layout))
        assert float((gather(out, mesh, layout, 2) - whole).abs().max()) < 1e-12


@on_ranks(4)
def test_meshes_of_unlike_orders_on_the_same_ranks() -> None:
    """One after the other on the same ranks: some ranks have as many tokens as before."""
    q = torch.randn(1, 4, 22, 4, generator=torch.Generator().manual_seed(0))
    whole = functional.scaled_dot_product_attention(q, q, q)
    for order in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 1], [0, 2]], [[0, 1], [2, 3]]):
        names = ("ring", "ulysses")
        mesh = AttentionMesh.of(DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=names))
        layout = SequenceLayout((5, 17), *mesh.degrees)
        options = AttentionOptions(layout=layout)
        local = split(q, mesh, layout, 2)
        out = gather(attention(local, local, local, mesh, options=options), mesh, layout, 2)
        assert float((out - whole).abs().max()) < 1e-6


# --- threads --------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_thread_takes_over_from_one_that_ended() -> None:
    mesh, errors = mesh_of(1, 2), list[float]()

    def attend() -> None:
        q = torch.ones(1, 2, 4, 4)
        errors.append(float((attention(q, q, q, mesh) - 1.0).abs().max()))

    for _ in range(3):
        thread = threading.Thread(target=attend)
        thread.start()
        thread.join()
    assert len(errors) == 3 and max(errors) < 1e-6


# --- steps ---------------------------------------------------------------------------------------


OF_A_STEP: list[dict[str, Any]] = [{"causal": True}, {"scale": 0.5}]


def other_settings_in_bags_of_one(settings: dict[str, Any]) -> Error:
    parallel = SequenceParallel(None, "g1n2", COST)
    for first in (True, False):
        step = parallel.plan([6])
        q = torch.randn(step.local.positions.size, 4, 2)
        if first:
            step.attend(q, q, q)
    given = settings if dist.get_rank() else {}
    return raised_by(lambda: step.restore(step.attend(q, q, q, **given)[:, 0]))


@pytest.mark.parametrize("settings", OF_A_STEP, ids=str)
def test_bags_of_one_compare_what_they_attend_with(settings: dict[str, Any]) -> None:
    assert_known(run_ranks(other_settings_in_bags_of_one, 2, settings), "attend")


def refused_by_the_mode(ring: int, ulysses: int) -> Error:
    mesh = mesh_of(ring, ulysses)
    layout = SequenceLayout((8,), ring, ulysses)
    own = split(torch.randn(1, 4, 8, 4), mesh, layout, 2)

    def attend() -> None:
        with context_parallel(mesh, layout):
            functional.scaled_dot_product_attention(own, own, own)
            dropout = 0.1 if dist.get_rank() else 0.0
            functional.scaled_dot_product_attention(own, own, own, dropout_p=dropout)

    return raised_by(attend)


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_what_the_mode_refuses_on_one_rank(ring: int, ulysses: int) -> None:
    errors = run_ranks(refused_by_the_mode, 2, ring, ulysses)
    assert all("dropout" in text for _, text in errors), errors
    assert_known(errors)


# --- block-sparse attention -----------------------------------------------------------------------

SPARSE = ("plan", "masks", "scale", "kernel")


@pytest.mark.parametrize("what", SPARSE)
@on_ranks(2)
def test_ranks_that_differ_in_sparse_attention_end_at_its_first_use(what: str) -> None:
    """Rank 1 differs from the other in one thing, with a plan that both have not used before."""
    mesh, is_odd = mesh_of(1, 2), dist.get_rank() == 1
    lens = block_lens((32,), 8)
    layout = BlockLayout.striped(lens, 1, 2)
    masks = np.tril(np.ones((2, lens.size, lens.size), bool))
    others = np.ones_like(masks)
    planned = others if is_odd and what == "plan" else masks
    plan = SparsePlanner(1, 2).plan(planned, layout, layout, num_kv_heads=2)
    seen = rows_of(others if is_odd and what in ("plan", "masks") else masks)
    given: dict[str, Any] = {}
    if is_odd and what in ("scale", "kernel"):
        given = {"scale": 0.5} if what == "scale" else {"kernel": "plain"}
    q = torch.randn(1, 2, int(lens[plan.q.home == dist.get_rank()].sum()), 4)
    classes, text = raised_by(lambda: sparse_attention(q, q, q, mesh, plan, seen, **given))
    assert "CommError" in classes and "sparse attention" in text and "disagree" in text, text
