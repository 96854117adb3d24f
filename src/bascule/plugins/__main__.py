"""Runs a script with the callback "bascule" among those that ``--report_to`` of a Trainer names."""

import sys
from pathlib import Path

from bascule.plugins.scripts import entered, run_script


def main() -> None:
    """Run a script with its arguments; without one, print the folder of the adapters."""
    if len(sys.argv) < 2:
        sys.stdout.write(f"{Path(__file__).parent}\n")
        return
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    from bascule.plugins.hf_trainer import BalanceCallback

    with entered(INTEGRATION_TO_CALLBACK, "bascule", BalanceCallback):
        run_script(sys.argv[1:])


if __name__ == "__main__":
    main()
