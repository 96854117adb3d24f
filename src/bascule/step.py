"""Step: move tokens and attend by one plan, on its process groups and its device.

Shapes: T tokens loaded on this rank, C tokens that it computes on, E context tokens of its bag, H
query heads, K key-value heads, D head width, n samples loaded on this rank, N on all ranks.
"""

from ast import literal_eval
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from bascule.arrays import sums_by
from bascule.attention import packed
from bascule.attention.kernels.registry import Kernel
from bascule.attention.mask import PLAIN, Scores
from bascule.attention.ring import AttentionCall
from bascule.attention.usp import (
    attend,
    attend_op,
    check_settings,
    check_sink,
    check_tensors,
    positive_scale,
    with_positive_scale,
)
from bascule.comm.agree import first_use
from bascule.comm.collectives import all_reduce, start_all_to_all, table_on
from bascule.comm.failures import leave, shared
from bascule.comm.groups import Cache, RankGroup, this_world
from bascule.comm.marks import mark_lengths
from bascule.comm.route import BoundRoute, check_rows, move
from bascule.comm.shared_row import SharedRow
from bascule.comm.transforms import refuse_second, refuse_transforms, wants_gradients
from bascule.errors import ConfigError
from bascule.plan.plan import Plan, Terms
from bascule.plan.routes import Route
from bascule.traffic import Traffic

T = TypeVar("T")
Settings = tuple[str, bool, float | None, tuple[bool, ...], tuple[int, int, float]]
"""Method, `causal`, `scale`, which of q, k and v want gradients, and arguments of `Scores`."""

_NUM_SIGNATURES = 64  # most that a step remembers: scales may change from call to call


@dataclass(slots=True, eq=False)
class _Done:
    """Counters of a step, apart from it so that calls do not keep the step alive."""

    num_attended: int = 0
    traffic: Traffic = field(default_factory=Traffic)

    def attend(self, traffic: Traffic) -> None:
        self.num_attended += 1
        self.traffic += traffic

    def route(self, num_bytes: int) -> None:
        self.traffic += Traffic(routed=num_bytes)

    def share_heads(self, num_bytes: int) -> None:
        self.traffic += Traffic(heads=num_bytes)


@dataclass(slots=True, eq=False)
class _Signatures:
    """The checked signatures of a step's calls, apart from the step, since graphs hold its routes.

    Each signature is checked, and agreed on by all ranks, at its first use.
    """

    group: RankGroup
    number: int  # of the step, for errors
    made: Cache[Hashable, Any] = field(default_factory=lambda: Cache(_NUM_SIGNATURES))

    def get(self, call: tuple[Any, ...], xs: Sequence[Any], make: Callable[[], T]) -> T:
        """Return `make()`, made at the first use of a call's settings with such tensors."""

        def first() -> T:
            with shared(f"step {self.number}: {call[0]}"):
                return make()

        try:
            key = call, *[(type(x), x.shape, x.dtype, x.device, x.layout) for x in xs]
            hash(key)
        except (AttributeError, TypeError, RuntimeError):  # no dense tensors: `make` refuses them
            return first()
        return self.made.get(key, first)

    def agree(self, what: str, check: Callable[[], str]) -> None:
        """Let all ranks agree on the text that a check returns, or on the error that it raises."""
        text, error = "", None
        try:
            text = check()
        except Exception as failure:  # whatever it is, the others must not wait
            error = failure
        signature = text if error is None else error  # an error has never been agreed on
        first_use(self.group, signature, lambda: (text, error), what=what, step=self.number)

    def check_move(
        self,
        device: torch.device,
        name: str,
        num_rows: int,
        names: str,
        xs: Sequence[Any],
        needs: Sequence[bool],
    ) -> None:
        """Refuse tensors that cannot be moved, or whose dtype or width differs between ranks."""

        def check() -> str:
            """Describe names, dtypes, widths and gradients, which decide the exchange."""
            if not xs:
                raise ConfigError(f"{name}: give at least one tensor")
            texts: list[str] = []
            for of_x, x, is_needed in zip(names.split(","), xs, needs, strict=True):
                check_rows(name, of_x, x, num_rows, device)
                dtype, end = str(x.dtype).removeprefix("torch."), " with gradient" * is_needed
                texts.append(f"{of_x} {dtype}{list(x.shape[1:])}{end}")
            return f"{name}({', '.join(texts)})"

        self.get((name, names, *needs), xs, lambda: self.agree(name, check))


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """The process groups, the device and the kernel that steps use."""

    group: RankGroup
    data_group: RankGroup  # over which gradients are averaged
    device: torch.device
    kernel: Kernel | None
    is_mean: bool  # True: the trainer averages gradients over ranks; False: it adds them


class Step:
    """One planned step: moves tokens and computes attention. `SequenceParallel.plan` makes it.

    The forward pass, recomputation under checkpointing and the backward pass use the same step;
    other steps may be alive. All ranks call its methods in the same order.

    Attributes:
        plan: The frozen plan.
        number: Number of this plan of its SequenceParallel, from 1.
        local: Layout of the tokens that this rank computes on, as numpy arrays.
        local_seq_ids: Global id of each sequence that this rank has a chunk of; see `LocalLayout`.
        token_slot: (C,) index into `local_seq_ids` of each token that this rank computes on.
    """

    def __init__(self, binding: Binding, plan: Plan, number: int, terms: Terms) -> None:
        rank = binding.group.rank
        self._binding, self._terms, self.number = binding, terms, number
        self.plan = plan
        self._done = _Done()
        self._signatures = _Signatures(binding.group, number)
        # Compilers cannot read numpy arrays: the tensors that graphs need are made here.
        self.local = plan.local(rank)
        self.local_seq_ids = table_on(self.local.seq_ids, binding.device)
        self.token_slot = table_on(self.local.slots, binding.device)
        bag, _, self._ulysses, self._degree = plan.topology.place_of(rank)
        first = rank - self._ulysses
        self._num_group_tokens = int(plan.tokens[first : first + self._degree].sum())
        self._routes = _bound_routes(plan, bag, binding, self._signatures, self._done)
        self._key = this_world().add(self, *self._routes.values())
        for number, route in enumerate(self._routes.values(), self._key + 1):
            route.number = number

    @property
    def num_attended(self) -> int:
        """Number of attention calls that this rank computed so far, in forward passes only."""
        return self._done.num_attended

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank sent to other ranks so far, in forward passes only."""
        return self._done.traffic

    @cached_property
    def row(self) -> SharedRow:
        """The sequences of this rank's bag, for layers that split heads over ranks, not tokens.

        ConfigError: The plan has masks that are not causal.
        """
        plan, group = self.plan, self._binding.group
        masks, ranks = plan.masks, plan.topology.bags[plan.topology.bag_of_rank[group.rank]]
        if masks is not None and not (masks.is_causal.all() and masks.counts.max(initial=0) <= 1):
            what = "layers with a state, such as gated delta layers, need plain causal attention"
            raise ConfigError(f"{what}, and this step has other masks: plan without masks")
        layouts = [plan.local(rank) for rank in ranks]
        ids = np.concatenate([layout.seq_ids[layout.slots] for layout in layouts])
        order = np.lexsort((np.concatenate([layout.positions for layout in layouts]), ids))
        lens = np.unique(ids, return_counts=True)[1].tolist()
        counts = [len(layout.slots) for layout in layouts]
        shared = group.part(ranks, "bag") if len(ranks) > 1 else None
        return SharedRow(lens, shared, counts, order, self.number, self._done.share_heads)

    def __enter__(self) -> "Step":
        """Begin a block: an error of the user's code in it ends the waits of the other ranks."""
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            leave(error, f"step {self.number}: the code of this rank", ends_all=True)

    def route(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Send tokens from the ranks that loaded them to the ranks that compute on them.

        Differentiable. One all-to-all forward, and one backward for tensors that need gradients.

        Args:
            tensors: Each (T, ...) in the order of this rank's sequences, of any dtype.

        Returns:
            The (C, ...) tensors, by name.

        Raises:
            ConfigError: A tensor does not have T rows. CommError: an exchange failed.
        """
        return self._move("route", tensors)

    def restore(self, tensor: Tensor) -> Tensor:
        """Send tokens (C, ...) back to the ranks that loaded them, in order: (T, ...)."""
        return self._move("route", {"tensor": tensor}, back=True)["tensor"]

    def route_contexts(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Send each sequence's context, its tokens of cross-attention, to all ranks of its bag.

        Differentiable; one all-to-all each way. The backward pass sums gradients over those ranks.

        Args:
            tensors: Each (rows, ...): the contexts of the sequences that this rank loaded, one
                after another, with the lengths in `Sequences.context_lens`.

        Returns:
            The (E, ...) tensors, by name: the contexts of the sequences of this rank's bag, ordered
            by sequence id.
        """
        return self._move("route_contexts", tensors)

    def attend_contexts(
        self, q_CHD: Tensor, k_EKD: Tensor, v_EKD: Tensor, *, scale: float | None = None
    ) -> Tensor:
        """Return the exact attention (C, H, D) of tokens to their sequence's context; no exchange.

        Tokens of a sequence without a context get 0.

        Args:
            q_CHD: Queries.
            k_EKD: Keys made from the output of `route_contexts`; H is a multiple of K.
            v_EKD: Values.
            scale: Factor of the scores. Default: D^-0.5.
        """
        return self._attend(q_CHD, k_EKD, v_EKD, "attend_contexts", False, scale)

    def attend(
        self,
        q_CHD: Tensor,
        k_CKD: Tensor,
        v_CKD: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        scores: Scores = PLAIN,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Return the exact attention (C, H, D) of each token within its whole sequence.

        Ranks that share heads make two all-to-alls forward and two backward. The R ranks of a ring
        make R - 1 exchanges with neighbours forward and 2 R - 1 backward.

        Args:
            q_CHD: Queries.
            k_CKD: Keys; H is a multiple of K.
            v_CKD: Values.
            causal: True hides later tokens from each token. Leave it False if the sequences were
                planned with masks, which then apply.
            scale: Factor of the scores. Default: D^-0.5.
            scores: Windows and chunks, which need causal attention, and caps.
            sink: (H,) one more score in each softmax, with a value of 0. Its gradient is the part
                that this rank computes: sum it over ranks.

        Raises:
            ConfigError: An argument is wrong. CommError: an exchange failed.
        """
        return self._attend(q_CHD, k_CKD, v_CKD, "attend", causal, scale, scores, sink)

    def count_routed(self, is_marked: Tensor) -> int:
        """Count the marked tokens that `route` sends to this rank; `is_marked` is (T,) bool on CPU.

        One all-to-all of a number per rank; the first call in a group also gathers, to compare.
        """
        if not torch.compiler.is_compiling():
            return self.num_marked(is_marked)
        return int(torch.ops.bascule.count_routed(is_marked, self._key))

    def gather_samples(self, tensor: Tensor) -> Tensor:
        """Gather one row per sample from all ranks: (n, ...) to (N, ...), by global sequence id.

        Differentiable; one all-to-all each way. Each row goes to all ranks.
        """
        return self._move("gather_samples", {"tensor": tensor})["tensor"]

    def mean(self, per_token: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """Return the mean over all ranks' tokens, with a gradient to be averaged (or summed).

        One all-reduce of two numbers.

        Args:
            per_token: (any number, ...) values of this rank; it accepts 0 rows, but no scalar.
            weights: Factor of each value; broadcasts to the values. None: 1.
        """
        refuse_transforms("mean", per_token)
        check_weights(weights)  # within an operator no tensor requires a gradient
        is_checked = not torch.compiler.is_compiling()
        if is_checked:
            self.check_mean(per_token, weights)
        return torch.ops.bascule.mean(per_token, weights, self._key, is_checked)[0]

    def metrics(self) -> dict[str, Any]:
        """Return predicted loads before and after balancing, and bytes sent, as plain values."""
        predicted = self.plan.summary(self._terms.cost, self._terms.cluster)
        return {"step": self.number, **predicted, "sent_bytes": self.traffic.total}

    # Entry points of eager code. In compiled code the names and sizes of an operator are constants.

    def _move(
        self, name: str, tensors: dict[str, Tensor], *, back: bool = False
    ) -> dict[str, Tensor]:
        names = ",".join(tensors)
        if not names.isascii():  # operators take ASCII alone
            names = ",".join(map(ascii, tensors))
        moved = move(self._routes[name], list(tensors.values()), names=names, back=back)
        return dict(zip(tensors, moved, strict=True))

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        what: str,
        causal: bool,
        scale: float | None,
        scores: Scores = PLAIN,
        sink: Tensor | None = None,
    ) -> Tensor:
        refuse_transforms(what, q, k, v)
        settings = what, causal, scale, tuple(wants_gradients([q, k, v])), scores.key
        if torch.compiler.is_compiling():
            self._check_settings(what, causal, scale, scores)
            q, _ = with_positive_scale(q, scale)
            sizes = self._sizes_of(what, q, k)
            return attend_op(q, k, v, None, sink, sizes, _name_of(settings))[0]
        with shared(f"step {self.number}: {what}"):
            check_sink(what, sink, q)
            call = self._call(settings, q, k, v)
            if scale is not None:
                q, _ = with_positive_scale(q, scale)
            return attend(q, k, v, call, sink=sink)

    # Methods that operators call.

    def find_call(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> AttentionCall:
        """Return the call that a compiled graph names; see `usp`."""
        return self._call(literal_eval(name.removeprefix("step ")), q, k, v)

    def num_marked(self, is_marked: Tensor) -> int:
        """Count as `count_routed` does, outside compiled code."""
        route = self._routes["route"]
        group, wanted = route.group, (route.num_rows[0],)
        where = f"step {self.number}: count_routed"

        def check() -> str:
            if is_marked.dtype != torch.bool or is_marked.shape != wanted or not is_marked.is_cpu:
                what = f"shape {tuple(is_marked.shape)}, {is_marked.dtype}, {is_marked.device}"
                raise ConfigError(f"count_routed: {what}: give a bool CPU tensor of {wanted}")
            return "rows of a bool tensor"

        with shared(where):
            agreed = partial(self._signatures.agree, "count_routed", check)
            self._signatures.get(("count_routed",), [is_marked], agreed)
            send_index, marks = route.route.send_index, is_marked.numpy()
            marks = marks if send_index is None else marks[send_index]
            dest = np.repeat(np.arange(group.size), route.route.send_splits)
            sent = torch.from_numpy(sums_by(dest, marks, group.size))
            counts, one_each = torch.empty_like(sent), [1] * group.size
            start_all_to_all(group.control or group, where, counts, sent, one_each, one_each)()
            return int(counts.sum())

    def mean_and_scale(self, values: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the weighted mean over all ranks, and the factor of its gradient; 0 for weight 0.

        The factor is (ranks of the mean, or 1) / (sum of weights). One all-reduce.
        """
        group = self._binding.data_group
        with shared(f"step {self.number}: mean"):
            wide = values.double()
            counted = wide.new_ones(()) if weights is None else weights.double()
            counted = counted.expand_as(values)
            sums = torch.stack([(wide * counted).sum(), counted.sum()])
            sums = all_reduce(group, f"step {self.number}: all_reduce (mean)", sums)
            inverse = torch.where(sums[1] == 0.0, 0.0, sums[1].reciprocal())
            scale = inverse * (group.size if self._binding.is_mean else 1)
            return (sums[0] * inverse).to(values.dtype), scale

    # Members that are made, checked and agreed on at their first use.

    @cached_property
    def _bag(self) -> packed.Bag:
        return packed.Bag.of(self.plan, self._binding.group, self._binding.device)

    def check_mean(self, values: Tensor, weights: Tensor | None) -> None:
        """Refuse values without a mean, or whose dtype or shape differs between ranks."""

        def check() -> str:
            check_mean(values, weights)
            return f"{tuple(values.shape[1:])}, {values.dtype}, weights {weights is not None}"

        xs = [values] if weights is None else [values, weights]
        self._signatures.get(("mean",), xs, partial(self._signatures.agree, "mean", check))

    def _check_settings(self, what: str, causal: bool, scale: float | None, scores: Scores) -> None:
        check_settings(what, causal, scale)
        masks = self.plan.masks
        if scores.is_near and not (causal or (masks is not None and masks.is_causal.all())):
            fix = 'give causal=True, or Sequences(.., masks="causal") in the plan'
            raise ConfigError(f"attend: {scores}, but attention is not causal: {fix}")
        if causal and self.plan.masks is not None:
            fix = 'leave it out, or plan with Sequences(.., masks="causal")'
            raise ConfigError(f"attend: causal=True contradicts the masks of the sequences: {fix}")

    def _sizes_of(self, what: str, q: Tensor, k: Tensor) -> list[int]:
        if self._degree == 1 or what == "attend_contexts":
            return [0, 0, 0, self._key]
        num_kv = k.shape[1] // self._degree + (self._ulysses < k.shape[1] % self._degree)
        return [self._num_group_tokens, q.shape[1] // k.shape[1] * num_kv, num_kv, self._key]

    def _call(self, settings: Settings, q: Tensor, k: Tensor, v: Tensor) -> AttentionCall:
        return self._signatures.get(settings, [q, k, v], lambda: self._make_call(settings, q, k, v))

    def _make_call(self, settings: Settings, q: Tensor, k: Tensor, v: Tensor) -> AttentionCall:
        what, causal, scale, _, key = settings
        bag, kernel, fixed = self._bag, self._binding.kernel, dict[str, Any]()
        scores = Scores(*key)
        self._check_settings(what, causal, scale, scores)

        def check() -> str:
            """Describe heads, dtype and gradients, which decide the exchanges."""
            check_tensors("attend", q, k, v)
            packed.check(self.plan.topology, bag, kernel, q, k, v, scores.cap)
            most_sharing = int(self.plan.topology.ulysses_groups.bag_sizes.max())
            shapes = q.shape[1:], k.shape[1:], v.shape[1:]
            return f"{most_sharing} ranks, {shapes}, {q.dtype}, {_name_of(settings)}"

        if what == "attend":
            self._signatures.agree(what, check)
            fixed["count"] = partial(self._done.attend, packed.traffic(bag, q, k))
        else:
            check_tensors(what, q, k, v)
            packed.check_shapes(bag, q, k, v, num_keys=self._routes["route_contexts"].num_rows[1])
        fixed |= {"where": f"step {self.number}: {what}", "name": _name_of(settings)}
        kind = "contexts" if what != "attend" else "causal" if causal else "all"
        factor, sizes = positive_scale(q.shape[2], scale), self._sizes_of(what, q, k)
        return bag.call(kind, kernel, q, k, factor, scores, sizes=sizes, **fixed)


def _name_of(settings: Settings) -> str:
    what, causal, scale, *others = settings
    return f"step {(what, causal, None if scale is None else float(scale), *others)}"


def _bound_routes(
    plan: Plan, bag: int, binding: Binding, signatures: _Signatures, done: _Done
) -> dict[str, BoundRoute]:
    """Return the moves of a step by name; a route is made at its first use."""
    group, rank, lens = binding.group, binding.group.rank, plan.seq_lens
    counts, contexts = plan.source_counts, plan.context_lens
    first, size = int(counts[:rank].sum()), group.size
    num_local = int(counts[rank])
    local = slice(first, first + num_local)

    def of_tokens() -> Route:
        mark_lengths("step", plan, rank)
        return plan.route(rank)

    def of_samples() -> Route:  # each to all ranks
        index = np.tile(np.arange(num_local), size)
        return Route(index, np.full(size, num_local), counts, None)

    num_tokens, num_contexts = (int(lens[local].sum()), int(plan.tokens[rank])), (0, 0)
    if contexts is not None:
        num_contexts = int(contexts[local].sum()), int(contexts[plan.bag_of == bag].sum())
    routed, of_contexts = done.route, partial(plan.context_route, rank)
    moves = {  # maker of the route, (rows here, rows there), whether rows have copies, counter
        ("route", "restore"): (of_tokens, num_tokens, False, routed),
        ("route_contexts", "contexts back"): (of_contexts, num_contexts, True, routed),
        ("gather_samples", "samples back"): (of_samples, (num_local, lens.size), True, None),
    }
    where, check = (group, binding.device), partial(signatures.check_move, binding.device)
    return {
        names[0]: BoundRoute(make, *where, rows, signatures.number, names, has_copies, check, count)
        for names, (make, rows, has_copies, count) in moves.items()
    }


# --- operators of a step, which find it by its number ---------------------------------------------


def check_mean(values: Any, weights: Any) -> None:
    """Refuse values and weights that have no mean over tokens."""
    if not isinstance(values, Tensor) or not isinstance(weights, Tensor | None):
        kinds = f"values are a {type(values).__name__}, weights a {type(weights).__name__}"
        raise ConfigError(f"mean: {kinds}: give tensors")
    if values.dim() == 0 or not values.is_floating_point() or values.is_meta:
        what = f"values of shape {tuple(values.shape)} and {values.dtype} on {values.device}"
        needed = "one real floating-point value per token, not their mean or sum (a scalar)"
        raise ConfigError(f"mean: {what}: give {needed}")
    if weights is None:
        return
    shape = (1,) * (values.dim() - weights.dim()) + tuple(weights.shape)
    fits = len(shape) == values.dim() and all(
        a in (1, b) for a, b in zip(shape, values.shape, strict=True)
    )
    if not fits or weights.is_complex() or weights.device != values.device:
        what = f"weights of shape {tuple(weights.shape)} and {weights.dtype} on {weights.device}"
        what += f" for values of shape {tuple(values.shape)} on {values.device}"
        fix = "give real numbers that broadcast to the values, on their device"
        raise ConfigError(f"mean: {what}: {fix}")
    check_weights(weights)


def check_weights(weights: Tensor | None) -> None:
    """Refuse weights that require a gradient."""
    if isinstance(weights, Tensor) and weights.requires_grad:
        raise ConfigError("mean: weights require a gradient but get none: pass weights.detach()")


_SCHEMAS = {
    "count_routed": "(Tensor is_marked, SymInt step) -> Tensor",
    "mean": "(Tensor values, Tensor? weights, SymInt step, bool is_checked) -> (Tensor, Tensor)",
}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"bascule::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)
has_side_effect(torch.ops.bascule.mean.default)  # an unused result must still be exchanged


@torch.library.impl("bascule::count_routed", "CompositeExplicitAutograd")
def _count_routed(is_marked: Tensor, step: int) -> Tensor:
    return torch.tensor(this_world().find(step).num_marked(is_marked))


@torch.library.register_fake("bascule::count_routed")
def _(is_marked: Tensor, step: int) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.impl("bascule::mean", "CompositeExplicitAutograd")
def _mean(
    values: Tensor, weights: Tensor | None, step: int, is_checked: bool
) -> tuple[Tensor, Tensor]:
    """Return the mean over the tokens of all ranks, and the factor of its gradient."""
    current: Step = this_world().find(step)
    if not is_checked:
        current.check_mean(values, weights)
    return current.mean_and_scale(values, weights)


@torch.library.register_fake("bascule::mean")
def _(values: Tensor, weights: Tensor | None, step: int, is_checked: bool) -> tuple[Tensor, Tensor]:
    return values.new_empty(()), values.new_empty((), dtype=torch.float64)


def _keep_mean(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    values, weights, *_ = inputs
    ctx.save_for_backward(weights, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.dtype, ctx.shape = values.dtype, values.shape


def _mean_gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    refuse_second(grad)
    weights, scale = ctx.saved_tensors
    wide = torch.promote_types(ctx.dtype, torch.float32)
    each = (grad.double() * scale).to(wide)
    if weights is not None:
        each = each * weights.to(wide)
    return each.to(ctx.dtype).expand(ctx.shape), None, None, None


torch.library.register_autograd("bascule::mean", _mean_gradients, setup_context=_keep_mean)
