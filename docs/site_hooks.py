"""Pages of the site that are made from files of the project: gallery, benchmarks, tests, names."""

import ast
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_MARK = re.compile(r"^( *```\w+) .*$", re.MULTILINE)
_EXAMPLE = re.compile(r"\]\(\.\./examples/([\w/]+)\.(?:py|sbatch)\)")
ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
_LISTS = ("bascule/**/__init__.py", "bascule/costs.py", "bascule/sparse.py")
_OWN = ("bascule/errors.py", "bascule/peers.py", "bascule/plugins/[!_]*.py")  # define public names


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    made = {"benchmarks.md": benchmarks_page(), "proven.md": proven_page(), "api.md": api_page()}
    made |= {f"gallery/{name}.md": gallery_page(path) for name, path in examples().items()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Without what code blocks say to the tests, and with links to examples that lead to pages."""
    return _EXAMPLE.sub(r"](gallery/\1.md)", _MARK.sub(r"\1", markdown))


def examples() -> dict[str, Path]:
    """The programs and jobs of `examples/`, by folder and name."""
    folder = ROOT / "examples"
    paths = sorted((*folder.rglob("*.py"), *folder.rglob("*.sbatch")))
    return {str(path.relative_to(folder).with_suffix("")): path for path in paths}


def gallery_page(path: Path) -> str:
    """What a program says of itself, and its code."""
    text = path.read_text()
    if path.suffix != ".py":
        return f"# {path.name}\n\n```sh\n{text}```\n"
    told = ast.get_docstring(ast.parse(text)) or ""
    title, _, rest = told.partition("\n")
    code = text[text.index('"""', 3) + 3 :].strip()
    return f"# {path.stem}\n\n{title}\n{rest}\n\n```python\n{code}\n```\n"


def benchmarks_page() -> str:
    """Every committed result with its date, its device and what it measures."""
    found = [
        (path.name, json.loads(path.read_text()))
        for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    ]
    rows = [result_row(name, result) for name, result in found if "environment" in result]
    return "\n".join(
        [
            "# All benchmarks",
            "",
            "Each result says on which commit and device it was measured. The numbers that matter "
            "are told in [what is measured](measured.md).",
            "",
            "| result | what is measured | date | device | torch | commit |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def result_row(name: str, found: dict[str, Any]) -> str:
    """A row of the table."""
    here = found["environment"]
    what = next((text for module in _modules() if (text := _first_line(module, name))), "")
    cores = f"{here['num_cpus']} cores, {here['cpu']}"
    device = cores if here["device"] == "cpu" else here["device"]
    cells = (name, what, here["date"][:10], device, here["torch"], here["commit"])
    return f"| {' | '.join(cells)} |"


def _modules() -> list[ast.Module]:
    paths = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks").glob("*/__init__.py")]
    return [ast.parse(path.read_text()) for path in sorted(paths)]


def _first_line(module: ast.Module, result: str) -> str:
    """Return the first line of the benchmark whose result has that name."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and f"{node.name}.json" == result:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


def proven_page() -> str:
    """Every file of tests, with the first line of its docstring: what it proves."""
    lines = ["# What is proven", "", "`make test` and `make nightly` run these files."]
    for folder in ("distributed", "peers", "unit", "plugins", "gpu"):
        lines += ["", f"## tests/{folder}", "", "| what | file |", "|---|---|"]
        for path in sorted((ROOT / "tests" / folder).glob("test_*.py")):
            told = ast.get_docstring(ast.parse(path.read_text())) or ""
            what = " ".join(told.partition("\n\n")[0].split())
            lines.append(f"| {what} | `{path.name}` |")
    return "\n".join([*lines, ""])


def api_page() -> str:
    """Every public name by the place that it is imported from, with a link to its reference."""
    paths = dict.fromkeys(_matches(_LISTS), False) | dict.fromkeys(_matches(_OWN), True)
    lines = ["# Public names", "", "These names, and no others, are kept from version to version."]
    for path in sorted(paths, key=_module_name):
        module = ast.parse(path.read_text())
        names = public_names(path, module, is_own=paths[path])
        if names:
            text = (ast.get_docstring(module) or "").partition("\n\n")[0]
            lines += ["", f"## {_module_name(path)}", "", text, ""]
            lines += ["| name | what it is |", "|---|---|"]
            lines += [name_row(name, home) for name, home in sorted(names.items())]
    return "\n".join([*lines, ""])


def public_names(path: Path, module: ast.Module, is_own: bool = False) -> dict[str, str]:
    """Return the modules that define the names of a list, which imports each as itself."""
    if is_own:
        kinds = ast.FunctionDef | ast.ClassDef
        names = [node.name for node in module.body if isinstance(node, kinds)]
        return {name: _module_name(path) for name in names if not name.startswith("_")}
    return {
        alias.name: str(node.module)
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == alias.asname
    }


def name_row(name: str, home: str) -> str:
    """A row of the table: where a name has a docstring, the reference has it."""
    path = SOURCE.joinpath(*home.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    module = ast.parse(path.read_text())
    further = public_names(path, module).get(name)
    if further:  # a list that takes its names from the list of another package
        return name_row(name, further)
    text = _text_of(name, module).partition("\n")[0].replace("|", "\\|")
    return f"| [`{name}`][{home}.{name}] | {text} |" if text else f"| `{name}` | |"


def _text_of(name: str, module: ast.Module) -> str:
    """Return the docstring of what a module defines under a name; empty without one."""
    for node, after in zip(module.body, [*module.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return ast.get_docstring(node) or ""
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            text = after.value if isinstance(after, ast.Expr) else None
            return str(text.value) if isinstance(text, ast.Constant) else ""
    return ""


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def _matches(patterns: tuple[str, ...]) -> list[Path]:
    return [path for pattern in patterns for path in SOURCE.glob(pattern)]
