"""Text files that a user names: read line by line, or refused with the reason."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path

from bascule.errors import ConfigError
from bascule.plan.checks import of_type

MAX_LINE = 2**24
"""Most characters of a line."""


def to_path(path: str | Path) -> Path:
    """The path, if it is one.

    Raises:
        ConfigError: It is something else.
    """
    return Path(of_type("path", path, (str, Path), "the name of a file"))


def read_lines(path: str | Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, their ends as they are.

    Raises:
        ConfigError: The file cannot be read, or it is a pipe or a device, which may never end, or
            a line is too long. Names the file.
    """
    path = to_path(path)
    try:
        check_regular(path)
        with path.open(encoding="utf-8-sig", newline="") as file:
            while line := file.readline(MAX_LINE + 1):
                if len(line) > MAX_LINE:
                    raise ConfigError(
                        f"cannot read {path}: a line has more than {MAX_LINE} characters"
                    )
                yield line
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot read {path}: {error}") from error


def check_regular(path: Path) -> None:
    """Refuse pipes and devices, since reading one may wait for ever.

    Raises:
        ConfigError: It is not a regular file.
        OSError: There is no such file.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ConfigError(
            f"cannot read {path}: it is a pipe or a device, so save what it gives to a file first"
        )


def parse_json(text: str, where: str) -> object:
    """Parse JSON; ConfigError says where the text is from and what is wrong with it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from error
