"""Plans for a batch of sequences: which bag computes each of them, and the tables to move them."""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from bascule.errors import ConfigError, PlanError
from bascule.plan import metrics, routes
from bascule.plan.binding import Binding, find_binding
from bascule.plan.checks import amounts, by_rank, check_rank, number, of_type, shown, wholes
from bascule.plan.costs.cost_models import Cost, evaluate
from bascule.plan.costs.hardware import Cluster
from bascule.plan.costs.prices import bag_carried, check_sizes, decide, price
from bascule.plan.lengths import check_lengths
from bascule.plan.limits import Limits, in_tokens
from bascule.plan.locality import Source, bring_home
from bascule.plan.routes import Ints, LocalLayout, Route
from bascule.plan.topology.search import choose_topology
from bascule.plan.topology.spec import Topology

_NODE_TOLERANCE = 0.005
"""Default share of the makespan that keeping tokens in their node may cost."""

JSON_VERSION = 1
MAX_TOKENS = 2**31 - 1
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


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
        planner: Name of the planner that made it.
    """

    topology: Topology
    source_counts: Ints
    seq_lens: Ints
    bag_of: Ints
    loads: npt.NDArray[np.float64]
    lower_bound: float
    planner: str

    def __post_init__(self) -> None:
        for array in (self.source_counts, self.seq_lens, self.bag_of, self.loads):
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
        """How far the makespan is above the lower bound at most: makespan / lower_bound - 1."""
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
        return find_binding(self.topology, self.seq_lens, self.bag_of, self.loads)

    @cached_property
    def source_ranks(self) -> Ints:
        """(num_seqs,) rank whose loader delivered each sequence."""
        return routes.frozen(np.repeat(np.arange(self.num_ranks), self.source_counts))

    @cached_property
    def tokens(self) -> Ints:
        """(num_ranks,) tokens that each rank computes on."""
        bags = self.topology.bag_of_rank
        place = np.arange(self.num_ranks) - self.topology.first_ranks[bags]
        sizes = self.topology.bag_sizes
        base = routes.sums_by(self.bag_of, self.seq_lens // sizes[self.bag_of], sizes.size)
        # The remainders of a bag are dealt in turn, so their sum tells how many each rank got.
        extra = routes.sums_by(self.bag_of, self.seq_lens % sizes[self.bag_of], sizes.size)
        extra = extra[bags]
        return routes.frozen(base[bags] + extra // sizes[bags] + (place < extra % sizes[bags]))

    def unbalanced_loads(
        self, cost: Cost, cluster: Cluster | None = None
    ) -> npt.NDArray[np.float64]:
        """(num_ranks,) cost of each rank if every sequence stayed where it was loaded.

        In the unit of `loads`, if cost and cluster are those that the plan was made with.
        """
        lens = self.seq_lens
        costs = evaluate(cost, lens) if cluster is None else cluster.compute_seconds(cost, lens)
        loads = np.zeros(self.num_ranks)
        np.add.at(loads, self.source_ranks, costs)
        return loads

    @cached_property
    def moved_tokens(self) -> int:
        """Tokens that leave the rank that loaded them."""
        sizes = self.topology.bag_sizes[self.bag_of]
        place = self.source_ranks - self.topology.first_ranks[self.bag_of]
        at_home = (place >= 0) & (place < sizes)
        place = np.clip(place, 0, sizes - 1)
        start = routes.chunk_starts(self.seq_lens, sizes, self._rotations, place)
        end = routes.chunk_starts(self.seq_lens, sizes, self._rotations, place + 1)
        return int(self.seq_lens.sum() - np.where(at_home, end - start, 0).sum())

    @cached_property
    def _rotations(self) -> Ints:
        return routes.frozen(routes.rotations(self.seq_lens, self.bag_of, self.topology.bag_sizes))

    def local(self, rank: int) -> LocalLayout:
        """What `rank` computes on. O(num_seqs + tokens of the rank).

        Raises:
            ConfigError: There is no such rank.
            PlanError: It holds more tokens than the int32 of `cu_seqlens` can count.
        """
        rank = check_rank(rank, self.num_ranks)
        bag = self.topology.bag_of_rank[rank]
        place = rank - self.topology.first_ranks[bag]
        seq_ids = np.flatnonzero(self.bag_of == bag)
        seq_lens, turns = self.seq_lens[seq_ids], self._rotations[seq_ids]
        size = self.topology.bag_sizes[bag]
        starts = routes.chunk_starts(seq_lens, size, turns, place)
        lens = routes.chunk_starts(seq_lens, size, turns, place + 1) - starts
        _check_countable(rank, int(lens.sum()))
        return LocalLayout(
            seq_ids=seq_ids,
            seq_lens=seq_lens,
            chunk_starts=starts,
            chunk_lens=lens,
            cu_seqlens=routes.cumulative(lens).astype(np.int32),
            positions=routes.ranges(starts, lens),
            slots=np.repeat(np.arange(seq_ids.size), lens),
        )

    def bag_lens(self, rank: int) -> Ints:
        """(bag size, n) tokens of each sequence of `rank`'s bag on each rank of that bag."""
        rank = check_rank(rank, self.num_ranks)
        bag = self.topology.bag_of_rank[rank]
        seq_ids = np.flatnonzero(self.bag_of == bag)
        size = self.topology.bag_sizes[bag]
        places = np.arange(int(size) + 1)[:, None]
        return np.diff(
            routes.chunk_starts(self.seq_lens[seq_ids], size, self._rotations[seq_ids], places),
            axis=0,
        )

    def route(self, rank: int) -> Route:
        """The part of `rank` in the exchange from source to compute layout; `.inverse()` restores.

        O(num_seqs + chunks and tokens of the rank).

        Raises:
            ConfigError: There is no such rank.
        """
        local = self.local(rank)
        recv_splits = routes.sums_by(
            self.source_ranks[local.seq_ids], local.chunk_lens, self.num_ranks
        )
        send_index, send_splits = self._send_table(rank)
        return Route(send_index, send_splits, recv_splits, None)

    def _send_table(self, rank: int) -> tuple[Ints, Ints]:
        """Row to send at each place, and rows to each rank: by destination, then sequence."""
        first = int(self.source_counts[:rank].sum())
        own = slice(first, first + int(self.source_counts[rank]))
        seq_lens, bags = self.seq_lens[own], self.bag_of[own]
        sizes = self.topology.bag_sizes[bags]
        piece_seq = np.repeat(np.arange(sizes.size), sizes)
        place = routes.ranges(np.zeros_like(sizes), sizes)
        args = seq_lens[piece_seq], sizes[piece_seq], self._rotations[own][piece_seq]
        starts = routes.chunk_starts(*args, place)
        lens = routes.chunk_starts(*args, place + 1) - starts
        dest = self.topology.first_ranks[bags][piece_seq] + place
        rows = routes.cumulative(seq_lens)[piece_seq] + starts
        return routes.sending(rows, lens, dest, self.num_ranks)

    @cached_property
    def digest(self) -> str:
        """Hex digest of the integers that decide who computes what; equal on ranks that agree."""
        terms = np.array(self.topology.terms, dtype=np.int64)
        rings = -np.array(self.topology.rings, dtype=np.int64)  # nothing else is negative
        head = np.array([JSON_VERSION, self.topology.num_replicas, len(terms)], dtype=np.int64)
        digest = hashlib.blake2b(digest_size=16)
        for part in (head, terms, rings, self.source_counts, self.seq_lens, self.bag_of):
            digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        return digest.hexdigest()

    def to_json(self) -> str:
        """The plan as JSON, with a version; floats survive exactly."""
        per_rank = np.split(self.seq_lens, np.cumsum(self.source_counts)[:-1])
        return json.dumps(
            {
                "version": JSON_VERSION,
                "topology": str(self.topology),
                "num_replicas": self.topology.num_replicas,
                "planner": self.planner,
                "seq_lens": [lens.tolist() for lens in per_rank],
                "bag_of": self.bag_of.tolist(),
                "loads": self.loads.tolist(),
                "lower_bound": self.lower_bound,
                "digest": self.digest,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Raises:
            ConfigError: The text is not such a plan, or its version is another.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            version = data["version"]
            if type(version) is not int or version != JSON_VERSION:
                raise ConfigError(
                    f"plan of version {shown(version)}: this bascule reads {JSON_VERSION}"
                )
            unit = Topology.parse(data["topology"])
            topology = replace(unit, num_replicas=data["num_replicas"])
            counts, lens = check_lengths(data["seq_lens"], topology.num_ranks)
            bag_of = wholes("bag_of", data["bag_of"], lens.size)
            loads = amounts("loads", data["loads"])
            bound = number("lower_bound", data["lower_bound"], most=sys.float_info.max)
            planner = of_type("planner", data["planner"], str, "the name of one")
            digest = data["digest"]
        except ConfigError as error:
            raise ConfigError(f"this text is not a plan, or a damaged one: {error}") from error
        except _DAMAGE as error:
            raise ConfigError(
                f"this is not a plan written by Plan.to_json: {shown(error)}"
            ) from error
        if loads.shape != counts.shape:
            raise ConfigError(
                f"plan on {counts.size} ranks has {loads.size} loads: the file is damaged"
            )
        if bag_of.size and bag_of.max() >= topology.num_bags:
            raise ConfigError(
                f"plan names a bag outside 0..{topology.num_bags - 1}: the file is damaged"
            )
        plan = cls(topology, counts, lens, bag_of, loads, bound, planner)
        if plan.digest != digest or not 0 <= plan.lower_bound <= plan.makespan < np.inf:
            raise ConfigError("the plan does not match its digest, or its bound: it is damaged")
        return plan


def plan_batch(
    seq_lens: Sequence[npt.ArrayLike],
    topology: Topology | str,
    cost: Cost,
    *,
    planner: str = "lpt",
    limits: Limits | None = None,
    carried_loads: npt.ArrayLike | None = None,
    cluster: Cluster | None = None,
    home_tolerance: float | None = None,
) -> Plan:
    """Assign every sequence of a batch to a bag, so that the slowest rank finishes early.

    First comes the makespan, then evenness, then staying at home: equal bags are laid where their
    tokens come from, and nothing moves where the batch as loaded is as good.

    Args:
        seq_lens: One list of token counts a source rank; empty lists are legal.
        topology: The bags, or their spec; replicas fill the world that `seq_lens` describes. With
            a cluster, "auto" chooses bags for this batch among aligned power-of-two subgroups of
            each node.
        cost: Predicts the cost of a sequence on one rank; a bag of G ranks takes a G-th of it.
        planner: "lpt" (longest first, by completion time, then moves and swaps until the gap to
            the bound is certified to be small) or "knapsack" (the greedy of KnapFormer: longest
            first, to the least occupied bag whose remaining capacity suffices; knows no limits and
            no homes).
        limits: What a rank can hold; hard. Bytes are those of activations, and need a cost model
            with `bytes_per_token`; with a cluster its memory is a limit too (see `in_tokens`).
        carried_loads: (num_ranks,) cost that each rank has already, as of earlier microbatches.
        cluster: With one, all costs are seconds of a forward pass, wires and launches included
            (see `Cluster`), and tokens that leave their node count before those that leave their
            rank.
        home_tolerance: By how much the makespan may pass the best one found so that more tokens
            stay where they were loaded; 0.01 is 1 %, 0 gives up evenness alone. None: nothing may,
            but with a cluster of several nodes it means 0.005.

    Returns:
        The plan; the same on every rank that gives the same arguments.

    Raises:
        ConfigError: A length, the topology, the planner, the cluster or a limit is illegal.
        PlanError: The limits cannot be kept, or a rank would hold more than 2^31 - 1 tokens; says
            what misses by how much.
    """
    tolerance = _tolerance(home_tolerance, cluster)
    limits = in_tokens(limits, cost, cluster)
    seq_lens = by_rank("sequence lengths", seq_lens)
    if isinstance(topology, str) and topology == "auto":
        topology = _choose(seq_lens, cost, cluster, limits, carried_loads)
    topology = Topology.parse(topology, world_size=len(seq_lens))
    counts, lens = check_lengths(seq_lens, topology.num_ranks)
    ranks = np.repeat(np.arange(counts.size), counts)
    check_sizes(lens, counts, topology, limits)
    carried = bag_carried(carried_loads, topology)
    prices = price(lens, counts, topology, cost, cluster, carried)
    found = decide(planner, prices, limits)
    if planner != "knapsack":
        found = bring_home(found, Source(ranks, lens, topology, cluster), tolerance)
    plan = Plan(
        topology=topology,
        source_counts=counts,
        seq_lens=lens,
        bag_of=found.bag_of,
        loads=found.loads[topology.bag_of_rank],
        lower_bound=found.lower_bound,
        planner=planner,
    )
    fullest = int(plan.tokens.argmax())
    _check_countable(fullest, int(plan.tokens[fullest]))
    return plan


def _check_countable(rank: int, num_tokens: int) -> None:
    """Refuse a rank with more tokens than the int32 of `cu_seqlens` can count."""
    if num_tokens > MAX_TOKENS:
        raise PlanError(
            f"rank {rank} would hold {num_tokens} tokens, but cu_seqlens counts at most "
            f"{MAX_TOKENS}: use larger bags, or shorter sequences"
        )


def _choose(
    seq_lens: Sequence[npt.ArrayLike],
    cost: Cost,
    cluster: Cluster | None,
    limits: Limits | None,
    carried_loads: npt.ArrayLike | None,
) -> Topology:
    if cluster is None:
        raise ConfigError('topology "auto" needs a cluster, which says what wires cost')
    cluster.check_world(len(seq_lens))
    counts, lens = check_lengths(seq_lens, cluster.num_ranks)
    ranks = np.repeat(np.arange(counts.size), counts)
    return choose_topology(ranks, lens, cost, cluster, limits, carried_loads)


def _tolerance(given: float | None, cluster: Cluster | None) -> float | None:
    if cluster is not None:
        of_type("cluster", cluster, Cluster, "a Cluster(num_nodes, ranks_per_node, ..), or None")
    if given is None:
        return _NODE_TOLERANCE if cluster is not None and cluster.num_nodes > 1 else None
    return number("home_tolerance", given)
