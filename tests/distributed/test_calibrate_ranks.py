"""`bascule calibrate` on ranks: known times give known numbers, and all ranks know what fails.

Never how fast: where numbers are compared, every call runs, and its time is replaced.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bascule.calibrate import measuring, timed
from bascule.calibrate.measuring import (
    ALONE,
    BETWEEN_NODES,
    ON_RANKS,
    measure,
    profile_of,
    refusals,
)
from bascule.calibrate.options import CalibrateOptions
from bascule.cli import launch, main
from bascule.machine.cluster import HardwareProfile
from tests.helpers.calibrations import CURVES
from tests.helpers.cli import run
from tests.helpers.jobs import in_a_job
from tests.helpers.ranks import raised_by, run_ranks

WIDTH = 32
SMALL = ("--rounds", "2", "--mib", "1", "--lengths", "16:256", "--points", "5", "--d-model")
OPTIONS = CalibrateOptions(
    rounds=2, mib=1, lengths="16:256", points=5, d_model=WIDTH, num_heads=2, timeout_s=100.0
)
LAUNCH_S = 7e-5
HOST = {ALONE: 2e-4, ON_RANKS: 2e-4 + 2 * LAUNCH_S}
FAR_SLOWER = 10.0
_really = timed.seconds_of


def known_seconds(probe: timed.Probe, device: torch.device) -> float:
    """Runs it, and tells the time of a machine that is known."""
    assert _really(replace(probe, in_a_row=1), device) > 0
    if probe.name in HOST:
        return HOST[probe.name]
    name = probe.name.removesuffix(BETWEEN_NODES)
    curve = CURVES.get(name, CURVES["all-to-all"])
    if probe.kind == measuring.PASS:
        return probe.amount * sum(c * probe.size**power for power, c in enumerate(curve))
    seconds = curve[0] + curve[1] * probe.amount
    return seconds if name == probe.name else FAR_SLOWER * seconds


def calibrated(options: CalibrateOptions = OPTIONS, hosts: int = 1) -> Mapping[str, Any]:
    """Of a machine with known times, and so many hosts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timed, "seconds_of", known_seconds)
        patch.setattr(measuring.socket, "gethostname", lambda: f"host {rank * hosts // size}")
        rounds = list[int]()
        measured = measure(options, torch.device("cpu"), lambda: rounds.append(1))
    assert len(rounds) == options.rounds + 2
    profile = profile_of(measured, options)
    return {"profile": profile.to_dict(), "refused": refusals(profile, options.limit)}


def test_known_times_give_known_numbers_on_all_ranks() -> None:
    first, second = run_ranks(calibrated, 2)
    assert first == second and first["refused"] == []
    profile = HardwareProfile.of_dict(first["profile"], "the first rank's")
    made = profile.calibration
    assert made is not None and profile.source == "measured" and made.num_ranks == 2
    assert {fit.what for fit in made.fits} == {*CURVES, "all-gather", "reduce-scatter"}
    for fit in made.fits:
        curve = CURVES.get(fit.what, CURVES["all-to-all"])
        assert fit.coefficients == pytest.approx(curve, rel=1e-6)
    assert profile.matmul_flops_per_s == pytest.approx(24 * WIDTH**2 / CURVES["forward"][1])
    assert profile.attention_flops_per_s == pytest.approx(4 * WIDTH / CURVES["forward"][2])
    assert profile.intra_bytes_per_s == pytest.approx(1 / CURVES["all-to-all"][1])
    assert profile.launch_s == pytest.approx(LAUNCH_S)
    assert made.torch == torch.__version__
    expected = {"matmul_flops_per_s", "attention_flops_per_s", "intra_bytes_per_s", "launch_s"}
    assert set(made.measured) == expected | {"memory_bytes"}
    assert profile.provenance_of("inter_bytes_per_s") == "from h100-datasheet, not measured"
    assert profile.peak_flops_per_s is None  # that of another device


def test_one_rank_measures_no_wires() -> None:
    (alone,) = run_ranks(calibrated, 1)
    profile = HardwareProfile.of_dict(alone["profile"], "its")
    made = profile.calibration
    assert made is not None and {fit.what for fit in made.fits} == {
        "forward",
        "recompute",
        "backward",
    }
    assert "intra_bytes_per_s" not in made.measured and "launch_s" not in made.measured
    assert profile.intra_bytes_per_s == HardwareProfile.load("h100-datasheet").intra_bytes_per_s
    assert "180 GB/s in a node (not measured)" in str(profile)


@pytest.mark.stress
def test_wires_between_hosts_are_told_from_those_within() -> None:
    found, *_ = run_ranks(calibrated, 4, OPTIONS, 2)
    profile = HardwareProfile.of_dict(found["profile"], "its")
    assert profile.intra_bytes_per_s == pytest.approx(1 / CURVES["all-to-all"][1])
    slow = 1 / (FAR_SLOWER * CURVES["all-to-all"][1])
    assert profile.inter_bytes_per_s == pytest.approx(slow)
    assert profile.calibration is not None
    assert "inter_bytes_per_s" in profile.calibration.measured


def unlike_options() -> tuple[list[str], str]:
    rounds = 2 + dist.get_rank()
    return raised_by(calibrated, CalibrateOptions(rounds=rounds, mib=1, lengths="16:256"))


def module_of_one() -> tuple[list[str], str]:
    """A module that one rank alone cannot import."""
    name = "tests.helpers.own_blocks:make"
    if dist.get_rank() == 1:
        sys.modules["tests.helpers.own_blocks"] = None  # pyright: ignore[reportArgumentType]
    return raised_by(calibrated, CalibrateOptions(lengths="16:256", points=5, module=name))


def test_what_one_rank_meets_is_known_to_all() -> None:
    for classes, text in run_ranks(unlike_options, 2):
        assert "CommError" in classes and "--rounds" in text
    for classes, text in run_ranks(module_of_one, 2):
        assert "RemoteConfigError" in classes and "own_blocks cannot be imported" in text


def _known(*arguments: str) -> None:
    timed.seconds_of = known_seconds
    main(list(arguments))


def _real(*arguments: str) -> None:
    main(list(arguments))


@pytest.mark.nightly
@pytest.mark.slow
def test_the_command_saves_a_profile_that_the_others_take(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, page = tmp_path / "mine.json", tmp_path / "mine.html"
    arguments = ("--out", str(path), "--report", str(page), "--json", "-")
    done = in_a_job(_known, "calibrate", *SMALL, "32", *arguments)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    profile = HardwareProfile.load(path)
    assert report["refused"] == [] and report["profile"] == json.loads(path.read_text())
    assert "forward" in done.stderr and "written: " in done.stderr
    text = page.read_text()
    assert "Passes of a block" in text and "Messages" in text and "held out" in text
    mine = tmp_path / "by_ranks_of_its_own.json"
    with pytest.MonkeyPatch.context() as patch:  # that ranks start is seen in tests of others
        patch.setattr(launch, "result_of_ranks", lambda *_: done.stdout)
        code, _, _ = run(capsys, "calibrate", "--ranks", "2", "--out", str(mine))
    assert code == 0 and json.loads(mine.read_text()) == report["profile"]
    given = ("--profile", str(path))
    code, out, _ = run(capsys, "topology", "--lengths", "900/300", "--d-model", "32", *given)
    assert code == 0 and "mine, measured" in " ".join(out.split())
    arguments = ("--model", "wan2.1", "--block", "1280", "--ring", "2", *given)
    code, out, _ = run(capsys, "sparse", *arguments)
    assert code == 0 and str(profile).split(";")[0] in " ".join(out.split())


def test_a_bad_fit_is_refused_and_nothing_is_saved(tmp_path: Path) -> None:
    """Real times, of which none is so exact."""
    path = tmp_path / "mine.json"
    done = in_a_job(_real, "calibrate", *SMALL, "32", "--out", str(path), "--limit", "0")
    assert done.returncode == 1 and not path.exists()
    assert "refused: " in done.stdout and "the limit is 0 %" in done.stdout
    assert "nothing was saved" in done.stdout


@pytest.mark.stress
def test_a_module_of_the_user_in_a_job(tmp_path: Path) -> None:
    path, name = tmp_path / "mine.json", "tests.helpers.own_blocks:make"
    arguments = ("calibrate", *SMALL, "16", "--out", str(path))
    done = in_a_job(_known, *arguments, "--module", name)
    assert done.returncode == 0, done.stderr
    made = HardwareProfile.load(path).calibration
    assert made is not None and name in made.settings
    done = in_a_job(_known, *arguments, "--module", "tests.helpers.own_blocks:raises")
    assert done.returncode == 2 and "raised ValueError: no block for 16" in done.stderr
