"""Configurations of trainers: samples and tokens by their rules, or a refusal with its way out.

Sizes are worked out by hand from the rules: w x h is the size that a trainer makes of an image.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bascule.errors import ConfigError
from bascule.workload.manifest import Manifest, read_manifest
from bascule.workload.tokens import TokenRule

NAMES = ("width", "height", "frames")
IMAGES = [(1920, 1080), (300, 300), (640, 480), (512, 2048)]
CLIPS = [(832, 480, 124), (832, 480, 40), (480, 832, 20), (832, 480, 200)]


def read(folder: Path, config: str, bucket: str | None = None) -> Manifest:
    """Images, or clips where the configuration is of videos."""
    is_video = '"dataset_type": "video"' in config or "video_jsonl_file" in config
    rows = [dict(zip(NAMES, size, strict=False)) for size in (CLIPS if is_video else IMAGES)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path = folder / ("data.json" if config.startswith("[{") else "data.toml")
    path.write_text(config)
    return read_manifest(path, TokenRule(frame_stride=4 if is_video else None, bucket=bucket))


def kohya(keys: str) -> str:
    return f"[general]\n{keys}\n[[datasets]]\n[[datasets.subsets]]\nmetadata_file = 'rows.jsonl'\n"


def buckets(keys: str = "") -> str:
    return kohya(f"enable_bucket = true\nresolution = 1024\n{keys}")


def musubi(keys: str) -> str:
    return f"[general]\n{keys}\n[[datasets]]\nimage_jsonl_file = 'rows.jsonl'\n"


def clips(keys: str) -> str:
    keys = f"resolution = [832, 480]\n{keys}"
    return f"[general]\n{keys}\n[[datasets]]\nvideo_jsonl_file = 'rows.jsonl'\n"


def simpletuner(**keys: Any) -> str:
    named = {"id": "mine", "instance_data_dir": "rows.jsonl", "resolution": 1024}
    return json.dumps([named | keys])


def simple_clips(**keys: Any) -> str:
    return simpletuner(dataset_type="video", resolution=480, **keys)


AREA = "1344x768 1024x1024 1152x896 512x2048"


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (buckets(), "1024x576 1024x1024 1024x768 256x1024"),
        (buckets("max_bucket_reso = 2048"), AREA),
        (  # 640, in steps
            buckets("max_bucket_reso = 2048\nmin_bucket_reso = 700"),
            "1344x768 1024x1024 1152x896 640x1600",
        ),
        (
            buckets("bucket_no_upscale = true\nbatch_size = 4\ncaption_prefix = 'a'"),
            "1344x768 256x256 640x448 512x2048",
        ),
        (kohya("resolution = '768,512'\nnum_repeats = 2"), "768x512 " * 8),
        (
            musubi("resolution = [1024, 1024]\nenable_bucket = true"),
            "1360x768 1024x1024 1184x880 512x2048",
        ),
        (
            musubi("resolution = 1024\nenable_bucket = true\nbucket_no_upscale = true"),
            "1360x768 288x288 640x480 512x2048",
        ),
        (musubi(""), "960x544 " * 4),
        (musubi("num_repeats = 2"), "960x544 " * 8),
        (simpletuner(resolution_type="pixel_area"), AREA),
        (
            simpletuner(resolution_type="pixel", resolution=512, repeats=1),
            "896x512 512x512 704x512 512x2048 " * 2,
        ),
        (simpletuner(crop=True, crop_style="center"), "1024x1024 " * 4),
        (simpletuner(minimum_image_size=600), "1344x768 512x2048"),
        (
            simpletuner(resolution_type="area", resolution=1.0, minimum_image_size=0.3),
            "1344x768 1152x896 512x2048",
        ),
        (
            simpletuner(resolution_type="pixel", resolution=1024, minimum_image_size=480),
            "1792x1024 1344x1024 1024x4096",
        ),
        (simpletuner(minimum_aspect_ratio=0.5, maximum_aspect_ratio=1.5), "1024x1024 1152x896"),
    ],
)
def test_images(config: str, sizes: str, tmp_path: Path) -> None:
    pixels = [map(int, size.split("x")) for size in sizes.split()]
    assert read(tmp_path, config).lens.tolist() == [w // 16 * (h // 16) for w, h in pixels]


@pytest.mark.parametrize(
    ("config", "without"),
    [
        (buckets("is_reg = false\nvalidation_split = 0.0"), buckets()),
        (simpletuner(crop=True, crop_aspect="preserve", minimum_image_size=0), simpletuner()),
        (simpletuner(probability=1, type="local", metadata_backend="discovery"), simpletuner()),
    ],
)
def test_keys_that_change_nothing(config: str, without: str, tmp_path: Path) -> None:
    assert read(tmp_path, config).lens.tolist() == read(tmp_path, without).lens.tolist()


@pytest.mark.parametrize(
    ("config", "frames"),
    [
        (clips("target_frames = [1, 25, 121, 150]"), [1] * 4 + [7] * 3 + [31] * 2 + [38]),
        (clips(""), [1] * 4),
        (clips("target_frames = [45]\nframe_extraction = 'chunk'"), [12] * 6),
        (
            clips("target_frames = [25]\nframe_extraction = 'slide'\nframe_stride = 50"),
            [7] * (2 + 1 + 4),
        ),
        (
            clips("target_frames = [37]\nframe_extraction = 'uniform'\nframe_sample = 9"),
            [10] * (9 + 4 + 9),  # of 40 frames, 4 places are unlike
        ),
        (clips("frame_extraction = 'full'\nmax_frames = 100"), [25, 10, 5, 25]),
        (simple_clips(video={"num_frames": 41}), [11] * 2),
        (
            simple_clips(
                video={"num_frames": 17, "min_frames": 20, "max_frames": 150, "is_i2v": True}
            ),
            [5] * 3,
        ),
    ],
)
def test_latent_frames_of_clips(config: str, frames: list[int], tmp_path: Path) -> None:
    assert read(tmp_path, config).grids[:, 0].tolist() == frames


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (buckets("num_repeats = 0\n[[datasets]]\n[[datasets.subsets]]"), "none of"),
        (kohya("enable_bucket = true"), "has no resolution: write what the trainer's options"),
        (kohya("enable_bucket = true\nresolution = 1536"), "max_bucket_reso 1024"),
        (buckets("bucket_reso_steps = 'x'"), "bucket_reso_steps is 'x'"),
        (buckets("min_bucket_reso = 10"), "min_bucket_reso is 10"),
        (kohya("resolution = 'a,b'"), "resolution is 'a'"),
        (kohya("resolution = []"), "resolution is None"),
        (musubi("resolution = 512.5"), "resolution is 512.5"),
        (musubi("resolution = 5"), "resolution is 5"),
        (simpletuner(video=3), "where keys belong"),
        (buckets("is_reg = true"), "is_reg = True"),
        (buckets("validation_split = 0.1"), "validation_split = 0.1"),
        (buckets("a_new_key = 3"), "a_new_key = 3"),
        (f"[model]\na = 1\n{buckets()}", "model = {'a': 1}"),
        (musubi("control_directory = 'c'"), "control_directory = 'c'"),
        (musubi("multiple_target = true"), "multiple_target = True"),
        (simpletuner(crop=True, crop_aspect="closest"), "crop_aspect = 'closest'"),
        (simpletuner(dataset_type="audio"), "dataset_type = 'audio'"),
        (simpletuner(conditioning_data="a"), "--columns reference=NAME"),
        (simpletuner(max_num_samples=10), "max_num_samples = 10"),
        (simpletuner(probability=0.5), "probability = 0.5"),
        (simpletuner(type="huggingface"), "type = 'huggingface'"),
        (simpletuner(resolution=None), "has no resolution"),
        (
            simpletuner(minimum_image_size=9000),
            "samples: 4 are left out by its keys: give the file",
        ),
        (clips("frame_extraction = 'half'"), "frame_extraction is 'half'"),
        (clips("source_fps = 30.0"), "source_fps = 30.0"),
        (simple_clips(video={"num_frames": 9, "bucket_strategy": 1}), "video.bucket_strategy = 1"),
        (simple_clips(), "has no video.num_frames"),
    ],
)
def test_keys_that_are_refused(config: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        read(tmp_path, config)


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    left_out = read(tmp_path, clips("target_frames = [25, 121]")).summary()[-1]
    assert left_out == "Left out by the keys of the configuration: 3."


def test_the_ways_out_of_a_refusal(tmp_path: Path) -> None:
    """The data themselves; a copy without the key; and --bucket in place of its sizes."""
    with pytest.raises(ConfigError, match=r"give rows.jsonl itself, with --bucket"):
        read(tmp_path, buckets("a_new_key = 3"))
    itself = read_manifest(tmp_path / "rows.jsonl", TokenRule(bucket="1024:64"))
    assert itself.lens[1] == 64 * 64
    assert len(read(tmp_path, buckets())) == 4
    assert read(tmp_path, buckets(), "512x512").lens.tolist() == [32 * 32] * 4


@pytest.mark.parametrize("kind", ["controlnet", "mask", "reference_strict"])
def test_conditions_are_tokens_or_not(kind: str, tmp_path: Path) -> None:
    sets = json.loads(simpletuner(conditioning_data="other"))
    sets.append({"id": "other", "dataset_type": "conditioning", "conditioning_type": kind})
    if kind == "reference_strict":
        with pytest.raises(ConfigError, match="conditioning_data = 'other'"):
            read(tmp_path, json.dumps(sets))
    else:
        assert len(read(tmp_path, json.dumps(sets))) == 4


def test_references_have_the_size_of_their_image(tmp_path: Path) -> None:
    """In a table that a configuration names, as trainers scale them by default."""
    config = musubi("resolution = 1024\nenable_bucket = true")
    (tmp_path / "data.toml").write_text(config)
    line = {"width": 640, "height": 480, "control_path_0": "x.png", "control_path_1": "y.png"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(line))
    with pytest.raises(ConfigError, match="reference=control_path_0"):
        read_manifest(tmp_path / "data.toml")
    columns = {"reference": "control_path_0"}
    assert read_manifest(tmp_path / "data.toml", columns=columns).lens == [3 * 74 * 55]
