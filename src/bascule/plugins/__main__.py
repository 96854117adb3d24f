"""Runs a script with the callback "bascule" among those that ``--report_to`` of a Trainer names."""

import runpy
import sys
from pathlib import Path

from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from bascule.plugins.hf_trainer import BalanceCallback


def main() -> None:
    """Run a script with its arguments; without one, print the folder of the adapters."""
    if len(sys.argv) < 2:
        sys.stdout.write(f"{Path(__file__).parent}\n")
        return
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)  # as `python SCRIPT` has it
    INTEGRATION_TO_CALLBACK["bascule"] = BalanceCallback
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        del INTEGRATION_TO_CALLBACK["bascule"]


if __name__ == "__main__":
    main()
