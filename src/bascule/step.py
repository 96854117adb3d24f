"""Step: the moves and the attention of one plan, bound to its groups and its device.

Shapes: T tokens as loaded on this rank, C tokens that it computes on, H heads, D head width, n
samples as loaded on this rank, N samples of all ranks.
"""

from ast import literal_eval
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from bascule import step_ops
from bascule.arrays import ranges, sums_by
from bascule.attention import packed
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
from bascule.comm.exchange import (
    BoundRoute,
    check_rows,
    move_back,
    move_rows,
    sample_gradients,
    samples_of_all,
)
from bascule.comm.failures import leave, mark_lengths, shared
from bascule.comm.groups import Kept, RankGroup, this_world
from bascule.comm.shared_row import SharedRow
from bascule.comm.transforms import refuse_transforms
from bascule.errors import ConfigError
from bascule.plan.plan import Plan, Terms
from bascule.plan.traffic import Traffic

if TYPE_CHECKING:
    from bascule.parallel import SequenceParallel

T = TypeVar("T")
Settings = tuple[str, bool, float | None, tuple[bool, ...], tuple[int, int, float]]
"""Method, `causal`, `scale`, which of q, k and v want gradients, and arguments of `Scores`."""

_NUM_KEPT = 64


@dataclass(slots=True, eq=False)
class _Done:
    """Forward passes of a step so far; attention calls refer to it, and not to their step."""

    num_attended: int = 0
    traffic: Traffic = field(default_factory=Traffic)

    def attend(self, traffic: Traffic) -> None:
        self.num_attended += 1
        self.traffic += traffic

    def share_heads(self, num_bytes: int) -> None:
        self.traffic += Traffic(heads=num_bytes)


class Step:
    """A plan bound to its groups and device: moves and attends for one step. Made by `plan`.

    Forward, recomputation under checkpointing and backward of a step all use this object, however
    many steps are alive. All ranks call its methods in the same order.

    Attributes:
        plan: The frozen plan.
        number: Which plan of the SequenceParallel it is, from 1.
        local: Layout of the tokens that this rank computes on, as numpy arrays.
        local_seq_ids: Global ids of the sequences of this rank's chunks; see `LocalLayout`.
        token_slot: (C,) index into `local_seq_ids` of each token that this rank computes on.
    """

    def __init__(self, parallel: "SequenceParallel", plan: Plan, number: int, terms: Terms) -> None:
        rank = parallel.rank
        self._parallel, self._terms, self.number = parallel, terms, number
        self.plan = plan
        self._done = _Done()
        self._kept = Kept[Hashable, Any](_NUM_KEPT)  # scales may change from call to call
        self._key = this_world().add_step(self)
        # Compilers can neither look into arrays nor make tables: what graphs need is made here.
        self.local = plan.local(rank)
        self.local_seq_ids = table_on(self.local.seq_ids, parallel.device)
        self.token_slot = table_on(self.local.slots, parallel.device)
        place = plan.topology.place_of(rank)
        self._place, self._degree = place.ulysses, place.ulysses_degree
        first = rank - self._place
        self._num_together = int(plan.tokens[first : first + self._degree].sum())
        self._num_rows = _num_rows(plan, rank, place.bag)

    @property
    def num_attended(self) -> int:
        """Attentions that this rank computed so far, forward passes only."""
        return self._done.num_attended

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank sent to other ranks so far, forward passes only."""
        return self._done.traffic

    @cached_property
    def row(self) -> SharedRow:
        """The sequences of this rank's bag, for layers that compute by heads.

        ConfigError: The plan has other masks than causal ones.
        """
        plan, group = self.plan, self._parallel.group
        masks, ranks = plan.masks, plan.topology.bags[plan.topology.bag_of_rank[group.rank]]
        if masks is not None and not (masks.is_causal.all() and masks.counts.max(initial=0) <= 1):
            raise ConfigError(
                "layers with a state along the sequence, such as gated delta layers, in a step of "
                "masks that are not plain causal ones: plan without masks"
            )
        layouts = [plan.local(rank) for rank in ranks]
        ids = np.concatenate([one.seq_ids[one.slots] for one in layouts])
        order = np.lexsort((np.concatenate([one.positions for one in layouts]), ids))
        lens, counts = np.unique(ids, return_counts=True)[1], [len(one.slots) for one in layouts]
        shared = group.part(ranks, "bag") if len(ranks) > 1 else None
        args = counts, order, self.number, self._done.share_heads
        return SharedRow(lens.tolist(), shared, *args)

    def __enter__(self) -> "Step":
        """Begin a block in which an error of the user's code ends the waits of other ranks."""
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            leave(error, f"step {self.number}: the code of this rank", ends_all=True)

    def route(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Bring tokens from where they were loaded to where they are computed.

        Differentiable; one all-to-all a direction, backward only of what needs gradients.

        Args:
            tensors: Each (T, ...) in the order of this rank's sequences, of any dtype.

        Returns:
            Each (C, ...), by its name.

        Raises:
            ConfigError: A tensor has another number of rows. CommError: an exchange failed.
        """
        return self._exchange("route", tensors)

    def restore(self, tensor: Tensor) -> Tensor:
        """Bring tokens (C, ...) back to source and order, (T, ...); one all-to-all a direction."""
        return self._exchange("restore", {"tensor": tensor})["tensor"]

    def route_contexts(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Bring the context of each sequence to all ranks that compute on the sequence.

        Differentiable; one all-to-all a direction. The gradient of a context is the sum over ranks.

        Args:
            tensors: Each (rows, ...): the contexts of this rank's sequences, one after another, as
                long as `Sequences.context_lens` says.

        Returns:
            Each (E, ...), by its name: the contexts of the sequences of this rank's bag, in order
            of their ids.
        """
        return self._exchange("route_contexts", tensors)

    def attend_contexts(
        self, q_CHD: Tensor, k_EKD: Tensor, v_EKD: Tensor, *, scale: float | None = None
    ) -> Tensor:
        """Exact attention of each token to all of its sequence's context; (C, H, D). No exchange.

        Tokens of a sequence without a context get 0.

        Args:
            q_CHD: Queries.
            k_EKD: Keys of what `route_contexts` brought; H is a multiple of K.
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
        """Exact attention within each whole sequence; (C, H, D).

        Two all-to-alls forward and two backward where ranks share heads; R - 1 exchanges with the
        neighbours forward and 2 R - 1 backward where there is a ring.

        Args:
            q_CHD: Queries.
            k_CKD: Keys; H is a multiple of K.
            v_CKD: Values.
            causal: True hides later tokens from each one. It must be False where sequences were
                planned with masks, which hold then.
            scale: Factor of the scores. Default: D^-0.5.
            scores: Windows, chunks and caps; the first two where all attention is causal.
            sink: (H,), one more score in each softmax, with a value of 0. The gradient is of what
                this rank computes: its sum over ranks counts each token once.

        Raises:
            ConfigError: An argument is wrong. CommError: an exchange failed.
        """
        return self._attend(q_CHD, k_CKD, v_CKD, "attend", causal, scale, scores, sink)

    def count_routed(self, is_marked: Tensor) -> int:
        """Count the marked rows that were brought here; `is_marked` is (T,) bool on the host.

        It takes an all-to-all of one number. In a group's first use, a gather lets ranks agree.
        """
        if not torch.compiler.is_compiling():
            return self.num_marked(is_marked)
        return int(step_ops.count_routed(is_marked, self._key))

    def gather_samples(self, tensor: Tensor) -> Tensor:
        """Gather the per-sample rows of all ranks: (n, ...) to (N, ...), by global sequence id.

        Differentiable; one all-gather forward, one reduce-scatter backward.
        """
        return self._exchange("gather_samples", {"tensor": tensor})["tensor"]

    def mean(self, per_token: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """Mean over the tokens of all ranks, right where gradients are averaged (or summed).

        One all-reduce of two numbers.

        Args:
            per_token: (any number, ...) values of this rank; no rows are legal, a scalar is not.
            weights: Factor of each value; broadcasts to the values. None counts each once.
        """
        refuse_transforms("mean", per_token)
        step_ops.check_weights(weights)  # within an operator nothing has one
        if not torch.compiler.is_compiling():
            self._check_mean(per_token, weights)
        return step_ops.mean(per_token, weights, self._key)[0]

    def metrics(self) -> dict[str, Any]:
        """Predicted loads before and after balancing, and what moved so far, as plain values."""
        predicted = self.plan.summary(self._terms.cost, self._terms.cluster)
        return {"step": self.number, **predicted, "sent_bytes": self.traffic.total}

    # Where plain code enters. Compilers take the name and the sizes of an operator as constants.

    def _exchange(self, way: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        xs = list(tensors.values())
        refuse_transforms(way, *xs)
        names, needs = ",".join(tensors), _needs(xs)
        if not names.isascii():  # which operators do not take
            names = ",".join(map(ascii, tensors))
        if not torch.compiler.is_compiling():
            self._check_rows(way, names, xs, needs)
        moved = step_ops.exchange(xs, self._key, way, names, needs, self._num_rows[way][1])
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
        settings = what, causal, scale, tuple(_needs([q, k, v])), scores.key
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
        """Return the call that a recorded program names, see `usp`."""
        return self._call(literal_eval(name.removeprefix("step ")), q, k, v)

    def move(
        self, way: str, names: str, xs: Sequence[Tensor], needs: Sequence[bool]
    ) -> Sequence[Tensor]:
        """Move rows one way, see `step_ops`; without names, gradients."""
        what = way if names else f"{step_ops.ADJOINT[way]}, backward"
        with shared(f"step {self.number}: {what}"):
            if names:
                self._check_rows(way, names, xs, needs)
            if way == "gather_samples":
                return [samples_of_all(xs[0], *self._samples)]
            if way == "samples back":
                num_own = self._num_rows["gather_samples"][0]
                return [sample_gradients(xs[0], num_own, *self._samples).clone()]
            if way == "contexts back":
                return move_back(self._context_route, xs)
            if way == "route_contexts":
                route = self._context_route
            else:
                route = self._route if way == "route" else self._route.inverse
            if names:
                self._done.traffic += Traffic(routed=route.sent_bytes(xs))
            return move_rows(route, xs)

    def num_marked(self, is_marked: Tensor) -> int:
        """Count as `count_routed` does, outside compiled code."""
        group, wanted = self._parallel.group, (self._num_rows["route"][0],)
        where = f"step {self.number}: count_routed"

        def check() -> str:
            if is_marked.dtype != torch.bool or is_marked.shape != wanted or not is_marked.is_cpu:
                raise ConfigError(
                    f"count_routed: a {is_marked.dtype} tensor of {tuple(is_marked.shape)} on "
                    f"{is_marked.device}: give a bool tensor of {wanted} on the host"
                )
            return "rows of a bool tensor"

        with shared(where):
            self._first(("count_routed",), [is_marked], lambda: self._agree("count_routed", check))
            route, marks = self._route.route, is_marked.numpy()
            marks = marks if route.send_index is None else marks[route.send_index]
            dest = np.repeat(np.arange(group.size), route.send_splits)
            sent = torch.from_numpy(sums_by(dest, marks, group.size))
            come, one_each = torch.empty_like(sent), [1] * group.size
            start_all_to_all(group.control or group, where, come, sent, one_each, one_each)()
            return int(come.sum())

    def mean_and_scale(self, values: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the weighted mean over all ranks, and the factor of its gradient; no weights: 0.

        The factor is (ranks of the mean, or 1) / (sum of weights). One all-reduce.
        """
        group, is_mean = self._parallel.data_group, self._parallel.gradients == "mean"
        with shared(f"step {self.number}: mean"):
            self._check_mean(values, weights)
            wide = values.double()
            counted = wide.new_ones(()) if weights is None else weights.double()
            counted = counted.expand_as(values)
            sums = torch.stack([(wide * counted).sum(), counted.sum()])
            sums = all_reduce(group, f"step {self.number}: all_reduce (mean)", sums)
            inverse = torch.where(sums[1] == 0.0, 0.0, sums[1].reciprocal())
            scale = inverse * (group.size if is_mean else 1)
            return (sums[0] * inverse).to(values.dtype), scale

    # Things that are made, checked and agreed on when they are first used.

    @cached_property
    def _route(self) -> BoundRoute:
        parallel = self._parallel
        mark_lengths("step", self.plan, parallel.rank)
        route = self.plan.route(parallel.rank)
        return BoundRoute(route, parallel.group, parallel.device, self.number, "route")

    @cached_property
    def _context_route(self) -> BoundRoute:
        parallel, num_rows = self._parallel, self._num_rows["route_contexts"][0]
        args = parallel.group, parallel.device, self.number, "route_contexts"
        return BoundRoute(self.plan.context_route(parallel.rank), *args, num_rows=num_rows)

    @cached_property
    def _bag(self) -> packed.Bag:
        return packed.Bag.of(self.plan, self._parallel.group, self._parallel.device)

    @cached_property
    def _samples(self) -> tuple[int, Tensor, RankGroup, int]:
        counts, parallel = self.plan.source_counts, self._parallel
        most = int(counts.max(initial=0))  # rows of a gather are padded to the most of a rank
        rows = ranges(np.arange(counts.size) * most, counts)
        return most, table_on(rows, parallel.device), parallel.group, self.number

    def _first(self, form: tuple[Any, ...], xs: Sequence[Any], make: Callable[[], T]) -> T:
        """Return what `make` gives for a form of call and of tensors; made at the first use."""

        def first() -> T:
            with shared(f"step {self.number}: {form[0]}"):
                return make()

        try:
            key = form, *[(type(x), x.shape, x.dtype, x.device, x.layout) for x in xs]
            hash(key)
        except (AttributeError, TypeError, RuntimeError):  # no dense tensors: `make` refuses them
            return first()
        return self._kept.get(key, first)

    def _agree(self, what: str, check: Callable[[], str]) -> str:
        """Let all ranks agree on the form that a check gives, or on the error that it raises."""
        text, error = "", None
        try:
            text = check()
        except Exception as met:  # whatever it is, the others must not wait
            error = met
        form = text if error is None else error  # which no rank has agreed on
        first_use(self._parallel.group, form, lambda: (text, error), what=what, step=self.number)
        return text

    def _check_rows(
        self, way: str, names: str, xs: Sequence[Tensor], needs: Sequence[bool]
    ) -> None:
        def check() -> str:
            """Describe what decides the sizes: names, dtypes, widths and gradients."""
            if not xs:
                raise ConfigError(f"{way}: give at least one tensor")
            forms: list[str] = []
            for name, x, is_needed in zip(names.split(","), xs, needs, strict=True):
                check_rows(way, name, x, self._num_rows[way][0], self._parallel.device)
                dtype, end = str(x.dtype).removeprefix("torch."), " with gradient" * is_needed
                forms.append(f"{name} {dtype}{list(x.shape[1:])}{end}")
            return f"{way}({', '.join(forms)})"

        self._first((way, names, *needs), xs, lambda: self._agree(way, check))

    def _check_mean(self, values: Tensor, weights: Tensor | None) -> None:
        def check() -> str:
            step_ops.check_mean(values, weights)
            return f"{tuple(values.shape[1:])}, {values.dtype}, weights {weights is not None}"

        xs = [values] if weights is None else [values, weights]
        self._first(("mean",), xs, lambda: self._agree("mean", check))

    def _check_settings(self, what: str, causal: bool, scale: float | None, scores: Scores) -> None:
        check_settings(what, causal, scale)
        masks = self.plan.masks
        if scores.is_near and not (causal or (masks is not None and masks.is_causal.all())):
            raise ConfigError(
                f"attend: {scores}, and not all attention is causal: windows and chunks need "
                'causal=True, or Sequences(.., masks="causal") in the plan'
            )
        if causal and self.plan.masks is not None:
            raise ConfigError(
                "attend: causal=True, and the sequences were planned with masks, which hold for "
                'every attention: leave it out, or plan with Sequences(.., masks="causal")'
            )

    def _sizes_of(self, what: str, q: Tensor, k: Tensor) -> list[int]:
        if self._degree == 1 or what == "attend_contexts":
            return [0, 0, 0, self._key]
        base, more = k.shape[1] // self._degree, k.shape[1] % self._degree
        own = base + (self._place < more)
        return [self._num_together, q.shape[1] // k.shape[1] * own, own, self._key]

    def _call(self, settings: Settings, q: Tensor, k: Tensor, v: Tensor) -> AttentionCall:
        return self._first(settings, [q, k, v], lambda: self._made(settings, q, k, v))

    def _made(self, settings: Settings, q: Tensor, k: Tensor, v: Tensor) -> AttentionCall:
        what, causal, scale, _, key = settings
        bag, kernel, fixed = self._bag, self._parallel.kernel, dict[str, Any]()
        scores = Scores(*key)
        self._check_settings(what, causal, scale, scores)

        def check() -> str:
            """Describe what decides the exchanges: heads, dtype and gradients."""
            check_tensors("attend", q, k, v)
            packed.check(self.plan.topology, bag, kernel, q, k, v, scores.cap)
            most_sharing = int(self.plan.topology.ulysses_groups.bag_sizes.max())
            shapes = q.shape[1:], k.shape[1:], v.shape[1:]
            return f"{most_sharing} ranks, {shapes}, {q.dtype}, {_name_of(settings)}"

        if what == "attend":
            self._agree(what, check)
            fixed["count"] = partial(self._done.attend, packed.traffic(bag, q, k))
        else:
            check_tensors(what, q, k, v)
            packed.check_shapes(bag, q, k, v, num_keys=self._num_rows["route_contexts"][1])
        fixed |= {"where": f"step {self.number}: {what}", "name": _name_of(settings)}
        kind = "contexts" if what != "attend" else "causal" if causal else "all"
        factor, sizes = positive_scale(q.shape[2], scale), self._sizes_of(what, q, k)
        return bag.call(kind, kernel, q, k, factor, scores, sizes=sizes, **fixed)


def _name_of(settings: Settings) -> str:
    what, causal, scale, *others = settings
    return f"step {(what, causal, None if scale is None else float(scale), *others)}"


def _needs(xs: Sequence[object]) -> list[bool]:
    """Return, for each tensor, whether it wants a gradient."""
    has_grad = torch.is_grad_enabled()
    return [has_grad and isinstance(x, Tensor) and x.requires_grad for x in xs]


def _num_rows(plan: Plan, rank: int, bag: int) -> dict[str, tuple[int, int]]:
    """Return the rows that each exchange takes from this rank, and brings to it, by its name."""
    counts, lens, contexts = plan.source_counts, plan.seq_lens, plan.context_lens
    first = int(counts[:rank].sum())
    own = slice(first, first + int(counts[rank]))
    loaded, computed = int(lens[own].sum()), int(plan.tokens[rank])
    rows = {"route": (loaded, computed), "restore": (computed, loaded), "route_contexts": (0, 0)}
    rows["gather_samples"] = own.stop - first, lens.size
    if contexts is not None:
        brought = int(contexts[plan.bag_of == bag].sum())
        rows["route_contexts"] = int(contexts[own].sum()), brought
    return rows
