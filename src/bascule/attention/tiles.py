"""What the queries of one ring rank see of the keys of another, as tiles for the kernels.

A mask that is added to the scores may hide all keys of a query by a finite number. Parts of such a
row cannot be merged as they are: an LSE of -1e9 + log(n) is -1e9 in float32. So what is added to a
row is taken down by the highest of it, over the keys of all ranks: softmax does not see that, and
the LSE keeps its digits. Where the number is so large that one process loses the scores themselves
in it, they do not count here either.

Shapes: as in `api`; of packed sequences R ring ranks, n chunks of sequences on each.
"""

import math
import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils.weak import WeakIdKeyDictionary

from bascule.arrays import Ints, cumulative, ranges
from bascule.attention.call import Tile
from bascule.attention.kernels.protocol import wide_dtype
from bascule.attention.layout import Run, SequenceLayout, positions_on
from bascule.attention.mask import AttentionMask, PackedSequences
from bascule.comm.collectives import table_on
from bascule.comm.groups import RankGroup
from bascule.plan.sequences import Masks, Pairs, Stretch

Made = TypeVar("Made")

_NUM_KEPT = 16  # layouts, heads and dtypes of one mask
_LEVELLED_FROM = 64.0  # closer to 0, a subtraction in 16 bits could round what is near the highest
_MOST_READ = 1 << 18  # values of a mask that its digest reads one by one
_LOST_AT = 8.0  # spacing of the numbers at a row's highest, of which scores of less than half go


_of_masks: "WeakIdKeyDictionary" = WeakIdKeyDictionary()
"""By mask, its version and what was made of it: all layers of a model use the same mask."""


def kept_of(mask: Tensor | None, key: Hashable, make: Callable[[], Made]) -> Made:
    """Return what `make` gives, for a mask of the host once a key, while nothing writes to it.

    A graph that a device records must not read what was made before it, and tensors of inference
    mode do not tell whether they were written to: of these it is made at every call.
    """
    if mask is None or not mask.is_cpu or mask.is_inference() or is_fake(mask):
        return make()
    version, kept = _of_masks.get(mask) or (-1, dict[Hashable, Any]())
    if version != mask._version:
        kept = dict[Hashable, Any]()
        _of_masks[mask] = mask._version, kept
    if key not in kept:
        if len(kept) >= _NUM_KEPT:
            kept.clear()
        kept[key] = make()
    return kept[key]


def digest_of(mask: Tensor) -> str:
    """Return what tells masks with other values apart; of large ones their sum and samples.

    On other devices than the host only the shape, as the device would have to be waited for.
    """
    if not mask.is_cpu:
        return str(tuple(mask.shape))
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[mask.element_size()]
    values = mask.detach().view(carrier)
    step = (
        1 if values.numel() <= _MOST_READ else values.numel() // _MOST_READ | 1
    )  # odd: all columns
    total, samples = int(values.sum(dtype=torch.int64)), values.flatten()[::step]
    return f"{tuple(mask.shape)} {total} {zlib.crc32(samples.numpy().tobytes())}"


def is_biased(layout: SequenceLayout, causal: bool) -> bool:
    """Return whether tiles add something to the scores, where there is no mask."""
    return causal and (layout.stripe > 0 or len(layout.segments) != 1)


def tiles_of(
    layout: SequenceLayout, ring: int, mask: Tensor | None, causal: bool, q: Tensor
) -> list[list[Tile]]:
    """Return, by ring rank, what the queries of ring rank `ring` see of its keys.

    `mask` is (B or 1, H or 1, S or 1, S or 1) of the whole sequence: bool, or added to the scores;
    `q` has the dtype and device of the queries.
    """
    if mask is not None or is_biased(layout, causal):
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


@dataclass(frozen=True)
class Pieces:
    """The tokens of packed sequences on each rank of a ring.

    A rank has a run of each sequence, and the runs follow each other in ring order; or an early run
    and a late one, of which the late ones follow each other in reverse (see `plan.chunks`).
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
        """(R,) tokens of each ring rank."""
        return self.lens.sum(axis=1).tolist()

    @property
    def num_sent(self) -> int:
        """Keys that this rank passes on in a forward: all but those that end with it."""
        return sum(self.kv_lens) - self.kv_lens[(self.rank + 1) % len(self.kv_lens)]

    @property
    def seq_lens(self) -> Ints:
        """Tokens of each sequence on all ranks together."""
        return self.lens.sum(axis=0).reshape(self.num_runs, -1).sum(axis=0)

    @cached_property
    def _starts(self) -> Ints:
        """(R, n) position of each run in its sequence."""
        early, *late = np.split(self.lens, self.num_runs, axis=1)
        starts = [np.cumsum(early, axis=0) - early]
        starts += [self.seq_lens - np.cumsum(runs, axis=0) for runs in late]
        return np.concatenate(starts, axis=1)

    def _runs(self, rank: int) -> list[Stretch]:
        """The early runs of a ring rank, and its late ones."""
        parts = self._starts[rank], self.lens[rank], cumulative(self.lens[rank])[:-1]
        split = (np.split(part, self.num_runs) for part in parts)
        return [Stretch(*run) for run in zip(*split, strict=True)]

    def tiles(self, masks: Masks | None) -> list[list[Tile]]:
        """By ring rank, what this rank's queries see of its keys: six tiles at most.

        `masks` are of the sequences, in their order; without them tokens see everything.
        """
        if masks is None and self.num_runs == 1:
            return [self._full_tiles(keys) for keys in self.lens]
        masks = masks or Masks.alike(self.seq_lens, causal=False)
        return [self._tiles_of(other, masks) for other in range(len(self.kv_lens))]

    def _full_tiles(self, keys: Ints) -> list[Tile]:
        """All queries and all keys of a ring rank, (n,) of each sequence."""
        queries = self.lens[self.rank]
        if not (queries * keys).any():
            return []
        packed = PackedSequences.build(queries.tolist(), self.device, keys.tolist())
        return [Tile(slice(None), slice(None), AttentionMask(packed=packed))]

    def _tiles_of(self, other: int, masks: Masks) -> list[Tile]:
        here, there = self._runs(self.rank), self._runs(other)
        tiles = [self._tile(other, masks.rectangles(q, k), False) for q in here for k in there]
        if other == self.rank:
            tiles += [self._tile(other, masks.triangles(run), True) for run in here]
        return [tile for tile in tiles if tile is not None]

    def _tile(self, other: int, pairs: Pairs, causal: bool) -> Tile | None:
        if not (pairs.q_lens * pairs.k_lens).any():
            return None
        lens = pairs.q_lens.tolist(), pairs.k_lens.tolist()
        mask = AttentionMask(
            causal=causal, packed=PackedSequences.build(lens[0], self.device, lens[1])
        )
        q = self._rows(pairs.q_rows, pairs.q_lens, self.kv_lens[self.rank])
        return Tile(q, self._rows(pairs.k_rows, pairs.k_lens, self.kv_lens[other]), mask)

    def _rows(self, first: Ints, lens: Ints, num_rows: int) -> slice | Tensor:
        """The rows of some runs, one after the other: a slice where they lie so."""
        first, lens = first[lens > 0], lens[lens > 0]
        if not np.array_equal(first[1:], (first + lens)[:-1]):
            return table_on(ranges(first, lens), self.device)
        start, stop = int(first[0]), int(first[-1] + lens[-1])
        return slice(None) if (start, stop) == (0, num_rows) else slice(start, stop)


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

    def counted() -> Tensor:
        of_all = mask[(None,) * (4 - mask.dim())]
        rows = torch.cat([torch.arange(*run, device=q.device) for run in runs or [(0, 0)]])
        highest = _highest(_rows_of(of_all, rows), layout, rows, causal).to(wide_dtype(q))
        lost_from = _LOST_AT / torch.finfo(highest.dtype).eps
        is_lost = highest.isfinite() & (highest.abs() >= lost_from)
        return (~is_lost).to(q.dtype)

    if torch.compiler.is_compiling():
        return q * counted()
    key = "counted", layout, tuple(runs), causal, q.dtype
    return q * kept_of(mask, key, counted)  # not a fill with 0: what is nan stays nan


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
