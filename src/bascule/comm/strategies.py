"""Meshes of other degrees over the same ranks: made once, so that a call can choose among them.

A rank keeps its number and its tokens: of U Ulysses x R ring ranks, rank = ring rank * U + Ulysses
rank, whatever U and R.
"""

from collections.abc import Iterable
from functools import lru_cache

import torch
import torch.distributed as dist

from bascule.comm.groups import RankGroup, timeout_of
from bascule.comm.making import new_group
from bascule.comm.meshes import RING_AXIS, ULYSSES_AXIS, AttentionMesh
from bascule.errors import ConfigError
from bascule.plan.sparse.choose_mesh import Degrees, all_degrees


def meshes_over(
    mesh: AttentionMesh, degrees: Iterable[Degrees] | None = None
) -> dict[Degrees, AttentionMesh]:
    """Meshes of other degrees over the ranks of a mesh, and that mesh itself, by (U, R).

    All ranks of the mesh must call, with the same degrees; the groups are kept, and last until
    torch.distributed is destroyed. Two groups for each mesh with both axes, with the timeout of the
    mesh's own.

    Args:
        mesh: The ranks.
        degrees: (Ulysses, ring) of each mesh. Default: all whose product is the number of ranks.

    Raises:
        ConfigError: Some degrees do not fit the number of ranks.
        CommError: A rank did not come in time.
    """
    ring, ulysses = mesh.degrees
    made = {(ulysses, ring): mesh}
    for one in all_degrees(ring * ulysses) if degrees is None else degrees:
        if one[0] * one[1] != ring * ulysses or min(one) < 1:
            raise ConfigError(
                f"{one[0]} x {one[1]} ranks (Ulysses x ring) of {ring * ulysses}: the product must "
                f"be {ring * ulysses}; possible are {all_degrees(ring * ulysses)}"
            )
        if one not in made:
            assert mesh.whole is not None
            made[one] = _mesh_over(mesh.whole, *one)
    return made


@lru_cache(maxsize=64)
def _mesh_over(whole: RankGroup, ulysses_degree: int, ring_degree: int) -> AttentionMesh:
    """The same for the same ranks: groups are never freed."""
    if ring_degree == 1:
        return AttentionMesh(None, whole, whole)
    if ulysses_degree == 1:
        return AttentionMesh(whole, None, whole)
    backend = dist.get_backend(whole.process_group)
    device = torch.device("cpu" if "gloo" in backend else "cuda")
    made_with = timeout_of(whole, device)
    timeout_s = (made_with or dist.default_pg_timeout).total_seconds()
    ring_rank, place = divmod(whole.rank, ulysses_degree)
    in_ring = whole.ranks[place::ulysses_degree]
    first = ring_rank * ulysses_degree
    in_ulysses = whole.ranks[first : first + ulysses_degree]
    return AttentionMesh(
        new_group(in_ring, RING_AXIS, timeout_s, backend=backend),
        new_group(in_ulysses, ULYSSES_AXIS, timeout_s, backend=backend),
        whole,
    )
