"""Charts in HTML and SVG without scripts: legible on a phone, in dark mode, and in print."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle, islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from bascule.quantities import Scale, amount, number, percent
from bascule.report.page import Chart

# A thing has one colour on all pages. The names are variables of page.html, for light and dark.
_COLORS = {
    thing: color
    for color, things in {
        "orange": "as loaded,now,none,without,fifo,slowest rank",
        "blue": "balanced,with bascule,average,computed",
        "green": "compute,greedy",
        "red": "communication,data loader",
        "yellow": "routing,sjf",
        "pink": "all-gather,srtf",
        "sky": "Ulysses",
        "violet": "ring",
        "brown": "reduce-scatter",
        "stone": "host,rest,bound",
        "wait": "waiting",
        "line": "left out",
    }.items()
    for thing in things.split(",")
}
_OTHERS = ("blue", "orange", "green", "violet", "sky", "yellow", "pink", "brown", "red", "stone")
_DASHES = ("none", "9 5", "2 4", "12 4 2 4", "5 3", "1 6")  # lines on each other are all seen
_MOST_POINTS = 64  # of a line; with more, points are not marked
_MOST_CELLS = 192  # of a map's side; of more, some are drawn
_MOST_NAMES = 12  # of classes, in the legend of a map
_NUM_BINS = 12
_MOST_TICKS = 9
_STEPS = 5  # of an axis, about

Points = tuple[Sequence[float], Sequence[float], Sequence[bool]]  # places, values, whether hollow


def draw_lengths(seq_lens: npt.ArrayLike) -> Chart:
    """Draw a histogram of sequence lengths, in classes that grow by about the same ratio."""
    lens = np.asarray(seq_lens, int)
    shown = lens[lens > 0]
    if not len(shown):
        return Chart("Lengths in tokens", "There is no sequence with tokens.", str)
    edges = np.unique(np.geomspace(shown.min(), shown.max() + 1, _NUM_BINS + 1).round().astype(int))
    names = [f"{low:,} to {end - 1:,}" for low, end in pairwise(edges)]
    longest = np.sort(lens)[-max(len(lens) // 10, 1) :]
    words = (
        f"{len(lens):,} sequences of {shown.min():,.0f} to {shown.max():,.0f} tokens, median "
        f"{np.median(lens):,.0f}; the longest tenth has {percent(longest.sum() / lens.sum())} of "
        "the tokens."
    )
    counts = np.histogram(shown, bins=edges)[0]
    return draw_bars("Lengths in tokens", words, names, {"sequences": counts}, "sequences")


def draw_bars(
    title: str, words: str, names: Sequence[str], parts: Mapping[str, npt.ArrayLike], unit: str
) -> Chart:
    """Draw a bar for each name, stacked from parts; `parts` has each part's (bars,) values."""

    def draw() -> str:
        values = {part: np.asarray(x).tolist() for part, x in parts.items()}
        colors, totals = _colors_of(values), np.sum([*values.values()], axis=0)
        axis, rows = _axis(unit, totals, from_zero=True), ""
        for bar, name in enumerate(names):
            rows += f"<b>{escape(name)}</b><span>"
            for part, x in values.items():
                hover = escape(f"{name}, {part}: {amount(x[bar], unit)}")
                rows += f'<i style="width:{axis(x[bar]):.2%};background:{colors[part]}" '
                rows += f'title="{hover}"></i>'
            rows += f"</span><em>{axis.text(totals[bar].item())}</em>"
        return (
            f'{_legend(colors) if len(colors) > 1 else ""}<div class="bars">{rows}<b></b>'
            f'{_ticks(axis)}<em></em><b></b><p class="title">{escape(axis.title)}</p></div>'
        )

    return Chart(title, words, draw)


def draw_lines(
    title: str,
    words: str,
    axes: tuple[str, str],
    lines: Mapping[str, npt.ArrayLike],
    across: npt.ArrayLike | None = None,
    points: Mapping[str, Points] | None = None,
) -> Chart:
    """Draw named lines of (steps,) values at the positions `across`, by default 0, 1, ..

    `axes` labels both axes. With measured `points`, both axes are logarithmic.
    """

    def draw() -> str:
        values = {name: np.asarray(line, float) for name, line in lines.items()}
        places = np.arange(max(map(len, values.values()))) if across is None else across
        is_log, marks, colors = points is not None, "", _colors_of(values)
        x = _axis(axes[0], places, is_log=is_log)
        y = _axis(axes[1], np.concatenate([*values.values()]), from_zero=not is_log, is_log=is_log)
        strokes = {
            name: f'stroke="{color}" stroke-dasharray="{dash}"'
            for (name, color), dash in zip(colors.items(), cycle(_DASHES), strict=False)
        }
        for name, line in values.items():
            known = np.isfinite(line)
            dots = np.asarray(places)[: len(line)][known], line[known]
            way = "L".join(f"{x(at):.4f} {1 - y(up):.4f}" for at, up in zip(*dots, strict=True))
            marks += f'<path d="M{way}" {strokes[name]}><title>{escape(name)}</title></path>'
            measured = (points or {}).get(name) or (*dots, [False] * len(line))
            for at, up, is_hollow in zip(*measured, strict=False):
                hover = escape(f"{name}, {axes[0]} {number(at)}: {amount(up, axes[1])}")
                dot = f'd="M{x(at):.4f} {1 - y(up):.4f}h0"><title>{hover}</title></path>'
                if len(measured[0]) <= _MOST_POINTS:
                    marks += f'<path class="dot" stroke="{colors[name]}" {dot}'
                    marks += f'<path class="hole" {dot}' * is_hollow
        return _legend(colors, strokes) + _plot(marks, x, y)

    return Chart(title, words, draw)


def draw_map(
    title: str,
    words: str,
    axes: tuple[str, str],
    names: Sequence[str],
    classes: Callable[[], npt.ArrayLike],
) -> Chart:
    """Draw (rows, columns) cells, whose values index `names`; row 0 is at the top."""

    def draw() -> str:
        cells = np.asarray(classes(), int)
        across, up = (
            _axis(axis, [-0.5, size - 0.5]) for axis, size in zip(axes, cells.T.shape, strict=True)
        )
        drawn = [np.linspace(0, size - 1, min(size, _MOST_CELLS)).round() for size in cells.shape]
        cells, ways = cells[np.ix_(*(x.astype(int) for x in drawn))], [""] * len(names)
        for row, line in enumerate(cells):
            edges = [0, *(np.flatnonzero(np.diff(line)) + 1).tolist(), len(line)]
            for start, end in pairwise(edges):
                ways[line[start]] += f"M{start} {row}h{end - start}v1h{start - end}z"
        ramp = np.linspace(0, 1, len(names)).tolist()  # ever lighter, which every eye can tell
        colors = {
            name: f"var(--{_COLORS[name]})"
            if name in _COLORS
            else f"oklch({0.36 + 0.54 * x:.3f} 0.13 {290 - 190 * x:.0f})"
            for name, x in zip(names, ramp, strict=True)
        }
        marks = "".join(
            f'<path d="{way}" fill="{color}"><title>{escape(name)}</title></path>'
            for way, (name, color) in zip(ways, colors.items(), strict=True)
        )
        legend = dict(islice(colors.items(), 0, None, -(-len(names) // _MOST_NAMES)))
        return _legend(legend) + _plot(marks, across, up, cells.T.shape)

    return Chart(title, words, draw)


@dataclass(frozen=True)
class _Axis:
    """An axis from `low` to `high`, and the texts of its ticks in a unit of `factor`."""

    title: str
    factor: float
    low: float
    high: float
    ticks: Mapping[str, float]
    is_log: bool

    def text(self, value: float) -> str:
        """Write a value in the unit of the axis; whole numbers of things stay whole."""
        return number(value if self.factor == 1.0 else value / self.factor)

    def __call__(self, values: npt.ArrayLike) -> Any:
        """Return where values stand, from 0 to 1."""
        low, high, x = map(np.log if self.is_log else np.asarray, (self.low, self.high, values))
        return (x - low) / (high - low)


def _axis(
    unit: str, values: npt.ArrayLike, *, from_zero: bool = False, is_log: bool = False
) -> _Axis:
    """Make an axis for values in a base unit; one from zero ends at a tick."""
    x = np.array([x for x in np.ravel(values).tolist() if np.isfinite(x)] or [0.0])
    scale = Scale.of(x.tolist(), unit)
    low, high = 0.0 if from_zero else x.min() / scale.factor, x.max() / scale.factor
    high = high if high > low else low + 1.0
    size = 10.0 ** np.floor(np.log10((high - low) / _STEPS))
    step = size * next(f for f in (1, 2, 5, 10) if f * size * _STEPS >= (high - low) * (1 - 1e-9))
    if np.all(2 * x / scale.factor % 1 == 0):  # numbers of things, or the edges between them
        step = max(step, 1.0)
    high = np.ceil(high / step - 1e-9) * step if from_zero else high
    ticks = steps = np.empty(0)
    for factors in ((1, 2, 5), (1,)) if is_log else ():
        size = 10.0 ** np.arange(np.floor(np.log10(low)), np.log10(high) + 1)
        ticks = steps = np.outer(size, factors).ravel()
        ticks = steps = ticks[(low * 0.999 <= ticks) & (ticks <= high * 1.001)]
        if len(ticks) <= _MOST_TICKS:
            break
    if len(ticks) < 2:
        places = np.arange(np.ceil(low / step - 1e-9), np.floor(high / step + 1e-9) + 1)
        ticks, steps = places * step + 0.0, np.full(len(places), step)  # 0, not -0
    decimals = np.maximum(0, -np.floor(np.log10(steps) + 1e-9)).astype(int)
    texts = [f"{tick:,.{num}f}" for tick, num in zip(ticks, decimals, strict=True)]
    of_text = dict(zip(texts, (ticks * scale.factor).tolist(), strict=True))
    low, high = float(low * scale.factor), float(high * scale.factor)
    return _Axis(scale.unit, scale.factor, low, high, of_text, is_log)


def _colors_of(names: Iterable[str]) -> dict[str, str]:
    """Return a CSS colour for each name: its own, or the next that no other has."""
    known = {name: _COLORS.get(name) for name in names}
    free = cycle([color for color in _OTHERS if color not in known.values()])
    return {name: f"var(--{color or next(free)})" for name, color in known.items()}


def _legend(colors: Mapping[str, str], strokes: Mapping[str, str] | None = None) -> str:
    """Name colours, of lines with their dashes."""
    shown = "".join(
        f'<span><i style="background:{color}"></i> {escape(name)}</span>'
        if strokes is None
        else f'<span><svg><path d="M0 6h32" {strokes[name]}/></svg> {escape(name)}</span>'
        for name, color in colors.items()
    )
    return f'<p class="legend">{shown}</p>'


def _ticks(axis: _Axis, side: str = "left") -> str:
    texts = (f'<span style="{side}:{axis(x):.2%}">{text}</span>' for text, x in axis.ticks.items())
    many = " many" if len(axis.ticks) > _STEPS else ""
    return f'<div class="ticks {side}{many}">{"".join(texts)}</div>'


def _plot(marks: str, across: _Axis, up: _Axis, cells: tuple[int, ...] = ()) -> str:
    """Frame marks, which stretch to the width of the page, with axes of text, which does not."""
    ticks, (width, height) = up.ticks.items(), cells or (1, 1)
    grid = "" if cells else "".join(f'<path d="M0 {1 - up(y):.4f}h1"/>' for _, y in ticks)
    return (
        f'<div class="plot{" square" * (cells != () and width == height)}" '
        f'style="--w:{max(len(text) for text, _ in ticks)}ch"><p>{escape(up.title)}</p>'
        f"{_ticks(up, 'top' if cells else 'bottom')}"
        f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none">{grid}{marks}</svg>'
        f'{_ticks(across)}<p class="title">{escape(across.title)}</p></div>'
    )
