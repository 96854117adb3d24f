"""The packed MM-DiT: sizes that do not fit, and batches that contradict themselves."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from bascule.models import LocalExchange, MMDiT, MMDiTConfig, PackedBatch
from bascule.models.layout import Interleaving

SIZES: dict[str, Any] = {"in_channels": 6, "text_dim": 10, "vec_dim": 5, "num_heads": 2}
CONFIG = MMDiTConfig(**SIZES, d_model=24, num_double=1, num_single=1, axes_dim=(4, 4, 4))


def sizes(**change: Any) -> Callable[[], object]:
    return lambda: replace(CONFIG, **change)


def forward(**change: Any) -> Callable[[], object]:
    """A batch of 3 text and 5 image tokens, with something else in place of some of it."""
    tensors: dict[str, Any] = {"image_tokens": torch.ones(5, 6), "text_tokens": torch.ones(3, 10)}
    tensors |= {"is_image": torch.arange(8) >= 3, "pos": torch.zeros(8, 3)}
    tensors |= {"timestep": torch.ones(1), "pooled": torch.ones(1, 5)}
    return lambda: MMDiT(CONFIG)(PackedBatch(**tensors | change), LocalExchange([8]))


def embed() -> object:
    return MMDiT(CONFIG).embed(torch.ones(5, 6), torch.ones(3, 10), torch.arange(8) < 3)


SWAPPED = "asks for 5 text and 3 image tokens", "has 3 text"
CASES = [
    ("num_heads", sizes(num_heads=5), ("num_heads 5 does not divide d_model 24",)),
    ("no heads", sizes(num_heads=0), ("MMDiTConfig(num_heads=0)", "at least 1")),
    ("num_kv_heads", sizes(num_kv_heads=3), ("num_kv_heads 3 does not divide num_heads 2",)),
    ("no kv heads", sizes(num_kv_heads=0), ("MMDiTConfig(num_kv_heads=0)", "at least 1")),
    ("axes_dim, sum", sizes(axes_dim=(4, 4)), ("add up to the head width, 12", "not to 8")),
    ("axes_dim, odd", sizes(axes_dim=(3, 5, 4)), ("must be even",)),
    ("num_single", sizes(num_single=-1), ("MMDiTConfig(num_single=-1)", "at least 0")),
    ("mlp_ratio", sizes(mlp_ratio=0.0), ("MMDiTConfig(mlp_ratio=0.0)", "at least 0.0416")),
    ("theta", sizes(theta=0.0), ("MMDiTConfig(theta=0.0)", "at least")),
    ("swapped modalities", forward(is_image=torch.arange(8) < 3), SWAPPED),
    ("swapped modalities, embed", embed, SWAPPED),
    ("few", forward(image_tokens=torch.ones(4, 6)), ("is_image has 8 rows", "3 text and 4 image")),
    ("guidance", forward(guidance=torch.ones(1)), ("the model has no guidance",)),
    ("pos", forward(pos=torch.zeros(8, 2)), ("pos must be (8, 3), got (8, 2)",)),
    ("is_image", lambda: Interleaving(torch.zeros(3)), ("is_image must be a bool vector",)),
    ("seq_lens", lambda: LocalExchange([3, -1]), ("must not be negative",)),
]
