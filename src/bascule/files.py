"""Read text files that a user names, or raise a ConfigError with the reason."""

import json
from collections.abc import Iterator
from pathlib import Path

from bascule.checks import of_type
from bascule.errors import ConfigError

MAX_LINE = 2**24
"""Most characters of a line."""


def to_path(path: str | Path) -> Path:
    """Return a `Path` of a text or path; ConfigError for another type."""
    return Path(of_type("path", path, (str, Path), "the name of a file"))


def read_lines(path: str | Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file with their line ends."""
    path = to_path(path)
    try:
        check_regular(path)
        with path.open(encoding="utf-8-sig", newline="") as file:
            while line := file.readline(MAX_LINE + 1):
                if len(line) > MAX_LINE:
                    raise ValueError(f"a line has more than {MAX_LINE} characters")
                yield line
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def read_json_lines(path: str | Path) -> Iterator[tuple[str, object]]:
    """Yield the place ("FILE, line 3") and the JSON value of each line that is not empty."""
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, parse_json(line, where)


def check_regular(path: Path) -> None:
    """Refuse pipes and devices, since reading from them may wait for ever."""
    if not path.is_file() and not path.is_dir() and path.exists():
        raise ConfigError(f"cannot read {path}: it is a pipe or a device: save it to a file")


def parse_json(text: str, where: str) -> object:
    """Parse JSON; a ConfigError begins with `where`, such as a file and a line."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
