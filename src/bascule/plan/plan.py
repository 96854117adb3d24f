"""Plans for a batch of sequences: which bag computes each of them, and the tables to move them."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from bascule.arrays import Ints, cumulative, frozen, ranges
from bascule.checks import choice, fields, number, of_type
from bascule.errors import ConfigError, PlanError
from bascule.machine.cluster import Cluster
from bascule.machine.costs import Cost, evaluate
from bascule.plan import metrics
from bascule.plan.limits import Limits, in_tokens
from bascule.plan.locality import Source, bring_home
from bascule.plan.prices import RankState, check_sizes, knapsack, price
from bascule.plan.routes import Chunks, LocalLayout, Route
from bascule.plan.sequences import Batch, Masks, Sequences, batch_of
from bascule.plan.solver.portfolio import solve
from bascule.plan.topology import Topology
from bascule.plan.topology_search import choose_topology

_NODE_TOLERANCE = 0.005  # default share of the makespan that keeping tokens in their node may cost

JSON_VERSION = 1
MAX_TOKENS = 2**31 - 1

_SHARE = 0.99  # share of a bag's tokens from which on a sequence is all that the bag computes
_EVEN = 1.01  # imbalance up to which the whole work binds, not one sequence


@dataclass(frozen=True, slots=True)
class Binding:
    """A sequence that alone keeps the slowest bag busy."""

    seq_id: int  # its place in source order
    num_tokens: int
    bag: int
    bag_size: int
    enough_ranks: int  # in a bag of them it takes no longer than the mean load, wires aside

    def __str__(self) -> str:
        ranks = "1 rank" if self.bag_size == 1 else f"{self.bag_size} ranks"
        return (
            f"sequence {self.seq_id} of {self.num_tokens:,} tokens alone fills bag {self.bag} of "
            f"{ranks}: a bag of {self.enough_ranks} ranks would help"
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """A frozen decision: the bag of every sequence, with its certificate and its index tables.

    Attributes:
        topology: The bags, over the whole world.
        source_counts: (num_ranks,) sequences that each rank's loader delivered.
        seq_lens: (num_seqs,) tokens of each sequence, in source order: its place is its global id.
        bag_of: (num_seqs,) bag that computes it.
        loads: (num_ranks,) predicted cost of each rank, carried loads included.
        lower_bound: No plan of these sequences on these bags has a smaller makespan.
        planner: Name of the planner that made it; `gap` and `binding` say how good it is.
        masks: The tokens that each token of a sequence sees; None: all.
        context_lens: (num_seqs,) tokens of the context of each sequence; None without contexts.
        speeds: (num_ranks,) of the ranks; None: 1.
    """

    topology: Topology
    source_counts: Ints
    seq_lens: Ints
    bag_of: Ints
    loads: npt.NDArray[np.float64]
    lower_bound: float
    planner: str
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
        """Ranks of the world that this plan is for."""
        return self.topology.num_ranks

    @property
    def makespan(self) -> float:
        """Predicted cost of the slowest rank."""
        return float(self.loads.max())

    @property
    def gap(self) -> float:
        """Most that the makespan is above the best one: makespan / lower_bound - 1."""
        return self.makespan / self.lower_bound - 1.0 if self.lower_bound > 0 else 0.0

    @property
    def imbalance(self) -> float:
        """Max over mean of the loads."""
        return metrics.imbalance(self.loads)

    @property
    def wir(self) -> float:
        """Max over min of the loads; infinite if a rank is idle, 1 if all are."""
        return metrics.wir(self.loads)

    @property
    def binding(self) -> Binding | None:
        """The sequence that keeps the slowest bag busy while others wait; None if none does."""
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
    def loaded(self) -> Batch:
        """The sequences that it is for."""
        return Batch(self.source_counts, self.seq_lens, self.masks, self.context_lens)

    @cached_property
    def chunks(self) -> Chunks:
        """Tokens of its sequences that each rank has."""
        return Chunks.of(self.topology, self.seq_lens, self.bag_of, self.masks)

    @cached_property
    def tokens(self) -> Ints:
        """(num_ranks,) tokens that each rank computes on."""
        return frozen(self.chunks.tokens)

    def unbalanced_loads(
        self, cost: Cost, cluster: Cluster | None = None
    ) -> npt.NDArray[np.float64]:
        """(num_ranks,) cost of each rank if every sequence stayed home, in the unit of `loads`."""
        costs_of = evaluate if cluster is None else cluster.compute_seconds
        costs = costs_of(cost, self.seq_lens, self.loaded.num_pairs)
        loads = np.zeros(self.num_ranks)
        np.add.at(loads, self.source_ranks, costs)
        return loads if self.speeds is None else loads / self.speeds

    def summary(self, cost: Cost, cluster: Cluster | None = None) -> dict[str, Any]:
        """Return what it predicts, before balancing and after it, as plain values."""
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
        """Tokens that leave the rank that loaded them."""
        return int(self.seq_lens.sum()) - self.chunks.num_at(self.source_ranks)

    def local(self, rank: int) -> LocalLayout:
        """Return what `rank` computes on. O(num_seqs + tokens of the rank)."""
        return self.chunks.local(rank)

    def bag_lens(self, rank: int) -> Ints:
        """(bag size, m) tokens of each chunk of `local(rank)` on each rank of `rank`'s bag."""
        return self.chunks.bag_lens(rank)

    def route(self, rank: int) -> Route:
        """Return a rank's part in the exchange to the compute layout; `.inverse()` restores."""
        return self.chunks.route(rank, self.source_ranks)

    def context_route(self, rank: int) -> Route:
        """Return a rank's part in bringing each context to all ranks of its sequence's bag."""
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
        """Hex digest of what decides who computes what; equal on ranks that agree."""
        terms = np.array(self.topology.terms, dtype=np.int64)
        rings = -np.array(self.topology.rings, dtype=np.int64)  # nothing else is negative
        head = np.array([JSON_VERSION, self.topology.num_replicas, len(terms)], dtype=np.int64)
        digest = hashlib.blake2b(digest_size=16)
        for part in (head, terms, rings, self.source_counts, self.seq_lens, self.bag_of):
            digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        if self.masks is not None or self.context_lens is not None:
            digest.update(np.ascontiguousarray(self.loaded.to_words(), dtype="<i8").tobytes())
        if self.speeds is not None:
            digest.update(np.ascontiguousarray(self.speeds, dtype="<f8").tobytes())
        return digest.hexdigest()

    def to_json(self) -> str:
        """Return the plan as JSON, with a version; floats survive exactly."""
        per_rank = np.split(self.seq_lens, np.cumsum(self.source_counts)[:-1])
        contexts = self.context_lens
        return json.dumps(
            {
                "version": JSON_VERSION,
                "topology": str(self.topology),
                "num_replicas": self.topology.num_replicas,
                "planner": self.planner,
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
    planner: str = "lpt",
    limits: Limits | None = None,
    initial_loads: npt.ArrayLike | None = None,
    speeds: npt.ArrayLike | None = None,
    cluster: Cluster | None = None,
    locality_tolerance: float | None = None,
) -> Plan:
    """Assign every sequence of a batch to a bag, so that the slowest rank finishes early.

    First comes the makespan, then evenness, then staying at home.

    Args:
        seq_lens: One list of token counts a source rank, may be empty; or `Sequences` with masks.
        topology: The bags, or their spec; replicas fill the world that `seq_lens` describes. With
            a cluster, "auto" chooses bags for this batch among aligned power-of-two subgroups of
            each node.
        cost: Predicts the cost of a sequence on one rank; a bag of G ranks takes a G-th of it.
        planner: "lpt" (longest first, by completion time, then moves and swaps until the gap to
            the bound is certified to be small) or "knapsack" (the greedy of KnapFormer: longest
            first, to the least occupied bag whose remaining capacity suffices; knows no limits and
            no homes).
        limits: Most that a rank holds; hard. Bytes are those of activations, and need a cost model
            with `bytes_per_token`; with a cluster its memory is a limit too.
        initial_loads: (num_ranks,) cost that each rank has already, as of earlier microbatches.
        speeds: (num_ranks,) of each rank, 1 by default; a bag is as fast as its slowest rank.
        cluster: With one, costs are seconds of a forward pass, wires and launches included, and
            tokens that leave their node count before those that leave their rank.
        locality_tolerance: By how much the makespan may pass the best one so that more tokens stay
            where they were loaded; 0.01 is 1 %, 0 gives up evenness alone. None: nothing may, but
            with a cluster of several nodes it means 0.005.

    Returns:
        The plan; the same on every rank that gives the same arguments.

    Raises:
        ConfigError: A length, the topology, the planner, the cluster or a limit is illegal.
        PlanError: The limits cannot be kept, or a rank would hold more than 2^31 - 1 tokens.
    """
    setup = PlanSetup(topology, cost, planner, limits, speeds, cluster, locality_tolerance)
    return setup.plan(seq_lens, initial_loads)


@dataclass(frozen=True, slots=True, eq=False)
class PlanSetup:
    """Make plans of one batch after the other; fields as the arguments of `plan_batch`."""

    topology: Topology | str
    cost: Cost
    planner: str = "lpt"
    limits: Limits | None = None
    speeds: npt.ArrayLike | None = None
    cluster: Cluster | None = None
    locality_tolerance: float | None = None

    def __post_init__(self) -> None:
        cluster = Cluster, "a Cluster(num_nodes, ranks_per_node, ..), or None"
        fields(self, cluster=(of_type, *cluster), locality_tolerance=number)

    def plan(
        self,
        loaded: Batch | Sequence[npt.ArrayLike | Sequences],
        initial_loads: npt.ArrayLike | None = None,
    ) -> Plan:
        """Plan a batch, on top of what each rank has already."""
        limits = in_tokens(self.limits, self.cost, self.cluster)
        batch = loaded if isinstance(loaded, Batch) else batch_of(loaded)
        state = RankState.of(batch.counts.size, initial_loads, self.speeds)
        if self.topology != "auto":
            topology = Topology.parse(self.topology, world_size=batch.counts.size)
        elif self.cluster is None:
            raise ConfigError('topology "auto" needs a cluster, which says what wires cost')
        else:
            self.cluster.check_world(batch.counts.size)
            topology = choose_topology(batch, self.cost, self.cluster, limits, state)
        check_sizes(batch, topology, limits)
        prices = price(batch, topology, self.cost, self.cluster, state)
        if choice("planner", self.planner, "lpt", "knapsack") == "lpt":
            problem = prices.problem(limits)
            source = Source(batch.ranks, batch.lens, topology, self.cluster)
            tolerance = self.locality_tolerance
            if tolerance is None and self.cluster is not None and self.cluster.num_nodes > 1:
                tolerance = _NODE_TOLERANCE
            decision = bring_home(problem, solve(problem), source, tolerance)
        elif limits is None or limits == Limits():
            decision = knapsack(prices)
        else:
            raise ConfigError(f'planner "knapsack" cannot keep {limits}: use "lpt"')
        plan = Plan(
            topology,
            batch.counts,
            batch.lens,
            decision.bin_of,
            decision.loads[topology.bag_of_rank],
            decision.lower_bound,
            self.planner,
            batch.masks,
            batch.context_lens,
            None if (state.speeds == 1.0).all() else state.speeds,
        )
        if batch.lens.sum(dtype=np.float64) > MAX_TOKENS and plan.tokens.max() > MAX_TOKENS:
            fullest = int(plan.tokens.argmax())
            raise PlanError(
                f"rank {fullest} would hold {plan.tokens[fullest]} tokens, but cu_seqlens counts "
                f"at most {MAX_TOKENS}: use larger bags, or shorter sequences"
            )
        return plan
