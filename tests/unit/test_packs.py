"""Packs and padded batches: every token of every sample is in its place, and comes back."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bascule.data.packs import Pack, collate_padded, make_pack, unpack
from bascule.errors import ConfigError
from tests.helpers.loader_cases import same


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def two() -> list[dict[str, Any]]:
    return [
        {"input_ids": ids(1, 2, 3), "labels": ids(1, -100, 3), "text": "a", "weight": ids(7)[0]},
        {"input_ids": ids(4, 5), "labels": ids(4, 5), "weight": ids(8)[0]},
    ]


def picture(num_images: int, first: int = 0) -> dict[str, Any]:
    """Images of (1, 2, 2) patches, that is one token each, between text tokens."""
    return {
        "input_ids": ids(1, *[9] * num_images, 2),
        "image_grid_thw": ids(1, 2, 2).expand(num_images, 3),
        "pixel_values": torch.arange(first, first + 4.0 * num_images)[:, None],
    }


def test_padding_is_a_segment_of_its_own() -> None:
    pack = make_pack(two(), Pack(8, fixed=True, pad_id=6, ignore_index=-1))
    assert pack["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 6, 6]
    assert pack["cu_seqlens"].tolist() == [0, 3, 5, 8]
    assert pack["positions"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert pack["labels"].tolist() == [-1, -100, 3, -1, 5, -1, -1, -1]
    assert pack["shift_labels"].tolist() == [-100, 3, -1, 5, -1, -1, -1, -1]
    assert len(unpack(pack)) == 2


@pytest.mark.parametrize(("fixed", "bounds"), [(False, [0]), (True, [0, 4])])
def test_no_samples_are_a_pack(fixed: bool, bounds: list[int]) -> None:
    pack = make_pack([], Pack(4, fixed=fixed, pad_id=3))
    assert pack["cu_seqlens"].tolist() == bounds
    assert pack["cu_seqlens"].dtype == torch.int32
    assert pack["input_ids"].tolist() == [3] * bounds[-1]
    assert pack["labels"].tolist() == pack["shift_labels"].tolist() == [-100] * bounds[-1]
    assert pack["positions"].tolist() == list(range(bounds[-1]))
    assert unpack(pack) == []


def test_token_fields_that_a_sample_lacks_are_neutral_and_leave_no_trace() -> None:
    samples = [{"input_ids": ids(1, 2), "labels": ids(1, 2), "attention_mask": ids(0, 1)}]
    samples += [{"input_ids": ids(3, 4)}]
    pack = make_pack(samples, Pack(6, fixed=True))
    assert pack["labels"].tolist() == [-100, 2, -100, -100, -100, -100]
    assert pack["attention_mask"].tolist() == [0, 1, 1, 1, 0, 0]
    assert [sample.keys() for sample in unpack(pack)] == [sample.keys() for sample in samples]


def test_packs_at_the_bounds_of_their_values() -> None:
    short = torch.tensor([1, 2], dtype=torch.uint8)
    samples = [{"input_ids": short}, {"input_ids": short[:1]}]
    for pad_id in (0, 255):
        pack = make_pack(samples[:1], Pack(3, fixed=True, pad_id=pad_id))
        assert pack["input_ids"].tolist() == [1, 2, pad_id]
        assert collate_padded(samples, pad_id=pad_id)["input_ids"].tolist()[1] == [1, pad_id]
    wrongs = [partial(make_pack, samples, Pack(4, fixed=True, pad_id=256))]
    wrongs += [partial(collate_padded, samples, pad_id=pad_id) for pad_id in (256, -1)]
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            wrong()


def test_labels_may_be_bytes_where_these_hold_the_ignored_value() -> None:
    sample = {"input_ids": ids(1, 2), "labels": ids(1, 2).to(torch.uint8)}
    assert make_pack([sample], Pack(4, ignore_index=255))["labels"].tolist() == [255, 2]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_pack_of_others_is_taken_apart(kind: Any) -> None:
    pack = {"input_ids": ids(1, 2, 3, 4, 5), "labels": ids(1, 2, 3, 4, 5), "text": ["a", "b"]}
    pack |= {"position_ids": ids(0, 1, 2, 0, 1), "pooled": torch.eye(2), "weight": ids(7, 8)}
    pack |= {"patches": torch.arange(4), "pixel_values": None, "cu_seqlens": kind([0, 3, 5])}
    first, second = unpack({**pack, "cu_items": {"patches": [0, 0, 4]}})
    wanted = {"input_ids": ids(4, 5), "labels": ids(4, 5), "text": "b", "position_ids": ids(0, 1)}
    wanted |= {"pooled": torch.eye(2)[1:], "weight": ids(8)[0], "patches": torch.arange(4)}
    assert same(sorted_fields([second]), sorted_fields([wanted]))
    assert (first["labels"].tolist(), first["text"], len(first["patches"])) == ([1, 2, 3], "a", 0)
    assert first.keys() == second.keys()
    again = unpack({**pack, "cu_items": {"patches": ids(0, 0, 4)}})
    assert [len(sample["patches"]) for sample in again] == [0, 4]
    made = make_pack([first, second], Pack(5))
    assert torch.equal(made["pooled"], pack["pooled"])
    assert torch.equal(made["patches"], pack["patches"])


def test_a_padded_batch_keeps_a_mask_and_joins_images() -> None:
    masked = {"input_ids": ids(5, 6), "attention_mask": ids(0, 1), "pixel_values": None}
    batch = collate_padded([picture(2), masked, picture(1, 100)])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 0, 0], [1, 1, 1, 0]]
    assert batch["pixel_values"].flatten().tolist() == [*range(8), 100, 101, 102, 103]
    assert batch["image_grid_thw"].shape == (3, 3)


@pytest.mark.parametrize("says", ["image_sizes", "pixel_attention_mask"])
def test_images_of_any_resolution_get_patches_of_zeros(says: str) -> None:
    samples: list[dict[str, Any]] = [
        {"input_ids": ids(1), "pixel_values": torch.ones(n, m, 2, 3, 3)}
        for n, m in ((1, 3), (2, 5))
    ]
    for sample in samples:
        n, m = sample["pixel_values"].shape[:2]
        sample[says] = torch.ones(n, 2) if says == "image_sizes" else torch.ones(n, m, 3, 3).bool()
    batch = collate_padded([*samples, {"input_ids": ids(1)}])
    assert batch["pixel_values"].shape == (3, 5, 2, 3, 3)
    assert batch["pixel_values"].sum((1, 2, 3, 4)).tolist() == [54, 90, 90]
    assert not batch["pixel_values"][0, 3:].any()
    assert batch[says].shape == ((3, 2) if says == "image_sizes" else (3, 5, 3, 3))
    assert batch[says].sum() == (6 if says == "image_sizes" else 13 * 9)
    assert samples[0]["pixel_values"].shape == (1, 3, 2, 3, 3)
    for sample in samples:
        del sample[says]  # then nothing would say that zeros are no patches
    with pytest.raises(ConfigError, match=r"\(1, 3, .* in sample 0 and .*\(2, 5, .* in sample 1"):
        collate_padded(samples)


def test_a_batch_of_text_has_no_visual_fields() -> None:
    batch = collate_padded([picture(0), {"input_ids": ids(1), "pixel_values": None}])
    assert batch.keys() == {"input_ids", "attention_mask"}
    assert {name: value.shape for name, value in collate_padded([]).items()} == dict.fromkeys(
        ("input_ids", "labels", "attention_mask"), (0, 0)
    )


# What is packed comes back bit for bit, whatever it is


DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.complex64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIGNED = [torch.int16, torch.int32, torch.int64]

some = settings(deadline=None, max_examples=100)


def sorted_fields(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dict(sorted(sample.items())) for sample in samples]


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
def test_unpack_inverts_make_pack(samples: list[dict[str, Any]], fixed: bool, room: int) -> None:
    before = make_pack(samples, Pack(64))
    total = sum(len(sample["input_ids"]) for sample in samples)
    pack = make_pack(samples, Pack(max(total + room, 1), fixed=fixed, pad_id=1))
    held = {name: value.clone() for name, value in pack.items() if isinstance(value, Tensor)}
    assert same(sorted_fields(unpack(pack)), sorted_fields(samples))
    assert same({name: pack[name] for name in held}, held)  # nothing was written to the pack
    again = unpack(make_pack(unpack(before), Pack(64)))
    assert same(sorted_fields(again), sorted_fields(samples))  # nor to the samples


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
@given(sample_lists(), st.integers(1, 4))
def test_a_padded_batch_holds_every_row(samples: list[dict[str, Any]], multiple_of: int) -> None:
    batch = collate_padded(samples, pad_id=3, multiple_of=multiple_of)
    assert batch["input_ids"].shape[1] % multiple_of == 0
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        assert same(batch["input_ids"][row, :length], sample["input_ids"])
        assert (batch["input_ids"][row, length:] == 3).all()
        assert not batch["attention_mask"][row, length:].any()
        if sample.get("labels") is not None:
            assert same(batch["labels"][row, :length], sample["labels"])
            assert (batch["labels"][row, length:] == -100).all()
    images = [s["pixel_values"] for s in samples if s.get("pixel_values") is not None]
    if sum(map(len, images)):
        assert same(batch["pixel_values"], torch.cat(images))
    else:
        assert "pixel_values" not in batch
