"""Pages of the site that are made from files of the project: the gallery and the benchmarks."""

import ast
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_MARK = re.compile(r"^( *```\w+) .*$", re.MULTILINE)
_EXAMPLE = re.compile(r"\]\(\.\./examples/(\w+)\.\w+\)")
ROOT = Path(__file__).resolve().parent.parent


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    made = {"benchmarks.md": benchmarks_page()}
    made |= {f"gallery/{path.stem}.md": gallery_page(path) for path in examples()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Without what code blocks say to the tests, and with links to examples that lead to pages."""
    return _EXAMPLE.sub(r"](gallery/\1.md)", _MARK.sub(r"\1", markdown))


def examples() -> list[Path]:
    """The programs of `examples/`."""
    return sorted(path for path in (ROOT / "examples").iterdir() if path.is_file())


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
