"""The process groups of compute bags: of one fixed topology, or of all that "auto" may choose."""

from collections.abc import Sequence

import torch.distributed as dist

from bascule.comm.groups import RankGroup, new_group
from bascule.plan.cluster import Cluster
from bascule.plan.topology import Topology


def possible_bags(
    rank: int, topology: Topology | str, cluster: Cluster | None
) -> list[tuple[int, range]]:
    """(size, ranks) of the bags that a rank can be in; as many on every rank.

    Args:
        rank: The rank.
        topology: The bags; a string stands for "auto": aligned power-of-two subgroups of a node.
        cluster: Says what a node is; needed for "auto".
    """
    if isinstance(topology, Topology):
        if topology.bag_sizes.max() == 1:
            return []
        bag = topology.bags[topology.bag_of_rank[rank]]
        return [(len(bag), range(bag[0], bag[-1] + 1))]
    assert cluster is not None
    node_size = cluster.ranks_per_node
    node = rank // node_size * node_size
    sizes = [1 << power for power in range(1, node_size.bit_length())]
    firsts = [node + (rank - node) // size * size for size in sizes]
    # Where a size does not divide the node, its last ranks make a smaller group, never used.
    return [
        (size, range(first, min(first + size, node + node_size)))
        for size, first in zip(sizes, firsts, strict=True)
    ]


def make_bag_groups(
    group: RankGroup, bags: Sequence[tuple[int, range]], timeout_s: float
) -> dict[int, RankGroup]:
    """A process group for each size of bag.

    A bag of one gets a group too: torch names a new group after the number of groups that a rank
    has, and ranks that differ in it can never again make one together (torch 2.13, local sync).

    Args:
        group: All ranks; serves as the group of a bag of all.
        bags: What `possible_bags` gave.
        timeout_s: Longest wait of a collective on them, in seconds.
    """
    backend = dist.get_backend(group.process_group)
    made: dict[int, RankGroup] = {}
    for size, bag in bags:
        ranks = [group.ranks[rank] for rank in bag]
        is_all = len(bag) == group.size
        made[size] = group if is_all else new_group(ranks, "bag", timeout_s, backend=backend)
    return made
