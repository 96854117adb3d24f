"""The Triton kernels in Triton's interpreter, against dense masked attention in float64.

Triton reads `TRITON_INTERPRET` when it is imported, and the rest of the tests must not run in the
interpreter: the cases run in a process of their own, which calls this file. In bfloat16 the
interpreter's `tl.dot` is wrong, so that is left to tests/gpu/test_sparse.py.
"""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.sparse_blocks import (
    NAMES,
    Case,
    attend,
    attend_in_halves,
    make_case,
    random_case,
    reference,
    relative,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: its kernels NOT TESTED",
)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
# Shared memory of a thread block on devices of compute capability 8.6 and 8.9, the smallest.
SHARED_BYTES = 99 * 1024
KERNELS = ("_forward", "_query_gradients", "_key_gradients")


@pytest.mark.parametrize(
    "what", [pytest.param("float32", marks=pytest.mark.nightly), "float16", "halves"]
)
def test_in_the_interpreter(what: str) -> None:
    for line in run(what, TRITON_INTERPRET="1"):
        assert line["same_empty"], line
        assert all(error < line["tolerance"] for error in line["errors"]), line
        assert line["lse_error"] < line["tolerance"], line


@pytest.mark.nightly
@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_without_a_device(capability: int) -> None:
    """For A100 and H100, to kernels that fit the shared memory of any device."""
    for line in run(f"compile {capability}"):
        assert 0 < line["shared"] <= SHARED_BYTES, line


def run(what: str, **environment: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "tests.unit.test_triton_sparse", *what.split()],
            env={**os.environ, "TRITON_CACHE_DIR": cache, **environment},
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def compared(
    call: Callable[..., list[Tensor]], case: Case, dtype: torch.dtype, dim: int, apart: float = 0.0
) -> dict[str, Any]:
    """One case, forward and backward, against the reference; queries and keys may be far apart."""
    from bascule.attention.kernels.registry import TritonKernel

    tensors = case.inputs(dtype, dim)
    tensors[0] += apart
    tensors[1] -= apart
    want, want_lse, wanted, grad = reference(case, tensors)
    out, lse, *grads = call(TritonKernel(), case, tensors, grad)
    pairs = zip((out, *grads), (want, *wanted), strict=True)
    return {
        "case": [case.mask.tolist(), case.q_lens.tolist(), case.k_lens.tolist(), str(dtype), dim],
        "tolerance": TOLERANCE[dtype] * (50 if apart else 1),
        "errors": [relative(found, exact) for found, exact in pairs],
        "same_empty": torch.equal(lse.isneginf(), want_lse.isneginf()),
        "lse_error": relative(lse[~lse.isneginf()], want_lse[~lse.isneginf()]),
    }


def compiled(name: str, dtype: torch.dtype, dim: int, block: int, capability: int) -> int:
    """Bytes of shared memory of a kernel of `triton_sparse`, compiled for a device."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    from bascule.attention.kernels import triton_sparse

    kernel = getattr(triton_sparse, name)
    sizes = triton_sparse.sizes_of(dtype, block if name == "_forward" else None)
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    inner = sizes["QUERIES" if name == "_key_gradients" else "KEYS"]
    constants = {"D": dim, **sizes, "PER_BLOCK": triton.cdiv(block, inner)}
    element = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}[dtype]
    types = {"scale": "fp32", "lse_rows": "*fp32", "delta_rows": "*fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    names = [parameter.name for parameter in kernel.params]
    signature = {n: types.get(n, element if n.endswith("_rows") else "*i32") for n in names}
    # As at a launch: tokens are aligned to 16 bytes.
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.endswith("_rows")}
    source = ASTSource(kernel, signature, constants, aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options).metadata.shared


def main(what: str, *capability: str) -> None:
    """Print a line of JSON a case."""
    if what == "compile":
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
        for one in itertools.product(KERNELS, dtypes, (64, 128), (64, 128)):
            print(json.dumps({"case": str(one), "shared": compiled(*one, int(capability[0]))}))
        return
    if what == "halves":
        for name in ("random", "empty rows"):
            print(json.dumps(compared(attend_in_halves, make_case(name, 64), torch.float32, 64)))
        return
    dtype = getattr(torch, what)
    for name in NAMES:
        print(json.dumps(compared(attend, make_case(name, 64), dtype, 64)))
    # Scores near -330, where the weight of a score of 0 is infinite.
    print(json.dumps(compared(attend, make_case("random", 64), dtype, 64, apart=3.6)))
    for block, dim in ((128, 128), (40, 32), (200, 16)):
        print(json.dumps(compared(attend, random_case(7, 3, 4, block, 0.6), dtype, dim)))


if __name__ == "__main__":
    main(*sys.argv[1:])
