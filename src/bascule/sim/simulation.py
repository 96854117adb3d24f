"""Training on machines that nobody has to start: what a step takes, and what balancing is worth."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats
from bascule.errors import ConfigError
from bascule.plan.checks import listed, number, of_type, put, rate, whole
from bascule.plan.costs.cluster import BYTES_PER_VALUE, Cluster
from bascule.plan.costs.cost_models import FLOPS_PER_UNIT, TransformerCost
from bascule.plan.costs.hardware import HardwareProfile
from bascule.plan.costs.passes import TRAINING, Passes, in_passes
from bascule.plan.loaded.sequences import batch_of
from bascule.plan.topology.search import suggest_topology
from bascule.sim.placements import AUTO, TOKENS, Loaded, Placement, Policy, planned, policy_of
from bascule.sim.simulation_result import Setting, SimulatedRun, SimulationResult
from bascule.sim.step_seconds import (
    KINDS,
    NUM_ROUTES,
    EncoderStage,
    Machine,
    Sharding,
    microbatch_seconds,
)
from bascule.workload.codes import SampleShape, parse_data_codes, sample_lengths

_MOST_MICROBATCHES = 100_000
_MOST_BATCHES, _MOST_RANKED = 20, 20_000
"""Batches for which bags are chosen, and sequences of them: they are ranked in some seconds."""

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
        passes: What a microbatch runs; by default forward, recomputation and backward.
        sharding: Of the parameters.
        stages: Encoders before the model.
        loader_bytes_per_s: Bytes that a rank's loader sends in a second; assumed, as of gloo.
        sample_bytes_per_token: Bytes that it sends for a token; by default a latent of FLUX in
            bf16, 64 values.
        routed_bytes_per_token: Bytes of a token in all exchanges that route it in a microbatch, to
            where it is computed and back, forward and backward; by default four times its values
            of the width of the model, in bf16.
        train_steps: Steps of the user's own run or epoch, for which GPU-hours are told.
        gpu_hour_price: Of one GPU-hour, in any currency; None: no money is told.

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
        put(self, "train_steps", whole("SimulationOptions(train_steps", self.train_steps, 1))
        if (price := self.gpu_hour_price) is not None:
            put(self, "gpu_hour_price", number("SimulationOptions(gpu_hour_price", price))
        of_type("SimulationOptions(passes", self.passes, Passes, "TRAINING, or a Passes(..)")
        of_type("SimulationOptions(sharding", self.sharding, Sharding, "a Sharding(..)")
        for stage in listed("SimulationOptions(stages", self.stages):
            of_type("SimulationOptions(stages: each", stage, EncoderStage, "an EncoderStage(..)")
        names = [stage.name for stage in self.stages]
        if len({*names, *KINDS}) < len(names) + len(KINDS):
            raise ConfigError(
                f"SimulationOptions(stages: names {names} must differ from each other, and from "
                f"{', '.join(KINDS)}"
            )
        for name in ("loader_bytes_per_s", "sample_bytes_per_token"):
            put(self, name, rate(f"SimulationOptions({name}", getattr(self, name)))
        if (value := self.routed_bytes_per_token) is not None:
            name = "routed_bytes_per_token"
            put(self, name, rate(f"SimulationOptions({name}", value))


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
    machine = _machine(model, profile, num_ranks, options)
    names = listed("topologies", topologies)
    if not names:
        raise ConfigError("no topologies to compare: give at least one, such as none or g1n8")
    priced = in_passes(model, machine.cluster, machine.passes)
    policies = [
        _suggested(run, *priced) if name == AUTO else (name, policy_of(name, *priced))
        for name in names
    ]
    peak = profile.peak_flops_per_s
    peak = None if peak is None else peak * num_ranks
    runs = [
        _simulated(name, policy(run), machine, options.accumulate, peak)
        for name, policy in policies
    ]
    setting = Setting(
        model,
        machine.sharding.params_of(model),
        float(np.mean([one.lens.size for one in run])) / num_ranks,
        len(run) // options.accumulate,
        options.accumulate,
        options.train_steps,
        options.gpu_hour_price,
    )
    return SimulationResult(profile, num_ranks, tuple(runs), setting)


def _machine(
    model: TransformerCost, profile: HardwareProfile, num_ranks: int, options: SimulationOptions
) -> Machine:
    per_node = options.ranks_per_node
    if per_node is None:
        per_node = max(size for size in range(1, 9) if num_ranks % size == 0)
    if num_ranks % per_node:
        raise ConfigError(f"ranks_per_node {per_node}: {num_ranks} ranks fill no whole nodes")
    return Machine(
        model,
        profile.cluster(num_ranks // per_node, per_node),
        0.0 if profile.host_s is None else profile.host_s,
        options.passes,
        options.sharding,
        tuple(options.stages),
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
    name: str, placed: Iterator[Placement], machine: Machine, accumulate: int, peak: float | None
) -> SimulatedRun:
    spent: list[Floats] = []
    hidden: list[Floats] = []
    stages: list[Floats] = []
    columns: list[tuple[int, float, Floats, Floats]] = []
    for one in placed:
        found = microbatch_seconds(one, machine)
        spent.append(found.spent)
        hidden.append(found.hidden)
        stages.append(found.stages)
        columns.append(_measures(one, machine))
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
        tuple(stage.name for stage in machine.stages),
        np.stack(stages),
    )


def _measures(placed: Placement, machine: Machine) -> tuple[int, float, Floats, Floats]:
    """Tokens, FLOPs, the workload of each rank, and the bytes that each holds."""
    topology, bag_of, cost = placed.topology, placed.bag_of, machine.cost
    forward = FLOPS_PER_UNIT * float(replace(cost, gamma=1.0)(placed.real_lens).sum())

    def by_rank(work: Floats) -> Floats:
        sums = np.bincount(bag_of, work, topology.num_bags) / topology.bag_sizes
        return sums[topology.bag_of_rank]

    each = cost.bytes_per_token
    if each is None:
        each = cost.d_model * (2 * cost.num_layers + _BLOCK_VALUES)
    held = by_rank(placed.lens.astype(np.float64)) * each
    flops = machine.passes.linear * forward
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
