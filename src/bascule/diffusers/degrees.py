"""Degrees of a mesh, and the groups of this rank's replica."""

import os
from dataclasses import astuple, dataclass, replace
from math import prod
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bascule.comm.groups import RankGroup, member_of, resolve
from bascule.comm.mesh import RING_AXIS, ULYSSES_AXIS, AttentionMesh, group_of, mesh_over, place_on
from bascule.errors import ConfigError
from bascule.machine.cluster import HardwareProfile
from bascule.machine.mesh_choice import DenoisingStep, MeshChoice, choose_mesh

AXES = "data", "guidance", RING_AXIS, ULYSSES_AXIS  # outermost first


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of ranks along the axes of a mesh."""

    data: int = 1  # replicas
    guidance: int = 1  # guidance groups of a replica
    ring: int = 1  # ring ranks of a guidance group
    ulysses: int = 1  # Ulysses ranks of a ring rank

    def __str__(self) -> str:
        outer = {"data": self.data, "guidance": self.guidance}
        axes = [f"{axis} {degree}" for axis, degree in outer.items() if degree > 1]
        return " x ".join([*axes, f"ring {self.ring}", f"Ulysses {self.ulysses}"])


ONE_RANK = Shape()


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """The ranks that make the same images together."""

    whole: RankGroup | None  # ordered by guidance, ring and Ulysses rank; None for one rank
    branches: RankGroup | None  # the rank at this rank's place in each guidance group; None for one
    mesh: AttentionMesh  # this rank's guidance group


@dataclass(frozen=True, slots=True)
class AutoMesh:
    """Lets `parallelize` choose degrees by these facts; all ranks form one replica.

    Attributes:
        num_passes: Forward passes of single samples per denoising step: 2 with guidance, times the
            images of a prompt if one call computes them all.
        num_tokens: Tokens of a sample, text included; needed with a profile.
        profile: Speeds of the machine. Default: none; a rule chooses, see `choose_mesh`.
        max_ring_degree: Largest ring degree. Default: no limit.
        ranks_per_node: Ranks per node. Default: torchrun's LOCAL_WORLD_SIZE, else all ranks.
    """

    num_passes: int = 1
    num_tokens: int | None = None
    profile: HardwareProfile | None = None
    max_ring_degree: int | None = None
    ranks_per_node: int | None = None

    def choose(self, model: nn.Module, num_ranks: int) -> tuple[Shape, MeshChoice]:
        """Return the degrees for a model on `num_ranks` ranks, and the reasons for them."""
        config: Any = getattr(model, "config", None)
        counts = "num_layers", "num_single_layers", "num_refiner_layers"
        num_layers = sum(getattr(config, name, None) or 0 for name in counts)
        num_heads: Any = getattr(config, "num_attention_heads", None)
        head_dim: Any = getattr(config, "attention_head_dim", None)
        needed: dict[str, Any] = {"num_attention_heads": num_heads}
        if self.profile is not None:
            needed |= {"attention_head_dim": head_dim, "num_layers": num_layers}
            needed |= {"num_tokens": self.num_tokens}
        missing = " and ".join(name for name, value in needed.items() if not value)
        if missing:
            wrong = f"mesh='auto': AutoMesh and the config of {type(model).__name__} lack {missing}"
            raise ConfigError(f"{wrong}: add it, or give degrees")
        sizes = self.num_tokens or 1, num_heads, head_dim or 1, num_layers or 1
        step = DenoisingStep(*sizes, self.num_passes)
        ranks_per_node = self.ranks_per_node
        if ranks_per_node is None:
            ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
        settings: Any = {"max_ring_degree": self.max_ring_degree, "profile": self.profile}
        choice = choose_mesh(step, num_ranks, ranks_per_node=ranks_per_node, **settings)
        mesh = choice.chosen
        return Shape(1, mesh.guidance, mesh.ring, mesh.ulysses), choice


def ranks_of(mesh: DeviceMesh | None) -> RankGroup | None:
    """Return the group of a mesh's ranks, or of all ranks; None for one rank."""
    if mesh is None:
        group = member_of(resolve(None), "world")
        return group if group.size > 1 else None
    place_on(mesh, AXES)
    if set(mesh.mesh_dim_names or ()) <= {RING_AXIS, ULYSSES_AXIS}:
        return AttentionMesh.of(mesh).whole
    ranks = mesh.mesh.flatten().tolist()
    return group_of(ranks) if len(ranks) > 1 else None


def shape_of(mesh: DeviceMesh | None, degrees: Shape) -> Shape:
    """Return the shape of a mesh; without a mesh, the degrees, if they fit the number of ranks."""
    if mesh is not None:
        return Shape(**dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True)))
    num_ranks = dist.get_world_size()
    if min(astuple(degrees)) < 1 or prod(astuple(degrees)) != num_ranks:
        wrong = f"{degrees} on {num_ranks} ranks: the product of degrees must be {num_ranks}"
        raise ConfigError(f"{wrong}: use ulysses_degree={num_ranks}, or a mesh of some of them")
    return degrees


def replica_of(shape: Shape, mesh: DeviceMesh | None) -> Replica:
    """Return this rank's replica; its ranks call this together, as it may make a process group."""
    if mesh is not None and set(mesh.mesh_dim_names or ()) <= {RING_AXIS, ULYSSES_AXIS}:
        attending = AttentionMesh.of(mesh)
        return Replica(attending.whole, None, attending)
    size = shape.guidance * shape.ring * shape.ulysses
    if size == 1:
        return Replica(None, None, AttentionMesh(None, None, None))
    ranks = list(range(dist.get_world_size())) if mesh is None else mesh.mesh.flatten().tolist()
    first = ranks.index(dist.get_rank()) // size * size
    return replica_over(group_of(ranks[first : first + size]), shape)


def replica_over(whole: RankGroup, shape: Shape) -> Replica:
    """Return the replica that consists of a group's ranks; needs no communication."""
    num_attending, alone = shape.ring * shape.ulysses, AttentionMesh(None, None, None)
    if whole.size == 1:
        return Replica(None, None, alone)

    def part(places: range, name: str) -> RankGroup:
        control = whole.control and whole.control.part(places, name)
        return replace(whole.part(places, name), control=control)

    group, place = divmod(whole.rank, num_attending)
    branches = None
    if shape.guidance > 1:
        branches = part(range(place, whole.size, num_attending), "guidance")
    if num_attending == 1:
        return Replica(whole, branches, alone)
    first = group * num_attending
    members = part(range(first, first + num_attending), "attention")
    return Replica(whole, branches, mesh_over(members, ring=shape.ring, ulysses=shape.ulysses))
