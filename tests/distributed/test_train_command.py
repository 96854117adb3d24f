"""`bascule train`: the curve and the samples do not depend on ranks, stops and kills."""

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bascule.train.checkpoints import newest_checkpoint, step_of
from tests.helpers.ranks import run_ranks, run_to_the_end
from tests.helpers.train_runs import (
    PLACES,
    SAVING,
    VICTIM,
    die,
    failing_run,
    hang,
    losses,
    make_album,
    out_of_space,
    run,
    trained_numbers,
)

WORLDS = [(2, 2), (4, 2), (2, 4)]


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_album(tmp_path_factory.mktemp("albums") / "album")


@pytest.fixture(scope="module")
def whole(album: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The curve of a run that nothing stops: two epochs of eleven samples, four a step."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_ranks(run, 2, epochs(album, folder)) == [6, 6]
    return losses(folder)


def epochs(album: Path, folder: Path) -> dict[str, Any]:
    return {
        "data": None,
        "photos": album,
        "epochs": 2,
        "batch_size": 4,
        "accumulate": 2,
        "out": folder,
    }


def everything_once(folder: Path) -> bool:
    return trained_numbers(folder) == dict.fromkeys(range(22), 1)


SELDOM, OFTEN = pytest.mark.stress, ("write", "publish")


@pytest.mark.some(1)
@pytest.mark.parametrize(("before", "after"), WORLDS)
def test_a_stopped_run_goes_on_with_the_same_curve_on_other_ranks(
    before: int, after: int, album: Path, whole: list[float], tmp_path: Path
) -> None:
    settings = epochs(album, tmp_path)
    assert run_ranks(run, before, settings, 3) == [3] * before
    assert losses(tmp_path) == pytest.approx(whole[:3], rel=1e-10)
    assert run_ranks(run, after, settings | {"resume": True}, None, 1) == [6] * after
    assert losses(tmp_path) == pytest.approx(whole, rel=1e-10)
    assert everything_once(tmp_path)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "place", [pytest.param(one, marks=() if one in OFTEN else SELDOM) for one in SAVING]
)
def test_a_kill_during_saving_leaves_a_checkpoint_to_go_on_from(
    place: str, album: Path, whole: list[float], tmp_path: Path
) -> None:
    settings = epochs(album, tmp_path) | {"save_every": 2}
    first, second = run_to_the_end(failing_run, 2, settings, place, 4, die)
    killed, other = (second, first) if place == "write" else (first, second)
    assert killed.exit_code == -signal.SIGKILL
    assert "CommError" in str(other.error) or "gloo" in str(other.error)
    last = newest_checkpoint(tmp_path)
    assert last is not None and step_of(last) == (4 if place == "published" else 2)
    assert run_ranks(run, 2, settings | {"resume": True}, None, 1) == [6, 6]
    assert losses(tmp_path) == pytest.approx(whole, rel=1e-10)
    assert everything_once(tmp_path)
    assert list(tmp_path.glob("*.tmp")) == []


@pytest.mark.parametrize("place", ["write", pytest.param("publish", marks=SELDOM)])
def test_a_full_disk_is_told_to_all_and_leaves_the_checkpoint_before(
    place: str, album: Path, whole: list[float], tmp_path: Path
) -> None:
    settings = epochs(album, tmp_path) | {"save_every": 2}
    for outcome in run_to_the_end(failing_run, 2, settings, place, 4, out_of_space):
        assert "CommError" in str(outcome.error)
        assert "No space left on device" in str(outcome.error).splitlines()[-1]
        assert "step 4" in str(outcome.error).splitlines()[-1]
    assert checkpoints(tmp_path) == ["step-00000002"]
    assert run_ranks(run, 2, settings | {"resume": True}, None, 1) == [6, 6]
    assert losses(tmp_path) == pytest.approx(whole, rel=1e-10)


def checkpoints(folder: Path) -> list[str]:
    """Whole ones and others."""
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step-"))


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("place", "on_victim"),
    [
        ("attend", die),
        ("backward", hang),
        *(pytest.param(place, die, marks=SELDOM) for place in ("plan", "route", "backward")),
        *(
            pytest.param(place, hang, marks=SELDOM)
            for place in ("plan", "route", "attend", "write")
        ),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_others_with_the_cause(
    place: str, on_victim: Callable[[], None], tmp_path: Path
) -> None:
    settings = {"out": tmp_path, "steps": 6, "save_every": 2, "timeout_s": 3.0}
    other, victim = run_to_the_end(failing_run, 2, settings, place, 4, on_victim, stopped=[VICTIM])
    assert victim.value is None
    last = str(other.error).splitlines()[-1]
    assert "CommError: step 4" in last and "ranks [1]" in last
    assert checkpoints(tmp_path) == ["step-00000002"]


@pytest.mark.stress
def test_twenty_random_stops_lose_and_repeat_nothing(album: Path, tmp_path: Path) -> None:
    """Worlds of two and four in any order; ranks are stopped, or killed anywhere."""
    draw = random.Random(0)
    settings = {"data": None, "photos": album, "epochs": 15, "batch_size": 4, "save_every": 2}
    assert run_ranks(run, 2, settings | {"out": tmp_path / "whole"}) == [42, 42]
    folder, num_kills = tmp_path / "stopped", 0
    settings |= {"out": folder, "resume": True}
    for attempt in range(20):
        world, last = draw.choice((2, 4)), newest_checkpoint(folder)
        done = 0 if last is None else step_of(last)
        if draw.random() < 0.5:
            stop = min(done + draw.randint(1, 3), 41)
            assert run_ranks(run, world, settings, stop, attempt) == [max(stop, done + 1)] * world
        else:
            num_kills += 1
            place, step = draw.choice(PLACES), done + draw.randint(1, 3)
            step += step % 2 if place in SAVING else 0
            run_to_the_end(failing_run, world, settings, place, step, die, attempt)
            losses_so_far = newest_checkpoint(folder)
            assert losses_so_far is None or step_of(losses_so_far) >= done
    assert num_kills >= 5
    assert run_ranks(run, 4, settings, None, 20) == [42] * 4
    assert losses(folder) == pytest.approx(losses(tmp_path / "whole"), rel=1e-10)
    assert trained_numbers(folder) == dict.fromkeys(range(165), 1)
