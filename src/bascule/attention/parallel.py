"""SequenceParallel: decide, move and attend, bound to process groups that are built once.

Shapes: T tokens as loaded on this rank, C tokens that it computes on, H heads, D head width, n
    samples
as loaded on this rank, N samples of all ranks.
"""

import re
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bascule.attention import packed
from bascule.comm import groups
from bascule.comm.agree import Statement, agree
from bascule.comm.bags import make_bag_groups
from bascule.comm.exchange import BoundRoute, exchange, gather_samples
from bascule.comm.groups import RankGroup
from bascule.comm.mean import global_mean
from bascule.errors import ConfigError
from bascule.plan import layout, metrics
from bascule.plan.cluster import Cluster
from bascule.plan.cost import Cost, describe_cost
from bascule.plan.limits import Limits
from bascule.plan.sequences import Plan, check_lengths, plan_batch
from bascule.plan.topology import Topology

_FIRST_CAPACITY = 64  # sequences a rank that the first gather of lengths has room for


class SequenceParallel:
    """Balances sequences over the ranks of a group; the process groups are made here, once.

    They live until `destroy_process_group`: torch cannot make a group again after destroying it.
    Every rank of the group constructs it at the same point, with the same arguments; what differs
    becomes the same CommError on all ranks.

    Args:
        mesh_or_group: A one-axis DeviceMesh, a process group, or None for the default group.
        topology: Bags over the ranks of the group, or their spec; replicas fill the group. "auto"
            chooses bags for every step and needs a cluster.
        cost: Predicts the cost of a sequence from its tokens.
        planner: See `plan_batch`.
        limits: Hard limits per rank.
        cluster: See `plan_batch`: prices wires, and says which ranks share a node.
        plan_group: A gloo group of the same ranks for the lengths, so that planning never waits for
            the device; made here if None.
        data_group: The ranks whose gradients are averaged, if more than the group (`step.mean`).
        kernel: Name of the attention kernel; None takes the fastest for device and dtype. In a ring
            it must have a form for blocks, too.
        device: Where the tensors are; None takes the mesh's, or the group's back end's.
        timeout_s: Longest wait of a collective, in seconds.

    Raises:
        ConfigError: An argument is wrong here. RemoteConfigError: on another rank.
        CommError: Ranks disagree, or one is gone.
    """

    def __init__(
        self,
        mesh_or_group: "DeviceMesh | dist.ProcessGroup | None",
        topology: Topology | str,
        cost: Cost,
        *,
        planner: str = "lpt",
        limits: Limits | None = None,
        cluster: Cluster | None = None,
        plan_group: dist.ProcessGroup | None = None,
        data_group: dist.ProcessGroup | None = None,
        kernel: str | None = None,
        device: torch.device | str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        given = groups.resolve(mesh_or_group)
        ranks = tuple(dist.get_process_group_ranks(given))
        self._timeout_s = timeout_s
        self._plan_group = (
            self._make(ranks, "plan", backend="gloo")
            if plan_group is None
            else groups.member_of(plan_group, "plan")
        )
        self.cost = cost
        self.planner = planner
        self.limits = limits
        self.cluster = cluster
        self.kernel = kernel
        self._num_plans = 0
        self._capacity = _FIRST_CAPACITY
        self._agreed: set[Hashable] = set()
        self.topology = self._agree_on_settings(topology, len(ranks))
        self.group = self._make(ranks, "exchange", backend=dist.get_backend(given))
        self._data_group = (
            self.group if data_group is None else groups.member_of(data_group, "data")
        )
        self.bag_groups = make_bag_groups(self.group, self.topology, cluster, timeout_s)
        self.device = (
            torch.device(device) if device is not None else _default_device(mesh_or_group, given)
        )

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self._plan_group.rank

    def plan(self, local_seq_lens: npt.ArrayLike) -> "Step":
        """Plan the next step from the lengths of all ranks; one fixed-size gather, on the host.

        Args:
            local_seq_lens: Tokens of each sequence that this rank loaded; may be empty.

        Returns:
            A frozen step. Any number may be alive.

        Raises:
            RemoteConfigError: A rank gave an illegal length (on all ranks).
            CommError: Ranks disagree about anything that a plan depends on, or one is gone.
            PlanError: The limits cannot be met (on all ranks).
        """
        values, error = np.zeros(0, np.int64), None
        try:
            values = check_lengths([local_seq_lens], 1)[1]
        except ConfigError as met:
            # The agreement says which rank; here it is the only one, hence 0.
            error = ConfigError(re.sub("^rank 0[,:] ", "", str(met)))
        return self._plan(values, error)

    def fail(self, error: Exception) -> None:
        """Take part in the gather of `plan` in its place, to say that this rank cannot go on.

        Raises:
            CommError: Always, on all ranks, with this error's text.
        """
        self._plan(np.zeros(0, np.int64), error)

    def _plan(self, values: layout.Ints, error: Exception | None) -> "Step":
        self._num_plans += 1
        settings = self._settings(self.topology) | {"step": str(self._num_plans)}
        lens = agree(
            self._plan_group,
            Statement(settings, values, error),
            what="plan",
            step=self._num_plans,
            capacity=self._capacity,
        )
        # Derived from what all ranks gathered, hence the same on all of them.
        most = max(part.size for part in lens)
        self._capacity = max(self._capacity, 1 << (most - 1).bit_length() if most else 0)
        plan = plan_batch(
            lens,
            self.topology,
            self.cost,
            planner=self.planner,
            limits=self.limits,
            cluster=self.cluster,
        )
        return Step(self, plan, self._num_plans)

    def agree_once(self, what: str, form: Hashable, error: Exception | None, step: int) -> None:
        """Let all ranks agree on the form of an exchange, the first time that this form is used.

        Raises:
            CommError: Ranks use different forms, or (RemoteConfigError) one of them an illegal one.
        """
        if not self.has_agreed(what, form):
            settings = {f"the form of {what}": str(form)}
            statement = Statement(settings, np.zeros(0, np.int64), error)
            agree(self._plan_group, statement, what=what, step=step, capacity=0)
            self._agreed.add((what, form))
        elif error is not None:
            raise error

    def has_agreed(self, what: str, form: Hashable) -> bool:
        """Whether all ranks have agreed on this form of an exchange."""
        return (what, form) in self._agreed

    def agree_on_error(self, what: str, error: Exception | None, step: int) -> None:
        """Let all ranks know whether one of them failed at `what`; one gather.

        Raises:
            CommError: A rank gave an error (RemoteConfigError if its input was bad), on all ranks.
        """
        statement = Statement({}, np.zeros(0, np.int64), error)
        agree(self._plan_group, statement, what=what, step=step, capacity=0)

    def _agree_on_settings(self, spec: Topology | str, world_size: int) -> Topology | str:
        """The bags, or "auto"; the same settings on all ranks."""
        topology, settings, error = spec, {}, None
        try:
            if spec != "auto":
                topology = Topology.parse(spec, world_size=world_size)
            elif self.cluster is None:
                raise ConfigError('topology "auto" needs a cluster, which says what wires cost')
            if self.cluster is not None:
                self.cluster.check_world(world_size)
            settings = self._settings(topology)
        except ConfigError as met:
            error = met
            settings = dict.fromkeys(_SETTINGS, "")
        agree(
            self._plan_group,
            Statement(settings, np.zeros(0, np.int64), error),
            what="construction",
            step=0,
            capacity=0,
        )
        return topology

    def _settings(self, topology: Topology | str) -> dict[str, str]:
        cost = describe_cost(self.cost)
        values = (topology, cost, self.planner, self.limits, self.cluster)
        return dict(zip(_SETTINGS, map(str, values), strict=True))

    def _make(self, ranks: Sequence[int], name: str, *, backend: str) -> RankGroup:
        return groups.new_group(ranks, name, self._timeout_s, backend=backend)


_SETTINGS: tuple[str, ...] = ("topology", "cost", "planner", "limits", "cluster")


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
        sent_bytes: What this rank sent to other ranks so far, forward passes only.
    """

    def __init__(self, parallel: SequenceParallel, plan: Plan, number: int) -> None:
        self._parallel = parallel
        self.plan = plan
        self.number = number
        self.sent_bytes = 0
        self.local = plan.local(parallel.rank)
        self.local_seq_ids = self._tensor(self.local.seq_ids)
        self.token_slot = self._tensor(self.local.slots)

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
        return dict(zip(tensors, self._exchange("route", self._route, tensors), strict=True))

    def restore(self, tensor: Tensor) -> Tensor:
        """Bring tokens back to their source rank and order: (C, ...) to (T, ...).

        Differentiable; one all-to-all a direction.
        """
        return self._exchange("restore", self._route.inverse, {"tensor": tensor})[0]

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
        bag, kernel = self._bag, self._parallel.kernel
        if self.plan.topology.bag_sizes.max() > 1:
            self._agree_on_attention(q_CHD, k_CKD, v_CKD, causal, scale)
        out = packed.attend(bag, kernel, q_CHD, k_CKD, v_CKD, causal=causal, scale=scale)
        self.sent_bytes += packed.sent_bytes(bag, q_CHD, k_CKD)
        return out

    def gather_samples(self, tensor: Tensor) -> Tensor:
        """Give every rank the per-sample rows of all: (n, ...) to (N, ...), by global sequence id.

        Differentiable; one all-gather forward, one reduce-scatter backward.
        """
        counts = self.plan.source_counts.tolist()
        own = counts[self._parallel.rank]
        self._agree_on_form("gather_samples", {"tensor": tensor}, own)
        return gather_samples(
            tensor, counts, self._valid_samples, self._parallel.group, self.number
        )

    def mean(self, per_token: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """Mean over the tokens of all ranks, right under FSDP's and DDP's gradient averaging.

        One all-reduce of two numbers.

        Args:
            per_token: (any number, ...) values of this rank; no rows are legal, a scalar is not.
            weights: Weight of each; None counts each once.

        Returns:
            The global mean, the same on every rank.
        """
        error = None
        if per_token.dim() == 0:
            error = ConfigError(
                "mean: give the values of the tokens, not their mean or sum (a scalar)"
            )
        form = (per_token.shape[1:], per_token.dtype, weights is not None)
        self._parallel.agree_once("mean", form, error, self.number)
        return global_mean(per_token, weights, self._parallel._data_group, self.number)

    def metrics(self) -> dict[str, Any]:
        """What the plan predicts and what was moved so far, as plain values."""
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
            "sent_bytes": self.sent_bytes,
        }

    @cached_property
    def _route(self) -> BoundRoute:
        parallel = self._parallel
        route = self.plan.route(parallel.rank)
        return BoundRoute(route, parallel.group, parallel.device, self.number, "route")

    @cached_property
    def _bag(self) -> packed.Bag:
        parallel = self._parallel
        groups, device = parallel.bag_groups, parallel.device
        return packed.Bag.of(self.plan, parallel.rank, groups, device, self.number)

    @cached_property
    def _valid_samples(self) -> Tensor:
        counts = self.plan.source_counts
        starts = np.arange(counts.size) * counts.max()
        return self._tensor(layout.ranges(starts, counts))

    def _exchange(
        self, what: str, route: BoundRoute, tensors: dict[str, Tensor]
    ) -> tuple[Tensor, ...]:
        self._agree_on_form(what, tensors, route.num_sent)
        rows = sum(x.shape[1:].numel() * x.element_size() for x in tensors.values())
        self.sent_bytes += rows * route.num_moved
        return exchange(route, list(tensors.values()))

    def _agree_on_attention(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> None:
        """Heads and dtype decide the sizes, and must do for the bags of all ranks."""
        topology, parallel = self.plan.topology, self._parallel
        degree = int(topology.ulysses_groups.bag_sizes.max())  # of "auto", another every step
        form = (degree, q.shape[1:], k.shape[1:], v.shape[1:], q.dtype, causal, scale)
        if not parallel.has_agreed("attend", form):
            error = None
            try:
                packed.check(topology, self._bag, parallel.kernel, q, k, v)
            except ConfigError as met:
                error = met
            parallel.agree_once("attend", form, error, self.number)

    def _agree_on_form(self, what: str, tensors: dict[str, Tensor], num_rows: int) -> None:
        """Names, dtypes, widths and gradients decide the sizes: all ranks must use the same."""
        error = None if tensors else ConfigError(f"{what}: give at least one tensor")
        for name, x in tensors.items():
            if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(f"{what}: {name!r} is a {type(x).__name__}, not a tensor")
            if x.dim() < 1 or x.shape[0] != num_rows or x.device.type != self._parallel.device.type:
                error = ConfigError(
                    f"{what}: {name!r} has shape {tuple(x.shape)} on {x.device}, but this rank's "
                    f"part of the plan has {num_rows} rows on {self._parallel.device}"
                )
        needs_grad = torch.is_grad_enabled()
        form = ", ".join(
            f"{name} {str(x.dtype).removeprefix('torch.')}{list(x.shape[1:])}"
            f"{' with gradient' if needs_grad and x.requires_grad else ''}"
            for name, x in tensors.items()
        )
        self._parallel.agree_once(what, f"{what}({form})", error, self.number)

    def _tensor(self, array: layout.Ints) -> Tensor:
        return torch.from_numpy(array).to(self._parallel.device, non_blocking=True)


def _default_device(
    mesh_or_group: "DeviceMesh | dist.ProcessGroup | None", group: dist.ProcessGroup
) -> torch.device:
    on_cuda = "nccl" in dist.get_backend(group)
    if isinstance(mesh_or_group, DeviceMesh):
        on_cuda = mesh_or_group.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
