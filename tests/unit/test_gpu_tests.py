"""What needs a GPU, as far as it can be told without one: it imports, and it leaves nothing out."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "src/bascule/attention/kernels"


FILES = sorted((ROOT / "tests/gpu").glob("test_*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_imports_and_has_tests_that_are_skipped_without_a_device(path: Path) -> None:
    module = importlib.import_module(f"tests.gpu.{path.stem}")
    assert any(name.startswith("test_") and callable(one) for name, one in vars(module).items())
    marks = next(
        ast.unparse(node.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    )
    assert "pytest.mark.gpu" in marks and "skipif(not torch.cuda.is_available()" in marks


def test_there_are_files_for_a_device() -> None:
    assert len(FILES) >= 8


def names_in(path: Path) -> tuple[set[str], set[str]]:
    """Functions of Triton in a file, and those of them that are launched."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    jitted = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(one) for one in node.decorator_list)
    }
    launched = {
        ast.unparse(node.func.value)
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    }
    return jitted, launched & jitted


def test_the_interpreter_is_given_every_triton_kernel() -> None:
    """It runs what `TritonKernel` launches forward and backward, which is all that there is."""
    of_file = {path.name: names_in(path) for path in sorted((ROOT / "src").rglob("*.py"))}
    assert [name for name, (jitted, _) in of_file.items() if jitted] == ["triton_sparse.py"]
    launched = of_file["triton_sparse.py"][1]
    tree = ast.parse((ROOT / "tests/unit/test_triton_sparse.py").read_text())
    (tested,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KERNELS"
    )
    assert launched == set(tested)
    # Where they are launched, and that the kernel of the tests calls both of these.
    source = ast.parse((KERNELS / "triton_sparse.py").read_text())
    launchers = {
        node.name
        for node in source.body
        if isinstance(node, ast.FunctionDef)
        and any(f"{name}[" in ast.unparse(node) for name in launched)
    }
    assert launchers == {"attend", "gradients"}
    kernel = (KERNELS / "skipping.py").read_text()
    assert all(f"triton_sparse.{name}(" in kernel for name in launchers)
