"""A picture of one training step, before and after balancing, as an SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.plan import metrics
from bascule.plan.costs import Cost, evaluate
from bascule.plan.machine import Cluster
from bascule.plan.plan import Plan

Stages = Mapping[str, Mapping[str, Sequence[float]]]

MOST_RANKS = 64
"""Bars of a picture; the ranks after these are left out, and it says so."""

_COLORS = ("#9ecae9", "#4c9bd6", "#1f6fb2", "#f2a541", "#d1495b")
_NUM_COLORS = len(_COLORS)
_STAGE_COLORS = ("#f2a541", "#4c9bd6", "#1f6fb2")
_LEFT, _PLOT, _RIGHT = 118.0, 620.0, 22.0
_BAR, _PITCH, _HEAD, _FOOT = 18.0, 23.0, 54.0, 20.0
_WIDTH = _LEFT + _PLOT + _RIGHT
_THINNEST = 0.005  # less is a rounding error
_WIRES, _WAIT = 'class="wires"', 'class="wait"'
_CARD = f'<rect class="card" x="0.5" y="0.5" width="{_WIDTH - 1:g}" rx="8" height="%g"/>'

# The card has a background of its own, so that it reads the same on white and on dark pages.
_STYLE = """\
<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.title { font-weight: 600; font-size: 15px; }
.card { fill: #fbfbf9; stroke: #c9ccd1; }
.work { stroke: #fbfbf9; stroke-width: 0.6; }
.wires { fill: #8d939c; }
.wait { fill: url(#waiting); stroke: #b4b9c1; stroke-width: 0.6; }
.end { stroke: #1f2328; stroke-width: 1.4; stroke-dasharray: 4 3; }
</style>
<defs><pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse" \
patternTransform="rotate(45)"><rect width="6" height="6" fill="#eceae4"/>\
<rect width="2" height="6" fill="#b4b9c1"/></pattern></defs>"""


@dataclass(frozen=True)
class _Segment:
    """A part of a bar: how it looks, what is said of it, and how long it is."""

    look: str
    title: str
    length: float


@dataclass(frozen=True)
class _Bar:
    """What one rank does, one part after the other."""

    label: str
    segments: tuple[_Segment, ...]
    load: float

    @property
    def waiting(self) -> float:
        """What is waiting before the bar's end."""
        return sum(part.length for part in self.segments if part.look == _WAIT)


def draw_step(plan: Plan, cost: Cost, cluster: Cluster | None = None, unit: str = "TFLOP") -> str:
    """Draw one step twice: the batch as it was loaded, and below it the batch as planned.

    There is one bar for each rank. A segment is a sequence, or a rank's part of one that a bag of
    several ranks shares; its width is its cost, and its colour says how long the sequence is. The
    hatched rest of a bar is the time that the rank waits for the slowest one. Both halves of the
    picture have the same scale.

    Args:
        plan: The plan to draw.
        cost: The cost model that the plan was made with.
        cluster: The cluster that the plan was made with, if any. Wires, launches and carried loads
            are drawn as one grey segment.
        unit: The unit of the plan's loads, for the labels.

    Returns:
        The text of an SVG file; the same for the same plan.
    """
    colors = _Colors.of(plan.seq_lens)
    before = _as_loaded(plan, cost, cluster, colors)
    after = _as_planned(plan, cost, cluster, colors)
    speed_up = max(bar.load for bar in before) / plan.makespan if plan.makespan > 0 else 1.0
    words = (
        f"Before: each rank computes what it loaded. {_waiting(before)}",
        f"After: {speed_up:.2f}x as fast (predicted). {_waiting(after)}",
    )
    used = {colors.of_len(seq_len) for seq_len in plan.seq_lens.tolist() if seq_len}
    bounds = [bound for bound in colors.upper if colors.of_len(bound) in used]
    legend = [(_work(colors.of_len(bound)), f"to {bound:,}") for bound in bounds]
    scale = _scale(before, after)
    wires = [part.length for bar in after for part in bar.segments if part.look == _WIRES]
    legend += [(_WIRES, "wires")] * any(length * scale >= _THINNEST for length in wires)
    legend.append((_WAIT, "waiting for the slowest rank"))
    return _drawn((before, after), words, unit, ("tokens", legend))


def draw_stages(before: Stages, after: Stages) -> str:
    """Draw a measured step twice, stage by stage: without balancing, and below it with balancing.

    There is one bar for each rank. The stages follow each other; the hatched rest of a stage is
    what its rank did not encode, or compute in blocks, in: it waited, exchanged, or planned.

    Args:
        before: By the name of each stage in its order, "seconds" from its begin to its end and
            "work" seconds within: lists with a number for each rank.
        after: The same with balancing.

    Returns:
        The text of an SVG file.
    """
    bars = [_staged(stages) for stages in (before, after)]
    ends = [max(bar.load for bar in one) for one in bars]
    speed_up = ends[0] / ends[1] if ends[1] > 0 else 1.0
    shares = [_waiting(one).replace("waiting", "not work") for one in bars]
    words = (
        f"Without: each rank computes what it loaded. {shares[0]}",
        f"With bascule: {speed_up:.2f}x as fast (measured). {shares[1]}",
    )
    names = [name.replace("_", " ") for name in before]
    legend = [(_work(color), name) for name, color in zip(names, _STAGE_COLORS, strict=False)]
    legend.append((_WAIT, "waiting, exchanges, and what is between"))
    return _drawn((bars[0], bars[1]), words, "s", ("stages", legend))


def _staged(stages: Stages) -> list[_Bar]:
    """The stages of each rank, with the waiting between them."""
    bars: list[_Bar] = []
    num_ranks = len(next(iter(stages.values()))["seconds"])
    for rank in range(num_ranks):
        segments: list[_Segment] = []
        for (name, one), color in zip(stages.items(), _STAGE_COLORS, strict=False):
            work, rest = one["work"][rank], max(one["seconds"][rank] - one["work"][rank], 0.0)
            title = f"{name.replace('_', ' ')}: {work:.4g} s"
            segments += [
                _Segment(_work(color), title, work),
                _Segment(_WAIT, f"{rest:.4g} s", rest),
            ]
        load = sum(part.length for part in segments)
        bars.append(_Bar(f"rank {rank}", tuple(segments), load))
    return bars


def _drawn(
    panels: tuple[list[_Bar], list[_Bar]],
    words: tuple[str, str],
    unit: str,
    legend: tuple[str, list[tuple[str, str]]],
) -> str:
    """Two panels of one scale, and what the colours mean: a word, and entries."""
    scale = _scale(*panels)
    num_ranks = len(panels[0])
    height = _HEAD + _PITCH * min(num_ranks, MOST_RANKS) + _FOOT
    total = 2 * height + 62.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {total:g}" '
        f'width="{_WIDTH:g}" height="{total:g}" role="img">',
        f"<title>{escape(f'One step on {num_ranks} ranks, before and after')}</title>",
        _STYLE,
        _CARD % (total - 1),
        *_panel("before", words[0], panels[0], (0.0, scale, unit)),
        *_panel("after", words[1], panels[1], (height, scale, unit)),
        *_legend(2 * height, legend, num_ranks),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _scale(*panels: list[_Bar]) -> float:
    """Of a picture in which the longest bar fills the width."""
    longest = max(bar.load for bars in panels for bar in bars)
    return _PLOT / longest if longest > 0 else 0.0


def _work(color: str) -> str:
    return f'class="work" fill="{color}"'


def _as_loaded(plan: Plan, cost: Cost, cluster: Cluster | None, colors: "_Colors") -> list[_Bar]:
    """Every sequence stays on the rank that loaded it."""
    costs = _costs(plan, cost, cluster)
    loads = plan.unbalanced_loads(cost, cluster)
    bars: list[_Bar] = []
    for rank in range(plan.num_ranks):
        ids = _longest_first(plan, np.flatnonzero(plan.source_ranks == rank))
        parts = _sequences(plan, ids, costs[ids], float(loads[rank]), colors)
        bars.append(_Bar(f"rank {rank}", parts, float(loads[rank])))
    return bars


def _as_planned(plan: Plan, cost: Cost, cluster: Cluster | None, colors: "_Colors") -> list[_Bar]:
    """The ranks of a bag share each of its sequences equally."""
    costs = _costs(plan, cost, cluster)
    bars: list[_Bar] = []
    for rank in range(plan.num_ranks):
        bag = int(plan.topology.bag_of_rank[rank])
        size = int(plan.topology.bag_sizes[bag])
        ids = _longest_first(plan, np.flatnonzero(plan.bag_of == bag))
        label = f"rank {rank}" if size == 1 else f"rank {rank}, bag of {size}"
        parts = _sequences(plan, ids, costs[ids] / size, float(plan.loads[rank]), colors)
        bars.append(_Bar(label, parts, float(plan.loads[rank])))
    return bars


def _sequences(
    plan: Plan, seq_ids: Ints, costs: Floats, load: float, colors: "_Colors"
) -> tuple[_Segment, ...]:
    """A rank's part of each of its sequences, then what is not compute."""
    parts: list[_Segment] = []
    for seq_id, cost in zip(seq_ids.tolist(), costs.tolist(), strict=True):
        seq_len = int(plan.seq_lens[seq_id])
        title = f"sequence {seq_id}: {seq_len:,} tokens"
        parts.append(_Segment(_work(colors.of_len(seq_len)), title, cost))
    rest = load - float(costs.sum())
    return (*parts, _Segment(_WIRES, "wires, launches and carried loads", rest))


def _costs(plan: Plan, cost: Cost, cluster: Cluster | None) -> Floats:
    if cluster is None:
        return evaluate(cost, plan.seq_lens)
    return cluster.compute_seconds(cost, plan.seq_lens)


def _longest_first(plan: Plan, seq_ids: Ints) -> Ints:
    return seq_ids[np.argsort(-plan.seq_lens[seq_ids], kind="stable")]


def _waiting(bars: Sequence[_Bar]) -> str:
    loads = np.array([bar.load for bar in bars])
    share = 1.0 - 1.0 / metrics.imbalance(loads)
    if loads.max() > 0:
        share += sum(bar.waiting for bar in bars) / float(loads.max()) / len(bars)
    return f"{share:.1%} of the ranks' time is waiting."


def _panel(
    name: str, title: str, bars: Sequence[_Bar], frame: tuple[float, float, str]
) -> list[str]:
    """A heading and one bar for each rank; `frame` is its top, the scale and the unit."""
    top, scale, unit = frame
    end = max(bar.load for bar in bars)
    bars = bars[:MOST_RANKS]
    x, bottom = _LEFT + end * scale, top + _HEAD + _PITCH * len(bars)
    parts = [
        f'<g class="{name}">',
        f'<text class="title" x="18" y="{top + 27:g}">{escape(title)}</text>',
    ]
    for number, bar in enumerate(bars):
        parts += _bar(bar, top + _HEAD + _PITCH * number, end, scale)
    parts += [
        f'<line class="end" x1="{x:.2f}" y1="{top + _HEAD - 6:g}" x2="{x:.2f}" y2="{bottom:g}"/>',
        f'<text x="{x:.2f}" y="{bottom + 12:g}" text-anchor="end">'
        f"{escape(f'the step ends: {end:.4g} {unit}')}</text>",
        "</g>",
    ]
    return parts


def _bar(bar: _Bar, top: float, end: float, scale: float) -> list[str]:
    """The segments of one rank, then its waiting time."""
    parts = [
        '<g class="rank">',
        f'<text x="{_LEFT - 8:g}" y="{top + 13.5:g}" text-anchor="end">{bar.label}</text>',
    ]
    place = f'y="{top:g}" height="{_BAR:g}"'
    x = _LEFT
    for part in bar.segments:
        width = part.length * scale
        if width >= _THINNEST or part.look not in (_WIRES, _WAIT):
            look, _, fill = part.look.partition(" ")
            shown = f'x="{x:.2f}" {place} width="{width:.2f}"' + (f" {fill}" if fill else "")
            parts.append(f"<rect {look} {shown}><title>{escape(part.title)}</title></rect>")
        x += width
    parts.append(
        f'<rect class="wait" x="{_LEFT + bar.load * scale:.2f}" {place} '
        f'width="{(end - bar.load) * scale:.2f}"><title>waiting</title></rect>'
    )
    return [*parts, "</g>"]


@dataclass(frozen=True)
class _Colors:
    """The longest sequence of each colour, ascending; powers of a common ratio."""

    upper: tuple[int, ...]

    @classmethod
    def of(cls, seq_lens: Ints) -> "_Colors":
        held = seq_lens[seq_lens > 0]
        if held.size == 0:
            return cls((0,))
        least, most = int(held.min()), int(held.max())
        edges = np.geomspace(least, most, _NUM_COLORS + 1)[1:]
        upper = sorted({_rounded(float(edge)) for edge in edges[:-1]} | {most})
        return cls(tuple(bound for bound in upper if bound <= most))

    def of_len(self, seq_len: int) -> str:
        """The colour of a sequence."""
        index = int(np.searchsorted(self.upper, seq_len))
        return _COLORS[_NUM_COLORS - len(self.upper) + min(index, len(self.upper) - 1)]


def _rounded(value: float) -> int:
    """To two digits, for a legend that can be read."""
    step = 10 ** max(len(str(int(value))) - 2, 0)
    return int(round(value / step) * step)


def _legend(top: float, legend: tuple[str, list[tuple[str, str]]], num_ranks: int) -> list[str]:
    """What the colours mean, in one row; colours that nothing has are left out."""
    word, entries = legend
    x, y = 18.0, top + 22.0
    parts = ['<g class="legend">', f'<text x="{x:g}" y="{y + 11.5:g}">{word}</text>']
    x += 54.0
    for look, text in entries:
        parts += [
            f'<rect {look} x="{x:g}" y="{y:g}" width="16" height="14"/>',
            f'<text x="{x + 22:g}" y="{y + 11.5:g}">{escape(text)}</text>',
        ]
        x += 36.0 + 7.0 * len(text)
    if num_ranks > MOST_RANKS:
        left_out = f"({num_ranks - MOST_RANKS:,} more ranks)"
        parts.append(f'<text x="18" y="{y - 9:g}">{left_out}</text>')
    return [*parts, "</g>"]
