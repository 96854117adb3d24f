"""What users of diffusers do to a split model: autocast, caches, adapters, offload, pipelines."""

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bascule.diffusers import SparseConfig, parallelize
from tests.helpers.inference_cases import (
    USED,
    Case,
    Inputs,
    difference,
    joined,
    make_inputs,
    make_mesh,
    same,
    same_gradients,
    seeded_model,
    step_of,
)
from tests.helpers.inference_toy import grads_of
from tests.helpers.ranks import on_ranks, raised_by

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow

FLUX, QWEN, WAN, _ = USED
STEPS = 8
OF_FLUX = "TaylorSeer", "MagCache", "first block, often"
"""Caches that Flux has daily; Wan has all."""
_times = [1000]  # of the step that runs


@on_ranks(2)
def test_autocast_casts_what_is_attended() -> None:
    """Rows travel as bfloat16, and errors are those that one process has with it, too."""
    for place, case in enumerate(USED):
        model, inputs = seeded_model(case), make_inputs(case)
        truth = step_of(model, inputs)
        with torch.autocast("cpu", torch.bfloat16):
            alone = step_of(model, inputs)
        with parallelize(model, mesh=make_mesh(1 + place % 2, 2 - place % 2)) as handle:
            with torch.autocast("cpu", torch.bfloat16):
                output, _ = step_of(model, inputs)
            handle.average_gradients()
            found = output, grads_of(model)
            last = handle.parts[0].last
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                assert handle.verify(**inputs).ok, case
        assert last is not None
        head_dim = 12 if case.model == "wan" else 16
        assert {shape.row_bytes / head_dim for shape in last.shapes} == {2.0}, case
        for several, one, wanted in zip(found, alone, truth, strict=True):
            error = difference(joined(several), joined(wanted))
            assert 0 < error < 1.5 * difference(joined(one), joined(wanted)), case


def caches() -> dict[str, Callable[[], Any]]:
    """Those that leave out the same on all ranks."""
    from diffusers.hooks.faster_cache import FasterCacheConfig
    from diffusers.hooks.first_block_cache import FirstBlockCacheConfig
    from diffusers.hooks.mag_cache import MagCacheConfig
    from diffusers.hooks.pyramid_attention_broadcast import PyramidAttentionBroadcastConfig
    from diffusers.hooks.sea_cache import SeaCacheConfig
    from diffusers.hooks.taylorseer_cache import TaylorSeerCacheConfig

    def taylor(**options: Any) -> Any:
        return TaylorSeerCacheConfig(
            cache_interval=3,
            disable_cache_before_step=2,
            taylor_factors_dtype=torch.float32,
            **options,
        )

    def broadcast(kind: str) -> Any:
        options: Any = {f"{kind}_attention_block_skip_range": 2}
        options[f"{kind}_attention_block_identifiers"] = ("blocks",)
        return PyramidAttentionBroadcastConfig(current_timestep_callback=lambda: 500, **options)

    def faster() -> Any:
        return FasterCacheConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 850),
            spatial_attention_block_identifiers=("blocks",),
            is_guidance_distilled=True,
            current_timestep_callback=lambda: _times[0],
        )

    return {
        "broadcast of self attention": lambda: broadcast("spatial"),
        "broadcast of cross attention": lambda: broadcast("cross"),
        "TaylorSeer": lambda: taylor(cache_identifiers=[r".*blocks\.\d+\.attn1?"]),
        "TaylorSeer, light": lambda: taylor(use_lite_mode=True),
        "MagCache": lambda: MagCacheConfig(
            threshold=0.5, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS, max_skip_steps=2
        ),
        "SeaCache": lambda: SeaCacheConfig(threshold=100.0),
        "first block, seldom": lambda: FirstBlockCacheConfig(threshold=0.05),
        "first block, often": lambda: FirstBlockCacheConfig(threshold=0.3),
        "FasterCache": faster,
    }


def denoise(model: Any, steps: list[Inputs]) -> Tensor:
    outputs: list[Tensor] = []
    for step, inputs in enumerate(steps):
        _times[0] = 1000 - 100 * step
        where = {"step_index": step, "num_inference_steps": STEPS, "sigma": 0.9 - 0.1 * step}
        with torch.no_grad(), model.cache_context("cond", **where):
            outputs.append(model(**inputs).sample)
    return torch.stack(outputs)


def steps_of(case: Case, num_steps: int) -> list[Inputs]:
    """Only the last tokens change from step to step."""
    inputs, other = make_inputs(case), make_inputs(case, seed=5)["hidden_states"]
    dim = 3 if other.dim() == 5 else 1
    other = other * (torch.arange(other.shape[dim]) >= other.shape[dim] - 2).view(
        -1, *[1] * (other.dim() - dim - 1)
    )
    return [
        inputs | {"hidden_states": inputs["hidden_states"] + 0.2 * step * other}
        for step in range(num_steps)
    ]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.stress)])
@on_ranks(2)
def test_caches_give_what_one_process_gives(every: bool) -> None:
    """Caches of all models, or those of Wan and a few of Flux."""
    mesh = make_mesh(1, 2)
    for case in USED if every else (WAN, FLUX):
        steps = steps_of(case, STEPS)
        plain = denoise(seeded_model(case), steps)
        for name, make in caches().items():
            if not every and case == FLUX and name not in OF_FLUX:
                continue
            model = seeded_model(case)
            model.enable_cache(make())
            wanted = denoise(model, steps)
            model.disable_cache()
            model.enable_cache(make())
            with parallelize(model, mesh=mesh):
                same(denoise(model, steps), wanted, 1e-6, (case, name))
            # Only Wan has cross attention and a SeaCache.
            is_idle = case != WAN and ("cross" in name or "SeaCache" in name)
            assert is_idle or difference(wanted, plain) > 0, (case, name)


@on_ranks(2)
def test_caches_are_kept_when_a_model_is_split_and_undone() -> None:
    """A first-block cache that was filled before, and one that is used when undone."""
    make, mesh = caches()["first block, often"], make_mesh(1, 2)
    steps = steps_of(FLUX, STEPS)
    whole, model = seeded_model(FLUX), seeded_model(FLUX)
    whole.enable_cache(make())
    model.enable_cache(make())
    wanted = denoise(whole, steps)
    denoise(model, steps[:4])
    with parallelize(model, mesh=mesh):
        same(denoise(model, steps), wanted, 1e-6, "filled before")
        model.disable_cache()
        model.enable_cache(make())
        same(denoise(model, steps), wanted, 1e-6, "enabled while split")
    same(denoise(model, steps), wanted, 1e-6, "undone")
    model.disable_cache()
    plain = seeded_model(FLUX)(**steps[0]).sample
    same(model(**steps[0]).sample, plain, 1e-6, "without a cache")


@on_ranks(2)
def test_the_configuration_of_diffusers_is_an_argument() -> None:
    config: Any = importlib.import_module("diffusers").ContextParallelConfig
    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("ring", "ulysses", "fsdp"))
    asked = {
        (1, 2): [config(ulysses_degree=2, ulysses_anything=True)],
        (2, 1): [config(ring_degree=2, convert_to_fp32=False), config(ring_degree=2, mesh=mesh)],
    }
    model, inputs = seeded_model(FLUX), make_inputs(FLUX)
    with torch.no_grad():
        wanted = model(**inputs).sample
        for degrees, configs in asked.items():
            for one in configs:
                with parallelize(model, one) as handle:
                    assert handle.mesh.degrees == degrees
                    same(model(**inputs).sample, wanted, 1e-6, one)


def enable_theirs(model: Any, **degrees: int) -> None:
    config = importlib.import_module("diffusers").ContextParallelConfig(**degrees)
    # Without an accelerator it divides by their number.
    with mock.patch.object(torch.accelerator, "device_count", lambda: 1):
        model.enable_parallelism(config=config)


@pytest.mark.parametrize("kind", ["flux", "wan"])
@on_ranks(2)
def test_a_split_of_diffusers_is_taken_over_and_given_back(kind: str) -> None:
    """With lengths that it refuses, and below a cache that was enabled after it."""
    case, other = {
        "flux": (Case("flux", 4, 2, 8, (2, 4)), FLUX),
        "wan": (WAN, Case("wan", 4, 1, 3, (2, 2))),
    }[kind]
    model, make = seeded_model(case), caches()["first block, often"]
    inputs, others, steps = make_inputs(case), make_inputs(other), steps_of(case, STEPS)
    with torch.no_grad():
        wanted, plain = model(**inputs).sample, model(**others).sample
        model.enable_cache(make())
        cached = denoise(model, steps)
        model.disable_cache()
        enable_theirs(model, ulysses_degree=2)
        same(model(**inputs, return_dict=False)[0], wanted, 1e-6, "theirs")
        model.enable_cache(make())
        with parallelize(model) as handle:
            assert handle.mesh.degrees == (1, 2)
            same(denoise(model, steps), cached, 1e-6, "cached")
            model.disable_cache()
            same(model(**others).sample, plain, 1e-6, "ours")
            assert handle.verify(**others).ok
        same(model(**inputs, return_dict=False)[0], wanted, 1e-6, "theirs again")
        if kind == "flux":
            with pytest.raises(AssertionError, match="must be divisible by mesh size"):
                model(**others)
        with parallelize(model, ring_degree=2) as handle:
            same(model(**others).sample, plain, 1e-6, "a ring")
        model = seeded_model(case)
        enable_theirs(model, ring_degree=2)
        with parallelize(model) as handle:
            assert handle.mesh.degrees == (2, 1)
            same(model(**others).sample, plain, 1e-6, "their ring")


@on_ranks(2)
def test_other_caches_are_refused_before_anything_is_computed() -> None:
    from diffusers.hooks.mag_cache import MagCacheConfig
    from diffusers.hooks.sea_cache import SeaCacheConfig, apply_sea_cache

    mesh, mag = make_mesh(1, 2), caches()["MagCache"]

    def refuse(words: str, model: Any, case: Case, *, verifies: bool = False, **split: Any) -> None:
        with parallelize(model, mesh=mesh, **split) as handle, model.cache_context("cond"):
            call = handle.verify if verifies else model
            classes, text = raised_by(call, **make_inputs(case))
        assert "ConfigError" in classes and words in text, text

    by_tokens = "would decide by one rank's tokens which blocks it skips"
    for case in (FLUX, QWEN):
        model = seeded_model(case)
        apply_sea_cache(model, SeaCacheConfig(raw_vision_callback=lambda *_: None))
        refuse(by_tokens, model, case)
    model = seeded_model(WAN)
    model.enable_cache(MagCacheConfig(num_inference_steps=STEPS, calibrate=True))
    refuse(by_tokens, model, WAN)
    model.disable_cache()
    model.enable_cache(mag())
    refuse("the model uses a step cache", model, WAN, verifies=True)
    sparse = SparseConfig(keep=0.5, block=4)
    refuse("block-sparse attention with a step cache", model, WAN, sparse=sparse)
    model = seeded_model(WAN)
    model.enable_cache(mag())
    denoise(model, steps_of(WAN, 2))
    refuse("by values from before parallelize: empty the cache first", model, WAN)


@on_ranks(2)
def test_parameters_are_loaded_when_they_are_needed() -> None:
    from accelerate import cpu_offload

    model, inputs = seeded_model(WAN), make_inputs(WAN)
    with torch.no_grad():
        wanted = model(**inputs).sample
        cpu_offload(model, execution_device=torch.device("cpu"))
        assert next(model.parameters()).device.type == "meta"
        given: list[dict[str, Any]] = [{"mesh": make_mesh(1, 2)}, {"ring_degree": 2}]
        for options in given:
            with parallelize(model, **options) as handle:
                same(model(**inputs).sample, wanted, 1e-6, options)
                assert handle.verify(**inputs).ok, options


class Pipeline:
    """As Wan 2.2 has them, two experts."""

    def __init__(self, case: Case) -> None:
        self.transformer, self.transformer_2 = seeded_model(case), seeded_model(case)


@on_ranks(2)
def test_a_pipeline_with_two_transformers() -> None:
    """Each is verified and explained by itself."""
    pipeline, inputs = Pipeline(WAN), make_inputs(WAN)
    first, second = pipeline.transformer, pipeline.transformer_2
    with parallelize(pipeline, mesh=make_mesh(1, 2)) as handle, torch.no_grad():
        scale = 1.0 + 0.1 * dist.get_rank()
        hook = second.blocks[0].register_forward_hook(lambda *args: args[2] * scale)
        assert handle.verify(**inputs).ok and handle.verify(first, **inputs).ok
        assert not handle.verify(second, **inputs).ok
        hook.remove()
        assert handle.verify(second, **inputs).ok
        second(**make_inputs(Case("wan", 4, 1, 3, (2, 2))))
        first(**inputs)
        explained = handle.explain(second), handle.explain(first), handle.explain()
        assert [one.lengths["video"] for one in explained] == [8, 30, 30]
    assert handle.explain(second).lengths == {"video": 8}


@on_ranks(2)
def test_adapters_on_all_layers() -> None:
    """Adapters on all layers, the last one too: loaded while split, trained, and deleted."""
    pytest.importorskip("peft")
    import peft  # pyright: ignore[reportMissingImports]

    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    for case in USED:
        model, inputs = seeded_model(case), make_inputs(case)
        plain = model(**inputs).sample.detach()
        with parallelize(model, mesh=make_mesh(1, 2)) as handle:
            torch.manual_seed(1)
            model.add_adapter(config)
            output, _ = step_of(model, inputs)
            handle.average_gradients()
            grads = grads_of(model)
            assert handle.verify(**inputs).ok, case
            model.unload_lora()
            same(model(**inputs).sample, plain, 1e-5, (case, "unloaded"))
            torch.manual_seed(1)
            model.add_adapter(config)
        wanted, wanted_grads = step_of(model, inputs)
        same(output, wanted, 1e-5, case)
        same_gradients(grads, wanted_grads, 1e-5)
