"""Block-sparse attention of a model in one process: dense attention with masks, by brute force."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
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
    q: Tensor, k: Tensor, v: Tensor, segments: tuple[int, ...], block: int, brute: Brute
) -> Tensor:
    """(B, H, N, N) of a rule by brute force, with text that sees all and is seen by all."""
    lens = lens_of(segments, block)
    is_text = torch.arange(q.shape[2]) < sum(segments[:-1])
    masks = [
        [brute(*one, lens, lens, is_text) for one in zip(*heads, strict=True)]
        for heads in zip(q.detach(), k.detach(), v.detach(), strict=True)
    ]
    return with_text(torch.stack([torch.stack(one) for one in masks]), text_blocks(segments, block))


@contextmanager
def one_process(
    segments: tuple[int, ...],
    block: int,
    *,
    masks: Bools | None = None,
    rule: dict[str, float] | Brute | None = None,
    dense_layers: tuple[int, ...] = (),
) -> Iterator[list[Tensor]]:
    """Within, self-attention of whole sequences sees masks (layers, H, N, N), or what a rule keeps.

    Yields the block masks of each layer, as they are used.
    """
    lens, used = torch.tensor(lens_of(segments, block)), list[Tensor]()
    size, num_text = int(lens.sum()), text_blocks(segments, block)

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if key.shape[2] != size:
            return _attend(query, key, value, *args, **kwargs)
        q, group = query, query.shape[1] // key.shape[1]
        if len(used) in dense_layers:
            found = torch.ones(1, q.shape[1], len(lens), len(lens), dtype=torch.bool)
        elif masks is not None:
            of_layer = masks[len(used) if len(masks) > 1 else 0]
            found = torch.from_numpy(with_text(of_layer, num_text))[None]
        else:
            keys, values = (x.repeat_interleave(group, dim=1) for x in (key, value))
            if callable(rule):
                found = by_brute(q, keys, values, segments, block, rule)
            else:
                found = by_rule(q, keys, segments, block, rule or {})
        used.append(found)
        mask = found.repeat_interleave(lens, 2).repeat_interleave(lens, 3)
        return dense_attention(q, key, value, mask)[0]

    with mock.patch.object(functional, "scaled_dot_product_attention", attend):
        yield used
