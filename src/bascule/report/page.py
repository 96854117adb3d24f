"""Reports of commands, for a console and as one HTML page that loads nothing from the network."""

import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from rich.console import Console
    from rich.table import Table

_PACKAGES = ("bascule", "torch", "numpy", "plotly")
_BACKGROUNDS = ("paper_bgcolor", "plot_bgcolor")
_CONFIG = {"responsive": True, "displaylogo": False}
_FEWEST_TO_FOLD = 12  # rows of a table that is folded at first
_MOST_ROWS = 200
_BAR_WIDTH = 28

Format = str | Callable[[Any], str]  # a pattern of `str.format`, or a function


def columns(*headings: str) -> dict[str, Format]:
    """Return formats by heading from "heading" or "heading: format", such as "gap: {:.2%}"."""
    pairs = (heading.partition(": ") for heading in headings)
    return {name: pattern or "{}" for name, _, pattern in pairs}


def ms(seconds: float) -> str:
    """Write seconds as milliseconds."""
    return f"{seconds * 1e3:.4g} ms"


def mib(num_bytes: float) -> str:
    """Write bytes as MiB."""
    return f"{num_bytes / 2**20:,.4g} MiB"


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
    draw: "Callable[[], Figure | str]"  # a figure of plotly, or a whole SVG element


@dataclass(frozen=True, slots=True)
class Rows:
    """A table."""

    title: str
    columns: Mapping[str, Format]  # formats by heading
    rows: Sequence[Sequence[Any]]  # values; None is an empty cell
    num_shown: int = 64  # rows on a console
    bars: Sequence[float] = ()  # lengths of bars beside the rows, on a console

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
        facts.add_column(no_wrap=True)
        for fact in self.facts:
            facts.add_row(plain(fact.label), plain(fact.text))
        console.print(facts, highlight=False)
        for part in self.parts:
            if isinstance(part, Rows) and part.rows:
                console.print(_console_table(part), highlight=False)
        for note in self.notes:
            write(note)


def render(report: Report, command: str | None = None) -> str:
    """Return a report as an HTML page, with the command that made it (default: this process's)."""
    from plotly.offline import get_plotlyjs

    parts = "\n".join(
        _table(part) if isinstance(part, Rows) else _chart(part, f"chart{number}")
        for number, part in enumerate(report.parts)
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
        plotly=get_plotlyjs() if "Plotly.newPlot" in parts else "",
        data=_script_json(report._values_of_facts),
    )


def _text(value: Any, how: Format) -> str:
    return how.format(value) if isinstance(how, str) else how(value)


def _json_value(value: Any) -> Any:
    """Return None for numbers that JSON lacks, such as the WIR of a batch with an idle rank."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _console_table(rows: Rows) -> "Table":
    from rich.markup import escape as plain
    from rich.table import Table

    table, hidden = Table(title=plain(rows.title)), len(rows.rows) - rows.num_shown
    if hidden > 0:
        table.caption = f"{hidden:,} more"
    for place, name in enumerate(rows.columns):
        is_number = all(isinstance(row[place], int | float | None) for row in rows.rows)
        table.add_column(plain(name), justify="right" if is_number else "left")
    scale = _BAR_WIDTH / (max(rows.bars, default=0.0) or 1.0)
    for place, cells in enumerate(rows.texts[: rows.num_shown]):
        bars = ("█" * round(bar * scale) for bar in rows.bars[place : place + 1])
        table.add_row(*map(plain, cells), *bars)
    return table


def _table(table: Rows) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    body = "\n".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for row in table.texts[:_MOST_ROWS]
    )
    hidden = len(table.rows) - _MOST_ROWS
    more = f"<p>{hidden:,} more</p>" if hidden > 0 else ""
    is_open = " open" if len(table.rows) <= _FEWEST_TO_FOLD else ""
    return (
        f"<section><details{is_open}><summary><h2>{escape(table.title)}</h2></summary>"
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>{more}</div></details></section>"
    )


def _chart(chart: Chart, name: str) -> str:
    title, words, figure = escape(chart.title), escape(chart.words), chart.draw()
    if isinstance(figure, str):
        drawn = f'<div class="wide" tabindex="0">{figure}</div>'
    else:
        drawing = json.loads(figure.to_json() or "{}")
        layout = drawing["layout"] | dict.fromkeys(_BACKGROUNDS, "rgba(0,0,0,0)")
        values = ", ".join(map(_script_json, (drawing["data"], layout, _CONFIG)))
        drawn = (
            f'<div id="{name}" class="chart" role="img" aria-label="{title}. {words}"></div>'
            f'<script>Plotly.newPlot("{name}", {values});</script>'
        )
    caption = f"<figcaption>{words}</figcaption>"
    return f"<section><h2>{title}</h2><figure>{drawn}{caption}</figure></section>"


def _script_json(value: object) -> str:
    """Return JSON in which no text can close the HTML script element."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
