"""Files that commands write for the user."""

from pathlib import Path

from bascule.errors import ConfigError
from bascule.report.page import Report, command_line, render


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
