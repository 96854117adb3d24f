"""Attention over a mesh: dtypes, masks and kernels; of one rank, so that no group is needed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bascule.attention.api import AttentionMesh, AttentionOptions, SequenceLayout, attention

ALONE = AttentionMesh(None, None, None)
Q = torch.zeros(1, 2, 6, 8)
SEEN = torch.ones(6, 6, dtype=torch.bool)


def attended(q: Any = Q, k: Any = None, v: Any = None, **settings: Any) -> Callable[[], object]:
    return partial(attention, q, q if k is None else k, q if v is None else v, ALONE, **settings)


def masked(mask: torch.Tensor, dtype: torch.dtype = torch.float32) -> Callable[[], object]:
    return attended(Q.to(dtype), attn_mask=mask)


def laid_out(segments: tuple[int, ...] = (3, 9), **settings: Any) -> Callable[[], object]:
    return partial(SequenceLayout, segments, 1, 2, **settings)


CASES = [
    *(
        (f"mask of {wrong} for {dtype}", masked(SEEN.to(wrong), dtype), (f"{wrong}", "mask.bool()"))
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
        for wrong in (torch.int64, torch.uint8, torch.float16, torch.complex64)
    ),
    ("values of 16 bits", attended(v=Q.bfloat16()), ("one floating-point dtype",)),
    ("queries of 64 bits", attended(Q.double(), Q, Q), ("one floating-point dtype",)),
    ("integers", attended(Q.int()), ("one floating-point dtype",)),
    ("no heads", attended(Q[:, :0]), ("(1, 0, 6, 8)",)),
    ("no width", attended(Q[..., :0]), ("(1, 2, 6, 0)",)),
    ("more heads of keys", attended(k=Q.repeat(1, 2, 1, 1)), ("k and v alike",)),
    ("mask of fewer keys", masked(SEEN[:, :5]), ("does not broadcast",)),
    ("sparse mask", masked(SEEN.float().to_sparse()), ("mask", "torch.sparse_coo")),
    ("mask with gradient", masked(SEEN.float().requires_grad_()), ("requires a gradient",)),
    ("no kernel", lambda: AttentionOptions(kernel="TORCH_MATH"), ("choose one of",)),
    ("segment twice", laid_out(replicated=(0, 0)), ("(0, 0)",)),
    ("no such segment", laid_out(replicated=(2,)), ("replicated[0]=2", "at most 1")),
    ("a segment below 0", laid_out((-1,)), ("segments[0]=-1", "at least 0")),
    ("stripes in zigzag", laid_out(stripe=1, zigzag=True), ("stripe",)),
    ("stripes of replicated tokens", laid_out(stripe=1, replicated=(0,)), ("stripe",)),
]
