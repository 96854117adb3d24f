"""A report on a console: facts, tables, notes. Charts are for pages."""

from io import StringIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bascule.report.page import Report, Rows

_BAR_WIDTH = 28


def show(console: Console, report: Report) -> None:
    """Print a report."""
    _line(console, f"{report.title}\n{report.answer}")
    facts = Table.grid(padding=(0, 3))
    facts.add_column(no_wrap=True)
    for fact in report.facts:
        facts.add_row(escape(fact.label), escape(fact.text))
    console.print(facts, highlight=False)
    for part in report.parts:
        if isinstance(part, Rows) and part.rows:
            console.print(_table(part), highlight=False)
    for note in report.notes:
        _line(console, note)


def as_text(report: Report, width: int) -> str:
    """Return what `show` prints, without colours."""
    text = StringIO()
    show(Console(file=text, width=width, color_system=None), report)
    return text.getvalue()


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _table(rows: Rows) -> Table:
    table = Table(title=escape(rows.title))
    hidden = len(rows.rows) - rows.num_shown
    if hidden > 0:
        table.caption = f"{hidden:,} more"
    for place, name in enumerate(rows.columns):
        table.add_column(escape(name), justify="right" if rows.is_number(place) else "left")
    if rows.bars:
        table.add_column("")
    scale = _BAR_WIDTH / (max(rows.bars, default=0.0) or 1.0)
    for place, cells in enumerate(rows.texts[: rows.num_shown]):
        bars = ("█" * round(bar * scale) for bar in rows.bars[place : place + 1])
        table.add_row(*map(escape, cells), *bars)
    return table
