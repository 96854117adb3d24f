"""One self-contained page of numbers, charts and tables, which loads nothing from anywhere."""

import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from bascule.errors import ConfigError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_PACKAGES = ("bascule", "torch", "numpy", "plotly")
_CONFIG = {"responsive": True, "displaylogo": False}
_FEWEST_TO_FOLD = 12
"""Rows of a table that is folded until it is asked for."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A number of the page.

    Attributes:
        key: Its name where a program reads the page, as in the command's JSON.
        label: Its name for readers.
        value: As it was computed.
        text: As it is shown.
    """

    key: str
    label: str
    value: float | str
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing.

    Attributes:
        title: What it shows.
        words: What is to be seen in it, for those who do not see it too.
        figure: By plotly, or a whole SVG element.
    """

    title: str
    words: str
    figure: "Figure | str"


@dataclass(frozen=True, slots=True)
class Rows:
    """A table.

    Attributes:
        title: What it lists.
        columns: Their names.
        rows: Texts of all cells.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What a page says.

    Attributes:
        title: Of the page.
        answer: What the numbers mean, in a sentence or two.
        facts: The numbers that matter, the most important first.
        parts: Charts and tables, in their order.
        notes: What a reader must know to trust the numbers: the certificate, where the machine's
            numbers are from, what is not counted.
    """

    title: str
    answer: str
    facts: tuple[Fact, ...]
    parts: tuple[Chart | Rows, ...] = ()
    notes: tuple[str, ...] = ()


def check_report(path: Path | None) -> None:
    """Find out before any work that a page could not be written.

    Raises:
        ConfigError: The name has another ending, there is no such folder, or plotly is missing.
    """
    if path is None:
        return
    if path.suffix != ".html":
        raise ConfigError(f"--report {path}: must end in .html")
    if not path.parent.is_dir():
        raise ConfigError(f"--report {path}: there is no folder {path.parent}")
    if find_spec("plotly") is None:
        raise ConfigError(f"--report {path} needs plotly: pip install plotly")


def command_line(arguments: Sequence[str] | None = None) -> str:
    """The command that made a page, as a shell takes it."""
    return shlex.join(["bascule", *(sys.argv[1:] if arguments is None else arguments)])


def render(report: Report, command: str) -> str:
    """The page, as HTML: facts, charts, tables, notes, the command and the versions.

    Everything that comes from the user's data is escaped, and the page's own policy forbids it to
    load anything.

    Args:
        report: What to say.
        command: That made it.
    """
    from plotly.offline import get_plotlyjs

    has_figure = any(isinstance(x, Chart) and not isinstance(x.figure, str) for x in report.parts)
    template = Template(files("bascule.report").joinpath("page.html").read_text("utf-8"))
    made_with = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    return template.substitute(
        title=escape(report.title),
        answer=escape(report.answer),
        facts="\n".join(map(_fact, report.facts)),
        parts="\n".join(_part(part, number) for number, part in enumerate(report.parts)),
        notes="\n".join(f"<li>{escape(note)}</li>" for note in report.notes),
        command=escape(command),
        versions=escape(f"Python {sys.version.split()[0]}, {made_with}"),
        plotly=get_plotlyjs() if has_figure else "",
        data=_script_json({fact.key: _json_value(fact.value) for fact in report.facts}),
    )


def _json_value(value: float | str) -> float | str | None:
    """None for what JSON cannot say, as the WIR of a batch with an idle rank."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _fact(fact: Fact) -> str:
    key, label, text = (escape(x) for x in (fact.key, fact.label, fact.text))
    return f'<div><dt>{label}</dt><dd data-key="{key}">{text}</dd></div>'


def _part(part: Chart | Rows, number: int) -> str:
    return _table(part) if isinstance(part, Rows) else _chart(part, f"chart{number}")


def _table(table: Rows) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    body = "\n".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    is_open = " open" if len(table.rows) <= _FEWEST_TO_FOLD else ""
    return (
        f"<section><details{is_open}><summary><h2>{escape(table.title)}</h2></summary>"
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></details></section>"
    )


def _chart(chart: Chart, name: str) -> str:
    title, words = escape(chart.title), escape(chart.words)
    if isinstance(chart.figure, str):
        drawn = f'<div class="wide" tabindex="0">{chart.figure}</div>'
    else:
        drawing = json.loads(chart.figure.to_json() or "{}")
        layout = drawing["layout"] | {
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
        }
        values = ", ".join(map(_script_json, (drawing["data"], layout, _CONFIG)))
        drawn = (
            f'<div id="{name}" class="chart" role="img" aria-label="{title}. {words}"></div>'
            f'<script>Plotly.newPlot("{name}", {values});</script>'
        )
    figure = f"<figure>{drawn}<figcaption>{words}</figcaption></figure>"
    return f"<section><h2>{title}</h2>{figure}</section>"


def _script_json(value: object) -> str:
    """JSON that cannot end the script element which it stands in."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
