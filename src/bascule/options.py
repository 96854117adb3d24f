"""Options of commands as dataclasses: annotations of their fields, and a check of all of them."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, cast, get_args, get_type_hints

from bascule.checks import MAX_NUMBER, MAX_WHOLE, number, whole
from bascule.errors import ConfigError

STDOUT = Path("-")
LONGEST_S = 1e7  # longest timeout, in seconds
POSITIONAL = "a value without the name of its option"  # `Annotated[Path, POSITIONAL]`
REPEATED = "a list whose option is given again for each value"


@dataclass(frozen=True)
class Range:
    """Bounds of a field: `Annotated[int | None, Range(1, 256)]`; None passes."""

    least: float = 0
    most: float | None = None  # None: the largest number that `checks` takes


@dataclass(frozen=True)
class NewFile:
    """A file that a command writes, in a folder that exists: `Annotated[Path, NewFile()]`."""

    suffix: str = ""


@dataclass(frozen=True)
class NewFolder:
    """A folder that a command makes, with those above it: `Annotated[Path, NewFolder()]`."""


@dataclass(frozen=True)
class Group:
    """Where a group of `--help` begins; it ends with its class: `Annotated[str, Group("Data")]`."""

    title: str


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Files for the report of a command.

    Attributes:
        json: File for all numbers, as JSON. With - they go to standard output, and the tables to
            standard error.
        report: File for a page with all tables and charts, .html.
    """

    json: Annotated[Path | None, NewFile(), Group("Output")] = None
    report: Annotated[Path | None, NewFile(".html")] = None


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Local ranks of a command.

    Attributes:
        ranks: Local ranks to start. By default one per GPU; without GPUs one per core, at least
            two.
        timeout_s: Longest wait for other ranks in a collective, in seconds.
    """

    ranks: Annotated[int | None, Range(1, 256), Group("Ranks")] = None
    timeout_s: Annotated[float, Range(1.0, LONGEST_S)] = 600.0


def check_options(options: Any) -> None:
    """Refuse fields of a dataclass that are out of range, and files that cannot be written."""
    files: dict[str, str] = {}
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        value: Any = getattr(options, name)
        kind, rules = type_and_rules(hint)
        for rule in rules if value not in (None, STDOUT) else ():
            if isinstance(rule, NewFile):
                check_file(flag(name), cast(Path, value), rule.suffix)
            elif isinstance(rule, NewFolder):
                _check_folder(flag(name), cast(Path, value))
            elif isinstance(rule, Range) and kind is int:
                whole(flag(name), value, int(rule.least), int(rule.most or MAX_WHOLE))
            elif isinstance(rule, Range):
                number(flag(name), value, rule.least, rule.most or MAX_NUMBER)
        if isinstance(value, Path) and value != STDOUT and not os.path.isdir(value):
            other = files.setdefault(os.path.abspath(value), flag(name))
            if other != flag(name):
                names = f"{other} and {flag(name)}"
                raise ConfigError(f"{names} both name {value}: give each a file of its own")


def check_file(option: str, path: Path, suffix: str = "") -> None:
    """Refuse a file that could not be written."""
    if path.suffix != suffix and suffix:
        raise ConfigError(f"{option} {path}: must end in {suffix}")
    if os.path.isdir(path):
        raise ConfigError(f"{option} {path}: is a folder; give the name of a file in it")
    if not os.path.isdir(path.parent):
        raise ConfigError(f"{option} {path}: cannot be written: there is no folder {path.parent}")


def _check_folder(option: str, path: Path) -> None:
    """Refuse a folder that could not be made, or written to."""
    folder = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not os.path.isdir(folder):
        raise ConfigError(f"{option} {path}: {folder} is a file; give a folder")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written: no permission in {folder}")


def refuse(options: Any, names: Iterable[str], reason: str) -> None:
    """Refuse options that were given but have no effect; `reason` says when they have one."""
    for name in names:
        value: Any = getattr(options, name)
        if value != type(options).__dataclass_fields__[name].default:
            values = value if isinstance(value, tuple) else [] if value is True else [value]
            raise ConfigError(f"{' '.join([flag(name), *map(str, values)])}: {reason}")


def flag(name: str) -> str:
    """Return the command-line option of a field: "--max-tokens" for "max_tokens"."""
    return f"--{name.replace('_', '-')}"


def type_and_rules(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the type of a field, without None, and its annotations."""
    kind, *rules = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    kinds = [part for part in get_args(kind) if part is not NoneType]
    return kinds[0] if NoneType in get_args(kind) else kind, tuple(rules)
