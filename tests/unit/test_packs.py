from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bascule.data.collators import collate_padded
from bascule.data.packs import Pack, make_pack, unpack
from bascule.errors import ConfigError


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


def test_a_pack_has_boundaries_positions_and_labels_that_cross_none() -> None:
    pack = make_pack(two(), Pack(8))
    assert pack["input_ids"].tolist() == [1, 2, 3, 4, 5]
    assert pack["cu_seqlens"].tolist() == [0, 3, 5]
    assert pack["cu_seqlens"].dtype == torch.int32
    assert pack["positions"].tolist() == [0, 1, 2, 0, 1]
    assert pack["labels"].tolist() == [-100, -100, 3, -100, 5]
    assert pack["shift_labels"].tolist() == [-100, 3, -100, 5, -100]
    assert pack["text"] == ["a", None]
    assert pack["weight"].tolist() == [7, 8]
    assert pack["num_samples"] == 2


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
    for tokens in (1, 2**31 - 1):
        Pack(tokens, ignore_index=0)
    bytes_of = torch.tensor([1, 2], dtype=torch.uint8)
    for pad_id in (0, 255):
        pack = make_pack([{"input_ids": bytes_of}], Pack(3, fixed=True, pad_id=pad_id))
        assert pack["input_ids"].tolist() == [1, 2, pad_id]
        batch = collate_padded(
            [{"input_ids": bytes_of}, {"input_ids": bytes_of[:1]}], pad_id=pad_id
        )
        assert batch["input_ids"].tolist() == [[1, 2], [1, pad_id]]
    for samples in ([bytes_of], [bytes_of, bytes_of[:1]]):
        given = [{"input_ids": ids} for ids in samples]
        with pytest.raises(ConfigError):
            make_pack(given, Pack(4, fixed=True, pad_id=256))
    with pytest.raises(ConfigError):
        collate_padded(given, pad_id=256)
    wrongs: list[dict[str, Any]] = [{"pad_id": -1}, {"multiple_of": 0}, {"ignore_index": 0.0}]
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            collate_padded(given, **wrong)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"input_ids": torch.zeros(9, dtype=torch.int64)}, "together 11 tokens .* pack of 10"),
        ({"input_ids": ids(1, 2), "labels": ids(1)}, "labels of sample 1 has 1 rows"),
        ({"text": "b"}, "sample 1 has none of the token fields"),
        ({"input_ids": [1, 2]}, "input_ids of sample 1 is a list"),
        ({"input_ids": ids(1, 2)[None]}, r"input_ids of sample 1 has the shape \(1, 2\)"),
        ({"labels": ids(1, 2)}, "sample 1 lacks input_ids"),
        ({"input_ids": ids(1).int()}, "int64 .* in sample 0 and torch.int32"),
        ({"input_ids": ids(1), "image": torch.zeros(1, 3)}, r"image is .*\(1, 2\).*\(1, 3\)"),
        ({"input_ids": ids(1), "image": torch.zeros(1, 2).bfloat16()}, "same dtype"),
        ({"input_ids": ids(1), "image": torch.zeros(0)}, "same shape"),
        ({"input_ids": ids(1), "image": [[0.0, 0.0]]}, "image of sample 1 is a list"),
        ({"input_ids": ids(1)}, "sample 1 lacks weight"),
        ({"input_ids": ids(1), "weight": ids(1)}, "same shape"),
        ({"input_ids": ids(1), "cu_items": {}}, "cu_items is what make_pack makes"),
    ],
)
def test_samples_that_cannot_be_packed_are_refused(other: dict[str, Any], says: str) -> None:
    first = {"input_ids": ids(1, 2), "image": torch.zeros(1, 2), "weight": ids(1)[0]}
    with pytest.raises(ConfigError, match=says):
        make_pack([first, other], Pack(10))


def test_labels_that_cannot_hold_the_ignored_value_are_refused() -> None:
    sample = {"input_ids": ids(1, 2), "labels": ids(1, 2).to(torch.uint8)}
    with pytest.raises(ConfigError, match=r"labels is torch\.uint8, which cannot hold -100"):
        make_pack([sample], Pack(4))
    assert make_pack([sample], Pack(4, ignore_index=255))["labels"].tolist() == [255, 2]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_pack_of_others_is_taken_apart(kind: Any) -> None:
    pack = {
        "input_ids": ids(1, 2, 3, 4, 5),
        "labels": ids(1, 2, 3, 4, 5),
        "position_ids": ids(0, 1, 2, 0, 1),
        "text": ["a", "b"],
        "pooled": torch.eye(2),
        "weight": ids(7, 8),
        "patches": torch.arange(4),
        "pixel_values": None,
        "cu_seqlens": kind([0, 3, 5]),
    }
    first, second = unpack(pack, cu_items={"patches": [0, 0, 4]})
    assert first["labels"].tolist() == [1, 2, 3]
    assert second["position_ids"].tolist() == [0, 1]
    assert (first["text"], second["text"]) == ("a", "b")
    assert second["pooled"].tolist() == [[0, 1]]
    assert second["weight"].shape == ()
    assert (len(first["patches"]), len(second["patches"])) == (0, 4)
    assert "pixel_values" not in first and "cu_seqlens" not in first
    again = unpack({**pack, "cu_items": {"patches": ids(0, 0, 4)}})
    assert [len(sample["patches"]) for sample in again] == [0, 4]
    made = make_pack([first, second], Pack(5))
    assert torch.equal(made["pooled"], pack["pooled"])
    assert torch.equal(made["patches"], pack["patches"])


def foreign() -> dict[str, Any]:
    images = [picture(2), {"input_ids": ids(1, 2)}, picture(1, 100)]
    pack = make_pack(images, Pack(20))
    return {n: pack[n] for n in ("input_ids", "pixel_values", "image_grid_thw", "cu_seqlens")}


def test_video_tokens_attribute_videos_beside_images() -> None:
    pack = {
        "input_ids": ids(9, 8, 8, 1, 8),
        "image_grid_thw": ids(1, 2, 2)[None],
        "pixel_values": torch.zeros(4, 1),
        "video_grid_thw": torch.tensor([[2, 2, 2], [1, 2, 2]]),
        "pixel_values_videos": torch.arange(12)[:, None],
        "second_per_grid_ts": torch.tensor([0.5, 1.0]),
        "cu_seqlens": [0, 4, 5],
    }
    first, second = unpack(pack, image_token_id=9, video_token_id=8)
    assert len(first["pixel_values"]) == 4 and len(second["pixel_values"]) == 0
    assert first["pixel_values_videos"].flatten().tolist() == list(range(8))
    assert second["second_per_grid_ts"].tolist() == [1.0]


def test_images_of_different_sizes_are_told_apart_by_their_tokens() -> None:
    pack = foreign() | {"image_grid_thw": torch.tensor([[1, 2, 4], [1, 2, 2]])}
    samples = unpack(pack, image_token_id=9)
    assert [len(sample["image_grid_thw"]) for sample in samples] == [1, 0, 1]
    assert [len(sample["pixel_values"]) for sample in samples] == [8, 0, 4]


NO_MATCH = "image_grid_thw does not match input_ids: up to sample {} there are {} image tokens"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input_ids": ids(1, 9, 1, 2, 1, 2, 1, 9, 2)}, NO_MATCH.format(2, 2)),  # one too few
        ({"input_ids": ids(1, 9, 9, 9, 1, 2, 1, 9, 2)}, NO_MATCH.format(2, 4)),  # one too many
        ({"image_grid_thw": torch.tensor([[1, 2, 2], [1, 4, 2]])}, NO_MATCH.format(0, 2)),
        ({"image_grid_thw": torch.tensor([[1, 1, 2]])}, "multiple of merge_size squared, 4"),
        ({"image_grid_thw": torch.tensor([[0, 2, 2]])}, "positive multiple"),
        ({"pixel_values": torch.zeros(11, 1)}, "pixel_values has 11 rows, but its samples have 12"),
        ({"input_ids": ids(9, 9, 9)}, "input_ids has 3 rows, but its samples have 9"),
        ({"input_ids": None}, "looked for in input_ids"),
    ],
)
def test_image_tokens_that_do_not_match_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        unpack(foreign() | change, image_token_id=9)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"cu_seqlens": None}, "no cu_seqlens"),
        ({"cu_seqlens": [1, 3]}, "begin with 0"),
        ({"cu_seqlens": []}, "begin with 0"),
        ({"cu_seqlens": [0.0, 3.0]}, "whole numbers"),
        ({"cu_seqlens": [0, 3, 2]}, "must not decrease"),
        ({"cu_seqlens": [0, 2]}, "input_ids has 3 rows, but its samples have 2"),
        ({"image": torch.zeros(5)}, r"image has 5 rows, .* cu_items: \{'image'"),
        ({"cu_items": {"image": [0, 5]}, "image": torch.zeros(5)}, "is for 1 samples"),
        ({"cu_items": {"image": [0, 2, 4]}, "image": torch.zeros(5)}, "image has 5 rows"),
        ({"max_seqlen": 2}, "max_seqlen is one int for the whole pack"),
        ({"name": "ab"}, "name is one str for the whole pack"),
        ({"scale": torch.tensor(1.0)}, "scale is one Tensor for the whole pack"),
        (
            {"cu_seqlens": [0, 1, 2, 3], "weight": torch.zeros(3)},
            "weight has 3 rows, and the pack as many tokens as samples",
        ),
    ],
)
def test_fields_that_belong_to_nobody_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        unpack({"input_ids": ids(1, 2, 3), "cu_seqlens": [0, 1, 3]} | fields)


def test_a_field_added_to_our_pack_needs_its_counts() -> None:
    pack = make_pack(two(), Pack(8)) | {"extra": torch.zeros(5)}
    with pytest.raises(ConfigError, match="extra has 5 rows"):
        unpack(pack)
    assert len(unpack(pack, cu_items={"extra": [0, 1, 5]})[1]["extra"]) == 4


def test_naming_a_token_field_settles_what_it_follows() -> None:
    pack = {"input_ids": ids(1, 2), "mine": ids(5, 6), "cu_seqlens": [0, 1, 2]}
    assert unpack(pack, token_fields=("input_ids", "mine"))[1]["mine"].tolist() == [6]


def test_a_padded_batch() -> None:
    samples = [*two(), {"input_ids": ids(), "labels": ids(), "weight": ids(9)[0]}]
    batch = collate_padded(samples, pad_id=6, ignore_index=-1, multiple_of=4)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 6], [4, 5, 6, 6], [6] * 4]
    assert batch["labels"].tolist() == [[1, -100, 3, -1], [4, 5, -1, -1], [-1] * 4]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [0] * 4]
    assert batch["weight"].tolist() == [7, 8, 9]
    assert batch["text"] == ["a", None, None]


def test_a_padded_batch_keeps_a_mask_and_joins_images() -> None:
    masked = {"input_ids": ids(5, 6), "attention_mask": ids(0, 1), "pixel_values": None}
    batch = collate_padded([picture(2), masked, picture(1, 100)])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 0, 0], [1, 1, 1, 0]]
    assert batch["pixel_values"].flatten().tolist() == [*range(8), 100, 101, 102, 103]
    assert batch["image_grid_thw"].shape == (3, 3)


def test_a_batch_of_text_has_no_visual_fields() -> None:
    batch = collate_padded([picture(0), {"input_ids": ids(1), "pixel_values": None}])
    assert batch.keys() == {"input_ids", "attention_mask"}
    assert {name: value.shape for name, value in collate_padded([]).items()} == dict.fromkeys(
        ("input_ids", "labels", "attention_mask"), (0, 0)
    )


@pytest.mark.parametrize(
    ("sample", "options", "says"),
    [
        ({"input_ids": ids(1)}, {"multiple_of": 0}, "multiple_of is 0; .* at least 1"),
        ({"input_ids": ids(1)}, {"pad_id": -1}, "pad_id is -1; .* at least 0"),
        ({"input_ids": ids(1), "second_per_grid_ts": [1.0]}, {}, "second_per_grid_ts must be a te"),
        ({"labels": ids(1)}, {}, "sample 1 lacks input_ids"),
    ],
)
def test_samples_without_a_batch_are_refused(
    sample: dict[str, Any], options: dict[str, int], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        collate_padded([{"input_ids": ids(1, 2)}, sample], **options)


@pytest.mark.parametrize("sample", [None, [1, 2], "abc", 5])
def test_what_has_no_fields_is_refused(sample: Any) -> None:
    for use in (lambda: make_pack([two()[0], sample], Pack(8)), lambda: collate_padded([sample])):
        with pytest.raises(ConfigError, match=r"sample \d is a \w+; give dicts of fields"):
            use()
    with pytest.raises(ConfigError, match="give dicts of fields"):
        unpack(sample)


def test_samples_may_come_one_by_one() -> None:
    made = make_pack((sample for sample in two()), Pack(8))
    assert made["input_ids"].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("bounds", ["ab", [0, "2"], [0, None], 5, {}])
def test_bounds_that_are_no_numbers_are_refused(bounds: Any) -> None:
    with pytest.raises(ConfigError, match="cu_seqlens must be whole numbers that begin with 0"):
        unpack({"cu_seqlens": bounds, "input_ids": ids(1, 2)})


def test_given_bounds_of_items_come_before_those_of_their_tokens() -> None:
    pack = {
        "cu_seqlens": ids(0, 2, 4),
        "input_ids": ids(7, 7, 1, 1),
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]]),
        "pixel_values": torch.arange(8.0)[:, None],
    }
    given = {"pixel_values": [0, 4, 8], "image_grid_thw": [0, 1, 2]}
    samples = unpack(pack, cu_items=given, image_token_id=7)
    assert [len(sample["pixel_values"]) for sample in samples] == [4, 4]
