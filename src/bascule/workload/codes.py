"""Sequence lengths from data codes and from files of lengths.

A *data code* ``g16b4i256f1s0`` describes a stream of synthetic samples: 16 ranks, 4 samples per
rank and step, 256 x 256 pixels, 1 frame, not compressed in time. Commas join codes to a mix. Source
of the format and its token counts: KnapFormer, section 4.1.
"""

import re
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import TypeVar, cast

import numpy as np

from bascule.checks import MAX_RANKS, fields, is_int, shown, whole
from bascule.errors import ConfigError
from bascule.files import parse_json, read_lines

PATCH_PIXELS = 16  # along one side of a visual token: VAE stride 8 times DiT patch 2
MAX_TEXT_TOKENS = 392  # of a sample that a data code draws
ASPECT_RANGE = (0.96, 1.04)  # factors on a rank's visual tokens, as by buckets of aspect ratios
MAX_LENGTH = 2**31 - 1  # of a sequence, in tokens: cumulative lengths are int32
MAX_SEQUENCES = 2**20  # of a batch that is drawn or read

_CODE_FORM = "g{ranks}b{samples per rank}i{pixels}f{frames}s{0 or 1}, for example g4b5i512f1s0"
_NUMBER = "(0|[1-9][0-9]{0,8})"
_CODE = re.compile(f"g{_NUMBER}b{_NUMBER}i{_NUMBER}f{_NUMBER}s([01])")
_WHOLE = re.compile("[0-9]{1,18}")

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class SampleShape:
    """Token counts of one sample, whose visual tokens lie on a grid in raster order."""

    text_tokens: int  # in front of the visual tokens
    image_tokens: int  # of all frames, equally many in each
    frames: int = 1  # latent frames
    grid_width: int = 1  # visual tokens in a row; the last row of a frame may be partly filled
    cross_tokens: int = 0  # text tokens of cross-attention: no part of the sequence

    def __post_init__(self) -> None:
        sizes = self.frames, self.grid_width
        if min(self.text_tokens, self.image_tokens, self.cross_tokens) < 0 or min(sizes) < 1:
            raise ConfigError(f"token counts must be >= 0, frames and grid_width >= 1: {self}")
        if self.image_tokens % self.frames:
            raise ConfigError(f"image_tokens must be a multiple of frames: {self}")

    @property
    def seq_len(self) -> int:
        """Number of tokens of the packed sequence: text and visual tokens."""
        return self.text_tokens + self.image_tokens


@dataclass(frozen=True, slots=True)
class DataCode:
    """A stream of a data mix; ``str()`` returns its code, ``g{G}b{B}i{R}f{F}s{S}``."""

    num_ranks: int  # ranks that read this stream (G)
    batch_size: int  # samples a rank and step (B); 0 makes ranks that only compute
    resolution: int  # pixels along each side of a frame (R)
    num_frames: int  # frames before compression (F)
    compressed: bool  # True if frames are compressed in time, by 3.4 (S)

    def __post_init__(self) -> None:
        fields(self, num_ranks=(whole, 1, MAX_RANKS), batch_size=whole, num_frames=(whole, 1))
        fields(self, resolution=(whole, PATCH_PIXELS))
        if self.num_ranks * self.batch_size > MAX_SEQUENCES:
            raise ConfigError(f"give g times b of at most {MAX_SEQUENCES} samples per step")
        # The factor for aspect ratios adds up to 4 %, text a little.
        if self.image_tokens > MAX_LENGTH * 0.96 - MAX_TEXT_TOKENS:
            wrong = f"{self.image_tokens} visual tokens, and text, may exceed {MAX_LENGTH} tokens"
            raise ConfigError(f"{wrong}: use fewer pixels or frames")

    def __str__(self) -> str:
        frames = f"i{self.resolution}f{self.num_frames}s{int(self.compressed)}"
        return f"g{self.num_ranks}b{self.batch_size}{frames}"

    @property
    def grid_width(self) -> int:
        """Visual tokens along one side of a frame."""
        return self.resolution // PATCH_PIXELS

    @property
    def latent_frames(self) -> int:
        """Frames that become tokens: all, or ``max(int(num_frames / 3.4), 1)`` if compressed."""
        return max(self.num_frames * 10 // 34, 1) if self.compressed else self.num_frames

    @property
    def image_tokens(self) -> int:
        """Visual tokens of a sample before the factor of `ASPECT_RANGE`."""
        return self.grid_width**2 * self.latent_frames


def keyed_generator(seed: int, stream: str, *key: int) -> np.random.Generator:
    """Return a Philox random generator for a key; no two keys share random numbers.

    `stream` has at most 8 ASCII characters, and `key` at most two numbers.
    """
    if not all(0 <= word < 2**64 for word in (seed, *key)):
        raise ConfigError(f"seed, step and rank must be in 0..2^64-1, got {(seed, *key)}")
    purpose = int.from_bytes(stream.encode("ascii"), "little")
    philox = np.random.Philox(
        key=np.array([seed, purpose], dtype=np.uint64),
        counter=np.array([0, 0, *key, *[0] * (2 - len(key))], dtype=np.uint64),
    )
    return np.random.Generator(philox)


def parse_data_codes(spec: str) -> tuple[DataCode, ...]:
    """Parse a mix such as ``"g16b4i256f1s0,g4b5i512f1s0"``; spaces around commas are fine."""
    codes: list[DataCode] = []
    for position, term in enumerate(spec.split(","), start=1):
        match = _CODE.fullmatch(term.strip())
        if match is None:
            wrong = f"data codes {shown(spec)}"
            raise ConfigError(f"{wrong}: term {position} {shown(term.strip())} is not {_CODE_FORM}")
        ranks, samples, pixels, frames, compressed = map(int, match.groups())
        try:
            codes.append(DataCode(ranks, samples, pixels, frames, bool(compressed)))
        except ConfigError as error:
            raise ConfigError(f"data code {term.strip()}: {error}") from None
    return tuple(codes)


def check_world(codes: Sequence[DataCode], world_size: int) -> None:
    """Refuse a world size that is not a multiple of the number of ranks of the mix."""
    unit = num_ranks_of(codes)
    whole("world_size", world_size, 0, MAX_RANKS)
    if world_size < unit or world_size % unit:
        below, above = world_size // unit * unit, -(-world_size // unit) * unit
        nearest = f"{below} or {above}" if below > 0 else str(unit)
        mix = shown(",".join(map(str, codes))).strip("'")
        wrong = f"data codes {mix} describe {unit} ranks, which does not fit a world"
        raise ConfigError(f"{wrong} of {world_size}; nearest legal world size: {nearest}")


def num_ranks_of(codes: Sequence[DataCode]) -> int:
    """Count the ranks of a mix."""
    return sum(code.num_ranks for code in codes)


def rank_lengths(
    codes: Sequence[DataCode], rank: int, *, seed: int, step: int
) -> list[SampleShape]:
    """Draw the samples of a rank, sizes scaled within `ASPECT_RANGE`; more ranks repeat the mix."""
    ends = list(accumulate(code.num_ranks for code in codes))
    code = codes[bisect(ends, rank % ends[-1])]
    generator = keyed_generator(seed, "lengths", step, rank)
    frame_tokens = max(round(code.grid_width**2 * generator.uniform(*ASPECT_RANGE)), 1)
    text_tokens = generator.integers(0, MAX_TEXT_TOKENS, size=code.batch_size, endpoint=True)
    frames = code.latent_frames
    return [
        SampleShape(text, frame_tokens * frames, frames, code.grid_width)
        for text in text_tokens.tolist()
    ]


def sample_lengths(
    codes: Sequence[DataCode], *, seed: int, step: int, world_size: int | None = None
) -> list[list[SampleShape]]:
    """Draw each rank's samples in a step. Default: for as many ranks as the mix has."""
    world_size = num_ranks_of(codes) if world_size is None else world_size
    check_world(codes, world_size)
    return [rank_lengths(codes, rank, seed=seed, step=step) for rank in range(world_size)]


def seq_lens(shapes: Sequence[Sequence[SampleShape]]) -> list[list[int]]:
    """Return the lengths of packed sequences, a list per rank, as ``plan_batch`` accepts them."""
    return [[shape.seq_len for shape in rank] for rank in shapes]


def deal(items: Sequence[_Item], num_ranks: int) -> list[list[_Item]]:
    """Deal items over ranks round robin: item ``k`` goes to rank ``k % num_ranks``."""
    whole("num_ranks", num_ranks, 1, MAX_RANKS)
    return [list(items[rank::num_ranks]) for rank in range(num_ranks)]


def read_lengths(path: str | Path, *, num_ranks: int | None = None) -> list[list[int]]:
    """Read sequence lengths, a list for each source rank.

    In text, each line has the lengths of a source rank, separated by spaces or commas, or none;
    ``#`` begins a comment, and a line with only a comment is skipped. JSON has a list of lists, or
    one flat list. With ``num_ranks``, a single line or list is dealt (see ``deal``).
    """
    lines = list(islice(read_lines(path), MAX_SEQUENCES + 1))
    text = "".join(lines)
    rows = _json_rows(text, path) if text.lstrip().startswith("[") else _text_rows(lines, path)
    if not rows:
        raise ConfigError(f"{path} holds no lengths; write one line per source rank")
    num_lines, num_lens = max(len(rows), len(lines)), sum(map(len, rows))
    if num_lines > MAX_RANKS or num_lens > MAX_SEQUENCES:
        wrong = f"{path} lists {num_lens} lengths in {num_lines} lines"
        raise ConfigError(f"{wrong}; give at most {MAX_SEQUENCES} lengths on {MAX_RANKS} lines")
    if num_ranks is None or len(rows) == num_ranks:
        return rows
    if len(rows) == 1:
        return deal(rows[0], num_ranks)
    wrong = f"{path} lists {len(rows)} source ranks (one per line), not {num_ranks}"
    raise ConfigError(f"{wrong}; use {len(rows)} ranks, or put all lengths on one line")


def _text_rows(lines: Sequence[str], path: str | Path) -> list[list[int]]:
    rows: list[list[int]] = []
    for number, line in enumerate(lines, start=1):
        content, comment, _ = line.partition("#")
        if comment and not content.strip():
            continue
        tokens = content.replace(",", " ").split()
        where = f"{path}, line {number}"
        rows.append([_length(int(t) if _WHOLE.fullmatch(t) else t, where) for t in tokens])
    return rows


def _json_rows(text: str, path: str | Path) -> list[list[int]]:
    data = cast(list[object], parse_json(text, str(path)))
    rows = data if any(isinstance(row, list) for row in data) else [data]
    result: list[list[int]] = []
    for rank, row in enumerate(rows):
        if not isinstance(row, list):
            raise ConfigError(f"{path}: rank {rank} is {shown(row)}, but other ranks are lists")
        items = cast(list[object], row)
        result.append([_length(n, f"{path}, rank {rank}, item {i}") for i, n in enumerate(items)])
    return result


def _length(value: object, where: str) -> int:
    if not is_int(value) or not 0 <= value <= MAX_LENGTH:
        raise ConfigError(f"{where}: {shown(value)} is not a length, whole from 0 to {MAX_LENGTH}")
    return value
