"""On one CUDA device: the kernels for block-sparse attention, against dense softmax in float64.

Run with `pytest -m gpu tests/gpu`; without a device everything here is skipped. For reads and
writes out of bounds, behind `compute-sanitizer --target-processes all`:
`pytest -m gpu tests/gpu/test_sparse.py -k triton`.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bascule.attention.kernels.registry import select_kernel
from tests.helpers.device_runs import kernel_or_skip
from tests.helpers.sparse_blocks import (
    NAMES,
    attend,
    attend_in_halves,
    make_case,
    random_case,
    reference,
    relative,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="NO CUDA DEVICE: block-sparse kernels NOT TESTED"
    ),
]
TOLERANCE = {
    ("triton", torch.float32): 1e-5,
    ("triton", torch.float16): 1e-2,
    ("triton", torch.bfloat16): 4e-2,
}


@pytest.mark.parametrize(("name", "dtype"), TOLERANCE)
@pytest.mark.parametrize("case_name", NAMES)
@pytest.mark.parametrize(("block", "dim"), [(64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("call", [attend, attend_in_halves])
def test_out_lse_and_gradients(
    name: str,
    dtype: torch.dtype,
    case_name: str,
    block: int,
    dim: int,
    call: Callable[..., list[Tensor]],
) -> None:
    if call is attend_in_halves and case_name == "single block":
        pytest.skip("one block has no halves")
    kernel = kernel_or_skip(name, dtype, dim, block=block)
    case = make_case(case_name, block)
    tensors = case.inputs(dtype, dim)
    want, want_lse, wanted, grad = reference(case, tensors)
    out, lse, *grads = call(kernel, case, [x.cuda() for x in tensors], grad.cuda())
    is_seen = ~want_lse.isneginf()
    assert torch.equal(~lse.isneginf().cpu(), is_seen)
    torch.testing.assert_close(lse.double().cpu()[is_seen], want_lse[is_seen], rtol=1e-2, atol=2e-2)
    errors = [relative(a, b) for a, b in zip((out, *grads), (want, *wanted), strict=True)]
    assert all(error < TOLERANCE[name, dtype] for error in errors), errors


@pytest.mark.parametrize(("block", "dim"), [(16, 16), (40, 32), (200, 64), (512, 128)])
def test_triton_takes_blocks_of_any_length(block: int, dim: int) -> None:
    kernel = select_kernel("triton", "cuda", dtype=torch.float16, head_dim=dim, block=block)
    case = random_case(7, 5, 6, block, 0.6)
    tensors = case.inputs(torch.float16, dim)
    want, _, wanted, grad = reference(case, tensors)
    out, _, *grads = attend(kernel, case, [x.cuda() for x in tensors], grad.cuda())
    errors = [relative(a, b) for a, b in zip((out, *grads), (want, *wanted), strict=True)]
    assert all(error < 1e-2 for error in errors), errors


def test_triton_is_the_first_choice() -> None:
    kernel = select_kernel(None, "cuda", dtype=torch.bfloat16, head_dim=64, block=128)
    assert type(kernel).__name__ == "TritonKernel"
