"""Every attention kernel that runs here, against dense softmax attention one sequence at a time."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from bascule.attention.kernels import packed_kernels
from bascule.attention.kernels.packed_kernels import KERNELS, PackedSequences, select_kernel
from bascule.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
ON_CPU = ["reference", "cpu_flash", "sdpa"]
WITH_LSE = ["reference", "cpu_flash"]
CPU = torch.device("cpu")
SEQ_LENS = (5, 1, 33, 2)


def dense(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    seq_lens: Sequence[int],
    *,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax written out in float64, a sequence and a head at a time."""
    q, k, v = (x.double() for x in (q_THD, k_TKD, v_TKD))
    group = q.shape[1] // k.shape[1]
    factor = q.shape[2] ** -0.5 if scale is None else scale
    outs, log_sums = [0 * (q[:0] + k[:0].sum() + v[:0].sum())], [q[:0, :, 0]]
    for rows in torch.arange(sum(seq_lens)).split([length for length in seq_lens if length]):
        heads, sums = list[Tensor](), list[Tensor]()
        for head in range(q.shape[1]):
            scores = factor * q[rows, head] @ k[rows, head // group].T
            if causal:
                future = torch.ones_like(scores).triu(1) > 0
                scores = scores.masked_fill(future, -math.inf)
            top = scores.amax(1, keepdim=True)
            sums.append((scores - top).exp().sum(1).log() + top[:, 0])
            heads.append(scores.softmax(1) @ v[rows, head // group])
        outs.append(torch.stack(heads, dim=1))
        log_sums.append(torch.stack(sums, dim=1))
    return torch.cat(outs), torch.cat(log_sums)


def inputs(
    seq_lens: Sequence[int],
    num_heads: int = 4,
    num_kv_heads: int = 4,
    dtype: torch.dtype = torch.float64,
    head_dim: int = 8,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(seq_lens), heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), v.to(dtype).requires_grad_()


def gradients(out: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of a sum with weights that tell the elements apart."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    return torch.autograd.grad((out.double() * weights).sum(), leaves)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (3, 1), (1, 1)])
def test_equals_dense_attention(
    name: str, num_heads: int, num_kv_heads: int, causal: bool, scale: float | None
) -> None:
    leaves = inputs(SEQ_LENS, num_heads, num_kv_heads)
    seqs = PackedSequences.build(SEQ_LENS, CPU)
    if causal and name == "sdpa":
        with pytest.raises(ConfigError, match=r"'sdpa' cannot attend causally .* use 'cpu_flash'"):
            KERNELS[name](*leaves, seqs, causal=True, scale=scale)
        return
    out, lse = KERNELS[name](*leaves, seqs, causal=causal, scale=scale)
    want, want_lse = dense(*leaves, SEQ_LENS, causal=causal, scale=scale)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-13)
    for grad, ref in zip(gradients(out, leaves), gradients(want, leaves), strict=True):
        torch.testing.assert_close(grad, ref, rtol=1e-11, atol=1e-12)
    assert (lse is not None) == (name in WITH_LSE)
    if lse is not None:
        assert not lse.requires_grad
        torch.testing.assert_close(lse, want_lse.detach(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", KERNELS)
def test_no_tokens(name: str) -> None:
    """An idle rank's kernel runs nothing, hence on any machine, and gives gradients of no rows."""
    leaves = inputs((), 4, 2)
    seqs = PackedSequences.build((0, 0), CPU)
    out, lse = KERNELS[name](*leaves, seqs, causal=False, scale=None)
    assert out.shape == (0, 4, 8)
    assert [grad.shape[0] for grad in torch.autograd.grad(out.sum(), leaves)] == [0, 0, 0]
    if lse is not None:
        assert lse.shape == (0, 4) and lse.dtype == torch.float64 and not lse.requires_grad


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("seq_lens", [(), (0,), (0, 0), (0, 3, 0, 0, 4, 0), (1,), (7,)])
def test_empty_sequences(name: str, seq_lens: tuple[int, ...]) -> None:
    leaves = inputs(seq_lens, 4, 2)
    out, lse = KERNELS[name](
        *leaves, PackedSequences.build(seq_lens, CPU), causal=False, scale=None
    )
    want, want_lse = dense(*leaves, seq_lens)
    torch.testing.assert_close(out, want)
    if lse is not None:
        torch.testing.assert_close(lse, want_lse.detach())
    for grad, ref in zip(gradients(out, leaves), gradients(want, leaves), strict=True):
        torch.testing.assert_close(grad, ref)


@pytest.mark.parametrize("name", ON_CPU)
def test_strided_inputs(name: str) -> None:
    seqs = PackedSequences.build(SEQ_LENS, CPU)
    fused = torch.randn(sum(SEQ_LENS), 4 + 2 + 2, 8, dtype=torch.float64)
    heads_first = fused.transpose(0, 1).contiguous().transpose(0, 1)
    values_apart = fused.transpose(1, 2).contiguous().transpose(1, 2)
    for leaf in (x.requires_grad_() for x in (fused, heads_first, values_apart)):
        q, k, v = leaf.split([4, 2, 2], dim=1)
        out, _ = KERNELS[name](q, k, v, seqs, causal=False, scale=None)
        want, _ = dense(q, k, v, SEQ_LENS)
        torch.testing.assert_close(out, want)
        grad = torch.randn(8, *out.shape[:2], dtype=out.dtype).permute(1, 2, 0)
        found, wanted = (torch.autograd.grad(x, leaf, grad) for x in (out, want))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", ON_CPU)
def test_gradient_that_is_expanded(name: str) -> None:
    """`out.sum().backward()` hands the kernel a gradient without strides."""
    leaves = inputs(SEQ_LENS, 4, 2)
    out, _ = KERNELS[name](*leaves, PackedSequences.build(SEQ_LENS, CPU), causal=False, scale=None)
    want, _ = dense(*leaves, SEQ_LENS)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(want.sum(), leaves)
    )


ERRORS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("dtype", ERRORS)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    leaves = inputs(SEQ_LENS, 4, 2, dtype)
    out, lse = KERNELS[name](
        *leaves, PackedSequences.build(SEQ_LENS, CPU), causal=False, scale=None
    )
    want, want_lse = dense(*leaves, SEQ_LENS)
    assert out.dtype == dtype
    pairs = [(out, want), *zip(gradients(out, leaves), gradients(want, leaves), strict=True)]
    for got, ref in pairs:
        assert got.dtype == dtype
        error = (
            got.detach().double() - ref.detach().double()
        ).norm() / ref.detach().double().norm()
        assert error.item() < ERRORS[dtype]
    if lse is not None:
        assert lse.dtype == torch.float32
        # In half precision the scores may be rounded before the sum.
        torch.testing.assert_close(lse, want_lse.float().detach(), rtol=0, atol=3 * ERRORS[dtype])


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (x.detach() * 100 for x in inputs(SEQ_LENS, dtype=torch.float32))
    want, want_lse = dense(q, k, v, SEQ_LENS)
    for name in ON_CPU:
        out, lse = KERNELS[name](
            q, k, v, PackedSequences.build(SEQ_LENS, CPU), causal=False, scale=None
        )
        torch.testing.assert_close(out.double(), want, rtol=1e-3, atol=1e-2)
        if lse is not None:
            torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-2)


def test_packed_sequences() -> None:
    seqs = PackedSequences.build([0, 3, 0, 5], CPU)
    assert seqs.seq_lens == (3, 5) and seqs.max_len == 5
    assert seqs.cu_seqlens.tolist() == [0, 3, 8] and seqs.cu_seqlens.dtype == torch.int32
    none = PackedSequences.build([], CPU)
    assert none.cu_seqlens.tolist() == [0] and none.max_len == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_automatic_choice_on_cpus(dtype: torch.dtype) -> None:
    assert select_kernel(None, "cpu", dtype) is packed_kernels.cpu_flash
    for name in ON_CPU:
        assert select_kernel(name, "cpu", dtype) is KERNELS[name]


def test_the_automatic_choice_elsewhere() -> None:
    assert select_kernel(None, "cuda", torch.float32) is packed_kernels.sdpa
    assert select_kernel(None, "xpu", torch.bfloat16) is packed_kernels.sdpa


@pytest.mark.parametrize(
    ("name", "device", "dtype", "reason"),
    [
        ("flash4", "cpu", torch.float32, "kernel 'flash4': choose one of reference, cpu_flash,"),
        (
            "varlen",
            "cpu",
            torch.bfloat16,
            "'varlen' runs on CUDA devices, not on cpu: use 'cpu_flash'",
        ),
        ("flash_attn", "cpu", torch.bfloat16, "runs on CUDA devices, not on cpu: use 'cpu_flash'"),
        ("cpu_flash", "cuda", torch.float32, "runs on CPUs, not on cuda: use 'sdpa'"),
        (
            "varlen",
            "cuda",
            torch.float32,
            "takes bfloat16 or float16, not torch.float32: use 'sdpa'",
        ),
        ("flash_attn", "cuda", torch.float64, "takes bfloat16 or float16, not torch.float64"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused(
    name: str, device: str, dtype: torch.dtype, reason: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        select_kernel(name, device, dtype)
    assert reason in str(refusal.value)


def test_a_kernel_whose_module_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    select_kernel.cache_clear()  # pyright: ignore[reportFunctionMemberAccess]
    monkeypatch.setattr(packed_kernels.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="needs the module flash_attn, which is not installed"):
        select_kernel("flash_attn", "cuda", torch.bfloat16)
    assert select_kernel(None, "cuda", torch.bfloat16) is packed_kernels.sdpa
    select_kernel.cache_clear()  # pyright: ignore[reportFunctionMemberAccess]
