"""Rules of CONTRIBUTING that no linter knows."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted((ROOT / "src").rglob("*.py"))}


def test_test_modules_do_not_import_each_other() -> None:
    imports = re.compile(r"^\s*(?:from|import) (tests\.\S*\btest_\w+)", re.MULTILINE)
    found = {path: imports.findall(path.read_text()) for path in (ROOT / "tests").rglob("*.py")}
    assert {path.name: modules for path, modules in found.items() if modules} == {}


def test_what_lives_as_long_as_the_ranks_is_kept_in_one_module() -> None:
    """Containers of modules that are filled later; what is kept of a mask or model is its own."""
    allowed = {"failures.py: _watches", "tiles.py: _of_masks"}
    allowed |= {"bag_attention.py: _tried", "context.py: _tried", "threads.py: _ends"}
    found: set[str] = set()
    for path, tree in trees().items():
        for node in tree.body:
            match node:
                case (
                    ast.Assign(targets=[target], value=value)
                    | ast.AnnAssign(target=target, value=ast.expr() as value)
                ):
                    text = ast.unparse(value)
                case _:
                    continue
            called = text.partition("(")[0].partition("[")[0].rpartition(".")[2]
            makes = called in ("dict", "list", "set", "defaultdict") or called.startswith("Weak")
            if text in ("{}", "[]") or (makes and isinstance(value, ast.Call)):
                found.add(f"{path.name}: {ast.unparse(target)}")
    assert found <= allowed


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """At most 2 % begin with a clause, which a reader has to take apart first."""
    clauses = {"What", "Whether", "As", "How", "Of", "Where", "Which"}
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Module)
    first = [
        re.split(r"\W", text.lstrip(), maxsplit=1)[0]
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
    ]
    assert sum(word in clauses for word in first) <= 0.02 * len(first)


def test_names_of_things_are_nouns() -> None:
    wrong = {"found", "given", "told", "held", "met"}
    names: set[str] = set()
    for path, tree in trees().items():
        for node in ast.walk(tree):
            match node:
                case (
                    ast.Name(id=name, ctx=ast.Store())
                    | ast.Attribute(attr=name, ctx=ast.Store())
                    | ast.arg(arg=name)
                    | ast.ClassDef(name=name)
                    | ast.FunctionDef(name=name)
                ) if name.strip("_") in wrong:
                    names.add(f"{path.name}: {name}")
    assert names == set()


def test_only_the_modules_of_the_security_page_unpickle() -> None:
    """SECURITY.md says which files may run code: those that these read."""
    reads = re.compile(
        r"^import pickle|\btorch\.load\(|allow_pickle=True|_object(_list)?\(|trust_remote_code"
        r"|import state_dict_loader",
        re.MULTILINE,
    )
    found = {path.name for path in trees() if reads.search(path.read_text())}
    assert found == {"titan_loader.py", "ray_train.py"}
