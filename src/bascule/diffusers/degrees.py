"""This rank's place among the ranks of a pipeline: its replica, its guidance group, its mesh."""

from dataclasses import dataclass
from typing import Any, TypedDict

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bascule.comm.groups import RankGroup, member_of, resolve
from bascule.comm.mesh import RING_AXIS, ULYSSES_AXIS, AttentionMesh, group_of, mesh_over
from bascule.errors import ConfigError
from bascule.plan.checks import is_int

DATA_AXIS, GUIDANCE_AXIS = "data", "guidance"
AXES = DATA_AXIS, GUIDANCE_AXIS, RING_AXIS, ULYSSES_AXIS
"""Of a mesh, outermost first."""


class Degrees(TypedDict, total=False):
    """Ranks along each axis; those that are left out are 1.

    Attributes:
        data_degree: Replicas, each with prompts and noise of its own.
        guidance_degree: Groups of ranks in a replica, each for a part of the guidance branches.
        ring_degree: Ranks of a group that pass keys and values around.
        ulysses_degree: Ranks of a group that share heads.
    """

    data_degree: int | None
    guidance_degree: int | None
    ring_degree: int | None
    ulysses_degree: int | None


@dataclass(frozen=True, slots=True)
class Shape:
    """How many ranks there are along each axis of a mesh.

    Attributes:
        data: Replicas.
        guidance: Guidance groups of each.
        ring: Ring ranks of each of these.
        ulysses: Ulysses ranks.
    """

    data: int = 1
    guidance: int = 1
    ring: int = 1
    ulysses: int = 1

    def __str__(self) -> str:
        outer = {"data": self.data, "guidance": self.guidance}
        said = [f"{axis} {degree}" for axis, degree in outer.items() if degree > 1]
        return " x ".join([*said, f"ring {self.ring}", f"Ulysses {self.ulysses}"])

    @property
    def num_attending(self) -> int:
        """Ranks of a guidance group."""
        return self.ring * self.ulysses

    @property
    def num_in_replica(self) -> int:
        """Ranks of a replica."""
        return self.guidance * self.num_attending


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """The ranks that make the same images together, and this rank's place among them.

    Attributes:
        whole: All of them, by guidance group, ring rank and Ulysses rank; None for one rank.
        branches: One rank of each guidance group, those at this rank's place; None for one group.
        mesh: This rank's guidance group.
    """

    whole: RankGroup | None
    branches: RankGroup | None
    mesh: AttentionMesh


def agreeing_on(mesh: DeviceMesh | None) -> RankGroup | None:
    """The ranks that are given the same: those of a mesh, or all; None for one.

    Raises:
        ConfigError: The mesh has other axes, or they are in another order, or this rank is not in
            it.
    """
    if mesh is None:
        group = member_of(resolve(None), "world")
        return group if group.size > 1 else None
    names = mesh.mesh_dim_names or ()
    if not names or tuple(name for name in AXES if name in names) != tuple(names):
        raise ConfigError(
            f"a mesh with the axes {names}: parallelize takes {AXES}, in this order, or some of "
            "them; transpose its tensor of ranks, or choose axes"
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.tolist()}: make the "
            "call on its ranks only"
        )
    if set(names) <= {RING_AXIS, ULYSSES_AXIS}:
        return AttentionMesh.of(mesh).whole
    ranks = mesh.mesh.flatten().tolist()
    return group_of(ranks) if len(ranks) > 1 else None


def shape_of(mesh: DeviceMesh | None, degrees: Degrees) -> Shape:
    """The degrees that a user gave, or those of a mesh.

    Raises:
        ConfigError: They do not fit the number of ranks, or both are given.
    """
    given: dict[str, Any] = {f"{axis}_degree": None for axis in AXES} | {**degrees}
    if len(given) > len(AXES):
        raise ConfigError(f"parallelize has no argument {list(given)[len(AXES)]!r}: leave it out")
    if mesh is not None:
        if any(degree is not None for degree in given.values()):
            raise ConfigError("parallelize: give a mesh or degrees, not both")
        return Shape(**dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True)))
    values = [1 if degree is None else degree for degree in given.values()]
    shape, num_ranks = None, dist.get_world_size()
    if all(is_int(one) and one >= 1 for one in values):
        shape = Shape(*values)
    if shape is None or shape.data * shape.num_in_replica != num_ranks:
        told = {**given, "ring_degree": values[2], "ulysses_degree": values[3]}
        said = " x ".join(f"{name} {one!r}" for name, one in told.items() if one is not None)
        raise ConfigError(
            f"{said} on {num_ranks} ranks: the product must be {num_ranks}, of integers, as with "
            f"ulysses_degree={num_ranks}; for some of the ranks give a mesh"
        )
    return shape


def replica_of(shape: Shape, mesh: DeviceMesh | None) -> Replica:
    """This rank's replica; its ranks meet where its process group was not made before.

    Args:
        shape: As `shape_of` gave it.
        mesh: Its ranks. Default: all ranks, in their order.
    """
    if mesh is not None and set(mesh.mesh_dim_names or ()) <= {RING_AXIS, ULYSSES_AXIS}:
        place = AttentionMesh.of(mesh)
        return Replica(place.whole, None, place)
    size, own = shape.num_in_replica, shape.num_attending
    if size == 1:
        return Replica(None, None, AttentionMesh(None, None, None))
    every = list(range(dist.get_world_size())) if mesh is None else mesh.mesh.flatten().tolist()
    first = every.index(dist.get_rank()) // size * size
    whole = group_of(every[first : first + size])
    group, place = divmod(whole.rank, own)
    branches = None
    if shape.guidance > 1:
        branches = whole.part(range(place, size, own), GUIDANCE_AXIS)
    if own == 1:
        return Replica(whole, branches, AttentionMesh(None, None, None))
    attending = whole.part(range(group * own, group * own + own), "attention")
    return Replica(whole, branches, mesh_over(attending, shape.ring, shape.ulysses))
