"""What operators of compiled block-sparse attention promise to the compiler."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bascule.attention.api import AttentionMesh
from bascule.attention.kernels import registry
from bascule.attention.kernels.protocol import KernelQuery, OutLse
from bascule.attention.mask import AttentionMask
from bascule.attention.sparse import rows_of, sparse_attention
from bascule.attention.sparse.attend import WholeMasks
from bascule.diffusers import SparseConfig, recorded
from bascule.diffusers.sparse_layers import SparseLayers, SparsePass
from bascule.plan.sparse import BlockLayout, SparsePlan, SparsePlanner, block_lens


@pytest.mark.parametrize("records", [False, True])
def test_outputs_are_in_the_order_of_memory_that_graphs_expect(records: bool) -> None:
    """Attention of one rank returns (B, H, T, D) that lie as (B, T, H, D)."""
    x, ticket = torch.randn(2, 6, 5, 4), torch.zeros(2, dtype=torch.int64)
    running = SimpleNamespace(
        sparse=SimpleNamespace(ticket=ticket, recorded={}, layers=mock.Mock()),
        attend_recorded=lambda qkv, *_: (qkv[0] + 1).transpose(1, 2).contiguous().transpose(1, 2),
    )
    world = SimpleNamespace(find=lambda _: running)
    with mock.patch.object(recorded, "this_world", lambda: world):
        out, _ = recorded.attend(x, x, x, None, ticket, "image", [5], False, None, records)
    assert torch.equal(out, x + 1) and out.stride() == x.stride()
    if records:  # graphs use the memory of an output again
        kept = running.sparse.recorded[0][1]
        assert kept.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()


def test_tables_of_a_plan_live_with_the_plan() -> None:
    mesh, lens = AttentionMesh(None, None, None), block_lens((12,), 4)
    masks, x = np.ones((2, 3, 3), bool), torch.randn(1, 2, 12, 4)
    plans = list[SparsePlan]()
    for number in range(70):  # of as many layers
        order = np.random.default_rng(number).permutation(12)
        home = replace(BlockLayout.striped(lens, 1, 1), order=np.tile(order, (2, 1)))
        plans.append(SparsePlanner(1, 1).plan(masks, home))

    def attend() -> list[Any]:
        for plan in plans:
            sparse_attention(x, x, x, mesh, plan, rows_of(masks))
        return [id(tables.get((1, x.device), list)) for tables in mesh.tables.values()]

    first = attend()
    assert len(first) == 70 and attend() == first
    plans.clear()
    assert len(mesh.tables) == 0


class _OnDevice:
    """Stands for a kernel of a device: it needs the tables there, and computes nothing."""

    def unfit(self, query: KernelQuery) -> None:
        """It computes anything."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        """Read the tables, and return what has no values."""
        assert mask.blocks is not None
        mask.blocks.on(q.device)
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


class _Copies(TorchDispatchMode):
    """Counts copies between devices, and reads of values, within."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "copy_", "_local_scalar_dense", "nonzero", "_pin_memory"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_model", [False, True])
def test_a_call_with_a_kept_plan_stays_on_its_device(is_model: bool) -> None:
    """Tables are copied there once for a plan, masks and keys; to read a value there fails."""
    mesh, lens = AttentionMesh(None, None, None), block_lens((12,), 4)
    masks = np.random.default_rng(0).random((2, 3, 3)) < 0.6
    plan, seen = SparsePlanner().plan(masks, BlockLayout.striped(lens, 1, 1)), rows_of(masks)
    layers, keys = SparseLayers(SparseConfig(masks=masks, block=4), mesh), (np.arange(12) < 9)[None]

    def call(x: Tensor, keys: Any = None, masks: WholeMasks = seen) -> Tensor:
        if is_model:
            return SparsePass(layers).attend(0, (x, x, x), {"image": 12}, None, keys)
        return sparse_attention(x, x, x, mesh, plan, masks, keys=keys)

    counts = list[int]()
    with (
        mock.patch.dict(registry.KERNELS, {"cpu_loop": _OnDevice()}),
        mock.patch("bascule.attention.sparse.attend.check_tensors"),  # which refuses "meta"
    ):
        for given in (None, None, keys, keys.copy(), None):
            with torch.no_grad(), _Copies() as copies:
                call(torch.empty(1, 2, 12, 4, device="meta"), given)
            counts.append(len(copies.names))
    assert [count > 0 for count in counts] == [True, False, True, False, True], counts
    x = torch.randn(1, 2, 12, 4)
    for given in (None, None, keys, keys.copy(), None):
        wanted = sparse_attention(x, x, x, mesh, plan, rows_of(masks), keys=given)
        assert torch.equal(call(x, given), wanted)
