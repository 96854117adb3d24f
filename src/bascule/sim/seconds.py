"""Predict the seconds of each rank in a microbatch, by kind.

Legend: N ranks, S ranks over which parameters are sharded, R replicas of the parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.checks import each, fields, number, of_type, rate, whole
from bascule.errors import ConfigError
from bascule.machine.cluster import BYTES_PER_VALUE, TRAINING, Cluster, Passes
from bascule.machine.costs import FLOPS_PER_UNIT, TransformerCost
from bascule.plan.offer import Offer
from bascule.plan.prices import RankState, price
from bascule.plan.solver.solve import assign
from bascule.sim.placements import SAMPLES, TOKENS, Placement

KINDS = (
    *("encoders", "compute", "ulysses", "ring", "routing", "all_gather", "reduce_scatter"),
    *("host", "loader", "waiting"),
)
"""Kinds of seconds of a rank in a microbatch; their sum is the same on all ranks."""

HIDDEN = ("sharding", "loader")
"""Kinds of exchanges that computing hides, at least in part."""

NUM_ROUTES = 4
"""Exchanges of all tokens: to the ranks that compute them, back, and the backward of both."""

LOADER_BYTES_PER_S, SAMPLE_BYTES = 1e9, 128.0  # assumed: gloo, and a token of FLUX's latent in bf16
_MOST_MICROBATCHES = 100_000
_MOST_TIMES = 1e3  # as long: plans take no lower speeds
_ALONE = 0.9  # share of a rank's work from which a sequence sets its time alone

_BLOCK_VALUES = 34
"""Bytes a token and unit of width that a block holds while it is recomputed, without attention
scores. Source: Korthikanti et al. (arXiv:2205.05198), equation 1."""


@dataclass(frozen=True, slots=True)
class EncoderStage:
    """An encoder that runs before the model on every sample, such as a T5 or a VAE.

    Args:
        name: Name in tables.
        sample_s: Seconds per sample, whatever its length, as for padded texts.
        text_token_s: Seconds per text token.
        image_token_s: Seconds per other token.
        is_balanced: True: samples are spread evenly over ranks at no cost, and ranks wait for each
            other at the end of the encoder.
    """

    name: str
    sample_s: float = 0.0
    text_token_s: float = 0.0
    image_token_s: float = 0.0
    is_balanced: bool = False

    def __post_init__(self) -> None:
        fields(self, name=(of_type, str, "a text"), is_balanced=(of_type, bool, "True or False"))
        fields(self, sample_s=number, text_token_s=number, image_token_s=number)

    def seconds(self, placed: Placement) -> Floats:
        """Return (N,) seconds of ranks, which encode the samples that they loaded or received."""
        num_ranks = placed.topology.num_ranks
        seconds = self.sample_s * (placed.lens > 0)
        seconds = seconds + placed.kinds @ np.array([self.text_token_s, self.image_token_s])
        if self.is_balanced and seconds.size:
            return assign(seconds, num_ranks).loads
        rank_of = placed.bag_of if placed.moves == SAMPLES else placed.source
        return np.bincount(rank_of, seconds, num_ranks).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Sharding:
    """Parameters that FSDP2 shards over S ranks, with R replicas of them (HSDP).

    Args:
        num_params: Number of parameters; None: 12 d^2 per layer.
        shard_ranks: S; None: the ranks of a node.
    """

    num_params: int | None = None
    shard_ranks: int | None = None

    def __post_init__(self) -> None:
        fields(self, num_params=(whole, 1), shard_ranks=(whole, 1))

    def params_of(self, cost: TransformerCost) -> int:
        """Return `num_params`, or by default the parameters of the model's blocks."""
        return self.num_params or 12 * cost.d_model**2 * cost.num_layers  # of 24 L d^2 FLOPs

    def seconds(self, cost: TransformerCost, cluster: Cluster) -> tuple[float, float]:
        """Predict the seconds to all-gather bf16 parameters, and to reduce float32 gradients.

        Across nodes, ranks send (S - 1) / S of the bytes at min(intra, inter * ranks per node).
        Replicas all-reduce 1 / S of the gradients: 2 (R - 1) / R of its bytes. Source: NCCL rings.
        """
        ranks, per_node = cluster.num_ranks, cluster.ranks_per_node
        shards = min(per_node, ranks) if self.shard_ranks is None else self.shard_ranks
        if ranks % shards:
            raise ConfigError(f"Sharding(shard_ranks={shards}): {ranks} ranks are no multiple")
        params = self.params_of(cost)
        node = min(cluster.intra_bytes_per_s, cluster.inter_bytes_per_s * per_node)
        speed = cluster.intra_bytes_per_s if shards <= per_node else node
        share, replicas = (shards - 1) / shards, ranks // shards
        between = cluster.intra_bytes_per_s if ranks <= per_node else cluster.inter_bytes_per_s
        gradients = 4 * params
        reduced = gradients * share / speed
        reduced += 2 * (replicas - 1) / replicas * gradients / shards / between
        return BYTES_PER_VALUE * params * share / speed, reduced


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Settings of a simulation besides data, model and machine.

    Args:
        num_steps: Steps to draw from data codes; lists of batches have their own length.
        num_ranks: Ranks of data codes; None: as many as the codes name.
        ranks_per_node: Ranks per node; None: at most 8.
        accumulate: Microbatches per step; ranks wait for each other after each, as with FSDP2.
        seed: Seed of data codes.
        passes: Passes of a microbatch; by default forward, recomputation and backward.
        stages: Encoders before the model.
        routed_bytes_per_token: Bytes per token over all exchanges that route it in a microbatch; by
            default four times the model's width in bf16.
        train_steps: Steps of the user's own run or epoch, to compute its GPU-hours.
        is_epoch: True if these steps are one epoch; the report then says so.
        gpu_hour_price: Price of a GPU-hour; None: no money is computed.
        currency: Currency of the price, such as USD.
        slow_ranks: By rank, how many times as long it computes: {5: 1.5}.
        slow_links: By rank, how many times as long it sends to other nodes.
        lost_nodes: Number of nodes that are gone, the last ones; other ranks load their samples.
        set_speeds: Plans know the slow ranks, as after `SequenceParallel.set_speeds`.
    """

    num_steps: int = 20
    num_ranks: int | None = None
    ranks_per_node: int | None = None
    accumulate: int = 1
    seed: int = 0
    passes: Passes = TRAINING
    sharding: Sharding = field(default_factory=Sharding)
    stages: tuple[EncoderStage, ...] = ()
    routed_bytes_per_token: float | None = None
    train_steps: int = 1000
    is_epoch: bool = False
    gpu_hour_price: float | None = None
    currency: str = "USD"
    slow_ranks: Mapping[int, float] = field(default_factory=dict[int, float])
    slow_links: Mapping[int, float] = field(default_factory=dict[int, float])
    lost_nodes: int = 0
    set_speeds: bool = False

    def __post_init__(self) -> None:
        count, positive = (whole, 1, _MOST_MICROBATCHES), (whole, 1)
        fields(self, num_steps=count, accumulate=count, num_ranks=positive)
        fields(self, ranks_per_node=positive, train_steps=positive, gpu_hour_price=number)
        fields(
            self,
            routed_bytes_per_token=rate,
            passes=(of_type, Passes, "TRAINING, or a Passes(..)"),
            sharding=(of_type, Sharding, "a Sharding(..)"),
            stages=(each, of_type, EncoderStage, "an EncoderStage(..)"),
            is_epoch=(of_type, bool, "True or False"),
            currency=(of_type, str, "a text such as EUR"),
            set_speeds=(of_type, bool, "True or False"),
            lost_nodes=whole,
            **dict.fromkeys(("slow_ranks", "slow_links"), (of_type, Mapping, "factors by rank")),
        )
        if self.num_steps * self.accumulate > _MOST_MICROBATCHES:
            what = f"SimulationOptions: {self.num_steps} steps of {self.accumulate} microbatches"
            raise ConfigError(f"{what} are more than {_MOST_MICROBATCHES}: use fewer")
        names = [stage.name for stage in self.stages]
        if len({*names, *KINDS}) < len(names) + len(KINDS):
            advice = f"must differ from each other, and from {', '.join(KINDS)}"
            raise ConfigError(f"SimulationOptions(stages: names {names} {advice}")

    @property
    def period(self) -> str:
        """The steps that GPU-hours are computed for, in words."""
        steps = f"{self.train_steps:,} steps"
        return f"one epoch ({steps})" if self.is_epoch else steps

    @property
    def troubles(self) -> str:
        """The troubles of the cluster in words; empty without any."""
        does = ((self.slow_ranks, "computes"), (self.slow_links, "sends to other nodes"))
        said = [f"rank {k} {does} {n:g} times as long" for of, does in does for k, n in of.items()]
        said += ["plans know the slow ranks"] * self.set_speeds
        return ", ".join(said + [f"nodes gone: {self.lost_nodes}"] * bool(self.lost_nodes))


def factors(name: str, of_ranks: Mapping[int, float], num_ranks: int) -> Floats:
    """Return (N,) factors, 1 for ranks without one; ConfigError for what is no rank or factor."""
    values = np.ones(num_ranks)
    for rank, factor in of_ranks.items():
        place = whole(f"{name}: a rank", rank, 0, num_ranks - 1)
        values[place] = number(f"{name}: the factor of rank {rank}", factor, 1.0, _MOST_TIMES)
    return values


@dataclass(frozen=True, slots=True)
class Setup:
    """Model, machine and options of a simulation; cost and cluster are for a forward pass."""

    cost: TransformerCost
    cluster: Cluster
    host_s: float  # seconds that the host adds to a microbatch
    options: SimulationOptions
    slow: Floats  # (N,) how many times as long ranks compute
    far: Floats  # (N,) how many times as long ranks send to other nodes

    def slowed(self, times: float) -> "Setup":
        """Return the same with links between nodes that all take so many times as long."""
        inter = self.cluster.inter_bytes_per_s / times
        return replace(self, cluster=replace(self.cluster, inter_bytes_per_s=inter))


class Microbatch(NamedTuple):
    """The prediction of a microbatch, with tokens and FLOPs of all ranks, without padding."""

    seconds: Floats  # (len(KINDS), N) of each rank, by kind
    hidden: Floats  # (len(HIDDEN), N) seconds of exchanges that no rank waited for
    stage_s: Floats  # (stages, N) of each encoder
    tokens: int
    padding: int  # tokens that are computed beside them
    is_alone: bool  # one sequence is nearly all work of the busiest ranks
    flops: float  # of all passes, attention in full, as KnapFormer, 4.2
    workloads: Floats  # (N,) cost of each rank by the model: forward, without wires
    activation_bytes: Floats  # (N,) kept until the backward pass


def microbatch(placed: Placement, setup: Setup) -> Microbatch:
    """Predict all passes of a microbatch; ranks wait for each other at its end, as in FSDP2."""
    cost, options, none = setup.cost, setup.options, np.zeros(placed.topology.num_ranks)
    spent = dict.fromkeys(KINDS, none) | _computed(placed, setup)
    bag_of_rank = placed.topology.bag_of_rank
    for rank in np.flatnonzero(setup.far > 1.0):  # its bag waits for it in each exchange
        longer = _computed(placed, setup.slowed(setup.far[rank]))
        is_late = bag_of_rank == bag_of_rank[rank]
        spent |= {kind: np.maximum(spent[kind], is_late * longer[kind]) for kind in longer}
    stages = np.array([setup.slow * stage.seconds(placed) for stage in options.stages])
    stages = stages.reshape(-1, none.size)
    spent["encoders"] = stages.sum(axis=0)
    if placed.moves == TOKENS:
        routed = options.routed_bytes_per_token or NUM_ROUTES * BYTES_PER_VALUE * cost.d_model
        routing = exchange_seconds(placed, setup.cluster, routed, setup.far)
        # All ranks launch the exchanges if any token moves.
        spent["routing"] = routing + NUM_ROUTES * setup.cluster.latency_s * bool(routing.any())
    # A ring over nodes is as fast as its slowest link.
    gather, reduce = options.sharding.seconds(cost, setup.slowed(setup.far.max()).cluster)
    spent |= _exposed_sharding(spent, setup, gather, reduce)
    exposed = spent["all_gather"] + spent["reduce_scatter"]
    moved = none
    if placed.moves == SAMPLES:  # while the step before computes, which is assumed as long
        near, far = _sent(placed, setup.cluster)
        moved = (near + far * setup.far) * (SAMPLE_BYTES / LOADER_BYTES_PER_S)
    spent["loader"] = np.maximum(moved - sum(spent.values(), none).max(), 0.0)
    staged = zip(stages, options.stages, strict=True)
    waits = sum((by_rank.max() - by_rank for by_rank, stage in staged if stage.is_balanced), none)
    busy = sum(spent.values(), none) + waits
    spent["waiting"] = waits + busy.max() - busy
    hidden = np.stack([2 * gather + reduce - exposed, moved - spent["loader"]])
    per_token = cost.bytes_per_token or cost.d_model * (2 * cost.num_layers + _BLOCK_VALUES)
    work = cost(placed.computed)
    workloads = placed.by_rank(work)
    longest = (work / placed.topology.bag_sizes[placed.bag_of]).max(initial=0.0)
    forward = FLOPS_PER_UNIT * float(replace(cost, gamma=1.0)(placed.lens).sum())
    return Microbatch(
        np.stack([spent[name] for name in KINDS]),
        np.maximum(hidden, 0.0),
        stages,
        int(placed.lens.sum()),
        int((placed.computed - placed.lens).sum()),
        bool(longest > _ALONE * workloads.max()),
        options.passes.linear * forward,
        workloads,
        placed.by_rank(placed.computed.astype(np.float64)) * per_token,
    )


def _computed(placed: Placement, setup: Setup) -> dict[str, Floats]:
    """Predict the seconds of compute, Ulysses and ring in the blocks, and of the host."""
    topology, bag_of = placed.topology, placed.bag_of
    cluster = replace(setup.cluster, passes=setup.options.passes)
    counts = np.bincount(placed.source, minlength=topology.num_ranks)
    offer, ranks = Offer.of(counts[None], placed.computed), RankState.of(topology.num_ranks)
    prices = price(offer, topology, setup.cost, cluster, ranks)
    parts = prices.parts[:, prices.kinds[bag_of], np.arange(bag_of.size)]
    compute, ulysses, ring = map(placed.by_rank, parts)
    launches, host = prices.carried, prices.exposed_host(bag_of)
    ulysses, host = ulysses + launches[topology.bag_of_rank], host[topology.bag_of_rank]
    compute = compute * setup.slow
    return {"compute": compute, "ulysses": ulysses, "ring": ring, "host": setup.host_s + host}


def _exposed_sharding(
    spent: dict[str, Floats], setup: Setup, gather: float, reduce: float
) -> dict[str, Floats]:
    """Return seconds of FSDP's collectives that are not hidden behind a neighbouring layer."""
    passes, first = setup.options.passes, 1 / setup.cost.num_layers
    wires = spent["ulysses"] + spent["ring"]
    forward = spent["compute"] / passes.linear + wires / passes.exchanges
    backward = spent["compute"] + wires - forward
    early = gather * (1 - first) - forward
    late = gather + reduce * (1 - first) - backward
    return {
        "all_gather": gather * first + np.maximum(early, 0.0),
        "reduce_scatter": reduce * first + np.maximum(late, 0.0),
    }


def exchange_seconds(
    placed: Placement, cluster: Cluster, bytes_per_token: float, far_times: Floats | float = 1.0
) -> Floats:
    """Return (N,) seconds that ranks need to send sequences to the bags that compute them."""
    near, far = _sent(placed, cluster) * bytes_per_token
    return np.asarray(cluster.wires.sending(near, far * far_times))


def _sent(placed: Placement, cluster: Cluster) -> Floats:
    """Return (2, N) tokens that ranks send or receive, the larger: in their node, across nodes."""
    topology, source, per_node = placed.topology, placed.source, cluster.ranks_per_node
    num_ranks, bag_of_rank = topology.num_ranks, topology.bag_of_rank
    first: Ints = topology.first_ranks[placed.bag_of]
    size: Ints = topology.bag_sizes[placed.bag_of]
    share, node = placed.computed / size, source // per_node * per_node
    is_home = (source >= first) & (source < first + size)  # the source is a rank of the bag
    in_node = np.minimum(first + size, node + per_node) - np.maximum(first, node)
    in_node = np.maximum(in_node, 0)
    ranks = np.arange(num_ranks)
    starts = np.diff(bag_of_rank, prepend=-1) + (ranks % per_node == 0) > 0
    part = np.cumsum(starts) - 1  # (N,) index of a bag's ranks in one node
    near = in_node > 0
    taken = np.bincount(part[np.maximum(first, node)[near]], share[near], num_ranks)[part]
    stays = np.bincount(source[is_home], share[is_home], num_ranks)
    whole = np.bincount(placed.bag_of, share, topology.num_bags)[bag_of_rank]
    sent_near = np.bincount(source, share * (in_node - is_home), num_ranks)
    sent_far = np.bincount(source, share * (size - in_node), num_ranks)
    sums = np.stack([np.maximum(sent_near, taken - stays), np.maximum(sent_far, whole - taken)])
    return np.maximum(sums, 0.0)  # differences of sums may be a rounding below
