"""Tokens and bytes of a forward pass on a mesh, computed from shapes.

Shapes: B batch, H query heads, K key-value heads, T tokens of a rank, D head width; R ring ranks, U
Ulysses ranks.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bascule.attention.api import SequenceLayout
from bascule.errors import ConfigError
from bascule.integrations.diffusers.forward import Attended, AttentionShape
from bascule.integrations.diffusers.hooks import SplitModel
from bascule.integrations.diffusers.sparse.layers import SparseLayer
from bascule.plan.head_shares import HeadShares
from bascule.plan.traffic import Traffic

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class MeshCost:
    """What a mesh sends in a forward pass.

    Attributes:
        ring_degree: R.
        ulysses_degree: U.
        tokens: Of each rank.
        traffic: What each rank sends to others in all attentions.
    """

    ring_degree: int
    ulysses_degree: int
    tokens: tuple[int, ...]
    traffic: tuple[Traffic, ...]

    @property
    def busiest_bytes(self) -> int:
        """Sent by the rank that sends most."""
        return max(sent.total for sent in self.traffic)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The mesh of a model, the last forward pass on it, and what other meshes would send.

    Attributes:
        model: Name of its class.
        lengths: Tokens of each segment.
        num_attentions: Over the mesh, in the forward pass.
        chosen: The mesh in use.
        others: The other meshes of as many ranks that the heads allow, fewest bytes first; none for
            block-sparse attention, whose bytes follow from plans.
        sparse: The layers of block-sparse attention, in their order.
    """

    model: str
    lengths: Mapping[str, int]
    num_attentions: int
    chosen: MeshCost
    others: tuple[MeshCost, ...]
    sparse: tuple[SparseLayer, ...] = ()

    def __str__(self) -> str:
        chosen, lengths = self.chosen, ", ".join(f"{n} of {k}" for k, n in self.lengths.items())
        lines = [
            f"{self.model}: ring {chosen.ring_degree} x Ulysses {chosen.ulysses_degree}",
            f"tokens: {lengths}; {min(chosen.tokens)} to {max(chosen.tokens)} a rank",
            f"attention: {self.num_attentions} calls; the busiest rank sends "
            f"{chosen.busiest_bytes / _MIB:.1f} MiB a forward pass",
        ]
        for one in self.others:
            more = one.busiest_bytes / chosen.busiest_bytes if chosen.busiest_bytes else 1.0
            lines.append(
                f"ring {one.ring_degree} x Ulysses {one.ulysses_degree} would send "
                f"{one.busiest_bytes / _MIB:.1f} MiB ({more:.2f}x)"
            )
        if self.others and self.others[0].busiest_bytes < chosen.busiest_bytes:
            lines.append("fewer bytes are possible; a ring sends while it computes, Ulysses before")
        if self.sparse:
            lines.append(_sparse_line(self.sparse))
        return "\n".join(lines)


def explain(part: SplitModel) -> Explanation:
    """From the last forward pass.

    Raises:
        ConfigError: There was none, or it was compiled.
    """
    if part.last is None:
        raise ConfigError("explain: run the model once, not compiled: lengths follow from inputs")
    last, (ring, ulysses) = part.last, part.mesh.degrees
    if last.sparse:
        return _explain_sparse(part, last)
    num_ranks = ring * ulysses
    most = min(shape.num_heads for shape in last.shapes)
    costs = {
        degree: mesh_cost(last.lengths, num_ranks // degree, degree, last.shapes)
        for degree in range(1, num_ranks + 1)
        if num_ranks % degree == 0 and (degree <= most or degree == ulysses)
    }
    chosen = costs.pop(ulysses)
    others = sorted(costs.values(), key=lambda cost: (cost.busiest_bytes, cost.ring_degree))
    return Explanation(
        model=type(part.model).__name__,
        lengths=dict(zip(part.table.segments, last.lengths, strict=True)),
        num_attentions=sum(last.shapes.values()),
        chosen=chosen,
        others=tuple(others),
    )


def _explain_sparse(part: SplitModel, last: Attended) -> Explanation:
    assert part.sparse is not None
    ring, ulysses = part.mesh.degrees
    dense = mesh_cost(last.lengths, ring, ulysses, last.shapes, part.sparse.config.dealt)
    sent = [
        sum((layer.used.traffic(rank, layer.row_bytes) for layer in last.sparse), traffic)
        for rank, traffic in enumerate(dense.traffic)
    ]
    return Explanation(
        model=type(part.model).__name__,
        lengths=dict(zip(part.table.segments, last.lengths, strict=True)),
        num_attentions=sum(last.shapes.values()) + len(last.sparse),
        chosen=replace(dense, traffic=tuple(sent)),
        others=(),
        sparse=last.sparse,
    )


def _sparse_line(layers: tuple[SparseLayer, ...]) -> str:
    imbalances = [layer.imbalance for layer in layers]
    density = sum(layer.density for layer in layers) / len(layers)
    return (
        f"sparse: {len(layers)} layers of density {density:.2f}; imbalance "
        f"{sum(imbalances) / len(layers):.3f}, at most {max(imbalances):.3f}; "
        f"{sum(layer.num_planned for layer in layers)} plans made, kept "
        f"{sum(layer.num_kept for layer in layers)} times{_meshes_of(layers)}"
    )


def _meshes_of(layers: tuple[SparseLayer, ...]) -> str:
    """On which meshes layers attended, where they could choose."""
    if all(layer.plans.choice is None for layer in layers):
        return ""
    used = Counter((layer.used.ring_degree, layer.used.ulysses_degree) for layer in layers)
    counts = ", ".join(
        f"{count} on ring {ring} x Ulysses {ulysses}"
        for (ring, ulysses), count in sorted(used.items())
    )
    switches = sum(layer.num_switches for layer in layers)
    return (
        f"; layers: {counts}; {switches} mesh switches so far (including those chosen for the "
        "next step)"
    )


def mesh_cost(
    segments: tuple[int, ...],
    ring: int,
    ulysses: int,
    shapes: Mapping[AttentionShape, int],
    stripe: int = 0,
) -> MeshCost:
    """Tokens and bytes of each rank, for attentions of these shapes, each so many times."""
    layout = SequenceLayout(segments, ring, ulysses, stripe=stripe)
    places = [(r, u) for r in range(ring) for u in range(ulysses)]
    return MeshCost(
        ring,
        ulysses,
        tuple(layout.num_tokens(*place) for place in places),
        tuple(
            sum((traffic(layout, place, one) * num for one, num in shapes.items()), Traffic())
            for place in places
        ),
    )


def traffic(layout: SequenceLayout, place: tuple[int, int], shape: AttentionShape) -> Traffic:
    """What a rank sends to others in the forward of one attention."""
    ring, ulysses = place
    num_kv = _kv_heads(shape, layout.ulysses_degree)
    passed = [(ring - turn) % layout.ring_degree for turn in range(layout.ring_degree - 1)]
    return Traffic.of_attention(
        HeadShares.split(num_kv, layout.ulysses_degree),
        ulysses,
        [layout.num_tokens(ring, one) for one in range(layout.ulysses_degree)],
        sum(layout.ring_lens[one] for one in passed),
        queries=shape.num_heads // num_kv,
        row_bytes=shape.batch * shape.row_bytes,
    )


def _kv_heads(shape: AttentionShape, ulysses: int) -> int:
    """Key-value heads, repeated until each Ulysses rank has one."""
    for num in range(shape.num_kv_heads, shape.num_heads + 1, shape.num_kv_heads):
        if shape.num_heads % num == 0 and num >= ulysses:
            return num
    return shape.num_heads
