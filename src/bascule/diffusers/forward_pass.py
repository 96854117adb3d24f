"""One forward pass of a split model: what is cut, what is attended to, what is gathered.

Shapes: B batch, S tokens of the whole sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bascule.attention.api import (
    AttentionMesh,
    AttentionOptions,
    SequenceLayout,
    gather,
    split,
)
from bascule.diffusers.sparse_layers import SparseLayer, SparsePass
from bascule.diffusers.split_table import Cut, Keys, Mask, SplitTable
from bascule.diffusers.work import Attended, AttentionShape, WorkCounter
from bascule.errors import ConfigError
from bascule.sdpa.call_mode import num_calls
from bascule.sdpa.mode import SequenceParallelMode, as_it_is


class Forward(SequenceParallelMode):
    """The lengths that a forward pass has met; while entered, its attention is over the mesh.

    Lengths are those of whole tensors, before they are cut, so they are the same on every rank.

    Attributes:
        depth: How many calls of the model were running when it began, itself among them; 0 if it
            was not begun by a call, and -1 where a compiler does not tell.
        thread: That of the call; None where a compiler does not tell.
        form: That of its inputs.

    Args:
        model: The model.
        mesh: The ranks. One alone leaves the model's attention as it is, but block-sparse, or with
            a kernel of the user's choice.
        table: What is cut.
        options: How rows travel, and what computes.
        sparse: The plans of block-sparse attention; None for dense attention.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: AttentionMesh,
        table: SplitTable,
        options: AttentionOptions,
        sparse: SparsePass | None = None,
        *,
        form: object = None,
    ) -> None:
        super().__init__(mesh, options=options)
        self.depth, self.form = 0, form
        self.thread: int | None = None
        self._model = model
        self._sparse = sparse
        # The first tensor of each segment, and its dim: a compiler takes the size of a tensor for
        # symbolic, and a number that one graph leaves to another for a constant.
        self._wholes: dict[str, tuple[Tensor, int]] = {}
        self._work: WorkCounter | None = None
        self._is_whole = mesh.whole is None and sparse is None and options.kernel is None
        self._table = table
        # What is attended to, and above what was before.
        self._parts: list[tuple[str, ...] | Keys] = [table.segments]
        self._masks: dict[str, tuple[Tensor, Mask]] = {}
        self._joint_masks: dict[tuple[str, ...], Tensor] = {}

    def sees_attention(self) -> bool:
        """Return whether it is entered as a mode: attention is replaced, or counted."""
        return self._work is not None or not self._is_whole

    def enter(self) -> None:
        """Begin; a mode costs microseconds for each of torch's functions."""
        if self.sees_attention():
            super().enter()

    def leave(self) -> None:
        """End what `enter` began."""
        if self.sees_attention():
            super().leave()

    def _counter(self) -> WorkCounter | None:
        """What counts what is computed, if anything does, and for the first time."""
        return None if torch.compiler.is_compiling() or self.depth <= 0 else self._work

    def is_running(self) -> bool:
        """Return whether the call that began it has not ended, also not by an interrupt."""
        if torch.compiler.is_compiling() or self.depth == 0:
            return True
        wanted = max(self.depth, 1)
        return num_calls(self._model, self.thread, wanted) == wanted

    def split(self, value: Any, cut: Cut | Mask, name: str) -> Any:
        """This rank's share of a tensor, of each tensor of a list or mapping, or of a count."""
        if isinstance(cut, Mask):
            return self._take_mask(value, cut, name) if isinstance(value, Tensor) else value
        if isinstance(value, Mapping):
            return {key: self.split(one, cut, name) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.split(one, cut, name) for one in value)
        if isinstance(value, int) and cut.ndim == 0:
            shares = self.layout(*cut.segments).shares(*self.mesh.place)
            return sum(max(0, min(stop, value) - start) for start, stop in shares)
        if not isinstance(value, Tensor) or cut.ndim not in (None, value.dim()):
            return value
        if value.dim() <= cut.dim:
            raise ConfigError(
                f"{name} has the shape {tuple(value.shape)}: its tokens are dim {cut.dim}, after "
                "the batch"
            )
        if not cut.segments:
            return split(value, self.mesh, self._layout_of({"": value.shape[cut.dim]}), cut.dim)
        self._meet(cut, value, name)
        return split(value, self.mesh, self.layout(*cut.segments), cut.dim)

    def gather(self, x: Tensor, cut: Cut) -> Tensor:
        """The tokens of all ranks. Their gradients are summed over the copies of all ranks.

        Every rank has the whole output and computes the same loss, so of N ranks each gets N times
        the gradients of its own tokens, and parameters N times the part that these tokens have: the
        mean over the ranks, as FSDP and DDP take it, is the gradient. Where what is gathered is cut
        again, each copy has the part of the gradient that comes from its rank's new tokens.
        """
        layout = self.layout(*cut.segments)
        tokens = layout.num_tokens(*self.mesh.place)
        if x.shape[cut.dim] != tokens:
            raise ConfigError(
                f"a tensor {tuple(x.shape)} to be gathered has {x.shape[cut.dim]} tokens of "
                f"{' and '.join(cut.segments)}, and this rank has {tokens}: the table does not fit "
                "the model"
            )
        return gather(x, self.mesh, layout, cut.dim, sums_gradients=True)

    def layout_of(self, num_tokens: int) -> SequenceLayout:
        """Of all that is attended to."""
        return self.layout(*self._segments())

    def layout(self, *segments: str) -> SequenceLayout:
        """Of these segments, one after the other."""
        missing = [name for name in segments if name not in self._wholes]
        if missing:
            raise ConfigError(
                f"the length of {missing[0]} is not known yet: let the table cut an input or "
                "output of a module that comes earlier"
            )
        return self._layout_of({name: self._length(name) for name in segments})

    def _layout_of(self, lengths: Mapping[str, int]) -> SequenceLayout:
        stripe = 0 if self._sparse is None else self._sparse.layers.config.dealt
        return layout_of(lengths, self.mesh, self._table, stripe)

    def mask_of(self, query: Tensor, mask: Tensor | None) -> Tensor | None:
        """(B, 1, 1, S), or (B, 1, S, S), from the masks that modules were given."""
        part = self._segments()
        taken = [self._masks[name][1] for name in part if name in self._masks]
        if not taken:
            return mask
        if mask is not None and not any(one.of_pairs for one in taken):
            raise ConfigError(
                f"attention with a mask of shape {tuple(mask.shape)}, in a model whose masks of "
                f"{list(self._masks)} are applied to it already"
            )
        if part not in self._joint_masks:
            self._joint_masks[part] = self._joint_mask(query.shape[0])
        return self._joint_masks[part]

    def other_keys(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """Those of all ranks, in a module whose keys are of another segment than its queries."""
        part = self._parts[-1]
        if not isinstance(part, Keys):
            return None
        layout = self.layout(part.segment)
        if (work := self._counter()) is not None:
            work.attend(self._shape_of(query, key, layout, gathers=True))
            work.attend_to_all(query, layout.seq_len)
        both = torch.cat([key, value], dim=-1)
        whole = gather(both, self.mesh, layout, 2, sums_gradients=True)
        key, value = whole.split([key.shape[-1], value.shape[-1]], dim=-1)
        return key, value

    def attends_locally(self) -> bool:
        """Return whether attention is left as it is."""
        return not self._parts[-1]

    def enter_part(self, segments: tuple[str, ...] | Keys) -> None:
        """Attend to these segments from here on; to none: leave attention as it is."""
        self._parts.append(segments)

    def leave_part(self) -> None:
        """End what the last `enter_part` began."""
        self._parts.pop()

    def begin_block(self, name: str) -> None:
        """A block of the table runs."""
        self.has_attended = False
        if (work := self._counter()) is not None:
            work.begin_block(name)
        if self._sparse is not None:
            self._sparse.begin_block(name, is_again=self.depth == 0)

    def end_block(self) -> None:
        """It ran."""
        if (work := self._counter()) is not None:
            work.end_block()

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
                lengths = dict(zip(self._segments(), layout.segments, strict=True))
                return self._sparse.attend(layer, (query, key, value), lengths, scale)
        if (work := self._counter()) is not None:
            work.attend(self._shape_of(query, key, layout))
        if self._is_whole:
            dense = functional.scaled_dot_product_attention
            gqa = query.shape[1] != key.shape[1]
            given = {"attn_mask": mask, "is_causal": is_causal, "scale": scale, "enable_gqa": gqa}
            return as_it_is(dense, query, key, value, **given)
        out = super().attend(query, key, value, layout, mask, is_causal, scale)
        if not any(
            self._masks[name][1].of_pairs for name in self._segments() if name in self._masks
        ):
            return out
        assert mask is not None
        seen = split(mask, self.mesh, layout, 3)
        return out.masked_fill(~seen.mT, 0.0)

    def end(self) -> Attended | None:
        """What was attended to; None for nothing, and where nothing was counted.

        Raises:
            ConfigError: Block masks are of more layers.
        """
        sparse: tuple[SparseLayer, ...] = ()
        if self._sparse is not None:
            self._sparse.end()
            sparse = tuple(self._sparse.done.values())
        work = {} if self._work is None else self._work.kinds
        if not any(one.shapes for one in work.values()) and not sparse:
            return None
        lengths = {name: self._length(name) for name in self._wholes}
        return Attended(lengths, work, sparse)

    def _shape_of(
        self, query: Tensor, key: Tensor, layout: SequenceLayout, *, gathers: bool = False
    ) -> AttentionShape:
        (batch, num_heads, _, head_dim), num_kv_heads = query.shape, key.shape[1]
        row_bytes, more_rows = head_dim * query.element_size(), 0
        quantized = self.options.quantized
        if quantized is not None and not gathers:
            row_bytes, more_rows = quantized.row_bytes(head_dim), quantized.num_more
        args = batch, num_heads, num_kv_heads, row_bytes, head_dim
        return AttentionShape(*args, layout.segments, gathers, more_rows)

    def _segments(self) -> tuple[str, ...]:
        """Names of what is attended to over the mesh."""
        part = self._parts[-1]
        assert not isinstance(part, Keys)
        return part

    def _take_mask(self, mask: Tensor, of: Mask, name: str) -> Tensor | None:
        """Let attention see a mask whole; what the module gets in its place."""
        if mask.dim() not in (2, 3):
            raise ConfigError(
                f"{name} has the shape {tuple(mask.shape)}: give (batch, tokens), or (batch, "
                "tokens, tokens)"
            )
        cut = Cut(of.segment)
        self._meet(cut, mask, name)
        if self._is_whole:
            return mask
        if self._masks.get(of.segment, (None,))[0] is not mask:
            self._masks[of.segment] = mask, of
            self._joint_masks.clear()
        return self.split(mask, cut, name) if of.of_pairs else None

    def _joint_mask(self, batch: int) -> Tensor:
        """Of all that is attended to, where some of it has a mask."""
        part = self._segments()
        masks = {name: self._masks[name][0] for name in part if name in self._masks}
        first = next(iter(masks.values()))
        if first.dim() == 3 and len(part) == 1:
            return first[:, None]
        if any(mask.dim() == 3 for mask in masks.values()):
            raise ConfigError(
                f"a mask of pairs of tokens of {list(masks)}, and attention over {list(part)}: "
                "the split table must let these attend to themselves alone"
            )
        every = first.new_ones(batch, 1, dtype=torch.bool)
        parts = [
            masks[name].to(torch.bool) if name in masks else every.expand(-1, self._length(name))
            for name in part
        ]
        return torch.cat(parts, dim=1)[:, None, None, :]

    def _meet(self, cut: Cut, whole: Tensor, name: str) -> None:
        if len(cut.segments) == 1 and cut.segments[0] not in self._wholes:
            self._wholes[cut.segments[0]] = whole, cut.dim
            if self._work is not None and not torch.compiler.is_compiling():
                self._work.take_lengths(self._by_share())  # inputs are cut before the call counts
        wanted = self.layout(*cut.segments).seq_len
        if whole.shape[cut.dim] != wanted:
            raise ConfigError(
                f"{name} has {whole.shape[cut.dim]} tokens of {' and '.join(cut.segments)}, and "
                f"another input has {wanted}"
            )

    def _by_share(self) -> dict[int, int]:
        """By tokens of this rank, those of the whole: of each segment that is known, and of all."""
        known = [name for name in self._table.segments if name in self._wholes]
        groups = [[name] for name in known] + [known]
        place = self.mesh.place
        layouts = [self.layout(*names) for names in groups]
        return {one.num_tokens(*place): one.seq_len for one in layouts}

    def _length(self, segment: str) -> int:
        whole, dim = self._wholes[segment]
        return whole.shape[dim]


class CountingForward(Forward):
    """One that counts what is computed, for `explain`; so it sees all of torch's functions."""

    def __init__(self, *args: Any, form: object) -> None:
        super().__init__(*args, form=form)
        self._work = WorkCounter()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What torch calls instead of each of its functions."""
        if (work := self._counter()) is not None:
            work.see(func, args)
        return super().__torch_function__(func, types, args, kwargs)


def layout_of(
    lengths: Mapping[str, int], mesh: AttentionMesh, table: SplitTable, stripe: int
) -> SequenceLayout:
    """Which tokens of these segments each rank has; `stripe` as in `SequenceLayout`."""
    num_ranks = mesh.degrees[0] * mesh.degrees[1]
    return SequenceLayout(
        tuple(lengths.values()),
        *mesh.degrees,
        stripe=stripe,
        replicated=tuple(
            place
            for place, (name, length) in enumerate(lengths.items())
            if name in table.nonempty and length <= (num_ranks - 1) * max(stripe, 1)
        ),
    )


def _check_sparse(mask: Tensor | None, is_causal: bool) -> None:
    if torch.compiler.is_compiling():
        raise ConfigError("block-sparse attention is planned in every step: do not compile it")
    if mask is not None or is_causal:
        said = "is_causal=True" if mask is None else f"a mask of shape {tuple(mask.shape)}"
        raise ConfigError(
            f"block-sparse attention, and the model gives it {said}: take it out of the model's "
            "inputs, or leave out sparse"
        )
