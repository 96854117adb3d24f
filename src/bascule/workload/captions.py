"""Captions of photos and clips: text files beside them, or lines of one file."""

from pathlib import Path

from bascule.errors import ConfigError
from bascule.plan.files import parse_json, read_lines


def caption_of(path: Path, listed: dict[str, bytes]) -> bytes:
    """UTF-8 bytes of a photo's caption, without white space around it; empty if it has none."""
    beside = path.with_name(f"{path.name if path.is_dir() else path.stem}.txt")
    if not beside.is_file():
        return listed.get(path.name, b"")
    try:
        return beside.read_bytes().removeprefix(b"\xef\xbb\xbf").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the caption {beside}: {error}") from error


def listed_captions(folder: Path) -> dict[str, bytes]:
    """Captions of ``captions.jsonl`` by file name; empty if there is no such file."""
    path = folder / "captions.jsonl"
    if not path.exists():
        return {}
    captions: dict[str, bytes] = {}
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        match parse_json(line, where):
            case {"file": str(name), "caption": str(caption)}:
                pass
            case row:
                raise ConfigError(f'{where}: needs "file" and "caption", both text, got {row!r}')
        if name in captions:
            raise ConfigError(f"{where}: {name!r} has a caption already")
        captions[name] = caption.encode("utf-8", "replace").strip()
    return captions
