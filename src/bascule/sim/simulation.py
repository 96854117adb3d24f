"""Training on machines that nobody has to start: what a step takes, and what balancing is worth."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.checks import choice, listed, of_type
from bascule.errors import ConfigError
from bascule.files import to_path
from bascule.machine.cluster import Cluster, HardwareProfile, in_passes
from bascule.machine.costs import TransformerCost
from bascule.options import check_file
from bascule.plan import metrics
from bascule.plan.offer import Offer, offer_of
from bascule.plan.topology_search import suggest_topology
from bascule.sim.placements import AUTO, TOKENS, Loaded, Policy, planned, policy_of
from bascule.sim.seconds import HIDDEN, KINDS, Setup, SimulationOptions, microbatch
from bascule.workload.codes import SampleShape, parse_data_codes, sample_lengths
from bascule.workload.traces.writing import Kind, Segment

_WIDTH = 120

_MOST_BATCHES, _MOST_RANKED = 20, 20_000
"""Batches for which bags are chosen, and sequences of them: they are ranked in some seconds."""

_ORDER: tuple[tuple[str, Kind], ...] = (
    ("loader", "communication"),
    ("routing", "communication"),
    ("all_gather", "communication"),
    ("compute", "compute"),
    ("ulysses", "communication"),
    ("ring", "communication"),
)
"""Work of a rank in a microbatch, one after the other: the simulator knows sums, not an order.
Encoders come after the first. Before it all the host is at work, which shows as a gap; at its end
ranks meet to reduce gradients."""


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRun:
    """A run of some steps under a policy. N ranks; M microbatches, `accumulate` make a step."""

    name: str  # of the policy
    accumulate: int
    seconds: Floats  # (M, len(KINDS), N) of each rank, by what they are spent on
    hidden: Floats  # (M, len(HIDDEN), N) of exchanges that nobody waited for
    stage_s: Floats  # (M, len(stages), N) of each encoder; "encoders" is their sum
    tokens: Ints  # (M,) without padding
    flops: Floats  # (M,) of all passes, without padding, attention in full, as KnapFormer, 4.2
    workloads: Floats  # (M, N) cost of each rank by the model: forward, without wires
    activation_bytes: Floats  # (M, N) kept until the backward pass
    peak_flops_per_s: float | None  # of all ranks; None if the profile has none
    stages: tuple[str, ...]  # names of the encoders

    @property
    def means(self) -> dict[str, float]:
        """Mean seconds of a rank and step by kind, encoders one by one."""
        kinds = dict(zip(KINDS, self._mean(self.seconds), strict=True))
        if not self.stages:
            return kinds
        del kinds["encoders"]
        return dict(zip(self.stages, self._mean(self.stage_s), strict=True)) | kinds

    def _mean(self, seconds: Floats) -> list[float]:
        """Return means of a rank and step of (M, K, N) seconds of microbatches."""
        return (seconds.mean(axis=(0, 2)) * self.accumulate).tolist()

    def spent_on(self, kind: str) -> Floats:
        """Return the (M, N) seconds of each rank."""
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
        """Return the metrics, and mean seconds of a rank and step; an infinite `wir` is None."""
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


@dataclass(frozen=True, slots=True, eq=False)
class SimulationResult:
    """Runs of the same data under each policy; the first one is compared with the others."""

    profile: HardwareProfile
    runs: tuple[SimulatedRun, ...]
    model: TransformerCost
    options: SimulationOptions
    sequences: float  # of a rank and microbatch, in the mean
    num_steps: int

    @property
    def num_ranks(self) -> int:
        """Ranks of each run."""
        return self.runs[0].seconds.shape[2]

    @property
    def num_params(self) -> int:
        """Parameters of the model."""
        return self.options.sharding.params_of(self.model)

    @property
    def setting(self) -> str:
        """The model and the data in one line."""
        return (
            f"{self.model.shape}, {self.num_params / 1e9:.3g} billion parameters; "
            f"{self.sequences:.3g} sequences a rank and microbatch in the mean; "
            f"steps simulated: {self.num_steps}, microbatches of each: {self.options.accumulate}"
        )

    def speedup(self, run: SimulatedRun) -> float:
        """Return tokens a second over those of the first run."""
        return run.tokens_per_s / self.runs[0].tokens_per_s

    def gpu_hours(self, run: SimulatedRun) -> float:
        """Return GPU-hours of all ranks, for as many tokens as the first run trains on."""
        seconds = self.options.train_steps * self.runs[0].fbl_s / self.speedup(run)
        return seconds * self.num_ranks / 3600

    def saved_gpu_hours(self, run: SimulatedRun) -> float:
        """Return GPU-hours of the first run less those of this one."""
        return self.gpu_hours(self.runs[0]) - self.gpu_hours(run)

    def saved_money(self, run: SimulatedRun) -> float | None:
        """Return the price of these hours; None if it is not known."""
        price = self.options.gpu_hour_price
        return None if price is None else self.saved_gpu_hours(run) * price

    def fits(self, run: SimulatedRun) -> bool | None:
        """Return whether activations alone fit into the memory of a rank; None if not known."""
        memory = self.profile.memory_bytes
        return None if memory is None else run.most_activation_bytes <= memory

    @property
    def warnings(self) -> list[str]:
        """Sentences on runs that exceed the memory, and what would help."""
        memory, large = self.profile.memory_bytes, [x for x in self.runs if self.fits(x) is False]
        if memory is None or not large:
            return []
        fitting = ", ".join(run.name for run in self.runs if self.fits(run))
        return [
            f"{', '.join(run.name for run in large)}: the activations of a rank, up to "
            f"{max(run.most_activation_bytes for run in large) / 1e9:.4g} GB, exceed its memory of "
            f"{memory / 1e9:.4g} GB ({self.profile.provenance_of('memory_bytes')}), so this would "
            "not run: give a rank fewer samples at once, and accumulate them; or larger bags, "
            "whose ranks share each sequence; or --kb-per-token, if a token of yours holds less"
            + (f"; {fitting} would fit" if fitting else "")
        ]

    def table(self) -> str:
        """Return everything as text."""
        from rich.console import Console

        from bascule.report.reports import of_simulation

        text = StringIO()
        of_simulation(self).show(Console(file=text, width=_WIDTH, color_system=None))
        return text.getvalue()

    def report(self, path: str | Path) -> None:
        """Write a page of it all, as `bascule simulate --report` does."""
        from bascule.report.page import render
        from bascule.report.reports import of_simulation

        path = to_path(path)
        check_file("path", path, ".html")
        try:
            path.write_text(render(of_simulation(self), "bascule.simulate(..)"), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "profile": str(self.profile),
            "num_ranks": self.num_ranks,
            "memory_bytes": self.profile.memory_bytes,
            "num_params": self.num_params,
            "sequences": self.sequences,
            "num_steps": self.num_steps,
            "accumulate": self.options.accumulate,
            "train_steps": self.options.train_steps,
            "gpu_hour_price": self.options.gpu_hour_price,
            **{name: getattr(self.model, name) for name in ("d_model", "num_layers", "gamma")},
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


def simulate(
    data: str | Sequence[Sequence[npt.ArrayLike | Sequence[SampleShape]]],
    *,
    profile: HardwareProfile | str,
    model: TransformerCost,
    topologies: Sequence[str],
    options: SimulationOptions | None = None,
) -> SimulationResult:
    """Predict training steps, without torch and without the machines.

    A microbatch takes as long as its slowest rank: encoders, compute, exchanges, what FSDP2's
    collectives do not hide, and the host. Linear in steps and ranks, in time and memory.

    Args:
        data: Data codes, of which steps are drawn; or batches, the microbatches in order. A batch
            has a list of token counts, or of `SampleShape`, a rank.
        profile: The machine; or its file or name, as for `HardwareProfile.load`.
        model: The model, and what is planned by. Its `gamma` is of the forward pass.
        topologies: The runs to compare with the first one: topologies ("g4n8"), which bascule
            plans; "knapsack g4n8", the paper's greedy; "loader", samples moved by the data loader;
            "none", "padded", "buckets" and "packs", today's practice; "auto", the choice of
            `suggest_topology` for the first batches.
        options: Everything else.

    Raises:
        ConfigError: A value is out of range, or something does not fit.
        PlanError: A sequence does not fit into the memory of its bag, in bags of several sizes.
    """
    options = SimulationOptions() if options is None else options
    of_type("options", options, SimulationOptions, "a SimulationOptions(..)")
    of_type("model", model, TransformerCost, "a TransformerCost(..)")
    if not isinstance(profile, HardwareProfile):
        profile = HardwareProfile.load(profile)
    run = _drawn(data, options) if isinstance(data, str) else _read(data)
    num_ranks = run[0].batch.counts.size
    _check_batches(run, num_ranks, options)
    names = listed("topologies", topologies)
    if not names:
        raise ConfigError("no topologies to compare: give at least one, such as none or g1n8")
    cluster = _cluster(profile, num_ranks, options.ranks_per_node)
    setup = Setup(model, cluster, profile.host_s or 0.0, options)
    priced = in_passes(model, cluster, options.passes)
    peak = profile.peak_flops_per_s
    runs: list[SimulatedRun] = []
    for name in names:
        label, policy = (
            _suggested(run, *priced) if name == AUTO else (name, policy_of(name, *priced))
        )
        columns = zip(*(microbatch(placed, setup) for placed in policy(run)), strict=True)
        runs.append(
            SimulatedRun(
                label,
                options.accumulate,
                *map(np.array, columns),
                peak_flops_per_s=None if peak is None else peak * num_ranks,
                stages=tuple(stage.name for stage in options.stages),
            )
        )
    sequences = float(np.mean([one.batch.lens.size for one in run])) / num_ranks
    num_steps = len(run) // options.accumulate
    return SimulationResult(profile, tuple(runs), model, options, sequences, num_steps)


def _cluster(profile: HardwareProfile, num_ranks: int, per_node: int | None) -> Cluster:
    per_node = per_node or max(size for size in range(1, 9) if num_ranks % size == 0)
    if num_ranks % per_node:
        raise ConfigError(f"ranks_per_node {per_node}: {num_ranks} ranks fill no whole nodes")
    return profile.cluster(num_ranks // per_node, per_node)


def _suggested(run: list[Loaded], cost: TransformerCost, cluster: Cluster) -> tuple[str, Policy]:
    """Choose the bags that suit the first batches best; return their name and policy."""
    most = max(_MOST_RANKED // max(run[0].batch.lens.size, 1), 1)
    batches = [one.batch for one in run[: min(most, _MOST_BATCHES)]]
    ranking = suggest_topology(batches, cost, cluster)
    policy = partial(planned, ranking.best, False, TOKENS, cost, cluster)
    return f"{AUTO} {ranking.rows[0].spec}", policy


def _check_batches(run: list[Loaded], num_ranks: int, options: SimulationOptions) -> None:
    if options.num_ranks not in (None, num_ranks):
        raise ConfigError(
            f"SimulationOptions(num_ranks={options.num_ranks}): the batches are of {num_ranks} "
            "ranks; leave it out, it is for data codes"
        )
    if len(run) % options.accumulate:
        raise ConfigError(
            f"accumulate={options.accumulate}: {len(run)} batches are no whole steps of so many"
        )
    if not sum(one.batch.lens.sum() for one in run):
        raise ConfigError("the data has no tokens: there is nothing to simulate")


def _drawn(data: str, options: SimulationOptions) -> list[Loaded]:
    codes = parse_data_codes(data)
    return [
        _of_shapes(
            sample_lengths(codes, seed=options.seed, step=step, world_size=options.num_ranks)
        )
        for step in range(options.num_steps * options.accumulate)
    ]


def _of_shapes(ranks: Sequence[Sequence[SampleShape]]) -> Loaded:
    counts = np.array([len(shapes) for shapes in ranks])
    lens = np.array([s.seq_len for shapes in ranks for s in shapes], dtype=np.int64)
    kinds = [(s.text_tokens + s.cross_tokens, s.image_tokens) for shapes in ranks for s in shapes]
    return Loaded(Offer.of(counts[None], lens), np.array(kinds, dtype=np.int64).reshape(-1, 2))


def _read(data: object) -> list[Loaded]:
    """Check batches of users: token counts or shapes of each rank."""
    run: list[Loaded] = []
    for batch in listed("data", data):
        ranks = listed("data: each batch", batch)
        lists = cast(list[list[object]], [own for own in ranks if isinstance(own, list)])
        if any(isinstance(one, SampleShape) for own in lists for one in own):
            run.append(_of_shapes(cast(Sequence[Sequence[SampleShape]], ranks)))
            continue
        loaded = offer_of(ranks, run[0].batch.num_ranks if run else len(ranks))
        if loaded.num_pairs is not None:
            raise ConfigError(
                f"data: batch {len(run)} has masks or contexts, which are not simulated: give "
                "lengths alone"
            )
        run.append(Loaded(loaded, np.stack([loaded.lens * 0, loaded.lens], axis=1)))
    if not run or not run[0].batch.counts.size:
        raise ConfigError("no batches, or no ranks, to simulate: give at least one")
    return run


def segments_of(run: SimulatedRun) -> Iterator[Segment]:
    """Yield the work of each rank in each step, on one clock, as of measured steps."""
    ends, ranks = np.cumsum(run.microbatch_s), range(run.seconds.shape[2])
    begins = ends - run.microbatch_s
    for step, (begin, end) in enumerate(
        zip(begins[:: run.accumulate], ends[run.accumulate - 1 :: run.accumulate], strict=True)
    ):
        for rank in ranks:
            yield Segment(rank, "step", str(step), float(begin), float(end - begin))
    for m, rank in product(range(ends.size), ranks):
        spent = dict(zip(KINDS, run.seconds[m, :, rank].tolist(), strict=True))
        spent |= dict(zip(run.stages, run.stage_s[m, :, rank].tolist(), strict=True))
        now = float(begins[m]) + spent["host"]
        stages: list[tuple[str, Kind]] = [(name, "compute") for name in run.stages]
        for name, kind in (_ORDER[0], *stages, *_ORDER[1:]):
            if spent[name] > 0:  # its name keeps readers from matching calls of unlike bags
                shown = name if kind == "compute" else f"{name} of rank {rank}"
                yield Segment(rank, kind, shown, now, spent[name])
            now += spent[name]
        yield Segment(rank, "waiting", "waiting", now, spent["waiting"])
        yield Segment(rank, "communication", "reduce_scatter", now, max(float(ends[m]) - now, 0.0))
