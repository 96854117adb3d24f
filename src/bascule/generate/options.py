"""The options of `bascule generate`. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bascule.errors import ConfigError
from bascule.generate.tiny import TINY, TINY_WAN
from bascule.options import Outputs, Range, RankOptions

Pixels = Annotated[int | None, Range(1, 2**15)]
Count = Annotated[int | None, Range(1, 10**4)]
Scale = Annotated[float | None, Range(0.0, 1e6)]
Seed = Annotated[int, Range(0, 2**63 - 1)]
_Degree = Annotated[int | None, Range(1, 2**16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions(Outputs, RankOptions):
    """Make images or videos with a pipeline of diffusers, shared by all local ranks.

    A file beside each output holds its prompt and times. Outputs that exist are not made again.

    Attributes:
        model: Folder of a pipeline of diffusers; or tiny, or tiny-wan for videos (random weights).
        prompt: Text of an output, once or several times.
        prompts: File of prompts: one a line, or JSON objects (.jsonl) with "prompt" and other
            options: "negative_prompt", "width", "height", "frames", "steps", "guidance", "seed".
        negative_prompt: Text to keep away from, where the pipeline guides with it.
        width: Pixels; the pipeline's default if not given, and 256 of a tiny one.
        height: Pixels; as for the width.
        frames: Frames of a video; the pipeline's default if not given, and 9 of a tiny one.
        steps: Denoising steps; the pipeline's default if not given, and 4 of a tiny one.
        guidance: Strength of a prompt; the pipeline's default if not given.
        seed: Seed of the first prompt; the next ones get the numbers after it.
        out: Folder for the images (PNG) and videos (MP4).
        fps: Frames a second of a video.
        ulysses: Ranks that share heads. Without this and the next three, the mesh is chosen.
        ring: Ranks that pass keys and values around.
        guidance_ranks: Groups of ranks that share guidance branches.
        replicas: Groups of ranks that take different prompts.
        tiles: Let the VAE work in tiles, which ranks share; this changes pixels a little.
        compile: Compile the transformers.
        dtype: Dtype of the weights; bfloat16 on GPUs and float32 on CPUs if not given.
        timeout_s: Longest wait of a collective, in seconds. Replicas wait for each other longer.
    """

    model: str = TINY
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    prompts: Path | None = None
    negative_prompt: str | None = None
    width: Pixels = None
    height: Pixels = None
    frames: Count = None
    steps: Count = None
    guidance: Scale = None
    seed: Seed = 0
    out: Path = Path("results/generated")
    fps: Annotated[int, Range(1, 1000)] = 16
    ulysses: _Degree = None
    ring: _Degree = None
    guidance_ranks: _Degree = None
    replicas: _Degree = None
    tiles: bool = False
    compile: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] | None = None

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees of the mesh, by argument of `parallelize`; without those to choose."""
        degrees = {
            "data_degree": self.replicas,
            "guidance_degree": self.guidance_ranks,
            "ring_degree": self.ring,
            "ulysses_degree": self.ulysses,
        }
        return {name: degree for name, degree in degrees.items() if degree is not None}

    def check_source(self) -> None:
        """Refuse options without prompts, or without a pipeline."""
        if bool(self.prompt) == (self.prompts is not None):
            raise ConfigError("give either --prompt TEXT, once or more, or --prompts FILE")
        index = Path(self.model) / "model_index.json"
        if self.model not in (TINY, TINY_WAN) and not index.is_file():
            raise ConfigError(
                f"--model {self.model}: no {index}: give the folder of a pipeline of diffusers, "
                f"or {TINY}, or {TINY_WAN}"
            )
