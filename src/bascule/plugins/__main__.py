"""Run a script, and let its Trainer accept ``--report_to bascule``, which adds a callback."""

import contextlib
import runpy
import sys
from collections.abc import Iterator, Mapping, MutableMapping
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


def run_script() -> None:
    """Run the script in the first argument, with the other arguments."""
    sys.argv = sys.argv[1:]
    if not Path(sys.argv[0]).is_file():
        sys.exit(f"bascule: there is no script {sys.argv[0]}")
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    """Run a script; without arguments print the folder of the adapters."""
    if len(sys.argv) < 2:
        sys.stdout.write(f"{Path(__file__).parent}\n")
        return
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    from bascule.plugins.hf_trainer import BalanceCallback

    with entered(INTEGRATION_TO_CALLBACK, {"bascule": BalanceCallback}):
        run_script()


if __name__ == "__main__":
    main()
