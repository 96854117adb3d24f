"""Tensors on the wire at 8 bits a value: half the bytes of bfloat16, at an error that is measured.

A row (the D values of one token and head) becomes D codes and the row's largest magnitude, its
peak, in float32: D + 4 bytes, which travel as uint8 since not every back end knows float8. The
peak itself is stored, not a scale: it is exact for every input up to float32, subnormals included.
What leaves a row is what enters it to within half a code: peak / 254 as int8; as e4m3 a relative
2^-4, or peak / 448 * 2^-10 where that is more.

What float32 cannot hold is never rounded to a number: a row with an inf or a nan arrives as nan.
float64 travels as float32 does, so what is beyond its range arrives as nan, or, if tiny, as 0.

Rows may travel as differences from a centre that sender and receiver know. Keys and values of one
head often have a few channels with a large constant offset, which would take the codes of all
others. The receiver adds the centre again, so attention is the same with any centre, whatever the
mask, and a rank can mix rows that travelled with its own. (Subtracted from all keys a constant
cancels in the softmax and need not be added; but then no key may stay as it is, and values need it
anyway.) A row travels as a difference only where that is smaller: the sign of its peak says so. So
no centre costs a row codes, and rows of zeros, such as the output of a query without keys, arrive
as zeros with any.

Nothing here is recorded by autograd. For training, the rule is: the forward uses the values as they
were received, the backward treats the transport as the identity, and gradients travel in full.

Shapes: B batch, H query heads, K key-value heads (H is a multiple of K), S tokens, D head width.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from bascule.comm.collectives import all_reduce
from bascule.comm.groups import RankGroup
from bascule.errors import ConfigError

Format = Literal["int8", "e4m3"]

_CODES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
_LARGEST = {"int8": 127.0, "e4m3": 448.0}  # codes are symmetric: -128 is not used
PEAK_BYTES = torch.float32.itemsize
"""Of a row's peak, which travels with its codes."""
_OUTLIER = 4.0  # times the median size of the rows of a head
_SCORES_AT_ONCE = 2**25


@dataclass(frozen=True, slots=True, eq=False)
class Wire:
    """How rows travel.

    Attributes:
        format: "int8", evenly spaced codes, or "e4m3", floating-point codes of 3 mantissa bits:
            less exact unless a row's values are of very different magnitudes.
        k_centre: (B, K, 1, D) float32, the same on all ranks; None stands for 0.
        v_centre: The same of the values, and so of the attention's output.
        takes_centres: Whether each call of attention takes centres from its own keys and values,
            as `centred` does, by one all-reduce.

    Raises:
        ConfigError: There is no such format, or centres are both given and to be taken.
    """

    format: Format
    k_centre: Tensor | None = None
    v_centre: Tensor | None = None
    takes_centres: bool = False

    def __post_init__(self) -> None:
        if self.format not in _CODES:
            raise ConfigError(f"wire format {self.format!r}: choose one of {', '.join(_CODES)}")
        if self.takes_centres and (self.k_centre is not None or self.v_centre is not None):
            raise ConfigError("a wire with centres and takes_centres=True: give one of them")

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one row."""
        return head_dim + PEAK_BYTES

    def pack(self, x: Tensor, centre: Tensor | None = None) -> Tensor:
        """The bytes of (..., D) floating-point rows: (..., D + 4) uint8. No device is waited for.

        Args:
            x: Any strides.
            centre: Broadcasts to `x`. Codes are of the difference, where it is smaller.

        Raises:
            ConfigError: `x` is not floating-point or has rows of no values, or the centre does not
                broadcast to it.
        """
        _check_rows(x, centre)
        wide, is_apart = x.detach().to(torch.float32), None
        peak = wide.abs().amax(-1)
        if centre is not None:
            apart = wide - centre
            peak_apart = apart.abs().amax(-1)
            # What codes are off by grows with a row's peak where they are evenly spaced, else with
            # all its values.
            is_apart = peak_apart < peak
            if self.format == "e4m3":
                is_apart = apart.square().sum(-1) < wide.square().sum(-1)
            wide = torch.where(is_apart[..., None], apart, wide)
            peak = torch.where(is_apart, peak_apart, peak)
        # Zeros over a peak of 0 are nan, and so are inf and nan over theirs: codes of 0 for all.
        units = (wide / peak[..., None]).nan_to_num_(0.0).mul_(_LARGEST[self.format])
        codes = units.round_() if self.format == "int8" else units
        codes = codes.to(_CODES[self.format]).view(torch.uint8)
        # One nan for all, so that the bytes do not depend on who computed them.
        peak = torch.where(peak < math.inf, peak, math.nan)
        if is_apart is not None:
            peak = torch.where(is_apart, -peak, peak)
        return torch.cat((codes, peak.contiguous()[..., None].view(torch.uint8)), dim=-1)

    def unpack(self, rows: Tensor, dtype: torch.dtype, centre: Tensor | None = None) -> Tensor:
        """What `pack` was given, (..., D), from its (..., D + 4) bytes and the same centre.

        Raises:
            ConfigError: These are not such bytes, or the centre does not broadcast to the values.
        """
        if rows.dtype != torch.uint8 or rows.dim() < 1 or rows.shape[-1] <= PEAK_BYTES:
            raise ConfigError(
                f"unpack: {tuple(rows.shape)} of {rows.dtype}: give uint8 rows of at least "
                f"{PEAK_BYTES + 1} bytes, as `pack` makes them"
            )
        codes, peak = rows.split([rows.shape[-1] - PEAK_BYTES, PEAK_BYTES], dim=-1)
        # A copy, since rows need not begin at a multiple of four bytes.
        peak = peak.clone(memory_format=torch.contiguous_format).view(torch.float32)
        # The quotient first: peak / 127 would lose the digits of a subnormal peak.
        values = codes.view(_CODES[self.format]).to(torch.float32).div_(_LARGEST[self.format])
        values = values.mul_(peak.abs())
        if centre is not None:
            _check_centre(values, centre)
            values = torch.where(peak.signbit(), values + centre, values)
        return values.to(dtype)

    def centred(self, k: Tensor, v: Tensor, group: RankGroup | None) -> "Wire":
        """The same with the centres of these tensors, see `take_centres`. One all-reduce.

        Centres may be kept for later tensors of the same heads, such as those of the next denoising
        step: a centre that is off helps less, and never costs exactness.

        Args:
            k: (B, K, T, D) keys of this rank's tokens, of any number.
            v: (B, K, T, D) values.
            group: The ranks that share the tokens; None for one rank.
        """
        k_centre, v_centre = take_centres(k, v, group).unbind(0)
        return Wire(self.format, k_centre, v_centre)

    def of_heads(self, first: int, num_heads: int) -> "Wire":
        """The same for a run of key-value heads, such as a Ulysses rank has."""
        k_centre, v_centre = (
            None if centre is None else centre.narrow(1, first, num_heads)
            for centre in (self.k_centre, self.v_centre)
        )
        return Wire(self.format, k_centre, v_centre)

    def out_centre(self, num_heads: int) -> Tensor | None:
        """(B, H, 1, D) the centre of the output, as weights of a softmax add up to 1."""
        if self.v_centre is None or self.v_centre.shape[1] == num_heads:
            return self.v_centre
        return self.v_centre.repeat_interleave(num_heads // self.v_centre.shape[1], dim=1)


def take_centres(k: Tensor, v: Tensor, group: RankGroup | None) -> Tensor:
    """The mean key and value of every head, (2, B, K, 1, D) float32, the same on all ranks.

    Rows of zeros do not count, nor those that are not finite, nor outliers, such as the tokens that
    attention sinks into: those of more than four times the median size of their head's on a rank.
    One all-reduce of 2 B K (D + 1) float32 numbers.

    Args:
        k: (B, K, T, D) keys of this rank's tokens, of any number.
        v: (B, K, T, D) values.
        group: The ranks that share the tokens; None for one rank.
    """
    sums = torch.stack([_sum_of_usual(x.detach()) for x in (k, v)])
    if group is not None:
        sums = all_reduce(group, "all_reduce (centres)", sums)
    means = sums[..., :-1] / sums[..., -1:].clamp(min=1.0)
    # Sums that overflow must not make nan of every row.
    return torch.where(means.isfinite(), means, 0.0)[..., None, :]


def _sum_of_usual(x: Tensor) -> Tensor:
    """(B, K, D + 1) the sum of a head's rows that are no outliers, and their number."""
    wide = torch.promote_types(x.dtype, torch.float32)
    sizes = torch.linalg.vector_norm(x, dim=-1, dtype=wide)
    is_known = (sizes > 0.0) & sizes.isfinite()
    # By sorting, which is deterministic on all devices; the others come last, and one at least.
    ordered = functional.pad(sizes.masked_fill(~is_known, math.inf), (0, 1), value=math.inf).sort()
    middle = (is_known.sum(-1, keepdim=True) - 1).clamp(min=0) // 2
    is_usual = is_known & (sizes <= _OUTLIER * ordered.values.gather(-1, middle))
    total = x.masked_fill(~is_usual[..., None], 0.0).sum(-2, dtype=torch.float32)
    return torch.cat((total, is_usual.sum(-1, keepdim=True)), dim=-1)


def _check_rows(x: Tensor, centre: Tensor | None) -> None:
    if not x.is_floating_point() or x.dim() < 1 or x.shape[-1] < 1:
        raise ConfigError(
            f"pack: {tuple(x.shape)} of {x.dtype}: give floating-point rows of one value or more"
        )
    if centre is not None:
        _check_centre(x, centre)


def _check_centre(x: Tensor, centre: Tensor) -> None:
    given = (1,) * (x.dim() - centre.dim()) + tuple(centre.shape)
    # Not `a not in (1, b)`: to a compiler no symbolic size is in a tuple.
    if len(given) != x.dim() or any(a != 1 and a != b for a, b in zip(given, x.shape, strict=True)):
        raise ConfigError(
            f"a centre of shape {tuple(centre.shape)} for rows of shape {tuple(x.shape)}: it must "
            "broadcast to them; take it with `centred` from tensors of the same batch and heads"
        )


# --- the error on given tensors -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far a tensor is from its reference.

    Attributes:
        relative_l2: Norm of the difference over that of the reference.
        relative_to_spread: The same over the reference less its mean over the tokens: a large
            constant in some channels makes `relative_l2` small, whatever happens to the rest.
        largest: Largest difference over the root mean square of the reference.
    """

    relative_l2: float
    relative_to_spread: float
    largest: float

    @classmethod
    def of(cls, x: Tensor, reference: Tensor) -> "Deviation":
        """Of (..., S, D) tensors, in float64. 0 for equal ones; inf over a reference of 0."""
        exact = reference.detach().to(torch.float64)
        difference = x.detach().to(torch.float64) - exact
        if not difference.numel() or not difference.any():
            return cls(0.0, 0.0, 0.0)
        spread = (exact - exact.mean(dim=-2, keepdim=True)).norm()
        rms = exact.norm() / math.sqrt(exact.numel())
        return cls(
            relative_l2=float(difference.norm() / exact.norm()),
            relative_to_spread=float(difference.norm() / spread),
            largest=float(difference.abs().max() / rms),
        )


@dataclass(frozen=True, slots=True)
class WireError:
    """What a wire costs on given tensors.

    Attributes:
        q: Of the queries themselves; likewise `k` and `v`.
        k: As `q`.
        v: As `q`.
        out_kv: Of the attention's output if all keys and values travelled, as in a ring.
        out_all: Of the output if all of q, k, v and the output travelled, as with Ulysses.
        packed_bytes: Of q, k, v and the output on the wire.
        full_bytes: Of the same tensors as they are.
    """

    q: Deviation
    k: Deviation
    v: Deviation
    out_kv: Deviation
    out_all: Deviation
    packed_bytes: int
    full_bytes: int


def measure_error(
    q: Tensor, k: Tensor, v: Tensor, wire: Wire, *, scale: float | None = None
) -> WireError:
    """What `wire` would cost on these tensors, against attention in float64. No communication.

    Args:
        q: (B, H, S, D) queries; attention is of all queries to all keys.
        k: (B, K, S, D) keys.
        v: (B, K, S, D) values.
        wire: The format and centres.
        scale: Factor of the scores. Default: D^-0.5.
    """
    wire = wire.centred(k, v, None) if wire.takes_centres else wire
    out_centre = wire.out_centre(q.shape[1])
    centres = (None, wire.k_centre, wire.v_centre)
    pairs = list(zip((q, k, v), centres, strict=True))
    packed = [wire.pack(x, centre) for x, centre in pairs]
    received = [
        wire.unpack(rows, x.dtype, centre) for rows, (x, centre) in zip(packed, pairs, strict=True)
    ]
    exact = _attention(q, k, v, scale)
    out = _attention(received[0], received[1], received[2], scale).to(q.dtype)
    packed_out = wire.pack(out, out_centre)
    return WireError(
        q=Deviation.of(received[0], q),
        k=Deviation.of(received[1], k),
        v=Deviation.of(received[2], v),
        out_kv=Deviation.of(_attention(q, received[1], received[2], scale), exact),
        out_all=Deviation.of(wire.unpack(packed_out, q.dtype, out_centre), exact),
        packed_bytes=sum(x.nbytes for x in (*packed, packed_out)),
        full_bytes=sum(x.nbytes for x in (q, k, v, out)),
    )


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """In float64, some queries at a time, for long sequences on devices without a fused kernel."""
    k, v = k.to(torch.float64), v.to(torch.float64)
    queries = max(1, _SCORES_AT_ONCE // max(1, math.prod(q.shape[:2]) * k.shape[2]))
    parts = [
        functional.scaled_dot_product_attention(
            part.to(torch.float64), k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        for part in q.split(queries, dim=2)
    ]
    return torch.cat(parts, dim=2)
