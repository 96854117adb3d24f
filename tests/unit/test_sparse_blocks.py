"""Block-sparse attention: its kernels against dense masked attention."""

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from bascule.attention import usp
from bascule.attention.call import AttentionCall, Tile
from bascule.attention.kernels.flex import SPARSE_BLOCK, flex
from bascule.attention.kernels.protocol import Attended, KernelQuery
from bascule.attention.kernels.registry import KERNELS, select_kernel
from bascule.attention.kernels.skipping import CpuLoopKernel
from bascule.attention.mask import AttentionMask, BlockRows
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
    ("dtype", "tolerance"),
    [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)],
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


def test_a_tile_of_a_ring_may_have_blocks() -> None:
    case = make_case("empty rows", 8)
    q, k, v = (x.requires_grad_() for x in case.inputs(torch.float64))
    want, _, wanted, grad = reference(case, [q, k, v])
    everything = slice(None)
    tiles = [[Tile(everything, everything, AttentionMask(blocks=case.rows))]]
    call = AttentionCall(CpuLoopKernel(), SCALE, lambda _: tiles, [k.shape[2]])
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (q, k, v))
    out = usp.attend(q_THD, k_THD, v_THD, call).transpose(0, 1)[None]
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-12)
    found = torch.autograd.grad(out, (q, k, v), grad)
    torch.testing.assert_close(list(found), wanted, rtol=1e-10, atol=1e-12)


def table(counts: Tensor, indices: Tensor, num_columns: int) -> Tensor:
    """Bool (rows, columns) of ordered indices."""
    seen = torch.zeros(counts.shape[2], num_columns, dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        seen[row, indices[0, 0, row, :count].long()] = True
    return seen


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", NAMES)
def test_flex_attends_to_padded_blocks(name: str) -> None:
    """Its block mask is decoded here, both ways: without compiling, flex reads only `mask_mod`."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case = make_case(name, SPARSE_BLOCK)
    num_q, num_k = case.mask.shape

    def eager(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, **options: Any) -> Any:
        partial = table(block_mask.kv_num_blocks, block_mask.kv_indices, num_k)
        full = table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, num_k)
        by_key = table(block_mask.q_num_blocks, block_mask.q_indices, num_q)
        full_by_key = table(block_mask.full_q_num_blocks, block_mask.full_q_indices, num_q)
        assert torch.equal(by_key.T, partial) and torch.equal(full_by_key.T, full)
        assert not (partial & full).any()

        def seen(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            at = row // SPARSE_BLOCK, column // SPARSE_BLOCK
            return full[at] | (partial[at] & block_mask.mask_mod(b, h, row, column))

        sizes = q.shape[2], k.shape[2]
        assert sizes == (num_q * SPARSE_BLOCK, num_k * SPARSE_BLOCK) == block_mask.seq_lengths
        whole = create_block_mask(seen, 1, 1, *sizes, device="cpu")
        return flex_attention(q, k, v, block_mask=whole, **options)

    q, k, v = case.inputs(torch.float32)
    want, want_lse, _, _ = reference(case, [q, k, v])
    out, lse = flex(eager, q, k, v, AttentionMask(blocks=case.rows), SCALE)
    torch.testing.assert_close((out.double(), lse.double()), (want, want_lse), rtol=1e-5, atol=1e-5)


def test_rows_by_key_and_runs() -> None:
    case = make_case("grouped heads", 8)
    rows = case.rows
    turned = Case(case.k_lens, case.q_lens, case.mask.T)
    for name in ("q_bounds", "k_bounds", "row_bounds", "columns"):
        np.testing.assert_array_equal(getattr(rows.transposed, name), getattr(turned.rows, name))
    assert rows.block == max(case.q_lens.max(), case.k_lens.max())
    same = make_case("clustered", 4).rows
    assert [(at.start, at.stop, columns.tolist()) for at, columns in same.runs] == [
        *((0, 8, [0, 1]), (8, 12, [0, 1, 2]), (12, 20, [3, 4]), (20, 24, [3, 4, 5])),
        *((24, 32, [6, 7]), (32, 36, [6, 7, 8])),
    ]


SPARSE = ("cpu_loop", "triton", "flex")


def test_which_kernels_take_blocks() -> None:
    for name, kernel in KERNELS.items():
        forms = [
            KernelQuery(device, dtype, 64, block=128)
            for device in ("cpu", "cuda")
            for dtype in (torch.bfloat16, torch.float32)
        ]
        fits = [kernel.unfit(form) is None for form in forms]
        assert any(fits) == (name in SPARSE) or name == "triton", name
    for name in ("cpu_loop", "triton"):
        kernel = KERNELS[name]
        device = "cpu" if name == "cpu_loop" else "cuda"
        form = KernelQuery(device, torch.bfloat16, 64)
        assert kernel.unfit(form) == "computes the scores of given blocks, not all"
    assert select_kernel(None, "cpu", block=128) is KERNELS["cpu_loop"]


def test_what_triton_kernels_take_where_there_is_triton() -> None:
    kernel = KERNELS["triton"]

    def fits(device: str, dtype: torch.dtype, dim: int, block: int | None) -> bool:
        return kernel.unfit(KernelQuery(device, dtype, dim, False, block, False)) is None

    with mock.patch("bascule.attention.kernels.skipping.no_module", lambda _: None):
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
        assert all(fits("cuda", dtype, dim, 1) for dtype in dtypes for dim in (16, 32, 64, 128))
        assert not any(fits("cuda", torch.float32, dim, 1) for dim in (1, 15, 17, 33, 65, 96, 256))
        assert not fits("cpu", torch.float32, 64, 1) and not fits("cuda", torch.float64, 64, 1)
        assert not fits("cuda", torch.float32, 64, None)
    with mock.patch("bascule.attention.kernels.skipping.no_module", lambda _: "none"):
        assert not fits("cuda", torch.float32, 64, 1)
