"""Sums of many parts in 16 bits are rounded once, at the end."""

import numpy as np
import pytest
import torch
from torch import Tensor

from bascule.attention.kernels.protocol import Attended
from bascule.attention.kernels.skipping import CpuLoopKernel
from bascule.attention.mask import AttentionMask, BlockRows
from bascule.attention.ring import Merged


def off_by(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("rows", [slice(1, 3), slice(None)])
def test_parts_for_some_queries_or_all_are_merged_wide(rows: slice) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.zeros(1, 1, 3, 64, dtype=torch.bfloat16)
    merged, shape = Merged(q), q[:, :, rows].shape
    parts = [torch.randn(shape, generator=generator).bfloat16() for _ in range(16)]
    for part in parts:
        merged.add(rows, part, torch.zeros(shape[:3]))
    exact = torch.stack(parts).double().mean(0)
    assert off_by(merged.result()[0][:, :, rows], exact) < 0.0022


def test_gradients_of_keys_that_many_blocks_see() -> None:
    """Key block 0 is seen by all query blocks, and each sees another one beside."""
    generator = torch.Generator().manual_seed(0)
    num, size, dim = 64, 8, 16
    columns = np.array([[0, 1 + i] for i in range(num)]).ravel()
    bounds = np.arange(num + 1) * size, np.arange(num + 2) * size, np.arange(num + 1) * 2
    mask = AttentionMask(blocks=BlockRows(*bounds, columns))
    grad, q, k, v = (
        torch.randn(1, 1, (num + more) * size, dim, generator=generator).bfloat16()
        for more in (0, 0, 1, 1)
    )
    kernel = CpuLoopKernel()
    found = kernel.backward(
        grad, Attended(q, k, v, *kernel.forward(q, k, v, mask, 0.25), mask, 0.25)
    )
    grad, q, k, v = (x.double() for x in (grad, q, k, v))
    exact = kernel.backward(
        grad, Attended(q, k, v, *kernel.forward(q, k, v, mask, 0.25), mask, 0.25)
    )
    for one, other in zip(found[1:], exact[1:], strict=True):
        assert off_by(one[:, :, :size], other[:, :, :size]) < 0.005
