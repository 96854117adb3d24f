"""Dense attention of blocks, written out."""

import math

import torch
from torch import Tensor

from bascule.attention.mask import AttentionMask

SCALE = 0.4


def dense(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax written out; 0 and -inf for a query without keys."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
    if mask.bias is not None:
        scores = scores + mask.bias
    if mask.causal:
        place = torch.arange(scores.shape[-1])
        scores = scores.masked_fill(place[:, None] < place[None, :], -math.inf)
    empty = scores.isneginf().all(-1)
    safe = scores.masked_fill(empty[..., None], 0.0)
    out = torch.einsum("bhqk,bhkd->bhqd", safe.softmax(-1), v)
    lse = safe.logsumexp(-1)
    return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -math.inf)
