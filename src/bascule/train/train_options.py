"""The options of `bascule train`. Imports no torch, so that its help is instant."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bascule.errors import ConfigError
from bascule.plan.checks import MAX_NUMBER, number
from bascule.plan.topology import Topology
from bascule.train.run_options import RunOptions
from bascule.workload.codes import parse_data_codes

_DEFAULT_STEPS = 100
_DEFAULT_BATCH = 8
_MOST = {
    "steps": 10**9,
    "epochs": 10**6,
    "batch_size": 2**20,
    "accumulate": 10**4,
    "save_every": 10**9,
    "keep": 10**6,
    "clip_frames": 10**4,
    "max_tokens": 2**22,
    "ranks": 256,
    "d_model": 2**16,
    "num_heads": 2**12,
    "num_double": 10**3,
    "num_single": 10**3,
    "seed": 2**63 - 1,
}
"""Largest values of options."""

_OF_THE_CURVE = (
    "batch_size",
    "seed",
    "dtype",
    "lr",
    "d_model",
    "num_heads",
    "num_double",
    "num_single",
    "max_tokens",
)
"""Options that decide the losses, whatever the ranks: a run is resumed with the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions(RunOptions):
    """Train a packed MM-DiT on photos, clips and captions, in balance; save, stop and resume.

    Which samples a step has depends on the seed and the step alone, so a run may be resumed on any
    number of ranks. SIGTERM saves and ends all ranks with exit status 0.

    Attributes:
        steps: Steps in all, those before a resume included; 100 if neither they nor --epochs are
            given.
        epochs: Times that each photo and clip is trained on, in place of --steps.
        batch_size: Samples of a step, over all ranks; 8, or those of all data codes, if not given.
        accumulate: Microbatches of a step.
        encode_ahead: Let --vae and --text-encoder encode a step while the one before trains, in a
            thread of their own; takes the memory of both.
        profile: File of a hardware profile, or h100-datasheet, that prices the wires of
            --topology auto, which chooses bags for every step.
        resume: Go on from the newest checkpoint in --out, or begin where there is none.
        save_every: Steps between checkpoints; the last step is always saved.
        keep: Checkpoints that are kept.
        out: Folder for checkpoints, metrics.jsonl and the events of TensorBoard, which all ranks
            can see.
    """

    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    accumulate: int = 1
    encode_ahead: bool = False
    profile: str = "h100-datasheet"
    resume: bool = False
    save_every: int = 100
    keep: int = 3
    out: Path = Path("results/train")

    def check(self, world_size: int) -> Topology | str:
        """Everything that can be known without the data; the bags of the world, or "auto".

        Raises:
            ConfigError: A value is out of range, or options do not fit each other or the world.
        """
        self.check_source()
        least = dict.fromkeys(_MOST, 1) | dict.fromkeys(
            ("num_double", "num_single", "seed", "clip_frames"), 0
        )
        self.check_least(**least)
        for name, most in _MOST.items():
            if (value := getattr(self, name)) is not None and value > most:
                raise ConfigError(f"{_flag(name)} {value}: must be at most {most}")
        for name, highest in (("gamma", MAX_NUMBER), ("lr", 1e6), ("timeout_s", 1e7)):
            if (value := getattr(self, name)) is not None:
                number(_flag(name), value, most=highest)
        self._check_data()
        if self.topology == "auto":
            return "auto"
        return Topology.parse(self.topology or f"g1n{world_size}", world_size=world_size)

    def _check_data(self) -> None:
        if self.encode_ahead and not self.encodes:
            raise ConfigError("--encode-ahead: nothing is encoded; give --vae or --text-encoder")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"--steps {self.steps} and --epochs {self.epochs}: give one of them")
        if self.data is not None:
            codes = parse_data_codes(self.data)
            if not any(code.batch_size for code in codes):
                raise ConfigError(f"--data {self.data}: no sample; give a code with b1 or more")
            if self.epochs is not None:
                raise ConfigError(
                    f"--epochs {self.epochs}: data codes have no end; give --steps instead"
                )


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which samples, by their numbers from 0, are in which step; whatever the ranks.

    Attributes:
        batch_size: Samples of a step.
        num_samples: Samples of the whole run; only the last step may be smaller.
        accumulate: Microbatches of a step, fewer where it has fewer samples.
    """

    batch_size: int
    num_samples: int
    accumulate: int

    @property
    def num_steps(self) -> int:
        """Of the whole run."""
        return -(-self.num_samples // self.batch_size)

    def samples_until(self, step: int) -> int:
        """Samples of the first steps."""
        return min(step * self.batch_size, self.num_samples)

    def microbatches(self, step: int) -> list[range]:
        """The samples of each microbatch of a step, counted from 0."""
        numbers = range(self.samples_until(step), self.samples_until(step + 1))
        return split(numbers, min(self.accumulate, len(numbers)))


def schedule_of(options: TrainOptions, epoch_samples: int | None) -> Schedule:
    """The steps of a run, of an epoch with so many samples; None where there are no epochs.

    Raises:
        ConfigError: A step has no sample for each microbatch.
    """
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
    """What decides the losses, by option, as text: runs with the same have the same curve."""
    settings = {"--data" if options.photos is None else "--photos": data}
    settings |= {_flag(name): str(getattr(options, name)) for name in _OF_THE_CURVE}
    return settings | {"--batch-size": str(schedule.batch_size)}


def split(samples: Sequence[Any], num_parts: int) -> list[Any]:
    """Cut into consecutive parts, whose lengths differ by one at most."""
    num = len(samples)
    return [samples[num * k // num_parts : num * (k + 1) // num_parts] for k in range(num_parts)]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
