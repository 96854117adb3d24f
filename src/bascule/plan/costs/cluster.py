"""Clusters of equal ranks: seconds of compute, wires and launches."""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.errors import ConfigError
from bascule.plan.checks import MAX_RANKS, number, put, rate, whole
from bascule.plan.costs.cost_models import FLOPS_PER_UNIT, Cost, TransformerCost, evaluate
from bascule.plan.topology.spec import Topology

BYTES_PER_VALUE = 2
"""Activations travel as bf16."""

VALUES_PER_TOKEN = 4
"""Of the width of the model: q, k and v to the heads, and the output back."""

EXCHANGES_PER_LAYER = 2
"""All-to-alls of Ulysses attention: one to the heads, one back."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equal ranks, and how fast they compute and talk. Ranks are numbered node by node.

    In a bag of G ranks, a forward pass over a sequence of L tokens takes each rank

        compute(L) / G  +  layers * 8 d * (L / G) * ((R - 1) / intra + (G - R) / inter) / G

    seconds: a G-th of the compute, and the Ulysses all-to-alls of its L / G tokens. A token is 4
    values of width d a layer, 2 bytes each; of a rank's tokens a G-th goes to each rank of the bag,
    of which R - 1 others are in its own node (the fewest of any rank, where a bag crosses nodes).
    All sequences of a bag share their all-to-alls: once a pass, a rank of a bag with more than one
    rank spends ``2 * layers * latency_s`` on launching them, whatever it holds. What a ring adds
    stands in `plan.costs.prices`.

    Compute is the cost model's: a `TransformerCost` with `seconds_per_unit` is measured; one
    without is converted with `flops_per_s`; any other model must give seconds already.

    Args:
        num_nodes: Nodes.
        ranks_per_node: Ranks in a node.
        flops_per_s: FLOPs that a rank sustains in a second.
        memory_bytes: Memory that a rank has for activations: what weights, gradients and optimiser
            states leave. It limits plans if the cost model knows its `bytes_per_token`.
        intra_bytes_per_s: Bytes that a rank sends in a second to ranks of its node.
        inter_bytes_per_s: The same, to ranks of other nodes.
        latency_s: Time to launch an all-to-all.
        pack_bytes_per_s: Bytes that a rank brings into order in a second, before and after the
            exchanges; None: in no time. Adds ``layers * 8 d * (L / G) / pack_bytes_per_s``.
        piece_s: Seconds of the host for each piece that an exchange of a layer puts into order, of
            which there are G for each sequence of a bag: of software that loops over them, as
            KnapFormer does. The host works while the device computes: what takes longer than the
            compute delays the step. bascule has no such loop.

    Raises:
        ConfigError: A value is out of range.
    """

    num_nodes: int
    ranks_per_node: int
    flops_per_s: float
    memory_bytes: float
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    latency_s: float
    pack_bytes_per_s: float | None = None
    piece_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_nodes", "ranks_per_node"):
            put(self, name, whole(f"Cluster({name}", getattr(self, name), 1, MAX_RANKS))
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            check = number if field.name in ("latency_s", "piece_s") else rate
            if value is not None or field.name != "pack_bytes_per_s":
                put(self, field.name, check(f"Cluster({field.name}", value))
        if self.num_ranks > MAX_RANKS:
            raise ConfigError(
                f"Cluster(num_nodes={self.num_nodes}, ranks_per_node={self.ranks_per_node}): "
                f"{self.num_ranks} ranks, at most {MAX_RANKS} can be planned for"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.num_nodes * self.ranks_per_node

    def check_world(self, num_ranks: int) -> None:
        """Refuse a world of another size.

        Raises:
            ConfigError: Says both sizes.
        """
        if num_ranks != self.num_ranks:
            raise ConfigError(
                f"a cluster of {self.num_nodes} nodes with {self.ranks_per_node} ranks each has "
                f"{self.num_ranks} ranks, not {num_ranks}: change num_nodes, or the input"
            )

    def compute_seconds(
        self, cost: Cost, seq_lens: npt.ArrayLike, num_pairs: npt.ArrayLike | None = None
    ) -> Floats:
        """Forward seconds of sequences of these many tokens on one rank; as `evaluate`."""
        if not isinstance(cost, TransformerCost):
            return evaluate(cost, seq_lens, num_pairs)
        if cost.seconds_per_unit is not None:
            return cost.seconds(seq_lens, num_pairs)
        return cost(seq_lens, num_pairs) * (FLOPS_PER_UNIT / self.flops_per_s)

    def wire_seconds(self, cost: Cost, bag_size: int, ranks_in_node: int | None = None) -> float:
        """Seconds that a token of a sequence costs each rank of its bag in all-to-alls and packing.

        Args:
            cost: Knows the width and the layers of the model.
            bag_size: Ranks of the bag.
            ranks_in_node: Ranks of the bag in a rank's own node. Default: as many as fit.

        Raises:
            ConfigError: The cost model has no width.
        """
        if bag_size == 1:
            return 0.0
        local = min(bag_size, self.ranks_per_node) if ranks_in_node is None else ranks_in_node
        width, num_layers = _shape(cost)
        num_bytes = BYTES_PER_VALUE * VALUES_PER_TOKEN * width * num_layers / bag_size**2
        near, far = (local - 1) / self.intra_bytes_per_s, (bag_size - local)
        pack = 0.0 if self.pack_bytes_per_s is None else bag_size / self.pack_bytes_per_s
        return num_bytes * (near + far / self.inter_bytes_per_s + pack)

    def launch_seconds(self, cost: Cost, bag_size: int) -> float:
        """Seconds that a rank of a bag spends on launching the all-to-alls of a forward pass."""
        if bag_size == 1:
            return 0.0
        return EXCHANGES_PER_LAYER * _shape(cost)[1] * self.latency_s

    def host_seconds(self, cost: Cost, bag_size: int) -> float:
        """Seconds that the host of a rank spends on the pieces of a sequence in its bag."""
        if bag_size == 1 or self.piece_s == 0.0:
            return 0.0
        return self.piece_s * _shape(cost)[1] * bag_size

    def bag_seconds(self, cost: Cost, seq_lens: npt.ArrayLike, bag_size: int) -> Floats:
        """Seconds of sequences of these many tokens on each rank of a bag, without launches."""
        wire = np.asarray(seq_lens, dtype=np.float64) * self.wire_seconds(cost, bag_size)
        return self.compute_seconds(cost, seq_lens) / bag_size + wire

    def nodes_of(self, topology: Topology) -> tuple[Ints, Ints]:
        """(num_bags,) node of each bag's first rank, and the fewest of its ranks in one node."""
        first, sizes = topology.first_ranks, topology.bag_sizes
        last = first + sizes - 1
        node, last_node = first // self.ranks_per_node, last // self.ranks_per_node
        head = (node + 1) * self.ranks_per_node - first
        tail = last - last_node * self.ranks_per_node + 1
        return node, np.where(node == last_node, sizes, np.minimum(head, tail))


def _shape(cost: Cost) -> tuple[int, int]:
    """Width and layers of the model, which decide what its all-to-alls carry."""
    if not isinstance(cost, TransformerCost):
        raise ConfigError(
            f"the wires of a bag carry activations, but {type(cost).__name__} does not know the "
            "width of the model: use a TransformerCost, or bags of one rank"
        )
    return cost.d_model, cost.num_layers
