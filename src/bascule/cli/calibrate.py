"""`bascule calibrate --lengths 64:1024 --points 5 --limit 0.5`: measure this machine."""

from collections.abc import Sequence
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from bascule.calibrate.options import CalibrateOptions
from bascule.machine.calibration import BYTES, TOKENS, Fit
from bascule.machine.cluster import HardwareProfile
from bascule.report.charts import new_figure
from bascule.report.page import Chart, Fact, Report, Rows, columns

if TYPE_CHECKING:
    import torch
    from plotly.graph_objects import Figure

_CURVE_POINTS = 100
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"), (1e-12, "ps"), (1e-15, "fs"))
_FORMAT = {"bascule": "calibration report", "version": 1}
_WARM_UP_ROUNDS = 2


def run(options: CalibrateOptions, arguments: list[str]) -> int | None:
    """Measure and save; return 1 if the profile was too bad for that."""
    from bascule.cli.command import on_ranks, progress, publish, saved

    def measure(device: "torch.device") -> dict[str, Any]:
        from bascule.calibrate.measuring import measure, profile_of, refusals

        with progress("measuring", options.rounds + _WARM_UP_ROUNDS) as advance:
            profile = profile_of(measure(options, device, advance), options)
        refused = refusals(profile, options.limit, attends=options.module is None)
        return {"refused": refused, "profile": profile.to_dict()}

    def finish(result: dict[str, Any]) -> int:
        profile = HardwareProfile.of_dict(result["profile"], "the report")
        console = publish(options, report_of(profile, result["refused"]))
        if result["refused"]:
            console.print(f"nothing was saved to {options.out}", markup=False, soft_wrap=True)
            return 1
        profile.save(options.out)
        saved(console, options.out)
        return 0

    def prepare(num_ranks: int) -> None:
        import torch

        from bascule.calibrate.measuring import check_block
        from bascule.cli.launch import device_type

        options.check()
        check_block(options, torch.device(device_type()))

    return on_ranks(options, arguments, measure, finish, prepare)


def report_of(profile: HardwareProfile, refused: Sequence[str]) -> Report:
    """Report measured and predicted curves of blocks and messages, and why they were `refused`."""
    calibration = profile.calibration
    assert calibration is not None
    base = [name for name in profile.numbers if name not in calibration.measured]
    return Report(
        title=f"{calibration.name}: {profile.device}, {calibration.num_ranks} ranks",
        answer=f"Refused: {refused[0]}." if refused else f"{profile}.",
        facts=tuple(
            Fact(f"held_out {fit.what}", f"{fit.what}, held out missed by", error, "{:.1%}")
            for fit in calibration.fits
            if (error := fit.held_out_error) is not None
        ),
        parts=(
            Rows(
                "Curves, seconds with half their 95 % intervals",
                columns("", "a call", "a token, byte", "a pair"),
                [
                    (
                        fit.what,
                        *map(_with_error, fit.coefficients, fit.errors),
                        *[None] * (fit.unit == BYTES),
                    )
                    for fit in calibration.fits
                ],
            ),
            *_curves("Passes of a block", [fit for fit in calibration.fits if fit.unit == TOKENS]),
            *_curves("Messages", [fit for fit in calibration.fits if fit.unit == BYTES]),
            _points(calibration.fits),
        ),
        notes=(
            *(f"refused: {line}" for line in refused),
            *(f"{x.what}: {_with_error(x.seconds, x.error)}" for x in calibration.overheads),
            f"measured {calibration.date} with torch {calibration.torch}: "
            f"{', '.join(calibration.measured)}; {calibration.settings}",
            f"not measured, taken from {calibration.base}: {', '.join(base) or 'nothing'}",
            "every third size was held out of the fits; errors are medians over these",
        ),
        values={**_FORMAT, "refused": list(refused), "profile": profile.to_dict()},
    )


def _with_error(seconds: float, error: float | None) -> str:
    largest = max(seconds, error or 0.0)
    unit, name = next((pair for pair in _UNITS if largest >= pair[0]), _UNITS[-1])
    spread = "unknown" if error is None else f"{error / unit:.2g}"
    return f"{seconds / unit:.3g} ± {spread} {name}"


def _curves(title: str, fits: list[Fit]) -> list[Chart]:
    if not fits:
        return []
    worst = max(fits, key=lambda fit: fit.held_out_error or 0.0)
    words = (
        "Points are measured, lines predicted; hollow points were held out of the fit. The worst "
        f"curve, {worst.what}, misses them by {worst.held_out_error or 0.0:.1%} in the median."
    )
    return [Chart(title, words, partial(_draw, fits))]


def _draw(fits: list[Fit]) -> "Figure":
    from plotly.colors import qualitative

    figure = new_figure(420, fits[0].unit, "seconds")
    for fit, color in zip(fits, cycle(qualitative.Plotly), strict=False):
        sizes = np.geomspace(min(fit.sizes), max(fit.sizes), _CURVE_POINTS)
        legend = {"name": fit.what, "legendgroup": fit.what}
        figure.add_scatter(x=sizes, y=fit(sizes), line_color=color, **legend)
        symbols = ["circle-open" if held_out else "circle" for held_out in fit.held_out]
        marker = {"color": color, "symbol": symbols, "size": 9}
        points = {"x": fit.sizes, "y": fit.seconds, "mode": "markers", "marker": marker}
        figure.add_scatter(**points, **legend, showlegend=False)
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log", exponentformat="SI")
    return figure


def _points(fits: Sequence[Fit]) -> Rows:
    seconds = "measured, s: {:.4g}", "predicted, s: {:.4g}"
    formats = columns("", "size: {:,.0f}", "unit", *seconds, "missed by: {:+.1%}", "held out")
    rows = [
        (fit.what, size, fit.unit, took, took * (1.0 + miss), miss, "yes" if held_out else None)
        for fit in fits
        for size, took, miss, held_out in zip(
            fit.sizes, fit.seconds, fit.misses.tolist(), fit.held_out, strict=True
        )
    ]
    return Rows("All points", formats, rows)
