"""A service on ranks: each request that was accepted is done once, as by one process."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch.distributed as dist

from bascule.errors import ConfigError
from bascule.generate.options import Prompt
from bascule.generate.tiny import TINY, TINY_WAN
from bascule.serve.service import Service
from bascule.serve.spool import Spool
from bascule.serve.status import ENDED, Busy, Closing, Late, Status, Unknown
from tests.helpers.ranks import run_ranks, run_to_the_end
from tests.helpers.serving import Even, Restless, apart, pipeline_of, with_service

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

RANKS = 4
PIXEL = 1.001 / 255


def boat(seed: int, side: int = 32, steps: int = 4) -> Prompt:
    return Prompt(prompt=f"boat {seed}", seed=seed, width=side, height=side, steps=steps)


def until(condition: Callable[[], Any], timeout_s: float = 100.0) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


class Diary:
    """What a service reports of its requests."""

    def __init__(self, service: Service) -> None:
        self.service, self.news = service, list[Status]()
        service.on_change = self.news.append

    def until_ended(self, ids: Sequence[str]) -> None:
        def have_ended() -> bool:
            assert not self.service.health()
            return all(self.service.status(one).has_ended for one in ids)

        until(have_ended)


def bursts(service: Service, seed: int, num: int) -> tuple[Counter[str], float]:
    """Requests of three sizes in bursts; some are cancelled. Ends and placements; pixels apart."""
    random, diary, ids = Random(seed), Diary(service), list[str]()
    while len(ids) < num:
        many = [
            boat(len(ids) + k, random.choice((32, 64, 96)), random.choice((2, 4)))
            for k in range(min(random.randrange(1, 9), num - len(ids)))
        ]
        statuses = service.submit(many)
        assert [one.prompt for one in statuses] == many
        ids += [one.id for one in statuses]
        if random.random() < 0.3:
            service.cancel(random.choice(ids))
        time.sleep(random.random() * 0.2)
    diary.until_ended(ids)
    scheduler = service._scheduler
    until(lambda: not scheduler.tasks)  # those that were cancelled have left their ranks
    assert not (service._unwritten or service._jobs._written or scheduler._planned)
    assert not (scheduler._users or scheduler.state.waiting)
    assert sum(one.degree for one in scheduler.state.free) == RANKS
    until(lambda: not scheduler.orders._post._items)  # the post drops the last ones in its thread
    counts, pipeline, most = Counter[str](), pipeline_of(TINY), 0.0
    for one in map(service.status, ids):
        counts[one.state] += 1
        if one.state == "done":
            most = max(most, apart(one, service.result(one.id), pipeline))
    places = {one: {x.ranks for x in diary.news if x.id == one and x.ranks} for one in ids}
    counts["moved"] = sum(len({len(x) for x in seen}) > 1 for seen in places.values())
    counts["paused"] = len({one.id for one in diary.news if one.state == "paused"})
    return counts, most


def in_bursts(folder: Path, seed: int, num: int) -> Any:
    make = partial(pipeline_of, TINY)
    return with_service(make, folder, bursts, seed, num, policy=Restless(seed))


def check_bursts(folder: Path, seed: int, num: int) -> None:
    counts, most = run_ranks(in_bursts, RANKS, folder, seed, num)[0]
    assert counts["done"] + counts["cancelled"] == num, counts
    assert min(counts["cancelled"], counts["moved"], counts["paused"]) > 0, counts
    assert most <= PIXEL


@pytest.mark.slow
def test_bursts(tmp_path: Path) -> None:
    check_bursts(tmp_path, 0, 24)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(1, 4))
def test_long_bursts(tmp_path: Path, seed: int) -> None:
    check_bursts(tmp_path, seed, 150)


def shared(service: Service) -> tuple[list[int], float]:
    """Numbers of ranks that had a large request, while small ones came and went."""
    diary = Diary(service)
    large = service.submit([boat(0, 96, 28)])[0]
    until(lambda: service.status(large.id).step > 1)
    small = service.submit([boat(k, 32, 3) for k in (1, 2)], deadline_s=2.0)
    ids = [large.id, *(one.id for one in small)]
    diary.until_ended(ids)
    pipeline = pipeline_of(TINY)
    most = max(apart(service.status(one), service.result(one), pipeline) for one in ids)
    seen = [len(one.ranks) for one in diary.news if one.id == large.id and one.ranks]
    return [b for a, b in zip([0, *seen], seen, strict=False) if a != b], most


def sharing(folder: Path) -> Any:
    return with_service(partial(pipeline_of, TINY), folder, shared, kind=Even)


def test_a_large_request_gives_ranks_to_small_ones_and_gets_them_back(tmp_path: Path) -> None:
    degrees, most = run_ranks(sharing, RANKS, tmp_path)[0]
    assert (degrees[0], degrees[-1]) == (4, 1)  # at last one rank decodes
    assert 4 in degrees[degrees.index(2) :]
    assert most <= PIXEL


def choosy_pipeline() -> Any:
    """A pipeline that fails for some prompts, and whose scheduler keeps what cannot travel."""
    pipeline = pipeline_of(TINY)
    encode, pipeline.scheduler.odd = pipeline.encode_prompt, object()

    def encoded(*args: Any, **kwargs: Any) -> Any:
        if "wrong" in kwargs["prompt"]:
            raise MemoryError("no memory is left")
        return encode(*args, **kwargs)

    pipeline.encode_prompt = encoded
    return pipeline


def refused(kind: type[Exception], call: Callable[..., Any], *args: Any) -> Any:
    with pytest.raises(kind) as raised:
        call(*args)
    return raised.value


def odds(service: Service) -> float:
    """What is refused, fails or cannot be written, between requests that are done."""
    diary, most = Diary(service), service._most_waiting
    wrong = Prompt(prompt="wrong", width=32, height=32, steps=2)
    ids = [one.id for one in service.submit([boat(0), wrong, boat(1, 64)])]
    diary.until_ended(ids)
    failed = service.status(ids[1])
    assert failed.state == "failed" and "MemoryError: no memory is left" in failed.reason
    assert "is failed" in str(refused(Unknown, service.result, ids[1]))
    assert service.cancel(ids[1]) == failed  # it stays as it is
    for unknown in (service.status, service.cancel, service.result):
        refused(Unknown, unknown, "none")
    assert {service.status(ids[0]), service.status(ids[2])} <= set(service.statuses())

    for one, image, text in (
        (boat(2, 40), None, "makes it 32: give 32"),
        (Prompt(prompt="a", frames=5), None, "takes no num_frames"),
        (boat(2), b"png", "takes no image"),
    ):
        assert text in str(refused(ConfigError, service.submit, [boat(3), one], image))
    assert "at most 5 may wait" in str(refused(ConfigError, service.submit, [wrong] * (most + 1)))

    many = service.submit([boat(4, 96, 1000)] * most)
    until(lambda: any(service.status(one.id).step for one in many))
    in_time = partial(service.submit, must_meet_deadline=True)
    assert refused(Late, in_time, [boat(6)], None, 1e-3).predicted_s > 1e-3
    busy = refused(Busy, service.submit, [boat(7)] * most)
    assert busy.retry_after_s >= 1.0
    assert not [one for one in service.statuses() if one.prompt.seed in (2, 3, 6, 7)]
    ids += [one.id for one in in_time([boat(8)], deadline_s=1e4)]
    assert {service.cancel(one.id).state for one in many} == {"cancelled"}

    spool: Any = service._spool
    end, spool.end = spool.end, full  # for a while
    until(lambda: "disk is full" in service.health())
    assert "disk is full" in str(refused(Closing, service.submit, [boat(9)]))
    spool.end = end
    until(lambda: not service.health())
    ids += [one.id for one in many] + [service.submit([boat(10)])[0].id]
    diary.until_ended(ids)
    reported = Counter(one.id for one in diary.news if one.state in ENDED)
    assert reported == dict.fromkeys(ids, 1)
    service.stop()
    until(service.health)
    assert "is ending" in str(refused(Closing, service.submit, [boat(11)]))
    states = Counter(service.status(one).state for one in ids)
    assert states == {"done": 4, "failed": 1, "cancelled": most}
    done, pipeline = [one for one in ids if service.status(one).state == "done"], pipeline_of(TINY)
    return max(apart(service.status(one), service.result(one), pipeline) for one in done)


def full(_: Status) -> bool:
    raise sqlite3.OperationalError("database or disk is full")


def at_odds(folder: Path) -> Any:
    return with_service(choosy_pipeline, folder, odds, policy=Restless(0), most_waiting=5)


def test_what_is_refused_or_fails_harms_no_other(tmp_path: Path) -> None:
    assert run_ranks(at_odds, 2, tmp_path)[0] <= PIXEL


def until_some_are_done(service: Service) -> None:
    """Wait until some are done, and some run."""
    until(lambda: sum(one.state == "done" for one in service.statuses()) > 1)
    until(lambda: any(one.step > 2 for one in service.statuses() if not one.has_ended))


def until_killed(service: Service, folder: Path, victim: int, num: int) -> str:
    service.submit([boat(k, 32, 4 if k else 50) for k in range(num)])
    until_some_are_done(service)
    os.kill(int((folder / f"{victim}.pid").read_text()), signal.SIGKILL)
    until(service.health)
    return str(refused(Closing, service.submit, [boat(0)]))


def killed(folder: Path, victim: int, num: int) -> None:
    (folder / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
    make = partial(pipeline_of, TINY)
    with_service(make, folder / "spool", until_killed, folder, victim, num, timeout_s=6.0)


def all_ended(service: Service) -> float:
    until(lambda: all(one.has_ended for one in service.statuses()))
    pipeline, statuses = pipeline_of(TINY), service.statuses()
    assert {one.state for one in statuses} == {"done"}
    return max(apart(one, service.result(one.id), pipeline) for one in statuses)


def again(folder: Path, client: Callable[..., Any]) -> Any:
    return with_service(partial(pipeline_of, TINY), folder / "spool", client)


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_restart_goes_on(tmp_path: Path, victim: int) -> None:
    """After a kill, and then after a stop in the middle."""
    num, written = 6, dict[Path, int]()

    def check_written() -> None:
        """What was done before was not done again."""
        assert {path: path.stat().st_mtime_ns for path in written} == written
        outputs = (tmp_path / "spool" / "outputs").glob("[!.]*.png")
        written.update((path, path.stat().st_mtime_ns) for path in outputs)

    outcomes = run_to_the_end(killed, 2, tmp_path, victim, num, stopped=[] if victim else [1])
    assert outcomes[victim].exit_code == -signal.SIGKILL
    if victim == 1:  # the other one misses it at its heart or, if they share a request, in a group
        names = "no sign of life from rank 1", "no report from ranks [1]"
        assert any(name in str(outcomes[0].error) for name in names), outcomes[0]
    with closing(Spool(tmp_path / "spool", "tiny")) as spool:
        done = spool.ended(num)
        assert len(done) + len(spool.waiting()) == num > len(done)
        assert {one.state for one in done} == {"done"}
        written |= {spool.output(one): spool.output(one).stat().st_mtime_ns for one in done}
    run_ranks(again, 2, tmp_path, until_some_are_done)
    check_written()
    assert run_ranks(again, 2, tmp_path, all_ended)[0] <= PIXEL
    check_written()
    assert len(written) == num


@contextmanager
def command(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server of tiny videos on two ranks, and its address."""
    base = [sys.executable, "-m", "bascule", "serve", "--model", TINY_WAN, "--ranks", "2"]
    base += ["--port", "0", "--spool", str(folder), *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(base, env=environment, stdout=subprocess.PIPE) as job:
        try:
            assert job.stdout is not None
            yield job, re.findall(r"http\S*[0-9]", job.stdout.readline().decode())[0]
        finally:
            job.kill()


def ask(address: str, path: str, **body: Any) -> Any:
    data = json.dumps(body).encode() if body else None
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(address + path, data, headers), timeout=60) as answer:
        read = answer.read()
    return read if path.endswith("content") else json.loads(read)


@pytest.mark.stress
def test_the_command(tmp_path: Path) -> None:
    """Videos by HTTP; a signal in the middle, and the same command goes on."""
    pytest.importorskip("av")
    sizes = {"size": "32x32", "frames": 5, "steps": 40}

    def videos(address: str) -> dict[str, str]:
        return {one["id"]: one["state"] for one in ask(address, "/v1/requests")["data"]}

    with command(tmp_path / "spool") as (job, address):
        for seed in range(6):
            ask(address, "/v1/requests", prompt=f"boat {seed}", seed=seed, **sizes)
        until(lambda: "done" in videos(address).values())
        with pytest.raises(IndexError), command(tmp_path / "spool"):
            pass  # another server has the spool
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 0
    with command(tmp_path / "spool") as (job, address):
        until(lambda: set(videos(address).values()) == {"done"})
        assert len(videos(address)) == 6
        for one in videos(address):
            assert ask(address, f"/v1/videos/{one}/content")[4:8] == b"ftyp"
        job.send_signal(signal.SIGINT)
        assert job.wait(60) == 0
    assert len(list((tmp_path / "spool" / "outputs").iterdir())) == 6
