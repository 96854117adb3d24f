"""What imports torch and what must not: planning loads fast, and runs on machines without torch."""

import subprocess
import sys

import pytest

from tests.helpers.cli import modules_imported_by


@pytest.mark.parametrize(
    "args",
    [
        ("-c", "import bascule"),
        ("-c", "import bascule.plan"),
        ("-c", "import bascule.workload.traces"),
        ("-m", "bascule.cli", "plan", "--help"),
        ("-m", "bascule.cli", "trace", "--help"),
        ("-m", "bascule.cli", "doctor", "--help"),
        ("-c", "import bascule.sim.simulation, bascule.sim.sparse_study"),
        ("-c", "import bascule; bascule.simulate"),
        ("-c", "import bascule.report.step_picture, bascule.report.sparse_picture"),
        ("-m", "bascule.cli", "simulate", "--lengths", "4/5"),
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


ALONE = """
import importlib, os, pkgutil, sys
import torch.distributed.fsdp, torch.distributed.tensor, diffusers, transformers, numpy, scipy, tyro
import bascule
wanted = ["bascule:" + name for name in dir(bascule) if name != "annotations"]
packages = "attention calibrate comm data integrations plan sim report workload"
for package in packages.split():
    spec = importlib.util.find_spec("bascule." + package)
    found = pkgutil.walk_packages(spec.submodule_search_locations, f"bascule.{package}.")
    wanted += [one.name + ":" for one in found if "triton" not in one.name]
failed = []
for one in wanted:
    pid = os.fork()
    if not pid:
        module, _, name = one.partition(":")
        try:
            loaded = importlib.import_module(module)
            name and getattr(loaded, name)
        except BaseException as error:
            print(one, type(error).__name__, error, flush=True)
            os._exit(1)
        os._exit(0)
    failed += [one] if os.waitpid(pid, 0)[1] else []
print(len(wanted), "modules and names,", len(failed), "failed")
"""


def test_every_module_and_public_name_can_be_imported_first() -> None:
    """A circle of imports shows only to who begins at the wrong end of it."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE], capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, process.stderr
    assert " 0 failed" in process.stdout, process.stdout
