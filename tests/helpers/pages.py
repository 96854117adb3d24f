"""The pages of the documentation: their code blocks, commands and links.

The first word behind the fence of a block is its language. Marks may follow it:

    python                              runs, after the other blocks of its page
    python lines-of=examples/a.py       its lines are lines of that file, which another test runs
    python not-run="reason"             cannot run here
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
)
WHOLE = "README.md"
"""The page whose blocks are whole programs, which torchrun starts on two ranks."""

SAVED = "part.py"
"""The file in which a reader saves such a block."""

ON_RANKS = (
    "docs/context_parallel.md",
    "docs/data_loader.md",
    "docs/encoders.md",
    "docs/pipelines.md",
    "docs/sequence_parallel.md",
    "docs/sparse_attention.md",
)
"""Pages whose code runs on two ranks, with the names of `page_worlds`; the others run alone."""

_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```\s*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_INLINE = re.compile(r"`(bascule [^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    marks: dict[str, str]
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        language, *marks = shlex.split(match[1]) or [""]
        pairs = {mark.split("=", 1)[0]: mark.partition("=")[2] for mark in marks}
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, language, pairs, match[2]))
    return found


def python_of(page: str) -> list[Block]:
    return [block for block in blocks_of(page) if block.language == "python"]


def run_python(page: str, names: dict[str, Any]) -> None:
    """Run the blocks of a page from top to bottom; what they define joins the names."""
    for block in python_of(page):
        if not block.marks:
            exec(compile("\n" * block.line + block.text, str(ROOT / page), "exec"), names)


def commands_of(page: str) -> list[list[str]]:
    """The commands of a page, split into words."""
    found: list[list[str]] = []
    for block in blocks_of(page):
        if block.language in ("sh", "bash"):
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    found.append(words)
    prose = _FENCE.sub("", (ROOT / page).read_text())
    found += [shlex.split(text) for text in _INLINE.findall(prose) if " --" in text]
    return found


def links_of(page: str) -> Iterator[tuple[str, str]]:
    """(file, anchor) of each link that stays in the repository; the file may be ''."""
    for target in _LINK.findall(_FENCE.sub("", (ROOT / page).read_text())):
        if "://" not in target and not target.startswith("mailto:"):
            file, _, anchor = target.partition("#")
            yield file, anchor


def anchors_of(path: Path) -> set[str]:
    """What links can jump to in a page, as GitHub names headings."""
    headings = re.findall(r"^#{1,6} +(.+?)\s*$", _FENCE.sub("", path.read_text()), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def code_lines(text: str) -> list[str]:
    """Lines without comments and indentation, and no empty ones."""
    lines = (line.split("  #")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
