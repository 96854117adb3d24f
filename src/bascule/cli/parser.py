"""Read the options of a command into their dataclass, and write `--help`, in groups.

`--help` ends with an example: the command that the docstring of the module begins with.
"""

import argparse
import inspect
import os
import re
import textwrap
from dataclasses import MISSING
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import Any, NoReturn, get_args, get_type_hints

from bascule.errors import ConfigError
from bascule.options import POSITIONAL, REPEATED, Group, NewFolder, Range, flag, type_and_rules

# Groups that follow those of a command
_LAST = "Data", "Data to tokens", "Model", "Training", "Machine", "Limits", "Ranks", "Output"


def read_options(module: ModuleType, arguments: list[str]) -> Any:
    """Return the options of a command; ConfigError if they are malformed. `--help` exits."""
    command, kind = arguments[0], get_type_hints(module.run)["options"]
    example = (module.__doc__ or "``").split("`")[1]
    values, unknown = _parser(command, kind, example).parse_known_args(arguments[1:])
    if unknown:
        name, known = unknown[0].partition("=")[0], map(flag, kind.__dataclass_fields__)
        if os.path.exists(name) and "manifest" in kind.__dataclass_fields__:
            raise ConfigError(f"{name}: give the table of your samples by --manifest {quote(name)}")
        near = get_close_matches(name, known, 1, cutoff=0.7) if name.startswith("-") else []
        advice = f"did you mean {near[0]}?" if near else f"see bascule {command} --help"
        raise ConfigError(f"{name}: there is no such option; {advice}")
    lists = {name: tuple(x) for name, x in vars(values).items() if isinstance(x, list)}
    return kind(**vars(values) | lists)


def _parser(command: str, kind: Any, example: str) -> argparse.ArgumentParser:
    hints, defaults = get_type_hints(kind, include_extras=True), kind.__dataclass_fields__
    words, titles = dict[str, str](), dict[str, str]()
    for owner in reversed(kind.__mro__):  # the first class that has a field says its group
        title, text = "", inspect.cleandoc(owner.__doc__ or "").partition("Attributes:")[2]
        words |= re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
        for name, hint in inspect.get_annotations(owner).items():
            rules = type_and_rules(hint)[1]
            title = next((rule.title for rule in rules if isinstance(rule, Group)), title)
            titles.setdefault(name, title)
    first = [name for name in titles if POSITIONAL in type_and_rules(hints[name])[1]]
    usage = " ".join(["bascule", command, *map(str.upper, first), "[OPTIONS]"])
    about = (kind.__doc__ or "").partition("Attributes:")[0]
    parser = _Parser(
        command, usage, about, epilog=f"For example: {example}", add_help=False, allow_abbrev=False,
        formatter_class=partial(_Formatter, max_help_position=26),
        argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    own = [title for title in dict.fromkeys(titles.values()) if title not in _LAST]
    groups = {title: parser.add_argument_group(title) for title in (*own, *_LAST)}
    for name, title in titles.items():
        settings = _settings(name, hints[name], defaults[name].default, words.get(name, ""))
        groups[title].add_argument(name if name in first else flag(name), **settings)
    return parser


def _settings(name: str, hint: Any, default: Any, words: str) -> dict[str, Any]:
    """Return what argparse is told of a field: how it is read, and what `--help` says."""
    kind, rules = type_and_rules(hint)
    ranges = (rule for rule in rules if isinstance(rule, Range) and (rule.most or 1e4) < 1e4)
    facts = [f"{rule.least:g} to {rule.most:g}" for rule in ranges]
    if default not in (None, (), MISSING) and default is not False:
        values = default if isinstance(default, tuple) else [default]
        facts.append(f"default: {' '.join(str(value).removesuffix('.0') for value in values)}")
    settings = {"help": (f"{words} ({'; '.join(facts)})" if facts else words).replace("%", "%%")}
    if kind is bool:
        return settings | {"action": "store_true"}
    element, *more = get_args(kind) or (kind,)
    if more and ... not in more:
        return settings | {"choices": get_args(kind), "metavar": "|".join(get_args(kind))}
    path = "FOLDER" if NewFolder() in rules else "PATH"
    value = {int: "N", float: "X", Path: path}.get(element, "TEXT")
    if REPEATED in rules:
        settings |= {"action": "append"}
    elif more:
        settings |= {"nargs": "*"}
        value = "A B .." if element is str else f"{value} {value} .."
    elif POSITIONAL in rules:
        settings |= {} if default is MISSING else {"nargs": "?", "default": default}
    value = name.upper() if POSITIONAL in rules else value
    return settings | {"type": element, "metavar": value}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace("expected one argument", "give a value")
        message = message.replace("invalid int value:", "give a whole number, not")
        raise ConfigError(message.replace("invalid float value:", "give a number, not"))


class _Formatter(argparse.HelpFormatter):
    """Two columns, lists as "A B ..", and no word torn apart."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar or default_metavar)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)
