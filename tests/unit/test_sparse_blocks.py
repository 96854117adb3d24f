"""Block-sparse attention: its kernels against dense masked attention, and what they refuse."""

import itertools
import math
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from bascule.attention.block_form import BlockForm, BlockKernel, BlockRows, Seen, merge
from bascule.attention.blocks import KERNELS, QUANTIZED, select_block_kernel
from bascule.attention.flex_blocks import SPARSE_BLOCK, flex
from bascule.attention.ring import RingPlan, Tile, ring_attention
from bascule.attention.sparse_blocks import CpuLoopKernel, ParoKernel, SpargeKernel
from bascule.errors import ConfigError
from tests.unit.test_blocks import SCALE, dense

DIM = 16


@dataclass(frozen=True, eq=False)
class Case:
    """Lengths of query and key blocks, and which of them meet."""

    q_lens: npt.NDArray[np.int64]
    k_lens: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]

    @property
    def rows(self) -> BlockRows:
        columns = np.concatenate([np.flatnonzero(row) for row in self.mask])
        row_bounds = bounds(self.mask.sum(axis=1))
        return BlockRows(bounds(self.q_lens), bounds(self.k_lens), row_bounds, columns)

    @property
    def bias(self) -> Tensor:
        """(1, 1, Sq, Sk) 0 where a key is seen, else -inf."""
        seen = np.repeat(np.repeat(self.mask, self.q_lens, axis=0), self.k_lens, axis=1)
        return torch.from_numpy(np.where(seen, 0.0, -math.inf))[None, None]

    def inputs(self, dtype: torch.dtype, dim: int = DIM) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        lens = (self.q_lens.sum(), self.k_lens.sum(), self.k_lens.sum())
        return [torch.randn(1, 1, int(n), dim, generator=generator).to(dtype) for n in lens]


def bounds(lens: Any) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int64)


def random_case(
    seed: int, num_q: int, num_k: int, block: int, density: float, least: int = 1
) -> Case:
    rng = np.random.default_rng(seed)
    q_lens, k_lens = (rng.integers(least, block + 1, n) for n in (num_q, num_k))
    return Case(q_lens, k_lens, rng.random((num_q, num_k)) < density)


def make_case(name: str, block: int) -> Case:
    """Named masks, of blocks of at most `block` tokens."""
    case = random_case(1, 7, 9, block, 0.5)
    mask = case.mask.copy()
    if name == "clustered":  # three heads of a band each: neighbours see the same, runs of keys
        mask = np.zeros((9, 9), dtype=np.bool_)
        for head, row in itertools.product(range(3), range(3)):
            mask[3 * head + row, 3 * head : 3 * head + 2 + (row == 2)] = True
        return Case(np.full(9, block), np.full(9, block), mask)
    if name == "empty rows":
        mask[[0, 3, 6]] = False
        mask[:, 4] = False
    if name == "nothing":
        mask[:] = False
    if name == "one row sees all":
        mask[:] = False
        mask[2] = True
    if name == "single block":
        return Case(np.array([block]), np.array([block]), np.ones((1, 1), dtype=np.bool_))
    if name == "short blocks in the middle":
        lens = np.array([block, 1, block, block // 2, block, 3, block])
        return Case(lens, np.roll(np.concatenate([lens, lens[:2]]), 2), mask)
    if name == "grouped heads":  # four query heads of two key heads
        one = random_case(2, 3, 3, block, 0.6)
        heads = [random_case(3 + head, 3, 3, block, 0.6).mask for head in range(4)]
        mask = np.zeros((12, 6), dtype=np.bool_)
        for head, part in enumerate(heads):
            at = 3 * (head // 2)
            mask[3 * head : 3 * head + 3, at : at + 3] = part
        return Case(np.tile(one.q_lens, 4), np.tile(one.k_lens, 2), mask)
    return Case(case.q_lens, case.k_lens, mask)


NAMES = (
    "random",
    "clustered",
    "empty rows",
    "nothing",
    "one row sees all",
    "single block",
    "short blocks in the middle",
    "grouped heads",
)


def reference(case: Case, tensors: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """Dense masked attention in float64: out, LSE, gradients of q, k and v, and that of out."""
    q, k, v = (x.detach().double().cpu().requires_grad_() for x in tensors)
    out, lse = dense(q, k, v, Seen(bias=case.bias), SCALE)
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    grad = grad.to(tensors[0].dtype)
    grads = torch.autograd.grad(out, (q, k, v), grad.double())
    return out.detach(), lse.detach(), list(grads), grad


def attend(kernel: BlockKernel, case: Case, tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Out, LSE and gradients of q, k and v."""
    (q, k, v), seen = tensors, Seen(blocks=case.rows)
    out, lse = kernel.forward(q, k, v, seen, SCALE)
    return [out, lse, *kernel.backward(grad, q, k, v, out, lse, seen, SCALE)]


def attend_in_halves(
    kernel: BlockKernel, case: Case, tensors: list[Tensor], grad: Tensor
) -> list[Tensor]:
    """The same of two halves of the keys, merged, each with the LSE of all in backward."""
    q, k, v = tensors
    middle = case.k_lens.size // 2
    cut = int(case.k_lens[:middle].sum())
    halves = [
        (slice(0, cut), Case(case.q_lens, case.k_lens[:middle], case.mask[:, :middle])),
        (slice(cut, None), Case(case.q_lens, case.k_lens[middle:], case.mask[:, middle:])),
    ]
    parts = [(k[:, :, at], v[:, :, at], Seen(blocks=half.rows)) for at, half in halves]
    (out, lse), (more, more_lse) = (kernel.forward(q, *part, SCALE) for part in parts)
    out, lse = merge(out.to(lse.dtype), lse, more.to(lse.dtype), more_lse)
    out = out.to(q.dtype)
    first, second = (
        kernel.backward(grad, q, *part[:2], out, lse, part[2], SCALE) for part in parts
    )
    keys = (torch.cat((first[i], second[i]), dim=2) for i in (1, 2))
    return [out, lse, first[0] + second[0], *keys]


def relative(found: Tensor, want: Tensor) -> float:
    return float((found.detach().double().cpu() - want).norm() / max(float(want.norm()), 1e-30))


@pytest.mark.parametrize("name", NAMES)
def test_exact_in_float64(name: str) -> None:
    case = make_case(name, 8)
    tensors = case.inputs(torch.float64)
    want, want_lse, wanted, grad = reference(case, tensors)
    out, lse, *found = attend(CpuLoopKernel(), case, tensors, grad)
    torch.testing.assert_close((out, lse), (want, want_lse), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_random_masks_and_lengths(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_q, num_k, block = (int(rng.integers(1, top)) for top in (12, 12, 40))
    case = random_case(seed, num_q, num_k, block, float(rng.random()))
    tensors = case.inputs(torch.float64)
    want, want_lse, wanted, grad = reference(case, tensors)
    out, lse, *found = attend(CpuLoopKernel(), case, tensors, grad)
    torch.testing.assert_close((out, lse), (want, want_lse), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


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


@pytest.mark.parametrize("name", NAMES[:5] + NAMES[6:])
def test_two_halves_of_the_keys_are_the_whole(name: str) -> None:
    """As in a ring of two: each half has its own rows, and backward has the LSE of all."""
    case = make_case(name, 8)
    tensors = case.inputs(torch.float64)
    want, want_lse, wanted, grad = reference(case, tensors)
    out, lse, *found = attend_in_halves(CpuLoopKernel(), case, tensors, grad)
    torch.testing.assert_close((out, lse), (want, want_lse), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_blocks_that_are_not_seen_are_not_read() -> None:
    """Keys of one row's blocks only; all others are nan."""
    case, kernel = make_case("one row sees all", 8), CpuLoopKernel()
    mask = case.mask.copy()
    mask[2, ::2] = False
    case = Case(case.q_lens, case.k_lens, mask)
    q, k, v = case.inputs(torch.float64)
    hidden = torch.from_numpy(np.repeat(~mask[2], case.k_lens))
    k[:, :, hidden] = v[:, :, hidden] = math.nan
    seen = Seen(blocks=case.rows)
    out, lse = kernel.forward(q, k, v, seen, SCALE)
    grads = kernel.backward(torch.ones_like(q), q, k, v, out, lse, seen, SCALE)
    assert all(bool(x.isfinite().all()) for x in (out, *grads))
    assert not grads[1][:, :, hidden].any() and not grads[2][:, :, hidden].any()
    assert grads[1][:, :, ~hidden].any()


def test_a_tile_of_a_ring_may_have_blocks() -> None:
    case = make_case("empty rows", 8)
    q, k, v = (x.requires_grad_() for x in case.inputs(torch.float64))
    want, _, wanted, grad = reference(case, [q, k, v])
    everything = slice(None)
    tiles = [[Tile(everything, everything, Seen(blocks=case.rows))]]
    plan = RingPlan(None, [k.shape[2]], tiles, CpuLoopKernel(), SCALE)
    out, _ = ring_attention(q, k, v, plan)
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
    out, lse = flex(eager, q, k, v, Seen(blocks=case.rows), SCALE)
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
        CpuLoopKernel().forward(q, k, k, Seen(blocks=rows), SCALE)
    with pytest.raises(ConfigError, match=r"queries \(1, 2, 1, 16\)"):
        CpuLoopKernel().forward(q.view(1, 2, 1, DIM), k, k, Seen(blocks=rows), SCALE)
    with pytest.raises(ConfigError, match="needs blocks"):
        CpuLoopKernel().forward(q, q, q, Seen(), SCALE)
    with pytest.raises(ConfigError, match="give the blocks alone"):
        Seen(causal=True, blocks=rows)
    with pytest.raises(ConfigError, match="give the blocks alone"):
        Seen(bias=torch.zeros(1, 1, 2, 3), blocks=rows)


SPARSE = ("cpu_loop", "triton", "flex")


def test_which_kernels_take_blocks() -> None:
    for name, kernel in KERNELS.items():
        forms = [
            BlockForm(device, dtype, 64, block=128)
            for device in ("cpu", "cuda")
            for dtype in (torch.bfloat16, torch.float32)
        ]
        fits = [kernel.unfit(form) is None for form in forms]
        assert any(fits) == (name in SPARSE) or name == "triton", name
    for name in ("cpu_loop", "triton", "sparge", "paro"):
        kernel = {**KERNELS, **QUANTIZED}[name]
        device = "cpu" if name == "cpu_loop" else "cuda"
        form = BlockForm(device, torch.bfloat16, 64, needs_lse=False)
        assert kernel.unfit(form) == "computes the scores of given blocks, not all"
    assert select_block_kernel(None, "cpu", block=128) is KERNELS["cpu_loop"]


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
    ("sparge", "cuda", 128, {}, "gives no log-sum-exp.*ring"),
    ("sparge", "cuda", 64, {"needs_lse": False}, "takes blocks of 128 tokens, not 64"),
    ("paro", "cuda", 100, {}, "takes blocks of 64 or 128 tokens, not 100"),
    ("paro", "cuda", 64, {"dtype": torch.float32}, "takes bfloat16 or float16"),
    ("paro", "cuda", 64, {"head_dim": 32}, "takes head widths 64 and 128, not 32"),
    (None, "cuda", 128, {"dtype": torch.float64}, "no kernel fits.*triton takes bfloat16"),
    ("plain", "cuda", 128, {"dtype": torch.float64}, "none fits.*flex takes bfloat16"),
]


@pytest.mark.parametrize(("name", "device", "block", "other", "text"), REFUSED)
def test_a_kernel_that_cannot_is_refused_with_the_reason(
    name: str | None, device: str, block: int | None, other: dict[str, Any], text: str
) -> None:
    form: dict[str, Any] = {"dtype": torch.bfloat16, "head_dim": 64, **other}
    with pytest.raises(ConfigError, match=text):
        select_block_kernel(name, device, block=block, **form)


def heads_case(num_heads: int, num_q: int, num_k: int, block: int) -> Case:
    """Equal blocks of equal heads; one row sees nothing."""
    rng = np.random.default_rng(5)
    mask = np.zeros((num_heads * num_q, num_heads * num_k), dtype=np.bool_)
    for head in range(num_heads):
        at = slice(head * num_q, (head + 1) * num_q), slice(head * num_k, (head + 1) * num_k)
        mask[at] = rng.random((num_q, num_k)) < 0.6
        mask[at[0], at[1].start] = True  # so that no head falls apart into smaller ones
    mask[1] = False
    return Case(np.full(mask.shape[0], block), np.full(mask.shape[1], block), mask)


def stand_in(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, queries: int, keys: int
) -> tuple[Tensor, Tensor]:
    """What such a kernel gives, garbage where nothing is seen; checks what it would not."""
    assert mask.dtype == torch.bool and mask.is_contiguous()
    assert all(x.is_contiguous() and x.dtype == torch.bfloat16 for x in (q, k, v))
    assert mask.shape[:2] == q.shape[:2] == k.shape[:2]
    seen = mask.repeat_interleave(queries, dim=2).repeat_interleave(keys, dim=3)
    scores = (q.float() @ k.float().mT * scale).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """A module that `import` and `find_spec` find."""
    for part in itertools.accumulate(name.split("."), lambda a, b: f"{a}.{b}"):
        module = ModuleType(part)
        module.__spec__ = ModuleSpec(part, None)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, part, module)


@pytest.mark.parametrize(("num_q", "num_k"), [(3, 3), (2, 4)])
def test_sparge(monkeypatch: pytest.MonkeyPatch, num_q: int, num_k: int) -> None:
    def kernel(q: Any, k: Any, v: Any, mask_id: Any, scale: Any, tensor_layout: str) -> Tensor:
        assert tensor_layout == "HND" and mask_id.shape[2:] == (num_q, 2 * num_k)
        return stand_in(q, k, v, mask_id, scale, 128, 64)[0]

    install(monkeypatch, "spas_sage_attn", block_sparse_sage2_attn_cuda=kernel)
    case = heads_case(2, num_q, num_k, 128)
    q, k, v = case.inputs(torch.bfloat16, 64)
    want, want_lse, _, _ = reference(case, [q, k, v])
    form = BlockForm("cuda", torch.bfloat16, 64, block=128, needs_lse=False)
    assert SpargeKernel().unfit(form) is None
    out, lse = SpargeKernel().forward(q, k, v, Seen(blocks=case.rows), SCALE)
    assert out.dtype == q.dtype and relative(out, want) < 1e-2
    assert torch.equal(lse.isneginf(), want_lse.isneginf())
    assert lse[~want_lse.isneginf()].isnan().all()
    with pytest.raises(ConfigError, match="SpargeKernel has no backward"):
        SpargeKernel().backward(out, q, k, v, out, lse, Seen(blocks=case.rows), SCALE)


@pytest.mark.parametrize("block", [64, 128])
def test_paro(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    def kernel(
        q: Any, k: Any, v: Any, tensor_layout: str, sm_scale: Any, sparse: Any, return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        assert tensor_layout == "HND" and return_lse and sparse.shape[2] == sparse.shape[3]
        return stand_in(q, k, v, sparse, sm_scale, 64, 64)

    install(monkeypatch, "paroattention.core", paroattn_qk_int8_pv_fp16_cuda=kernel)
    case = heads_case(3, 2, 2, block)
    q, k, v = case.inputs(torch.bfloat16, 64)
    want, want_lse, _, _ = reference(case, [q, k, v])
    assert ParoKernel().unfit(BlockForm("cuda", torch.bfloat16, 64, block=block)) is None
    out, lse = ParoKernel().forward(q, k, v, Seen(blocks=case.rows), SCALE)
    assert relative(out, want) < 1e-2
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="ParoKernel has no backward"):
        ParoKernel().backward(out, q, k, v, out, lse, Seen(blocks=case.rows), SCALE)
    wide = heads_case(2, 2, 3, block)
    q, k, v = wide.inputs(torch.bfloat16, 64)
    with pytest.raises(ConfigError, match=r"\d blocks of queries and \d of keys a head"):
        ParoKernel().forward(q, k, v, Seen(blocks=wide.rows), SCALE)
    q, k, v = (uneven := make_case("random", block)).inputs(torch.bfloat16, 64)
    with pytest.raises(ConfigError, match="take equal ones, so use triton or flex"):
        ParoKernel().forward(q, k, v, Seen(blocks=uneven.rows), SCALE)
