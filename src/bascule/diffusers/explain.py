"""Tokens, bytes and seconds of a forward pass on a mesh, computed from what an eager one counted.

Shapes: B batch, H query heads, K key-value heads, T tokens of a rank, D head width; R ring ranks, U
Ulysses ranks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from bascule.attention.api import AttentionOptions, SequenceLayout
from bascule.comm.quantized import Quantized
from bascule.diffusers.phases import Phase
from bascule.diffusers.sparse_layers import SparseLayer
from bascule.diffusers.split_model import SplitModel
from bascule.diffusers.work import Attended, AttentionShape, LayerWork
from bascule.errors import ConfigError
from bascule.plan.checks import MAX_RANKS, whole
from bascule.plan.machine import (
    FLOPS_PER_VALUE,
    Bag,
    HardwareProfile,
    Seconds,
    Work,
)
from bascule.plan.traffic import HeadShares, Traffic

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class MeshCost:
    """What a mesh sends in a forward pass.

    Attributes:
        ring_degree: R.
        ulysses_degree: U.
        tokens: Of each rank, in the longest sequence that is attended to.
        traffic: What each rank sends to others in all attentions.
        seconds: By kind of layer, as "blocks.*", predicted by a profile; "" is what is in none.
    """

    ring_degree: int
    ulysses_degree: int
    tokens: tuple[int, ...]
    traffic: tuple[Traffic, ...]
    seconds: Mapping[str, Seconds] = field(default_factory=dict[str, Seconds])

    @property
    def total_s(self) -> float:
        """Seconds of a forward pass; 0 without a profile."""
        return sum(float(one.total) for one in self.seconds.values())

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
        others: The other meshes of as many ranks that the heads allow, fewest seconds or else bytes
            first; none for block-sparse attention, whose bytes follow from plans.
        advice: What would make it faster, by predicted seconds, most first; none without a profile.
        sparse: The layers of block-sparse attention, in their order.
        phases: Those of a pipeline of which something is known.
        num_groups: Guidance groups, each on a mesh of its own.
        guidance_bytes: That this rank sent to those of other groups in the last exchange.
    """

    model: str
    lengths: Mapping[str, int]
    num_attentions: int
    chosen: MeshCost
    others: tuple[MeshCost, ...]
    advice: tuple[str, ...] = ()
    sparse: tuple[SparseLayer, ...] = ()
    phases: tuple[Phase, ...] = ()
    num_groups: int = 1
    guidance_bytes: int = 0

    def __str__(self) -> str:
        chosen, lengths = self.chosen, ", ".join(f"{n} of {k}" for k, n in self.lengths.items())
        lines = [
            f"{self.model}: ring {chosen.ring_degree} x Ulysses {chosen.ulysses_degree}",
            f"tokens: {lengths}; {min(chosen.tokens)} to {max(chosen.tokens)} a rank",
            f"attention: {self.num_attentions} calls; the busiest rank sends "
            f"{chosen.busiest_bytes / _MIB:.1f} MiB a forward pass",
        ]
        if self.num_groups > 1:
            lines.append(
                f"guidance: {self.num_groups} groups of ranks share branches and samples; this "
                f"rank sent {self.guidance_bytes / _MIB:.3g} MiB of results in the last exchange"
            )
        if chosen.seconds:
            lines.append(f"predicted: {sum(chosen.seconds.values(), Seconds())} a forward pass")
            lines += [f"  {kind or 'other'}: {one}" for kind, one in chosen.seconds.items()]
        for one in self.others:
            more = one.busiest_bytes / chosen.busiest_bytes if chosen.busiest_bytes else 1.0
            lines.append(
                f"ring {one.ring_degree} x Ulysses {one.ulysses_degree} would send "
                f"{one.busiest_bytes / _MIB:.1f} MiB ({more:.2f}x)"
                + (f" and take {one.total_s * 1e3:.3g} ms" if one.seconds else "")
            )
        lines += self.advice
        fewest = min((one.busiest_bytes for one in self.others), default=chosen.busiest_bytes)
        if not chosen.seconds and fewest < chosen.busiest_bytes:
            lines.append("fewer bytes are possible; a ring sends while it computes, Ulysses before")
        if self.sparse:
            lines.append(_sparse_line(self.sparse))
        lines += map(str, self.phases)
        return "\n".join(lines)


def explain(
    part: SplitModel, profile: HardwareProfile | None = None, ranks_per_node: int | None = None
) -> Explanation:
    """From the last forward pass; as `ParallelHandle.explain`.

    Raises:
        ConfigError: There was none, it was compiled, or it cannot be told in seconds.
    """
    if part.last is None:
        raise ConfigError("explain: run the model once, not compiled: lengths follow from inputs")
    last, (ring, ulysses) = part.last, part.mesh.degrees
    if last.sparse and profile is not None:
        raise ConfigError(
            "explain: seconds of block-sparse attention follow from its plans, not from a profile: "
            "leave out profile"
        )
    if last.sparse:
        return _explain_sparse(part, last)
    num_ranks = ring * ulysses
    most = min(shape.num_heads for shape in last.shapes if not shape.gathers)
    segments = max((shape.segments for shape in last.shapes), key=sum)
    predict = None
    if profile is not None:
        in_node = whole("explain: ranks_per_node", ranks_per_node or num_ranks, 1, MAX_RANKS)
        predict = Prediction(last, profile, in_node, part.options)
    costs = {
        degree: mesh_cost(segments, num_ranks // degree, degree, last.shapes)
        for degree in range(1, num_ranks + 1)
        if num_ranks % degree == 0 and (degree <= most or degree == ulysses)
    }
    if predict is not None:
        costs = {
            degree: replace(cost, seconds=predict.on(cost.ring_degree, degree))
            for degree, cost in costs.items()
        }
    chosen = costs.pop(ulysses)
    others = sorted(
        costs.values(), key=lambda cost: (cost.total_s, cost.busiest_bytes, cost.ring_degree)
    )
    return Explanation(
        model=type(part.model).__name__,
        lengths=last.lengths,
        num_attentions=sum(last.shapes.values()),
        chosen=chosen,
        others=tuple(others),
        advice=() if predict is None else _advice(predict, chosen, others),
    )


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of the last forward pass on any mesh of as many ranks.

    Attributes:
        last: What it attended to and computed.
        profile: What the machine does in a second.
        ranks_per_node: Of how many one node is.
        options: Those of attention.
    """

    last: Attended
    profile: HardwareProfile
    ranks_per_node: int
    options: AttentionOptions

    def on(
        self, ring: int, ulysses: int, *, is_compiled: bool = False, is_quantized: bool = False
    ) -> dict[str, Seconds]:
        """By kind of layer; compiled, it launches products and exchanges alone.

        Raises:
            ConfigError: The profile lacks a number.
        """
        bag = Bag.aligned(ulysses, ring, self.ranks_per_node)
        return {
            kind: self.profile.forward_seconds(
                self._works(work, bag, is_compiled, is_quantized),
                bag,
                hides_ring=self.options.double_buffer,
            )
            for kind, work in self.last.work.items()
        }

    def _works(
        self, work: LayerWork, bag: Bag, is_compiled: bool, is_quantized: bool
    ) -> list[Work]:
        """What each rank does in the layers of a kind."""
        ring, ulysses = bag.ring, bag.ulysses
        matmul, attention = self.profile.numbers_of("matmul_flops_per_s", "attention_flops_per_s")
        longest = max((shape.segments for shape in self.last.shapes), key=sum)
        layouts = {
            segments: SequenceLayout(segments, ring, ulysses)
            for segments in {longest, *(shape.segments for shape in work.shapes)}
        }
        calls = sum(times for shape, times in work.shapes.items() if not shape.gathers)
        gathers = sum(work.shapes.values()) - calls
        works: list[Work] = []
        for place in product(range(ring), range(ulysses)):
            share = layouts[longest].num_tokens(*place) / max(1, sum(longest))
            sent = Traffic()
            attention_flops = 0.0
            for shape, times in work.shapes.items():
                layout = layouts[shape.segments]
                sent += traffic(layout, place, _quantized(shape) if is_quantized else shape) * times
                attention_flops += times * _attention_flops(layout, place, shape)
            attention_s = attention_flops / attention
            works.append(
                Work(
                    compute_s=(work.token_flops * share + work.other_flops) / matmul + attention_s,
                    attention_s=attention_s,
                    heads_bytes=sent.heads,
                    ring_bytes=sent.ring,
                    num_exchanges=(2 * calls if ulysses > 1 else 0) + gathers,
                    num_rounds=(ring - 1) * calls,
                    num_kernels=work.num_products if is_compiled else work.num_kernels,
                )
            )
        return works


def _attention_flops(
    layout: SequenceLayout, place: tuple[int, int], shape: AttentionShape
) -> float:
    """4 FLOPs for each pair of a query and a key, value of a head, and head of this rank.

    None where keys were gathered: those of tokens have them.
    """
    if shape.gathers:
        return 0.0
    num_kv = _kv_heads(shape, layout.ulysses_degree)
    heads = shape.num_heads // num_kv * HeadShares.split(num_kv, layout.ulysses_degree).of(place[1])
    pairs = layout.ring_len(place[0]) * layout.seq_len
    return float(FLOPS_PER_VALUE * pairs * shape.batch * heads * shape.head_dim)


_LEAST_GAIN = 1.02


def _advice(predict: Prediction, chosen: MeshCost, others: Sequence[MeshCost]) -> tuple[str, ...]:
    """What each level of optimisation would give this forward pass, the most first."""
    mesh = chosen.ring_degree, chosen.ulysses_degree
    ways: dict[str, Mapping[str, Seconds]] = {
        "handle.compile(), which launches fewer kernels": predict.on(*mesh, is_compiled=True)
    }
    if predict.options.comm_dtype is None:
        ways['comm_dtype="int8", with fewer bytes'] = predict.on(*mesh, is_quantized=True)
    for one in others:
        ways[f"ring_degree={one.ring_degree}, ulysses_degree={one.ulysses_degree}"] = one.seconds
    totals = {way: sum(float(one.total) for one in found.values()) for way, found in ways.items()}
    gains = {way: chosen.total_s / total for way, total in totals.items() if total}
    found = [
        f"{gain:.2f}x predicted with {way}"
        for way, gain in sorted(gains.items(), key=lambda item: -item[1])
        if gain >= _LEAST_GAIN
    ]
    return tuple(found) or ("compute-bound: no compilation, 8-bit rows or other mesh gains 2 %",)


def _explain_sparse(part: SplitModel, last: Attended) -> Explanation:
    assert part.sparse is not None
    ring, ulysses = part.mesh.degrees
    segments = max((layer.key.segments for layer in last.sparse), key=sum)
    dense = mesh_cost(segments, ring, ulysses, last.shapes, part.sparse.config.dealt)
    sent = [
        sum((layer.used.traffic(rank, layer.row_bytes) for layer in last.sparse), traffic)
        for rank, traffic in enumerate(dense.traffic)
    ]
    return Explanation(
        model=type(part.model).__name__,
        lengths=last.lengths,
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
    """Tokens of each rank, and its bytes for attentions of these shapes, each so many times."""

    def layout(lengths: tuple[int, ...]) -> SequenceLayout:
        return SequenceLayout(lengths, ring, ulysses, stripe=stripe)

    places = [(r, u) for r in range(ring) for u in range(ulysses)]
    return MeshCost(
        ring,
        ulysses,
        tuple(layout(segments).num_tokens(*place) for place in places),
        tuple(
            sum(
                (traffic(layout(one.segments), place, one) * num for one, num in shapes.items()),
                Traffic(),
            )
            for place in places
        ),
    )


def traffic(layout: SequenceLayout, place: tuple[int, int], shape: AttentionShape) -> Traffic:
    """What a rank sends to others in the forward of one attention."""
    ring, ulysses = place
    if shape.gathers:
        others = layout.ring_degree * layout.ulysses_degree - 1
        rows = 2 * layout.num_tokens(*place) * shape.num_kv_heads * others
        return Traffic(ring=rows * shape.batch * shape.row_bytes)
    num_kv = _kv_heads(shape, layout.ulysses_degree)
    passed = [(ring - turn) % layout.ring_degree for turn in range(layout.ring_degree - 1)]
    return Traffic.of_attention(
        HeadShares.split(num_kv, layout.ulysses_degree),
        ulysses,
        [layout.num_tokens(ring, u) + shape.more_rows for u in range(layout.ulysses_degree)],
        sum(layout.ring_lens[r] + shape.more_rows for r in passed),
        queries=shape.num_heads // num_kv,
        row_bytes=shape.batch * shape.row_bytes,
    )


def _quantized(shape: AttentionShape) -> AttentionShape:
    """Return the attention as it travels in 8 bits a value."""
    quantized = Quantized("int8")
    if shape.gathers:
        return shape
    return replace(
        shape, row_bytes=quantized.row_bytes(shape.head_dim), more_rows=quantized.num_more
    )


def _kv_heads(shape: AttentionShape, ulysses: int) -> int:
    """Key-value heads, repeated until each Ulysses rank has one."""
    for num in range(shape.num_kv_heads, shape.num_heads + 1, shape.num_kv_heads):
        if shape.num_heads % num == 0 and num >= ulysses:
            return num
    return shape.num_heads
