"""The HTTP server of a service: OpenAI's API, a page and metrics.

It runs in a thread of its own and decides nothing. Waiting clients are coroutines, which the
service's thread wakes; blocking calls run in a few threads. FastAPI routes, uvicorn speaks HTTP.
"""

import asyncio
import base64
import json
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode

from anyio import CancelScope, CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect
from starlette.types import Send

from bascule.generate.options import VIDEO, Prompt
from bascule.serve import forms, schema
from bascule.serve.forms import Format, ImageForm, VideoForm
from bascule.serve.guard import CLIENT_ERRORS, NO_RETRY, answer, disconnect, guarded, hide_folders
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
_EVENTS = "text/event-stream"
_IMAGES, _EDITS = "/v1/images/generations", "/v1/images/edits"
_CONTENT = {media: {} for media in ("image/png", "image/jpeg", "image/webp", "video/mp4")}

_Result = TypeVar("_Result")


class _Events(StreamingResponse):
    """Server-sent events, whose generator ends with the answer, also if the client leaves."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # the second for nginx
        super().__init__(lines, headers=headers, media_type=_EVENTS)

    async def stream_response(self, send: Send) -> None:
        lines: Any = self.body_iterator
        async with aclosing(lines):  # else it ends whenever Python collects it
            await super().stream_response(send)


class Door:
    """The HTTP server of a service."""

    def __init__(self, service: "Service", options: ServeOptions) -> None:
        self.address = ""  # URL of its page, from `start` on
        self._service, self._options = service, options
        self._form = VideoForm if service.kind == "video" else ImageForm
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._is_open, self._is_closing = threading.Event(), False
        self._calls, self._decodes, self._health_calls = map(CapacityLimiter, (16, 2, 4))
        self._started_at = int(time.time())
        more: Any = {"lifespan": self._lifespan, "telemetry": {"operation_spans": False}}
        app = FastAPI(title="bascule serve", docs_url=None, redoc_url=None, **more)
        for kind in (*CLIENT_ERRORS, Exception):
            app.add_exception_handler(kind, answer)
        image_body, video_body = schema.body_of(ImageForm), schema.body_of(VideoForm)
        either_body = video_body if self._form is VideoForm else image_body
        content, pages = schema.query_of(forms.ContentQuery), schema.query_of(forms.ListQuery)
        for method, path, handler, model, extra in (
            ("POST", _IMAGES, self._images, schema.IMAGES, image_body),
            ("POST", _EDITS, self._images, schema.IMAGES, image_body),
            ("POST", "/v1/videos", self._make_video, schema.VIDEO, video_body),
            ("GET", "/v1/videos", self._list_videos, schema.VIDEOS, pages),
            ("POST", "/v1/videos/sync", self._video_now, {"video/mp4": {}}, video_body),
            ("GET", "/v1/videos/{request_id}", self._get_video, schema.VIDEO, None),
            ("GET", "/v1/videos/{request_id}/content", self._content, _CONTENT, content),
            ("DELETE", "/v1/videos/{request_id}", self._delete_video, schema.DELETED, None),
            ("GET", "/v1/models", self._models, schema.MODELS, None),
            ("GET", "/v1/models/{name}", self._model, schema.MODEL, None),
            ("GET", "/v1/loras", self._list_loras, schema.LORAS, None),
            ("POST", "/v1/loras", self._load_lora, schema.LORA, schema.body_of(forms.LoraForm)),
            ("DELETE", "/v1/loras/{name}", self._remove_lora, schema.LORA_REMOVED, None),
            ("POST", "/v1/requests", self._make, schema.MADE, either_body),
            ("GET", "/v1/requests", self._list, schema.REQUESTS, None),
            ("GET", "/v1/requests/{request_id}", self._get, schema.REQUEST, None),
            ("DELETE", "/v1/requests/{request_id}", self._delete, schema.REQUEST, None),
            ("POST", "/v1/requests/{request_id}/cancel", self._cancel, schema.REQUEST, None),
            ("GET", "/v1/requests/{request_id}/events", self._events, {_EVENTS: {}}, None),
            ("GET", "/v1/requests/{request_id}/content", self._content, _CONTENT, content),
            ("GET", "/health", self._health, schema.HEALTH, None),
            ("GET", "/metrics", self._show_metrics, {"text/plain": {}}, None),
            ("GET", "/docs", self._page, {"text/html": {}}, None),
            ("GET", "/", self._page, {"text/html": {}}, None),
        ):
            status = 202 if (method, path) == ("POST", "/v1/requests") else 200
            is_json = not isinstance(model, dict)
            said = {"description": "done"} | ({"model": model} if is_json else {"content": model})
            refused = {"description": "refused, and why", "model": schema.ERROR}
            about: Any = {"responses": {status: said, "default": refused}, "openapi_extra": extra}
            about |= {"response_class": JSONResponse if is_json else Response}
            about |= {"response_model": None, "status_code": status}
            app.add_api_route(path, handler, methods=[method], **about)
            if handler in (self._health, self._page, self._content):  # proxies and curl -I ask
                app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)
        self._app = app

    # --- start and end ----------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, and answer calls in a thread; ConfigError if the address is not free."""
        most_open = 2 * self._options.most_waiting + 1000
        server = guarded(self._app, self._options, most_open, _GRACE_S)
        self._server, listener, self.address = server
        serve = partial(self._server.run, [listener])
        self._thread = threading.Thread(target=serve, name="bascule door", daemon=True)
        self._thread.start()
        while not self._is_open.wait(0.1):
            if not self._thread.is_alive():
                raise RuntimeError("the server's thread has ended: its log says why")
        self._service.on_change = self._on_change

    def stop(self) -> None:
        """Answer all waiting calls with 503, and end the thread."""
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

    def _check_kind(self, kind: type[forms.Form]) -> None:
        if kind is not self._form:
            path = _IMAGES if self._form is ImageForm else "/v1/videos"
            name = self._options.model_name
            raise Refusal(404, f"{name} makes {self._service.kind}s: use {path}")

    async def _submit(self, request: Request, kind: type[forms.Form]) -> Any:
        """Submit the requests of a call; return its fields, and the status of each request."""
        self._check_kind(kind)
        form, sent = await forms.read(request, kind, self._options)
        path = request.url.path
        if path == "/v1/requests" and isinstance(form, ImageForm):
            form.check_later()
        if sent and path == _IMAGES and self._service.takes_image:
            raise Refusal(400, f"image: {path} takes none: use {_EDITS}", "image")
        if not sent and path == _EDITS:
            raise Refusal(400, "image is missing: give it", "image")
        images, decode = list[bytes](), partial(forms.picture, most=self._options.max_pixels)
        for item in sent:
            images.append(await to_thread.run_sync(decode, item, limiter=self._decodes))
        key, prompts = forms.key_of(request, form, images), forms.prompts_of(form, self._options)
        facts: Any = {"must_meet_deadline": form.must_meet_deadline, "key": key}
        submit = partial(self._service.submit, **facts, parent=parent_of(request.headers))
        statuses = await self._call(submit, prompts, images, form.deadline_s)
        request.state.has_key, request.state.is_accepted = key is not None, key is None
        return form, statuses

    async def _images(self, request: Request) -> Any:
        """Make images, and answer when all are done; with `stream`, send each as an event."""
        form, statuses = await self._submit(request, ImageForm)
        ids, data = [status.id for status in statuses], list[dict[str, Any]]()
        if form.stream:
            return _Events(self._image_events(request, ids, form))
        for status in await self._until_done(request, ids):
            row, path = {"id": status.id, "seed": status.prompt.seed}, await self._result(status)
            if form.response_format == "url":
                settings = form.model_dump(include=set(Format.model_fields), exclude_defaults=True)
                query = f"?{urlencode(settings)}" if settings else ""
                row["url"] = f"{request.base_url}v1/requests/{status.id}/content{query}"
            elif form.response_format == "file":
                name = f'attachment; filename="{status.id}.{form.output_format}"'
                headers, media = {"Content-Disposition": name}, f"image/{form.output_format}"
                return Response(await self._encode(path, form), headers=headers, media_type=media)
            else:
                row["b64_json"] = await self._in_base64(path, form)
            data.append(row)
        created = int(statuses[0].created_at)
        return {"created": created, "output_format": form.output_format, "data": data}

    async def _image_events(
        self, request: Request, ids: Sequence[str], form: ImageForm
    ) -> AsyncIterator[str]:
        """Yield an event for each image in order, as soon as it is done; an error ends them."""
        left, what = list(ids), "edit" if request.url.path == _EDITS else "generation"
        kind = f"image_{what}.completed"
        try:
            for request_id in ids:
                async with aclosing(self._changes(request_id)) as changes:
                    async for status in changes:
                        if not status.has_ended:
                            yield f": {status.state}, step {status.step}\n\n"  # a comment
                            continue
                        left.remove(request_id)
                        path, prompt = await self._result(status), status.prompt
                        event = {"type": kind, "b64_json": await self._in_base64(path, form)}
                        event |= {"created_at": int(status.ended_at or 0), "size": _size(prompt)}
                        event |= {"output_format": form.output_format, "quality": "auto"}
                        event |= {"background": "opaque", "usage": None}
                        event |= {"id": status.id, "seed": prompt.seed}
                        yield f"event: {kind}\ndata: {json.dumps(event)}\n\n"
        except Refusal as refusal:
            yield f"event: error\ndata: {bytes(answer(None, refusal).body).decode()}\n\n"
        finally:
            if not self._is_closing:  # else the rest resumes at the next start
                with CancelScope(shield=True):
                    await self._abandon(request, left)

    async def _encode(self, path: Path, form: Format) -> bytes:
        return await to_thread.run_sync(form.encode, path, limiter=self._decodes)

    async def _in_base64(self, path: Path, form: Format) -> str:
        return base64.b64encode(await self._encode(path, form)).decode()

    async def _abandon(self, request: Request, ids: Sequence[str]) -> None:
        """Cancel requests whose client has gone, unless a key lets the client come again."""
        for request_id in () if request.state.has_key else ids:
            await self._call(self._service.cancel, request_id)

    async def _until_done(self, request: Request, ids: list[str]) -> list[Status]:
        """Wait for requests; abandon them if the waiting client disconnects."""

        async def end_of(request_id: str) -> Status:
            async with aclosing(self._changes(request_id)) as changes:
                return [status async for status in changes][-1]

        ends, gone = asyncio.gather(*map(end_of, ids)), asyncio.ensure_future(disconnect(request))
        try:
            await asyncio.wait({ends, gone}, return_when=asyncio.FIRST_COMPLETED)
            if ends.done():
                return ends.result()
            await self._abandon(request, ids)
            raise ClientDisconnect
        finally:
            ends.cancel()
            gone.cancel()
            await asyncio.gather(ends, gone, return_exceptions=True)  # else asyncio logs them

    async def _result(self, status: Status) -> Path:
        """Return the output's path of a request; Refusal if there is none."""
        if status.state == "done":
            return await self._call(self._service.result, status.id)
        number, code, what = 409, "not_done", f"is {status.state}: ask again when it is done"
        if status.state == "failed":
            number, code, what = 500, "failed", f"failed: {status.reason}"
        elif status.state == "cancelled":
            number, code, what = 410, "cancelled", "was cancelled"
        text = f"request {status.id} {what}"
        raise Refusal(number, text, code=f"request_{code}", headers=NO_RETRY)

    async def _make(self, request: Request) -> Any:
        """Make images or a video, without waiting."""
        _, statuses = await self._submit(request, self._form)
        return _list_of(map(_row, statuses))

    async def _list(self, request: Request) -> Any:
        """List the requests that have not ended, and the latest that have; or those of a key."""
        key = request.headers.get("idempotency-key")
        rows = _list_of(map(_row, await self._call(self._service.statuses, key)))
        rows |= {"kind": self._service.kind, "takes_image": self._service.takes_image}
        return rows | {"model": self._options.model_name, "num_ranks": self._service.num_ranks}

    async def _get(self, request_id: str) -> Any:
        """Show a request."""
        return _row(await self._call(self._service.status, request_id))

    async def _delete(self, request_id: str) -> Any:
        """Cancel a request, or remove it if it has ended."""
        return _row(await self._call(self._service.delete, request_id))

    async def _cancel(self, request_id: str) -> Any:
        """Cancel a request, unless it has ended."""
        return _row(await self._call(self._service.cancel, request_id))

    async def _content(self, request: Request, request_id: str) -> Any:
        """Send an output: a video, or an image in the format that the query names."""
        query = forms.queried(request, forms.ContentQuery)
        path = await self._result(await self._call(self._service.status, request_id))
        if query.output_format == "png":
            return FileResponse(path)
        if path.suffix == VIDEO:
            raise Refusal(400, "output_format: videos are MP4: leave it out", "output_format")
        media = f"image/{query.output_format}"
        return Response(await self._encode(path, query), media_type=media)

    async def _events(self, request_id: str) -> Any:
        """Send an event at each change of a request until it ends."""
        await self._call(self._service.status, request_id)  # or 404

        async def lines() -> AsyncIterator[str]:
            with suppress(Closing):
                async with aclosing(self._changes(request_id)) as changes:
                    async for status in changes:
                        yield f"data: {json.dumps(_row(status))}\n\n"

        return _Events(lines())

    async def _make_video(self, request: Request) -> Any:
        """Make a video, and answer at once with its id."""
        _, (status,) = await self._submit(request, VideoForm)
        return self._video(status)

    async def _video_now(self, request: Request) -> Any:
        """Make a video, and answer with the MP4."""
        _, (status,) = await self._submit(request, VideoForm)
        (status,) = await self._until_done(request, [status.id])
        path, took_s = await self._result(status), (status.ended_at or 0.0) - status.created_at
        headers = {"X-Request-Id": status.id, "X-Inference-Time-S": f"{took_s:.3f}"}
        return FileResponse(path, headers=headers)

    async def _get_video(self, request_id: str) -> Any:
        """Show a video's state."""
        return self._video(await self._call(self._service.status, request_id))

    async def _list_videos(self, request: Request) -> Any:
        """List videos, the newest first."""
        self._check_kind(VideoForm)
        query = forms.queried(request, forms.ListQuery)
        asked = query.limit + 1, query.after, query.order == "asc"
        statuses = await self._call(self._service.page, *asked)
        rows = list(map(self._video, statuses[: query.limit]))
        first, last = (rows[0]["id"], rows[-1]["id"]) if rows else (None, None)
        ends = {"first_id": first, "last_id": last, "has_more": len(statuses) > query.limit}
        return _list_of(rows) | ends

    async def _delete_video(self, request_id: str) -> Any:
        """Cancel a video, or remove it if it has ended."""
        status = await self._call(self._service.delete, request_id)
        return {"id": status.id, "object": "video.deleted", "deleted": status.has_ended}

    def _video(self, status: Status) -> dict[str, Any]:
        prompt, error, ended = status.prompt, None, status.ended_at
        if status.state in ("failed", "cancelled"):
            message = hide_folders(status.reason) or f"request {status.id} was {status.state}"
            error = {"code": f"request_{status.state}", "message": message}
        frames = prompt.frames and (prompt.frames - 1) / (prompt.fps or self._options.fps)
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
            "size": _size(prompt),
            "prompt": prompt.prompt,
            "error": error,
        }

    # --- the server -------------------------------------------------------------------------------

    async def _models(self) -> Any:
        """Name the model."""
        return _list_of([await self._model(self._options.model_name)])

    async def _model(self, name: str) -> Any:
        """Show the model."""
        forms.check_model(name, self._options)
        model = {"id": self._options.model_name, "object": "model", "owned_by": "bascule"}
        return model | {"created": self._started_at}

    async def _list_loras(self) -> Any:
        return _list_of(map(_lora, await self._call(self._service.loras)))

    async def _load_lora(self, request: Request) -> Any:
        form, _ = await forms.read(request, forms.LoraForm, self._options)
        await asyncio.wrap_future(await self._call(self._service.load_lora, form.name))
        return _lora(form.name)

    async def _remove_lora(self, name: str) -> Any:
        await asyncio.wrap_future(await self._call(self._service.remove_lora, name))
        return _lora(name) | {"deleted": True}

    async def _health(self) -> Any:
        """Say that all is well, or why not."""
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
        """Send metrics for Prometheus."""
        text = await self._call(self._service.metrics)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _page(self) -> Any:
        """Send the page."""
        return HTMLResponse((files("bascule.serve") / "page.html").read_text(encoding="utf-8"))


def _list_of(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": list(rows)}


def _lora(name: str) -> dict[str, Any]:
    return {"id": name, "object": "lora"}


def _row(status: Status) -> dict[str, Any]:
    row: dict[str, Any] = asdict(status) | {"reason": hide_folders(status.reason)}
    settings = {name: value for name, value in row.pop("prompt").items() if value not in (None, ())}
    return {"object": "request", **row, "prompt": settings.pop("prompt"), "settings": settings}


def _size(prompt: Prompt) -> str:
    return f"{prompt.width}x{prompt.height}" if prompt.width and prompt.height else "auto"
