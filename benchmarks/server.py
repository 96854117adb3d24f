"""Serve bursts of requests on two ranks by two policies, beside the simulator."""

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import met, on_ranks, ratio
from published import Dispatch

from bascule.generate.generating import load_pipeline
from bascule.generate.options import Prompt
from bascule.generate.tiny import TINY
from bascule.plan.requests import Balanced, Policy, Request
from bascule.serve.engine import Engine
from bascule.serve.service import Service
from bascule.serve.spool import Spool
from bascule.serve.status import Status
from bascule.serve.times import Times
from bascule.sim.requests import serve

NUM_RANKS, STEPS = 2, 12
SIDES = 192, 384, 576  # 1 : 4 : 9 pixels
SHARES = 0.5, 0.35, 0.15
POLICIES: dict[str, Callable[[], Policy]] = {
    "least in flight": lambda: Dispatch("least in flight"),
    "balanced": Balanced,
}
MOST_APART, LOAD = 0.15, 0.8
FIGURES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda x: float(np.mean(x)),
    "P50": lambda x: float(np.percentile(x, 50)),
    "P95": lambda x: float(np.percentile(x, 95)),
}


def server(*, rounds: int = 5, requests: int = 40, quick: bool = False) -> dict[str, Any]:
    """Compare latencies of a policy with least in flight, and with the simulator.

    Ten minutes. A tiny Flux on two ranks of one thread serves images of 192, 384 and 576 pixels a
    side, 12 steps, in bursts of one to eight at about 0.8 of what the ranks can do. In each round
    both policies get the same requests at the same moments, one after the other. The simulator gets
    the seconds of steps that the server itself has measured by then, and the moments of arrival.
    """
    if quick:
        rounds, requests = 2, 10
    with tempfile.TemporaryDirectory() as folder:
        result = on_ranks(_on_rank, folder, rounds, requests, num_ranks=NUM_RANKS)
    for name in POLICIES:
        for what, apart in result["measured_by_simulated"][name].items():
            word = met(abs(apart["median"] - 1) <= MOST_APART)
            print(f"{word}  {name}, {what}: measured {apart['median']:.2f}x of the simulator's")
    for what, gain in result["gain"].items():
        print(f"        {what}: least in flight takes {gain['median']:.2f}x of balanced")
    return result


def _on_rank(folder: str, rounds: int, num: int) -> dict[str, Any] | None:
    pipeline = load_pipeline(TINY, torch.float32, torch.device("cpu"))
    times = Times(pipeline, [1, 2])
    runs: list[dict[str, Any]] = []
    for turn in range(-1, rounds):  # the first one warms up, and measures the seconds of steps
        for name in POLICIES:
            one = _run(pipeline, Path(folder) / f"{turn} {name}", name, times, 100 + turn, num)
            if one is not None and turn >= 0:
                runs.append({"round": turn, "policy": name, **one})
    return _compared(runs) if runs else None


def _run(
    pipeline: Any, folder: Path, policy: str, times: Times, seed: int, num: int
) -> dict[str, Any] | None:
    """Serve the requests of a seed; return measured and simulated latencies."""
    engine = Engine(pipeline)
    if engine.orders is None:
        engine.run()
        return None
    spool, statuses = Spool(folder, TINY), list[Status]()
    service = Service(pipeline, engine.orders, spool, policy=POLICIES[policy](), times=times)
    service.start()

    def use() -> None:
        try:
            statuses.extend(_client(service, times, np.random.default_rng(seed), num))
        finally:
            service.stop()

    thread = threading.Thread(target=use)
    thread.start()
    engine.run()
    thread.join()
    service.close()
    begin = statuses[0].created_at
    requests = [_request(times, one.prompt, one.created_at - begin) for one in statuses]
    return {
        "side": [one.prompt.width for one in statuses],
        "arrival_s": [one.arrival_s for one in requests],
        "measured_s": [(one.ended_at or 0) - one.created_at for one in statuses],
        "simulated_s": serve(requests, POLICIES[policy](), NUM_RANKS).latency_s.tolist(),
        "costs": {one.prompt.width: asdict(r) for one, r in zip(statuses, requests, strict=True)},
    }


def _client(service: Service, times: Times, random: np.random.Generator, num: int) -> list[Status]:
    """Submit in bursts; return what ended."""
    prompts = [Prompt(prompt="a boat", width=x, height=x, steps=STEPS) for x in SIDES]
    works = [_request(times, one, 0.0).work_s for one in prompts]
    usual_s = float(np.dot(works, SHARES)) / NUM_RANKS / LOAD  # from one request to the next
    due, ids = time.monotonic(), list[str]()
    while len(ids) < num:
        many = random.choice(
            len(SIDES), size=min(int(random.integers(1, 9)), num - len(ids)), p=SHARES
        )
        made = service.submit([prompts[k] for k in many])
        ids += [one.id for one in made]
        due += random.exponential() * len(made) * usual_s
        time.sleep(max(0.0, due - time.monotonic()))
    while not all(service.status(one).has_ended for one in ids):
        time.sleep(0.05)
    return [service.status(one) for one in ids]


def _request(times: Times, prompt: Prompt, arrival_s: float) -> Request:
    size = times.request_size(prompt, {})
    step_s, once_s = times.step_s(size), times.once_s(size)
    return Request(step_s=step_s, steps=STEPS, arrival_s=arrival_s, once_s=once_s)


def _compared(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def seconds(policy: str, what: str, of: str) -> list[float]:
        return [FIGURES[what](one[of]) for one in runs if one["policy"] == policy]

    apart = {
        name: {
            what: ratio(seconds(name, what, "measured_s"), seconds(name, what, "simulated_s"))
            for what in FIGURES
        }
        for name in POLICIES
    }
    counted, ours = POLICIES
    gain = {
        what: ratio(seconds(counted, what, "measured_s"), seconds(ours, what, "measured_s"))
        for what in FIGURES
    }
    return {
        "num_ranks": NUM_RANKS,
        "measured_by_simulated": apart,
        "gain": gain,
        "runs": list(runs),
    }
