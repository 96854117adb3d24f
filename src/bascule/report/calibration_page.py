"""The page of a calibration: what was measured, and the curves that predict it."""

from typing import TYPE_CHECKING

import numpy as np

from bascule.plan.calibration import BYTES, TOKENS, Fit
from bascule.plan.machine import HardwareProfile
from bascule.report.page import Chart, Fact, Report, Rows

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_CURVE_POINTS = 100


def of_calibration(profile: HardwareProfile, refused: list[str]) -> Report:
    """Passes of a block over tokens, messages over bytes: points measured, lines predicted.

    Args:
        profile: One that was calibrated.
        refused: What is wrong with it; empty if it was saved.
    """
    made = profile.calibration
    assert made is not None
    errors = {fit.what: fit.held_out_error for fit in made.fits}
    facts = tuple(
        Fact(f"held_out {what}", f"{what}, held out missed by", error, f"{error:.1%}")
        for what, error in errors.items()
        if error is not None
    )
    answer = f"Refused: {refused[0]}." if refused else f"{profile}."
    kinds = ((TOKENS, "Passes of a block"), (BYTES, "Messages"))
    charts = [
        _chart(title, [fit for fit in made.fits if fit.unit == unit], unit) for unit, title in kinds
    ]
    left = [name for name in profile.numbers if name not in made.measured]
    return Report(
        title=f"{made.name}: {profile.device}",
        answer=answer,
        facts=facts,
        parts=(*(chart for chart in charts if chart is not None), _points(made.fits)),
        notes=(
            *refused,
            f"Measured {made.date} on {made.num_ranks} ranks with torch {made.torch}: "
            f"{', '.join(made.measured)}.",
            f"Not measured, taken from {made.base}: {', '.join(left) or 'nothing'}.",
            f"{made.settings}.",
        ),
    )


def _chart(title: str, fits: list[Fit], unit: str) -> Chart | None:
    if not fits:
        return None

    def draw() -> "Figure":
        from plotly.graph_objects import Figure

        figure = Figure()
        for fit in fits:
            _draw(figure, fit)
        figure.update_xaxes(title=unit, type="log")
        figure.update_yaxes(title="seconds", type="log", exponentformat="SI")
        figure.update_layout(template="plotly_white", height=420)
        return figure

    worst = max(fits, key=lambda fit: fit.held_out_error or 0.0)
    error = worst.held_out_error or 0.0
    words = (
        "Points are measured, lines predicted; hollow points were held out of the fit. The worst "
        f"curve, {worst.what}, misses them by {error:.1%} in the median."
    )
    return Chart(title, words, draw)


def _draw(figure: "Figure", fit: Fit) -> None:
    from plotly.colors import qualitative

    color = qualitative.Plotly[len(figure.data) // 2 % len(qualitative.Plotly)]  # pyright: ignore
    curve = np.geomspace(min(fit.sizes), max(fit.sizes), _CURVE_POINTS)
    figure.add_scatter(
        x=curve, y=fit(curve), name=fit.what, legendgroup=fit.what, line={"color": color}
    )
    symbols = ["circle-open" if out else "circle" for out in fit.held_out]
    figure.add_scatter(
        x=fit.sizes,
        y=fit.seconds,
        mode="markers",
        name=fit.what,
        legendgroup=fit.what,
        showlegend=False,
        marker={"color": color, "symbol": symbols, "size": 9},
    )


def _points(fits: tuple[Fit, ...]) -> Rows:
    rows = tuple(
        (
            fit.what,
            f"{size:,.0f} {fit.unit}",
            f"{seconds:.4g} s",
            f"{seconds * (1.0 + miss):.4g} s",
            f"{miss:+.1%}{', held out' if out else ''}",
        )
        for fit in fits
        for size, seconds, miss, out in zip(
            fit.sizes, fit.seconds, fit.misses.tolist(), fit.held_out, strict=True
        )
    )
    return Rows(
        "All points", dict.fromkeys(("", "size", "measured", "predicted", "missed by"), "{}"), rows
    )
