"""One forward pass of a split model: lengths, shards, masks and attention over the mesh.

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
from bascule.diffusers.sparse_layers import SparseLayer, SparseLayers, SparsePass
from bascule.diffusers.split_table import Cut, Input, Keys, Mask, SplitTable
from bascule.errors import ConfigError
from bascule.sdpa import SequenceParallelMode, as_it_is, num_modes, refuse_modes


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of an attention call that, with the mesh, decide its bytes and FLOPs."""

    batch: int
    num_heads: int
    num_kv_heads: int
    row_bytes: int  # of one token of one head, as it is sent
    head_dim: int
    segments: tuple[int, ...]  # tokens of each, in the order of attention
    gathers: bool = False  # every rank gathers all keys and values, and nothing else is sent


@dataclass(frozen=True, slots=True)
class PassRecord:
    """The attention calls of one forward pass over a mesh."""

    degrees: tuple[int, int]  # of the mesh, (R, U)
    lengths: Mapping[str, int]  # tokens of each segment
    shapes: Counter[AttentionShape]  # number of dense attentions
    sparse: tuple[SparseLayer, ...] = ()


class Share(NamedTuple):
    """This rank's tokens of a sequence that consists of some segments."""

    layout: SequenceLayout
    seq_len: int  # S
    num_tokens: int  # of this rank
    runs: list[tuple[int, int]]  # start and stop of each run of its tokens in the sequence
    options: AttentionOptions  # with the layout


Shares = dict[tuple[tuple[str, ...], tuple[int, ...]], Share]
"""Shares by names and lengths of segments."""


class ForwardPass(SequenceParallelMode):
    """A forward pass of a split model: a function mode that attends over the mesh."""

    def __init__(
        self,
        mesh: AttentionMesh,
        table: SplitTable,
        options: AttentionOptions,
        sparse: SparsePass | None = None,
        cached_shares: Shares | None = None,
        *,
        signature: object = None,
    ) -> None:
        super().__init__(mesh, options=options)
        self.signature, self.thread = signature, 0  # mesh, names, shapes and dtypes of the inputs
        self.is_recomputed = False  # checkpointing runs modules a second time
        # Whether the mode is around the model, else around attention modules; and whether it was
        # entered there only while the model ran.
        self.is_around = self.is_inserted = False
        self.depth = 0  # number of modes that were entered when the pass began
        self.is_whole = mesh.whole is None and sparse is None and options.kernel is None
        self.shapes: Counter[AttentionShape] | None = None  # None: not counted
        self.attended: list[str] = []  # blocks, in the order in which they attended
        self._table, self.sparse = table, sparse
        # A tensor and a dim that have each segment's length: dynamo would specialise on integers.
        self._lengths: dict[str, tuple[Tensor, int]] = {}
        self._shares: dict[tuple[str, ...], Share] = {}
        self._cached_shares: Shares = {} if cached_shares is None else cached_shares
        # Segments that running modules attend to; the last entry is the innermost module's.
        self.scopes: list[tuple[str, ...] | Keys] = [table.segments]
        self._masks: dict[str, tuple[Tensor, Mask]] = {}
        self._joint_masks: dict[tuple[str, ...], Tensor] = {}
        self._keys: tuple[Tensor | None, Bools | None] = None, None  # last mask of `_keys_of`

    def is_innermost(self) -> bool:
        """Return whether this mode is entered, and no other mode within it."""
        return num_modes() > 0 and torch._C._get_function_stack_at(num_modes() - 1) is self

    def surround(self) -> None:
        """Enter this mode below all modes that were entered since the pass began.

        A rank without tokens needs the mode, which infers the -1 in reshapes of empty tensors.
        """
        self.is_around = self.is_inserted = True
        self._replace_at_depth(0, self)

    def take_out(self) -> None:
        """Leave this mode at the depth where `surround` entered it."""
        self.is_inserted = False
        self._replace_at_depth(1, None)

    def _replace_at_depth(self, num_out: int, mode: SequenceParallelMode | None) -> None:
        above = [overrides._pop_mode() for _ in range(num_modes() - self.depth - num_out)]
        for _ in range(num_out):
            overrides._pop_mode()
        for entered in ([] if mode is None else [mode]) + above[::-1]:
            overrides._push_mode(entered)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Recompute modules of this pass within this scope."""
        before, self.is_recomputed = self.is_recomputed, True
        self.thread = threading.get_ident()
        try:
            with self if self.is_around else nullcontext():
                yield
        finally:
            self.is_recomputed = before

    # --- lengths ----------------------------------------------------------------------------------

    def share(self, segments: tuple[str, ...]) -> Share:
        """Return this rank's share of the sequence of these segments."""
        if not torch.compiler.is_compiling() and segments in self._shares:
            return self._shares[segments]
        lengths: list[int] = []  # dynamo traces no `list[int]()`
        for name in segments:
            if name not in self._lengths:
                raise ConfigError(
                    f"the length of {name} is not known yet: let the split table cut it earlier"
                )
            whole, dim = self._lengths[name]
            lengths.append(whole.shape[dim])
        share = self._share_of(segments, tuple(lengths))
        if not torch.compiler.is_compiling():
            self._shares[segments] = share
        return share

    def _share_of(self, segments: tuple[str, ...], lengths: tuple[int, ...]) -> Share:
        is_eager = not torch.compiler.is_compiling()  # graphs make their own shares
        share = self._cached_shares.get((segments, lengths)) if is_eager else None
        if share is None:
            named = dict(zip(segments, lengths, strict=True))
            layers = None if self.sparse is None else self.sparse.layers
            layout = layout_of(named, self.mesh, self._table, layers)
            runs, num_tokens = layout.shares(*self.mesh.place), layout.num_tokens(*self.mesh.place)
            options = replace(self.options, layout=layout)
            share = Share(layout, layout.seq_len, num_tokens, runs or [(0, 0)], options)
            if is_eager:
                self._cached_shares[segments, lengths] = share
        if is_eager and share.num_tokens == 0 and not (self.is_around or self.is_whole):
            self.surround()
        return share

    def _share_from(self, segments: tuple[str, ...], whole: Tensor, dim: int, name: str) -> Share:
        """Return the share of a tensor's segments; learn the length of a segment from it."""
        new = [name for name in segments if name not in self._lengths]
        if len(new) == 1:
            rest = whole
            if len(segments) > 1:
                others = [self._lengths[name] for name in segments if name in self._lengths]
                num_others = sum([tensor.shape[place] for tensor, place in others])
                rest = whole.narrow(dim, 0, max(0, whole.shape[dim] - num_others))
            self._lengths[new[0]] = rest, dim
        share = self.share(segments)
        if whole.shape[dim] != share.seq_len:
            raise ConfigError(
                f"{name} has {whole.shape[dim]} tokens of {' and '.join(segments)}, but another "
                f"input has {share.seq_len}: give both the same number"
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
        """Replace a module's arguments by this rank's shares; `names` lists its parameters."""
        args, kwargs = list(args), dict(kwargs)
        for name, cut in cuts.items():
            if name in kwargs:
                kwargs[name] = self.cut(kwargs[name], cut, name)
            elif name in names[: len(args)]:
                place = names.index(name)
                args[place] = self.cut(args[place], cut, name)
        return args, kwargs

    def cut(self, value: Any, cut: Input, name: str) -> Any:
        """Return this rank's share of a tensor, of tensors in a list or mapping, or of a count."""
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
            return {key: self.cut(entry, cut, name) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.cut(entry, cut, name) for entry in value)
        if isinstance(value, int) and cut.ndim == 0:
            if cut.segments[0] not in self._lengths:
                self._lengths[cut.segments[0]] = torch.empty(value, device="meta"), 0
            runs = self.share(cut.segments).runs
            return sum(max(0, min(stop, value) - start) for start, stop in runs)
        if not isinstance(value, Tensor) or cut.ndim not in (None, value.dim()):
            return value
        if value.dim() <= cut.dim:
            raise ConfigError(
                f"{name} has the shape {tuple(value.shape)}: give its tokens in dim {cut.dim}"
            )
        if cut.segments:
            share = self._share_from(cut.segments, value, cut.dim, name)
        else:
            share = self._share_of(("",), (value.shape[cut.dim],))
        if len(share.runs) > 1:
            return take_runs(value, share.runs, cut.dim)
        start, stop = share.runs[0]
        return value.narrow(cut.dim, start, stop - start)

    def gather(self, x: Any, cut: Cut) -> Any:
        """Gather the tokens of all ranks, with the gradients of `attention.api.gather`."""
        if isinstance(x, tuple):
            return self.gather(x[0], cut), *x[1:]
        share = self.share(cut.segments)
        if x.shape[cut.dim] != share.num_tokens:
            raise ConfigError(
                f"the table does not fit the model: it gathers dim {cut.dim} of {tuple(x.shape)}, "
                f"but this rank has {share.num_tokens} tokens of {cut.segments}: correct the table"
            )
        is_plain = not share.layout.replicated and not (torch.is_grad_enabled() and x.requires_grad)
        group = self.mesh.whole
        if group is None or not is_plain or is_recorded():
            return gather(x, self.mesh, share.layout, cut.dim)
        blocks = ", ".join(self.attended)
        mark = zlib.crc32(blocks.encode())
        rows, is_same = gather_rows(x.movedim(cut.dim, 0), group, share.layout, mark)
        if not is_same:
            name = "the blocks that attended, as if a cache decided by each rank's own tokens"
            agree(group.control or group, {name: blocks}, what="forward pass")
        return rows.movedim(0, cut.dim)

    # --- masks ------------------------------------------------------------------------------------

    def _take_mask(self, mask: Tensor, entry: Mask, name: str) -> Tensor | None:
        """Store a whole mask for attention; return what the module gets: its share, or None."""
        if mask.dim() not in (2, 3):
            legal = "give (batch, tokens), or (batch, tokens, tokens)"
            raise ConfigError(f"{name} has the shape {tuple(mask.shape)}: {legal}")
        share = self._share_from((entry.segment,), mask, 1, name)
        if self.is_whole:
            return mask
        if self._masks.get(entry.segment, (None,))[0] is not mask:
            self._masks[entry.segment] = mask, entry
            self._joint_masks.clear()
        return take_runs(mask, share.runs, 1) if entry.of_pairs else None

    def _joint_mask(self, segments: tuple[str, ...], batch: int) -> Tensor:
        """Return the mask of all keys, (B, 1, 1, S), or one of pairs of tokens, (B, 1, S, S)."""
        masks = {name: self._masks[name][0] for name in segments if name in self._masks}
        first = next(iter(masks.values()))
        if first.dim() == 3 and len(segments) == 1:
            return first[:, None]
        if any(mask.dim() == 3 for mask in masks.values()):
            raise ConfigError(
                f"a mask of pairs of tokens of {list(masks)}, but attention over {list(segments)}: "
                "let the split table make each segment attend only to itself"
            )
        seen = first.new_ones(batch, 1, dtype=torch.bool)
        lengths = [self.share((name,)).seq_len for name in segments]
        columns = [
            masks[name].to(torch.bool) if name in masks else seen.expand(-1, length)
            for name, length in zip(segments, lengths, strict=True)
        ]
        return torch.cat(columns, dim=1)[:, None, None, :]

    # --- attention --------------------------------------------------------------------------------

    def _segments(self) -> tuple[str, ...]:
        scope = self.scopes[-1]
        assert not isinstance(scope, Keys)
        return scope

    def resolve(self, query: Tensor, mask: Tensor | None) -> tuple[AttentionOptions, Tensor | None]:
        """Return a call's options with its layout, and the mask of the call or of model inputs."""
        segments = self._segments()
        share = self.share(segments)
        options = share.options
        if self._table.copied and query.shape[2] != share.num_tokens:
            copied = [name for name in segments if name in self._table.copied]
            more = query.shape[2] - share.num_tokens  # Mochi attends to some tokens of the text
            pairs = zip(segments, share.layout.segments, strict=True)
            lengths = [length + more if name in copied[-1:] else length for name, length in pairs]
            options = self._share_of(segments, tuple(lengths)).options if copied else options
        if not self._masks:
            return options, mask
        masks = [self._masks[name][1] for name in segments if name in self._masks]
        if not masks:
            return options, mask
        if mask is not None and not any(entry.of_pairs for entry in masks):
            raise ConfigError(
                f"attention with a mask of shape {tuple(mask.shape)}, but the split table's masks "
                f"of {list(self._masks)} are applied to it already: leave out one of them"
            )
        if segments not in self._joint_masks:
            self._joint_masks[segments] = self._joint_mask(segments, query.shape[0])
        return options, self._joint_masks[segments]

    def attends_locally(self) -> bool:
        """Return whether the running module attends locally, without the mesh."""
        return not self.scopes[-1]

    def local_layouts(self, query: Tensor, key: Tensor, modes: Any) -> Any:
        """Return the layout of sharded queries, or None if they are whole; None for whole keys."""
        names = [(name,) for name in self._lengths]
        whole = [scope for scope in self.scopes if scope and not isinstance(scope, Keys)][-1]
        names += [whole] if all(name in self._lengths for name in whole) else []
        size, num_keys = query.shape[2], key.shape[2]
        fitting = {share.layout for share in map(self.share, names) if share.num_tokens == size}
        if len(fitting) != int(size != num_keys):  # ambiguous: the tokens of one rank, or of all
            refuse_modes(modes, f"attention of {size} tokens to {num_keys} that every rank has")
        return fitting.pop() if fitting else None, None

    def other_keys(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return all keys and values if `Keys` makes the module attend to another segment."""
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
        """Attend over the mesh, with the plans of block-sparse attention if there are any."""
        layout = options.layout
        assert layout is not None
        if self.sparse is not None and torch.compiler.is_compiling():
            if self.is_recomputed:
                raise ConfigError(
                    "handle.checkpoint around compiled blocks with sparse: compile all or no blocks"
                )
            qkv, lengths = (query, key, value), list(layout.segments)
            records = torch.is_grad_enabled() and any([x.requires_grad for x in qkv])
            settings = "\n".join(self._segments()), lengths, is_causal, scale, records
            out, self.sparse.ticket = recorded.attend(*qkv, mask, self.sparse.ticket, *settings)
            return self.zero_unseen(out, mask, layout)
        if self.sparse is not None:
            layer = self.sparse.next_layer()
            if layer is not None:
                lengths = dict(zip(self._segments(), layout.segments, strict=True))
                keys = self._keys_of(mask, is_causal)
                qkv, wire = (query, key, value), self.options.wire
                out = self.sparse.attend(layer, qkv, lengths, scale, keys, wire)
                return self.zero_unseen(out, mask, layout)
        if self.shapes is not None and not self.is_recomputed:
            self.shapes[self._shape_of(query, key, layout)] += 1
        if self.is_whole:
            dense = functional.scaled_dot_product_attention
            gqa = query.shape[1] != key.shape[1]
            same = {"attn_mask": mask, "is_causal": is_causal, "scale": scale, "enable_gqa": gqa}
            return as_it_is(dense, query, key, value, **same)
        settings: Any = {"attn_mask": mask, "is_causal": is_causal, "scale": scale}
        out = attention(query, key, value, self.mesh, options=options, **settings)
        return self.zero_unseen(out, mask, layout) if self._masks else out

    def attend_recorded(
        self,
        qkv: list[Tensor],
        mask: Tensor | None,
        segments: tuple[str, ...],
        lengths: tuple[int, ...],
        *settings: Any,
    ) -> Tensor:
        """Attend for the compiled operator, which knows only these arguments."""
        self._keys = None, None  # compilers may put another mask into the same memory
        self.scopes.append(segments)
        try:
            q, k, v = qkv
            return self.attend(q, k, v, self._share_of(segments, lengths).options, mask, *settings)
        finally:
            self.scopes.pop()

    def zero_unseen(self, out: Tensor, mask: Tensor | None, layout: SequenceLayout) -> Tensor:
        """Zero the output of tokens that see no key, if a mask is of pairs of tokens."""
        masks = [self._masks[name][1] for name in self._segments() if name in self._masks]
        if not any([entry.of_pairs for entry in masks]):
            return out
        assert mask is not None
        seen = split(mask, self.mesh, layout, 3)
        return out.masked_fill(~seen.mT, 0.0)

    def _keys_of(self, mask: Tensor | None, is_causal: bool) -> Bools | None:
        """Return bool (B or 1, S), the keys that block-sparse attention may see; None: all."""
        if mask is None and not is_causal:
            return None
        shape = [1] if mask is None else [*(1,) * (4 - mask.dim()), *mask.shape]
        if is_causal or mask is None or mask.dtype != torch.bool or shape[1:3] != [1, 1]:
            setting = "is_causal=True" if mask is None else f"a mask of {shape}, {mask.dtype}"
            raise ConfigError(
                f"block-sparse attention got {setting}: it accepts only masks of keys, bool (batch,"
                " 1, 1, keys): change the model's inputs, or leave out sparse"
            )
        if mask is not self._keys[0]:  # the same in all layers
            keys = mask.reshape(-1, shape[-1]).cpu().numpy()
            self._keys = mask, None if keys.all() else keys
        return self._keys[1]

    def end(self) -> PassRecord | None:
        """End the pass; return the record of its attention, or None if there was none."""
        sparse: tuple[SparseLayer, ...] = ()
        if self.sparse is not None:
            self.sparse.end()
            sparse = tuple(self.sparse.done.values())
        if not (sparse or self.shapes):
            return None
        lengths = {name: self.share((name,)).seq_len for name in self._lengths}
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
    lengths: Mapping[str, int], mesh: AttentionMesh, table: SplitTable, layers: SparseLayers | None
) -> SequenceLayout:
    """Return the layout of segments of these lengths on a mesh; `layers`: of sparse attention."""
    dealt: Mapping[str, Any] = {} if layers is None else layers.dealt
    stripe = dealt.get("stripe", 0)
    num_ranks = mesh.degrees[0] * mesh.degrees[1]
    replicated: list[int] = []  # dynamo traces no `list[int]()`
    for place, (name, length) in enumerate(lengths.items()):
        is_short = name in table.nonempty and length <= (num_ranks - 1) * max(stripe, 1)
        if is_short and stripe:
            most = max((length - 1) // (num_ranks - 1), 1)
            raise ConfigError(
                f"sparse: {length} tokens of {name}, dealt {stripe} at a time, leave some of "
                f"{num_ranks} ranks without any: use blocks of {most} or fewer tokens"
            )
        if is_short or name in table.copied:
            replicated.append(place)
    sizes = tuple(lengths.values()), *mesh.degrees
    return SequenceLayout(*sizes, replicated=tuple(replicated), **dealt)
