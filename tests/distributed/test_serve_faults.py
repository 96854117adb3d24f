"""The server as users start it, under faults: what was accepted is done once, and nobody hangs."""

import asyncio
import base64
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch

from bascule.generate.tiny import TINY, TINY_WAN
from bascule.serve.spool import Spool
from tests.helpers.pages import blocks_of, commands_of
from tests.helpers.serving import apart, pipeline_of
from tests.helpers.sockets import listening
from tests.helpers.struck_server import DAY_S, START

for _needed in ("diffusers", "transformers", "fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_needed)

ROOT = Path(__file__).parents[2]
PIXEL = 1.001 / 255
TIMEOUT_S = 30.0  # of the ranks
COMMAND = ("serve", "--model", TINY, "--ranks", "2")


@dataclass(frozen=True, slots=True)
class Answer:
    """Of the server."""

    status: int
    headers: dict[str, str]  # names in lower case
    content: bytes

    @classmethod
    def of(cls, received: bytes) -> "Answer":
        head, _, content = received.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = (line.split(": ", 1) for line in lines)
        return cls(int(first.split()[1]), {name.lower(): value for name, value in headers}, content)

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def text(self) -> str:
        return self.content.decode()


@dataclass(slots=True)
class Job:
    """A server that runs, with its launcher."""

    process: subprocess.Popen[str]
    folder: Path
    others: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])
    url: str = ""
    lines: list[str] = field(default_factory=list[str])  # that it printed, also as errors

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Answer:
        with socket.create_connection(self.address, 60) as connection:
            connection.sendall(call(path, body, method))
            return Answer.of(b"".join(iter(lambda: connection.recv(65536), b"")))

    def submit(self, seeds: Sequence[int], **settings: Any) -> list[str]:
        """Ids of requests that were accepted, one for each seed."""
        bodies = [body(seed, **settings) for seed in seeds]
        answers = [self.ask("/v1/requests", one) for one in bodies]
        assert {one.status for one in answers} == {202}, [one.text for one in answers]
        return [one.json["data"][0]["id"] for one in answers]

    def row(self, request_id: str) -> dict[str, Any]:
        return self.ask(f"/v1/requests/{request_id}").json

    def until(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < end, self.text
            time.sleep(0.02)

    def until_ended(self, ids: Sequence[str], timeout_s: float = 60.0) -> list[str]:
        """States, when all have ended."""
        ends = ("done", "failed", "cancelled")
        for one in ids:
            self.until(lambda one=one: self.row(one)["state"] in ends, timeout_s)
        return [self.row(one)["state"] for one in ids]

    def until_running(self, request_id: str) -> None:
        self.until(lambda: self.row(request_id)["step"] > 0)

    def ranks(self, launcher: int | None = None) -> dict[int, int]:
        """Process ids by rank, of the ranks of this launcher or another one."""
        pids = dict[int, int]()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                variables = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            except (OSError, IndexError):
                continue
            rank = [one[5:] for one in variables if one.startswith("RANK=")]
            if parent == (launcher or self.process.pid) and rank:
                pids[int(rank[0])] = int(path.name)
        return pids

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it as an operator would; it exits with 0."""
        self.process.send_signal(number)
        assert self.process.wait(timeout=60) == 0, self.text


def call(path: str, body: Any = None, method: str | None = None) -> bytes:
    """What a client sends."""
    sent = b"" if body is None else json.dumps(body).encode()
    head = f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Connection: close\r\nContent-Length: {len(sent)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + sent


def body(seed: int, side: int = 32, steps: int = 4, **more: Any) -> dict[str, Any]:
    sizes = {"size": f"{side}x{side}", "steps": steps, "seed": seed}
    return {"prompt": f"boat {seed}"} | sizes | more


@contextmanager
def started(
    folder: Path,
    *options: str,
    restless: bool = False,
    strike: str = "",
    launcher: Sequence[str] = ("bascule",),
    others: int = 0,
) -> Iterator[Job]:
    """A server on the spool of a folder, until the block ends; options stand over those here.

    `others` counts further launchers of the same job.
    """
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(START)
    (folder / "struck").unlink(missing_ok=True)
    (folder / "ran").write_text("")
    path = [str(folder), str(ROOT / "src"), str(ROOT)]
    variables = {"PYTHONPATH": os.pathsep.join(path), "BASCULE_FAULTS_IN": str(folder)}
    variables |= {"OMP_NUM_THREADS": "1"}
    variables |= {"BASCULE_RESTLESS": "1"} if restless else {}
    variables |= {"BASCULE_STRIKE": strike} if strike else {}
    words = [options[0], "--port", "0", "--spool", str(folder / "spool"), "--max-restarts", "0"]
    words = [sys.executable, "-m", *launcher, *words, "--timeout-s", str(TIMEOUT_S), *options[1:]]
    process, *rest = (
        subprocess.Popen(
            words,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(1 + others)
    )
    job = Job(process, folder, rest)
    readers = [threading.Thread(target=read, args=(one, job.lines)) for one in (process, *rest)]
    for reader in readers:
        reader.start()
    try:
        job.until(lambda: re.search(r" at http://\S+, requests in ", job.text), 120)
        (job.url,) = re.findall(r" at (http://\S+), requests in ", job.text)
        yield job
    except BaseException:
        print(job.text)
        raise
    finally:
        for one, reader in zip((process, *rest), readers, strict=True):
            pids = job.ranks(one.pid) if one.poll() is None else {}
            one.kill()  # first, lest it starts them again
            for pid in pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            one.wait()
            reader.join()


def read(process: subprocess.Popen[str], lines: list[str]) -> None:
    """Keep what a process prints, until it ends."""
    assert process.stdout is not None
    with process.stdout:
        lines.extend(process.stdout)


def on_disk(
    folder: Path, before: dict[Path, int] | None = None
) -> tuple[dict[str, str], dict[Path, int]]:
    """States by id, "" if it has not ended; and when outputs of what is done were written.

    Those of before are as they were, and all have the pixels of one process. Once all have ended,
    there is no other output, nor half of one.
    """
    torch.set_num_threads(1)
    pipeline = pipeline_of(TINY)
    with closing(Spool(folder / "spool", f"{TINY}, float32")) as spool:
        waiting, ended = spool.waiting(), spool.ended(10**6)
        done = {spool.output(one): one for one in ended if one.state == "done"}
    written = {path: path.stat().st_mtime_ns for path in done}
    before = before or {}
    assert {path: written[path] for path in before} == before, "an output was made twice"
    for path, one in done.items():
        assert path in before or apart(one, path, pipeline) <= PIXEL, one
    if not waiting:
        assert set((folder / "spool" / "outputs").iterdir()) == set(done)
    states = {one.status.id: "" for one in waiting} | {one.id: one.state for one in ended}
    return states, written


@pytest.mark.slow
def test_the_guide_and_faults_of_a_day(tmp_path: Path) -> None:
    """One server, started as the guide says; what befalls one request harms no other."""
    install, serve = commands_of("docs/serve.md")[:2]
    assert install == ["pip", "install", "bascule[serve]"]
    assert serve == ["bascule", *COMMAND]
    with started(tmp_path, *serve[1:], "--max-steps", "1000") as job:
        listens_on_loopback_alone(job)
        an_image_by_openais_client(job)
        num = len(job.lines)
        time.sleep(2.5)
        assert job.lines[num:] == []  # who waits is silent
        (other,) = job.submit([1], steps=200, side=64)
        job.until_running(other)
        a_client_that_vanishes(job)
        one_that_fails(job)
        a_clock_set_back(job)
        a_full_disk(job)
        assert job.until_ended([other]) == ["done"]
        running = job.submit([2, 3], steps=1000, side=128)
        job.until(lambda: any(job.row(one)["step"] > 0 for one in running))
        job.stop()
    assert "Traceback" not in job.text
    states, _ = on_disk(tmp_path)
    assert [states.pop(one) for one in running] == ["", ""]
    assert Counter(states.values()) == {"done": 8, "failed": 1, "cancelled": 3}


def listens_on_loopback_alone(job: Job) -> None:
    ports = listening([job.process.pid, *job.ranks().values()])
    assert job.address[1] in ports and len(ports) > 2 and all(ports.values()), ports


def an_image_by_openais_client(job: Job) -> None:
    openai: Any = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{job.url}/v1", api_key="none", timeout=60)
    extra = {"steps": 4, "seed": 7}
    image: Any = client.images.generate(prompt="a", size="32x32", extra_body=extra).data[0]
    content = job.ask(f"/v1/requests/{image.id}/content").content
    assert base64.b64decode(image.b64_json) == content


def a_client_that_vanishes(job: Job) -> None:
    """Its images are cancelled, the one that runs and the one that waits."""
    sent = call("/v1/images/generations", body(10, steps=200, side=128, n=2))

    def own() -> list[dict[str, Any]]:
        rows = job.ask("/v1/requests").json["data"]
        return [one for one in rows if one["prompt"] == "boat 10"]

    with socket.create_connection(job.address) as connection:
        connection.sendall(sent)
        job.until(lambda: any(one["step"] > 0 for one in own()))
    job.until(lambda: [one["state"] for one in own()] == ["cancelled"] * 2)


def one_that_fails(job: Job) -> None:
    ids = job.submit([20, 21, 22])
    (wrong,) = job.submit([23], prompt="wrong")
    assert job.until_ended([*ids, wrong]) == ["done"] * 3 + ["failed"]
    assert "MemoryError: no memory is left" in job.row(wrong)["reason"]
    line = rf"request {wrong}: failed after .*, 32x32, 0 of 4 steps, queue .*, encode .*, ranks "
    assert re.search(line + ".*: MemoryError: no memory is left\n", job.text)
    line = (
        rf"request {ids[0]}: done after .*, queue .*, encode .*, denoise .*, decode .*, write .*, "
    )
    assert re.search(line + "ranks [01 ]+\n", job.text)


def a_clock_set_back(job: Job) -> None:
    """By a day, while a request runs."""
    (before,) = job.submit([30], steps=40, deadline_s=3600)
    (job.folder / "back").touch()
    (after,) = job.submit([31], deadline_s=60, must_meet_deadline=True)
    assert job.until_ended([before, after]) == ["done"] * 2
    (job.folder / "back").unlink()
    rows = [job.row(one) for one in (before, after)]
    assert rows[0]["created_at"] - rows[1]["created_at"] > DAY_S - 60
    assert all(one["ended_at"] >= one["created_at"] for one in rows)
    assert job.ask("/health").status == 200


def a_full_disk(job: Job) -> None:
    """First for outputs and then for the spool, too; all goes on when there is room."""
    (first,) = job.submit([40], steps=2)
    (job.folder / "full").touch()
    job.until(lambda: "No space left" in job.ask("/health").text)
    assert job.row(first)["state"] == "running"
    refused = job.ask("/v1/requests", body(41))
    assert refused.status == 503 and "No space left" in refused.json["error"]["message"]
    (job.folder / "full").unlink()
    assert job.until_ended([first]) == ["done"]
    job.until(lambda: job.ask("/health").status == 200)
    pid, every = job.ranks()[0], (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    (second,) = job.submit([42], steps=200, side=64)
    job.until_running(second)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    refused = job.ask("/v1/requests", body(43))
    assert refused.status == 503 and "the spool cannot store requests" in refused.text
    gone = job.ask(f"/v1/requests/{second}", method="DELETE")
    resource.prlimit(pid, resource.RLIMIT_FSIZE, every)
    assert gone.status == 200
    job.until(lambda: job.row(second)["state"] == "cancelled")
    job.until(lambda: job.ask("/health").status == 200)


KILLS = {  # "RANK PLACE NTH" of each life
    "steps": "0 step 15; 1 between steps 7; 0 between steps 12; 1 step 9",
    "moves": "0 moving 2; 1 moving 1; 0 joining 2; 1 joining 1; 0 ordering 6",
    "items": "0 keeping 9; 1 keeping 2; 0 fetching 4; 1 fetching 3; 1 beginning 2",
    "calls": "0 waiting 1; 1 waiting 1; 1 encoding 2; 0 encoding 3; 0 decoding 1; 1 decoding 1",
    "disk": "0 accepting 3; 0 accepted 3; 0 writing 2; 0 written 1; 0 ending 2; 0 ended 2",
}


def running_at_death(folder: Path) -> tuple[set[str], set[str]]:
    """Requests that certainly ran when the ranks ended, and those that may have."""
    certain, possible = set[str](), set[str]()
    for line in (folder / "ran").read_text().splitlines():
        what, request_id = line.split()
        {"begins": possible.add, "runs": certain.add}.get(what, certain.discard)(request_id)
        if what == "forgiven":
            possible.discard(request_id)
    return certain & possible, possible


@pytest.mark.stress
@pytest.mark.parametrize("what", KILLS)
def test_kills(tmp_path: Path, what: str) -> None:
    """Of a rank at each place; the next life takes over what was left, until it is killed, too.

    All requests are done, but for those that ran at two deaths: these have failed.
    """
    strikes = KILLS[what].split("; ")
    accepted, written = list[str](), dict[Path, int]()
    certain, possible = Counter[str](), Counter[str]()  # deaths
    for life, strike in enumerate([*strikes, ""]):
        at = time.monotonic()
        with started(tmp_path, *COMMAND, restless=True, strike=strike) as job:
            print(f"life {life}: {strike or 'the last one'}, up in {time.monotonic() - at:.1f} s")
            for place in range(0 if "waiting" in strike else 200 if strike else 5):
                if place >= 5:  # the restless policy may take its time to come to the place
                    if (tmp_path / "struck").exists():
                        break
                    time.sleep(0.3)
                try:
                    answer = job.ask(
                        "/v1/requests", body(life, 32 + 32 * (place % 2), 5 + place % 5)
                    )
                except (OSError, IndexError):  # it is gone
                    break
                if answer.status != 503:
                    accepted += [answer.json["data"][0]["id"]]
            if not strike:
                job.until_ended(accepted, 120)
                job.stop()
                break
            assert job.process.wait(timeout=100) == 1, job.text
            seconds = time.monotonic() - float((tmp_path / "struck").read_text())
            print(f"ended {seconds:.1f} s after, {len(accepted)} accepted")
        assert f"bascule: rank {strike[0]} failed with exit code -9" in job.text
        states, written = on_disk(tmp_path, written)
        assert set(states) >= set(accepted)
        check_failures(tmp_path, states, certain, possible)
        for deaths, ids in zip((certain, possible), running_at_death(tmp_path), strict=True):
            deaths.update(ids)
    states, written = on_disk(tmp_path, written)
    assert set(states) >= set(accepted) and "" not in states.values()
    failed = check_failures(tmp_path, states, certain, possible)
    twice = {name for name, num in certain.items() if num == 2}
    assert failed >= twice, (failed, twice)
    assert max(possible.values()) <= 2, possible
    print(f"{len(failed)} of {len(states)} ran at two deaths, {len(failed - twice)} perhaps")
    assert len(states) - len(accepted) <= (what == "disk")  # killed before it answered


def check_failures(
    folder: Path, states: dict[str, str], certain: Counter[str], possible: Counter[str]
) -> set[str]:
    """All that have ended are done, but for those that ran at two deaths; returns these."""
    failed = {name for name, state in states.items() if state == "failed"}
    assert set(states.values()) <= {"", "done", "failed"}
    assert all(possible[name] >= 2 for name in failed), (failed, possible)
    assert not any(certain[name] >= 2 for name, state in states.items() if state == "done")
    with closing(Spool(folder / "spool", f"{TINY}, float32")) as spool:
        reasons = {spool.status(name).reason for name in failed}
    assert all(one.startswith("its ranks ended 2 times while it ran, at last") for one in reasons)
    return failed


@pytest.mark.nightly
@pytest.mark.slow
def test_a_request_that_ends_its_ranks(tmp_path: Path) -> None:
    """On one rank: of three lives the first two end by it, the others are done in between."""
    command = (*COMMAND[:-1], "1")
    ids = list[str]()
    for life in range(3):
        with started(tmp_path, *command) as job:
            if life == 0:
                listens_on_loopback_alone(job)
                ids = job.submit([0], steps=200, side=64)
                job.until_running(ids[0])
                ids += job.submit([1], prompt="deadly") + job.submit([2, 3])
            if life < 2:
                assert job.process.wait(timeout=100) == 1, job.text
                assert "bascule: rank 0 failed with exit code -9" in job.text
            else:
                assert job.until_ended(ids) == ["done", "failed", "done", "done"]
                assert "its ranks ended 2 times while it ran" in job.row(ids[1])["reason"]
                job.stop()
    states, _ = on_disk(tmp_path)
    assert Counter(states.values()) == {"done": 3, "failed": 1}


AGAIN = "serve", "--model", TINY, "--max-restarts", "9", "--save-every", "5", "--max-steps", "999"
OWN = "bascule"
TORCHRUN = "torch.distributed.run --nproc-per-node 4 --max-restarts 9 -m bascule"
GONE = OSError, IndexError, ValueError  # nobody listens, or an answer was cut


def kill(job: Job, rank: int) -> None:
    """Kill a rank, and wait until the server is up again."""
    before = job.ranks()
    os.kill(before[rank], signal.SIGKILL)
    job.until(lambda: not set(before.values()) & set(job.ranks().values()))
    job.until(lambda: is_up(job), 120)


def is_up(job: Job) -> bool:
    try:
        return job.ask("/health").status == 200
    except GONE:
        return False


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [OWN, TORCHRUN], ids=["own", "torchrun"])
def test_up_again_by_itself(tmp_path: Path, launcher: str) -> None:
    """A rank is killed under load, and then the one with the door; the same job goes on.

    Requests go on from their states. A client that waits gets an error with the name of its
    request, if rank 0 lives. No request runs at both deaths: four have all ranks until the first
    one, and later ones, of another size, precede them until the second one.
    """
    options = (*AGAIN, "--port", str(free_port()), *(("--ranks", "4") if launcher == OWN else ()))
    options = *options, "--policy", "fifo"  # it recalls nobody
    with started(tmp_path, *options, launcher=launcher.split()) as job:
        first, answers = job.submit([0, 1, 2], steps=300, side=64), list[Answer]()
        waits = body(3, steps=300, side=64)
        client = threading.Thread(
            target=lambda: answers.append(job.ask("/v1/images/generations", waits))
        )
        client.start()
        states = tmp_path / "spool" / "states"
        job.until(lambda: len(list(states.glob("*.state"))) == 4)
        short, *later = job.submit([4], steps=25) + job.submit(range(5, 9), steps=300)
        kill(job, 2)
        client.join()
        (answer,) = answers
        (asked,) = re.findall(r"request (\w{32}) resumes", answer.text)
        assert (answer.status, answer.headers["x-should-retry"]) == (503, "false"), answer
        first.append(asked)
        job.until(lambda: is_done(job, short))
        assert not any(job.row(one)["step"] for one in first)  # they run last, and alone
        written = output(job, short).stat().st_mtime_ns
        kill(job, 0)
        ids = [*first, short, *later]
        assert job.until_ended(ids) == ["done"] * 9, [job.row(one)["reason"] for one in ids]
        assert output(job, short).stat().st_mtime_ns == written
        if launcher == OWN:  # torchrun itself exits with 1
            job.stop()
    went_on = re.findall(r"request (\w+) goes on from its saved state", job.text)
    assert set(first) <= set(went_on)
    assert set(on_disk(tmp_path)[0]) == set(ids)
    assert not list((tmp_path / "spool" / "states").iterdir())


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(2))
def test_kills_at_random_moments(tmp_path: Path, seed: int) -> None:
    """Of any rank, also while ranks start; requests fail only if they ran at two deaths."""
    random, ids, done = Random(seed), list[str](), dict[str, int]()
    options = *AGAIN, "--port", str(free_port()), "--ranks", "4", "--save-every", "2"
    options = *options, "--max-restarts", "99"
    with started(tmp_path, *options, restless=True) as job:
        for nth in range(12):
            end = time.monotonic() + random.uniform(0.0, 5.0 if nth % 3 else 25.0)
            while time.monotonic() < end:
                with suppress(*GONE):
                    sizes = random.choice((32, 64)), random.choice((3, 12, 40))
                    answer = job.ask("/v1/requests", body(len(ids), *sizes))
                    ids += [answer.json["data"][0]["id"]] if answer.status == 202 else []
                    for one in [one for one in ids if one not in done and is_done(job, one)]:
                        done[one] = output(job, one).stat().st_mtime_ns
                time.sleep(0.3)
            if pids := job.ranks():
                os.kill(random.choice(list(pids.values())), signal.SIGKILL)
        job.until(lambda: is_up(job), 120)
        states = dict(zip(ids, job.until_ended(ids, 300), strict=True))
        reasons = [job.row(one)["reason"] for one in ids if states[one] == "failed"]
        assert all(reason.startswith("its ranks ended 2 times") for reason in reasons), reasons
        assert {one: output(job, one).stat().st_mtime_ns for one in done} == done
        job.stop()
    print(Counter(states.values()), job.text.count("goes on from its saved state"))
    on_spool, _ = on_disk(tmp_path)
    assert set(states.values()) <= {"done", "failed"} and states.items() <= on_spool.items()
    assert not list((tmp_path / "spool" / "states").iterdir())


@pytest.mark.stress
def test_a_node_that_is_gone(tmp_path: Path) -> None:
    """Two launchers of torch are two nodes; the one that is left goes on with its two ranks.

    So does a new start with one rank.
    """
    meeting, words = free_port(), (*AGAIN, "--port", str(free_port()))
    nodes = "torch.distributed.run --nnodes 1:2 --nproc-per-node 2 "
    nodes += f"--rdzv-endpoint 127.0.0.1:{meeting}"
    nodes += " --rdzv-backend c10d --rdzv-id a --rdzv-conf last_call_timeout=5 --max-restarts 99"
    launcher = (*nodes.split(), "-m", "bascule")
    with started(tmp_path, *words, launcher=launcher, others=1) as job:
        (other,) = job.others
        if meeting in listening([other.pid]):  # where launchers meet must stay
            job.process, other = other, job.process
        assert len(job.ranks()) == 2 and job.ask("/v1/requests").json["num_ranks"] == 4
        ids = job.submit(range(6), steps=150, side=64)
        job.until(lambda: any(job.row(one)["step"] for one in ids))
        pids = [other.pid, *job.ranks(other.pid).values()]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        job.until(lambda: is_up(job) and job.ask("/v1/requests").json["num_ranks"] == 2, 200)
        job.until(lambda: any(is_done(job, one) for one in ids))
        assert set(job.until_ended(ids)) == {"done"}
        ids += job.submit([6], steps=150, side=64)
    with started(tmp_path, *AGAIN, "--ranks", "1") as job:
        assert set(job.until_ended(ids)) == {"done"}
        job.stop()
    assert set(on_disk(tmp_path)[0]) == set(ids)


def is_done(job: Job, request_id: str) -> bool:
    return job.row(request_id)["state"] == "done"


def output(job: Job, request_id: str) -> Path:
    return job.folder / "spool" / "outputs" / f"{request_id}.png"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.stress
def test_a_rank_that_stands_still_is_named_at_last(tmp_path: Path) -> None:
    with started(tmp_path, *COMMAND) as job:
        os.kill(job.ranks()[0], signal.SIGSTOP)
        assert job.process.wait(timeout=200) == 1, job.text
        assert "no sign of life from rank 0" in job.text.splitlines()[-1], job.text


@pytest.mark.stress
@pytest.mark.parametrize(
    ("number", "model"), [(signal.SIGTERM, TINY), (signal.SIGINT, TINY_WAN)], ids=["TERM", "INT"]
)
def test_a_stop_during_steps(tmp_path: Path, number: signal.Signals, model: str) -> None:
    """Of images or videos; the same command goes on."""
    command, videos = ("serve", "--model", model, "--ranks", "2"), {}
    if model == TINY_WAN:
        pytest.importorskip("av")
        videos = {"frames": 5}
    with started(tmp_path, *command) as job:
        ids = job.submit(range(6), steps=60, side=64, **videos)
        job.until_running(ids[1])
        with pytest.raises(AssertionError, match="another server uses it"):
            with started(tmp_path, *command, "--max-restarts", "9"):  # once is enough
                pass
        job.stop(number)
    with started(tmp_path, *command) as job:
        assert job.until_ended(ids) == ["done"] * 6
        if videos:
            assert all(job.ask(f"/v1/videos/{x}/content").content[4:8] == b"ftyp" for x in ids)
        job.stop(number)
    if videos:
        assert len(list((tmp_path / "spool" / "outputs").iterdir())) == 6
    else:
        assert set(on_disk(tmp_path)[0]) == set(ids)


@pytest.mark.stress
def test_a_thousand_at_once(tmp_path: Path) -> None:
    async def ask(address: tuple[str, int], seed: int) -> Answer:
        reader, writer = await asyncio.open_connection(*address)
        path = "/v1/images/generations" if seed % 2 else "/v1/requests"
        writer.write(call(path, body(seed, steps=1)))
        answer = Answer.of(await reader.read())
        writer.close()
        return answer

    async def all_ask(address: tuple[str, int]) -> list[Answer]:
        return await asyncio.gather(*(ask(address, seed) for seed in range(1000)))

    with started(tmp_path, *COMMAND, "--most-waiting", "200") as job:
        answers = asyncio.run(all_ask(job.address))
        counts = Counter(one.status for one in answers)
        refused = [one for one in answers if one.status == 429]
        assert set(counts) == {200, 202, 429} and counts[200] + counts[202] >= 200, counts
        assert all(1 <= int(one.headers["retry-after"]) < 600 for one in refused)
        accepted = [one.json["data"][0]["id"] for one in answers if one.status < 300]
        assert set(job.until_ended(accepted)) == {"done"}
        job.stop()
    print(counts)
    assert set(on_disk(tmp_path)[0]) == set(accepted)


@pytest.mark.stress
@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
def test_the_guide_behind_nginx(tmp_path: Path) -> None:
    """Links have the name and port that the client knows; events come while the request runs."""
    openai: Any = pytest.importorskip("openai")
    (place,) = (one.text for one in blocks_of("docs/serve.md") if "proxy_pass" in one.text)
    front = f"localhost:{free_port()}"
    key, path = "a key of twenty characters", tmp_path / "nginx.conf"
    headers = {"Authorization": f"Bearer {key}"}
    (tmp_path / "key").write_text(key)
    with started(tmp_path, *COMMAND, "--api-key-file", str(tmp_path / "key")) as job:
        place = place.replace("127.0.0.1:8000", job.url.removeprefix("http://"))
        path.write_text(
            f"daemon off; pid {tmp_path}/pid; error_log stderr; events {{}}\n"
            f"http {{ access_log off; server {{ listen {front}; {place} }} }}"
        )
        nginx = subprocess.Popen(["nginx", "-p", str(tmp_path), "-c", str(path)])
        try:
            client = openai.OpenAI(base_url=f"http://{front}/v1", api_key=key, timeout=60)
            extra = {"steps": 4, "seed": 7}
            settings: dict[str, Any] = {"prompt": "a", "size": "32x32", "extra_body": extra}
            image: Any = client.images.generate(**settings, response_format="url").data[0]
            assert image.url == f"http://{front}/v1/requests/{image.id}/content"
            with urlopen(Request(image.url, headers=headers)) as answer:
                assert answer.read(4) == b"\x89PNG"
            long = {"prompt": "b", "size": "64x64", "steps": 200}
            asked: Any = client.post("/requests", body=long, cast_to=object)
            url = f"http://{front}/v1/requests/{asked['data'][0]['id']}"
            states = list[tuple[str, str]]()  # by an event, and when it has come
            with urlopen(Request(f"{url}/events", headers=headers)) as events:
                for line in filter(bytes.strip, events):
                    with urlopen(Request(url, headers=headers)) as answer:
                        now = json.load(answer)["state"]
                    states.append((json.loads(line.removeprefix(b"data: "))["state"], now))
            assert states[-1] == ("done", "done") and ("running", "running") in states, states
        finally:
            nginx.terminate()
            nginx.wait()
        job.stop()


@pytest.mark.stress
def test_memory_is_flat(tmp_path: Path) -> None:
    """Of all ranks, between 500 requests and 2,000."""
    with started(tmp_path, *COMMAND, restless=True) as job:
        bytes_at = dict[int, list[int]]()
        for num in range(0, 2000, 20):
            if num in (500, 1980):
                pids = sorted(job.ranks().items())
                bytes_at[num] = [resident(pid) for _, pid in pids]
            ids = job.submit(range(num, num + 20), steps=2)
            assert set(job.until_ended(ids)) == {"done"}
        job.stop()
    print(bytes_at)
    for before, after in zip(bytes_at[500], bytes_at[1980], strict=True):
        assert after < 1.05 * before, bytes_at


def resident(pid: int) -> int:
    return 1024 * int(re.findall(r"VmRSS:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())[0])
