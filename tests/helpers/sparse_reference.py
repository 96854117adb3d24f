"""Block-sparse attention of a model in one process: dense attention with masks, by brute force."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tests.helpers.oracle import dense_attention
from tests.helpers.sparse_rules import Brute

Bools = np.ndarray[Any, np.dtype[np.bool_]]
_attend = functional.scaled_dot_product_attention


def lens_of(segments: tuple[int, ...], block: int) -> list[int]:
    lens: list[int] = []
    for length in segments:
        while length > 0:
            lens.append(min(block, length))
            length -= block
    return lens


def text_blocks(segments: tuple[int, ...], block: int) -> int:
    """Of a text and what it is about; 0 without text."""
    return len(lens_of(segments[:-1], block))


def with_text(masks: Any, num_text: int) -> Any:
    """(..., N, N): text sees all, and all see it."""
    masks = masks.copy() if isinstance(masks, np.ndarray) else masks.clone()
    masks[..., :num_text, :] = True
    masks[..., :num_text] = True
    return masks


def means(x: Tensor, lens: list[int]) -> Tensor:
    """(B, H, N, D)."""
    return torch.stack([part.double().mean(dim=2) for part in x.split(lens, dim=2)], dim=2)


def by_rule(
    q: Tensor, k: Tensor, segments: tuple[int, ...], block: int, rule: dict[str, float]
) -> Tensor:
    """(B, H, N, N) what a rule keeps; every row by itself."""
    lens = lens_of(segments, block)
    scores = means(q, lens) @ means(k, lens).mT * q.shape[-1] ** -0.5
    num_blocks, masks = len(lens), torch.zeros(scores.shape, dtype=torch.bool)
    num_text = text_blocks(segments, block)
    for b, h, row in np.ndindex(*scores.shape[:3]):
        one = scores[b, h, row].detach().clone()
        if "keep" in rule:
            one[row] = one[:num_text] = torch.inf
            number = int(np.ceil(rule["keep"] * num_blocks))
            masks[b, h, row, one.argsort(descending=True)[:number]] = True
        else:
            shares = (one.exp() * torch.tensor(lens)) / (one.exp() * torch.tensor(lens)).sum()
            total = 0.0
            for place in shares.argsort(descending=True).tolist():
                masks[b, h, row, place] = total < rule["mass"]
                total += float(shares[place])
        masks[b, h, row, row] = True
    return with_text(masks, num_text)


def by_brute(
    q: Tensor, k: Tensor, v: Tensor, form: "Form", blocks: tuple[int, int], brute: Brute
) -> Tensor:
    """(B, H, Q, C) of a rule by brute force."""
    q_lens, kv_lens = (lens_of(form.segments, block) for block in blocks)
    masks = [
        [brute(*one, q_lens, kv_lens, form.is_text(1)) for one in zip(*heads, strict=True)]
        for heads in zip(q.detach(), k.detach(), v.detach(), strict=True)
    ]
    return torch.stack([torch.stack(one) for one in masks])


class Form(NamedTuple):
    """The segments of a sequence, and which are text."""

    segments: tuple[int, ...]
    texts: tuple[bool, ...]

    def is_text(self, block: int) -> Tensor:
        """(N,) of blocks."""
        counts = [len(lens_of((length,), block)) for length in self.segments]
        return torch.tensor(self.texts).repeat_interleave(torch.tensor(counts))


@contextmanager
def one_process(
    segments: tuple[int, ...] | list[Form],
    block: int | tuple[int, int],
    *,
    masks: Bools | None = None,
    rule: dict[str, float] | Brute | None = None,
    orders: Any = None,
    dense_layers: tuple[int, ...] = (),
) -> Iterator[list[Tensor]]:
    """Within, self-attention of whole sequences sees masks (layers, H, Q, C), or what a rule keeps.

    `orders` (H, tokens of the last segment) are those of blocks. Yields the block masks of each
    layer, as they are used. All segments but the last are text, or as forms say.
    """
    blocks = (block, block) if isinstance(block, int) else block
    used = list[Tensor]()
    if isinstance(segments, tuple):
        segments = [Form(segments, (*(True for _ in segments[1:]), False))]
    forms = {sum(form.segments): form for form in segments}

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **more: Any
    ) -> Tensor:
        size, heads = key.shape[2], query.shape[1]
        if size not in forms or query.shape[2] != size:
            return _attend(query, key, value, attn_mask, **more)
        form = forms[size]
        lens = [torch.tensor(lens_of(form.segments, one)) for one in blocks]
        order = torch.arange(size).repeat(heads, 1)
        if orders is not None:
            order[:, -orders.shape[1] :] = torch.from_numpy(orders) + size - orders.shape[1]
        every = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (query, key, value))
        q, k, v = (x.gather(2, order[None, :, :, None].expand_as(x)) for x in every)
        if len(used) in dense_layers:
            found = torch.ones(1, heads, *map(len, lens), dtype=torch.bool)
        elif masks is not None:
            found = torch.from_numpy(masks[len(used) if len(masks) > 1 else 0].copy())[None]
        elif callable(rule):
            seen = torch.ones(1, 1, size, dtype=torch.bool)
            if attn_mask is not None:
                seen = attn_mask.any(dim=-2)
            q, k = (x.masked_fill(~seen[..., None], torch.nan) for x in (q, k))
            found = by_brute(q, k, v, form, blocks, rule)
        else:
            found = by_rule(q, k, form.segments, blocks[0], rule or {})
        is_text = [form.is_text(one) for one in blocks]
        found = found | is_text[0][:, None] | is_text[1]
        used.append(found)
        mask = found.repeat_interleave(lens[0], 2).repeat_interleave(lens[1], 3)
        pairs = zip(mask.unbind(1), order.argsort(), strict=True)
        mask = torch.stack([one[:, back][:, :, back] for one, back in pairs], 1)
        if attn_mask is not None:
            mask = mask & attn_mask
        return dense_attention(query, key, value, mask)[0]

    with mock.patch.object(functional, "scaled_dot_product_attention", attend):
        yield used
