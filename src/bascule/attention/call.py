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
    """Queries of this rank that attend to keys of one shard.

    Attributes:
        q: Which queries of this rank; numbers of rows are int64, each of them once.
        k: Which keys of the shard; numbers of rows may repeat.
        mask: What those see of these.
    """

    q: "slice | Tensor"
    k: "slice | Tensor"
    mask: AttentionMask = EVERYTHING


Tiles = Sequence[Sequence[Tile]]
"""By ring rank, what the queries here see of its keys."""


def _count_nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """What is fixed of an attention; made by a step, a mesh or a sparse plan.

    Attributes:
        kernel: Computes a tile.
        scale: Factor of the scores, above 0.
        tiles: From a mask (None if there is none) to what queries here see.
        kv_lens: (R,) keys that each ring rank has at home.
        ring: The ranks that pass keys and values on; None for one.
        heads: How ranks share heads; None: this rank's tokens are all of its ring place.
        wire: Format of rows on the wire; None: they travel as they are. Gradients always do.
        overlap: Whether rows travel while the rank attends to its own tokens.
        double_buffer: Whether a ring attends while keys and values travel.
        where: For errors and profiles.
        name: With `sizes`, by which a recorded program finds this; see `usp.find_call`.
        sizes: S, this rank's heads of queries and of keys (0 each where no heads are shared), then
            the segments of a layout, or the number of a step.
        count: Called after each forward.
    """

    kernel: AttentionKernel
    scale: float
    tiles: Callable[[Tensor | None], Tiles]
    kv_lens: Sequence[int]
    ring: RankGroup | None = None
    heads: HeadExchange | None = None
    wire: Format | None = None
    overlap: bool = False
    double_buffer: bool = True
    where: str = "attention"
    name: str = ""
    sizes: Sequence[int] = ()
    count: Callable[[], object] = _count_nothing

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
    """How rows (B, tokens, heads, D) travel by a wire.

    Attributes:
        wire: With centres of all heads.
        mine: With those of this rank's heads.
        dtype: Of the rows.
    """

    wire: Wire
    mine: Wire
    dtype: torch.dtype

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
