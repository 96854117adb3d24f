"""Options of a command: a model, its data and the ranks that train it. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from bascule.errors import ConfigError
from bascule.options import LONGEST_S, Group, Range, RankOptions, refuse
from bascule.workload.options import ManifestOptions

MAX_TOKENS = 2**22  # of a sample, and of a rank in a step


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(RankOptions, ManifestOptions):
    """A model, its data, and the ranks that train it.

    Attributes:
        photos: Folder of photos and clips. Captions in NAME.txt or captions.jsonl are optional.
        data: Data codes of a synthetic mix, for example g1b8i256f1s0,g1b2i512f1s0.
        clip_frames: Most frames to read of a clip, which is a video or a subfolder of frames; 0
            reads photos alone.
        max_tokens: Most tokens of a sample. Larger photos and clips are scaled down; a --manifest
            with a longer sample is refused.
        d_model: Width of the model.
        num_heads: Attention heads.
        num_double: Blocks with separate weights for text and image.
        num_single: Blocks that share weights between text and image.
        vae: Folder of a frozen VAE of diffusers; or tiny, or tiny-wan for clips (random weights).
        text_encoder: Folder of a frozen T5, UMT5 or CLIP of transformers; or tiny (random weights).
        checkpoint: Recompute activations in the backward pass, which saves memory.
        dtype: Data type of parameters and activations in the forward and backward pass.
        gamma: How many times as long a FLOP of attention takes as a FLOP of a linear layer. By
            default, the command measures it first.
        kernel: Attention kernel. By default, the first one that runs on the device.
        lr: Learning rate of AdamW.
        seed: Seed of weights, data and noise.
        strict: Stop at a photo that cannot be read. By default, the run skips it.
    """

    photos: Annotated[Path | None, Group("Data")] = None
    data: str | None = None
    clip_frames: Annotated[int, Range(0, 10**4)] = 16
    max_tokens: Annotated[int, Range(1, MAX_TOKENS), Group("Data")] = 2048
    d_model: Annotated[int, Range(1, 2**16), Group("Model")] = 192
    num_heads: Annotated[int, Range(1, 2**12)] = 6
    num_double: Annotated[int, Range(0, 10**3)] = 1
    num_single: Annotated[int, Range(0, 10**3)] = 3
    vae: str | None = None
    text_encoder: str | None = None
    checkpoint: Annotated[bool, Group("Training")] = False
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    gamma: Annotated[float | None, Range()] = None
    kernel: str | None = None
    lr: Annotated[float, Range(1e-30, 1e6)] = 1e-3
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    strict: Annotated[bool, Group("Data")] = False
    timeout_s: Annotated[float, Range(1.0, LONGEST_S)] = 120.0

    @property
    def encodes(self) -> bool:
        """True if a frozen encoder stands before the transformer."""
        return self.vae is not None or self.text_encoder is not None

    def check_source(self) -> None:
        """Refuse a run without data, or with two sorts of it."""
        if [self.photos, self.data, self.manifest].count(None) != 2:
            raise ConfigError("give one of --photos FOLDER, --manifest TABLE and --data CODES")
        self.check_manifest()
        if self.manifest is None:
            refuse(self, ("model",), "only for --manifest; --d-model sets sizes")
        if self.photos is None:
            names = "vae", "text_encoder", "clip_frames", "strict"
            refuse(self, names, "only photos have pixels; give --photos")
        if self.data is not None:
            refuse(self, ("max_tokens",), "data codes say the size of each sample; leave it out")
