"""Attention over a mesh of ranks, Ulysses by ring, exact for any shape.

Ulysses ranks exchange tokens for heads; ring ranks pass keys and values around.

Shapes: B batch, H query heads, K key-value heads, S tokens of the whole sequence, T tokens of this
rank, D head width; R ring ranks, U Ulysses ranks.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bascule.attention.kernels.registry import FunctionKernel, Kernel, check_name
from bascule.attention.layout import (
    SequenceLayout,
    gather_tokens,
    layout_text,
    num_tokens,
    own_tokens,
    replicated,
    take_runs,
)
from bascule.attention.mask import PLAIN, Scores
from bascule.attention.ring import AttentionCall
from bascule.attention.tiles import is_biased
from bascule.attention.usp import (
    attend,
    attend_op,
    check_settings,
    check_sink,
    check_tensors,
    new_call,
    positive_scale,
    signature,
)
from bascule.checks import is_int
from bascule.comm.failures import leave, shared
from bascule.comm.mesh import AttentionMesh as AttentionMesh
from bascule.comm.mesh import Place, as_attention_mesh, place_in
from bascule.comm.quantized import CommDtype, Quantized
from bascule.comm.transforms import refuse_derivatives
from bascule.errors import ConfigError


def split(x: Tensor, mesh: AttentionMesh, layout: SequenceLayout, dim: int) -> Tensor:
    """Take this rank's tokens from a tensor that every rank has. Differentiable, no communication.

    Raises:
        ConfigError: The tensor has another number of tokens than the layout.
    """
    _check_tokens("split", x, mesh, layout, dim, layout.seq_len)
    return take_runs(x, layout.shares(*mesh.place), dim)


def _check_tokens(
    what: str, x: Tensor, mesh: AttentionMesh, layout: SequenceLayout, dim: int, num: int
) -> None:
    """Refuse a layout for another mesh, and a tensor without `num` tokens in a dim."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"{what}: give a dense tensor, not a {type(x).__name__}")
    _check_degrees(what, layout, mesh.degrees)
    if not is_int(dim) or not -x.dim() <= dim < x.dim():
        raise ConfigError(f"{what}: dim={dim!r}: give a dim of the shape {tuple(x.shape)}")
    if x.shape[dim] != num:
        raise ConfigError(
            f"{what}: dim {dim} of {tuple(x.shape)} has {x.shape[dim]} tokens, the layout has {num}"
        )


def _check_degrees(what: str, layout: SequenceLayout, degrees: tuple[int, int]) -> None:
    if (layout.ring_degree, layout.ulysses_degree) != degrees:
        raise ConfigError(
            f"{what}: a layout for {layout.ring_degree} x {layout.ulysses_degree} ranks on a "
            f"mesh of {degrees[0]} x {degrees[1]} (ring x Ulysses): give the mesh's degrees"
        )


@shared("gather over a mesh")
def gather(x: Tensor, mesh: AttentionMesh, layout: SequenceLayout, dim: int) -> Tensor:
    """Gather the tokens of all ranks on every rank, in the sequence's order, by one all-gather.

    The backward pass sums the gradients of all ranks' copies by one reduce-scatter. So the mean of
    parameters' gradients over ranks, as in DDP and FSDP, is right.

    Raises:
        ConfigError: The tensor has another number of tokens than this rank has in the layout.
    """
    _check_tokens("gather", x, mesh, layout, dim, num_tokens(layout.shares(*mesh.place)))
    refuse_derivatives("gather", x)
    if mesh.whole is None:
        return x
    rows = own_tokens(x, layout, mesh.place, dim).movedim(dim, 0)
    placed = layout_text(place_in(mesh), layout)
    return gather_tokens(rows, list(layout.segments), placed).movedim(0, dim)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Settings of attention over ranks: token layout, communication and kernel.

    Attributes:
        layout: Which tokens each rank has. Default: one segment, as many tokens on every rank.
        kernel: Name of the block kernel, or your own. Default: the first that runs here.
        comm_dtype: "int8" or "e4m3" sends rows in 8 bits: Ulysses' q, k, v and output, and the keys
            and values in a ring; see `measure_error`. Gradients and replicated tokens keep their
            dtype. Default: all keep it.
        overlap: True overlaps Ulysses' exchanges with attention. This needs up to four more kernel
            calls, and with a ring two more per round, so it pays on slow links; not with zigzag.
        scores: Windows, chunks and caps; windows and chunks need causal attention in one segment.
            Default: none.
        documents: Tokens of each document in a causal segment; no document sees another. Default:
            one document.

    Raises:
        ConfigError: There is no such kernel or format.
    """

    layout: SequenceLayout | None = None
    kernel: Kernel | None = None
    comm_dtype: CommDtype | None = None
    overlap: bool = False
    scores: Scores | None = None
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():  # which cannot trace `shared`
            return
        try:
            check_name(self.kernel)
            _ = self.wire
        except ConfigError as error:  # ranks that go on to attend do not wait for this one
            leave(error, "AttentionOptions")
            raise

    @property
    def wire(self) -> Quantized | None:
        """The format of rows between ranks; None for rows as they are."""
        return Quantized.of(self.comm_dtype)

    @property
    def is_packed(self) -> bool:
        """True if kernels get parts of the sequence as separate sequences."""
        return bool(self.documents) or (self.scores is not None and self.scores.is_near)


_DEFAULT = AttentionOptions()


@shared("attention over a mesh")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: AttentionMesh | DeviceMesh,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    options: AttentionOptions = _DEFAULT,
    sink: Tensor | None = None,
) -> Tensor:
    """Attend exactly over tokens that are sharded over a mesh; return (B, H, T, D) as q.

    It costs two all-to-alls over the Ulysses ranks and R - 1 exchanges around the ring, and twice
    that backward. Replicated tokens add one all-gather, and one reduce-scatter backward. The first
    call of a kind adds one all-gather, in which ranks agree.

    Args:
        q: (B, H, T, D) queries of this rank's tokens, in the order of the layout's `shares`.
        k: (B, K, T, D) keys; H is a multiple of K.
        v: (B, K, T, D) values.
        mesh: The ranks.
        attn_mask: Mask of the whole sequence, the same on every rank: bool (True: seen), or numbers
            to add to the scores, float32 or q's dtype. It broadcasts to (B, H, S, S), as (B, 1, 1,
            S) for key padding. A token that sees nothing gives 0. If a finite number, as finfo.min,
            hides all its keys, it attends as if none were hidden (torch's own kernels differ).
        is_causal: True hides later tokens from each token, even where the mask shows them.
        scale: Factor of the scores. Default: D^-0.5.
        options: Settings that seldom change.
        sink: (H,), one extra score in each head's softmax, for a value of 0.

    Raises:
        ConfigError: The shapes do not fit each other, the layout or the mesh.
        CommError: The ranks disagree, or a rank did not make the call in time.
    """
    refuse_derivatives("attention", q, k, v, attn_mask)
    if isinstance(q, Tensor) and q.dim() == 4 and q.shape[0] > 1 and options.is_packed:
        # Kernels take packed sequences in a batch of one, so rows of the batch become heads.
        q_row, k_row, v_row = (x.flatten(0, 1)[None] for x in (q, k, v))
        sink = None if sink is None else sink.repeat(q.shape[0])
        same: Any = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale}
        out = attention(q_row, k_row, v_row, mesh, options=options, sink=sink, **same)
        return out[0].unflatten(0, q.shape[:2])
    check_sink("attention", sink, q)
    settings = mesh, attn_mask, is_causal, scale, options
    if torch.compiler.is_compiling():
        prepared = _prepare(q, k, v, *settings, sink is not None)
        q, k, v = _operands(q, k, v, prepared)
        out = attend_op(q, k, v, attn_mask, sink, prepared.sizes, prepared.name)[0]
    else:
        key = signature(q, k, v, attn_mask), is_causal, scale, options, sink is not None
        ranks = mesh if isinstance(mesh, AttentionMesh) else as_attention_mesh(mesh)

        def first() -> tuple[_Prepared, AttentionCall]:
            prepared = _prepare(q, k, v, *settings, sink is not None)
            q_here, k_here, _ = _operands(q, k, v, prepared)
            return prepared, new_call(prepared.name, prepared.sizes, q_here, k_here, attn_mask)

        if isinstance(options.kernel, FunctionKernel):
            # A later job may reuse the names of groups.
            groups = tuple(group and group.reference for group in ranks.groups)
            prepared, call = options.kernel.calls.get((groups, *key), first)
        else:
            prepared, call = ranks.cache.get(key, first)
        out = attend(*_operands(q, k, v, prepared), call, attn_mask, sink)
    return replicated(out, prepared.ranks, prepared.layout) if prepared.layout.replicated else out


class _Prepared(NamedTuple):
    """A checked call without its tensors; compilers make it while they trace."""

    ranks: Place  # of the mesh
    layout: SequenceLayout  # which tokens each rank has
    multiplier: float | None  # of the queries, where the scale is not above 0; else None
    num_kv_heads: int  # of keys and values, repeated where ranks are more
    name: str  # the call's text; see `usp`
    sizes: list[int]  # the call's sizes; see `usp`


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: AttentionMesh | DeviceMesh,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    options: AttentionOptions,
    has_sink: bool = False,
) -> _Prepared:
    """Check a call, and write its text."""
    ranks, layout, wire = place_in(mesh), options.layout, options.wire
    check_settings("attention", causal, scale)
    check_tensors("attention", q, k, v, mask)
    if layout is None:
        layout = SequenceLayout((q.shape[2] * math.prod(ranks.degrees),), *ranks.degrees)
    _check(q, k, v, ranks, layout, mask)
    scores, documents = options.scores or PLAIN, options.documents
    if options.is_packed and (not causal or mask is not None or is_biased(layout, causal)):
        raise ConfigError(
            f"attention: {scores}, {len(documents)} documents, with is_causal={causal}, "
            f"{len(layout.segments)} segments, stripe={layout.stripe}, "
            f"{'a' if mask is not None else 'no'} mask: windows, chunks and documents need causal "
            "attention in one segment without a mask; put them into a mask instead"
        )
    if documents and (sum(documents) != layout.seq_len or min(documents) < 1):
        raise ConfigError(
            f"attention: {len(documents)} documents of {sum(documents)} tokens together, the "
            f"shortest of {min(documents)}, in {layout.seq_len}: give lengths > 0 that add up to it"
        )
    if ranks.degrees == (1, 1):
        wire = None
    num_heads, sizes = enough_heads(q.shape[1], k.shape[1], ranks.degrees[1]), [0, 0, 0]
    if ranks.degrees[1] > 1:
        num_kv = num_heads // ranks.degrees[1] + (ranks.place[1] < num_heads % ranks.degrees[1])
        sizes = [layout.ring_len(ranks.place[0]), q.shape[1] // num_heads * num_kv, num_kv]
    factor = positive_scale(q.shape[-1], scale)
    overlap = options.overlap and ranks.degrees[1] > 1 and not (has_sink or options.is_packed)
    if overlap and layout.zigzag:
        raise ConfigError("attention: overlap=True with a zigzag layout: leave one of them out")
    kernel = options.kernel
    kernel = kernel.key if isinstance(kernel, FunctionKernel) else kernel
    wire_format = None if wire is None else wire.format
    window, chunk, cap = scores.key  # perhaps symbols: dynamo formats each, but no tuple of them
    settings = (
        f"{{'replicated': {layout.replicated}, 'causal': {causal}, 'scale': {scale}, "
        f"'factor': {factor}, 'kernel': {kernel!r}, 'wire': {wire_format!r}, "
        f"'overlap': {overlap}, 'scores': ({window}, {chunk}, {cap}), "
        f"'documents': {documents}}}"
    )
    name = f"mesh\n{layout_text(ranks, layout)}\n{settings}"
    multiplier = None if scale is None or scale > 0 else scale
    return _Prepared(ranks, layout, multiplier, num_heads, name, [*sizes, *layout.segments])


def _operands(
    q: Tensor, k: Tensor, v: Tensor, prepared: _Prepared
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v scaled, with this rank's share of replicated tokens, and enough heads."""
    ranks, layout = prepared.ranks, prepared.layout
    if prepared.multiplier is not None:
        q = q * prepared.multiplier
    if layout.replicated:
        q, k, v = (own_tokens(x, layout, ranks.place, 2) for x in (q, k, v))
    if prepared.num_kv_heads != k.shape[1]:
        times = prepared.num_kv_heads // k.shape[1]
        k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
    return q, k, v


def enough_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> int:
    """Count key-value heads after repeating them until each Ulysses rank has one."""
    repeat = num_heads // num_kv_heads
    counts = [num_kv_heads * times for times in range(1, repeat + 1) if repeat % times == 0]
    return min([count for count in counts if count >= num_ranks])


def _check(
    q: Tensor, k: Tensor, v: Tensor, mesh: Place, layout: SequenceLayout, mask: Tensor | None
) -> None:
    """Refuse tensors that do not fit each other, the layout or the mesh."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    alike = q.dim() == k.dim() == 4 and k.shape == v.shape
    if not alike or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        raise ConfigError(
            f"attention: {shapes}: give (batch, heads, tokens, head_dim) each, k and v alike, and "
            "as many keys as queries"
        )
    if q.shape[1] % k.shape[1] or q.shape[1] < mesh.degrees[1]:
        raise ConfigError(
            f"attention: {shapes} on {mesh.degrees[1]} Ulysses ranks: query heads must be a "
            "multiple of key-value heads, and at least one a rank; use a larger ring degree"
        )
    _check_degrees("attention", layout, mesh.degrees)
    if mask is not None:
        if mask.dtype not in (torch.bool, torch.float32, q.dtype):
            raise ConfigError(
                f"attention: a mask of {mask.dtype} for q of {q.dtype}: give bool (True: seen), as "
                f"mask.bool() of a tokenizer's, or numbers to add to scores, {q.dtype} or float32"
            )
        if mask.requires_grad:
            raise ConfigError(
                "attention: attn_mask requires a gradient, and gets none: pass attn_mask.detach()"
            )
        wanted = (q.shape[0], q.shape[1], layout.seq_len, layout.seq_len)
        shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        if len(shape) != 4 or any(a not in (1, b) for a, b in zip(shape, wanted, strict=True)):
            raise ConfigError(
                f"attention: a mask of shape {tuple(mask.shape)} does not broadcast to (batch, "
                f"heads, tokens, tokens) of the whole sequence, {wanted}"
            )
