"""Read rows of data sets from Parquet, Arrow, CSV, JSON, tar shards, and folders.

Only the wanted columns are read, in batches of rows, so that memory stays constant if the format
allows it. If the file is a trainer's configuration, the data sets that it names are read.
"""

import csv
import importlib
import io
import json
import re
import tarfile
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, cast

from bascule.checks import shown
from bascule.errors import ConfigError
from bascule.files import check_regular, parse_json, to_path
from bascule.workload.trainers import DataSet, data_sets

Wanted = Callable[[Sequence[str]], Collection[str]]
"""Chooses columns from the names of all columns."""

IMAGE_SUFFIXES = frozenset(
    ".avif .bmp .gif .jfif .jpeg .jpg .pbm .pgm .png .ppm .tga .tif .tiff .webp".split()
)
VIDEO_SUFFIXES = frozenset((".m4v", ".mkv", ".mov", ".mp4", ".webm"))

_COMPRESSED = frozenset((".gz", ".zst", ".bz2", ".lz4"))
_BATCH_ROWS = 2**16
_HEAD_BYTES = 2**20
_BLOCK_CHARS = 2**22
_MOST_NESTS = 1000
_SETTING = frozenset(("instance_data_dir", "dataset_type"))  # keys of SimpleTuner's configurations
_SPLIT = re.compile("(train|test|validation|valid|val|dev)(?![a-z])")


@dataclass(frozen=True, slots=True)
class Batch:
    """Some rows of one file.

    Attributes:
        file: The file or folder.
        columns: Columns by name, of equal length: pyarrow arrays, or lists of values.
        data: The data set of a trainer's configuration with these rows; None if there is none.
    """

    file: Path
    columns: Mapping[str, Any]
    data: DataSet | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows of each column."""
        return len(next(iter(self.columns.values()), ()))

    @property
    def folder(self) -> Path:
        """The folder that relative paths in rows start from."""
        return self.file if self.file.is_dir() else self.file.parent


def read_batches(
    path: str | Path, wanted: Wanted, wrong: list[str] | None = None
) -> Iterator[Batch]:
    """Yield the wanted columns of a data set in batches of rows.

    Args:
        path: A .parquet, .arrow, .csv, .tsv, .json, .jsonl, .tar or .toml file, or a folder of such
            files or of images. Text files may be compressed as .gz, .zst, .bz2 or .lz4.
        wanted: Receives the names of all columns, and returns those to read.
        wrong: Receives lines of a CSV file with too few or too many cells; None: these are errors.
    """
    path = to_path(path)
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file or folder")
    check_regular(path)
    if path.is_dir():
        yield from _folder(path, wanted, wrong)
        return
    suffix = _suffix(path)
    if suffix not in _READERS:
        what = f"{path}: cannot read {suffix or 'a file without a suffix'}"
        fix = f"give one of {', '.join(_READERS)}, or a folder of them or of images"
        raise ConfigError(
            f"{what}: {fix}, such as the folder_path of a configuration of ai-toolkit"
        )
    try:
        yield from _READERS[suffix](path, wanted, wrong)
    except ConfigError:
        raise
    except (OSError, ValueError, EOFError, RecursionError, csv.Error, tarfile.TarError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ConfigError(f"{path}: cannot be read as {suffix}: {reason[:300]}") from None


def _suffix(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return ([suffix for suffix in suffixes if suffix not in _COMPRESSED] or [""])[-1]


def _open(path: Path) -> Any:
    """Open a file to read its bytes, decompressed."""
    import pyarrow as pa

    return pa.input_stream(str(path), compression="detect")


def _encoding(head: bytes) -> str:
    """Guess the encoding of a text from its first bytes."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    try:
        head[: head.rfind(b"\n") + 1 or None].decode("utf-8")
    except UnicodeDecodeError:
        return "latin-1"
    return "utf-8-sig"


def _parquet(path: Path, wanted: Wanted, _: object) -> Iterator[Batch]:
    import pyarrow as pa
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        chosen = list(wanted(list(_flat(file.schema_arrow.empty_table()))))
        for batch in file.iter_batches(_BATCH_ROWS, columns=chosen):
            yield Batch(path, _flat(pa.Table.from_batches([batch])))


def _arrow(path: Path, wanted: Wanted, _: object) -> Iterator[Batch]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        try:
            batches: Any = pa.ipc.open_stream(file)
        except pa.ArrowInvalid:
            opened = pa.ipc.open_file(file)
            batches = map(opened.get_batch, range(opened.num_record_batches))
        for batch in batches:
            flat = _flat(pa.Table.from_batches([batch]))
            yield Batch(path, {name: flat[name] for name in wanted(list(flat))})


def _flat(table: Any) -> dict[str, Any]:
    """Return the columns of a table by name, with fields of structs as "struct.field"."""
    import pyarrow as pa

    columns: dict[str, Any] = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        is_struct = pa.types.is_struct(field.type)
        if is_struct and not _is_picture([inner.name for inner in field.type]):
            columns |= _flat(pa.Table.from_arrays([column], [field.name]).flatten())
        else:
            columns[field.name] = column.combine_chunks()
    return columns


def _is_picture(names: Collection[str]) -> bool:
    """Return True for the fields of a picture in data sets of the Hugging Face Hub."""
    return "bytes" in names and {*names} <= {"bytes", "path"}


def _csv(path: Path, wanted: Wanted, wrong: list[str] | None) -> Iterator[Batch]:
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    with _open(path) as file:
        parts = iter(partial(file.read, _HEAD_BYTES), b"")
        head = next(parts, b"")
        num_quotes = sum(part.count(b'"') for part in chain([head], parts))
    encoding = _encoding(head)
    if num_quotes % 2 and encoding != "utf-16":
        fault = f"{path}: a text begins with a double quote and does not end with one"
        raise ConfigError(f"{fault}: write quotes within texts twice")
    text = head.decode(encoding, "replace")
    line = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = max(",;\t|", key=line.count)
    names = next(csv.reader(io.StringIO(text.lstrip()), delimiter=delimiter), [])
    plain = [name.strip() for name in names]
    if twice := [name for name in plain if name and plain.count(name) > 1]:
        raise ConfigError(f"{path}: two columns are named {shown(twice[0])}: rename one")

    def skip(row: Any) -> str:
        if wrong is None:
            return "error"
        wrong.append(f"{path}: {row.actual_columns} cells, not {row.expected_columns}: {row.text}")
        return "skip"

    with _open(path) as file:
        reader = arrow_csv.open_csv(
            file,
            arrow_csv.ReadOptions(encoding=encoding, block_size=2**22),
            arrow_csv.ParseOptions(
                delimiter=delimiter, newlines_in_values=True, invalid_row_handler=skip
            ),
            arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), include_columns=list(wanted(names))
            ),
        )
        for batch in reader:
            yield Batch(path, dict(zip(batch.schema.names, batch.columns, strict=True)))


def _json(path: Path, wanted: Wanted, _: object) -> Iterator[Batch]:
    with _open(path) as file:
        encoding = _encoding(file.read(_HEAD_BYTES))
    with _open(path) as file, io.TextIOWrapper(file, encoding) as text:
        first = next((line for line in text if line.strip()), "[]")
        try:
            value = json.loads(first)
        except ValueError:
            value = None
        rest = next(text, "")
        is_lines = isinstance(value, dict) and (rest.strip() or _suffix(path) != ".json")
        if not is_lines and (value is None or not rest.strip()):  # else lines of lengths
            value = json.loads(first + rest + text.read())
    settings = cast(list[Any], value) if isinstance(value, list) else []
    if is_lines:
        yield from _json_lines(path, wanted, encoding)
    elif any(
        isinstance(setting, dict) and not _SETTING.isdisjoint(setting) for setting in settings
    ):
        yield from _configured(path, settings, wanted)
    else:
        yield from _batched(path, _rows_in(value, path), wanted)


def _json_lines(path: Path, wanted: Wanted, encoding: str) -> Iterator[Batch]:
    """Read blocks of lines by pyarrow, or by Python if pyarrow refuses, as on mixed types."""
    import pyarrow as pa
    from pyarrow import json as arrow_json

    num_lines, rest = 0, ""
    with _open(path) as file, io.TextIOWrapper(file, encoding) as text:
        for part in chain(iter(partial(text.read, _BLOCK_CHARS), ""), ["\n"]):
            lines, end, rest = (rest + part).rpartition("\n")
            block = None
            if lines.strip() and all(map(_is_flat, lines.split("\n"))):
                with suppress(pa.ArrowInvalid):
                    block = _flat(arrow_json.read_json(pa.BufferReader(lines.encode())))
            if block is None:
                yield from _batched(path, _parsed(lines, path, num_lines), wanted)
            else:
                yield Batch(path, {name: block[name] for name in wanted(list(block))})
            num_lines += (lines + end).count("\n")


def _is_flat(line: str) -> bool:
    """Return False for null and for deep nests of objects, on which pyarrow 26 crashes."""
    return line.lstrip()[:1] in ("", "{") and line.count("{") + line.count("[") < _MOST_NESTS


def _parsed(lines: str, path: Path, num_before: int) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(lines.split("\n"), start=num_before + 1):
        if line.strip():
            row = parse_json(line, f"{path}, line {number}")
            if not isinstance(row, dict):
                wrong = f"{path}, line {number}: {shown(row)}"
                raise ConfigError(f"{wrong}: write an object with names")
            yield cast(dict[str, Any], row)


def _rows_in(value: Any, path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a JSON document: of a list, of an object with one list, or by path."""
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list)]
        if len(lists) == 1:
            value = lists[0]
        elif value and all(isinstance(item, dict) for item in value.values()):
            value = [{"file_name": name, **row} for name, row in value.items()]
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        wrong = f"{path}: is {shown(value)}: give a list of rows with names"
        raise ConfigError(f"{wrong}; for lists of lengths use --file")
    yield from cast(list[dict[str, Any]], value)


def _batched(path: Path, rows: Iterator[Mapping[str, Any]], wanted: Wanted) -> Iterator[Batch]:
    while part := list(islice(rows, _BATCH_ROWS)):
        flat = [_flat_row(row) for row in part]
        names = wanted(list(dict.fromkeys(name for row in flat for name in row)))
        yield Batch(path, {name: [row.get(name) for row in flat] for name in names})


def _flat_row(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        key = prefix + name
        is_nested = isinstance(value, dict) and not _is_picture(value)
        flat |= _flat_row(value, f"{key}.") if is_nested else {key: value}
    return flat


def _shard_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield a row for each sample of a WebDataset shard; only headers of images are read."""

    def key(member: tarfile.TarInfo) -> str:
        folder, _, name = member.name.rpartition("/")
        return f"{folder}/{name.partition('.')[0]}"

    with tarfile.open(path) as shard:
        files = (member for member in shard if member.isfile())
        for name, members in groupby(files, key):
            row: dict[str, Any] = {"key": name.strip("/")}
            for member in members:
                suffix, content = Path(member.name).suffix.lower(), shard.extractfile(member)
                assert content is not None
                if suffix == ".json":
                    row |= json.load(content)
                elif suffix == ".txt":
                    row.setdefault("caption", content.read().decode("utf-8", "replace"))
                elif suffix in IMAGE_SUFFIXES:
                    width, height = image_size(content) or (None, None)
                    row = {"width": width, "height": height} | row
            yield row


def image_size(file: Any) -> tuple[int, int] | None:
    """Read width and height from the header of an image (path or open file); None: no image."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            return image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def load_av(where: object, instead: str = "") -> Any:
    """Import PyAV, which reads videos; the ConfigError for a missing PyAV ends with `instead`."""
    try:
        return importlib.import_module("av")
    except ImportError:
        wrong = f"{where}: PyAV, for videos, is not installed"
        raise ConfigError(f"{wrong}: pip install 'bascule[video]'{instead}") from None


def video_size(path: Path) -> tuple[float, ...] | None:
    """Read width, height, frames and frame rate from the header of a video; None: no video."""
    av = load_av(path, ", or give a table with frames, width and height")
    try:
        with av.open(str(path)) as video:
            stream = video.streams.video[0]
            rate = float(stream.average_rate or 0)
            frames = stream.frames or round((video.duration or 0) / av.time_base * rate)
            return stream.width, stream.height, max(frames, 1), rate
    except (av.error.FFmpegError, IndexError):
        return None


def _configured(path: Path, value: Any, wanted: Wanted) -> Iterator[Batch]:
    """Yield rows of all data sets that a trainer's configuration names."""
    try:
        sets = list(data_sets(path, value))
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: has a list, or a value, where keys belong: {error}") from None
    for data in sets:
        places = (path.parent / name for name in data.places)
        place = next((place for place in places if place.exists()), None)
        if place is None:
            wrong = f"{path}: its data {data.places[0]} are not here: run where they are"
            raise ConfigError(f"{wrong}, or give a table with their width and height")
        if place.is_dir():
            rows = _image_rows(place, data.captions, data.is_deep)
            if data.only_captioned:
                rows = (row for row in rows if row["caption"] is not None)
            batches = _batched(place, rows, wanted)
        else:
            batches = read_batches(place, wanted)
        yield from (replace(batch, data=data) for batch in batches)


def _folder(path: Path, wanted: Wanted, wrong: list[str] | None) -> Iterator[Batch]:
    if (splits := path / "dataset_dict.json").is_file():
        names = json.loads(splits.read_text()).get("splits", ())
        raise ConfigError(f"{path}: has the splits {', '.join(names)}: give the folder of one")
    metadata = sorted(path.glob("metadata.*")) + sorted(path.glob("captions.jsonl"))
    files = [file for file in metadata if _suffix(file) in _READERS][:1] or _tables_in(path)
    matches = (_SPLIT.match(part) for file in files for part in file.relative_to(path).parts)
    if len(splits := sorted({match[1] for match in matches if match})) > 1:
        raise ConfigError(f"{path}: has the splits {', '.join(splits)}: give one of them alone")
    for file in files:
        yield from read_batches(file, wanted, wrong)
    if not files:
        yield from _batched(path, _image_rows(path), wanted)


def _tables_in(folder: Path) -> list[Path]:
    """Return all tables of one format in a folder, at any depth, of the first that is there."""
    state = folder / "state.json"
    if state.is_file():
        return [folder / load["filename"] for load in json.loads(state.read_text())["_data_files"]]
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    kinds = [[file for file in files if _suffix(file) == kind] for kind in _SHARDS]
    return next((kind for kind in kinds if kind), [])


def _image_rows(
    folder: Path, captions: Sequence[str] = (".txt",), is_deep: bool = True
) -> Iterator[Mapping[str, Any]]:
    """Yield a row for each image or clip, with the caption of a file beside it."""
    for file in sorted(folder.rglob("*") if is_deep else folder.iterdir()):
        if file.suffix.lower() in IMAGE_SUFFIXES | VIDEO_SUFFIXES:
            texts = (text for text in map(file.with_suffix, captions) if text.is_file())
            beside = next(texts, None)
            caption = beside and beside.read_text("utf-8", "replace").strip()
            yield {"path": str(file.relative_to(folder)), "caption": caption}


_READERS: dict[str, Callable[[Path, Wanted, list[str] | None], Iterator[Batch]]] = {
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".csv": _csv,
    ".tsv": _csv,
    ".json": _json,
    ".jsonl": _json,
    ".ndjson": _json,
    ".tar": lambda path, wanted, _: _batched(path, _shard_rows(path), wanted),
    ".toml": lambda path, wanted, _: _configured(
        path, tomllib.loads(path.read_text("utf-8")), wanted
    ),
}
_SHARDS = (".parquet", ".arrow", ".tar", ".csv", ".tsv", ".jsonl", ".ndjson")
