"""An attention over ranks, but for its tensors: made once, then used by all layers and steps.

Shapes: as in `usp`; R ring ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bascule.attention.kernels.protocol import AttentionKernel
from bascule.attention.mask import EVERYTHING, AttentionMask
from bascule.comm.groups import RankGroup
from bascule.comm.heads import HeadExchange
from bascule.comm.wire import Format, Wire


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Queries of this rank that attend to keys of one shard."""

    q: "slice | Tensor"  # which queries of this rank; numbers of rows are int64, each of them once
    k: "slice | Tensor"  # which keys of the shard; numbers of rows may repeat
    mask: AttentionMask = EVERYTHING  # what those see of these


Tiles = Sequence[Sequence[Tile]]
"""By ring rank, what the queries here see of its keys."""


def _count_nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """What is fixed of an attention; made by a step, a mesh or a sparse plan."""

    kernel: AttentionKernel  # computes a tile
    scale: float  # factor of the scores, above 0
    # from a mask (None if there is none) to what queries here see
    tiles: Callable[[Tensor | None], Tiles]
    kv_lens: Sequence[int]  # (R,) keys that each ring rank has at home
    ring: RankGroup | None = None  # the ranks that pass keys and values on; None for one
    # how ranks share heads; None: this rank's tokens are all of its ring place
    heads: HeadExchange | None = None
    # format of rows on the wire; None: they travel as they are. Gradients always do.
    wire: Format | None = None
    overlap: bool = False  # whether rows travel while the rank attends to its own tokens
    double_buffer: bool = True  # whether a ring attends while keys and values travel
    where: str = "attention"  # for errors and profiles
    name: str = ""  # with `sizes`, by which a recorded program finds this; see `usp.find_call`
    # S, this rank's heads of queries and of keys (0 each where no heads are shared), then the
    # segments of a layout, or the number of a step
    sizes: Sequence[int] = ()
    count: Callable[[], object] = _count_nothing  # called after each forward

    def owner(self, turn: int) -> int:
        """Ring rank whose keys are at hand in a round."""
        return ((0 if self.ring is None else self.ring.rank) - turn) % len(self.kv_lens)

    def rows(self, centres: Tensor | None, dtype: torch.dtype) -> "Rows | None":
        """Return how rows of this dtype travel, with centres (2, B, K, 1, D) of keys and values."""
        if self.wire is None:
            return None
        wire = Wire(self.wire) if centres is None else Wire(self.wire, centres[0], centres[1])
        if self.heads is None:
            return Rows(wire, wire, dtype)
        first, own = self.heads.first_kv_head, self.heads.own_kv_heads
        return Rows(wire, wire.of_heads(first, own), dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """How rows (B, tokens, heads, D) travel by a wire."""

    wire: Wire  # with centres of all heads
    mine: Wire  # with those of this rank's heads
    dtype: torch.dtype  # of the rows

    def packed(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return queries, keys and values of all heads as they travel."""
        centres = None, self.wire.k_centre, self.wire.v_centre
        return [_packed(self.wire, x, centre) for x, centre in zip(xs, centres, strict=True)]

    def unpacked(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return those of this rank's heads, as they came."""
        centres, mine = (None, self.mine.k_centre, self.mine.v_centre), self.mine
        pairs = zip(xs, centres, strict=True)
        return [_unpacked(mine, x, self.dtype, centre) for x, centre in pairs]

    def packed_out(self, out: Tensor) -> Tensor:
        """Return the output of this rank's heads as it travels."""
        return _packed(self.mine, out, self.mine.out_centre(out.shape[2]))

    def unpacked_out(self, out: Tensor, wire: Wire) -> Tensor:
        """Return the output of the heads of `wire`, one of the two."""
        return _unpacked(wire, out, self.dtype, wire.out_centre(out.shape[2]))


def _packed(wire: Wire, x: Tensor, centre: Tensor | None) -> Tensor:
    return wire.pack(x.transpose(1, 2), centre).transpose(1, 2)


def _unpacked(wire: Wire, x: Tensor, dtype: torch.dtype, centre: Tensor | None) -> Tensor:
    return wire.unpack(x.transpose(1, 2), dtype, centre).transpose(1, 2)
