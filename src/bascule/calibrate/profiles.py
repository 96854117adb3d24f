"""Make a profile of times: curves, the numbers that follow from them, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import torch

from bascule.arrays import Floats
from bascule.calibrate.measuring import ALONE, BETWEEN_NODES, HOST, ON_RANKS, PASS, Measured
from bascule.calibrate.options import CalibrateOptions
from bascule.calibrate.timed import COLLECTIVE
from bascule.plan.calibration import (
    ALL_TO_ALL,
    BYTES,
    FORWARD,
    TOKENS,
    Calibration,
    Fit,
    Overhead,
    block_rates,
)
from bascule.plan.fits import fit_curve
from bascule.plan.machine import HardwareProfile

EXCHANGE = "exchange of attention"

_QUARTILE = 0.25
_DRAWS = 200
_NORMAL = 1.96  # standard errors on either side hold 95 %


def profile_of(measured: Measured, options: CalibrateOptions) -> HardwareProfile:
    """Make the profile of the measurements and the base."""
    fits, overheads = _fits(measured), _overheads(measured)
    numbers = _numbers(measured, fits, overheads)
    calibration = Calibration(
        name=options.name or options.out.stem or "profile",
        date=datetime.now(UTC).date().isoformat(),
        torch=str(torch.__version__),
        num_ranks=measured.seconds.shape[1],
        settings=measured.settings,
        d_model=measured.d_model,
        measured=(*numbers, *(() if measured.attention is None else ("attention",))),
        base=options.base,
        fits=tuple(fits.values()),
        overheads=overheads,
    )
    base = HardwareProfile.load(options.base)
    return replace(
        base,
        **numbers,
        device=measured.device,
        source="measured",
        peak_flops_per_s=base.peak_flops_per_s if base.device == measured.device else None,
        attention=measured.attention,
        note=f"what was not measured is taken from {options.base}: {base.note}".strip(": "),
        calibration=calibration,
    )


def refusals(profile: HardwareProfile, limit: float, *, attends: bool = True) -> list[str]:
    """Name curves that miss held-out points by more than `limit`, or give no rate."""
    assert profile.calibration is not None
    sentences: list[str] = []
    error = None if profile.attention is None else profile.attention.fit_error
    if error is not None and error > limit:
        sentences.append(
            f"block-sparse attention: the fit has an error of {error:.0%}, and the limit is "
            f"{limit:.0%}: leave the machine idle, or give more --rounds or --sparse-tokens"
        )
    for fit in profile.calibration.fits:
        error = fit.held_out_error
        if error is not None and error > limit:
            sentences.append(
                f"{fit.what}: held-out {fit.unit} are missed by {error:.0%} in the median, and the "
                f"limit is {limit:.0%}: leave the machine idle, give more --rounds, or sizes over "
                "which it behaves alike"
            )
        elif fit.coefficients[1] <= 0:
            sentences.append(
                f"{fit.what}: the times do not grow with the {fit.unit} in proportion anywhere, so "
                "they give no rate: leave the machine idle, give more --rounds, or larger sizes"
            )
        elif attends and fit.what == FORWARD and fit.coefficients[2] <= 0:
            sentences.append(
                f"{fit.what}: attention is lost in the noise, so that it would take no time at any "
                "length: give longer --lengths, or leave the machine idle"
            )
    return sentences


def _fits(measured: Measured) -> dict[str, Fit]:
    kinds: dict[str, list[int]] = {}
    for place, probe in enumerate(measured.probes):
        if probe.kind in (PASS, COLLECTIVE):
            kinds.setdefault(probe.name, []).append(place)
    return {name: _fit(name, places, measured) for name, places in kinds.items()}


def _fit(name: str, places: list[int], measured: Measured) -> Fit:
    """Fit a curve: to messages of the slowest rank, to a block in the mean over the ranks."""
    probes, seconds = [measured.probes[place] for place in places], measured.seconds[:, :, places]
    amounts = np.array([probe.amount for probe in probes])
    if probes[0].kind == COLLECTIVE:
        sizes = [max(round(amount), 1) for amount in amounts.tolist()]
        return fit_curve(name, BYTES, sizes, *undisturbed(seconds.max(axis=1)))
    times = seconds.mean(axis=1) / amounts
    return fit_curve(name, TOKENS, [probe.size for probe in probes], *undisturbed(times))


def undisturbed(times: Floats) -> tuple[Floats, Floats]:
    """Return (n,) lower quartiles of (rounds, n) times, and relative errors by bootstrap.

    Least times are luck, and medians follow other work. Of 18 rounds of messages on two busy cores,
    held-out sizes were missed by 8.8 % with least times, 8.1 % with medians, and 4.8 % with
    quartiles (median of 480 fits).
    """
    drawn = np.random.default_rng(0).integers(len(times), size=(_DRAWS, len(times)))
    again = np.quantile(times[drawn], _QUARTILE, axis=1)
    seconds = np.quantile(times, _QUARTILE, axis=0)
    return seconds, again.std(axis=0) / seconds


def _overheads(measured: Measured) -> tuple[Overhead, ...]:
    times: dict[str, tuple[float, float]] = {}
    for place, probe in enumerate(measured.probes):
        if probe.kind == HOST:
            slowest = measured.seconds[:, :, place].max(axis=1, keepdims=True)
            (seconds,), (noise,) = undisturbed(slowest)
            times[probe.name] = float(seconds), float(seconds * noise)
    if ON_RANKS in times:  # to the heads, and back
        (both_s, both_error), (alone_s, error) = times.pop(ON_RANKS), times[ALONE]
        half = max(both_s - alone_s, 0.0) / 2
        times[EXCHANGE] = half, float(np.hypot(both_error, error)) / 2
    return tuple(
        Overhead(what=what, seconds=seconds, error=_NORMAL * error)
        for what, (seconds, error) in times.items()
    )


def _numbers(
    measured: Measured, fits: dict[str, Fit], overheads: Sequence[Overhead]
) -> dict[str, float]:
    numbers: dict[str, float | None] = {
        **block_rates(fits[FORWARD], measured.d_model),
        "memory_bytes": measured.memory_bytes,
    }
    wires = {"intra_bytes_per_s": ALL_TO_ALL, "inter_bytes_per_s": ALL_TO_ALL + BETWEEN_NODES}
    for name, what in wires.items():
        if what in fits:
            numbers[name] = 1.0 / byte_s if (byte_s := fits[what].coefficients[1]) > 0 else None
    launches = [one.seconds for one in overheads if one.what == EXCHANGE]
    if launches:
        numbers["launch_s"] = launches[0]
    return {name: float(value) for name, value in numbers.items() if value is not None}
