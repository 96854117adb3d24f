"""The options of `bascule bench`. Imports no torch, so that its help is instant."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bascule.errors import ConfigError
from bascule.plan.topology.spec import Topology
from bascule.workload.codes import check_world, parse_data_codes


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Train on the same batches without and with balancing, step by step, and compare.

    Balancing cuts sequences and moves tokens inside the model; with --loader it moves whole samples
    before the model sees them.

    Attributes:
        photos: Folder of photos of any size; captions in NAME.txt or captions.jsonl are optional.
        data: Data codes of a synthetic mix, for example g1b8i256f1s0,g1b2i512f1s0.
        topology: Compute bags, for example g2n1; one rank a bag if not given.
        planner: lpt, or the greedy of the KnapFormer paper.
        loader: Balance in the data loader: samples change ranks behind the compute.
        accumulate: Microbatches of a step, with --loader; each is a batch of the stream.
        ranks: Local ranks to launch; as many as GPUs, else physical cores but two at least, if
            not given.
        steps: Measured steps.
        warmup: Steps before them that do not count.
        batch_size: Photos a rank and step.
        max_tokens: Photos with more tokens are scaled down.
        d_model: Model width.
        num_heads: Attention heads.
        num_double: Blocks with separate weights for text and image.
        num_single: Blocks with shared weights.
        checkpoint: Recompute activations in the backward.
        dtype: Of parameters and activations in forward and backward.
        gamma: Cost of an attention FLOP over one of a linear layer; measured first if not given.
        kernel: Attention kernel; the fastest for the device if not given.
        lr: Learning rate of AdamW.
        seed: Of weights, data and noise.
        strict: Stop at a photo that cannot be read, instead of skipping it.
        timeout_s: Longest wait of a collective, in seconds.
        out: Folder for summary.json and steps.jsonl.
    """

    photos: Path | None = None
    data: str | None = None
    topology: str | None = None
    planner: Literal["lpt", "knapsack"] = "lpt"
    loader: bool = False
    accumulate: int = 1
    ranks: int | None = None
    steps: int = 12
    warmup: int = 2
    batch_size: int = 2
    max_tokens: int = 2048
    d_model: int = 192
    num_heads: int = 6
    num_double: int = 1
    num_single: int = 3
    checkpoint: bool = False
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    gamma: float | None = None
    kernel: str | None = None
    lr: float = 1e-3
    seed: int = 0
    strict: bool = False
    timeout_s: float = 120.0
    out: Path = Path("results/bench")

    def check(self, world_size: int) -> Topology:
        """Everything that can be known before ranks are launched; returns the bags of the world.

        Raises:
            ConfigError: A value is out of range, or data codes or topology do not fit the world.
        """
        self._check_values()
        codes = () if self.data is None else parse_data_codes(self.data)
        if self.data is not None:
            check_world(codes, world_size)
        topology = Topology.parse(self.topology or f"g1n{world_size}", world_size=world_size)
        if not self.loader:
            return topology
        if int(topology.bag_sizes.max()) > 1:
            raise ConfigError(
                f"--topology {self.topology}: --loader moves whole samples, so each rank is a bag "
                "of its own; leave --topology out"
            )
        if world_size == 1:
            raise ConfigError("--loader on 1 rank: samples have nowhere to move; use --ranks 2")
        if self.planner != "lpt":
            raise ConfigError(f"--planner {self.planner}: --loader plans with lpt; leave it out")
        if self.data is not None and not any(code.batch_size for code in codes):
            raise ConfigError(f"--data {self.data}: no rank loads a sample that could be moved")
        return topology

    def _check_values(self) -> None:
        if (self.photos is None) == (self.data is None):
            raise ConfigError("give either --photos FOLDER or --data CODES")
        for name, least in (
            ("steps", 1),
            ("warmup", 0),
            ("batch_size", 0),
            ("max_tokens", 1),
            ("seed", 0),
            ("accumulate", 1),
        ):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} {getattr(self, name)}: must be at least {least}")
        if self.accumulate > 1 and not self.loader:
            raise ConfigError(f"--accumulate {self.accumulate}: only with --loader")
        if self.ranks is not None and self.ranks < 1:
            raise ConfigError(f"--ranks {self.ranks}: must be at least 1")
        for name in ("lr", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: must be positive"
                )
