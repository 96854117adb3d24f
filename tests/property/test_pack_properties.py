"""What is packed comes back bit for bit, whatever it is."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bascule.data.collators import collate_padded
from bascule.data.packs import Pack, make_pack, unpack

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]
SIGNED = [torch.int16, torch.int32, torch.int64]

some = settings(deadline=None, max_examples=200)


def bits(tensor: Tensor) -> tuple[Any, ...]:
    """Dtype, shape and bytes: NaN is NaN, and -0.0 is not 0.0."""
    return tensor.dtype, tensor.shape, tensor.contiguous().view(-1).view(torch.uint8).tolist()


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for mine, given_sample in zip(found, expected, strict=True):
        assert mine.keys() == given_sample.keys()
        for name, value in given_sample.items():
            if isinstance(value, Tensor):
                assert bits(mine[name]) == bits(value), name
            else:
                assert mine[name] == value and type(mine[name]) is type(value), name


@st.composite
def sample_lists(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Samples whose fields agree on dtype and shape, and which may lack some, or have None."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def raw(dtype: torch.dtype, *shape: int) -> Tensor:
        if dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=generator).bool()
        tensor = torch.empty(shape, dtype=dtype)
        num_bytes = tensor.numel() * tensor.element_size()
        noise = torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)
        return noise.view(dtype).view(shape)  # any bits, so also NaN with a payload

    dtypes = {name: draw(st.sampled_from(SIGNED)) for name in ("input_ids", "labels", "mm")}
    image, scalar = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    width = draw(st.integers(0, 3))
    has_scalar = draw(st.booleans())
    samples: list[dict[str, Any]] = []
    for length in draw(st.lists(st.integers(0, 5), max_size=5)):
        sample: dict[str, Any] = {"input_ids": raw(dtypes["input_ids"], length)}
        optional = {
            "labels": raw(dtypes["labels"], length),
            "mm_token_type_ids": raw(dtypes["mm"], length),
            "attention_mask": raw(torch.bool, length),
            "pixel_values": raw(image, draw(st.integers(0, 4)), width),
            "flat": raw(image, draw(st.integers(0, 2))),
            "text": draw(st.text(max_size=2)),
            "numbers": draw(st.lists(st.integers(), max_size=2)),
        }
        for name, value in optional.items():
            match draw(st.sampled_from(["value", "value", "none", "absent"])):
                case "value":
                    sample[name] = value
                case "none":
                    sample[name] = None
        if has_scalar:
            sample["scalar"] = raw(scalar)
        samples.append(sample)
    return samples


@some
@given(sample_lists(), st.booleans(), st.integers(0, 3))
def test_unpack_is_the_inverse_of_make_pack(
    samples: list[dict[str, Any]], fixed: bool, room: int
) -> None:
    before = make_pack(samples, Pack(64))
    total = sum(len(sample["input_ids"]) for sample in samples)
    pack = make_pack(samples, Pack(max(total + room, 1), fixed=fixed, pad_id=1))
    held = {name: value.clone() for name, value in pack.items() if isinstance(value, Tensor)}
    assert_same(unpack(pack), samples)
    assert_same([{name: pack[name] for name in held}], [held])  # nothing was written to the pack
    assert_same(unpack(make_pack(unpack(before), Pack(64))), samples)  # nor to the samples


@some
@given(sample_lists(), st.booleans())
def test_segments_cover_the_tokens_and_no_label_crosses_one(
    samples: list[dict[str, Any]], fixed: bool
) -> None:
    pack = make_pack(samples, Pack(32, fixed=fixed))
    lens = [len(sample["input_ids"]) for sample in samples]
    num_padding = 32 - sum(lens) if fixed else 0
    segments = lens + [num_padding] * (num_padding > 0)
    assert pack["cu_seqlens"].diff().tolist() == segments
    assert pack["positions"].tolist() == [place for length in segments for place in range(length)]
    if "shift_labels" not in pack:
        assert all(sample.get("labels") is None for sample in samples)
        return
    shifted, masked = [], []
    for length, sample in zip(lens, samples, strict=True):
        labels = sample.get("labels")
        own = [-100] * length if labels is None else labels.tolist()
        masked += [-100, *own[1:]] if own else []
        shifted += [*own[1:], -100] if own else []
    assert pack["labels"].tolist() == masked + [-100] * num_padding
    assert pack["shift_labels"].tolist() == shifted + [-100] * num_padding


@some
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=6))
def test_a_foreign_pack_is_split_by_its_image_tokens(plan: list[tuple[int, int]]) -> None:
    samples = [
        {
            "input_ids": torch.cat([torch.arange(text), torch.full((3 * images,), 99)]),
            "image_grid_thw": torch.tensor([[1, 2, 6]]).expand(images, 3),
            "pixel_values": torch.rand(12 * images, 2),
        }
        for text, images in plan
    ]
    if not samples:
        return
    made = make_pack(samples, Pack(100))
    names = ("input_ids", "image_grid_thw", "pixel_values", "cu_seqlens")
    assert_same(unpack({name: made[name] for name in names}, image_token_id=99), samples)


@some
@given(sample_lists(), st.integers(1, 4))
def test_a_padded_batch_holds_every_row(samples: list[dict[str, Any]], multiple_of: int) -> None:
    batch = collate_padded(samples, pad_id=3, multiple_of=multiple_of)
    assert batch["input_ids"].shape[1] % multiple_of == 0
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        assert bits(batch["input_ids"][row, :length]) == bits(sample["input_ids"])
        assert (batch["input_ids"][row, length:] == 3).all()
        assert not batch["attention_mask"][row, length:].any()
        if sample.get("labels") is not None:
            assert bits(batch["labels"][row, :length]) == bits(sample["labels"])
            assert (batch["labels"][row, length:] == -100).all()
    images = [s["pixel_values"] for s in samples if s.get("pixel_values") is not None]
    if sum(map(len, images)):
        assert bits(batch["pixel_values"]) == bits(torch.cat(images))
    else:
        assert "pixel_values" not in batch
