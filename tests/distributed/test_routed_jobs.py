"""A router before two servers, as users start them: one is killed, and nothing is done twice."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from bascule.generate.tiny import TINY
from tests.helpers.serving import apart, pipeline_of

for _needed in ("diffusers", "transformers", "fastapi", "uvicorn", "httpx2"):
    pytest.importorskip(_needed)

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
PIXEL = 1.001 / 255
LATER, ENDED = "/v1/requests", ("done", "failed", "cancelled")


@contextmanager
def started(log: Path, *words: str) -> Iterator[str]:
    """The URL of a command that listens; at the end it and its ranks are killed."""
    settings = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with open(log, "a") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "bascule", *words],
            env=os.environ | settings,
            stdout=output,
            stderr=output,
        )
    try:

        def addresses() -> list[str]:
            assert process.poll() is None, log.read_text()
            return re.findall(r" at (http://127\S+?)[,:] [ra]", log.read_text())

        until(addresses)
        yield addresses()[-1]
    finally:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in (
            process.pid,
            *map(int, children),
        ):  # the launcher first: it starts no rank again
            os.kill(pid, signal.SIGKILL)
        process.wait()


def serve(folder: Path, port: int = 0) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "log").unlink(missing_ok=True)
    words = ["serve", "--model", TINY, "--ranks", "1", "--port", str(port)]
    return started(folder / "log", *words, "--spool", str(folder / "spool"), "--max-restarts", "0")


def until(condition: Callable[[], Any], timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def call(url: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    sent = None if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urlopen(
            Request(url, sent, {"Content-Type": "application/json"} | named), timeout=120
        ) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


def body(seed: int, steps: int = 4) -> dict[str, Any]:
    return {"prompt": f"boat {seed}", "size": "32x32", "steps": steps, "seed": seed}


def test_two_jobs_one_of_which_is_killed(tmp_path: Path) -> None:
    """Ids stay where they were accepted, in a new router and after the job came back."""
    names = [tmp_path / "a", tmp_path / "b"]
    with serve(names[1]) as right:
        with (
            serve(names[0]) as left,
            started(tmp_path / "log", "route", left, right, "--port", "0") as url,
        ):
            key = {"Idempotency_Key": "k"}
            (kept,) = call(url + LATER, body(99), **key)[1]["data"]
            ids = [kept["id"]]
            for seed in range(8):
                status, answer = call(url + LATER, body(seed))
                assert status == 202, answer
                ids.append(answer["data"][0]["id"])
            of_left = [name for name in ids if call(f"{left}{LATER}/{name}")[0] == 200]
            of_right = [name for name in ids if call(f"{right}{LATER}/{name}")[0] == 200]
            assert len(of_left) >= 2 and len(of_right) >= 2
            assert sorted(of_left + of_right) == sorted(ids)
            has_key = left if kept["id"] in of_left else right
            until(lambda: all(call(f"{url}{LATER}/{name}")[1]["state"] == "done" for name in ids))
            assert {row["id"] for row in call(url + LATER)[1]["data"]} == {*ids}
            lasting = [call(url + LATER, body(seed, 200))[1]["data"][0]["id"] for seed in (20, 21)]
            port = int(left.rpartition(":")[2])
        # The left job and the router were killed.
        with started(tmp_path / "log2", "route", left, right, "--port", "0") as url:
            found = [call(f"{url}{LATER}/{name}")[0] for name in of_left]
            assert set(found) == {503} and call(f"{url}{LATER}/{of_right[0]}")[0] == 200
            status, answer = call(url + LATER, body(30))
            assert status == 202 and call(f"{right}{LATER}/{answer['data'][0]['id']}")[0] == 200
            lasting.append(answer["data"][0]["id"])
            status, answer = call(url + LATER, body(99), **key)
            if has_key == left:
                assert status == 503 and left in answer["error"]["message"]
            with serve(names[0], port):
                until(lambda: f"in: {left}" in (tmp_path / "log2").read_text())
                assert call(url + LATER, body(99), **key)[1]["data"][0]["id"] == kept["id"]
                ids += lasting
                until(
                    lambda: all(call(f"{url}{LATER}/{name}")[1]["state"] in ENDED for name in ids)
                )
                rows = {name: call(f"{url}{LATER}/{name}")[1] for name in ids}
                assert {row["state"] for row in rows.values()} == {"done"}
                listed = [row["id"] for row in call(url + LATER)[1]["data"]]
                assert sorted(listed) == sorted(ids)
                pixels(url, tmp_path, rows)


def pixels(url: str, folder: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Outputs have the pixels of one process."""
    from bascule.generate.options import Prompt
    from bascule.serve.status import Status

    pipeline, path = pipeline_of(TINY), folder / "image.png"
    for name, row in rows.items():
        with urlopen(f"{url}{LATER}/{name}/content") as answer:
            path.write_bytes(answer.read())
        prompt = Prompt(prompt=row["prompt"], **row["settings"])
        status = Status(id=name, kind="image", state="done", created_at=0.0, prompt=prompt)
        assert apart(status, path, pipeline) <= PIXEL
