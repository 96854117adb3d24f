"""Requests on the blocks of an engine by scripts, and how far outputs are from one process's."""

import importlib
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bascule.comm.groups import member_of, resolve
from bascule.generate import tiny
from bascule.generate.generating import arguments_of
from bascule.generate.options import Lora, Prompt
from bascule.plan.requests import Balanced, Block, Policy, Request, Starts, State
from bascule.serve.adapters import digest_of, load_on_all
from bascule.serve.engine import Engine
from bascule.serve.options import ServeOptions
from bascule.serve.orders import Event, Orders
from bascule.serve.scheduling import Scheduler, Task
from bascule.serve.service import Service
from bascule.serve.spool import Spool
from bascule.serve.status import Status
from bascule.serve.times import RequestSize, Times

Script = dict[int | str, Block | str]
"""What becomes of a request after a step, or when it rests: where it goes on, "rest", "cancel"."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, with the orders that it gets.

    Attributes:
        arguments: Of the pipeline.
        block: Where it starts.
        script: What becomes of it.
    """

    arguments: dict[str, Any]
    block: Block
    script: Script = field(default_factory=dict[int | str, Block | str])


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a request."""

    events: list[Event]
    apart: float = 0.0  # the output's largest difference from one process

    @property
    def end(self) -> Event:
        return self.events[-1]

    @property
    def moves(self) -> list[tuple[int, int, int]]:
        """Steps done, first rank and degree of each move."""
        moved = [one for one in self.events if one.kind == "moved"]
        return [(one.step, one.block.first, one.block.degree) for one in moved]


def pipeline_of(name: str, scheduler: str | None = None) -> Any:
    """A tiny pipeline; `scheduler` replaces its scheduler by one of many steps."""
    diffusers: Any = importlib.import_module("diffusers")
    transformers = importlib.import_module("transformers")
    pipeline = tiny.load("test", lambda: tiny.pipeline(diffusers, transformers, name))
    if scheduler is not None:
        flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
        config = {**pipeline.scheduler.config, **flow}
        pipeline.scheduler = getattr(diffusers, scheduler).from_config(config)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def values_of(output: Any) -> Tensor:
    """Numbers of an output of any kind; pixels between 0 and 1."""
    if isinstance(output, list):
        return torch.stack([values_of(one) for one in output])
    if isinstance(output, Tensor | np.ndarray):
        return torch.as_tensor(output)
    return torch.as_tensor(np.array(output)) / 255


class Scripted:
    """A policy that puts tasks on the blocks that are wanted, once these are free."""

    def __init__(self) -> None:
        self.wanted: dict[str, Block | str] = {}

    def decide(self, state: State, act: Starts) -> None:
        """Start what is wanted somewhere."""
        for task in list(state.waiting):
            assert isinstance(task, Task)
            block = self.wanted[task.id]
            if isinstance(block, Block) and any(
                set(block.ranks) <= set(free.ranks) for free in state.free
            ):
                act.start(task, block)


class Untaught(Times):
    """Seconds of steps that nobody asks for."""

    def __init__(self) -> None:
        """Know no pipeline."""

    def measure(self, *facts: Any, **more: Any) -> None:
        """Forget it."""


def task_of(
    name: str,
    number: int,
    arguments: dict[str, Any],
    saved: Tensor | None = None,
    lora: Sequence[Lora] = (),
) -> Task:
    """A task by its arguments or its saved state, whose number is its seed."""
    step_s = {1: 4.0, 2: 2.0, 4: 1.0}
    together = {degree: [s, 1.1 * s, 1.2 * s] for degree, s in step_s.items()}
    steps = arguments["num_inference_steps"]
    request = Request(step_s=step_s, steps=steps, batch_key=tuple(lora), batch_s=together)
    facts: dict[str, Any] = {"id": name, "size": RequestSize(1, 1)}
    facts["arguments"] = lambda: arguments if saved is None else saved
    prompt = Prompt(prompt="", seed=number, lora=tuple(lora))
    return Task(number, request, request.steps, prompt=prompt, **facts)


def play(
    orders: Orders, asked: dict[str, Asked], saved: dict[str, Tensor] | None = None
) -> dict[str, Served]:
    """Let requests do what their scripts say, and return what happened.

    `saved` has the states of earlier requests, from which those of the same name go on.
    """
    saved = {} if saved is None else saved
    policy = Scripted()
    scheduler = Scheduler(orders, policy, Untaught())
    served = {name: Served([]) for name in asked}
    for seed, (name, one) in enumerate(asked.items()):
        policy.wanted[name] = one.block
        scheduler.add(task_of(name, seed, one.arguments, saved.get(name)))
    scheduler.decide()
    while scheduler.tasks:
        event = orders.events.get(timeout=100)
        assert event.kind != "ended", event.reason
        task, script = scheduler.tasks[event.request_id], asked[event.request_id].script
        if event.kind == "saved":
            saved[task.id] = event.output
            continue
        served[task.id].events.append(event)
        scheduler.handle(event)
        wanted = script.get(event.step if event.kind == "step" else event.kind)
        if event.kind == "done":
            scheduler.remove(task)
        elif wanted == "cancel":
            scheduler.cancel(task)
        elif wanted is not None:
            policy.wanted[task.id] = wanted
        if event.kind == "step" and not task.is_cancelled:
            if wanted is not None:
                scheduler.halt(task)
            elif task.at is not None:
                scheduler._order(task, "go on")
        scheduler.decide()
    assert not scheduler._users and scheduler.state.num_free == orders.num_ranks
    return served


@dataclass(frozen=True, slots=True)
class Ride:
    """Requests in one batch.

    Attributes:
        asked: Arguments of each request.
        block: Where it starts.
        script: Who begins, then an order for each time that the batch waits for one, an action with
            the name of a request or a block; or where it goes on after a pause. "adapt" with a name
            and a path, or None, lets the ranks load or remove an adapter.
        loras: The adapters that requests choose.
    """

    asked: dict[str, dict[str, Any]]
    block: Block
    script: list[Any]
    loras: dict[str, Sequence[Lora]] = field(default_factory=dict[str, Sequence[Lora]])


def ride(orders: Orders, batch: Ride, saved: dict[str, Tensor] | None = None) -> dict[str, Served]:
    """Let requests be a batch as its script says, and return what happened, as `play`."""
    asked, block, saved = batch.asked, batch.block, {} if saved is None else saved
    served = {name: Served([]) for name in asked}
    tickets = {
        name: orders.keep(name, saved.get(name, arguments), seed, batch.loras.get(name, ()))
        for seed, (name, arguments) in enumerate(asked.items())
    }
    (first, *rest), num_runs = batch.script, 0

    def run(at: Block, names: Sequence[str]) -> None:
        nonlocal num_runs
        num_runs += 1
        orders.run(f"batch {num_runs}", at, [(name, tickets[name]) for name in names])

    run(block, first)
    members, boarding = set(first), ""
    while members:
        event = orders.events.get(timeout=100)
        assert event.kind != "ended", event.reason
        if event.kind == "saved":
            saved[event.request_id] = event.output
        if event.kind in ("saved", "adapter"):
            assert not event.reason
            continue
        for one in event.by_request():
            served[one.request_id].events.append(one)
        waits = event.kind in ("step", "boarded", "halted", "cancelled", "refused")
        waits |= event.kind == "failed" and event.request_id == boarding
        block, boarding = event.block, "" if event.kind in ("boarded", "failed") else boarding
        if event.kind in ("done", "failed", "cancelled"):
            members.discard(event.request_id)
        if event.kind == "paused":
            tickets |= event.tickets
            run(rest.pop(0), list(event.members))
        elif waits and members:
            action, *whom = rest.pop(0) if rest else ("go on",)
            if action == "adapt":
                name, path = whom
                orders.adapt(name, name, path and str(path), path and digest_of(path))
                action = "go on"
            what: dict[str, Any] = {"block": whom[0]} if action == "move" else {}
            if action in ("board", "cancel"):
                what = {"id": whom[0]}
            if action == "board":
                what["ticket"], boarding = tickets[whom[0]], whom[0]
                members.add(boarding)
            orders.order(block, f"batch {num_runs}", action, **what)
    assert not rest, rest
    return served


class Patient(Engine):
    """An engine that waits for an order after each step."""

    def _take(self, wait_s: float | None = None) -> Any:
        return super()._take(None if self._batch is None else 100.0)


def serve(
    make: Callable[[], Any],
    scenes: Sequence[dict[str, Asked] | Ride],
    paths: Mapping[str, Path] | None = None,
    alone: Callable[[Any, Sequence[Lora]], Any] = lambda pipeline, _: pipeline,
    **ways: Any,
) -> dict[str, Served]:
    """Play scenes one after the other, on all ranks; rank 0 returns what happened.

    `paths` has adapters to load first; `alone` lets a pipeline of one process use a choice of them.
    """
    torch.set_num_threads(1)
    pipeline = make()
    engine = Patient(pipeline, **ways)
    load_on_all(engine.adapters, paths or {}, member_of(resolve(None), "world"), "adapters")
    served, saved, errors = dict[str, Served](), dict[str, Tensor](), list[Exception]()

    def schedule(orders: Orders) -> None:
        try:
            for scene in scenes:
                is_ride = isinstance(scene, Ride)
                served.update(ride(orders, scene, saved) if is_ride else play(orders, scene, saved))
            orders.stop()
        except Exception as error:
            errors.append(error)
            orders.abort(str(error))

    orders = engine.orders
    if orders is not None:
        threading.Thread(target=schedule, args=(orders,)).start()
    engine.run()
    if orders is not None:
        assert orders.events.get(timeout=60).kind == "ended" and not engine._post._items
        last = dict[str, tuple[dict[str, Any], int, Sequence[Lora]]]()
        for scene in scenes:
            for seed, (name, one) in enumerate(
                scene.asked.items() if isinstance(scene, Ride) else scene.items()
            ):
                lora = scene.loras.get(name, ()) if isinstance(scene, Ride) else ()
                last[name] = one.arguments if isinstance(one, Asked) else one, seed, lora
        for name, (arguments, seed, lora) in last.items():
            if served[name].end.kind == "done":  # each alone: pipelines may keep values
                served[name] = compared(served[name], alone(make(), lora), arguments, seed)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("bascule request")]
    return served


def compared(served: Served, pipeline: Any, arguments: Any, seed: int) -> Served:
    """Compare an output with that of one process, and leave it out."""
    generator = torch.Generator().manual_seed(seed)
    wanted = pipeline(**arguments, generator=generator, return_dict=False)[0]
    output = served.end.output
    assert type(output) is type(wanted)
    apart = float((values_of(output) - values_of(wanted)).abs().max())
    return Served([replace(one, output=None) for one in served.events], apart)


class Restless:
    """A policy that puts requests anywhere, and recalls what runs again and again."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def decide(self, state: State, act: Starts) -> None:
        """Start and recall at random; nobody waits while all ranks are free."""
        rests = self._random.random() < 0.3 and state.running  # until many ranks are free
        for job in [] if rests else self._random.sample(state.waiting, len(state.waiting)):
            degree = self._random.choice(list(job.request.step_s))
            block = state.free_block(degree) or (None if state.running else state.free_block(1))
            if block is not None:
                act.start(job, block)
        for job in list(state.running.values()):
            if self._random.random() < 0.5:
                act.recall(job)


def boarding_at_random(seed: int) -> Callable[..., None]:
    """A rule by which waiting requests board any batch that may take them in."""
    random = Random(seed)

    def board(
        state: State, act: Callable[[Any, Any], None], most: int, closed: set[Any], _: int
    ) -> None:
        for job in [job for job in state.waiting if job not in closed and not job.riders]:
            leads = [lead for lead in state.running.values() if lead not in closed]
            leads = [lead for lead in leads if 1 + len(lead.riders) < most]
            if leads and random.random() < 0.2:
                act(job, random.choice(leads))

    return board


class Even(Times):
    """Seconds of steps by which ranks gain all that they could; nothing is measured."""

    def step_s(self, size: RequestSize) -> dict[int, float]:
        """As many seconds as tokens, shared by the ranks."""
        return {degree: 0.01 * size.num_tokens / degree for degree in (1, 2, 4)}

    def batch_s(self, size: RequestSize) -> dict[int, list[float]]:
        """No batches."""
        return {}

    measure = Untaught.measure


def with_service(
    make: Callable[[], Any],
    folder: Path,
    client: Callable[..., Any],
    *args: Any,
    policy: Policy | None = None,
    kind: type[Times] = Times,
    most_waiting: int = 1000,
    timeout_s: float = 100.0,
    loras: Mapping[str, Path] | None = None,
    lora_folder: Path | None = None,
) -> Any:
    """Let a client use a service in a thread of rank 0; return what it does there."""
    torch.set_num_threads(1)
    pipeline = make()
    engine = Engine(pipeline, timeout_s=timeout_s)
    world = member_of(resolve(None), "world")
    loaded = load_on_all(engine.adapters, loras or {}, world, "the adapters of a test")
    if (orders := engine.orders) is None:
        engine.run()
        return None
    size = orders.num_ranks
    service = Service(
        pipeline,
        orders,
        Spool(folder, "tiny"),
        ServeOptions(most_waiting=most_waiting, lora_folder=lora_folder, batch=1),
        policy=policy or Balanced(),
        times=kind(pipeline, [1 << k for k in range(size.bit_length())]),
        loras=loaded,
    )
    service.start()
    results, errors = list[Any](), list[BaseException]()

    def use() -> None:
        try:
            results.append(client(service, *args))
        except BaseException as error:
            errors.append(error)
        finally:
            service.stop()

    thread = threading.Thread(target=use)
    thread.start()
    try:
        engine.run()
    finally:
        thread.join()
        service.close()
    if errors:
        raise errors[0]
    return results[0]


def apart(status: Status, path: Path, pipeline: Any, **more: Any) -> float:
    """How far the pixels of an image on disk are from those of one process, of 0 to 1."""
    takes = inspect.signature(pipeline.__call__).parameters
    arguments = arguments_of(status.prompt, takes) | more
    generator = torch.Generator().manual_seed(status.prompt.seed)
    wanted = pipeline(**arguments, generator=generator, return_dict=False)
    return float((values_of(Image.open(path)) - values_of(wanted[0][0])).abs().max())
