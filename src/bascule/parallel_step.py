"""Step: the moves and the attention of one plan, bound to its groups and its device.

Shapes: T tokens as loaded on this rank, C tokens that it computes on, H heads, D head width, n
samples as loaded on this rank, N samples of all ranks.
"""

from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bascule.attention import packed
from bascule.attention.call_spec import check_settings, check_tensors
from bascule.comm import mean
from bascule.comm.exchange import BoundRoute, exchange, gather_samples
from bascule.comm.guard.derivatives import refuse_transforms
from bascule.comm.guard.failures import tell, telling
from bascule.comm.staging import table_on
from bascule.errors import ConfigError
from bascule.plan import metrics, routes
from bascule.plan.batch import Plan
from bascule.plan.traffic import Traffic

if TYPE_CHECKING:
    from bascule.parallel import SequenceParallel


_between_graphs = torch.compiler.disable(
    recursive=True, reason="ranks exchange rows: a graph of torch.compile ends here"
)


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
        traffic: What this rank sent to other ranks so far, forward passes only.
    """

    def __init__(self, parallel: "SequenceParallel", plan: Plan, number: int) -> None:
        self._parallel = parallel
        self.plan = plan
        self.number = number
        self.traffic = Traffic()
        self.local = plan.local(parallel.rank)
        self.local_seq_ids = self._tensor(self.local.seq_ids)
        self.token_slot = self._tensor(self.local.slots)

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

    @_between_graphs
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
        with telling(f"step {self.number}: route"):
            return dict(zip(tensors, self._exchange("route", self._route, tensors), strict=True))

    @_between_graphs
    def restore(self, tensor: Tensor) -> Tensor:
        """Bring tokens back to their source rank and order: (C, ...) to (T, ...).

        Differentiable; one all-to-all a direction.
        """
        with telling(f"step {self.number}: restore"):
            return self._exchange("restore", self._route.inverse, {"tensor": tensor})[0]

    @_between_graphs
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
        bag, kernel = self._bag, self._parallel.options.kernel
        with telling(f"step {self.number}: attend"):
            refuse_transforms("attend", q_CHD, k_CKD, v_CKD)
            check_settings("attend", causal, scale)
            self._agree_on_attention(q_CHD, k_CKD, v_CKD, causal, scale)
            out = packed.attend(bag, kernel, q_CHD, k_CKD, v_CKD, causal=causal, scale=scale)
            self.traffic += packed.traffic(bag, q_CHD, k_CKD)
            return out

    @_between_graphs
    def gather_samples(self, tensor: Tensor) -> Tensor:
        """Give every rank the per-sample rows of all: (n, ...) to (N, ...), by global sequence id.

        Differentiable; one all-gather forward, one reduce-scatter backward.
        """
        counts = self.plan.source_counts.tolist()
        own, group = counts[self._parallel.rank], self._parallel.group
        with telling(f"step {self.number}: gather_samples"):
            self._agree_on_form("gather_samples", {"tensor": tensor}, own)
            return gather_samples(tensor, counts, self._valid_samples, group, self.number)

    @_between_graphs
    def mean(self, per_token: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """Mean over the tokens of all ranks, right under FSDP's and DDP's gradient averaging.

        One all-reduce of two numbers.

        Args:
            per_token: (any number, ...) values of this rank; no rows are legal, a scalar is not.
            weights: What each value counts; broadcasts to the values. None counts each once.

        Returns:
            The global mean, the same on every rank.
        """
        parallel = self._parallel
        with telling(f"step {self.number}: mean"):
            refuse_transforms("mean", per_token)
            error, form = None, None
            try:
                mean.check(per_token, weights)
                form = (per_token.shape[1:], per_token.dtype, weights is not None)
            except Exception as met:  # whatever it is, the others must not wait
                error = met
            parallel.agree_once("mean", form, error, self.number)
            return mean.global_mean(per_token, weights, parallel.data_group, self.number)

    def metrics(self) -> dict[str, Any]:
        """Predicted loads before and after balancing, and what moved so far, as plain values."""
        before = self.plan.unbalanced_loads(self._parallel.cost, self._parallel.cluster)
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
    def _valid_samples(self) -> Tensor:
        counts = self.plan.source_counts
        starts = np.arange(counts.size) * counts.max()
        return self._tensor(routes.ranges(starts, counts))

    def _exchange(
        self, what: str, route: BoundRoute, tensors: dict[str, Tensor]
    ) -> tuple[Tensor, ...]:
        self._agree_on_form(what, tensors, route.num_sent)
        rows = sum(x.shape[1:].numel() * x.element_size() for x in tensors.values())
        self.traffic += Traffic(routed=rows * route.num_moved)
        return exchange(route, list(tensors.values()))

    def _agree_on_attention(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> None:
        """Heads and dtype decide the sizes, and must do for the bags of all ranks."""
        parallel = self._parallel
        try:
            check_tensors("attend", q, k, v)
        except ConfigError as error:
            parallel.agree_once("attend", f"attend: {error}", error, self.number)
        dtypes = q.dtype, k.dtype, v.dtype
        form = (self._degree, q.shape[1:], k.shape[1:], v.shape[1:], dtypes, causal, scale)
        if not parallel.group.calls.has_agreed(("attend", form)):
            error = None
            try:
                packed.check(self.plan.topology, self._bag, parallel.options.kernel, q, k, v)
            except ConfigError as met:
                error = met
            parallel.agree_once("attend", form, error, self.number)

    def _agree_on_form(self, what: str, tensors: dict[str, Tensor], num_rows: int) -> None:
        """Names, dtypes, widths and gradients decide the sizes: all ranks must use the same."""
        refuse_transforms(what, *tensors.values())
        error = None if tensors else ConfigError(f"{what}: give at least one tensor")
        for name, x in tensors.items():
            error = error or self._misfit(what, name, x, num_rows)
        if error is not None:
            self._parallel.agree_once(what, f"{what}: {error}", error, self.number)
        needs_grad = torch.is_grad_enabled()
        form = ", ".join(
            f"{name} {str(x.dtype).removeprefix('torch.')}{list(x.shape[1:])}"
            f"{' with gradient' if needs_grad and x.requires_grad else ''}"
            for name, x in tensors.items()
        )
        self._parallel.agree_once(what, f"{what}({form})", error, self.number)

    def _misfit(self, what: str, name: str, x: Any, num_rows: int) -> ConfigError | None:
        """The reason why a tensor cannot be exchanged, or None."""
        if not isinstance(x, Tensor):
            return ConfigError(f"{what}: {name!r} is a {type(x).__name__}, not a tensor")
        if x.layout != torch.strided or x.is_nested or x.is_quantized or hasattr(x, "placements"):
            return ConfigError(
                f"{what}: {name!r} is a {type(x).__name__} of layout {x.layout}: give a dense "
                "tensor of this rank's rows, as with .to_dense(), .dequantize() or .to_local()"
            )
        if x.dim() < 1 or x.shape[0] != num_rows or x.device.type != self._parallel.device.type:
            return ConfigError(
                f"{what}: {name!r} has shape {tuple(x.shape)} on {x.device}, but this rank's "
                f"part of the plan has {num_rows} rows on {self._parallel.device}"
            )
        return None

    def _tensor(self, array: routes.Ints) -> Tensor:
        return table_on(array, self._parallel.device)
