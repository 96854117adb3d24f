"""One forward pass of a split model: lengths, cuts, masks and attention over the mesh.

Shapes: B batch, S tokens of the whole sequence.
"""

import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, overrides
from torch.nn import functional

from bascule.arrays import Bools
from bascule.attention.api import (
    AttentionMesh,
    AttentionOptions,
    SequenceLayout,
    attention,
    gather,
    split,
)
from bascule.attention.layout import gather_rows, take_runs
from bascule.comm.agree import agree
from bascule.comm.transforms import is_recorded
from bascule.diffusers import recorded
from bascule.diffusers.sparse_layers import SparseLayer, SparsePass
from bascule.diffusers.split_table import Cut, Input, Keys, Mask, SplitTable
from bascule.errors import ConfigError
from bascule.sdpa import SequenceParallelMode, as_it_is, num_modes, refuse_modes


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes that decide the bytes and FLOPs of an attention, apart from the mesh."""

    batch: int
    num_heads: int
    num_kv_heads: int
    row_bytes: int  # of one token and head as they travel
    head_dim: int
    segments: tuple[int, ...]  # tokens of each, as they follow each other in attention
    gathers: bool = False  # all keys and values to every rank; nothing else travels


@dataclass(frozen=True, slots=True)
class PassRecord:
    """The attention of a forward pass over a mesh."""

    degrees: tuple[int, int]  # of the mesh, (R, U)
    lengths: Mapping[str, int]  # tokens of each segment
    shapes: Counter[AttentionShape]  # number of dense attentions
    sparse: tuple[SparseLayer, ...] = ()


class Share(NamedTuple):
    """This rank's part of some segments, one after the other."""

    layout: SequenceLayout
    seq_len: int  # S
    num_tokens: int  # of this rank
    runs: list[tuple[int, int]]  # in the sequence, of this rank's tokens
    options: AttentionOptions  # with the layout


Shares = dict[tuple[tuple[str, ...], tuple[int, ...]], Share]
"""Shares by names and lengths of segments."""


class ForwardPass(SequenceParallelMode):
    """A forward pass and the tensors it has cut; while entered, it attends over the mesh."""

    def __init__(
        self,
        mesh: AttentionMesh,
        table: SplitTable,
        options: AttentionOptions,
        sparse: SparsePass | None = None,
        kept: Shares | None = None,
        *,
        form: object = None,
    ) -> None:
        super().__init__(mesh, options=options)
        self.form, self.thread = form, 0  # mesh, names, shapes and dtypes of the inputs
        # Modules run again, by checkpointing; the mode is around the model, else modules that
        # attend; it came to be around the model only while that ran.
        self.is_recomputed = self.is_around = self.is_inserted = False
        self.depth = 0  # modes that were entered when the pass began
        self.is_whole = mesh.whole is None and sparse is None and options.kernel is None
        self.shapes: Counter[AttentionShape] | None = None  # None: not counted
        self.attended: list[str] = []  # blocks, in the order in which they attended
        self._table, self.sparse = table, sparse
        # Each segment's first tensor, and its dim: dynamo would specialise on integers.
        self._wholes: dict[str, tuple[Tensor, int]] = {}
        self._shares: dict[tuple[str, ...], Share] = {}
        self._kept_shares: Shares = {} if kept is None else kept
        # The segments that each module attends to which runs now, the innermost one last.
        self.scopes: list[tuple[str, ...] | Keys] = [table.segments]
        self._masks: dict[str, tuple[Tensor, Mask]] = {}
        self._joint_masks: dict[tuple[str, ...], Tensor] = {}
        self._keys: tuple[Tensor | None, Bools | None] = None, None  # of the last such mask

    def is_innermost(self) -> bool:
        """Return whether this mode is entered, and no other mode within it."""
        return num_modes() > 0 and torch._C._get_function_stack_at(num_modes() - 1) is self

    def surround(self) -> None:
        """Enter this mode below all that were entered since the pass began.

        A rank without tokens needs it for reshapes, which lengths tell that are met in a module.
        """
        self.is_around = self.is_inserted = True
        self._replace_at_depth(0, self)

    def take_out(self) -> None:
        """Leave this mode where `surround` entered it."""
        self.is_inserted = False
        self._replace_at_depth(1, None)

    def _replace_at_depth(self, num_out: int, mode: SequenceParallelMode | None) -> None:
        above = [overrides._pop_mode() for _ in range(num_modes() - self.depth - num_out)]
        for _ in range(num_out):
            overrides._pop_mode()
        for entered in ([] if mode is None else [mode]) + above[::-1]:
            overrides._push_mode(entered)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Compute modules of this pass again within."""
        before, self.is_recomputed = self.is_recomputed, True
        self.thread = threading.get_ident()
        try:
            with self if self.is_around else nullcontext():
                yield
        finally:
            self.is_recomputed = before

    # --- lengths ----------------------------------------------------------------------------------

    def share(self, segments: tuple[str, ...]) -> Share:
        """Return this rank's share of these segments, one after the other."""
        if not torch.compiler.is_compiling() and segments in self._shares:
            return self._shares[segments]
        lengths: list[int] = []  # dynamo traces no `list[int]()`
        for name in segments:
            if name not in self._wholes:
                raise ConfigError(
                    f"the length of {name} is not known yet: let the table cut an input or output "
                    "of a module that comes earlier"
                )
            whole, dim = self._wholes[name]
            lengths.append(whole.shape[dim])
        share = self._share_of(segments, tuple(lengths))
        if not torch.compiler.is_compiling():
            self._shares[segments] = share
        return share

    def _share_of(self, segments: tuple[str, ...], lengths: tuple[int, ...]) -> Share:
        is_kept = not torch.compiler.is_compiling()  # graphs keep shares of their own
        share = self._kept_shares.get((segments, lengths)) if is_kept else None
        if share is None:
            stripe = 0 if self.sparse is None else self.sparse.layers.config.dealt
            named = dict(zip(segments, lengths, strict=True))
            layout = layout_of(named, self.mesh, self._table, stripe)
            runs, num_tokens = layout.shares(*self.mesh.place), layout.num_tokens(*self.mesh.place)
            options = replace(self.options, layout=layout)
            share = Share(layout, layout.seq_len, num_tokens, runs or [(0, 0)], options)
            if is_kept:
                self._kept_shares[segments, lengths] = share
        if is_kept and share.num_tokens == 0 and not (self.is_around or self.is_whole):
            self.surround()
        return share

    def _meet(self, segments: tuple[str, ...], whole: Tensor, dim: int, name: str) -> Share:
        """Return the share of a tensor's segments; a first tensor makes a length known."""
        unknown = [segment for segment in segments if segment not in self._wholes]
        if len(unknown) == 1:
            rest = whole
            if len(segments) > 1:
                others = [self._wholes[segment] for segment in segments if segment in self._wholes]
                known = sum([x.shape[place] for x, place in others])
                rest = whole.narrow(dim, 0, max(0, whole.shape[dim] - known))
            self._wholes[unknown[0]] = rest, dim
        share = self.share(segments)
        if whole.shape[dim] != share.seq_len:
            raise ConfigError(
                f"{name} has {whole.shape[dim]} tokens of {' and '.join(segments)}, and another "
                f"input has {share.seq_len}"
            )
        return share

    # --- cut and gather ---------------------------------------------------------------------------

    def cut_arguments(
        self,
        names: Sequence[str],
        cuts: Mapping[str, Input],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return a module's arguments with this rank's shares; `names` are those by place."""
        args, kwargs = list(args), dict(kwargs)
        for name, cut in cuts.items():
            if name in kwargs:
                kwargs[name] = self.cut(kwargs[name], cut, name)
            elif name in names[: len(args)]:
                place = names.index(name)
                args[place] = self.cut(args[place], cut, name)
        return args, kwargs

    def cut(self, value: Any, cut: Input, name: str) -> Any:
        """Return this rank's share of a tensor, of each in a list or mapping, or of a count."""
        if isinstance(cut, Mask):
            return self._take_mask(value, cut, name) if isinstance(value, Tensor) else value
        if isinstance(cut, Mapping):
            if value is None:
                return None
            values = list(value)
            for place, cut_there in cut.items():
                values[place] = self.cut(values[place], cut_there, f"place {place} of {name}")
            return tuple(values)
        if isinstance(value, Mapping):
            return {key: self.cut(one, cut, name) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.cut(one, cut, name) for one in value)
        if isinstance(value, int) and cut.ndim == 0:
            if cut.segments[0] not in self._wholes:
                self._wholes[cut.segments[0]] = torch.empty(value, device="meta"), 0
            runs = self.share(cut.segments).runs
            return sum(max(0, min(stop, value) - start) for start, stop in runs)
        if not isinstance(value, Tensor) or cut.ndim not in (None, value.dim()):
            return value
        if value.dim() <= cut.dim:
            raise ConfigError(
                f"{name} has the shape {tuple(value.shape)}: its tokens are dim {cut.dim}, after "
                "the batch"
            )
        segments = (cut.segment,) if isinstance(cut.segment, str) else cut.segment
        if segments:
            share = self._meet(segments, value, cut.dim, name)
        else:
            share = self._share_of(("",), (value.shape[cut.dim],))
        if len(share.runs) > 1:
            return take_runs(value, share.runs, cut.dim)
        start, stop = share.runs[0]
        return value.narrow(cut.dim, start, stop - start)

    def gather(self, x: Any, cut: Cut) -> Any:
        """Return the tokens of all ranks; gradients are summed over the copies of all ranks.

        Every rank computes the same loss, so the mean that FSDP and DDP take is the gradient.
        """
        if isinstance(x, tuple):
            return self.gather(x[0], cut), *x[1:]
        share = self.share((cut.segment,) if isinstance(cut.segment, str) else cut.segment)
        if x.shape[cut.dim] != share.num_tokens:
            raise ConfigError(
                f"a tensor {tuple(x.shape)} to be gathered has {x.shape[cut.dim]} tokens of "
                f"{' and '.join(cut.segments)}, and this rank has {share.num_tokens}: the table "
                "does not fit the model"
            )
        is_plain = not share.layout.replicated and not (torch.is_grad_enabled() and x.requires_grad)
        group = self.mesh.whole
        if group is None or not is_plain or is_recorded():
            return gather(x, self.mesh, share.layout, cut.dim)
        blocks = ", ".join(self.attended)
        mark = zlib.crc32(blocks.encode())
        rows, is_same = gather_rows(x.movedim(cut.dim, 0), group, share.layout, mark)
        if not is_same:
            what = "the blocks that attended, as if a cache decided by each rank's own tokens"
            agree(group.control or group, {what: blocks}, what="forward pass")
        return rows.movedim(0, cut.dim)

    # --- masks ------------------------------------------------------------------------------------

    def _take_mask(self, mask: Tensor, of: Mask, name: str) -> Tensor | None:
        """Keep a whole mask for attention; return the module's share of it, None for no mask."""
        if mask.dim() not in (2, 3):
            raise ConfigError(
                f"{name} has the shape {tuple(mask.shape)}: give (batch, tokens), or (batch, "
                "tokens, tokens)"
            )
        share = self._meet((of.segment,), mask, 1, name)
        if self.is_whole:
            return mask
        if self._masks.get(of.segment, (None,))[0] is not mask:
            self._masks[of.segment] = mask, of
            self._joint_masks.clear()
        return take_runs(mask, share.runs, 1) if of.of_pairs else None

    def _joint_mask(self, segments: tuple[str, ...], batch: int) -> Tensor:
        masks = {name: self._masks[name][0] for name in segments if name in self._masks}
        first = next(iter(masks.values()))
        if first.dim() == 3 and len(segments) == 1:
            return first[:, None]
        if any(mask.dim() == 3 for mask in masks.values()):
            raise ConfigError(
                f"a mask of pairs of tokens of {list(masks)}, and attention over {list(segments)}: "
                "the split table must let these attend to themselves alone"
            )
        every = first.new_ones(batch, 1, dtype=torch.bool)
        lengths = [self.share((name,)).seq_len for name in segments]
        columns = [
            masks[name].to(torch.bool) if name in masks else every.expand(-1, length)
            for name, length in zip(segments, lengths, strict=True)
        ]
        return torch.cat(columns, dim=1)[:, None, None, :]

    # --- attention --------------------------------------------------------------------------------

    def _segments(self) -> tuple[str, ...]:
        scope = self.scopes[-1]
        assert not isinstance(scope, Keys)
        return scope

    def where(self, query: Tensor, mask: Tensor | None) -> tuple[AttentionOptions, Tensor | None]:
        """Return the options, with the layout of all that is attended to, and the whole mask.

        The mask is (B, 1, 1, S), or (B, 1, S, S), from the masks of the modules' inputs.
        """
        segments = self._segments()
        share = self.share(segments)
        options = share.options
        if self._table.copied and query.shape[2] != share.num_tokens:
            copied = [name for name in segments if name in self._table.copied]
            more = query.shape[2] - share.num_tokens  # as Mochi takes those of a text that it sees
            pairs = zip(segments, share.layout.segments, strict=True)
            lengths = [length + more if name in copied[-1:] else length for name, length in pairs]
            options = self._share_of(segments, tuple(lengths)).options if copied else options
        if not self._masks:
            return options, mask
        masks = [self._masks[name][1] for name in segments if name in self._masks]
        if not masks:
            return options, mask
        if mask is not None and not any(known.of_pairs for known in masks):
            raise ConfigError(
                f"attention with a mask of shape {tuple(mask.shape)}, in a model whose masks of "
                f"{list(self._masks)} are applied to it already"
            )
        if segments not in self._joint_masks:
            self._joint_masks[segments] = self._joint_mask(segments, query.shape[0])
        return options, self._joint_masks[segments]

    def attends_locally(self) -> bool:
        """Return whether attention is left as it is."""
        return not self.scopes[-1]

    def local_layouts(self, query: Tensor, key: Tensor, modes: Any) -> Any:
        """Return the layout of queries if they are cut, and None for keys, which are whole."""
        names = [(name,) for name in self._wholes]
        whole = [scope for scope in self.scopes if scope and not isinstance(scope, Keys)][-1]
        names += [whole] if all(name in self._wholes for name in whole) else []
        size, num_keys = query.shape[2], key.shape[2]
        fitting = {share.layout for share in map(self.share, names) if share.num_tokens == size}
        if len(fitting) != int(size != num_keys):  # else these may be one rank's tokens, or all
            refuse_modes(modes, f"attention of {size} tokens to {num_keys} that every rank has")
        return fitting.pop() if fitting else None, None

    def other_keys(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """Gather keys and values of other segments than the queries'."""
        scope = self.scopes[-1]
        if not isinstance(scope, Keys):
            return None
        self.has_attended = True
        copied = tuple([name for name in scope.segments if name in self._table.copied])
        if copied and query.shape[2] == key.shape[2] == self.share(copied).seq_len:
            return key, value
        layout = self.share(scope.segments).layout
        if self.shapes is not None and not self.is_recomputed:
            self.shapes[self._shape_of(query, key, layout, gathers=True)] += 1
        both = torch.cat([key, value], dim=-1)
        whole = gather(both, self.mesh, layout, 2)
        key, value = whole.split([key.shape[-1], value.shape[-1]], dim=-1)
        return key, value

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        """Attend over the mesh, by the plans of block-sparse attention if there are any."""
        layout = options.layout
        assert layout is not None
        if self.sparse is not None and torch.compiler.is_compiling():
            if self.is_recomputed:
                raise ConfigError(
                    "handle.checkpoint around compiled blocks with block-sparse attention: compile "
                    "the whole model, or no block"
                )
            qkv, lengths = (query, key, value), list(layout.segments)
            records = torch.is_grad_enabled() and any([x.requires_grad for x in qkv])
            of_call = "\n".join(self._segments()), lengths, is_causal, scale, records
            out, self.sparse.ticket = recorded.attend(*qkv, mask, self.sparse.ticket, *of_call)
            return self.without_unseen(out, mask, layout)
        if self.sparse is not None:
            layer = self.sparse.next_layer()
            if layer is not None:
                lengths = dict(zip(self._segments(), layout.segments, strict=True))
                keys = self._keys_of(mask, is_causal)
                qkv, wire = (query, key, value), self.options.wire
                out = self.sparse.attend(layer, qkv, lengths, scale, keys, wire)
                return self.without_unseen(out, mask, layout)
        if self.shapes is not None and not self.is_recomputed:
            self.shapes[self._shape_of(query, key, layout)] += 1
        if self.is_whole:
            dense = functional.scaled_dot_product_attention
            gqa = query.shape[1] != key.shape[1]
            same = {"attn_mask": mask, "is_causal": is_causal, "scale": scale, "enable_gqa": gqa}
            return as_it_is(dense, query, key, value, **same)
        settings: Any = {"attn_mask": mask, "is_causal": is_causal, "scale": scale}
        out = attention(query, key, value, self.mesh, options=options, **settings)
        return self.without_unseen(out, mask, layout) if self._masks else out

    def attend_recorded(
        self,
        qkv: list[Tensor],
        mask: Tensor | None,
        segments: tuple[str, ...],
        lengths: tuple[int, ...],
        *settings: Any,
    ) -> Tensor:
        """Attend for the compiled operator, which has only its arguments."""
        self._keys = None, None  # compilers may use the memory of a mask again
        self.scopes.append(segments)
        try:
            q, k, v = qkv
            return self.attend(q, k, v, self._share_of(segments, lengths).options, mask, *settings)
        finally:
            self.scopes.pop()

    def without_unseen(self, out: Tensor, mask: Tensor | None, layout: SequenceLayout) -> Tensor:
        """Return zeros for tokens that see nothing, where a mask is of pairs."""
        if not self._masks:
            return out
        masks = [self._masks[name][1] for name in self._segments() if name in self._masks]
        if not any(one.of_pairs for one in masks):
            return out
        assert mask is not None
        seen = split(mask, self.mesh, layout, 3)
        return out.masked_fill(~seen.mT, 0.0)

    def _keys_of(self, mask: Tensor | None, is_causal: bool) -> Bools | None:
        """Return the keys that block-sparse attention may see, (B or 1, S); None: all."""
        if mask is None and not is_causal:
            return None
        shape = [1] if mask is None else [*(1,) * (4 - mask.dim()), *mask.shape]
        if is_causal or mask is None or mask.dtype != torch.bool or shape[1:3] != [1, 1]:
            setting = "is_causal=True" if mask is None else f"a mask of {shape}, {mask.dtype}"
            raise ConfigError(
                f"block-sparse attention, and the model gives it {setting}: it takes masks of keys "
                "alone, bool (batch, 1, 1, keys): take it out of the model's inputs, or leave out "
                "sparse"
            )
        if mask is not self._keys[0]:  # the same in all layers
            keys = mask.reshape(-1, shape[-1]).cpu().numpy()
            self._keys = mask, None if keys.all() else keys
        return self._keys[1]

    # --- blocks and the end -----------------------------------------------------------------------

    def begin_block(self, name: str) -> None:
        """Begin a block of the table."""
        if self.sparse is not None and not torch.compiler.is_compiling():
            self.sparse.begin_block(name, is_again=self.is_recomputed)

    def end(self) -> PassRecord | None:
        """Close the pass; return its attention if there was any."""
        sparse: tuple[SparseLayer, ...] = ()
        if self.sparse is not None:
            self.sparse.end()
            sparse = tuple(self.sparse.done.values())
        if not (sparse or self.shapes):
            return None
        lengths = {name: self.share((name,)).seq_len for name in self._wholes}
        return PassRecord(self.mesh.degrees, lengths, self.shapes or Counter(), sparse)

    def _shape_of(
        self, query: Tensor, key: Tensor, layout: SequenceLayout, *, gathers: bool = False
    ) -> AttentionShape:
        (batch, num_heads, _, head_dim), num_kv_heads = query.shape, key.shape[1]
        row_bytes = head_dim * query.element_size()
        wire = self.options.wire
        if wire is not None and not gathers:
            row_bytes = wire.row_bytes(head_dim)
        args = batch, num_heads, num_kv_heads, row_bytes, head_dim
        return AttentionShape(*args, layout.segments, gathers)


def layout_of(
    lengths: Mapping[str, int], mesh: AttentionMesh, table: SplitTable, stripe: int
) -> SequenceLayout:
    """Return the layout of these segments on a mesh; `stripe` as in `SequenceLayout`."""
    num_ranks = mesh.degrees[0] * mesh.degrees[1]
    replicated: list[int] = []  # dynamo traces no `list[int]()`
    for place, (name, length) in enumerate(lengths.items()):
        is_short = name in table.nonempty and length <= (num_ranks - 1) * max(stripe, 1)
        if is_short and stripe:
            raise ConfigError(
                f"sparse: {length} tokens of {name}, dealt {stripe} at a time, leave some of "
                f"{num_ranks} ranks without any, which this model does not take: use blocks of "
                f"{max((length - 1) // (num_ranks - 1), 1)} or fewer tokens, or fewer ranks"
            )
        if is_short or name in table.copied:
            replicated.append(place)
    sizes = tuple(lengths.values()), *mesh.degrees
    return SequenceLayout(*sizes, stripe=stripe, replicated=tuple(replicated))
