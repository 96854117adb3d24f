"""Draw the ranks' work in one training step, before and after balancing, as an SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from xml.sax.saxutils import escape

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.machine.cluster import Cluster
from bascule.machine.costs import FLOPS_PER_UNIT, Cost, evaluate, in_bag
from bascule.plan import metrics
from bascule.plan.plan import Plan
from bascule.quantities import amount, flops, percent, times

MOST_RANKS = 64  # bars of a picture
_COLORS = ("#b7d7f0", "#7fb5e1", "#4a90cc", "#2a6bb0", "#24579c")
_LEFT, _PLOT, _RIGHT = 136.0, 620.0, 22.0
_WIDTH = _LEFT + _PLOT + _RIGHT
_BAR, _PITCH, _HEAD, _FOOT, _LINE = 18.0, 23.0, 62.0, 26.0, 20.0
_LEGEND_COLUMNS = 3
_THINNEST = 0.005  # width below which a segment is a rounding error
_MOST_FIELDS = 2000  # of more shares of sequences, those of a rank and colour are one segment
_WIRES, _WAIT = 'class="wires"', 'class="wait"'

# On a page text keeps its size, and bars take the width that is there. The page sets the colours.
_STYLE = f"""\
<style>
.step text {{ font: 13px system-ui, sans-serif; fill: var(--ink, #1f2328); }}
.step .head {{ font-weight: 600; font-size: 15px; }}
.step .card {{ fill: var(--card, #fbfbf9); }}
.step .work {{ stroke: var(--card, #fbfbf9); stroke-width: 0.6; }}
.step .wires {{ fill: var(--stone, #848b94); }}
.step .wait {{ fill: url(#waiting); stroke: var(--dark-hatch, #b4b9c1); stroke-width: 0.6; }}
.step .end {{ fill: var(--ink, #1f2328); }}
.step .rank rect, .step .end {{ x: calc({_LEFT:g}px + (100% - {_LEFT + _RIGHT:g}px) * var(--x)); }}
.step .rank rect {{ width: calc((100% - {_LEFT + _RIGHT:g}px) * var(--w)); }}
</style>
<defs><pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse" \
patternTransform="rotate(45)"><rect width="6" height="6" style="fill: var(--hatch, #eceae4)"/>\
<rect width="2" height="6" style="fill: var(--dark-hatch, #b4b9c1)"/></pattern></defs>"""

_Segment = tuple[str, str, float]  # SVG attributes, title and length of a part of a bar


@dataclass(frozen=True)
class _Bar:
    """The bar of a rank, and the segments of its load."""

    label: str
    segments: Sequence[_Segment]
    load: float


def draw_step(plan: Plan, cost: Cost, cluster: Cluster | None = None, unit: str = "TFLOP") -> str:
    """Draw a batch as it was loaded, and below it as planned; return the SVG.

    Each bar is a rank. Each segment is a sequence, or a rank's share of a sequence: its width is
    the cost, its colour the length. Communication, launches, carried loads: grey; waiting: hatched.
    """
    bounds = _bounds(plan.seq_lens)
    costs_of = evaluate if cluster is None else cluster.compute_seconds
    costs = costs_of(cost, plan.seq_lens)
    ranks, sizes = range(plan.num_ranks), plan.topology.bag_sizes
    before = [
        _bar_of(f"rank {rank}", plan, bounds, plan.source_ranks == rank, costs, load)
        for rank, load in zip(ranks, plan.unbalanced_loads(cost, cluster).tolist(), strict=True)
    ]
    after: list[_Bar] = []
    for rank, bag in zip(ranks, plan.topology.bag_of_rank.tolist(), strict=True):
        size = int(sizes[bag])
        label = f"rank {rank}" if size == 1 else f"rank {rank}, bag of {size}"
        degree = plan.topology.place_of(rank).ulysses_degree
        load, shares = float(plan.loads[rank]), costs_of(in_bag(cost, degree), plan.seq_lens) / size
        after.append(_bar_of(label, plan, bounds, plan.bag_of == bag, shares, load))
    speed_up = max(bar.load for bar in before) / plan.makespan if plan.makespan > 0 else 1.0
    longest = max(bar.load for bar in (*before, *after))
    scale = _PLOT / longest if longest > 0 else 0.0  # the longest bar fills the width
    used = {_color(bounds, seq_len) for seq_len in plan.seq_lens.tolist() if seq_len}
    shown = [bound for bound in bounds if _color(bounds, bound) in used]
    legend = [(_work(_color(bounds, bound)), f"to {bound:,}") for bound in shown]
    wires = [length for bar in after for look, _, length in bar.segments if look == _WIRES]
    legend += [(_WIRES, "wires")] * (max(wires) * scale >= _THINNEST)
    legend.append((_WAIT, "waiting"))
    first, second = "Before: as loaded", f"After: {times(speed_up)} as fast (predicted)"
    height = _HEAD + _PITCH * min(len(ranks), MOST_RANKS) + _FOOT
    total = 2 * height + _LINE * (2 - -len(legend) // _LEGEND_COLUMNS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="step" width="{_WIDTH:g}" '
        f'height="{total:g}" role="img">',
        f"<title>{escape(f'One step on {len(ranks)} ranks, before and after')}</title>",
        _STYLE,
        '<rect class="card" width="100%" height="100%" rx="8"/>',
        *_panel("before", first, before, 0.0, scale, unit),
        *_panel("after", second, after, height, scale, unit),
        *_legend(2 * height, legend, len(ranks)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _bar_of(
    label: str, plan: Plan, bounds: Sequence[int], mask: np.ndarray, costs: Floats, load: float
) -> _Bar:
    """Make a bar of the sequences in `mask`, the longest first, then of what is not compute."""
    ids = np.flatnonzero(mask)
    ids = ids[np.argsort(-plan.seq_lens[ids], kind="stable")]
    rows = zip(ids.tolist(), plan.seq_lens[ids].tolist(), costs[ids].tolist(), strict=True)
    segments: list[_Segment] = [
        (_work(_color(bounds, seq_len)), f"sequence {seq_id}: {seq_len:,} tokens", cost)
        for seq_id, seq_len, cost in rows
    ]
    if plan.seq_lens.size * plan.topology.bag_sizes.max() > _MOST_FIELDS:
        segments = [
            (look, f"{len(alike)} sequences", sum(cost for *_, cost in alike))
            for look, group in groupby(segments, key=itemgetter(0))
            if (alike := list(group))
        ]
    rest = load - float(costs[ids].sum())
    return _Bar(label, [*segments, (_WIRES, "wires, launches and carried loads", rest)], load)


def _waiting(bars: Sequence[_Bar]) -> str:
    loads = np.array([bar.load for bar in bars])
    share = 1.0 - 1.0 / metrics.imbalance(loads)
    return f"{percent(share)} of the ranks' time is waiting."


def _bounds(seq_lens: Ints) -> list[int]:
    """Return the longest length of each colour, ascending by about a common ratio."""
    lens = seq_lens[seq_lens > 0]
    if lens.size == 0:
        return [0]
    least, most = int(lens.min()), int(lens.max())
    edges = np.geomspace(least, most, len(_COLORS) + 1)[1:-1].tolist()
    # Two digits make a legend that can be read.
    steps = [10 ** max(len(str(int(edge))) - 2, 0) for edge in edges]
    rounded = {int(round(edge / step) * step) for edge, step in zip(edges, steps, strict=True)}
    return sorted(bound for bound in rounded | {most} if bound <= most)


def _color(bounds: Sequence[int], seq_len: int) -> str:
    index = min(int(np.searchsorted(bounds, seq_len)), len(bounds) - 1)
    return _COLORS[len(_COLORS) - len(bounds) + index]


def _work(color: str) -> str:
    return f'class="work" fill="{color}"'


def _panel(
    name: str, title: str, bars: Sequence[_Bar], top: float, scale: float, unit: str
) -> list[str]:
    """Draw a heading and a bar for each rank, below `top`."""
    end, shown, first = max(bar.load for bar in bars), bars[:MOST_RANKS], top + _HEAD
    x, height = end * scale, _PITCH * len(shown)
    ends = flops(end * FLOPS_PER_UNIT) if unit == "TFLOP" else amount(end, unit)
    ending = escape(f"the step ends: {ends}")
    return [
        f'<g class="{name}">',
        f'<text class="head" x="18" y="{top + 27:g}">{escape(title)}</text>',
        f'<text x="18" y="{top + 47:g}">{escape(_waiting(bars))}</text>',
        *(x for k, bar in enumerate(shown) for x in _bar(bar, first + _PITCH * k, end, scale)),
        f'<rect class="end" {_from(x)} y="{first - 6:g}" width="1.5" height="{height + 6:g}"/>',
        f'<text x="{_LEFT:g}" y="{first + height + 12:g}">{ending}</text>',
        "</g>",
    ]


def _from(x: float, more: str = "") -> str:
    """Return the place in a bar, in pixels of a picture and as the share of a page's width."""
    return f'x="{_LEFT + x:.2f}" style="--x:{x / _PLOT:.5f}{more}"'


def _bar(bar: _Bar, top: float, end: float, scale: float) -> list[str]:
    parts = [
        '<g class="rank">',
        f'<text x="{_LEFT - 8:g}" y="{top + 13.5:g}" text-anchor="end">{bar.label}</text>',
    ]
    place, x = f'y="{top:g}" height="{_BAR:g}"', 0.0
    for look, title, length in (*bar.segments, (_WAIT, "waiting", end - bar.load)):
        width = length * scale
        if width >= _THINNEST or look not in (_WIRES, _WAIT):
            shown = f'{_from(x, f";--w:{width / _PLOT:.5f}")} {place} width="{width:.2f}"'
            parts.append(f"<rect {look} {shown}><title>{escape(title)}</title></rect>")
        x += width
    return [*parts, "</g>"]


def _legend(top: float, legend: list[tuple[str, str]], num_ranks: int) -> list[str]:
    more = f"{num_ranks - MOST_RANKS:,} more ranks. " if num_ranks > MOST_RANKS else ""
    words = f"{more}Tokens of a sequence:"
    parts = ['<g class="legend">', f'<text x="18" y="{top + 13:g}">{words}</text>']
    for place, (look, text) in enumerate(legend):
        row, column = divmod(place, _LEGEND_COLUMNS)
        x, y = 18 + 96 * column, top + _LINE * (row + 1)
        parts += [
            f'<rect {look} x="{x}" y="{y:g}" width="16" height="14"/>',
            f'<text x="{x + 22}" y="{y + 11.5:g}">{escape(text)}</text>',
        ]
    return [*parts, "</g>"]
