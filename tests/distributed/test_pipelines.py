"""Whole pipelines over ranks: the pixels of one process, the same on all ranks of a replica."""

import copy
import math
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bascule.diffusers import AutoMesh, SparseConfig, parallelize
from bascule.diffusers.pending import Pending
from tests.helpers.inference_toy import TABLE, make_toy, toy_inputs
from tests.helpers.pipeline_cases import (
    ONE_BY_ONE,
    PIPELINES,
    generated,
    make_pipeline,
    prompt_of,
    seeded,
    with_text_encoders,
)
from tests.helpers.ranks import raised_by, run_ranks

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow


def compared(name: str, pipeline: Any, prompt: Any, others: Any, degrees: Any) -> dict[str, Any]:
    """Over ranks, each with a generator of its own, against one process."""
    seeds = (1, 1 + dist.get_rank())
    one, own = ({"generator": seeded(seed), **others} for seed in seeds)
    before = generated(name, pipeline, prompt, **one)
    with parallelize(pipeline, **degrees) as handle:
        found = generated(name, pipeline, prompt, **own)
    one["generator"] = seeded(1)
    after = generated(name, pipeline, prompt, **one)
    return {
        "error": float((found - before).abs().max()),
        "pixels": found.numpy().tobytes(),
        "undone": torch.equal(before, after),
        "calls": [len(part.model._forward_hooks) for part in handle.parts],
    }


def all_cases(kind: str, degrees: dict[str, int]) -> list[dict[str, Any]]:
    """Each pipeline with and without guidance, tiles of the VAE, and several images."""
    found = list[dict[str, Any]]()
    for name in PIPELINES[kind]:
        pipeline = make_pipeline(name)
        found.append(compared(name, pipeline, prompt_of(name), {}, degrees))
        pipeline.vae.enable_tiling()
        # Some pipelines make one image of a prompt that is given as embeddings.
        num_prompts = {"cogvideox": 2, "sd3": 3}.get(name, 1)
        several = 1 if num_prompts > 1 else 3 if kind == "images" else 2
        others = {f"num_{kind}_per_prompt": several}
        prompts = prompt_of(name, num_prompts=num_prompts)
        found.append(compared(name, pipeline, prompts, others, degrees))
        found.append(compared(name, pipeline, prompt_of(name, is_guided=False), {}, degrees))
    return found


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize(
    "degrees",
    [
        {"guidance_degree": 2},
        {"guidance_degree": 2, "ulysses_degree": 2},
        {"guidance_degree": 2, "ring_degree": 2},
        {"ring_degree": 3},
    ],
    ids=str,
)
def test_pixels_are_those_of_one_process(kind: str, degrees: dict[str, int]) -> None:
    ranks = run_ranks(all_cases, math.prod(degrees.values()), kind, degrees)
    for cases in zip(*ranks, strict=True):
        assert len({case["pixels"] for case in cases}) == 1
        for case in cases:
            assert case["error"] <= 1e-4 and case["undone"] and not any(case["calls"])


def drawn_alike() -> list[float]:
    """Without generators, and with random numbers that differ between ranks."""
    found = list[float]()
    for name in ("flux", "cogvideox"):  # the schedulers draw in every step
        pipeline = make_pipeline(name, **({"stochastic_sampling": True} if name == "flux" else {}))
        torch.manual_seed(7)
        wanted = generated(name, pipeline, prompt_of(name))
        torch.manual_seed(7 + dist.get_rank())
        with parallelize(pipeline, guidance_degree=2):
            other = generated(name, pipeline, prompt_of(name))
            lists = [[seeded(one + extra) for one in (3, 4)] for extra in (0, dist.get_rank())]
            pair = prompt_of(name, num_prompts=2)
            both = generated(name, pipeline, pair, generator=lists[1])
        found.append(float((other - wanted).abs().max()))
        alone = generated(name, pipeline, pair, generator=lists[0])
        found.append(float((both - alone).abs().max()))
    return found


def test_noise_is_that_of_the_first_rank_also_in_stochastic_steps() -> None:
    for errors in run_ranks(drawn_alike, 2):
        assert max(errors) <= 1e-4


def replicas() -> dict[str, Any]:
    """Two, each of two guidance groups, with prompts and noise of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "guidance"))
    own, name = mesh.get_local_rank("data"), "wan"
    pipeline, prompt = make_pipeline(name), prompt_of(name, seed=own)
    pipeline.vae.enable_tiling()
    wanted = generated(name, pipeline, prompt, generator=seeded(10 + own))
    with parallelize(pipeline, mesh) as handle:
        whole = handle.replica.whole
        assert whole is not None
        mine = seeded(10 + own + 5 * mesh.get_local_rank("guidance"))
        found = generated(name, pipeline, prompt, generator=mine)
    return {"ranks": whole.ranks, "error": float((found - wanted).abs().max())}


def test_replicas_have_prompts_and_noise_of_their_own() -> None:
    found = run_ranks(replicas, 4)
    assert [one["ranks"] for one in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert max(one["error"] for one in found) <= 1e-4


def direct_calls() -> dict[str, Any]:
    """Results that wait, of a model that returns a tensor and of one that returns an output."""
    toy, found = make_toy(), dict[str, Any]()
    inputs = [toy_inputs(text=length, batch=1, seed=length) for length in (5, 3, 4)]
    pipeline = make_pipeline("flux")
    flux = pipeline.transformer
    seen = list[dict[str, Tensor]]()
    hook = flux.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    generated("flux", pipeline, prompt_of("flux"))
    hook.remove()
    with torch.no_grad():
        wanted = [toy(**one) for one in inputs]
        samples = [flux(**{**one, "return_dict": True}).sample for one in seen[:2]]
        counted = list[int]()
        count = toy.register_forward_hook(lambda *_: counted.append(1))
        with parallelize(toy, guidance_degree=2, table=TABLE) as handle:
            outputs = [toy(**one) for one in inputs]  # all know the form after the first
            found["pending"] = [type(one) is Pending for one in outputs]
            found["computed"] = len(counted)
            part, sign = outputs[1][:, :1], -outputs[1]
            other = outputs[1][torch.tensor([0])]  # made of what may change: it is fetched
            found["later"] = [type(one) is Pending for one in (part, sign, other)]
            part.add_(1.0)  # a view of the result; the other one is a copy
            views = outputs[1][:, :1] - 1.0, wanted[1][:, :1]
            copies = sign, -wanted[1]
            found["views"] = [float((a - b).abs().max()) for a, b in (views, copies)]
            outputs[1][:, :1] -= 1.0
            sums = [one + 0 for one in reversed(outputs)]
            found["toy"] = max(
                float((a - b).abs().max()) for a, b in zip(sums, wanted[::-1], strict=True)
            )
            found["shape"] = outputs[1].shape == wanted[1].shape and isinstance(sums[0], Tensor)
            found["verify"] = handle.verify(**inputs[0]).ok
        count.remove()
        with parallelize(flux, guidance_degree=2):
            both = [flux(**{**one, "return_dict": True}) for one in seen[:2]]
            found["classes"] = {type(one).__name__ for one in both}
            found["flux"] = [
                float((one.sample - x).abs().max()) for one, x in zip(both, samples, strict=True)
            ]
    return found


def test_a_result_is_exchanged_when_it_is_used() -> None:
    ranks = run_ranks(direct_calls, 2)
    assert [found["computed"] for found in ranks] == [2, 2]  # of three, the first by both
    for found in ranks:
        assert found["pending"] == [True] * 3 and found["shape"] and found["verify"]
        assert found["later"] == [True, True, False] and max(found["views"]) < 1e-12
        assert found["toy"] < 1e-12 and found["classes"] == {"Transformer2DModelOutput"}
        assert max(found["flux"]) < 1e-6


def round_unlike() -> list[Tensor]:
    """Pixels where a rank rounds otherwise, as another GPU does, or a kernel tuned there."""
    found = list[Tensor]()
    for tiles in (False, True):
        pipeline = make_pipeline("flux")
        if tiles:
            pipeline.vae.enable_tiling()
        if dist.get_rank() == 1:
            pipeline.transformer.proj_out.register_forward_hook(lambda _, __, out: out * (1 + 1e-6))
        with parallelize(pipeline, guidance_degree=2):
            found.append(generated("flux", pipeline, prompt_of("flux"), generator=seeded(1)))
    return found


def test_ranks_that_round_unlike_have_the_same_pixels() -> None:
    first, second = run_ranks(round_unlike, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def calls_of_samples() -> dict[str, float]:
    """Samples in dicts, arguments without samples, and fewer samples than groups."""
    import diffusers as host

    diffusers: Any = host
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_attention_heads": 2, "in_channels": 4, "out_channels": 4}
    pixart = diffusers.PixArtTransformer2DModel(
        **sizes,
        attention_head_dim=24,
        num_layers=1,
        norm_num_groups=1,
        cross_attention_dim=48,
        sample_size=128,
        caption_channels=32,
    )
    vace = diffusers.WanVACETransformer3DModel(
        **sizes,
        attention_head_dim=12,
        text_dim=32,
        freq_dim=16,
        ffn_dim=16,
        num_layers=3,
        vace_layers=[0, 2],
        vace_in_channels=4,
    )

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    random = seeded(1)
    text = {"encoder_hidden_states": draw(2, 5, 32), "timestep": torch.tensor([500.0, 500.0])}
    conditions = {"resolution": torch.full((2, 2), 64.0), "aspect_ratio": torch.ones(2, 1)}
    pixels = {"hidden_states": draw(2, 4, 8, 8), "added_cond_kwargs": conditions}
    video = {name: draw(2, 4, 2, 8, 8) for name in ("hidden_states", "control_hidden_states")}
    video["control_hidden_states_scale"] = torch.tensor([0.5, 2.0])
    found = dict[str, float]()
    with torch.no_grad():
        for model, inputs in ((pixart, pixels), (vace, video)):
            wanted = model.eval()(**text, **inputs, return_dict=False)[0]
            calls = list[int]()
            count = model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            errors = list[float]()
            with parallelize(model, guidance_degree=dist.get_world_size()):
                for _ in range(3):
                    made = [model(**text, **inputs, return_dict=False)[0] for _ in range(2)]
                    errors += [float((one - wanted).abs().max()) for one in made]
            count.remove()
            found[type(model).__name__] = max(errors)
            found[f"{type(model).__name__} calls"] = len(calls)
    return found


@pytest.mark.parametrize(("num_groups", "num_calls"), [(2, 6), (4, 4)])
def test_samples_of_a_call_are_shared(num_groups: int, num_calls: int) -> None:
    """Of two calls of two samples each, four groups compute one sample each."""
    for found in run_ranks(calls_of_samples, num_groups):
        for name, value in found.items():
            limit = num_calls if "calls" in name else 1e-5
            assert value <= limit, (name, found)


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


def met() -> dict[str, tuple[int, float]]:
    """Branches of a second image, which ranks compute at once; so many on this rank."""
    found = dict[str, tuple[int, float]]()
    for name in ONE_BY_ONE:
        pipeline, prompt = make_pipeline(name), prompt_of(name)
        wanted = generated(name, pipeline, prompt, generator=seeded(1), num_inference_steps=5)
        with parallelize(pipeline, guidance_degree=2) as handle:
            generated(name, pipeline, prompt)  # ranks learn what the model returns
            meeting = Meeting(name)
            for part in handle.parts:
                part.model.register_forward_pre_hook(meeting)
            image = generated(name, pipeline, prompt, generator=seeded(1), num_inference_steps=5)
        found[name] = meeting.num_calls, float((image - wanted).abs().max())
    return found


def test_branches_are_computed_at_once() -> None:
    for found in run_ranks(met, 2):
        for name, (num_calls, error) in found.items():
            assert num_calls == 5 and error <= 1e-4, (name, found)


class Failing:
    """A step that one rank cannot compute."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise ValueError("this branch cannot be computed")


def broken_off() -> tuple[str, float]:
    """A run that ends between two branches, on all ranks alike; and the next one."""
    pipeline, prompt = make_pipeline("flux"), prompt_of("flux")
    wanted = generated("flux", pipeline, prompt, generator=seeded(1))
    kept = dict[str, Any]()

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        kept.update(kwargs)

    with parallelize(pipeline, guidance_degree=2):
        hook = pipeline.transformer.register_forward_pre_hook(keep, with_kwargs=True)
        generated("flux", pipeline, prompt)
        hook.remove()
        with torch.no_grad():
            pending = pipeline.transformer(**kept)[0]
        found = generated("flux", pipeline, prompt, generator=seeded(1))
        said = raised_by(pending.sum)[1]
    return said, float((found - wanted).abs().max())


def test_what_a_run_left_when_it_was_broken_off_is_forgotten() -> None:
    for said, error in run_ranks(broken_off, 2):
        assert "of a run that ended" in said and error <= 1e-4


def cached() -> tuple[list[float], list[str]]:
    """A cache of steps keeps what each branch gave, in the group that computes it."""
    from diffusers.hooks.first_block_cache import FirstBlockCacheConfig
    from diffusers.hooks.pyramid_attention_broadcast import PyramidAttentionBroadcastConfig
    from diffusers.hooks.taylorseer_cache import TaylorSeerCacheConfig

    name, found, said = "flux", list[Tensor](), list[str]()
    steps = {"num_inference_steps": 5}
    pipeline, prompt = make_pipeline(name), prompt_of(name)
    pipeline.transformer.enable_cache(TaylorSeerCacheConfig(cache_interval=3, max_order=1))
    wanted = generated(name, pipeline, prompt, generator=seeded(1), **steps)
    pipeline.transformer.disable_cache()
    found.append(generated(name, pipeline, prompt, generator=seeded(1), **steps))
    with parallelize(pipeline, guidance_degree=2):
        for _ in range(2):
            config = TaylorSeerCacheConfig(cache_interval=3, max_order=1)
            pipeline.transformer.enable_cache(config)
            found.append(generated(name, pipeline, prompt, generator=seeded(1), **steps))
            pipeline.transformer.disable_cache()
        broadcast = PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
        )
        for config, num_images in ((broadcast, 1), (FirstBlockCacheConfig(threshold=0.1), 2)):
            pipeline.transformer.enable_cache(config)
            others = {"num_images_per_prompt": num_images}
            said.append(raised_by(generated, name, pipeline, prompt, **others)[1])
            pipeline.transformer.disable_cache()
    return [float((images - wanted).abs().max()) for images in found], said


def test_caches_of_steps_belong_to_branches() -> None:
    for (uncached, first, second), said in run_ranks(cached, 2):
        assert max(first, second) <= 1e-5 < uncached
        assert "keeps one state for all guidance branches" in said[0]
        assert "decides by all samples of a batch, which groups share" in said[1]


def copies() -> float:
    """A copy of a pipeline over ranks runs alone."""
    pipeline, prompt = make_pipeline("flux"), prompt_of("flux")
    wanted = generated("flux", pipeline, prompt, generator=seeded(1))
    with parallelize(pipeline, guidance_degree=2):
        other = copy.deepcopy(pipeline)
    if dist.get_rank() == 1:  # by itself
        return 0.0
    return float((generated("flux", other, prompt, generator=seeded(1)) - wanted).abs().max())


def test_a_copy_of_a_pipeline_runs_alone() -> None:
    assert max(run_ranks(copies, 2)) == 0.0


def in_threads() -> list[float]:
    """Requests that several threads answer, one at a time."""
    pipeline, prompt, found = make_pipeline("flux"), prompt_of("flux"), list[Tensor]()
    wanted = generated("flux", pipeline, prompt, generator=seeded(1))

    def answer() -> None:
        found.append(generated("flux", pipeline, prompt, generator=seeded(1)))

    with parallelize(pipeline, guidance_degree=2):
        for _ in range(2):
            thread = threading.Thread(target=answer)
            thread.start()
            thread.join()
            answer()
    return [float((images - wanted).abs().max()) for images in found]


def test_threads_take_turns() -> None:
    for errors in run_ranks(in_threads, 2):
        assert len(errors) == 4 and max(errors) <= 1e-5


def failing_branch() -> tuple[list[str], str]:
    """One rank of the second group fails; the first group has nothing to do with it."""
    pipeline = make_pipeline("wan")
    with parallelize(pipeline, guidance_degree=2, ulysses_degree=2):
        if dist.get_rank() == 3:
            pipeline.transformer.blocks[0].register_forward_pre_hook(Failing(2))
        return raised_by(generated, "wan", pipeline, prompt_of("wan"), generator=seeded(1))


def test_a_rank_that_fails_in_one_branch_ends_all() -> None:
    for kinds, text in run_ranks(failing_branch, 4):
        assert "this branch cannot be computed" in text
        assert "CommError" in kinds or kinds[0] == "ValueError"


def compiled() -> float:
    """Results wait outside of the graph."""
    toy = make_toy(num_blocks=1)
    inputs = [toy_inputs(text=5, batch=1, seed=seed) for seed in (1, 2)]
    with torch.no_grad():
        wanted = [toy(**one) for one in inputs]
        with parallelize(toy, guidance_degree=2, table=TABLE) as handle:
            handle.compile()
            toy(**inputs[0])
            found = [toy(**one) for one in inputs]
            error = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
        assert toy._compiled_call_impl is None
    return error


def test_a_compiled_model_shares_branches() -> None:
    assert max(run_ranks(compiled, 2)) < 1e-12


def encoded() -> list[float]:
    """Prompts of a batch, encoded by the ranks in turn; and text encoders that FSDP has sharded."""
    pipeline, found = with_text_encoders(make_pipeline("flux")), list[float]()
    prompt = {"prompt": ["w1 w2 w3", "w4", "w5 w6"], "max_sequence_length": 8}
    sizes = {"height": 32, "width": 32, "num_inference_steps": 1, "output_type": "latent"}

    def latents() -> Tensor:
        return pipeline(**prompt, **sizes, generator=seeded(1)).images

    wanted = latents()
    encoders = pipeline.text_encoder, pipeline.text_encoder_2
    with parallelize(pipeline, ring_degree=2, text_encoders="all"):
        found.append(float((latents() - wanted).abs().max()))
    assert (pipeline.text_encoder, pipeline.text_encoder_2) == encoders
    fully_shard(pipeline.text_encoder_2)
    for way in ("own", "all"):
        with parallelize(pipeline, ring_degree=2, text_encoders=way):
            found.append(float((latents() - wanted).abs().max()))
    return found


def test_prompts_are_encoded_over_ranks() -> None:
    for errors in run_ranks(encoded, 2):
        assert max(errors) <= 1e-4


def first_only() -> list[tuple[int, float]]:
    found = list[tuple[int, float]]()
    for name in ("flux", "kontext"):  # which also encodes a photo, for all ranks
        pipeline = make_pipeline(name)
        pipeline.vae.enable_tiling()
        wanted = generated(name, pipeline, prompt_of(name), generator=seeded(1))
        with parallelize(pipeline, guidance_degree=2, vae="first"):
            made = generated(name, pipeline, prompt_of(name), generator=seeded(1))
        error = float((made - wanted[: len(made)]).abs().max()) if len(made) else 0.0
        found.append((len(made), error))
    return found


def test_the_first_rank_alone_may_get_the_pixels() -> None:
    for place, found in enumerate(run_ranks(first_only, 2)):
        assert [count for count, _ in found] == [1 - place] * 2
        assert max(error for _, error in found) <= 1e-4


def stopping_callback() -> tuple[list[str], str]:
    """The user's own code fails on one rank, between two steps."""
    pipeline = make_pipeline("flux")

    def callback(_: Any, step: int, __: Any, given: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("enough of this image")
        return given

    def run() -> None:
        with parallelize(pipeline, guidance_degree=2):
            generated("flux", pipeline, prompt_of("flux"), callback_on_step_end=callback)

    return raised_by(run)


def test_an_error_of_a_callback_is_told_to_the_others() -> None:
    for kinds, text in run_ranks(stopping_callback, 2):
        assert "enough of this image" in text and {"RuntimeError", "CommError"} & set(kinds)


def explained() -> str:
    pipeline = make_pipeline("flux")
    with parallelize(pipeline, guidance_degree=2) as handle:
        generated("flux", pipeline, prompt_of("flux"))
        return str(handle.explain())


def test_explain_tells_guidance() -> None:
    for said in run_ranks(explained, 2):
        assert "guidance: 2 groups of ranks share branches and samples; this rank sent 0.0" in said


def chosen() -> list[str]:
    pipeline = make_pipeline("flux")  # two heads
    said = list[str]()
    for mesh in ("auto", AutoMesh(num_passes=2), AutoMesh(num_passes=2, max_ring_degree=1)):
        with parallelize(pipeline, mesh) as handle:
            assert handle.choice is not None
            said.append(str(handle.choice.chosen))
            generated("flux", pipeline, prompt_of("flux"), generator=seeded(1))
    return said


def test_auto_chooses_a_mesh_for_all_ranks() -> None:
    for said in run_ranks(chosen, 4):
        assert said == [
            "guidance 1 x ring 2 x Ulysses 2",
            *["guidance 2 x ring 1 x Ulysses 2"] * 2,
        ]


def refused() -> list[str]:
    pipeline, rank = make_pipeline("flux"), dist.get_rank()
    toy, inputs, said = make_toy(), toy_inputs(batch=1), list[str]()

    def told(call: Any, *args: Any, **kwargs: Any) -> None:
        said.append(raised_by(call, *args, **kwargs)[1])

    told(parallelize, pipeline, guidance_degree=3)
    told(parallelize, pipeline, "auto", ring_degree=2)
    told(parallelize, make_toy(), "auto", table=TABLE)
    told(parallelize, pipeline, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)))
    told(parallelize, pipeline, guidance_degree=2, sparse=SparseConfig(keep=0.5))
    told(parallelize, pipeline, ring_degree=2, vae="first")
    told(parallelize, pipeline, ring_degree=2, vae="none")
    video = make_pipeline("wan")
    video.vae.enable_tiling()
    told(parallelize, video, ring_degree=2, vae="first")
    with parallelize(toy, guidance_degree=2, table=TABLE):
        told(toy, **inputs)
        with torch.no_grad():
            told(toy, **toy_inputs(batch=2) | {"text": inputs["text"].expand(3, -1, -1)})
    with parallelize(pipeline, guidance_degree=2):
        latents = torch.randn(1, 99, 16, generator=seeded(rank))
        told(generated, "flux", pipeline, prompt_of("flux"), latents=latents)
        told(generated, "flux", pipeline, prompt_of("flux", seed=rank))
        told(generated, "flux", pipeline, prompt_of("flux") | {"true_cfg_scale": 3.0 + rank / 100})
        told(generated, "flux", pipeline, prompt_of("flux"), num_inference_steps=2 + rank)
        generated("flux", pipeline, prompt_of("flux"))  # all of them can go on
    if rank:
        pipeline.vae.enable_tiling()
    told(parallelize, pipeline, guidance_degree=2)
    fully_shard(toy)
    told(parallelize, toy, guidance_degree=2, table=TABLE)
    return said


def test_what_cannot_be_done_is_refused_on_all_ranks() -> None:
    texts = (
        "guidance 3 x ring 1 x Ulysses 1 on 2 ranks: the product of degrees must be 2",
        "give degrees, or let 'auto' choose them, not both",
        "a Toy does not say its num_attention_heads",
        "a mesh with the axes ('tensor',)",
        "block-sparse attention counts the forward passes of a step",
        "call pipeline.vae.enable_tiling() before parallelize",
        "'none'",
        "which cannot put together a video of no frames",
        "guidance over ranks has no gradients",
        "image has the shape (2, 9, 4) in a call of 3 samples",
        "disagree on latents",
        "disagree on negative_pooled_prompt_embeds",
        "disagree on true_cfg_scale",
        "disagree on num_inference_steps",
        "disagree on shared parts",
        "Toy is sharded by FSDP",
    )
    for said in run_ranks(refused, 2):
        assert len(said) == len(texts)
        for text, sentence in zip(texts, said, strict=True):
            assert text in sentence, sentence
