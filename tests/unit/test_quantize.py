"""8-bit rows against brute force, and the error of attention on them against softmax in float64."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bascule.comm import wire as wires
from bascule.comm.groups import member_of, resolve
from bascule.comm.wire import Deviation, Format, Wire, measure_error
from bascule.errors import ConfigError
from tests.helpers.oracle import dense_attention
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import FORMATS, normal, there_and_back, with_offsets

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


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_peaks_and_zeros_are_exact(fmt: Format, dtype: torch.dtype) -> None:
    x = normal(200, 33).to(dtype)
    x[::3] = 0.0
    found = there_and_back(Wire(fmt), x)
    assert found.dtype == dtype and found.shape == x.shape
    place = x.abs().argmax(-1, keepdim=True)
    # float64 travels as float32 does.
    assert torch.equal(found.gather(-1, place), x.gather(-1, place).float().to(dtype))
    assert not found[::3].any() and found[1::3].any(-1).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_row_that_is_not_finite_is_nan_and_no_other(
    fmt: Format, centre: bool, dtype: torch.dtype, bad: float
) -> None:
    x = normal(2, 3, 4, 8).to(dtype)
    x[1, 2, 0, 5] = bad
    x[0, 1, 3] = bad
    found = there_and_back(Wire(fmt), x, normal(2, 3, 1, 8) if centre else None)
    is_nan = found.isnan()
    assert torch.equal(is_nan.any(-1), is_nan.all(-1))
    assert is_nan.all(-1).nonzero().tolist() == [[0, 1, 3], [1, 2, 0]]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    "magnitude", [1e-45, 3e-44, 1e-40, 1.1e-38, 1.2e-38, 1e-30, 1e30, 3.4e38], ids=str
)
def test_any_magnitude_of_float32_has_the_same_error(fmt: Format, magnitude: float) -> None:
    x = normal(50, 64).clamp(-1.0, 1.0)
    found = there_and_back(Wire(fmt), x * magnitude).double()
    exact = (x * magnitude).double()
    least = 2.0**-149  # spacing of float32's subnormals
    peak = exact.abs().amax(-1, keepdim=True)
    assert found.isfinite().all()
    assert ((found - exact).abs() <= peak * 0.036 + least).all()
    assert torch.equal(found.abs().amax(-1), exact.abs().amax(-1))


@pytest.mark.parametrize("fmt", FORMATS)
def test_float64_beyond_float32_is_nan_or_zero(fmt: Format) -> None:
    x = torch.tensor([[1.0, 2.0], [1e300, 1.0], [1e-300, 2e-300]], dtype=torch.float64)
    found = there_and_back(Wire(fmt), x)
    assert found[0].tolist() == [1.0, 2.0] or fmt == "int8"
    assert found[1].isnan().all() and found[2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 3, 5), (8,), (1, 1, 7), (4, 1, 1, 1)], ids=str)
def test_shapes(fmt: Format, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    packed = Wire(fmt).pack(x)
    assert packed.shape == (*shape[:-1], shape[-1] + 4)
    found = Wire(fmt).unpack(packed, x.dtype)
    assert found.shape == x.shape
    np.testing.assert_allclose(found, nearest(x, fmt) if x.numel() else x, rtol=1e-6)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dim", [5, 8])
def test_strides_do_not_matter(fmt: Format, dim: int) -> None:
    wire, base = Wire(fmt), normal(6, 4, 10, dim)
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
        assert torch.equal(packed, wire.pack(x.clone(memory_format=torch.contiguous_format)))
        wanted = wire.unpack(packed, x.dtype)
        assert torch.equal(wire.unpack(packed.flip(0), x.dtype), wanted.flip(0))
        buffer = torch.zeros(*packed.shape[:-1], packed.shape[-1] + 3, dtype=torch.uint8)
        buffer[..., 2:-1] = packed  # peaks at odd addresses
        assert torch.equal(wire.unpack(buffer[..., 2:-1], x.dtype), wanted)


def test_wrong_input_is_refused() -> None:
    wire, rows = Wire("int8"), torch.zeros(2, 3, 4, 12, dtype=torch.uint8)
    x = torch.zeros(2, 3, 4, 8)
    cases: list[tuple[Any, tuple[str, ...]]] = [
        (lambda: Wire(cast(Format, "fp8")), ("'fp8'", "int8, e4m3")),
        (lambda: wire.pack(torch.zeros(2, 3, dtype=torch.int64)), ("int64", "floating-point")),
        (lambda: wire.pack(torch.zeros(2, 3, dtype=torch.complex64)), ("complex64",)),
        (lambda: wire.pack(torch.zeros(2, 0)), ("(2, 0)", "one value")),
        (lambda: wire.pack(torch.tensor(1.0)), ("()", "one value")),
        (lambda: wire.unpack(x, torch.float32), ("float32", "uint8")),
        (lambda: wire.unpack(rows[..., :4], torch.float32), ("(2, 3, 4, 4)", "5 bytes")),
        (lambda: wire.pack(x, torch.zeros(2, 5, 1, 8)), ("(2, 5, 1, 8)", "(2, 3, 4, 8)")),
        (lambda: wire.pack(x[:1], torch.zeros(2, 3, 1, 8)), ("(2, 3, 1, 8)", "(1, 3, 4, 8)")),
        (lambda: wire.pack(x[0, 0], torch.zeros(2, 3, 1, 8)), ("(2, 3, 1, 8)", "(4, 8)")),
        (lambda: wire.unpack(rows, x.dtype, torch.zeros(2, 3, 1, 7)), ("(2, 3, 1, 7)",)),
    ]
    for call, words in cases:
        with pytest.raises(ConfigError) as caught:
            call()
        assert all(word in str(caught.value) for word in words), caught.value


# --- centres --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_centre_takes_offsets_off_the_codes(fmt: Format, dtype: torch.dtype) -> None:
    plain = normal(2, 4, 500, 64)
    x = with_offsets(plain, 1).to(dtype)
    wire = Wire(fmt).centred(x, x, None)
    assert wire.k_centre is not None
    torch.testing.assert_close(
        wire.k_centre, x.double().mean(2, keepdim=True).float(), rtol=1e-5, atol=1e-5
    )
    is_plain = ((x.float() - plain).abs() < 4.0).all(2, keepdim=True).expand_as(x)
    errors = [
        (there_and_back(wire, x, centre).double() - x.double())[is_plain].norm()
        for centre in (wire.k_centre, None)
    ]
    without_offsets = there_and_back(Wire(fmt), plain.to(dtype))
    expected = (without_offsets.double() - plain.to(dtype).double())[is_plain].norm()
    assert errors[0] < 1.05 * expected
    if fmt == "int8":  # codes of e4m3 suit small values too
        assert errors[1] > 2.5 * expected


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_zeros_are_not_rows_at_the_centre(fmt: Format) -> None:
    wire, centre = Wire(fmt), normal(1, 2, 1, 8)
    x = torch.stack([torch.zeros(1, 2, 8), centre[:, :, 0], normal(1, 2, 8, seed=2)], dim=2)
    found = there_and_back(wire, x, centre)
    assert torch.equal(found[:, :, :2], x[:, :, :2])
    assert not torch.equal(found[:, :, 2], x[:, :, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_centre_is_not_spoilt_by_what_is_not_finite(dtype: torch.dtype) -> None:
    k, v = normal(1, 2, 5, 8).to(dtype), normal(1, 2, 5, 8, seed=1).to(dtype)
    # In float32 the size of such a row overflows, in float64 only the sum of the rows does.
    k[0, 0, 3, 2], v[0, 1] = math.nan, 3e38
    wire = Wire("int8").centred(k, v, None)
    assert wire.k_centre is not None and wire.v_centre is not None
    assert wire.k_centre.isfinite().all() and wire.v_centre.isfinite().all()
    found = there_and_back(wire, k, wire.k_centre)
    assert found.isnan().any(-1).nonzero().tolist() == [[0, 0, 3]]
    assert there_and_back(wire, v, wire.v_centre).isfinite().all()


def test_centres_of_heads_and_of_the_output() -> None:
    wire = Wire("e4m3").centred(normal(2, 5, 7, 4), normal(2, 5, 7, 4, seed=1), None)
    assert wire.k_centre is not None and wire.v_centre is not None
    part = wire.of_heads(1, 3)
    assert part.k_centre is not None and torch.equal(part.k_centre, wire.k_centre[:, 1:4])
    of_out = part.out_centre(6)
    assert of_out is not None and of_out.shape == (2, 6, 1, 4)
    for head in range(6):
        assert torch.equal(of_out[:, head], wire.v_centre[:, 1 + head // 2])
    assert Wire("int8").of_heads(1, 3).out_centre(6) is None


def rank_tokens(rank: int) -> tuple[int, int]:
    """Uneven shares of 17 tokens over 3 ranks, one of them empty."""
    return ((0, 12), (12, 12), (12, 17))[rank]


def centres_and_exchange() -> tuple[list[Tensor], Tensor, int]:
    group = member_of(resolve(None), "all")
    k, v = (with_offsets(normal(2, 3, 17, 10, seed=seed), seed).bfloat16() for seed in (3, 4))
    first, last = rank_tokens(group.rank)
    wire = Wire("int8").centred(k[:, :, first:last], v[:, :, first:last], group)
    packed = wire.pack(k[:, :, first:last], wire.k_centre).permute(2, 0, 1, 3).contiguous()
    counts = [rank_tokens(rank)[1] - rank_tokens(rank)[0] for rank in range(group.size)]
    # Every rank sends its tokens to every rank, its own included.
    sent = torch.cat([packed] * group.size)
    received = sent.new_empty(17, *packed.shape[1:])
    dist.all_to_all_single(received, sent, counts, [counts[group.rank]] * group.size)
    keys = wire.unpack(received.permute(1, 2, 0, 3), k.dtype, wire.k_centre)
    assert wire.k_centre is not None and wire.v_centre is not None
    return [wire.k_centre, wire.v_centre], keys, received.nbytes


def test_ranks_share_their_centres_and_bytes() -> None:
    found = run_ranks(centres_and_exchange, 3)
    k, v = (with_offsets(normal(2, 3, 17, 10, seed=seed), seed).bfloat16() for seed in (3, 4))
    for centres, keys, num_bytes in found:
        for centre, first, whole in zip(centres, found[0][0], (k, v), strict=True):
            assert torch.equal(centre, first)
            wanted = whole.double().mean(2, keepdim=True).float()
            torch.testing.assert_close(centre, wanted, rtol=1e-6, atol=1e-6)
        assert torch.equal(keys, found[0][1]) and relative(keys, k) < 0.006
        assert num_bytes == 17 * 2 * 3 * 14


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
    wire = Wire("int8") if case == "gaussian" else Wire("int8").centred(k, v, None)
    received = [
        there_and_back(wire, x, c) for x, c in ((q, None), (k, wire.k_centre), (v, wire.v_centre))
    ]
    exact = attended(q, k, v)
    # What is left of the output without the offset of the values, which every output has alike.
    varying = attended(q, k, normal(1, 2, 2048, 128, seed=2).to(dtype)).norm()
    assert max(relative(got, x) for got, x in zip(received, (q, k, v), strict=True)) <= 0.007
    out_kv = attended(q, *received[1:])
    assert float((out_kv - exact).norm() / varying) <= 0.01
    out = there_and_back(wire, attended(*received).to(dtype), wire.out_centre(2))
    assert relative(out, exact) <= 0.014
    if dtype == torch.float32:  # as bfloat16 an output with offsets is off by more than this
        assert float((out - exact).norm() / varying) <= 0.014
    sent = [wire.pack(x).nbytes for x in (q, k, v, out)]
    assert sum(sent) <= 0.52 * 4 * q.numel() * torch.bfloat16.itemsize


def test_offsets_without_a_centre_cost_as_the_design_says() -> None:
    q, k, v = inputs("k", torch.float32)
    plain = measure_error(q, k, v, Wire("int8")).out_kv.relative_l2
    centred = measure_error(q, k, v, Wire("int8").centred(k, v, None)).out_kv.relative_l2
    assert plain > 2.0 * centred and centred <= 0.01


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
    wire = Wire("int8").centred(k, v, None)
    found = measure_error(q, k, v, wire)
    q8, k8, v8 = (
        there_and_back(wire, x, c) for x, c in ((q, None), (k, wire.k_centre), (v, wire.v_centre))
    )
    exact, out_kv = attended(q, k, v), attended(q, k8, v8)
    out = there_and_back(wire, attended(q8, k8, v8).bfloat16(), wire.out_centre(heads[0]))
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
    assert (found.packed_bytes, found.full_bytes) == (num_rows * 20, num_rows * 32)


def test_deviations_of_nothing_and_of_nan() -> None:
    zeros, empty = torch.zeros(3, 4), torch.zeros(0, 4)
    assert Deviation.of(zeros, zeros) == Deviation.of(empty, empty) == Deviation(0.0, 0.0, 0.0)
    assert Deviation.of(zeros + 1, zeros).relative_l2 == math.inf
    assert math.isnan(Deviation.of(zeros * math.nan, zeros + 1).relative_l2)


# --- graphs ---------------------------------------------------------------------------------------


def travel(x: Tensor, wire: Wire) -> tuple[Tensor, Tensor, Tensor]:
    own = wire.centred(x, x, None)
    packed = own.pack(x, own.k_centre)
    return packed, own.unpack(packed, x.dtype, own.k_centre), wire.pack(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own
@pytest.mark.parametrize(("fmt", "dtype"), [("int8", torch.bfloat16), ("e4m3", torch.float32)])
def test_compiles_into_one_graph_with_the_same_bytes(fmt: Format, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(travel, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (7, 12, 33):
            x = normal(2, 3, tokens, 10, seed=tokens).to(dtype)
            x[0, 0, 3], x[1, 2, 4, 1] = 0.0, math.nan
            found, wanted = compiled(x, Wire(fmt)), travel(x, Wire(fmt))
            assert torch.equal(found[2], wanted[2])
            torch.testing.assert_close(found[1], wanted[1], equal_nan=True, rtol=0.0, atol=0.1)
            mine = Wire(fmt).unpack(found[0], dtype)
            torch.testing.assert_close(
                mine, Wire(fmt).unpack(wanted[0], dtype), equal_nan=True, rtol=0.0, atol=0.2
            )


@pytest.mark.parametrize("fmt", FORMATS)
def test_nothing_is_read_from_the_device(fmt: Format) -> None:
    with FakeTensorMode():  # reading a value of a fake tensor is an error
        x = torch.empty(2, 3, 5, 8, dtype=torch.bfloat16)
        packed, back, _ = travel(x, Wire(fmt))
    assert packed.shape == (2, 3, 5, 12) and back.shape == x.shape and back.dtype == x.dtype


@pytest.mark.parametrize("fmt", FORMATS)
def test_nothing_is_recorded_by_autograd(fmt: Format) -> None:
    x = normal(1, 2, 5, 8).requires_grad_()
    assert not any(found.requires_grad for found in travel(x, Wire(fmt)))
