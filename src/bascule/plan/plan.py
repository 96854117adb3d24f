"""Plan a batch: the bag of ranks that computes each sequence, with a bound and index tables.

A plan minimises the makespan (the slowest rank's load), then unevenness, then moved tokens. If
ranks wait for each other in every microbatch, a step takes the sum of makespans, so microbatches
are planned one by one. If ranks wait once per step, it takes the largest sum of one rank's loads.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints, cumulative, frozen, ranges
from bascule.checks import choice, fields, number, of_type
from bascule.errors import ConfigError, PlanError
from bascule.machine.cluster import BYTES_PER_VALUE, Cluster
from bascule.machine.costs import Cost, TransformerCost, describe_cost, evaluate
from bascule.plan import metrics
from bascule.plan.limits import Limits, in_tokens
from bascule.plan.masks import Masks
from bascule.plan.offer import Offer, Sequences, offer_of
from bascule.plan.prices import Prices, RankState, check_sizes, price
from bascule.plan.routes import Chunks, LocalLayout, Route
from bascule.plan.solver.bounds import lower_bound
from bascule.plan.solver.homes import Homes, Regions, relabel
from bascule.plan.solver.portfolio import by_speed, may_end_by, near_home, solve
from bascule.plan.solver.problem import Assignment, Problem, build_problem
from bascule.plan.topology import Topology
from bascule.plan.topology_search import choose_topology

Sync = Literal["microbatch", "step"]

_Input = TypeVar("_Input")
_Result = TypeVar("_Result")

JSON_VERSION = 2
MAX_TOKENS = 2**31 - 1

_NUM_ROUTES = 2  # of a token in a forward pass: to its bag and back
_NODE_TOLERANCE = 0.005  # default share of the makespan that keeping tokens in their node may cost
_SHARE = 0.99  # least share of a bag's tokens that makes a sequence the whole work of the bag
_EVEN = 1.01  # imbalance up to which no single sequence binds
_MAX_ROUNDS = 3  # in which each microbatch is planned again on top of all others
_CLOSE = 1.0 + 1e-4  # least factor by which a round must shorten the step
_MAX_SEARCHED = 256  # most sequences that a search brings home one by one
_RELEASED = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7)  # of a bag's time, given away
_SAME = 1.0 + 1e-4  # makespans this close are certified to be equally good
_ROUNDING = 1.0 + 1e-9  # makespans this close are equal but for rounding


@dataclass(frozen=True, slots=True)
class Binding:
    """A sequence that alone keeps the slowest bag busy."""

    seq_id: int  # its place in source order
    num_tokens: int
    bag: int
    bag_size: int
    enough_ranks: int  # ranks on which it takes no longer than the mean load, wires aside

    def __str__(self) -> str:
        ranks = "1 rank" if self.bag_size == 1 else f"{self.bag_size} ranks"
        return (
            f"sequence {self.seq_id} of {self.num_tokens:,} tokens alone fills bag {self.bag} of "
            f"{ranks}: a bag of {self.enough_ranks} ranks would help"
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """A frozen plan: the bag of every sequence, with a lower bound and index tables.

    Attributes:
        topology: The bags, over the whole world.
        source_counts: (num_ranks,) sequences that each rank's loader delivered.
        seq_lens: (num_seqs,) tokens of each sequence, in source order: its index is its global id.
        bag_of: (num_seqs,) bag that computes each sequence.
        loads: (num_ranks,) predicted cost of each rank, with the initial loads.
        lower_bound: No plan of these sequences on these bags has a smaller makespan; `gap` and
            `binding` say how close this plan is.
        masks: Which tokens each token of a sequence sees; None: all.
        context_lens: (num_seqs,) cross-attention tokens of each sequence; None without any.
        speeds: (num_ranks,) speed of each rank; None: all 1.
    """

    topology: Topology
    source_counts: Ints
    seq_lens: Ints
    bag_of: Ints
    loads: npt.NDArray[np.float64]
    lower_bound: float
    masks: Masks | None = None
    context_lens: Ints | None = None
    speeds: npt.NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        arrays = self.source_counts, self.seq_lens, self.bag_of, self.loads
        for array in (*arrays, self.context_lens, self.speeds):
            if array is not None:
                array.flags.writeable = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the world that this plan is for."""
        return self.topology.num_ranks

    @property
    def makespan(self) -> float:
        """Predicted cost of the slowest rank."""
        return float(self.loads.max())

    @property
    def gap(self) -> float:
        """Upper bound on the distance to the best makespan: makespan / lower_bound - 1."""
        return self.makespan / self.lower_bound - 1.0 if self.lower_bound > 0 else 0.0

    @property
    def imbalance(self) -> float:
        """Largest load over the mean load."""
        return metrics.imbalance(self.loads)

    @property
    def wir(self) -> float:
        """Largest load over the smallest; infinite if a rank is idle, 1 if all are idle."""
        return metrics.wir(self.loads)

    @property
    def binding(self) -> Binding | None:
        """The sequence that alone keeps the slowest bag busy while others wait; else None."""
        if not self.seq_lens.size or self.imbalance <= _EVEN:
            return None
        slowest = int(self.loads.argmax())
        bag = int(self.topology.bag_of_rank[slowest])
        seqs = np.flatnonzero(self.bag_of == bag)
        lens, size = self.seq_lens[seqs], int(self.topology.bag_sizes[bag])
        longest = int(lens.max(initial=0))
        if not longest or longest < _SHARE * lens.sum():
            return None
        enough = math.ceil(self.loads[slowest] * size / self.loads.mean() * (1.0 - 1e-9))
        return Binding(int(seqs[lens.argmax()]), longest, bag, size, enough)

    @cached_property
    def source_ranks(self) -> Ints:
        """(num_seqs,) rank whose loader delivered each sequence."""
        return frozen(np.repeat(np.arange(self.num_ranks), self.source_counts))

    @property
    def offer(self) -> Offer:
        """The sequences that the plan is for."""
        counts, contexts = self.source_counts[None], self.context_lens
        return Offer.of(counts, self.seq_lens, [self.masks], context_lens=contexts)

    @cached_property
    def chunks(self) -> Chunks:
        """The chunks of each sequence that each rank computes on."""
        return Chunks.of(self.topology, self.seq_lens, self.bag_of, self.masks)

    @cached_property
    def tokens(self) -> Ints:
        """(num_ranks,) number of tokens that each rank computes on."""
        return frozen(self.chunks.tokens)

    def unbalanced_loads(
        self, cost: Cost, cluster: Cluster | None = None
    ) -> npt.NDArray[np.float64]:
        """Return (num_ranks,) costs if no sequence moved, in the unit of `loads`."""
        costs_of = evaluate if cluster is None else cluster.compute_seconds
        costs = costs_of(cost, self.seq_lens, self.offer.num_pairs)
        loads = np.zeros(self.num_ranks)
        np.add.at(loads, self.source_ranks, costs)
        return loads if self.speeds is None else loads / self.speeds

    def summary(self, cost: Cost, cluster: Cluster | None = None) -> dict[str, Any]:
        """Return the predicted loads before and after balancing, as plain values."""
        before = self.unbalanced_loads(cost, cluster)
        return {
            "makespan": self.makespan,
            "makespan_unbalanced": float(before.max()),
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "imbalance": self.imbalance,
            "imbalance_unbalanced": metrics.imbalance(before),
            "wir": self.wir,
            "wir_unbalanced": metrics.wir(before),
            "tokens": self.tokens.tolist(),
            "moved_tokens": self.moved_tokens,
        }

    @cached_property
    def moved_tokens(self) -> int:
        """Number of tokens that leave the rank that loaded them."""
        return int(self.seq_lens.sum()) - self.chunks.num_at(self.source_ranks)

    def local(self, rank: int) -> LocalLayout:
        """Return the chunks that `rank` computes on. O(num_seqs + tokens of the rank)."""
        return self.chunks.local(rank)

    def bag_lens(self, rank: int) -> Ints:
        """Return (bag size, m) tokens that each rank of the bag has of `local(rank)`'s parts."""
        return self.chunks.bag_lens(rank)

    def route(self, rank: int) -> Route:
        """Return a rank's part in the exchange to the compute layout; `.inverse()` leads back."""
        return self.chunks.route(rank, self.source_ranks)

    def context_route(self, rank: int) -> Route:
        """Return a rank's part in sending each context to all ranks of its sequence's bag."""
        source, bags = self.source_ranks, self.bag_of
        lens = np.zeros_like(self.seq_lens) if self.context_lens is None else self.context_lens
        first = cumulative(lens)[:-1]
        starts = first - cumulative(lens)[cumulative(self.source_counts)[source]]
        seqs = np.flatnonzero((source == rank) | (bags == self.topology.bag_of_rank[rank]))
        sizes = self.topology.bag_sizes[bags[seqs]]
        items, place = np.repeat(seqs, sizes), ranges(np.zeros_like(sizes), sizes)
        dest = self.topology.first_ranks[bags[items]] + place
        args = source[items], dest, lens[items], rank, self.num_ranks
        return Route.of_items(*args, starts=starts[items])

    @cached_property
    def digest(self) -> str:
        """Hex digest of the plan's inputs and decisions; equal on ranks that agree."""
        terms = np.array(self.topology.terms, dtype=np.int64)
        rings = -np.array(self.topology.rings, dtype=np.int64)  # nothing else is negative
        head = np.array([JSON_VERSION, self.topology.num_replicas, len(terms)], dtype=np.int64)
        digest = hashlib.blake2b(digest_size=16)
        for part in (head, terms, rings, self.source_counts, self.seq_lens, self.bag_of):
            digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        if self.masks is not None or self.context_lens is not None:
            digest.update(np.ascontiguousarray(self.offer.to_words(), dtype="<i8").tobytes())
        if self.speeds is not None:
            digest.update(np.ascontiguousarray(self.speeds, dtype="<f8").tobytes())
        return digest.hexdigest()

    def to_json(self) -> str:
        """Return the plan as JSON, with a format version; floats are exact."""
        per_rank = np.split(self.seq_lens, np.cumsum(self.source_counts)[:-1])
        contexts = self.context_lens
        return json.dumps(
            {
                "version": JSON_VERSION,
                "topology": str(self.topology),
                "num_replicas": self.topology.num_replicas,
                "seq_lens": [lens.tolist() for lens in per_rank],
                "masks": None if self.masks is None else self.masks.to_lists(),
                "context_lens": None if contexts is None else contexts.tolist(),
                "speeds": None if self.speeds is None else self.speeds.tolist(),
                "bag_of": self.bag_of.tolist(),
                "loads": self.loads.tolist(),
                "lower_bound": self.lower_bound,
                "digest": self.digest,
            }
        )


def plan_batch(
    seq_lens: Sequence[npt.ArrayLike | Sequences],
    topology: Topology | str,
    cost: Cost,
    *,
    limits: Limits | None = None,
    initial_loads: npt.ArrayLike | None = None,
    speeds: npt.ArrayLike | None = None,
    cluster: Cluster | None = None,
    locality_tolerance: float | None = None,
) -> Plan:
    """Assign every sequence of a batch to a bag, so that the slowest rank finishes early.

    Args:
        seq_lens: One list of token counts per source rank, maybe empty; or `Sequences` with masks.
        topology: The bags, or their spec, repeated to fill the ranks of `seq_lens`. "auto", which
            needs a cluster, chooses among aligned power-of-two subgroups of each node.
        cost: Predicts the cost of a sequence on one rank; on each of G ranks it is a G-th of this.
        limits: Hard limits of a rank. Limits in bytes concern activations, and need a cost model
            with `bytes_per_token`; the memory of a cluster is then a limit, too.
        initial_loads: (num_ranks,) cost that each rank already has, as from earlier microbatches.
        speeds: (num_ranks,) speed of each rank, default 1; the slowest rank sets a bag's speed.
        cluster: Makes costs seconds of a forward pass, with communication and launches. The plan
            then first avoids moves to other nodes, and only then moves to other ranks.
        locality_tolerance: Share by which the makespan may exceed the best, so that fewer tokens
            move. 0 keeps the makespan and gives up only evenness. Default: both are kept; with a
            cluster of several nodes, 0.005.

    Returns:
        The plan. Ranks that give the same arguments get the same plan.

    Raises:
        ConfigError: A length, the topology, the cluster or a limit is illegal.
        PlanError: The limits cannot be kept, or a rank would hold more than 2^31 - 1 tokens.
    """
    terms = Terms(topology, cost, limits, speeds, cluster, locality_tolerance)
    return terms.priced(offer_of(seq_lens), initial_loads).plan()


def plan_step(
    microbatches: Sequence[Sequence[npt.ArrayLike | Sequences]],
    topology: Topology | str,
    cost: Cost,
    *,
    sync: Sync = "microbatch",
    limits: Limits | None = None,
    speeds: npt.ArrayLike | None = None,
    cluster: Cluster | None = None,
    locality_tolerance: float | None = None,
) -> tuple[Plan, ...]:
    """Plan all microbatches of an optimiser step at once; see `plan_batch`.

    `sync` says when ranks wait for each other: "microbatch" (FSDP that reshards; minimises the sum
    of makespans) or "step" (DDP under `no_sync`; minimises the largest sum of a rank's loads).
    Returns one plan per microbatch, with its own loads and bound; `step_makespan` gives the time of
    the step. Raises the errors of `plan_batch`, with the microbatch's number.
    """
    terms = Terms(topology, cost, limits, speeds, cluster, locality_tolerance)
    offers = [_of_microbatch(place, offer_of, loaded) for place, loaded in enumerate(microbatches)]
    worlds = {offer.num_ranks for offer in offers}
    if len(worlds) > 1:
        raise ConfigError(f"microbatches for {sorted(worlds)} ranks: give all the same ranks")
    return plan_jointly(terms.priced_step(offers), check_sync(sync))


def plan_greedily(
    seq_lens: Sequence[npt.ArrayLike | Sequences] | Offer,
    topology: Topology | str,
    cost: Cost,
    *,
    cluster: Cluster | None = None,
) -> Plan:
    """Plan by KnapFormer's greedy algorithm (section 3.3), a baseline for comparisons.

    It gives sequences, longest first, to the least occupied bag with enough capacity left. It
    ignores limits and homes, and uses each sequence's cost on the cheapest kind of bag.
    """
    offer = seq_lens if isinstance(seq_lens, Offer) else offer_of(seq_lens)
    priced = Terms(topology, cost, cluster=cluster).priced(offer)
    prices = priced.prices
    problem = build_problem(prices.work.min(axis=0), prices.speeds, carried=prices.carried)
    bin_of = by_speed(problem, fill_first=True)
    decision = Assignment.of(prices.problem(None), bin_of, lower_bound(problem))
    return priced.plan_of(decision.bin_of, decision.loads, decision.lower_bound)


def step_makespan(plans: Sequence[Plan], *, sync: Sync) -> float:
    """Return the cost of a step: the sum of makespans, or with "step" the largest sum of a rank."""
    if check_sync(sync) == "microbatch":
        return sum(plan.makespan for plan in plans)
    return _largest_sum(plans)


def check_sync(sync: str) -> Sync:
    """Return `sync`, or refuse another word."""
    return "step" if choice("sync", sync, "microbatch", "step") == "step" else "microbatch"


# --- terms -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Terms:
    """All arguments of `plan_batch` but the sequences; the same on all ranks."""

    topology: Topology | str
    cost: Cost
    limits: Limits | None = None
    speeds: npt.ArrayLike | None = None
    cluster: Cluster | None = None
    locality_tolerance: float | None = None
    min_gain: float = 0.0  # least share of a step that `at_home_unless_it_pays` moves sequences for

    def __post_init__(self) -> None:
        cluster = Cluster, "a Cluster(num_nodes, ranks_per_node, ..), or None"
        fields(self, cluster=(of_type, *cluster), locality_tolerance=number)
        fields(self, min_gain=(number, 0.0, 1.0))
        _ = self.token_limits  # refuses what the cost model cannot count

    @cached_property
    def settings(self) -> dict[str, str]:
        """The terms as texts that ranks compare; equal texts make equal plans."""
        texts = {name: str(getattr(self, name)) for name in Terms.__dataclass_fields__}
        return texts | {"cost": describe_cost(self.cost)}

    @cached_property
    def token_limits(self) -> Limits | None:
        """The limits, in tokens and items only."""
        return in_tokens(self.limits, self.cost, self.cluster)

    def priced(self, offer: Offer, initial_loads: npt.ArrayLike | None = None) -> "Priced":
        """Predict the costs of a microbatch on its bags, on top of the ranks' initial loads."""
        limits, cluster, num_ranks = self.token_limits, self.cluster, offer.num_ranks
        ranks = RankState.of(num_ranks, initial_loads, self.speeds)
        if self.topology != "auto":
            topology = Topology.parse(self.topology, world_size=num_ranks)
        elif cluster is None:
            raise ConfigError('topology "auto" needs cluster=.., to predict communication')
        else:
            cluster.check_world(num_ranks)
            topology = choose_topology(offer, self.cost, cluster, limits, ranks)
        check_sizes(offer, topology, limits)
        return Priced(self, offer, price(offer, topology, self.cost, cluster, ranks))

    def priced_step(self, offers: Sequence[Offer]) -> "list[Priced]":
        """Predict the costs of the microbatches of a step."""
        return [_of_microbatch(place, self.priced, offer) for place, offer in enumerate(offers)]


# --- decisions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """A microbatch, with the predicted cost of each sequence on each bag."""

    terms: Terms
    offer: Offer
    prices: Prices

    def plan(self) -> Plan:
        """Find the plan."""
        problem = self.prices.problem(self.terms.token_limits)
        cluster, tolerance = self.terms.cluster, self.terms.locality_tolerance
        if tolerance is None and cluster is not None and cluster.num_nodes > 1:
            tolerance = _NODE_TOLERANCE
        decision = bring_home(self, problem, solve(problem), tolerance)
        return self.plan_of(decision.bin_of, decision.loads, decision.lower_bound)

    def as_loaded(self) -> Plan:
        """Return the plan without a bound that moves no sequence, on bags of one rank."""
        owner = self.offer.owner
        return self.plan_of(owner, self.prices.loads(owner), 0.0)

    def routing_s(self, bag_of: Ints) -> float:
        """Predict the seconds in which sequences move to other bags and back, in all passes.

        0 without a cluster, or a width that says how many bytes a token has.
        """
        cost, cluster, topology = self.terms.cost, self.terms.cluster, self.prices.topology
        owner = self.offer.owner
        away = topology.bag_of_rank[owner] != bag_of
        if cluster is None or not isinstance(cost, TransformerCost) or not away.any():
            return 0.0
        sizes = self.offer.lens * away * float(_NUM_ROUTES * BYTES_PER_VALUE * cost.d_model)
        nodes = owner // cluster.ranks_per_node, topology.first_ranks[bag_of]
        is_near = nodes[0] == nodes[1] // cluster.ranks_per_node
        each_s = np.asarray(cluster.wires.sending(sizes * is_near, sizes * ~is_near))
        sent = np.bincount(owner, each_s).max()
        received = np.bincount(bag_of, each_s, topology.num_bags) / topology.bag_sizes
        return max(float(sent), float(received.max())) + _NUM_ROUTES * cluster.wires.latency_s

    def on_top(self, carried: Floats) -> Plan:
        """Plan on top of (num_ranks,) carried loads, and leave these out of the plan's loads."""
        topology = self.prices.topology
        most = np.maximum.reduceat(carried, topology.first_ranks)
        prices = replace(self.prices, carried=most + self.prices.carried)
        bag_of = Priced(self.terms, self.offer, prices).plan().bag_of
        return self.plan_of(bag_of, self.prices.loads(bag_of), 0.0)

    def plan_of(self, bag_of: Ints, bag_loads: Floats, bound: float) -> Plan:
        """Make the plan from an assignment to bags; refuse more than 2^31 - 1 tokens on a rank."""
        offer, topology, state = self.offer, self.prices.topology, self.prices.ranks
        loads, masks = bag_loads[topology.bag_of_rank], offer.masks[0]
        speeds = None if (state.speeds == 1.0).all() else state.speeds
        sequences = topology, offer.counts[0], offer.lens
        plan = Plan(*sequences, bag_of, loads, bound, masks, offer.context_lens, speeds)
        if offer.lens.sum(dtype=np.float64) > MAX_TOKENS and plan.tokens.max() > MAX_TOKENS:
            fullest = int(plan.tokens.argmax())
            wrong = f"rank {fullest} would hold {plan.tokens[fullest]} tokens"
            raise PlanError(f"{wrong}, over {MAX_TOKENS}: use larger bags, or shorter sequences")
        return plan


def plan_jointly(microbatches: Sequence[Priced], sync: Sync) -> tuple[Plan, ...]:
    """Plan the microbatches of a step.

    If ranks wait once per step, the longest microbatch is planned first, and each later one on top
    of the loads so far. Then each is planned again, on top of the loads of all others.
    """
    alone = tuple(_of_microbatch(place, Priced.plan, m) for place, m in enumerate(microbatches))
    if sync == "microbatch" or len(alone) < 2:
        return alone
    plans = list(alone)
    order = sorted(range(len(plans)), key=lambda k: (-alone[k].makespan, k))
    total = np.zeros(alone[0].num_ranks)

    def replanned(k: int, carried: Floats) -> Plan:
        plan = microbatches[k].on_top(carried)
        return replace(plan, lower_bound=min(plans[k].lower_bound, plan.makespan))

    for k in order:
        plans[k] = replanned(k, total)
        total = total + plans[k].loads
    for _ in range(_MAX_ROUNDS):
        before = _largest_sum(plans)
        if before <= float(total.mean()) * _CLOSE:
            break
        for k in order:
            trial = list(plans)
            others = np.sum([plan.loads for plan in plans if plan is not plans[k]], axis=0)
            trial[k] = replanned(k, others)
            plans = min(plans, trial, key=_largest_sum)
        if _largest_sum(plans) * _CLOSE >= before:
            break
    return min((alone, tuple(plans)), key=_largest_sum)


def _largest_sum(plans: Sequence[Plan]) -> float:
    return float(np.sum([plan.loads for plan in plans], axis=0).max()) if plans else 0.0


def _of_microbatch(place: int, make: Callable[[_Input], _Result], microbatch: _Input) -> _Result:
    """Call `make` with a microbatch; errors name its place."""
    try:
        return make(microbatch)
    except (ConfigError, PlanError) as error:
        raise type(error)(f"microbatch {place}: {error}") from None


# --- whether moving pays --------------------------------------------------------------------------

Reason = Literal["balanced", "even", "gain", "exchange", "limits", "trial", "slower"]
"""Why items move or stay: "balanced" they move; "even": nothing is gained; "gain": less than the
least gain; "exchange": moving takes longer than it saves; "limits": only the loaded batch fits;
"trial": this step measures whether moving pays; "slower": moving was measured to be slower."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reason why the items of a step move or stay."""

    applied: bool
    reason: Reason
    before: float  # predicted step as loaded, in the unit of the cost model
    after: float  # predicted step as planned; at least, where too little could be gained to plan


def weigh(before: float, after: float, *, min_gain: float = 0.0, exchange: float = 0.0) -> Reason:
    """Decide whether items move, from the makespans before and after and the exchange's cost.

    `min_gain` is a share of the makespan before. `after` may also be a bound on it.
    """
    if before <= after * _ROUNDING:
        return "even"
    if before - after < min_gain * before:
        return "gain"
    return "exchange" if before - after <= exchange else "balanced"


def at_home_unless_it_pays(
    microbatches: Sequence[Priced], plans: tuple[Plan, ...], sync: Sync
) -> tuple[Plan, ...]:
    """Return the plans of a step, or legal plans in which all stays where `weigh` advises that."""
    if len(plans) == 1 and plans[0].topology.num_bags == 1:
        return plans
    pairs = list(zip(microbatches, plans, strict=True))
    homes = [priced.prices.topology.bag_of_rank[priced.offer.owner] for priced in microbatches]
    loads = [priced.prices.loads(home) for priced, home in zip(microbatches, homes, strict=True)]
    if sync == "step" and len(plans) > 1:
        of_ranks = zip(loads, plans, strict=True)
        loads = [np.sum([x[plan.topology.bag_of_rank] for x, plan in of_ranks], axis=0)]
    before, after = sum(float(x.max()) for x in loads), step_makespan(plans, sync=sync)
    min_gain = microbatches[0].terms.min_gain if plans else 0.0
    reason = weigh(before, after, min_gain=min_gain)
    if reason == "balanced" and microbatches[0].terms.cluster is not None:
        routing_s = sum(priced.routing_s(plan.bag_of) for priced, plan in pairs)
        reason = weigh(before, after, exchange=routing_s)
    if reason in ("balanced", "even"):
        return plans
    for priced, home in zip(microbatches, homes, strict=True):
        if priced.prices.problem(priced.terms.token_limits).excess(home):
            return plans
    staying = zip(pairs, homes, strict=True)
    return tuple(
        priced.plan_of(home, priced.prices.loads(home), plan.lower_bound)
        for (priced, plan), home in staying
    )


# --- what stays at home ---------------------------------------------------------------------------


def _homes(priced: Priced, ceiling: float) -> Homes:
    """Return the bags that sequences prefer, by tokens that leave their node, then rank."""
    offer, topology, cluster = priced.offer, priced.prices.topology, priced.terms.cluster
    lens, staying = offer.lens.astype(np.float64), 1.0 / topology.bag_sizes
    bags, home = topology.bag_of_rank, topology.bag_of_rank[offer.owner]
    if cluster is None or cluster.num_nodes == 1:
        return Homes(home, lens, ceiling, staying)
    shares = np.zeros((topology.num_bags, cluster.num_nodes))  # of a bag's ranks
    np.add.at(shares, (bags, np.arange(bags.size) // cluster.ranks_per_node), 1.0)
    shares /= topology.bag_sizes[:, None]
    regions = Regions(lens, offer.owner // cluster.ranks_per_node, shares)
    return Homes(home, lens / (2.0 * lens.sum() + 1.0), ceiling, staying, regions)


def bring_home(
    priced: Priced, problem: Problem, decision: Assignment, tolerance: float | None
) -> Assignment:
    """Change the plan with the smallest makespan so that fewer tokens leave home.

    A tolerance of 0.01 accepts a makespan 1 % larger. None only renames equal bags, and moves
    nothing if the batch as loaded has as small a makespan and is as even.
    """
    if not problem.num_items or problem.num_bins == 1:
        return decision
    good_enough = max(decision.makespan, decision.lower_bound * _SAME)
    bag_of_source = priced.prices.topology.bag_of_rank[priced.offer.owner]
    home = Assignment.of(problem, bag_of_source, decision.lower_bound)
    if (
        home.makespan <= good_enough
        and (tolerance is not None or _is_as_even(home, decision))
        and not problem.excess(home.bin_of)
    ):
        return home
    ceiling = good_enough * (1.0 + (tolerance or 0.0)) / problem.unit
    homes = _homes(priced, max(ceiling, problem.makespan(decision.bin_of)))  # both are rounded
    if tolerance is not None and problem.num_items <= _MAX_SEARCHED:
        bag_of, _ = near_home(problem, decision.bin_of, homes)
    else:
        bag_of = relabel(problem, decision.bin_of, homes)
        if tolerance is not None and not problem.limited:
            trials = (_keep_part(problem, homes, rank) for rank in (-problem.work, problem.work))
            mostly = [trial for trial in trials if trial is not None]
            relabelled = [relabel(problem, trial, homes) for trial in mostly]
            bag_of = min([bag_of, *mostly, *relabelled], key=homes.total_away)
    return Assignment.of(problem, bag_of, decision.lower_bound)


def _is_as_even(first: Assignment, second: Assignment) -> bool:
    """Compare sorted loads: return whether the first pair that differs is lower in `first`."""
    loads, others = np.sort(first.loads)[::-1], np.sort(second.loads)[::-1]
    differ = np.flatnonzero((loads > others * _SAME) | (others > loads * _SAME))
    return not differ.size or bool(loads[differ[0]] < others[differ[0]])


def _keep_part(problem: Problem, homes: Homes, rank: Floats) -> Ints | None:
    """Keep the sequences of lowest `rank` in each bag, while the others still fit elsewhere.

    None if nothing ends by the ceiling. Knows no limits.
    """
    home = homes.bins
    work = problem.kind_work[problem.kind_of[home], np.arange(home.size)]
    order = np.lexsort((rank, home))
    starts = np.searchsorted(home[order], np.arange(problem.num_bins))
    sums = np.concatenate([np.zeros(1), np.cumsum(work[order])])
    within = sums[1:] - sums[starts][home[order]]
    tried = np.ones(home.size, dtype=bool)
    for share in _RELEASED:
        room = (1.0 - share) * homes.ceiling * problem.speeds - problem.carried_work
        stays = np.zeros(home.size, dtype=bool)
        stays[order] = within <= np.maximum(room, 0.0)[home[order]]
        if np.array_equal(stays, tried):
            continue
        tried, rest = stays, problem.without(stays, home)
        if not may_end_by(rest, homes.ceiling):
            continue
        bag_of = home.copy()
        bag_of[~stays] = solve(rest, enough=homes.ceiling, quick=True).bin_of
        if problem.makespan(bag_of) <= homes.ceiling:
            return bag_of
    return None
