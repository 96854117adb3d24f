"""Samples as bytes: what arrives is what was sent, bit for bit; the rest is refused by place."""

import math
from collections import OrderedDict, UserDict, namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bascule.data.wire import ALIGNMENT, parcel, read
from bascule.errors import ConfigError
from tests.distributed.loader_cases import same

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

DTYPES = [
    dtype
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    if not str(dtype).startswith(("torch.q", "torch.bits", "torch.int1", "torch.uint1"))
    or str(dtype) in ("torch.int16", "torch.uint16")
]


def copied(sample: Any) -> Any:
    """The sample as it would arrive elsewhere."""
    whole = parcel(sample)
    buffer = torch.empty(whole.num_bytes, dtype=torch.uint8)
    whole.write(buffer)
    return read(buffer)


NUMPY_DTYPES = [
    "?",
    "i1",
    ">i2",
    "<u4",
    "i8",
    "f2",
    ">f4",
    "f8",
    "c8",
    "c16",
    "M8[ns]",
    "S3",
    "<U2",
]


def bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor with any bits, so that NaN payloads are among them."""
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.manual_seed(seed))
    if dtype == torch.bool:
        raw %= 2
    return raw.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 3), (2, 1, 4)], ids=str)
def test_every_dtype_and_shape_arrives_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = bits(dtype, shape)
    assert same(copied({"a": tensor, "b": [tensor, "x"]}), {"a": tensor, "b": [tensor, "x"]})


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3), (3, 0)], ids=str)
def test_every_numpy_type_arrives_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape).astype("i1").astype(dtype)
    assert same(copied((array,)), (array,))
    if array.size:
        scalar = array.flat[0]
        assert same(copied([scalar]), [scalar])


def test_layouts_arrive_as_values() -> None:
    base = bits(torch.float32, (6, 4))
    cases = [base.T, base[::2, 1:3], base[0].expand(3, 4), base[:, :0], base[2, 3]]
    for tensor in cases:
        arrived = copied(tensor)
        assert same(arrived, tensor.contiguous()) and arrived.is_contiguous()
    numbers = bits(torch.complex64, (3,)).nan_to_num()
    for lazy in (numbers.conj(), numbers.conj().imag, numbers._neg_view()):
        assert torch.equal(copied(lazy), lazy.clone())
        assert not copied(lazy).is_conj() and not copied(lazy).is_neg()
    strided = np.arange(24).reshape(4, 6)[::-2, 1::3]
    assert same(copied(strided), strided) and same(copied(strided.T), strided.T)
    learnt = torch.nn.Parameter(torch.ones(2))
    assert same(copied(learnt), torch.ones(2)) and not copied(learnt).requires_grad


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.characters(codec=None).map(str),  # lone surrogates among them
    st.binary(max_size=40),
    st.builds(
        bits,
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
        st.integers(0, 9),
    ),
    st.builds(
        lambda dtype, shape: np.zeros(shape, dtype),
        st.sampled_from(NUMPY_DTYPES),
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
    ),
    st.sampled_from([np.float32(0.1), np.int8(-3), np.bool_(True), np.complex64(1j)]),
)
SAMPLES = st.recursive(
    PLAIN,
    lambda parts: st.one_of(
        st.lists(parts, max_size=4),
        st.lists(parts, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4), parts, max_size=4),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(st.lists(SAMPLES, min_size=1, max_size=4))
def test_nested_samples_arrive_side_by_side(samples: list[Any]) -> None:
    parcels = [parcel(sample) for sample in samples]
    buffer = torch.full((sum(p.num_bytes for p in parcels),), 255, dtype=torch.uint8)
    end = 0
    for one in parcels:
        assert one.num_bytes % ALIGNMENT == 0
        one.write(buffer[end : end + one.num_bytes])
        end += one.num_bytes
    end = 0
    for sample, one in zip(samples, parcels, strict=True):
        assert same(read(buffer[end : end + one.num_bytes]), sample)
        end += one.num_bytes


def test_the_values_that_json_could_lose() -> None:
    values = [0.1 + 0.2, -0.0, 5e-324, math.inf, -math.inf, math.nan, 2**63, -(2**200), True, 1]
    assert same(copied(values), values)
    assert same(
        copied({"": "", "\0": "\ud800", "a\u2028": b""}), {"": "", "\0": "\ud800", "a\u2028": b""}
    )


def test_mappings_become_dicts() -> None:
    arrived = copied({"a": OrderedDict(x=1), "b": UserDict(y=2)})
    assert same(arrived, {"a": {"x": 1}, "b": {"y": 2}})


def test_what_was_copied_has_memory_of_its_own() -> None:
    tensor, array = torch.zeros(3), np.zeros(3)
    arrived = copied({"t": tensor, "a": array})
    tensor += 1
    array += 1
    assert arrived["t"].sum() == 0 and arrived["a"].sum() == 0
    arrived["t"] += 2
    arrived["a"] += 2  # what arrived may be written to
    assert tensor.sum() == 3 and array.sum() == 3


class Kind(IntEnum):
    A = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (object(), ("sample is a object",)),
        ({"a": [1, {2, 3}]}, ("sample['a'][1]", "set")),
        ((0, {"b": frozenset()}), ("sample[1]['b']", "frozenset")),
        ({"a": {1: 2}}, ("sample['a']", "key 1", "strings")),
        ({("a",): 2}, ("sample has the key ('a',)",)),
        ({"x": torch.eye(2).to_sparse()}, ("sample['x']", "sparse_coo", "dense")),
        ([torch.zeros(2, device="meta")], ("sample[0]", "on meta", "CPU")),
        ({"x": np.array([None, 1])}, ("sample['x']", "object")),
        ({"x": np.zeros(2, [("a", "f4")])}, ("sample['x']", "cannot travel")),
        ({"p": Point(1, 2)}, ("sample['p']", "Point")),
        ({"k": Kind.A}, ("sample['k']", "Kind")),
        ({"f": test_mappings_become_dicts}, ("sample['f']", "function")),
        ({"d": torch.float32}, ("sample['d']", "dtype")),
        ({"c": 1j}, ("sample['c']", "complex")),
    ],
    ids=range(14),
)
def test_what_cannot_travel_is_refused_by_its_place(sample: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parcel(sample)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    "layout",
    [torch.jagged, torch.strided],
    ids=str,
)
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)
    with pytest.raises(ConfigError, match=r"sample\['x'\]"):
        parcel({"x": nested})


def test_a_masked_array_does_not_lose_its_mask_silently() -> None:
    masked = np.ma.masked_array([1, 2, 3], mask=[False, True, False])
    with pytest.raises(ConfigError, match=r"sample\['x'\]"):
        parcel({"x": masked})


def test_a_cycle_is_an_error() -> None:
    sample: list[Any] = []
    sample.append(sample)
    with pytest.raises(RecursionError):
        parcel(sample)


@pytest.mark.gpu
def test_tensors_on_the_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sample\['x'\] .* on cuda:0"):
        parcel({"x": torch.zeros(2, device="cuda")})
