"""Charts shared by reports: loads of ranks, lengths of sequences, bars, and lines over steps."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bascule.report.page import Chart

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

BEFORE, AFTER = "#f2a541", "#1f6fb2"
_COLORS = (AFTER, "#4c9bd6", "#8cc4a3", BEFORE, "#d1495b", "#8d939c", "#7d5ba6", "#b59f3b")
_MOST_BARS = 128
_NUM_BINS = 40


def draw_loads(before: npt.ArrayLike, after: npt.ArrayLike, unit: str) -> Chart:
    """Draw the loads of all ranks, (ranks,), as loaded and as planned."""
    first, second = np.asarray(before, float), np.asarray(after, float)

    def draw() -> "Figure":
        figure, ranks = new_figure(320, "rank", unit), np.arange(len(first))
        for name, loads, color in (("as loaded", first, BEFORE), ("balanced", second, AFTER)):
            if len(ranks) <= _MOST_BARS:
                figure.add_bar(x=ranks, y=loads, name=name, marker_color=color)
            else:
                figure.add_scatter(x=ranks, y=loads, name=name, line_color=color, line_width=1)
        return figure

    words = (
        f"All ranks wait for the slowest: {first.max():.4g} {unit} as loaded, where the mean is "
        f"{first.mean():.4g}; {second.max():.4g} {unit} balanced, mean {second.mean():.4g}."
    )
    return Chart("Work of each rank", words, draw)


def draw_lengths(seq_lens: npt.ArrayLike) -> Chart:
    """Draw a histogram of lengths, on a logarithmic axis."""
    lens = np.asarray(seq_lens, float)
    shown = lens[lens > 0]

    def draw() -> "Figure":
        figure = new_figure(280, "tokens of a sequence", "sequences")
        if len(shown):
            edges = np.geomspace(shown.min(), shown.max() * 1.001, _NUM_BINS + 1)
            counts = np.histogram(shown, bins=edges)[0]
            centers, widths = np.sqrt(edges[1:] * edges[:-1]), np.diff(edges)
            figure.add_bar(x=centers, y=counts, width=widths, marker_color=AFTER)
            figure.update_xaxes(type="log")
        return figure

    if not len(shown):
        return Chart("Lengths", "There is no sequence with tokens.", draw)
    longest = np.sort(lens)[-max(len(lens) // 10, 1) :]
    words = (
        f"{len(lens):,} sequences of {shown.min():,.0f} to {shown.max():,.0f} tokens, median "
        f"{np.median(lens):,.0f}; the longest tenth has {longest.sum() / lens.sum():.0%} of the "
        "tokens."
    )
    return Chart("Lengths", words, draw)


def draw_bars(
    title: str, words: str, names: Sequence[str], parts: Mapping[str, npt.ArrayLike], unit: str
) -> Chart:
    """Draw a bar for each name, stacked of parts; `parts` has the (bars,) values of each."""

    def draw() -> "Figure":
        figure = new_figure(max(240, 90 + 26 * len(names)), unit, "")
        for number, (part, values) in enumerate(parts.items()):
            figure.add_bar(
                y=[escape(name) for name in names],
                x=np.asarray(values, float),
                name=escape(part),
                orientation="h",
                marker_color=_COLORS[number % len(_COLORS)],
            )
        figure.update_layout(barmode="stack", showlegend=len(parts) > 1)
        figure.update_yaxes(autorange="reversed", type="category", automargin=True)
        return figure

    return Chart(title, words, draw)


def draw_lines(
    title: str,
    words: str,
    axes: tuple[str, str],
    lines: Mapping[str, npt.ArrayLike],
    across: npt.ArrayLike | None = None,
) -> Chart:
    """Draw lines of (steps,) values by name, at the places `across`, by default 0, 1, ..

    `axes` are the names of the horizontal and the vertical axis.
    """

    def draw() -> "Figure":
        figure = new_figure(320, *axes)
        colors = cycle((BEFORE, AFTER, *_COLORS[1:]))
        for (name, values), color in zip(lines.items(), colors, strict=False):
            y = np.asarray(values, float)
            x = np.arange(len(y)) if across is None else np.asarray(across)
            figure.add_scatter(x=x, y=y, name=escape(name), line_color=color)
        figure.update_yaxes(rangemode="tozero")
        return figure

    return Chart(title, words, draw)


def new_figure(height: int, across: str, up: str) -> "Figure":
    """Make an empty figure with names of its horizontal and its vertical axis."""
    from plotly.graph_objects import Figure

    figure = Figure()
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 55, "r": 15, "t": 40, "b": 45},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    )
    figure.update_xaxes(title=escape(across))
    figure.update_yaxes(title=escape(up))
    return figure
