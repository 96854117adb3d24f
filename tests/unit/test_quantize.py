"""8-bit rows against brute force, and the error of attention on them against softmax in float64."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bascule.comm import wire as wires
from bascule.comm.wire import Deviation, Format, Wire, measure_error
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


def relative(x: Tensor, reference: Tensor) -> float:
    return float((x.double() - reference.double()).norm() / reference.double().norm())


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dim", [1, 3, 5, 16, 128])
@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 1e4])
def test_a_value_becomes_the_nearest_code(fmt: Format, dim: int, magnitude: float) -> None:
    x = normal(9, dim, seed=dim) * magnitude
    found = there_and_back(Wire(fmt), x).double().numpy()
    # Where two codes are as near, rounding in float32 may choose the other.
    wanted = nearest(x, fmt)
    as_near = np.abs(np.abs(found - x.double().numpy()) - np.abs(wanted - x.double().numpy()))
    peaks = x.abs().amax(-1, keepdim=True).double().numpy()
    assert (as_near <= 1e-6 * peaks).all()


def test_the_bytes_are_codes_and_the_peak() -> None:
    rows = torch.tensor([[127.0, -127.0, 2.4, -63.6, 0.0], [0.0, 0.5, 0.0, -0.25, 0.125]])
    packed = Wire("int8").pack(rows)
    assert packed.dtype == torch.uint8 and packed.shape == (2, 9)
    raw = packed.numpy()
    assert raw[:, :5].view(np.int8).tolist() == [[127, -127, 2, -64, 0], [0, 127, 0, -64, 32]]
    assert raw[:, 5:].copy().view(np.float32).ravel().tolist() == [127.0, 0.5]
    assert Wire("int8").row_bytes(5) == 9


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_peaks_and_zeros_are_exact(wire: Wire, dtype: torch.dtype) -> None:
    x = normal(200, 33).to(dtype)
    x[::3] = 0.0
    found = there_and_back(wire, x)
    assert found.dtype == dtype and found.shape == x.shape
    assert not found[::3].any() and found[1::3].any(-1).all()
    if not wire.takes_centres:  # float64 travels as float32 does
        place = x.abs().argmax(-1, keepdim=True)
        assert torch.equal(found.gather(-1, place), x.gather(-1, place).float().to(dtype))


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_row_that_is_not_finite_is_nan_and_no_other(
    wire: Wire, dtype: torch.dtype, bad: float
) -> None:
    x = with_offsets(normal(2, 3, 4, 8), 1).to(dtype)
    x[1, 2, 0, 5] = bad
    x[0, 1, 3] = bad
    is_nan = there_and_back(wire, x).isnan()
    assert torch.equal(is_nan.any(-1), is_nan.all(-1))
    assert is_nan.all(-1).nonzero().tolist() == [[0, 1, 3], [1, 2, 0]]


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize(
    "magnitude", [1e-45, 3e-44, 1e-40, 1.1e-38, 1.2e-38, 1e-30, 1e30, 3.4e38], ids=str
)
def test_any_magnitude_of_float32_has_the_same_error(wire: Wire, magnitude: float) -> None:
    x = normal(50, 64).clamp(-1.0, 1.0)
    found = there_and_back(wire, x * magnitude).double()
    exact = (x * magnitude).double()
    least = 2.0**-149  # spacing of float32's subnormals
    peak = exact.abs().amax(-1, keepdim=True)
    assert found.isfinite().all()
    assert ((found - exact).abs() <= peak * 0.036 + 2 * least).all()
    if not wire.takes_centres:
        assert torch.equal(found.abs().amax(-1), exact.abs().amax(-1))


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_float64_beyond_float32_is_nan_or_zero(wire: Wire) -> None:
    x = torch.tensor([[1.0, 2.0], [1e300, 1.0], [1e-300, 2e-300]], dtype=torch.float64)
    found = there_and_back(wire, x)
    assert found[1].isnan().all() and found[2].tolist() == [0.0, 0.0]
    assert (found[0] - x[0]).abs().max() < 0.01


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 3, 5), (1, 8), (1, 1, 7), (4, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("dim", [-2, 0])
def test_shapes(wire: Wire, shape: tuple[int, ...], dim: int) -> None:
    x = normal(*shape)
    packed = wire.pack(x, dim)
    wanted = list(x.shape)
    wanted[dim] += wire.num_more
    assert packed.shape == (*wanted[:-1], shape[-1] + 4)
    found = wire.unpack(packed, x.dtype, dim)
    assert found.shape == x.shape
    assert ((found - x).abs() <= 0.036 * x.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("dim", [5, 8])
def test_strides_do_not_matter(wire: Wire, dim: int) -> None:
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
    wire, rows = Wire("int8"), torch.zeros(2, 3, 4, 12, dtype=torch.uint8)
    cases: list[tuple[Any, tuple[str, ...]]] = [
        (lambda: Wire(cast(Format, "fp8")), ("'fp8'", "int8, e4m3")),
        (lambda: wire.pack(torch.zeros(2, 3, dtype=torch.int64)), ("int64", "floating-point")),
        (lambda: wire.pack(torch.zeros(2, 3, dtype=torch.complex64)), ("complex64",)),
        (lambda: wire.pack(torch.zeros(2, 0)), ("(2, 0)", "one value")),
        (lambda: wire.pack(torch.tensor(1.0)), ("()", "one value")),
        (lambda: Wire("int8", True).pack(torch.zeros(3)), ("(3,)", "rows")),
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
    return Wire(fmt).unpack(Wire(fmt, takes_centres=True).pack(x)[..., :1, :], torch.float32)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_centre_takes_offsets_off_the_codes(fmt: Format, dtype: torch.dtype) -> None:
    plain = normal(2, 4, 500, 64)
    x = with_offsets(plain, 1).to(dtype)
    mean = x.double().mean(2, keepdim=True)
    assert (centre_of(fmt, x) - mean).abs().max() <= 0.036 * mean.abs().max()
    is_plain = ((x.float() - plain).abs() < 4.0).all(2, keepdim=True).expand_as(x)
    errors = [
        (there_and_back(Wire(fmt, is_taken), x).double() - x.double())[is_plain].norm()
        for is_taken in (True, False)
    ]
    without_offsets = there_and_back(Wire(fmt), plain.to(dtype))
    expected = (without_offsets.double() - plain.to(dtype).double())[is_plain].norm()
    assert errors[0] < 1.05 * expected
    if fmt == "int8":  # codes of e4m3 suit small values too
        assert errors[1] > 2.5 * expected


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("factor", [10.0, 100.0, 1000.0])
def test_outliers_do_not_spoil_a_centre(fmt: Format, factor: float) -> None:
    """Two tokens in fifty are so many times as large, as those that attention sinks into."""
    plain, usual = normal(2, 4, 500, 64), torch.arange(500) % 25 != 0
    for x, gain in ((plain, 1.02), (with_offsets(plain, 1), 0.8)):
        x = torch.where(usual[:, None], x, factor * x)
        errors = [
            (there_and_back(Wire(fmt, is_taken), x) - x)[:, :, usual].norm()
            for is_taken in (True, False)
        ]
        assert errors[0] < gain * errors[1]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scale", [1e-3, 0.3, 1.0, 100.0])
def test_a_centre_far_from_some_rows_costs_them_no_codes(fmt: Format, scale: float) -> None:
    x, offset = normal(1, 2, 1000, 64), scale * normal(1, 2, 1, 64, seed=1)
    x[:, :, ::4] += 8.0 * offset
    errors = [
        (there_and_back(Wire(fmt, is_taken), x) - x).norm(dim=-1) for is_taken in (True, False)
    ]
    is_far = torch.arange(1000) % 4 == 0
    for some in (is_far, ~is_far):
        assert errors[0][..., some].norm() < 1.01 * errors[1][..., some].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_say_nothing_do_not_count_for_a_centre(dtype: torch.dtype) -> None:
    x = (normal(1, 2, 9, 8) + 3.0).to(dtype)
    bad = torch.full((1, 2, 2, 8), math.inf).to(dtype)
    bad[:, :, 1, 2] = math.nan
    padded = torch.cat((torch.zeros(1, 2, 30, 8).to(dtype), x, bad), dim=2)
    mean = x.float().mean(2, keepdim=True)
    assert (centre_of("int8", padded) - mean).abs().max() <= mean.abs().max() / 250
    large = torch.full((1, 2, 5, 8), 3e38).to(dtype)  # their sum overflows
    for rows in (bad, padded[:, :, :0], padded[:, :, :30]):
        assert not centre_of("int8", rows).any()
    large = torch.full((1, 2, 5, 8), 3e38).to(dtype)  # their sum overflows in float32
    assert there_and_back(Wire("int8", takes_centres=True), large).isfinite().all()


# --- errors ---------------------------------------------------------------------------------------


def inputs(case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """B1 H2 S2048 D128; "k" has offsets in the keys, "kv" in keys and values."""
    q, k, v = (normal(1, 2, 2048, 128, seed=seed).to(dtype) for seed in range(3))
    k = with_offsets(k, 7).to(dtype) if "k" in case else k
    v = with_offsets(v, 8).to(dtype) if "v" in case else v
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["gaussian", "k", "kv"])
def test_int8_attention_is_off_by_one_percent(case: str, dtype: torch.dtype) -> None:
    q, k, v = inputs(case, dtype)
    wire = Wire("int8", takes_centres=case != "gaussian")
    found = measure_error(q, k, v, wire)
    assert max(one.relative_l2 for one in (found.q, found.k, found.v)) <= 0.007
    # What is left of the output without the offset of the values, which every output has alike.
    spread = 1.0 if dtype == torch.bfloat16 and case == "kv" else 0.02
    assert found.out_kv.relative_l2 <= 0.01 and found.out_kv.relative_to_spread <= spread
    assert found.out_all.relative_l2 <= 0.014 and found.out_all.relative_to_spread <= spread
    assert found.packed_bytes <= 0.52 * 4 * q.numel() * torch.bfloat16.itemsize
    if case != "gaussian":
        plain = measure_error(q, k, v, Wire("int8")).out_kv
        assert plain.relative_to_spread > 2.0 * found.out_kv.relative_to_spread


def test_e4m3_is_off_by_its_three_bits() -> None:
    q, k, v = inputs("gaussian", torch.float32)
    found = measure_error(q, k, v, Wire("e4m3"))
    for of_tensor in (found.q, found.k, found.v):
        assert 0.025 <= of_tensor.relative_l2 <= 0.0265
    assert 0.03 <= found.out_kv.relative_l2 <= 0.04


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=str)
@pytest.mark.parametrize("at_once", [1, 2**25])
def test_the_measured_error_is_the_error(
    heads: tuple[int, int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wires, "_SCORES_AT_ONCE", at_once)
    q = normal(2, heads[0], 9, 16).bfloat16()
    k, v = (with_offsets(normal(2, heads[1], 11, 16, seed=s), s).bfloat16() for s in (1, 2))
    wire = Wire("int8", takes_centres=True)
    found = measure_error(q, k, v, wire)
    q8, k8, v8 = (there_and_back(wire, x) for x in (q, k, v))
    exact, out_kv = attended(q, k, v), attended(q, k8, v8)
    out = there_and_back(wire, attended(q8, k8, v8).bfloat16())
    pairs = [(found.q, q8, q), (found.k, k8, k), (found.v, v8, v)]
    pairs += [(found.out_kv, out_kv, exact), (found.out_all, out, exact)]
    for deviation, got, wanted in pairs:
        got, wanted = got.double(), wanted.double()
        spread = (wanted - wanted.mean(-2, keepdim=True)).norm()
        assert deviation.relative_l2 == pytest.approx(relative(got, wanted), rel=1e-9)
        assert deviation.relative_to_spread == pytest.approx(
            float((got - wanted).norm() / spread), rel=1e-9
        )
        largest = (got - wanted).abs().max() / wanted.square().mean().sqrt()
        assert deviation.largest == pytest.approx(float(largest), rel=1e-9)
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
def test_nothing_is_read_from_the_device_nor_recorded(wire: Wire) -> None:
    with FakeTensorMode():  # reading a value of a fake tensor is an error
        x = torch.empty(2, 3, 5, 8, dtype=torch.bfloat16, requires_grad=True)
        packed = wire.pack(x)
        back = wire.unpack(packed, x.dtype)
    assert packed.shape == (2, 3, 5 + wire.num_more, 12)
    assert back.shape == x.shape and back.dtype == x.dtype
    assert not packed.requires_grad and not back.requires_grad
