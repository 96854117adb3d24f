"""Run `bascule serve` on Ray Serve: `serve run bascule.plugins.ray_serve:app command="..."`."""

# pyright: reportMissingImports=false

import asyncio
import itertools
import os
import re
import shlex
import socket
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx2
import ray
from pydantic import BaseModel
from ray import serve
from ray.exceptions import ActorAlreadyExistsError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from starlette.requests import Request
from starlette.responses import Response

from bascule.cli import parse
from bascule.errors import CommError, ConfigError
from bascule.options import check_options
from bascule.serve.guard import answer
from bascule.serve.options import ServeOptions
from bascule.serve.route import backlog_s_of, passed, relayed
from bascule.serve.status import Closing

_WITH_ID = re.compile(r"/v1/(requests|videos)/(?!sync$)")


class Settings(BaseModel, extra="forbid"):
    """Settings of `app`: options of `bascule serve`, and what Ray asks for."""

    command: str  # with --ranks; in --spool, each replica has a folder of its own
    gpus: float = 1.0  # of a rank
    backlog_s: float = 60.0  # predicted seconds of accepted work for each replica
    scaling: dict[str, Any] = {}  # of Ray's AutoscalingConfig: max_replicas, ..


def app(settings: Settings) -> serve.Application:
    """Return the application; ConfigError for options that `bascule serve` refuses."""
    options: ServeOptions = parse(["serve", *shlex.split(settings.command)])[1]
    check_options(options)
    options.check()
    if options.ranks is None:
        raise ConfigError("--ranks is missing: give the number of ranks of a replica")
    policy = AutoscalingPolicy(policy_function=replicas_by_backlog)
    bundle = {"CPU": 1.0} | ({"GPU": settings.gpus} if settings.gpus else {})
    deployment = serve.deployment(
        name="bascule",
        ray_actor_options={"num_cpus": 0},  # beside rank 0
        placement_group_bundles=[bundle] * options.ranks,
        max_ongoing_requests=2 * options.most_waiting + 1000,  # they wait in `bascule serve`
        autoscaling_config=AutoscalingConfig(**settings.scaling, policy=policy),
        health_check_period_s=2.0,
        graceful_shutdown_timeout_s=600.0,  # for accepted work
    )
    return deployment(Replica).bind(replace(options, spool=options.spool.resolve()), settings)


def replicas_by_backlog(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return how many replicas the accepted work needs; a policy of Ray Serve."""
    return sum((context.aggregated_metrics or {}).get("replicas", {}).values()), {}


class Rank:
    """Ray actor that runs one rank."""

    def run(self, options: ServeOptions, job: dict[str, str]) -> None:
        """Serve as a rank of a job; errors as `run_server`."""
        # Here, because it loads torch: Ray's controller imports this file.
        from bascule.cli.launch import joined
        from bascule.serve.serving import run_server

        os.environ |= job
        with joined(options.timeout_s) as device:
            run_server(options, device, lambda: False)


class Replica:
    """Replica of Ray Serve: a placement group, whose actors are the ranks of one `bascule serve`.

    It runs on the node of rank 0, and forwards calls to rank 0. Accepted requests are in the first
    folder of the spool that no other replica uses.
    """

    def __init__(self, options: ServeOptions, settings: Settings) -> None:
        self._root, self._backlog_s, self._misses = options.spool, settings.backlog_s, 0
        key = options.api_key()
        self._key = {"Authorization": f"Bearer {key.decode()}"} if key else None
        limits = httpx2.Limits(max_keepalive_connections=0)
        more: Any = {"trust_env": False, "headers": {"Accept-Encoding": "identity"}}
        self._client = httpx2.AsyncClient(limits=limits, timeout=None, **more)
        node, num_ranks = ray.util.get_node_ip_address(), options.ranks or 0
        with socket.create_server(("", 0)) as first, socket.create_server(("", 0)) as second:
            meeting, port = first.getsockname()[1], second.getsockname()[1]
        # Ray shows each actor its own GPUs alone.
        job = {"MASTER_ADDR": node, "MASTER_PORT": str(meeting), "LOCAL_RANK": "0"}
        job |= {"WORLD_SIZE": str(num_ranks)}
        group = ray.util.get_current_placement_group()
        actor_class: Any = ray.remote(Rank)
        for number in itertools.count():
            options = replace(options, port=port, spool=self._root / str(number))
            with suppress(ActorAlreadyExistsError):  # another replica uses it
                self._ranks = [
                    actor_class.options(
                        name=f"{options.spool} rank {rank}",
                        namespace="bascule",
                        num_gpus=settings.gpus,
                        scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
                    ).remote()
                    for rank in range(num_ranks)
                ]
                break
        self._ends = [
            actor.run.remote(options, job | {"RANK": str(rank)})
            for rank, actor in enumerate(self._ranks)
        ]
        self._url = f"http://{node if options.host == '0.0.0.0' else options.host}:{port}"
        is_open = False
        while not is_open:
            ray.get(ray.wait(self._ends, timeout=0.5)[0])  # the error of a rank that has ended
            with suppress(httpx2.TransportError):
                is_open = httpx2.get(f"{self._url}/health", trust_env=False).is_success
        (options.spool / "address").write_text(self._url, encoding="utf-8")

    async def check_health(self) -> None:
        """Raise CommError if a rank or the server is gone; the next replica gets the folder."""
        ended = ray.wait(self._ends, timeout=0)[0]
        try:
            ray.get(ended)
            (await self._client.get(f"{self._url}/health")).raise_for_status()
            self._misses = 0
        except Exception as error:
            self._misses += 1
            if ended or self._misses > 1:  # after the third, Ray starts another replica
                for rank in self._ranks:
                    ray.kill(rank)
                ray.wait(self._ends, num_returns=len(self._ends), timeout=10.0)
            # Ray would take its own error for the end of this actor, and not wait.
            raise CommError(f"the ranks of this replica do not serve: {error}") from None

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how many replicas the work that was accepted here needs."""
        metrics = await self._client.get(f"{self._url}/metrics", headers=self._key)
        return {"replicas": backlog_s_of(metrics.text) / self._backlog_s}

    async def __del__(self) -> None:
        """Wait until the accepted work is done, before Ray stops this replica."""
        with suppress(httpx2.HTTPError):
            while (await self.record_autoscaling_stats())["replicas"] > 0:
                await asyncio.sleep(0.5)

    async def __call__(self, request: Request) -> Response:
        """Forward a call to rank 0; if it does not know the call's id, ask the other replicas."""
        headers, urls, content = request.headers, [self._url], None
        if _WITH_ID.match(request.url.path):
            others = {path.read_text() for path in self._root.glob("*/address")} - {self._url}
            urls += [*others, self._url] if others else []  # its own 404, if all say so
            content = await request.body()
        elif "content-length" in headers or "transfer-encoding" in headers:
            content = request.stream()
        path = str(request.url.replace(scheme="", netloc=""))
        for number, url in enumerate(urls, 1):
            how: Any = {"headers": passed(headers.raw), "content": content}
            call = self._client.build_request(request.method, f"{url}{path}", **how)
            with suppress(httpx2.TransportError):  # the ranks at this address have ended
                response = await self._client.send(call, stream=True)
                if response.status_code == 404 and number < len(urls):
                    await response.aclose()
                    continue
                answered = relayed(response)
                answered.headers["X-Content-Type-Options"] = "nosniff"  # as the ranks' server says
                return answered
        return answer(None, Closing("ranks of this server have ended: they start again"))
