"""Step: the moves and the attention of one plan, bound to its groups and its device.

Shapes: T tokens as loaded on this rank, C tokens that it computes on, H heads, D head width, n
samples as loaded on this rank, N samples of all ranks.
"""

from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bascule import parallel_ops
from bascule.attention import packed
from bascule.attention.call_spec import (
    check_settings,
    check_tensors,
    naming,
    positive_scale,
    with_positive_scale,
)
from bascule.attention.usp import Forward, by_head, usp_backward, usp_forward
from bascule.comm import mean
from bascule.comm.exchange import (
    BoundRoute,
    exchange,
    gather_samples,
    misfit,
    move_rows,
    sample_gradients,
    samples_of_all,
)
from bascule.comm.groups import RankGroup
from bascule.comm.guard.derivatives import is_recorded, refuse_transforms
from bascule.comm.guard.failures import tell, telling
from bascule.comm.mean import MeanOver
from bascule.comm.staging import table_on
from bascule.comm.world import this_world
from bascule.errors import ConfigError
from bascule.plan import metrics, routes
from bascule.plan.batch import Plan
from bascule.plan.costs.cost_models import Cost
from bascule.plan.traffic import Traffic

if TYPE_CHECKING:
    from bascule.parallel import SequenceParallel


class Step:
    """A plan bound to its groups and device: moves and attends for one step. Made by `plan`.

    Forward, recomputation under checkpointing and backward of a step all use this object, however
    many steps are alive. All ranks call its methods in the same order.

    Attributes:
        plan: The frozen plan.
        number: Which plan of the SequenceParallel it is, from 1.
        local: What this rank computes on, as numpy arrays.
        local_seq_ids: Global ids of the sequences of this rank's bag, ascending.
        token_slot: (C,) index into `local_seq_ids` of each token that this rank computes on.
        num_attended: Attentions that this rank computed so far, forward passes only.
        traffic: What this rank sent to other ranks so far, forward passes only.
    """

    def __init__(self, parallel: "SequenceParallel", plan: Plan, number: int, cost: Cost) -> None:
        self._parallel = parallel
        self.plan = plan
        self.number = number
        self.num_attended, self.traffic = 0, Traffic()
        self._cost = cost  # that it was planned with
        self.local = plan.local(parallel.rank)
        self.local_seq_ids = self._tensor(self.local.seq_ids)
        self.token_slot = self._tensor(self.local.slots)
        # For compilers, which take whole numbers, and cannot look into arrays.
        lens, counts = plan.seq_lens, plan.source_counts
        self._key = this_world().steps.add(self)
        self._num_source = int(lens[plan.source_ranks == parallel.rank].sum())
        self._num_tokens, self._num_samples = self.local.positions.size, int(counts.sum())
        self._num_together, self._sharing = sum(self._bag.tokens), self._bag.degree
        self._place = self._bag.mesh.place[1]

    def __enter__(self) -> "Step":
        """Begin a block in which an error of the user's code ends the other ranks too."""
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

    def attend(
        self,
        q_CHD: Tensor,
        k_CKD: Tensor,
        v_CKD: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """Exact attention within each whole sequence; (C, H, D). See `packed.attend`."""
        if is_recorded():
            return self._attend_recorded(q_CHD, k_CKD, v_CKD, causal, scale)
        bag, kernel = self._bag, self._parallel.options.kernel
        with telling(f"step {self.number}: attend"):
            needs_grad = list(map(_needs_grad, (q_CHD, k_CKD, v_CKD)))
            self._agree_on_attention((q_CHD, k_CKD, v_CKD), needs_grad, causal, scale)
            out = packed.attend(bag, kernel, q_CHD, k_CKD, v_CKD, causal=causal, scale=scale)
            self._count(q_CHD, k_CKD)
            return out

    def gather_samples(self, tensor: Tensor) -> Tensor:
        """Give every rank the per-sample rows of all: (n, ...) to (N, ...), by global sequence id.

        Differentiable; one all-gather forward, one reduce-scatter backward.
        """
        refuse_transforms("gather_samples", tensor)
        needs_grad = _needs_grad(tensor)
        if is_recorded():
            args = self._key, self._num_samples, needs_grad
            return parallel_ops.gather_samples(tensor, *args)
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
            return parallel_ops.mean(per_token, weights, self._key)[0]
        with telling(f"step {self.number}: mean"):
            self._agree_on_mean(per_token, weights)
            return mean.global_mean(per_token, weights, self._mean_over)

    def metrics(self) -> dict[str, Any]:
        """Predicted loads before and after balancing, and what moved so far, as plain values."""
        before = self.plan.unbalanced_loads(self._cost, self._parallel.cluster)
        return {
            "step": self.number,
            "makespan": self.plan.makespan,
            "makespan_unbalanced": float(before.max()),
            "lower_bound": self.plan.lower_bound,
            "gap": self.plan.gap,
            "imbalance": self.plan.imbalance,
            "imbalance_unbalanced": metrics.imbalance(before),
            "wir": self.plan.wir,
            "wir_unbalanced": metrics.wir(before),
            "tokens": self.plan.tokens.tolist(),
            "moved_tokens": self.plan.moved_tokens,
            "sent_bytes": self.traffic.total,
        }

    @cached_property
    def _route(self) -> BoundRoute:
        parallel = self._parallel
        route = self.plan.route(parallel.rank)
        return BoundRoute(route, parallel.group, parallel.device, self.number, "route")

    @cached_property
    def _bag(self) -> packed.Bag:
        parallel = self._parallel
        return packed.Bag.of(self.plan, parallel.group, parallel.device, self.number)

    @cached_property
    def _degree(self) -> int:
        """The most ranks that share heads; of "auto", others every step."""
        return int(self.plan.topology.ulysses_groups.bag_sizes.max())

    @cached_property
    def _samples(self) -> tuple[int, Tensor, RankGroup, int]:
        """Most samples of a rank, rows of a gather padded to them, the ranks, the step number."""
        counts = self.plan.source_counts
        most = int(counts.max(initial=0))
        rows = routes.ranges(np.arange(counts.size) * most, counts)
        return most, self._tensor(rows), self._parallel.group, self.number

    def _exchange(self, what: str, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        refuse_transforms(what, *tensors.values())
        needs_grad = list(map(_needs_grad, tensors.values()))
        if is_recorded():
            num_rows = self._num_tokens if what == "route" else self._num_source
            args = self._key, what, ",".join(tensors), needs_grad, num_rows
            return tuple(parallel_ops.exchange(list(tensors.values()), *args)[:-1])
        with telling(f"step {self.number}: {what}"):
            route = self._agreed_route(what, tensors, needs_grad)
            return exchange(route, list(tensors.values()))

    def _attend_recorded(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> Tensor:
        refuse_transforms("attend", q, k, v)
        check_settings("attend", causal, scale)
        q, _ = with_positive_scale(q, scale)
        sizes: list[int] = []
        if self._sharing > 1:
            own = k.shape[1] // self._sharing + (self._place < k.shape[1] % self._sharing)
            sizes = [self._num_together, q.shape[1] // k.shape[1] * own, own]
        needs_grad = [_needs_grad(x) for x in (q, k, v)]
        return parallel_ops.attend(q, k, v, self._key, sizes, needs_grad, causal, scale)[0]

    # What operators do, with the same checks and agreements; autograd does not record it.

    def attend_now(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        needs_grad: Sequence[bool],
        causal: bool,
        scale: float | None,
    ) -> Forward:
        """The forward of `attend`."""
        q, k, v = qkv
        with telling(f"step {self.number}: attend"), naming("attend", qkv):
            self._agree_on_attention(qkv, needs_grad, causal, scale)
            self._count(q, k)
            return usp_forward(q, k, v, *self._prepared(q, k, causal, scale))

    def attend_back(
        self,
        grad: Tensor,
        saved: Sequence[Tensor],
        numbers: Sequence[int],
        num_heads: tuple[int, int],
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, ...]:
        """Gradients of q, k and v, of so many heads, from what `parallel_ops.attend` gave."""
        tokens, _, width = grad.shape
        like = grad.new_empty(())  # without memory for what has only a shape
        q, k = (like.expand(tokens, heads, width) for heads in num_heads)
        plan, heads = self._prepared(q, k, causal, scale)
        if heads is None:
            *rows, out, lse = saved
            saved = *map(by_head, (*rows, out)), lse
        else:
            whole, out, lse = saved
            saved = *heads.parts(whole), out.transpose(1, 2), lse
        with telling(f"step {self.number}: attend, backward"):
            return usp_backward(grad, saved, numbers, plan, heads)

    def exchange_now(
        self, what: str, tensors: dict[str, Tensor], needs_grad: Sequence[bool]
    ) -> tuple[tuple[Tensor, ...], int]:
        """The forward of `route` or `restore`, and which call of the group it was."""
        with telling(f"step {self.number}: {what}"):
            route = self._agreed_route(what, tensors, needs_grad)
            return move_rows(route, list(tensors.values())), route.group.calls.number

    def exchange_back(self, what: str, grads: Sequence[Tensor], number: int) -> tuple[Tensor, ...]:
        """The gradients of a call's rows, where these came from."""
        with telling(f"step {self.number}: {what}, backward"):
            return move_rows(self._route_of(what).inverse, grads, of=number)

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

    def _count(self, q: Tensor, k: Tensor) -> None:
        self.num_attended += 1
        self.traffic += packed.traffic(self._bag, q, k)

    def _prepared(self, q: Tensor, k: Tensor, causal: bool, scale: float | None) -> packed.Prepared:
        factor = positive_scale(q.shape[2], scale)
        kernel = self._parallel.options.kernel
        return self._bag.prepared(kernel, q, k, k, causal=causal, scale=factor)

    def _route_of(self, what: str) -> BoundRoute:
        return self._route if what == "route" else self._route.inverse

    def _agreed_route(
        self, what: str, tensors: dict[str, Tensor], needs_grad: Sequence[bool]
    ) -> BoundRoute:
        route = self._route_of(what)
        self._agree_on_form(what, tensors, needs_grad, route.num_sent)
        rows = sum(x.shape[1:].numel() * x.element_size() for x in tensors.values())
        self.traffic += Traffic(routed=rows * route.num_moved)
        return route

    def _agree_on_samples(self, tensor: Tensor, needs_grad: bool) -> None:
        own = int(self.plan.source_counts[self._parallel.rank])
        self._agree_on_form("gather_samples", {"tensor": tensor}, [needs_grad], own)

    def _agree_on_mean(self, values: Tensor, weights: Tensor | None) -> None:
        error, form = None, None
        try:
            mean.check(values, weights)
            form = (values.shape[1:], values.dtype, weights is not None)
        except Exception as met:  # whatever it is, the others must not wait
            error = met
        self._parallel.agree_once("mean", form, error, self.number)

    def _agree_on_attention(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        needs_grad: Sequence[bool],
        causal: bool,
        scale: float | None,
    ) -> None:
        """Heads, dtype and gradients decide the exchanges: all ranks must mean the same."""
        parallel, (q, k, v) = self._parallel, qkv
        refuse_transforms("attend", *qkv)
        check_settings("attend", causal, scale)
        try:
            check_tensors("attend", *qkv)
        except ConfigError as error:
            parallel.agree_once("attend", f"attend: {error}", error, self.number)
        factor = None if scale is None else float(scale)
        alike = q.dtype, k.dtype, v.dtype, tuple(needs_grad), causal, factor
        form = (self._degree, q.shape[1:], k.shape[1:], v.shape[1:], *alike)
        if not parallel.group.calls.has_agreed(("attend", form)):
            error = None
            try:
                packed.check(self.plan.topology, self._bag, parallel.options.kernel, q, k, v)
            except ConfigError as met:
                error = met
            parallel.agree_once("attend", form, error, self.number)

    def _agree_on_form(
        self, what: str, tensors: dict[str, Tensor], needs_grad: Sequence[bool], num_rows: int
    ) -> None:
        """Names, dtypes, widths and gradients decide the sizes: all ranks must use the same."""
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

    def _tensor(self, array: routes.Ints) -> Tensor:
        return table_on(array, self._parallel.device)


def _needs_grad(x: Any) -> bool:
    return torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad
