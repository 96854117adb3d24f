"""An attention over ranks, but for its tensors: made once, then used by all layers and steps.

Shapes: as in `usp`; R ring ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from bascule.attention.kernels.protocol import AttentionKernel
from bascule.attention.mask import EVERYTHING, AttentionMask
from bascule.comm.groups import RankGroup
from bascule.comm.heads import HeadExchange
from bascule.comm.quantized import Quantized


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Queries of this rank that attend to keys of one shard."""

    q: "slice | Tensor"  # which queries of this rank; numbers of rows are int64, each of them once
    k: "slice | Tensor"  # which keys of the shard; numbers of rows may repeat
    mask: AttentionMask = EVERYTHING  # what those see of these


Tiles = Sequence[Sequence[Tile]]
"""By ring rank, what the queries here see of its keys."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """All that is fixed of an attention; made by a step, a mesh or a sparse plan."""

    kernel: AttentionKernel  # computes a tile
    scale: float  # factor of the scores, above 0
    # what queries here see; a function of the mask (None if there is none) where it depends on it
    tiles: Tiles | Callable[[Tensor | None], Tiles]
    kv_lens: Sequence[int]  # (R,) keys that each ring rank has at home
    ring: RankGroup | None = None  # the ranks that pass keys and values on; None for one
    # how ranks share heads; None: no other rank has tokens of this ring place
    heads: HeadExchange | None = None
    # how rows travel; None: as they are. Gradients always do.
    quantized: Quantized | None = None
    overlap: bool = False  # whether rows travel while the rank attends to its own tokens
    double_buffer: bool = True  # whether a ring attends while keys and values travel
    where: str = "attention"  # for errors and profiles
    name: str = ""  # with `sizes`, by which a recorded program finds this; see `usp.find_call`
    # S, this rank's heads of queries and keys (0 if unshared), then segments or a step's number
    sizes: Sequence[int] = ()
    count: Callable[[], object] | None = None  # called after each forward

    def owner(self, turn: int) -> int:
        """Ring rank whose keys are at hand in a round."""
        return ((0 if self.ring is None else self.ring.rank) - turn) % len(self.kv_lens)
