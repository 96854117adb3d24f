"""Runs the command line, and looks at what a program imports."""

import subprocess
import sys

import pytest

from bascule.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command line."""
    code = 0
    try:
        main(list(arguments))
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


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
