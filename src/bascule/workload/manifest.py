"""Read the samples of a data set from its table, and count their tokens."""

import importlib
import io
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.checks import shown
from bascule.errors import ConfigError, QuestionError
from bascule.workload.codes import MAX_LENGTH, SampleShape
from bascule.workload.columns import ROLES, TEXTS, may_be_text, named, roles_of
from bascule.workload.tables import VIDEO_SUFFIXES, Batch, image_size, read_batches, video_size
from bascule.workload.tokens import BYTES_PER_TOKEN, TokenRule
from bascule.workload.trainers import Take

_NUMBER = r"^\s*[+]?[0-9]+(\.[0-9]*)?([eE][+]?[0-9]+)?\s*$"
_COMMA = re.compile("[0-9]+,[0-9]+")
_PAIR = re.compile(r"\s*[\[(]?\s*([0-9]+)\s*[x×*,; ]\s*([0-9]+)\s*[\])]?\s*")
_OTHERWISE = "say which columns have sizes, or text alone, by --columns width=W,height=H, or image="
_CONTENTS = ("content", "value", "text")  # keys of a turn of a conversation
_SPEAKERS = frozenset(("system", "user", "assistant", "question", "answer"))  # or its texts by them
_MOST_SHOWN = 3  # rows that cannot be read
_MOST_SEEN = 100  # rows of a batch that tell whether a column holds text
_FEW_WORDS, _SAMPLED = 3.0, 100  # words of a text in the mean of a sample, below which it is none


@dataclass(frozen=True, eq=False)
class Manifest:
    """The samples of a data set.

    Attributes:
        path: The file or folder.
        text_tokens: (n,) text tokens of each sample, in the order of the file.
        cross_tokens: (n,) text tokens for cross-attention, which are not in the sequence.
        grids: (n, 3) latent frames, rows and columns of visual tokens.
        columns: The columns that were used, by role.
        ignored: Names of the columns that were not used.
        skipped: The first rows that could not be read, with place and reason.
        num_skipped: Number of rows that could not be read.
        example: A row and its tokens, for a person to check.
        num_left_out: Samples that the trainer's configuration leaves out.
    """

    path: Path
    text_tokens: Ints
    cross_tokens: Ints
    grids: Ints
    columns: Mapping[str, str]
    ignored: tuple[str, ...]
    skipped: tuple[str, ...]
    num_skipped: int
    example: str
    num_left_out: int = 0

    def __len__(self) -> int:
        return self.text_tokens.size

    @cached_property
    def lens(self) -> Ints:
        """(n,) tokens of each sample: text and visual ones together."""
        return self.text_tokens + self.grids.prod(axis=1)

    def shape(self, sample: int) -> SampleShape:
        """Return the token counts of a sample."""
        frames, rows, columns = self.grids[sample].tolist()
        text, cross = int(self.text_tokens[sample]), int(self.cross_tokens[sample])
        return SampleShape(text, frames * rows * columns, max(frames, 1), max(columns, 1), cross)

    def summary(self) -> list[str]:
        """Return sentences that say how the table was read, for a person to check."""
        five = np.percentile(self.lens, (0, 25, 50, 75, 100), method="nearest")
        least, low, middle, high, most = five.astype(int).tolist()
        pairs = self.columns.items()
        used = ", ".join(role if role == name else f"{role} ({name})" for role, name in pairs)
        lines = [
            f"{self.path}: {len(self):,} samples; tokens follow from {used}.",
            f"Tokens of a sample: {least:,} to {most:,}, quartiles {low:,}, {middle:,}, {high:,}.",
            f"For example {self.example}.",
        ]
        if self.ignored:
            lines.append(f"Ignored columns: {named(self.ignored)}.")
        if self.num_left_out:
            lines.append(f"Left out by the keys of the configuration: {self.num_left_out:,}.")
        if self.num_skipped:
            lines.append(f"Skipped rows: {self.num_skipped:,}, first {'; '.join(self.skipped)}.")
        return lines


def read_manifest(
    path: str | Path,
    rule: TokenRule | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    skip_bad: bool = False,
) -> Manifest:
    """Read the samples of a data set from its table, in the order of its rows.

    `tables.read_batches` lists the formats, and `ROLES` the names of columns. A row has `tokens` (a
    number, or a list of ids), which count as text. Otherwise it has a size: `width` and `height` in
    pixels, both as a `size`, or an `image`, whose header is read. A clip has `frames`, or seconds
    as `duration` and `fps`. Text is `text_tokens`, a `text` (the longest of several), or a `talk`
    of messages. Empty frames count as 1; empty texts have no tokens.

    Args:
        path: The file or folder.
        rule: Turns sizes and texts into tokens; by default images of 16 pixels a token.
        columns: Columns by role, for roles that names do not tell: {"width": "W"}; "" uses none.
        skip_bad: Leave out and count rows that cannot be read. Otherwise they are refused.

    Raises:
        ConfigError: Rows cannot be read, no column has lengths, or a column that seems to have
            frames, seconds or text would not be used.
    """
    if unknown := (columns or {}).keys() - ROLES.keys():
        raise ConfigError(f"columns {min(unknown)}=..: give one of {', '.join(ROLES)}")
    reading = _Reading(Path(path), rule or TokenRule(), columns or {}, [] if skip_bad else None)
    counts = list(reading.counts())
    num_samples = sum(text.size for text, *_ in counts)
    if reading.num_bad and not (skip_bad and num_samples):
        advice = "--skip-bad leaves them out" if num_samples else _OTHERWISE
        rows = f"{reading.num_bad} row{'s' * (reading.num_bad > 1)}"
        raise ConfigError(f"{path}: {rows} cannot be read: {'; '.join(reading.bad)}; {advice}")
    if num_samples == 0:
        left = f": {reading.num_left_out} are left out by its keys" if reading.num_left_out else ""
        raise ConfigError(f"{path} holds no samples{left}: give the file or folder that has them")
    has_size = reading.used.keys() & {"width", "size"}
    has_frames = reading.used.keys() & {"frames", "duration"} or "frames" in (columns or {})
    used = reading.used.values()
    ignored = tuple(name for name in reading.names if name.strip() and name not in used)
    if has_size and not has_frames and reading.reads_clips:
        of = f", of {named(ignored)}" if ignored else ""
        fix = f"--columns frames=F{of}, or give --columns frames= if all samples are images"
        text = f"{path}: has no known column of frames, and the model reads clips: give {fix}"
        raise QuestionError(text, columns="frames=")
    text, cross, grids = (np.concatenate(parts) for parts in zip(*counts, strict=True))
    tokens, skipped = (text, cross, grids), (tuple(reading.bad), reading.num_bad)
    rest = reading.example, reading.num_left_out
    return Manifest(reading.path, *tokens, reading.used, ignored, *skipped, *rest)


class _Reading:
    """A pass over the rows of a data set, with notes for its summary."""

    def __init__(
        self, path: Path, rule: TokenRule, chosen: Mapping[str, str], wrong: list[str] | None
    ) -> None:
        self.path = path
        self.used: dict[str, str] = {}
        self.names: dict[str, None] = {}  # a set in the order of the file
        self.bad: list[str] = []
        self.num_bad = 0
        self.example = ""
        self.num_left_out = 0
        self.reads_clips = rule.frame_stride is not None
        self._rule, self._chosen, self._wrong = rule, chosen, wrong
        self._roles: dict[str, str] = {}  # of the newest batch: rows of JSON may differ in columns

    def counts(self) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Yield text tokens (n,), cross tokens (n,) and grids (n, 3) of each batch's good rows."""
        num_rows: dict[Path, int] = {}
        for batch in read_batches(self.path, self._wanted, self._wrong):
            first = num_rows.get(batch.file, 0)
            num_rows[batch.file] = first + batch.num_rows
            if batch.data is not None:
                self.reads_clips |= batch.data.has_clips
            if batch.num_rows:
                self.used |= self._roles
                yield self._count(batch, first + 1)
        self.num_bad += len(self._wrong or ())
        self.bad = [*self.bad, *(self._wrong or ())][:_MOST_SHOWN]

    def _wanted(self, names: Sequence[str]) -> Collection[str]:
        """Return the columns to read: those with a role, and those that may be text unnamed."""
        self.names |= dict.fromkeys(names)
        try:
            self._roles = roles_of(names, self._chosen, has_rate=self._rule.fps is not None)
        except ConfigError as error:
            error.args = (f"{self.path}: {error}",)
            raise
        needed = set(self._roles.values())
        if not self._roles.keys() & TEXTS and "text" not in self._chosen:
            needed |= set(filter(may_be_text, names))
        return [name for name in names if name in needed]

    def _count(self, batch: Batch, first: int) -> tuple[Ints, Ints, Ints]:
        """Count the tokens of a batch, which begins with row `first` of its file."""
        self._look_for_texts(batch)
        rows = _Rows(batch, self._roles, self._rule)
        try:
            rows.read()
            chosen: Sequence[Take | None] = batch.data.takes if batch.data else [None]
            taken = {take: rows.taken(take) for take in dict.fromkeys(chosen)}
            takes = [taken[take] for take in chosen]
        except ConfigError as error:
            error.args = (f"{self.path}: {error}",)
            raise
        for row in sorted(rows.reasons)[: _MOST_SHOWN - len(self.bad)]:
            self.bad.append(f"{batch.file.name}, row {first + row}: {rows.reasons[row]}")
        good = ~rows.is_wrong
        self.num_bad += int(rows.is_wrong.sum())
        for grid, times in takes:
            if not self.example and (is_used := good & (times > 0)).any():
                row = int(is_used.argmax())
                self.example = f"row {first + row}: {rows.example(row, grid[row])}"
        self.num_left_out += sum(int((times[good] == 0).sum()) for _, times in takes)
        parts = [
            [np.repeat(table[good], times[good], axis=0) for table in (rows.text, rows.cross, grid)]
            for grid, times in takes
        ]
        text, cross, grid = (np.concatenate(tables) for tables in zip(*parts, strict=True))
        return text, cross, grid

    def _look_for_texts(self, batch: Batch) -> None:
        """Refuse an unused column whose values are text."""
        for name in batch.columns.keys() - set(self._roles.values()):
            sample = _listed(batch.columns[name][:_SAMPLED])
            texts = [value for value in sample if isinstance(value, str)]
            if texts and sum(len(text.split()) for text in texts) >= _FEW_WORDS * len(texts):
                what = f"{self.path}: has the column {shown(name)}, which holds text"
                fix = f"use it by --columns text={name}, or count no text by --columns text="
                raise QuestionError(f"{what} ({shown(texts[0])}): {fix}", columns=f"text={name}")


class _Rows:
    """The rows of a batch: their tokens, and why some cannot be read."""

    def __init__(self, batch: Batch, roles: Mapping[str, str], rule: TokenRule) -> None:
        self._batch, self._roles, self._rule = batch, roles, rule
        self.text, self.cross = np.zeros((2, batch.num_rows), dtype=np.int64)
        self.is_wrong = np.zeros(batch.num_rows, dtype=bool)
        self.reasons: dict[int, str] = {}  # of the first rows that are wrong
        self._sound = np.zeros(batch.num_rows, dtype=np.int64)  # tokens of a duration without sizes
        self._owners = np.zeros(0, dtype=np.int64)  # row of each picture, the sample itself first
        self._sizes = np.zeros((0, 4))  # width, height, frames and their rate of each picture

    def read(self) -> None:
        """Read tokens of texts and sizes of pictures; note rows that cannot be read."""
        tokens = self._whole("tokens", 0)
        by_shape = np.isnan(tokens)
        self.text[~by_shape] = tokens[~by_shape]
        if self._roles.keys() == {"tokens"}:
            self._refuse("tokens", by_shape)
        elif by_shape.any():
            self._read_shapes(by_shape)

    def taken(self, take: Take | None) -> tuple[Ints, Ints]:
        """Return the grid of each row (n, 3), and how many samples a trainer makes of it (n,)."""
        grid = np.zeros((self._batch.num_rows, 3), dtype=np.int64)
        times = np.ones(self._batch.num_rows, dtype=np.int64)
        grid[:, :] = np.stack([self._sound, self._sound > 0, self._sound > 0], axis=1)
        rule, sizes, owners = self._rule, self._sizes.T, self._owners
        if take is not None and owners.size:
            width, height, frames, often = take(sizes[0], sizes[1], rule.frames_taken(*sizes[2:]))
            times[owners[::-1]] = often[::-1]
            sides = (width, height) if rule.bucket is None else sizes[:2]
            rule, sizes = replace(rule, fps=None, max_frames=None), (*sides, frames, frames)
        if owners.size:
            grids = rule.grids(*sizes)
            counts = np.bincount(owners, minlength=times.size)[:, None]
            total = np.bincount(owners, grids.prod(axis=1), minlength=times.size)
            grid[owners] = grids
            grid = np.where(counts > 1, total[:, None].astype(np.int64) ** [0, 0, 1], grid)
            is_small = np.bincount(owners, grids.min(axis=1) < 1, minlength=times.size) > 0
            reason = f"smaller than a token of {rule.pixels} x {rule.pixels} pixels"
            self._refuse("", is_small & (times > 0), reason)
        total = self.text + grid.astype(np.float64).prod(axis=1)
        self._refuse("", total > MAX_LENGTH, f"more than {MAX_LENGTH} tokens")
        return grid, times

    def _read_shapes(self, by_shape: Any) -> None:
        is_visual = self._roles.keys() & {"width", "size", "image"}
        is_crosswise = self._rule.is_crosswise and is_visual
        (self.cross if is_crosswise else self.text)[by_shape] = self._texts()[by_shape]
        if self._roles.keys() & {"width", "size"}:
            self._measure(by_shape)
        elif "image" in self._roles:
            self._read_headers("image", by_shape)
        elif "duration" in self._roles and self._rule.fps is not None:
            seconds = self._numbers("duration")
            self._refuse("duration", by_shape & ~(seconds > 0))
            seconds = np.clip(np.nan_to_num(seconds), 0.0, 1e9)[by_shape]
            self._sound[by_shape] = np.floor(seconds * self._rule.fps + 1e-6)
        for role in self._roles:
            if role.startswith("reference"):
                self._read_headers(role, by_shape & ~self.is_wrong)

    def example(self, row: int, grid: Ints) -> str:
        """Describe the cells of a row and its tokens."""
        facts = ", ".join(f"{role} {self._shown(role, row)}" for role in self._roles)
        frames, rows, columns = grid.tolist()
        counts, notes = list[str](), list[str]()
        if grid.prod():
            counts.append(f"{frames} x {rows} x {columns} = {grid.prod():,} visual tokens")
        if texts := int(self.text[row] + self.cross[row]):
            if self.cross[row]:
                notes.append(", used by cross-attention only")
            if self._rule.tokenize is None and self._roles.keys() & {"text", "talk"}:
                notes.append(f" (estimated: {BYTES_PER_TOKEN} bytes per token)")
            counts.append(f"{texts:,} text tokens{''.join(notes)}")
        return f"{facts}: {'; '.join(counts) or 'no tokens'}"

    def _shown(self, role: str, row: int) -> str:
        value = _listed(self._batch.columns[self._roles[role]][row : row + 1])[0]
        text = "missing" if value in (None, "") else shown(value)
        return text if role in ("text", "talk", "size", "image") else text.strip("'")

    def _refuse(self, role: str, is_wrong: Any, reason: str = "") -> None:
        """Mark rows as wrong; the default reason is the value of a role's column."""
        is_new = is_wrong & ~self.is_wrong
        for row in np.flatnonzero(is_new)[:_MOST_SHOWN].tolist():
            value = "" if reason else self._shown(role, row)
            self.reasons[row] = reason or f"{self._roles[role]} is {value}"
            if _COMMA.fullmatch(value):
                self.reasons[row] += ", and numbers have no comma: write 1280 or 3.5"
        self.is_wrong |= is_new

    def _numbers(self, role: str) -> Floats:
        """Return the numbers of a role's column, NaN for empty cells and without a column."""
        if role not in self._roles:
            return np.full(self._batch.num_rows, np.nan)
        return _numbers(self._batch.columns[self._roles[role]])

    def _whole(self, role: str, least: int) -> Floats:
        """Return the whole numbers of a role's column, NaN for empty cells; refuse others."""
        values = self._numbers(role)
        most = 2.0**53 if least == 0 else MAX_LENGTH
        is_wrong = (values < least) | (values > most) | (np.floor(values) < values)
        self._refuse(role, is_wrong)
        return np.where(is_wrong, np.nan, values)

    def _texts(self) -> Ints:
        """Return the text tokens of each row."""
        if "text_tokens" in self._roles:
            return np.nan_to_num(self._whole("text_tokens", 0)).astype(np.int64)
        role = "text" if "text" in self._roles else "talk"
        if role not in self._roles:
            return self.text
        column, name = self._batch.columns[self._roles[role]], self._roles[role]
        first = [value for value in _listed(column[:_MOST_SEEN]) if value not in (None, "")]
        if role == "text" and first and all(map(_is_number, first)):
            fix = f"if it counts tokens, --columns text_tokens={name}"
            raise ConfigError(f"has numbers in {name!r}, not text: give another column, or {fix}")
        if self._rule.tokenize is None and (sizes := _byte_lengths(column)) is not None:
            return np.ceil(sizes / BYTES_PER_TOKEN).astype(np.int64)
        texts = [_texts_in(value, role) for value in _listed(column)]
        counts = iter(self._rule.count([text for row in texts for text in row]))
        return np.array([max((next(counts) for _ in row), default=0) for row in texts], np.int64)

    def _measure(self, by_shape: Any) -> None:
        """Read the sizes of rows from their columns."""
        if "width" in self._roles:
            sides = self._whole("width", 1), self._whole("height", 1)
            self._refuse("width", by_shape & np.isnan(sides[0]))
            self._refuse("height", by_shape & np.isnan(sides[1]))
        else:
            pairs = [_pair(value) for value in _listed(self._batch.columns[self._roles["size"]])]
            sides = tuple(np.array(pairs, dtype=np.float64).reshape(-1, 2).T)
            self._refuse("size", by_shape & np.isnan(sides[0]))
        if "duration" in self._roles:
            seconds, fps = self._numbers("duration"), self._numbers("fps")
            fps = fps if self._rule.fps is None else np.full_like(fps, self._rule.fps)
            self._refuse("duration", seconds <= 0)
            self._refuse("fps", ~np.isnan(seconds) & ~(fps > 0))
            frames = np.maximum(np.floor(seconds * fps + 1e-6), 1.0)
        else:
            frames, fps = self._whole("frames", 1), self._numbers("fps")
        frames = np.where(np.isnan(frames), 1.0, frames)
        if self._rule.fps is not None:
            self._refuse("fps", (frames > 1) & ~(fps > 0))
        good = by_shape & ~self.is_wrong
        self._owners = np.flatnonzero(good)
        self._sizes = np.stack([*sides, frames, fps], axis=1)[good]

    def _read_headers(self, role: str, by_shape: Any) -> None:
        """Read sizes from the headers of the files of each row, which may have several."""
        values = _listed(self._batch.columns[self._roles[role]])
        size_of = dict(zip(self._owners.tolist()[::-1], self._sizes.tolist()[::-1], strict=True))
        owners: list[int] = []
        sizes: list[Sequence[float]] = []
        missing: dict[int, str] = {}
        for row in np.flatnonzero(by_shape).tolist():
            value = values[row]
            for picture in value if isinstance(value, list) else [value]:
                if role == "image" or self._batch.data is None:
                    size = _visual_size(picture, self._batch.folder)
                else:  # trainers scale references to the size of their image
                    size = size_of.get(row) if picture else None
                if size is not None:
                    owners.append(row)
                    sizes.append(size)
                elif picture or (role == "image" and "talk" not in self._roles):
                    missing.setdefault(row, f"there is no image, nor a size, of {shown(picture)}")
        self.reasons |= dict(list(missing.items())[:_MOST_SHOWN])
        self.is_wrong[list(missing)] = True
        self._owners = np.append(self._owners, np.array(owners, dtype=np.int64))
        self._sizes = np.append(self._sizes, np.array(sizes).reshape(-1, 4), axis=0)


def _visual_size(value: Any, folder: Path) -> tuple[float, ...] | None:
    """Read width, height, frames and their rate from the header of an image or a video."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and (path := folder / value).is_file():
        if path.suffix.lower() in VIDEO_SUFFIXES:
            return video_size(path)
        size = image_size(path)
    else:
        size = image_size(io.BytesIO(value)) if isinstance(value, bytes) else None
    return None if size is None else (*size, 1.0, 1.0)


def _listed(column: Any) -> list[Any]:
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)


def _numbers(column: Any) -> Floats:
    """Return a column as numbers: of a list its length, NaN if empty, -inf for other values."""
    if hasattr(column, "type"):
        import pyarrow as pa

        compute: Any = importlib.import_module("pyarrow.compute")
        kind = column.type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            values = np.array(column.cast(pa.float64(), safe=False).fill_null(0.0))
            values[~np.isfinite(values)] = -np.inf
            return np.where(np.array(column.is_null()), np.nan, values)
        if pa.types.is_list(kind):
            return _numbers(compute.list_value_length(column))
        if pa.types.is_string(kind):
            text = compute.utf8_trim_whitespace(column)
            is_number = compute.match_substring_regex(text, _NUMBER)
            values = compute.if_else(is_number, text, None).cast(pa.float64()).fill_null(-np.inf)
            is_empty = compute.fill_null(compute.equal(text, ""), True)
            return np.where(np.array(is_empty), np.nan, np.array(values, dtype=np.float64))
    return np.array([_number(value) for value in _listed(column)], dtype=np.float64)


def _is_number(value: Any) -> bool:
    return not isinstance(value, list | tuple | dict) and _number(value) > -np.inf


def _number(value: Any) -> float:
    match value:
        case None | "":
            return np.nan
        case list():
            return len(value)
        case str() if re.match(_NUMBER, value):
            return float(value)
        case int() | float() if not isinstance(value, bool) and abs(value) < 1e300:
            return float(value)
        case _:
            return -np.inf


def _byte_lengths(column: Any) -> Floats | None:
    """Count the UTF-8 bytes of each text of an arrow column; return None for other columns."""
    if not hasattr(column, "type"):
        return None
    import pyarrow as pa

    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return None
    compute: Any = importlib.import_module("pyarrow.compute")
    return np.array(compute.binary_length(column).fill_null(0), dtype=np.float64)


def _texts_in(value: Any, role: str) -> list[str]:
    """Return the texts of a cell: those of a list, or the joined turns of a conversation."""
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        return [str(value)]
    if role == "text" and not any(isinstance(item, dict) for item in value):
        return [str(item) for item in value]
    parts = [part for turn in value for part in _parts(turn, role)]
    return [re.sub("<(image|video|audio)>", "", "".join(parts))]


def _parts(turn: Any, role: str) -> list[str]:
    """Return the texts of a turn in the formats of sharegpt, chat templates and the_cauldron."""
    if not isinstance(turn, dict):
        return [str(turn)]
    names = next(([name] for name in _CONTENTS if name in turn), _SPEAKERS & turn.keys())
    if not names:
        wrong = f"has turns with {named(turn)}, and no {' or '.join(_CONTENTS)}"
        raise ConfigError(f"{wrong}: count no text by --columns {role}=")
    contents = [turn[name] for name in sorted(names)]
    parts = [part for text in contents for part in (text if isinstance(text, list) else [text])]
    return [str(part.get("text", "") if isinstance(part, dict) else part or "") for part in parts]


def _pair(value: Any) -> tuple[float, float]:
    """Return two sides in pixels from "1024x576" or [1024, 576], or two NaN."""
    if isinstance(value, list | tuple) and len(value) == 2:
        value = "{}x{}".format(*value)
    match = _PAIR.fullmatch(value) if isinstance(value, str) else None
    sides = (float(match[1]), float(match[2])) if match else (np.nan, np.nan)
    return sides if min(sides) >= 1 else (np.nan, np.nan)
