"""What operators of compiled block-sparse attention promise to the compiler."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from bascule.attention.api import AttentionMesh
from bascule.attention.sparse import rows_of, sparse_attention
from bascule.diffusers import recorded
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
