"""What needs a GPU, as far as it can be told without one: it imports, and it leaves nothing out."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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
