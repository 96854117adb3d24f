"""Rules of CONTRIBUTING that no linter knows."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = sorted((ROOT / "src").rglob("*.py"))


def test_test_modules_do_not_import_each_other() -> None:
    found: list[str] = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and "test_" in (node.module or ""):
                found.append(f"{path.name} imports {node.module}")
    assert found == []


def test_what_lives_as_long_as_the_ranks_is_kept_in_one_module() -> None:
    """Containers of modules that are filled later; what is kept of a mask depends on it alone."""
    allowed = {"failures.py: _watches", "tiles.py: _of_masks"}
    found: set[str] = set()
    for path in SOURCE:
        for node in ast.parse(path.read_text()).body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            is_call = isinstance(value, ast.Call) and isinstance(
                value.func, ast.Name | ast.Attribute
            )
            name = ast.unparse(value.func).rpartition(".")[2] if is_call else ""  # pyright: ignore
            is_empty = isinstance(value, ast.Dict | ast.List) and not ast.unparse(value).strip(
                "{}[]"
            )
            if (
                is_empty
                or name in ("dict", "list", "set", "defaultdict")
                or name.startswith("Weak")
            ):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target  # pyright: ignore
                found.add(f"{path.name}: {ast.unparse(target)}")
    assert found <= allowed
