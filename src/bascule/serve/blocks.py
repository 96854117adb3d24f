"""Blocks of ranks that compute a request together: their meshes, and a rank's place in them."""

from collections.abc import Mapping
from dataclasses import replace

from bascule.comm.groups import RankGroup
from bascule.diffusers.degrees import Replica, Shape, replica_over
from bascule.machine.mesh_choice import mesh_of_block
from bascule.plan.requests import Block


def shape_of_block(degree: int, num_heads: int, num_groups: int = 1) -> Shape:
    """Return the shape of a block's mesh."""
    mesh = mesh_of_block(degree, num_heads, num_groups)
    return Shape(1, mesh.guidance, mesh.ring, mesh.ulysses)


def places_of(
    control: RankGroup, attending: RankGroup, shapes: Mapping[int, Shape], size: int = 1
) -> dict[Block, Replica]:
    """Return this rank's place in each of its blocks, without communication.

    Both groups have all ranks; `control` is on the host. `shapes` has the mesh of a block by its
    degree. If blocks count replicas, these have `size` ranks each.
    """
    unit, places = control.rank // size, dict[Block, Replica]()
    for degree, shape in shapes.items():
        block = Block(unit // degree * degree, degree)
        ranks = range(block.first * size, (block.first + degree) * size)
        if ranks.stop <= control.size:
            whole = attending.part(ranks, str(ranks))
            whole = replace(whole, control=control.part(ranks, str(ranks)))
            places[block] = replica_over(whole, shape)
    return places
