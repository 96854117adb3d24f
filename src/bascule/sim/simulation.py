"""Simulate training steps on a cluster: predict their time, and the speed-up of balancing."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats
from bascule.checks import listed, of_type, whole
from bascule.errors import ConfigError, PlanError
from bascule.machine.cluster import Cluster, HardwareProfile
from bascule.machine.costs import TransformerCost
from bascule.plan.offer import Offer, offer_of
from bascule.plan.topology_search import suggest_topology
from bascule.sim.placements import AUTO, TOKENS, Loaded, Policy, planned, policy_of, split
from bascule.sim.results import SimulatedRun, SimulationResult
from bascule.sim.seconds import KINDS, Setup, SimulationOptions, factors, microbatch
from bascule.workload.codes import SampleShape, parse_data_codes, sample_lengths
from bascule.workload.traces.writing import Kind, Segment

_MOST_BATCHES, _MOST_RANKED = 20, 20_000
"""Most batches and sequences for which `auto` ranks topologies, so that it takes seconds."""

_On = tuple[TransformerCost, Cluster, Floats | None]  # for which plans are made; speeds of ranks

_ORDER: tuple[tuple[str, Kind], ...] = (
    ("loader", "communication"),
    ("routing", "communication"),
    ("all_gather", "communication"),
    ("compute", "compute"),
    ("ulysses", "communication"),
    ("ring", "communication"),
)
"""Assumed order of a rank's work in a trace of a microbatch; the simulator predicts sums alone.
Encoders follow the loader. The host works before, which shows as a gap; gradients are reduced at
the end."""


def simulate(
    data: str | Sequence[Sequence[npt.ArrayLike | Sequence[SampleShape]]],
    *,
    profile: HardwareProfile | str,
    model: TransformerCost,
    topologies: Sequence[str],
    options: SimulationOptions | None = None,
) -> SimulationResult:
    """Predict training steps, without torch and without the machines.

    A microbatch takes as long as its slowest rank: encoders, compute, exchanges, FSDP2 collectives
    that compute does not hide, and the host. Linear in steps and ranks, in time and memory.

    If activations exceed a rank's memory, a microbatch is split into the fewest `parts` that fit.

    Args:
        data: Data codes, from which steps are drawn; or the microbatches in order, each with a list
            of token counts, or of `SampleShape`, for every rank.
        profile: The machine, as a profile; or its file or name, as for `HardwareProfile.load`.
        model: The cost model of a forward pass; it makes the plans, too.
        topologies: The runs, compared with the first: topologies ("g4n8"), which bascule plans;
            "knapsack g4n8", the paper's greedy; "loader", which moves samples in the data loader;
            "none", "padded", "buckets" and "packs", today's practice; "auto", the choice of
            `suggest_topology` for the first batches.
        options: All other settings.

    Raises:
        ConfigError: A value is out of range, or something does not fit.
    """
    options = SimulationOptions() if options is None else options
    of_type("options", options, SimulationOptions, "a SimulationOptions(..)")
    of_type("model", model, TransformerCost, "a TransformerCost(..)")
    if not isinstance(profile, HardwareProfile):
        profile = HardwareProfile.load(profile)
    run = _draw(data, options) if isinstance(data, str) else _read(data)
    num_ranks = run[0].batch.counts.size
    _check_batches(run, num_ranks, options)
    names = listed("topologies", topologies)
    if not names:
        raise ConfigError("no topologies to compare: give at least one, such as none or g1n8")
    cluster = _cluster(profile, num_ranks, options.ranks_per_node)
    if options.lost_nodes:
        left = whole("lost_nodes: nodes left", cluster.num_nodes - options.lost_nodes, 1)
        cluster, num_ranks = replace(cluster, num_nodes=left), left * cluster.ranks_per_node
        run = [loaded.on_first(num_ranks) for loaded in run]
    slow = factors("slow_ranks", options.slow_ranks, num_ranks)
    far = factors("slow_links", options.slow_links, num_ranks)
    setup = Setup(model, cluster, profile.host_s or 0.0, options, slow, far)
    speeds = 1.0 / slow if options.set_speeds else None
    priced = model, replace(cluster, passes=options.passes), speeds
    unlimited = replace(model, bytes_per_token=None), *priced[1:]
    peak, memory = profile.peak_flops_per_s, profile.memory_bytes or math.inf
    common: dict[str, Any] = {"peak_flops_per_s": None if peak is None else peak * num_ranks}
    common["stages"] = tuple(stage.name for stage in options.stages)
    most, runs = max(int(loaded.batch.counts.max()) for loaded in run), list[SimulatedRun]()
    for name in names:
        parts, tried = 0, list[SimulatedRun]()
        while not tried or (parts < most and tried[-1].most_activation_bytes > memory):
            parts = min(parts + max(parts // 8, 1), most)  # of many, not every number is tried
            cut = split(run, parts)
            try:
                label, columns = _placed(name, cut, setup, priced)
            except PlanError:  # no plan keeps the memory: see by how much it is exceeded
                label, columns = _placed(name, cut, setup, unlimited)
            per_step = options.accumulate * parts
            tried.append(SimulatedRun(label, per_step, *columns, **common, parts=parts))
        runs.append(replace(tried[-1], given_bytes=tried[0].most_activation_bytes))
    sequences = float(np.mean([microbatch.batch.lens.size for microbatch in run])) / num_ranks
    num_steps = len(run) // options.accumulate
    tokens = sum(float(microbatch.batch.lens.sum()) for microbatch in run) / num_steps
    return SimulationResult(profile, tuple(runs), model, options, sequences, num_steps, tokens)


def _placed(name: str, run: list[Loaded], setup: Setup, on: _On) -> tuple[str, list[Any]]:
    """Return the label of a policy, and the columns of its microbatches."""
    label, policy = _suggest(run, on) if name == AUTO else (name, policy_of(name, *on))
    parts = [microbatch(placed, setup) for placed in policy(run)]
    return label, list(map(np.array, zip(*parts, strict=True)))


def _cluster(profile: HardwareProfile, num_ranks: int, per_node: int | None) -> Cluster:
    per_node = per_node or max(size for size in range(1, 9) if num_ranks % size == 0)
    if num_ranks % per_node:
        raise ConfigError(f"ranks_per_node {per_node}: {num_ranks} ranks fill no whole nodes")
    return profile.cluster(num_ranks // per_node, per_node)


def _suggest(run: list[Loaded], on: _On) -> tuple[str, Policy]:
    """Choose the fastest topology for the first batches; return its name and policy."""
    most = max(_MOST_RANKED // max(run[0].batch.lens.size, 1), 1)
    batches = [microbatch.batch for microbatch in run[: min(most, _MOST_BATCHES)]]
    ranking = suggest_topology(batches, *on[:2])
    policy = partial(planned, ranking.best, False, TOKENS, *on)
    return f"{AUTO} {ranking.rows[0].spec}", policy


def _check_batches(run: list[Loaded], num_ranks: int, options: SimulationOptions) -> None:
    if options.num_ranks not in (None, num_ranks):
        what = f"SimulationOptions(num_ranks={options.num_ranks})"
        raise ConfigError(f"{what}: the batches are of {num_ranks} ranks; leave it out")
    if len(run) % options.accumulate:
        what = f"accumulate={options.accumulate}"
        raise ConfigError(f"{what}: {len(run)} batches are no whole steps of so many")
    if not sum(microbatch.batch.lens.sum() for microbatch in run):
        raise ConfigError("the data has no tokens: there is nothing to simulate")


def _draw(data: str, options: SimulationOptions) -> list[Loaded]:
    codes, num_ranks = parse_data_codes(data), options.num_ranks
    draw = partial(sample_lengths, codes, seed=options.seed, world_size=num_ranks)
    steps = range(options.num_steps * options.accumulate)
    return [_of_shapes(draw(step=step)) for step in steps]


def _of_shapes(ranks: Sequence[Sequence[SampleShape]]) -> Loaded:
    counts = np.array([len(shapes) for shapes in ranks])
    lens = np.array([s.seq_len for shapes in ranks for s in shapes], dtype=np.int64)
    kinds = [(s.text_tokens + s.cross_tokens, s.image_tokens) for shapes in ranks for s in shapes]
    return Loaded(Offer.of(counts[None], lens), np.array(kinds, dtype=np.int64).reshape(-1, 2))


def _read(data: object) -> list[Loaded]:
    """Check a user's batches: token counts or `SampleShape`s of each rank."""
    run: list[Loaded] = []
    for batch in listed("data", data):
        ranks = listed("data: each batch", batch)
        lists = cast(list[list[object]], [entry for entry in ranks if isinstance(entry, list)])
        if any(isinstance(sample, SampleShape) for samples in lists for sample in samples):
            run.append(_of_shapes(cast(Sequence[Sequence[SampleShape]], ranks)))
            continue
        loaded = offer_of(ranks, run[0].batch.num_ranks if run else len(ranks))
        if loaded.num_pairs is not None:
            what = f"batch {len(run)} has masks or contexts"
            raise ConfigError(f"data: {what}, which are not simulated: give lengths alone")
        run.append(Loaded(loaded, np.stack([loaded.lens * 0, loaded.lens], axis=1)))
    if not run or not run[0].batch.counts.size:
        raise ConfigError("no batches, or no ranks, to simulate: give at least one")
    return run


def segments_of(run: SimulatedRun) -> Iterator[Segment]:
    """Yield each rank's work in each step on one clock, like a trace of measured steps."""
    ends, ranks = np.cumsum(run.microbatch_s), range(run.seconds.shape[2])
    begins = ends - run.microbatch_s
    for step, first in enumerate(range(0, ends.size, run.accumulate)):
        begin, end = begins[first], ends[first : first + run.accumulate][-1]
        for rank in ranks:
            yield Segment(rank, "step", str(step), float(begin), float(end - begin))
    for m, rank in product(range(ends.size), ranks):
        spent = dict(zip(KINDS, run.seconds[m, :, rank].tolist(), strict=True))
        spent |= dict(zip(run.stages, run.stage_s[m, :, rank].tolist(), strict=True))
        now = float(begins[m]) + spent["host"]
        stages: list[tuple[str, Kind]] = [(name, "compute") for name in run.stages]
        for name, kind in (_ORDER[0], *stages, *_ORDER[1:]):
            if spent[name] > 0:  # "of rank": else readers match exchanges of unlike bags
                shown = name if kind == "compute" else f"{name} of rank {rank}"
                yield Segment(rank, kind, shown, now, spent[name])
            now += spent[name]
        yield Segment(rank, "waiting", "waiting", now, spent["waiting"])
        yield Segment(rank, "communication", "reduce_scatter", now, max(float(ends[m]) - now, 0.0))
