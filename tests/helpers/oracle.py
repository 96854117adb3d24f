"""Attention written out, to compare with."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bascule import Span


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Out (B, H, L, D) and LSE (B, H, L) in the dtype of the values; differentiable.

    The mask is bool, or added to the scores. A query that sees nothing gets 0, and -inf as LSE.
    """
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    scores = scores.to(v.dtype)
    is_empty = scores.isneginf().all(dim=-1, keepdim=True)
    scores = scores.masked_fill(is_empty, 0.0)
    out = scores.softmax(dim=-1).masked_fill(is_empty, 0.0) @ v
    return out, scores.logsumexp(dim=-1).masked_fill(is_empty[..., 0], -math.inf)


def packed_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    seq_lens: Sequence[int],
    *,
    key_lens: Sequence[int] | None = None,
    causal: bool = False,
    scale: float | None = None,
    masks: Sequence[Sequence[Span]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Out (T, H, D) and LSE (T, H) within each packed sequence, in float64; differentiable.

    With key_lens from each sequence to its own keys, as many as these.
    """
    q, k, v = (x.double() for x in (q_THD, k_TKD, v_TKD))
    outs, log_sums = [0 * (q[:0] + k[:0].sum() + v[:0].sum())], [q[:0, :, 0]]
    parts = [q.split(list(seq_lens)), *(x.split(list(key_lens or seq_lens)) for x in (k, v))]
    for number, part in enumerate(zip(*parts, strict=True)):
        if len(part[0]):
            mask = seen_by(masks[number]) if masks else None
            sequence = (x.transpose(0, 1)[None] for x in part)
            out, lse = dense_attention(*sequence, mask=mask, causal=causal, scale=scale)
            outs.append(out[0].transpose(0, 1))
            log_sums.append(lse[0].T)
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
