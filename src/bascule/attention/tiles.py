"""What the queries of one ring rank see of the keys of another, as tiles for the kernels.

A mask that is added to the scores may hide all keys of a query by a finite number. Parts of such a
row cannot be merged as they are: an LSE of -1e9 + log(n) is -1e9 in float32. So what is added to a
row is taken down by the highest of it, over the keys of all ranks: softmax does not see that, and
the LSE keeps its digits. Where the number is so large that one process loses the scores themselves
in it, they do not count here either.

Shapes: as in `api`.
"""

import math

import torch
from torch import Tensor

from bascule.attention.kernels.protocol import wide_dtype
from bascule.attention.mask import AttentionMask
from bascule.attention.ring import Tile
from bascule.attention.shards import Run, SequenceLayout, positions_on

_LEVELLED_FROM = 64.0  # closer to 0, a subtraction in 16 bits could round what is near the highest
_LOST_AT = 8.0  # spacing of the numbers at a row's highest, of which scores of less than half go


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
    if mask is not None or (causal and (layout.stripe or len(layout.segments) != 1)):
        return [[tile] for tile in _masked(layout, ring, mask, causal, q)]
    everything = slice(None)
    tiles: list[list[Tile]] = []
    for other in range(layout.ring_degree):
        if not causal:
            tiles.append([Tile(everything, everything)])
        elif other == ring:
            tiles.append([Tile(everything, everything, AttentionMask(causal=True))])
        elif not layout.zigzag:
            tiles.append([Tile(everything, everything)] if other < ring else [])
        elif other < ring:  # of its two pieces only the early one is before both of this rank's
            tiles.append([Tile(everything, slice(0, _first_len(layout, other)))])
        else:  # only the late piece of this rank is after both of the other's
            tiles.append([Tile(slice(_first_len(layout, ring), None), everything)])
    return tiles


def without_lost_scores(
    q: Tensor, layout: SequenceLayout, runs: list[Run], mask: Tensor | None, causal: bool
) -> Tensor:
    """The queries, 0 where one process loses their scores in what a mask adds to all of them.

    In float32 a score of 3 less 1e9 is -1e9, so a query that a mask hides from all keys by 1e9
    weighs them alike. `tiles_of` takes the 1e9 away, after which the score would count again. With
    0 for the query it does not, and what does not count has no gradient.

    Args:
        q: (B, H, T, D).
        layout: Which tokens each rank has.
        runs: The runs in the sequence of the T tokens.
        mask: As in `tiles_of`; leading dims may be left out.
        causal: As in `tiles_of`.
    """
    if mask is None or not mask.is_floating_point():
        return q
    mask = mask[(None,) * (4 - mask.dim())]
    rows = torch.cat([torch.arange(*run, device=q.device) for run in runs or [(0, 0)]])
    highest = _highest(_rows_of(mask, rows), layout, rows, causal).to(wide_dtype(q))
    lost_from = _LOST_AT / torch.finfo(highest.dtype).eps
    is_lost = highest.isfinite() & (highest.abs() >= lost_from)
    return q * (~is_lost).to(q.dtype)  # not a fill with 0: what is nan stays nan


def _first_len(layout: SequenceLayout, ring: int) -> int:
    start, stop = layout.pieces(ring)[0]
    return stop - start


def _masked(
    layout: SequenceLayout, ring: int, mask: Tensor | None, causal: bool, q: Tensor
) -> list[Tile]:
    """By ring rank, all queries and all keys, with what is added to their scores."""
    everything, of_rank = slice(None), range(layout.ring_degree)
    places = [positions_on(layout, other, q.device) for other in of_rank]
    rows, part, level = places[ring], None, None
    if mask is not None:
        part = _rows_of(mask, rows).expand(-1, -1, -1, layout.seq_len)
        if part.is_floating_point():
            level = _level(_highest(part, layout, rows, causal).to(wide_dtype(q)))
    tiles: list[Tile] = []
    for columns in places:
        bias = torch.zeros((1, 1, 1, columns.numel()), dtype=q.dtype, device=q.device)
        if part is not None:
            bias = _bias(part.index_select(3, columns), level, q.dtype)
        if causal:
            bias = bias.masked_fill(rows[:, None] < columns[None, :], -math.inf)
        tiles.append(Tile(everything, everything, AttentionMask(bias=bias)))
    return tiles


def _rows_of(mask: Tensor, rows: Tensor) -> Tensor:
    return mask if mask.shape[2] == 1 else mask.index_select(2, rows)


def _highest(part: Tensor, layout: SequenceLayout, rows: Tensor, causal: bool) -> Tensor:
    """(B or 1, H or 1, rows or 1, 1) the highest that is added to a score of each row."""
    if not layout.seq_len:
        return part.new_zeros(1, 1, 1, 1)
    if not causal:
        return part.amax(dim=3, keepdim=True)
    whole = part.expand(-1, -1, -1, layout.seq_len)
    if part.shape[2] == 1:
        return whole.cummax(dim=3).values.index_select(3, rows).mT
    later = rows[:, None] < torch.arange(layout.seq_len, device=rows.device)
    return whole.masked_fill(later, -math.inf).amax(dim=3, keepdim=True)


def _level(highest: Tensor) -> Tensor:
    """What a row is taken down by; 0 where its LSE loses nothing, and where nothing is seen."""
    is_far = highest.isfinite() & (highest.abs() >= _LEVELLED_FROM)
    return torch.where(is_far, highest, 0.0)


def _bias(part: Tensor, level: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What is added to scores: of the queries' dtype, or float32 as torch takes it for 16 bits."""
    if level is None:
        hidden = torch.zeros(part.shape, dtype=dtype, device=part.device)
        return hidden.masked_fill(~part, -math.inf)
    return (part - level).to(torch.promote_types(part.dtype, dtype))
