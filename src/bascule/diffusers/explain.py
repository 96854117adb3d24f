"""Explain a forward pass: its tokens, bytes and predicted time on any mesh.

Bytes follow from the sizes of the attention calls in the last pass. To predict time, one more pass
counts FLOPs and kernels by kind of layer.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bascule.attention.api import AttentionOptions, SequenceLayout, enough_heads
from bascule.checks import MAX_RANKS, whole
from bascule.comm.quantized import Quantized
from bascule.diffusers.forward_pass import AttentionShape, ForwardPass, PassRecord
from bascule.diffusers.sparse_layers import SparseLayer
from bascule.diffusers.split_model import SplitModel
from bascule.errors import ConfigError
from bascule.machine.cluster import FLOPS_PER_VALUE, BagShape, HardwareProfile, Seconds, Work
from bascule.quantities import count, num_bytes, number, seconds, times
from bascule.traffic import HeadShares, Traffic


@dataclass(frozen=True, slots=True)
class MeshCost:
    """The cost of a forward pass on a mesh."""

    ring_degree: int
    ulysses_degree: int
    tokens: tuple[int, ...]  # of each rank, in the longest sequence of an attention
    traffic: tuple[Traffic, ...]  # from each rank to others in all attentions
    # Predicted by kind of layer, as "blocks.*"; "" for all other layers; empty without a profile.
    seconds: Mapping[str, Seconds] = field(default_factory=dict[str, Seconds])

    @property
    def total_s(self) -> float:
        """Predicted time of a forward pass in seconds; 0 without a profile."""
        return sum(float(parts.total) for parts in self.seconds.values())

    @property
    def busiest_bytes(self) -> int:
        """Bytes that the rank with the most traffic sends."""
        return max(sent.total for sent in self.traffic)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The mesh of a model, the last forward pass on it, and the costs of other meshes."""

    model: str  # name of its class
    lengths: Mapping[str, int]  # tokens of each segment
    num_attentions: int  # over the mesh, in the forward pass
    chosen: MeshCost  # the mesh in use
    others: tuple[MeshCost, ...] = ()  # other legal meshes, best first; none if sparse
    advice: tuple[str, ...] = ()  # settings that would be faster; none without a profile
    sparse: tuple[SparseLayer, ...] = ()  # layers of block-sparse attention, in their order
    phases: tuple[str, ...] = ()  # of a pipeline
    num_groups: int = 1  # guidance groups, each on a mesh of its own
    guidance_bytes: int = 0  # from this rank to other groups in the last exchange

    def __str__(self) -> str:
        chosen, least, most = self.chosen, min(self.chosen.tokens), max(self.chosen.tokens)
        lengths = [f"{number(length)} of {name}" for name, length in self.lengths.items()]
        lines = [
            f"{self.model}: ring {chosen.ring_degree} x Ulysses {chosen.ulysses_degree}",
            f"tokens: {', '.join(lengths)}; {number(least)} to {number(most)} per rank",
            f"attention: {count(self.num_attentions, 'call')}; the busiest rank sends "
            f"{num_bytes(chosen.busiest_bytes)} per forward pass",
        ]
        if self.num_groups > 1:
            lines.append(
                f"guidance: {self.num_groups} groups of ranks share branches and samples; this "
                f"rank sent {num_bytes(self.guidance_bytes)} of results in the last exchange"
            )
        if chosen.seconds:
            lines.append(f"predicted: {sum(chosen.seconds.values(), Seconds())} per forward pass")
            lines += [f"  {kind or 'other'}: {parts}" for kind, parts in chosen.seconds.items()]
        for other in self.others:
            ratio = other.busiest_bytes / chosen.busiest_bytes if chosen.busiest_bytes else 1.0
            is_near = 1 / _LEAST_GAIN < ratio < _LEAST_GAIN
            lines.append(
                f"ring {other.ring_degree} x Ulysses {other.ulysses_degree} would send "
                + ("about as much" if is_near else num_bytes(other.busiest_bytes))
                + (f" and take {seconds(other.total_s)}" if other.seconds else "")
            )
        lines += self.advice
        if self.sparse:
            lines.append(_sparse_line(self.sparse))
        return "\n".join([*lines, *self.phases])


# Functions that read metadata or make views; all others are a kernel each.
_WITHOUT_KERNEL = frozenset(
    "__get__ __getitem__ __len__ chunk contiguous detach dim expand expand_as flatten is_complex "
    "is_floating_point narrow numel permute reshape size split split_with_sizes squeeze stride "
    "swapaxes tensor_split transpose type_as unbind unflatten unsqueeze view view_as".split()
)
_PRODUCTS = functional.linear, torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__


@dataclass(slots=True)
class LayerWork:
    """The work of all layers of one kind in a forward pass."""

    token_flops: float = 0.0  # matrix products that ranks share, for the whole sequence
    other_flops: float = 0.0  # matrix products that every rank computes
    num_kernels: int = 0
    num_products: int = 0  # kernels that are matrix products or attentions
    shapes: Counter[AttentionShape] = field(default_factory=Counter[AttentionShape])


Works = dict[str, LayerWork]  # by kind of layer, as "blocks.*"; "" for the rest


class CountingPass(ForwardPass):
    """A forward pass that counts this rank's FLOPs and kernels, by a mode around the model."""

    def __init__(self, works: Works, *args: Any, signature: object) -> None:
        super().__init__(*args, signature=signature)
        self.is_around, self._works = True, works
        self.count_for("")

    def count_for(self, kind: str) -> None:
        """Count all later operations as work of this kind of layer."""
        self.work = self._works.setdefault(kind, LayerWork())
        self.shapes = self.work.shapes

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count a call of a torch function, and replace it."""
        if getattr(func, "__name__", "") not in _WITHOUT_KERNEL:
            self.work.num_kernels += 1
            is_product = func in _PRODUCTS and len(args) > 1 and isinstance(args[1], Tensor)
            self.work.num_products += is_product or func is functional.scaled_dot_product_attention
            if is_product:
                columns = args[1].shape[0] if func is functional.linear else args[1].shape[-1]
                self._multiply(args[0], columns)
        return super().__torch_function__(func, types, args, kwargs)

    def _multiply(self, x: Tensor, columns: int) -> None:
        """Count 2 FLOPs for each value of `x` and column."""
        # A prompt that happens to be as long as a rank's share counts as one.
        whole = self._whole_lengths().get(x.shape[-2]) if x.dim() > 2 else None
        if whole is None:
            self.work.other_flops += 2.0 * x.numel() * columns
        else:
            self.work.token_flops += 2.0 * math.prod(x.shape[:-2]) * whole * x.shape[-1] * columns

    def _whole_lengths(self) -> dict[int, int]:
        """Return the whole length for each length of a rank's share, of each segment and of all."""
        segments = tuple([name for name in self._table.segments if name in self._lengths])
        shares = [self.share(names) for names in [*((name,) for name in segments), segments]]
        return {share.num_tokens: share.seq_len for share in shares}

    def other_keys(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """Gather keys and values, and count attention to them as work that ranks share."""
        gathered = super().other_keys(query, key, value)
        if gathered is not None and gathered[0] is not key:
            whole = self._whole_lengths().get(query.shape[2], query.shape[2])
            pairs = query.shape[0] * query.shape[1] * whole * gathered[0].shape[2]
            self.work.token_flops += 4.0 * pairs * query.shape[3]
        return gathered

    def end(self) -> PassRecord | None:
        """Close the pass; return the attention of all kinds of layers."""
        self.shapes = sum((work.shapes for work in self._works.values()), Counter())
        return super().end()


def count_work(split: SplitModel, run: Callable[[], object]) -> Works:
    """Count the work of a model's first forward pass in `run`, which calls it or its pipeline."""
    works, passes = Works(), list[CountingPass]()

    def make_pass(*args: Any, signature: object) -> ForwardPass:
        if passes:
            return ForwardPass(*args, signature=signature)
        passes.append(CountingPass(works, *args, signature=signature))
        return passes[0]

    def begin(kind: str, *_: object) -> None:
        if split.forward is passes[0]:
            passes[0].count_for(kind)

    def end(*_: object) -> None:
        passes[0].count_for("")

    assert split.way is not None
    with (
        ExitStack() as hooks,
        split.taking(replace(split.way, make_pass=make_pass)),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
    ):
        for name, (block, _) in split.blocks.items():
            start = partial(begin, re.sub(r"\d+", "*", name))
            hooks.callback(block.register_forward_pre_hook(start).remove)
            hooks.callback(block.register_forward_hook(end).remove)
        run()
    return works


def explain(
    split: SplitModel,
    profile: HardwareProfile | None = None,
    ranks_per_node: int | None = None,
    run: Callable[[], object] | None = None,
) -> Explanation:
    """Explain the last forward pass of a model; with a profile, the first forward pass of `run`."""
    works: Works = {}
    if profile is not None:
        if split.sparse is not None or split.has_cache:
            reason = "a profile cannot predict the time of block-sparse attention or a cache"
            raise ConfigError(f"explain: {reason}: leave out profile")
        if run is None:
            raise ConfigError(
                "explain(profile=..) runs the model: give its inputs, or a pipeline's arguments"
            )
        profile.numbers_of("matmul_flops_per_s", "attention_flops_per_s")
        works = count_work(split, run)
    elif run is not None or ranks_per_node is not None:
        raise ConfigError("explain: inputs and ranks_per_node need a profile to predict time")
    last = split.last
    if last is None:
        raise ConfigError("explain: there is no forward pass yet: run the model, not compiled")
    ring, ulysses = last.degrees
    explanation = partial(
        Explanation,
        model=type(split.model).__name__,
        lengths=last.lengths,
        num_attentions=sum(last.shapes.values()) + len(last.sparse),
        sparse=last.sparse,
    )
    if split.sparse is not None and last.sparse:
        segments = max((layer.key.segments for layer in last.sparse), key=sum)
        dense = _mesh_cost(segments, ring, ulysses, last.shapes, split.sparse.dealt)
        sent = [
            sum((layer.used.traffic(rank, layer.row_bytes) for layer in last.sparse), traffic)
            for rank, traffic in enumerate(dense.traffic)
        ]
        return explanation(chosen=replace(dense, traffic=tuple(sent)))
    num_ranks = ring * ulysses
    heads = [shape.num_heads for shape in last.shapes if not shape.gathers]
    most = min(heads, default=num_ranks)
    segments = max((shape.segments for shape in last.shapes), key=sum)
    costs = {
        degree: _mesh_cost(segments, num_ranks // degree, degree, last.shapes)
        for degree in range(1, num_ranks + 1)
        if num_ranks % degree == 0 and (degree <= most or degree == ulysses)
    }
    prediction = None
    if profile is not None:
        in_node = whole("explain: ranks_per_node", ranks_per_node or num_ranks, 1, MAX_RANKS)
        prediction = _Prediction(works, segments, profile, in_node, split.options)
        for degree, cost in costs.items():
            costs[degree] = replace(cost, seconds=prediction.seconds(cost.ring_degree, degree))
    chosen = costs.pop(ulysses)
    others = sorted(costs.values(), key=attrgetter("total_s", "busiest_bytes", "ring_degree"))
    advice = () if prediction is None else _advice(prediction, chosen, others)
    return explanation(chosen=chosen, others=tuple(others), advice=advice)


@dataclass(frozen=True, slots=True)
class _Prediction:
    """A prediction of a forward pass's seconds, on any mesh of these ranks."""

    works: Works
    longest: tuple[int, ...]  # tokens of the segments of the longest attention
    profile: HardwareProfile
    ranks_per_node: int
    options: AttentionOptions

    def seconds(
        self, ring: int, ulysses: int, *, is_compiled: bool = False, is_quantized: bool = False
    ) -> dict[str, Seconds]:
        """Predict seconds by kind of layer; compiled, only products and exchanges are launched."""
        bag, seconds = BagShape.aligned(ring, ulysses, self.ranks_per_node), dict[str, Seconds]()
        for kind, work in self.works.items():
            works = self._work_of_ranks(work, ring, ulysses, is_compiled, is_quantized)
            seconds[kind] = self.profile.forward_seconds(works, bag)
        return seconds

    def _work_of_ranks(
        self, work: LayerWork, ring: int, ulysses: int, is_compiled: bool, is_quantized: bool
    ) -> list[Work]:
        """Return the work of each rank in the layers of a kind."""
        matmul, attention = self.profile.numbers_of("matmul_flops_per_s", "attention_flops_per_s")
        layouts = {
            segments: SequenceLayout(segments, ring, ulysses)
            for segments in {self.longest, *(shape.segments for shape in work.shapes)}
        }
        calls = sum(times for shape, times in work.shapes.items() if not shape.gathers)
        gathers = sum(work.shapes.values()) - calls
        works: list[Work] = []
        for place in product(range(ring), range(ulysses)):
            share = layouts[self.longest].num_tokens(*place) / max(1, sum(self.longest))
            sent, attention_s = Traffic(), 0.0
            for shape, num_times in work.shapes.items():
                layout = layouts[shape.segments]
                attention_s += num_times * _attention_flops(layout, place, shape) / attention
                if is_quantized and not shape.gathers:
                    row_bytes = Quantized("int8").row_bytes(shape.head_dim)
                    shape = replace(shape, row_bytes=row_bytes)
                sent += _traffic(layout, place, shape) * num_times
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
    """Return 4 FLOPs for each pair of tokens, value of a head, and head of this rank."""
    if shape.gathers:
        return 0.0  # `LayerWork.token_flops` has them
    num_kv = enough_heads(shape.num_heads, shape.num_kv_heads, layout.ulysses_degree)
    heads = shape.num_heads // num_kv * HeadShares.split(num_kv, layout.ulysses_degree).of(place[1])
    pairs = layout.ring_len(place[0]) * layout.seq_len
    return float(FLOPS_PER_VALUE * pairs * shape.batch * heads * shape.head_dim)


_LEAST_GAIN = 1.02


def _advice(prediction: _Prediction, chosen: MeshCost, others: list[MeshCost]) -> tuple[str, ...]:
    """Return the settings that would be faster for this forward pass, best first."""
    predict = partial(prediction.seconds, chosen.ring_degree, chosen.ulysses_degree)
    compiled = replace(chosen, seconds=predict(is_compiled=True))
    settings = {"handle.compile(), which launches fewer kernels": compiled}
    if prediction.options.comm_dtype is None:
        quantized = replace(chosen, seconds=predict(is_quantized=True))
        settings['comm_dtype="int8", with fewer bytes'] = quantized
    for other in others:
        name = f"ring_degree={other.ring_degree}, ulysses_degree={other.ulysses_degree}"
        settings[name] = other
    gains = [
        (chosen.total_s / cost.total_s, name) for name, cost in settings.items() if cost.total_s
    ]
    lines = [
        f"{times(gain)} predicted with {name}"
        for gain, name in sorted(gains, key=lambda pair: -pair[0])
        if gain >= _LEAST_GAIN
    ]
    return tuple(lines) or ("compute-bound: no compilation, 8-bit rows or other mesh gains 2 %",)


def _sparse_line(layers: tuple[SparseLayer, ...]) -> str:
    imbalances = [layer.imbalance for layer in layers]
    density = sum(layer.density for layer in layers) / len(layers)
    line = (
        f"sparse: {count(len(layers), 'layer')} of density {number(density)}; imbalance "
        f"{number(sum(imbalances) / len(layers))}, at most {number(max(imbalances))}; "
        f"{count(sum(layer.num_planned for layer in layers), 'plan')} made, kept "
        f"{count(sum(layer.num_kept for layer in layers), 'time')}"
    )
    if all(layer.plans.choice is None for layer in layers):
        return line
    used = Counter((layer.used.ring_degree, layer.used.ulysses_degree) for layer in layers)
    counts = ", ".join(
        f"{count} on ring {ring} x Ulysses {ulysses}"
        for (ring, ulysses), count in sorted(used.items())
    )
    switches = sum(layer.num_switches for layer in layers)
    return (
        f"{line}; layers: {counts}; {switches} mesh switches so far (including those chosen for "
        "the next step)"
    )


def _mesh_cost(
    segments: tuple[int, ...],
    ring: int,
    ulysses: int,
    shapes: Mapping[AttentionShape, int],
    dealt: Mapping[str, Any] | None = None,
) -> MeshCost:
    """Return tokens and bytes of each rank; `shapes` has a number of attentions by shape."""
    layouts = {
        lengths: SequenceLayout(lengths, ring, ulysses, **(dealt or {}))
        for lengths in {segments, *(shape.segments for shape in shapes)}
    }
    places = list(product(range(ring), range(ulysses)))
    sent = [
        sum(
            (_traffic(layouts[shape.segments], place, shape) * n for shape, n in shapes.items()),
            Traffic(),
        )
        for place in places
    ]
    tokens = [layouts[segments].num_tokens(*place) for place in places]
    return MeshCost(ring, ulysses, tuple(tokens), tuple(sent))


def _traffic(layout: SequenceLayout, place: tuple[int, int], shape: AttentionShape) -> Traffic:
    """Return the bytes that a rank sends to others in the forward pass of one attention."""
    ring, ulysses = place
    if shape.gathers:
        others = layout.ring_degree * layout.ulysses_degree - 1
        rows = 2 * layout.num_tokens(*place) * shape.num_kv_heads * others
        return Traffic(ring=rows * shape.batch * shape.row_bytes)
    num_kv = enough_heads(shape.num_heads, shape.num_kv_heads, layout.ulysses_degree)
    passed = [(ring - turn) % layout.ring_degree for turn in range(layout.ring_degree - 1)]
    return Traffic.of_attention(
        HeadShares.split(num_kv, layout.ulysses_degree),
        ulysses,
        [layout.num_tokens(ring, u) for u in range(layout.ulysses_degree)],
        sum(layout.ring_lens[r] for r in passed),
        queries=shape.num_heads // num_kv,
        row_bytes=shape.batch * shape.row_bytes,
    )
