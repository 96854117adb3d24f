"""Models of random weights and inputs that inference is timed on: even, odd, 10 heads, a video."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Shape:
    """A model and the size of what it generates.

    Attributes:
        what: In words, without the sizes.
        make: The model and its inputs, of this shape; the same on all ranks.
        grid: Tokens of the image or video: (height, width), or (frames, height, width).
        text: Tokens.
        heads: Of attention, of 64 channels each.
        is_divisible: Whether two ranks can have the same tokens, without a filled rest.
    """

    what: str
    make: Callable[["Shape"], tuple[Any, dict[str, Any]]]
    grid: tuple[int, ...]
    text: int
    heads: int
    is_divisible: bool = True

    def __str__(self) -> str:
        tokens = f"{math.prod(self.grid)} + {self.text} tokens"
        return f"{self.what}, {tokens}, {self.heads} heads of 64, float32"


def make_flux(shape: Shape) -> tuple[Any, dict[str, Any]]:
    """Text and image are one sequence."""
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=64,
        num_attention_heads=shape.heads,
        joint_attention_dim=256,
        pooled_projection_dim=256,
        axes_dims_rope=(8, 28, 28),
    ).eval()
    height, width = shape.grid
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack([torch.zeros(height, width), rows, columns], dim=-1).view(-1, 3)
    inputs = {
        "hidden_states": torch.randn(1, height * width, 64),
        "encoder_hidden_states": torch.randn(1, shape.text, 256),
        "pooled_projections": torch.randn(1, 256),
        "timestep": torch.tensor([0.5]),
        "img_ids": places,
        "txt_ids": torch.zeros(shape.text, 3),
        "return_dict": False,
    }
    return model, inputs


def make_wan(shape: Shape) -> tuple[Any, dict[str, Any]]:
    """The video attends to itself, and to a text that every rank has."""
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=shape.heads,
        attention_head_dim=64,
        in_channels=16,
        out_channels=16,
        text_dim=256,
        freq_dim=256,
        ffn_dim=shape.heads * 64 * 4,
        num_layers=4,
    ).eval()
    frames, height, width = shape.grid
    inputs = {
        "hidden_states": torch.randn(1, 16, frames, height * 2, width * 2),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, shape.text, 256),
        "return_dict": False,
    }
    return model, inputs


SHAPES = {
    "flux": Shape("Flux, 2 + 4 blocks", make_flux, (32, 32), 128, 8),
    "odd": Shape("Flux, 2 + 4 blocks", make_flux, (31, 33), 77, 8, is_divisible=False),
    "heads": Shape("Flux, 2 + 4 blocks", make_flux, (32, 32), 128, 10),
    "wan": Shape("Wan, 4 blocks, 5 frames", make_wan, (5, 13, 17), 77, 8, is_divisible=False),
}
