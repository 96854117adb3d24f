"""A service that computes nothing, behind a door that listens; and calls without any client."""

import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit
from uuid import uuid4

import openai
from PIL import Image

from bascule.errors import ConfigError
from bascule.generate.options import Prompt
from bascule.serve.door import Door
from bascule.serve.options import ServeOptions
from bascule.serve.status import Busy, Closing, Key, Late, Refusal, Reused, Status, Unknown

STEPS = 3


@dataclass(frozen=True)
class Asked:
    """What a call asked for, by an output."""

    prompt: Prompt
    images: list[bytes]
    deadline_s: float | None
    must_meet_deadline: bool


@dataclass
class FakeService:
    """Runs requests in the order of arrival, one a rank, by steps that a test asks for.

    A prompt of "fail" fails after a step, by `fails_with`. An image has one pixel, of the color
    (seed, steps, 7).
    """

    folder: Path
    kind: str = "image"
    num_ranks: int = 2
    takes_image: bool = False
    room: int = 1000
    reason: str = ""
    fails_with: str = "no memory"
    backlog_s: float = 0.0
    on_change: Callable[[Status], None] | None = None
    parent: Any = None  # of the newest request
    asked: dict[str, Asked] = field(default_factory=dict[str, Asked])
    of: dict[str, Status] = field(default_factory=dict[str, Status])
    on_submit: Callable[[], None] = lambda: None
    on_cancel: Callable[[], None] = lambda: None
    lock: Any = field(default_factory=threading.RLock)
    keys: dict[str, tuple[Key, list[str]]] = field(default_factory=dict[str, Any])

    def submit(
        self,
        prompts: Sequence[Prompt],
        images: list[bytes],
        deadline_s: float | None,
        *,
        must_meet_deadline: bool,
        key: Key | None,
        parent: Any,
    ) -> list[Status]:
        with self.lock:
            self.parent = parent
            if key is not None and (found := self.keys.get(key.name)):
                if found[0] != key:
                    raise Reused(key.name)
                return [self.status(request_id) for request_id in found[1]]
            if self.reason:
                raise Closing(self.reason)
            waiting = sum(not one.has_ended for one in self.of.values())
            if waiting + len(prompts) > self.room:
                raise Busy(2.5)
            if must_meet_deadline and (deadline_s or 9) < 1:
                raise Late(4.25)
            facts: dict[str, Any] = {"kind": self.kind, "created_at": time.time()}
            made = list[Status]()
            for prompt in prompts:
                if (prompt.width or 8) % 8:
                    raise ConfigError(f"width is {prompt.width}: give a multiple of 8")
                if any(lora.name == "gone" for lora in prompt.lora):
                    raise ConfigError("lora: 'gone' is not loaded; loaded: 'style'")
                facts |= {"num_steps": prompt.steps or STEPS, "prompt": prompt, "ends_in_s": 1.5}
                made.append(Status(id=uuid4().hex, state="waiting", **facts))
            for status in made:
                self.asked[status.id] = Asked(status.prompt, images, deadline_s, must_meet_deadline)
                self._put(status)
            if key is not None:
                self.keys[key.name] = key, [status.id for status in made]
            self.on_submit()
            return made

    def _put(self, status: Status) -> None:
        self.of[status.id] = status
        if self.on_change is not None:
            self.on_change(status)

    def status(self, request_id: str) -> Status:
        with self.lock:
            if request_id not in self.of:
                raise Unknown(f"there is no request {request_id}")
            return self.of[request_id]

    def statuses(self, key: str | None = None) -> list[Status]:
        with self.lock:
            if key is not None:
                return [self.of[name] for name in self.keys[key][1]] if key in self.keys else []
            every = list(self.of.values())
        ended = [one for one in every if one.has_ended]
        return [one for one in every if not one.has_ended] + ended[::-1][:20]

    def page(self, num: int, after: str | None, oldest_first: bool) -> list[Status]:
        with self.lock:
            every = list(self.of.values())[:: 1 if oldest_first else -1]
            if after is not None:
                every = every[every.index(self.status(after)) + 1 :]
            return every[:num]

    def metrics(self) -> bytes:
        return b"bascule_ranks 2.0\nbascule_backlog_seconds %f\n" % self.backlog_s

    def cancel(self, request_id: str) -> Status:
        with self.lock:
            if not (status := self.status(request_id)).has_ended:
                self._put(replace(status, state="cancelled", ranks=(), ended_at=time.time()))
            self.on_cancel()
            return self.of[request_id]

    def delete(self, request_id: str) -> Status:
        with self.lock:
            if self.status(request_id).has_ended:
                return self.of.pop(request_id)
            return self.cancel(request_id)

    def result(self, request_id: str) -> Path:
        return self.folder / f"{request_id}{'.mp4' if self.kind == 'video' else '.png'}"

    def loras(self) -> list[str]:
        return ["style"]

    def load_lora(self, name: str) -> Future[None]:
        answer = Future[None]()
        if name == "wrong":
            raise Refusal(409, "it is loaded already", "name")
        threading.Timer(0.1, answer.set_result, [None]).start()
        return answer

    def remove_lora(self, name: str) -> Future[None]:
        answer = Future[None]()
        answer.set_exception(ConfigError(f"rank 1: {name} stays"))
        return answer

    def health(self) -> str:
        return self.reason

    def step(self) -> None:
        """Run a step of the first requests that have not ended."""
        with self.lock:
            left = [one for one in self.of.values() if not one.has_ended]
            for rank, status in enumerate(left[: self.num_ranks]):
                running = replace(status, state="running", step=status.step + 1, ranks=(rank,))
                if status.prompt.prompt == "fail":
                    running = replace(status, state="failed", reason=self.fails_with)
                elif running.step == status.num_steps:
                    self._write(status)
                    running = replace(running, state="done", ranks=())
                ended_at = time.time() if running.has_ended else None
                self._put(replace(running, ended_at=ended_at, ends_in_s=1.0))

    def _write(self, status: Status) -> None:
        path, seed = self.result(status.id), status.prompt.seed
        if self.kind == "video":
            path.write_bytes(b"a video of %d" % seed)
        else:
            color = seed % 256, status.num_steps or 0, 7
            Image.new("RGB", (1, 1), color).save(path)


@dataclass
class Open:
    """A door that listens."""

    door: Door
    service: FakeService
    clients: ExitStack  # they end before the door

    def client(self, key: str = "none") -> Any:
        """OpenAI's client."""
        settings: Any = {"api_key": key, "max_retries": 0, "timeout": 60}
        return self.clients.enter_context(openai.OpenAI(base_url=f"{self.url}/v1", **settings))

    @property
    def url(self) -> str:
        return self.door.address

    @property
    def _address(self) -> tuple[str, int]:
        target = urlsplit(self.url)
        return target.hostname or "", target.port or 0

    def connect(self, sent: bytes) -> socket.socket:
        """A connection over which these bytes were sent."""
        connection = socket.create_connection(self._address, timeout=60)
        connection.sendall(sent)
        return connection

    def call(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, body (of JSON: its value) and headers of an answer; bytes go as they are."""
        connection = http.client.HTTPConnection(*self._address, timeout=60)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if body is not None:
            named.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            data, found = answer.read(), {k.lower(): v for k, v in answer.getheaders()}
        finally:
            connection.close()
        is_json = data and found.get("content-type") == "application/json"
        return answer.status, json.loads(data) if is_json else data, found


@contextmanager
def opened_door(folder: Path, options: dict[str, Any] | None = None, **fake: Any) -> Iterator[Open]:
    """A door on a free port, whose service waits for `step`."""
    service = FakeService(folder, **fake)
    settings: dict[str, Any] = {"port": 0, "model": "tiny"} | (options or {})
    door = Door(cast(Any, service), ServeOptions(**settings))
    door.start()
    try:
        with ExitStack() as clients:
            yield Open(door, service, clients)
    finally:
        door.stop()


@contextmanager
def stepping(service: FakeService, every_s: float = 0.002) -> Iterator[None]:
    """Within, the service runs by itself."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(every_s):
            service.step()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def png(width: int = 4, height: int = 3, color: tuple[int, ...] = (9, 8, 7, 6)) -> bytes:
    """A picture with transparency."""
    Image.new("RGBA", (width, height), color).save(made := io.BytesIO(), "PNG")
    return made.getvalue()


def multipart(*fields: tuple[str, str | bytes]) -> tuple[bytes, str]:
    """Body and content type of a form; bytes go as a file."""
    parts = b""
    for name, value in fields:
        is_file = isinstance(value, bytes)
        head = f'Content-Disposition: form-data; name="{name}"'
        head += '; filename="../../x.png"\r\nContent-Type: image/png' if is_file else ""
        data = value if isinstance(value, bytes) else value.encode()
        parts += b"--edge\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n"
    return parts + b"--edge--\r\n", "multipart/form-data; boundary=edge"
