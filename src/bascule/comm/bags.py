"""The process groups of compute bags: of one fixed topology, or of all that "auto" may choose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bascule.comm.groups import RankGroup, member_of
from bascule.plan.costs.hardware import Cluster
from bascule.plan.topology.spec import Topology


@dataclass(frozen=True, slots=True)
class BagGroups:
    """The groups of a rank inside the bags that it can be in.

    Attributes:
        rank: The rank.
        ulysses: For each number of ranks that share heads, those that do so with this one.
        ring: The ranks that pass keys and values to each other; None if no bag has a ring.
    """

    rank: int
    ulysses: Mapping[int, RankGroup]
    ring: RankGroup | None

    def of(self, topology: Topology) -> tuple[RankGroup | None, RankGroup | None]:
        """The Ulysses group and the ring in the bag of a topology; None where it is one rank."""
        groups = topology.ulysses_groups
        degree = int(groups.bag_sizes[groups.bag_of_rank[self.rank]])
        has_ring = topology.ring_degrees[topology.bag_of_rank[self.rank]] > 1
        return self.ulysses[degree] if degree > 1 else None, self.ring if has_ring else None


def make_bag_groups(
    group: RankGroup, topology: Topology | str, cluster: Cluster | None
) -> BagGroups:
    """The groups: parts of that of all ranks, so nothing is made, and no rank waits.

    Args:
        group: All ranks; serves as a group of all.
        topology: The bags; a string stands for "auto": aligned power-of-two subgroups of a node.
        cluster: Says what a node is; needed for "auto".
    """

    def make(ranks: Sequence[int], name: str) -> RankGroup:
        if len(ranks) == group.size:
            return group
        return member_of(group.process_group, name, ranks=[group.ranks[rank] for rank in ranks])

    if not isinstance(topology, Topology):
        assert cluster is not None
        aligned = _aligned_groups(group.rank, cluster.ranks_per_node)
        ulysses = {size: make(ranks, "bag") for size, ranks in aligned if len(ranks) > 1}
        return BagGroups(group.rank, ulysses, None)
    groups = topology.ulysses_groups
    bag, ring = groups.bags[groups.bag_of_rank[group.rank]], topology.ring(group.rank)
    ulysses = {len(bag): make(bag, "bag")} if len(bag) > 1 else {}
    return BagGroups(group.rank, ulysses, make(ring, "ring") if len(ring) > 1 else None)


def _aligned_groups(rank: int, node_size: int) -> list[tuple[int, Sequence[int]]]:
    """(degree, ranks) of the power-of-two subgroups of a node that a rank can be in."""
    node = rank // node_size * node_size
    sizes = [1 << power for power in range(1, node_size.bit_length())]
    firsts = [node + (rank - node) // size * size for size in sizes]
    # Where a size does not divide the node, its last ranks make a smaller group, never used.
    return [
        (size, range(first, min(first + size, node + node_size)))
        for size, first in zip(sizes, firsts, strict=True)
    ]
