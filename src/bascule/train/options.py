"""Options of `bascule train`, some also of `bench`, and steps of a run. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from bascule.errors import ConfigError
from bascule.options import LONGEST_S, NewFolder, Range, RankOptions, flag, refuse
from bascule.plan.topology import Topology
from bascule.workload.codes import parse_data_codes
from bascule.workload.options import ManifestOptions

MAX_TOKENS = 2**22  # of a sample, and of a rank in a step
_DEFAULT_STEPS = 100
_DEFAULT_BATCH = 8
_SOURCES = "photos", "data", "manifest"
_OF_THE_CURVE = tuple(  # options that decide the losses: a run is resumed with the same
    "batch_size seed dtype lr d_model num_heads num_double num_single max_tokens".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(RankOptions, ManifestOptions):
    """A model, its data, and the ranks that train it.

    Attributes:
        photos: Folder of photos and clips; captions in NAME.txt or captions.jsonl are optional.
        data: Data codes of a synthetic mix, for example g1b8i256f1s0,g1b2i512f1s0.
        clip_frames: Most frames of a clip (video, or subfolder of frames); 0 takes photos alone.
        max_tokens: Photos and clips with more tokens are scaled down; --manifest must have none.
        d_model: Model width.
        num_heads: Attention heads.
        num_double: Blocks with separate weights for text and image.
        num_single: Blocks with shared weights.
        vae: Folder of a frozen VAE of diffusers; or tiny, or tiny-wan for clips (random weights).
        text_encoder: Folder of a frozen T5, UMT5 or CLIP of transformers; or tiny (random weights).
        checkpoint: Recompute activations in the backward.
        dtype: Dtype of parameters and activations in forward and backward.
        gamma: Cost of an attention FLOP over one of a linear layer; measured first if not given.
        kernel: Attention kernel; the first that runs on the device if not given.
        lr: Learning rate of AdamW.
        seed: Seed of weights, data and noise.
        strict: Stop at a photo that cannot be read, instead of skipping it.
    """

    photos: Path | None = None
    data: str | None = None
    clip_frames: Annotated[int, Range(0, 10**4)] = 16
    max_tokens: Annotated[int, Range(1, MAX_TOKENS)] = 2048
    d_model: Annotated[int, Range(1, 2**16)] = 192
    num_heads: Annotated[int, Range(1, 2**12)] = 6
    num_double: Annotated[int, Range(0, 10**3)] = 1
    num_single: Annotated[int, Range(0, 10**3)] = 3
    vae: str | None = None
    text_encoder: str | None = None
    checkpoint: bool = False
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    gamma: Annotated[float | None, Range()] = None
    kernel: str | None = None
    lr: Annotated[float, Range(1e-30, 1e6)] = 1e-3
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    strict: bool = False
    timeout_s: Annotated[float, Range(1.0, LONGEST_S)] = 120.0

    @property
    def encodes(self) -> bool:
        """True if a frozen encoder stands before the transformer."""
        return self.vae is not None or self.text_encoder is not None

    def check_source(self) -> None:
        """Refuse a run without data, or with two sorts of it."""
        if sum(one is not None for one in (self.photos, self.data, self.manifest)) != 1:
            raise ConfigError("give one of --photos FOLDER, --manifest TABLE and --data CODES")
        self.check_manifest()
        if self.manifest is None:
            refuse(self, ("model",), "only for --manifest; --d-model sets sizes")
        if self.photos is None:
            names = "vae", "text_encoder", "clip_frames", "strict"
            refuse(self, names, "only photos have pixels; give --photos")
        if self.data is not None:
            refuse(self, ("max_tokens",), "data codes say the size of each sample; leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions(RunOptions):
    """Train a packed MM-DiT on photos, clips and captions; save, stop and resume.

    A run may be resumed on any number of ranks. SIGTERM saves and ends with exit status 0.

    Attributes:
        topology: Compute bags, for example g2n1; one rank a bag if not given.
        steps: Steps in all, those before a resume included; 100 if --epochs is not given either.
        epochs: Times that each photo and clip is trained on, in place of --steps.
        batch_size: Samples of a step, over all ranks; 8, or those of all data codes, if not given.
        accumulate: Microbatches of a step.
        encode_ahead: Encode a step while the one before trains; takes the memory of both.
        profile: Hardware profile for --topology auto, which chooses bags for every step: a file, or
            h100-datasheet.
        resume: Resume from the newest checkpoint in --out, or begin without one.
        save_every: Steps between checkpoints; the last step is always saved.
        keep: Checkpoints that are kept.
        out: Folder that all ranks can see, for checkpoints, metrics.jsonl and TensorBoard.
    """

    topology: str | None = None
    steps: Annotated[int | None, Range(1, 10**9)] = None
    epochs: Annotated[int | None, Range(1, 10**6)] = None
    batch_size: Annotated[int | None, Range(1, 2**20)] = None
    accumulate: Annotated[int, Range(1, 10**4)] = 1
    encode_ahead: bool = False
    profile: str = "h100-datasheet"
    resume: bool = False
    save_every: Annotated[int, Range(1, 10**9)] = 100
    keep: Annotated[int, Range(1, 10**6)] = 3
    out: Annotated[Path, NewFolder()] = Path("results/train")

    def check(self, world_size: int) -> Topology | str:
        """Refuse options that do not fit each other or the world; return the bags, or "auto"."""
        self.check_source()
        if self.encode_ahead and not self.encodes:
            raise ConfigError("--encode-ahead: nothing is encoded; give --vae or --text-encoder")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"--steps {self.steps} and --epochs {self.epochs}: give one of them")
        if self.data is not None:
            if not any(code.batch_size for code in parse_data_codes(self.data)):
                raise ConfigError(f"--data {self.data}: no sample; give a code with b1 or more")
            refuse(self, ("epochs",), "data codes have no end; give --steps instead")
        if self.topology == "auto":
            return "auto"
        refuse(self, ("profile",), "only for --topology auto")
        return Topology.parse(self.topology or f"g1n{world_size}", world_size=world_size)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The samples of each step, by their numbers from 0, whatever the ranks."""

    batch_size: int  # samples of a step
    num_samples: int  # of the whole run; only the last step may be smaller
    accumulate: int  # microbatches of a step, fewer if it has fewer samples

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return -(-self.num_samples // self.batch_size)

    def samples_until(self, step: int) -> int:
        """Return the number of samples of the first steps."""
        return min(step * self.batch_size, self.num_samples)

    def microbatches(self, step: int) -> list[range]:
        """Return the samples of each microbatch of a step, counted from 0."""
        numbers = range(self.samples_until(step), self.samples_until(step + 1))
        return split(numbers, min(self.accumulate, len(numbers)))


def schedule_of(options: TrainOptions, epoch_samples: int | None) -> Schedule:
    """Return the steps of a run, given the samples of an epoch; None if there are no epochs."""
    size = options.batch_size or _DEFAULT_BATCH
    if options.batch_size is None and options.data is not None:
        size = sum(code.num_ranks * code.batch_size for code in parse_data_codes(options.data))
    if options.accumulate > size:
        raise ConfigError(
            f"--accumulate {options.accumulate}: a step has {size} samples; give at most {size}"
        )
    total = (options.steps or _DEFAULT_STEPS) * size
    if options.epochs is not None and epoch_samples is not None:
        total = options.epochs * epoch_samples
    return Schedule(size, total, options.accumulate)


def settings_of(options: TrainOptions, data: str, schedule: Schedule) -> dict[str, str]:
    """Return what decides the losses, by option, as text: runs with the same have one curve."""
    source = next(name for name in _SOURCES if getattr(options, name) is not None)
    settings = {flag(source): data}
    settings |= {flag(name): str(getattr(options, name)) for name in _OF_THE_CURVE}
    return settings | {"--batch-size": str(schedule.batch_size)}


def split(samples: Sequence[Any], num_parts: int) -> list[Any]:
    """Cut into consecutive parts, whose lengths differ by one at most."""
    num = len(samples)
    return [samples[num * k // num_parts : num * (k + 1) // num_parts] for k in range(num_parts)]
