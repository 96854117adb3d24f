"""8-bit rows against brute force, and the error of attention on them against softmax in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bascule.comm import quantized as wires
from bascule.comm.quantized import Format, Quantized, measure_error
from tests.helpers.oracle import dense_attention
from tests.helpers.rows import FORMATS, WIRES, normal, there_and_back, with_offsets

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LARGEST = {"int8": 127.0, "e4m3": 448.0}


def all_values(fmt: Format) -> np.ndarray:
    """What the codes of a format can stand for, from the formats' definitions."""
    if fmt == "int8":
        return np.arange(-127.0, 128.0)
    found = [0.0]
    for exponent in range(16):
        for mantissa in range(8):
            if exponent == 0:
                found.append(mantissa / 8 * 2.0**-6)
            elif (exponent, mantissa) != (15, 7):  # that one is nan
                found.append((1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.unique([sign * value for sign in (-1, 1) for value in found])


def nearest(x: Tensor, fmt: Format) -> np.ndarray:
    """Every value of a row as the nearest code times the row's peak, by trying all codes."""
    rows = x.to(torch.float64).numpy().reshape(-1, x.shape[-1])
    peaks = np.abs(rows).max(axis=-1, keepdims=True)
    ladder = all_values(fmt) / LARGEST[fmt]
    units = np.divide(rows, peaks, out=np.zeros_like(rows), where=peaks > 0)
    best = np.abs(units[..., None] - ladder).argmin(axis=-1)
    return (ladder[best] * peaks).reshape(x.shape)


def attended(*qkv: Tensor) -> Tensor:
    q, k, v = (x.double() for x in qkv)
    return dense_attention(q, k, v)[0]


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_value_becomes_the_nearest_code(fmt: Format) -> None:
    for dim, magnitude in itertools.product((1, 3, 5, 16, 128), (1.0, 1e-3, 1e4)):
        x = normal(9, dim, seed=dim) * magnitude
        exact, found = x.double().numpy(), there_and_back(Quantized(fmt), x).double().numpy()
        # Where two codes are as near, rounding in float32 may choose the other.
        as_near = np.abs(np.abs(found - exact) - np.abs(nearest(x, fmt) - exact))
        assert (as_near <= 1e-6 * np.abs(exact).max(-1, keepdims=True)).all(), (dim, magnitude)


def test_the_bytes_are_codes_and_the_peak() -> None:
    rows = torch.tensor([[127.0, -127.0, 2.4, -63.6, 0.0], [0.0, 0.5, 0.0, -0.25, 0.125]])
    packed = Quantized("int8").pack(rows)
    assert packed.dtype == torch.uint8 and packed.shape == (2, 9)
    raw = packed.numpy()
    assert raw[:, :5].view(np.int8).tolist() == [[127, -127, 2, -64, 0], [0, 127, 0, -64, 32]]
    assert raw[:, 5:].copy().view(np.float32).ravel().tolist() == [127.0, 0.5]
    assert Quantized("int8").row_bytes(5) == 9


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("dim", [5, 8])
def test_strides_do_not_matter(wire: Quantized, dim: int) -> None:
    base = normal(6, 4, 10, dim)
    views = [base.transpose(1, 2), base[::2, 1:3], base[..., 1:4], base.permute(3, 1, 2, 0)]
    views += [base[:, :1].expand(6, 4, 10, dim), base[:1, :, :1], base[:0]]
    for x in views:
        packed = wire.pack(x)
        assert packed.shape == (*x.shape[:-1], x.shape[-1] + 4)
        back = wire.unpack(packed, x.dtype)
        dense = x.clone(memory_format=torch.contiguous_format)
        torch.testing.assert_close(back, there_and_back(wire, dense), rtol=0.0, atol=1e-6)
        assert torch.equal(wire.unpack(packed.flip(0), x.dtype), back.flip(0))
        buffer = torch.zeros(*packed.shape[:-1], packed.shape[-1] + 3, dtype=torch.uint8)
        buffer[..., 2:-1] = packed  # peaks at odd addresses
        assert torch.equal(wire.unpack(buffer[..., 2:-1], x.dtype), back)
        other = wire.unpack(wire.pack(x.transpose(0, 2)), x.dtype)
        torch.testing.assert_close(other.transpose(0, 2), back, rtol=0.0, atol=1e-6)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_attention_is_off_by_one_percent(dtype: torch.dtype) -> None:
    q, k, v = (normal(1, 2, 2048, 128, seed=seed).to(dtype) for seed in range(3))
    found = measure_error(q, k, v, Quantized("int8"))
    assert max(one.relative_l2 for one in (found.q, found.k, found.v)) <= 0.007
    assert found.out_kv.relative_l2 <= 0.01 and found.out_kv.relative_to_spread <= 0.02
    assert found.out_all.relative_l2 <= 0.014 and found.out_all.relative_to_spread <= 0.02
    assert found.packed_bytes <= 0.52 * 4 * q.numel() * torch.bfloat16.itemsize


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=str)
@pytest.mark.parametrize("at_once", [1, 2**25])
def test_the_measured_error_is_the_error(
    heads: tuple[int, int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wires, "_SCORES_AT_ONCE", at_once)
    q = normal(2, heads[0], 9, 16).bfloat16()
    k, v = (with_offsets(normal(2, heads[1], 11, 16, seed=s), s).bfloat16() for s in (1, 2))
    wire = Quantized("int8")
    found = measure_error(q, k, v, wire)
    q8, k8, v8 = (there_and_back(wire, x) for x in (q, k, v))
    exact, out_kv = attended(q, k, v), attended(q, k8, v8)
    out = there_and_back(wire, attended(q8, k8, v8).bfloat16())
    pairs = [(found.q, q8, q), (found.k, k8, k), (found.v, v8, v)]
    pairs += [(found.out_kv, out_kv, exact), (found.out_all, out, exact)]
    for deviation, got, wanted in pairs:
        got, wanted = got.double(), wanted.double()
        error, spread = got - wanted, (wanted - wanted.mean(-2, keepdim=True)).norm()
        largest = error.abs().max() / wanted.square().mean().sqrt()
        expected = (error.norm() / wanted.norm(), error.norm() / spread, largest)
        found_all = (deviation.relative_l2, deviation.relative_to_spread, deviation.largest)
        assert found_all == pytest.approx(tuple(map(float, expected)), rel=1e-9)
    num_rows = 2 * (2 * heads[0] * 9 + 2 * heads[1] * 11)
    assert found.packed_bytes == num_rows * 20 and found.full_bytes == num_rows * 32


# --- graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_nothing_is_read_from_the_device_nor_recorded(wire: Quantized) -> None:
    with FakeTensorMode():  # reading a value of a fake tensor is an error
        x = torch.empty(2, 3, 5, 8, dtype=torch.bfloat16, requires_grad=True)
        packed = wire.pack(x)
        back = wire.unpack(packed, x.dtype)
    assert packed.shape == (2, 3, 5, 12)
    assert back.shape == x.shape and back.dtype == x.dtype
    assert not packed.requires_grad and not back.requires_grad


# 8-bit rows of any bits: within their bound, or nan, and the same whatever lies beside them


FORMAT = st.sampled_from(["int8", "e4m3"])


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


@settings(deadline=None, max_examples=150)
@given(any_rows(), FORMAT)
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


@settings(deadline=None, max_examples=60)
@given(any_rows(), FORMAT)
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
