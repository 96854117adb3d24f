"""Send tensors at 8 bits per value: half the bytes of bfloat16, with an error to be measured.

A row (the D values of one token and head) becomes D codes and its peak, the largest magnitude, in
float32: D + 4 bytes, as uint8 since not every back end knows float8. Values are off by at most
peak / 254 as int8; as e4m3 by a relative 2^-4, or peak / 448 * 2^-10 if that is more. A row with an
inf or a nan arrives as nan, and so does one of float64 beyond the range of float32.
Rows of zeros stay zeros. The backward treats the transport as the identity.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from bascule.errors import ConfigError

Format = Literal["int8", "e4m3"]

_CODES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
_LARGEST = {"int8": 127.0, "e4m3": 448.0}  # codes are symmetric: -128 is not used
PEAK_BYTES = torch.float32.itemsize
"""Bytes of a row's peak, which travels with its codes."""
_SCORES_AT_ONCE = 2**25


@dataclass(frozen=True, slots=True)
class Quantized:
    """An 8-bit format of rows sent between ranks; ConfigError for an unknown name."""

    # "int8", evenly spaced codes, or "e4m3", floating-point codes of 3 mantissa bits: less exact
    # unless a row's values are of very different magnitudes
    format: Format

    def __post_init__(self) -> None:
        if self.format not in _CODES:
            raise ConfigError(f"comm_dtype {self.format!r}: choose one of {', '.join(_CODES)}")

    @classmethod
    def of(cls, comm_dtype: "Format | Quantized | None") -> "Quantized | None":
        """Return the format that a `comm_dtype` names."""
        return cls(comm_dtype) if isinstance(comm_dtype, str) else comm_dtype

    def row_bytes(self, head_dim: int) -> int:
        """Return the bytes of one row."""
        return head_dim + PEAK_BYTES

    def pack(self, x: Tensor) -> Tensor:
        """Return rows (.., D) as bytes (.., D + 4)."""
        if not x.is_floating_point() or x.dim() < 1 or x.shape[-1] < 1:
            raise ConfigError(
                f"pack: got {tuple(x.shape)} of {x.dtype}: give floating-point rows, not empty"
            )
        wide = x.detach().to(torch.float32)
        peak = wide.abs().amax(-1, keepdim=True)
        # Zeros over a peak of 0 are nan, and so are inf and nan over theirs: codes of 0 for all.
        units = (wide / peak).nan_to_num_(0.0).mul_(_LARGEST[self.format])
        codes = units.round_() if self.format == "int8" else units
        codes = codes.to(_CODES[self.format]).view(torch.uint8)
        # One nan for all, so that the bytes do not depend on who computed them.
        peak = torch.where(peak < math.inf, peak, math.nan)[..., 0]
        return torch.cat((codes, peak.contiguous()[..., None].view(torch.uint8)), dim=-1)

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows (.., D) that were given to `pack`, in new memory."""
        if rows.dtype != torch.uint8 or rows.dim() < 1 or rows.shape[-1] <= PEAK_BYTES:
            wrong = f"unpack: got {tuple(rows.shape)} of {rows.dtype}"
            raise ConfigError(f"{wrong}: give uint8 rows of pack, {PEAK_BYTES + 1} bytes or more")
        codes, peak = rows.split([rows.shape[-1] - PEAK_BYTES, PEAK_BYTES], dim=-1)
        # A copy, since rows need not begin at a multiple of four bytes.
        peak = peak.clone(memory_format=torch.contiguous_format).view(torch.float32)
        # The quotient first: peak / 127 would lose the digits of a subnormal peak.
        values = codes.view(_CODES[self.format]).to(torch.float32).div_(_LARGEST[self.format])
        return values.mul_(peak).to(dtype)


CommDtype = Format | Quantized


@dataclass(frozen=True, slots=True)
class Deviation:
    """Distance of a tensor from its reference."""

    relative_l2: float  # norm of the difference over the reference's norm
    # The same over the reference less its mean over the tokens: a large constant in some channels
    # makes `relative_l2` small, whatever happens to the rest.
    relative_to_spread: float
    largest: float  # largest difference over the root mean square of the reference

    @classmethod
    def of(cls, x: Tensor, reference: Tensor) -> "Deviation":
        """Compare (..., S, D) tensors in float64: 0 for equal ones, inf over a reference of 0."""
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
class MeasuredError:
    """Deviation and bytes of some tensors that are sent at 8 bits."""

    q: Deviation  # of the queries themselves
    k: Deviation
    v: Deviation
    out_kv: Deviation  # of attention's output if all keys and values travelled, as in a ring
    out_all: Deviation  # if all of q, k, v and the output travelled, as with Ulysses
    packed_bytes: int  # of q, k, v and the output
    full_bytes: int  # of the same tensors as they are


def measure_error(
    q: Tensor, k: Tensor, v: Tensor, quantized: Quantized, *, scale: float | None = None
) -> MeasuredError:
    """Measure the error of 8 bits on these tensors against float64 attention; nothing is sent.

    Queries are (B, H, S, D), keys and values (B, K, S, D); no mask. The default scale is D^-0.5.
    """
    packed = [quantized.pack(x) for x in (q, k, v)]
    received = [quantized.unpack(rows, x.dtype) for rows, x in zip(packed, (q, k, v), strict=True)]
    exact = _attention(q, k, v, scale)
    out = _attention(received[0], received[1], received[2], scale).to(q.dtype)
    packed_out = quantized.pack(out)
    return MeasuredError(
        q=Deviation.of(received[0], q),
        k=Deviation.of(received[1], k),
        v=Deviation.of(received[2], v),
        out_kv=Deviation.of(_attention(q, received[1], received[2], scale), exact),
        out_all=Deviation.of(quantized.unpack(packed_out, q.dtype), exact),
        packed_bytes=sum(x.nbytes for x in (*packed, packed_out)),
        full_bytes=sum(x.nbytes for x in (q, k, v, out)),
    )


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Attend in float64, some queries at a time: not every device has a fused kernel."""
    k, v = k.to(torch.float64), v.to(torch.float64)
    queries = max(1, _SCORES_AT_ONCE // max(1, math.prod(q.shape[:2]) * k.shape[2]))
    parts = [
        functional.scaled_dot_product_attention(
            part.to(torch.float64), k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        for part in q.split(queries, dim=2)
    ]
    return torch.cat(parts, dim=2)
