"""Options of every command that plans: lengths of a batch, machines, limits."""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Annotated

import numpy as np

from bascule.checks import MAX_RANKS, number, rate, shown
from bascule.errors import ConfigError
from bascule.machine.cluster import LIMITS, Cluster, HardwareProfile
from bascule.machine.costs import TransformerCost
from bascule.options import Group, Range, flag, refuse
from bascule.plan.limits import Limits, in_tokens
from bascule.quantities import num_bytes
from bascule.workload.codes import (
    MAX_SEQUENCES,
    SampleShape,
    deal,
    parse_data_codes,
    read_lengths,
    sample_lengths,
    seq_lens,
)
from bascule.workload.manifest import Manifest
from bascule.workload.options import ManifestOptions
from bascule.workload.tokens import model_shape

_WHOLE = re.compile("-?[0-9]{1,18}")
_UNITS: dict[str, tuple[float, tuple[str, ...]]] = {  # unit, fields of a profile
    "tflops": (1e12, ("matmul_flops_per_s", "attention_flops_per_s")),
    "intra_gbs": (1e9, ("intra_bytes_per_s",)),
    "inter_gbs": (1e9, ("inter_bytes_per_s",)),
    "latency_us": (1e-6, ("launch_s",)),
    "memory_gb": (1e9, ("memory_bytes",)),
}
_LONG_CLIP = 500_000  # tokens of a sample, far above what trainers use
_DEFAULT_BATCH = 4


@dataclass(frozen=True, kw_only=True)
class InputOptions(ManifestOptions):
    """Lengths of sequences, from one of four sources, and the model.

    Attributes:
        lengths: Tokens of each sequence; "/" separates ranks, for example 4096,300/512/900,40/.
        file: File of lengths: one line for each rank, or JSON.
        batch_size: Samples per rank and step of --manifest; the default is 4.
        data: Data codes, for example g16b4i256f1s0,g8b1i2048f1s0.
        ranks: Number of ranks. Default: as many as the lengths, topology or data codes describe.
        d_model: Model width. Default: the width of --model.
        gamma: Time of an attention FLOP over the time of another FLOP. Default: the profile's.
        num_layers: Number of blocks of the model. Default: as --model has.
        num_heads: Number of key-value heads. Default: as --model has, unless --d-model is given.
        seed: Random seed of --data and of the sample order of --manifest.
        step: First step to read from --data or --manifest.
    """

    lengths: Annotated[str | None, Group("Data")] = None
    file: Path | None = None
    batch_size: Annotated[int | None, Range(1, MAX_SEQUENCES)] = None
    data: str | None = None
    ranks: Annotated[int | None, Range(1, MAX_RANKS)] = None
    d_model: Annotated[int | None, Range(1, 2**31), Group("Model")] = None
    gamma: float | None = None
    num_layers: Annotated[int | None, Range(1, 2**31)] = None
    num_heads: Annotated[int | None, Range(1)] = None
    seed: Annotated[int, Group("Data")] = 0
    step: int = 0

    @property
    def cost(self) -> TransformerCost:
        """The cost model."""
        gamma = self.gamma
        if gamma is None:
            gamma = self.hardware().gamma if isinstance(self, MachineOptions) else 1.0
        model = model_shape(self.model)
        width, blocks = self.d_model or model.width, self.num_layers or model.num_blocks
        heads = self.num_heads or (model.num_heads if self.d_model is None else None)
        return TransformerCost(width, gamma=gamma, num_layers=blocks, num_heads=heads)

    @property
    def has_steps(self) -> bool:
        """True if the source has more than one batch."""
        return self.data is not None or self.manifest is not None

    @property
    def data_lines(self) -> list[str]:
        """Lines that say how --manifest or --lengths was understood."""
        if self.lengths is not None and "/" not in self.lengths and "," in self.lengths:
            return ["Rank 0 loads all these sequences: --lengths separates ranks by /."]
        if self.manifest is None:
            return []
        lines, most = self._manifest.summary(), int(self._manifest.lens.max(initial=0))
        settings = {"cuts clips": "--max-frames 81", "scales images": "--bucket 720p"}
        unset = [self.max_frames is None, self.bucket is None]
        if most > _LONG_CLIP and any(unset):
            does, says = zip(*compress(settings.items(), unset), strict=True)
            cut = f"The longest sample has {most:,} tokens: if your trainer {' or '.join(does)}"
            lines.append(f"{cut}, say how, as by {' and '.join(says)}.")
        return lines

    def check_steps(self, **counts: int | None) -> None:
        """Refuse counts above 1 (by option name) if the source has only one batch."""
        reason = "only --data and --manifest have more than one batch"
        for name, value in counts.items():
            if value is not None and value > 1 and not self.has_steps:
                raise ConfigError(f"--{name} {value}: {reason}")

    def read(self, default_ranks: int | None = None, *, steps_after: int = 0) -> list[list[int]]:
        """Read the batch `steps_after` steps after --step: one list of lengths per source rank."""
        num_ranks = default_ranks if self.ranks is None else self.ranks
        if self.has_steps:
            return seq_lens(self.read_shapes(num_ranks, steps_after=steps_after))
        self._check_source()
        refuse(self, ("seed", "step"), "lengths are as given; only for --data and --manifest")
        if self.lengths is not None:
            return _parse_lengths(self.lengths, self.ranks)
        assert self.file is not None
        return read_lengths(self.file, num_ranks=num_ranks)

    def read_shapes(
        self, num_ranks: int | None = None, *, steps_after: int = 0
    ) -> list[list[SampleShape]]:
        """Read a batch of --manifest or --data: each source rank's samples, by token counts."""
        self._check_source()
        step = self.step + steps_after
        if self.data is not None:
            codes = parse_data_codes(self.data)
            return sample_lengths(codes, seed=self.seed, step=step, world_size=self.ranks)
        if self.manifest is None:
            raise ConfigError("lengths do not tell texts from images: give --data or --manifest")
        if num_ranks is None:
            reason = "a list of samples has no ranks"
            raise ConfigError(f"--manifest needs --ranks, such as --ranks 8: {reason}")
        return deal(self._draw(num_ranks, step), num_ranks)

    def epoch_batches(self, num_ranks: int) -> int | None:
        """Return how many batches an epoch of --manifest has; None for other sources."""
        if self.manifest is None:
            return None
        return max(len(self._manifest) // self._step_size(num_ranks), 1)

    def _check_source(self) -> None:
        sources = self.lengths, self.file, self.manifest, self.data
        if (num := sum(source is not None for source in sources)) != 1:
            options = "--lengths, --file, --manifest and --data"
            raise ConfigError(f"give one of {options}, not {num} of them")
        self.check_manifest("batch_size")

    @cached_property
    def _manifest(self) -> Manifest:
        return self.read_manifest()

    def _step_size(self, num_ranks: int) -> int:
        """Return how many samples a step has; without --batch-size at most the data set."""
        size, num_samples = (self.batch_size or _DEFAULT_BATCH) * num_ranks, len(self._manifest)
        if self.batch_size is not None and size > num_samples:
            option = f"--batch-size {self.batch_size} on {num_ranks} ranks"
            few = f"needs {size} samples per step, and {self.manifest} has {num_samples}"
            raise ConfigError(f"{option} {few}: use a smaller one")
        if size > MAX_SEQUENCES:
            limit = f"at most {MAX_SEQUENCES} can be planned"
            raise ConfigError(f"{size} samples per step, {limit}: use a smaller --batch-size")
        return min(size, num_samples)

    def _draw(self, num_ranks: int, step: int) -> list[SampleShape]:
        """Draw the samples of a step; every epoch has another order, and drops incomplete steps."""
        manifest, size = self._manifest, self._step_size(num_ranks)
        epoch, place = divmod(step, len(manifest) // size)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(manifest))
        return [manifest.shape(k) for k in order[place * size : (place + 1) * size].tolist()]


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The machine: a profile, and numbers that replace the profile's.

    Attributes:
        profile: Hardware profile: h100-, h200-, b200-, a100- or l40s-datasheet, h100-knapformer, or
            a file that bascule calibrate wrote.
        tflops: TFLOP per second that a rank sustains.
        intra_gbs: GB per second that a rank sends within its node.
        latency_us: Microseconds to launch a kernel or an exchange.
    """

    profile: Annotated[str, Group("Machine")] = "h100-datasheet"
    tflops: float | None = None
    intra_gbs: float | None = None
    latency_us: float | None = None

    def hardware(self) -> HardwareProfile:
        """Return the profile, with the numbers that options replace."""
        profile, changes = HardwareProfile.load(self.profile), dict[str, float]()
        for option, (unit, fields) in _UNITS.items():
            if (value := getattr(self, option, None)) is None:
                continue
            least, most = LIMITS[fields[0]]
            value = number(flag(option), value, least / unit, most / unit)
            changes |= dict.fromkeys(fields, value * unit)
        if not changes:
            return profile
        return replace(profile, source="given", note="", calibration=None, **changes)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(MachineOptions):
    """The machines; by default nodes of eight ranks.

    Attributes:
        ranks_per_node: Ranks in a node; the default is at most 8.
        memory_gb: GB of memory that a rank has for activations; needs --kb-per-token.
        max_tokens: Most tokens that a rank may hold.
        kb_per_token: KB of activations per token, over all layers; --memory-gb limits them.
    """

    ranks_per_node: Annotated[int | None, Group("Machine")] = None
    memory_gb: Annotated[float | None, Group("Limits")] = None
    max_tokens: int | None = None
    kb_per_token: float | None = None

    @property
    def limits(self) -> Limits | None:
        """Limits, in tokens; None if unlimited."""
        limits = None if self.max_tokens is None else Limits(tokens=self.max_tokens)
        if self.kb_per_token is None:
            refuse(self, ("memory_gb",), "limits nothing without --kb-per-token; give both")
            return limits
        memory_bytes = self.hardware().memory_bytes
        if memory_bytes is None:
            raise ConfigError(f"--kb-per-token: {self.profile} has no memory: give --memory-gb")
        bytes_per_token = rate("--kb-per-token", self.kb_per_token) * 1e3
        if bytes_per_token > int(memory_bytes):
            memory = f"a rank has {num_bytes(memory_bytes)} of memory, too little for one token"
            what = f"--kb-per-token: a token takes {num_bytes(bytes_per_token)}, and {memory}"
            raise ConfigError(f"{what}: give a smaller number, or a larger --memory-gb")
        limits = Limits(tokens=self.max_tokens, num_bytes=int(memory_bytes))
        return in_tokens(limits, TransformerCost(bytes_per_token=bytes_per_token), None)

    def machines(self, num_ranks: int) -> Cluster:
        """Return a cluster of whole nodes with `num_ranks` ranks."""
        per_node = self.ranks_per_node
        if per_node is None:
            per_node = max(size for size in range(1, 9) if num_ranks % size == 0)
        if per_node < 1 or num_ranks % per_node:
            raise ConfigError(f"--ranks-per-node {per_node}: give a divisor of {num_ranks} ranks")
        return self.hardware().cluster(num_ranks // per_node, per_node)


class BatchOptions(ClusterOptions, InputOptions):
    """Batches, and the machines that they are planned for."""

    def notes(self, *, is_priced: bool = True) -> list[str]:
        """Return sentences that name the model, machine and batch of the predictions."""
        machine = self.hardware()
        notes = [
            f"Model: {self.cost.shape}.",
            f"Predicted for {machine}." if is_priced else "Loads are compute alone, without wires.",
        ]
        if self.kb_per_token is not None and machine.memory_bytes is not None:
            source = machine.provenance_of("memory_bytes")
            notes.append(f"A rank has {num_bytes(machine.memory_bytes)} of memory; {source}.")
        if self.manifest is not None and self.batch_size is None:
            notes.append(f"A step has {_DEFAULT_BATCH} samples per rank (--batch-size).")
        return notes


def _parse_lengths(text: str, num_ranks: int | None) -> list[list[int]]:
    if not text.strip():
        raise ConfigError("--lengths is empty: give tokens, such as 4096,300/512/900,40")
    ranks = [[term.strip() for term in rank.split(",")] for rank in text.split("/")]
    wrong = [term for terms in ranks for term in terms if term and not _WHOLE.fullmatch(term)]
    if wrong:
        advice = "write whole numbers, commas between sequences and / between ranks"
        raise ConfigError(f"--lengths {shown(text)}: {shown(wrong[0])} is not a length; {advice}")
    if num_ranks is not None and num_ranks < len(ranks):
        raise ConfigError(f"--ranks {num_ranks}: --lengths lists {len(ranks)} ranks; give as many")
    lens = [[int(term) for term in terms if term] for terms in ranks]
    return lens + [[]] * ((num_ranks or 0) - len(lens))
