"""Routers before two jobs of one rank: bascule's, and nginx by two of its policies."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from measuring import say
from server import answers, post, serving_command, until

OURS, LEAST, RANDOM = "bascule route", "nginx least_conn", "nginx random"
NGINX = {LEAST: "least_conn", RANDOM: "random"}
SIZES = {"512": (256, 20), "768": (384, 20), "1024": (512, 25), "1536": (768, 35)}
SHARES = 0.15, 0.25, 0.45, 0.15
FIGURES = {"P95": 95, "P99": 99}
_PLACE = """
daemon off; worker_processes 1; pid {folder}/pid; error_log stderr crit;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    upstream jobs {{ zone jobs 64k; {policy}; {servers} }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://jobs;
            proxy_http_version 1.1;
            proxy_set_header Host $http_host;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 3600s;
        }}
    }}
}}
"""


def router(
    *,
    rounds: int = 3,
    requests: int = 120,
    load: float = 0.8,
    steps: float = 0.2,
    poll_s: float = 1.0,
    nginx: str = "nginx",
    quick: bool = False,
) -> dict[str, Any]:
    """Compare latencies behind `bascule route` and behind nginx, by least_conn and at random.

    Ten minutes. Two jobs of `bascule serve --model tiny --ranks 1` share two cores with the router
    and the clients. RANDOM4 has four sizes of pictures at fixed intervals; here, sides are half as
    long, and steps are multiplied by `steps`. First each size is timed alone on each job. In each
    round all routers get the same requests at the same intervals, one router after the other; the
    order turns. All rounds have the same shares of sizes, in another order. A latency counts from
    the moment at which a request is due.
    """
    if quick:
        rounds, requests = 1, 20
    if shutil.which(nginx) is None:
        sys.exit(f"{nginx} is not installed: apt-get install nginx-light, or give --nginx PATH")
    os.environ["OMP_NUM_THREADS"] = "1"  # of each job: they share the cores
    sizes = {name: (side, max(1, round(num * steps))) for name, (side, num) in SIZES.items()}
    runs = list[dict[str, Any]]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = [
            stack.enter_context(serving_command(["--ranks", "1", "--spool", str(folder / name)]))[1]
            for name in "ab"
        ]
        alone_s = {name: _alone(urls, size) for name, size in sizes.items()}
        for url in urls:  # they try batches, and learn their seconds
            _served(url, [*sizes.values()] * 3, 0.0)
        nums = np.diff(np.rint(requests * np.cumsum([0.0, *SHARES])).astype(int))
        mix = np.repeat(list(sizes), nums)
        mean_s = float(np.mean([alone_s[name] for name in mix]))
        interval_s = mean_s / len(urls) / load
        say(f"alone: {', '.join(f'{name} {seconds:.2f} s' for name, seconds in alone_s.items())}")
        say(f"{requests} requests, one each {interval_s:.3f} s")
        for turn in range(rounds):
            kinds = np.random.default_rng(turn).permutation(mix)
            names = [OURS, LEAST, RANDOM]
            for name in names[turn % 3 :] + names[: turn % 3]:
                with _front(name, urls, folder, nginx, poll_s) as url:
                    latency_s = _served(url, [sizes[kind] for kind in kinds], interval_s)
                figures = {key: float(np.percentile(latency_s, at)) for key, at in FIGURES.items()}
                figures["mean"] = float(np.mean(latency_s))
                text = ", ".join(f"{key} {value:.2f} s" for key, value in figures.items())
                say(f"round {turn}, {name}: {text}")
                runs.append({"round": turn, "router": name, "latency_s": latency_s, **figures})
    facts = {"sizes": sizes, "load": load, "alone_s": alone_s, "interval_s": interval_s}
    return facts | {"ratio": _ratios(runs), "runs": runs}


def _ratios(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return our latency over another router's, as median and range of the rounds."""
    ratios = dict[str, dict[str, dict[str, float]]]()
    for other in NGINX:
        ratios[other] = {}
        for key in (*FIGURES, "mean"):
            ours, theirs = ([run[key] for run in runs if run["router"] == r] for r in (OURS, other))
            values = [a / b for a, b in zip(ours, theirs, strict=True)]
            spread = {"median": float(np.median(values)), "least": min(values), "most": max(values)}
            ratios[other][key] = spread
            text = "{median:.3f} ({least:.3f} to {most:.3f})".format_map(spread)
            is_met = spread["median"] <= 1.0 if key in FIGURES else None
            say(f"{key}: {text} of {other}'s", is_met)
    return ratios


def _body(size: tuple[int, int], seed: int) -> dict[str, Any]:
    side, steps = size
    body = {"prompt": "a boat", "size": f"{side}x{side}", "steps": steps, "seed": seed}
    return body | {"response_format": "url"}


def _alone(urls: Sequence[str], size: tuple[int, int]) -> float:
    """Return the seconds of a request alone, the median over jobs that have seen the size."""
    seconds = list[float]()
    for turn in range(3):
        for url in urls:
            begin = time.perf_counter()
            post(f"{url}/v1/images/generations", _body(size, turn))
            seconds += [time.perf_counter() - begin] if turn else []
    return float(np.median(seconds))


def _served(url: str, sizes: Sequence[tuple[int, int]], interval_s: float) -> list[float]:
    """Send requests at fixed intervals; return their latencies."""
    begin = time.monotonic() + 1.0

    def ask(place: int) -> float:
        due = begin + place * interval_s
        time.sleep(max(0.0, due - time.monotonic()))
        post(f"{url}/v1/images/generations", _body(sizes[place], place))
        return time.monotonic() - due

    with ThreadPoolExecutor(len(sizes)) as clients:
        return list(clients.map(ask, range(len(sizes))))


@contextmanager
def _front(
    name: str, urls: Sequence[str], folder: Path, nginx: str, poll_s: float
) -> Iterator[str]:
    """Run a router before the jobs; yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bascule", "route", *urls, "--port", str(port)]
    command += ["--poll-s", str(poll_s)]
    if name in NGINX:
        servers = " ".join(f"server {urlsplit(url).netloc} max_fails=0;" for url in urls)
        facts = {"folder": folder, "policy": NGINX[name], "servers": servers, "port": port}
        (folder / "nginx.conf").write_text(_PLACE.format_map(facts))
        command = [nginx, "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}"))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)
