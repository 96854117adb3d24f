"""Checks in front of the HTTP server: keys, and limits of bodies and connections; error answers."""

import asyncio
import hmac
import logging
import re
import resource
import socket
import time
from collections import Counter
from dataclasses import fields
from typing import Any

import uvicorn
from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from bascule.errors import ConfigError
from bascule.generate.options import Prompt
from bascule.serve.options import Address
from bascule.serve.status import Refusal

_HEADERS_S = 20.0  # longest wait for a request's headers
_NEW_S = 1.0  # age up to which a silent connection is not closed for others
_BODY_S = 120.0  # longest wait for a body
_BODIES = 16  # bodies of the largest size that may be in memory at once
_OPEN = "/", "/docs", "/health", "/openapi.json"  # need no key, and hold no data
_LOCAL = {"127.0.0.1", "localhost", "[::1]"}
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_KEY = {"WWW-Authenticate": "Bearer"}
_SOON = {"Retry-After": "1"}
_FOLDERS = re.compile(r"(?<![\w.:/~-])~?/(?:[^\s/:'\"]+/)+")  # the folders of a path in a text
_FIELD = re.compile(rf"({'|'.join(field.name for field in fields(Prompt))})\b")
NO_RETRY = {"x-should-retry": "false"}  # else OpenAI's client would make a request twice

_log = logging.getLogger(__name__)

CLIENT_ERRORS = Refusal, ConfigError, HTTPException, ClientDisconnect
"""Exceptions that a client caused; any other is the server's."""


def answer(request: Request | None, error: Exception) -> JSONResponse:
    """Return an exception as an error answer of OpenAI's API."""
    match error:
        case Refusal():
            refusal = error
        case ConfigError():  # about a setting, it begins with the setting's name
            match = _FIELD.match(str(error))
            param = match and re.sub("width|height", "size", match[1])
            refusal = Refusal(400, hide_folders(str(error)), param)
        case HTTPException():  # of FastAPI: unknown path or method, or a malformed form
            path = f"{request.method} {request.url.path}: " if request else ""
            advice = ": /docs lists what is served" if error.status_code in (404, 405) else ""
            text, headers = f"{path}{error.detail}{advice}", error.headers or {}
            refusal = Refusal(error.status_code, text, headers=headers)
        case ClientDisconnect():
            refusal = Refusal(400, "the client is gone")
        case _:
            text = "the server failed at this call; its log says why"
            refusal = Refusal(500, text, headers=NO_RETRY)
    status, text, headers = refusal.status, refusal.message, refusal.headers
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    if status >= 500:
        text = hide_folders(text)
    if request is not None and getattr(request.state, "is_accepted", False):
        headers = NO_RETRY  # whatever went wrong, the request is in the spool
    body = {"message": text, "type": kind, "param": refusal.param, "code": refusal.code}
    return JSONResponse({"error": body}, status, dict(headers))


def hide_folders(text: str) -> str:
    """Return a text without the folders of its paths, which are of this machine."""
    return _FOLDERS.sub("", text)


async def disconnect(request: Request) -> None:
    """Wait until the client of a call, whose body was read, has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Guard:
    """ASGI app that refuses calls without the key, from pages of other sites, or beyond limits.

    With `keeps`, the app keeps a body as long as the call takes.
    """

    def __init__(
        self, app: ASGIApp, options: Address, most_open: int, *, keeps: bool = False
    ) -> None:
        self._app, self._key, self._names = app, options.api_key(), _LOCAL | {options.host}
        self._keeps = keeps
        self._max_body_bytes, self._body_bytes = options.max_body_bytes, 0  # of a body; of all
        self._most_open, self._num_open = most_open, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a call, or count the call and its body and pass it on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, size, is_read = dict(scope["headers"]), 0, False
        deadline = time.monotonic() + _BODY_S

        async def receive_counted() -> Message:
            nonlocal size, is_read
            if is_read:  # the app waits for the client to disconnect
                if not self._keeps:
                    self._body_bytes, size = self._body_bytes - size, 0
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline - time.monotonic())
            except TimeoutError:
                raise Refusal(408, f"the body did not arrive within {_BODY_S:.0f} s") from None
            size += (num_bytes := len(message.get("body", b"")))
            self._body_bytes += num_bytes
            self._check_size(size)
            is_read = not message.get("more_body", False)
            return message

        try:
            self._check_caller(scope["path"], headers)
            declared = headers.get(b"content-length", b"0")
            self._check_size(int(declared) if declared.isdigit() else 0)
            if self._num_open >= self._most_open and scope["path"] not in _OPEN:
                message = f"{self._num_open:,} calls are open, this server's limit: try again"
                raise Refusal(503, message, headers=_SOON)
            query = scope["query_string"].decode("latin-1")
            if scope["method"] == "POST" and query:
                raise Refusal(400, f"?{query[:80]}: no query is read: send settings in the body")
        except Refusal as refusal:
            return await answer(None, refusal)(scope, receive, send)
        self._num_open += 1
        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._num_open -= 1
            self._body_bytes -= size

    def _check_size(self, size: int) -> None:
        if size > (most := self._max_body_bytes):
            raise Refusal(413, f"the body is larger than {most:,} bytes, the limit: send less")
        if self._body_bytes > _BODIES * most:
            raise Refusal(429, "too many large bodies are on their way: try again", headers=_SOON)

    def _check_caller(self, path: str, headers: dict[bytes, bytes]) -> None:
        if path in _OPEN:
            return
        if self._key is not None:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            is_right = hmac.compare_digest(key.strip(), self._key)
            if not (is_right and scheme.lower() == b"bearer"):
                message = "the key is missing or wrong: send the header Authorization: Bearer KEY"
                raise Refusal(401, message, code="invalid_api_key", headers=_KEY)
            return
        # Without a key, pages of other sites in a browser on this machine could send calls.
        host = headers.get(b"host", b"").decode("latin-1").lower()
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if re.sub(r":\d+$", "", host) not in self._names:
            raise Refusal(403, f"Host {host!r} needs a server with --api-key-file")
        if origin and origin.partition("://")[2] != host:
            raise Refusal(403, f"Origin {origin!r} needs a server with --api-key-file")


class Connection(H11Protocol):
    """HTTP connection that the server closes to make room, or if no whole request comes in time.

    If there are too many connections, the client address with the most loses its oldest.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most_open = self.limit_concurrency or 0
        self.limit_concurrency = None  # else uvicorn refuses the newest, in plain text
        self.opened_s, self.host = self.loop.time(), ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore
        """Watch a new connection, and close others if there are too many."""
        super().connection_made(transport)
        self.host = self.client[0] if self.client else ""
        self.loop.call_later(_HEADERS_S, self._close_if_silent, None)
        if (excess := len(self.connections) - self._most_open) > 0:
            others = [
                other  # whose request, or the rest of its body, the server waits for
                for other in self.connections
                if isinstance(other, Connection) and other is not self
                if (cycle := other.cycle) is None or cycle.response_complete or cycle.more_body
            ]
            nums, now_s = Counter(other.host for other in others), self.loop.time()
            others.sort(key=lambda other: (-nums[other.host], other.opened_s))
            for other in others[:excess]:
                if now_s - other.opened_s > _NEW_S or len(self.connections) > 2 * self._most_open:
                    self.connections.discard(other)
                    other.transport.close()

    def _close_if_silent(self, before: Any) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is before:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(_HEADERS_S, self._close_if_silent, self.cycle)


def guarded(
    app: ASGIApp, options: Address, most_open: int, grace_s: int, *, keeps: bool = False
) -> tuple[uvicorn.Server, socket.socket, str]:
    """Return a server of an app behind a `Guard`, its socket, which listens, and its URL.

    It keeps `most_open` connections, or fewer if this process may not open three files for each.
    Open answers get `grace_s` at the end. ConfigError if the address is not free.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = max(soft, 3 * most_open)  # a connection is a file
    if hard != resource.RLIM_INFINITY:
        num_files = min(num_files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    most_open = min(most_open, num_files // 3)
    path = options.api_key_file
    if path is not None and path.stat().st_mode & 0o077:  # not refused: container mounts are so
        _log.warning("other users of this machine can read %s: chmod 600 %s", path, path)
    listener = options.listen()
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        Guard(app, options, most_open, keeps=keeps),
        http=Connection,
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        headers=[("X-Content-Type-Options", "nosniff")],
        limit_concurrency=most_open,
        timeout_graceful_shutdown=grace_s,
    )
    for name in ("uvicorn.error", "python_multipart.multipart", "opentelemetry.trace"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn of clients' mistakes
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    return uvicorn.Server(config), listener, address
