"""Calls of attention over a mesh, looked up by their names and made when they are first used.

A name is text, a constant to compilers: the mesh, how tokens lie, and settings. The sizes beside it
may be symbols: S, this rank's heads of queries and of keys (0 where unshared), then the segments.
"""

from ast import literal_eval
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from bascule.attention.call import AttentionCall, Tiles
from bascule.attention.kernels.registry import select_kernel
from bascule.attention.layout import SequenceLayout, num_tokens
from bascule.attention.tiles import digest_of, is_biased, kept_of, tiles_of
from bascule.attention.tokens import layout_on
from bascule.comm.agree import first_use
from bascule.comm.heads import HeadExchange
from bascule.comm.mesh import AttentionMesh, mesh_named
from bascule.comm.quantized import Quantized
from bascule.errors import ConfigError
from bascule.plan.traffic import HeadShares

_NUM_KEPT = 64  # forms of calls on a mesh, and plans


def look(*tensors: Tensor | None) -> tuple[object, ...]:
    """Return all of some tensors that makes a form of calls."""
    parts = list[object]()
    for x in tensors:
        if not isinstance(x, Tensor) or x.is_nested:
            parts.append(type(x))
        else:
            parts += (x.shape, x.dtype, x.device, x.layout, x.requires_grad)
    return tuple(parts)


class Settings(NamedTuple):
    """A call but for its mesh and layout; see `attention` and `AttentionOptions`."""

    replicated: tuple[int, ...]
    causal: bool
    scale: float | None
    factor: float
    kernel: str | None
    quantized: tuple[Any, ...] | None  # arguments of a Quantized
    overlap: bool
    double_buffer: bool


def _read(name: str, sizes: Sequence[int]) -> tuple[AttentionMesh, SequenceLayout, Settings]:
    """Return what the name and sizes of a call say."""
    form, _, settings = name.partition("\n")[2].rpartition("\n")
    return *layout_on(form, sizes[3:]), Settings(*literal_eval(settings))


def call_of(
    name: str, sizes: Sequence[int], q: Tensor, k: Tensor, mask: Tensor | None
) -> AttentionCall:
    """Return the call of a name; made, and agreed on by all ranks, when it is first used."""
    kept = mesh_named(name.split("\n")[1]).kept
    key = name, tuple(sizes), q.shape, k.shape, q.dtype, q.device, look(mask)
    call = kept.get(key)
    if call is None:
        mesh, layout, settings = _read(name, sizes)
        _agree(mesh, layout, settings, q, k, mask)
        call = _made(mesh, layout, settings, q, k, mask is not None)
        call = replace(call, name=name, sizes=tuple(sizes))
        keep(kept, key, call)
    return call


def keep(kept: dict[Hashable, Any], key: Hashable, one: object) -> None:
    """Keep something of a mesh under a key."""
    if len(kept) >= _NUM_KEPT:
        kept.clear()
    kept[key] = one


def _agree(
    mesh: AttentionMesh,
    layout: SequenceLayout,
    settings: Settings,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
) -> None:
    """Make sure that all ranks mean the same, and have the tokens of the layout; one all-gather."""
    sent_as = "" if settings.quantized is None else f" as {Quantized(*settings.quantized)}"
    seen = "none"
    if mask is not None:
        seen = f"of {mask.dim()} dims, {mask.dtype}, {digest_of(mask)}"
    text = (
        f"a layout of {layout.segments} tokens on {mesh.degrees[0]} x {mesh.degrees[1]} ranks, "
        f"zigzag={layout.zigzag}, stripe={layout.stripe}, replicated segments "
        f"{settings.replicated}, batch {q.shape[0]}, {q.shape[1]} heads for {k.shape[1]}, head_dim "
        f"{q.shape[3]}, {q.dtype}{sent_as}, causal={settings.causal}, scale={settings.scale}, "
        f"kernel {settings.kernel}, overlap={settings.overlap}, mask {seen}"
    )

    def say() -> tuple[str, ConfigError | None]:
        wanted = num_tokens(layout.own_runs(*mesh.place))
        if q.shape[2] == wanted:
            return text, None
        return text, ConfigError(
            f"attention: q has {q.shape[2]} tokens, and the layout gives this rank {wanted} of "
            f"{layout.seq_len}: take them with split(x, mesh, layout, dim)"
        )

    first_use(mesh.whole, (mesh.name, q.shape[2], text), say, what="attention")


def _made(
    mesh: AttentionMesh,
    layout: SequenceLayout,
    settings: Settings,
    q: Tensor,
    k: Tensor,
    is_masked: bool,
) -> AttentionCall:
    """Return the call of a form of tensors, without its name."""
    (ring, ulysses), causal, like = mesh.place, settings.causal, q.new_empty(0)
    has_bias = is_masked or is_biased(layout, causal)
    heads, own = None, slice(None)
    if mesh.ulysses is not None:
        shares, each = HeadShares.split(k.shape[1], mesh.ulysses.size), q.shape[1] // k.shape[1]
        heads = HeadExchange(mesh.ulysses, shares, *layout.exchanged(ring))
        first = shares.first(ulysses)
        own = slice(first * each, (first + shares.of(ulysses)) * each)
    form = "tiles", layout, ring, causal, own.start, own.stop, q.dtype, q.device

    def cut(mask: Tensor | None) -> Tiles:
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
            mask = mask if mask.shape[1] == 1 else mask[:, own]
        return tiles_of(layout, ring, mask, causal, like)

    def tiles(mask: Tensor | None) -> Tiles:
        return kept_of(mask, form, partial(cut, mask))

    asked = {"dtype": q.dtype, "head_dim": q.shape[-1], "has_bias": has_bias}
    return AttentionCall(
        kernel=select_kernel(settings.kernel, q.device.type, **asked),
        scale=settings.factor,
        tiles=tiles if has_bias else cut(None),
        kv_lens=layout.ring_lens,
        ring=mesh.ring,
        heads=heads,
        quantized=None if settings.quantized is None else Quantized(*settings.quantized),
        overlap=settings.overlap,
        double_buffer=settings.double_buffer,
    )
