"""Samples of a dataset from a manifest: a JSONL or CSV file with one sample a row."""

import csv
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

from bascule.errors import ConfigError
from bascule.plan.checks import is_int, rate, shown, whole
from bascule.plan.files import read_json_lines, read_lines
from bascule.workload.codes import MAX_LENGTH, PATCH_PIXELS, SampleShape, latent_frames

TOKEN_COLUMNS = ("tokens", "num_tokens", "seq_len", "length")  # the first of them counts
SHAPE_COLUMNS = ("width", "height", "frames", "text_tokens", "caption")  # if none says the tokens

_WHOLE = re.compile("[0-9]{1,18}")
_MOST_NAMED = 20
_log = logging.getLogger(__name__)


def read_manifest(
    path: str | Path,
    *,
    patch: int = PATCH_PIXELS,
    compress_frames: bool = False,
    bytes_per_token: float = 4.0,
    max_samples: int | None = None,
) -> list[SampleShape]:
    """Read the samples of a dataset from a ``.jsonl`` or ``.csv`` manifest, in its order.

    A row has ``tokens`` (or ``num_tokens``, ``seq_len``, ``length``), which are taken as text. Or
    it has ``width`` and ``height`` in pixels (both 0: text only), and may have ``frames`` (default
    1) and ``text_tokens`` or, where that is absent or empty, a ``caption``. Others are ignored, and
    logged once.

    Args:
        path: The file, UTF-8; the first line of a CSV file names its columns.
        patch: Pixels along one side of a visual token; a partial patch at the edge is cut.
        compress_frames: Frames are compressed in time as in data codes with ``s1``.
        bytes_per_token: UTF-8 bytes of caption that make a token: about 4 for English, 1 for byte
            tokens.
        max_samples: Refuse a manifest of more; None reads any number.
    """
    whole("patch", patch, 1)
    rate("bytes_per_token", bytes_per_token)
    path = Path(path)
    if (read_rows := READERS.get(path.suffix.lower())) is None:
        raise ConfigError(f"{path} is not a manifest; use a .jsonl or a .csv file")
    shapes: list[SampleShape] = []
    used: dict[str, None] = {}  # a set in the order of the file
    ignored: dict[str, None] = {}
    for where, row in read_rows(path):
        try:
            columns = _columns(row)
            used |= dict.fromkeys(columns)
            ignored |= dict.fromkeys(name for name in row if name not in columns)
            if columns[0] in TOKEN_COLUMNS:
                text_tokens, grid = _whole(row, columns[0]), (0, 1, 1)
            else:
                text_tokens = _text_tokens(row, bytes_per_token)
                grid = _grid(row, patch, compress_frames)
            image_tokens = math.prod(grid)
            if image_tokens + text_tokens > MAX_LENGTH:
                raise ConfigError(f"the sample has more than {MAX_LENGTH} tokens")
            shapes.append(SampleShape(text_tokens, image_tokens, grid[1], max(grid[2], 1)))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if max_samples is not None and len(shapes) > max_samples:
            raise ConfigError(
                f"{path} has more than {max_samples} samples, the most that can be planned for at "
                "once: give a part of it"
            )
    if not shapes:
        raise ConfigError(f"{path} holds no samples")
    if ignored := {name: None for name in ignored if name not in used}:
        names = _named(used), _named(ignored)
        _log.warning("%s: lengths are from the columns %s; ignored: %s", path, *names)
    return shapes


def _columns(row: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of the columns from which a row's tokens are counted."""
    for name in TOKEN_COLUMNS:
        if row.get(name) not in (None, ""):
            return (name,)
    if columns := tuple(name for name in SHAPE_COLUMNS if name in row):
        return columns
    if empty := [name for name in TOKEN_COLUMNS if name in row]:
        raise ConfigError(f"{empty[0]} is missing")
    raise ConfigError(
        f"none of its columns ({_named(row) or 'it has none'}) is known: give tokens (or "
        f"{', '.join(TOKEN_COLUMNS[1:])}), or width and height, and with these frames, "
        "text_tokens or caption"
    )


def _named(names: Iterable[str]) -> str:
    """Join names of columns for a message on one line, and not all of many."""
    named = [name if name.isidentifier() else shown(name) for name in names]
    left = len(named) - _MOST_NAMED
    return ", ".join([*named[:_MOST_NAMED], *([f"{left} others"] if left > 0 else [])])


def _grid(row: Mapping[str, object], patch: int, compress_frames: bool) -> tuple[int, int, int]:
    """Return rows, latent frames and columns of a row's visual tokens."""
    width, height = _whole(row, "width"), _whole(row, "height")
    num_frames = _whole(row, "frames", default=1, least=1)
    if min(width, height) < patch and max(width, height) > 0:
        raise ConfigError(f"{width} x {height} pixels is smaller than one patch of {patch}")
    frames = latent_frames(num_frames, compressed=compress_frames)
    return height // patch, frames, width // patch


def _text_tokens(row: Mapping[str, object], bytes_per_token: float) -> int:
    caption = row.get("caption") or ""
    if not isinstance(caption, str):
        raise ConfigError(f"caption must be text, got {shown(caption)}")
    num_bytes = len(caption.encode("utf-8", "replace"))
    return _whole(row, "text_tokens", default=math.ceil(num_bytes / bytes_per_token))


def _whole(row: Mapping[str, object], name: str, *, default: int = -1, least: int = 0) -> int:
    """Read a whole number; absent or empty gives the default, if that is >= 0."""
    value = row.get(name)
    if isinstance(value, str):
        value = value.strip()
        value = int(value) if _WHOLE.fullmatch(value) else value
    if value is None or value == "":
        if default >= 0:
            return default
        raise ConfigError(f"{name} is missing")
    if not is_int(value) or value < least:
        raise ConfigError(f"{name} must be a whole number >= {least}, got {shown(value)}")
    return value


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    for where, row in read_json_lines(path):
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: not a JSON object: {shown(row)}")
        yield where, cast(dict[str, object], row)


def _csv_rows(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    reader = csv.reader(read_lines(path), strict=True, skipinitialspace=True)
    header: list[str] = []
    line = 1
    try:
        for cells in reader:
            if header and cells and len(cells) != len(header):
                raise ConfigError(
                    f"{path}, line {line}: {len(cells)} columns, but the first line names "
                    f"{len(header)}"
                )
            if header and cells:
                yield f"{path}, line {line}", dict(zip(header, cells, strict=True))
            if not header:
                header = [cell.strip() for cell in cells]
                if twice := [name for name in header if name and header.count(name) > 1]:
                    raise ConfigError(
                        f"{path}: two columns are named {shown(twice[0])}: remove or rename one"
                    )
            line = reader.line_num + 1
    except csv.Error as error:
        raise ConfigError(f"{path}, line {line}: {error}") from error


READERS = {".jsonl": _jsonl_rows, ".csv": _csv_rows}  # yield rows behind their places
