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
from tests.helpers.sparse_rules import Brute, brute_of

Bools = np.ndarray[Any, np.dtype[np.bool_]]
_attend = functional.scaled_dot_product_attention


def lens_of(segments: tuple[int, ...], block: int) -> list[int]:
    lens: list[int] = []
    for length in segments:
        while length > 0:
            lens.append(min(block, length))
            length -= block
    return lens


def by_brute(
    q: Tensor, k: Tensor, v: Tensor, form: "Form", blocks: tuple[int, int], brute: Brute
) -> Tensor:
    """(B, H, Q, C) of a rule by brute force, in float64."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    q_lens, kv_lens = (lens_of(form.segments, block) for block in blocks)
    masks = [
        [brute(*one, q_lens, kv_lens, form.is_text(1)) for one in zip(*heads, strict=True)]
        for heads in zip(q, k, v, strict=True)
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
        else:
            seen = torch.ones(1, 1, size, dtype=torch.bool)
            if attn_mask is not None:
                seen = attn_mask.any(dim=-2)
            q, k = (x.masked_fill(~seen[..., None], torch.nan) for x in (q, k))
            brute = rule if callable(rule) else brute_of(rule or {})
            found = by_brute(q, k, v, form, blocks, brute)
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
