"""Tiny VAEs whose tiles are computed by several ranks, beside the same on one."""

from typing import Any

import torch
from torch import Tensor

from bascule.comm.items import leaves_of

LATENTS = {"kl": 2, "wan": 4, "wan2.2": 4, "qwen": 4, "hunyuan": 4, "cogvideox": 4, "ltx": 8}
RATIO = {"kl": 2, "wan": 2, "wan2.2": 4, "qwen": 2, "hunyuan": 8, "cogvideox": 8, "ltx": 8}
"""Pixels a latent, along a side."""


def tiny_vae(kind: str, tile: int = 16) -> Any:
    """With random weights, that has not been told to tile; its tiles overlap by a quarter."""
    import diffusers as host

    diffusers: Any = host
    torch.manual_seed(0)
    if kind == "kl":
        sizes: dict[str, Any] = {"block_out_channels": (8, 8), "norm_num_groups": 4}
        sizes |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "latent_channels": 2}
        sizes |= {"up_block_types": ("UpDecoderBlock2D",) * 2}
        vae = diffusers.AutoencoderKL(**sizes)
        vae.tile_sample_min_size, vae.tile_latent_min_size = tile, tile // 2
        return vae.eval()
    sizes = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1}
    sizes |= {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4, "temperal_downsample": [True]}
    if kind == "qwen":
        vae = diffusers.AutoencoderKLQwenImage(**sizes)
    elif kind == "wan":
        vae = diffusers.AutoencoderKLWan(**sizes, scale_factor_spatial=2)
    else:
        sizes |= {"patch_size": 2, "in_channels": 12, "out_channels": 12, "is_residual": True}
        vae = diffusers.AutoencoderKLWan(**sizes, scale_factor_spatial=4, decoder_base_dim=4)
    vae.tile_sample_min_height = vae.tile_sample_min_width = tile
    vae.tile_sample_stride_height = vae.tile_sample_stride_width = tile * 3 // 4
    return vae.eval()


def other_vae(kind: str) -> Any:
    """A tiny one of HunyuanVideo, whose tiles are some frames, too; of CogVideoX; or of LTX."""
    import diffusers as host

    diffusers: Any = host
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"block_out_channels": (8,) * 4, "latent_channels": LATENTS[kind]}
    if kind == "cogvideox":
        sizes |= {"norm_num_groups": 4, "layers_per_block": 1}
        return diffusers.AutoencoderKLCogVideoX(**sizes, sample_height=32, sample_width=32).eval()
    if kind == "hunyuan":
        sizes |= {"norm_num_groups": 4, "layers_per_block": 1}
        sizes |= {"down_block_types": ("HunyuanVideoDownBlock3D",) * 4}
        sizes |= {"up_block_types": ("HunyuanVideoUpBlock3D",) * 4}
        vae = diffusers.AutoencoderKLHunyuanVideo(**sizes)
        vae.tile_sample_min_num_frames, vae.tile_sample_stride_num_frames = 8, 4
    else:
        sizes |= {"decoder_block_out_channels": (8,) * 4, "layers_per_block": (1,) * 5}
        sizes |= {"decoder_layers_per_block": (1,) * 5, "patch_size": 1}
        vae = diffusers.AutoencoderKLLTXVideo(**sizes)
    vae.tile_sample_min_height = vae.tile_sample_min_width = 32
    vae.tile_sample_stride_height = vae.tile_sample_stride_width = 24
    return vae.eval()


def sample_of(kind: str, way: str, size: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """Images or their latents, of a batch, frames, and sides in pixels."""
    batch, frames, height, width = size
    channels, sides = 3, (height, width)
    if way == "decode":
        channels, sides = LATENTS[kind], (height // RATIO[kind], width // RATIO[kind])
        frames = (frames + 1) // 2
    shape = (batch, channels, *(() if kind == "kl" else (frames,)), *sides)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def values_of(output: Any) -> Tensor:
    """All numbers of an output of a VAE."""
    (leaf,) = leaves_of(output)
    return leaf


def own_tiled(vae: Any, way: str, x: Tensor) -> Tensor:
    """What the model itself makes of it, with its tiles."""
    vae.enable_tiling()
    try:
        return values_of(getattr(vae, way)(x))
    finally:
        vae.disable_tiling()
