"""How long an item is for each family of encoders: tokens, and pairs that attention computes."""

from collections.abc import Mapping
from typing import Any

from torch import nn


def of_patches(module: nn.Module, item: Mapping[str, Any]) -> tuple[int, float]:
    """Patches of an image or a video of Qwen-VL, and pairs on the mean of all layers.

    Each frame attends to itself: t frames of h x w patches are t (h w)^2 pairs. Layers of
    Qwen2.5-VL that are not in `fullatt_block_indexes` attend within windows, whose sides are
    `window_size / patch_size` patches, the last of a row or column less.
    """
    config: Any = module.config
    frames, height, width = (int(n) for n in item["grid_thw"][0].tolist())
    full = frames * float(height * width) ** 2
    full_layers = getattr(config, "fullatt_block_indexes", None)
    window = getattr(config, "window_size", None)
    if full_layers is None or not window:
        return frames * height * width, full
    side = window // config.patch_size // config.spatial_merge_size * config.spatial_merge_size
    windowed = frames * float(_squares(height, side) * _squares(width, side))
    num_full = len({layer for layer in full_layers if 0 <= layer < config.depth})
    pairs = (num_full * full + (config.depth - num_full) * windowed) / config.depth
    return frames * height * width, pairs


def _squares(length: int, side: int) -> int:
    """Sum of the squares of a length cut into pieces of a side."""
    return length // side * side**2 + (length % side) ** 2


def of_image(module: nn.Module, item: Mapping[str, Any]) -> int:
    """Patches of an image, or a tile, of pixels (1, C, H, W)."""
    config: Any = module.config
    patch = config.patch_size
    sides = (patch, patch) if isinstance(patch, int) else patch
    height, width = item["pixel_values"].shape[-2:]
    return max(1, (height // sides[0]) * (width // sides[1]))


def of_text(module: nn.Module, item: Mapping[str, Any]) -> int:
    """Tokens of a text as it is padded: padding is computed as well."""
    del module
    tokens = item.get("input_ids")
    return int((item["inputs_embeds"] if tokens is None else tokens).shape[1])


def of_pixels(module: nn.Module, item: Mapping[str, Any]) -> int:
    """Pixels of an image or video (1, C, .., H, W): a VAE's convolutions take as long as these."""
    del module
    return int(item["x"].shape[2:].numel())
