"""Step: the moves and the attention of one plan, bound to its groups and its device.

Shapes: T tokens as loaded on this rank, C tokens that it computes on, H heads, D head width, n
samples as loaded on this rank, N samples of all ranks.
"""

from collections.abc import Hashable, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bascule import step_ops
from bascule.arrays import Ints, cumulative, ranges
from bascule.attention import packed
from bascule.attention.call_spec import (
    check_settings,
    check_tensors,
    naming,
    positive_scale,
    with_positive_scale,
)
from bascule.attention.usp import Forward, by_head, usp_attention, usp_backward, usp_forward
from bascule.comm import mean
from bascule.comm.agree import Statement, agree
from bascule.comm.exchange import (
    BoundRoute,
    exchange,
    gather_samples,
    misfit,
    move_back,
    move_rows,
    sample_gradients,
    samples_of_all,
)
from bascule.comm.groups import RankGroup
from bascule.comm.guard.failures import tell, telling
from bascule.comm.guard.ranges import mark_lengths
from bascule.comm.mean import MeanOver
from bascule.comm.staging import table_on
from bascule.comm.transforms import is_recorded, refuse_transforms
from bascule.comm.world import this_world
from bascule.errors import ConfigError
from bascule.plan.costs import Cost
from bascule.plan.traffic import Traffic
from bascule.planning import Planned

if TYPE_CHECKING:
    from bascule.parallel import SequenceParallel

Qkv = tuple[Tensor, Tensor, Tensor]

_NUM_CALLS = 64


class _Call(NamedTuple):
    """An attention of a step, as it was when it was first made.

    Attributes:
        prepared: What `usp_attention` takes with the tensors.
        traffic: What this rank sends to others in it.
    """

    prepared: packed.Prepared
    traffic: Traffic


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
        num_attended: Attentions that this rank computed so far, forward passes only.
        traffic: What this rank sent to other ranks so far, forward passes only.
    """

    def __init__(
        self, parallel: "SequenceParallel", planned: Planned, number: int, cost: Cost
    ) -> None:
        plan = planned.plan
        self._parallel, self.number = parallel, number
        self.plan, self.sources = plan, planned.sources
        self.num_attended, self.traffic = 0, Traffic()
        self._cost = cost  # that it was planned with
        self._is_marked = False
        self._calls: dict[Hashable, _Call] = {}
        self.local = plan.local(parallel.rank)
        self.local_seq_ids = table_on(self.local.seq_ids, parallel.device)
        self.token_slot = table_on(self.local.slots, parallel.device)
        # For compilers, which take whole numbers, and cannot look into arrays.
        lens, counts, place = (
            plan.seq_lens,
            plan.source_counts,
            packed.place_of(plan, parallel.rank),
        )
        self._key = this_world().steps.add(self)
        self._num_samples = int(counts.sum())
        self._num_rows = {
            "route": self.local.positions.size,
            "restore": int(lens[plan.source_ranks == parallel.rank].sum()),
            "route_contexts": place.num_contexts,
        }
        self._num_together, self._sharing = place.num_together, place.degree
        self._place = place.ulysses

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
            tell(error, f"step {self.number}: the code of this rank", leaves=True)

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
        refuse_transforms("attend_contexts", q_CHD, k_EKD, v_EKD)
        if is_recorded():
            return self._attend_recorded(q_CHD, k_EKD, v_EKD, "contexts", scale)
        with telling(f"step {self.number}: attend_contexts"):
            check_settings("attend_contexts", False, scale)
            check_tensors("attend_contexts", q_CHD, k_EKD, v_EKD)
            q_CHD, factor = with_positive_scale(q_CHD, scale)
            plan, _ = self._prepared((q_CHD, k_EKD, v_EKD), "contexts", factor)
            return usp_attention(q_CHD, k_EKD, v_EKD, plan)

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
        if is_recorded():
            refuse_transforms("attend", q_CHD, k_CKD, v_CKD)
            kind = "causal" if causal else "all"
            return self._attend_recorded(q_CHD, k_CKD, v_CKD, kind, scale)
        qkv = q_CHD, k_CKD, v_CKD
        with telling(f"step {self.number}: attend"):
            call = self._call_of(qkv, list(map(needs_gradient, qkv)), causal, scale)
            if scale is not None:
                q_CHD, _ = with_positive_scale(q_CHD, scale)
            with naming("attend", qkv):
                out = usp_attention(q_CHD, k_CKD, v_CKD, *call.prepared)
            self.num_attended += 1
            self.traffic += call.traffic
            return out

    def count_routed(self, is_marked: Tensor) -> int:
        """How many of the rows that `route` brings here are marked; one gather, on the host.

        Args:
            is_marked: bool (T,) on the host, in the order of this rank's sequences.
        """
        if is_recorded():
            return int(step_ops.count_routed(is_marked, self._key))
        with telling(f"step {self.number}: count_routed"):
            return count_marked(self._route, is_marked)

    def gather_samples(self, tensor: Tensor) -> Tensor:
        """Give every rank the per-sample rows of all: (n, ...) to (N, ...), by global sequence id.

        Differentiable; one all-gather forward, one reduce-scatter backward.
        """
        refuse_transforms("gather_samples", tensor)
        needs_grad = needs_gradient(tensor)
        if is_recorded():
            args = self._key, self._num_samples, needs_grad
            return step_ops.gather_samples(tensor, *args)
        with telling(f"step {self.number}: gather_samples"):
            self._agree_on_samples(tensor, needs_grad)
            return gather_samples(tensor, *self._samples)

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
        if is_recorded():
            mean.check_gradient(weights)  # within an operator nothing has one
            return step_ops.mean(per_token, weights, self._key)[0]
        with telling(f"step {self.number}: mean"):
            self._agree_on_mean(per_token, weights)
            return mean.global_mean(per_token, weights, self._mean_over)

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
        return packed.Bag.of(self.plan, parallel.group, parallel.device, self.number)

    @cached_property
    def _samples(self) -> tuple[int, Tensor, RankGroup, int]:
        counts, parallel = self.plan.source_counts, self._parallel
        most = int(counts.max(initial=0))  # rows of a gather are padded to the most of a rank
        rows = ranges(np.arange(counts.size) * most, counts)
        return most, table_on(rows, parallel.device), parallel.group, self.number

    def _exchange(self, what: str, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        refuse_transforms(what, *tensors.values())
        needs_grad = list(map(needs_gradient, tensors.values()))
        if is_recorded():
            args = self._key, what, ",".join(tensors), needs_grad, self._num_rows[what]
            return tuple(step_ops.exchange(list(tensors.values()), *args))
        with telling(f"step {self.number}: {what}"):
            route = self._agreed_route(what, tensors, needs_grad)
            return exchange(route, list(tensors.values()))

    def _attend_recorded(
        self, q: Tensor, k: Tensor, v: Tensor, kind: str, scale: float | None
    ) -> Tensor:
        self._check_settings(kind == "causal", scale)
        q, _ = with_positive_scale(q, scale)
        sizes: list[int] = []
        if self._sharing > 1 and kind != "contexts":
            own = k.shape[1] // self._sharing + (self._place < k.shape[1] % self._sharing)
            sizes = [self._num_together, q.shape[1] // k.shape[1] * own, own]
        needs_grad = [needs_gradient(x) for x in (q, k, v)]
        return step_ops.attend(q, k, v, self._key, sizes, needs_grad, kind, scale)[0]

    # What operators do, with the same checks and agreements; autograd does not record it.

    def attend_now(
        self,
        qkv: Qkv,
        needs_grad: Sequence[bool],
        kind: str,
        scale: float | None,
    ) -> Forward:
        """The forward of `attend` or `attend_contexts`."""
        with telling(f"step {self.number}: attend"), naming("attend", qkv):
            if kind == "contexts":
                check_tensors("attend_contexts", *qkv)
                factor = positive_scale(qkv[0].shape[2], scale)
                return usp_forward(*qkv, *self._prepared(qkv, kind, factor))
            call = self._call_of(qkv, needs_grad, kind == "causal", scale)
            self.num_attended += 1
            self.traffic += call.traffic
            return usp_forward(*qkv, *call.prepared)

    def attend_back(
        self,
        grad: Tensor,
        saved: Sequence[Tensor],
        shapes: tuple[tuple[int, int], tuple[int, int]],
        kind: str,
        scale: float | None,
    ) -> tuple[Tensor, ...]:
        """Gradients of q, k and v, of so many rows and heads, from what the forward gave."""
        like = grad.new_empty(())  # without memory for what has only a shape
        q, k = (like.expand(*shape, grad.shape[2]) for shape in shapes)
        plan, heads = self._prepared((q, k, k), kind, positive_scale(grad.shape[2], scale))
        if heads is None:
            *rows, out, lse = saved
            saved = *map(by_head, (*rows, out)), lse
        else:
            whole, out, lse = saved
            saved = *heads.parts(whole), out.transpose(1, 2), lse
        with telling(f"step {self.number}: attend, backward"):
            return usp_backward(grad, saved, plan, heads)

    def exchange_now(
        self, what: str, tensors: dict[str, Tensor], needs_grad: Sequence[bool]
    ) -> tuple[Tensor, ...]:
        """The forward of `route` or `restore`."""
        with telling(f"step {self.number}: {what}"):
            route = self._agreed_route(what, tensors, needs_grad)
            return move_rows(route, list(tensors.values()))

    def exchange_back(self, what: str, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The gradients of a call's rows, where these came from."""
        with telling(f"step {self.number}: {what}, backward"):
            return move_back(self._route_of(what), grads)

    def gather_now(self, tensor: Tensor, needs_grad: bool) -> Tensor:
        """The forward of `gather_samples`."""
        with telling(f"step {self.number}: gather_samples"):
            self._agree_on_samples(tensor, needs_grad)
            return samples_of_all(tensor, *self._samples)

    def gather_back(self, grad: Tensor) -> Tensor:
        """The gradient of this rank's samples."""
        own = int(self.plan.source_counts[self._parallel.rank])
        with telling(f"step {self.number}: gather_samples, backward"):
            return sample_gradients(grad, own, *self._samples)

    def mean_now(self, values: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """The forward of `mean`, and what its gradient is multiplied by."""
        with telling(f"step {self.number}: mean"):
            self._agree_on_mean(values, weights)
            return mean.mean_and_scale(values, weights, self._mean_over)

    @property
    def _mean_over(self) -> MeanOver:
        group = self._parallel.data_group
        divisor = group.size if self._parallel.options.gradients == "mean" else 1
        return MeanOver(group, divisor, self.number)

    def _call_of(
        self, qkv: Qkv, needs_grad: Sequence[bool], causal: bool, scale: float | None
    ) -> "_Call":
        """The call of this form: checked, agreed on and made when it is first used."""
        refuse_transforms("attend", *qkv)
        try:
            forms = [(x.shape, x.dtype, x.device) for x in qkv]
            key = (*forms, *needs_grad, causal, scale)
            call = self._calls.get(key)
        except (AttributeError, TypeError):  # no tensors, or a scale that is a list: said below
            key = call = None
        if call is None:
            self._agree_on_attention(qkv, needs_grad, causal, scale)
            q, k, _ = qkv
            prepared = self._prepared(
                qkv, "causal" if causal else "all", positive_scale(q.shape[2], scale)
            )
            call = _Call(prepared, packed.traffic(self._bag, q, k))
            if len(self._calls) >= _NUM_CALLS:  # scales may change from call to call
                self._calls.clear()
            self._calls[key] = call
        return call

    @cached_property
    def _most_sharing(self) -> int:
        """The most ranks that share heads; of "auto", others every step."""
        return int(self.plan.topology.ulysses_groups.bag_sizes.max())

    def _prepared(self, qkv: Qkv, kind: str, scale: float) -> packed.Prepared:
        kernel = self._parallel.options.kernel
        if kind == "contexts":
            return self._bag.context_plan(kernel, *qkv, scale=scale), None
        return self._bag.prepared(kernel, *qkv, causal=kind == "causal", scale=scale)

    def _route_of(self, what: str) -> BoundRoute:
        if what == "route_contexts":
            return self._context_route
        return self._route if what == "route" else self._route.inverse

    def _agreed_route(
        self, what: str, tensors: dict[str, Tensor], needs_grad: Sequence[bool]
    ) -> BoundRoute:
        route = self._route_of(what)
        self._agree_on_rows(what, tensors, needs_grad, route.num_at_source)
        rows = sum(x.shape[1:].numel() * x.element_size() for x in tensors.values())
        self.traffic += Traffic(routed=rows * route.num_moved)
        return route

    # What all ranks must mean alike, agreed on when it is first used: each of these returns where
    # they do, and raises on all of them where one gave what is wrong, or they differ.

    def _check_settings(self, causal: bool, scale: float | None) -> None:
        check_settings("attend", causal, scale)
        if causal and self.plan.masks is not None:
            raise ConfigError(
                "attend: causal=True, and the sequences were planned with masks, which hold for "
                'every attention: leave it out, or plan with Sequences(.., masks="causal")'
            )

    def _agree_on_attention(
        self, qkv: Qkv, needs_grad: Sequence[bool], causal: bool, scale: float | None
    ) -> None:
        """Heads, dtype and gradients decide the exchanges."""
        parallel, (q, k, v) = self._parallel, qkv
        self._check_settings(causal, scale)
        try:
            check_tensors("attend", *qkv)
        except ConfigError as error:
            parallel.agree_once("attend", f"attend: {error}", error, self.number)
        factor = None if scale is None else float(scale)
        alike = q.dtype, k.dtype, v.dtype, tuple(needs_grad), causal, factor
        form = (self._most_sharing, q.shape[1:], k.shape[1:], v.shape[1:], *alike)
        if not parallel.group.calls.has_agreed(("attend", form)):
            error = None
            try:
                packed.check(self.plan.topology, self._bag, parallel.options.kernel, q, k, v)
            except ConfigError as met:
                error = met
            parallel.agree_once("attend", form, error, self.number)

    def _agree_on_rows(
        self, what: str, tensors: dict[str, Tensor], needs_grad: Sequence[bool], num_rows: int
    ) -> None:
        """Names, dtypes, widths and gradients decide the sizes.

        The first route says in a running profile which lengths the step is for.
        """
        if what == "route" and not self._is_marked:
            self._is_marked = True
            mark_lengths("step", self.plan, self._parallel.rank)
        error = None if tensors else ConfigError(f"{what}: give at least one tensor")
        for name, x in tensors.items():
            error = error or misfit(what, name, x, num_rows, self._parallel.device)
        if error is not None:
            self._parallel.agree_once(what, f"{what}: {error}", error, self.number)
        form = ", ".join(
            f"{name} {str(x.dtype).removeprefix('torch.')}{list(x.shape[1:])}"
            f"{' with gradient' if needed else ''}"
            for (name, x), needed in zip(tensors.items(), needs_grad, strict=True)
        )
        self._parallel.agree_once(what, f"{what}({form})", error, self.number)

    def _agree_on_samples(self, tensor: Tensor, needs_grad: bool) -> None:
        own = int(self.plan.source_counts[self._parallel.rank])
        self._agree_on_rows("gather_samples", {"tensor": tensor}, [needs_grad], own)

    def _agree_on_mean(self, values: Tensor, weights: Tensor | None) -> None:
        error, form = None, None
        try:
            mean.check(values, weights)
            form = (values.shape[1:], values.dtype, weights is not None)
        except Exception as met:  # whatever it is, the others must not wait
            error = met
        self._parallel.agree_once("mean", form, error, self.number)


def needs_gradient(x: object) -> bool:
    """Whether a call with this tensor takes part in a backward."""
    return torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad


def count_marked(route: BoundRoute, is_marked: Tensor) -> int:
    """How many marked rows a route brings here; one gather of a number a rank, on the host.

    Args:
        route: That of tokens.
        is_marked: bool (T,), on the host.

    Raises:
        RemoteConfigError: On some rank it is something else.
    """
    sent, error = np.zeros(route.group.size, np.int64), None
    try:
        sent = _marked_by_rank(route, is_marked)
    except ConfigError as met:  # the others must not wait
        error = met
    control = route.group.control or route.group
    statement = Statement({}, sent, error)
    said = agree(control, statement, what="count_routed", step=route.step, capacity=sent.size)
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
