"""The options of `bascule bench`. Imports no torch, so that its help is instant."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from bascule.errors import ConfigError
from bascule.options import Range
from bascule.plan.topology import Topology
from bascule.train.options import RunOptions
from bascule.workload.codes import check_world, parse_data_codes


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(RunOptions):
    """Train on the same batches without and with balancing, step by step, and compare.

    Balancing cuts sequences and moves tokens inside the model; with --loader it moves whole samples
    before the model sees them.

    Attributes:
        planner: lpt, or the greedy of the KnapFormer paper.
        loader: Balance in the data loader: samples change ranks behind the compute.
        accumulate: Microbatches of a step, with --loader; each is a batch of the stream.
        steps: Measured steps.
        warmup: Steps before them that do not count.
        batch_size: Photos and clips a rank and step.
        out: Folder for summary.json and steps.jsonl.
        report: Where to write a page of it all, .html.
        picture: Where to draw a step without and with balancing as an SVG, with --vae or
            --text-encoder: the step whose speed-up is the median.
    """

    planner: Literal["lpt", "knapsack"] = "lpt"
    loader: bool = False
    accumulate: Annotated[int, Range(1, 10**4)] = 1
    steps: Annotated[int, Range(1, 10**6)] = 12
    warmup: Annotated[int, Range(0, 10**6)] = 2
    batch_size: Annotated[int, Range(0, 10**4)] = 2
    out: Path = Path("results/bench")
    report: Path | None = None
    picture: Path | None = None

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
        self.check_source()
        if self.picture is not None and not self.encodes:
            raise ConfigError(f"--picture {self.picture}: give --vae or --text-encoder, too")
        if self.loader and self.encodes:
            raise ConfigError(
                "--loader moves samples before they are encoded, which is not compared: leave out "
                "--vae and --text-encoder, or --loader"
            )
        if self.accumulate > 1 and not self.loader:
            raise ConfigError(f"--accumulate {self.accumulate}: only with --loader")
