"""Attention of one cut sequence to the keys of another, in one process."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bascule.comm.mesh import AttentionMesh
from bascule.errors import ConfigError
from bascule.sdpa import SequenceParallelMode


class Crossing(SequenceParallelMode):
    """Its keys are gathered from two ranks that have the same ones."""

    def other_keys(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([key, key], dim=2), torch.cat([value, value], dim=2)


def attend(mask: Tensor | None = None, *, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    every = torch.cat([k, k], dim=2)
    wanted = scaled_dot_product_attention(q, every, every, mask)
    with Crossing(AttentionMesh(None, None, None)):
        return scaled_dot_product_attention(q, k, k, mask, is_causal=is_causal), wanted


def test_queries_see_all_keys_or_those_of_a_mask() -> None:
    mask = torch.tensor([True, False, True, True, True, False])
    for seen in (None, mask[None], mask[None, None, None]):
        found, wanted = attend(seen)
        assert torch.equal(found, wanted)


def test_a_mask_of_a_ranks_own_queries_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a mask of shape \(1, 1, 3, 6\): give is_causal=False"):
        attend(torch.ones(1, 1, 3, 6, dtype=torch.bool))
    with pytest.raises(ConfigError, match=r"another sharded sequence, is_causal=True"):
        attend(is_causal=True)
