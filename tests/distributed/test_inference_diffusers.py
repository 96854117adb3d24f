"""What users of diffusers do to a split model: autocast, caches, adapters, offload, pipelines."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bascule.diffusers import SparseConfig, parallelize
from tests.helpers.inference_cases import (
    Case,
    Inputs,
    difference,
    make_inputs,
    make_mesh,
    make_model,
)
from tests.helpers.ranks import on_ranks, raised_by, run_ranks

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow

MODELS = [
    Case("flux", 4, 2, 7, (3, 5)),
    Case("qwen", 4, 2, 7, (3, 5), ("mask",)),
    Case("wan", 4, 2, 7, (3, 5)),
    Case("cogvideox", 4, 2, 7, (3, 5)),
]
STEPS = 8
OF_FLUX = "TaylorSeer", "MagCache", "first block, often"
"""Caches that Flux has daily; Wan has all."""
_times = [1000]  # of the step that runs
Found = dict[str, Any]


def seeded_model(case: Case) -> Any:
    """The same for every call, also the biases that its class draws."""
    torch.manual_seed(0)
    return make_model(case)


def step_of(model: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Output, and all gradients, of a loss in float32."""
    model.zero_grad()
    output = model(**inputs).sample.float()
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
    (output * weights + output.square()).mean().backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return output.detach(), torch.cat(grads)


def under_autocast() -> Found:
    """By model: errors of one process and of a mesh, and the bytes of a value."""
    found: Found = {}
    for place, case in enumerate(MODELS):
        model, inputs = seeded_model(case), make_inputs(case)
        truth = step_of(model, inputs)
        with torch.autocast("cpu", torch.bfloat16):
            one = [difference(*pair) for pair in zip(step_of(model, inputs), truth, strict=True)]
        with parallelize(model, mesh=make_mesh(1 + place % 2, 2 - place % 2)) as handle:
            with torch.autocast("cpu", torch.bfloat16):
                output, _ = step_of(model, inputs)
            handle.average_gradients()
            grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            pairs = zip((output, torch.cat(grads)), truth, strict=True)
            last = handle.parts[0].last
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                verified = handle.verify(**inputs)
        assert last is not None
        head_dim = 12 if case.model == "wan" else 16
        widths = {shape.row_bytes / head_dim for shape in last.shapes}
        several = [difference(*pair) for pair in pairs]
        found[case.model] = one, several, widths, verified.ok
    return found


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


def with_caches(names: dict[str, Sequence[str]]) -> Found:
    """By model and cache, of these names: the error, and what the cache changes."""
    torch.set_num_threads(1)
    mesh, found = make_mesh(1, 2), Found()
    for case in (one for one in MODELS if one.model in names):
        steps = steps_of(case, STEPS)
        plain = denoise(seeded_model(case), steps)
        for name in names[case.model]:
            make = caches()[name]
            model = seeded_model(case)
            model.enable_cache(make())
            wanted = denoise(model, steps)
            model.disable_cache()
            model.enable_cache(make())
            with parallelize(model, mesh=mesh):
                error = difference(denoise(model, steps), wanted)
            found[f"{case.model}, {name}"] = error, difference(wanted, plain)
    return found


def kept_caches(mesh: Any) -> list[float]:
    """A first-block cache that was filled before, and one that is used when undone."""
    case, make = MODELS[0], caches()["first block, often"]
    steps = steps_of(case, STEPS)
    whole, model = seeded_model(case), seeded_model(case)
    whole.enable_cache(make())
    model.enable_cache(make())
    wanted = denoise(whole, steps)
    denoise(model, steps[:4])
    with parallelize(model, mesh=mesh):
        errors = [difference(denoise(model, steps), wanted)]
        model.disable_cache()
        model.enable_cache(make())
        errors.append(difference(denoise(model, steps), wanted))
    errors.append(difference(denoise(model, steps), wanted))
    model.disable_cache()
    return [*errors, difference(model(**steps[0]).sample, seeded_model(case)(**steps[0]).sample)]


def refused_caches(mesh: Any) -> dict[str, tuple[list[str], str]]:
    """What is said of caches that ranks cannot use, or not for this."""
    from diffusers.hooks.mag_cache import MagCacheConfig
    from diffusers.hooks.sea_cache import SeaCacheConfig, apply_sea_cache

    said: dict[str, tuple[list[str], str]] = {}
    by_tokens = SeaCacheConfig(raw_vision_callback=lambda *_: None)
    for case in MODELS[:2]:
        model, inputs = seeded_model(case), make_inputs(case)
        apply_sea_cache(model, by_tokens)
        with parallelize(model, mesh=mesh), model.cache_context("cond"):
            said[f"{case.model}, by tokens"] = raised_by(model, **inputs)
    model, inputs = seeded_model(MODELS[2]), make_inputs(MODELS[2])
    model.enable_cache(MagCacheConfig(num_inference_steps=STEPS, calibrate=True))
    with parallelize(model, mesh=mesh), model.cache_context("cond"):
        said["calibrated"] = raised_by(model, **inputs)
    model.disable_cache()
    model.enable_cache(caches()["MagCache"]())
    with parallelize(model, mesh=mesh) as handle, model.cache_context("cond"):
        said["verify"] = raised_by(handle.verify, **inputs)
    sparse = SparseConfig(keep=0.5, block=4)
    with parallelize(model, mesh=mesh, sparse=sparse), model.cache_context("cond"):
        said["sparse"] = raised_by(model, **inputs)
    model = seeded_model(MODELS[2])
    model.enable_cache(caches()["MagCache"]())
    denoise(model, steps_of(MODELS[2], 2))
    with parallelize(model, mesh=mesh), model.cache_context("cond"):
        said["filled before"] = raised_by(model, **inputs)
    return said


def offloaded() -> Found:
    """Parameters that are loaded when they are needed; a pipeline with two transformers."""
    from accelerate import cpu_offload

    found: Found = {}
    case = MODELS[2]
    model, inputs = seeded_model(case), make_inputs(case)
    with torch.no_grad():
        wanted = model(**inputs).sample
        cpu_offload(model, execution_device=torch.device("cpu"))
        assert next(model.parameters()).device.type == "meta"
        given: list[dict[str, Any]] = [{"mesh": make_mesh(1, 2)}, {"ring_degree": 2}]
        for options in given:
            with parallelize(model, **options) as handle:
                error = difference(model(**inputs).sample, wanted)
                found[f"offload {list(options)}"] = error
                found[f"offload {list(options)}, verified"] = handle.verify(**inputs).ok
    pipeline = Pipeline(case)
    with parallelize(pipeline, mesh=make_mesh(1, 2)) as handle, torch.no_grad():
        first, second = pipeline.transformer, pipeline.transformer_2
        scale = 1.0 + 0.1 * dist.get_rank()
        hook = second.blocks[0].register_forward_hook(lambda *args: args[2] * scale)
        found["first"] = handle.verify(**inputs).ok and handle.verify(first, **inputs).ok
        found["second is found to differ"] = not handle.verify(second, **inputs).ok
        hook.remove()
        found["second"] = handle.verify(second, **inputs).ok
        second(**make_inputs(Case("wan", 4, 1, 3, (2, 2))))
        first(**inputs)
        found["lengths"] = [handle.explain(one).lengths["video"] for one in (second, first)] + [
            handle.explain().lengths["video"]
        ]
    assert handle.explain(second).lengths == {"video": 8}
    return found


class Pipeline:
    """As Wan 2.2 has them, two experts."""

    def __init__(self, case: Case) -> None:
        self.transformer, self.transformer_2 = seeded_model(case), seeded_model(case)


def all_of_it() -> dict[str, Found]:
    """Importing diffusers takes six seconds a rank, so all share a world."""
    torch.set_num_threads(1)
    mesh = make_mesh(1, 2)
    return {
        "autocast": under_autocast(),
        "caches": with_caches({"wan": list(caches()), "flux": OF_FLUX}),
        "said": refused_caches(mesh),
        "kept": {"errors": kept_caches(mesh)},
        "offload": offloaded(),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Found]]:
    return run_ranks(all_of_it, 2)


def test_autocast_casts_what_is_attended(results: list[dict[str, Found]]) -> None:
    for found in (by_part["autocast"] for by_part in results):
        for one, several, widths, is_ok in found.values():
            assert widths == {2.0} and is_ok, found
            for error, of_one in zip(several, one, strict=True):
                assert 0 < error < 1.5 * of_one, found


def check_caches(results: list[Found]) -> None:
    for errors in results:
        assert max(error for error, _ in errors.values()) < 1e-6, errors
        idle = {name for name, (_, effect) in errors.items() if effect == 0}
        # Only Wan has cross attention and a SeaCache.
        assert all("cross" in name or "SeaCache" in name for name in idle), errors
        assert not any("wan" in name for name in idle), errors


def test_caches_give_what_one_process_gives(results: list[dict[str, Found]]) -> None:
    check_caches([by_part["caches"] for by_part in results])
    assert max(max(by_part["kept"]["errors"]) for by_part in results) < 1e-6, results


@pytest.mark.stress
def test_caches_of_all_models() -> None:
    check_caches(run_ranks(with_caches, 2, {one.model: list(caches()) for one in MODELS}))


def test_other_caches_are_refused_before_anything_is_computed(
    results: list[dict[str, Found]],
) -> None:
    texts = {"sparse": "block-sparse attention and a cache"}
    texts["filled before"] = "empty caches that were filled before parallelize"
    by_tokens = "decides by the tokens of a rank what it leaves out"
    for found in (by_part["said"] for by_part in results):
        assert len(found) == 6
        for name, (classes, text) in found.items():
            wanted = "the model has a cache" if "verify" in name else texts.get(name, by_tokens)
            assert "ConfigError" in classes and wanted in text, (name, text)


def test_offload_and_pipelines(results: list[dict[str, Found]]) -> None:
    for found in (by_part["offload"] for by_part in results):
        assert found.pop("lengths") == [8, 30, 30]
        errors = [one for one in found.values() if isinstance(one, float)]
        assert max(errors) < 1e-6 and len(errors) == 2
        assert all(one is True for one in found.values() if isinstance(one, bool)), found


@on_ranks(2)
def test_adapters_on_all_layers() -> None:
    """Adapters on all layers, the last one too: loaded while split, trained, and deleted."""
    pytest.importorskip("peft")
    import peft  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    found: dict[str, list[float]] = {}
    for case in MODELS:
        model, inputs = seeded_model(case), make_inputs(case)
        plain = model(**inputs).sample.detach()
        with parallelize(model, mesh=make_mesh(1, 2)) as handle:
            torch.manual_seed(1)
            model.add_adapter(config)
            output, _ = step_of(model, inputs)
            handle.average_gradients()
            grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            verified = handle.verify(**inputs).ok
            model.unload_lora()
            unloaded = difference(model(**inputs).sample, plain)
            torch.manual_seed(1)
            model.add_adapter(config)
        wanted, wanted_grads = step_of(model, inputs)
        found[case.model] = [
            difference(output, wanted),
            difference(torch.cat(grads), wanted_grads),
            unloaded,
            0.0 if verified else 1.0,
        ]
    assert max(max(errors) for errors in found.values()) < 1e-5, found
