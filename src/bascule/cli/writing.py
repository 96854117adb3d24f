"""Files that commands write for the user."""

from pathlib import Path

from bascule.errors import ConfigError


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
