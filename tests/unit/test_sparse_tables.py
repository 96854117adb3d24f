"""What block-sparse attention asks of a kernel."""

import numpy as np
import pytest
import torch

from bascule.attention.api import AttentionMesh
from bascule.attention.kernels import registry
from bascule.attention.kernels.protocol import BlockForm
from bascule.attention.kernels.skipping import CpuLoopKernel
from bascule.attention.sparse.block_sparse import rows_of, sparse_attention
from bascule.errors import ConfigError
from bascule.plan.sparse import BlockLayout, SparsePlanner, block_lens


class _WithoutLse(CpuLoopKernel):
    def unfit(self, form: BlockForm) -> str | None:
        """As `BlockKernel`."""
        return "gives no log-sum-exp" if form.needs_lse else super().unfit(form)


def test_gradients_need_the_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.QUANTIZED, "without_lse", _WithoutLse())
    layout = BlockLayout.striped(block_lens((9,), 4), 1, 1)
    masks = np.ones((2, 3, 3), dtype=np.bool_)
    plan = SparsePlanner().plan(masks, layout, layout, num_kv_heads=2)
    mesh, q = AttentionMesh(None, None, None), torch.randn(1, 2, 9, 8)
    out = sparse_attention(q, q, q, mesh, plan, rows_of(masks), kernel="without_lse")
    assert out.shape == q.shape
    with pytest.raises(ConfigError, match="gives no log-sum-exp"):
        trained = q.clone().requires_grad_()
        sparse_attention(trained, q, q, mesh, plan, rows_of(masks), kernel="without_lse")
