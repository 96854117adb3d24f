"""Kernels for blocks: their LSE and gradients, what they refuse, and the CUDA ones' signatures."""

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bascule.attention.kernels.cuda import (
    AtenCudnnKernel,
    AtenEfficientKernel,
    AtenFlashKernel,
)
from bascule.attention.kernels.flex import flex, gradients_by_recomputation
from bascule.attention.kernels.protocol import (
    Attended,
    AttentionKernel,
    KernelQuery,
    merge,
    without_empty_rows,
)
from bascule.attention.kernels.registry import KERNELS, select_kernel
from bascule.attention.mask import AttentionMask
from tests.helpers.oracle import dense_attention

SCALE = 0.4

ON_CPU = ["plain", "cpu_flash"]


def inputs(
    heads: int = 4, kv_heads: int = 2, rows: int = 5, columns: int = 7, dim: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, rows, dim), (2, kv_heads, columns, dim), (2, kv_heads, columns, dim)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def make_bias(kind: str, rows: int, columns: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(3)
    if kind == "none":
        return None
    if kind == "additive":
        return torch.randn(1, 4, rows, columns, generator=generator, dtype=torch.float64)
    hidden = torch.rand(2, 1, 1 if kind == "keys" else rows, columns, generator=generator) < 0.4
    if kind == "empty rows":
        hidden[:, :, ::2] = True
    else:
        hidden[..., 0] = False
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -math.inf)


BIASES = ("none", "additive", "keys", "rows", "empty rows")
CASES = [(bias, causal) for causal in (False, True) for bias in BIASES]


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize(("kind", "causal"), CASES)
def test_out_lse_and_gradients(name: str, kind: str, causal: bool) -> None:
    q, k, v = inputs(rows=7) if causal else inputs()
    mask = AttentionMask(causal, make_bias(kind, q.shape[2], k.shape[2]))
    want, want_lse = dense_attention(q, k, v, mask.bias, causal=mask.causal, scale=SCALE)
    with torch.no_grad():
        out, lse = KERNELS[name].forward(q, k, v, mask, SCALE)
    torch.testing.assert_close((out, lse), (want, want_lse), rtol=1e-10, atol=1e-12)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    wanted = torch.autograd.grad(want, (q, k, v), grad)
    with torch.no_grad():
        found = KERNELS[name].backward(grad, Attended(q, k, v, out, lse, mask, SCALE))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ON_CPU)
def test_values_of_a_head_may_lie_apart(name: str) -> None:
    """Torch's operator for CPUs then reads what is not theirs."""
    q, k, v = (x.detach() for x in inputs())
    mask = AttentionMask()
    out, lse = KERNELS[name].forward(q, k, v, mask, SCALE)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    wanted = KERNELS[name].backward(grad, Attended(q, k, v, out, lse, mask, SCALE))
    q, k, v, grad, result = (x.mT.contiguous().mT for x in (q, k, v, grad, out))
    found = KERNELS[name].forward(q, k, v, mask, SCALE)
    torch.testing.assert_close(found, (out, lse), rtol=1e-10, atol=1e-12)
    grads = KERNELS[name].backward(grad, Attended(q, k, v, result, lse, mask, SCALE))
    torch.testing.assert_close(grads, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 2, 13])
def test_scores_that_are_no_numbers_are_not_those_of_hidden_keys(
    dtype: torch.dtype, columns: int
) -> None:
    """Torch's operator takes few keys of nan for none, and the LSE of no key for 0."""
    q, k, v = (x.detach().to(dtype) for x in inputs(rows=columns, columns=columns))
    some_q, some_k, no_k = q.clone(), k.clone(), k.clone()
    some_q[0, 1, 0, 2] = some_k[1, 0, columns // 2, 3] = math.nan
    no_k[0, 1] = -math.inf
    hidden = torch.zeros(1, 1, columns, columns, dtype=dtype)
    hidden[:, :, columns // 2] = -math.inf
    for keys, queries in ((k, some_q), (some_k, q), (no_k, q.abs())):
        for mask in (AttentionMask(), AttentionMask(causal=True), AttentionMask(bias=hidden)):
            found = KERNELS["cpu_flash"].forward(queries, keys, v, mask, SCALE)
            wide_q, wide_k, wide_v = (x.double() for x in (queries, keys, v))
            bias = None if mask.bias is None else mask.bias.double()
            out, lse = KERNELS["plain"].forward(
                wide_q, wide_k, wide_v, AttentionMask(mask.causal, bias), SCALE
            )
            want = without_empty_rows(out, lse, mask.bias)
            tolerance = 1e-5 if dtype != torch.bfloat16 else 2e-2
            close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
            torch.testing.assert_close([x.double() for x in found], [*want], **close)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("kind", BIASES)
def test_blocks_merge_to_the_whole(name: str, kind: str) -> None:
    """Forward and backward of keys in two blocks, with the LSE of all."""
    q, k, v = inputs()
    kernel, bias = KERNELS[name], make_bias(kind, 5, 7)
    want, want_lse = dense_attention(q, k, v, bias, scale=SCALE)
    grad = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).view(want.shape)
    wanted = torch.autograd.grad(want, (q, k, v), grad)
    blocks = [(slice(0, 3), bias), (slice(3, 7), bias)]
    parts = [
        (
            k[:, :, at],
            v[:, :, at],
            AttentionMask(bias=None if b is None else b[..., at].contiguous()),
        )
        for at, b in blocks
    ]
    with torch.no_grad():
        first, second = (kernel.forward(q, *part, SCALE) for part in parts)
        out, lse = merge(*first, *second)
        torch.testing.assert_close((out, lse), (want, want_lse), rtol=1e-10, atol=1e-12)
        grads = [
            kernel.backward(grad, Attended(q, *part[:2], out, lse, part[2], SCALE))
            for part in parts
        ]
    (dq, dk, dv), (more, dk_more, dv_more) = grads
    found = dq + more, torch.cat((dk, dk_more), 2), torch.cat((dv, dv_more), 2)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", BIASES)
def test_gradients_by_recomputation_are_those_of_the_whole(kind: str) -> None:
    q, k, v = inputs()
    bias = make_bias(kind, 5, 7)
    want, lse = dense_attention(q, k, v, bias, scale=SCALE)
    grad = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).view(want.shape)
    wanted = torch.autograd.grad(want, (q, k, v), grad)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for at in (slice(0, 3), slice(3, 7)):
        part = None if bias is None else bias[..., at]
        attend = partial(dense_attention, mask=part, scale=SCALE)
        whole = want.detach(), lse.detach()
        more = gradients_by_recomputation(attend, grad, q, k[:, :, at], v[:, :, at], *whole)
        dq += more[0]
        dk[:, :, at] += more[1]
        dv[:, :, at] += more[2]
    torch.testing.assert_close((dq, dk, dv), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("kind", "causal"), CASES)
def test_flex_forward(kind: str, causal: bool) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (x.detach().float() for x in (inputs(rows=7) if causal else inputs()))
    bias = make_bias(kind, q.shape[2], k.shape[2])
    mask = AttentionMask(causal, None if bias is None else bias.float())
    out, lse = flex(flex_attention, q, k, v, mask, SCALE)
    torch.testing.assert_close(
        (out, lse),
        dense_attention(q, k, v, mask.bias, causal=mask.causal, scale=SCALE),
        rtol=1e-5,
        atol=1e-5,
    )


FAKE: list[tuple[AttentionKernel, torch.dtype, bool]] = [
    (AtenFlashKernel(), torch.bfloat16, False),
    (AtenFlashKernel(), torch.float16, True),
    (AtenCudnnKernel(), torch.bfloat16, False),
    (AtenEfficientKernel(), torch.bfloat16, False),
    (AtenEfficientKernel(), torch.float32, True),
]


@pytest.mark.parametrize(("kernel", "dtype", "causal"), FAKE)
@pytest.mark.parametrize(("rows", "columns"), [(37, 37), (64, 64)])
def test_cuda_operators_take_these_arguments(
    kernel: AttentionKernel, dtype: torch.dtype, causal: bool, rows: int, columns: int
) -> None:
    """Shapes and dtypes by torch's own rules for its operators; no number is computed."""
    with torch.device("meta"):
        q = torch.empty(2, 6, rows, 64, dtype=dtype)
        k = torch.empty(2, 3, columns, 64, dtype=dtype)
        takes_bias = kernel.unfit(KernelQuery("cuda", dtype, 64, has_bias=True)) is None
        biases = [None, torch.empty(2, 1, 1, columns, dtype=dtype)]
        for bias in biases[: 1 + takes_bias]:
            mask = AttentionMask(causal, bias)
            out, lse = kernel.forward(q, k, k, mask, SCALE)
            assert out.shape == q.shape and out.dtype == dtype
            assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
            grads = kernel.backward(out, Attended(q, k, k, out, lse, mask, SCALE))
            assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
            assert all(x.dtype == dtype for x in grads)


class BiasDtypes(TorchDispatchMode):
    """Notes the dtype of the bias that the memory-efficient operators of CUDA are given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, torch.dtype] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As `TorchDispatchMode`."""
        if "efficient_attention" in str(func):
            self.found[str(func)] = args[4 if "backward" in str(func) else 3].dtype
        return func(*args, **(kwargs or {}))


def test_a_float32_bias_of_16_bit_queries_is_cast_for_cuda() -> None:
    """Its operators take none of another dtype than the queries; those for meta tensors do."""
    kernel = AtenEfficientKernel()
    with torch.device("meta"), BiasDtypes() as noted:
        q = torch.empty(1, 2, 5, 64, dtype=torch.bfloat16)
        mask = AttentionMask(bias=torch.empty(1, 1, 5, 5))
        out, lse = kernel.forward(q, q, q, mask, SCALE)
        kernel.backward(out, Attended(q, q, q, out, lse, mask, SCALE))
    assert len(noted.found) == 2 and set(noted.found.values()) == {torch.bfloat16}


def test_the_first_that_fits_is_selected() -> None:
    dtypes = (None, torch.float64, torch.float32, torch.bfloat16)
    for dtype, head_dim, has_bias in itertools.product(dtypes, (None, 7, 64), (False, True)):
        form = KernelQuery("cuda", dtype, head_dim, has_bias)
        fitting = [kernel for kernel in KERNELS.values() if kernel.unfit(form) is None]
        chosen = select_kernel(None, "cuda", dtype=dtype, head_dim=head_dim, has_bias=has_bias)
        assert chosen is fitting[0]
    assert select_kernel(None, "cpu") is KERNELS["cpu_flash"]
    assert select_kernel(None, "cuda", dtype=torch.float64, head_dim=64) is KERNELS["plain"]
    masked = select_kernel(None, "cuda", dtype=torch.bfloat16, head_dim=64, has_bias=True)
    assert masked is KERNELS["efficient"]
