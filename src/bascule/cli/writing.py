"""Files that commands write for the user, and what they show meanwhile."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from bascule.errors import ConfigError
from bascule.options import STDOUT as STDOUT
from bascule.options import check_file
from bascule.report.page import Report, command_line, render

_MOST_NAMED = 2


def check_outputs(**files: Path | None) -> None:
    """Find out before any work that what a command was asked to write could not be written.

    Args:
        files: By option, ``json=..`` for --json, files and folders that the command reads or
            writes; None if the option was not given, `STDOUT` for standard output.

    Raises:
        ConfigError: Two options name the same file, --json is no file in a folder that there is, or
            the page of --report could not be made.
    """
    seen: dict[str, str] = {}
    for name, path in files.items():
        if path is None or path == STDOUT:
            continue
        option = f"--{name.replace('_', '-')}"
        if (other := seen.setdefault(os.path.abspath(path), option)) != option:
            raise ConfigError(
                f"{other} and {option} both name {path}, and one would be written over the other: "
                "give each a file of its own"
            )
    for name in ("json", "picture"):
        path = files.get(name)
        if path is not None and path != STDOUT:
            if path.is_dir():
                raise ConfigError(f"--{name} {path}: is a folder; give the name of a file in it")
            if not path.parent.is_dir():
                raise ConfigError(f"--{name} {path}: cannot be written: no folder {path.parent}")
    if (report := files.get("report")) is not None:
        check_file("--report", report, ".html")


def tell_written(console: Console, *paths: Path) -> None:
    """Say what a command wrote; every file and folder is told this way."""
    many = f"{paths[0].parent} ({len(paths)} files)" if len(paths) > _MOST_NAMED else ""
    text = f"written: {many or ', '.join(map(str, paths))}"
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def write_text(console: Console, option: str, path: Path, text: str) -> None:
    """Write what an option asked for, and say so.

    Raises:
        ConfigError: The file cannot be written; names the option, the path and the reason.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option} {path}: cannot be written: {reason}") from error
    tell_written(console, path)


def write_report(console: Console, path: Path, report: Report) -> None:
    """Write the page of `--report`, and say so. Making a report needs plotly, so ask before.

    Raises:
        ConfigError: The file cannot be written.
    """
    write_text(console, "--report", path, render(report, command_line()))


def write_json(console: Console, path: Path | None, report: dict[str, Any]) -> None:
    """Write a report where --json says: a file, `STDOUT`, or nowhere.

    Raises:
        ConfigError: The file cannot be written.
    """
    text = json.dumps(report, indent=2) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    elif path is not None:
        write_text(console, "--json", path, text)


def progress_bar(console: Console) -> Progress:
    """Rounds that are done, of all."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, console=console, transient=True)
