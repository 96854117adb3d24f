"""Block-sparse attention: the rows of masks, and what kernels take and refuse."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from bascule.attention.kernels.protocol import KernelQuery
from bascule.attention.kernels.registry import KERNELS, select_kernel
from bascule.attention.kernels.skipping import CpuLoopKernel
from bascule.attention.mask import AttentionMask, BlockRows
from bascule.errors import ConfigError
from tests.helpers.blocks import SCALE
from tests.helpers.sparse_blocks import DIM, Case, make_case


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


def rows_of(q: list[int], k: list[int], rows: list[int], columns: list[int]) -> BlockRows:
    return BlockRows(*(np.array(x, dtype=np.int64) for x in (q, k, rows, columns)))


MALFORMED = [
    (([1, 2], [0, 2], [0, 1], [0]), r"bounds \[1, 2\] of query blocks: give 0"),
    (([0, 2], [0, 2, 2], [0, 1], [0]), r"of key blocks: give 0, then the end of each"),
    (([0, 2], [0, 2], [0, 1, 1], [0]), "3 row bounds up to 1 for 1 query blocks.*give 2"),
    (([0, 2], [0, 2], [0, 2], [0]), "2 row bounds up to 2.*from 0 up to 1"),
    (([0, 2, 3], [0, 2], [0, 1, 0], []), "3 row bounds up to 0"),
    (([0, 2, 3, 4], [0, 2], [0, 1, 0, 1], [0]), "4 row bounds up to 1"),
    (([0, 2], [0, 2], [0, 1], [1]), "key blocks 1 to 1 are seen, and there are 1"),
    (([0, 2], [0, 2, 4], [0, 2], [1, 1]), "must be ascending, each of them once"),
    (([0, 1, 2], [0, 2, 4], [0, 2, 3], [1, 0, 0]), "must be ascending"),
]


@pytest.mark.parametrize(("arrays", "text"), MALFORMED)
def test_malformed_rows_are_refused(arrays: tuple[list[int], ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        rows_of(*arrays)


def test_rows_that_do_not_fit_are_refused() -> None:
    rows, q = rows_of([0, 2], [0, 3], [0, 1], [0]), torch.zeros(1, 1, 2, DIM)
    k = torch.zeros(1, 1, 4, DIM)
    with pytest.raises(ConfigError, match=r"keys \(1, 1, 4, 16\) for blocks of 2 .* and 3 keys"):
        CpuLoopKernel().forward(q, k, k, AttentionMask(blocks=rows), SCALE)
    with pytest.raises(ConfigError, match=r"queries \(1, 2, 1, 16\)"):
        CpuLoopKernel().forward(q.view(1, 2, 1, DIM), k, k, AttentionMask(blocks=rows), SCALE)
    with pytest.raises(ConfigError, match="needs blocks"):
        CpuLoopKernel().forward(q, q, q, AttentionMask(), SCALE)
    with pytest.raises(ConfigError, match="give the blocks alone"):
        AttentionMask(causal=True, blocks=rows)
    with pytest.raises(ConfigError, match="give the blocks alone"):
        AttentionMask(bias=torch.zeros(1, 1, 2, 3), blocks=rows)


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


REFUSED = [
    ("plain", "cpu", 128, {}, "'plain' computes all scores.*use one of cpu_loop"),
    ("cpu_flash", "cpu", 128, {}, "'cpu_flash' computes all scores.*use one of cpu_loop"),
    ("cpu_loop", "cpu", None, {}, "computes the scores of given blocks.*use one of cpu_flash"),
    ("aten_flash", "cuda", 128, {}, "computes all scores"),
    ("cudnn", "cuda", 128, {}, "computes all scores"),
    ("efficient", "cuda", 128, {}, "computes all scores"),
    ("flex", "cuda", 64, {}, "pads blocks to 128 tokens.*not 64"),
    ("flex", "cuda", 129, {}, "not 129"),
    ("triton", "cuda", 128, {"head_dim": 96}, "head widths 16, 32, 64 and 128, not 96"),
    ("triton", "cuda", 128, {"dtype": torch.float64}, "not torch.float64"),
    ("triton", "cpu", 128, {}, "runs on CUDA devices, not on cpu: use one of cpu_loop"),
    (None, "cuda", 128, {"dtype": torch.float64}, "no kernel fits.*triton takes bfloat16"),
    ("plain", "cuda", 128, {"dtype": torch.float64}, "none fits.*flex takes bfloat16"),
]


@pytest.mark.parametrize(("name", "device", "block", "other", "text"), REFUSED)
def test_a_kernel_that_cannot_is_refused_with_the_reason(
    name: str | None, device: str, block: int | None, other: dict[str, Any], text: str
) -> None:
    form: dict[str, Any] = {"dtype": torch.bfloat16, "head_dim": 64, **other}
    with pytest.raises(ConfigError, match=text):
        select_kernel(name, device, block=block, **form)


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
