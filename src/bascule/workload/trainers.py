"""Configurations of trainers: the data sets that they name, and what becomes of their samples.

A key is applied as its trainer applies it, or is listed as harmless, or ends the command by name.
Sources: `library/train_util.py` of sd-scripts, `dataset/bucket.py` and `image_video_dataset.py` of
musubi-tuner, `multiaspect/image.py` of SimpleTuner, `utils/dataset.py` of diffusion-pipe.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from bascule.arrays import Bools, Floats
from bascule.errors import ConfigError
from bascule.plan.checks import choice, number, shown, whole
from bascule.workload.tokens import TokenRule, nearest

Sides = tuple[Floats, Floats]
Size = Callable[[TokenRule, Floats, Floats], Sides]
"""Returns the width and height that a trainer makes of those of images, in pixels."""

Clip = Callable[[TokenRule, Floats, Floats], tuple[Floats, Floats]]
"""Returns the frames of a sample, and the number of such samples of a clip, by frames and rate."""

Keep = Callable[[Sides, Sides], Bools]
"""Says which samples are trained, by their sides before and after."""

_PLACES = (
    *("metadata_file", "image_jsonl_file", "video_jsonl_file", "image_dir", "image_directory"),
    *("video_directory", "instance_data_dir", "path"),
)
_MUSUBI = {"image_jsonl_file", "video_jsonl_file", "image_directory", "video_directory"}
_HARMLESS = frozenset(
    """alpha_mask batch_size cache_dir cache_dir_conditioning_image_embeds cache_dir_vae
    cache_directory cache_info cache_shuffle_delimiter caption_dropout_every_n_epochs
    caption_dropout_rate caption_filter_list caption_prefix caption_separator caption_shuffle
    caption_strategy caption_suffix caption_tag_dropout_rate class_tokens color_aug compress_cache
    conditioning_data_dir conditioning_image_embed_batch_size conditioning_image_embeds crop_aspect_buckets
    crop_style     custom_attributes debug_dataset default default_mask_file disable_multiline_split
    disable_validation enable_wildcard face_crop_aug_range flip_aug hash_filenames id image_embeds
    instance_prompt is_regularisation_data is_regularization_data keep_tokens
    keep_tokens_separator mask_path max_upscale_threshold maximum_image_size
    metadata_update_interval network_multiplier only_instance_prompt prepend_instance_prompt
    preserve_data_backend_cache prior_loss_weight random_crop resize_interpolation
    secondary_separator shorten_filenames shuffle_caption shuffle_metadata shuffle_tags
    skip_file_discovery target_downsample_size text_cache_disable text_cache_ondemand text_embeds
    timestep_sampling_offset token_warmup_min token_warmup_step train_batch_size
    vae_cache_clear_each_epoch vae_cache_disable vae_cache_ondemand validation_seed
    video.frame_interval video.is_i2v""".split()
)
_NEUTRAL: dict[str, tuple[object, ...]] = {  # values with which other keys change nothing
    **dict.fromkeys(("cache_shuffle_num", "probability", "start_epoch", "start_step"), (0, 1)),
    **dict.fromkeys(("fp_1f_no_post", "is_reg", "max_num_samples", "multiple_target"), (False,)),
    **dict.fromkeys(("no_resize_control", "online_captions", "validation_split"), (False,)),
    "metadata_backend": ("discovery",),
    "type": ("local",),
    "video.bucket_strategy": ("aspect_ratio",),
}
_REFERENCES = ("control_directory", "control_path", "conditioning", "conditioning_data")
_NAMED_SIDES = {0.25: 512, 0.5: 768, 1.0: 1024, 2.0: 1536, 4.0: 2048}  # of SimpleTuner's areas
_ALIGNED = 64  # pixels of its sides


@dataclass(frozen=True, slots=True)
class Take:
    """What a trainer makes of the images and clips of a data set."""

    size: Size
    clip: Clip = lambda rule, frames, fps: (rule.frames_taken(frames, fps), np.ones_like(frames))
    keep: Keep = lambda before, after: before[0] > 0.0

    def __call__(
        self, rule: TokenRule, width: Floats, height: Floats, frames: Floats, fps: Floats
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Return width, height and frames of samples, and how many such samples each gives."""
        sides = width, height
        after = self.size(rule, *sides)
        frames, times = self.clip(rule, frames, fps)
        return *after, frames, np.where(self.keep(sides, after), times, 0.0)


@dataclass(frozen=True, slots=True)
class DataSet:
    """A folder or a table that a configuration names.

    Attributes:
        places: Its data: the first of these that exists.
        takes: What the trainer makes of each row; an entry for each time that it is trained.
        captions: Endings of the files with captions.
        only_captioned: Images without such a file are no samples.
        is_deep: Images in folders of the folder are samples.
        has_clips: It has clips, whose frames are to be known.
        num_left_out: Images without a caption, which are no samples.
    """

    places: tuple[str, ...]
    takes: tuple[Take, ...]
    captions: tuple[str, ...] = (".txt",)
    only_captioned: bool = False
    is_deep: bool = False
    has_clips: bool = False
    num_left_out: int = 0


class _Keys:
    """The keys of a data set, of which those that nothing reads must be harmless."""

    def __init__(self, path: Path, *tables: object) -> None:
        self.path = path
        self._left: dict[str, Any] = {}
        for table in tables:
            if not isinstance(table, dict):
                raise ConfigError(f"{path}: {shown(table)} is no table of keys and values")
            self._left |= cast(dict[str, Any], table)
        video = self._left.pop("video", {})
        self._left |= {f"video.{key}": value for key, value in video.items()}
        self.places = {name: str(self._left.pop(name)) for name in _PLACES if name in self._left}

    def pop(self, key: str, default: Any = None) -> Any:
        value = self._left.pop(key, None)
        return default if value is None else value

    def needed(self, key: str, default: Any = None) -> Any:
        if (value := self.pop(key, default)) is None:
            raise ConfigError(
                f"{self.path}: says no {key}: write the one of the trainer's options into it, or "
                f"give {self._data}"
            )
        return value

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        return whole(f"{self.path}: {key}", self.needed(key, default), least, 2**16)

    def number(self, key: str, default: float | None = None) -> float:
        return number(f"{self.path}: {key}", self.needed(key, default), 0.0, 2.0**16)

    def several(self, key: str, default: Any = None) -> list[Any]:
        value = self.needed(key, default)
        return value if isinstance(value, list) else [value]

    def sides(self, default: list[int] | None = None) -> tuple[int, int]:
        value = self.several("resolution", default)
        texts = value[0].split(",") if isinstance(value[0], str) else value
        sides = [whole(f"{self.path}: resolution", int(side), 1, 2**14) for side in texts]
        return sides[0], sides[-1]

    def refusal(self, key: str, value: object) -> ConfigError:
        text = f"{self.path}: {key} = {shown(value)}"
        if key in _REFERENCES:
            return ConfigError(
                f"{text} names pictures that are tokens of Qwen-Image-Edit, Kontext, FLUX.2 and "
                "the like: give a table with a column of them, and --columns reference=NAME; or "
                "leave it out of a copy, for a model without"
            )
        return ConfigError(
            f"{text} may change which samples are trained or how long they are, and is not "
            f"applied: give {self._data}; or leave it out of a copy, if it does not"
        )

    def end(self, takes: Sequence[Take], times: int = 1, **fields: Any) -> DataSet:
        """Return the data set; refuse a key that nothing read, unless it is harmless."""
        for key, value in self._left.items():
            if not (
                key in _HARMLESS or (key in _NEUTRAL and (not value or value in _NEUTRAL[key]))
            ):
                raise self.refusal(key, value)
        if not self.places:
            raise ConfigError(f"{self.path}: a data set has none of the keys {', '.join(_PLACES)}")
        return DataSet(tuple(self.places.values()), tuple(takes) * times, **fields)

    @property
    def _data(self) -> str:
        place = next(iter(self.places.values()), "the folder or table of its data")
        return f"{place} itself, with --bucket and --max-frames as the trainer makes its samples"


def data_sets(path: Path, value: Any) -> Iterator[DataSet]:
    """Yield the data sets of a configuration, as it was read from .toml or .json."""
    sets: Iterable[DataSet | None]
    if isinstance(value, list):
        kinds = {one.get("id"): one.get("conditioning_type") for one in value}
        sets = (_simpletuner(_Keys(path, one), kinds) for one in value)
    elif not value.keys().isdisjoint(("directory", "datasets")):
        name = "directory" if "directory" in value else "datasets"
        ahead = {key: one for key, one in value.items() if key not in (name, "general")}
        if name == "datasets" and ahead:
            raise _Keys(path).refusal(*next(iter(ahead.items())))
        merged = [
            _Keys(path, value.get("general", {}), ahead, one, subset)
            for one in value[name]
            for subset in (one.pop("subsets", None) or ({},))
        ]
        reads = {"directory": _diffusion_pipe, "datasets": _kohya}[name]
        sets = (_musubi(keys) if keys.places.keys() & _MUSUBI else reads(keys) for keys in merged)
    else:
        raise ConfigError(
            f"{path}: has neither [[datasets]] (sd-scripts, musubi-tuner) nor [[directory]] "
            "(diffusion-pipe): give the folder or the table of your data"
        )
    yield from (one for one in sets if one is not None and one.takes)


def _kohya(keys: _Keys) -> DataSet:
    """Read a data set of sd-scripts."""
    width, height = keys.sides()
    step, area = keys.whole("bucket_reso_steps", 64), width * height
    least = keys.whole("min_bucket_reso", 256) // step * step
    most = -(-keys.whole("max_bucket_reso", 1024) // step) * step
    no_upscale = keys.pop("bucket_no_upscale")
    if not keys.pop("enable_bucket"):
        size = _nearest_of([(width, height)])
    elif least > min(width, height) or max(width, height) > most:
        raise ConfigError(
            f"{keys.path}: resolution {width} x {height} is not within min_bucket_reso {least} and "
            f"max_bucket_reso {most}, where sd-scripts ends: write the trainer's options "
            "--min_bucket_reso and --max_bucket_reso into it"
        )
    elif no_upscale:
        size = _not_enlarged(partial(_shrunk, area, step), area, step)
    else:
        side = math.isqrt(area) // step * step
        pairs = [(w, min(most, area // w // step * step)) for w in range(least, most + 1, step)]
        size = _nearest_of([(side, side), *(pair for pair in pairs if pair[1] >= least)])
    caption = keys.pop("caption_extension")
    captions = (str(caption),) if caption else (".txt", ".caption")
    return keys.end([Take(size)], keys.whole("num_repeats", 1, 0), captions=captions)


def _musubi(keys: _Keys) -> DataSet:
    """Read a data set of musubi-tuner."""
    width, height = keys.sides([960, 544])
    is_bucketed, no_upscale = keys.pop("enable_bucket"), keys.pop("bucket_no_upscale")
    area, side = width * height, math.isqrt(width * height)
    widths = range(max(side // 2 // 16, 1) * 16, side + 16, 16)
    size = _nearest_of([(w, area // w // 16 * 16) for w in widths])
    takes = [Take(size)]
    has_clips = not keys.places.keys().isdisjoint(("video_directory", "video_jsonl_file"))
    if has_clips:  # always in these buckets
        takes = [Take(size, clip) for clip in _extractions(keys)]
    elif not is_bucketed:
        takes = [Take(_nearest_of([(width, height)]))]
    elif no_upscale:
        takes = [Take(_not_enlarged(size, area, 16))]
    caption, times = keys.pop("caption_extension"), keys.whole("num_repeats", 1, 0)
    captions = (str(caption),) if caption else (".txt",)
    return keys.end(
        takes, times, captions=captions, only_captioned=bool(caption), has_clips=has_clips
    )


def _extractions(keys: _Keys) -> list[Clip]:
    """Return the clips that musubi-tuner cuts out of one, by their lengths."""
    kinds = ("head", "chunk", "slide", "uniform", "full")
    kind = choice(f"{keys.path}: frame_extraction", keys.pop("frame_extraction", "head"), *kinds)
    most, stride = keys.whole("max_frames", 129), keys.whole("frame_stride", 1)
    num, rate = keys.whole("frame_sample", 1), keys.number("source_fps", 0.0)
    named = [
        whole(f"{keys.path}: target_frames", one, 1) for one in keys.several("target_frames", 1)
    ]

    def clip(target: int, rule: TokenRule, frames: Floats, fps: Floats) -> tuple[Floats, Floats]:
        if rate and rule.fps is None:
            raise ConfigError(
                f"source_fps = {rate:g}: say how many frames of a second the model takes, such as "
                "--fps 16 for Wan, --fps 24 for HunyuanVideo"
            )
        if rate and rule.fps is not None:
            if (step := rule.fps / rate) < 1.0:  # frames that fall on the place of the last one go
                steps = np.append(0.0, np.full(int(frames.max(initial=1)) - 1, step))
                frames = np.floor(np.cumsum(steps))[frames.astype(np.int64) - 1] + 1
        else:
            frames = rule.frames_taken(frames, fps)
        if kind == "full":
            return (np.minimum(frames, most) - 1) // 4 * 4 + 1, np.ones_like(frames)
        left = frames - target
        times = {
            "head": np.ones_like(left),
            "chunk": frames // target,
            "slide": left // stride + 1,
            "uniform": np.minimum(left + 1, num),  # those at one place are one sample
        }
        return np.full_like(frames, target), np.where(left < 0, 0.0, times[kind])

    targets = sorted({(one - 1) // 4 * 4 + 1 for one in named})
    return [partial(clip, target) for target in (targets if kind != "full" else [1])]


def _simpletuner(keys: _Keys, kinds: dict[object, object]) -> DataSet | None:
    """Read a data set of SimpleTuner; None for one that is off, or of no samples of their own."""
    kind, is_off = keys.pop("dataset_type", "image"), keys.pop("disabled") or keys.pop("disable")
    if is_off or kind not in ("image", "video", "audio", "caption"):
        return None
    if kind not in ("image", "video"):
        raise keys.refusal("dataset_type", kind)
    for linked in keys.several("conditioning_data", []):
        if kinds.get(linked) not in ("controlnet", "mask"):
            raise keys.refusal("conditioning_data", linked)
    units = ("pixel_area", "area", "pixel")
    unit = choice(f"{keys.path}: resolution_type", keys.pop("resolution_type", units[0]), *units)
    crop, aspect = keys.pop("crop"), keys.pop("crop_aspect", "square")
    if crop and aspect not in ("square", "preserve"):
        raise keys.refusal("crop_aspect", aspect)
    is_cropped = bool(crop) and aspect == "square"
    given, least = keys.number("resolution"), keys.number("minimum_image_size", 0.0)
    low, high = keys.number("minimum_aspect_ratio", 0.0), keys.number("maximum_aspect_ratio", 0.0)
    area = given * 1e6 if unit == "area" else given**2
    least_area = least * 1e6 if unit == "area" or least <= 10.0 else least**2
    least_side = math.isqrt(int(least_area)) if is_cropped else 0.0
    if unit == "pixel":
        least_side, least_area = least, 0.0
    edge = given if unit == "pixel" else float(_aligned(math.isqrt(int(area))))
    named = [side for size, side in _NAMED_SIDES.items() if abs(area / 1e6 - size) < 0.05]
    square = named[0] if named and unit != "pixel" else edge

    def size(_: TokenRule, width: Floats, height: Floats) -> Sides:
        ratio = np.maximum(np.round(width / height, 2), 0.01)
        sides = edge * np.sqrt(ratio), edge / np.sqrt(ratio)
        if unit == "pixel":  # of the shorter side
            is_upright = width < height
            sides = np.where(is_upright, edge, np.floor(edge * ratio)), np.floor(edge / ratio)
            sides = sides[0], np.where(is_upright, sides[1], edge)
        wide, tall = (_aligned(side) for side in sides)
        is_square = (np.round(wide / tall, 2) == 1.0) | is_cropped
        return np.where(is_square, square, wide), np.where(is_square, square, tall)

    def keep(before: Sides, after: Sides) -> Bools:
        (width, height), ratio = before, np.round(after[0] / after[1], 2)
        is_large = (np.minimum(width, height) >= least_side) & (width * height >= least_area)
        return is_large & (ratio >= low) & (ratio <= (high or np.inf))

    times, has_clips = keys.whole("repeats", 0, 0) + 1, kind == "video"
    take = Take(size, keep=keep)
    if has_clips:
        num = keys.whole("video.num_frames")
        shortest, longest = (
            keys.whole("video.min_frames", num),
            keys.whole("video.max_frames", 2**16),
        )
        take = Take(size, partial(_cut, num, shortest, longest), keep)
    return keys.end([take], times, is_deep=True, has_clips=has_clips)


def _cut(
    num: int, shortest: int, longest: int, rule: TokenRule, frames: Floats, fps: Floats
) -> tuple[Floats, Floats]:
    """Take a part of each clip that is neither too short nor too long, as SimpleTuner does."""
    stride = rule.frame_stride or 1
    frames = (rule.frames_taken(frames, fps) - 1) // stride * stride + 1
    is_kept = (frames >= (shortest - 1) // stride * stride + 1) & (frames <= longest)
    return np.full_like(frames, num), is_kept.astype(np.float64)


def _diffusion_pipe(keys: _Keys) -> DataSet:
    """Read a directory of diffusion-pipe."""
    named, span = keys.pop("ar_buckets"), [keys.pop("min_ar"), keys.pop("max_ar")]
    num, resolutions = keys.pop("num_ar_buckets"), keys.several("resolutions")
    if not keys.pop("enable_ar_bucket"):
        named = [1.0]
    elif not named:
        ends = [number(f"{keys.path}: min_ar and max_ar", one, 0.01, 100.0) for one in span]
        named = np.geomspace(*ends, whole(f"{keys.path}: num_ar_buckets", num, 1, 2**10)).tolist()
    sides = [one if isinstance(one, list) else [one, 1.0] for one in named]
    ratios = np.unique([round(width / height, 3) for width, height in sides])
    areas = sorted({np.prod(one if isinstance(one, list) else [one, one]) for one in resolutions})
    frames = [
        whole(f"{keys.path}: frame_buckets", one, 1) for one in keys.several("frame_buckets", 1)
    ]
    buckets = np.array(sorted({1, *frames}), dtype=np.float64)

    def size(area: float, rule: TokenRule, width: Floats, height: Floats) -> Sides:
        off = np.abs(np.log(ratios) - np.log(width / height)[:, None])
        wide = np.sqrt(area * ratios[off.argmin(axis=1)])
        return _aligned(wide, rule.pixels), _aligned(area / wide, rule.pixels)

    def clip(rule: TokenRule, frames: Floats, fps: Floats) -> tuple[Floats, Floats]:
        if rule.fps is None and frames.max(initial=1) > 1:
            raise ConfigError(
                "has clips, of which diffusion-pipe takes the frames of a second that its model "
                "has, such as --fps 16 for Wan, --fps 24 for HunyuanVideo"
            )
        frames = rule.frames_taken(frames, fps)
        taken = buckets[np.searchsorted(buckets, frames, side="right") - 1]
        return taken, ((frames == 1) | (taken > 1)).astype(np.float64)

    takes = [Take(partial(size, float(area)), clip) for area in areas]
    only_captioned = bool(keys.pop("skip_empty_caption", True))
    return keys.end(takes, keys.whole("num_repeats", 1), only_captioned=only_captioned)


def _nearest_of(sizes: Iterable[tuple[int, int]]) -> Size:
    """Return the rule that scales to the size, lying or standing, of nearest aspect ratio."""
    table = np.array([size for pair in sizes for size in (pair, pair[::-1])], dtype=np.int64)
    return lambda _, width, height: nearest(table, width, height)


def _not_enlarged(size: Size, area: int, step: int) -> Size:
    """Return the rule that cuts images of at most this area, and scales larger ones."""

    def cut(rule: TokenRule, width: Floats, height: Floats) -> Sides:
        is_large = width * height > area
        pairs = zip((width, height), size(rule, width, height), strict=True)
        wide, tall = (np.where(is_large, after, side) // step * step for side, after in pairs)
        return wide, tall

    return cut


def _shrunk(area: int, step: int, _: TokenRule, width: Floats, height: Floats) -> Sides:
    """Scale to an area, one side in steps: the one that leaves the aspect ratio nearer."""

    def stepped(side: Floats) -> Floats:
        return np.maximum(np.floor(side + 0.5) // step * step, 1.0)

    ratio = width / height
    wide, tall = np.sqrt(area * ratio), area / np.sqrt(area * ratio)
    by_width, by_height = stepped(wide), stepped(tall)
    off_width = np.abs(by_width / stepped(by_width / ratio) - ratio)
    is_by_width = off_width < np.abs(stepped(by_height * ratio) / by_height - ratio)
    wide = np.where(is_by_width, by_width, np.floor(by_height * ratio + 0.5))
    return wide, np.where(is_by_width, np.floor(by_width / ratio + 0.5), by_height)


def _aligned(side: Any, step: int = _ALIGNED) -> Any:
    """Return sides that are rounded to whole steps."""
    return np.maximum(np.round(side / step), 1.0) * step
