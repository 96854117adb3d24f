"""Every attention kernel that runs here, against dense softmax attention one sequence at a time."""

import copy
import gc
import itertools
import math
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bascule.attention.api import AttentionMesh, AttentionOptions, attention
from bascule.attention.kernels import protocol, registry
from bascule.attention.kernels.cuda import AtenEfficientKernel, AtenFlashKernel
from bascule.attention.kernels.protocol import Attended, AttentionKernel, KernelQuery
from bascule.attention.kernels.registry import KERNELS, CpuLoopKernel, FunctionKernel, select_kernel
from bascule.attention.mask import AttentionMask, BlockRows, PackedSequences
from bascule.attention.packed import attend_packed
from bascule.attention.ring import Merged
from tests.helpers.oracle import dense_attention, packed_attention
from tests.helpers.sparse_blocks import (
    NAMES,
    SCALE,
    Case,
    attend,
    attend_in_halves,
    bounds,
    make_case,
    random_case,
    reference,
    relative,
)

ON_CPU = ["plain", "cpu_flash"]
CPU = torch.device("cpu")
SEQ_LENS = (5, 1, 33, 2)
Shape = tuple[int, ...]
Three = tuple[Tensor, Tensor, Tensor]


def drawn(of_queries: Shape, of_keys: Shape, dtype: torch.dtype = torch.float64) -> Three:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in (of_queries, of_keys, of_keys)
    )
    return q, k, v


def inputs(
    seq_lens: Sequence[int], num_heads: int = 4, num_kv_heads: int = 4, dtype: Any = torch.float64
) -> Three:
    return drawn((sum(seq_lens), num_heads, 8), (sum(seq_lens), num_kv_heads, 8), dtype)


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
@pytest.mark.parametrize("scale", [None, 0.0, -0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("seq_lens", [SEQ_LENS, (), (0, 0), (0, 3, 0, 0, 4, 0), (1,)], ids=str)
def test_equals_dense_attention(
    name: str, seq_lens: Any, num_heads: int, num_kv_heads: int, causal: bool, scale: float | None
) -> None:
    leaves = inputs(seq_lens, num_heads, num_kv_heads)
    seqs = PackedSequences.build(seq_lens, CPU)
    out = attend_packed(*leaves, seqs, kernel=name, causal=causal, scale=scale)
    want, _ = packed_attention(*leaves, seq_lens, causal=causal, scale=scale)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-13)
    pairs = gradients(out, leaves), gradients(want, leaves)
    torch.testing.assert_close(*pairs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ON_CPU)
def test_keys_of_another_rank(name: str) -> None:
    """Of a sequence there may be queries or keys alone: a query without keys has LSE -inf."""
    q_lens, k_lens = (3, 0, 5, 2, 0), (4, 6, 0, 1, 0)
    (q, _, _), (_, k, v) = inputs(q_lens, 4, 2), inputs(k_lens, 4, 2)
    mask = AttentionMask(packed=PackedSequences.build(q_lens, CPU, k_lens))
    own_q, own_k, own_v = (x.detach().transpose(0, 1)[None] for x in (q, k, v))
    out, lse = KERNELS[name].forward(own_q, own_k, own_v, mask, 0.5)
    grad = torch.randn(out.shape, dtype=out.dtype)
    found = KERNELS[name].backward(grad, Attended(own_q, own_k, own_v, out, lse, mask, 0.5))
    want, want_lse = packed_attention(q, k, v, q_lens, key_lens=k_lens, scale=0.5)
    torch.testing.assert_close((out[0].transpose(0, 1), lse[0].T), (want, want_lse))
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
        assert relative(got, ref.detach().double()) < ERRORS[dtype]
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


# Tiles of dense attention, and the signatures of kernels for CUDA


def dense_inputs(rows: int = 5, columns: int = 7) -> Three:
    return drawn((2, 4, rows, 8), (2, 2, columns, 8))


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
    q, k, v = dense_inputs(rows=7) if causal else dense_inputs()
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 2, 13])
def test_scores_of_nan_are_not_those_of_hidden_keys(dtype: torch.dtype, columns: int) -> None:
    """Torch's operator takes few keys of nan for none, and the LSE of no key for 0."""
    q, k, v = (x.detach().to(dtype) for x in dense_inputs(rows=columns, columns=columns))
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
            want = protocol.without_empty_rows(out, lse, mask.bias)
            tolerance = 1e-5 if dtype != torch.bfloat16 else 2e-2
            close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
            torch.testing.assert_close([x.double() for x in found], [*want], **close)


@pytest.mark.parametrize("kind", BIASES)
def test_gradients_by_recomputation_are_those_of_the_whole(kind: str) -> None:
    q, k, v = dense_inputs()
    bias = make_bias(kind, 5, 7)
    want, lse = dense_attention(q, k, v, bias, scale=SCALE)
    grad = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).view(want.shape)
    wanted = torch.autograd.grad(want, (q, k, v), grad)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for at in (slice(0, 3), slice(3, 7)):
        part = None if bias is None else bias[..., at]
        attend = partial(dense_attention, mask=part, scale=SCALE)
        whole = want.detach(), lse.detach()
        part_kv = k[:, :, at], v[:, :, at]
        more = registry.gradients_by_recomputation(attend, grad, q, *part_kv, *whole)
        dq += more[0]
        dk[:, :, at] += more[1]
        dv[:, :, at] += more[2]
    torch.testing.assert_close((dq, dk, dv), wanted, rtol=1e-10, atol=1e-12)


FAKE: list[tuple[AttentionKernel, torch.dtype, bool]] = [
    (AtenFlashKernel(), torch.bfloat16, False),
    (AtenFlashKernel(), torch.float16, True),
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


# Sums of many parts


@pytest.mark.parametrize("rows", [slice(1, 3), slice(None)])
def test_parts_for_some_queries_or_all_are_merged_wide(rows: slice) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.zeros(1, 1, 3, 64, dtype=torch.bfloat16)
    merged, shape = Merged(q), q[:, :, rows].shape
    parts = [torch.randn(shape, generator=generator).bfloat16() for _ in range(16)]
    for part in parts:
        merged.add(rows, part, torch.zeros(shape[:3]))
    exact = torch.stack(parts).double().mean(0)
    assert relative(merged.result()[0][:, :, rows], exact) < 0.0022


def test_rows_in_another_order_are_merged_where_they_belong() -> None:
    q, rows = torch.zeros(1, 1, 3, 2), torch.tensor([2, 0, 1])
    part, lse = torch.arange(6.0).view(1, 1, 3, 2), torch.zeros(1, 1, 3)
    merged = Merged(q)
    for _ in range(2):
        merged.add(rows, part, lse)
    assert torch.equal(merged.result()[0][:, :, rows], part)


# Block-sparse kernels against dense masked attention


def assert_exact(case: Case, run: Any = attend, change: Any = lambda x: x) -> None:
    """Run the loop kernel in some way on tensors that may lie otherwise: output, LSE, gradients."""
    tensors = [change(x) for x in case.inputs(torch.float64)]
    want, want_lse, wanted, grad = reference(case, tensors)
    out, lse, *found = run(CpuLoopKernel(), case, tensors, change(grad))
    torch.testing.assert_close((out, lse), (want, want_lse), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_exact_in_float64(name: str) -> None:
    assert_exact(make_case(name, 8))


@pytest.mark.parametrize("seed", range(20))
def test_random_masks_and_lengths(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_q, num_k, block = (int(rng.integers(1, top)) for top in (12, 12, 40))
    assert_exact(random_case(seed, num_q, num_k, block, float(rng.random())))


@pytest.mark.parametrize("name", NAMES[:5] + NAMES[6:])
def test_two_halves_of_the_keys_are_the_whole(name: str) -> None:
    """As in a ring of two: each half has its own rows, and backward has the LSE of all."""
    assert_exact(make_case(name, 8), attend_in_halves)


def test_values_of_a_head_that_are_not_next_to_each_other() -> None:
    """Every second value of a wider head, and heads that lie by value, not by token."""
    case = make_case("random", 8)
    for strided in (
        lambda x: torch.stack((x, x + 9.0), dim=-1).flatten(-2)[..., ::2],
        lambda x: x.mT.contiguous().mT,
    ):
        assert strided(case.inputs(torch.float64)[0]).stride(-1) > 1
        assert_exact(case, change=strided)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)]
)
@pytest.mark.parametrize("name", ["random", "clustered", "short blocks in the middle"])
def test_narrow_dtypes(name: str, dtype: torch.dtype, tolerance: float) -> None:
    case = make_case(name, 32)
    tensors = case.inputs(dtype)
    want, want_lse, wanted, grad = reference(case, tensors)
    out, lse, *found = attend(CpuLoopKernel(), case, tensors, grad)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert [x.dtype for x in found] == [dtype] * 3
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-2, atol=1e-2)
    errors = [relative(out, want), *map(relative, found, wanted)]
    assert all(error < tolerance for error in errors), errors


def test_blocks_that_are_not_seen_are_not_read() -> None:
    """Keys of one row's blocks only; all others are nan."""
    case, kernel = make_case("one row sees all", 8), CpuLoopKernel()
    mask = case.mask.copy()
    mask[2, ::2] = False
    case = Case(case.q_lens, case.k_lens, mask)
    q, k, v = case.inputs(torch.float64)
    hidden = torch.from_numpy(np.repeat(~mask[2], case.k_lens))
    k[:, :, hidden] = v[:, :, hidden] = math.nan
    seen = AttentionMask(blocks=case.rows)
    out, lse = kernel.forward(q, k, v, seen, SCALE)
    grads = kernel.backward(torch.ones_like(q), Attended(q, k, v, out, lse, seen, SCALE))
    assert all(bool(x.isfinite().all()) for x in (out, *grads))
    assert not grads[1][:, :, hidden].any() and not grads[2][:, :, hidden].any()
    assert grads[1][:, :, ~hidden].any()


@pytest.mark.parametrize("which", range(3))
def test_nan_goes_where_it_is_seen(which: int) -> None:
    """A token of queries, keys or values that is nan, in the output of CpuLoopKernel."""
    case = make_case("random", 8)
    q, k, v = tensors = case.inputs(torch.float64)
    tensors[which][0, 0, 5] = math.nan
    out, _ = CpuLoopKernel().forward(q, k, v, AttentionMask(blocks=case.rows), SCALE)
    sees = case.bias[0, 0] == 0
    hit = sees[:, 5] if which else sees.any(dim=1) & (torch.arange(sees.shape[0]) == 5)
    assert hit.any() and not hit.all()
    assert torch.equal(out[0, 0].isnan().all(dim=1), hit)
    assert torch.equal(out[0, 0].isnan().any(dim=1), hit)


@pytest.mark.parametrize(("num_q", "num_k"), [(0, 0), (0, 3), (3, 0)])
def test_no_queries_or_no_keys(num_q: int, num_k: int) -> None:
    case = Case(np.full(num_q, 4), np.full(num_k, 4), np.zeros((num_q, num_k), dtype=np.bool_))
    rows = BlockRows(bounds(case.q_lens), bounds(case.k_lens), bounds([0] * num_q), bounds([])[1:])
    q, k, v = case.inputs(torch.float64)
    seen, kernel = AttentionMask(blocks=rows), CpuLoopKernel()
    out, lse = kernel.forward(q, k, v, seen, SCALE)
    assert out.shape == q.shape and not out.any() and lse.isneginf().all()
    grads = kernel.backward(torch.ones_like(q), Attended(q, k, v, out, lse, seen, SCALE))
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
    assert not any(bool(x.any()) for x in grads)


def test_a_function_goes_with_its_model() -> None:
    model = torch.nn.Linear(2, 2)
    gone = weakref.ref(model)
    kernel = FunctionKernel("own", lambda q, k, v, model=model, **_: model(q))
    assert select_kernel(kernel, "cpu", dtype=torch.float32, head_dim=2) is kernel
    x, mesh = torch.randn(1, 1, 3, 2), AttentionMesh(None, None, None)
    for _ in range(2):
        attention(x, x, x, mesh, options=AttentionOptions(kernel=kernel))
    assert copy.deepcopy(AttentionOptions(kernel=kernel)).kernel is kernel
    del kernel, model
    gc.collect()
    assert gone() is None
