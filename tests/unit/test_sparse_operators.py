"""What operators of compiled block-sparse attention promise to the compiler."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from bascule.diffusers import recorded


@pytest.mark.parametrize("records", [False, True])
def test_outputs_are_in_the_order_of_memory_that_graphs_expect(records: bool) -> None:
    """Attention of one rank returns (B, H, T, D) that lie as (B, T, H, D)."""
    x, ticket = torch.randn(2, 6, 5, 4), torch.zeros(2, dtype=torch.int64)
    running = SimpleNamespace(
        sparse=SimpleNamespace(ticket=ticket, recorded={}, layers=mock.Mock()),
        attend_recorded=lambda qkv, *_: (qkv[0] + 1).transpose(1, 2).contiguous().transpose(1, 2),
    )
    world = SimpleNamespace(step=lambda _: running)
    with mock.patch.object(recorded, "this_world", lambda: world):
        out, _ = recorded.attend(x, x, x, None, ticket, "image", [5], False, None, records)
    assert torch.equal(out, x + 1) and out.stride() == x.stride()
    if records:  # graphs use the memory of an output again
        kept = running.sparse.recorded[0][1]
        assert kept.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()
