"""A folder of photos of any size, and of clips, as a stream of training samples.

Legend of shapes: P patch side in pixels; h, w rows and columns of patches of one photo.
"""

import hashlib
import io
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from bascule.arrays import Ints
from bascule.checks import whole
from bascule.errors import ConfigError
from bascule.files import read_json_lines
from bascule.train.streams import (
    EpochOrder,
    RawBatch,
    SampleBatch,
    pack_encoded,
    patches,
    sample_normals,
)
from bascule.workload.codes import SampleShape
from bascule.workload.tables import IMAGE_SUFFIXES, VIDEO_SUFFIXES, load_av

_INSTEAD = ", or give folders of frames"
_NUMBER = re.compile("[0-9]+$")
_log = logging.getLogger(__name__)

Gather = Callable[..., Sequence[Ints]]
"""`agree` of `comm.agree`, for a group: returns all ranks' values, or raises on all of them."""


@dataclass(frozen=True, slots=True)
class _Photo:
    """A photo, or a clip."""

    path: Path
    caption: Sequence[int]  # text tokens
    grid: tuple[int, int, int]  # frames, and rows and columns of patches
    shape: SampleShape  # numbers of its tokens


@dataclass(frozen=True, slots=True)
class PhotoOptions:
    """Options that decide how photos and captions become tokens."""

    patch: int = 16  # side P of a patch in pixels
    max_tokens: int = 4096  # most image tokens of a photo or clip
    max_text_tokens: int = 512  # most text tokens; the rest of a caption is cut off
    text_dim: int = 64  # width of a text embedding, and of the pooled vector, which is their mean
    strict: bool = False  # refuse a folder with a photo that cannot be decoded
    cache_bytes: int = 256 * 2**20  # memory for decoded photos, filled in the order of names
    clip_frames: int = 0  # most frames of a clip; 0 takes photos alone
    # frames of a clip, after its first, that become one latent frame; the rest is not taken
    frame_group: int = 1
    token_channels: int | None = None  # channels of an image token; None: pixels of a patch
    # the text tokens of a caption, and True if some were cut; None takes its bytes
    tokenize: Callable[[str], tuple[Sequence[int], bool]] | None = None


class PhotoStream:
    """Photos at their own size, with the bytes of their captions as text tokens.

    A photo becomes ``h * w`` tokens of ``3 * P**2`` values in [-1, 1], channels first. It scales
    down photos of too many tokens, stretches sides below the patch, and crops the borders to whole
    patches. A caption is ``name.txt`` beside ``name.jpg``, else a line of ``captions.jsonl``
    (``{"file": "name.jpg", "caption": "..."}``), else empty.

    With ``clip_frames``, video files and subfolders of numbered frames are samples, too: frame
    after frame, all within ``max_tokens``. The caption of folder ``name`` is ``name.txt`` beside
    it.

    The constructor reads and checks each photo: on all ranks, or, with ``gather``, on one of them.
    It leaves out photos that cannot be decoded, counts them in ``skipped``, and rank 0 logs them.
    Steps draw photos in a shuffled order, each once per epoch.
    """

    def __init__(
        self,
        folder: str | Path,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        options: PhotoOptions | None = None,
        gather: Gather | None = None,
    ) -> None:
        self._options = options = options or PhotoOptions()
        self.batch_size = whole("batch_size", batch_size, 1)
        self.rank = whole("rank", rank, 0, world_size - 1)
        self.world_size = world_size
        self.seed = seed
        self.in_channels = options.token_channels or 3 * options.patch**2
        self.text_dim = self.vec_dim = options.text_dim
        self.skipped = 0
        self._embedding = sample_normals([0], [256], options.text_dim, seed=0, stream="t_bytes")
        self._cache: dict[Path, NDArray[np.uint8]] = {}
        self._photos = self._scan(Path(folder), gather)
        self._order = EpochOrder(len(self._photos), seed)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the readable photos, sorted."""
        return tuple(photo.path.name for photo in self._photos)

    def batch(self, step: int) -> SampleBatch:
        """Return this rank's share of the ``world_size * batch_size`` photos of a step."""
        return self.samples(self.numbers(step))

    def numbers(self, step: int) -> range:
        """Return the numbers of this rank's samples of a step."""
        first = (step * self.world_size + self.rank) * self.batch_size
        return range(first, first + self.batch_size)

    def raw(self, numbers: Sequence[int]) -> RawBatch:
        """Read the pixels and captions of the samples with these numbers, to be encoded."""
        photos = self._draw(numbers)
        texts = [torch.tensor(list(photo.caption), dtype=torch.int64) for photo in photos]
        if self._options.tokenize is None:
            texts = [self._embedding[text] for text in texts]
        pixels = [torch.from_numpy(self._pixels(photo)) for photo in photos]
        return RawBatch([photo.shape for photo in photos], list(numbers), pixels, texts)

    def samples(self, numbers: Sequence[int]) -> SampleBatch:
        """Read the samples with these numbers in the order of all epochs, which are their ids."""
        assert self._options.tokenize is None and self._options.token_channels is None, "use raw()"
        raw, patch = self.raw(numbers), self._options.patch
        images = [patches(pixels.float() / 127.5 - 1.0, patch) for pixels in raw.pixels]
        return pack_encoded(raw, images, raw.texts, self)

    def _draw(self, numbers: Sequence[int]) -> list[_Photo]:
        return [self._photos[sample] for sample in self._order.samples(numbers)]

    def _decoded(self, paths: Sequence[Path], gather: Gather | None) -> tuple[Ints, dict[int, str]]:
        """Return the grids of all photos (n, 3), 0 for a bad one; the reasons this rank knows."""
        grids, reasons, error = np.zeros((len(paths), 3), dtype=np.int64), dict[int, str](), None
        share, room = self.world_size if gather else 1, self._options.cache_bytes
        for place in range(self.rank % share, len(paths), share):
            try:
                pixels, grids[place] = _decode(paths[place], self._options)
            except ConfigError as refusal:
                reasons[place] = str(refusal)
                error = error or (refusal if self._options.strict else None)
                continue
            if pixels.nbytes <= room:
                room -= pixels.nbytes
                self._cache[paths[place]] = pixels
        if gather is not None:
            names = hashlib.blake2b(repr([path.name for path in paths]).encode(), digest_size=8)
            local = grids[self.rank :: share].ravel()
            for rank, part in enumerate(gather({"photos": names.hexdigest()}, error, values=local)):
                grids[rank::share] = part.reshape(-1, 3)
        elif error is not None:
            raise error
        return grids, reasons

    def _scan(self, folder: Path, gather: Gather | None) -> list[_Photo]:
        options = self._options
        paths, listed = _sample_paths(folder, options), _listed_captions(folder)
        grids, reasons = self._decoded(paths, gather)
        photos: list[_Photo] = []
        bad: list[str] = []
        num_cut = 0
        for place, path in enumerate(paths):
            if not grids[place].any():
                bad.append(reasons.get(place, f"cannot read {path}"))
                continue
            caption, is_cut = _text_tokens(_caption_of(path, listed), options)
            num_cut += is_cut
            num_frames, rows, columns = grid = tuple(grids[place].tolist())
            frames = _latent_frames(num_frames, options)
            shape = SampleShape(len(caption), frames * rows * columns, frames, columns)
            photos.append(_Photo(path, caption, grid, shape))
        if not photos:
            fix = f"put photos directly in it, named *{', *'.join(sorted(IMAGE_SUFFIXES))}"
            raise ConfigError(f"no readable photo in {folder} ({len(bad)} unreadable); {fix}")
        self.skipped = len(bad)
        if self.rank == 0:
            unknown = sorted(listed.keys() - {path.name for path in paths})
            if unknown:
                _log.warning("captions.jsonl names %d missing photos: %s", len(unknown), unknown[0])
            if bad:
                _log.warning("skipped %d of %d photos: %s", len(bad), len(paths), "; ".join(bad))
            if num_cut:
                _log.warning("cut %d captions to the limit of the text encoder", num_cut)
        return photos

    def _pixels(self, photo: _Photo) -> NDArray[np.uint8]:
        """Return (3, frames, h * P, w * P) uint8, from memory or from the file."""
        if photo.path in self._cache:
            return self._cache[photo.path]
        pixels, grid = _decode(photo.path, self._options)
        if grid != photo.grid:
            raise ConfigError(f"{photo.path} has changed its size: start the run again")
        return pixels


def _sample_paths(folder: Path, options: PhotoOptions) -> list[Path]:
    """Return photos, and clips if wanted, sorted by path."""
    try:
        visible = [path for path in folder.iterdir() if not path.name.startswith(".")]
        kinds = {path: _kind_of(path) for path in visible}
    except OSError as error:
        raise ConfigError(f"{folder} must be a folder of photos: {error}") from None
    wanted = ("photo", "frames", "video") if options.clip_frames else ("photo",)
    paths = sorted(path for path, kind in kinds.items() if kind in wanted)
    videos = [path for path in paths if kinds[path] == "video" and path.is_file()]
    if videos:
        load_av(videos[0], _INSTEAD)
    return paths


def _kind_of(path: Path) -> str | None:
    """Return "photo", "video", "frames" for a folder of numbered ones, or None."""
    suffix = path.suffix.lower()
    if path.is_dir():
        return "frames" if _frame_paths(path) else None
    if suffix in IMAGE_SUFFIXES and (path.is_file() or path.is_symlink()):
        return "photo"
    return "video" if suffix in VIDEO_SUFFIXES else None


def _text_tokens(caption: bytes, options: PhotoOptions) -> tuple[Sequence[int], bool]:
    """Return the text tokens of a caption, none of an empty one, and True if some were cut."""
    if not caption or options.tokenize is None:
        return caption[: options.max_text_tokens], False
    return options.tokenize(caption.decode("utf-8", "replace"))


def _latent_frames(num_frames: int, options: PhotoOptions) -> int:
    return 1 + (num_frames - 1) // options.frame_group


def _decode(path: Path, options: PhotoOptions) -> tuple[NDArray[np.uint8], tuple[int, int, int]]:
    """Return pixels (3, frames, h * P, w * P), and frames, h and w."""
    patch, kind = options.patch, "photo" if _kind_of(path) in ("photo", None) else "clip"
    try:
        images = [_read_photo(path)] if kind == "photo" else _read_clip(path, options)
        most = options.max_tokens // _latent_frames(len(images), options)
        pixels = np.stack([_fit(_to_rgb(image), patch, most) for image in images])
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise ConfigError(f"cannot read the {kind} {path}: no known image format") from None
    except Exception as error:  # decoders raise anything on damaged bytes
        reason = error or type(error).__name__
        raise ConfigError(f"cannot read the {kind} {path}: {reason}") from None
    frames, height, width, _ = pixels.shape
    channels_first = np.ascontiguousarray(pixels.transpose(3, 0, 1, 2))
    return channels_first, (frames, height // patch, width // patch)


def _read_photo(path: Path) -> Image.Image:
    data = path.read_bytes()
    with Image.open(io.BytesIO(data)) as image:
        image.verify()  # checksums that loading leaves out; the image is spent afterwards
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return ImageOps.exif_transpose(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB: high byte of 16-bit values, floats as 0 to 1, alpha put on white."""
    if image.mode.startswith("I"):
        grey = np.asarray(image).clip(0, 65535) // 256
        image = Image.fromarray(grey.astype(np.uint8))
    elif image.mode == "F":
        grey = np.nan_to_num(np.asarray(image)).clip(0.0, 1.0) * 255.0
        image = Image.fromarray(grey.round().astype(np.uint8))
    elif image.has_transparency_data:
        above = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), above)
    return image.convert("RGB")


def _fit(image: Image.Image, patch: int, max_tokens: int) -> NDArray[np.uint8]:
    """Scale and crop to whole patches, at most ``max_tokens``; (h * P, w * P, 3) uint8."""
    width, height = image.size
    scale = 1.0
    if (width // patch) * (height // patch) > max_tokens:
        scale = math.sqrt(max_tokens * patch**2 / (width * height))
    size = max(int(width * scale), patch), max(int(height * scale), patch)
    if size != image.size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    rows = min(size[1] // patch, max_tokens)
    columns = min(size[0] // patch, max_tokens // rows)
    left, top = (size[0] - columns * patch) // 2, (size[1] - rows * patch) // 2
    return np.asarray(image.crop((left, top, left + columns * patch, top + rows * patch)))


def _read_clip(path: Path, options: PhotoOptions) -> list[Image.Image]:
    """Read the chosen frames of a clip; refuse frames of unlike sizes."""
    frames = _read_folder(path, options) if path.is_dir() else _read_video(path, options)
    if not frames:
        raise ConfigError(f"{path} has no frame")
    sizes = {frame.size for frame in frames}
    if len(sizes) > 1:
        raise ConfigError(f"frames of sizes {sorted(sizes)}; all frames of a clip must have one")
    return frames


def _frame_paths(folder: Path) -> list[Path]:
    """Return the numbered images of a folder by their numbers, then names."""
    numbered = [
        (int(number[0]), path.name, path)
        for path in folder.iterdir()
        if path.suffix.lower() in IMAGE_SUFFIXES and (number := _NUMBER.search(path.stem))
    ]
    return [path for *_, path in sorted(numbered)]


def _read_folder(path: Path, options: PhotoOptions) -> list[Image.Image]:
    paths = _frame_paths(path)
    frames: list[Image.Image] = []
    for place in sorted(_chosen(len(paths), options)):
        with Image.open(paths[place]) as frame:
            frame.load()
            frames.append(frame)
    return frames


def _read_video(path: Path, options: PhotoOptions) -> list[Image.Image]:
    av = load_av(path, _INSTEAD)
    with av.open(str(path)) as video:
        num_frames = sum(packet.size > 0 for packet in video.demux(video=0))
    wanted = _chosen(num_frames, options)
    with av.open(str(path)) as video:
        frames = enumerate(video.decode(video=0))
        return [frame.to_image() for place, frame in frames if place in wanted]


def _chosen(num_frames: int, options: PhotoOptions) -> set[int]:
    """Choose evenly spaced frames: one, and as many whole groups of frames as limits allow."""
    group = options.frame_group
    num = min(num_frames, options.clip_frames, 1 + (options.max_tokens - 1) * group)
    num -= (num - 1) % group if num else 0
    places = np.linspace(0, num_frames - 1, num).round()
    return set(places.astype(int).tolist())


def _caption_of(path: Path, listed: dict[str, bytes]) -> bytes:
    """Return a photo's caption in UTF-8 without white space around it; empty if it has none."""
    beside = path.with_name(f"{path.name if path.is_dir() else path.stem}.txt")
    if not beside.is_file():
        return listed.get(path.name, b"")
    try:
        return beside.read_bytes().removeprefix(b"\xef\xbb\xbf").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the caption {beside}: {error}") from None


def _listed_captions(folder: Path) -> dict[str, bytes]:
    """Read the captions of ``captions.jsonl`` by file name; none if there is no such file."""
    path = folder / "captions.jsonl"
    if not path.exists():
        return {}
    captions: dict[str, bytes] = {}
    for where, row in read_json_lines(path):
        match row:
            case {"file": str(name), "caption": str(caption)}:
                pass
            case _:
                raise ConfigError(f'{where}: needs "file" and "caption", both text, got {row!r}')
        if name in captions:
            raise ConfigError(f"{where}: {name!r} has a caption already")
        captions[name] = caption.encode("utf-8", "replace").strip()
    return captions
