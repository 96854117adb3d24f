"""The adapters of kernels with 8-bit queries and keys, which are not installed: with stand-ins."""

import itertools
import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from bascule.attention.kernels.protocol import BlockForm, BlockKernel, Seen
from bascule.attention.kernels.skipping import ParoKernel, SpargeKernel
from bascule.errors import ConfigError
from tests.unit.test_blocks import SCALE
from tests.unit.test_sparse_blocks import heads_case, make_case, reference, relative


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
    with pytest.raises(ConfigError, match=r"take equal ones of 64 each.*use triton or flex"):
        ParoKernel().forward(q, k, v, Seen(blocks=uneven.rows), SCALE)


@pytest.mark.parametrize(
    ("module", "kernel", "block"),
    [("spas_sage_attn", SpargeKernel(), 64), ("paroattention.core", ParoKernel(), 16)],
)
def test_a_rank_that_has_short_blocks_alone(
    monkeypatch: pytest.MonkeyPatch, module: str, kernel: BlockKernel, block: int
) -> None:
    """The last block of a sequence, whose others are long enough: equal, and less than a tile."""
    functions = ("block_sparse_sage2_attn_cuda", "paroattn_qk_int8_pv_fp16_cuda")
    install(monkeypatch, module, **dict.fromkeys(functions, pytest.fail))
    q, k, v = (short := heads_case(2, 2, 2, block)).inputs(torch.bfloat16, 64)
    with pytest.raises(ConfigError, match=f"blocks of {block} to {block} tokens.* of "):
        kernel.forward(q, k, v, Seen(blocks=short.rows), SCALE)
