"""Attention of tokens that are sharded over ranks: one forward, one backward, recorded once.

Ulysses brings all tokens of some heads to a rank, the ring passes keys and values on, and Ulysses
takes the output back (USP, arXiv:2405.07719). Autograd records one function. Compilers and
selective checkpoints record one operator, which costs the host three times as much. An operator
finds its call by two arguments. `call` is a text, constant in a graph: mesh, token layout and
settings. `sizes`, which may be symbols, is [S, own query heads, own key heads, *rest]; both head
counts are 0 if ranks do not share heads. `rest` is the segment lengths of a mesh, or [number of a
step].

Shapes: B batch, T tokens of this rank, S of its Ulysses ranks, H heads, K key-value heads, D head
width. Tensors at home are (T, H, D) of packed sequences, else (B, H, T, D).
"""

import math
from ast import literal_eval
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from bascule.attention.kernels.protocol import wide_dtype
from bascule.attention.kernels.registry import FunctionKernel, named, select_kernel
from bascule.attention.layout import SequenceLayout, layout_on, num_tokens
from bascule.attention.mask import Scores
from bascule.attention.ring import (
    AttentionCall,
    Tiles,
    overlapped_forward,
    ring_backward,
    ring_forward,
)
from bascule.attention.tiles import cached_by_mask, digest_of, is_biased, tiles_of
from bascule.comm.agree import first_use
from bascule.comm.failures import shared
from bascule.comm.groups import this_world
from bascule.comm.heads import HeadExchange
from bascule.comm.mesh import AttentionMesh, mesh_named
from bascule.comm.quantized import Format, Quantized
from bascule.comm.transforms import NO_SECOND, is_recorded, refuse_second
from bascule.errors import ConfigError
from bascule.traffic import HeadShares

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_tensors(what: str, q: Any, k: Any, v: Any, mask: Any = None) -> None:
    """Refuse tensors whose type, layout, dtype or device no attention supports."""
    for x in (q, k, v) if mask is None else (q, k, v, mask):
        if not isinstance(x, Tensor):
            raise ConfigError(f"{what}: q, k, v or the mask is a {type(x).__name__}: give tensors")
        if x.layout != torch.strided or x.is_nested:
            raise ConfigError(
                f"{what}: q, k, v or the mask is nested or {x.layout}: give dense tensors"
            )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        wrong = f"{what}: q is {q.dtype}, k {k.dtype}, v {v.dtype}"
        raise ConfigError(f"{wrong}: give one floating-point dtype, 16 to 64 bits: k.to(q.dtype)")
    devices = {x.device for x in (q, k, v, mask) if x is not None}
    if len(devices) > 1 or q.is_meta:
        raise ConfigError(
            f"{what}: tensors are on {sorted(map(str, devices))}: give all on one device with data"
        )
    if min(q.dim(), k.dim()) > 2 and 0 in (q.shape[-1], q.shape[-2 if q.dim() == 3 else 1]):
        raise ConfigError(
            f"{what}: q {tuple(q.shape)} has no heads, or heads of no width: give one at least"
        )


def check_settings(what: str, causal: Any, scale: Any) -> None:
    """Refuse a `causal` that is no bool, and a scale that is no finite number."""
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    # For compilers a number may be a symbol; what runs checks it again.
    is_finite = is_number and (torch.compiler.is_compiling() or math.isfinite(scale))
    if not isinstance(causal, bool) or not (scale is None or is_finite):
        wrong = f"{what}: causal={causal!r} and scale={scale!r}"
        raise ConfigError(f"{wrong}: give True or False, and a finite number or None")


def with_positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """Move a scale of 0 or less into the queries; return these and a scale above 0.

    Torch's flash attention for CPUs (2.13) multiplies hidden scores, -inf, by the scale.
    """
    factor = positive_scale(q.shape[-1], scale)
    return (q, factor) if scale is None or scale > 0 else (q * scale, factor)


def positive_scale(head_dim: int, scale: float | None) -> float:
    """Return the softmax scale by which attention multiplies, made positive."""
    if scale is None:
        return head_dim**-0.5
    return scale if scale > 0 else 1.0


def signature(*tensors: Tensor | None) -> tuple[object, ...]:
    """Return the properties of tensors that decide which call attends to them."""
    parts = list[object]()
    for x in tensors:
        if not isinstance(x, Tensor) or x.is_nested:
            parts.append(type(x))
        else:
            parts += (x.shape, x.dtype, x.device, x.layout, x.requires_grad)
    return tuple(parts)


class _Settings(NamedTuple):
    """Settings of a call over a mesh, which its text holds as a dict."""

    replicated: tuple[int, ...]
    causal: bool
    scale: float | None
    factor: float
    kernel: str | None  # or the key of a `FunctionKernel`
    wire: Format | None
    overlap: bool
    scores: tuple[int, int, float]  # arguments of Scores
    documents: tuple[int, ...]


def new_call(
    name: str, sizes: Sequence[int], q: Tensor, k: Tensor, mask: Tensor | None
) -> AttentionCall:
    """Make the call over a mesh that a text describes, after all ranks agreed on it."""
    placed, _, text = name.partition("\n")[2].rpartition("\n")
    (mesh, layout), settings = layout_on(placed, sizes[3:]), _Settings(**literal_eval(text))
    _agree(mesh, layout, settings, q, k, mask)
    (ring, ulysses), causal, like = mesh.place, settings.causal, q.new_empty(0)
    has_bias = mask is not None or is_biased(layout, causal)
    scores = Scores(*settings.scores)
    heads, own = None, slice(None)
    if mesh.ulysses is not None:
        shares, each = HeadShares.split(k.shape[1], mesh.ulysses.size), q.shape[1] // k.shape[1]
        heads = HeadExchange(mesh.ulysses, shares, *layout.exchanged(ring))
        first = shares.first(ulysses)
        own = slice(first * each, (first + shares.of(ulysses)) * each)
    key = "tiles", layout, ring, causal, own.start, own.stop, q.dtype, q.device

    def cut(mask: Tensor | None) -> Tiles:
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
            mask = mask if mask.shape[1] == 1 else mask[:, own]
        return tiles_of(layout, mesh.ring, mask, causal, like, scores, settings.documents)

    def tiles(mask: Tensor | None) -> Tiles:
        return cached_by_mask(mask, key, partial(cut, mask))

    query = {"dtype": q.dtype, "head_dim": q.shape[-1], "has_bias": has_bias}
    query |= {"is_packed": scores.is_near or bool(settings.documents), "cap": scores.cap}
    return AttentionCall(
        kernel=select_kernel(named(settings.kernel), q.device.type, **query),
        scale=settings.factor,
        tiles=tiles if has_bias else cut(None),
        kv_lens=layout.ring_lens,
        ring=mesh.ring,
        heads=heads,
        wire=Quantized.of(settings.wire),
        overlap=settings.overlap,
        name=name,
        sizes=tuple(sizes),
    )


def _agree(
    mesh: AttentionMesh,
    layout: SequenceLayout,
    settings: _Settings,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
) -> None:
    """Check that all ranks make the same call, on the tokens of the layout; one all-gather."""
    sent_as = "" if settings.wire is None else f" as {Quantized(settings.wire)}"
    of_mask = "none"
    if mask is not None:
        of_mask = f"of {mask.dim()} dims, {mask.dtype}, {digest_of(mask)}"
    text = (
        f"a layout of {layout.segments} tokens on {mesh.degrees[0]} x {mesh.degrees[1]} ranks, "
        f"zigzag={layout.zigzag}, stripe={layout.stripe}, turn_step={layout.turn_step}, "
        f"turn_skip={layout.turn_skip}, "
        f"replicated segments {settings.replicated}, batch {q.shape[0]}, {q.shape[1]} heads for "
        f"{k.shape[1]}, head_dim {q.shape[3]}, {q.dtype}{sent_as}, causal={settings.causal}, "
        f"scale={settings.scale}, kernel {named(settings.kernel)}, overlap={settings.overlap}, "
        f"mask {of_mask}, {Scores(*settings.scores)}, documents {settings.documents}"
    )

    def describe() -> tuple[str, ConfigError | None]:
        wanted = num_tokens(layout.own_runs(*mesh.place))
        if q.shape[2] == wanted:
            return text, None
        return text, ConfigError(
            f"attention: q has {q.shape[2]} tokens, but the layout gives this rank {wanted} of "
            f"{layout.seq_len}: take them with split(x, mesh, layout, dim)"
        )

    first_use(mesh.whole, (mesh.name, q.shape[2], text), describe, what="attention")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Attend with this rank's queries; return as q. Differentiable. `sink`: see `api.attention`."""
    if call.name and is_recorded():
        return attend_op(q, k, v, mask, sink, call.sizes, call.name)[0]
    if not torch.is_grad_enabled():
        return forward(q, k, v, mask, sink, call)[0]
    apply = _Attention.apply if torch.compiler.is_compiling() else _apply
    return apply(q, k, v, mask, sink, call)


def check_sink(what: str, sink: Any, q: Tensor) -> None:
    """Refuse a sink that is not one score for each query head, on the device of the queries."""
    if sink is None:
        return
    is_one = isinstance(sink, Tensor) and sink.is_floating_point() and sink.device == q.device
    if not is_one or sink.shape != q.shape[1:2]:
        shown = tuple(sink.shape) if isinstance(sink, Tensor) else sink
        raise ConfigError(
            f"{what}: sink is {shown}: give a number for each of {q.shape[1]} heads, on {q.device}"
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        sink: Tensor | None,
        call: AttentionCall,
    ) -> Tensor:
        out, *gathered = forward(q, k, v, mask, sink, call)
        saved = gathered if call.heads is not None else (q, k, v, out, gathered[-1])
        ctx.save_for_backward(mask, sink, *saved)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second(grads[0])
        mask, sink, *saved = ctx.saved_tensors
        dq, dk, dv, *rest = backward(grads[0], saved, mask, sink, ctx.call)
        return dq, dk, dv, None, rest[0] if rest else None, None


# `Function.apply` looks for transforms, which every entry point has refused: 2 microseconds a call.
_apply = cast(Any, super(torch.autograd.Function, _Attention)).apply


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sink: Tensor | None, call: AttentionCall
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Attend as `attend` does, without autograd.

    Returns the output at home; where ranks share heads, this rank's heads of all tokens: (B, S,
    heads of q, k and v, D), and their output (B, S, heads of q, D), else None; and the LSE.
    """
    tiles, heads = call.tiles(mask) if callable(call.tiles) else call.tiles, call.heads
    if isinstance(call.kernel, FunctionKernel):
        num_parts = max(len(tiles), sum(map(len, tiles)), 2 if sink is not None else 1)
        call.kernel.check_parts(2 if call.overlap else num_parts)
    if heads is None:
        out, lse = ring_forward(_by_head(q), _by_head(k), _by_head(v), tiles, call)
        out, lse = _sunk(out, lse, sink)
        if call.count is not None:
            call.count()
        # In place: users may not write to a view that a function returned.
        return out if q.dim() == 4 else out.transpose_(1, 2).squeeze_(0), None, None, lse
    xs = q, k, v
    if not heads.is_packed:
        xs = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if call.overlap:
        own, whole, out, lse = overlapped_forward(xs, tiles, call)
    else:
        whole = heads.start_to_heads(xs, call.where, call.wire)()
        num_kv = heads.own_kv_heads
        sizes = whole.shape[2] - 2 * num_kv, num_kv, num_kv
        q, k, v = whole.transpose(1, 2).split_with_sizes(sizes, 1)
        out, lse = ring_forward(q, k, v, tiles, call)
        out, lse = _sunk(out, lse, None if sink is None else _local_sink(sink, call))
        out = out.transpose(1, 2)
        (own,) = heads.start_to_tokens(out, [out.shape[2]], call.where, call.wire)()
    if call.count is not None:
        call.count()
    return own if heads.is_packed else own.transpose_(1, 2), whole, out, lse


def _local_sink(sink: Tensor, call: AttentionCall) -> Tensor:
    """Return a view of the sinks of the heads that this rank attends with."""
    heads = call.heads
    if heads is None:
        return sink
    each = sink.shape[0] // heads.num_kv_heads
    return sink.narrow(0, heads.first_kv_head * each, heads.own_kv_heads * each)


def _sunk(out: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add a sink to each softmax, with a value of 0: the kernels' gradients stay right."""
    if sink is None:
        return out, lse
    whole = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    return (out * (lse - whole).exp()[..., None]).to(out.dtype), whole


def _sink_gradient(
    grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor, call: AttentionCall
) -> Tensor:
    """Return the gradient of all sinks from (B, local heads, S, D); 0 for heads of other ranks."""
    weights = (_local_sink(sink, call).to(lse.dtype)[:, None] - lse).exp()
    wide, total = wide_dtype(out), torch.zeros_like(sink)
    each = weights * (grad.to(wide) * out.to(wide)).sum(-1)
    _local_sink(total, call).copy_(-each.sum((0, 2)))
    return total


def backward(
    grad: Tensor,
    saved: Sequence[Tensor],
    mask: Tensor | None,
    sink: Tensor | None,
    call: AttentionCall,
) -> tuple[Tensor, ...]:
    """Return gradients of q, k, v at home, and of a sink, from what `_Attention.forward` saved."""
    tiles, heads = call.tiles(mask) if callable(call.tiles) else call.tiles, call.heads
    with shared(f"{call.where}, backward"):
        if heads is None:
            *tensors, lse = saved
            attended = [*map(_by_head, tensors), lse]
            grads = ring_backward(_by_head(grad), attended, tiles, call)
            grads = grads if grad.dim() == 4 else [x[0].transpose(0, 1) for x in grads]
            if sink is None:
                return tuple(grads)
            return *grads, _sink_gradient(_by_head(grad), attended[3], lse, sink, call)
        whole, out, lse = saved
        num_kv = heads.own_kv_heads
        sizes = whole.shape[2] - 2 * num_kv, num_kv, num_kv
        qkv = whole.transpose(1, 2).split_with_sizes(sizes, 1)
        out = out.transpose(1, 2)
        grad = grad if heads.is_packed else grad.transpose(1, 2)
        grad_here = heads.start_to_heads([grad], call.where)().transpose(1, 2)
        grads = ring_backward(grad_here, [*qkv, out, lse], tiles, call)
        rows = torch.cat(grads, 1).transpose(1, 2)
        home = heads.start_to_tokens(rows, [x.shape[1] for x in grads], call.where)()
        home = home if heads.is_packed else [x.transpose(1, 2) for x in home]
        if sink is None:
            return tuple(home)
        return *home, _sink_gradient(grad_here, out, lse, sink, call)


def _by_head(x: Tensor) -> Tensor:
    """View a tensor at home as (B, heads, T, D)."""
    return x if x.dim() == 4 else x.transpose(0, 1)[None]


# --- `attend` as operators of torch ---------------------------------------------------------------


def find_call(
    name: str, sizes: Sequence[int], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> AttentionCall:
    """Return the call that a text names: of a mesh, made at first use, or of a numbered step."""
    if not name.startswith("mesh"):
        return this_world().find(sizes[3]).find_call(name, q, k, v)
    key = name, tuple(sizes), q.shape, k.shape, q.dtype, q.device, signature(mask)
    calls = mesh_named(name.split("\n")[1]).cache
    return calls.get(key, lambda: new_call(name, sizes, q, k, mask))


# Defined by their schemas: `custom_op` costs 25 microseconds more a call. No output is a part of
# another tensor. Where no heads are shared, `whole` and `out` are empty.
torch.library.define(
    "bascule::attend",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sink, SymInt[] sizes, str call)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "bascule::attend_backward",
    "(Tensor grad, Tensor[] saved, Tensor? mask, Tensor? sink, SymInt[] sizes, str call)"
    " -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)
attend_op = torch.ops.bascule.attend.default
_backward_op = torch.ops.bascule.attend_backward.default
for _operator in (attend_op, _backward_op):  # an unused result must still be exchanged
    has_side_effect(_operator)


@torch.library.impl("bascule::attend", "CompositeExplicitAutograd")
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    sizes: Sequence[int],
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with shared("attend"):
        call = find_call(name, sizes, q, k, v, mask)
        own, whole, out, lse = forward(q, k, v, mask, sink, call)
    own, lse = _by_token(own_memory(_by_token(own))), own_memory(lse)
    if whole is None or out is None:
        return own, q.new_empty(0), q.new_empty(0), lse
    return own, whole, own_memory(out), lse


@torch.library.register_fake("bascule::attend")
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (*_, sizes, _) = others
    seq_len, num_q, num_kv = sizes[:3]
    batch, wide = q.shape[0] if q.dim() == 4 else 1, torch.promote_types(q.dtype, torch.float32)
    own = _empty_at_home(q, q)
    if not num_q:
        return own, q.new_empty(0), q.new_empty(0), q.new_empty(_by_head(q).shape[:3], dtype=wide)
    whole = q.new_empty(batch, seq_len, num_q + 2 * num_kv, q.shape[-1])
    out = q.new_empty(batch, seq_len, num_q, q.shape[-1])
    return own, whole, out, q.new_empty(batch, num_q, seq_len, dtype=wide)


@torch.library.impl("bascule::attend_backward", "CompositeExplicitAutograd")
def _attend_backward(
    grad: Tensor,
    saved: Sequence[Tensor],
    mask: Tensor | None,
    sink: Tensor | None,
    sizes: Sequence[int],
    name: str,
) -> list[Tensor]:
    k = _keys_like(grad, saved, sizes)
    call = find_call(name, sizes, grad, k, k, mask)
    dq, dk, dv, *rest = backward(grad, saved, mask, sink, call)
    return [*(_by_token(own_memory(_by_token(x))) for x in (dq, dk, dv)), *rest]


@torch.library.register_fake("bascule::attend_backward")
def _(grad: Tensor, saved: Sequence[Tensor], *settings: Any) -> list[Tensor]:
    _, sink, sizes, _ = settings
    k = _keys_like(grad, saved, sizes)
    own = [_empty_at_home(x, grad) for x in (grad, k, k)]
    return own if sink is None else [*own, torch.empty_like(sink)]


def _keys_like(grad: Tensor, saved: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return a tensor of the keys' shape and dtype, whose values mean nothing."""
    if not sizes[1]:
        return saved[1]
    batch_or_tokens, num_heads, *rest = grad.shape
    return grad.new_empty(()).expand(batch_or_tokens, num_heads // (sizes[1] // sizes[2]), *rest)


def _empty_at_home(x: Tensor, like: Tensor) -> Tensor:
    """Return memory of the shape of `x`, contiguous by token."""
    return _by_token(like.new_empty(_by_token(x).shape))


def _by_token(x: Tensor) -> Tensor:
    """View a tensor at home as (B, T, H, D) or (T, H, D), and back."""
    return x if x.dim() == 3 else x.transpose(1, 2)


def own_memory(x: Tensor) -> Tensor:
    """Return a contiguous tensor with its own storage: operators may return no part of another."""
    is_part = x.untyped_storage().nbytes() != x.numel() * x.element_size() or not x.numel()
    return x.clone(memory_format=torch.contiguous_format) if is_part else x.contiguous()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, mask, sink, sizes, name = inputs
    out, *gathered = output
    saved = gathered if sizes[1] else (q, k, v, out, gathered[-1])
    ctx.save_for_backward(mask, sink, *saved)
    ctx.mark_non_differentiable(*gathered)
    ctx.set_materialize_grads(False)  # of `gathered`, which is large
    ctx.settings = sizes, name


def _gradients(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    refuse_second(grad)
    mask, sink, *saved = ctx.saved_tensors
    dq, dk, dv, *rest = _backward_op(grad, saved, mask, sink, *ctx.settings)
    return dq, dk, dv, None, rest[0] if rest else None, None, None


def _no_second(ctx: Any, *grads: Any) -> Any:
    raise ConfigError(NO_SECOND)


torch.library.register_autograd("bascule::attend", _gradients, setup_context=_keep)
torch.library.register_autograd("bascule::attend_backward", _no_second)
