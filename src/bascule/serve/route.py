"""A router of jobs of `bascule serve`: a new request goes to the job that is free first.

It stores nothing: jobs know their requests and the keys of calls, so the router asks them, also
after a restart. A call that one job may have accepted goes to no other job.
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote
from weakref import WeakValueDictionary

import httpx2
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from bascule.serve.forms import ListQuery, queried, work_of
from bascule.serve.guard import CLIENT_ERRORS, answer, disconnect
from bascule.serve.options import RouteOptions
from bascule.serve.status import Refusal, Unknown

_NEW = "images/generations", "images/edits", "videos", "videos/sync", "requests"
_COUNTED_S = 0.1  # after which a job's backlog has a request that was sent to it
_SOON_S = 0.2  # between sending a request and the next poll of its job
_KEPT = 0.95  # weight of earlier measurements of the speed, when a new one comes
_ASK_S = 6.0  # longest wait in a short call; /health takes up to 5 s
_MOST_IDS = 10**5  # of requests whose jobs the router remembers
# Headers of a connection and not of a call, or of which each server or client sends its own.
_OWN = b"connection keep-alive transfer-encoding te trailer upgrade proxy-connection expect "
_OWN += b"accept-encoding date x-content-type-options"
_LATER = {"Retry-After": "10"}  # a job that starts again needs seconds to minutes

_START = "start it again, or the router without its URL"
_MAY_HAVE = "it may have this request: look into /v1/requests when it is back"

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Job:
    """A job: its answer to the last poll, and the time and work of each request sent since."""

    url: str
    reason: str = "it was not asked yet"  # why it gets no new requests; empty if it does
    model: str = ""
    backlog_s: float = 0.0
    polled_s: float = -math.inf
    sent: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    last_s: float = -math.inf  # when a request was sent to it
    has_more: asyncio.Event = field(default_factory=asyncio.Event)  # since the last poll

    def free_s(self, s_per_work: float) -> float:
        """Predict in how many seconds the job has done what it has; work is pixels times steps."""
        left_s, at_s = self.backlog_s, self.polled_s
        for sent_s, work in self.sent:
            left_s, at_s = max(0.0, left_s - (sent_s - at_s)) + s_per_work * work, sent_s
        return max(0.0, left_s - (time.monotonic() - at_s))

    def take(self, backlog_s: float, began_s: float) -> tuple[float, float]:
        """Store a polled backlog; return the seconds that it grew, and the work sent for them."""
        counted = [sent for sent in self.sent if sent[0] <= began_s - _COUNTED_S]
        took_s = work = 0.0
        if counted and backlog_s > 0:  # so it worked all the time since the first of them
            left_s = max(0.0, self.backlog_s - (counted[0][0] - self.polled_s))
            took_s = max(0.0, backlog_s - left_s + began_s - counted[0][0])
            work = sum(work for _, work in counted)
        self.backlog_s, self.polled_s, self.sent = backlog_s, began_s, self.sent[len(counted) :]
        return took_s, work

    def judge(self, reason: str) -> None:
        """Take the job out for a reason, or back."""
        if reason != self.reason:
            _log.warning("%s", f"out: {reason}" if reason else f"in: {self.url}")
        self.reason = reason


class Router:
    """App that sends calls of clients to jobs; `transport` stands in for the network."""

    def __init__(self, options: RouteOptions, transport: Any = None) -> None:
        self._options, self._transport, key = options, transport, options.api_key()
        self.jobs = [_Job(url.rstrip("/")) for url in options.urls]
        self._key = {} if key is None else {b"authorization": b"Bearer " + key}
        self._took_s, self._work = 1e-7, 1.0  # of all jobs; at first, an H100's for Flux
        self._owners = dict[str, _Job]()  # by id of a request, the oldest first
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # by key of a call
        of_id = [f"/v1/{kind}/{{id}}{{rest:path}}" for kind in ("requests", "videos")]
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            *(Route(f"/v1/{path}", self._make, methods=["POST"]) for path in _NEW),
            *(Route(f"/v1/{path}", self._list) for path in ("requests", "loras")),
            Route("/v1/videos", self._list_videos),
            Route("/v1/loras", self._tell_all, methods=["POST"]),
            Route("/v1/loras/{name}", self._tell_all, methods=["DELETE"]),
            *(Route(path, self._of_id, methods=["GET", "POST", "DELETE"]) for path in of_id),
            Route("/{path:path}", self._forward, methods=["GET", "POST", "PUT", "DELETE"]),
        ]
        handlers: Any = dict.fromkeys((*CLIENT_ERRORS, Exception), answer)
        self.app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self.lifespan)

    @asynccontextmanager
    async def lifespan(self, _: Any = None) -> AsyncIterator[None]:
        """Ask all jobs, and go on asking, within the `with`."""
        # No connection is kept: a job could close it just as a call is sent, received or not.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx2.Timeout(self._options.answer_s, connect=5.0, write=120.0)
        settings: Any = {"limits": limits, "timeout": timeout, "transport": self._transport}
        settings |= {"trust_env": False, "headers": {"Accept-Encoding": "identity"}}
        async with httpx2.AsyncClient(**settings) as self._client:
            await asyncio.gather(*map(self._poll, self.jobs))
            watches = [asyncio.create_task(self._watch(job)) for job in self.jobs]
            yield
            for watch in watches:
                watch.cancel()

    async def _watch(self, job: _Job) -> None:
        """Poll a job; with a long queue polls take long, but less than a fifth of the time."""
        took_s = 0.0
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(job.has_more.wait(), self._options.poll_s)
                job.has_more.clear()
                await asyncio.sleep(max(_SOON_S, 5 * took_s))
            began_s = time.monotonic()
            await self._poll(job)
            took_s = time.monotonic() - began_s

    async def _poll(self, job: _Job) -> None:
        """Ask a job for its backlog; take it out if it gives none, and in again if it does."""
        began_s, reason = time.monotonic(), ""
        try:
            await self._ask(job, "/health")
            backlog_s = backlog_s_of((await self._ask(job, "/metrics")).text)
            if job.reason:  # it may have started with another model
                job.model = (await self._ask(job, "/v1/models")).json()["data"][0]["id"]
            models = {other.model for other in self.jobs if not other.reason and other is not job}
            if models - {job.model}:
                what = f"{job.url} serves {job.model}, another job {models.pop()}"
                raise Refusal(503, f"{what}: give jobs of one model")
            self._learn(*job.take(backlog_s, began_s))
        except Refusal as refusal:
            reason = refusal.message
        except (LookupError, TypeError, ValueError) as error:
            reason = f"{job.url} does not answer as bascule serve does: {error!r}"
        job.judge(reason)

    async def _ask(self, job: _Job, path: str, method: str = "GET", **call: Any) -> httpx2.Response:
        """Return a job's answer to a call of the router; Refusal if it fails."""
        call = {"timeout": _ASK_S} | call | {"headers": self._key | call.get("headers", {})}
        try:
            reply = await self._client.request(method, job.url + path, **call)
            return reply.raise_for_status()
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise _refusal(job, error) from error

    async def _search(self, path: str, **call: Any) -> _Job | None:
        """Return the job that has what a path names; Refusal if one that may have it fails."""
        failed = None
        for job in sorted(self.jobs, key=lambda job: bool(job.reason)):
            try:
                if (await self._ask(job, path, **call)).json().get("data", True):
                    return job
            except Refusal as refusal:
                failed = failed or (refusal if refusal.status != 404 else None)
        if failed is not None:
            raise failed
        return None

    def _learn(self, took_s: float, work: float) -> None:
        """Note how long work took.

        Jobs share one speed: one that a cold start made slow would get no work to be timed by.
        """
        if work:
            self._took_s = _KEPT * self._took_s + took_s
            self._work = _KEPT * self._work + work

    def _free_s(self, job: _Job) -> float:
        """Predict in how many seconds a job has done what it has."""
        return job.free_s(self._took_s / self._work)

    # --- calls that go to one job -----------------------------------------------------------------

    async def _make(self, request: Request) -> Response:
        """Send a new request to the job that is free first, or to the job that knows its key.

        Calls with one key wait for each other, as two jobs would not see that they are the same.
        """
        work = work_of(await request.body())
        if not (key := _key_of(request)):
            return await self._forward(request, work)
        async with self._locks.setdefault(str(key), asyncio.Lock()):
            owner = await self._search("/v1/requests", headers=key)
            return await self._forward(request, work, owner)

    async def _of_id(self, request: Request) -> Response:
        """Send a call to the job that has its request."""
        name = request.path_params["id"]
        path = f"/v1/requests/{quote(name, safe='')}"
        if (owner := self._owners.get(name) or await self._search(path)) is None:
            raise Unknown(f"there is no request {name!r}")
        self._owners[name] = owner
        if len(self._owners) > _MOST_IDS:
            del self._owners[next(iter(self._owners))]
        return await self._forward(request, owner=owner)

    async def _forward(
        self, request: Request, work: float = 0.0, owner: _Job | None = None
    ) -> Response:
        """Send a call to its owner or the best job; to the next one if it was not accepted."""
        left = [owner] if owner else [job for job in self.jobs if not job.reason]
        reasons, refused = [job.reason for job in self.jobs if job.reason], None
        while left:
            left.remove(job := min(left, key=lambda job: (self._free_s(job), job.last_s)))
            sent = time.monotonic(), work
            if work and owner is None:
                job.sent.append(sent)
                job.last_s = sent[0]
                job.has_more.set()
            request.state.is_accepted = work > 0 and not _key_of(request)  # perhaps: no retries
            try:
                reply = await self._send(request, job)
                if reply.status_code >= 400:
                    job.sent = [other for other in job.sent if other is not sent]
                    await reply.aread()
            except httpx2.HTTPError as error:
                if not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
                    raise _refusal(job, error, _MAY_HAVE if work else _START) from error
                job.judge((refusal := _refusal(job, error)).message)  # it got nothing
                if owner:
                    raise refusal from error
                reasons.append(job.reason)
                continue
            if reply.status_code < 400 or owner or not _is_free(request, reply):
                return relayed(reply)
            refused = refused or reply
        if refused is not None:
            return relayed(refused)
        request.state.is_accepted = False
        raise Refusal(503, f"no job takes this call: {'; '.join(reasons)}", headers=_LATER)

    async def _send(self, request: Request, job: _Job) -> httpx2.Response:
        """Send a call to a job; return its answer, whose body comes later. HTTPError if it fails.

        If the client leaves, the call to the job is closed, which it notices: ClientDisconnect.
        """
        path, query = request.scope["raw_path"], request.scope["query_string"]
        url = job.url + (path + (b"?" + query if query else b"")).decode("latin-1")
        content, headers = await request.body() or None, passed(request.headers.raw)
        call = self._client.build_request(request.method, url, content=content, headers=headers)
        sending = asyncio.ensure_future(self._client.send(call, stream=True))
        gone = asyncio.ensure_future(disconnect(request))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                return sending.result()
            raise ClientDisconnect
        finally:
            sending.cancel()
            gone.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)

    # --- calls that go to all jobs ----------------------------------------------------------------

    async def _list(self, request: Request) -> Response:
        """List the requests of all jobs, or the adapters that all of them have."""
        path, key = request.url.path, _key_of(request)
        asked = (self._ask(job, path, headers=key) for job in self.jobs)
        lists = [reply.json() for reply in await asyncio.gather(*asked)]
        rows = [row for of_job in lists for row in of_job["data"]]
        if "num_ranks" not in lists[0]:
            rows = [row for row in lists[0]["data"] if rows.count(row) == len(lists)]
            return JSONResponse(lists[0] | {"data": rows})
        rows.sort(
            key=lambda row: (0, row["created_at"]) if (at := row["ended_at"]) is None else (1, -at)
        )
        num_ranks = sum(of_job["num_ranks"] for of_job in lists)
        return JSONResponse(lists[0] | {"data": rows, "num_ranks": num_ranks})

    async def _list_videos(self, request: Request) -> Response:
        """List a page of the videos of all jobs, by the seconds of their arrival."""
        query = queried(request, ListQuery)
        lists = await asyncio.gather(*(self._videos_of(job, query) for job in self.jobs))
        rows = [row for of_job in lists for row in of_job]
        rows.sort(key=lambda row: row["created_at"], reverse=query.order == "desc")
        ids = [row["id"] for row in rows]
        if query.after not in (None, *ids):
            raise Unknown(f"there is no request {query.after!r}")
        begin = 0 if query.after is None else ids.index(query.after) + 1
        page = ids[begin : begin + query.limit]
        first, last = (page[0], page[-1]) if page else (None, None)
        ends = {"first_id": first, "last_id": last, "has_more": len(ids) > begin + query.limit}
        return JSONResponse({"object": "list", "data": rows[begin:][: query.limit]} | ends)

    async def _videos_of(self, job: _Job, query: ListQuery) -> list[dict[str, Any]]:
        rows, has_more, after = [], True, ""
        while has_more and (query.after or len(rows) <= query.limit):
            path = f"/v1/videos?limit=100&order={query.order}{after}"
            page = (await self._ask(job, path)).json()
            rows += page["data"]
            has_more, after = page["has_more"], f"&after={page['last_id']}"
        return rows

    async def _tell_all(self, request: Request) -> Response:
        """Let all jobs load or remove an adapter; Refusal of the first job that did not."""
        path, media = request.scope["raw_path"].decode(), request.headers.get("content-type", "")
        call: Any = {"content": await request.body(), "headers": {"Content-Type": media}}
        call |= {"method": request.method, "timeout": self._options.answer_s}
        asked = (self._ask(job, path, **call) for job in self.jobs)
        replies: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return relayed(replies[0])

    async def _health(self, _: Request) -> Response:
        """Say that a job takes new requests, or why none does."""
        if all(reasons := [job.reason for job in self.jobs]):
            raise Refusal(503, f"no job takes new requests: {'; '.join(reasons)}", headers=_LATER)
        return JSONResponse({"status": "ok"})

    async def _metrics(self, _: Request) -> Response:
        """Send gauges for Prometheus, of which a router before this one reads the first."""
        free_s = {job.url: self._free_s(job) for job in self.jobs if not job.reason}
        text = f"bascule_backlog_seconds {min(free_s.values(), default=math.inf)}\n"
        for job in self.jobs:
            text += f'bascule_router_job_up{{job="{job.url}"}} {int(job.url in free_s)}\n'
        for url, seconds in free_s.items():
            text += f'bascule_router_backlog_seconds{{job="{url}"}} {seconds}\n'
        return PlainTextResponse(text)


def _is_free(request: Request, reply: httpx2.Response) -> bool:
    """Return whether a job surely did not accept a call, which another one may.

    A busy or ending job says so. With a key, an ending job says it also of calls that it accepted.
    """
    is_ending = reply.status_code == 503 and reply.headers.get("x-should-retry") != "false"
    is_ending = is_ending and not _key_of(request) and '"error"' in reply.text
    has_no_lora = reply.status_code == 400 and "lora_not_loaded" in reply.text
    return is_ending or has_no_lora or reply.status_code == 429


def _refusal(job: _Job, error: Exception, advice: str = _START) -> Refusal:
    """Return the answer for a client whose job failed, in the job's words if it sent any."""
    if not isinstance(error, httpx2.HTTPStatusError):
        what = str(error) or type(error).__name__
        return Refusal(503, f"{job.url} does not answer: {what}; {advice}", headers=_LATER)
    status, text = error.response.status_code, error.response.text
    if status == 401:
        text = '"message":"its key is not the router\'s: give both the same --api-key-file"'
    said = re.search(r'"message":"((?:[^"\\]|\\.)*)"', text)
    status = status if status in (400, 404, 409, 415, 422) else 503
    return Refusal(status, f"{job.url}: {said[1] if said else f'status {status}'}", headers=_LATER)


def relayed(reply: httpx2.Response) -> Response:
    """Return a job's answer, which is passed on as it comes."""
    close = BackgroundTask(reply.aclose)
    response = StreamingResponse(reply.aiter_bytes(), reply.status_code, background=close)
    response.raw_headers = passed(reply.headers.raw)
    return response


def passed(headers: Any) -> list[tuple[bytes, bytes]]:
    """Return the headers of a call or an answer that are passed on."""
    pairs = ((name.lower(), value) for name, value in headers)
    return [(name, value) for name, value in pairs if name not in _OWN.split()]


def backlog_s_of(metrics: str) -> float:
    """Return the predicted seconds of a job's work, from its metrics; ValueError without them."""
    (backlog_s,) = re.findall(r"^bascule_backlog_seconds (\S+)$", metrics, re.MULTILINE)
    return float(backlog_s)


def _key_of(request: Request) -> dict[bytes, bytes]:
    return dict(pair for pair in request.headers.raw if pair[0] == b"idempotency-key")
