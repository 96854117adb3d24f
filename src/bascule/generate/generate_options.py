"""The options of `bascule generate`. Imports no torch, so that its help is instant."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bascule.errors import ConfigError
from bascule.plan.checks import number, whole

TINY, TINY_WAN = "tiny", "tiny-wan"
"""In place of a pipeline's folder: a small Flux or Wan with random weights, tokenizers included."""

RANGES = {
    "width": (1, 2**15),
    "height": (1, 2**15),
    "frames": (1, 10**4),
    "steps": (1, 10**4),
    "seed": (0, 2**63 - 1),
}
"""Least and largest of what a prompt may say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Make images or videos with a pipeline of diffusers, shared by all local ranks.

    Every output is written beside a file of what it was made from and of the seconds that each
    phase took. Outputs that are there already are not made again, so a list of prompts is gone on
    with by giving the same command once more.

    Attributes:
        model: Folder of a pipeline of diffusers; or tiny, or tiny-wan for videos, with random
            weights.
        prompt: What to make, once or several times.
        prompts: File of prompts: one a line, or JSON objects (.jsonl) with "prompt" and what
            differs from the options: "negative_prompt", "width", "height", "frames", "steps",
            "guidance", "seed".
        negative_prompt: What to keep away from, where the pipeline guides with it.
        width: Pixels; what the pipeline does if not given, and 256 of a tiny one.
        height: Likewise.
        frames: Of a video; what the pipeline does if not given, and 9 of a tiny one.
        steps: Denoising steps; what the pipeline does if not given, and 4 of a tiny one.
        guidance: How strongly a prompt guides; what the pipeline does if not given.
        seed: Of the first prompt; the next ones get the numbers after it.
        out: Folder for the images (PNG) and videos (MP4).
        fps: Frames a second of a video.
        ranks: Local ranks; as many as GPUs, else physical cores but two at least, if not given.
        ulysses: Ranks that share heads. Without this and the next three, the mesh is chosen.
        ring: Ranks that pass keys and values around.
        guidance_ranks: Groups of ranks that share guidance branches.
        replicas: Groups of ranks with prompts of their own.
        tiles: Whether the VAE works in tiles, which ranks share; this changes pixels a little.
        compile: Compile the transformers.
        dtype: Of the weights; bfloat16 on GPUs and float32 on CPUs if not given.
        timeout_s: Longest wait of a collective, in seconds. Replicas wait for each other longer.
        json: File for what was made and the seconds of each phase; - for standard output.
    """

    model: str = TINY
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    prompts: Path | None = None
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    steps: int | None = None
    guidance: float | None = None
    seed: int = 0
    out: Path = Path("results/generated")
    fps: int = 16
    ranks: int | None = None
    ulysses: int | None = None
    ring: int | None = None
    guidance_ranks: int | None = None
    replicas: int | None = None
    tiles: bool = False
    compile: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    timeout_s: float = 600.0
    json: Path | None = None

    @property
    def degrees(self) -> dict[str, int]:
        """Those that were given, by argument of `parallelize`."""
        given = {
            "data_degree": self.replicas,
            "guidance_degree": self.guidance_ranks,
            "ring_degree": self.ring,
            "ulysses_degree": self.ulysses,
        }
        return {name: degree for name, degree in given.items() if degree is not None}

    def check(self) -> None:
        """Everything that can be known without the pipeline and the prompts.

        Raises:
            ConfigError: A value is out of range, or options do not fit each other.
        """
        ranges = RANGES | {"fps": (1, 1000), "ranks": (1, 256)}
        ranges |= dict.fromkeys(("replicas", "guidance_ranks", "ring", "ulysses"), (1, 2**16))
        for name, (least, most) in ranges.items():
            if (value := getattr(self, name)) is not None:
                whole(f"--{name.replace('_', '-')}", value, least, most)
        number("--timeout-s", self.timeout_s, most=1e7)
        if self.guidance is not None:
            number("--guidance", self.guidance, most=1e6)
        if bool(self.prompt) == (self.prompts is not None):
            raise ConfigError("give either --prompt TEXT, once or more, or --prompts FILE")
        if self.model not in (TINY, TINY_WAN):
            index = Path(self.model) / "model_index.json"
            if not index.is_file():
                raise ConfigError(
                    f"--model {self.model}: no {index}: give the folder of a pipeline of "
                    f"diffusers, or {TINY}, or {TINY_WAN}"
                )
