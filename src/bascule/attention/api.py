"""Attention over a mesh of ranks, Ulysses by ring, exact for any shape.

Tokens are shared over the ranks; Ulysses gives the ranks of a row whole runs of tokens with some of
the heads, and the rows pass keys and values around a ring.

Shapes: B batch, H query heads, K key-value heads, S tokens of the whole sequence, T tokens of this
rank, D head width; R ring ranks, U Ulysses ranks.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bascule.attention import ops
from bascule.attention.call_marks import rows_of_call
from bascule.attention.call_spec import (
    CallSpec,
    check_settings,
    check_tensors,
    with_positive_scale,
)
from bascule.attention.kernels.registry import check_name
from bascule.attention.layout import (
    Run,
    SequenceLayout,
    num_tokens,
    own_tokens,
    take_runs,
    with_replicated,
)
from bascule.attention.overlap import overlapped_attention
from bascule.attention.tiles import without_lost_scores
from bascule.attention.ulysses import TokenOrder, own_run, to_heads, to_tokens
from bascule.comm.guard.failures import told
from bascule.comm.mesh import AttentionMesh as AttentionMesh
from bascule.comm.mesh import Place, place_in
from bascule.comm.transforms import refuse_derivatives
from bascule.comm.wire import Wire
from bascule.errors import ConfigError
from bascule.plan.checks import is_int


def split(x: Tensor, mesh: AttentionMesh, layout: SequenceLayout, dim: int) -> Tensor:
    """This rank's tokens of a tensor that every rank has. Differentiable, no communication.

    Raises:
        ConfigError: The tensor has another number of tokens than the layout.
    """
    _check_tokens("split", x, mesh, layout, dim, layout.seq_len)
    return take_runs(x, layout.shares(*mesh.place), dim)


def _check_tokens(
    what: str, x: Tensor, mesh: AttentionMesh, layout: SequenceLayout, dim: int, num: int
) -> None:
    """Refuse a layout of other ranks, and a tensor without this number of tokens in a dim."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"{what}: give a dense tensor, not a {type(x).__name__}")
    if (layout.ring_degree, layout.ulysses_degree) != mesh.degrees:
        raise ConfigError(
            f"{what}: a layout for {layout.ring_degree} x {layout.ulysses_degree} ranks (ring x "
            f"Ulysses) on a mesh of {mesh.degrees[0]} x {mesh.degrees[1]}"
        )
    if not is_int(dim) or not -x.dim() <= dim < x.dim():
        raise ConfigError(f"{what}: dim={dim!r} of a tensor of shape {tuple(x.shape)}")
    if x.shape[dim] != num:
        raise ConfigError(
            f"{what}: dim {dim} of {tuple(x.shape)} has {x.shape[dim]} tokens, and the layout has "
            f"{num}"
        )


@told("gather over a mesh")
def gather(
    x: Tensor,
    mesh: AttentionMesh,
    layout: SequenceLayout,
    dim: int,
    *,
    sums_gradients: bool = False,
) -> Tensor:
    """The tokens of all ranks in the order of the sequence, on every rank. One all-gather.

    The gradient of a rank's tokens is that of this rank's copy, of replicated tokens for the
    rank's share of them: what follows is taken to be the same on every rank. With `sums_gradients`
    it is the sum over the copies of all ranks, by one reduce-scatter: what DDP and FSDP want, which
    take the mean of the parameters' gradients over the ranks.

    Raises:
        ConfigError: The tensor has another number of tokens than this rank has in the layout.
    """
    _check_tokens("gather", x, mesh, layout, dim, num_tokens(layout.shares(*mesh.place)))
    refuse_derivatives("gather", x)
    if mesh.whole is None:
        return x
    rows = own_tokens(x, layout, mesh.place, dim).movedim(dim, 0)
    spec = CallSpec(mesh.name, zigzag=layout.zigzag, stripe=layout.stripe)
    whole = ops.gather_tokens(rows, list(layout.segments), spec.text, sums_gradients)
    return whole.movedim(0, dim)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How tokens lie and travel, and what computes, where the defaults of `attention` do not fit.

    Attributes:
        layout: Which tokens each rank has. Default: one segment, as many tokens on every rank.
        kernel: Name of the block kernel. Default: the fastest for the device.
        wire: How rows travel at 8 bits: of Ulysses q, k, v and the output, of a ring the keys and
            values of other ranks; see `wires.measure_error`. Gradients and replicated tokens
            travel as they are. Default: everything does.
        overlap: Whether Ulysses exchanges while it computes, in up to four more kernel calls,
            and with a ring two more a round; not with zigzag. Default: on CPUs where rows travel as
            they are, without a ring: there it measures faster.
        double_buffer: Whether a ring attends while keys and values travel. False waits for them
            where they are posted, which measures what that is worth.

    Raises:
        ConfigError: There is no such kernel, or one of the last two is no bool.
    """

    layout: SequenceLayout | None = None
    kernel: str | None = None
    wire: Wire | None = None
    overlap: bool | None = None
    double_buffer: bool = True

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():
            return
        check_name(self.kernel)
        is_known = isinstance(self.overlap, bool | None)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_known or not isinstance(self.double_buffer, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"overlap={self.overlap!r} and double_buffer={self.double_buffer!r}: give True or "
                "False each, or overlap=None for what measures faster"
            )


_DEFAULT = AttentionOptions()


@told("attention over a mesh")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: AttentionMesh | DeviceMesh | Place,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    options: AttentionOptions = _DEFAULT,
) -> Tensor:
    """Exact attention of tokens that are shared over a mesh; (B, H, T, D) as q.

    Two all-to-alls over the Ulysses ranks and R - 1 exchanges around the ring, and twice that
    backward; for replicated tokens one all-gather more, and one reduce-scatter backward; for a wire
    that takes centres one all-reduce. In the first call of a form ranks agree by one all-gather.

    Args:
        q: (B, H, T, D) queries of this rank's tokens, in the order of the layout's `shares`.
        k: (B, K, T, D) keys; H is a multiple of K.
        v: (B, K, T, D) values.
        mesh: The ranks, or this rank's place among them.
        attn_mask: Of the whole sequence and all heads, the same on every rank: bool (True is seen)
            or added to the scores, float32 or as q; broadcasts to (B, H, S, S), as (B, 1, 1, S) for
            key padding. A token that sees nothing gives 0; one whose keys are all hidden by a
            finite number so large that its scores are lost in it, as finfo.min, weighs them alike,
            as in one process; its query and keys get no gradient from it (torch's own kernels
            differ there).
        is_causal: Whether a token sees, of what the mask shows, only itself and those before it.
        scale: Factor of the scores. Default: D^-0.5.
        options: What is seldom changed.

    Raises:
        ConfigError: The shapes do not fit each other, the layout, the mesh or the wire.
        CommError: The ranks disagree, or a rank did not come in time.
    """
    ranks, layout = place_in(mesh), options.layout
    if not torch.compiler.is_compiling():
        check_settings("attention", is_causal, scale, options.kernel)
    check_tensors("attention", q, k, v, attn_mask)
    refuse_derivatives("attention", q, k, v, attn_mask)
    if layout is None:
        layout = SequenceLayout((q.shape[2] * math.prod(ranks.degrees),), *ranks.degrees)
    _check(q, k, v, ranks, layout, attn_mask)
    wire = _checked_wire(options.wire, k, ranks)
    rows = f"{rows_of_call(q, wire, attn_mask, layout.replicated)}, given scale {scale}"
    q, factor = with_positive_scale(q, scale)
    spec = CallSpec(
        mesh=ranks.name,
        num_heads=q.shape[1],
        num_kv_heads=_enough_heads(q.shape[1], k.shape[1], ranks.degrees[1]),
        zigzag=layout.zigzag,
        stripe=layout.stripe,
        causal=is_causal,
        scale=factor,
        kernel=options.kernel or "",
        wire="" if wire is None else wire.format,
        rows=rows,
        is_blocking=not options.double_buffer,
    )
    overlap = _overlaps(options.overlap, q, ranks, layout, wire)
    given = AttentionOptions(layout, options.kernel, wire, overlap)
    return _attend(q, k, v, attn_mask, ranks, spec, given)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    ranks: Place,
    spec: CallSpec,
    options: AttentionOptions,
) -> Tensor:
    """`attention` of what was checked, by options that leave nothing open."""
    layout, wire = options.layout, options.wire
    assert layout is not None
    segments = list(layout.segments)
    q, k, v = (own_tokens(x, layout, ranks.place, 2) for x in (q, k, v))
    q = without_lost_scores(q, layout, layout.own_runs(*ranks.place), mask, spec.causal)
    wire = None if wire is None else _with_centres(wire, k, v, segments, spec)
    k, v = (_repeated(x, spec.num_kv_heads) for x in (k, v))
    if options.overlap:
        centres = (None, None) if wire is None else (wire.k_centre, wire.v_centre)
        out, *_ = overlapped_attention(q, k, v, mask, *centres, segments, spec.text)
    else:
        out = _in_turn(q, k, v, mask, ranks, layout, wire, spec)
    return _replicated(out, ranks, layout, spec) if layout.replicated else out


def _in_turn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    ranks: Place,
    layout: SequenceLayout,
    wire: Wire | None,
    spec: CallSpec,
) -> Tensor:
    """Tokens to heads, around the ring, and back."""
    own = own_run(spec.num_kv_heads, ranks)
    mine = None if wire is None else wire.of_heads(*own)
    centres = (None, None) if mine is None else (mine.k_centre, mine.v_centre)
    settings = mask, *centres, list(layout.segments), spec.text
    if ranks.degrees[1] == 1:
        return ops.ring_attention(q, k, v, *settings)[0]
    order = TokenOrder.of(layout, ranks.place[0], q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in to_heads(q, k, v, order, spec, wire, own))
    out, _ = ops.ring_attention(q, k, v, *settings)
    return to_tokens(out.transpose(1, 2), order, spec, wire, own).transpose(1, 2)


def _overlaps(
    wanted: bool | None,
    q: Tensor,
    ranks: Place,
    layout: SequenceLayout,
    wire: Wire | None,
) -> bool:
    """Whether Ulysses exchanges while it computes, as was asked for or where it measures faster.

    Raises:
        ConfigError: It is to, and cannot.
    """
    ring, ulysses = ranks.degrees
    if ulysses == 1:
        return False
    if wanted and layout.zigzag:
        raise ConfigError(
            "attention: overlap=True with a zigzag layout, whose tokens are put in order between "
            "exchange and attention: leave out overlap, or zigzag"
        )
    if wanted is not None:
        return wanted
    return q.device.type == "cpu" and ring == 1 and wire is None and not layout.zigzag


def _replicated(own: Tensor, ranks: Place, layout: SequenceLayout, spec: CallSpec) -> Tensor:
    """Every rank's tokens, of replicated segments all of them, from those it answers for."""
    if ranks.degrees == (1, 1):
        return own
    runs: list[Run] = []
    at = 0
    for segment, spans in enumerate(layout.own(*ranks.place)):
        length = num_tokens(spans)
        if segment in layout.replicated:
            runs.append((at, at + length))
        at += length
    segments = [layout.segments[segment] for segment in sorted(layout.replicated)]
    rows = take_runs(own, runs, 2).movedim(2, 0)
    whole = ops.gather_tokens(rows, segments, spec.text, True)
    return with_replicated(own, whole.movedim(0, 2), layout, ranks.place, 2)


def _with_centres(wire: Wire, k: Tensor, v: Tensor, segments: list[int], spec: CallSpec) -> Wire:
    """The wire with the centres of this call, if any, repeated as keys are."""
    k_centre, v_centre = wire.k_centre, wire.v_centre
    if wire.takes_centres:
        centres = ops.take_centres(k.detach(), v.detach(), segments, spec.text)
        k_centre, v_centre = centres.unbind(0)
    k_centre, v_centre = (
        None if centre is None else _repeated(centre, spec.num_kv_heads)
        for centre in (k_centre, v_centre)
    )
    return Wire(wire.format, k_centre, v_centre)


def _enough_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> int:
    """Key-value heads, repeated as often as it takes for each Ulysses rank to have one."""
    repeat = num_heads // num_kv_heads
    for times in range(1, repeat + 1):
        if repeat % times == 0 and num_kv_heads * times >= num_ranks:
            return num_kv_heads * times
    return num_kv_heads


def _repeated(x: Tensor, num_heads: int) -> Tensor:
    """(B, heads, ...) with each head repeated, `num_heads` of them."""
    times = num_heads // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: Place,
    layout: SequenceLayout,
    mask: Tensor | None,
) -> None:
    """Refuse what cannot be attended.

    Raises:
        ConfigError: Names the shapes.
    """
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
    if (layout.ring_degree, layout.ulysses_degree) != mesh.degrees:
        raise ConfigError(
            f"attention: a layout for {layout.ring_degree} x {layout.ulysses_degree} ranks on a "
            f"mesh of {mesh.degrees[0]} x {mesh.degrees[1]}"
        )
    if mask is not None:
        if mask.dtype not in (torch.bool, torch.float32, q.dtype):
            raise ConfigError(
                f"attention: a mask of {mask.dtype} for q of {q.dtype}: give bool (True is seen; "
                "of a tokenizer's mask, mask.bool()), or what is added to the scores, as "
                f"{q.dtype} or torch.float32"
            )
        if mask.requires_grad:
            raise ConfigError(
                "attention: attn_mask requires a gradient, and mesh attention gives it none: "
                "pass attn_mask.detach()"
            )
        wanted = (q.shape[0], q.shape[1], layout.seq_len, layout.seq_len)
        given = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        if len(given) != 4 or any(a not in (1, b) for a, b in zip(given, wanted, strict=True)):
            raise ConfigError(
                f"attention: a mask of shape {tuple(mask.shape)} does not broadcast to (batch, "
                f"heads, tokens, tokens) of the whole sequence, {wanted}"
            )


def _checked_wire(wire: Wire | None, k: Tensor, ranks: Place) -> Wire | None:
    """The wire, where there is one between ranks.

    Raises:
        ConfigError: It is not a Wire, or its centres do not fit these keys.
    """
    is_wire = torch.compiler.is_compiling() or isinstance(wire, Wire | None)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_wire:
        raise ConfigError(f"attention: wire={wire!r}: give a Wire, as Wire('int8'), or None")
    wanted = (*k.shape[:2], 1, k.shape[3])
    for centre in () if wire is None else (wire.k_centre, wire.v_centre):
        if centre is not None and tuple(centre.shape) != wanted:
            raise ConfigError(
                f"attention: a centre of shape {tuple(centre.shape)} for k {tuple(k.shape)}: it "
                f"must be {wanted}; take it with Wire.centred, or make Wire(takes_centres=True)"
            )
    return None if ranks.degrees == (1, 1) else wire
