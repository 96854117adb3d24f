"""Train diffusers' Flux, unmodified, on images of very different sizes.

    torchrun --standalone --nproc-per-node 2 examples/train_flux_balanced.py [TOPOLOGY]

A tiny Flux of random weights; of a real one, only its sizes differ. Like LoRA, it trains a part of
the weights: those of attention. On GPUs, or on CPU cores over gloo where there are none. Even ranks
load large images and odd ones small images, so without balancing the odd ones would wait.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bascule import BalancedModel, SequenceParallel, TransformerCost, train_step

CHANNELS, TEXT_DIM, WIDTH, NUM_TEXT = 16, 32, 64, 8
NUM_STEPS, NUM_SAMPLES = 15, 3


def make_model() -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    model = FluxTransformer2DModel(
        in_channels=CHANNELS,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=TEXT_DIM,
        axes_dims_rope=(4, 6, 6),
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".attn." in name or name.startswith("proj_out"))
    return model


def load_sample(random: torch.Generator, least: int) -> dict[str, Any]:
    """What Flux takes for a batch of one, and the velocity to predict: rectified flow."""
    rows, columns = torch.randint(least, 2 * least, (2,), generator=random).tolist()
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1], ids[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)
    ids = ids.flatten(0, 1)
    clean = (ids.sum(-1, keepdim=True) / 5 + torch.arange(CHANNELS)).sin()[None]
    noise = torch.randn(clean.shape, generator=random)
    time = torch.rand(1, generator=random)
    return {
        "hidden_states": (1 - time) * clean + time * noise,
        "encoder_hidden_states": torch.randn(1, NUM_TEXT, TEXT_DIM, generator=random),
        "pooled_projections": torch.randn(1, TEXT_DIM, generator=random),
        "timestep": time,
        "img_ids": ids,
        "txt_ids": torch.zeros(NUM_TEXT, 3),
        "target": noise - clean,
    }


def num_tokens(sample: dict[str, Any]) -> int:
    return sample["hidden_states"].shape[1] + sample["encoder_hidden_states"].shape[1]


def loss_fn(output: Tensor, batch: dict[str, Any]) -> Tensor:
    """The loss of each element; that of a sample is the mean over its own."""
    return (output - batch["target"]).square()


def train(device: torch.device, topology: str) -> None:
    transformer = make_model().to(device)
    model = DistributedDataParallel(transformer)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    sp = SequenceParallel(None, topology, TransformerCost(WIDTH, num_layers=3))  # once
    balanced = BalancedModel(model, sp, length_fn=num_tokens)  # once
    for number in range(NUM_STEPS):
        random = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        least = 4 if dist.get_rank() % 2 else 12
        samples = [load_sample(random, least) for _ in range(NUM_SAMPLES)]
        loss = train_step(model, balanced.microbatches(samples, loss_fn))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)  # to show it: the mean over the ranks is that over all samples
        plan = balanced.step.metrics()
        if dist.get_rank() == 0:
            print(
                f"step {number + 1}: loss {loss.item() / dist.get_world_size():.6f}, imbalance "
                f"(max/mean load) {plan['imbalance']:.3f} instead of "
                f"{plan['imbalance_unbalanced']:.3f}"
            )


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        train(device, sys.argv[1] if len(sys.argv) > 1 else f"g1n{dist.get_world_size()}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
