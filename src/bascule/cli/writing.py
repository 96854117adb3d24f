"""Files that commands write for the user, and what they show meanwhile."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from bascule.errors import ConfigError
from bascule.report.page import Report, command_line, render

STDOUT = Path("-")


def write_text(option: str, path: Path, text: str) -> None:
    """Write what an option asked for.

    Raises:
        ConfigError: The file cannot be written; names the option, the path and the reason.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option} {path}: cannot be written: {reason}") from error


def write_report(path: Path, report: Report) -> None:
    """Write the page of `--report`.

    Raises:
        ConfigError: The file cannot be written.
    """
    write_text("--report", path, render(report, command_line()))


def write_json(path: Path | None, report: dict[str, Any]) -> None:
    """Write a report where --json says: a file, `STDOUT`, or nowhere.

    Raises:
        ConfigError: The file cannot be written.
    """
    text = json.dumps(report, indent=2) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    elif path is not None:
        write_text("--json", path, text)


def progress_bar(console: Console) -> Progress:
    """Rounds that are done, of all."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, console=console, transient=True)
