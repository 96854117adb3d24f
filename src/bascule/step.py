"""Step: the moves and the attention of one plan, bound to its groups and its device.

Shapes: T tokens as loaded on this rank, C tokens that it computes on, H heads, D head width, n
samples as loaded on this rank, N samples of all ranks.
"""

from collections.abc import Hashable, Sequence
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bascule import step_ops
from bascule.arrays import Ints, cumulative, ranges
from bascule.attention import packed, usp
from bascule.attention.call import AttentionCall
from bascule.attention.inputs import (
    check_settings,
    check_tensors,
    positive_scale,
    with_positive_scale,
)
from bascule.comm import mean
from bascule.comm.agree import agree
from bascule.comm.collectives import table_on
from bascule.comm.exchange import (
    BoundRoute,
    misfit,
    move_back,
    move_rows,
    sample_gradients,
    samples_of_all,
)
from bascule.comm.failures import leave, shared
from bascule.comm.groups import RankGroup, this_world
from bascule.comm.mean import MeanOver
from bascule.comm.profiles import mark_lengths
from bascule.comm.transforms import refuse_transforms
from bascule.errors import ConfigError
from bascule.plan.costs import Cost
from bascule.plan.traffic import Traffic
from bascule.planning import Planned

if TYPE_CHECKING:
    from bascule.parallel import SequenceParallel

_NUM_CALLS = 64


class _Done:
    """Forward passes of a step so far: attentions, and bytes that this rank sent."""

    def __init__(self) -> None:
        self.num_attended, self.traffic = 0, Traffic()

    def attend(self, traffic: Traffic) -> None:
        """Count an attention."""
        self.num_attended += 1
        self.traffic += traffic


class Step:
    """A plan bound to its groups and device: moves and attends for one step. Made by `plan`.

    Forward, recomputation under checkpointing and backward of a step all use this object, however
    many steps are alive. All ranks call its methods in the same order.

    Attributes:
        plan: The frozen plan.
        number: Which plan of the SequenceParallel it is, from 1.
        sources: (n, 2) of each sequence that this rank routes, the microbatch of `plan_step` in
            which it loaded it, and its place there.
        local: What this rank computes on, as numpy arrays.
        local_seq_ids: Global ids of the sequences of this rank's chunks; see `LocalLayout`.
        token_slot: (C,) index into `local_seq_ids` of each token that this rank computes on.
    """

    def __init__(
        self, parallel: "SequenceParallel", planned: Planned, number: int, cost: Cost
    ) -> None:
        plan = planned.plan
        self._parallel, self.number = parallel, number
        self.plan, self.sources = plan, planned.sources
        self._done = _Done()
        self._cost = cost  # that it was planned with
        self._is_marked = False
        self._calls: dict[Hashable, AttentionCall] = {}
        self.local = plan.local(parallel.rank)
        self.local_seq_ids = table_on(self.local.seq_ids, parallel.device)
        self.token_slot = table_on(self.local.slots, parallel.device)
        # For compilers, which take whole numbers, and cannot look into arrays.
        lens, place = plan.seq_lens, packed.place_of(plan, parallel.rank)
        self._key = this_world().steps.add(self)
        self._num_rows = {
            "route": self.local.positions.size,
            "restore": int(lens[plan.source_ranks == parallel.rank].sum()),
            "route_contexts": place.num_contexts,
            "gather_samples": int(plan.source_counts.sum()),
        }
        self._num_together, self._sharing = place.num_together, place.degree
        self._place = place.ulysses

    @property
    def num_attended(self) -> int:
        """Attentions that this rank computed so far, forward passes only."""
        return self._done.num_attended

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank sent to other ranks so far, forward passes only."""
        return self._done.traffic

    def __enter__(self) -> "Step":
        """Begin a block in which an error of the user's code ends the others."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            leave(error, f"step {self.number}: the code of this rank", ends_all=True)

    def route(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Bring tokens from where they were loaded to where they are computed.

        Differentiable; one all-to-all forward and one backward, which sends only what needs
        gradients.

        Args:
            tensors: Each (T, ...) in the order of this rank's sequences, of any dtype.

        Returns:
            Each (C, ...), by its name.

        Raises:
            ConfigError: A tensor has another number of rows. CommError: an exchange failed.
        """
        return dict(zip(tensors, self._exchange("route", tensors), strict=True))

    def restore(self, tensor: Tensor) -> Tensor:
        """Bring tokens back to their source rank and order: (C, ...) to (T, ...).

        Differentiable; one all-to-all a direction.
        """
        return self._exchange("restore", {"tensor": tensor})[0]

    def route_contexts(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Bring the context of each sequence to all ranks that compute on the sequence.

        Differentiable; one all-to-all a direction. The gradient of a context is the sum over ranks.

        Args:
            tensors: Each (rows, ...): the contexts of this rank's sequences, one after another, as
                long as `Sequences.context_lens` says.

        Returns:
            Each (E, ...), by its name: the contexts of the sequences of this rank's bag, in order
            of their ids.

        Raises:
            As `route`.
        """
        return dict(zip(tensors, self._exchange("route_contexts", tensors), strict=True))

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

        Raises:
            ConfigError: An argument is wrong.
        """
        return self._attend(q_CHD, k_EKD, v_EKD, "contexts", False, scale)

    def attend(
        self,
        q_CHD: Tensor,
        k_CKD: Tensor,
        v_CKD: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """Exact attention within each whole sequence; (C, H, D).

        Two all-to-alls forward and two backward where ranks share heads; R - 1 exchanges with the
        neighbours forward and 2 R - 1 backward where there is a ring. The number of torch
        operations does not depend on sequences, chunks or heads (CPU kernels aside).

        Args:
            q_CHD: Queries.
            k_CKD: Keys; H is a multiple of K.
            v_CKD: Values.
            causal: Whether a token sees none that comes later. Where sequences were planned with
                masks these hold, and it must be False.
            scale: Factor of the scores. Default: D^-0.5.

        Raises:
            ConfigError: An argument is wrong. CommError: an exchange failed.
        """
        return self._attend(q_CHD, k_CKD, v_CKD, "attend", causal, scale)

    def count_routed(self, is_marked: Tensor) -> int:
        """How many of the rows that `route` brings here are marked; one gather, on the host.

        Args:
            is_marked: bool (T,) on the host, in the order of this rank's sequences.
        """
        if not torch.compiler.is_compiling() and not _is_plain(is_marked):
            return self.num_marked(is_marked)  # refuses it on all ranks
        return int(step_ops.count_routed(is_marked, self._key))

    def gather_samples(self, tensor: Tensor) -> Tensor:
        """Give every rank the per-sample rows of all: (n, ...) to (N, ...), by global sequence id.

        Differentiable; one all-gather forward, one reduce-scatter backward.
        """
        return self._exchange("gather_samples", {"tensor": tensor})[0]

    def mean(self, per_token: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """Mean over the tokens of all ranks, right where gradients are averaged (or summed).

        One all-reduce of two numbers.

        Args:
            per_token: (any number, ...) values of this rank; no rows are legal, a scalar is not.
            weights: What each value counts; broadcasts to the values. None counts each once.

        Returns:
            The global mean, the same on every rank.
        """
        refuse_transforms("mean", per_token)
        given = [per_token] if weights is None else [per_token, weights]
        if not torch.compiler.is_compiling() and not all(map(_is_plain, given)):
            self._agree_on_mean(per_token, weights)
        mean.check_gradient(weights)  # within an operator nothing has one
        return step_ops.mean(per_token, weights, self._key)[0]

    def metrics(self) -> dict[str, Any]:
        """Predicted loads before and after balancing, and what moved so far, as plain values."""
        predicted = self.plan.summary(self._cost, self._parallel.cluster)
        return {"step": self.number, **predicted, "sent_bytes": self.traffic.total}

    @cached_property
    def _route(self) -> BoundRoute:
        parallel = self._parallel
        route = self.plan.route(parallel.rank)
        return BoundRoute(route, parallel.group, parallel.device, self.number, "route")

    @cached_property
    def _context_route(self) -> BoundRoute:
        parallel, plan = self._parallel, self.plan
        contexts, is_own = plan.context_lens, plan.source_ranks == parallel.rank
        num_rows = 0 if contexts is None else int(contexts[is_own].sum())
        args = parallel.group, parallel.device, self.number, "route_contexts"
        return BoundRoute(plan.context_route(parallel.rank), *args, num_rows=num_rows)

    @cached_property
    def _bag(self) -> packed.Bag:
        parallel = self._parallel
        return packed.Bag.of(self.plan, parallel.group, parallel.device)

    @cached_property
    def _samples(self) -> tuple[int, Tensor, RankGroup, int]:
        counts, parallel = self.plan.source_counts, self._parallel
        most = int(counts.max(initial=0))  # rows of a gather are padded to the most of a rank
        rows = ranges(np.arange(counts.size) * most, counts)
        return most, table_on(rows, parallel.device), parallel.group, self.number

    # Where plain code enters. Compilers take the name and the sizes of an operator as constants.

    def _exchange(self, way: str, tensors: dict[str, Tensor]) -> list[Tensor]:
        refuse_transforms(way, *tensors.values())
        xs = list(tensors.values())
        has_grad = torch.is_grad_enabled()
        needs = [has_grad and isinstance(x, Tensor) and x.requires_grad for x in xs]
        if not torch.compiler.is_compiling() and not (xs and all(map(_is_plain, xs))):
            with shared(f"step {self.number}: {way}"):
                self._agree_on_rows(way, tensors, needs)
        names, num_rows = ",".join(tensors), self._num_rows[way]
        if not names.isascii():  # which operators do not take
            names = ",".join(map(ascii, tensors))
        return step_ops.exchange(xs, self._key, way, names, needs, num_rows)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, kind: str, causal: bool, scale: float | None
    ) -> Tensor:
        what = "attend_contexts" if kind == "contexts" else "attend"
        refuse_transforms(what, q, k, v)
        has_grad = torch.is_grad_enabled()
        needs = [has_grad and isinstance(x, Tensor) and x.requires_grad for x in (q, k, v)]
        if torch.compiler.is_compiling():
            self._check_settings(what, causal, scale)
            q, _ = with_positive_scale(q, scale)
            name, sizes = self._name_of(kind, causal, scale, needs), self._sizes_of(q, k, kind)
            return usp.attend_op(q, k, v, None, None, sizes, name)[0]
        with shared(f"step {self.number}: {what}"):
            call = self._call(kind, causal, scale, needs, q, k, v)
            if scale is not None:
                q, _ = with_positive_scale(q, scale)
            return usp.attend(q, k, v, call)

    def _name_of(self, kind: str, causal: bool, scale: float | None, needs: Sequence[bool]) -> str:
        flags = "".join("1" if one else "0" for one in needs)
        return f"step\n{kind}\n{causal}\n{scale}\n{flags}"

    def _sizes_of(self, q: Tensor, k: Tensor, kind: str) -> list[int]:
        if self._sharing == 1 or kind == "contexts":
            return [0, 0, 0, self._key]
        base, more = k.shape[1] // self._sharing, k.shape[1] % self._sharing
        own = base + (self._place < more)
        return [self._num_together, q.shape[1] // k.shape[1] * own, own, self._key]

    def find_call(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> AttentionCall:
        """Return the call that a recorded program names, see `usp.find_call`."""
        _, kind, causal, scale, flags = name.split("\n")
        factor, needs = None if scale == "None" else float(scale), [one == "1" for one in flags]
        with shared(f"step {self.number}: attend"):
            return self._call(kind, causal == "True", factor, needs, q, k, v)

    def _call(
        self,
        kind: str,
        causal: bool,
        scale: float | None,
        needs: Sequence[bool],
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> AttentionCall:
        """Return the call of this form: checked, agreed on and made when it is first used."""
        try:
            forms = [(x.shape, x.dtype, x.device) for x in (q, k, v)]
            key = (*forms, kind, causal, scale, *needs)
            call = self._calls.get(key)
        except (AttributeError, TypeError):  # no tensors, or a scale that is a list: said below
            key = call = None
        if call is None:
            call = self._made(kind, causal, scale, needs, (q, k, v))
            if len(self._calls) >= _NUM_CALLS:  # scales may change from call to call
                self._calls.clear()
            self._calls[key] = call
        return call

    def _made(
        self,
        kind: str,
        causal: bool,
        scale: float | None,
        needs: Sequence[bool],
        qkv: tuple[Tensor, Tensor, Tensor],
    ) -> AttentionCall:
        (q, k, v), names = qkv, dict[str, Any]()
        if kind == "contexts":
            self._check_settings("attend_contexts", causal, scale)
            check_tensors("attend_contexts", q, k, v)
            num_keys = int(self._bag.contexts.lens.sum())
            packed.check_shapes(self._bag, q, k, v, num_keys=num_keys)
        else:
            self._agree_on_attention(qkv, needs, causal, scale)
            names["count"] = partial(self._done.attend, packed.traffic(self._bag, q, k))
        names |= {
            "where": f"step {self.number}: attend",
            "name": self._name_of(kind, causal, scale, needs),
            "sizes": self._sizes_of(q, k, kind),
        }
        if kind == "attend":
            kind = "causal" if causal else "all"
        kernel, factor = self._parallel.options.kernel, positive_scale(q.shape[2], scale)
        return self._bag.call(kind, kernel, q, k, factor, **names)

    # How operators come back, with the agreements that the first of a form takes; autograd does not
    # record it.

    def move(
        self, way: str, xs: Sequence[Tensor], names: Sequence[str], needs: Sequence[bool]
    ) -> Sequence[Tensor]:
        """Move rows one way, see `step_ops`; into memory of their own, as operators must."""
        is_forward = bool(names)
        what = way if is_forward else f"{step_ops.ADJOINT[way]}, backward"
        with shared(f"step {self.number}: {what}"):
            if is_forward:
                self._agree_on_rows(way, dict(zip(names, xs, strict=True)), needs)
            if way == "gather_samples":
                return [samples_of_all(xs[0], *self._samples)]
            if way == "samples back":
                own = int(self.plan.source_counts[self._parallel.rank])
                return [sample_gradients(xs[0], own, *self._samples).clone()]
            if way == "contexts back":
                return move_back(self._context_route, xs)
            route = self._route_of(way)
            if is_forward:
                rows = sum(x.shape[1:].numel() * x.element_size() for x in xs)
                self._done.traffic += Traffic(routed=rows * route.num_moved)
            return move_rows(route, xs)

    def num_marked(self, is_marked: Tensor) -> int:
        """Do what `count_routed` does."""
        with shared(f"step {self.number}: count_routed"):
            return count_marked(self._route, is_marked)

    def mean_and_scale(self, values: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the mean, and what its gradient is multiplied by."""
        group, is_mean = self._parallel.data_group, self._parallel.options.gradients == "mean"
        with shared(f"step {self.number}: mean"):
            self._agree_on_mean(values, weights)
            over = MeanOver(group, group.size if is_mean else 1, self.number)
            return mean.mean_and_scale(values, weights, over)

    def _route_of(self, way: str) -> BoundRoute:
        if way == "route_contexts":
            return self._context_route
        return self._route if way == "route" else self._route.inverse

    @cached_property
    def _most_sharing(self) -> int:
        """The most ranks that share heads; of "auto", others every step."""
        return int(self.plan.topology.ulysses_groups.bag_sizes.max())

    # What all ranks must mean alike, agreed on when it is first used: each of these returns where
    # they do, and raises on all of them where one gave what is wrong, or they differ.

    def _check_settings(self, what: str, causal: bool, scale: float | None) -> None:
        check_settings(what, causal, scale)
        if causal and self.plan.masks is not None:
            raise ConfigError(
                "attend: causal=True, and the sequences were planned with masks, which hold for "
                'every attention: leave it out, or plan with Sequences(.., masks="causal")'
            )

    def _agree_on_attention(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        needs: Sequence[bool],
        causal: bool,
        scale: float | None,
    ) -> None:
        """Heads, dtype and gradients decide the exchanges."""
        parallel, error = self._parallel, None
        self._check_settings("attend", causal, scale)
        try:
            check_tensors("attend", *qkv)
            packed.check(self.plan.topology, self._bag, parallel.options.kernel, *qkv)
            factor = None if scale is None else float(scale)
            shapes = [x.shape[1:] for x in qkv]
            form = (self._most_sharing, *shapes, qkv[0].dtype, *needs, causal, factor)
        except ConfigError as met:
            form = error = met
        parallel.agree_once("attend", form, error, self.number)

    def _agree_on_rows(self, way: str, tensors: dict[str, Tensor], needs: Sequence[bool]) -> None:
        """Names, dtypes, widths and gradients decide the sizes.

        The first route says in a running profile which lengths the step is for.
        """
        if way == "route" and not self._is_marked:
            self._is_marked = True
            mark_lengths("step", self.plan, self._parallel.rank)
        if way == "gather_samples":
            num_rows = int(self.plan.source_counts[self._parallel.rank])
        else:
            num_rows = self._route_of(way).num_at_source
        error = None if tensors else ConfigError(f"{way}: give at least one tensor")
        for name, x in tensors.items():
            error = error or misfit(way, name, x, num_rows, self._parallel.device)
        form = str(error) if error is not None else _form_of(tensors, needs)
        self._parallel.agree_once(way, f"{way}({form})", error, self.number)

    def _agree_on_mean(self, values: Tensor, weights: Tensor | None) -> None:
        error, form = None, None
        try:
            mean.check(values, weights)
            form = (values.shape[1:], values.dtype, weights is not None)
        except Exception as met:  # whatever it is, the others must not wait
            error = met
        self._parallel.agree_once("mean", form, error, self.number)


def _is_plain(x: object) -> bool:
    """Return whether operators take it for what it is; `misfit` says what is wrong otherwise."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or hasattr(x, "placements"):
        return False
    return not (x.is_nested or x.is_quantized or x.is_meta)


def _form_of(tensors: dict[str, Tensor], needs: Sequence[bool]) -> str:
    return ", ".join(
        f"{name} {str(x.dtype).removeprefix('torch.')}{list(x.shape[1:])}"
        f"{' with gradient' if is_needed else ''}"
        for (name, x), is_needed in zip(tensors.items(), needs, strict=True)
    )


def count_marked(route: BoundRoute, is_marked: Tensor) -> int:
    """How many marked rows a route brings here; one gather of a number a rank, on the host.

    Args:
        route: That of tokens.
        is_marked: bool (T,), on the host.
    """
    sent, error = np.zeros(route.group.size, np.int64), None
    try:
        sent = _marked_by_rank(route, is_marked)
    except ConfigError as met:  # the others must not wait
        error = met
    control = route.group.control or route.group
    where = {"what": "count_routed", "step": route.step}
    said = agree(control, {}, error, **where, values=sent, capacity=sent.size)
    return sum(int(of_rank[route.group.rank]) for of_rank in said)


def _marked_by_rank(route: BoundRoute, is_marked: Tensor) -> Ints:
    """Of the rows that go to each rank, how many are marked."""
    wanted = (route.num_at_source,)
    if is_marked.dtype != torch.bool or is_marked.shape != wanted or not is_marked.is_cpu:
        raise ConfigError(
            f"count_routed: a {is_marked.dtype} tensor of {tuple(is_marked.shape)} on "
            f"{is_marked.device}: give a bool tensor of {wanted} on the host"
        )
    marks, index = is_marked.numpy(), route.route.send_index
    before = cumulative((marks if index is None else marks[index]).astype(np.int64))
    return np.diff(before[cumulative(route.route.send_splits)])
