"""Training on machines that nobody has to start: what a step takes, and what balancing is worth."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from bascule.arrays import Floats, Ints
from bascule.errors import ConfigError
from bascule.plan import metrics
from bascule.plan.checks import choice, each, fields, listed, number, of_type, rate, whole
from bascule.plan.costs import FLOPS_PER_UNIT, TransformerCost
from bascule.plan.files import to_path
from bascule.plan.machine import (
    BYTES_PER_VALUE,
    TRAINING,
    Cluster,
    HardwareProfile,
    Passes,
    in_passes,
)
from bascule.plan.sequences import batch_of
from bascule.plan.topology_search import suggest_topology
from bascule.sim.placements import AUTO, TOKENS, Loaded, Placement, Policy, planned, policy_of
from bascule.sim.seconds import (
    HIDDEN,
    KINDS,
    NUM_ROUTES,
    EncoderStage,
    Setup,
    Sharding,
    microbatch_seconds,
)
from bascule.workload.codes import SampleShape, parse_data_codes, sample_lengths

_WIDTH = 120


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRun:
    """A run of some steps under a policy. N ranks; M microbatches, `accumulate` make a step."""

    name: str  # of the policy
    accumulate: int
    seconds: Floats  # (M, len(KINDS), N) of each rank, by what they are spent on
    hidden: Floats  # (M, len(HIDDEN), N) of exchanges that nobody waited for
    tokens: Ints  # (M,) without padding
    flops: Floats  # (M,) of all passes, without padding, attention in full, as KnapFormer, 4.2
    workloads: Floats  # (M, N) what the cost model says of each rank: forward, without wires
    activation_bytes: Floats  # (M, N) held until the backward pass
    peak_flops_per_s: float | None  # of all ranks; None if the profile has none
    stages: tuple[str, ...]  # names of the encoders
    stage_s: Floats  # (M, len(stages), N); "encoders" among the kinds is their sum

    @property
    def means(self) -> dict[str, float]:
        """Mean seconds of a rank and step by kind, encoders one by one."""
        kinds = dict(zip(KINDS, self._mean(self.seconds), strict=True))
        if not self.stages:
            return kinds
        del kinds["encoders"]
        return dict(zip(self.stages, self._mean(self.stage_s), strict=True)) | kinds

    def _mean(self, seconds: Floats) -> list[float]:
        """Means of a rank and step of (M, K, N) seconds of microbatches."""
        return (seconds.mean(axis=(0, 2)) * self.accumulate).tolist()

    def spent_on(self, kind: str) -> Floats:
        """(M, N) seconds of each rank."""
        return self.seconds[:, KINDS.index(choice("kind", kind, *KINDS))]

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
        """The metrics, and the mean seconds of a rank and step by kind, as plain values.

        `wir` is None where it is infinite, which JSON cannot say.
        """
        slowest = self.stage_s.max(axis=2).mean(axis=0) * self.accumulate
        imbalances = [
            float(np.mean([metrics.imbalance(one) for one in spent]))
            for spent in self.stage_s.swapaxes(0, 1)
        ]
        stages = zip(self.stages, imbalances, slowest.tolist(), strict=True)
        return {
            "name": self.name,
            "wir": self.wir if np.isfinite(self.wir) else None,
            "fbl_s": self.fbl_s,
            "tokens_per_s": self.tokens_per_s,
            "hfu": self.hfu,
            "idle_share": self.idle_share,
            "activation_bytes": self.most_activation_bytes,
            "seconds": dict(zip(KINDS, self._mean(self.seconds), strict=True)),
            "hidden_seconds": dict(zip(HIDDEN, self._mean(self.hidden), strict=True)),
            "stages": {
                name: {"imbalance": imbalance, "seconds": seconds}
                for name, imbalance, seconds in stages
            },
        }


@dataclass(frozen=True, slots=True)
class Setting:
    """The model and the data of a simulation, for whoever reads its numbers."""

    model: TransformerCost
    num_params: int
    sequences: float  # of a rank and microbatch, in the mean
    num_steps: int
    accumulate: int  # microbatches of a step
    train_steps: int  # of the run for which GPU-hours are given
    gpu_hour_price: float | None

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.model.shape}, {self.num_params / 1e9:.3g} billion parameters; "
            f"{self.sequences:.3g} sequences a rank and microbatch in the mean; "
            f"steps: {self.num_steps}, microbatches of each: {self.accumulate}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class SimulationResult:
    """Runs of the same data under each policy, in the order that was asked for.

    The first run is what the others are compared with.
    """

    profile: HardwareProfile
    num_ranks: int
    runs: tuple[SimulatedRun, ...]
    setting: Setting

    def speedup(self, run: SimulatedRun) -> float:
        """Tokens a second over those of the first run."""
        return run.tokens_per_s / self.runs[0].tokens_per_s

    def gpu_hours(self, run: SimulatedRun) -> float:
        """GPU-hours of all ranks, for as many tokens as the first run trains on."""
        seconds = self.setting.train_steps * self.runs[0].fbl_s / self.speedup(run)
        return seconds * self.num_ranks / 3600

    def saved_gpu_hours(self, run: SimulatedRun) -> float:
        """GPU-hours of the first run less those of this one."""
        return self.gpu_hours(self.runs[0]) - self.gpu_hours(run)

    def saved_money(self, run: SimulatedRun) -> float | None:
        """The price of these hours; None if it is not known."""
        price = self.setting.gpu_hour_price
        return None if price is None else self.saved_gpu_hours(run) * price

    def fits(self, run: SimulatedRun) -> bool | None:
        """True if activations alone fit into the memory of a rank; None if it is not known."""
        memory = self.profile.memory_bytes
        return None if memory is None else run.most_activation_bytes <= memory

    @property
    def warnings(self) -> list[str]:
        """Sentences on runs that exceed the memory, and what would help."""
        if not (large := [run for run in self.runs if self.fits(run) is False]):
            return []
        profile = self.profile
        assert profile.memory_bytes is not None
        most = max(run.most_activation_bytes for run in large)
        fitting = [run.name for run in self.runs if self.fits(run)]
        return [
            f"{', '.join(run.name for run in large)}: the activations of a rank, up to "
            f"{most / 1e9:.4g} GB, exceed its memory of {profile.memory_bytes / 1e9:.4g} GB "
            f"({profile.provenance_of('memory_bytes')}), so this would not run: give a rank fewer "
            "samples at once, and accumulate them; or larger bags, whose ranks share each "
            f"sequence; or --kb-per-token, if a token of yours holds less"
            + (f"; {', '.join(fitting)} would fit" if fitting else "")
        ]

    def worth_rows(self) -> list[tuple[str, ...]]:
        """Compare each run with the first one: a heading and a row a run."""
        setting, first = self.setting, self.runs[0]
        price = setting.gpu_hour_price
        hours = f"GPU-hours, {setting.train_steps:,} steps"
        money = () if price is None else (f"saved, at {price:g} an hour",)
        rows: list[tuple[str, ...]] = [("against the first", "speed-up", hours, "saved", *money)]
        for run in self.runs:
            name = f"{run.name}: what you do now" if run is first else run.name
            amounts = self.gpu_hours(run), self.saved_gpu_hours(run), self.saved_money(run)
            shown = (f"{one:,.4g}" for one in amounts if one is not None)
            rows.append((name, f"{self.speedup(run):.2f}x", *shown))
        return rows

    def rows(self) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """Metrics, and mean seconds of a rank and step by kind; each a heading and a row a run.

        Kinds on which no run spends anything are left out.
        """
        metric_rows = [("", "WIR", "FBL, s", "TPS, k", "HFU, %", "idle, %", "activations, GB")]
        means = [run.means for run in self.runs]
        kinds = [name for name in means[0] if any(one[name] > 0 for one in means)]
        second_rows = [("seconds of", *(name.replace("_", " ") for name in kinds))]
        for run, spent in zip(self.runs, means, strict=True):
            large = " (too much)" if self.fits(run) is False else ""
            row = (
                *(run.name, f"{run.wir:.2f}", f"{run.fbl_s:.3g}", f"{run.tokens_per_s / 1e3:.4g}"),
                *("" if run.hfu is None else f"{100 * run.hfu:.1f}", f"{100 * run.idle_share:.1f}"),
                f"{run.most_activation_bytes / 1e9:.3g}{large}",
            )
            metric_rows.append(row)
            shown = (f"{spent[name]:.3g}" if spent[name] > 0 else "" for name in kinds)
            second_rows.append((run.name, *shown))
        return metric_rows, second_rows

    def tables(self) -> list[Table]:
        """`worth_rows` and `rows`, to be printed."""
        tables: list[Table] = []
        for heading, *rows in (self.worth_rows(), *self.rows()):
            table = Table()
            for place, name in enumerate(heading):
                justify = "right" if place else "left"
                table.add_column(name.replace("_", " "), justify=justify, no_wrap=not place)
            for row in rows:
                table.add_row(*row)
            tables.append(table)
        return tables

    def table(self) -> str:
        """Everything as text."""
        text = StringIO()
        console = Console(file=text, width=_WIDTH, color_system=None)
        console.print(*self.tables(), sep="\n")
        for line in self.notes:
            console.print(line, soft_wrap=True, markup=False, highlight=False)
        return text.getvalue()

    @property
    def notes(self) -> list[str]:
        """Lines below the tables: assumptions, and warnings."""
        return [
            f"simulated: {self.setting}",
            f"{self.num_ranks} ranks of {self.profile}",
            *(f"warning: {line}" for line in self.warnings),
        ]

    def report(self, path: str | Path) -> None:
        """Write a page of it all, as `bascule simulate --report` does."""
        from bascule.report.page import check_report, render
        from bascule.report.reports import of_simulation

        path = to_path(path)
        check_report(path)
        try:
            path.write_text(render(of_simulation(self), "bascule.simulate(..)"), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        setting = asdict(self.setting)
        model = setting.pop("model")
        shape = {name: model[name] for name in ("d_model", "num_layers", "gamma")}
        return {
            "profile": str(self.profile),
            "num_ranks": self.num_ranks,
            "memory_bytes": self.profile.memory_bytes,
            **setting,
            **shape,
            "compared_with": self.runs[0].name,
            "runs": [
                run.to_dict()
                | {
                    "speedup": self.speedup(run),
                    "gpu_hours": self.gpu_hours(run),
                    "saved_gpu_hours": self.saved_gpu_hours(run),
                    "saved_money": self.saved_money(run),
                    "fits": self.fits(run),
                }
                for run in self.runs
            ],
            "warnings": self.warnings,
        }


_MOST_MICROBATCHES = 100_000
_MOST_BATCHES, _MOST_RANKED = 20, 20_000
"""Batches for which bags are chosen, and sequences of them: they are ranked in some seconds."""

_BLOCK_VALUES = 34
"""Bytes a token and unit of width that the block that is recomputed holds, without the scores of
attention. Source: Korthikanti et al. (arXiv:2205.05198), equation 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Settings of a simulation besides data, model and machine.

    Args:
        num_steps: Of data codes; given batches tell theirs.
        num_ranks: Of data codes; None: those of the mix.
        ranks_per_node: None: at most 8.
        accumulate: Microbatches of a step; ranks meet at the end of each, as under FSDP2.
        seed: Of data codes.
        passes: What a microbatch runs; by default forward, recomputation and backward.
        sharding: Of the parameters.
        stages: Encoders before the model.
        loader_bytes_per_s: Bytes that a rank's loader sends in a second; assumed, as of gloo.
        sample_bytes_per_token: Bytes that it sends for a token; by default a latent of FLUX in
            bf16, 64 values.
        routed_bytes_per_token: Bytes of a token in all exchanges that route it in a microbatch, to
            where it is computed and back, forward and backward; by default four times its values
            of the width of the model, in bf16.
        train_steps: Steps of the user's own run or epoch, for which GPU-hours are computed.
        gpu_hour_price: Of one GPU-hour, in any currency; None: no money is computed.

    Raises:
        ConfigError: A value is out of range.
    """

    num_steps: int = 20
    num_ranks: int | None = None
    ranks_per_node: int | None = None
    accumulate: int = 1
    seed: int = 0
    passes: Passes = TRAINING
    sharding: Sharding = field(default_factory=Sharding)
    stages: tuple[EncoderStage, ...] = ()
    loader_bytes_per_s: float = 1e9
    sample_bytes_per_token: float = 128.0
    routed_bytes_per_token: float | None = None
    train_steps: int = 1000
    gpu_hour_price: float | None = None

    def __post_init__(self) -> None:
        count, some = (whole, 1, _MOST_MICROBATCHES), (whole, 1)
        fields(self, num_steps=count, accumulate=count, num_ranks=some, ranks_per_node=some)
        fields(self, train_steps=some, gpu_hour_price=number, loader_bytes_per_s=rate)
        fields(self, sample_bytes_per_token=rate, routed_bytes_per_token=rate)
        fields(
            self,
            passes=(of_type, Passes, "TRAINING, or a Passes(..)"),
            sharding=(of_type, Sharding, "a Sharding(..)"),
            stages=(each, of_type, EncoderStage, "an EncoderStage(..)"),
        )
        if self.num_steps * self.accumulate > _MOST_MICROBATCHES:
            raise ConfigError(
                f"SimulationOptions: {self.num_steps} steps of {self.accumulate} microbatches are "
                f"more than {_MOST_MICROBATCHES}: use fewer"
            )
        names = [stage.name for stage in self.stages]
        if len({*names, *KINDS}) < len(names) + len(KINDS):
            raise ConfigError(
                f"SimulationOptions(stages: names {names} must differ from each other, and from "
                f"{', '.join(KINDS)}"
            )


def simulate(
    data: str | Sequence[Sequence[npt.ArrayLike | Sequence[SampleShape]]],
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
        data: Data codes, of which steps are drawn; or batches, each one list a source rank, of
            token counts or of `SampleShape`: the microbatches, in order.
        profile: The machine; or its file or name, as for `HardwareProfile.load`.
        model: The model, and what is planned by. Its `gamma` is of the forward pass.
        topologies: What to compare: topologies ("g4n8"), which bascule plans; "knapsack g4n8", the
            paper's greedy; "loader", whole samples moved by the data loader; and of today's
            practice "none", "padded", "buckets" and "packs"; "auto" is what `suggest_topology`
            finds for the first batches. The first one is what the others are compared with.
        options: Everything else.

    Raises:
        ConfigError: A value is out of range, or something does not fit; says what.
        PlanError: A sequence does not fit into the memory of its bag, where the model knows its
            `bytes_per_token` and bags of several sizes are planned.
    """
    options = SimulationOptions() if options is None else options
    of_type("options", options, SimulationOptions, "a SimulationOptions(..)")
    of_type("model", model, TransformerCost, "a TransformerCost(..)")
    if not isinstance(profile, HardwareProfile):
        profile = HardwareProfile.load(profile)
    run = _drawn(data, options) if isinstance(data, str) else _given(data)
    _check_batches(run, options)
    num_ranks = run[0].num_ranks
    setup = _setup(model, profile, num_ranks, options)
    names = listed("topologies", topologies)
    if not names:
        raise ConfigError("no topologies to compare: give at least one, such as none or g1n8")
    priced = in_passes(model, setup.cluster, setup.passes)
    policies = [
        _suggested(run, *priced) if name == AUTO else (name, policy_of(name, *priced))
        for name in names
    ]
    peak = profile.peak_flops_per_s
    peak = None if peak is None else peak * num_ranks
    accumulate = options.accumulate
    setting = Setting(
        model,
        setup.sharding.params_of(model),
        float(np.mean([one.lens.size for one in run])) / num_ranks,
        len(run) // accumulate,
        accumulate,
        options.train_steps,
        options.gpu_hour_price,
    )
    runs = [_simulated(name, policy(run), setup, accumulate, peak) for name, policy in policies]
    return SimulationResult(profile, num_ranks, tuple(runs), setting)


def _setup(
    model: TransformerCost, profile: HardwareProfile, num_ranks: int, options: SimulationOptions
) -> Setup:
    per_node = options.ranks_per_node
    if per_node is None:
        per_node = max(size for size in range(1, 9) if num_ranks % size == 0)
    if num_ranks % per_node:
        raise ConfigError(f"ranks_per_node {per_node}: {num_ranks} ranks fill no whole nodes")
    return Setup(
        model,
        profile.cluster(num_ranks // per_node, per_node),
        profile.host_s or 0.0,
        options.passes,
        options.sharding,
        options.stages,
        options.loader_bytes_per_s,
        options.sample_bytes_per_token,
        options.routed_bytes_per_token or NUM_ROUTES * BYTES_PER_VALUE * model.d_model,
    )


def _suggested(run: list[Loaded], cost: TransformerCost, cluster: Cluster) -> tuple[str, Policy]:
    """The bags that suit the first batches best, and their name."""
    most = max(_MOST_RANKED // max(run[0].lens.size, 1), 1)
    batches = [one.by_rank() for one in run[: min(most, _MOST_BATCHES)]]
    ranking = suggest_topology(batches, cost, cluster)
    policy = partial(planned, ranking.best, "lpt", TOKENS, cost, cluster)
    return f"{AUTO} {ranking.rows[0].spec}", policy


def _check_batches(run: list[Loaded], options: SimulationOptions) -> None:
    if options.num_ranks not in (None, run[0].num_ranks):
        raise ConfigError(
            f"SimulationOptions(num_ranks={options.num_ranks}): the batches are of "
            f"{run[0].num_ranks} ranks; leave it out, it is for data codes"
        )
    if len(run) % options.accumulate:
        raise ConfigError(
            f"accumulate={options.accumulate}: {len(run)} batches are no whole steps of so many"
        )
    if not sum(one.lens.sum() for one in run):
        raise ConfigError("the data has no tokens: there is nothing to simulate")


def _simulated(
    name: str, placed: Iterator[Placement], setup: Setup, accumulate: int, peak: float | None
) -> SimulatedRun:
    pairs = [(microbatch_seconds(one, setup), _measures(one, setup)) for one in placed]
    seconds, measures = zip(*pairs, strict=True)
    tokens, flops, workloads, activation_bytes = map(np.array, zip(*measures, strict=True))
    return SimulatedRun(
        name,
        accumulate,
        np.stack([one.spent for one in seconds]),
        np.stack([one.hidden for one in seconds]),
        tokens,
        flops,
        workloads,
        activation_bytes,
        peak,
        tuple(stage.name for stage in setup.stages),
        np.stack([one.stages for one in seconds]),
    )


def _measures(placed: Placement, setup: Setup) -> tuple[int, float, Floats, Floats]:
    """Tokens, FLOPs, and (N,) the workload of each rank and the bytes that it holds."""
    topology, bag_of, cost = placed.topology, placed.bag_of, setup.cost
    forward = FLOPS_PER_UNIT * float(replace(cost, gamma=1.0)(placed.real_lens).sum())

    def by_rank(work: Floats) -> Floats:
        sums = np.bincount(bag_of, work, topology.num_bags) / topology.bag_sizes
        return sums[topology.bag_of_rank]

    each = cost.bytes_per_token or cost.d_model * (2 * cost.num_layers + _BLOCK_VALUES)
    held = by_rank(placed.lens.astype(np.float64)) * each
    flops = setup.passes.linear * forward
    return int(placed.real_lens.sum()), flops, by_rank(cost(placed.lens)), held


def _drawn(data: str, options: SimulationOptions) -> list[Loaded]:
    codes = parse_data_codes(data)
    run: list[Loaded] = []
    for step in range(options.num_steps * options.accumulate):
        ranks = sample_lengths(codes, seed=options.seed, step=step, world_size=options.num_ranks)
        run.append(_of_shapes(ranks))
    return run


def _has_shapes(ranks: Sequence[object]) -> bool:
    lists = [cast(list[object], own) for own in ranks if isinstance(own, list)]
    return any(isinstance(one, SampleShape) for own in lists for one in own)


def _of_shapes(ranks: Sequence[Sequence[SampleShape]]) -> Loaded:
    source = np.repeat(np.arange(len(ranks)), [len(shapes) for shapes in ranks])
    lens = np.array([s.seq_len for shapes in ranks for s in shapes], dtype=np.int64)
    texts = np.array([s.text_tokens for shapes in ranks for s in shapes], dtype=np.int64)
    return Loaded(len(ranks), source, lens, texts)


def _given(data: object) -> list[Loaded]:
    run: list[Loaded] = []
    for batch in listed("data", data):
        ranks = listed("data: each batch", batch)
        if _has_shapes(ranks):
            run.append(_of_shapes(cast(Sequence[Sequence[SampleShape]], ranks)))
            continue
        loaded = batch_of(ranks, run[0].num_ranks if run else len(ranks))
        if loaded.masks is not None or loaded.context_lens is not None:
            raise ConfigError(
                f"data: batch {len(run)} has masks or contexts, which are not simulated: give "
                "lengths alone"
            )
        run.append(Loaded(loaded.counts.size, loaded.ranks, loaded.lens, loaded.lens * 0))
    if not run or not run[0].num_ranks:
        raise ConfigError("no batches, or no ranks, to simulate: give at least one")
    return run
