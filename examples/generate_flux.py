"""Denoise with diffusers' Flux pipeline, each image split over the ranks; check it block by block.

    torchrun --standalone --nproc-per-node 2 examples/generate_flux.py

On GPUs, or on CPU cores over gloo where there are none. The transformer is tiny and random, so that
nothing is downloaded; with `FluxPipeline.from_pretrained(...)` nothing else changes.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor, nn

from bascule import parallelize

HEIGHT, WIDTH, NUM_STEPS = 240, 176, 4  # 15 x 11 tokens, which do not divide by two


def make_pipeline(device: torch.device) -> Any:
    torch.manual_seed(0)  # the same weights on every rank
    transformer: nn.Module = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=5,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    absent = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    parts: dict[str, Any] = {"transformer": transformer.eval(), **dict.fromkeys(absent)}
    pipeline: Any = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), **parts)
    return pipeline.to(device)


def generate(pipeline: Any, prompt: dict[str, Tensor]) -> Tensor:
    """Latents; every rank draws the same noise."""
    result = pipeline(
        **prompt,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=NUM_STEPS,
        generator=torch.Generator().manual_seed(1),
        output_type="latent",
    )
    return result.images


def transformer_inputs(prompt: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """What the pipeline gives the transformer, at these shapes."""
    rows, columns = HEIGHT // 16, WIDTH // 16
    ids = torch.zeros(rows * columns, 3)
    ids[:, 1:] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    latents = torch.randn(1, rows * columns, 16, generator=torch.Generator().manual_seed(2))
    return {
        "hidden_states": latents.to(device),
        "encoder_hidden_states": prompt["prompt_embeds"],
        "pooled_projections": prompt["pooled_prompt_embeds"],
        "timestep": torch.tensor([0.5], device=device),
        "img_ids": ids.to(device),
        "txt_ids": torch.zeros(prompt["prompt_embeds"].shape[1], 3, device=device),
    }


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        pipeline = make_pipeline(device)
        pipeline.set_progress_bar_config(disable=True)
        random = torch.Generator().manual_seed(3)
        prompt = {
            "prompt_embeds": torch.randn(1, 7, 32, generator=random).to(device),
            "pooled_prompt_embeds": torch.randn(1, 32, generator=random).to(device),
        }
        alone = generate(pipeline, prompt)
        with parallelize(pipeline, ulysses_degree=dist.get_world_size()) as handle:
            shared = generate(pipeline, prompt)
            verdict = handle.verify(**transformer_inputs(prompt, device))
            explained = handle.explain()
        if dist.get_rank() == 0:
            print(explained)
            print(verdict)
            difference = (shared - alone).norm() / alone.norm()
            print(f"latents {tuple(shared.shape)}, relative difference {difference:.1e}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
