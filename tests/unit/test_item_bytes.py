"""Samples as bytes: what arrives is what was sent, bit for bit; the rest is refused by place."""

import math
import threading
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from enum import IntEnum, StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bascule.comm.groups import Staging
from bascule.comm.items import ALIGNMENT, parcel, read
from bascule.errors import ConfigError
from tests.helpers.loader_cases import same

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


NUMPY_DTYPES = "? i1 >i2 <u4 i8 f2 >f4 f8 c8 c16 M8[ns] S3 <U2".split()


def bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor with any bits, so that NaN payloads are among them."""
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.manual_seed(seed))
    if dtype == torch.bool:
        raw %= 2
    return raw.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 3), (2, 1, 4)], ids=str)
def test_every_dtype_and_shape_arrives_bit_for_bit(shape: tuple[int, ...]) -> None:
    arrays = [np.ones(shape).astype("i1").astype(dtype) for dtype in NUMPY_DTYPES]
    values = [*(bits(dtype, shape) for dtype in DTYPES), *arrays]
    for value in [*values, *(array.flat[0] for array in arrays if array.size)]:
        assert same(copied({"a": value, "b": (value, "x")}), {"a": value, "b": (value, "x")})


def strides_of(value: Any) -> list[int]:
    """In elements, of the dims in which there is a step to take."""
    is_tensor = isinstance(value, torch.Tensor)
    strides = value.stride() if is_tensor else [n // value.itemsize for n in value.strides]
    steps = [n for n, size in zip(strides, value.shape, strict=True) if size > 1]
    return steps if all(value.shape) else []


def test_dense_layouts_arrive_as_they_are() -> None:
    """What is a view of an image with channels last stays one: batches of it are alike."""
    image, array = bits(torch.float32, (6, 4, 3)), np.arange(72).reshape(6, 4, 3)
    cases: list[Any] = [image.permute(2, 0, 1), image.transpose(0, 1), image[:, 0].contiguous().T]
    cases += [image[None].to(memory_format=torch.channels_last), image.bfloat16().permute(1, 2, 0)]
    cases += [array.transpose(2, 0, 1), array.T, np.asfortranarray(array), array[..., 0].T.copy()]
    for value in cases:
        arrived = copied([value])[0]
        assert same(arrived, value) and strides_of(arrived) == strides_of(value)


def test_layouts_with_gaps_and_overlaps_arrive_dense() -> None:
    base, array = bits(torch.float32, (6, 4)), np.arange(24).reshape(4, 6)
    cases: list[Any] = [base[::2, 1:3], base[0].expand(3, 4), base[:, :0], base[2, 3]]
    cases += [array[::-2, 1::3], np.broadcast_to(array[0], (3, 6)), array[:, :0]]
    for value in cases:
        arrived, is_tensor = copied(value), isinstance(value, torch.Tensor)
        dense = value.clone() if is_tensor else value.copy(order="K")
        assert same(arrived, value) and strides_of(arrived) == strides_of(dense)
    numbers = bits(torch.complex64, (3,)).nan_to_num()
    for lazy in (numbers.conj(), numbers.conj().imag, numbers._neg_view()):
        assert torch.equal(copied(lazy), lazy.clone())
        assert not copied(lazy).is_conj() and not copied(lazy).is_neg()


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.characters(codec=None).map(str),  # lone surrogates among them
    st.binary(max_size=40),
    st.builds(bits, st.sampled_from(DTYPES), SHAPES, st.integers(0, 9)),
    st.builds(np.zeros, SHAPES, st.sampled_from(NUMPY_DTYPES)),
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


@settings(deadline=None, max_examples=100)
@given(st.lists(SAMPLES, min_size=1, max_size=4))
def test_nested_samples_arrive_side_by_side(samples: list[Any]) -> None:
    parcels = [parcel(sample) for sample in samples]
    buffer = torch.full((sum(p.num_bytes for p in parcels),), 255, dtype=torch.uint8)
    places = buffer.split([p.num_bytes for p in parcels])
    for written, place in zip(parcels, places, strict=True):
        assert written.num_bytes % ALIGNMENT == 0
        written.write(place)
    for sample, place in zip(samples, places, strict=True):
        assert same(read(place), sample)


def test_values_that_the_header_could_lose() -> None:
    values: list[Any] = [
        OrderedDict(z=1, a=OrderedDict()),
        {"z": 1, "a": [OrderedDict(b=2)], "": "", "\0": "\ud800", "a\u2028": b""},
        *("\ud83d\ude00", "\U0001f600"),  # two lone surrogates, and a character written alike
        *(np.str_(""), np.str_("a\0"), np.bytes_(b""), np.bytes_(b"a\0"), b""),
        *(np.array(["", ""]), np.array([b"", b"a\0"])),
        np.zeros(3, [("a", "U0")])["a"],  # strings of no characters
        *(np.array(3.5), np.void(b"ab"), np.longdouble(1) / 3),
        *(np.datetime64("NaT"), np.array(7, "M8[25s]")[()], np.timedelta64(3)),
        *((1, 2), (), [], [True, False], [1, 2.0], True, 1, 2**64, 2**63, -(2**200)),
        *(0.1 + 0.2, -0.0, 5e-324, math.inf, -math.inf, math.nan),
    ]
    for value in [*values, values]:
        arrived = copied(value)
        assert same(arrived, value), value
        assert repr(arrived) == repr(value)


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


class Name(StrEnum):
    B = "b"


class Tokens(torch.Tensor): ...


class Text(str):
    __slots__ = ()


class Raw(bytes): ...


class Half(np.float16): ...


class Items(list[int]): ...


Point = namedtuple("Point", "x y")
LEAF, PLAIN_LEAF = torch.ones(2, requires_grad=True), torch.ones(2)


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding, which is a UserDict."""


def deep(num_levels: int) -> Any:
    return [deep(num_levels - 1)] if num_levels else 0


REFUSED: list[tuple[Any, tuple[str, ...]]] = [
    (object(), ("sample is a object",)),
    ({"a": [1, {2, 3}]}, ("sample['a'][1]", "set")),
    ((0, {"b": frozenset()}), ("sample[1]['b']", "frozenset")),
    ({"a": {1: 2}}, ("sample['a']", "key 1", "strings")),
    ({("a",): 2}, ("sample has the key ('a',)",)),
    ({Name.B: 2}, ("sample has the key <Name.B", "strings")),
    ({np.str_("a"): 2}, ("sample has the key", "strings")),
    ({"x": torch.eye(2).to_sparse()}, ("sample['x']", "sparse_coo", "dense")),
    ([torch.zeros(2, device="meta")], ("sample[0]", "on meta", "CPU")),
    ({"x": np.array([None, 1])}, ("sample['x']", "object")),
    ({"x": np.zeros(2, [("a", "f4")])}, ("sample['x']", "cannot be sent")),
    ({"x": np.zeros(2, np.longlong)}, ("sample['x']", "cannot be sent")),
    ({"x": np.array(["a"], np.dtypes.StringDType())}, ("sample['x']", "cannot be sent")),
    ({"p": Point(1, 2)}, ("sample['p']", "Point", "tuple(..)")),
    ({"k": Kind.A}, ("sample['k']", "Kind", "its name or value")),
    ({"k": [Name.B]}, ("sample['k'][0]", "Name", "its name or value")),
    ({"f": bits}, ("sample['f']", "function")),
    ({"d": torch.float32}, ("sample['d']", "dtype")),
    ({"c": 1j}, ("sample['c']", "complex")),
    (Encoding(a=1), ("sample is a Encoding", "dict(..)")),
    ({"d": defaultdict(list)}, ("sample['d'] is a defaultdict", "dict(..)")),
    ({"c": Counter("ab")}, ("sample['c'] is a Counter", "dict(..)")),
    ({"m": MappingProxyType({})}, ("sample['m'] is a mappingproxy", "dict(..)")),
    ({"p": torch.nn.Parameter(torch.ones(2))}, ("sample['p'] requires a gradient", "token ids")),
    ({"p": torch.nn.Parameter(PLAIN_LEAF, False)}, ("sample['p'] is a Parameter", "detach()")),
    ({"x": Tokens(2)}, ("sample['x'] is a Tokens", "as_subclass(torch.Tensor)")),
    ({"g": LEAF}, ("sample['g'] requires a gradient", "within the model")),
    ({"g": [LEAF * 2]}, ("sample['g'][0] requires a gradient", "within the model")),
    ({"x": np.ones((2, 2)).view(np.matrix)}, ("sample['x'] is a matrix", "numpy.asarray")),
    ({"x": np.ones(2).view(np.recarray)}, ("sample['x'] is a recarray", "numpy.asarray")),
    ({"x": np.ma.masked_array([1, 2], mask=[False, True])}, ("sample['x']", "data and mask apart")),
    ({"x": Half(2)}, ("sample['x'] is a Half", "item()")),
    ({"s": Text("a")}, ("sample['s'] is a Text", "str(..)")),
    ({"b": Raw(b"a")}, ("sample['b'] is a Raw", "bytes(..)")),
    ({"b": bytearray(b"a")}, ("sample['b'] is a bytearray",)),
    ({"l": Items([1])}, ("sample['l'] is a Items", "list(..)")),
    ([deque([1])], ("sample[0] is a deque",)),
    (deep(200), ("nested deeper than 64 levels",)),
]


@pytest.mark.parametrize(("sample", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_would_not_arrive_is_refused_by_its_place(sample: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parcel(sample)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_view_of_a_file_is_refused(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "tokens", np.int32, "w+", shape=4)
    with pytest.raises(ConfigError, match=r"sample\['x'\] is a memmap.* numpy\.asarray"):
        parcel({"x": mapped[1:3]})
    assert same(copied(np.asarray(mapped[1:3])), np.zeros(2, np.int32))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nests_are_refused_and_the_deepest_arrives() -> None:
    for layout in (torch.jagged, torch.strided):
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)
        with pytest.raises(ConfigError, match=r"sample\['x'\]"):
            parcel({"x": nested})
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ConfigError, match="nested deeper"):
        parcel(cycle)
    assert copied(deep(64)) == deep(64)


@pytest.mark.gpu
def test_tensors_on_the_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sample\['x'\] .* on cuda:0"):
        parcel({"x": torch.zeros(2, device="cuda")})


# Memory of exchanges is used again


def test_memory_is_used_again_and_grows() -> None:
    staging = Staging()
    first = staging.take("sent", (8,), torch.empty(0, dtype=torch.float32))
    assert first.shape == (8,) and first.dtype == torch.float32
    again = staging.take("sent", (4,), torch.empty(0, dtype=torch.float64))
    assert again.shape == (4,) and again.data_ptr() == first.data_ptr()
    # As many elements of a wider dtype need more room.
    wider = staging.take("sent", (8,), torch.empty(0, dtype=torch.float64))
    wider.fill_(1.0)
    assert wider.shape == (8,) and bool((wider == 1.0).all())
    # What is kept of a role is never of the memory that it had before it grew.
    same = staging.take("sent", (8,), torch.empty(0, dtype=torch.float32))
    assert same.shape == (8,) and same.data_ptr() == wider.data_ptr()
    other = staging.take("received", (8,), wider)
    assert other.data_ptr() != wider.data_ptr()


def test_memory_taken_in_inference_mode_can_be_written_outside() -> None:
    staging = Staging()
    with torch.inference_mode():
        staging.take("sent", (8,), torch.empty(0, dtype=torch.uint8)).fill_(0)
    kept = staging.take("sent", (8,), torch.empty(0, dtype=torch.uint8))
    assert not kept.is_inference()
    assert bool((kept.copy_(torch.ones(8)) == 1).all())


def test_each_thread_has_memory_of_its_own() -> None:
    staging, found = Staging(), list[int]()

    def take() -> None:
        found.append(staging.take("sent", (8,), torch.empty(0)).data_ptr())

    take()
    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert found[0] != found[1]
