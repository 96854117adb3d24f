"""`bascule calibrate --lengths 64:1024 --points 5 --limit 0.5`: measure this machine."""

from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from bascule.calibrate.options import CalibrateOptions
from bascule.machine.calibration import BYTES, TOKENS, Fit
from bascule.machine.cluster import HardwareProfile
from bascule.quantities import Scale, count, number, percent, with_spread
from bascule.report.charts import draw_lines
from bascule.report.page import Chart, Fact, Report, Rows

if TYPE_CHECKING:
    import torch

_CURVE_POINTS = 100
_FORMAT = {"bascule": "calibration report", "version": 1}
_WARM_UP_ROUNDS = 2


def run(options: CalibrateOptions, arguments: list[str]) -> int | None:
    """Measure, and save the profile; return 1 if its errors are too large to save it."""
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
        use = f"use it with plan --wires, topology, simulate, sparse: --profile {options.out}"
        console.print(use, markup=False, highlight=False, soft_wrap=True)
        return 0

    def prepare(num_ranks: int) -> None:
        import torch

        from bascule.calibrate.measuring import check_block
        from bascule.cli.launch import device_type

        options.check()
        check_block(options, torch.device(device_type()))

    return on_ranks(options, arguments, measure, finish, prepare)


def report_of(profile: HardwareProfile, refused: Sequence[str]) -> Report:
    """Report measured and predicted times of blocks and messages; `refused`: why none is saved."""
    calibration = profile.calibration
    assert calibration is not None
    base = [name for name in profile.numbers if name not in calibration.measured]
    return Report(
        title=f"{calibration.name}: {profile.device}, {count(calibration.num_ranks, 'rank')}",
        answer=f"Refused: {refused[0]}." if refused else f"{profile}.",
        facts=tuple(
            Fact(f"held_out {fit.what}", f"{fit.what}: error on held-out sizes", error, percent)
            for fit in calibration.fits
            if (error := fit.held_out_error) is not None
        ),
        parts=(
            Rows(
                "Fitted times, ± half of the 95 % confidence interval",
                dict.fromkeys(("", "per call", "per token or byte", "per pair of tokens"), str),
                [
                    (
                        fit.what,
                        *map(with_spread, fit.coefficients, fit.errors, repeat("s")),
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
            *(f"{x.what}: {with_spread(x.seconds, x.error, 's')}" for x in calibration.overheads),
            f"measured {calibration.date} with torch {calibration.torch}: "
            f"{', '.join(calibration.measured)}; {calibration.settings}",
            f"not measured, taken from {calibration.base}: {', '.join(base) or 'nothing'}",
            "every third size was held out of the fits; errors are medians over these sizes",
        ),
        values={**_FORMAT, "refused": list(refused), "profile": profile.to_dict()},
    )


def _curves(title: str, fits: list[Fit]) -> list[Chart]:
    if not fits:
        return []
    worst = max(fits, key=lambda fit: fit.held_out_error or 0.0)
    words = (
        "Points are measured, lines are predicted. Hollow points were held out of the fit; the "
        f"worst curve, {worst.what}, has a median error of {percent(worst.held_out_error)} on them."
    )
    sizes = [size for fit in fits for size in fit.sizes]
    across = np.geomspace(min(sizes), max(sizes), _CURVE_POINTS)
    lines = {
        fit.what: np.where(across > max(fit.sizes) * 1.001, np.nan, fit(across)) for fit in fits
    }
    points = {fit.what: (fit.sizes, fit.seconds, fit.held_out) for fit in fits}
    unit = "B" if fits[0].unit == BYTES else fits[0].unit
    return [draw_lines(title, words, (unit, "s"), lines, across, points)]


def _points(fits: Sequence[Fit]) -> Rows:
    scale = Scale.of((took for fit in fits for took in fit.seconds), "s")
    formats = {"": str, "size": number, "unit": str}
    formats |= {f"{name}, {scale.unit}": scale for name in ("measured", "predicted")}
    formats |= {"predicted over measured, less 1": percent, "held out": str}
    rows = [
        (fit.what, size, fit.unit, took, took * (1.0 + miss), miss, "yes" if held_out else None)
        for fit in fits
        for size, took, miss, held_out in zip(
            fit.sizes, fit.seconds, fit.misses.tolist(), fit.held_out, strict=True
        )
    ]
    return Rows("All points", formats, rows)
