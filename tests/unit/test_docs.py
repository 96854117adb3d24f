"""The pages: their code runs, their commands parse, their links lead somewhere, their numbers are
those that were measured."""

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bascule.cli import parse
from bascule.quantities import num_bytes, percent, seconds
from tests.helpers import pages
from tests.helpers.pages import ON_RANKS, PAGES, ROOT, SAVED, WHOLE, Block, blocks_of, python_of

LANGUAGES = {"", "python", "sh", "text", "mermaid"}
MARKS = {"lines-of", "not-run"}
QUOTES = [block for page in PAGES for block in python_of(page) if "lines-of" in block.marks]
TARGETS = set((ROOT / "Makefile").read_text().split(".PHONY: ")[1].splitlines()[0].split())


def test_there_are_pages() -> None:
    assert {WHOLE, "ARCHITECTURE.md", "docs/glossary.md", *ON_RANKS} <= set(PAGES)
    assert len(QUOTES) >= 1


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_known_language_and_says_why_it_does_not_run(page: str) -> None:
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{block}: {block.language}"
        assert set(block.marks) <= MARKS, f"{block}: {block.marks}"
        assert len(block.marks.get("not-run", "a sentence")) >= 10, f"{block} gives no reason"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if python_of(page) and page not in (WHOLE, *ON_RANKS)]
)
def test_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process; pages that need ranks are run by tests/distributed/test_pages.py."""
    monkeypatch.chdir(tmp_path)
    pages.run_python(page, {})


def test_the_tests_that_pages_name_are_there_and_guides_name_none() -> None:
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    functions = set(re.findall(r"def (test_\w+)", "".join(files.values())))
    for page in PAGES:
        lines = (ROOT / page).read_text().splitlines()
        prose = "\n".join(line for line in lines if not line.startswith("```"))
        named = set(re.findall(r"\btest_\w+(?:\.py)?", prose))
        assert named <= functions | {*files} | {name.removesuffix(".py") for name in files}, page
        assert not named or ("/" not in page and page != WHOLE), page


@pytest.mark.parametrize("page", [page for page in PAGES if page == WHOLE or "docs/" in page])
def test_lines_are_short(page: str) -> None:
    assert [line for line in (ROOT / page).read_text().splitlines() if len(line) > 130] == []


@pytest.mark.parametrize("block", QUOTES, ids=str)
def test_quoted_lines_are_lines_of_their_file(block: Block) -> None:
    lines = set(pages.code_lines((ROOT / block.marks["lines-of"]).read_text()))
    assert [line for line in pages.code_lines(block.text) if line not in lines] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_command_can_be_given(page: str) -> None:
    for words in pages.commands_of(page):
        command = " ".join(words)
        if words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            assert set(targets) <= TARGETS, command
        files = [word for word in words if word.endswith(".py") and word != SAVED]
        assert all((ROOT / file).is_file() for file in files), command
        if (arguments := arguments_of(words)) is not None and not {"..", "COMMAND"} & {*arguments}:
            with suppress_help():
                parse(arguments)


@contextmanager
def suppress_help() -> Iterator[None]:
    """`--help` prints and exits with 0."""
    try:
        yield
    except SystemExit as stop:
        assert not stop.code, "the command line refuses it"


def arguments_of(words: list[str]) -> list[str] | None:
    """What a command gives to bascule; None if it is another command."""
    if Path(words[0]).name == "bascule":
        return words[1:]
    module = {"bascule", "bascule.cli"} & {*words}  # after -m
    return words[words.index(module.pop()) + 1 :] if module else None


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for file, anchor in pages.links_of(page):
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.is_file(), f"{page} links to {file}, which does not exist"
        assert not anchor or anchor in pages.anchors_of(path), f"{page}: {file} has no #{anchor}"


def test_the_readme_is_short() -> None:
    prose = (ROOT / WHOLE).read_text()
    for block in python_of(WHOLE):
        prose = prose.replace(block.text, "")
    assert len(prose.splitlines()) <= 110


RESULTS = ROOT / "benchmarks" / "results"
FILES_OF_USERS = {"machine", "summary"}  # that pages name


@cache
def benchmarks() -> dict[str, set[str]]:
    """Options of each benchmark that `benchmarks/run.py` runs, by its name."""
    tree = ast.parse((ROOT / "benchmarks" / "run.py").read_text())
    (modules,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODULES"
    ]
    options = dict[str, set[str]]()
    for module, names in modules.items():
        path = ROOT / "benchmarks" / module
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        functions = {
            node.name: {arg.arg for arg in node.args.kwonlyargs}
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        options |= {name: functions[name] for name in names}
    return options


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_says_how_to_measure_it_again(path: Path) -> None:
    """Its command is one of today, and its commit, without changes, one of this repository."""
    measured = json.loads(path.read_text())
    environment = measured["environment"]
    assert measured["benchmark"] == path.stem and path.stem in benchmarks()
    command = shlex.split(measured["command"])
    assert command[:3] == ["python", "benchmarks/run.py", path.stem]
    words = [word[2:].removeprefix("no-") for word in command if word.startswith("--")]
    flags = {word.replace("-", "_") for word in words}
    assert flags <= benchmarks()[path.stem] - {"quick"}
    assert datetime.fromisoformat(environment["date"]).tzinfo is not None
    assert environment["device"] and environment["cpu"]
    assert re.fullmatch("[0-9a-f]{12}", environment["commit"]), environment["commit"]
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("NOT RUN: a shallow clone, or none, does not have the commits of results")
    commit = environment["commit"]
    assert not git("merge-base", "--is-ancestor", commit, "HEAD").returncode, f"no commit {commit}"


@pytest.mark.parametrize("page", PAGES)
def test_the_results_that_pages_name_are_there(page: str) -> None:
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`([a-z_0-9]+)\.json`", text)) - FILES_OF_USERS
    if page == "docs/measured.md":
        named |= {
            name.split()[0]
            for cell in re.findall(r"\| (`[^|]*`) \|$", text, re.MULTILINE)
            for name in re.findall("`([^`]*)`", cell)
        }
    assert {name for name in named if not (RESULTS / f"{name}.json").exists()} == set()


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def test_the_numbers_of_the_readme_are_those_of_the_results() -> None:
    streams = result("wallclock.json")["sets"]["long and short streams"]
    runs = [run["measured"] for run in streams["runs"]]
    planning = result("overhead.json")["planning"]["g1n32"]["times"]["lpt"]["median_us"] / 1e3
    waits = result("loader.json")["overlap"]
    shares = [waits[f"{work}, prefetch 2"]["exposed_share"] for work in ("sleep", "matmul")]
    flux = result("inference.json")["cases"][0]
    over_peer = {name: f"{ratio['mean']:.2f}x" for name, ratio in flux["over_best_peer"].items()}
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line[:2] == "| "]
    for source, texts in {
        "wallclock.json": [f"{min(runs):.2f}x to {max(runs):.2f}x", f"{len(runs)} runs"],
        "overhead.json": [f"{planning:.1f} ms"],
        "make test": ["1e-10"],
        "loader.json": [
            f"{shares[0]:.1%}".replace("%", " %"),
            f"{shares[1]:.1%}".replace("%", " %"),
        ],
        "inference.json": [f"{flux['speedup']['bascule ring']['mean']:.2f}x", *over_peer.values()],
    }.items():
        shown = " ".join(row for row in rows if source in row)
        assert all(text in shown for text in texts), f"{shown} does not say {texts}"
    assert len(runs) >= 3


def test_the_numbers_of_the_guide_at_size_are_those_of_its_result() -> None:
    measured, page = result("at_size.json"), (ROOT / "docs" / "at_size.md").read_text()
    rows = [f"| {row['group']:,} | {row['over_mean']:.3f} |" for row in measured["groups"]]
    plans = {(row["ranks"], row["bags"]): row for row in measured["plans"]}
    for ranks in {ranks for ranks, _ in plans}:
        kinds = [plans[ranks, kind] for kind in ("alone", "bags of 8", "both, with wires")]
        cells = [f"{ranks:,}", *(seconds(row["plan_s"]) for row in kinds)]
        rows.append(f"| {' | '.join([*cells, num_bytes(kinds[0]['gathered_bytes'])])} |")
        assert kinds[0]["gathered_bytes"] == 960 * ranks
    for row in measured["troubles"]:
        runs = [row[way] for way in ("none", "loader", "g8")]
        cells = [f"{seconds(run['step_s'])}, {percent(run['waiting'])}" for run in runs]
        rows.append(f"| {' | '.join([row['trouble'], *cells])} |")
    assert [row for row in rows if row not in page.splitlines()] == []
