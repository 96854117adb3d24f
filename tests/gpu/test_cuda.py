"""On one CUDA device: the kernels, and rows that move over NCCL in a world of one.

Run with `pytest -m gpu tests/gpu`; without a device everything here is skipped.
"""

import pytest
import torch
from torch import Tensor

from bascule.attention import AttentionMask, PackedSequences, attend_packed
from bascule.attention.kernels.protocol import Attended
from bascule.attention.kernels.registry import KERNELS
from bascule.parallel import SequenceParallel
from tests.helpers.cases import COST
from tests.helpers.device_runs import kernel_or_skip
from tests.helpers.oracle import packed_attention
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="NO CUDA DEVICE: kernels and NCCL path NOT TESTED"
    ),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]
SEQ_LENS = (300, 1, 77, 0, 1024)


def inputs(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(SEQ_LENS), heads, head_dim, generator=generator).to("cuda", dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def relative_error(got: Tensor, want: Tensor) -> float:
    want = want.detach().double()
    return ((got.detach().double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("name", ["plain", "aten_flash", "flash_attn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 64), (6, 2, 128)])
def test_kernels_in_half_precision(
    name: str, dtype: torch.dtype, causal: bool, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    kernel = kernel_or_skip(name, dtype, head_dim, is_packed=True)
    leaves = inputs(dtype, num_heads, num_kv_heads, head_dim)
    exact = tuple(x.detach().double().cpu().requires_grad_() for x in leaves)
    seqs = PackedSequences.build(SEQ_LENS, torch.device("cuda"))
    want, want_lse = packed_attention(
        exact[0], exact[1], exact[2], SEQ_LENS, causal=causal, scale=0.1
    )
    out = attend_packed(*leaves, seqs, kernel=name, causal=causal, scale=0.1)
    assert out.dtype == dtype and out.shape == want.shape
    assert relative_error(out.cpu(), want) < 1e-2
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    grads = torch.autograd.grad((out.double() * weights.cuda()).sum(), leaves)
    wanted = torch.autograd.grad((want * weights).sum(), exact)
    for grad, ref in zip(grads, wanted, strict=True):
        assert grad.dtype == dtype
        assert relative_error(grad.cpu(), ref) < 2e-2
    mask = AttentionMask(causal=causal, packed=seqs)
    q, k, v = (x.detach().transpose(0, 1)[None] for x in leaves)
    lse = kernel.forward(q, k, v, mask, 0.1)[1][0].T
    assert lse.shape == want_lse.shape and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double().cpu(), want_lse.detach(), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["plain", "aten_flash", "flash_attn"])
def test_keys_of_another_rank(name: str) -> None:
    """Of a sequence there may be queries or keys alone: 0, LSE -inf, and no gradient."""
    kernel = kernel_or_skip(name, torch.bfloat16, 64, is_packed=True)
    q_lens, k_lens, cuda = (3, 0, 130, 70), (4, 60, 0, 1), torch.device("cuda")
    mask = AttentionMask(packed=PackedSequences.build(q_lens, cuda, k_lens))
    q, grad = torch.randn(2, 1, 4, sum(q_lens), 64, device="cuda", dtype=torch.bfloat16).unbind()
    k, v = torch.randn(2, 1, 4, sum(k_lens), 64, device="cuda", dtype=torch.bfloat16).unbind()
    plain = KERNELS["plain"]
    wide_q, wide_k, wide_v = (x.double() for x in (q, k, v))
    want, want_lse = plain.forward(wide_q, wide_k, wide_v, mask, 0.1)
    out, lse = kernel.forward(q, k, v, mask, 0.1)
    assert torch.equal(lse.isneginf(), want_lse.isneginf())
    assert relative_error(out, want) < 1e-2
    wanted = plain.backward(
        grad.double(), Attended(wide_q, wide_k, wide_v, want, want_lse, mask, 0.1)
    )
    found = kernel.backward(grad, Attended(q, k, v, want.to(q.dtype), want_lse.float(), mask, 0.1))
    for part, ref in zip(found, wanted, strict=True):
        assert part.isfinite().all()
        assert relative_error(part, ref) < 2e-2


@pytest.mark.parametrize("name", ["plain", "aten_flash", "flash_attn"])
def test_idle_rank(name: str) -> None:
    kernel_or_skip(name, torch.bfloat16, 64, is_packed=True)
    q, kv = (
        torch.zeros(0, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2)
    )
    seqs = PackedSequences.build([0], torch.device("cuda"))
    out = attend_packed(q, kv, kv, seqs, kernel=name)
    assert out.shape == q.shape
    out.sum().backward()


def move_over_nccl() -> None:
    torch.cuda.set_device(0)
    parallel = SequenceParallel(None, "g1n1", COST, timeout_s=60.0)
    assert parallel.device.type == "cuda"
    step = parallel.plan([4, 0, 3])
    generator = torch.Generator(device="cuda").manual_seed(0)
    bits = torch.randint(0, 256, (7, 16), generator=generator, device="cuda", dtype=torch.uint8)
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex64)
    tensors = {str(dtype): bits.clone().view(dtype) for dtype in dtypes}
    tensors["bool"] = bits > 100
    moved = step.route(**tensors)
    for name, x in tensors.items():
        back = step.restore(moved[name])
        assert back.dtype == x.dtype
        assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))
    vec = torch.randn(3, 5, device="cuda", requires_grad=True)
    assert torch.equal(step.gather_samples(vec), vec)


def test_moving_over_nccl_is_bit_exact() -> None:
    run_ranks(move_over_nccl, 1, backend="nccl")
