"""The HTTP server of a service: OpenAI's API, a page and metrics.

It runs in a thread of its own and decides nothing. Waiting clients are coroutines, which the
service's thread wakes; blocking calls run in a few threads. FastAPI routes, uvicorn speaks HTTP.
"""

import asyncio
import base64
import json
import logging
import resource
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from bascule.serve.forms import Form, ImageForm, VideoForm, picture, prompts_of, read
from bascule.serve.guard import CLIENT_ERRORS, NO_RETRY, Connection, Guard, answer, hide_folders
from bascule.serve.options import ServeOptions
from bascule.serve.status import Closing, Refusal, Status
from bascule.serve.tracing import parent_of

if TYPE_CHECKING:
    from bascule.serve.service import Service

_HEARTBEAT_S = 15.0  # between events without a change: else proxies end the connection
_HEALTH_S = 5.0  # longest wait for the service in /health
_GRACE_S = 3  # for open answers at the end
_VIDEO_STATUS = {"waiting": "queued", "running": "in_progress", "paused": "in_progress"}
_VIDEO_STATUS |= {"done": "completed", "failed": "failed", "cancelled": "failed"}
_MEDIA = {".png": "image/png", ".mp4": "video/mp4"}

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class Door:
    """The HTTP server of a service."""

    def __init__(self, service: "Service", options: ServeOptions) -> None:
        self.address = ""  # URL of its page, from `start` on
        self._service, self._options = service, options
        self._form = VideoForm if service.kind == "video" else ImageForm
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._is_open, self._is_closing = threading.Event(), False
        self._calls, self._decodes, self._health_calls = map(CapacityLimiter, (16, 2, 4))
        app = FastAPI(openapi_url=None, lifespan=self._lifespan)
        for kind in (*CLIENT_ERRORS, Exception):
            app.add_exception_handler(kind, answer)
        for method, path, handler in (
            ("POST", "/v1/images/generations", self._images),
            ("POST", "/v1/images/edits", self._images),
            ("POST", "/v1/videos", self._make_video),
            ("GET", "/v1/videos/{request_id}", self._get_video),
            ("GET", "/v1/videos/{request_id}/content", self._content),
            ("DELETE", "/v1/videos/{request_id}", self._delete_video),
            ("GET", "/v1/models", self._models),
            ("POST", "/v1/requests", self._make),
            ("GET", "/v1/requests", self._list),
            ("GET", "/v1/requests/{request_id}", self._get),
            ("DELETE", "/v1/requests/{request_id}", self._delete),
            ("POST", "/v1/requests/{request_id}/cancel", self._cancel),
            ("GET", "/v1/requests/{request_id}/events", self._events),
            ("GET", "/v1/requests/{request_id}/content", self._content),
            ("GET", "/health", self._health),
            ("GET", "/metrics", self._show_metrics),
            ("GET", "/docs", self._page),
            ("GET", "/", self._page),
        ):
            app.add_api_route(path, handler, methods=[method], response_model=None)
        self._app = app

    # --- start and end ----------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, and answer calls in a thread; ConfigError if the address is not free."""
        most_open = 2 * self._options.most_waiting + 1000
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        num_files = max(soft, 3 * most_open)  # a connection is a file
        if hard != resource.RLIM_INFINITY:
            num_files = min(num_files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
        most_open = min(most_open, num_files // 3)
        path = self._options.api_key_file
        if path is not None and path.stat().st_mode & 0o077:  # not refused: container mounts are so
            _log.warning("other users of this machine can read %s: chmod 600 %s", path, path)
        listener = self._options.listen()
        host, port = listener.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        config = uvicorn.Config(
            Guard(self._app, self._options, most_open),
            http=Connection,
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            headers=[("X-Content-Type-Options", "nosniff")],
            limit_concurrency=most_open,
            timeout_graceful_shutdown=_GRACE_S,
        )
        for name in ("uvicorn.error", "python_multipart.multipart", "opentelemetry.trace"):
            logging.getLogger(name).setLevel(logging.ERROR)  # they warn of clients' mistakes
        self._server = uvicorn.Server(config)
        serve = partial(self._server.run, [listener])
        self._thread = threading.Thread(target=serve, name="bascule door", daemon=True)
        self._thread.start()
        while not self._is_open.wait(0.1):
            if not self._thread.is_alive():
                raise RuntimeError("the server's thread has ended: its log says why")
        self._service.on_change = self._on_change

    def stop(self) -> None:
        """Answer all waiting calls with 503, and end the thread."""
        self._service.on_change = None
        self._loop.call_soon_threadsafe(self._close)
        self._server.should_exit = True
        self._thread.join()

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._is_open.set()
        yield

    def _close(self) -> None:
        self._is_closing = True
        for request_id in self._watchers:
            self._wake(request_id)

    def _on_change(self, status: Status) -> None:
        """Wake the clients that wait for a request; in the service's thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._wake, status.id)

    def _wake(self, request_id: str) -> None:
        for has_changed in self._watchers.get(request_id, ()):
            has_changed.set()

    async def _call(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        return await to_thread.run_sync(function, *arguments, limiter=self._calls)

    async def _changes(self, request_id: str) -> AsyncGenerator[Status, None]:
        """Yield the status of a request, now and at each change, until it has ended."""
        has_changed = asyncio.Event()
        self._watchers.setdefault(request_id, set()).add(has_changed)
        try:
            while not self._is_closing:
                has_changed.clear()
                yield (status := await self._call(self._service.status, request_id))
                if status.has_ended:
                    return
                with suppress(TimeoutError):
                    await asyncio.wait_for(has_changed.wait(), _HEARTBEAT_S)
            raise Closing(f"the server is ending; request {request_id} resumes at its next start")
        finally:
            self._watchers[request_id].discard(has_changed)
            if not self._watchers[request_id]:
                del self._watchers[request_id]

    # --- requests ---------------------------------------------------------------------------------

    async def _submit(self, request: Request, kind: type[Form], *, with_image: bool | None) -> Any:
        """Submit the requests of a call; return its fields, and the status of each request."""
        name = self._options.model_name
        if kind is not self._form:
            path = "/v1/images/generations" if self._form is ImageForm else "/v1/videos"
            raise Refusal(404, f"{name} makes {self._service.kind}s: use {path}")
        form, sent = await read(request, kind, self._options)
        if sent is not None and (with_image is False or not self._service.takes_image):
            why = "use /v1/images/edits" if self._service.takes_image else "leave it out"
            raise Refusal(400, f"{name} takes no image here: {why}", "image")
        if sent is None and with_image:
            raise Refusal(400, "image is missing: give it", "image")
        image = None
        if sent is not None:
            decode = partial(picture, sent, self._options.max_pixels)
            image = await to_thread.run_sync(decode, limiter=self._decodes)
        submit = partial(self._service.submit, must_meet_deadline=form.must_meet_deadline)
        submit = partial(submit, parent=parent_of(request.headers))
        prompts = prompts_of(form, self._options)
        statuses = await self._call(submit, prompts, image, form.deadline_s)
        request.state.is_accepted = True
        return form, statuses

    async def _images(self, request: Request) -> Any:
        """Answer when all images of a call are done."""
        with_image = request.url.path.endswith("/edits")
        form, statuses = await self._submit(request, ImageForm, with_image=with_image)
        data: list[dict[str, Any]] = []
        for status in await self._until_done(request, [status.id for status in statuses]):
            row, path = {"id": status.id, "seed": status.prompt.seed}, await self._result(status)
            if form.response_format == "url":
                row["url"] = f"{request.base_url}v1/requests/{status.id}/content"
            else:
                row["b64_json"] = await self._call(_in_base64, path)
            data.append(row)
        return {"created": int(statuses[0].created_at), "output_format": "png", "data": data}

    async def _until_done(self, request: Request, ids: list[str]) -> list[Status]:
        """Wait for requests; cancel them if the waiting client disconnects."""

        async def end_of(request_id: str) -> Status:
            async with aclosing(self._changes(request_id)) as changes:
                return [status async for status in changes][-1]

        async def disconnect() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        ends, gone = asyncio.gather(*map(end_of, ids)), asyncio.ensure_future(disconnect())
        try:
            await asyncio.wait({ends, gone}, return_when=asyncio.FIRST_COMPLETED)
            if ends.done():
                return ends.result()
            for request_id in ids:
                await self._call(self._service.cancel, request_id)
            raise ClientDisconnect
        finally:
            ends.cancel()
            gone.cancel()
            await asyncio.gather(ends, gone, return_exceptions=True)  # else asyncio logs them

    async def _result(self, status: Status) -> Path:
        """Return the output's path of a request; Refusal if there is none."""
        if status.state == "failed":
            message = f"request {status.id} failed: {status.reason}"
            raise Refusal(500, message, code="request_failed", headers=NO_RETRY)
        if status.state == "cancelled":
            raise Refusal(410, f"request {status.id} was cancelled", code="request_cancelled")
        if status.state != "done":
            message = f"request {status.id} is {status.state}: ask again when it is done"
            raise Refusal(409, message, code="request_not_done", headers=NO_RETRY)
        return await self._call(self._service.result, status.id)

    async def _make(self, request: Request) -> Any:
        _, statuses = await self._submit(request, self._form, with_image=None)
        return JSONResponse(_list_of(map(_row, statuses)), 202)

    async def _list(self) -> Any:
        rows = _list_of(map(_row, await self._call(self._service.statuses)))
        rows |= {"kind": self._service.kind, "takes_image": self._service.takes_image}
        return rows | {"model": self._options.model_name, "num_ranks": self._service.num_ranks}

    async def _get(self, request_id: str) -> Any:
        return _row(await self._call(self._service.status, request_id))

    async def _delete(self, request_id: str) -> Any:
        return _row(await self._call(self._service.delete, request_id))

    async def _cancel(self, request_id: str) -> Any:
        return _row(await self._call(self._service.cancel, request_id))

    async def _content(self, request_id: str) -> Any:
        path = await self._result(await self._call(self._service.status, request_id))
        return FileResponse(path, media_type=_MEDIA[path.suffix])

    async def _events(self, request_id: str) -> Any:
        await self._call(self._service.status, request_id)  # or 404

        async def lines() -> AsyncIterator[str]:
            with suppress(Closing):
                async with aclosing(self._changes(request_id)) as changes:
                    async for status in changes:
                        yield f"data: {json.dumps(_row(status))}\n\n"

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # the second for nginx
        return StreamingResponse(lines(), headers=headers, media_type="text/event-stream")

    async def _make_video(self, request: Request) -> Any:
        _, (status,) = await self._submit(request, VideoForm, with_image=None)
        return self._video(status)

    async def _get_video(self, request_id: str) -> Any:
        return self._video(await self._call(self._service.status, request_id))

    async def _delete_video(self, request_id: str) -> Any:
        status = await self._call(self._service.delete, request_id)
        return {"id": status.id, "object": "video.deleted", "deleted": status.has_ended}

    def _video(self, status: Status) -> dict[str, Any]:
        prompt, error, ended = status.prompt, None, status.ended_at
        if status.state in ("failed", "cancelled"):
            message = hide_folders(status.reason) or f"request {status.id} was {status.state}"
            error = {"code": f"request_{status.state}", "message": message}
        frames = prompt.frames and (prompt.frames - 1) / self._options.fps
        progress = 100 * status.step // (status.num_steps or 1)
        return {
            "id": status.id,
            "object": "video",
            "model": self._options.model_name,
            "status": _VIDEO_STATUS[status.state],
            "progress": 100 if status.state == "done" else min(progress, 99),
            "created_at": int(status.created_at),
            "completed_at": int(ended) if ended and status.state == "done" else None,
            "seconds": "auto" if frames is None else f"{frames:g}",
            "size": f"{prompt.width}x{prompt.height}" if prompt.width and prompt.height else "auto",
            "prompt": prompt.prompt,
            "error": error,
        }

    # --- the server -------------------------------------------------------------------------------

    async def _models(self) -> Any:
        model = {"id": self._options.model_name, "object": "model", "owned_by": "bascule"}
        return _list_of([model])

    async def _health(self) -> Any:
        try:
            async with asyncio.timeout(_HEALTH_S):
                reason = await to_thread.run_sync(
                    self._service.health, limiter=self._health_calls, abandon_on_cancel=True
                )
        except TimeoutError:
            reason = f"the service has not answered for {_HEALTH_S:.0f} s"
        if reason or self._is_closing:
            raise Refusal(503, reason or "the server is ending", headers=NO_RETRY)
        return {"status": "ok"}

    async def _show_metrics(self) -> Any:
        text = await self._call(self._service.metrics)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _page(self) -> Any:
        return HTMLResponse((files("bascule.serve") / "page.html").read_text(encoding="utf-8"))


def _list_of(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": list(rows)}


def _row(status: Status) -> dict[str, Any]:
    row: dict[str, Any] = asdict(status) | {"reason": hide_folders(status.reason)}
    settings = {name: value for name, value in row.pop("prompt").items() if value is not None}
    return {"object": "request", **row, "prompt": settings.pop("prompt"), "settings": settings}


def _in_base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
