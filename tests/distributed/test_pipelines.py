"""Whole pipelines over ranks: the pixels of one process, the same on all ranks of a replica."""

import copy
import importlib
import inspect
import math
import pickle
import threading
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bascule.comm.groups import RankGroup, member_of, resolve
from bascule.diffusers import AutoMesh, SparseConfig, parallelize, pipeline_run, verify
from bascule.diffusers.pending import Pending
from tests.helpers.inference_cases import CASES, make_inputs, make_model
from tests.helpers.inference_toy import TABLE, make_toy, toy_inputs
from tests.helpers.pipeline_cases import (
    ONE_BY_ONE,
    PIPELINES,
    TABLES,
    generated,
    make_pipeline,
    prompt_of,
    seeded,
)
from tests.helpers.ranks import by_one_rank, on_ranks, raised_by, run_ranks

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow


def check(images: Tensor, expected: Tensor, limit: float = 1e-4) -> None:
    assert images.shape == expected.shape
    assert float((images - expected).abs().max()) <= limit


def mine(seed: int = 1) -> torch.Generator:
    """A generator whose seed is another one on each rank."""
    return seeded(seed + dist.get_rank())


def image(pipeline: Any, **others: Any) -> Tensor:
    return generated("flux", pipeline, prompt_of("flux"), **{"generator": seeded(1), **others})


def shared_as_alone(
    name: str, pipeline: Any, prompt: Any, degrees: Any, *, is_last: bool = False, **others: Any
) -> Tensor:
    """Compare with one process, and what is left after the last; ranks have seeds of their own."""

    def generate() -> Tensor:
        return generated(name, pipeline, prompt, generator=seeded(1), **others)

    before = by_one_rank(generate)
    with parallelize(pipeline, table=TABLES.get(name), **degrees):
        images = generated(name, pipeline, prompt, generator=mine(), **others)
    check(images, before)
    if is_last and dist.get_rank() == dist.get_world_size() - 1:  # by itself
        assert torch.equal(before, generate())
    return images


def all_cases(kind: str, degrees: dict[str, int], is_whole: bool) -> list[Tensor]:
    """Each pipeline with guidance and several images; one, or each, without it and in tiles."""
    pixels = list[Tensor]()
    for name in PIPELINES[kind]:
        pipeline = make_pipeline(name)
        # Some pipelines make one image of a prompt that is an embedding.
        num_prompts = {"cogvideox": 2, "sd3": 3, "dit": 3}.get(name, 1)
        several = 2 if kind == "videos" else 3
        others: dict[str, Any] = {f"num_{kind}_per_prompt": several if num_prompts == 1 else 1}
        if kind == "draws first":
            others = {}
        prompts = prompt_of(name, num_prompts=num_prompts)
        has_more = is_whole or name == PIPELINES[kind][0]
        others |= {"is_last": not has_more}
        pixels.append(shared_as_alone(name, pipeline, prompts, degrees, **others))
        if not has_more:
            continue
        pipeline.vae.enable_tiling()
        plain = prompt_of(name, is_guided=False)
        pixels.append(shared_as_alone(name, pipeline, plain, degrees, is_last=True))
    return pixels


DEGREES = [
    {"guidance_degree": 2},
    {"guidance_degree": 2, "ulysses_degree": 2},
    {"guidance_degree": 2, "ring_degree": 2},
    {"ring_degree": 3},
]
USUAL = {"videos": DEGREES[0], "images": DEGREES[0], "draws first": DEGREES[1]}
"""What `make test` runs; `make stress` runs all kinds with all degrees."""


@pytest.mark.parametrize(
    ("kind", "degrees", "is_whole"),
    [
        *(pytest.param(kind, USUAL[kind], False, id=kind) for kind in PIPELINES),
        *(
            pytest.param(kind, degrees, True, marks=pytest.mark.stress, id=f"{kind}-{degrees}")
            for kind in PIPELINES
            for degrees in DEGREES
        ),
    ],
)
def test_pixels_are_those_of_one_process(
    kind: str, degrees: dict[str, int], is_whole: bool
) -> None:
    ranks = run_ranks(all_cases, math.prod(degrees.values()), kind, degrees, is_whole)
    for pixels in zip(*ranks, strict=True):
        assert all(torch.equal(one, pixels[0]) for one in pixels)


def drawn_alike() -> None:
    """Without generators, and with random numbers that differ between ranks."""
    for name in ("flux", "cogvideox"):  # the schedulers draw in every step
        pipeline = make_pipeline(name, **({"stochastic_sampling": True} if name == "flux" else {}))
        pair = prompt_of(name, num_prompts=2)
        torch.manual_seed(7)
        expected = generated(name, pipeline, prompt_of(name))
        torch.manual_seed(7 + dist.get_rank())
        with parallelize(pipeline, guidance_degree=2):
            images = generated(name, pipeline, prompt_of(name))
            both = generated(name, pipeline, pair, generator=[mine(3), mine(4)])
        check(images, expected)
        check(both, generated(name, pipeline, pair, generator=[seeded(3), seeded(4)]))


@on_ranks(4)
def test_replicas_have_prompts_and_noise_of_their_own() -> None:
    """Two, each of two guidance groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "guidance"))
    data, name = mesh.get_local_rank("data"), "wan"
    pipeline, prompt = make_pipeline(name), prompt_of(name, seed=data)
    pipeline.vae.enable_tiling()
    expected = generated(name, pipeline, prompt, generator=seeded(10 + data))
    with parallelize(pipeline, mesh) as handle:
        generator = seeded(10 + data + 5 * mesh.get_local_rank("guidance"))
        check(generated(name, pipeline, prompt, generator=generator), expected)
        assert handle.replica.whole is not None
        assert handle.replica.whole.ranks == (2 * data, 2 * data + 1)


class Drawing:
    """Draws as a pipeline does."""

    _execution_device = torch.device("cpu")

    def __init__(self) -> None:
        self.transformer = make_toy()

    def __call__(self, generator: Any = None) -> Tensor:
        return torch.randn(3, generator=generator)


@on_ranks(2)
def test_what_is_of_the_host_travels_where_the_group_carries_it() -> None:
    """Where tensors are that are broadcast by a group that carries none of the host, as NCCL's."""
    devices = list[str]()
    sent: Any = pipeline_run.broadcast

    def broadcast(group: RankGroup, what: Any, x: Tensor) -> Tensor:
        devices.append(x.device.type)
        return sent(group, what, torch.zeros(x.shape, dtype=x.dtype))

    def all_reduce(group: RankGroup, what: Any, x: Tensor) -> Tensor:
        devices.append(x.device.type)
        return torch.ones(x.shape, dtype=x.dtype)

    modules: list[Any] = [pipeline_run, verify]
    modules[0].groups = SimpleNamespace(device_of=lambda _: torch.device("meta"))
    modules[1].device_of = modules[0].groups.device_of
    for module in modules:  # of this rank's process alone
        module.broadcast = broadcast
        module.set_random_states, module.all_reduce = lambda *_: None, all_reduce
    pipeline = Drawing()
    with parallelize(pipeline, ulysses_degree=2, table=TABLE):
        pipeline(mine())
    whole = member_of(resolve(None), "world")
    devices.append(verify.of_first_rank(torch.ones(2), whole).device.type + " again")
    verify.errors_of({"x": torch.ones(2)}, whole)
    assert devices == ["meta", "meta", "cpu again", "meta"]


class Device:
    """A module of torch for one device, which has a generator of its own."""

    def __init__(self) -> None:
        self.generator = mine(10)

    def get_rng_state(self, _: torch.device) -> Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor, _: torch.device) -> None:
        self.generator.set_state(state)


@on_ranks(2)
def test_ranks_draw_alike_on_the_device_that_a_pipeline_names_later() -> None:
    """Weights are on the host, and noise is drawn elsewhere, as is known later."""
    device: Any = Device()
    torch.get_device_module = lambda *_: device
    pipeline = Drawing()
    with parallelize(pipeline, ulysses_degree=2, table=TABLE):
        pipeline._execution_device = torch.device("xpu")
        pipeline()
    drawn = torch.rand(1, generator=device.generator)
    assert torch.equal(drawn, by_one_rank(lambda: drawn))


def guided_by_two_models() -> None:
    """Ideogram: each group computes the passes of one of them."""
    pipeline, calls = make_pipeline("ideogram"), list[str]()
    latent = {"output_type": "latent"}
    for name in ("transformer", "unconditional_transformer"):
        layer = getattr(pipeline, name).layers[0]
        layer.register_forward_hook(lambda *_, name=name: calls.append(name))
    expected = generated("ideogram", pipeline, prompt_of("ideogram"), generator=seeded(1), **latent)
    alone = len(calls)
    shares: list[tuple[dict[str, Any], float]] = [
        ({"guidance_degree": 2}, 0.5),
        ({"ulysses_degree": 2}, 1.0),
    ]
    for degrees, share in shares:
        with parallelize(pipeline, **degrees):
            generated("ideogram", pipeline, prompt_of("ideogram"), **latent)
            calls.clear()
            prompt = prompt_of("ideogram")
            check(generated("ideogram", pipeline, prompt, generator=mine(), **latent), expected)
            assert len(calls) == share * alone


@on_ranks(2)
def test_a_result_is_exchanged_when_it_is_used() -> None:
    """Results that wait, of a model that returns a tensor and of one that returns an output."""
    toy, counted = make_toy(), list[int]()
    inputs = [toy_inputs(text=length, batch=1, seed=length) for length in (5, 3, 4)]
    pipeline = make_pipeline("flux")
    flux, seen = pipeline.transformer, list[dict[str, Any]]()
    hook = flux.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs | {"return_dict": True}), with_kwargs=True
    )
    image(pipeline)
    hook.remove()
    with torch.no_grad():
        expected = [toy(**one) for one in inputs]
        samples = [flux(**one).sample for one in seen[:2]]
        count = toy.register_forward_hook(lambda *_: counted.append(1))
        with parallelize(toy, guidance_degree=2, table=TABLE) as handle:
            outputs = [toy(**one) for one in inputs]  # all know the form after the first
            assert len(counted) == 2  # of three calls, the first by both
            part, sign = outputs[1][:, :1], -outputs[1]
            other = outputs[1][torch.tensor([0])]  # made of what may change: it is fetched
            waits = [type(one) is Pending for one in (*outputs, part, sign, other)]
            assert waits == [True] * 5 + [False]
            part.add_(1.0)  # a view of the result; the other one is a copy
            check(outputs[1][:, :1] - 1.0, expected[1][:, :1], 1e-12)
            check(sign, -expected[1], 1e-12)
            outputs[1][:, :1] -= 1.0
            assert outputs[1].shape == expected[1].shape
            for one, whole in zip(reversed(outputs), reversed(expected), strict=True):
                check(one + 0, whole, 1e-12)
            assert handle.verify(**inputs[0]).ok
        count.remove()
        with parallelize(flux, guidance_degree=2):
            both = [flux(**one) for one in seen[:2]]
            for one, sample in zip(both, samples, strict=True):
                assert type(one).__name__ == "Transformer2DModelOutput"
                check(one.sample, sample, 1e-6)


@on_ranks(2)
def test_ranks_that_round_unlike_have_the_same_pixels() -> None:
    """A rank rounds otherwise, as another GPU does, or a kernel tuned there."""
    for tiles in (False, True):
        pipeline = make_pipeline("flux")
        if tiles:
            pipeline.vae.enable_tiling()
        if dist.get_rank() == 1:
            pipeline.transformer.proj_out.register_forward_hook(lambda _, __, out: out * (1 + 1e-6))
        with parallelize(pipeline, guidance_degree=2):
            pixels = image(pipeline)
        assert torch.equal(pixels, by_one_rank(lambda made=pixels: made)), tiles


@pytest.mark.parametrize("num_groups", [2, 4])
@on_ranks(lambda num_groups: num_groups)
def test_samples_of_a_call_are_shared(num_groups: int) -> None:
    """Calls of two samples, with arguments for all; and fewer samples than groups."""
    num_groups, calls = dist.get_world_size(), list[int]()
    for name in ("pixart", "vace"):
        case = next(one for one in CASES if one.model == name)
        model, inputs = make_model(case), make_inputs(case) | {"return_dict": False}
        if name == "vace":
            inputs["control_hidden_states_scale"] = torch.tensor([0.5, 2.0])
        with torch.no_grad():
            expected = model(**inputs)[0]
            model.register_forward_hook(lambda *_: calls.append(1))
            with parallelize(model, guidance_degree=num_groups):
                for _ in range(3):
                    outputs = [model(**inputs)[0] for _ in range(2)]
                    for one in outputs:
                        check(one + 0, expected, 1e-5)
        # Of two calls of two samples each, four groups compute one sample each.
        assert len(calls) <= {2: 6, 4: 4}[num_groups]
        calls.clear()


class Meeting:
    """A call of a model that goes on when the other rank is in a call, too."""

    def __init__(self, name: str) -> None:
        self.name, self.num_calls = name, 0
        self._store: Any = dist.distributed_c10d._get_default_store()

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.num_calls += 1
        key = f"{self.name} {self.num_calls}"
        self._store.add(key, 1)
        deadline = time.monotonic() + 300.0
        while self._store.add(key, 0) < 2:
            assert time.monotonic() < deadline, f"{key}: the other rank waits for this one"
            time.sleep(0.01)


def computed_at_once(names: Sequence[str]) -> None:
    """Branches of a second image, which ranks compute at once: half of them on this rank."""
    for name in names:
        pipeline, prompt = make_pipeline(name), prompt_of(name)
        expected = generated(name, pipeline, prompt, generator=seeded(1), num_inference_steps=5)
        with parallelize(pipeline, guidance_degree=2) as handle:
            generated(name, pipeline, prompt)  # ranks learn what the model returns
            meeting = Meeting(name)
            for part in handle.parts:
                part.model.register_forward_pre_hook(meeting)
            images = generated(name, pipeline, prompt, generator=seeded(1), num_inference_steps=5)
        check(images, expected)
        assert meeting.num_calls == 5, name


def broken_off() -> None:
    """A result that its run did not use; and the next run."""
    pipeline, inputs = make_pipeline("flux"), dict[str, Any]()
    expected = image(pipeline)
    with torch.no_grad(), parallelize(pipeline, guidance_degree=2):
        hook = pipeline.transformer.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.update(kwargs), with_kwargs=True
        )
        image(pipeline)
        hook.remove()
        pending = pipeline.transformer(**inputs)[0]
        check(image(pipeline), expected)
        assert "of a run that ended" in raised_by(pending.sum)[1]


def cached() -> None:
    """A cache of steps keeps what each branch gave, in the group that computes it."""
    from diffusers.hooks.first_block_cache import FirstBlockCacheConfig
    from diffusers.hooks.pyramid_attention_broadcast import PyramidAttentionBroadcastConfig
    from diffusers.hooks.taylorseer_cache import TaylorSeerCacheConfig

    steps, pipeline = {"num_inference_steps": 5}, make_pipeline("flux")
    flux = pipeline.transformer
    flux.enable_cache(TaylorSeerCacheConfig(cache_interval=3, max_order=1))
    expected = image(pipeline, **steps)
    flux.disable_cache()
    assert float((image(pipeline, **steps) - expected).abs().max()) > 1e-5
    with parallelize(pipeline, guidance_degree=2):
        for _ in range(2):
            flux.enable_cache(TaylorSeerCacheConfig(cache_interval=3, max_order=1))
            check(image(pipeline, **steps), expected, 1e-5)
            flux.disable_cache()
        broadcast = PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
        )
        flux.enable_cache(broadcast)
        reason = "keeps one state for all guidance branches"
        assert reason in raised_by(image, pipeline)[1]
        flux.disable_cache()
        flux.enable_cache(FirstBlockCacheConfig(threshold=0.1))
        reason = "decides by all samples of a batch, which groups share"
        assert reason in raised_by(image, pipeline, num_images_per_prompt=2)[1]
        flux.disable_cache()


def copied() -> None:
    """Over ranks it is what it was to its users; a copy of it runs alone, as itself after undo."""
    pipeline = make_pipeline("flux")
    pipeline.vae.enable_tiling()
    parts = pipeline, pipeline.vae, pipeline.transformer
    expected, kinds = image(pipeline), [type(one) for one in parts]
    signature = inspect.signature(pipeline)
    with parallelize(pipeline, guidance_degree=2) as handle:
        assert inspect.signature(pipeline) == signature and isinstance(pipeline, kinds[0])
        assert [type(one).__name__ for one in parts] == [kind.__name__ for kind in kinds]
        other, pickled = copy.deepcopy(pipeline), pickle.loads(pickle.dumps(pipeline.vae))
        with handle.timed():
            handle.undo()
        assert [type(one) for one in parts] == kinds
    assert type(other) is kinds[0] and type(pickled) is type(other.vae) is kinds[1]
    if dist.get_rank() == 0:  # by itself
        check(image(other), expected, 0.0)
        check(image(pipeline), expected, 0.0)


def in_threads() -> None:
    """Requests that several threads answer, one at a time."""
    pipeline, images = make_pipeline("flux"), list[Tensor]()
    expected = image(pipeline)
    with parallelize(pipeline, guidance_degree=2):
        for _ in range(2):
            thread = threading.Thread(target=lambda: images.append(image(pipeline)))
            thread.start()
            thread.join()
            images.append(image(pipeline))
    assert len(images) == 4
    for one in images:
        check(one, expected, 1e-5)


def compiled() -> None:
    """Results wait outside of the graph."""
    toy = make_toy(num_blocks=1)
    inputs = [toy_inputs(text=5, batch=1, seed=seed) for seed in (1, 2)]
    with torch.no_grad():
        expected = [toy(**one) for one in inputs]
        with parallelize(toy, guidance_degree=2, table=TABLE) as handle:
            handle.compile()
            toy(**inputs[0])
            outputs = [toy(**one) for one in inputs]
            assert [type(one) for one in outputs] == [Pending] * 2
            for one, whole in zip(outputs, expected, strict=True):
                check(one + 0, whole, 1e-12)
        assert toy._compiled_call_impl is None
        wrapper: Any = torch.compile(toy, backend="aot_eager")
        for when in ("not called yet", "called"):
            with parallelize(wrapper, ulysses_degree=2, table=TABLE) as handle:
                assert handle.model is toy, when
                check(wrapper(**inputs[0]), expected[0], 1e-12)
            check(wrapper(**inputs[0]), expected[0], 1e-12)


def encoded() -> None:
    """Prompts of a batch, encoded by the ranks in turn; and text encoders that FSDP has sharded."""
    pipeline, latent = make_pipeline("texts"), {"output_type": "latent"}

    def latents() -> Tensor:
        return generated("texts", pipeline, prompt_of("texts"), generator=seeded(1), **latent)

    expected = latents()
    ways: tuple[Any, ...] = "all", "own", "all"
    for place, way in enumerate(ways):
        with parallelize(pipeline, ring_degree=2, text_encoders=way) as handle:
            check(latents(), expected)
            assert ("encode: " in str(handle.explain())) == (way == "all")
        if place == 0:
            fully_shard(pipeline.text_encoder_2)


def sister(pipeline: Any, name: str) -> Any:
    """Another pipeline with the same models and scheduler."""
    made = getattr(importlib.import_module("diffusers"), name)(**pipeline.components)
    made.set_progress_bar_config(disable=True)
    return made


def edited(pipeline: Any, **others: Any) -> Tensor:
    """Pixels of a photo that is changed, from noise that torch draws at large."""
    prompt = {key: x for key, x in prompt_of("flux").items() if "negative" not in key}
    photo = torch.rand(1, 3, 44, 36, generator=seeded(5))
    settings = {"image": photo, "strength": 0.6, "num_inference_steps": 5, "true_cfg_scale": 1.0}
    return generated("flux", pipeline, {**prompt, **settings}, **others)


def of_one_model() -> None:
    """Pipelines that share a split model: noise of their own, and noise of all ranks."""
    pipeline = make_pipeline("flux")
    edits = sister(pipeline, "FluxImg2ImgPipeline")
    torch.manual_seed(7)
    expected = [edited(edits), image(pipeline), edited(edits), edited(edits)]
    torch.manual_seed(7)
    with parallelize(pipeline, ulysses_degree=2) as handle:
        images = [edited(edits), image(pipeline), edited(edits)]
        handle.add(edits)
        torch.rand(dist.get_rank())  # as a data loader draws on one rank
        images.append(edited(edits))
    for one, wanted in zip(images, expected, strict=True):
        check(one, wanted)


def changed_while_split() -> None:
    """Tiles that are turned on, or off, and another VAE: as in one process."""
    pipeline, other = make_pipeline("flux"), make_pipeline("flux").vae
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    own = pipeline.vae

    def turn_to(vae: Any, tiles: bool) -> Tensor:
        pipeline.vae, vae.use_tiling = vae, tiles
        return image(pipeline)

    steps = [(own, False), (own, True), (own, False), (other, True), (own, True)]
    expected = [turn_to(*one) for one in steps]
    own.use_tiling = False
    pipeline.vae = own
    with parallelize(pipeline, ring_degree=2) as handle:
        for step, wanted in zip(steps, expected, strict=True):
            check(turn_to(*step), wanted)
            assert ("decode: " in str(handle.explain())) == (step is not steps[0])
    assert type(own) is type(other) is type(make_pipeline("flux").vae)
    apart = [float((x - y).abs().max()) for x, y in pairwise(expected)]
    assert min(apart) > 1e-3  # of what each change does


def first_only() -> None:
    for name in ("flux", "kontext"):  # which also encodes a photo, for all ranks
        pipeline = make_pipeline(name)
        pipeline.vae.enable_tiling()
        expected = generated(name, pipeline, prompt_of(name), generator=seeded(1))
        with parallelize(pipeline, guidance_degree=2, vae="first"):
            images = generated(name, pipeline, prompt_of(name), generator=seeded(1))
        assert len(images) == 1 - dist.get_rank()
        if len(images):
            check(images, expected)


@pytest.mark.parametrize(
    "run",
    [
        drawn_alike,
        guided_by_two_models,
        pytest.param(partial(computed_at_once, ("flux", "wan")), id="computed_at_once"),
        pytest.param(partial(computed_at_once, ONE_BY_ONE), marks=pytest.mark.stress, id="all"),
        broken_off,
        cached,
        copied,
        in_threads,
        pytest.param(compiled, marks=pytest.mark.stress),
        encoded,
        of_one_model,
        changed_while_split,
        first_only,
    ],
)
def test_two_ranks_as_one_process(run: Any) -> None:
    run_ranks(run, 2)


def failing_branch() -> str:
    """One rank of the second group fails; the first group has nothing to do with it."""
    pipeline, calls = make_pipeline("wan"), list[int]()

    def fail(module: nn.Module, args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("enough of this image")

    with parallelize(pipeline, guidance_degree=2, ulysses_degree=2):
        if dist.get_rank() == 3:
            pipeline.transformer.blocks[0].register_forward_pre_hook(fail)
        return raised_by(generated, "wan", pipeline, prompt_of("wan"), generator=seeded(1))[1]


def failing_callback() -> str:
    """The user's own code fails on one rank, between two steps."""
    pipeline = make_pipeline("flux")

    def callback(_: Any, step: int, __: Any, values: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("enough of this image")
        return values

    with parallelize(pipeline, guidance_degree=dist.get_world_size()):
        return raised_by(image, pipeline, callback_on_step_end=callback)[1]


@pytest.mark.parametrize(("run", "num_ranks"), [(failing_branch, 4), (failing_callback, 2)])
def test_a_rank_that_fails_ends_all(run: Any, num_ranks: int) -> None:
    for text in run_ranks(run, num_ranks):
        assert "enough of this image" in text


@on_ranks(4)
def test_auto_chooses_a_mesh_for_all_ranks() -> None:
    pipeline, meshes = make_pipeline("flux"), list[str]()  # two heads
    for mesh in ("auto", AutoMesh(num_passes=2), AutoMesh(num_passes=2, max_ring_degree=1)):
        with parallelize(pipeline, mesh) as handle:
            assert handle.choice is not None
            meshes.append(str(handle.choice.chosen))
            image(pipeline)
    assert meshes[0] == "guidance 1 x ring 2 x Ulysses 2"
    assert meshes[1:] == ["guidance 2 x ring 1 x Ulysses 2"] * 2


@on_ranks(2)
def test_what_cannot_be_done_is_refused_on_all_ranks() -> None:
    pipeline, rank = make_pipeline("flux"), dist.get_rank()
    toy = make_toy()

    def refuse(reason: str, call: Any, /, *args: Any, **kwargs: Any) -> None:
        text = raised_by(call, *args, **kwargs)[1]
        assert reason in text, text

    with parallelize(pipeline, guidance_degree=2, sparse=SparseConfig(keep=0.5)) as handle:
        refuse("a guidance group computes only some", handle.save_masks("masks.npz").__enter__)
    video = make_pipeline("wan")
    video.vae.enable_tiling()
    frames = "would put together a video of no frames"
    refuse(frames, parallelize, video, ring_degree=2, vae="first")
    with torch.no_grad(), parallelize(toy, guidance_degree=2, table=TABLE):
        more = toy_inputs(batch=2) | {"text": toy_inputs(batch=3)["text"]}
        refuse("image has the shape (2, 9, 4) in a call of 3 samples", toy, **more)
    with parallelize(pipeline, guidance_degree=2) as handle:
        latents = torch.randn(1, 99, 16, generator=mine())
        refuse("disagree on latents", image, pipeline, latents=latents)
        refuse("disagree on generator", image, pipeline, generator=[None, seeded(1)][rank])
        sigmas = np.array([1.0, 0.5 - 0.1 * rank])
        refuse("disagree on sigmas", image, pipeline, sigmas=sigmas)
        pipeline.scheduler.set_shift(2.0 + rank)
        refuse("disagree on scheduler", image, pipeline)
        pipeline.scheduler.set_shift(1.0)
        pipeline.vae.use_tiling = rank == 1
        refuse("disagree on vae", image, pipeline)
        pipeline.vae.use_tiling = False
        paint = sister(pipeline, "FluxInpaintPipeline")
        handle.add(paint)
        mask = Image.new("L", (36, 44))
        mask.paste(255, (0, 0, 12 + 4 * rank, 44))
        refuse("disagree on mask_image", edited, paint, mask_image=mask)
        image(pipeline)  # all of them can go on
        pipeline.transformer = copy.deepcopy(pipeline.transformer)
        refuse("transformer of this FluxPipeline is not one of the models", image, pipeline)
        refuse("transformer of this FluxPipeline", handle.add, pipeline)
        pipeline.transformer = handle.model
    if rank:
        pipeline.vae.enable_tiling()
    refuse("disagree on shared parts", parallelize, pipeline, guidance_degree=2)
    fully_shard(toy)
    refuse("Toy is sharded by FSDP", parallelize, toy, guidance_degree=2, table=TABLE)
