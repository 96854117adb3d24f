"""What imports torch and what must not: planning loads fast, and runs on machines without torch."""

import subprocess
import sys

import pytest


def modules_imported_by(*args: str) -> set[str]:
    """Names of all modules that a fresh interpreter imports when it runs with these arguments."""
    process = subprocess.run(
        [sys.executable, "-X", "importtime", *args], capture_output=True, text=True, timeout=60
    )
    # Lines read "import time:   self [us] | cumulative | indented name".
    lines = process.stderr.splitlines()
    errors = [line for line in lines if not line.startswith("import time:")]
    assert process.returncode == 0, "\n".join(errors)
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}


@pytest.mark.parametrize(
    "args",
    [
        ("-c", "import bascule"),
        ("-c", "import bascule.plan"),
        ("-m", "bascule.cli", "plan", "--help"),
    ],
    ids=" ".join,
)
def test_loads_without_torch(args: tuple[str, ...]) -> None:
    modules = modules_imported_by(*args)
    assert "bascule" in modules
    assert "torch" not in modules


def test_the_check_sees_torch() -> None:
    modules = modules_imported_by("-c", "import bascule.comm")
    assert {"bascule.comm", "torch"} <= modules
