"""The options of `bascule calibrate`. Imports no torch, so that its help is instant."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bascule.errors import ConfigError
from bascule.plan.calibration import TOKENS, least_points
from bascule.plan.checks import MAX_RANKS, number, shown, whole
from bascule.plan.machine import HardwareProfile

_MOST_TOKENS = 2**24
_MOST_WIDTH = 2**16

_RANGE = re.compile("([0-9]{1,9}):([0-9]{1,9})")
BY_DEVICE: dict[str, dict[str, Any]] = {
    "cpu": {"lengths": "64:4096", "d_model": 256, "num_heads": 4, "dtype": "float32"},
    "cuda": {"lengths": "256:32768", "d_model": 3072, "num_heads": 24, "dtype": "bfloat16"},
}
"""Defaults by type of device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """Measure this machine, and save a profile that predictions are made from.

    Starts local ranks; in a job, start it with torchrun. Exit status 0: saved; 1: a curve misses
    its held-out points by too much and nothing was saved, or a rank failed; 2: a wrong option.

    Attributes:
        out: The profile, a JSON file.
        name: Of the profile; that of its file, if not given.
        ranks: Local ranks to launch; as many as GPUs, else physical cores but two at least, if
            not given. One rank measures no wires.
        module: A block of yours, package.module:function; the function gets a number of tokens,
            and gives a function or module and its input, or a tuple of inputs. By default the
            blocks of the packed MM-DiT.
        lengths: Shortest and longest sequence, in tokens.
        points: Lengths, spread evenly in their logarithm; every third one is held out to judge by.
        mib: Largest message, in MiB.
        rounds: Measured rounds, one after the other; of each time their lower quartile counts.
        d_model: Width of the block, for which costs count FLOPs.
        num_heads: Attention heads of the block.
        dtype: Of parameters and activations of the block.
        kernel: Attention kernel of the block; the fastest for the device if not given.
        sparse_tokens: Also time block-sparse attention on all meshes of the ranks, up to so many
            tokens.
        base: File or name of the profile that has what is not measured here.
        limit: Of what held-out points are missed by in the median; 0.25 is 25 %.
        report: Where to write a page with measured against predicted, .html.
        json: Where to write the profile and what is refused of it, also if it is; - for standard
            output, the table then goes to standard error.
        timeout_s: Longest wait of a collective, in seconds.
    """

    out: Path = Path("profile.json")
    name: str | None = None
    ranks: int | None = None
    module: str | None = None
    lengths: str | None = None
    points: int = 9
    mib: int = 16
    rounds: int = 9
    d_model: int | None = None
    num_heads: int | None = None
    dtype: Literal["float32", "bfloat16", "float64"] | None = None
    kernel: str | None = None
    sparse_tokens: int | None = None
    base: str = "h100-datasheet"
    limit: float = 0.25
    report: Path | None = None
    json: Path | None = None
    timeout_s: float = 600.0

    def check(self, world_size: int | None = None) -> None:
        """Refuse values that are out of range, or do not fit the ranks of the job."""
        check_ranks(self.ranks, world_size)
        whole("--points", self.points, least_points(TOKENS), 100)
        whole("--mib", self.mib, 1, 1024)
        whole("--rounds", self.rounds, 1, 10_000)
        for name, value, most in (
            ("--d-model", self.d_model, _MOST_WIDTH),
            ("--num-heads", self.num_heads, _MOST_WIDTH),
            ("--sparse-tokens", self.sparse_tokens, _MOST_TOKENS),
        ):
            if value is not None:
                whole(name, value, 1, most)
        if self.sparse_tokens is not None and 1 in (self.ranks, world_size):
            raise ConfigError(
                f"--sparse-tokens {self.sparse_tokens}: one rank has no meshes; give --ranks 2 or "
                "more, or leave it out"
            )
        number("--limit", self.limit)
        number("--timeout-s", self.timeout_s, 1.0, 1e7)
        if self.module is not None and self.num_heads is not None:
            raise ConfigError(
                f"--num-heads {self.num_heads} and --module {self.module}: the module has heads of "
                "its own; leave --num-heads out"
            )
        for device in BY_DEVICE:
            self.seq_lens(device)
        HardwareProfile.load(self.base)

    def on(self, device: str, name: str) -> Any:
        """Return an option, or what is timed on a type of device if it is not given."""
        value = getattr(self, name)
        return BY_DEVICE[device][name] if value is None else value

    def seq_lens(self, device: str) -> list[int]:
        """Return ascending tokens of the sequences that are timed."""
        text = self.on(device, "lengths")
        match = _RANGE.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"--lengths {shown(text)}: give the shortest and the longest, such as 256:16384"
            )
        shortest, longest = (
            whole("--lengths: tokens", int(x), 1, _MOST_TOKENS) for x in match.groups()
        )
        lens = np.unique(np.geomspace(shortest, longest, self.points).round().astype(np.int64))
        if shortest >= longest or lens.size < self.points:
            raise ConfigError(
                f"--lengths {text}: {lens.size} lengths for --points {self.points}; give a wider "
                "range, the shortest length first"
            )
        return lens.tolist()

    def message_bytes(self) -> list[int]:
        """Return ascending bytes of the messages that are timed."""
        return np.geomspace(2**12, self.mib * 2**20, self.points).round().astype(int).tolist()

    @property
    def settings(self) -> dict[str, str]:
        """Options that must be the same on all ranks, so that they make the same calls."""
        own = ("out", "name", "report", "json", "base", "limit", "ranks", "timeout_s")
        names = [name for name in self.__dataclass_fields__ if name not in own]
        return {f"--{name.replace('_', '-')}": str(getattr(self, name)) for name in names}


def check_ranks(ranks: int | None, world_size: int | None) -> None:
    """Refuse --ranks that cannot be started, or are not those of the job, if there is one yet."""
    if ranks is not None:
        whole("--ranks", ranks, 1, 256)
        if world_size not in (None, ranks):
            raise ConfigError(
                f"--ranks {ranks}: the launcher of this job started {world_size} ranks; leave "
                "--ranks out, it is for ranks that bascule starts"
            )
    if world_size is not None:
        whole("WORLD_SIZE", world_size, 1, MAX_RANKS)
