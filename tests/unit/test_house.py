"""Rules of CONTRIBUTING that no linter knows."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = sorted((ROOT / "src").rglob("*.py"))
MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_FILES = 400, 70, 12


def test_files_can_be_read_in_one_sitting() -> None:
    long = {path.name: len(path.read_text().splitlines()) for path in SOURCE}
    assert {name: lines for name, lines in long.items() if lines > MOST_LINES} == {}


def test_functions_are_short() -> None:
    long: dict[str, int] = {}
    for path in SOURCE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                long[f"{path.name}: {node.name}"] = (node.end_lineno or 0) - node.lineno + 1
    assert {name: lines for name, lines in long.items() if lines > MOST_LINES_OF_A_FUNCTION} == {}


def test_packages_are_small_and_no_two_files_share_a_name() -> None:
    modules = [path for path in SOURCE if not path.name.startswith("__")]
    sizes = Counter(str(path.parent.relative_to(ROOT)) for path in modules)
    assert {name: size for name, size in sizes.items() if size > MOST_FILES} == {}
    names = Counter(path.name for path in modules)
    assert [name for name, times in names.items() if times > 1] == []


def test_test_modules_do_not_import_each_other() -> None:
    found: list[str] = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and "test_" in (node.module or ""):
                found.append(f"{path.name} imports {node.module}")
    assert found == []


def test_what_lives_as_long_as_the_ranks_is_kept_in_one_module() -> None:
    """A module-level container that is filled later; digests of masks depend on nothing else."""
    allowed = {"world.py: _worlds", "call_marks.py: _digests"}
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
