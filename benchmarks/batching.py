"""Equal requests of a server on one rank: in one batch, and one after the other."""

import threading
import time
from typing import Any

import numpy as np
import torch
from measuring import on_ranks, say, time_interleaved

from bascule.generate.generating import load_pipeline
from bascule.generate.tiny import TINY
from bascule.plan.requests import Block
from bascule.serve.engine import Engine
from bascule.serve.orders import Orders

LEAST_GAIN = 1.3
_TEXT_TOKENS = 32


def batching(
    *, requests: int = 8, side: int = 64, steps: int = 20, rounds: int = 9, quick: bool = False
) -> dict[str, Any]:
    """Compare equal requests in one batch with the same requests one after the other.

    A minute. A tiny Flux makes images of `side` pixels a side for 32 tokens of text, on one rank
    and one thread. Its operators take longer to begin than to compute, as those of small images do
    on a GPU. In each round the requests are sent to the engine both ways, with encoding and
    decoding. Compared is the time from the first order to the last output.
    """
    if quick:
        rounds, steps = 2, 4
    seconds = on_ranks(_on_rank, requests, side, steps, rounds, num_ranks=1)
    gains = np.divide(seconds["in turn"], seconds["batch"])
    figures = {"median": np.median, "least": np.min, "most": np.max}
    gain = {name: float(figure(gains)) for name, figure in figures.items()}
    text = f"{gain['median']:.2f} ({gain['least']:.2f} to {gain['most']:.2f})"
    what = f"{requests} requests of {side} x {side} pixels, {steps} steps"
    say(f"{what}: one after the other takes {text} of a batch", gain["median"] >= LEAST_GAIN)
    return {"requests": requests, "side": side, "steps": steps, "gain": gain, "seconds": seconds}


def _on_rank(num: int, side: int, steps: int, rounds: int) -> dict[str, list[float]]:
    engine = Engine(load_pipeline(TINY, torch.float32, torch.device("cpu")))
    orders, seconds = engine.orders, dict[str, list[float]]()
    assert orders is not None
    arguments = {"prompt": "a boat", "width": side, "height": side, "num_inference_steps": steps}
    arguments["max_sequence_length"] = _TEXT_TOKENS

    def use() -> None:
        ways = {"in turn": [1] * num, "batch": [num]}
        calls = {
            name: lambda sizes=sizes: _serve(orders, arguments, sizes)
            for name, sizes in ways.items()
        }
        seconds.update(time_interleaved(calls, rounds=rounds))
        orders.stop()

    thread = threading.Thread(target=use)
    thread.start()
    engine.run()
    thread.join()
    return seconds


def _serve(orders: Orders, arguments: dict[str, Any], sizes: list[int]) -> None:
    """Let batches of these sizes run one after the other."""
    for size in sizes:
        name, left = f"batch at {time.monotonic_ns()}", size
        members = [(str(k), orders.keep(str(k), arguments, k)) for k in range(size)]
        orders.run(name, Block(0, 1), members)
        while left:
            event = orders.events.get(timeout=60)
            if event.kind in ("failed", "ended"):
                raise RuntimeError(event.reason)
            left -= event.kind == "done"
