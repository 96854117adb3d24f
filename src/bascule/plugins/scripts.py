"""Runs a script as Python does, once an adapter has been entered in a table of its trainer."""

import contextlib
import runpy
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def entered(table: MutableMapping[Any, Any], name: Any, value: Any) -> Iterator[None]:
    """Within, a table of a trainer has this entry; afterwards it is as it was."""
    before = dict(table)
    table[name] = value
    try:
        yield
    finally:
        table.clear()
        table.update(before)


def run_script(arguments: list[str]) -> None:
    """Run a file as `python FILE ARGUMENTS` does."""
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")
