"""Count the tokens of images, clips and texts, by model, by bucket and by frame rate."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.checks import fields, rate, shown, whole
from bascule.errors import ConfigError, QuestionError
from bascule.machine.costs import TransformerCost

_NAMED = {"480p": "832x480:16", "720p": "1280x720:16", "1080p": "1920x1080:16"}
_BUCKETS = re.compile("([0-9]{1,5}x)?[0-9]{1,5}:[0-9]{1,4}")
_SIZES = re.compile("[0-9]{1,5}x[0-9]{1,5}(,[0-9]{1,5}x[0-9]{1,5})*")
_MOST_ASPECT = 4.0
BYTES_PER_TOKEN = 4  # UTF-8 bytes of text, about right for English


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a named model.

    Attributes:
        width: Model width.
        num_blocks: Blocks of the transformer.
        num_heads: Heads of keys and values.
        pixels: Side of a visual token in pixels: the VAE's stride times the patch size.
        frame_stride: Frames after the first that become one latent frame; None: images only.
        areas: Least and most pixels to which an image is scaled; None keeps its size.
        is_crosswise: True if text is used in cross-attention only, and is not in the sequence.
    """

    width: int
    num_blocks: int
    num_heads: int
    pixels: int = 16
    frame_stride: int | None = None
    areas: tuple[int, int] | None = None
    is_crosswise: bool = False

    @property
    def cost(self) -> TransformerCost:
        """The cost model of a sequence."""
        return TransformerCost(self.width, num_layers=self.num_blocks, num_heads=self.num_heads)


MODELS = {  # the defaults of their classes in diffusers and transformers, and their papers
    "flux.1": ModelShape(3072, 57, 24),
    "flux.2": ModelShape(6144, 56, 48),
    "qwen-image": ModelShape(3072, 60, 24),
    "sd3.5-large": ModelShape(2432, 38, 38),
    "z-image": ModelShape(3840, 34, 30),
    "wan2.1-1.3b": ModelShape(1536, 30, 12, 16, 4, is_crosswise=True),
    "wan2.1": ModelShape(5120, 40, 40, 16, 4, is_crosswise=True),
    "wan2.2-5b": ModelShape(3072, 30, 24, 32, 4, is_crosswise=True),
    "hunyuanvideo": ModelShape(3072, 60, 24, 16, 4),
    "hunyuanvideo1.5": ModelShape(2048, 54, 16, 16, 4),
    "cogvideox-2b": ModelShape(1920, 30, 30, 16, 4),
    "cogvideox-5b": ModelShape(3072, 42, 48, 16, 4),
    "mochi": ModelShape(3072, 48, 24, 16, 6),
    "ltx": ModelShape(2048, 28, 32, 32, 8, is_crosswise=True),
    "ltx2": ModelShape(4096, 48, 32, 32, 8, is_crosswise=True),
    "qwen2.5-vl": ModelShape(3584, 28, 4, 28, None, (56**2, 3584**2)),
    "qwen3-vl": ModelShape(4096, 36, 8, 32, None, (256**2, 4096**2)),
}


@dataclass(frozen=True, slots=True)
class TokenRule:
    """The rules by which a trainer turns images, clips and texts into tokens.

    Attributes:
        pixels: Side of a visual token in pixels; a remainder at an edge is cut off.
        frame_stride: f frames become 1 + (f - 1) // frame_stride latent frames; None: images only.
        areas: Least and most pixels; sides are rounded to whole tokens within them. None: as is.
        bucket: Sizes to which images are scaled, by the nearest aspect ratio. "1024:64": all sizes
            of at most 1024 x 1024 pixels and 4:1, with sides in steps of 64. "1280x720:16" and
            "720p" have another area; "1024x1024,1152x896" lists the sizes.
        fps: Frames per second that are used of a clip; None uses all frames.
        max_frames: Most frames that are used of a clip.
        tokenize: Counts the tokens of each text; None estimates them by `BYTES_PER_TOKEN`.
        is_crosswise: True if the text of images and clips is used in cross-attention only, and is
            not in the sequence.
    """

    pixels: int = 16
    frame_stride: int | None = None
    areas: tuple[int, int] | None = None
    bucket: str | None = None
    fps: float | None = None
    max_frames: int | None = None
    tokenize: Callable[[Sequence[str]], Sequence[int]] | None = None
    is_crosswise: bool = False

    def __post_init__(self) -> None:
        fields(self, pixels=(whole, 1), frame_stride=(whole, 1), max_frames=(whole, 1))
        fields(self, fps=rate)
        if self.bucket is not None:
            bucket_sizes(self.bucket)

    @classmethod
    def of_model(cls, name: str, **options: object) -> "TokenRule":
        """Return the rule of a model of `MODELS`; `options` are other fields of the rule."""
        model = model_shape(name)
        rule = cls(model.pixels, model.frame_stride, model.areas, is_crosswise=model.is_crosswise)
        return replace(rule, **options)  # pyright: ignore[reportArgumentType]

    def count(self, texts: Sequence[str]) -> Sequence[int]:
        """Count the tokens of each text."""
        if self.tokenize is not None:
            return self.tokenize(texts)
        sizes = (len(text.encode("utf-8", "replace")) for text in texts)
        return [math.ceil(size / BYTES_PER_TOKEN) for size in sizes]

    def frames_taken(self, frames: Floats, fps: Floats) -> Floats:
        """Return (n,) frames of each clip that `fps` and `max_frames` leave."""
        if self.fps is not None:
            taken = np.maximum(np.floor(frames * self.fps / fps + 1e-6), 1.0)
            frames = np.where(frames > 1, taken, frames)
        return np.minimum(frames, self.max_frames or np.inf)

    def grids(self, width: Floats, height: Floats, frames: Floats, fps: Floats) -> Ints:
        """Return (n, 3) latent frames, token rows and token columns of each sample.

        Args:
            width: (n,) pixels.
            height: (n,) pixels.
            frames: (n,) frames of each clip, 1 of an image.
            fps: (n,) frames per second of each clip; used only if the rule has `fps`.

        Raises:
            ConfigError: A sample is a clip, and the rule has no `frame_stride`.
        """
        frames = self.frames_taken(frames, fps)
        if self.frame_stride is None and frames.max(initial=1) > 1:
            what = f"has clips, one of {int(frames.max()):,} frames: give a model of clips, and"
            fix = "the most frames to use of a clip, for example --model wan2.1 --max-frames 81"
            raise QuestionError(f"{what} {fix}", model="wan2.1", max_frames=self.max_frames or 81)
        if self.bucket is not None:
            width, height = nearest(bucket_sizes(self.bucket), width, height, np.log)
        if self.areas is not None:
            width, height = _within(self.areas, self.pixels, width, height)
        latent = 1 + (frames - 1) // (self.frame_stride or 1)
        sides = latent, height // self.pixels, width // self.pixels
        return np.stack(sides, axis=1).astype(np.int64)


def model_shape(name: str) -> ModelShape:
    """Return the sizes of a model by its name."""
    if name not in MODELS:
        raise ConfigError(f"model {shown(name)} is not known: give one of {', '.join(MODELS)}")
    return MODELS[name]


def bucket_sizes(bucket: str) -> Ints:
    """Return (n, 2) width and height of all buckets; see `TokenRule.bucket`."""
    text = _NAMED.get(bucket, bucket).replace(" ", "")
    if _SIZES.fullmatch(text):
        sizes = [[int(side) for side in size.split("x")] for size in text.split(",")]
    elif _BUCKETS.fullmatch(text):
        area, step = text.split(":")
        sides, step = [int(side) for side in area.split("x")], int(step)
        most = sides[0] * sides[-1]
        widths = range(step, math.isqrt(int(most * _MOST_ASPECT)) + 1, max(step, 1))
        half = [(w, h) for w in widths if w <= (h := most // w // step * step) <= _MOST_ASPECT * w]
        sizes = sorted({*half, *((h, w) for w, h in half)})
    else:
        wrong = f"bucket {shown(bucket)}: give an area and a step, such as 1024:64 or 1280x720:16"
        raise ConfigError(f"{wrong}; or 480p, 720p or 1080p; or sizes, such as 1024x1024,1152x896")
    if not sizes or min(map(min, sizes)) < 1:
        raise ConfigError(f"bucket {shown(bucket)} has no size: give a larger area")
    return np.array(sizes, dtype=np.int64)


def nearest(
    sizes: Ints, width: Floats, height: Floats, scale: Callable[[Floats], Floats] = np.abs
) -> tuple[Floats, Floats]:
    """Return the size with the nearest aspect ratio on a scale; of equal ratios the larger size."""
    order = np.lexsort((-sizes.prod(axis=1), sizes[:, 0] / sizes[:, 1]))
    sides = sizes[order].astype(np.float64)
    aspects, first = np.unique(scale(sides[:, 0] / sides[:, 1]), return_index=True)
    middles = (aspects[1:] + aspects[:-1]) / 2.0
    chosen = sides[first[np.searchsorted(middles, scale(width / height))]]
    return chosen[:, 0], chosen[:, 1]


def _within(
    areas: tuple[int, int], pixels: int, width: Floats, height: Floats
) -> tuple[Floats, Floats]:
    """Round sides to whole tokens, within least and most pixels, as `smart_resize` of Qwen2-VL."""
    least, most = areas
    rounded = [np.maximum(np.round(side / pixels), 1.0) * pixels for side in (width, height)]
    area = rounded[0] * rounded[1]
    factor = np.sqrt(np.where(area > most, most, least) / (width * height))
    is_off = (area > most) | (area < least)
    scaled = [side * factor / pixels for side in (width, height)]
    whole_sides = [
        np.where(area > most, np.maximum(np.floor(side), 1.0), np.ceil(side)) * pixels
        for side in scaled
    ]
    width, height = (
        np.where(is_off, side, near) for side, near in zip(whole_sides, rounded, strict=True)
    )
    return width, height
