"""Every attention kernel that runs here, against dense softmax attention one sequence at a time."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from bascule.attention.kernels import protocol
from bascule.attention.kernels.protocol import Attended
from bascule.attention.kernels.registry import KERNELS, select_kernel
from bascule.attention.mask import AttentionMask, PackedSequences
from bascule.attention.packed import attend_packed
from bascule.errors import ConfigError
from tests.helpers.oracle import packed_attention

ON_CPU = ["plain", "cpu_flash"]
ON_CUDA = ["flash_attn", "aten_flash", "plain"]
CPU = torch.device("cpu")
SEQ_LENS = (5, 1, 33, 2)


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


def lse_of(name: str, tensors: Sequence[Tensor], seq_lens: Sequence[int], scale: float) -> Tensor:
    """(T, H)."""
    mask = AttentionMask(packed=PackedSequences.build(seq_lens, CPU))
    q, k, v = (x.detach().transpose(0, 1)[None] for x in tensors)
    return KERNELS[name].forward(q, k, v, mask, scale)[1][0].T


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("scale", [None, 0.7, 0.0, -0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (3, 1), (1, 1)])
def test_equals_dense_attention(
    name: str, num_heads: int, num_kv_heads: int, causal: bool, scale: float | None
) -> None:
    leaves = inputs(SEQ_LENS, num_heads, num_kv_heads)
    seqs = PackedSequences.build(SEQ_LENS, CPU)
    out = attend_packed(*leaves, seqs, kernel=name, causal=causal, scale=scale)
    want, _ = packed_attention(*leaves, SEQ_LENS, causal=causal, scale=scale)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-13)
    for grad, ref in zip(gradients(out, leaves), gradients(want, leaves), strict=True):
        torch.testing.assert_close(grad, ref, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", KERNELS)
def test_no_tokens(name: str) -> None:
    """An idle rank's kernel runs nothing, hence on any machine, and gives gradients of no rows."""
    if name not in ON_CPU:
        with pytest.raises(ConfigError):
            attend_packed(*inputs((), 4, 2), PackedSequences.build((), CPU), kernel=name)
        return
    leaves = inputs((), 4, 2)
    out = attend_packed(*leaves, PackedSequences.build((0, 0), CPU), kernel=name)
    assert out.shape == (0, 4, 8)
    assert [grad.shape[0] for grad in torch.autograd.grad(out.sum(), leaves)] == [0, 0, 0]


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("seq_lens", [(), (0,), (0, 0), (0, 3, 0, 0, 4, 0), (1,), (7,)])
def test_empty_sequences(name: str, seq_lens: tuple[int, ...]) -> None:
    leaves = inputs(seq_lens, 4, 2)
    out = attend_packed(*leaves, PackedSequences.build(seq_lens, CPU), kernel=name)
    want, _ = packed_attention(*leaves, seq_lens)
    torch.testing.assert_close(out, want)
    for grad, ref in zip(gradients(out, leaves), gradients(want, leaves), strict=True):
        torch.testing.assert_close(grad, ref)


@pytest.mark.parametrize("name", ON_CPU)
def test_keys_of_another_rank(name: str) -> None:
    """Of a sequence there may be queries or keys alone: a query without keys has LSE -inf."""
    q_lens, k_lens = (3, 0, 5, 2, 0), (4, 6, 0, 1, 0)
    q, _, _ = inputs(q_lens, 4, 2)
    _, k, v = inputs(k_lens, 4, 2)
    mask = AttentionMask(packed=PackedSequences.build(q_lens, CPU, k_lens))
    here_q, here_k, here_v = (x.detach().transpose(0, 1)[None] for x in (q, k, v))
    out, lse = KERNELS[name].forward(here_q, here_k, here_v, mask, 0.5)
    grad = torch.randn(out.shape, dtype=out.dtype)
    found = KERNELS[name].backward(grad, Attended(here_q, here_k, here_v, out, lse, mask, 0.5))
    pairs = zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True)
    outs, sums = list[Tensor](), list[Tensor]()
    for rows, keys, values in pairs:
        scores = 0.5 * torch.einsum("qhd,khd->hqk", rows, keys.repeat_interleave(2, dim=1))
        weights = scores.softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(2, dim=1)))
        sums.append(scores.logsumexp(-1).T)
    want = torch.cat(outs)
    torch.testing.assert_close(out[0].transpose(0, 1), want.detach())
    torch.testing.assert_close(lse[0].T, torch.cat(sums).detach())
    wanted = torch.autograd.grad(want, (q, k, v), grad[0].transpose(0, 1))
    for part, ref in zip(found, wanted, strict=True):
        torch.testing.assert_close(part[0].transpose(0, 1), ref)


@pytest.mark.parametrize("name", ON_CPU)
def test_strided_inputs(name: str) -> None:
    seqs = PackedSequences.build(SEQ_LENS, CPU)
    fused = torch.randn(sum(SEQ_LENS), 4 + 2 + 2, 8, dtype=torch.float64)
    heads_first = fused.transpose(0, 1).contiguous().transpose(0, 1)
    values_apart = fused.transpose(1, 2).contiguous().transpose(1, 2)
    for leaf in (x.requires_grad_() for x in (fused, heads_first, values_apart)):
        q, k, v = leaf.split([4, 2, 2], dim=1)
        out = attend_packed(q, k, v, seqs, kernel=name)
        want, _ = packed_attention(q, k, v, SEQ_LENS)
        torch.testing.assert_close(out, want)
        grad = torch.randn(8, *out.shape[:2], dtype=out.dtype).permute(1, 2, 0)
        found, wanted = (torch.autograd.grad(x, leaf, grad) for x in (out, want))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", ON_CPU)
def test_gradient_that_is_expanded(name: str) -> None:
    """`out.sum().backward()` hands the kernel a gradient without strides."""
    leaves = inputs(SEQ_LENS, 4, 2)
    out = attend_packed(*leaves, PackedSequences.build(SEQ_LENS, CPU), kernel=name)
    want, _ = packed_attention(*leaves, SEQ_LENS)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(want.sum(), leaves)
    )


ERRORS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("dtype", ERRORS)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    leaves = inputs(SEQ_LENS, 4, 2, dtype)
    out = attend_packed(*leaves, PackedSequences.build(SEQ_LENS, CPU), kernel=name)
    want, want_lse = packed_attention(*leaves, SEQ_LENS)
    assert out.dtype == dtype
    pairs = [(out, want), *zip(gradients(out, leaves), gradients(want, leaves), strict=True)]
    for got, ref in pairs:
        assert got.dtype == dtype
        error = (
            got.detach().double() - ref.detach().double()
        ).norm() / ref.detach().double().norm()
        assert error.item() < ERRORS[dtype]
    lse = lse_of(name, leaves, SEQ_LENS, 8**-0.5)
    assert lse.dtype == torch.float32
    # In half precision the scores may be rounded before the sum.
    torch.testing.assert_close(lse, want_lse.float().detach(), rtol=0, atol=3 * ERRORS[dtype])


@pytest.mark.parametrize("name", ON_CPU)
def test_large_scores_do_not_overflow(name: str) -> None:
    q, k, v = (x.detach() * 100 for x in inputs(SEQ_LENS, dtype=torch.float32))
    want, want_lse = packed_attention(q, k, v, SEQ_LENS)
    out = attend_packed(q, k, v, PackedSequences.build(SEQ_LENS, CPU), kernel=name)
    torch.testing.assert_close(out.double(), want, rtol=1e-3, atol=1e-2)
    lse = lse_of(name, (q, k, v), SEQ_LENS, 8**-0.5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-2)


def test_packed_sequences() -> None:
    seqs = PackedSequences.build([0, 3, 0, 5], CPU)
    assert seqs.seq_lens == (3, 5) and seqs.max_len == 5
    assert seqs.cu_seqlens.tolist() == [0, 3, 8] and seqs.cu_seqlens.dtype == torch.int32
    none = PackedSequences.build([], CPU)
    assert none.cu_seqlens.tolist() == [0] and none.max_len == 0
    pairs = PackedSequences.build([0, 3, 0, 5], CPU, [2, 0, 0, 4])
    assert pairs.cu_seqlens.tolist() == [0, 0, 3, 8] and pairs.max_kv_len == 4
    assert pairs.cu_kv_lens.tolist() == [0, 2, 2, 6] and pairs.num_pairs == 20
    assert (
        pairs.without_keys is not None and pairs.without_keys.tolist() == [True] * 3 + [False] * 5
    )


PACKED = {"head_dim": 64, "is_packed": True}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_automatic_choice_on_cpus(dtype: torch.dtype) -> None:
    assert select_kernel(None, "cpu", dtype=dtype, **PACKED) is KERNELS["cpu_flash"]
    for name in ON_CPU:
        assert select_kernel(name, "cpu", dtype=dtype, **PACKED) is KERNELS[name]


def test_the_automatic_choice_elsewhere() -> None:
    assert select_kernel(None, "cuda", dtype=torch.float32, **PACKED) is KERNELS["plain"]
    assert select_kernel(None, "xpu", dtype=torch.bfloat16, **PACKED) is KERNELS["plain"]
    assert select_kernel(None, "cuda", dtype=torch.bfloat16, **PACKED) is KERNELS["aten_flash"]


def test_a_kernel_whose_module_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    select_kernel.cache_clear()
    monkeypatch.setattr(protocol.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="needs the module flash_attn, which is not installed"):
        select_kernel("flash_attn", "cuda", dtype=torch.bfloat16, **PACKED)
    select_kernel.cache_clear()


def test_queries_that_see_no_key_give_nothing_whatever_an_operator_gave() -> None:
    """By a bias of each head's own, and by one for all of them."""
    out, lse = torch.full((1, 2, 3, 4), 7.0), torch.full((1, 2, 3), 5.0)
    bias = torch.zeros(1, 2, 3, 6)
    bias[0, 1, 2], bias[0, 0, 1, 1:] = -torch.inf, -torch.inf
    for one, heads in ((bias, [1]), (bias[:, 1:], [0, 1])):
        found, found_lse = protocol.without_empty_rows(out, lse, one)
        is_empty = torch.zeros(1, 2, 3, dtype=torch.bool)
        is_empty[0, heads, 2] = True
        assert torch.equal(found, out.masked_fill(is_empty[..., None], 0.0))
        assert torch.equal(found_lse, lse.masked_fill(is_empty, -torch.inf))
    assert protocol.without_empty_rows(out, lse, None)[1] is lse
