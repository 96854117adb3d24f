"""One self-contained page of numbers, charts and tables, which loads nothing from anywhere."""

import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_PACKAGES = ("bascule", "torch", "numpy", "plotly")
_CONFIG = {"responsive": True, "displaylogo": False}
_FEWEST_TO_FOLD = 12  # rows of a table that is folded at first
_MOST_ROWS = 200

Form = str | Callable[[Any], str]  # a form of `str.format`, or a function


def columns(*headings: str) -> dict[str, Form]:
    """Return columns of a table by "heading" or "heading: form", such as "gap: {:.2%}"."""
    pairs = (heading.partition(": ") for heading in headings)
    return {name: form or "{}" for name, _, form in pairs}


def ms(seconds: float) -> str:
    """Write seconds as milliseconds."""
    return f"{seconds * 1e3:.4g} ms"


def mib(num_bytes: float) -> str:
    """Write bytes as MiB."""
    return f"{num_bytes / 2**20:,.4g} MiB"


@dataclass(frozen=True, slots=True)
class Fact:
    """A number that matters."""

    key: str  # its name where a program reads it
    label: str  # its name for readers
    value: float | str | None
    form: Form = "{}"

    @property
    def text(self) -> str:
        """The value for readers."""
        return "not known" if self.value is None else _text(self.value, self.form)


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing, made when a page shows it."""

    title: str
    words: str  # what is to be seen in it, for those who do not see it too
    draw: "Callable[[], Figure | str]"  # a figure of plotly, or a whole SVG element


@dataclass(frozen=True, slots=True)
class Rows:
    """A table."""

    title: str
    columns: Mapping[str, Form]  # by heading
    rows: Sequence[Sequence[Any]]  # values; None is an empty cell
    num_shown: int = 64  # rows on a console
    bars: Sequence[float] = ()  # drawn beside the rows on a console, where a page has a chart

    @property
    def texts(self) -> list[list[str]]:
        """All cells as text."""
        forms = self.columns.values()
        return [
            ["" if x is None else _text(x, form) for x, form in zip(row, forms, strict=True)]
            for row in self.rows
        ]

    def is_number(self, place: int) -> bool:
        """Return whether a column has numbers alone."""
        return all(isinstance(row[place], int | float | None) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a command, for a console, a page and programs."""

    title: str
    answer: str  # what the numbers mean, in a sentence or two
    facts: tuple[Fact, ...]  # the most important first
    parts: tuple[Chart | Rows, ...] = ()
    notes: tuple[str, ...] = ()  # certificate, sources of the numbers, what is not counted

    def to_dict(self) -> dict[str, Any]:
        """Return facts and tables as plain values, for JSON."""
        tables = [part for part in self.parts if isinstance(part, Rows)]
        return {fact.key: _json_value(fact.value) for fact in self.facts} | {
            part.title: [
                dict(zip(part.columns, map(_json_value, row), strict=True)) for row in part.rows
            ]
            for part in tables
        }


def command_line(arguments: Sequence[str] | None = None) -> str:
    """Return the command that made a page, for a shell."""
    return shlex.join(["bascule", *(sys.argv[1:] if arguments is None else arguments)])


def render(report: Report, command: str) -> str:
    """Return a report as HTML, escaped, which loads nothing, with the command that made it."""
    from plotly.offline import get_plotlyjs

    parts = "\n".join(_part(part, number) for number, part in enumerate(report.parts))
    template = Template(files("bascule.report").joinpath("page.html").read_text("utf-8"))
    made_with = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    return template.substitute(
        title=escape(report.title),
        answer=escape(report.answer),
        facts="\n".join(map(_fact, report.facts)),
        parts=parts,
        notes="\n".join(f"<li>{escape(note)}</li>" for note in report.notes),
        command=escape(command),
        versions=escape(f"Python {sys.version.split()[0]}, {made_with}"),
        plotly=get_plotlyjs() if "Plotly.newPlot" in parts else "",
        data=_script_json({fact.key: _json_value(fact.value) for fact in report.facts}),
    )


def _text(value: Any, form: Form) -> str:
    return form.format(value) if isinstance(form, str) else form(value)


def _json_value(value: Any) -> Any:
    """Return None for a number that JSON lacks, as the WIR of a batch with an idle rank."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _fact(fact: Fact) -> str:
    key, label, text = (escape(x) for x in (fact.key, fact.label, fact.text))
    return f'<div><dt>{label}</dt><dd data-key="{key}">{text}</dd></div>'


def _part(part: Chart | Rows, number: int) -> str:
    return _table(part) if isinstance(part, Rows) else _chart(part, f"chart{number}")


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
        layout = drawing["layout"] | {
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
        }
        values = ", ".join(map(_script_json, (drawing["data"], layout, _CONFIG)))
        drawn = (
            f'<div id="{name}" class="chart" role="img" aria-label="{title}. {words}"></div>'
            f'<script>Plotly.newPlot("{name}", {values});</script>'
        )
    caption = f"<figcaption>{words}</figcaption>"
    return f"<section><h2>{title}</h2><figure>{drawn}{caption}</figure></section>"


def _script_json(value: object) -> str:
    """Return JSON that cannot end its script element."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
