"""Run a script with a plug-in switched on: ``python -m bascule.plugins [NAME] SCRIPT ..``.

A plug-in is an entry point of "bascule.plugins": a function that returns a context manager, in
which the script runs. Default: "transformers", whose Trainer accepts ``--report_to bascule``.
"""

import contextlib
import runpy
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def entered(table: MutableMapping[Any, Any], entries: Mapping[Any, Any]) -> Iterator[None]:
    """Add entries to a trainer's table, and restore the table when the `with` block ends."""
    before = dict(table)
    table.update(entries)
    try:
        yield
    finally:
        table.clear()
        table.update(before)


def transformers() -> AbstractContextManager[None]:
    """Let transformers' Trainer accept ``--report_to bascule``."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    from bascule.plugins.hf_trainer import BalanceCallback

    return entered(INTEGRATION_TO_CALLBACK, {"bascule": BalanceCallback})


def main() -> None:
    """Run a script; without arguments print the folder of the adapters."""
    if len(sys.argv) < 2:
        sys.stdout.write(f"{Path(__file__).parent}\n")
        return
    plugins, switched_on = entry_points(group="bascule.plugins"), transformers
    if sys.argv[1] in plugins.names:
        switched_on = plugins[sys.argv.pop(1)].load()
    sys.argv = sys.argv[1:]
    script = Path(*sys.argv[:1])
    if not script.is_file():
        names = ", ".join(sorted(plugins.names))
        sys.exit(f"bascule: there is no script {script}; the plug-ins are {names}")
    sys.path[0] = str(script.resolve().parent)
    with switched_on():
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
