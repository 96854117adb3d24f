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

IMAGES = [(1920, 1080), (300, 300), (640, 480), (512, 2048)]
CLIPS = [(832, 480, 124), (832, 480, 40), (480, 832, 20), (832, 480, 200)]


def rows(sizes: list[tuple[int, ...]]) -> str:
    names = ("width", "height", "frames")
    return "".join(json.dumps(dict(zip(names, size, strict=False))) + "\n" for size in sizes)


def read(
    folder: Path, config: str, rule: TokenRule, sizes: list[tuple[int, ...]], **options: Any
) -> Manifest:
    (folder / "rows.jsonl").write_text(rows(sizes))
    path = folder / ("data.json" if config.startswith("[{") else "data.toml")
    path.write_text(config)
    return read_manifest(path, rule, **options)


def tokens(*sizes: tuple[int, int]) -> list[int]:
    return [w // 16 * (h // 16) for w, h in sizes]


def kohya(keys: str) -> str:
    return f"[general]\n{keys}\n[[datasets]]\n[[datasets.subsets]]\nmetadata_file = 'rows.jsonl'\n"


def musubi(keys: str, kind: str = "image") -> str:
    return f"[general]\n{keys}\n[[datasets]]\n{kind}_jsonl_file = 'rows.jsonl'\n"


def simpletuner(**keys: Any) -> str:
    named = {"id": "mine", "instance_data_dir": "rows.jsonl", "resolution": 1024}
    return json.dumps([named | keys])


BUCKETS = "enable_bucket = true\nresolution = 1024\n"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (kohya(BUCKETS), tokens((1024, 576), (1024, 1024), (1024, 768), (256, 1024))),
        (
            kohya(BUCKETS + "max_bucket_reso = 2048"),
            tokens((1344, 768), (1024, 1024), (1152, 896), (512, 2048)),
        ),
        (
            kohya(BUCKETS + "max_bucket_reso = 2048\nmin_bucket_reso = 700"),  # 640, in steps
            tokens((1344, 768), (1024, 1024), (1152, 896), (640, 1600)),
        ),
        (
            kohya(BUCKETS + "bucket_no_upscale = true\nbatch_size = 4\ncaption_prefix = 'a'"),
            tokens((1344, 768), (256, 256), (640, 448), (512, 2048)),
        ),
        (kohya("resolution = '768,512'\nnum_repeats = 2"), tokens(*[(768, 512)] * 4) * 2),
        (kohya(BUCKETS + "num_repeats = 0\n[[datasets]]\n[[datasets.subsets]]"), "none of"),
        (kohya("enable_bucket = true"), "says no resolution: write what the trainer's options"),
        (kohya("enable_bucket = true\nresolution = 1536"), "max_bucket_reso 1024, as sd-scripts"),
        (kohya(BUCKETS + "bucket_reso_steps = 'x'"), "bucket_reso_steps is 'x'"),
        (kohya(BUCKETS + "min_bucket_reso = 10"), "min_bucket_reso is 10"),
        (kohya("resolution = 'a,b'"), "resolution is 'a'"),
        (kohya("resolution = []"), "resolution is None"),
        (musubi("resolution = 512.5"), "resolution is 512.5"),
        (musubi("resolution = 5"), "resolution is 5"),
        (simpletuner(video=3), "where keys belong"),
        (kohya(BUCKETS + "is_reg = false\nvalidation_split = 0.0"), None),
        (kohya(BUCKETS + "is_reg = true"), "is_reg = True"),
        (kohya(BUCKETS + "validation_split = 0.1"), "validation_split = 0.1"),
        (kohya(BUCKETS + "a_new_key = 3"), "a_new_key = 3"),
        (f"[model]\na = 1\n{kohya(BUCKETS)}", "model = {'a': 1}"),
        (
            musubi("resolution = [1024, 1024]\nenable_bucket = true"),
            tokens((1360, 768), (1024, 1024), (1184, 880), (512, 2048)),
        ),
        (
            musubi("resolution = 1024\nenable_bucket = true\nbucket_no_upscale = true"),
            tokens((1360, 768), (288, 288), (640, 480), (512, 2048)),
        ),
        (musubi(""), tokens(*[(960, 544)] * 4)),
        (musubi("num_repeats = 2"), tokens(*[(960, 544)] * 8)),
        (musubi("control_directory = 'c'"), "control_directory = 'c'"),
        (musubi("multiple_target = true"), "multiple_target = True"),
        (
            simpletuner(resolution_type="pixel_area"),
            tokens((1344, 768), (1024, 1024), (1152, 896), (512, 2048)),
        ),
        (
            simpletuner(resolution_type="pixel", resolution=512, repeats=1),
            tokens((896, 512), (512, 512), (704, 512), (512, 2048)) * 2,
        ),
        (simpletuner(crop=True, crop_style="center"), tokens(*[(1024, 1024)] * 4)),
        (simpletuner(crop=True, crop_aspect="preserve", minimum_image_size=0), None),
        (simpletuner(minimum_image_size=600), tokens((1344, 768), (512, 2048))),
        (
            simpletuner(resolution_type="area", resolution=1.0, minimum_image_size=0.3),
            tokens((1344, 768), (1152, 896), (512, 2048)),
        ),
        (
            simpletuner(resolution_type="pixel", resolution=1024, minimum_image_size=480),
            tokens((1792, 1024), (1344, 1024), (1024, 4096)),
        ),
        (
            simpletuner(minimum_aspect_ratio=0.5, maximum_aspect_ratio=1.5),
            tokens((1024, 1024), (1152, 896)),
        ),
        (simpletuner(crop=True, crop_aspect="closest"), "crop_aspect = 'closest'"),
        (simpletuner(dataset_type="audio"), "dataset_type = 'audio'"),
        (simpletuner(conditioning_data="a"), "--columns reference=NAME"),
        (simpletuner(max_num_samples=10), "max_num_samples = 10"),
        (simpletuner(probability=0.5), "probability = 0.5"),
        (simpletuner(type="huggingface"), "type = 'huggingface'"),
        (simpletuner(probability=1, type="local", metadata_backend="discovery"), None),
        (simpletuner(resolution=None), "says no resolution"),
        (
            simpletuner(minimum_image_size=9000),
            "samples: 4 are left out by its keys: give the file",
        ),
    ],
)
def test_images(config: str, expected: list[int] | str | None, tmp_path: Path) -> None:
    """None: read like the same configuration without these keys."""
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            read(tmp_path, config, TokenRule(), IMAGES)
        return
    found = read(tmp_path, config, TokenRule(), IMAGES).lens.tolist()
    default = kohya(BUCKETS) if "general" in config else simpletuner()
    assert found == (expected or read(tmp_path, default, TokenRule(), IMAGES).lens.tolist())


VIDEO = "resolution = [832, 480]\n"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            musubi(VIDEO + "target_frames = [1, 25, 121, 150]", "video"),
            [1] * 4 + [7] * 3 + [31] * 2 + [38],
        ),
        (musubi(VIDEO, "video"), [1] * 4),
        (musubi(VIDEO + "target_frames = [45]\nframe_extraction = 'chunk'", "video"), [12] * 6),
        (
            musubi(
                VIDEO + "target_frames = [25]\nframe_extraction = 'slide'\nframe_stride = 50",
                "video",
            ),
            [7] * (2 + 1 + 4),
        ),
        (
            musubi(
                VIDEO + "target_frames = [37]\nframe_extraction = 'uniform'\nframe_sample = 9",
                "video",
            ),
            [10] * (9 + 4 + 9),  # of 40 frames, 4 places are unlike
        ),
        (musubi(VIDEO + "frame_extraction = 'full'\nmax_frames = 100", "video"), [25, 10, 5, 25]),
        (musubi(VIDEO + "frame_extraction = 'half'", "video"), "frame_extraction is 'half'"),
        (musubi(VIDEO + "source_fps = 30.0", "video"), "source_fps = 30.0"),
        (simpletuner(dataset_type="video", resolution=480, video={"num_frames": 41}), [11] * 2),
        (
            simpletuner(
                dataset_type="video",
                resolution=480,
                video={"num_frames": 17, "min_frames": 20, "max_frames": 150, "is_i2v": True},
            ),
            [5] * 3,
        ),
        (
            simpletuner(dataset_type="video", video={"num_frames": 9, "bucket_strategy": "x"}),
            "video.bucket_strategy = 'x'",
        ),
        (simpletuner(dataset_type="video"), "says no video.num_frames"),
    ],
)
def test_clips(config: str, expected: list[int] | str, tmp_path: Path) -> None:
    """Latent frames of the samples of all clips."""
    rule = TokenRule(frame_stride=4)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            read(tmp_path, config, rule, CLIPS)
        return
    manifest = read(tmp_path, config, rule, CLIPS)
    assert manifest.grids[:, 0].tolist() == expected


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    config = musubi(VIDEO + "target_frames = [25, 121]", "video")
    manifest = read(tmp_path, config, TokenRule(frame_stride=4), CLIPS)
    assert manifest.summary()[-1] == "Left out by the keys of the configuration: 3."


def test_the_ways_out_of_a_refusal(tmp_path: Path) -> None:
    """The data themselves; a copy without the key; and --bucket in place of its sizes."""
    config = kohya(BUCKETS + "a_new_key = 3")
    with pytest.raises(ConfigError, match=r"give rows.jsonl itself, with --bucket"):
        read(tmp_path, config, TokenRule(), IMAGES)
    itself = read_manifest(tmp_path / "rows.jsonl", TokenRule(bucket="1024:64"))
    assert itself.lens[1] == 64 * 64
    assert len(read(tmp_path, kohya(BUCKETS), TokenRule(), IMAGES)) == 4
    chosen = read(tmp_path, kohya(BUCKETS), TokenRule(bucket="512x512"), IMAGES)
    assert chosen.lens.tolist() == [32 * 32] * 4


@pytest.mark.parametrize("kind", ["controlnet", "mask", "reference_strict"])
def test_conditions_are_tokens_or_not(kind: str, tmp_path: Path) -> None:
    sets = json.loads(simpletuner(conditioning_data="other"))
    sets.append({"id": "other", "dataset_type": "conditioning", "conditioning_type": kind})
    if kind == "reference_strict":
        with pytest.raises(ConfigError, match="conditioning_data = 'other'"):
            read(tmp_path, json.dumps(sets), TokenRule(), IMAGES)
    else:
        assert len(read(tmp_path, json.dumps(sets), TokenRule(), IMAGES)) == 4


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
