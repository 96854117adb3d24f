"""What the queries of one ring rank see of the keys of another, as tiles for the kernels.

Shapes: as in `mesh`.
"""

import math

import torch
from torch import Tensor

from bascule.attention.block_form import Seen
from bascule.attention.layout import SequenceLayout, positions_on
from bascule.attention.ring import Tile


def tiles_of(
    layout: SequenceLayout, ring: int, mask: Tensor | None, causal: bool, q: Tensor
) -> list[list[Tile]]:
    """By ring rank, what the queries of ring rank `ring` see of its keys.

    Args:
        layout: Which tokens each rank has.
        ring: The rank that attends.
        mask: (B or 1, H or 1, S or 1, S or 1) of the whole sequence: bool, or added to the scores.
        causal: Whether a token sees only itself and those before it.
        q: Queries, for their dtype and device.
    """
    everything = slice(None)
    tiles: list[list[Tile]] = []
    for other in range(layout.ring_degree):
        if mask is not None or (causal and (layout.stripe or len(layout.segments) > 1)):
            bias = _bias(layout, ring, other, mask, causal, q)
            tiles.append([Tile(everything, everything, Seen(bias=bias))])
        elif not causal:
            tiles.append([Tile(everything, everything)])
        elif other == ring:
            tiles.append([Tile(everything, everything, Seen(causal=True))])
        elif not layout.zigzag:
            tiles.append([Tile(everything, everything)] if other < ring else [])
        elif other < ring:  # of its two pieces only the early one is before both of this rank's
            tiles.append([Tile(everything, slice(0, _first_len(layout, other)))])
        else:  # only the late piece of this rank is after both of the other's
            tiles.append([Tile(slice(_first_len(layout, ring), None), everything)])
    return tiles


def _first_len(layout: SequenceLayout, ring: int) -> int:
    start, stop = layout.pieces(ring)[0]
    return stop - start


def _bias(
    layout: SequenceLayout,
    ring: int,
    other: int,
    mask: Tensor | None,
    causal: bool,
    q: Tensor,
) -> Tensor:
    """What is added to the scores of one ring rank's queries and another's keys."""
    rows, columns = (positions_on(layout, r, q.device) for r in (ring, other))
    bias = torch.zeros((1, 1, 1, columns.numel()), dtype=q.dtype, device=q.device)
    if mask is not None:
        part = mask if mask.shape[2] == 1 else mask.index_select(2, rows)
        part = part.expand(*part.shape[:3], layout.seq_len).index_select(3, columns)
        bias = part.to(q.dtype) if part.dtype != torch.bool else _hidden(part, q.dtype)
    if causal:
        bias = bias.masked_fill(rows[:, None] < columns[None, :], -math.inf)
    return bias


def _hidden(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """-inf where a key is not seen, else 0."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -math.inf)
