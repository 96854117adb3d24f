"""Which mesh a denoising step takes: guidance groups, ring and Ulysses degrees, by predicted time.

A step is B forward passes (guidance branches, or samples) of a transformer. G guidance groups take
ceil(B / G) of them each, one after another; the R x U ranks of a group share the tokens, and one of
those that have most heads counts. Of L tokens of width d, in each layer of a pass, it computes

    24 d^2 L / (R U)                          FLOPs of products with weights        [KnapFormer, 1]
    4 d L^2 / (R U), for an average rank      FLOPs of attention                    [KnapFormer, 2]

sends `BYTES_PER_VALUE` d L / (R U) bytes of each of four tensors to its Ulysses ranks, but for its
own part, in two exchanges, and as many of keys and of values to the next rank of the ring, in each
of R - 1 rounds. `layer_seconds` makes seconds of that, without launches of kernels, which are not
known. At last, groups exchange their outputs, which is small, and taken as a launch. Ranks lie as
in a mesh with axes guidance, ring and Ulysses: neighbours share heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bascule.errors import ConfigError
from bascule.plan.checks import MAX_RANKS, of_type, whole
from bascule.plan.machine import BYTES_PER_VALUE, HardwareProfile, RankWork, Wires, layer_seconds

_MOST_TOKENS = 2**40
_LINEAR, _ATTENTION = 24.0, 4.0
"""FLOPs of a layer: of a token and d^2, and of a pair of tokens and d."""


@dataclass(frozen=True, slots=True)
class DenoisingStep:
    """What a step of a pipeline computes.

    Args:
        num_tokens: L, of a sample, text included.
        num_heads: H.
        head_dim: Values of a head; d is H times that.
        num_layers: Blocks.
        num_passes: B, forward passes of one sample: the guidance branches of all images.

    Raises:
        ConfigError: A number is out of range.
    """

    num_tokens: int
    num_heads: int
    head_dim: int
    num_layers: int
    num_passes: int = 1

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_heads", "head_dim", "num_layers", "num_passes"):
            whole(f"DenoisingStep({name}", getattr(self, name), 1, _MOST_TOKENS)


@dataclass(frozen=True, slots=True)
class InferenceMesh:
    """A mesh for one replica.

    Attributes:
        guidance: Groups.
        ring: Ring ranks of a group.
        ulysses: Ulysses ranks of a group.
        seconds: Of a step, predicted; None without a profile.
    """

    guidance: int
    ring: int
    ulysses: int
    seconds: float | None = None

    def __str__(self) -> str:
        return f"guidance {self.guidance} x ring {self.ring} x Ulysses {self.ulysses}"


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """The mesh that was chosen, and why.

    Attributes:
        meshes: All that are possible, the chosen one first.
        reason: In words.
    """

    meshes: tuple[InferenceMesh, ...]
    reason: str

    @property
    def chosen(self) -> InferenceMesh:
        """The mesh."""
        return self.meshes[0]

    def __str__(self) -> str:
        lines = [f"{self.chosen}: {self.reason}"]
        for mesh in self.meshes if self.chosen.seconds is not None else ():
            assert mesh.seconds is not None
            lines.append(f"  {mesh}: {mesh.seconds * 1e3:.3g} ms a step")
        return "\n".join(lines)


def choose_mesh(
    step: DenoisingStep,
    num_ranks: int,
    *,
    ranks_per_node: int | None = None,
    max_ring_degree: int | None = None,
    profile: HardwareProfile | None = None,
) -> MeshChoice:
    """The mesh of one replica that is predicted to be the fastest.

    Without a profile: as many guidance groups as share the passes evenly, since they exchange
    nothing in a layer; then Ulysses ranks up to the heads, within a node; and a ring for the rest.
    Of equal predictions the first in that order.

    Args:
        step: What is computed.
        num_ranks: All of them are used.
        ranks_per_node: Of how many one node is. Default: all are in one.
        max_ring_degree: Longest ring. Default: any.
        profile: What the machine does in a second.

    Raises:
        ConfigError: No mesh fits, or the profile lacks a number.
    """
    num_ranks = whole("choose_mesh: num_ranks", num_ranks, 1, MAX_RANKS)
    in_node = num_ranks if ranks_per_node is None else ranks_per_node
    in_node = whole("choose_mesh: ranks_per_node", in_node, 1, MAX_RANKS)
    most = num_ranks if max_ring_degree is None else max_ring_degree
    most = whole("choose_mesh: max_ring_degree", most, 1, MAX_RANKS)
    meshes = [
        InferenceMesh(guidance, ring, num_ranks // guidance // ring)
        for guidance in _divisors(num_ranks)
        for ring in _divisors(num_ranks // guidance)
        if guidance <= step.num_passes
        and ring <= most
        and num_ranks // guidance // ring <= step.num_heads
    ]
    if not meshes:
        raise ConfigError(
            f"choose_mesh: {num_ranks} ranks for {step.num_passes} passes, {step.num_heads} heads "
            f"and rings of {most} at most: raise max_ring_degree, use fewer ranks, or give data "
            "replicas their own"
        )
    meshes.sort(key=lambda mesh: (step.num_passes % mesh.guidance > 0, *_order(mesh, in_node)))
    passes = f", of {step.num_passes} {'pass' if step.num_passes == 1 else 'passes'} a step"
    if profile is None:
        return MeshChoice(tuple(meshes), _RULE + passes)
    of_type("choose_mesh: profile", profile, HardwareProfile, "a HardwareProfile, or None")
    timed = [
        InferenceMesh(x.guidance, x.ring, x.ulysses, step_seconds(step, x, in_node, profile))
        for x in meshes
    ]
    timed.sort(key=lambda mesh: mesh.seconds or 0.0)  # stable
    return MeshChoice(tuple(timed), f"the fastest as predicted for {profile.device}{passes}")


def step_seconds(
    step: DenoisingStep, mesh: InferenceMesh, ranks_per_node: int, profile: HardwareProfile
) -> float:
    """Seconds of a step on a mesh.

    Raises:
        ConfigError: The profile lacks a number.
    """
    ring, ulysses, width = mesh.ring, mesh.ulysses, step.num_heads * step.head_dim
    tokens = step.num_tokens / (ring * ulysses)
    heads = -(-step.num_heads // ulysses) / step.num_heads
    sent = BYTES_PER_VALUE * width * tokens
    calls = -(-step.num_passes // mesh.guidance) * step.num_layers
    work = RankWork(
        linear_flops=calls * _LINEAR * tokens * width**2,
        attention_flops=calls * _ATTENTION * step.num_tokens**2 / ring * width * heads,
        heads_bytes=calls * 4 * sent * (ulysses - 1) / ulysses,
        ring_bytes=calls * 2 * sent * (ring - 1),
        num_exchanges=2 * calls if ulysses > 1 else 0,
        num_rounds=calls * (ring - 1),
        num_kernels=0,
    )
    seconds = layer_seconds([work], Wires(ring, ulysses, ranks_per_node), profile).total
    return seconds + ((profile.launch_s or 0.0) if mesh.guidance > 1 else 0.0)


_RULE = (
    "guidance groups first, which exchange nothing in a layer; then Ulysses ranks up to the heads "
    "within a node; a ring for the rest (a rule: give a profile to compare predictions)"
)


def _order(mesh: InferenceMesh, ranks_per_node: int) -> tuple[int, bool, int]:
    return -mesh.guidance, mesh.ulysses > ranks_per_node, -mesh.ulysses


def _divisors(number: int) -> Sequence[int]:
    candidates = np.arange(1, number + 1)
    return candidates[number % candidates == 0].tolist()
