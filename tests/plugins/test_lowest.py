"""The lowest versions that pyproject.toml allows: these are installed, and train and split."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ALLOWED = (*PROJECT["dependencies"], *(EXTRAS[of][0] for of in ("diffusers", "lora")))
LOWEST = dict(one.split(">=") for one in (*ALLOWED, *EXTRAS["transformers"]))


def release(version: str) -> str:
    """Return a version without its build and its last zeros."""
    return re.sub(r"(\.0)+$", "", version.partition("+")[0])


INSTALLED = {name: release(importlib.metadata.version(name)) for name in LOWEST}
pytestmark = pytest.mark.skipif(
    INSTALLED["torch"] != release(LOWEST["torch"]), reason="see `make plugins-lowest`"
)


def test_the_lowest_versions_are_installed() -> None:
    assert {name: release(version) for name, version in LOWEST.items()} == INSTALLED


@pytest.mark.parametrize(
    "name",
    [
        "unit/test_golden_plans.py",
        "distributed/test_bag_transformers.py",
        "distributed/test_balanced_diffusers.py",
        "distributed/test_inference_diffusers.py",
        "distributed/test_trainer.py",
    ],
)
def test_they_do_what_the_newest_do(name: str) -> None:
    command = (sys.executable, "-m", "pytest", "-q", "-o", "filterwarnings=", f"tests/{name}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
