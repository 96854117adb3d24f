"""Requests on blocks of ranks: the same outputs as of one process, wherever their steps run."""

import importlib
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from bascule.errors import ConfigError
from bascule.generate import tiny
from bascule.serve import Block, Controller, Engine, Event
from tests.helpers.ranks import run_ranks

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

RANKS = 4
STEPS = 8
Script = dict[Any, tuple[Any, ...]]  # by the step after which a request gets an order
Request = tuple[str, Block, Script]  # name of its arguments

IMAGE = {"prompt": "a boat", "height": 64, "width": 96, "num_inference_steps": STEPS}
VIDEO = {**IMAGE, "height": 32, "width": 48, "num_frames": 5}
ARGUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "flux": {
        "image": {**IMAGE, "output_type": "latent"},
        "large": {**IMAGE, "height": 128, "width": 128, "num_inference_steps": 4},
        "guided": {**IMAGE, "negative_prompt": "fog", "true_cfg_scale": 3.0, "output_type": "np"},
        "wrong": {**IMAGE, "nothing": 1},
        "wrong later": {**IMAGE, "output_type": "none"},
    },
    "wan": {  # two branches
        "video": {**VIDEO, "output_type": "latent"},
        "frames": {**VIDEO, "num_inference_steps": 3, "output_type": "pil"},
    },
}
SCHEDULERS = {"unipc": "UniPCMultistepScheduler", "dpm": "DPMSolverMultistepScheduler"}


def made(name: str, scheduler: str | None) -> Any:
    diffusers, transformers = map(importlib.import_module, ("diffusers", "transformers"))
    kind = {"flux": tiny.TINY, "wan": tiny.TINY_WAN}[name]
    pipeline = tiny.load("test", lambda: tiny.pipeline(diffusers, transformers, kind))
    if scheduler is not None:
        flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
        cls = getattr(diffusers, SCHEDULERS[scheduler])
        pipeline.scheduler = cls.from_config(pipeline.scheduler.config, **flow)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def values_of(output: Any) -> Tensor:
    """Numbers of an output of any kind; pixels between 0 and 1."""
    if isinstance(output, list):
        return torch.stack([values_of(one) for one in output])
    if isinstance(output, Tensor | np.ndarray):
        return torch.as_tensor(output)
    return torch.as_tensor(np.array(output)) / 255


def seed_of(request_id: str) -> int:
    return sum(map(ord, request_id))


class Gates:
    """Let a request begin a step only when the test has seen the step before, and its order come.

    So orders are followed at the steps that a script says, however slow the machine is.
    """

    def __init__(self) -> None:
        job: Any = c10d._get_default_store()
        self._store = job.clone()

    def open(self, request_id: str, step: int, has_order: bool) -> None:
        self._store.set(f"{request_id} {step}", str(has_order))

    def stand_before(self, engine: Engine, scheduler: Any) -> None:
        step = scheduler.step

        def gated(*args: Any, **kwargs: Any) -> Any:
            run = engine._run
            if run is not None:
                has_order = self._store.get(f"{run.id} {run.num_done}") == b"True"
                goes_on = run.num_done >= run.first_step
                if has_order and goes_on and run.block.first == engine._rank:
                    while engine._post.inbox.empty():
                        threading.Event().wait(0.001)
            return step(*args, **kwargs)

        scheduler.step = gated


def play(
    controller: Controller, gates: Gates, of: dict[str, Any], requests: dict[str, Request]
) -> dict[str, list[Event]]:
    """Start requests, give the orders of their scripts, and return all events."""
    events: dict[str, list[Event]] = {request_id: [] for request_id in requests}
    for request_id, (name, block, _) in requests.items():
        controller.start(request_id, of[name], seed_of(request_id), block)
    left = set(requests)
    while left:
        event = controller.events.get(timeout=60)
        assert event.kind != "ended", event.reason
        events[event.request_id].append(event)
        script = requests[event.request_id][2]
        order = script.get(event.step if event.kind == "step" else event.kind)
        if order is not None:
            getattr(controller, order[0])(event.request_id, *order[1:])
        if event.kind == "step":
            gates.open(event.request_id, event.step, order is not None)
        elif event.kind in ("done", "failed", "cancelled"):
            left.remove(event.request_id)
    assert controller.free_ranks == list(range(controller.num_ranks))
    return events


def serving(
    name: str, scheduler: str | None, scenes: list[dict[str, Request]]
) -> dict[str, tuple[list[Event], float]] | None:
    """Events of all requests, and how far their outputs are from those of one process."""
    torch.set_num_threads(1)
    pipeline = made(name, scheduler)
    engine, gates = Engine(pipeline), Gates()
    gates.stand_before(engine, pipeline.scheduler)
    controller, events, errors = engine.controller, dict[str, list[Event]](), list[Exception]()

    def schedule(controller: Controller) -> None:
        try:
            for requests in scenes:
                events.update(play(controller, gates, ARGUMENTS[name], requests))
        except Exception as error:
            errors.append(error)
            for request_id in {request_id for requests in scenes for request_id in requests}:
                for step in range(STEPS):
                    gates.open(request_id, step, has_order=False)
        controller.close()

    if controller is not None:
        threading.Thread(target=schedule, args=(controller,)).start()
    engine.run()
    if controller is None:
        return None
    for error in errors:
        raise error
    assert controller.events.get(timeout=60).kind == "ended"
    results, wanted = dict[str, tuple[list[Event], float]](), made(name, scheduler)
    names = {request_id: one[0] for requests in scenes for request_id, one in requests.items()}
    for request_id, log in events.items():
        apart, arguments = 0.0, ARGUMENTS[name][names[request_id]]
        if log[-1].kind == "done":
            generator = torch.Generator().manual_seed(seed_of(request_id))
            reference = wanted(**arguments, generator=generator, return_dict=False)[0]
            given = log[-1].output
            apart = float((values_of(given) - values_of(reference)).abs().max())
            assert type(given) is type(reference)
        results[request_id] = log, apart
    return results


def moves_of(events: list[Event]) -> list[tuple[int, Block]]:
    return [(event.step, event.block) for event in events if event.kind == "moved"]


FIXED: list[dict[str, Request]] = [
    {f"block of {degree}": ("image", Block(4 - degree, degree), {})} for degree in (1, 2, 4)
]
MOVED: dict[str, Request] = {
    "grows and shrinks": (
        "image",
        Block(0, 1),
        {0: ("move", Block(0, 2)), 2: ("move", Block(0, 4)), 4: ("move", Block(3, 1))},
    ),
}


def test_images() -> None:
    scenes = [
        *FIXED,
        MOVED,
        {
            "moves, rests and moves": (
                "guided",
                Block(0, 1),
                {1: ("move", Block(1, 1)), 2: ("pause",), "paused": ("resume", Block(2, 2))},
            ),
        },
        {
            "beside others": ("guided", Block(0, 2), {2: ("move", Block(0, 1))}),
            "cancelled": ("large", Block(2, 1), {1: ("cancel",)}),
            "wrong": ("wrong", Block(3, 1), {}),
        },
        {
            "small": ("image", Block(2, 2), {}),
            "large": ("large", Block(0, 2), {}),
        },
        {
            "wrong on all": ("wrong", Block(0, 4), {}),
        },
        {
            "wrong at the end": ("wrong later", Block(0, 4), {}),
        },
    ]
    results = run_ranks(serving, RANKS, "flux", None, scenes)[0]
    assert results is not None
    for name, (events, apart) in results.items():
        print(name, apart, [(e.kind, e.step, str(e.block), round(e.seconds, 4), e.reason) for e in events])
