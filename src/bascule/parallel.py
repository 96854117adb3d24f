"""SequenceParallel: decide, move and attend, bound to process groups that are built once."""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bascule.attention import packed
from bascule.comm import groups
from bascule.comm.agree import Statement, agree, agree_on, agree_once
from bascule.comm.groups import RankGroup
from bascule.comm.guard.failures import tell, telling, told
from bascule.comm.new_groups import new_group
from bascule.errors import ConfigError
from bascule.parallel_step import Step as Step
from bascule.plan import routes
from bascule.plan.batch import check_lengths, plan_batch
from bascule.plan.checks import listed, of_type, shown
from bascule.plan.costs.cost_models import Cost, describe_cost
from bascule.plan.costs.hardware import Cluster
from bascule.plan.limits import Limits
from bascule.plan.step import Sync, check_sync, plan_step
from bascule.plan.topology.spec import Topology

_FIRST_CAPACITY = 65  # numbers: of the sequences, then the tokens of each, in the first gather


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """How a SequenceParallel plans, attends and averages, where the defaults do not fit.

    Attributes:
        planner: See `plan_batch`.
        home_tolerance: See `plan_batch`.
        kernel: Name of the attention kernel; None takes the fastest for device and dtype.
        device: Where the tensors are; None takes the mesh's, or the group's back end's.
        data_group: The ranks whose gradients are put together, for `step.mean`. Default: the group.
        gradients: How the trainer puts the gradients of ranks together: "mean" (FSDP, DDP) or
            "sum" (torchtitan, and FSDP2 with `set_gradient_divide_factor(1.0)`).
    """

    planner: str = "lpt"
    home_tolerance: float | None = None
    kernel: str | None = None
    device: torch.device | str | None = None
    data_group: dist.ProcessGroup | None = None
    gradients: Literal["mean", "sum"] = "mean"


_DEFAULT = ParallelOptions()


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
        limits: Hard limits per rank.
        cluster: See `plan_batch`: prices wires, and says which ranks share a node.
        plan_group: A gloo group of the same ranks for the lengths, so that planning never waits for
            the device; made here if None.
        timeout_s: Longest wait of a collective, in seconds.
        options: What is seldom changed.

    Raises:
        ConfigError: An argument is wrong here. RemoteConfigError: on another rank.
        CommError: Ranks disagree, or one is gone.
    """

    @told("construction of a SequenceParallel")
    def __init__(
        self,
        mesh_or_group: "DeviceMesh | dist.ProcessGroup | None",
        topology: Topology | str,
        cost: Cost,
        *,
        limits: Limits | None = None,
        cluster: Cluster | None = None,
        plan_group: dist.ProcessGroup | None = None,
        timeout_s: float = 600.0,
        options: ParallelOptions = _DEFAULT,
    ) -> None:
        given = groups.resolve(mesh_or_group)
        ranks = tuple(dist.get_process_group_ranks(given))
        self._timeout_s = timeout_s
        self._plan_group = (
            self._make(ranks, "plan", backend="gloo")
            if plan_group is None
            else groups.member_of(groups.resolve(plan_group), "plan")
        )
        self.cost = cost
        self.limits = limits
        self.cluster = cluster
        self.options = options
        self._num_plans = 0
        self._capacity = _FIRST_CAPACITY
        self._used: set[str] = set()
        error, data = None, None
        try:
            of_type("options", options, ParallelOptions, "ParallelOptions(..)")
            self.device = _device(options.device, mesh_or_group, given)
            packed.check_kernel(options.kernel)
            if options.gradients not in (ways := ("mean", "sum")):
                raise ConfigError(f"gradients={shown(options.gradients)}: choose one of {ways}")
            if options.data_group is not None:
                data = _data_group(options.data_group, ranks)
        except Exception as met:  # whatever it is, the others must not wait
            error = met
        self.topology = self._agree_on_settings(topology, len(ranks), error)
        group = self._make(ranks, "exchange", backend=dist.get_backend(given))
        self.group = replace(group, control=self._plan_group)
        self.data_group = self.group if data is None else data

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
        return self._plan([local_seq_lens], "microbatch")[0]

    def plan_step(
        self, microbatches: Sequence[npt.ArrayLike], *, sync: Sync = "microbatch"
    ) -> tuple["Step", ...]:
        """Plan all microbatches of an optimizer step from one fixed-size gather, on the host.

        Args:
            microbatches: Of each, the tokens of each sequence that this rank loaded; as many
                microbatches on all ranks.
            sync: What ranks wait for, as for `bascule.plan_step`; see `training.sync_of`.

        Returns:
            A frozen step for each microbatch, in their order.

        Raises:
            As `plan`; CommError: ranks give unlike numbers of microbatches, or of `sync`.
        """
        return self._plan(microbatches, sync)

    def fail(self, error: Exception) -> None:
        """Take part in the gather of `plan` in its place, to say that this rank cannot go on.

        Raises:
            CommError: Always, on all ranks, with this error's text.
        """
        self._gather([], "", error or RuntimeError("it said so without an error"))

    def _plan(self, microbatches: Sequence[npt.ArrayLike], sync: Sync) -> tuple["Step", ...]:
        first, error, lens = self._num_plans + 1, None, list[routes.Ints]()
        try:
            check_sync(sync)
            lens = _checked(microbatches)
        except Exception as met:  # whatever it is, the others must not wait
            error = met
        except BaseException as met:  # as that of a user who interrupts
            tell(met, f"step {first}: plan")
            raise
        of_ranks = self._gather(lens, sync, error)
        with telling(f"step {first}: plan"):
            planned: dict[str, Any] = {
                "planner": self.options.planner,
                "limits": self.limits,
                "cluster": self.cluster,
                "home_tolerance": self.options.home_tolerance,
            }
            if len(of_ranks) == 1:
                plans = [plan_batch(of_ranks[0], self.topology, self.cost, **planned)]
            else:
                plans = plan_step(of_ranks, self.topology, self.cost, sync=sync, **planned)
        self._num_plans += len(plans) - 1
        return tuple(Step(self, plan, number) for number, plan in enumerate(plans, first))

    def _gather(
        self, lens: Sequence[routes.Ints], sync: str, error: Exception | None
    ) -> list[list[routes.Ints]]:
        """Lengths by microbatch and rank; or the same error on all ranks."""
        self._num_plans += 1
        settings = dict.fromkeys(_SETTINGS, "")
        try:
            settings = self._settings(self.topology)
        except Exception as met:  # of the user's cost
            error = error or met
        settings |= {"step": str(self._num_plans), "microbatches": f"{len(lens)}, sync={sync}"}
        values = np.concatenate([np.array([part.size for part in lens], np.int64), *lens])
        said = agree(
            self._plan_group,
            Statement(settings, values, error),
            what="plan",
            step=self._num_plans,
            capacity=self._capacity,
        )
        # Derived from what all ranks gathered, hence the same on all of them.
        most = max(part.size for part in said)
        self._capacity = max(self._capacity, 1 << (most - 1).bit_length() if most else 0)
        parts = [np.split(x[len(lens) :], np.cumsum(x[: len(lens)])[:-1]) for x in said]
        return [list(of_ranks) for of_ranks in zip(*parts, strict=True)]

    def agree_once(self, what: str, form: Hashable, error: Exception | None, step: int) -> None:
        """Let all ranks agree on the form of an exchange, the first time that this form is used.

        Where exchanges of that name were used before, the others may not come to agree: then an
        error is raised here, and they are told of it (see `failures.tell`).

        Raises:
            CommError: Ranks use different forms, or (RemoteConfigError) one of them an illegal one.
        """
        if error is not None and what in self._used:
            raise error

        def say() -> tuple[dict[str, str], Exception | None]:
            return {f"the form of {what}": str(form)}, error

        agree_once(self.group, (what, form), say, what=what, step=step)
        self._used.add(what)

    def agree_on_error(self, what: str, error: Exception | None, step: int) -> None:
        """Let all ranks know whether one of them failed at `what`; one gather.

        Raises:
            CommError: A rank gave an error (RemoteConfigError if its input was bad), on all ranks.
        """
        agree_on(self._plan_group, {}, error, what=what, step=step)

    def _agree_on_settings(
        self, spec: Topology | str, world_size: int, error: Exception | None
    ) -> Topology | str:
        """The bags, or "auto"; the same settings on all ranks, and no error on any."""
        topology, settings = spec, dict.fromkeys(_SETTINGS, "")
        try:
            if error is not None:
                raise error
            if spec != "auto":
                topology = Topology.parse(spec, world_size=world_size)
            elif self.cluster is None:
                raise ConfigError('topology "auto" needs a cluster, which says what wires cost')
            if self.cluster is not None:
                self.cluster.check_world(world_size)
            settings = self._settings(topology)
        except Exception as met:  # whatever it is, the others must not wait
            error = met
            settings = dict.fromkeys(_SETTINGS, "")
        agree_on(self._plan_group, settings, error, what="construction")
        return topology

    def _settings(self, topology: Topology | str) -> dict[str, str]:
        chosen = self.options
        values = (topology, describe_cost(self.cost), self.limits, self.cluster, self._timeout_s)
        values = (*values, chosen.planner, chosen.home_tolerance, chosen.kernel, self.device.type)
        values = (*values, chosen.gradients)
        return dict(zip(_SETTINGS, map(str, values), strict=True))

    def _make(self, ranks: Sequence[int], name: str, *, backend: str) -> RankGroup:
        return new_group(ranks, name, self._timeout_s, backend=backend)


def _checked(microbatches: Sequence[npt.ArrayLike]) -> list[routes.Ints]:
    """The lengths of this rank.

    Raises:
        ConfigError: There is no microbatch, or a length is illegal. An agreement says which rank.
    """
    found: list[routes.Ints] = []
    for number, lens in enumerate(listed("microbatches", microbatches)):
        try:
            found.append(check_lengths([lens], 1)[1])
        except ConfigError as met:
            text = re.sub("^rank 0[,:] ", "", str(met))  # here it is the only one, hence 0
            where = f"microbatch {number}: " if len(microbatches) > 1 else ""
            raise ConfigError(where + text) from None
    if not found:
        raise ConfigError("no microbatches: give the lengths of one at least")
    return found


_SETTINGS: tuple[str, ...] = (
    "topology",
    "cost",
    "limits",
    "cluster",
    "timeout_s",
    "planner",
    "home_tolerance",
    "kernel",
    "device",
    "gradients",
)


def _data_group(group: dist.ProcessGroup, ranks: Sequence[int]) -> RankGroup:
    data = groups.member_of(groups.resolve(group), "data")
    missing = sorted(set(ranks) - set(data.ranks))
    if missing:
        raise ConfigError(
            f"data_group has the ranks {list(data.ranks)}, without {missing} of the group: a mean "
            "is taken over all ranks whose gradients are averaged, those of the group included"
        )
    return data


def _device(
    device: torch.device | str | None,
    mesh_or_group: "DeviceMesh | dist.ProcessGroup | None",
    group: dist.ProcessGroup,
) -> torch.device:
    if device is not None:
        try:
            given = torch.device(device)
            if given.type == "cuda" and not torch.cuda.is_available():
                raise ConfigError(f"device={device!r}, and torch finds no CUDA device: give 'cpu'")
            return given
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"device={device!r} is not a device of torch: {error}") from error
    on_cuda = "nccl" in dist.get_backend(group)
    if isinstance(mesh_or_group, DeviceMesh):
        on_cuda = mesh_or_group.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
