"""8-bit rows against brute force, and the error of attention on them against softmax in float64."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bascule.comm import quantized as wires
from bascule.comm.quantized import Deviation, Format, Quantized, measure_error
from bascule.errors import ConfigError
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
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_peaks_and_zeros_are_exact(wire: Quantized, dtype: torch.dtype) -> None:
    x = normal(200, 33).to(dtype)
    x[::3] = 0.0
    found = there_and_back(wire, x)
    assert found.dtype == dtype and found.shape == x.shape
    assert not found[::3].any() and found[1::3].any(-1).all()
    if not wire.centered:  # float64 travels as float32 does
        place = x.abs().argmax(-1, keepdim=True)
        assert torch.equal(found.gather(-1, place), x.gather(-1, place).float().to(dtype))


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_a_row_that_is_not_finite_is_nan_and_no_other(wire: Quantized) -> None:
    for dtype, bad in itertools.product(DTYPES, (math.inf, -math.inf, math.nan)):
        x = with_offsets(normal(2, 3, 4, 8), 1).to(dtype)
        x[1, 2, 0, 5] = bad
        x[0, 1, 3] = bad
        is_nan = there_and_back(wire, x).isnan()
        assert torch.equal(is_nan.any(-1), is_nan.all(-1)), (dtype, bad)
        assert is_nan.all(-1).nonzero().tolist() == [[0, 1, 3], [1, 2, 0]], (dtype, bad)


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_any_magnitude_of_float32_has_the_same_error(wire: Quantized) -> None:
    """Of float64, what is beyond float32 is nan or zero."""
    least = 2.0**-149  # spacing of float32's subnormals
    for magnitude in (1e-45, 3e-44, 1e-40, 1.1e-38, 1.2e-38, 1e-30, 1e30, 3.4e38):
        x = normal(50, 64).clamp(-1.0, 1.0) * magnitude
        found, exact = there_and_back(wire, x).double(), x.double()
        peak = exact.abs().amax(-1, keepdim=True)
        assert found.isfinite().all(), magnitude
        assert ((found - exact).abs() <= peak * 0.036 + 2 * least).all(), magnitude
        if not wire.centered:
            assert torch.equal(found.abs().amax(-1), exact.abs().amax(-1)), magnitude
    x = torch.tensor([[1.0, 2.0], [1e300, 1.0], [1e-300, 2e-300]], dtype=torch.float64)
    found = there_and_back(wire, x)
    assert found[1].isnan().all() and found[2].tolist() == [0.0, 0.0]
    assert (found[0] - x[0]).abs().max() < 0.01


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_shapes(wire: Quantized) -> None:
    shapes = [(0, 8), (2, 0, 3, 5), (1, 8), (1, 1, 7), (4, 1, 1, 1)]
    for shape, dim in itertools.product(shapes, (-2, 0)):
        x, wanted = normal(*shape), list(shape)
        packed = wire.pack(x, dim)
        wanted[dim] += wire.num_more
        assert packed.shape == (*wanted[:-1], shape[-1] + 4)
        found = wire.unpack(packed, x.dtype, dim)
        assert found.shape == x.shape
        assert ((found - x).abs() <= 0.036 * x.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("dim", [5, 8])
def test_strides_do_not_matter(wire: Quantized, dim: int) -> None:
    base = normal(6, 4, 10, dim)
    views = [
        base.transpose(1, 2),
        base[::2, 1:3],
        base[..., 1:4],
        base.permute(3, 1, 2, 0),
        base[:, :1].expand(6, 4, 10, dim),
        base[:1, :, :1],
    ]
    for x in views:
        packed = wire.pack(x)
        back = wire.unpack(packed, x.dtype)
        dense = x.clone(memory_format=torch.contiguous_format)
        torch.testing.assert_close(back, there_and_back(wire, dense), rtol=0.0, atol=1e-6)
        assert torch.equal(wire.unpack(packed.flip(0), x.dtype), back.flip(0))
        buffer = torch.zeros(*packed.shape[:-1], packed.shape[-1] + 3, dtype=torch.uint8)
        buffer[..., 2:-1] = packed  # peaks at odd addresses
        assert torch.equal(wire.unpack(buffer[..., 2:-1], x.dtype), back)
        other = wire.unpack(wire.pack(x.transpose(0, 2), 0), x.dtype, 0)
        torch.testing.assert_close(other.transpose(0, 2), back, rtol=0.0, atol=1e-6)


def test_wrong_input_is_refused() -> None:
    wire, rows = Quantized("int8"), torch.zeros(2, 3, 4, 12, dtype=torch.uint8)
    cases: list[tuple[Any, tuple[str, ...]]] = [
        (lambda: Quantized(cast(Format, "fp8")), ("'fp8'", "int8, e4m3")),
        (lambda: wire.pack(torch.zeros(2, 3, dtype=torch.int64)), ("int64", "floating-point")),
        (lambda: wire.pack(torch.zeros(2, 3, dtype=torch.complex64)), ("complex64",)),
        (lambda: wire.pack(torch.zeros(2, 0)), ("(2, 0)", "one value")),
        (lambda: wire.pack(torch.tensor(1.0)), ("()", "one value")),
        (lambda: Quantized("int8", True).pack(torch.zeros(3)), ("(3,)", "rows")),
        (lambda: wire.unpack(torch.zeros(2, 12), torch.float32), ("float32", "uint8")),
        (lambda: wire.unpack(rows[..., :4], torch.float32), ("(2, 3, 4, 4)", "5 bytes")),
    ]
    for call, words in cases:
        with pytest.raises(ConfigError) as caught:
            call()
        assert all(word in str(caught.value) for word in words), caught.value


# --- centres --------------------------------------------------------------------------------------


def centre_of(fmt: Format, x: Tensor) -> Tensor:
    """The centre that travels before the rows of `x`."""
    return Quantized(fmt).unpack(Quantized(fmt, centered=True).pack(x)[..., :1, :], torch.float32)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_centre_takes_offsets_off_the_codes(fmt: Format, dtype: torch.dtype) -> None:
    plain = normal(2, 4, 500, 64)
    x = with_offsets(plain, 1).to(dtype)
    mean = x.double().mean(2, keepdim=True)
    assert (centre_of(fmt, x) - mean).abs().max() <= 0.036 * mean.abs().max()
    is_plain = ((x.float() - plain).abs() < 4.0).all(2, keepdim=True).expand_as(x)
    errors = [
        (there_and_back(Quantized(fmt, is_taken), x).double() - x.double())[is_plain].norm()
        for is_taken in (True, False)
    ]
    without_offsets = there_and_back(Quantized(fmt), plain.to(dtype))
    expected = (without_offsets.double() - plain.to(dtype).double())[is_plain].norm()
    assert errors[0] < 1.05 * expected
    if fmt == "int8":  # codes of e4m3 suit small values too
        assert errors[1] > 2.5 * expected


def uneven_rows() -> Iterator[tuple[Tensor, Tensor, float]]:
    """Tensors, some of their tokens, and how a centre changes the error of these at most."""
    plain, usual = normal(2, 4, 500, 64), torch.arange(500) % 25 != 0
    for factor in (10.0, 100.0, 1000.0):  # of outliers, as those that attention sinks into
        for x, gain in ((plain, 1.02), (with_offsets(plain, 1), 0.8)):
            yield torch.where(usual[:, None], x, factor * x), usual, gain
    is_far = torch.arange(1000) % 4 == 0
    for scale in (1e-3, 0.3, 1.0, 100.0):
        x = normal(1, 2, 1000, 64)
        x[:, :, is_far] += 8.0 * scale * normal(1, 2, 1, 64, seed=1)
        yield from ((x, some, 1.01) for some in (is_far, ~is_far))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_centre_costs_rows_that_are_near_or_far_no_codes(fmt: Format) -> None:
    for x, some, gain in uneven_rows():
        centred, plain = (
            (there_and_back(Quantized(fmt, is_taken), x) - x)[:, :, some].norm()
            for is_taken in (True, False)
        )
        assert centred < gain * plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_say_nothing_do_not_count_for_a_centre(dtype: torch.dtype) -> None:
    x = (normal(1, 2, 9, 8) + 3.0).to(dtype)
    bad = torch.full((1, 2, 2, 8), math.inf).to(dtype)
    bad[:, :, 1, 2] = math.nan
    padded = torch.cat((torch.zeros(1, 2, 30, 8).to(dtype), x, bad), dim=2)
    mean = x.float().mean(2, keepdim=True)
    assert (centre_of("int8", padded) - mean).abs().max() <= mean.abs().max() / 250
    for rows in (bad, padded[:, :, :0], padded[:, :, :30]):
        assert not centre_of("int8", rows).any()
    large = torch.full((1, 2, 5, 8), 3e38).to(dtype)  # their sum overflows in float32
    assert there_and_back(Quantized("int8", centered=True), large).isfinite().all()


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_centres", [False, True])
def test_int8_attention_is_off_by_one_percent(with_centres: bool, dtype: torch.dtype) -> None:
    """Keys and values have offsets where centres are taken."""
    q, k, v = (normal(1, 2, 2048, 128, seed=seed) for seed in range(3))
    if with_centres:
        k, v = with_offsets(k, 7), with_offsets(v, 8)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    found = measure_error(q, k, v, Quantized("int8", with_centres))
    assert max(one.relative_l2 for one in (found.q, found.k, found.v)) <= 0.007
    # What is left of the output without the offset of the values, which every output has alike.
    spread = 1.0 if dtype == torch.bfloat16 and with_centres else 0.02
    assert found.out_kv.relative_l2 <= 0.01 and found.out_kv.relative_to_spread <= spread
    assert found.out_all.relative_l2 <= 0.014 and found.out_all.relative_to_spread <= spread
    assert found.packed_bytes <= 0.52 * 4 * q.numel() * torch.bfloat16.itemsize


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=str)
@pytest.mark.parametrize("at_once", [1, 2**25])
def test_the_measured_error_is_the_error(
    heads: tuple[int, int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wires, "_SCORES_AT_ONCE", at_once)
    q = normal(2, heads[0], 9, 16).bfloat16()
    k, v = (with_offsets(normal(2, heads[1], 11, 16, seed=s), s).bfloat16() for s in (1, 2))
    wire = Quantized("int8", centered=True)
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
    num_more = 2 * (2 * heads[0] + 2 * heads[1])
    assert found.packed_bytes == (num_rows + num_more) * 20 and found.full_bytes == num_rows * 32


def test_deviations_of_nothing_and_of_nan() -> None:
    zeros, empty = torch.zeros(3, 4), torch.zeros(0, 4)
    assert Deviation.of(zeros, zeros) == Deviation.of(empty, empty) == Deviation(0.0, 0.0, 0.0)
    assert Deviation.of(zeros + 1, zeros).relative_l2 == math.inf
    assert math.isnan(Deviation.of(zeros * math.nan, zeros + 1).relative_l2)


# --- graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_nothing_is_read_from_the_device_nor_recorded(wire: Quantized) -> None:
    with FakeTensorMode():  # reading a value of a fake tensor is an error
        x = torch.empty(2, 3, 5, 8, dtype=torch.bfloat16, requires_grad=True)
        packed = wire.pack(x)
        back = wire.unpack(packed, x.dtype)
    assert packed.shape == (2, 3, 5 + wire.num_more, 12)
    assert back.shape == x.shape and back.dtype == x.dtype
    assert not packed.requires_grad and not back.requires_grad
