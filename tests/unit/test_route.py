"""The router: requests go to the job that is free first, ids to theirs; nothing is done twice."""

import asyncio
import io
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import pytest
from PIL import Image

from bascule.serve import guard, route
from bascule.serve.forms import work_of
from bascule.serve.options import RouteOptions
from bascule.serve.status import Refusal, Status
from tests.helpers.door import Open, multipart, opened_door, png, stepping
from tests.helpers.routers import Routed, opened_router, until

GENERATE, EDIT, LATER = "/v1/images/generations", "/v1/images/edits", "/v1/requests"
BOAT = {"prompt": "a boat", "size": "1024x1024", "steps": 28}  # 2.9 s, before a rate is learned
KEY = "0123456789abcdef"
_FREE = "http://127.0.0.1:9"  # where nobody listens

Pair = tuple[Open, ...]


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield tuple(stack.enter_context(opened_door(folder(tmp_path, name))) for name in "ab")


@pytest.fixture
def videos(tmp_path: Path) -> Iterator[Pair]:
    settings: Any = {"options": {"model": "tiny-wan"}, "kind": "video", "takes_image": True}
    with ExitStack() as stack:
        doors = (opened_door(folder(tmp_path, name), **settings) for name in "cd")
        yield tuple(map(stack.enter_context, doors))


def folder(parent: Path, name: str) -> Path:
    (made := parent / name).mkdir()
    return made


def urls(jobs: Pair) -> list[str]:
    return [job.url for job in jobs]


def nums(jobs: Pair) -> list[int]:
    """How many requests each job has accepted."""
    return [len(job.service.asked) for job in jobs]


def made(router: Routed, **more: Any) -> str:
    status, answer, _ = router.call("POST", LATER, BOAT | more)
    assert status == 202, answer
    return answer["data"][0]["id"]


# Where a new request goes


def test_a_request_goes_to_the_job_that_is_free_first(jobs: Pair) -> None:
    """By what jobs have to do, and by what was sent since they said it, in pixels times steps."""
    jobs[0].service.backlog_s, jobs[1].service.backlog_s = 4000.0, 3000.0
    with opened_router(*urls(jobs)) as router:
        for _ in range(4):
            made(router, size="2048x2048", steps=200)  # 84 s each
        assert nums(jobs) == [0, 4]
    jobs[0].service.backlog_s = jobs[1].service.backlog_s = 0.0
    with opened_router(*urls(jobs)) as router:
        made(router, size="2048x2048", steps=200)
        for _ in range(8):
            made(router, size="512x512", steps=100)  # 2.6 s each
        assert nums(jobs) == [1, 12]
        for _ in range(4):
            made(router, size="2048x2048", steps=200)
    assert nums(jobs) == [3, 14]


def test_the_seconds_of_work_are_read_from_a_backlog() -> None:
    """By what it grew while the job worked; what a poll may have missed stays."""
    job, now = route._Job("http://a"), time.monotonic()
    assert job.take(10.0, now) == (0.0, 0.0)
    job.sent = [(now + 1.0, 3e8), (now + 2.0, 2e8), (now + 3.99, 1e9)]
    assert job.take(16.0, now + 4.0) == pytest.approx((10.0, 5e8))  # 6 s were left
    assert job.sent == [(now + 3.99, 1e9)] and job.backlog_s == 16.0
    assert job.take(0.0, now + 50.0) == (0.0, 0.0)  # it says only that all is done
    assert job.sent == []
    job.sent = [(now + 60.0, 1e9)]
    assert job.take(25.0, now + 65.0) == pytest.approx((30.0, 1e9))  # it was idle, and did 5 s


def test_a_job_works_between_two_polls() -> None:
    job, now = route._Job("http://a"), time.monotonic()
    job.take(8.0, now - 15.0)
    assert job.free_s(1e-8) == 0.0
    job.sent = [(now - 12.0, 2e8), (now - 4.0, 1e9), (now - 2.0, 1e9)]
    assert job.free_s(1e-8) == pytest.approx(8.0 + 8.0 + 0.0, abs=1.0)


def test_jobs_of_which_nothing_is_known_take_turns(jobs: Pair) -> None:
    with opened_router(*urls(jobs)) as router:
        for _ in range(6):
            made(router, size="64x64", steps=1)
    assert nums(jobs) == [3, 3]


def test_a_cold_start_does_not_keep_a_job_from_work(jobs: Pair) -> None:
    """A job's first small request took a thousand times its usual seconds."""
    with opened_router(*urls(jobs)) as router:
        cold, now = router.router.jobs[0], time.monotonic()
        cold.polled_s, cold.sent = now - 4.0, [(now - 3.0, 64 * 64)]
        router.router._learn(*cold.take(1e-3, now))
        assert router.router._took_s / router.router._work > 5e-4
        for _ in range(12):
            made(router, size="512x512", steps=10)
    assert nums(jobs) == [6, 6]


def test_a_job_that_got_a_request_is_asked_soon(jobs: Pair) -> None:
    """Here, a request takes far longer than the router thinks."""
    with opened_router(*urls(jobs), soon_s=0.2) as router:
        jobs[0].service.backlog_s = 50.0
        made(router, size="64x64", steps=1)
        for _ in range(3):
            until(lambda: not any(job.sent for job in router.router.jobs))
            made(router, size="64x64", steps=1)
    assert nums(jobs) == [1, 3]


@pytest.mark.parametrize(
    ("fields", "work"),
    [
        ({"prompt": "a"}, 2**20 * 28),
        ({"prompt": 'a "size": "9x9"', "size": "512x256", "steps": 20}, 512 * 256 * 20),
        ({"width": 64, "height": 32, "num_inference_steps": "7", "n": 3}, 64 * 32 * 7 * 3),
        ({"size": "64x64", "steps": 5, "seconds": "2", "fps": 8}, 64 * 64 * 5 * 17),
        ({"size": "64x64", "steps": 5, "num_frames": 9, "seconds": 3}, 64 * 64 * 5 * 9),
        ({"size": "auto", "steps": 1, "image": "A" * 200_000}, 2**20),
    ],
)
def test_work_is_read_from_json_and_forms(fields: dict[str, Any], work: float) -> None:
    assert work_of(json.dumps(fields).encode()) == work
    texts = [(name, str(value)) for name, value in fields.items() if name != "image"]
    form, _ = multipart(*texts[:1], ("image", b"\r\n\xff" * 70_000), *texts[1:])
    assert work_of(form) == work


# Jobs that are out, busy or gone


def test_a_job_that_is_not_healthy_is_taken_out_and_back(
    jobs: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    jobs[0].service.reason = "the disk is full"
    jobs[1].service.backlog_s = 100.0
    with opened_router(*urls(jobs), poll_s=0.1) as router:
        assert router.reasons() == [True, False] and router.call("GET", "/health")[0] == 200
        made(router)
        assert nums(jobs) == [0, 1]
        jobs[0].service.reason, jobs[1].service.reason = "", "it is ending"
        until(lambda: router.reasons() == [False, True])
        made(router)
        assert nums(jobs) == [1, 1]
        text = router.call("GET", "/metrics")[1].decode()
        assert f'bascule_router_job_up{{job="{jobs[0].url}"}} 1' in text
        assert f'bascule_router_job_up{{job="{jobs[1].url}"}} 0' in text
        jobs[0].service.reason = "no disk"
        until(lambda: router.reasons() == [True, True])
        for method, path, body in (("GET", "/health", None), ("POST", LATER, BOAT)):
            status, answer, headers = router.call(method, path, body)
            assert (status, headers["retry-after"]) == (503, "10")
            assert "no disk" in answer["error"]["message"]
            assert "it is ending" in answer["error"]["message"]
    assert f"out: {jobs[0].url}: the disk is full" in caplog.text
    assert f"in: {jobs[0].url}" in caplog.text


def test_what_a_job_did_not_accept_goes_to_another(jobs: Pair) -> None:
    """A full queue, a job that ends, one that is gone, one that has not loaded the adapter."""
    first, second = (job.service for job in jobs)
    second.backlog_s = 100.0
    with opened_router(_FREE, *urls(jobs)) as router:
        router.router.jobs[0].reason = ""  # it went just now
        first.room = 0
        made(router)
        assert nums(jobs) == [0, 1] and router.reasons() == [True, False, False]
        first.room, first.reason = 9, "it is ending"
        made(router)
        assert nums(jobs) == [0, 2]
        first.reason, accept = "", first.submit

        def refuse(*_: Any, **__: Any) -> list[Status]:
            raise Refusal(400, "lora: 'b' is not loaded", "lora", "lora_not_loaded")

        first.submit = refuse  # pyright: ignore
        made(router, lora="b")
        assert nums(jobs) == [0, 3]
        first.submit = accept  # pyright: ignore
        first.room = second.room = 0
        status, answer, headers = router.call("POST", LATER, BOAT)
        assert (status, headers["retry-after"]) == (429, "3"), answer
        assert answer["error"]["code"] == "queue_full" and nums(jobs) == [0, 3]


def test_a_clients_mistake_is_refused_once(jobs: Pair) -> None:
    asked = list[int]()
    for number, job in enumerate(jobs):
        job.service.on_submit = lambda number=number: asked.append(number)
    with opened_router(*urls(jobs)) as router:
        for path, body, status in (
            (LATER, {"prompt": "a", "size": "3x8"}, 400),
            (LATER, {"prompt": "a", "colour": 1}, 400),
            (LATER, b"[", 400),
            ("/v1/videos", BOAT, 404),
            ("/v1/nothing", BOAT, 404),
        ):
            found, answer, _ = router.call("POST", path, body)
            assert found == status and answer["error"]["message"], answer
        assert asked == [] and nums(jobs) == [0, 0]
    with opened_router(*urls(jobs)) as router:
        assert router.call("POST", LATER, BOAT | {"size": "1023x1024"})[0] == 400
        assert [job.sent for job in router.router.jobs] == [[], []]  # what was refused is no work


class Network(httpx2.AsyncBaseTransport):
    """Stands in for the network: jobs by name, whose answers to a POST a test sets."""

    def __init__(self) -> None:
        self.posted, self.keys, self.silent = list[str](), dict[str, str](), set[str]()
        self.model, self.refusing = {"a": "flux", "b": "flux"}, dict[str, httpx2.Response]()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        job, path = request.url.host, request.url.path
        key = request.headers.get("idempotency-key")
        if request.method == "POST":
            self.posted.append(job)
            if key is not None:
                self.keys[key] = job
            if job in self.silent:
                raise httpx2.ReadError("connection reset", request=request)
            if job in self.refusing:
                return self.refusing[job]
            return httpx2.Response(202, json={"data": [{"id": f"{job}1"}]})
        if job in self.silent:
            raise httpx2.ConnectError("refused", request=request)
        rows = [{"id": f"{job}1"}] if self.keys.get(key or "") == job else []
        match path:
            case "/metrics":
                return httpx2.Response(200, text=f"bascule_backlog_seconds {9.0 * (job == 'b')}\n")
            case "/v1/models":
                return httpx2.Response(200, json={"data": [{"id": self.model[job]}]})
            case _:
                return httpx2.Response(200, json={"data": rows, "num_ranks": 1})


def test_what_may_have_been_accepted_goes_nowhere_else() -> None:
    """The connection ends after a request was sent; with a key, it may come again, to that job."""
    network = Network()
    with opened_router("http://a", "http://b", transport=network) as router:
        network.silent = {"a"}
        status, answer, headers = router.call("POST", LATER, BOAT)
        assert (status, headers.get("x-should-retry")) == (503, "false")
        assert "http://a does not answer" in answer["error"]["message"]
        assert network.posted == ["a"]
        network.silent = set()
        assert router.call("POST", LATER, BOAT, Idempotency_Key="k")[0] == 202
        network.silent = {"a"}
        for _ in range(2):  # it has the key, which the router does not know
            status, answer, headers = router.call("POST", LATER, BOAT, Idempotency_Key="k")
            assert status == 503 and "x-should-retry" not in headers, answer
            assert "http://a does not answer" in answer["error"]["message"]
        assert network.posted == ["a", "a"]
        network.silent = set()
        assert router.call("POST", LATER, BOAT, Idempotency_Key="k")[0] == 202
        assert network.posted == ["a", "a", "a"]


@pytest.mark.parametrize(
    ("headers", "content", "posted"),
    [
        ({}, '{"error": {"message": "it is ending", "code": null}}', ["a", "b"]),
        ({"x-should-retry": "false"}, '{"error": {"message": "it resumes", "code": null}}', ["a"]),
        ({}, "<html>503</html>", ["a"]),  # of a proxy, which may have sent the call on
    ],
)
def test_only_what_a_job_refused_goes_on(
    headers: dict[str, str], content: str, posted: list[str]
) -> None:
    network = Network()
    network.refusing["a"] = httpx2.Response(503, headers=headers, text=content)
    with opened_router("http://a", "http://b", transport=network) as router:
        status, _, found = router.call("POST", LATER, BOAT)
        assert network.posted == posted and status == (202 if len(posted) == 2 else 503)
        assert found.get("x-should-retry") == headers.get("x-should-retry")


def test_a_job_of_another_model_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    network = Network()
    network.model["b"] = "wan"
    with opened_router("http://a", "http://b", transport=network, poll_s=0.1) as router:
        until(lambda: sum(router.reasons()) == 1)
        assert "another job" in caplog.text
        network.model["b"] = "flux"
        until(lambda: router.reasons() == [False, False])


def test_a_keyed_call_is_made_once(jobs: Pair) -> None:
    """Also if it comes four times at once, by another router, or while its job has more to do."""
    first, second = (job.service for job in jobs)
    gate = threading.Event()
    first.on_submit = lambda: time.sleep(0.05)
    ids, threads = list[str](), list[threading.Thread]()
    with opened_router(*urls(jobs)) as router:

        def send() -> None:
            gate.wait()
            ids.append(router.call("POST", LATER, BOAT, Idempotency_Key="k")[1]["data"][0]["id"])

        for _ in range(4):
            threads.append(threading.Thread(target=send))
            threads[-1].start()
        gate.set()
        for thread in threads:
            thread.join()
        assert len(set(ids)) == 1 and len(ids) == 4 and nums(jobs) == [1, 0]
    first.backlog_s, second.backlog_s = 1000.0, 0.0
    with opened_router(*urls(jobs)) as router:
        again = router.call("POST", LATER, BOAT, Idempotency_Key="k")[1]
        assert again["data"][0]["id"] == ids[0] and nums(jobs) == [1, 0]
        status, answer, _ = router.call("POST", LATER, BOAT | {"n": 2}, Idempotency_Key="k")
        assert (status, answer["error"]["code"]) == (422, "idempotency_key_reused")
        listed = router.call("GET", LATER, Idempotency_Key="k")[1]
        assert [row["id"] for row in listed["data"]] == [ids[0]]
        second.room = 0  # what was not accepted may go on, with a key, too
        assert router.call("POST", LATER, BOAT, Idempotency_Key="j")[0] == 202
        assert nums(jobs) == [2, 0]
        second.reason = "it is ending"  # perhaps after it accepted the call
        assert router.call("POST", LATER, BOAT, Idempotency_Key="i")[0] == 503
        assert nums(jobs) == [2, 0]


# Ids, lists, adapters


def test_an_id_goes_to_its_job_also_by_a_new_router(jobs: Pair) -> None:
    with opened_router(*urls(jobs)) as router:
        ids = [made(router, seed=number) for number in range(6)]
        owners = [number for name in ids for number in (0, 1) if name in jobs[number].service.of]
        assert owners == [0, 1, 0, 1, 0, 1]
    with opened_router(*urls(jobs)) as router:
        for name in ids:
            assert router.call("GET", f"{LATER}/{name}")[1]["id"] == name
        assert router.call("POST", f"{LATER}/{ids[0]}/cancel")[1]["state"] == "cancelled"
        assert router.call("DELETE", f"{LATER}/{ids[1]}")[1]["state"] == "cancelled"
        assert router.call("DELETE", f"{LATER}/{ids[1]}")[0] == 200
        assert router.call("GET", f"{LATER}/{ids[1]}")[0] == 404
        assert router.call("GET", f"{LATER}/none")[1]["error"]["message"].startswith("there is no")
        for job in jobs:
            while any(not one.has_ended for one in job.service.statuses()):
                job.service.step()
        path = f"{LATER}/{ids[2]}/content"
        status, whole, headers = router.call("GET", path)
        assert status == 200 and whole[:4] == b"\x89PNG", headers
        status, part, headers = router.call("GET", path, Range="bytes=1-3")
        assert (status, part) == (206, b"PNG") and headers["content-range"].startswith("bytes 1-3/")
        status, none, headers = router.call("HEAD", path)
        assert (status, none, headers["content-length"]) == (200, b"", str(len(whole)))
        status, jpeg, headers = router.call("GET", f"{path}?output_format=jpeg")
        assert status == 200 and headers["content-type"] == "image/jpeg"
        assert Image.open(io.BytesIO(jpeg)).format == "JPEG"
        last = made(router)
        listed = router.call("GET", LATER)[1]
        found = [row["id"] for row in listed["data"]]
        assert set(found) == {*ids, last} - {ids[1]} and found[0] == last
        assert found[-1] == ids[0]  # the first that has ended
        assert listed["num_ranks"] == 4 and listed["model"] == "tiny"


def test_an_id_whose_job_is_silent_is_not_unknown(jobs: Pair) -> None:
    with opened_router(_FREE, jobs[0].url) as router:
        name = made(router)
        assert router.call("GET", f"{LATER}/{name}")[0] == 200  # the other job need not answer
        for path in (f"{LATER}/other", LATER, "/v1/loras"):
            status, answer, headers = router.call("GET", path)
            assert (status, headers["retry-after"]) == (503, "10")
            assert f"{_FREE} does not answer" in answer["error"]["message"]


@pytest.mark.filterwarnings("ignore:(The Sora API|deprecated):DeprecationWarning")
def test_videos_of_all_jobs_in_pages(videos: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, clock = list[str](), count()
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))  # created_at has whole seconds
    with opened_router(*urls(videos)) as router:
        for _ in range(7):
            ids.append(router.call("POST", "/v1/videos", {"prompt": "waves"})[1]["id"])
        assert nums(videos) == [4, 3]
        for order, wanted in (("asc", ids), ("desc", ids[::-1])):
            found, after = list[str](), ""
            for last in (False, False, True):
                page = router.call("GET", f"/v1/videos?limit=3&order={order}{after}")[1]
                found += [row["id"] for row in page["data"]]
                assert page["has_more"] is not last
                assert [page["first_id"], page["last_id"]] == [found[-len(page["data"])], found[-1]]
                after = f"&after={found[-1]}"
            assert found == wanted
        assert [row.id for row in router.client().videos.list(limit=2)] == ids[::-1]
        assert router.call("GET", "/v1/videos?after=none")[0] == 404
        assert router.call("GET", "/v1/videos?limit=0")[0] == 400
        assert router.call("DELETE", f"/v1/videos/{ids[0]}")[1]["id"] == ids[0]


def test_adapters_are_of_all_jobs(jobs: Pair) -> None:
    with opened_router(*urls(jobs)) as router:
        assert [row["id"] for row in router.call("GET", "/v1/loras")[1]["data"]] == ["style"]
        jobs[1].service.loras = lambda: ["other", "style"]  # pyright: ignore
        assert [row["id"] for row in router.call("GET", "/v1/loras")[1]["data"]] == ["style"]
        jobs[1].service.loras = list  # pyright: ignore
        assert router.call("GET", "/v1/loras")[1]["data"] == []
        assert router.call("POST", "/v1/loras", {"name": "good"})[:2] == (
            200,
            {"id": "good", "object": "lora"},
        )
        load = jobs[1].service.load_lora
        jobs[1].service.load_lora = lambda _: load("wrong")  # pyright: ignore
        status, answer, _ = router.call("POST", "/v1/loras", {"name": "good"})
        assert (
            status == 409 and answer["error"]["message"] == f"{jobs[1].url}: it is loaded already"
        )
        status, answer, _ = router.call("DELETE", "/v1/loras/style")
        assert status == 400 and answer["error"]["message"].endswith("rank 1: style stays")


# Bodies, answers, connections


def test_calls_of_the_door_pass(videos: Pair, jobs: Pair) -> None:
    form, media = multipart(("prompt", "waves"), ("input_reference", png()), ("seed", "3"))
    with opened_router(*urls(videos)) as router, stepping(videos[0].service):
        status, video, headers = router.call("POST", "/v1/videos/sync", form, Content_Type=media)
        assert (status, video) == (200, b"a video of 3"), video
        (asked,) = videos[0].service.asked.values()
        assert len(asked.images) == 1 and headers["x-request-id"] in videos[0].service.of
    with opened_router(*urls(jobs), max_body_bytes=10_000) as router, ExitStack() as stack:
        for job in jobs:
            stack.enter_context(stepping(job.service))
        answer = router.client().images.generate(prompt="a", response_format="url", size="8x8")
        assert answer.data[0].url.startswith(f"{router.url}/v1/requests/")  # by way of the router
        assert router.call("GET", answer.data[0].url.removeprefix(router.url))[0] == 200
        events = list(router.client().images.generate(prompt="a", size="8x8", stream=True))
        assert [event.type for event in events] == ["image_generation.completed"]
        assert router.call("GET", "/v1/models/tiny")[1]["id"] == "tiny"
        assert (
            b"<html" in router.call("GET", "/")[1] and router.call("GET", "/openapi.json")[0] == 200
        )
        assert router.call("POST", LATER, {"prompt": "a" * 20_000})[0] == 413
        assert router.call("PATCH", LATER)[0] == 405


def test_events_come_as_they_are_sent(jobs: Pair) -> None:
    with opened_router(*urls(jobs)) as router:
        name = made(router, steps=2)
        head = f"GET {LATER}/{name}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        with router.connect(head.encode()) as connection, connection.makefile("rb") as lines:
            states = list[str]()
            for line in lines:
                if line.startswith(b"data: "):
                    states.append(json.loads(line[6:])["state"])
                    if states[-1] == "done":
                        break
                    jobs[0].service.step()  # so nothing waits for a later event
        assert states[0] == "waiting" and states[-1] == "done" and "running" in states


def test_a_client_that_leaves_is_seen_by_the_job(jobs: Pair) -> None:
    cancelled = threading.Event()
    jobs[0].service.on_cancel = cancelled.set
    with opened_router(*urls(jobs)) as router:
        body = json.dumps(BOAT).encode()
        head = f"POST {GENERATE} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        connection = router.connect(head.encode() + body)
        until(lambda: nums(jobs) == [1, 0])
        connection.close()
        assert cancelled.wait(30)


def test_bodies_count_until_a_job_has_answered(jobs: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_BODIES", 1)
    body = {"prompt": "a" * 9000, "size": "8x8"}
    with opened_router(*urls(jobs), max_body_bytes=10_000) as router:
        thread = threading.Thread(target=router.call, args=("POST", GENERATE, body))
        thread.start()
        until(lambda: sum(nums(jobs)) == 1)
        assert router.call("POST", LATER, body)[0] == 429
        for job in jobs:
            while any(not one.has_ended for one in job.service.statuses()):
                job.service.step()
        thread.join()
        assert router.call("POST", LATER, body)[0] == 202


def test_a_job_that_is_silent_for_too_long_is_given_up(jobs: Pair) -> None:
    with opened_router(*urls(jobs), answer_s=1.0) as router:
        status, answer, headers = router.call("POST", GENERATE, BOAT)
        assert (status, headers["x-should-retry"]) == (503, "false"), answer
        assert "ReadTimeout" in answer["error"]["message"] and nums(jobs) == [1, 0]


def test_an_answer_that_breaks_off_is_not_a_whole_one() -> None:
    """The job promises ten bytes and dies after four; the client sees no end."""

    class Broken(Network):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            if request.url.path != "/":
                return await super().handle_async_request(request)

            async def half() -> AsyncIterator[bytes]:
                yield b"four"
                raise httpx2.ReadError("reset", request=request)

            return httpx2.Response(200, headers={"content-length": "10"}, content=half())

    with opened_router("http://a", transport=Broken()) as router:
        with router.connect(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as connection:
            received = b"".join(iter(lambda: connection.recv(4096), b""))
    head, _, content = received.partition(b"\r\n\r\n")
    assert b"content-length: 10" in head.lower() and content == b"four"


def test_keys_of_clients_pass_and_the_router_needs_the_same(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    settings: Any = {"options": {"api_key_file": tmp_path / "key"}}
    with opened_door(folder(tmp_path, "a"), **settings) as job:
        with opened_router(job.url, api_key_file=tmp_path / "key") as router:
            assert router.reasons() == [False]
            assert router.call("POST", LATER, BOAT)[0] == 401
            bearer = {"Authorization": f"Bearer {KEY}"}
            assert router.call("POST", LATER, BOAT, **bearer)[0] == 202
            assert router.call("GET", "/metrics")[0] == 401
            assert router.call("GET", "/health")[0] == 200
        with opened_router(job.url) as router:
            message = router.call("GET", "/health")[1]["error"]["message"]
            assert "its key is not the router's: give both the same" in message


def test_a_router_before_routers(jobs: Pair) -> None:
    jobs[0].service.backlog_s = 100.0
    with opened_router(jobs[0].url) as left, opened_router(jobs[1].url) as right:
        with opened_router(left.url, right.url) as outer:
            name = made(outer)
            assert nums(jobs) == [0, 1]
            assert outer.call("GET", f"{LATER}/{name}")[1]["id"] == name
            assert outer.call("GET", LATER)[1]["num_ranks"] == 4


def test_calls_go_through_the_app_itself(jobs: Pair) -> None:
    """In one process, as a user of Starlette mounts it."""

    async def use() -> httpx2.Response:
        router = route.Router(RouteOptions(urls=(jobs[0].url,)))
        app: Any = httpx2.ASGITransport(app=router.app)
        async with router.lifespan(), httpx2.AsyncClient(transport=app) as client:
            return await client.post(
                f"http://router{LATER}", json=BOAT, headers={"Host": "localhost"}
            )

    assert asyncio.run(use()).status_code == 202
