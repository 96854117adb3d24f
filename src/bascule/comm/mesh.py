"""Meshes of ranks that attend together, and this rank's place in them."""

import math
import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bascule.comm.groups import (
    Cache,
    RankGroup,
    device_of,
    member_of,
    new_group,
    resolve,
    this_world,
    timeout_of,
)
from bascule.comm.transforms import constant_result
from bascule.errors import CommError, ConfigError
from bascule.plan.topology import Degrees, all_degrees

RING_AXIS, ULYSSES_AXIS = "ring", "ulysses"
_NUM_CACHED = 256  # most calls that a mesh remembers


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMesh:
    """Mesh of R x U ranks and this rank's place in it."""

    ring: RankGroup | None  # the ranks that pass keys and values to each other; None if R is 1
    ulysses: RankGroup | None  # the ranks that share heads; None if U is 1
    whole: RankGroup | None  # all, by ring rank, then by Ulysses rank; None for one rank
    name: str = field(init=False)  # groups and orders of ranks, by which operators find the mesh
    # what calls of attention on this mesh need, by their signature; by their block-sparse plan
    cache: Cache[Hashable, Any] = field(
        default_factory=lambda: Cache(_NUM_CACHED), init=False, repr=False
    )
    tables: "weakref.WeakKeyDictionary[Any, Cache[Hashable, Any]]" = field(
        default_factory=weakref.WeakKeyDictionary, init=False, repr=False
    )

    def __post_init__(self) -> None:
        names = ["" if group is None else f"{group.key} {group.ranks}" for group in self.groups]
        object.__setattr__(self, "name", "|".join(names))
        if any(self.groups):
            this_world().keep(self)
        _ = self.degrees  # the groups cache their sizes, which compilers cannot trace

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy a mesh of this rank alone; the groups of other meshes refuse."""
        return AttentionMesh, (self.ring, self.ulysses, self.whole)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "AttentionMesh":
        """Return the AttentionMesh of a DeviceMesh with axes "ring" and "ulysses".

        One axis may be missing; other axes are replicas; ranks may have any order. ConfigError: the
        mesh has neither axis, or has them in another order, or does not contain this rank.
        """
        if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"a mesh is a {type(mesh).__name__}: give a DeviceMesh")
        allowed = (RING_AXIS, ULYSSES_AXIS)
        mesh = named_part(mesh, allowed)
        coordinate = place_on(mesh, allowed)
        parts: dict[str, RankGroup | None] = dict.fromkeys(allowed)
        for axis, name in enumerate(mesh.mesh_dim_names or ()):
            if mesh.mesh.shape[axis] > 1:
                along = mesh.mesh.movedim(axis, -1)
                others = [place for at, place in enumerate(coordinate) if at != axis]
                ranks = along[tuple(others)].tolist()
                parts[name] = member_of(mesh.get_group(name), name, ranks=ranks)
        several = [part for part in parts.values() if part is not None]
        whole = several[0] if several else None
        if len(several) == 2:
            group = mesh._flatten().get_group()
            whole = member_of(group, "attention", ranks=mesh.mesh.flatten().tolist())
        return cls(parts[RING_AXIS], parts[ULYSSES_AXIS], whole)

    @property
    def groups(self) -> tuple[RankGroup | None, RankGroup | None, RankGroup | None]:
        """The groups of ring ranks, of Ulysses ranks, and of all ranks."""
        return self.ring, self.ulysses, self.whole

    @property
    def degrees(self) -> Degrees:
        """Ring degree and Ulysses degree, (R, U)."""
        return (self.ring.size if self.ring else 1, self.ulysses.size if self.ulysses else 1)

    @property
    def rank(self) -> int:
        """Index of this rank among all ranks of the mesh."""
        return 0 if self.whole is None else self.whole.rank

    @property
    def place(self) -> tuple[int, int]:
        """(ring rank, Ulysses rank) of this rank."""
        return (self.ring.rank if self.ring else 0, self.ulysses.rank if self.ulysses else 0)

    @property
    def exists(self) -> bool:
        """False if one of its process groups was destroyed."""
        return all(group is None or group.reference() for group in self.groups)


def named_part(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Return the part of a mesh that has these axes, around this rank."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name in axes)
    is_part = names and len(names) < mesh.ndim and mesh.get_coordinate() is not None
    return mesh[names] if is_part else mesh


def place_on(mesh: DeviceMesh, axes: tuple[str, ...]) -> Sequence[int]:
    """Return this rank's coordinates; refuse a mesh with other axes, or without this rank."""
    names = mesh.mesh_dim_names or ()
    if not names or tuple(name for name in axes if name in names) != tuple(names):
        wrong = f"a mesh with the axes {names}: give {axes} or some of them, in this order"
        raise ConfigError(f"{wrong}: transpose its tensor of ranks, or name other axes")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        wrong = f"rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.tolist()}"
        raise ConfigError(f"{wrong}: call this only on ranks of the mesh")
    return coordinate


class Place(NamedTuple):
    """Degrees, this rank's place and the name of a mesh: constants of compiled graphs."""

    degrees: Degrees  # (R, U)
    place: tuple[int, int]  # (ring rank, Ulysses rank) of this rank
    name: str  # of the `AttentionMesh`


def place_in(mesh: AttentionMesh | DeviceMesh) -> Place:
    """Return this rank's place in a mesh, a constant in compiled graphs."""
    if isinstance(mesh, AttentionMesh):
        return Place(mesh.degrees, mesh.place, mesh.name)
    if mesh is None or isinstance(mesh, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"mesh={mesh!r}: give an AttentionMesh or a DeviceMesh")
    return Place(*facts_of(mesh))


def as_attention_mesh(mesh: AttentionMesh | DeviceMesh) -> AttentionMesh:
    """Return the AttentionMesh of a DeviceMesh, made once for its process groups."""
    if isinstance(mesh, AttentionMesh):
        return mesh
    key, world = (mesh, *map(weakref.ref, mesh.get_all_groups())), this_world()
    if key not in world.device_meshes:
        world.device_meshes[key] = AttentionMesh.of(mesh)
    return world.device_meshes[key]


def mesh_of_all(*, ring: int, ulysses: int) -> AttentionMesh:
    """Return all R x U ranks as a mesh, in a shared group. Rank = ring rank * U + Ulysses rank."""
    if resolve(None).size() == 1:
        return AttentionMesh(None, None, None)
    return mesh_over(group_of(range(dist.get_world_size())), ring=ring, ulysses=ulysses)


def group_of(ranks: Sequence[int]) -> RankGroup:
    """Return a group of two or more global ranks in this order; made once, by all of them."""

    def make() -> RankGroup:
        world = member_of(resolve(None), "world")
        timeout = timeout_of(world.process_group, device_of(world)) or dist.default_pg_timeout
        made = new_group(ranks, "attention", timeout.total_seconds())
        return member_of(made.process_group, made.name, ranks=ranks)

    return this_world().cached((group_of, tuple(ranks)), make, lambda group: not group.is_ended)


def meshes_over(
    mesh: AttentionMesh, degrees: Iterable[Degrees] | None = None
) -> dict[Degrees, AttentionMesh]:
    """Return meshes of other degrees over the ranks of a mesh, and that mesh itself, by (R, U).

    No collective. A rank keeps its number and tokens. Default: all degrees for this many ranks.
    """
    made = {mesh.degrees: mesh}
    size = math.prod(mesh.degrees)
    for pair in all_degrees(size) if degrees is None else degrees:
        if pair[0] * pair[1] != size or min(pair) < 1:
            wrong = f"{pair[0]} x {pair[1]} (ring x Ulysses) on {size} ranks"
            raise ConfigError(f"{wrong}: the product must be {size}, as in {all_degrees(size)}")
        if pair not in made:
            assert mesh.whole is not None
            made[pair] = mesh_over(mesh.whole, ring=pair[0], ulysses=pair[1])
    return made


def mesh_over(whole: RankGroup, *, ring: int, ulysses: int) -> AttentionMesh:
    """Return a group of R x U ranks as a mesh. No collective."""
    if ring == 1:
        return AttentionMesh(None, whole, whole)
    if ulysses == 1:
        return AttentionMesh(whole, None, whole)
    ring_rank, place = divmod(whole.rank, ulysses)
    first = ring_rank * ulysses
    return AttentionMesh(
        whole.part(range(place, whole.size, ulysses), RING_AXIS),
        whole.part(range(first, first + ulysses), ULYSSES_AXIS),
        whole,
    )


@constant_result
def facts_of(mesh: DeviceMesh) -> tuple[tuple[int, int], tuple[int, int], str]:
    """Return the fields of `Place`: compilers accept tuples as constants, not objects."""
    # Torch 2.13 traces with a stand-in that lacks most methods.
    ranks = as_attention_mesh(getattr(mesh, "real_obj", mesh))
    return ranks.degrees, ranks.place, ranks.name


def mesh_named(name: str) -> AttentionMesh:
    """Return the mesh of that name; CommError if its groups are gone."""
    if name == _alone().name:
        return _alone()
    mesh = this_world().meshes.get(name) if dist.is_initialized() else None
    if mesh is None or not mesh.exists:
        raise CommError(
            "a process group of the mesh was destroyed: make it again, after init_process_group"
        )
    return mesh


@lru_cache(maxsize=1)
def _alone() -> AttentionMesh:
    return AttentionMesh(None, None, None)
