"""Requests on blocks of ranks: the outputs of one process, wherever their steps are computed."""

import importlib
import json
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, wraps
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from bascule.diffusers import SparseConfig
from bascule.diffusers.degrees import Shape
from bascule.diffusers.tables import table_of
from bascule.errors import CommError
from bascule.generate.tiny import TINY, TINY_WAN
from bascule.plan.requests import Balanced, Block, Policy
from bascule.serve import engine as engine_module
from bascule.serve import scheduling as scheduling_module
from bascule.serve.blocks import shape_of_block
from bascule.serve.engine import Engine
from bascule.serve.jobs import Jobs, Sink
from bascule.serve.orders import Event, Orders
from bascule.serve.post import pack, unpack
from bascule.serve.scheduling import Scheduler, Task
from tests.helpers.pipeline_cases import PIPELINES, make_pipeline, prompt_of
from tests.helpers.ranks import raised_by, run_ranks, run_to_the_end
from tests.helpers.serving import (
    Asked,
    Restless,
    Ride,
    Script,
    Scripted,
    Served,
    Untaught,
    boarding_at_random,
    compared,
    pipeline_of,
    serve,
    task_of,
)
from tests.helpers.sparse_reference import Form, one_process
from tests.helpers.split_models import TEXT_DIM, Case, Draw, built

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

RANKS, STEPS = 4, 6
IMAGE = {"prompt": "a boat", "height": 64, "width": 48, "num_inference_steps": STEPS}
LATENT = {**IMAGE, "output_type": "latent"}
GUIDED = {**IMAGE, "negative_prompt": "fog", "true_cfg_scale": 3.0, "output_type": "np"}
LARGE = {**LATENT, "height": 128, "width": 96}
VIDEO = {**IMAGE, "height": 32, "num_frames": 5}  # two branches of guidance
SCHEDULERS = "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"
# One calls nothing at the end of a step, the other has no split table.
OTHERS = [one for kind in PIPELINES.values() for one in kind if one not in ("dit", "ernie")]

# After the last step one rank decodes.
GROWS: Script = {0: Block(0, 2), 2: Block(0, 4), 3: Block(2, 1)}
GROWN = [(0, 0, 2), (2, 0, 4), (3, 2, 1)]
RESTS: Script = {1: Block(1, 1), 3: "rest", "paused": Block(2, 2), 6: Block(0, 2)}
RESTED = [(1, 1, 1), (3, 2, 2), (6, 0, 1)]


def moving(arguments: dict[str, Any]) -> list[dict[str, Asked]]:
    """One request whose ranks grow, and then one that rests and moves."""
    scripts = {"grows": GROWS, "rests": RESTS}
    return [{name: Asked(arguments, Block(0, 1), script)} for name, script in scripts.items()]


def check(
    served: dict[str, Served], moves: dict[str, list[tuple[int, int, int]]], tolerance: float = 1e-5
) -> None:
    """All requests with moves are done, and are those of one process."""
    for name, wanted in moves.items():
        one = served[name]
        assert (one.end.kind, one.end.step, one.moves) == ("done", STEPS, wanted), one
        assert one.apart <= tolerance, name
        steps = [event.step for event in one.events if event.kind == "step"]
        assert steps == list(range(STEPS + 1))
        assert {event.num_steps for event in one.events} == {STEPS}


@pytest.mark.slow
def test_images() -> None:
    scenes = [
        {
            "one": Asked(GUIDED, Block(2, 1)),
            "two": Asked(LATENT, Block(0, 2)),
            "forgotten": Asked(LATENT, Block(3, 1), {1: "rest", "paused": "cancel"}),
        },
        {"four": Asked(GUIDED, Block(0, 4))},
        *riding(LATENT),
        {"grows": Asked(LATENT, Block(0, 1), GROWS)},
        {
            "rests": Asked(GUIDED, Block(0, 1), RESTS),
            "cancelled": Asked(LARGE, Block(2, 1), {1: "cancel"}),
        },
        {
            "large": Asked(LARGE, Block(0, 2), {1: Block(0, 1)}),
            "wrong": Asked({**LATENT, "nothing": 1}, Block(2, 1)),
            "picture": Asked({**IMAGE, "num_inference_steps": 1}, Block(3, 1)),
        },
        {
            "again": Asked(GUIDED, Block(0, 1), {5: "cancel"}),
            "shared again": Asked(LATENT, Block(2, 2), {3: "cancel"}),
        },
        {
            "again": Asked(GUIDED, Block(3, 1)),
            "shared again": Asked(LATENT, Block(0, 2)),
        },
    ]
    served = run_ranks(serve_saving, RANKS, partial(pipeline_of, TINY), scenes)[0]
    check(
        served,
        {
            "one": [],
            "two": [(6, 0, 1)],  # the first rank decodes alone
            "four": [(6, 0, 1)],
            "grows": GROWN,
            "rests": RESTED,
            "large": [(1, 0, 1)],
        },
    )
    check_ride(served)
    ends = {name: (served[name].end.kind, served[name].end.step) for name in served}
    assert ends["cancelled"] == ("cancelled", 1) and ends["forgotten"] == ("paused", 1)
    assert ends["wrong"] == ("failed", 0)
    assert "unexpected keyword argument 'nothing'" in served["wrong"].end.reason
    assert ends["picture"] == ("done", 1) and served["picture"].apart <= 1.001 / 255
    check_again(served["again"], 4, Block(3, 1), 0.0)
    check_again(served["shared again"], 2, Block(0, 2), 1e-5)


def serve_saving(make: Any, scenes: list[dict[str, Asked]]) -> dict[str, Served]:
    """Scenes, with a state of each request every two steps."""
    return serve(make, scenes, save_every=2)


def check_again(served: Served, step: int, block: Block, tolerance: float) -> None:
    """A request that was cancelled went on from its last state, with the output of one process."""
    kinds = [(event.kind, event.step) for event in served.events if event.kind != "moved"]
    assert served.moves[0] == (step, block.first, block.degree)
    assert kinds == [*(("step", k) for k in range(step + 1, STEPS + 1)), ("done", STEPS)]
    assert served.apart <= tolerance


@pytest.mark.some(1)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.slow
def test_videos_by_schedulers_of_many_steps(scheduler: str) -> None:
    latents = {**VIDEO, "output_type": "latent"}
    again = {"output_type": "latent", **VIDEO}
    scenes: list[Any] = [moving(latents)[0], moving(VIDEO)[1], *riding(latents)]
    scenes += [{"again": Asked(again, Block(1, 1), {5: "cancel"})}]
    scenes += [{"again": Asked(again, Block(1, 1))}]
    served = run_ranks(serve_saving, RANKS, partial(pipeline_of, TINY_WAN, scheduler), scenes)[0]
    check(served, {"grows": GROWN, "rests": RESTED})
    check_ride(served)
    check_again(served["again"], 4, Block(1, 1), 0.0)


MEMBERS = {"a": STEPS, "b": STEPS - 2, "c": STEPS}  # steps
# A batch that grows on its way, rests, and goes on elsewhere; `b` ends before the others.
RIDE: list[Any] = [
    *(["a", "b"], ("go on",), ("halt",), ("move", Block(0, 2)), ("board", "c"), ("go on",)),
    *(("halt",), ("move", Block(0, 4)), ("halt",), ("pause",), Block(2, 2)),
]


def riding(arguments: dict[str, Any], script: list[Any] = RIDE) -> list[Ride]:
    asked = {
        name: arguments | {"prompt": name, "num_inference_steps": steps}
        for name, steps in MEMBERS.items()
    }
    return [Ride(asked, Block(1, 1), script)]


def check_ride(served: dict[str, Served], tolerance: float = 1e-5) -> None:
    for name, steps in MEMBERS.items():
        one = served[name]
        assert (one.end.kind, one.end.step) == ("done", steps) and one.apart <= tolerance, one


def counted(make: Any, *args: Any, **ways: Any) -> tuple[dict[str, Served], list[int]]:
    """What happened, and the requests of each call of the transformer until all was served."""
    calls, pipeline = list[int](), make()

    def count(_: Any, __: Any, inputs: dict[str, Any], ___: Any) -> None:
        calls.append(inputs["hidden_states"].shape[0])

    pipeline.transformer.register_forward_hook(count, with_kwargs=True)
    pipelines = iter([pipeline])
    served = serve(lambda: next(pipelines, None) or make(), *args, **ways)
    return served, calls


def tiled_pipeline() -> Any:
    """Its VAE decodes an image in several tiles."""
    pipeline = pipeline_of(TINY)
    pipeline.vae.enable_tiling()
    pipeline.vae.tile_latent_min_size, pipeline.vae.tile_sample_min_size = 4, 32
    return pipeline


# Where ranks share tiles, they stay to decode them.
STAYED = [*RESTED[:-1], (6, 0, 2)]


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "arguments", "ways", "rested", "apart"),
    [
        (partial(pipeline_of, TINY), GUIDED, {"num_groups": 2}, RESTED, 1e-5),
        (partial(pipeline_of, TINY_WAN), VIDEO, {"num_groups": 2}, RESTED, 1e-5),
        (tiled_pipeline, GUIDED, {"num_groups": 2, "shares_tiles": True}, STAYED, 1e-5),
        (partial(pipeline_of, TINY), LATENT, {"compiles": True}, RESTED, 1e-4),
        (partial(pipeline_of, TINY), LATENT, {"comm_dtype": "int8"}, RESTED, 0.1),
    ],
    ids=["guidance", "guidance of videos", "tiles", "compiled", "8 bits"],
)
def test_ways_to_share_a_request(
    make: Any,
    arguments: dict[str, Any],
    ways: dict[str, Any],
    rested: list[tuple[int, int, int]],
    apart: float,
) -> None:
    short = [["a", "b"], ("go on",), ("board", "c")]  # compilers are slow
    scenes = [*moving(arguments), *riding(arguments, short if "compiles" in ways else RIDE)]
    served = run_ranks(partial(serve, **ways), RANKS, make, scenes)[0]
    check(served, {"grows": GROWN, "rests": rested}, apart)
    check_ride(served, apart)
    assert (served["grows"].apart > 1e-5) == ("comm_dtype" in ways)


def cached_pipeline(name: str, number: float) -> Any:
    """A pipeline with a cache of steps."""
    diffusers: Any = importlib.import_module("diffusers")
    model = (pipeline := pipeline_of(TINY)).transformer
    if name == "first-block":
        model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=number))
    else:
        exact = {"taylor_factors_dtype": torch.float32}
        model.enable_cache(diffusers.TaylorSeerCacheConfig(cache_interval=int(number), **exact))
    return pipeline


def with_cache(name: str, number: float) -> dict[str, Served]:
    """Requests of one size on one and on two ranks; one is told to move, and one to rest."""
    other = {**GUIDED, "prompt": "two boats"}
    scenes = [
        {"moves": Asked(GUIDED, Block(0, 2), {2: Block(0, 1), 3: Block(1, 1)})},
        {"one": Asked(other, Block(0, 1)), "rests": Asked(other, Block(1, 1), {2: "rest"})},
        {"two": Asked(other, Block(0, 2))},
    ]
    return serve(partial(cached_pipeline, name, number), scenes)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [("first-block", 0.3), ("taylorseer", 2)])
def test_a_cache_of_steps_belongs_to_a_request(name: str, number: float) -> None:
    served = run_ranks(with_cache, 2, name, number)[0]
    check(served, {"moves": [(6, 0, 1)], "one": [], "rests": [], "two": [(6, 0, 1)]})
    refused = [one for one in served["moves"].events if one.kind == "refused"]
    assert [one.step for one in refused] == [2, 3]
    assert "requests cannot change ranks: leave them in place" in refused[0].reason


def with_masks(names: list[str]) -> dict[str, Served]:
    """Masks of a file, other ones in each step, against dense masked attention."""
    form, made = Form((512, 48), (True, False)), list[Any]()  # text, image
    masks = np.random.default_rng(3).random((STEPS, 4, 4, 70, 70)) < 0.4

    def make() -> Any:
        made.append(pipeline_of(TINY))
        if len(made) > 1:  # the reference, when all is served
            flat = masks.reshape(-1, *masks.shape[2:])
            context.enter_context(one_process([form], 8, masks=np.tile(flat, (2, 1, 1, 1))))
        return made[-1]

    scenes = [scene for scene in moving(LARGE) if scene.keys() <= set(names)]
    with ExitStack() as context:
        return serve(make, scenes, sparse=SparseConfig(masks=masks, block=8))


@pytest.mark.slow
@pytest.mark.parametrize(
    "moves", [{"rests": RESTED}, pytest.param({"grows": GROWN}, marks=pytest.mark.stress)], ids=list
)
def test_masks_of_a_step_wherever_it_is_computed(
    moves: dict[str, list[tuple[int, int, int]]],
) -> None:
    check(run_ranks(with_masks, RANKS, list(moves))[0], moves)


def other(name: str) -> dict[str, Served]:
    """A pipeline of another family: its request moves to another rank, and shares it later."""
    sides = {"cogvideox": (48, 32), "wan": (48, 80), "hunyuan": (48, 80)}
    height, width = sides.get(name, (44, 36))
    sizes = {"height": height, "width": width, "num_inference_steps": STEPS, "output_type": "pt"}
    script: Script = {1: Block(1, 1), 3: Block(0, 4)}
    asked = {name: Asked({**prompt_of(name), **sizes}, Block(0, 1), script)}
    return serve(partial(make_pipeline, name), [asked])


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_pipelines(name: str) -> None:
    """Of two heads: four ranks are a ring of two that share them."""
    served = run_ranks(other, RANKS, name)[0]
    moves = [(1, 1, 1), (3, 0, 4), (6, 0, 1)]
    check(served, {name: moves}, tolerance=5e-5)  # as without moves: pixels of 6 guided steps


def calls_of_a_block() -> int:
    """The calls of the model that this rank computes of a request of two branches."""
    pipeline, calls = pipeline_of(TINY), Counter[str]()
    pipeline.transformer.proj_out.register_forward_hook(lambda *_: calls.update(["call"]))
    engine = Engine(pipeline, num_groups=2)
    if engine.orders is not None:
        begin(engine.orders, "shared", GUIDED, Block(0, 2))
        threading.Thread(target=stop_after_one, args=(engine.orders,)).start()
    engine.run()
    return calls["call"]


def begin(orders: Orders, name: str, arguments: dict[str, Any], block: Block) -> None:
    orders.run(name, block, [(name, orders.keep(name, arguments, 0))])


def stop_after_one(orders: Orders) -> None:
    while orders.events.get(timeout=100).kind != "done":
        pass
    orders.stop()


def test_a_guidance_group_computes_a_branch() -> None:
    calls = run_ranks(calls_of_a_block, 2)
    assert calls == [STEPS, STEPS + 1]  # the first call is of both, who then know its form


def test_meshes_of_blocks() -> None:
    shapes = [shape_of_block(degree, 3, 2) for degree in (1, 2, 4, 8)]
    assert shapes == [Shape(1, 1, 1, 1), Shape(1, 2, 1, 1), Shape(1, 2, 1, 2), Shape(1, 2, 2, 2)]
    assert [shape_of_block(degree, 24) for degree in (2, 32)] == [
        Shape(1, 1, 1, 2),
        Shape(1, 1, 2, 16),
    ]


def on_replicas() -> dict[str, Served]:
    """Two replicas of two ranks each, which are the places of requests."""
    script: Script = {2: "rest", "paused": Block(1, 1)}
    scene = {"rests": Asked(GUIDED, Block(0, 1), script), "one": Asked(LATENT, Block(1, 1))}
    scenes = [scene | {"one": replace(scene["one"], script={1: "cancel"})}, {"two": scene["one"]}]
    return serve(partial(pipeline_of, TINY), scenes, shape=Shape(2, 2, 1, 1))


@pytest.mark.slow
def test_a_replica_in_place_of_a_rank() -> None:
    served = run_ranks(on_replicas, RANKS)[0]
    check(served, {"rests": [(2, 1, 1)], "two": []})
    assert served["one"].end.kind == "cancelled"


def with_table(**changes: Any) -> dict[str, Served]:
    """A request on one rank, and one that two share, by a table that bascule does not know."""

    def table(model: Any, _: None) -> Any:
        return replace(table_of(model), **changes)

    scenes = [{"one": Asked(LATENT, Block(0, 1))}, {"two": Asked(LATENT, Block(0, 2))}]
    with mock.patch.object(engine_module, "table_of", table):
        return serve(partial(pipeline_of, TINY), scenes)


def test_a_table_of_others_is_compared_with_one_process_first() -> None:
    check(run_ranks(with_table, 2)[0], {"one": [], "two": [(6, 0, 1)]})
    served = run_ranks(partial(with_table, gathers={}), 2)[0]
    check(served, {"one": []})
    assert served["two"].end.kind == "failed"
    assert "the table of FluxTransformer2DModel does not fit" in served["two"].end.reason


def with_momentum(name: str) -> Any:
    """A pipeline that keeps an average of what its transformer gave, in a guider or in itself."""
    torch.manual_seed(0)
    diffusers: Any = importlib.import_module("diffusers")
    if name == "guider":
        parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
        case = Case("hunyuan_image", 4, 1, 5, (1, 3), ("two texts",))
        guider = diffusers.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=2)
        pipeline = diffusers.HunyuanImagePipeline(
            **parts,
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            transformer=built(case).eval(),
            guider=guider,
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline
    pipeline = pipeline_of(TINY)
    kind: Any = type(pipeline.scheduler)

    @wraps(kind.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        self.owner.averages = [0.0]
        kind.set_timesteps(self, *args, **kwargs)

    def step(self: Any, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        averages = self.owner.averages
        averages[0] = output + 0.5 * averages[0]
        return kind.step(self, averages[0], *args, **kwargs)

    averaging: Any = type("Averaging", (kind,), {"set_timesteps": set_timesteps, "step": step})
    pipeline.scheduler = averaging.from_config(pipeline.scheduler.config)
    pipeline.scheduler.owner = pipeline
    return pipeline


def test_what_a_pipeline_keeps_between_steps_moves_with_a_request() -> None:
    draw, embeds = Draw(torch.float32, 0), dict[str, torch.Tensor]()
    for sign in ("", "negative_"):
        for ending, shape in {"": (1, 5, TEXT_DIM), "_2": (1, 4, 24)}.items():
            embeds[f"{sign}prompt_embeds{ending}"] = draw(*shape)
            mask = torch.ones(shape[:2], dtype=torch.int64)
            embeds[f"{sign}prompt_embeds_mask{ending}"] = mask
    image = {name: value for name, value in LATENT.items() if name != "prompt"}
    for name, arguments in {
        "guider": {**image, **embeds, "height": 64, "width": 128},
        "itself": LATENT,
    }.items():
        make, asked = partial(with_momentum, name), Asked(arguments, Block(0, 1), RESTS)
        check(run_ranks(serve, 4, make, [{name: asked}])[0], {name: RESTED})


def odd_pipeline() -> Any:
    """The scheduler keeps what cannot travel for a large image; rank 1 draws no noise for small.

    The transformer takes two images at once.
    """
    pipeline = pipeline_of(TINY)

    def refuse(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        if inputs["hidden_states"].shape[0] > 2:
            raise MemoryError("no memory is left for three")

    pipeline.transformer.register_forward_pre_hook(refuse, with_kwargs=True)
    kind: Any = type(pipeline)

    def prepared(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.scheduler.odd = object() if args[2] == LARGE["height"] else None
        if dist.get_rank() == 1 and args[2] == LATENT["height"]:
            raise MemoryError("no memory is left")
        return kind.prepare_latents(self, *args, **kwargs)

    pipeline.__class__ = type(kind.__name__, (kind,), {"prepare_latents": prepared})
    return pipeline


def test_a_rank_that_cannot_join_fails_the_request_alone() -> None:
    joins: Script = {1: Block(0, 2)}
    scenes = [
        {"stays": Asked(LARGE, Block(0, 1), joins)},
        {"fails": Asked(LATENT, Block(0, 1), joins)},
        Ride(
            {"x": LATENT, "y": {**LATENT, "height": 48}, "z": LATENT},
            Block(0, 1),
            [["x", "y"], ("go on",), ("halt",), ("move", Block(0, 2)), ("board", "z")],
        ),
        Ride({name: {**LATENT, "height": 48} for name in "pqr"}, Block(0, 2), [["p", "q", "r"]]),
        {"next": Asked(LATENT, Block(0, 1))},
    ]
    served = run_ranks(serve, 2, odd_pipeline, scenes)[0]
    check(served, {"stays": [], "next": [], "y": [(1, 0, 2), (STEPS, 0, 1)]})
    check(served, {name: [(STEPS, 0, 1)] for name in "pqr"})  # one after the other
    for name, step in {"fails": 1, "x": 1, "z": 0}.items():
        end = served[name].end
        assert (end.kind, end.step, end.reason[:19]) == ("failed", step, "rank 1: MemoryError")
    refused = [one for one in served["stays"].events if one.kind == "refused"]
    assert [one.step for one in refused] == [1] and "keeps a object as 'odd'" in refused[0].reason


def failing(kind: str) -> str:
    """What each rank says when one of two that share a request fails in a step, or dies."""
    torch.set_num_threads(1)
    pipeline = pipeline_of(TINY)
    engine = Engine(pipeline)
    if engine._rank == 1:
        is_forward = kind != "joins nothing"
        owner: Any = pipeline.transformer.norm_out if is_forward else engine_module
        name = "forward" if is_forward else "merged"
        call = getattr(owner, name)

        def strike(*args: Any, **kwargs: Any) -> Any:
            batch = engine._batch
            if batch is not None and [run.num_done for run in batch.members.values()] == [2, 2]:
                if kind == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise MemoryError("no memory is left")
            return call(*args, **kwargs)

        setattr(owner, name, strike)  # of this process, which ends with the test
    if engine.orders is not None:  # of a batch
        names = "shared", "beside"
        tickets = [(name, engine.orders.keep(name, LATENT, 0)) for name in names]
        engine.orders.run("batch", Block(0, 2), tickets)
    error = ""
    try:
        engine.run()
    except (CommError, MemoryError) as failure:
        error = str(failure)
    assert not any("bascule request" in thread.name for thread in threading.enumerate())
    if engine.orders is not None:
        events = [engine.orders.events.get(timeout=60) for _ in range(4)]
        assert [one.kind for one in events] == ["step"] * 3 + ["ended"]
        assert events[-1].reason
    return error


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fails", "dies", "joins nothing"])
def test_a_rank_that_others_wait_for_ends_the_engine_by_its_name(kind: str) -> None:
    outcomes = run_to_the_end(failing, RANKS, kind, timeout_s=120.0)
    reason = "no report from ranks [1]" if kind == "dies" else "rank 1 failed in"
    victim = outcomes.pop(1)
    assert victim.value == (None if kind == "dies" else "no memory is left")
    for outcome in outcomes:
        assert outcome.error is None and reason in outcome.value, outcome


def strange_orders() -> list[str]:
    """What an engine refuses, and what it leaves out: orders for what has ended, and strangers'."""
    hooks: Any = importlib.import_module("diffusers.hooks")
    dit, hooked = pipeline_of(TINY), pipeline_of(TINY)
    dit.transformer._is_cached = True  # as cache-dit marks it
    hook = type("Keeper", (hooks.ModelHook,), {"_is_stateful": True})()
    hooks.HookRegistry.check_if_exists_or_initialize(hooked.transformer.norm_out).register_hook(
        hook, "keeper"
    )
    errors = [raised_by(Engine, one)[1] for one in (make_pipeline("dit"), dit, hooked)]
    engine = Engine(pipeline_of(TINY))
    orders = engine.orders
    if orders is None:
        engine.run()
        return []
    policy, events = Scripted(), list[tuple[str, str]]()
    scheduler = Scheduler(orders, policy, Untaught())

    def until(kind: str) -> None:
        while not events or events[-1][1] != kind:
            event = orders.events.get(timeout=60)
            if event.kind != "ended":
                scheduler.handle(event)
            if event.kind != "step":
                events.append((event.request_id, event.kind))
                scheduler.decide()

    def schedule() -> None:
        errors.append(raised_by(orders.keep, "a", {"prompt": object()}, 0)[1])
        name, store = engine._post._name, engine._mail._store
        stranger = json.dumps({"kind": "over", "reason": "a stranger was here"})
        for rank in range(2):
            store.set(f"{name}/{rank}/{store.add(f'{name}/{rank}', 1)}", stranger)
            for action in ("pause", "halt", "go on", "cancel"):
                orders.order(Block(rank, 1), "none", action)
        for number, task in enumerate("ab"):
            policy.wanted[task] = Block(number, 1)
            scheduler.add(task_of(task, number, {**LATENT, "num_inference_steps": 500}))
        a, b = scheduler.decide()
        policy.wanted["a"] = policy.wanted["b"] = "rest"
        scheduler.halt(a)
        until("paused")
        scheduler.halt(b)
        until("halted")
        assert (a.phase, b.phase) == ("paused", "pausing")
        scheduler.close()  # with a request that is to rest, and one that does
        until("ended")
        assert not engine._post._items and not scheduler.decide()
        assert [(task.phase, task.at) for task in (a, b)] == [("new", None)] * 2

    thread = threading.Thread(target=schedule)
    thread.start()
    engine.run()
    thread.join()
    wanted = [("a", "halted"), ("a", "paused"), ("b", "halted"), ("b", "paused"), ("", "ended")]
    assert events == wanted
    return errors


def test_what_cannot_be_done_is_refused_or_left_out() -> None:
    errors = run_ranks(strange_orders, 2)[0]
    wanted = [
        "a DiTPipeline has no callback at the end of a step",
        "share the cache (cache-dit)",
        "share the cache (Keeper)",
        "a object, and would not arrive as one",
    ]
    assert [text in error for text, error in zip(wanted, errors, strict=True)] == [True] * 4


class Moving(Sink):
    """Outputs of requests that change ranks whenever they can; with a seed some are cancelled."""

    def __init__(self, scheduler: Scheduler, seed: int | None) -> None:
        self._scheduler, self._random = scheduler, None if seed is None else Random(seed)
        self.kinds, self.done = Counter[str](), list[tuple[Task, Event]]()

    def changed(self, task: Task, event: Event | None) -> None:
        """Count news, and cancel a few."""
        self.kinds[event.kind if event is not None else "ordered"] += 1
        num = 1 if event is None else len(event.members)
        self.kinds["most in a batch"] = max(num, self.kinds["most in a batch"])
        is_step = event is not None and event.kind == "step"
        if is_step and self._random is not None and self._random.random() < 0.02:
            self._scheduler.cancel(task)
            self.kinds["cancelled"] += 1

    def write(self, task: Task, output: Any) -> str:
        """Keep an output."""
        assert task.last is not None and task.last.output is output
        self.done.append((task, task.last))
        return ""

    def ended(self, task: Task, state: str, reason: str) -> None:
        """Count failures."""
        del task, reason
        self.kinds["failed"] += state == "failed"


def queued(
    policy: Policy, asked: list[dict[str, Any]], num_groups: int = 1, seed: int | None = None
) -> tuple[Counter[str], float]:
    """Requests in batches of three at most: news by kind, and the largest difference."""
    torch.set_num_threads(1)
    engine = Engine(pipeline_of(TINY), num_groups=num_groups)
    if engine.orders is None:
        engine.run()
        return Counter(), 0.0
    scheduler = Scheduler(engine.orders, policy, Untaught(), most_batch=3)
    sink = Moving(scheduler, seed)
    for number, arguments in enumerate(asked):
        scheduler.add(task_of(str(number), number, arguments))
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        if seed is not None:
            rule = boarding_at_random(seed)
            stack.enter_context(mock.patch.object(scheduling_module, "board", rule))
        loop = pool.submit(Jobs(scheduler, sink, until_idle=True).run)
        engine.run()
    loop.result()
    assert not (scheduler.tasks or scheduler._users or scheduler._planned or engine._post._items)
    alone, apart = pipeline_of(TINY), 0.0
    for task, event in sink.done:
        served = compared(Served([event]), alone, task.arguments(), task.prompt.seed)
        apart = max(apart, served.apart)
    return sink.kinds, apart


def in_batches(scenes: list[Ride], asked: list[dict[str, Any]]) -> tuple[Any, ...]:
    return counted(partial(pipeline_of, TINY), scenes), queued(Balanced(), asked, 2)


@pytest.mark.slow
def test_batches() -> None:
    """Members of any steps come and go; those of other sizes or calls are computed apart.

    A queue of requests of 9 and 3 steps is in batches that some leave early, on ranks that share
    guidance.
    """
    eight = {str(k): {**LATENT, "prompt": f"boat {k}"} for k in range(8)}
    script = [["a", "b"], ("go on",), ("board", "c"), ("board", "large"), ("go on",)]
    script += [("board", "wrong"), ("board", "guided"), ("board", "late"), ("cancel", "c")]
    mixed = {"a": LATENT, "b": {**LATENT, "num_inference_steps": 4}, "c": LATENT, "large": LARGE}
    mixed |= {"wrong": {**LATENT, "nothing": 1}, "guided": GUIDED, "late": LATENT}
    scenes = [Ride(eight, Block(0, 1), [list(eight)]), Ride(mixed, Block(0, 1), script)]
    asked = [{**GUIDED, "num_inference_steps": 9 - 6 * (k % 2)} for k in range(9)]
    (served, calls), (kinds, apart) = run_ranks(in_batches, 2, scenes, asked)[0]
    assert calls[:STEPS] == [8] * STEPS and max(calls[STEPS:]) == 4
    ends = {name: (one.end.kind, one.end.step) for name, one in served.items()}
    assert ends.pop("c") == ("cancelled", 1) and ends.pop("wrong") == ("failed", 0)
    assert "unexpected keyword argument 'nothing'" in served["wrong"].end.reason
    assert ends.pop("b") == ("done", 4) and {*ends.values()} == {("done", STEPS)}
    assert max(served[name].apart for name in ends) <= 1e-5
    assert apart <= 1e-5 and kinds["done"] == 9 and kinds["most in a batch"] == 3
    assert kinds["boarded"] > 0


@pytest.mark.stress
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_moves_at_random(seed: int, num_groups: int) -> None:
    random = Random(seed)
    asked = [random.choice((LATENT, GUIDED, LARGE)) for _ in range(60)]
    kinds, apart = run_ranks(queued, RANKS, Restless(seed), asked, num_groups, seed)[0]
    assert apart <= 1e-5
    assert kinds["done"] + kinds["cancelled"] == 60 and kinds["done"] > 40
    assert min(kinds["moved"], kinds["paused"]) > 10 and kinds["boarded"] > 0
    assert kinds["most in a batch"] == 3
    assert kinds["failed"] == kinds["refused"] == 0


def test_items_arrive_as_they_left() -> None:
    photo = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3))
    item = {"photo": photo, "x": torch.arange(5)[1:4], "many": [None, 2, "é", (1.5, True)]}
    back = unpack(pack(item), torch.device("cpu"))
    assert back["photo"].tobytes() == photo.tobytes() and back["photo"].size == (4, 2)
    assert torch.equal(back.pop("x"), item.pop("x"))
    assert back.pop("photo").mode == item.pop("photo").mode and back == item
