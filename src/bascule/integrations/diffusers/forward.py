"""One forward pass of a split model: what is cut, what is attended to, what is gathered.

Shapes: B batch, S tokens of the whole sequence.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bascule.attention.api import AttentionMesh, SequenceLayout, gather, split
from bascule.comm.quantize import Wire
from bascule.errors import ConfigError
from bascule.integrations.diffusers.sparse.layers import SparseLayer, SparsePass
from bascule.integrations.diffusers.tables import Cut, SplitTable
from bascule.integrations.sdpa.call_mode import num_calls
from bascule.integrations.sdpa.mode import SequenceParallelMode


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What decides the bytes of an attention, apart from the layout.

    Attributes:
        batch: B.
        num_heads: H.
        num_kv_heads: K.
        row_bytes: Of one token and head on the wire.
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Attended:
    """What a forward pass attended to over the mesh.

    Attributes:
        lengths: Tokens of each segment, in the order of the table.
        shapes: How often each shape was attended, by dense attention.
        sparse: Each layer of block-sparse attention.
    """

    lengths: tuple[int, ...]
    shapes: Mapping[AttentionShape, int]
    sparse: tuple[SparseLayer, ...] = ()


class Forward(SequenceParallelMode):
    """The lengths that a forward pass has met; while entered, its attention is over the mesh.

    Lengths are those of whole tensors, before they are cut, so they are the same on every rank.

    Attributes:
        depth: How many calls of the model were running when it began, itself among them; 0 if it
            was not begun by a call, and -1 where a compiler does not tell.
        thread: That of the call; None where a compiler does not tell.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: AttentionMesh,
        table: SplitTable,
        wire: Wire | None = None,
        sparse: SparsePass | None = None,
    ) -> None:
        super().__init__(mesh, wire=wire)
        self.depth = 0
        self.thread: int | None = None
        self._model = model
        self._sparse = sparse
        # The first tensor of each segment, and its dim: a compiler takes the size of a tensor for
        # symbolic, and a number that one graph leaves to another for a constant.
        self._wholes: dict[str, tuple[Tensor, int]] = {}
        self._shapes: Counter[AttentionShape] = Counter()
        self._table = table
        self._masks: dict[str, Tensor] = {}
        self._key_mask: Tensor | None = None

    def is_running(self) -> bool:
        """Whether the call that began it has not ended, also not by an interrupt."""
        if torch.compiler.is_compiling() or self.depth == 0:
            return True
        wanted = max(self.depth, 1)
        return num_calls(self._model, self.thread, wanted) == wanted

    def split(self, value: Any, cut: Cut, name: str) -> Any:
        """This rank's share of a tensor, or of each tensor of a list."""
        if isinstance(value, list | tuple):
            return type(value)(self.split(one, cut, name) for one in value)
        if not isinstance(value, Tensor) or cut.ndim not in (None, value.dim()):
            return value
        self._meet(cut.segment, value, cut.dim, name)
        return split(value, self.mesh, self._layout_of(cut.segment), cut.dim)

    def gather(self, x: Tensor, cut: Cut) -> Tensor:
        """The tokens of all ranks. Gradients are scaled for averaging over the ranks.

        Every rank has the whole output, computes the same loss, and gets the gradients of its own
        tokens; parameters get the part of their gradient that these tokens have. The sum over the
        N ranks is the gradient; FSDP and DDP divide it by N, so each part is multiplied by N.
        """
        layout = self._layout_of(cut.segment)
        tokens = layout.num_tokens(*self.mesh.place)
        if x.shape[cut.dim] != tokens:
            raise ConfigError(
                f"a tensor {tuple(x.shape)} to be gathered has {x.shape[cut.dim]} tokens of "
                f"{cut.segment}, and this rank has {tokens}: the table does not fit the model"
            )
        num_ranks = self.mesh.degrees[0] * self.mesh.degrees[1]
        return _ScaleGradient.apply(gather(x, self.mesh, layout, cut.dim), num_ranks)

    def take_mask(self, mask: Tensor, segment: str, name: str) -> None:
        """Say which keys of a segment are seen, for attention to know: (B, tokens), nonzero is."""
        if mask.dim() != 2:
            raise ConfigError(f"{name} has the shape {tuple(mask.shape)}: give (batch, tokens)")
        self._meet(segment, mask, 1, name)
        self._masks[segment] = mask.to(torch.bool)

    def layout_of(self, num_tokens: int) -> SequenceLayout:
        """Of the whole sequence."""
        missing = [name for name in self._table.segments if name not in self._wholes]
        if missing:
            raise ConfigError(
                f"attention before the length of {missing[0]} is known: let the table cut an input "
                "or output of a module that comes earlier"
            )
        return self._layout_of(*self._table.segments)

    def mask_of(self, query: Tensor, mask: Tensor | None) -> Tensor | None:
        """(B, 1, 1, S), from the masks that the model was given."""
        if not self._masks:
            return mask
        if mask is not None:
            raise ConfigError(
                f"attention with a mask of shape {tuple(mask.shape)}, in a model whose masks "
                f"{list(self._table.masks)} are applied to it already"
            )
        if self._key_mask is None:
            every = query.new_ones(query.shape[0], 1, dtype=torch.bool)
            parts = [
                self._masks.get(name, every.expand(-1, self._length(name)))
                for name in self._table.segments
            ]
            self._key_mask = torch.cat(parts, dim=1)[:, None, None, :]
        return self._key_mask

    def begin_block(self, name: str) -> None:
        """A block of the table runs."""
        self.has_attended = False
        if self._sparse is not None:
            self._sparse.begin_block(name, is_again=self.depth == 0)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: SequenceLayout,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        """Attention over the mesh, block-sparse where that was asked for."""
        if self._sparse is not None:
            _check_sparse(mask, is_causal)
            layer = self._sparse.next_layer()
            if layer is not None:
                return self._sparse.attend(layer, (query, key, value), layout.segments, scale)
        if not torch.compiler.is_compiling():
            self._shapes[self._shape_of(query, key)] += 1
        return super().attend(query, key, value, layout, mask, is_causal, scale)

    def end(self) -> Attended | None:
        """What was attended to; None for nothing, and in compiled graphs, which do not count.

        Raises:
            ConfigError: Block masks are of more layers.
        """
        sparse: tuple[SparseLayer, ...] = ()
        if self._sparse is not None:
            self._sparse.end()
            sparse = tuple(self._sparse.done.values())
        if not self._shapes and not sparse:
            return None
        return Attended(tuple(map(self._length, self._table.segments)), dict(self._shapes), sparse)

    def _shape_of(self, query: Tensor, key: Tensor) -> AttentionShape:
        (batch, num_heads, _, head_dim), num_kv_heads = query.shape, key.shape[1]
        full = head_dim * query.element_size()
        row_bytes = self.wire.row_bytes(head_dim) if self.wire else full
        return AttentionShape(batch, num_heads, num_kv_heads, row_bytes)

    def _meet(self, segment: str, whole: Tensor, dim: int, name: str) -> None:
        self._wholes.setdefault(segment, (whole, dim))
        if whole.shape[dim] != self._length(segment):
            raise ConfigError(
                f"{name} has {whole.shape[dim]} tokens of {segment}, and another input has "
                f"{self._length(segment)}"
            )

    def _length(self, segment: str) -> int:
        whole, dim = self._wholes[segment]
        return whole.shape[dim]

    def _layout_of(self, *segments: str) -> SequenceLayout:
        stripe = 0 if self._sparse is None else self._sparse.layers.config.dealt
        return SequenceLayout(tuple(map(self._length, segments)), *self.mesh.degrees, stripe=stripe)


def _check_sparse(mask: Tensor | None, is_causal: bool) -> None:
    if torch.compiler.is_compiling():
        raise ConfigError("block-sparse attention is planned in every step: do not compile it")
    if mask is not None or is_causal:
        said = "is_causal=True" if mask is None else f"a mask of shape {tuple(mask.shape)}"
        raise ConfigError(
            f"block-sparse attention, and the model gives it {said}: take it out of the model's "
            "inputs, or leave out sparse"
        )


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.factor, None
