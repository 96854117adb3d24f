"""What `bascule bench` and `bascule train` share of their options. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bascule.errors import ConfigError

TINY, TINY_WAN = "tiny", "tiny-wan"
"""In place of folders of encoders: small ones of the real classes, with random weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """A model, its data, and the ranks that train it.

    Attributes:
        photos: Folder of photos and clips of any size; captions in NAME.txt or captions.jsonl are
            optional.
        data: Data codes of a synthetic mix, for example g1b8i256f1s0,g1b2i512f1s0.
        topology: Compute bags, for example g2n1; one rank a bag if not given.
        ranks: Local ranks to launch; as many as GPUs, else physical cores but two at least, if
            not given.
        clip_frames: Most frames of a clip in --photos (a video file, or a subfolder of numbered
            frames); 0 takes photos alone.
        max_tokens: Photos and clips with more tokens are scaled down.
        d_model: Model width.
        num_heads: Attention heads.
        num_double: Blocks with separate weights for text and image.
        num_single: Blocks with shared weights.
        vae: Folder of a VAE of diffusers, frozen, whose latents take the place of pixels; or tiny,
            or tiny-wan for clips, with random weights.
        text_encoder: Folder of a T5, UMT5 or CLIP text encoder of transformers, frozen, whose
            embeddings take the place of a caption's bytes; or tiny, with random weights.
        checkpoint: Recompute activations in the backward.
        dtype: Of parameters and activations in forward and backward.
        gamma: Cost of an attention FLOP over one of a linear layer; measured first if not given.
        kernel: Attention kernel; the fastest for the device if not given.
        lr: Learning rate of AdamW.
        seed: Of weights, data and noise.
        strict: Stop at a photo that cannot be read, instead of skipping it.
        timeout_s: Longest wait of a collective, in seconds.
    """

    photos: Path | None = None
    data: str | None = None
    topology: str | None = None
    ranks: int | None = None
    clip_frames: int = 16
    max_tokens: int = 2048
    d_model: int = 192
    num_heads: int = 6
    num_double: int = 1
    num_single: int = 3
    vae: str | None = None
    text_encoder: str | None = None
    checkpoint: bool = False
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    gamma: float | None = None
    kernel: str | None = None
    lr: float = 1e-3
    seed: int = 0
    strict: bool = False
    timeout_s: float = 120.0

    @property
    def encodes(self) -> bool:
        """Return whether a frozen encoder stands before the transformer."""
        return self.vae is not None or self.text_encoder is not None

    def check_source(self) -> None:
        """Refuse a run without data, or with two sorts of it.

        Raises:
            ConfigError: Says what to give.
        """
        if (self.photos is None) == (self.data is None):
            raise ConfigError("give either --photos FOLDER or --data CODES")
        for flag, name in (("--vae", self.vae), ("--text-encoder", self.text_encoder)):
            if name is not None and self.photos is None:
                raise ConfigError(f"{flag} {name}: data codes have no pixels; give --photos")

    def check_least(self, **least: int) -> None:
        """Refuse numbers below these, which are given by the names of options.

        Raises:
            ConfigError: Names the option, its value and the least.
        """
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} {value}: must be at least {bound}")
        for name in ("lr", "timeout_s"):
            if not getattr(self, name) > 0:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} {getattr(self, name)}: must be positive")
