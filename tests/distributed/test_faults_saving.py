"""A fault at each point of saving and resuming: all ranks end and say why, and nothing is lost.

After each fault the newest checkpoint is the one that was whole, and the run goes on from it with
the losses of a run that nothing stopped.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bascule.comm.failures import ROLL_CALL_S
from bascule.train.checkpoints import newest_checkpoint, step_of
from tests.helpers.faults import Fault, cause_of, check_fault
from tests.helpers.ranks import COLLECTIVE_TIMEOUT_S, run_ranks
from tests.helpers.train_runs import SMALL, losses, refused, run, struck_run, trained_numbers

GRACE_S = 10.0
NUM_STEPS, STRUCK, NOBODY = 6, 4, 65534
SETTINGS: dict[str, Any] = {"steps": NUM_STEPS, "save_every": 2}


def at(step: int = STRUCK, **places: str) -> list[Fault]:
    """Faults such as "kill 2/3 #2" (rank 2 of 3, its second call), by the place."""
    return [
        Fault(kind, place.replace("_", " "), int(victim), int(ranks), step, int(nth or 1))
        for place, faults in places.items()
        for kind, victim, ranks, nth in re.findall(r"(\w+) (\d)/(\d)(?: #(\d))?", faults)
    ]


BEFORE_RENAME = at(
    plan="kill 1/2, stop 1/2",
    route="kill 1/2, stop 1/2",
    attend="kill 1/2, stop 1/2",
    backward="kill 1/2, stop 1/2",
    prepare="kill 0/3, stop 0/2, full 0/4",
    write="kill 2/3, full 0/3",
    half_of_a_file="kill 0/3 #3, kill 1/2 #2, stop 1/3 #3, full 3/4 #2",
    written="kill 1/3, stop 0/2",
    metadata="kill 0/4, stop 0/3, full 0/2",
    half_of_the_facts="kill 0/2, full 0/3",
    sync="kill 0/3, full 0/2",
    rename="kill 0/2, kill 0/4 #2, stop 0/2 #2, full 0/4 #2",
)
AFTER_RENAME = at(sync="kill 0/3 #2, stop 0/2 #2", rename="kill 0/2 #3", remove="kill 0/4")
RESUMING = at(
    0,
    read_facts="kill 1/3, stop 0/2",
    read_metadata="kill 0/2",
    read="kill 2/3, stop 1/2",
    set="kill 3/4",
)
LAUNCHED = [
    *at(half_of_a_file="kill 1/2 #2", rename="kill 0/3 #2", metadata="full 0/2"),
    *at(write="stop 1/2"),  # torchrun kills it after 30 s
    *at(0, read="kill 1/2"),
]
DAILY = [
    *at(backward="stop 1/2", write="full 0/3", rename="kill 0/2"),
    *at(0, read="kill 2/3"),
]


def seldom(faults: Sequence[Fault]) -> list[Any]:
    often, stress = (), pytest.mark.stress
    return [pytest.param(x, id=str(x), marks=often if x in DAILY else stress) for x in faults]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The curve of a run that nothing stops."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_ranks(run, 2, SETTINGS | {"out": folder}) == [NUM_STEPS] * 2
    return losses(folder)


def end_struck(fault: Fault, tmp_path: Path, **settings: Any) -> Path:
    out, told = tmp_path / "out", tmp_path / "told"
    told.mkdir()
    program = partial(struck_run, SETTINGS | {"out": out, "timeout_s": 5.0} | settings)
    check_fault(fault, told, program, COLLECTIVE_TIMEOUT_S + ROLL_CALL_S + GRACE_S)
    return out


def check_left(out: Path, newest: int, whole: list[float]) -> None:
    """The newest checkpoint is that of a step, and the run goes on from it as if not stopped."""
    last = newest_checkpoint(out)
    assert last is not None and step_of(last) == newest
    assert run_ranks(run, 2, SETTINGS | {"out": out, "resume": True}, None, 1) == [NUM_STEPS] * 2
    assert losses(out) == pytest.approx(whole, rel=1e-10)
    assert trained_numbers(out) == dict.fromkeys(range(3 * NUM_STEPS), 1)
    assert list(out.glob("*.tmp")) == []


@pytest.mark.parametrize("fault", seldom(BEFORE_RENAME))
def test_a_fault_before_a_checkpoint_is_whole_leaves_the_one_before(
    fault: Fault, whole: list[float], tmp_path: Path
) -> None:
    check_left(end_struck(fault, tmp_path), STRUCK - 2, whole)


@pytest.mark.parametrize("fault", seldom(AFTER_RENAME))
def test_a_fault_after_a_checkpoint_is_whole_leaves_it(
    fault: Fault, whole: list[float], tmp_path: Path
) -> None:
    check_left(end_struck(fault, tmp_path, keep=1), STRUCK, whole)


@pytest.mark.parametrize("fault", seldom(RESUMING))
def test_a_fault_while_resuming_hurts_no_checkpoint(
    fault: Fault, whole: list[float], tmp_path: Path
) -> None:
    assert run_ranks(run, 2, SETTINGS | {"out": tmp_path / "out"}, 3) == [3] * 2
    check_left(end_struck(fault, tmp_path, resume=True), 3, whole)


def launched(fault: Fault, tmp_path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """`bascule train` under torchrun, as a user starts it."""
    given = SMALL | SETTINGS | {"out": tmp_path / "out", "timeout_s": 5.0}
    flags = [text for k, v in given.items() for text in (f"--{k.replace('_', '-')}", str(v))]
    program = ["-m", "tests.helpers.train_runs", json.dumps(asdict(fault)), str(tmp_path)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*launcher, "--nproc-per-node", str(fault.ranks), *program, "train", *flags, *more],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


@pytest.mark.stress
@pytest.mark.parametrize("fault", LAUNCHED, ids=str)
def test_a_fault_under_torchrun_leaves_no_process_and_nothing_half_written(
    fault: Fault, whole: list[float], tmp_path: Path
) -> None:
    more = []
    if fault.step == 0:
        assert run_ranks(run, 2, SETTINGS | {"out": tmp_path / "out"}, 3) == [3] * 2
        more = ["--resume"]
    done = launched(fault, tmp_path, *more)
    assert (tmp_path / "struck").exists() and done.returncode != 0, done.stderr
    assert cause_of(fault) in done.stderr or "the store is gone with its host" in done.stderr
    commands = [one / "cmdline" for one in Path("/proc").glob("[0-9]*")]
    left = [one for one in commands if one.exists() and str(tmp_path) in one.read_text()]
    assert left == []
    check_left(tmp_path / "out", STRUCK - 2 if fault.step else 3, whole)


@pytest.fixture
def disk() -> Iterator[Callable[[str], Path]]:
    """Makes a disk of a size, or changes its size."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "disk")
        folder.mkdir()

        def sized(size: str) -> Path:
            remount = ["remount"] if folder.is_mount() else []
            options = ",".join([*remount, f"size={size}"])
            command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"NOT RUN: a disk that is full needs root: {done.stderr.strip()}")
            return folder

        try:
            yield sized
        finally:
            if folder.is_mount():
                subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.stress
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_disk_that_fills_up_while_a_checkpoint_is_written(
    ranks: int, disk: Callable[[str], Path], whole: list[float], tmp_path: Path
) -> None:
    assert run_ranks(run, ranks, SETTINGS | {"out": tmp_path}, 2) == [2] * ranks
    (saved,) = tmp_path.glob("step-*")
    blocks = sum(-(-one.stat().st_size // 4096) for one in saved.iterdir())
    out = disk(f"{blocks * 6}k") / "out"  # one and a half of it
    for classes, text in run_ranks(refused, ranks, SETTINGS | {"out": out}):
        assert "CommError" in classes and "step 4" in text, text
        assert "No space left on device" in text, text
    disk("100m")
    check_left(out, 2, whole)


def damage(checkpoint: Path, kind: str) -> None:
    shard = next(checkpoint.glob("__1_*.distcp"))
    if kind == "a short shard":
        os.truncate(shard, shard.stat().st_size // 2)
    elif kind == "no facts":
        (checkpoint / "run.json").write_text("")
    else:
        (shard if kind == "no shard" else checkpoint / ".metadata").unlink()


@pytest.mark.stress
@pytest.mark.parametrize("kind", ["a short shard", "no metadata", "no shard", "no facts"])
def test_a_damaged_checkpoint_is_refused_by_all_ranks(kind: str, tmp_path: Path) -> None:
    assert run_ranks(run, 2, SETTINGS | {"out": tmp_path}, 2) == [2] * 2
    damage(tmp_path / "step-00000002", kind)
    for classes, text in run_ranks(refused, 3, SETTINGS | {"out": tmp_path, "resume": True}):
        assert "CommError" in classes or "ConfigError" in classes, classes
        assert "step-00000002" in text, text
    assert [one.name for one in tmp_path.glob("step-*")] == ["step-00000002"]
