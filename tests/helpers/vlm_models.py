"""The VLM classes of transformers, tiny, with random weights in float64; and samples for them."""

import importlib
from typing import Any

import torch

VOCAB, WIDTH, IMAGE, VIDEO = 64, 32, 60, 61
PATCH_VALUES = 3 * 2 * 4 * 4  # channels, frames and side of a Qwen patch
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
QWEN_VISION = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "tie_word_embeddings": False}
MODELS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl"]
QWENS = MODELS[:3]


SMALL = {"hidden_size": 16, "intermediate_size": 24}
TOWER = SMALL | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8}
QWEN_TEXT: dict[str, Any] = TEXT | {"rope_parameters": ROPE}
QWEN_TOWER = QWEN_VISION | SMALL | {"out_hidden_size": WIDTH}
QWEN2: dict[str, Any] = {"model_type": "qwen2", **TEXT}
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # The name of its classes, its text, its vision, and the rest.
    "qwen2_vl": ("Qwen2VL", QWEN_TEXT, QWEN_VISION | {"embed_dim": 16, "hidden_size": WIDTH}, {}),
    "qwen2_5_vl": (
        *("Qwen2_5_VL", QWEN_TEXT),
        *(QWEN_TOWER | {"window_size": 16, "fullatt_block_indexes": [1]}, {}),
    ),
    "qwen3_vl": (
        *("Qwen3VL", QWEN_TEXT | {"head_dim": 8}),
        *(QWEN_TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}, {}),
    ),
    "internvl": ("InternVL", QWEN2, TOWER | {"patch_size": 2}, {"image_seq_length": 4}),
    "llava_onevision": (  # images are tiles of 8 x 8 pixels, as many as they need
        *("LlavaOnevision", QWEN2),
        TOWER | {"model_type": "siglip_vision_model", "patch_size": 4, "vision_use_head": False},
        {"image_grid_pinpoints": [[8, 8], [8, 16], [16, 8], [16, 16]]},
    ),
}


def make_model(name: str) -> Any:
    """A tiny model in float64."""
    tf: Any = importlib.import_module("transformers")
    classes, text, vision, others = CONFIGS[name]
    make = getattr(tf, f"{classes}Config")
    config = make(text_config=text, vision_config=vision, **IDS, **others)
    torch.manual_seed(0)
    config._attn_implementation = "sdpa"
    model = getattr(tf, f"{classes}ForConditionalGeneration")(config).double().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)  # no zero that could hide a wrong image or position
    return model


def make_sample(
    model: str, seed: int, images: list[tuple[int, int]], num_text: int
) -> dict[str, Any]:
    """Text with images; a size is rows and columns of merged patches, or of InternVL's tiles."""
    generator = torch.Generator().manual_seed(seed)
    ids, tiles = [], 4 if model == "internvl" else 1
    for rows, columns in images:
        ids += [torch.randint(0, 50, (2,), generator=generator)]
        ids += [torch.full((rows * columns * tiles,), IMAGE)]
    input_ids = torch.cat([*ids, torch.randint(0, 50, (num_text,), generator=generator)])
    labels = input_ids.masked_fill(input_ids == IMAGE, -100)
    labels[1] = -100
    sample: dict[str, Any] = {"input_ids": input_ids, "labels": labels}
    if model != "internvl":
        sample["mm_token_type_ids"] = (input_ids == IMAGE).long()
    if not images:
        return sample
    num_merged = sum(rows * columns for rows, columns in images)
    if model == "internvl":
        shape = (num_merged, 3, 8, 8)
    else:
        shape = (4 * num_merged, PATCH_VALUES)
        grids = [(1, 2 * rows, 2 * columns) for rows, columns in images]
        sample["image_grid_thw"] = torch.tensor(grids)
    sample["pixel_values"] = torch.randn(shape, generator=generator, dtype=torch.float64)
    return sample


def make_samples(model: str) -> list[dict[str, Any]]:
    return [
        make_sample(model, 1, [(2, 3)], 5),
        make_sample(model, 2, [], 9),
        make_sample(model, 3, [(1, 2), (3, 2), (2, 2)], 2),
        make_sample(model, 4, [], 2),
        make_sample(model, 5, [(3, 1), (1, 3)], 7),
    ]


def with_video(model: str, sample: dict[str, Any], seed: int) -> dict[str, Any]:
    """A sample that a video of two frames of 2 x 2 merged patches follows."""
    generator = torch.Generator().manual_seed(seed)
    ids, types = [sample["input_ids"]], [sample["mm_token_type_ids"]]
    for num in [4, 4] if model == "qwen3_vl" else [8]:  # Qwen3-VL has times between frames
        ids += [torch.full((num,), VIDEO), torch.randint(0, 50, (2,), generator=generator)]
        types += [torch.full((num,), 2), torch.zeros(2, dtype=torch.int64)]
    input_ids, mm_types = torch.cat(ids), torch.cat(types)
    return sample | {
        "input_ids": input_ids,
        "labels": input_ids.masked_fill(mm_types > 0, -100),
        "mm_token_type_ids": mm_types,
        "pixel_values_videos": torch.randn(
            32, PATCH_VALUES, generator=generator, dtype=torch.float64
        ),
        "video_grid_thw": torch.tensor([(2, 4, 4)]),
        **({"second_per_grid_ts": torch.tensor([1.5])} if model == "qwen2_5_vl" else {}),
    }


def with_frames(sample: dict[str, Any], seed: int) -> dict[str, Any]:
    """A sample and a video, as InternVL's processor has it: a tile a frame, with text between."""
    generator, num_frames = torch.Generator().manual_seed(seed), 3
    frame = torch.full((4,), IMAGE)
    texts = torch.randint(0, 50, (num_frames, 2), generator=generator)
    ids = torch.cat([sample["input_ids"], *(torch.cat([text, frame]) for text in texts), texts[0]])
    tiles = torch.randn(num_frames, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = ids.masked_fill(ids == IMAGE, -100)
    labels[: len(sample["labels"])] = sample["labels"]
    images = [sample["pixel_values"]] if "pixel_values" in sample else []
    return sample | {
        "input_ids": ids,
        "labels": labels,
        "pixel_values": torch.cat([*images, tiles]),
    }


def make_videos(model: str) -> list[dict[str, Any]]:
    """The samples; all but the first have a video."""
    samples = make_samples(model)
    videos = [
        with_frames(one, i) if model == "internvl" else with_video(model, one, i)
        for i, one in enumerate(samples[1:])
    ]
    return samples[:1] + videos
