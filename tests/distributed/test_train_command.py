"""`bascule train`: what it writes, how it ends, and a curve that depends on no rank and no stop."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile

from bascule.cli import main
from bascule.errors import ConfigError
from bascule.parallel import Step
from bascule.train import training_run
from bascule.train.checkpoints import newest_checkpoint, step_of
from bascule.train.stopwatch import Stopwatch
from bascule.train.training_run import PARTS
from bascule.workload.streams import SampleBatch, SyntheticStream
from tests.helpers.jobs import in_a_job
from tests.helpers.ranks import run_ranks, run_to_the_end
from tests.helpers.train_runs import (
    IN_A_STEP,
    VICTIM,
    killed_run,
    losses,
    make_album,
    records,
    refused,
    run,
    trained_numbers,
)

CODES = "g1b2i32f1s0,g1b1i64f4s1"
FLAGS = "--d-model 32 --num-heads 2 --num-single 1 --gamma 1 --dtype float64 --timeout-s 10".split()


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_album(tmp_path_factory.mktemp("albums") / "album")


def epochs(album: Path, folder: Path, number: int = 2) -> dict[str, Any]:
    """Settings of epochs of eleven photos and clips, four a step."""
    sizes = {"epochs": number, "batch_size": 4, "accumulate": 2}
    return {"data": None, "photos": album, "out": folder} | sizes


@pytest.mark.some(1)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (4, 2), (3, 2), (2, 4)])
def test_a_stopped_run_goes_on_with_the_same_curve_on_other_ranks(
    before: int, after: int, album: Path, tmp_path: Path
) -> None:
    assert run_ranks(run, 1, epochs(album, tmp_path / "whole")) == [6]
    settings = epochs(album, tmp_path / "stopped")
    assert run_ranks(run, before, settings, 3) == [3] * before
    assert run_ranks(run, after, settings | {"resume": True}, None, 1) == [6] * after
    whole = losses(tmp_path / "whole")
    assert losses(tmp_path / "stopped") == pytest.approx(whole, rel=1e-10)
    assert trained_numbers(tmp_path / "stopped") == dict.fromkeys(range(22), 1)


@pytest.mark.stress
def test_twenty_random_stops_lose_and_repeat_nothing(album: Path, tmp_path: Path) -> None:
    """Worlds of two and four in any order; ranks are stopped, or killed anywhere."""
    draw, num_kills = random.Random(0), 0
    settings = epochs(album, tmp_path / "stopped", 15) | {"save_every": 2, "resume": True}
    assert run_ranks(run, 2, settings | {"out": tmp_path / "whole"}) == [42, 42]
    folder = tmp_path / "stopped"
    for attempt in range(20):
        world, last = draw.choice((2, 4)), newest_checkpoint(folder)
        done = 0 if last is None else step_of(last)
        if draw.random() < 0.5:
            stop = min(done + draw.randint(1, 3), 41)
            assert run_ranks(run, world, settings, stop, attempt) == [max(stop, done + 1)] * world
        else:
            num_kills += 1
            place = draw.choice([*IN_A_STEP, "write", "metadata", "rename", "sync"])
            step = done + draw.randint(1, 3)
            step += step % 2 if place not in IN_A_STEP else 0
            run_to_the_end(killed_run, world, settings, place, step, attempt)
            last = newest_checkpoint(folder)
            assert last is None or step_of(last) >= done
    assert num_kills >= 5
    assert run_ranks(run, 4, settings, None, 20) == [42] * 4
    assert losses(folder) == pytest.approx(losses(tmp_path / "whole"), rel=1e-10)
    assert trained_numbers(folder) == dict.fromkeys(range(165), 1)


def command(folder: Path, *arguments: str) -> list[str]:
    return ["train", "--data", CODES, "--out", str(folder), *FLAGS, *arguments]


def _main(*arguments: str) -> None:
    main(list(arguments))


def _main_with_sigterm(*arguments: str) -> None:
    """One rank of the job gets SIGTERM in its third step."""
    train_step, num_steps = training_run.train_step, [0]

    def counted(*args: Any, **named: Any) -> Any:
        num_steps[0] += 1
        if num_steps[0] == 3 and os.environ["RANK"] == str(VICTIM):
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "train_step", counted)
        main(list(arguments))


def test_a_job_writes_a_line_a_step_and_says_where(tmp_path: Path) -> None:
    done = in_a_job(_main, *command(tmp_path, "--steps", "3", "--save-every", "2", "--keep", "1"))
    assert done.returncode == 0, done.stderr
    assert "steps 1 to 3 of 3" in done.stdout and "step-00000003" in done.stdout
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]
    lines = records(tmp_path)
    assert len(lines) == 3
    for line in lines:
        assert set(line["mean_s"]) == set(line["max_s"]) == set(PARTS)
        assert all(seconds >= 0 for seconds in line["max_s"].values())
        inside = ("samples", "route", "attend", "restore")
        assert sum(line["mean_s"][name] for name in inside) < line["mean_s"]["forward"]
        both = line["mean_s"]["forward"] + line["mean_s"]["backward"]
        assert 0 < line["mean_s"]["waiting"] < both and line["makespan_s"]["measured"] > 0
        assert line["imbalance"]["predicted"] >= 1 and line["imbalance"]["measured"] >= 1
        assert line["slowest"]["rank"] in (0, 1) and line["slowest"]["why"]
    assert lines[0]["makespan_s"]["predicted"] is None
    assert lines[1]["makespan_s"]["predicted"] > 0
    done = in_a_job(_main, *command(tmp_path, "--steps", "3", "--resume"))
    assert done.returncode == 0 and "nothing is left to train" in done.stdout


def test_sigterm_to_one_rank_saves_on_all_and_exits_with_0(tmp_path: Path) -> None:
    done = in_a_job(_main_with_sigterm, *command(tmp_path, "--steps", "9"))
    assert done.returncode == 0, done.stderr
    assert "stopped after step 3: go on with --resume" in done.stdout
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000003"
    done = in_a_job(_main, *command(tmp_path, "--steps", "5"))
    assert done.returncode == 2 and "go on with --resume" in done.stderr
    done = in_a_job(_main, *command(tmp_path, "--steps", "5", "--resume"))
    assert done.returncode == 0 and "steps 4 to 5 of 5" in done.stdout
    assert len(losses(tmp_path)) == 5


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_stop_with_the_command_that_started_them(tmp_path: Path, number: int) -> None:
    whole = [sys.executable, "-m", "bascule.cli", *command(tmp_path, "--ranks", "2")]
    process = subprocess.Popen(
        [*whole, "--steps", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    try:
        metrics, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 500
        while not (metrics.exists() and metrics.read_text().count("\n") > 3):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        out, err = process.communicate(timeout=600)  # also of the ranks, which write there as well
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (0 if number == signal.SIGTERM else -number), err
    assert ("stopped after step" in out) is (number == signal.SIGTERM)
    last = newest_checkpoint(tmp_path)
    assert last is not None and step_of(last) == len(losses(tmp_path))


def profiled(folder: Path) -> set[str]:
    """Names of the ranges of a step."""
    with profile() as traced:
        run({"out": folder, "steps": 1})
    return {one.key for one in traced.key_averages() if one.key.startswith("bascule::")}


def test_a_profile_has_ranges_with_names(tmp_path: Path) -> None:
    for names in run_ranks(profiled, 2, tmp_path):
        parts = "plan route gather_samples attend restore mean".split()
        assert {f"bascule::{part}" for part in parts} <= names
        assert any("route" in name and "all_to_all" in name for name in names), names


def each(runs: list[dict[str, Any]]) -> None:
    """Train all of them on this rank, one after the other."""
    for settings in runs:
        run(settings)


def test_the_curve_does_not_depend_on_bags_microbatches_or_ranks(tmp_path: Path) -> None:
    for num_ranks, settings, changes in (
        (1, {"data": CODES, "steps": 2, "batch_size": 1}, [{}]),
        (3, {"data": CODES, "steps": 2, "batch_size": 1}, [{}]),  # more ranks than samples
        (
            2,
            {"data": CODES, "steps": 2},
            [
                {},
                {"topology": "g2n1", "accumulate": 3},
                {"topology": "auto", "checkpoint": True},
            ],
        ),
    ):
        outs = [tmp_path / f"{num_ranks}-{place}" for place in range(len(changes))]
        pairs = zip(changes, outs, strict=True)
        run_ranks(each, num_ranks, [settings | change | {"out": out} for change, out in pairs])
    for first, others in (("1-0", ["3-0"]), ("2-0", ["2-1", "2-2"])):
        for other in others:
            assert losses(tmp_path / other) == pytest.approx(losses(tmp_path / first), rel=1e-10)


def with_a_slow_rank(folder: Path) -> None:
    """Attention takes a second, of one rank five; ranks that wait for it have its time then."""
    attend, lap, now = Step.attend, Stopwatch.lap, [0.0]
    seconds, group = (5.0 if dist.get_rank() == VICTIM else 1.0), dist.new_group()

    def attend_slowly(*args: Any) -> Any:
        now[0] += seconds
        return attend(*args)

    def lap_together(watch: Stopwatch, name: str, start: Any) -> Any:
        if name == "waiting":
            latest = torch.tensor(now)
            dist.all_reduce(latest, dist.ReduceOp.MAX, group)
            now[:] = latest.tolist()
        return lap(watch, name, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "attend", attend_slowly)
        patch.setattr(Stopwatch, "lap", lap_together)
        patch.setattr(Stopwatch, "now", lambda _: now[0])
        run({"out": folder, "steps": 3, "data": "g2b2i32f1s0"})


def test_a_slow_rank_is_named_and_the_others_wait(tmp_path: Path) -> None:
    run_ranks(with_a_slow_rank, 2, tmp_path)
    lines = records(tmp_path)
    assert len(lines) == 3
    for line in lines:
        assert line["slowest"]["rank"] == VICTIM
        assert line["slowest"]["why"] == "slower than planned"
        assert line["imbalance"]["measured"] == pytest.approx(5 / 3)
        assert line["imbalance"]["predicted"] < 1.3
        assert line["max_s"]["waiting"] >= 4.0


def unlike(folder: Path) -> list[tuple[list[str], str]]:
    """Runs of another seed on each rank, and with a folder that cannot be made."""
    (folder / "file").touch()
    wrong = {"out": folder, "seed": dist.get_rank()}, {"out": folder / "file" / "run"}
    return [refused(settings) for settings in wrong]


def test_wrong_settings_are_refused_on_all_ranks(tmp_path: Path) -> None:
    for seed, out in run_ranks(unlike, 2, tmp_path):
        assert "CommError" in seed[0] and "disagree on" in seed[1]
        assert "RemoteConfigError" in out[0] and "Not a directory" in out[1]


def failing_load(folder: Path, first: int) -> tuple[list[str], str]:
    load = SyntheticStream.samples

    def fail(self: SyntheticStream, numbers: Any) -> SampleBatch:
        if min(numbers) >= first:
            raise ConfigError("6.png has changed its size since the run began")
        return load(self, numbers)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == VICTIM:
            patch.setattr(SyntheticStream, "samples", fail)
        return refused({"out": folder, "steps": 9})


@pytest.mark.parametrize("first", [0, 6])
def test_a_sample_that_one_rank_cannot_load_is_told_to_all(first: int, tmp_path: Path) -> None:
    other, own = run_ranks(failing_load, 2, tmp_path, first)
    assert "ConfigError" in own[0] and "CommError" in other[0] and "rank 1" in other[1]
    assert all("6.png has changed its size" in text for _, text in (other, own))


def test_how_a_table_was_understood_is_said_once(tmp_path: Path) -> None:
    table = tmp_path / "sizes.csv"
    table.write_text("width,height\n64,64\n32,64\n")
    data = "--manifest", str(table), "--out", str(tmp_path / "run"), "--steps", "1"
    done = in_a_job(_main, "train", *data, *FLAGS, "--batch-size", "2")
    assert done.returncode == 0, done.stderr
    said = f"{table}: 2 samples; tokens follow from width, height.\nTokens of a sample: 8 to 16"
    assert done.stdout.startswith(said) and done.stdout.count(str(table)) == 1


def test_photos_and_clips_train_together(album: Path, tmp_path: Path) -> None:
    flags = "--epochs", "1", "--batch-size", "4", "--lr", "0.003"
    out = str(tmp_path / "run")
    done = in_a_job(_main, "train", "--photos", str(album), "--out", out, *FLAGS, *flags)
    assert done.returncode == 0, done.stderr
    assert "steps 1 to 3 of 3" in done.stdout and len(losses(tmp_path / "run")) == 3
