"""Attention written out, to compare with: float64, a sequence and a head at a time."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bascule import Span


def packed_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    seq_lens: Sequence[int],
    *,
    causal: bool = False,
    scale: float | None = None,
    masks: Sequence[Sequence[Span]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Out (T, H, D) and LSE (T, H) within each packed sequence, in float64; differentiable."""
    q, k, v = (x.double() for x in (q_THD, k_TKD, v_TKD))
    group = q.shape[1] // k.shape[1]
    factor = q.shape[2] ** -0.5 if scale is None else scale
    outs, log_sums = [0 * (q[:0] + k[:0].sum() + v[:0].sum())], [q[:0, :, 0]]
    kept = [mask for mask, length in zip(masks, seq_lens, strict=True) if length] if masks else None
    parts = torch.arange(sum(seq_lens)).split([length for length in seq_lens if length])
    for number, rows in enumerate(parts):
        heads, sums = list[Tensor](), list[Tensor]()
        for head in range(q.shape[1]):
            scores = factor * q[rows, head] @ k[rows, head // group].T
            if causal:
                future = torch.ones_like(scores).triu(1) > 0
                scores = scores.masked_fill(future, -math.inf)
            if kept is not None:
                scores = scores.masked_fill(~seen_by(kept[number]), -math.inf)
            top = scores.amax(1, keepdim=True)
            sums.append((scores - top).exp().sum(1).log() + top[:, 0])
            heads.append(scores.softmax(1) @ v[rows, head // group])
        outs.append(torch.stack(heads, dim=1))
        log_sums.append(torch.stack(sums, dim=1))
    return torch.cat(outs), torch.cat(log_sums)


def seen_by(mask: Sequence[Span]) -> Tensor:
    """(L, L) whether a token, of a sequence of these spans, sees another."""
    numbers = torch.tensor([n for n, span in enumerate(mask) for _ in range(span.num_tokens)])
    first = torch.tensor([span.new_document for span in mask], dtype=torch.int64)
    causal = torch.tensor([span.causal for span in mask], dtype=torch.bool)
    if not numbers.numel():
        return torch.zeros(0, 0, dtype=torch.bool)
    documents = first.cumsum(0)[numbers]
    place = torch.arange(numbers.numel())
    is_later = place > place[:, None]
    is_hidden = is_later & ((numbers > numbers[:, None]) | causal[numbers][:, None])
    return (documents == documents[:, None]) & ~is_hidden
