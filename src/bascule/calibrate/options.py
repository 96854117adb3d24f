"""Options of `bascule calibrate`. Imports no torch."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from bascule.checks import shown, whole
from bascule.errors import ConfigError
from bascule.machine.calibration import TOKENS, least_points
from bascule.machine.cluster import HardwareProfile
from bascule.options import Group, NewFile, Outputs, Range, RankOptions, flag, refuse

_MOST_TOKENS = 2**24
_RANGE = re.compile("([0-9]{1,9}):([0-9]{1,9})")
BY_DEVICE: dict[str, dict[str, Any]] = {  # defaults of options by device type
    "cpu": {"lengths": "64:4096", "d_model": 256, "num_heads": 4, "dtype": "float32"},
    "cuda": {"lengths": "256:32768", "d_model": 3072, "num_heads": 24, "dtype": "bfloat16"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions(Outputs, RankOptions):
    """Measure this machine, and save a profile that other commands predict from.

    calibrate starts local ranks; a single rank measures no links. In a job, start it with torchrun.
    It exits with 0 if it saved a profile, with 1 if a curve misses its held-out points by more than
    --limit or a rank failed, and with 2 if an option is wrong.

    Attributes:
        out: File for the profile, as JSON.
        module: A block of yours to measure, package.module:function. The function takes a number of
            tokens, and returns a function or module and its input, or a tuple of inputs. By
            default, calibrate measures the blocks of the packed MM-DiT.
        lengths: Shortest and longest sequence, in tokens. By default 256:32768 on GPUs and 64:4096
            on CPUs.
        points: Number of lengths to measure, spaced evenly in their logarithm. Every third length
            is held out, to check the fitted curve.
        mib: Size of the largest message, in MiB.
        rounds: Rounds to measure. The lower quartile of each time counts.
        d_model: Width of the block, from which its FLOPs are counted. By default 3072 on GPUs and
            256 on CPUs.
        num_heads: Attention heads of the block. By default 24 on GPUs and 4 on CPUs.
        dtype: Data type of the block. By default bfloat16 on GPUs and float32 on CPUs.
        kernel: Attention kernel of the block. By default, the first one that runs on the device.
        base: File or name of a profile, for the numbers that calibrate does not measure.
        limit: Largest median error at the held-out points; 0.25 is 25 %. Above it, nothing is
            saved.
    """

    out: Annotated[Path, NewFile(), Group("Profile")] = Path("profile.json")
    module: Annotated[str | None, Group("Block")] = None
    lengths: Annotated[str | None, Group("Measurement")] = None
    points: Annotated[int, Range(least_points(TOKENS), 100)] = 9
    mib: Annotated[int, Range(1, 1024)] = 16
    rounds: Annotated[int, Range(1, 10_000)] = 9
    d_model: Annotated[int | None, Range(1, 2**16), Group("Block")] = None
    num_heads: Annotated[int | None, Range(1, 2**16)] = None
    dtype: Literal["float32", "bfloat16", "float64"] | None = None
    kernel: str | None = None
    base: Annotated[str, Group("Profile")] = "h100-datasheet"
    limit: Annotated[float, Range()] = 0.25

    def check(self) -> None:
        """Refuse options that do not fit each other."""
        if self.module is not None:
            names = "num_heads", "dtype", "kernel"
            refuse(self, names, f"--module {self.module} has its own; leave it out")
        for device in BY_DEVICE:
            self.seq_lens(device)
        HardwareProfile.load(self.base)

    def on(self, device: str, name: str) -> Any:
        """Return the value of an option; its default depends on the device type."""
        value = getattr(self, name)
        return BY_DEVICE[device][name] if value is None else value

    def seq_lens(self, device: str) -> list[int]:
        """Return the lengths to time, in tokens, ascending."""
        text = self.on(device, "lengths")
        match = _RANGE.fullmatch(text)
        if match is None:
            wrong = f"--lengths {shown(text)}"
            raise ConfigError(f"{wrong}: give the shortest and the longest, such as 256:16384")
        shortest, longest = (
            whole("--lengths: tokens", int(x), 1, _MOST_TOKENS) for x in match.groups()
        )
        lens = np.unique(np.geomspace(shortest, longest, self.points).round().astype(np.int64))
        if shortest >= longest or lens.size < self.points:
            wrong = f"--lengths {text}: {lens.size} lengths for --points {self.points}"
            raise ConfigError(f"{wrong}; give a wider range, the shortest length first")
        return lens.tolist()

    def message_bytes(self) -> list[int]:
        """Return the sizes of the messages to time, in bytes, ascending."""
        return np.geomspace(2**12, self.mib * 2**20, self.points).round().astype(int).tolist()

    @property
    def settings(self) -> dict[str, str]:
        """The options that must be the same on all ranks, so that ranks make the same calls."""
        local = ("out", "report", "json", "base", "limit", "ranks", "timeout_s")
        names = [name for name in self.__dataclass_fields__ if name not in local]
        return {flag(name): str(getattr(self, name)) for name in names}
