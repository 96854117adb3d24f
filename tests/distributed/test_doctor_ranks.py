"""`bascule doctor` on ranks: what it reports, whom it names, and how it ends. Never how fast."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bascule.bench import doctor
from bascule.bench.doctor import LINK, WORK
from bascule.bench.options import DoctorOptions
from bascule.calibrate import timed
from bascule.cli import main
from bascule.comm.groups import member_of, resolve, set_timeout
from bascule.machine.cluster import HardwareProfile
from tests.helpers.cli import run
from tests.helpers.faults import look_often
from tests.helpers.jobs import forked_launches, in_a_job
from tests.helpers.ranks import raised_by, run_ranks, run_to_the_end

pytestmark = pytest.mark.nightly

OPTIONS = DoctorOptions(rounds=2, mib=1)
SMALL = ("--rounds", "1", "--mib", "1")
VICTIM = 1
TIMEOUT_S = 4.0
COLLECTIVES = {"all-to-all", "all-gather", "reduce-scatter", "all-reduce", "to the next rank"}


def checked(options: DoctorOptions = OPTIONS) -> dict[str, Any]:
    return doctor.check_up(options, torch.device("cpu"))


def of_kind(report: Mapping[str, Any], kind: str) -> list[tuple[int, ...]]:
    return [one["ranks"] for one in report["findings"] if one["kind"] == kind]


def known_seconds(kind: str) -> dict[str, Any]:
    """A report in which all runs for real, and everything of one kind takes the victim longer."""
    really = timed.seconds_of

    def seconds_of(probe: timed.Probe, device: torch.device) -> float:
        assert really(probe, device) > 0
        is_own = not probe.ends or any(VICTIM in ends and 0 in ends for ends in probe.ends)
        is_slow = dist.get_rank() == VICTIM and probe.kind == kind and is_own
        return 0.01 if is_slow else 0.001

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timed, "seconds_of", seconds_of)
        return checked()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(600.0)  # the others are killed or done long before


def failing_rank(on_victim: Callable[[], None]) -> tuple[list[str], str]:
    """One rank has another Python, and does not get through its work."""
    set_timeout(member_of(resolve(None), "doctor"), TIMEOUT_S)
    look_often()

    def fail(*args: Any, **kwargs: Any) -> Any:
        on_victim()
        raise MemoryError("no room for q")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == VICTIM:
            patch.setattr(doctor.platform, "python_version", lambda: "3.9.1")
            patch.setattr(doctor, "attend_packed", fail)
        try:
            return raised_by(checked)
        except MemoryError as error:
            return ["MemoryError"], str(error)


def profile_of_one(folder: str) -> tuple[list[str], str]:
    """A relative path that leads to a profile on one rank alone."""
    if dist.get_rank() == VICTIM:
        os.chdir(folder)
    options = DoctorOptions(rounds=1, mib=1, profile="nowhere.json")
    return raised_by(checked, options)


def unlike_options() -> tuple[list[str], str]:
    return raised_by(checked, DoctorOptions(rounds=1 + dist.get_rank(), mib=1))


def test_a_report_has_all_fields_and_is_the_same_on_all_ranks() -> None:
    reports = run_ranks(checked, 2)
    assert reports[0] == reports[1]
    report = json.loads(json.dumps(reports[0]))
    assert report["bascule"] == "doctor report" and report["num_ranks"] == 2
    for rank, row in enumerate(report["ranks"]):
        assert row["rank"] == rank
        assert row["torch"] == torch.__version__ and row["bascule"] and row["host"]
        assert row["memory_bytes"] > 0 and row["store_s"] > 0 and row["timeout_s"] == 100
        assert set(row["work"]) == {"matmul", "attention"}
        assert all(work["flops_per_s"] > 0 for work in row["work"].values())
    assert {row["name"] for row in report["collectives"]} == COLLECTIVES
    assert {row["size_bytes"] for row in report["collectives"]} == {2**10, 2**18, 2**20}
    assert all(row["bytes_per_s"] > 0 for row in report["collectives"])
    assert [row["ranks"] for row in report["links"]] == [[0, 1]] * 3
    assert [row["num_bytes"] for row in report["links"]] == [2**10, 2**18, 2**20]


def test_a_world_of_one_and_of_three() -> None:
    (alone,) = run_ranks(checked, 1)
    assert alone["collectives"] == [] and alone["links"] == [] and len(alone["ranks"]) == 1
    report, *_ = run_ranks(checked, 3)
    assert {tuple(row["ranks"]) for row in report["links"]} == {(0, 1), (1, 2), (2, 0)}


def test_a_slow_rank_and_a_slow_link_are_named() -> None:
    report, _ = run_ranks(known_seconds, 2, WORK)
    assert set(of_kind(report, "slow rank")) == {(VICTIM,)}
    assert any(f"rank {VICTIM} on" in one["text"] for one in report["findings"])
    report, *_ = run_ranks(known_seconds, 4, LINK)
    assert set(of_kind(report, "slow link")) == {(0, 1)}


def test_an_error_of_one_rank_ends_the_others_with_it_and_with_what_differs() -> None:
    first, own = (one.value for one in run_to_the_end(failing_rank, 2, _pass))
    assert own == (["MemoryError"], "no room for q")
    assert "CommError" in first[0]
    assert "no room for q" in first[1] and "3.9.1 on rank 1" in first[1]


@pytest.mark.some(1)
@pytest.mark.parametrize("on_victim", [die, hang])
def test_a_rank_that_dies_or_hangs_ends_the_others(on_victim: Callable[[], None]) -> None:
    first, dead = run_to_the_end(failing_rank, 2, on_victim, stopped=[VICTIM])
    assert dead.value is None
    assert "CommError" in first.value[0] and "missing: no report from ranks [1]" in first.value[1]
    assert "3.9.1 on rank 1" in first.value[1]


def _pass() -> None:
    """Goes on to the error."""


def test_what_one_rank_cannot_read_or_has_otherwise_is_known_to_all(tmp_path: Path) -> None:
    for classes, text in run_ranks(profile_of_one, 2, str(tmp_path)):
        assert "RemoteConfigError" in classes and "nowhere.json" in text
    for classes, text in run_ranks(unlike_options, 2):
        assert "CommError" in classes and "--rounds" in text


def job(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a job, as torchrun starts it."""
    return in_a_job(_main, "doctor", *SMALL, *arguments)


def _main(*arguments: str) -> None:
    main(list(arguments))


def test_the_command_in_a_job(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = job("--json", str(path))
    report = json.loads(path.read_text())
    assert done.returncode == bool(report["findings"]), done.stderr
    assert "2 ranks" in done.stdout and "all-to-all" in done.stdout and "Neighbours" in done.stdout
    assert ("All checks passed" in done.stdout) == (not report["findings"])


def test_findings_are_exit_code_1_and_json_goes_to_standard_output(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    HardwareProfile(device="dream", matmul_flops_per_s=1e24).save(path)
    done = job("--json", "-", "--profile", str(path))
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert (0, 1) in [tuple(one["ranks"]) for one in report["findings"]]
    assert "found (profile): ranks 0 to 1" in done.stderr


def test_what_cannot_be_written_and_ranks_that_do_not_fit() -> None:
    done = job("--json", "/nonexistent/report.json")
    assert done.returncode == 2 and "cannot be written" in done.stderr
    done = job("--ranks", "3")
    assert done.returncode == 2 and "started 2 ranks" in done.stderr


def test_the_command_starts_its_own_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    with forked_launches():
        code, out, error = run(capsys, "doctor", "--ranks", "2", *SMALL, "--json", str(path))
    report = json.loads(path.read_text())
    assert code == bool(report["findings"]), error
    assert report["num_ranks"] == 2 and "2 ranks" in out


def alone() -> None:
    """The first rank comes to its job, and the second one does not."""
    if os.environ["RANK"] == "0":
        main(["doctor", *SMALL, "--timeout-s", "1"])


def test_a_rank_that_waits_alone_says_so() -> None:
    done = in_a_job(alone)
    assert done.returncode == 1
    assert "ranks of this job did not meet within 1 s" in done.stderr.splitlines()[-1]
