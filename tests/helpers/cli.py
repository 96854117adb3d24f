"""Runs the command line, and looks at what a program imports."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from bascule.cli import main

Console = pytest.CaptureFixture[str]
_GOLDENS = Path(__file__).parents[1] / "goldens" / "console"


def options_of(command: str) -> Any:
    """The dataclass of a command's options."""
    module = importlib.import_module(f"bascule.cli.{command.replace('-', '_')}")
    return get_type_hints(module.run)["options"]


def run(capsys: Console, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command line."""
    code = 0
    try:
        main(list(arguments))
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def sentence(capsys: Console, *arguments: str) -> str:
    """The message of a refused command: one line, exit code 2, nothing else."""
    code, out, err = run(capsys, *arguments)
    assert code == 2 and not out, (arguments, code, out)
    assert err.startswith("bascule: ") and "\n" not in err.strip() and len(err) < 1400, err
    return err


def refused(*cases: tuple[str, str]) -> list[Any]:
    """Cases of a command line and a part of its message, for `parametrize`."""
    return [pytest.param(words.split(), said, id=words[:60]) for words, said in cases]


def check_golden(name: str, text: str) -> None:
    """Compare with a file of tests/goldens/console; UPDATE_GOLDENS=1 writes it."""
    path = _GOLDENS / f"{name}.txt"
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if os.environ.get("UPDATE_GOLDENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"read it, then UPDATE_GOLDENS=1: {path}"


def modules_imported_by(*args: str) -> set[str]:
    """Names of all modules that a fresh interpreter imports when it runs with these arguments."""
    process = subprocess.run(
        [sys.executable, "-X", "importtime", *args], capture_output=True, text=True, timeout=600
    )
    # Lines read "import time:   self [us] | cumulative | indented name".
    lines = process.stderr.splitlines()
    errors = [line for line in lines if not line.startswith("import time:")]
    assert process.returncode == 0, "\n".join(errors)
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
