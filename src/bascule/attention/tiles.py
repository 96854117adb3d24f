"""Tiles for the kernels: queries of one ring rank, and the keys of another that they see.

A mask may hide all keys of a query by a finite number, and an LSE of -1e9 + log(n) is -1e9 in
float32. So the highest number added to a row, over the keys of all ranks, is subtracted. Then
such a query attends as if nothing were hidden: nobody reads its output.

Shapes: as in `api`; of packed sequences R ring ranks, n chunks of sequences on each.
"""

import math
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils.weak import WeakIdKeyDictionary

from bascule.arrays import Bools, Ints, cumulative, ranges
from bascule.attention.kernels.protocol import wide_dtype
from bascule.attention.layout import SequenceLayout, positions_on
from bascule.attention.mask import PLAIN, AttentionMask, PackedSequences, Scores
from bascule.attention.ring import Tile
from bascule.comm.collectives import table_on
from bascule.comm.groups import Cache, RankGroup
from bascule.comm.route import INTEGERS
from bascule.errors import ConfigError
from bascule.plan.masks import Masks, Stretch

Made = TypeVar("Made")

_NUM_MADE = 16  # layouts, heads and dtypes of one mask
_LEVELLED_FROM = 64.0  # closer to 0, a subtraction in 16 bits could round what is near the highest
_MOST_READ = 1 << 18  # values of a mask that its digest reads one by one
_ALL = slice(None)


class _MaskCache:
    """Objects made of a mask, valid while the mask has the same values."""

    def __init__(self, mask: Tensor) -> None:
        self.made = Cache[Hashable, Any](_NUM_MADE)
        self._version, self._values = None if mask.is_cpu else mask._version, _values(mask).clone()
        # Nothing waits for a device's comparison: a later use reports an earlier change.
        self._is_other = torch.zeros((), dtype=torch.bool, pin_memory=mask.is_cuda)

    def is_valid(self, mask: Tensor) -> bool:
        """Compare a mask by value, as numpy, `.data` and kernels write without a new version."""
        if mask.is_cpu:
            return torch.equal(_values(mask), self._values)
        if mask._version != self._version:
            return False
        if self._is_other:
            wrong = f"attention: .data or a kernel changed a mask on {mask.device} that was used"
            raise ConfigError(f"{wrong}: change it by mask.copy_(..), or give a new tensor")
        self._is_other.copy_((_values(mask) != self._values).any(), non_blocking=True)
        return True


_of_masks: "WeakIdKeyDictionary" = WeakIdKeyDictionary()
"""A `_MaskCache` by mask: all layers of a model use the same mask."""


def cached_by_mask(mask: Tensor | None, key: Hashable, make: Callable[[], Made]) -> Made:
    """Return `make()` for a mask, called once per key while the mask keeps its values.

    It is called every time while CUDA captures a graph, and for inference tensors on devices.
    """
    if mask is None or is_fake(mask) or not (mask.is_cpu or _is_cached_on_device(mask)):
        return make()
    cache = _of_masks.get(mask)
    if cache is None or not cache.is_valid(mask):
        cache = _of_masks[mask] = _MaskCache(mask)
    return cache.made.get(key, make)


def _is_cached_on_device(mask: Tensor) -> bool:
    is_recorded = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    return mask.is_cuda and not mask.is_inference() and not is_recorded


def _values(mask: Tensor) -> Tensor:
    """View a mask as the widest integers that fit: 1 ms for 4096 x 4096 bools of the host."""
    whole = mask.detach()[tuple(slice(None if step else 1) for step in mask.stride())]
    size = mask.element_size()
    if not whole.is_contiguous() or whole.numel() * size % 8 or whole.storage_offset() * size % 8:
        return whole.view(INTEGERS[size])
    return whole.view(-1).view(torch.int64)


def digest_of(mask: Tensor) -> str:
    """Return text that tells masks apart: large masks' sum and samples; the shape on devices."""
    if not mask.is_cpu:
        return str(tuple(mask.shape))
    values = mask.detach().view(INTEGERS[mask.element_size()])
    step = 1 if values.numel() <= _MOST_READ else values.numel() // _MOST_READ | 1  # odd
    total, samples = int(values.sum(dtype=torch.int64)), values.flatten()[::step]
    return f"{tuple(mask.shape)} {total} {zlib.crc32(samples.numpy().tobytes())}"


def is_biased(layout: SequenceLayout, causal: bool) -> bool:
    """Return whether tiles add a bias to the scores even without a mask."""
    return causal and (layout.stripe > 0 or len(layout.segments) != 1)


def tiles_of(
    layout: SequenceLayout,
    ring: RankGroup | None,
    mask: Tensor | None,
    causal: bool,
    q: Tensor,
    scores: Scores,
    documents: Sequence[int] = (),
) -> list[list[Tile]]:
    """Return, by ring rank, which of its keys the queries of this rank see.

    `mask` is (B or 1, H or 1, S or 1, S or 1) of the whole sequence: bool, or added to the scores;
    `q` has the dtype and device of the queries. Windows, chunks and documents need one causal
    segment.
    """
    if scores.is_near or documents:
        lens = [[end - start for start, end in layout.pieces(r)] for r in range(layout.ring_degree)]
        pieces = Pieces(np.array(lens), 2 if layout.zigzag else 1, ring, q.device)
        masks = Masks.alike(np.array(documents or pieces.seq_lens), causal=True)
        # One span a document, of one sequence.
        masks = replace(masks, counts=masks.counts.sum(keepdims=True))
        return pieces.tiles(masks, scores)
    rank = 0 if ring is None else ring.rank
    if mask is not None or is_biased(layout, causal):
        return [[tile] for tile in _masked(layout, rank, mask, causal, q)]

    def first_len(other: int) -> int:
        start, stop = layout.pieces(other)[0]
        return stop - start

    def of_rank(other: int) -> list[Tile]:
        if not causal:
            return [Tile(_ALL, _ALL)]
        if other == rank:
            return [Tile(_ALL, _ALL, AttentionMask(causal=True))]
        if not layout.zigzag:
            return [Tile(_ALL, _ALL)] if other < rank else []
        if other < rank:  # of its two pieces only the early one is before both of this rank's
            return [Tile(_ALL, slice(0, first_len(other)))]
        # only the late piece of this rank is after both of the other's
        return [Tile(slice(first_len(rank), None), _ALL)]

    return [of_rank(other) for other in range(layout.ring_degree)]


@dataclass(frozen=True)
class Pieces:
    """The tokens of packed sequences on each rank of a ring: a run of each sequence in ring order.

    With zigzag, a rank has an early and a late run of each; late runs are in reverse ring order.
    """

    lens: Ints  # (R, n) tokens of each run on each ring rank: the early runs, then the late ones
    num_runs: int  # of a sequence on a rank, 1 or 2
    group: RankGroup | None  # the ring; None for one rank
    device: torch.device  # of the tensors

    @property
    def rank(self) -> int:
        """This rank's place in the ring."""
        return 0 if self.group is None else self.group.rank

    @cached_property
    def kv_lens(self) -> list[int]:
        """Tokens of each ring rank, (R,)."""
        return self.lens.sum(axis=1).tolist()

    @property
    def num_sent(self) -> int:
        """Keys that this rank passes on in a forward: all but those that end with it."""
        return sum(self.kv_lens) - self.kv_lens[(self.rank + 1) % len(self.kv_lens)]

    @property
    def seq_lens(self) -> Ints:
        """Tokens of each sequence, summed over all ranks."""
        return self.lens.sum(axis=0).reshape(self.num_runs, -1).sum(axis=0)

    @cached_property
    def _starts(self) -> Ints:
        """Position of each run in its sequence, (R, n)."""
        early, *late = np.split(self.lens, self.num_runs, axis=1)
        starts = [np.cumsum(early, axis=0) - early]
        starts += [self.seq_lens - np.cumsum(runs, axis=0) for runs in late]
        return np.concatenate(starts, axis=1)

    def _runs(self, rank: int) -> list[Stretch]:
        """Return the early runs of a ring rank, and its late ones."""
        parts = self._starts[rank], self.lens[rank], cumulative(self.lens[rank])[:-1]
        split = (np.split(part, self.num_runs) for part in parts)
        return [Stretch(*run) for run in zip(*split, strict=True)]

    def tiles(self, masks: Masks | None, scores: Scores = PLAIN) -> list[list[Tile]]:
        """Return, by ring rank, the tiles that this rank's queries see; masks by sequence."""
        if masks is None and self.num_runs == 1:  # no causal ones, hence without windows
            mine = self.lens[self.rank]
            return [
                [Tile(_ALL, _ALL, self._packed(mine, keys, False))] if (mine * keys).any() else []
                for keys in self.lens
            ]
        masks, goes_on = masks or Masks.alike(self.seq_lens, causal=False), np.zeros(0, bool)
        if scores.is_near:
            masks, goes_on = masks.chunks(scores.window or scores.chunk)
        near = masks, scores.window, goes_on
        return [self._tiles_of(other, *near) for other in range(len(self.kv_lens))]

    def _packed(self, q_lens: Ints, k_lens: Ints, causal: bool) -> AttentionMask:
        packed = PackedSequences.build(q_lens.tolist(), self.device, k_lens.tolist())
        return AttentionMask(causal=causal, packed=packed)

    def _tiles_of(self, other: int, masks: Masks, window: int, goes_on: Bools) -> list[Tile]:
        here, there = self._runs(self.rank), self._runs(other)
        pairs = [(masks.rectangles(q, k), False, False) for q in here for k in there]
        if other == self.rank:
            pairs += [(masks.triangles(run), True, False) for run in here]
        for q, k in product(here, there) if window else ():
            *rectangles, turned = masks.before(q, k, window, goes_on)
            pairs += [*((spans, False, False) for spans in rectangles), (turned, True, True)]
        num_q, num_k = self.kv_lens[self.rank], self.kv_lens[other]
        tiles = list[Tile]()
        for spans, causal, is_turned in pairs:
            if (spans.q_lens * spans.k_lens).any():
                q_rows = self._rows(spans.q_rows, spans.q_lens, num_q, is_turned)
                k_rows = self._rows(spans.k_rows, spans.k_lens, num_k, is_turned)
                order = slice(None, None, -1 if is_turned else 1)
                packed = self._packed(spans.q_lens[order], spans.k_lens[order], causal)
                tiles.append(Tile(q_rows, k_rows, packed))
        return tiles

    def _rows(self, first: Ints, lens: Ints, num_rows: int, is_turned: bool) -> slice | Tensor:
        """Return the rows of runs, one after the other or in reverse: a slice where they lie so."""
        first, lens = first[lens > 0], lens[lens > 0]
        if is_turned:
            return table_on(ranges(first, lens)[::-1].copy(), self.device)
        if not np.array_equal(first[1:], (first + lens)[:-1]):
            return table_on(ranges(first, lens), self.device)
        start, stop = int(first[0]), int(first[-1] + lens[-1])
        return _ALL if (start, stop) == (0, num_rows) else slice(start, stop)


def _masked(
    layout: SequenceLayout, ring: int, mask: Tensor | None, causal: bool, q: Tensor
) -> list[Tile]:
    """Return, by ring rank, a tile of all queries and all keys with a bias."""
    places = [positions_on(layout, other, q.device) for other in range(layout.ring_degree)]
    rows = places[ring]
    if mask is None:
        part = torch.zeros((1, 1, 1, layout.seq_len), dtype=q.dtype, device=q.device)
    else:
        part = mask if mask.shape[2] == 1 else mask.index_select(2, rows)
        part = part.expand(-1, -1, -1, layout.seq_len)
        if part.is_floating_point():
            highest = _highest(part, layout.seq_len, rows if causal else None).to(wide_dtype(q))
            # Not where the LSE loses nothing, nor where nothing is seen.
            is_far = highest.isfinite() & (highest.abs() >= _LEVELLED_FROM)
            # Of the queries' dtype, or float32 as torch takes it for 16 bits.
            dtype = torch.promote_types(part.dtype, q.dtype)
            part = (part - torch.where(is_far, highest, 0.0)).to(dtype)
        else:
            part = torch.zeros_like(part, dtype=q.dtype).masked_fill(~part, -math.inf)
    tiles: list[Tile] = []
    for columns in places:
        bias = part.index_select(3, columns)
        if causal:
            bias = bias.masked_fill(rows[:, None] < columns, -math.inf)
        tiles.append(Tile(_ALL, _ALL, AttentionMask(bias=bias)))
    return tiles


def _highest(part: Tensor, num_keys: int, rows: Tensor | None) -> Tensor:
    """Return the highest bias of each row (.., rows or 1, 1); given positions, of no later key."""
    if not num_keys:
        return part.new_zeros(1, 1, 1, 1)
    if rows is not None:
        later = rows[:, None] < torch.arange(num_keys, device=rows.device)
        part = part.expand(-1, -1, -1, num_keys).masked_fill(later, -math.inf)
    return part.amax(dim=3, keepdim=True)
