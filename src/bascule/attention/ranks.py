"""This rank's place among the ranks that attend together."""

import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (
    _resolve_process_group,  # pyright: ignore[reportPrivateImportUsage]
    _set_pg_timeout,
)

from bascule.comm.groups import RankGroup, member_of
from bascule.errors import ConfigError

RING_AXIS, ULYSSES_AXIS = "ring", "ulysses"
_SEPARATOR = "|"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMesh:
    """This rank's place in a mesh of R x U ranks.

    Attributes:
        ring: The ranks that pass keys and values to each other; None if R is 1.
        ulysses: The ranks that share heads; None if U is 1.
        whole: All ranks, by ring rank, then by Ulysses rank; None for one rank.
        name: The names of the three process groups, by which operators find them.
    """

    ring: RankGroup | None
    ulysses: RankGroup | None
    whole: RankGroup | None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        groups = (self.ring, self.ulysses, self.whole)
        names = [group.process_group.group_name if group else "" for group in groups]
        object.__setattr__(self, "name", _SEPARATOR.join(names))

    @classmethod
    def of(cls, mesh: DeviceMesh, *, timeout_s: float | None = None) -> "AttentionMesh":
        """From a DeviceMesh whose axes are called "ring" and "ulysses"; one may be missing.

        Args:
            mesh: The ranks.
            timeout_s: Longest wait of a collective, in seconds; it becomes that of the mesh's
                process groups. None leaves them as they are.

        Raises:
            ConfigError: It has other axes, or they are in the other order.
        """
        names = mesh.mesh_dim_names or ()
        allowed = (RING_AXIS, ULYSSES_AXIS)
        if not names or tuple(name for name in allowed if name in names) != tuple(names):
            raise ConfigError(
                f"a mesh with the axes {names}: attention takes ('ring', 'ulysses'), in this "
                "order, or one of them; choose them with mesh['ring', 'ulysses']"
            )
        parts: dict[str, RankGroup | None] = dict.fromkeys(allowed)
        for name in names:
            if mesh[name].size() > 1:
                parts[name] = member_of(mesh.get_group(name), name)
        several = [part for part in parts.values() if part is not None]
        whole = several[0] if several else None
        if len(several) == 2:
            whole = member_of(mesh._flatten().get_group(), "attention")
        made = cls(parts[RING_AXIS], parts[ULYSSES_AXIS], whole)
        for group in (made.ring, made.ulysses, made.whole):
            if group is not None and timeout_s is not None:
                _set_pg_timeout(timedelta(seconds=timeout_s), group.process_group)
        return made

    @property
    def degrees(self) -> tuple[int, int]:
        """(R, U)."""
        return (self.ring.size if self.ring else 1, self.ulysses.size if self.ulysses else 1)

    @property
    def place(self) -> tuple[int, int]:
        """(ring rank, Ulysses rank) of this rank."""
        return (self.ring.rank if self.ring else 0, self.ulysses.rank if self.ulysses else 0)


@dataclass(frozen=True, slots=True)
class Place:
    """What a traced program needs to know of a mesh: numbers, and the name of the rest.

    Attributes:
        degrees: (R, U).
        place: (ring rank, Ulysses rank) of this rank.
        name: That of the `AttentionMesh`.
    """

    degrees: tuple[int, int]
    place: tuple[int, int]
    name: str


def place_in(mesh: AttentionMesh | DeviceMesh | Place) -> Place:
    """This rank's place in a mesh; for compilers a constant."""
    if isinstance(mesh, Place):
        return mesh
    if isinstance(mesh, AttentionMesh):
        return Place(mesh.degrees, mesh.place, mesh.name)
    return Place(*facts_of(mesh))


def as_attention_mesh(mesh: AttentionMesh | DeviceMesh) -> AttentionMesh:
    """The same for the same DeviceMesh, while its groups exist."""
    return mesh if isinstance(mesh, AttentionMesh) else _of_groups(mesh)


@torch.compiler.assume_constant_result
def facts_of(mesh: DeviceMesh) -> tuple[tuple[int, int], tuple[int, int], str]:
    """The attributes of the place in a mesh: compilers take tuples for constants, not objects."""
    ranks = _of_groups(real_mesh(mesh))
    return ranks.degrees, ranks.place, ranks.name


def real_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh itself: torch 2.13 traces with a stand-in that lacks most of its methods."""
    return getattr(mesh, "real_obj", mesh)


def mesh_named(name: str) -> AttentionMesh:
    """The mesh of that name."""
    ring, ulysses, whole = (_reference_to(part) for part in name.split(_SEPARATOR))
    return _mesh_with(ring, ulysses, whole)


def _reference_to(name: str) -> weakref.ref[dist.ProcessGroup] | None:
    """The group of that name; weak, since what is kept here would outlive its destruction."""
    if not name:
        return None
    return weakref.ref(_resolve_process_group(name))  # pyright: ignore[reportArgumentType]


def _of_groups(mesh: DeviceMesh) -> AttentionMesh:
    """Meshes of the same ranks are equal, also when the groups of one of them are gone."""
    return _mesh_of(mesh, tuple(map(weakref.ref, mesh.get_all_groups())))


@lru_cache(maxsize=16)
def _mesh_of(mesh: DeviceMesh, groups: tuple[weakref.ref[dist.ProcessGroup], ...]) -> AttentionMesh:
    return AttentionMesh.of(mesh)


@lru_cache(maxsize=16)
def _mesh_with(
    ring: weakref.ref[dist.ProcessGroup] | None,
    ulysses: weakref.ref[dist.ProcessGroup] | None,
    whole: weakref.ref[dist.ProcessGroup] | None,
) -> AttentionMesh:
    groups = (reference and reference() for reference in (ring, ulysses, whole))
    named = zip(groups, (RING_AXIS, ULYSSES_AXIS, "attention"), strict=True)
    return AttentionMesh(*(member_of(group, name) if group else None for group, name in named))
