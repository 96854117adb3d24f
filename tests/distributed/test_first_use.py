"""Ranks that make other calls than the others: never each other's rows, never a wait, an error."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bascule.attention.api import (
    AttentionMesh,
    AttentionOptions,
    SequenceLayout,
    attention,
    gather,
    split,
)
from bascule.comm.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from bascule.comm.groups import RankGroup
from bascule.comm.guard.calls import Calls
from bascule.parallel import SequenceParallel
from tests.helpers.cases import COST
from tests.helpers.mesh_cases import as_given
from tests.helpers.ranks import raised_by, run_ranks

KNOWN_WITHIN_S = 30.0  # of waits that the groups would allow 60 s; on a quiet machine 2 s
LENS = [30, 9, 2], [4]  # on two ranks; whoever balances them moves some
Heard = tuple[list[str], str, float]


def heard(fn: Callable[[], Any]) -> Heard:
    start = time.monotonic()
    classes, text = raised_by(fn)
    return classes, text, time.monotonic() - start


def assert_known(of_rank: list[Heard], *parts: str) -> None:
    """All ranks have an error, in time; one of the texts has all parts."""
    for classes, text, seconds in of_rank:
        assert {"CommError", "ConfigError"} & set(classes), text
        assert seconds < KNOWN_WITHIN_S, (seconds, text)
    assert any(all(part in text for part in parts) for _, text, _ in of_rank), of_rank


def parallel_of(topology: str = "g1n2") -> SequenceParallel:
    return SequenceParallel(None, topology, COST, timeout_s=60)


def tokens() -> int:
    return sum(LENS[dist.get_rank()])


# --- meshes ---------------------------------------------------------------------------------------


def mesh_of(*degrees: int) -> AttentionMesh:
    names = ("ring", "ulysses")
    return AttentionMesh.of(init_device_mesh("cpu", degrees, mesh_dim_names=names))


Settings = dict[str, Any]


@dataclass(frozen=True)
class Lay:
    """A layout of eight tokens, on any mesh of two ranks."""

    zigzag: bool
    stripe: int

    def on(self, degrees: tuple[int, int]) -> SequenceLayout:
        return SequenceLayout((8,), *degrees, zigzag=self.zigzag, stripe=self.stripe)


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
    "zigzag": (
        {"layout": Lay(True, 0), "is_causal": True},
        {"layout": Lay(False, 0), "is_causal": True},
    ),
    "stripe": ({"layout": Lay(False, 2)}, {"layout": Lay(False, 1)}),
    "kernel": ({"kernel": "plain"}, {"kernel": "cpu_flash"}),
    "causal and a mask": (
        {"attn_mask": DIAGONAL, "is_causal": True},
        {"attn_mask": ~DIAGONAL, "is_causal": True},
    ),
}


def unlike_settings(degrees: tuple[int, int], what: str) -> Heard:
    mesh = mesh_of(*degrees)
    both: list[Settings] = [
        {name: one.on(degrees) if isinstance(one, Lay) else one for name, one in settings.items()}
        for settings in SETTINGS[what]
    ]
    q = torch.randn(1, 4, 4, 8)
    settings = both[dist.get_rank() % 2]
    return heard(lambda: attention(q, q, q, mesh, **as_given(settings)))


@pytest.mark.some(6)
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)])
@pytest.mark.parametrize("what", SETTINGS)
def test_unlike_settings_of_mesh_attention_end_all_ranks(
    what: str, degrees: tuple[int, int]
) -> None:
    assert_known(run_ranks(unlike_settings, 2, degrees, what))


def replicated_on_one_rank() -> Heard:
    """Each rank answers for four tokens; one of them has those of both in the first segment."""
    mesh, is_odd = mesh_of(1, 2), dist.get_rank() == 1
    layout = SequenceLayout((4, 4), 1, 2, replicated=(0,) if is_odd else ())
    q = torch.randn(1, 2, 6 if is_odd else 4, 8)
    return heard(lambda: attention(q, q, q, mesh, options=AttentionOptions(layout=layout)))


def test_tokens_replicated_on_one_rank_only_end_all_ranks() -> None:
    assert_known(run_ranks(replicated_on_one_rank, 2), "disagree", "replicated segments (0,)")


# --- meshes in any order --------------------------------------------------------------------------


def collectives_by_place(group: RankGroup, own: int) -> None:
    call = "test"
    assert all_gather(group, call, torch.tensor([own])).flatten().tolist() == [0, 1, 2, 3]
    x = torch.arange(4.0)[:, None] + 10 * own
    received = torch.empty(4, 1)
    all_to_all(group, call, received, x, [1] * 4, [1] * 4)
    assert received.flatten().tolist() == [own + 10.0 * place for place in range(4)]
    assert reduce_scatter(group, call, x).tolist() == [4.0 * own + 60]
    assert all_reduce(group, call, torch.tensor([float(own)])).tolist() == [6.0]
    large = torch.full((5001,), float(own))
    assert torch.equal(all_reduce(group, call, large), torch.full((5001,), 6.0))
    given = torch.tensor([own])
    assert broadcast(group, call, given).tolist() == [0] and given.tolist() == [own]


def collectives_in_any_order(order: list[list[int]]) -> None:
    device_mesh = DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=("ring", "ulysses"))
    mesh = AttentionMesh.of(device_mesh)
    flat = [rank for row in order for rank in row]
    assert mesh.whole is not None
    own = flat.index(dist.get_rank())
    assert mesh.whole.ranks == tuple(flat) and mesh.whole.rank == own
    # As it is, and as on devices, where the back end's own collectives have another order.
    for group in (mesh.whole, replace(mesh.whole, calls=Calls())):
        collectives_by_place(group, own)
    q = torch.randn(2, 3, 22, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layout = SequenceLayout((5, 17), *mesh.degrees)
    local = split(q, mesh, layout, 2)
    out = gather(
        attention(local, local, local, mesh, options=AttentionOptions(layout=layout)),
        mesh,
        layout,
        2,
    )
    whole = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert float((out - whole).abs().max()) < 1e-12
    out = gather(
        attention(local, local, local, device_mesh, options=AttentionOptions(layout=layout)),
        mesh,
        layout,
        2,
    )
    assert float((out - whole).abs().max()) < 1e-12


@pytest.mark.parametrize("order", [[[0, 2], [1, 3]], [[3, 1], [0, 2]], [[3, 2], [1, 0]]])
def test_the_ranks_of_a_mesh_may_be_in_any_order(order: list[list[int]]) -> None:
    run_ranks(collectives_in_any_order, 4, order)


def meshes_of_unlike_orders() -> None:
    """One after the other on the same ranks, each with forms of its own."""
    q = torch.randn(1, 4, 8, 4, generator=torch.Generator().manual_seed(0))
    whole = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    for order in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]):
        names = ("ring", "ulysses")
        mesh = AttentionMesh.of(DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=names))
        layout = SequenceLayout((8,), *mesh.degrees)
        local = split(q, mesh, layout, 2)
        out = gather(attention(local, local, local, mesh), mesh, layout, 2)
        assert float((out - whole).abs().max()) < 1e-6


def test_meshes_of_unlike_orders_on_the_same_ranks() -> None:
    run_ranks(meshes_of_unlike_orders, 4)


# --- threads --------------------------------------------------------------------------------------


def one_after_the_other() -> list[float]:
    """A thread may take over from one that ended."""
    mesh, errors = mesh_of(1, 2), list[float]()

    def attend() -> None:
        q = torch.ones(1, 2, 4, 4)
        errors.append(float((attention(q, q, q, mesh) - 1.0).abs().max()))

    for _ in range(3):
        thread = threading.Thread(target=attend)
        thread.start()
        thread.join()
    return errors


def test_a_thread_takes_over_from_one_that_ended() -> None:
    for errors in run_ranks(one_after_the_other, 2):
        assert len(errors) == 3 and max(errors) < 1e-6
