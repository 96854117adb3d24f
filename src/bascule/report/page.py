"""Reports of commands, for a console and as an HTML page that loads nothing from the network."""

import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PACKAGES = ("bascule", "torch", "numpy")
_FEWEST_TO_FOLD = 12  # rows of a table that is folded at first
_MOST_ROWS = 200
_BAR_WIDTH = 28

Format = str | Callable[[Any], str]  # a pattern of `str.format`, or a function


@dataclass(frozen=True, slots=True)
class Fact:
    """A number of a report."""

    key: str  # name in JSON
    label: str  # name on a console and page
    value: float | str | None
    format: Format = "{}"

    @property
    def text(self) -> str:
        """The formatted value."""
        return "not known" if self.value is None else _text(self.value, self.format)


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing, made only for a page."""

    title: str
    words: str  # caption, which also says what it shows to readers who cannot see it
    draw: Callable[[], str]  # returns HTML


@dataclass(frozen=True, slots=True)
class Rows:
    """A table."""

    title: str
    columns: Mapping[str, Format]  # formats by heading
    rows: Sequence[Sequence[Any]]  # values; None is an empty cell
    num_shown: int = 64  # rows on a console
    bars: Sequence[float] = ()  # lengths of bars beside the rows, on a console

    def is_number(self, place: int) -> bool:
        """Return whether a column has only numbers."""
        return all(isinstance(row[place], int | float | None) for row in self.rows)

    @property
    def texts(self) -> list[list[str]]:
        """The formatted cells."""
        formats = self.columns.values()
        return [
            ["" if x is None else _text(x, how) for x, how in zip(row, formats, strict=True)]
            for row in self.rows
        ]


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a command, for a console, a page and programs."""

    title: str
    answer: str  # a sentence or two on what the numbers mean
    facts: tuple[Fact, ...]  # the most important first
    parts: tuple[Chart | Rows, ...] = ()
    notes: tuple[str, ...] = ()  # certificate, sources of the numbers, what is not counted
    data: tuple[str, ...] = ()  # sentences on how the user's data were read; shown first
    values: dict[str, Any] | None = None  # the JSON, in place of facts and tables

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: `values`, or facts and tables."""
        if self.values is not None:
            return self.values
        tables = {
            part.title: [
                dict(zip(part.columns, map(_json_value, row), strict=True)) for row in part.rows
            ]
            for part in self.parts
            if isinstance(part, Rows)
        }
        return self._values_of_facts | tables

    @property
    def _values_of_facts(self) -> dict[str, Any]:
        return {fact.key: _json_value(fact.value) for fact in self.facts}

    def show(self, console: "Console") -> None:
        """Print facts, tables and notes, no charts."""
        from rich.markup import escape as plain
        from rich.table import Table

        write = partial(console.print, markup=False, highlight=False, emoji=False, soft_wrap=True)
        write("\n".join((*self.data, self.title, self.answer)))
        facts = Table.grid(padding=(0, 3))
        for fact in self.facts:
            facts.add_row(plain(fact.label), plain(fact.text))
        console.print(facts, highlight=False)
        for part in self.parts:
            if isinstance(part, Rows) and part.rows:
                for table in _console_tables(part, console.width):
                    console.print(table, highlight=False)
        for note in self.notes:
            write(note)


def render(report: Report, command: str | None = None) -> str:
    """Return a report as an HTML page, with the command that made it (default: this process's)."""
    parts = "\n".join(
        _table(part) if isinstance(part, Rows) else _chart(part) for part in report.parts
    )
    template = Template(files("bascule.report").joinpath("page.html").read_text("utf-8"))
    made_with = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    return template.substitute(
        title=escape(report.title),
        answer=escape(report.answer),
        facts="\n".join(
            f"<div><dt>{escape(fact.label)}</dt>"
            f'<dd data-key="{escape(fact.key)}">{escape(fact.text)}</dd></div>'
            for fact in report.facts
        ),
        parts=parts,
        notes="\n".join(f"<li>{escape(note)}</li>" for note in (*report.data, *report.notes)),
        command=escape(command or shlex.join(["bascule", *sys.argv[1:]])),
        versions=escape(f"Python {sys.version.split()[0]}, {made_with}"),
        data=_script_json(report._values_of_facts),
    )


def _text(value: Any, how: Format) -> str:
    return how.format(value) if isinstance(how, str) else how(value)


def _json_value(value: Any) -> Any:
    """Return None for numbers that JSON lacks, such as the WIR of a batch with an idle rank."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _console_tables(rows: Rows, width: int) -> "Iterator[Table]":
    """Yield a table, in as many parts below each other as its words are too wide for the console.

    Each part begins with the first column, and no word of a heading or cell is ever cut.
    """
    from rich.cells import cell_len
    from rich.markup import escape as plain
    from rich.table import Table

    texts = list(zip(rows.columns, *rows.texts[: rows.num_shown], strict=True))
    least = [max(map(cell_len, "\n".join(column).split()), default=0) for column in texts]
    most = [max(map(cell_len, "\n".join(column).split("\n"))) for column in texts]
    parts = [[0]]
    for place in range(1, len(texts)):
        if len(parts[-1]) > 1 and sum(least[x] + 3 for x in (*parts[-1], place)) >= width:
            parts.append([0])
        parts[-1].append(place)
    hidden = len(rows.rows) - rows.num_shown
    for number, part in enumerate(parts):
        table = Table(title=plain(rows.title) + ", continued" * (number > 0))
        caps = ([max(least[x], min(most[x], cap)) for x in part] for cap in range(width, -1, -1))
        fitting = [sizes for sizes in caps if sum(sizes) + 3 * len(part) < width]
        sizes = fitting[0] if fitting else [least[x] for x in part]  # the widest give way first
        for x, size in zip(part, sizes, strict=True):
            side = "right" if rows.is_number(x) else "left"
            table.add_column(plain(texts[x][0]), justify=side, width=size, overflow="fold")
        room = width - 4 - sum(size + 3 for size in sizes)
        longest = min(_BAR_WIDTH, room) if part is parts[-1] else 0
        scale = max(longest, 0) / (max(rows.bars, default=0.0) or 1.0)
        for row, cells in enumerate(zip(*(texts[x][1:] for x in part), strict=True)):
            bars = ("█" * round(bar * scale) for bar in rows.bars[row : row + 1] if longest > 0)
            table.add_row(*map(plain, cells), *bars)
        table.caption = f"{hidden:,} more" if hidden > 0 and part is parts[-1] else None
        yield table


def _table(table: Rows) -> str:
    kinds = [' class="n"' * table.is_number(place) for place in range(len(table.columns))]
    head, *body = (
        "".join(
            f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True)
        )
        for tag, row in (("th", table.columns), *(("td", x) for x in table.texts[:_MOST_ROWS]))
    )
    rows = "".join(f"<tr>{row}</tr>" for row in body)
    hidden = len(table.rows) - _MOST_ROWS
    more = f"<p>{hidden:,} more</p>" if hidden > 0 else ""
    is_open = " open" if len(table.rows) <= _FEWEST_TO_FOLD else ""
    return (
        f"<section><details{is_open}><summary><h2>{escape(table.title)}</h2></summary>"
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>{more}</div></details></section>"
    )


def _chart(chart: Chart) -> str:
    title, words = escape(chart.title), escape(chart.words)
    return (
        f'<section><h2>{title}</h2><figure><div class="chart" role="img" '
        f'aria-label="{title}. {words}">{chart.draw()}</div>'
        f"<figcaption>{words}</figcaption></figure></section>"
    )


def _script_json(value: object) -> str:
    """Return JSON in which no text can close the HTML script element."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
