"""8-bit rows of any bits: within their bound, or nan, and the same whatever lies beside them."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bascule.comm.quantized import Format, Quantized

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORMATS = st.sampled_from(["int8", "e4m3"])


@st.composite
def any_rows(draw: st.DrawFn) -> Tensor:
    """(n, D) of any bits: infinities, nan payloads, subnormals and zeros of both signs."""
    dtype = draw(st.sampled_from(DTYPES))
    num_rows, dim = draw(st.integers(0, 6)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = num_rows * dim * dtype.itemsize
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    rows = raw.view(dtype).view(num_rows, dim) if size else torch.empty(num_rows, dim, dtype=dtype)
    special = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, torch.finfo(dtype).max]
    special += [torch.finfo(dtype).tiny, torch.finfo(dtype).smallest_normal / 2]
    for row in range(num_rows):
        kind = draw(st.sampled_from(["bits", "normal", "special"]))
        if kind == "normal":
            exponent = draw(st.integers(-44, 38))
            rows[row] = (torch.randn(dim, generator=generator) * 10.0**exponent).to(dtype)
        elif kind == "special":
            rows[row] = torch.tensor(draw(st.lists(st.sampled_from(special), min_size=1))[0])
            rows[row, draw(st.integers(0, dim - 1))] = draw(st.sampled_from(special))
    return rows


def bound(unit: Tensor, fmt: Format) -> Tensor:
    """Largest error of values that are at most 1 in magnitude."""
    if fmt == "int8":
        return torch.full_like(unit, 0.5 / 127.0)
    return torch.maximum(unit.abs() * 2.0**-4, torch.full_like(unit, 2.0**-10 / 448.0))


@settings(deadline=None, max_examples=300)
@given(any_rows(), FORMATS)
def test_rows_are_within_their_bound_or_nan(rows: Tensor, fmt: Format) -> None:
    found = Quantized(fmt).unpack(Quantized(fmt).pack(rows), torch.float64)
    exact = rows.float().double()  # what float32 can hold
    is_finite = exact.isfinite().all(-1)
    assert found[~is_finite].isnan().all()
    found, exact = found[is_finite], exact[is_finite]
    peak = exact.abs().amax(-1, keepdim=True)
    unit = torch.where(peak > 0.0, exact / peak, 0.0)
    spacing = 2.0**-149
    allowed = peak * (bound(unit, fmt) + 1e-6) + spacing
    assert ((found - exact).abs() <= allowed).all()
    assert torch.equal(found.abs().amax(-1), peak.squeeze(-1))


@settings(deadline=None, max_examples=100)
@given(any_rows(), FORMATS)
def test_what_arrived_can_travel_on_unchanged(rows: Tensor, fmt: Format) -> None:
    wire = Quantized(fmt)
    packed = wire.pack(rows)
    once = wire.unpack(packed, torch.float32)
    torch.testing.assert_close(
        wire.unpack(wire.pack(once), torch.float32), once, equal_nan=True, rtol=1e-6, atol=1e-44
    )
    assert torch.equal(wire.pack(rows), packed)


@settings(deadline=None, max_examples=100)
@given(any_rows(), FORMATS)
def test_rows_do_not_depend_on_each_other(rows: Tensor, fmt: Format) -> None:
    wire = Quantized(fmt)
    order = torch.randperm(rows.shape[0], generator=torch.Generator().manual_seed(rows.shape[1]))
    packed = wire.pack(rows)
    assert torch.equal(wire.pack(rows[order]), packed[order])
    for row, alone in zip(packed, rows, strict=True):
        assert torch.equal(wire.pack(alone), row)
    values = wire.unpack(packed, torch.float32)
    for row, value in zip(packed, values, strict=True):
        assert torch.equal(wire.unpack(row, torch.float32).isnan(), value.isnan())
        assert torch.equal(wire.unpack(row, torch.float32).nan_to_num(), value.nan_to_num())


@settings(deadline=None, max_examples=200)
@given(any_rows(), FORMATS)
def test_no_centre_costs_codes(rows: Tensor, fmt: Format) -> None:
    wire = Quantized(fmt, centered=True)
    packed = wire.pack(rows)
    centre = Quantized(fmt).unpack(packed[:1], torch.float32)[0]
    found = wire.unpack(packed, torch.float64)
    exact = rows.float().double()
    assert not found[(exact == 0.0).all(-1)].any()
    is_finite = exact.isfinite().all(-1)
    assert found[~is_finite].isnan().all()
    found, exact = found[is_finite], exact[is_finite]
    order = math.inf if fmt == "int8" else 2.0
    allowed: list[Tensor] = []
    for rows in (exact, exact - centre.double()):
        peak = rows.abs().amax(-1, keepdim=True)
        unit = torch.where(peak > 0.0, rows / peak, 0.0)
        rounding = 2.0**-22 * (exact.abs() + (exact - rows).abs() + peak) + 2.0**-148
        allowed.append((peak * bound(unit, fmt) + rounding).norm(order, dim=-1))
    # Where the sum of a row's squares leaves float32, it is not known which is smaller.
    is_known = exact.square().sum(-1).float().isfinite() | (order == math.inf)
    most = torch.where(is_known, torch.minimum(*allowed), torch.maximum(*allowed))
    assert ((found - exact).norm(order, dim=-1) <= most).all()
