"""On one CUDA device: the kernels for blocks, whole and merged, against dense softmax in float64.

Run with `pytest -m gpu tests/gpu`; without a device everything here is skipped.
"""

import math

import pytest
import torch
from torch import Tensor

from bascule.attention.kernels.protocol import Attended, merge
from bascule.attention.kernels.registry import KERNELS, select_kernel
from bascule.attention.mask import AttentionMask
from tests.helpers.device_runs import kernel_or_skip
from tests.helpers.oracle import dense_attention

SCALE = 0.4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="NO CUDA DEVICE: kernels for blocks NOT TESTED"
    ),
]
ON_CUDA = [name for name in KERNELS if name not in ("cpu_flash", "cpu_loop", "triton")]
# Of torch's operators these must run on any supported device: a skip of all would test nothing.
ALWAYS = ["plain", "aten_flash", "efficient"]
TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2}


def inputs(
    dtype: torch.dtype, shape: tuple[int, int, int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads, rows, columns, dim = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, heads, rows, dim), (2, kv_heads, columns, dim), (2, kv_heads, columns, dim)]
    q, k, v = (torch.randn(size, generator=generator).to("cuda", dtype) for size in sizes)
    return q, k, v


def make_bias(kind: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
    generator = torch.Generator().manual_seed(3)
    if kind == "none":
        return None
    if kind == "additive":
        return torch.randn(1, 1, rows, columns, generator=generator).to("cuda", dtype)
    hidden = torch.rand(2, 1, 1 if kind == "keys" else rows, columns, generator=generator) < 0.4
    if kind == "empty rows":
        hidden[:, :, ::2] = True
    return torch.zeros(hidden.shape).masked_fill(hidden, -math.inf).to("cuda", dtype)


def close(found: Tensor, want: Tensor, tolerance: float) -> bool:
    difference = (found.double() - want).norm()
    return bool(difference <= tolerance * want.norm() + 1e-6)


def cut_in_two(columns: int) -> list[slice]:
    return [slice(0, columns // 3), slice(columns // 3, columns)]


@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["none", "additive", "keys", "empty rows"])
@pytest.mark.parametrize("shape", [(4, 4, 128, 256, 64), (6, 2, 77, 133, 128), (2, 2, 1, 40, 64)])
def test_two_blocks_are_the_whole(
    name: str, dtype: torch.dtype, kind: str, shape: tuple[int, int, int, int, int]
) -> None:
    """Out, LSE and gradients of keys in two blocks, merged, with the LSE of all."""
    kernel = kernel_or_skip(name, dtype, shape[4], has_bias=kind != "none")
    q, k, v = inputs(dtype, shape)
    bias = make_bias(kind, shape[2], shape[3], dtype)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wide_bias = None if bias is None else bias.double()
    want, want_lse = dense_attention(exact[0], exact[1], exact[2], wide_bias, scale=SCALE)
    grad = torch.linspace(-1, 1, want.numel(), device="cuda").view(want.shape).to(dtype)
    wanted = torch.autograd.grad(want, exact, grad.double())
    tiles = [
        (k[:, :, at], v[:, :, at], AttentionMask(bias=None if bias is None else bias[..., at]))
        for at in cut_in_two(shape[3])
    ]
    with torch.no_grad():
        parts = [kernel.forward(q, *tile, SCALE) for tile in tiles]
        assert all(lse.shape == q.shape[:3] for _, lse in parts)
        (out, lse), (more, more_lse) = parts
        out, lse = merge(out.float(), lse, more.float(), more_lse)
        out = out.to(dtype)
        tolerance = TOLERANCE[dtype]
        assert close(out, want.detach(), tolerance)
        assert torch.equal(lse.isneginf(), want_lse.isneginf())
        seen = ~want_lse.isneginf()
        torch.testing.assert_close(
            lse[seen].double(), want_lse[seen].detach(), rtol=1e-2, atol=2e-2
        )
        grads = [
            kernel.backward(grad, Attended(q, *tile[:2], out, lse, tile[2], SCALE))
            for tile in tiles
        ]
    found = [grads[0][0] + grads[1][0]]
    found += [torch.cat((grads[0][i], grads[1][i]), dim=2) for i in (1, 2)]
    assert all(close(a, b, 2 * tolerance) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_causal_block(name: str, dtype: torch.dtype) -> None:
    kernel = kernel_or_skip(name, dtype, 64, has_bias=False)
    q, k, v = inputs(dtype, (4, 2, 133, 133, 64))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    want, _ = dense_attention(exact[0], exact[1], exact[2], causal=True, scale=SCALE)
    grad = torch.linspace(-1, 1, want.numel(), device="cuda").view(want.shape).to(dtype)
    wanted = torch.autograd.grad(want, exact, grad.double())
    with torch.no_grad():
        mask = AttentionMask(causal=True)
        out, lse = kernel.forward(q, k, v, mask, SCALE)
        assert close(out, want.detach(), TOLERANCE[dtype])
        grads = kernel.backward(grad, Attended(q, k, v, out, lse, mask, SCALE))
    assert all(close(a, b, 2 * TOLERANCE[dtype]) for a, b in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("name", ALWAYS)
def test_torchs_own_kernels_fit(name: str) -> None:
    select_kernel(name, "cuda", dtype=torch.bfloat16, head_dim=64)
