"""Training on machines that nobody has to start: what a step takes, and what balancing is worth."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from bascule.errors import ConfigError
from bascule.plan import metrics
from bascule.plan.checks import index_of, listed, number, of_type, put, rate, whole
from bascule.plan.costs.cost_models import FLOPS_PER_UNIT, TransformerCost
from bascule.plan.costs.hardware import Floats, HardwareProfile
from bascule.plan.files import to_path
from bascule.plan.loaded.sequences import batch_of
from bascule.plan.routes import Ints
from bascule.sim.placements import Loaded, Placement, policy_of
from bascule.sim.step_seconds import (
    HIDDEN,
    KINDS,
    EncoderStage,
    Machine,
    Sharding,
    microbatch_seconds,
)
from bascule.workload.codes import parse_data_codes, sample_lengths

_MOST_MICROBATCHES = 100_000
_PASSES_OF_FLOPS = 4
"""Forward, backward twice, and the recomputation: what HFU counts. Source: KnapFormer, section 4.2."""

_BLOCK_VALUES = 34
"""Bytes a token and unit of width that the block that is recomputed holds, without the scores of
attention. Source: Korthikanti et al. (arXiv:2205.05198), equation 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """What a simulation depends on besides data, model and machine.

    Args:
        num_steps: Of data codes; given batches tell theirs.
        num_ranks: Of data codes; None: those of the mix.
        ranks_per_node: None: at most 8.
        accumulate: Microbatches of a step; ranks meet at the end of each, as under FSDP2.
        seed: Of data codes.
        sharding: Of the parameters.
        stages: Encoders before the model.
        loader_bytes_per_s: Bytes that a rank's loader sends in a second; assumed, as of gloo.
        sample_bytes_per_token: Bytes that it sends for a token; by default a latent of FLUX in
            bf16, 64 values.

    Raises:
        ConfigError: A value is out of range.
    """

    num_steps: int = 20
    num_ranks: int | None = None
    ranks_per_node: int | None = None
    accumulate: int = 1
    seed: int = 0
    sharding: Sharding = Sharding()
    stages: tuple[EncoderStage, ...] = ()
    loader_bytes_per_s: float = 1e9
    sample_bytes_per_token: float = 128.0

    def __post_init__(self) -> None:
        for name in ("num_steps", "accumulate"):
            most = _MOST_MICROBATCHES
            put(self, name, whole(f"SimulationOptions({name}", getattr(self, name), 1, most))
        for name in ("num_ranks", "ranks_per_node"):
            if (value := getattr(self, name)) is not None:
                put(self, name, whole(f"SimulationOptions({name}", value, 1))
        if self.num_steps * self.accumulate > _MOST_MICROBATCHES:
            raise ConfigError(
                f"SimulationOptions: {self.num_steps} steps of {self.accumulate} microbatches are "
                f"more than {_MOST_MICROBATCHES}: use fewer"
            )
        of_type("SimulationOptions(sharding", self.sharding, Sharding, "a Sharding(..)")
        for stage in listed("SimulationOptions(stages", self.stages):
            of_type("SimulationOptions(stages: each", stage, EncoderStage, "an EncoderStage(..)")
        for name in ("loader_bytes_per_s", "sample_bytes_per_token"):
            put(self, name, rate(f"SimulationOptions({name}", getattr(self, name)))


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRun:
    """A run of some steps. N ranks; M microbatches, of which `accumulate` make a step.

    Attributes:
        name: Of the policy.
        accumulate: Microbatches of a step.
        seconds: (M, len(KINDS), N) of each rank, by what they are spent on.
        hidden: (M, len(HIDDEN), N) seconds of exchanges that nobody waited for.
        tokens: (M,) without padding.
        flops: (M,) of forward, recomputation and backward, without padding, attention in full.
        workloads: (M, N) what the cost model says of each rank: forward, without wires.
        activation_bytes: (M, N) held until the backward pass.
        peak_flops_per_s: Of all ranks; None if the profile has none.
    """

    name: str
    accumulate: int
    seconds: Floats
    hidden: Floats
    tokens: Ints
    flops: Floats
    workloads: Floats
    activation_bytes: Floats
    peak_flops_per_s: float | None

    def spent_on(self, kind: str) -> Floats:
        """(M, N) seconds of each rank; `KINDS` lists what there is."""
        return self.seconds[:, KINDS.index(kind)]

    @property
    def microbatch_s(self) -> Floats:
        """(M,) seconds of each microbatch, the same on all ranks."""
        return self.seconds[:, :, 0].sum(axis=1)

    @property
    def fbl_s(self) -> float:
        """Mean seconds of forward and backward of a step."""
        return float(self.microbatch_s.mean()) * self.accumulate

    @property
    def tokens_per_s(self) -> float:
        """Tokens in a second, over all ranks."""
        return float(self.tokens.sum() / self.microbatch_s.sum())

    @property
    def hfu(self) -> float | None:
        """FLOPs over what the ranks could compute at their peak; None if that is not known."""
        if self.peak_flops_per_s is None:
            return None
        return float(self.flops.sum() / self.microbatch_s.sum()) / self.peak_flops_per_s

    @property
    def wir(self) -> float:
        """Mean of max over min of the ranks' workloads; infinite if a rank is ever idle."""
        return float(np.mean([metrics.wir(loads) for loads in self.workloads]))

    @property
    def idle_share(self) -> float:
        """Share of all seconds in which a rank waits for another one."""
        return float(self.spent_on("waiting").sum() / self.seconds.sum())

    @property
    def most_activation_bytes(self) -> float:
        """Most that a rank ever holds."""
        return float(self.activation_bytes.max())

    def to_dict(self) -> dict[str, Any]:
        """The metrics, and the mean seconds of a rank and step by kind, as plain values."""
        means = self.seconds.mean(axis=(0, 2)) * self.accumulate
        hidden = self.hidden.mean(axis=(0, 2)) * self.accumulate
        return {
            "name": self.name,
            "wir": self.wir,
            "fbl_s": self.fbl_s,
            "tokens_per_s": self.tokens_per_s,
            "hfu": self.hfu,
            "idle_share": self.idle_share,
            "activation_bytes": self.most_activation_bytes,
            "seconds": dict(zip(KINDS, means.tolist(), strict=True)),
            "hidden_seconds": dict(zip(HIDDEN, hidden.tolist(), strict=True)),
        }


@dataclass(frozen=True, slots=True, eq=False)
class SimulationResult:
    """What every policy makes of the same data.

    Attributes:
        profile: The machine, and from where its numbers are.
        num_ranks: N.
        runs: One a policy, in the order that was asked for.
    """

    profile: HardwareProfile
    num_ranks: int
    runs: tuple[SimulatedRun, ...]

    def rows(self) -> list[tuple[str, ...]]:
        """A heading, and a row a run, for tables."""
        rows = [("", "WIR", "FBL, s", "TPS, k", "HFU, %", "idle, %", "GB", *KINDS[:-1])]
        for run in self.runs:
            means = run.seconds.mean(axis=(0, 2)) * run.accumulate
            rows.append(
                (
                    run.name,
                    f"{run.wir:.2f}",
                    f"{run.fbl_s:.3g}",
                    f"{run.tokens_per_s / 1e3:.4g}",
                    "" if run.hfu is None else f"{100 * run.hfu:.1f}",
                    f"{100 * run.idle_share:.1f}",
                    f"{run.most_activation_bytes / 1e9:.3g}",
                    *(f"{value:.3g}" if value else "" for value in means[:-1]),
                )
            )
        return rows

    def table(self) -> str:
        """Text: a row a run; seconds of a rank and step by kind, means over ranks and steps."""
        head, *rows = self.rows()
        kinds = [index for index in range(len(head)) if any(row[index] for row in rows)]
        table = Table(title=f"{self.num_ranks} ranks of {self.profile}")
        for index in kinds:
            table.add_column(head[index], justify="right" if index else "left")
        for row in rows:
            table.add_row(*(row[index] for index in kinds))
        console = Console(file=StringIO(), width=160, color_system=None)
        console.print(table)
        return str(console.file.getvalue())  # pyright: ignore

    def report(self, path: str | Path) -> None:
        """Write the table as Markdown.

        Raises:
            ConfigError: The file cannot be written; says why.
        """
        head, *rows = self.rows()
        lines = [f"{self.num_ranks} ranks of {self.profile}", self.profile.note, ""]
        lines += ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
        try:
            to_path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write {path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "profile": str(self.profile),
            "num_ranks": self.num_ranks,
            "runs": [run.to_dict() for run in self.runs],
        }


def simulate(
    data: str | Sequence[Sequence[npt.ArrayLike]],
    *,
    profile: HardwareProfile | str,
    model: TransformerCost,
    topologies: Sequence[str],
    options: SimulationOptions | None = None,
) -> SimulationResult:
    """Predict training steps, without torch and without the machines.

    A microbatch takes as long as its slowest rank: encoders, compute of forward, recomputation and
    backward, exchanges, what FSDP2's collectives do not hide, and the host. Linear in steps and
    ranks, in time and memory.

    Args:
        data: Data codes, of which steps are drawn; or batches, each one list of token counts a
            source rank: the microbatches, in order.
        profile: The machine; or its file or name, as for `HardwareProfile.load`.
        model: The model, and what is planned by. Its `gamma` is of the forward pass.
        topologies: What to compare: topologies ("g4n8"), which bascule plans; "knapsack g4n8", the
            paper's greedy; "loader", whole samples moved by the data loader; and of today's
            practice "none", "padded", "buckets" and "packs".
        options: Everything else.

    Raises:
        ConfigError: A value is out of range, or something does not fit; says what.
    """
    options = SimulationOptions() if options is None else options
    of_type("options", options, SimulationOptions, "a SimulationOptions(..)")
    of_type("model", model, TransformerCost, "a TransformerCost(..)")
    if not isinstance(profile, HardwareProfile):
        profile = HardwareProfile.load(profile)
    run = _drawn(data, options) if isinstance(data, str) else _given(data)
    if not sum(one.lens.sum() for one in run):
        raise ConfigError("the data has no tokens: there is nothing to simulate")
    num_ranks = run[0].num_ranks
    per_node = options.ranks_per_node
    if per_node is None:
        per_node = max(size for size in range(1, 9) if num_ranks % size == 0)
    if num_ranks % per_node:
        raise ConfigError(f"ranks_per_node {per_node}: {num_ranks} ranks fill no whole nodes")
    machine = Machine(
        model,
        profile.cluster(num_ranks // per_node, per_node),
        0.0 if profile.host_s is None else profile.host_s,
        options.sharding,
        tuple(options.stages),
        options.loader_bytes_per_s,
        options.sample_bytes_per_token,
    )
    names = listed("topologies", topologies)
    if not names:
        raise ConfigError("no topologies to compare: give at least one, such as none or g1n8")
    policies = [(name, policy_of(name, num_ranks, model)) for name in names]
    peak = profile.peak_flops_per_s
    peak = None if peak is None else peak * num_ranks
    runs = [
        _simulated(name, policy(run), machine, options.accumulate, peak)
        for name, policy in policies
    ]
    return SimulationResult(profile, num_ranks, tuple(runs))


def _simulated(
    name: str, placed: Any, machine: Machine, accumulate: int, peak: float | None
) -> SimulatedRun:
    spent: list[Floats] = []
    hidden: list[Floats] = []
    columns: list[tuple[int, float, Floats, Floats]] = []
    for one in placed:
        found = microbatch_seconds(one, machine)
        spent.append(found.spent)
        hidden.append(found.hidden)
        columns.append(_measures(one, machine.cost))
    tokens, flops, workloads, held = zip(*columns, strict=True)
    return SimulatedRun(
        name,
        accumulate,
        np.stack(spent),
        np.stack(hidden),
        np.array(tokens, dtype=np.int64),
        np.array(flops),
        np.stack(workloads),
        np.stack(held),
        peak,
    )


def _measures(placed: Placement, cost: TransformerCost) -> tuple[int, float, Floats, Floats]:
    """Tokens, FLOPs, the workload of each rank, and the bytes that each holds."""
    topology, bag_of = placed.topology, placed.bag_of
    plain = replace(cost, gamma=1.0)
    flops = _PASSES_OF_FLOPS * FLOPS_PER_UNIT * float(plain(placed.real_lens).sum())

    def by_rank(work: Floats) -> Floats:
        sums = np.bincount(bag_of, work, topology.num_bags) / topology.bag_sizes
        return sums[topology.bag_of_rank]

    each = cost.bytes_per_token
    if each is None:
        each = cost.d_model * (2 * cost.num_layers + _BLOCK_VALUES)
    held = by_rank(placed.lens.astype(np.float64)) * each
    return int(placed.real_lens.sum()), flops, by_rank(cost(placed.lens)), held


def _drawn(data: str, options: SimulationOptions) -> list[Loaded]:
    codes = parse_data_codes(data)
    run: list[Loaded] = []
    for step in range(options.num_steps * options.accumulate):
        ranks = sample_lengths(codes, seed=options.seed, step=step, world_size=options.num_ranks)
        source = np.repeat(np.arange(len(ranks)), [len(shapes) for shapes in ranks])
        lens = np.array([s.seq_len for shapes in ranks for s in shapes], dtype=np.int64)
        texts = np.array([s.text_tokens for shapes in ranks for s in shapes], dtype=np.int64)
        run.append(Loaded(len(ranks), source, lens, texts))
    return run


def _given(data: object) -> list[Loaded]:
    run: list[Loaded] = []
    for batch in listed("data", data):
        ranks = listed("data: each batch", batch)
        loaded = batch_of(ranks, run[0].num_ranks if run else len(ranks))
        run.append(Loaded(loaded.counts.size, loaded.ranks, loaded.lens, loaded.lens * 0))
    if not run or not run[0].num_ranks:
        raise ConfigError("no batches, or no ranks, to simulate: give at least one")
    return run
