"""Options of `bascule serve` and `bascule route`. Imports no torch."""

import ipaddress
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from bascule.errors import ConfigError
from bascule.files import read_lines
from bascule.generate.options import EngineOptions, adapter_file
from bascule.options import (
    LONGEST_S,
    POSITIONAL,
    REPEATED,
    Group,
    NewFolder,
    Outputs,
    Range,
    refuse,
)
from bascule.plan.requests import SERVED, Policy, Request, policy_of

_SHORTEST_KEY = 16


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where an HTTP server listens, and what its clients send.

    Attributes:
        host: Address to listen at. If other machines can reach it, --api-key-file is required.
        port: Port to listen at; 0 for a free one, which changes at each start.
        api_key_file: File with the key that clients send as "Authorization: Bearer KEY".
        max_body_bytes: Most bytes of the body of a call.
    """

    host: Annotated[str, Group("Address")] = "127.0.0.1"
    port: Annotated[int, Range(0, 2**16 - 1)] = 8000
    api_key_file: Path | None = None
    max_body_bytes: Annotated[int, Range(10**3, 2**30)] = 2**25

    def api_key(self) -> bytes | None:
        """Return the key that clients must send; ConfigError if it is needed but not given."""
        if self.api_key_file is None:
            is_local = self.host == "localhost"
            with suppress(ValueError):  # of a name
                is_local = is_local or ipaddress.ip_address(self.host).is_loopback
            if not is_local:
                fix = "give --api-key-file, a file with a key on one line, or --host 127.0.0.1"
                raise ConfigError(f"--host {self.host}: others can reach this address: {fix}")
            return None
        lines = [line.strip() for line in read_lines(self.api_key_file) if line.strip()]
        if len(lines) != 1 or len(lines[0]) < _SHORTEST_KEY or not lines[0].isascii():
            needed = f"one line of {_SHORTEST_KEY} ASCII characters or more: openssl rand -hex 32"
            raise ConfigError(f"--api-key-file {self.api_key_file}: give {needed}")
        return lines[0].encode()

    def listen(self) -> socket.socket:
        """Return a socket that listens at the address; ConfigError if that cannot be."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listener = socket.create_server((self.host, self.port), family=family, backlog=2048)
        except OSError as error:
            what = f"--host {self.host} --port {self.port}: cannot listen there: "
            reason = str(error.strerror or error).partition(" (while")[0]  # not the address again
            what += f"{reason}; give another --port, or 0 for one that is free"
            raise ConfigError(what) from None
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # clients without power
        return listener


@dataclass(frozen=True, kw_only=True)
class RouteOptions(Address):
    """Send calls of clients to one of several jobs of bascule serve, which serve one model.

    A new request goes to the job that is predicted to be free first; a later call goes to the job
    that has the request.

    Attributes:
        urls: Addresses of the jobs: http://node1:8000 http://node2:8000.
        poll_s: Longest time between two polls of a job's backlog, in seconds. A job that got a
            request is polled just after.
        answer_s: Longest wait for a job's answer, in seconds; images may wait in its queue.
    """

    urls: Annotated[tuple[str, ...], POSITIONAL, Group("Jobs")] = ()
    poll_s: Annotated[float, Range(0.1, 60.0)] = 1.0
    answer_s: Annotated[float, Range(1.0, LONGEST_S)] = 3600.0
    port: Annotated[int, Range(0, 2**16 - 1)] = 9000

    def check(self) -> None:
        """Refuse jobs that no call could reach."""
        if not self.urls:
            raise ConfigError("no job: give its URL, http://HOST:PORT")
        for place, url in enumerate(self.urls):
            try:
                is_job = re.fullmatch(r"https?://[^\s/?#@]+/?", url) and urlsplit(url).port != 0
            except ValueError:  # of a port
                is_job = False
            if not is_job:
                raise ConfigError(f"{url}: not the URL of a job: give http://HOST:PORT alone")
            if url.rstrip("/") in (other.rstrip("/") for other in self.urls[:place]):
                raise ConfigError(f"{url}: given twice: give each job once")
        self.api_key()
        check_installed("httpx2", "fastapi", "prometheus_client", "uvicorn")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Address, Outputs, EngineOptions):
    """Serve a pipeline of diffusers over HTTP, by OpenAI's API, on all local ranks.

    The spool stores requests and results: after a stop, the same command resumes.

    Attributes:
        spool: Folder of requests and results; one server at a time.
        keep_days: Days after which ended requests are removed, with their outputs. Default: never.
        keep_gb: GB of outputs to keep, the latest ones. Default: all.
        save_every: Denoising steps between two savings of a running request, from which it goes on
            after a crash; 0 for none.
        max_restarts: How often all ranks start again because one died.
        most_waiting: Most requests that may wait; the server refuses more.
        max_pixels: Most pixels of an output's frame, and of a picture that a client sends.
        max_frames: Most frames of a video.
        max_steps: Most denoising steps.
        max_prompt_chars: Most characters of a prompt.
        max_images: Most images of a call.
        degrees: Numbers of ranks that may share a request: 1, 2, 4, ..; by default all.
        batch: Most requests of one size that ranks compute together, where that saves time; 1: off.
        policy: Rule that decides which request runs next, on how many ranks: balanced, quick,
            greedy, fifo, sjf, srtf, or sjf:4 for four ranks per request. --advise compares them.
        lora: LoRA to load, as NAME=PATH of a .safetensors or its folder. Give the option once per
            LoRA; requests choose by name.
        lora_folder: Folder of LoRAs that clients may load, by POST /v1/loras.
        advise: Print the options that are predicted to serve --mix or --arrivals best on --ranks,
            and exit. --model is a name then: flux.1, wan2.1, ltx2, ..
        mix: Sizes, steps and shares of requests, as simulate-requests reads them: 1024x1024@25=0.6.
        arrivals: File of requests, as simulate-requests reads it.
        rate: Requests per second of --mix, by default 80 % of what all ranks can do; or the
            speed-up of --arrivals.
        passes: Forward passes of a step: 2 with guidance.
        deadline: Deadline of --mix, as a multiple of a request's time on one GPU. Default: none.
        profile: Hardware profile: the name of one, or its file.
    """

    spool: Annotated[Path, NewFolder(), Group("Spool")] = Path("results/serve")
    keep_days: Annotated[float | None, Range(0.01, 1e5)] = None
    keep_gb: Annotated[float | None, Range(0.001, 1e6)] = None
    save_every: Annotated[int, Range(0, 10**4)] = 10
    max_restarts: Annotated[int, Range(0, 10**4)] = 10
    most_waiting: Annotated[int, Range(1, 10**5)] = 1000
    max_pixels: Annotated[int, Range(1, 2**30), Group("Limits of a request")] = 2**22
    max_frames: Annotated[int, Range(1, 10**4)] = 257
    max_steps: Annotated[int, Range(1, 10**4)] = 200
    max_prompt_chars: Annotated[int, Range(1, 10**6)] = 10**4
    max_images: Annotated[int, Range(1, 1000)] = 8
    degrees: Annotated[tuple[int, ...], Group("Ranks")] = ()
    batch: Annotated[int, Range(1, 64)] = 8
    policy: str = SERVED
    lora: Annotated[tuple[str, ...], REPEATED, Group("Pipeline")] = ()
    lora_folder: Path | None = None
    advise: Annotated[bool, Group("Advice")] = False
    mix: tuple[str, ...] = ()
    arrivals: Path | None = None
    rate: Annotated[float | None, Range(1e-6, 1e6)] = None
    passes: Annotated[int, Range(1, 16)] = 1
    deadline: Annotated[float | None, Range(1e-3, 1e6)] = None
    profile: str = "h100-datasheet"

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        return Path(self.model).resolve().name.encode(errors="backslashreplace").decode()

    def outputs_of(self, dtype: str) -> str:
        """Name what pixels of requests depend on: the weights, and options that change pixels."""
        changing = {name: getattr(self, name) for name in ("sparse", "wire", "cache", "tiles")}
        words = [f"{name} {value}" for name, value in changing.items() if value]
        return ", ".join(filter(None, (self.model_name, self.variant, dtype, *words)))

    @property
    def loras(self) -> dict[str, Path]:
        """Paths of the adapters to load, by name; ConfigError if one is malformed or not there."""
        loras = dict[str, Path]()
        for text in self.lora:
            name, _, path = text.partition("=")
            if not name or not path or name in loras:
                raise ConfigError(f"--lora {text}: give NAME=PATH, and each name once")
            loras[name] = adapter_file(Path(path))
        return loras

    def make_policy(self, degrees: Sequence[int]) -> Policy:
        """Return a new policy for allowed degrees; ConfigError if its name or degree is wrong."""
        request = Request(step_s=dict.fromkeys(degrees, 1.0), steps=1)
        return policy_of(self.policy, [request], max(degrees))

    def check(self) -> None:
        """Refuse settings that no rank could serve."""
        of_advice = "mix", "arrivals", "rate", "passes", "deadline", "profile", "json", "report"
        refuse(self, of_advice, "only --advise reads it: leave it out")
        self.check_engine()
        self.api_key()
        if self.lora_folder is not None and not self.lora_folder.is_dir():
            raise ConfigError(f"--lora-folder {self.lora_folder}: is no folder: make it")
        if (self.loras or self.lora_folder) and find_spec("peft") is None:
            raise ConfigError("--lora: peft is not installed: pip install 'bascule[lora]'")
        for degree in self.degrees:
            if degree < 1 or degree & (degree - 1):
                raise ConfigError(f"--degrees {degree}: give powers of two: 1, 2, 4, ..")
        self.make_policy(self.degrees or [1 << k for k in range(15)])
        modules = "fastapi", "opentelemetry", "prometheus_client", "python_multipart", "uvicorn"
        check_installed(*modules)


def check_installed(*modules: str) -> None:
    """Refuse to serve without these modules."""
    for name in modules:
        if find_spec(name) is None:
            raise ConfigError(f"{name} is not installed: pip install 'bascule[serve]'")
