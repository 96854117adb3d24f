"""Options of `bascule bench` and `bascule doctor`. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bascule.errors import ConfigError
from bascule.options import LONGEST_S, Group, NewFolder, Outputs, Range, RankOptions, flag, refuse
from bascule.plan.topology import Topology
from bascule.train.options import MAX_TOKENS, RunOptions
from bascule.workload.codes import check_world, parse_data_codes


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(Outputs, RunOptions):
    """Train on the same batches without and with balancing, step by step, and compare both.

    Balancing moves tokens inside the model; with --loader it moves whole samples before the model.

    Attributes:
        topologies: Bags of ranks, such as g2n1 for one bag of two ranks. By default, each rank is a
            bag of its own. Several topologies, such as g1n4 g2n2 g4n1, each train their own model,
            in turns.
        loader: Balance in the data loader: it moves whole samples between ranks while they compute.
        accumulate: Microbatches per step, with --loader. Each is a batch of the stream.
        steps: Steps to measure.
        warmup: Steps to train before the measured ones.
        batch_size: Samples of --photos or --manifest that each rank loads per step.
        out: Folder for summary.json and steps.jsonl.
        peak_tflops: Peak of a rank, in TFLOP/s, to compute HFU. By default, the peak of a known GPU
            in bfloat16.
    """

    topologies: Annotated[tuple[str, ...], Group("What to compare")] = ()
    loader: bool = False
    accumulate: Annotated[int, Range(1, 10**4)] = 1
    steps: Annotated[int, Range(1, 10**6)] = 12
    warmup: Annotated[int, Range(0, 10**6)] = 2
    batch_size: Annotated[int, Range(0, 10**4), Group("Data")] = 2
    out: Annotated[Path, NewFolder(), Group("Output")] = Path("results/bench")
    peak_tflops: Annotated[float | None, Range(1e-6, 1e12), Group("Machine")] = None

    def check(self, world_size: int) -> tuple[Topology, ...]:
        """Refuse options that do not fit each other or the world; return the topologies."""
        self.check_source()
        codes = () if self.data is None else parse_data_codes(self.data)
        if codes:
            check_world(codes, world_size)
            refuse(self, ("batch_size",), "--data says how many samples a rank has; leave it out")
        for code in codes:
            if (tokens := code.batch_size * code.image_tokens) > MAX_TOKENS:
                what = f"--data {code}: {tokens:,} visual tokens per rank, over {MAX_TOKENS:,}"
                raise ConfigError(f"{what}: use fewer samples, pixels or frames")
        if not self.loader:
            refuse(self, ("accumulate",), "only with --loader")
        names = self.topologies or (f"g1n{world_size}",)
        topologies = tuple(Topology.parse(name, world_size=world_size) for name in names)
        first: dict[tuple[bytes, bytes], str] = {}  # topologies by their bags
        for name, topology in zip(names, topologies, strict=True):
            bags = topology.bag_sizes.tobytes(), topology.ring_degrees.tobytes()
            if other := first.get(bags):
                raise ConfigError(f"--topologies: {name} has the bags of {other}; leave one out")
            first[bags] = name
        if self.loader:
            self._check_loader(topologies)
            if codes and not any(code.batch_size for code in codes):
                raise ConfigError(f"--data {self.data}: no rank loads a sample that could be moved")
        return topologies

    def _check_loader(self, topologies: tuple[Topology, ...]) -> None:
        names = "vae", "text_encoder"
        refuse(self, names, "--loader moves samples before they are encoded; leave one of them out")
        if any(int(topology.bag_sizes.max()) > 1 for topology in topologies):
            what = "--loader moves whole samples between bags of one rank; leave --topologies out"
            raise ConfigError(f"--topologies {' '.join(self.topologies)}: {what}")
        if topologies[0].num_ranks == 1:
            raise ConfigError("--loader on 1 rank: samples have nowhere to move; use --ranks 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions(Outputs, RankOptions):
    """Check the ranks before a run: versions, devices, links, and who computes slowly.

    doctor starts local ranks; in a job, start it with torchrun. It exits with 0 if it found
    nothing, with 1 if it found something or a rank failed, and with 2 if an option is wrong.

    Attributes:
        profile: File of a hardware profile, or a name such as h100-datasheet. Ranks and links must
            reach its rates. By default, doctor compares them only with each other.
        rounds: Rounds to measure. A rank or link counts as slow if it is slow in three quarters of
            them.
        mib: Size of the largest message, in MiB.
        tolerance: How much slower a rank may be than the median, or than the profile; 0.1 is 10 %.
        link_tolerance: How far the bandwidth of a link may lie below the median, or below the
            profile; 0.5 is half.
    """

    profile: Annotated[str | None, Group("Checks")] = None
    rounds: Annotated[int, Range(1, 10_000)] = 7
    mib: Annotated[int, Range(1, 1024)] = 16
    tolerance: Annotated[float, Range(0.0, 100.0)] = 0.1
    link_tolerance: Annotated[float, Range(0.0, 0.99)] = 0.5
    timeout_s: Annotated[float, Range(1.0, LONGEST_S)] = 120.0

    @property
    def settings(self) -> dict[str, str]:
        """The options that must be the same on all ranks, so that ranks make the same calls."""
        names = ("rounds", "mib", "tolerance", "link_tolerance", "profile")
        return {flag(name): str(getattr(self, name)) for name in names}
