"""Choose the mesh of a denoising step by predicted time: guidance groups, ring and Ulysses degrees.

Each of G guidance groups computes ceil(B / G) of B forward passes, one after another. The R x U
ranks of a group share tokens; neighbours share heads. At the end, groups exchange their outputs.
"""

import math
from dataclasses import dataclass, replace

from bascule.checks import MAX_RANKS, fields, of_type, whole
from bascule.errors import ConfigError
from bascule.machine.cluster import BagShape, HardwareProfile, Work
from bascule.quantities import seconds

_RULE = (
    "guidance groups first, which exchange nothing in a layer; then Ulysses ranks up to the heads "
    "within a node; a ring for the rest (a rule: give a profile to compare predictions)"
)


@dataclass(frozen=True, slots=True)
class DenoisingStep:
    """The work of a pipeline's denoising step: tokens L per sample, heads, layers, passes B."""

    num_tokens: int  # of a sample, text included
    num_heads: int
    head_dim: int
    num_layers: int
    num_passes: int = 1  # the guidance branches of all images

    def __post_init__(self) -> None:
        fields(self, **dict.fromkeys(self.__dataclass_fields__, (whole, 1, 2**40)))


@dataclass(frozen=True, slots=True)
class InferenceMesh:
    """A mesh of one replica: guidance groups, and the ring and Ulysses degrees of each group."""

    guidance: int
    ring: int
    ulysses: int
    seconds: float | None = None  # of a step, predicted; None without a profile

    def __str__(self) -> str:
        return f"guidance {self.guidance} x ring {self.ring} x Ulysses {self.ulysses}"


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """All possible meshes, the chosen mesh first, and the reason for it in words."""

    meshes: tuple[InferenceMesh, ...]
    reason: str

    @property
    def chosen(self) -> InferenceMesh:
        """The chosen mesh."""
        return self.meshes[0]

    def __str__(self) -> str:
        lines = [f"{self.chosen}: {self.reason}"]
        for mesh in self.meshes:
            if mesh.seconds is not None:
                lines.append(f"  {mesh}: {seconds(mesh.seconds)} per step")
        return "\n".join(lines)


def choose_mesh(
    step: DenoisingStep,
    num_ranks: int,
    *,
    ranks_per_node: int | None = None,
    max_ring_degree: int | None = None,
    profile: HardwareProfile | None = None,
) -> MeshChoice:
    """Choose the mesh of one replica that is predicted to be the fastest.

    Without a profile, it prefers guidance groups that share passes evenly, because these exchange
    nothing in a layer; then Ulysses up to the heads, within a node; then a ring. Ties likewise.
    """
    num_ranks = whole("choose_mesh: num_ranks", num_ranks, 1, MAX_RANKS)
    in_node = num_ranks if ranks_per_node is None else ranks_per_node
    in_node = whole("choose_mesh: ranks_per_node", in_node, 1, MAX_RANKS)
    most = num_ranks if max_ring_degree is None else max_ring_degree
    most = whole("choose_mesh: max_ring_degree", most, 1, MAX_RANKS)
    meshes = [
        InferenceMesh(guidance, ring=ring, ulysses=num_ranks // guidance // ring)
        for guidance in range(1, min(num_ranks, step.num_passes) + 1)
        if num_ranks % guidance == 0
        for ring in range(1, min(num_ranks, most) + 1)
        if num_ranks // guidance % ring == 0 and num_ranks // guidance // ring <= step.num_heads
    ]
    if not meshes:
        wrong = f"choose_mesh: {num_ranks} ranks, {step.num_passes} passes, {step.num_heads} heads"
        raise ConfigError(f"{wrong}, rings up to {most}: raise max_ring_degree, or use fewer ranks")

    def order(mesh: InferenceMesh) -> tuple[bool, int, bool, int]:
        is_uneven = step.num_passes % mesh.guidance > 0
        return is_uneven, -mesh.guidance, mesh.ulysses > in_node, -mesh.ulysses

    meshes.sort(key=order)
    passes = f", of {step.num_passes} {'pass' if step.num_passes == 1 else 'passes'} a step"
    if profile is None:
        return MeshChoice(tuple(meshes), _RULE + passes)
    of_type("choose_mesh: profile", profile, HardwareProfile, "a HardwareProfile, or None")
    timed = [replace(mesh, seconds=step_seconds(step, mesh, in_node, profile)) for mesh in meshes]
    timed.sort(key=lambda mesh: mesh.seconds or 0.0)  # stable
    return MeshChoice(tuple(timed), f"the fastest as predicted for {profile.device}{passes}")


def mesh_of_block(degree: int, num_heads: int, num_groups: int = 1) -> InferenceMesh:
    """Return a server's mesh: guidance groups, then Ulysses ranks up to the heads, then a ring."""
    groups = math.gcd(degree, num_groups)
    ulysses = min(degree // groups, 1 << (max(num_heads, 1).bit_length() - 1))
    return InferenceMesh(groups, ring=degree // groups // ulysses, ulysses=ulysses)


def step_seconds(
    step: DenoisingStep, mesh: InferenceMesh, ranks_per_node: int, profile: HardwareProfile
) -> float:
    """Predict the seconds of a step on a mesh, without kernel launches, which are not known."""
    bag = BagShape.aligned(mesh.ring, mesh.ulysses, ranks_per_node)
    width, tokens = step.num_heads * step.head_dim, step.num_tokens / bag.size
    heads = -(-step.num_heads // bag.ulysses) / step.num_heads
    calls = -(-step.num_passes // mesh.guidance) * step.num_layers
    matmul, attention = profile.numbers_of("matmul_flops_per_s", "attention_flops_per_s")
    # FLOPs of a layer: 24 of a token and d^2, 4 of a pair of tokens and d (KnapFormer, 1 and 2).
    linear_s = calls * 24.0 * tokens * width**2 / matmul
    attention_s = calls * 4.0 * step.num_tokens**2 / bag.ring * width * heads / attention
    work = Work.of_layers(bag, calls, calls * tokens * width, linear_s + attention_s, attention_s)
    seconds = float(profile.forward_seconds([work], bag).total)
    return seconds + ((profile.launch_s or 0.0) if mesh.guidance > 1 else 0.0)
