"""Runs of pipelines that differ between ranks, or cannot be; and what users are told."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bascule.diffusers import parallelize
from tests.helpers.misuse_arguments import Wrong
from tests.helpers.misuse_models import SPLIT
from tests.helpers.misuse_ranks import other
from tests.helpers.pipeline_cases import generated, make_pipeline, prompt_of, seeded


def made(name: str, own: Callable[[Any], dict[str, Any]], **degrees: Any) -> Callable[[], object]:
    """A pipeline, where the second rank does something else."""

    def call() -> object:
        pipeline, prompt = make_pipeline(name), prompt_of(name)
        given: dict[str, Any] = degrees or {"guidance_degree": 2}
        with parallelize(pipeline, **given):
            changed = own(pipeline) if other() else {}
            return generated(name, pipeline, {**prompt, "generator": seeded(1)}, **changed)

    return call


def another_scheduler(pipeline: Any) -> dict[str, Any]:
    diffusers: Any = importlib.import_module("diffusers")
    kind: Any = diffusers.FlowMatchEulerDiscreteScheduler
    pipeline.scheduler = kind.from_config(pipeline.scheduler.config, shift=7.0)
    return {}


def changing_callback(pipeline: Any) -> dict[str, Any]:
    def change(_: Any, step: int, time: Any, given: Any) -> Any:
        return given | {"latents": given["latents"] * 1.5}

    return {"callback_on_step_end": change}


def latents_of(seed: int) -> Tensor:
    return torch.randn(1, 99, 16, generator=seeded(seed))


class Lora(nn.Linear):
    """A layer as peft makes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features)
        self.base_layer, self.scaling = base, {"style": 1.0}
        self.active_adapters, self.disable_adapters = ["style"], False
        torch.manual_seed(3)
        self.lora_A = nn.ModuleDict({"style": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"style": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, input: Tensor) -> Tensor:
        added = self.lora_B["style"](self.lora_A["style"](input)) * self.scaling["style"]
        return self.base_layer(input) + added


def adapted(change: Callable[[Lora], object]) -> Callable[[], object]:
    """LoRAs are loaded after parallelize, on the second rank others."""

    def call() -> object:
        pipeline, prompt = make_pipeline("flux"), prompt_of("flux")
        with torch.no_grad(), parallelize(pipeline, **SPLIT):
            pipeline.transformer.proj_out = layer = Lora(pipeline.transformer.proj_out)
            generated("flux", pipeline, {**prompt, "generator": seeded(1)})
            if other():
                change(layer)
            return generated("flux", pipeline, {**prompt, "generator": seeded(1)})

    return call


def loaded_alone(pipeline: Any) -> dict[str, Any]:
    pipeline.transformer.proj_out = Lora(pipeline.transformer.proj_out)
    return {}


def with_options(**options: Any) -> Callable[[], object]:
    return lambda: parallelize(make_pipeline("flux"), **options, **SPLIT)


def gradients() -> object:
    pipeline = make_pipeline("flux")
    call: Any = vars(type(pipeline))["__call__"].__wrapped__  # without torch.no_grad
    with parallelize(pipeline, guidance_degree=2):
        return call(pipeline, **prompt_of("flux"), height=44, width=36, num_inference_steps=1)


def failing(pipeline: Any) -> dict[str, Any]:
    def fail(*_: Any) -> None:
        raise ValueError("no memory is left")

    pipeline.transformer.register_forward_pre_hook(fail)
    return {}


VALUES = "differ between ranks, of ranks [1] from those of rank 0"
GUIDANCE = "disagree on guidance_scale"
STEPS = "disagree on num_inference_steps: ranks [0]: 2; ranks [1]: 3"
RUNS: dict[str, Wrong] = {
    "steps": (made("flux", lambda _: {"num_inference_steps": 3}), STEPS),
    "steps, batched": (made("sd3", lambda _: {"num_inference_steps": 3}), STEPS),
    "height": (made("flux", lambda _: {"height": 48}, **SPLIT), "disagree on height"),
    "frames": (made("wan", lambda _: {"num_frames": 9}), "disagree on num_frames"),
    "images": (made("flux", lambda _: {"num_images_per_prompt": 2}), "disagree on num_images"),
    "guidance, batched": (
        made("sd3", lambda _: {"guidance_scale": 2.0}),
        "disagree on guidance_scale",
    ),
    "no guidance, batched": (
        made("sd3", lambda _: {"guidance_scale": 1.0}),
        "disagree on guidance_scale",
    ),
    "guidance": (made("flux", lambda _: {"true_cfg_scale": 2.0}), "disagree on true_cfg_scale"),
    "no guidance": (made("flux", lambda _: {"true_cfg_scale": 1.0}), "disagree on true_cfg_scale"),
    "schedule": (made("flux", another_scheduler, **SPLIT), VALUES),
    "sigmas": (made("flux", lambda _: {"sigmas": [1.0, 0.2]}, **SPLIT), "disagree on sigmas"),
    "callback": (made("flux", changing_callback), VALUES),
    "prompt": (
        made("flux", lambda _: prompt_of("flux", seed=4)),
        "disagree on negative_pooled_prompt_embeds",
    ),
    "latents": (made("flux", lambda _: {"latents": latents_of(2)}), "disagree on latents"),
    "a failure": (made("flux", failing), "no memory is left"),
    "LoRA": (made("flux", loaded_alone, **SPLIT), "disagree on adapters"),
    "LoRA's scale": (adapted(lambda one: one.scaling.update(style=0.5)), "disagree on adapters"),
    "LoRA's weights": (adapted(lambda one: one.lora_B["style"].weight.add_(1)), "on adapters"),  # pyright: ignore[reportCallIssue]
    "LoRA is off": (adapted(lambda one: setattr(one, "disable_adapters", True)), "and off"),
    "first without tiling": (with_options(vae="first"), "call pipeline.vae.enable_tiling()"),
    "gradients": (gradients, "guidance over ranks has no gradients"),
}
"""Runs of pipelines, where ranks differ; and what cannot be run."""

QUICK = {
    "steps",
    "height",
    "guidance",
    "no guidance",
    "prompt",
    "a failure",
    "LoRA",
    "LoRA's weights",
    "first without tiling",
}
"""Those that are not left to stress tests."""
