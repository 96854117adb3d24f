"""Curves through noisy times, the profiles that follow, and files that hold none."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bascule.calibrate.measuring import refusals, undisturbed
from bascule.cli.calibrate import report_of
from bascule.errors import ConfigError
from bascule.machine.calibration import BYTES, TOKENS, is_held_out, least_points
from bascule.machine.cluster import TRAINING, HardwareProfile, passes_of
from bascule.quantities import Scale, percent
from bascule.report.page import render
from tests.helpers.browser import opened
from tests.helpers.calibrations import CURVES, LENS, calibrated, fitted
from tests.helpers.cli import Console, run
from tests.helpers.mutations import mutated

NUM_MUTATIONS = 600


@pytest.mark.parametrize("what", CURVES)
def test_exact_times_give_the_curve_back(what: str) -> None:
    fit = fitted(what)
    assert fit.coefficients == pytest.approx(CURVES[what], rel=1e-6)
    assert fit.held_out_error == pytest.approx(0.0, abs=1e-9)
    assert fit(fit.sizes) == pytest.approx(fit.seconds)


@pytest.mark.parametrize("what", CURVES)
def test_stated_errors_hold_the_true_coefficients(what: str) -> None:
    """Intervals of 95 %: of 300 draws, each coefficient is in no fewer than 270."""
    true = np.array(CURVES[what])
    fits = [fitted(what, 0.03, seed) for seed in range(300)]
    inside = [
        np.abs(np.array(fit.coefficients) - true) <= np.array(fit.errors, dtype=np.float64)
        for fit in fits
    ]
    assert np.sum(inside, axis=0).min() >= 270
    # and they are no wider than they must be: most coefficients are known within a fourth
    widths = [np.array(fit.errors, dtype=float) / true for fit in fits]
    assert np.median(widths, axis=0).max() < 0.6


def test_every_third_point_is_held_out_but_neither_end() -> None:
    for num in range(4, 40):
        held_out = is_held_out(num)
        assert not held_out[0] and not held_out[-1] and held_out[1]
        assert held_out.sum() in (num // 3, (num - 1) // 3, (num + 1) // 3)
    assert (least_points(TOKENS), least_points(BYTES)) == (5, 4)


def test_a_stall_of_some_rounds_bends_no_curve() -> None:
    times = np.tile([1.0, 2.0, 4.0], (9, 1))
    times[2:8, 1] = 50.0  # most of the rounds
    seconds, noise = undisturbed(times)
    assert seconds.tolist() == [1.0, 2.0, 4.0]
    assert noise[0] == noise[2] == 0.0 < noise[1]
    times[2:8, 1] = [2.1, 2.2, 2.3, 2.4, 2.5, 2.6]
    assert undisturbed(times)[0][1] == pytest.approx(2.0)
    times[3, 0] = 0.5  # a call that was left alone for once bends no curve, either
    assert undisturbed(times)[0][0] == 1.0


def refused_of(**changes: Any) -> list[str]:
    """Refusals of a profile whose forward curve has other points."""
    profile = calibrated(noise=0.0)
    assert profile.calibration is not None
    first, *others = profile.calibration.fits
    fits = (replace(first, **changes), *others)
    changed = replace(profile, calibration=replace(profile.calibration, fits=fits))
    return refusals(changed, 0.25)


def test_a_bad_fit_is_refused_with_its_numbers() -> None:
    assert refused_of() == []
    seconds = np.array(fitted("forward").seconds)
    held_out = is_held_out(len(LENS))
    (told,) = refused_of(seconds=np.where(held_out, 1.6 * seconds, seconds))
    assert "forward: held-out tokens are missed by 37.5 %" in told and "limit is 25.0 %" in told
    assert "leave the machine idle" in told
    assert refused_of(seconds=np.where(held_out, 1.2 * seconds, seconds)) == []
    seen = np.where(held_out, seconds, 1.6 * seconds)  # those that were fitted do not judge
    assert refused_of(seconds=seen) == []
    (told,) = refused_of(coefficients=(1e-4, 0.0, 3e-11), seconds=1e-4 + 3e-11 * np.square(LENS))
    assert "do not grow" in told
    (told,) = refused_of(coefficients=(1e-4, 2e-7, 0.0), seconds=1e-4 + 2e-7 * np.array(LENS))
    assert "attention cannot be told from noise" in told


def test_gamma_and_passes_are_those_that_were_measured() -> None:
    profile = calibrated(noise=0.0)
    assert profile.gamma == pytest.approx(3e-11 / 2e-7 * 24 * 1024**2 / (4 * 1024))
    step = passes_of("step", profile)
    assert step.linear == pytest.approx((2.0 + 2.2 + 4.0) / 2.0)
    assert step.attention == pytest.approx((3 + 3 + 8) / 3)
    assert step.exchanges == TRAINING.exchanges
    assert passes_of("step", HardwareProfile.load("h100-datasheet")) is TRAINING
    assert HardwareProfile.load("h100-datasheet").gamma == 1.0
    assert HardwareProfile.load("h100-knapformer").gamma == pytest.approx(0.426)
    assert HardwareProfile(device="new").gamma == 1.0
    text = str(profile)
    assert "126 TFLOP/s, 167 GB/s in a node, 25.0 GB/s between nodes (not measured)" in text
    assert text.endswith("mine, measured 2026-11-23 on 8 ranks with torch 2.13.0")


def test_a_topology_of_a_calibrated_profile(capsys: Console, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    calibrated().save(path)
    arguments = ("--lengths", "900,300/512", "--d-model", "1024", "--profile", str(path))
    code, out, _ = run(capsys, "topology", *arguments)
    assert code == 0 and "mine, measured 2026-11-23" in " ".join(out.split())
    assert "(not measured)" in " ".join(out.split())
    code, out, _ = run(capsys, "plan", *arguments, "--kb-per-token", "9")
    told = "A rank has 80.0 GB of memory; from h100-datasheet, not measured"
    assert code == 0 and told in " ".join(out.split())
    replace(calibrated(), calibration=None).save(path)
    code, out, _ = run(capsys, "topology", *arguments, "--tflops", "5")
    assert code == 0 and "given, not measured" in " ".join(out.split())


def test_the_page_in_the_browser(tmp_path: Path) -> None:
    path, profile = tmp_path / "mine.html", calibrated("<b>mine</b>", noise=0.02)
    path.write_text(render(report_of(profile, []), "bascule calibrate"))
    found = opened(path, tmp_path / "profile")
    assert found.errors == [] and found.num_charts == 2
    assert "&lt;b&gt;mine" in found.html and "<b>mine" not in found.html
    assert profile.calibration is not None
    scale = Scale.of((took for fit in profile.calibration.fits for took in fit.seconds), "s")
    for fit in profile.calibration.fits:
        assert found.numbers[f"held_out {fit.what}"] == percent(fit.held_out_error)
        assert f">{scale(fit.seconds[1])}</td>" in found.html
    told = render(report_of(profile, ["forward: bad", "backward: too"]), "x")
    assert "Refused: forward: bad." in told and "backward: too" in told


def test_mutated_files_give_a_profile_or_one_sentence(capsys: Console, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    saved, chance = calibrated().to_dict(), random.Random(7)
    saved = json.loads(json.dumps(saved))
    num_loaded = num_refused = 0
    for _ in range(NUM_MUTATIONS):
        path.write_text(json.dumps(mutated(chance, saved)))
        try:
            profile = HardwareProfile.load(path)
        except ConfigError as error:
            num_refused += 1
            told = str(error)
            assert "\n" not in told and len(told) < 1500 and told.startswith(str(path)), told
            continue
        num_loaded += 1
        again = HardwareProfile.of_dict(json.loads(json.dumps(profile.to_dict())), "again")
        assert again == profile and profile.gamma >= 0
        passes_of("step", profile)
        for fit in () if profile.calibration is None else profile.calibration.fits:
            assert np.isfinite(fit(fit.sizes)).all() and fit.held_out_error != -1.0
    assert num_loaded > 20 and num_refused > 300
    for _ in range(40):  # through the command: an answer, or one line and exit code 2
        path.write_text(json.dumps(mutated(chance, saved)))
        code, _, err = run(capsys, "topology", "--lengths", "90/50", "--profile", str(path))
        assert code in (0, 2), err
        lines = [line for line in err.splitlines() if line.strip() and "solving" not in line]
        assert code == 0 or len(lines) == 1, err
