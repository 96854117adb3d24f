"""Read configurations of trainers: the data sets that they name, and how rows become samples.

A key is applied as its trainer applies it, or is ignored as harmless, or is refused by name.
Sources: `library/train_util.py` of sd-scripts, `dataset/bucket.py` and `image_video_dataset.py` of
musubi-tuner, `multiaspect/image.py` and `metadata/backends/base.py` of SimpleTuner.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bascule.arrays import Floats
from bascule.checks import choice, number, shown, whole
from bascule.errors import ConfigError
from bascule.workload.tokens import nearest

Clip = Callable[[Floats], tuple[Floats, Floats]]
"""Turns frames of rows into frames of samples, and the number of samples of each row."""
Taken = tuple[Floats, Floats, Floats, Floats]
Take = Callable[[Floats, Floats, Floats], Taken]
"""Turns width, height and frames of rows into sizes of samples, and their number for each row."""

_LISTS = ("metadata_file", "image_jsonl_file", "video_jsonl_file")
_FOLDERS = ("image_dir", "image_directory", "video_directory", "instance_data_dir")
_HARMLESS = frozenset(
    """alpha_mask batch_size cache_dir cache_dir_conditioning_image_embeds cache_dir_vae
    cache_directory cache_info caption_dropout_every_n_epochs caption_dropout_rate
    caption_filter_list caption_prefix caption_separator caption_shuffle caption_strategy
    caption_suffix caption_tag_dropout_rate class_tokens color_aug compress_cache
    conditioning_data_dir conditioning_image_embed_batch_size conditioning_image_embeds
    crop_aspect_buckets crop_style custom_attributes debug_dataset default
    disable_multiline_split disable_validation enable_wildcard face_crop_aug_range flip_aug
    hash_filenames id image_embeds instance_prompt is_regularisation_data is_regularization_data
    keep_tokens keep_tokens_separator max_upscale_threshold maximum_image_size
    metadata_update_interval network_multiplier only_instance_prompt prepend_instance_prompt
    preserve_data_backend_cache prior_loss_weight random_crop resize_interpolation
    secondary_separator shorten_filenames shuffle_caption skip_file_discovery
    target_downsample_size text_cache_disable text_cache_ondemand text_embeds
    timestep_sampling_offset token_warmup_min token_warmup_step train_batch_size
    vae_cache_clear_each_epoch vae_cache_disable vae_cache_ondemand validation_seed
    video.frame_interval video.is_i2v""".split()
)
_NEUTRAL: dict[str, object] = {  # keys that are harmless with this value, or if they are off
    **dict.fromkeys("is_reg multiple_target no_resize_control validation_split".split()),
    **dict.fromkeys("end_epoch end_step max_num_samples start_step".split()),
    **{"probability": 1, "start_epoch": 1, "type": "local", "metadata_backend": "discovery"},
    "video.bucket_strategy": "aspect_ratio",
}
_REFERENCES = ("control_directory", "conditioning", "conditioning_data")
_SQUARES = {0.25: 512, 0.5: 768, 1.0: 1024, 2.0: 1536, 4.0: 2048}  # of SimpleTuner, by megapixels


@dataclass(frozen=True, slots=True)
class DataSet:
    """A folder or a table that a configuration names.

    Attributes:
        places: Paths of its data; the first that exists is read.
        takes: Functions from rows to samples, one for each time that the rows are trained on.
        captions: Suffixes of the files with captions.
        only_captioned: True if images without a caption file are left out.
        is_deep: True if images in subfolders are samples, too.
        has_clips: True if it has clips, whose frames must be known.
    """

    places: list[str]
    takes: list[Take]
    captions: tuple[str, ...] = (".txt",)
    only_captioned: bool = False
    is_deep: bool = False
    has_clips: bool = False


class _Keys:
    """The keys of a data set; keys that nothing reads must be harmless."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        inner = {f"video.{key}": value for key, value in values.get("video", {}).items()}
        outer = values.keys() - {"datasets", "subsets", "video"}
        self.path, self._left = path, {k: v for k, v in values.items() if k in outer} | inner
        self.names = [name for name in (*_LISTS, *_FOLDERS) if self._left.get(name)]
        self.places = [str(self._left.pop(name)) for name in self.names]

    def pop(self, key: str, default: Any = None) -> Any:
        value = self._left.pop(key, None)
        return default if value is None else value

    def needed(self, key: str, default: Any = None) -> Any:
        if (value := self.pop(key, default)) is None:
            raise ConfigError(f"{self.path}: has no {key}: write what the trainer's options say")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return number(f"{self.path}: {key}", self.needed(key, default), 0.0, 2.0**16)

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        return whole(f"{self.path}: {key}", self.needed(key, default), least, 2**16)

    def wholes(self, key: str, default: list[int] | None = None, least: int = 1) -> list[int]:
        value = self.needed(key, default)
        parts = value.split(",") if isinstance(value, str) else np.ravel(value).tolist()
        parts = [int(x) if isinstance(x, str) and x.strip().isdigit() else x for x in parts]
        return [whole(f"{self.path}: {key}", part, least, 2**16) for part in parts or [None]]

    def refusal(self, key: str, value: object) -> ConfigError:
        place = next(iter(self.places), "the folder or table of its data")
        advice = f"give {place} itself, with --bucket and --max-frames as the trainer makes samples"
        if key in _REFERENCES:
            advice = "give a table with a column of these pictures, and --columns reference=NAME"
        return ConfigError(
            f"{self.path}: bascule does not apply {key} = {shown(value)}, which may change which "
            f"samples are trained or how long they are: {advice}; or, if it changes neither, "
            "delete it in a copy of the file"
        )

    def end(self, takes: list[Take], times: int, **fields: Any) -> DataSet:
        """Make the data set; refuse keys that nothing read, unless they are harmless."""
        for key, value in self._left.items():
            is_off = key in _NEUTRAL and (not value or value == _NEUTRAL[key])
            if key not in _HARMLESS and not is_off:
                raise self.refusal(key, value)
        if not self.places:
            raise ConfigError(f"{self.path}: a data set has none of {', '.join(_LISTS + _FOLDERS)}")
        return DataSet(self.places, takes * times, **fields)


def data_sets(path: Path, value: Any) -> Iterator[DataSet]:
    """Yield the data sets of a configuration; `value` is the content of the .toml or .json file."""
    if isinstance(value, list):
        kinds = {entry.get("id"): entry.get("conditioning_type") for entry in value}
        sets = [_simpletuner(_Keys(path, entry), kinds) for entry in value]
    elif "directory" in value:
        wrong = f"{path}: areas and buckets of [[directory]] of diffusion-pipe are not supported"
        raise ConfigError(f"{wrong}: give the folder of its path, and for example --bucket 512:16")
    elif "datasets" in value:
        general = value.pop("general", {})
        sets = [
            _kohya(_Keys(path, value | general | entry | subset))
            for entry in value["datasets"]
            for subset in entry.get("subsets", ({},))
        ]
    else:
        wrong = f"{path}: has no [[datasets]], as configurations of sd-scripts or musubi-tuner have"
        raise ConfigError(f"{wrong}: give the folder or the table of your data")
    yield from (data for data in sets if data is not None and data.takes)


def _kohya(keys: _Keys) -> DataSet:
    """Read a data set of sd-scripts or musubi-tuner, which differ in the keys of their data."""
    is_musubi = not {"metadata_file", "image_dir"}.intersection(keys.names)
    has_clips = any(name.startswith("video") for name in keys.names)
    default = [960, 544] if is_musubi else None
    width, height = (keys.wholes("resolution", default, 32) * 2)[:2]
    area, step = width * height, 16 if is_musubi else keys.whole("bucket_reso_steps", 64)
    side, least, most = math.isqrt(area), 1, 2**16
    if is_musubi:
        sizes = [(w, area // w // 16 * 16) for w in range(max(side // 32, 1) * 16, side + 16, 16)]
    else:
        least = keys.whole("min_bucket_reso", 256, step) // step * step
        most = -(-keys.whole("max_bucket_reso", 1024) // step) * step
        sizes = [(w, min(most, area // w // step * step)) for w in range(least, most + 1, step)]
        sizes = [(side // step * step,) * 2, *(pair for pair in sizes if pair[1] >= least)]
    is_bucketed, no_upscale = keys.pop("enable_bucket"), keys.pop("bucket_no_upscale")
    if has_clips:  # for clips musubi-tuner reads neither key
        is_bucketed, no_upscale = True, False
    if is_bucketed and not least <= min(width, height) <= max(width, height) <= most:
        wrong = f"{keys.path}: resolution {width} x {height} is not within min_bucket_reso {least}"
        raise ConfigError(f"{wrong} and max_bucket_reso {most}: copy the options of sd-scripts")
    table = np.array(
        [*sizes, *(pair[::-1] for pair in sizes)] if is_bucketed else [(width, height)]
    )

    def take(clip: Clip, wide: Floats, tall: Floats, frames: Floats) -> Taken:
        after = nearest(table, wide, tall)
        if is_bucketed and no_upscale:  # small images are cut, not scaled
            after = after if is_musubi else _shrink(area, step, wide, tall)
            pairs, is_small = zip((wide, tall), after, strict=True), wide * tall <= area
            wide, tall = (np.where(is_small, old // step * step, new) for old, new in pairs)
            after = wide, tall
        return *after, *clip(frames)

    caption = keys.pop("caption_extension")
    return keys.end(
        [partial(take, clip) for clip in (_extractions(keys) if has_clips else [_whole_clip])],
        keys.whole("num_repeats", 1, 0),
        captions=(str(caption),) if caption else (".txt", ".caption"),
        only_captioned=bool(is_musubi and caption),
        has_clips=has_clips,
    )


def _whole_clip(frames: Floats) -> tuple[Floats, Floats]:
    return frames, np.ones_like(frames)


def _extractions(keys: _Keys) -> list[Clip]:
    """Return the functions by which musubi-tuner cuts clips of each length out of longer ones."""
    kinds = ("head", "chunk", "slide", "uniform", "full")
    kind = choice(f"{keys.path}: frame_extraction", keys.pop("frame_extraction", "head"), *kinds)
    most, stride = keys.whole("max_frames", 129), keys.whole("frame_stride", 1)
    num, targets = keys.whole("frame_sample", 1), keys.wholes("target_frames", [1])

    def clip(target: int, frames: Floats) -> tuple[Floats, Floats]:
        if kind == "full":
            return (np.minimum(frames, most) - 1) // 4 * 4 + 1, np.ones_like(frames)
        left = frames - target
        times = {"chunk": frames // target, "slide": left // stride + 1}
        times["uniform"] = np.minimum(left + 1, num)  # equal clips are one sample
        return np.full_like(frames, target), np.where(left < 0, 0.0, times.get(kind, 1.0))

    targets = sorted({(target - 1) // 4 * 4 + 1 for target in targets})
    return [partial(clip, target) for target in (targets if kind != "full" else [1])]


def _simpletuner(keys: _Keys, kinds: dict[object, object]) -> DataSet | None:
    """Read a data set of SimpleTuner; None if it is off, or has no samples to train on."""
    kind, is_off = keys.pop("dataset_type", "image"), keys.pop("disabled") or keys.pop("disable")
    if is_off or kind not in ("image", "video", "audio", "caption"):
        return None
    unit, crop = keys.pop("resolution_type", "pixel_area"), keys.pop("crop")
    aspect, linked = keys.pop("crop_aspect", "square"), keys.pop("conditioning_data", [])
    links = {kinds.get(name) for name in np.ravel(linked).tolist()}
    for key, value, is_legal in (
        ("dataset_type", kind, kind in ("image", "video")),
        ("conditioning_data", linked, links <= {"controlnet", "mask"}),
        ("resolution_type", unit, unit in ("pixel_area", "area", "pixel")),
        ("crop_aspect", aspect, not crop or aspect in ("square", "preserve")),
    ):
        if not is_legal:
            raise keys.refusal(key, value)
    is_square, is_edge = bool(crop) and aspect == "square", unit == "pixel"
    resolution, least = keys.number("resolution"), keys.number("minimum_image_size", 0.0)
    low, high = keys.number("minimum_aspect_ratio", 0.0), keys.number("maximum_aspect_ratio", 0.0)
    area = resolution * 1e6 if unit == "area" else resolution**2
    least *= 1e6 if unit == "area" or (unit == "pixel_area" and least <= 10.0) else least
    edge = resolution if is_edge else _align(math.isqrt(int(area)))
    named = [side for size, side in _SQUARES.items() if abs(area / 1e6 - size) < 0.05]
    square = named[0] if named and not is_edge else edge
    num, shortest, longest = 1, 1, 2**16
    if kind == "video":
        num = keys.whole("video.num_frames")
        shortest = keys.whole("video.min_frames", num)
        longest = keys.whole("video.max_frames", longest)

    def take(wide: Floats, tall: Floats, frames: Floats) -> Taken:
        is_used = (wide * tall >= least) | is_edge
        is_used &= (np.minimum(wide, tall) >= math.isqrt(int(least))) | (not (is_edge or is_square))
        is_used &= (frames >= shortest) & (frames <= longest)
        ratio, is_upright = np.maximum(np.round(wide / tall, 2), 0.01), wide < tall
        if is_edge:  # the resolution is that of the shorter side
            wide = np.where(is_upright, edge, np.floor(edge * ratio))
            tall = np.where(is_upright, np.floor(edge / ratio), edge)
        else:
            wide, tall = edge * np.sqrt(ratio), edge / np.sqrt(ratio)
        wide, tall = _align(wide), _align(tall)
        ratio = np.where(is_square, 1.0, np.round(wide / tall, 2))
        is_used &= (ratio >= low) & (ratio <= (high or np.inf))
        wide, tall = (np.where(ratio == 1.0, square, side) for side in (wide, tall))
        return wide, tall, np.full_like(frames, num), is_used.astype(np.float64)

    times = keys.whole("repeats", 0, 0) + 1
    return keys.end([take], times, is_deep=True, has_clips=kind == "video")


def _shrink(area: int, step: int, wide: Floats, tall: Floats) -> tuple[Floats, Floats]:
    """Scale to an area; the side that keeps the aspect ratio better is in whole steps."""

    def stepped(side: Floats) -> Floats:
        return np.maximum(np.floor(side + 0.5) // step * step, 1.0)

    ratio = wide / tall
    by_width, by_height = stepped(np.sqrt(area * ratio)), stepped(area / np.sqrt(area * ratio))
    off_width = np.abs(by_width / stepped(by_width / ratio) - ratio)
    is_by_width = off_width < np.abs(stepped(by_height * ratio) / by_height - ratio)
    wide = np.where(is_by_width, by_width, np.floor(by_height * ratio + 0.5))
    tall = np.where(is_by_width, np.floor(by_width / ratio + 0.5), by_height)
    return wide // step * step, tall // step * step


def _align(side: Any) -> Any:
    """Round sides to whole steps of SimpleTuner."""
    return np.maximum(np.round(side / 64), 1.0) * 64
