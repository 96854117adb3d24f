"""SequenceParallel: plan, move and attend, on process groups that are built once.

A thread may plan during the current step, over its own group; all ranks gather in the same order.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from operator import attrgetter, is_not
from typing import Any, Literal

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bascule.arrays import Floats
from bascule.attention.kernels.registry import Kernel, check_name
from bascule.checks import choice, listed
from bascule.comm.agree import agree
from bascule.comm.failures import leave, shared
from bascule.comm.groups import RankGroup, device_for, member_of, new_group, resolve
from bascule.errors import ConfigError
from bascule.machine.cluster import Cluster
from bascule.machine.costs import Cost
from bascule.plan.limits import Limits
from bascule.plan.offer import NO_ITEMS, Offer, Sequences, offer_of
from bascule.plan.plan import Plan, Sync, Terms, at_home_unless_it_pays, check_sync, plan_jointly
from bascule.plan.prices import RankState
from bascule.plan.topology import Topology
from bascule.step import Binding
from bascule.step import Step as Step

_FIRST_CAPACITY = 68  # numbers in the first gather: four of a microbatch, and one a sequence


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One rank's sequences for the next plan, and the terms of this plan."""

    number: int  # number of the first planned step
    offer: Offer  # its sequences
    terms: Terms | None  # None if there is an error
    sync: Sync
    initial_loads: Floats | None  # as for `plan_batch`
    settings: Mapping[str, str]  # all that must be the same on all ranks, as text
    error: Exception | None  # of this rank, for all ranks to raise

    @property
    def where(self) -> str:
        """The name of the plan in error messages."""
        return f"step {self.number}: plan"


class Planning:
    """The planner of a group of ranks: makes one plan after another, over gloo."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._capacity = _FIRST_CAPACITY

    def plan_now(self, request: PlanRequest) -> tuple[Plan, ...]:
        """Make one plan per microbatch, from one gather of a fixed size."""
        with shared(request.where):
            try:
                gathered = agree(
                    self.group,
                    request.settings,
                    request.error,
                    what="plan",
                    step=request.number,
                    values=request.offer.to_words(),
                    capacity=self._capacity,
                )
            finally:  # later waits are the main thread's again: failure notes go by thread
                self.group.calls.thread = threading.main_thread().ident
            # Derived from what all ranks gathered, hence the same on all of them.
            most = max(words.size for words in gathered)
            self._capacity = max(self._capacity, 1 << (most - 1).bit_length())
            terms, offer = request.terms, Offer.from_words(gathered)
            assert terms is not None  # else the gather raised its error
            if len(offer.microbatches) == 1:
                priced = [terms.priced(offer, request.initial_loads)]
                plans = (priced[0].plan(),)
            else:
                priced = terms.priced_step(offer.microbatches)
                plans = plan_jointly(priced, request.sync)
            return at_home_unless_it_pays(priced, plans, request.sync)


class PlanFuture:
    """A future of steps whose plans a thread makes; see `SequenceParallel.plan_async`."""

    def __init__(
        self,
        make: Callable[[], tuple[Plan, ...]],
        bind: Callable[[tuple[Plan, ...]], tuple["Step", ...]],
        where: str,
        before: "PlanFuture | None",
    ) -> None:
        self._bind, self._where = bind, where
        self._steps: tuple[Step, ...] | None = None
        self._plans: Future[tuple[Plan, ...]] = Future()
        args = make, None if before is None else before._plans
        threading.Thread(target=self._run, args=args, name="bascule plan").start()

    def done(self) -> bool:
        """Return whether the plans are made: then `result` does not wait."""
        return self._plans.done()

    def result(self) -> tuple["Step", ...]:
        """Return the steps of `SequenceParallel.plan_step`, or raise its error."""
        if self._steps is None:
            with shared(self._where):  # by this thread, which others wait for
                self._steps = self._bind(self._plans.result())
        return self._steps

    def _run(self, make: Callable[[], tuple[Plan, ...]], before: "Future[Any] | None") -> None:
        if before is not None:
            wait([before])
        try:
            self._plans.set_result(make())
        except BaseException as error:
            self._plans.set_exception(error)


def _offer(microbatches: Iterable[npt.ArrayLike | Sequences]) -> Offer:
    """Check the sequences that the user gives on this rank."""
    offers: list[Offer] = []
    each = listed("microbatches", microbatches)
    for place, loaded in enumerate(each):
        try:
            offers.append(offer_of([loaded], 1))
        except ConfigError as error:
            text = re.sub("^rank 0[,:] ", "", str(error))  # the only rank in this check
            where = f"microbatch {place}: " if len(each) > 1 else ""
            raise ConfigError(where + text) from None
    if not offers:
        raise ConfigError("no microbatches: give the sequence lengths of at least one")
    return Offer.stacked(offers)


class SequenceParallel:
    """A group of ranks that balance their sequences.

    Every rank of the group constructs it at the same point, with the same arguments; if they
    differ, all ranks raise the same CommError.

    Args:
        mesh_or_group: A one-axis DeviceMesh, a process group, or None for the default group.
        topology: Bags (ranks that share sequences) or their spec, repeated to fill the group.
            "auto" chooses the bags of each step, and needs a cluster.
        cost: Predicts the cost of a sequence from its tokens.
        limits: Hard limits per rank.
        cluster: See `plan_batch`: prices communication, and says which ranks share a node.
        plan_group: A gloo group of the same ranks, over which they exchange lengths, so planning
            never waits for the device. Default: a new one.
        timeout_s: Longest wait of a collective, in seconds.
        locality_tolerance: See `plan_batch`.
        kernel: Name of the attention kernel, or your own. Default: the first that runs here.
        device: Device of the tensors. Default: the mesh's, or the group's back end's.
        data_group: Ranks over which gradients are averaged, for `step.mean`. Default: the group.
        min_gain: Sequences change bags only if that saves at least this share of the predicted
            step, and with a cluster more than the seconds in which they move.
        gradients: How the trainer reduces gradients over ranks: "mean" (FSDP, DDP) or "sum"
            (torchtitan, and FSDP2 with `set_gradient_divide_factor(1.0)`).
    """

    @shared("construction of a SequenceParallel")
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
        locality_tolerance: float | None = None,
        kernel: Kernel | None = None,
        device: torch.device | str | None = None,
        data_group: dist.ProcessGroup | None = None,
        gradients: Literal["mean", "sum"] = "mean",
        min_gain: float = 0.02,
    ) -> None:
        group = resolve(mesh_or_group)
        ranks = tuple(dist.get_process_group_ranks(group))
        self._timeout_s = timeout_s
        if plan_group is None:
            self._planning = Planning(new_group(ranks, "plan", timeout_s, backend="gloo"))
        else:
            self._planning = Planning(member_of(resolve(plan_group), "plan"))
        self.topology, self.cost, self.limits, self.cluster = topology, cost, limits, cluster
        self.locality_tolerance, self.kernel, self.gradients = locality_tolerance, kernel, gradients
        self.min_gain, self._num_plans = min_gain, 0
        self._ahead: Planning | None = None
        self._latest: PlanFuture | None = None
        self.speeds: tuple[float, ...] | None = None
        self._terms: tuple[tuple[Any, ...], Terms, dict[str, str]] | None = None
        # Compiled graphs hold numbers of steps: those of two plans live until their backward.
        self._recent: tuple[tuple[Step, ...], ...] = ()
        error, data, settings = None, None, dict[str, str]()
        try:
            self.device = device_for(device, mesh_or_group, group)
            check_name(kernel)
            choice("gradients", gradients, "mean", "sum")
            if data_group is not None:
                data = _data_group(data_group, ranks)
            if topology != "auto":
                self.topology = Topology.parse(topology, world_size=len(ranks))
            elif cluster is None:
                raise ConfigError('topology "auto" needs a cluster, for speeds of links: give one')
            if cluster is not None:
                cluster.check_world(len(ranks))
            settings = self._terms_now()[1]
        except Exception as failure:  # the other ranks must not wait
            error = failure
        agree(self._planning.group, settings, error, what="construction")
        made = new_group(ranks, "exchange", timeout_s, backend=dist.get_backend(group))
        self.group = replace(made, control=self._planning.group)
        self.data_group = self.group if data is None else data
        ranks_of_steps = self.group, self.data_group, self.device
        self._binding = Binding(*ranks_of_steps, kernel, is_mean=gradients == "mean")

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return self._planning.group.rank

    def plan(
        self,
        local_seq_lens: npt.ArrayLike | Sequences,
        *,
        initial_loads: npt.ArrayLike | None = None,
    ) -> "Step":
        """Plan the next step from the lengths of all ranks; one fixed-size gather, on the host.

        Args:
            local_seq_lens: Tokens of each sequence that this rank loaded; may be empty. `Sequences`
                also give masks, and the lengths of contexts for cross-attention.
            initial_loads: (ranks,) cost of work that each rank does first, without waiting for
                other ranks, such as an encoder's loads. All ranks give the same array.

        Returns:
            A frozen step. Any number of steps may be alive.

        Raises:
            RemoteConfigError: A rank gave an illegal length; all ranks raise it.
            CommError: Ranks disagree on an input of the plan, or a rank is gone.
            PlanError: The limits cannot be met; all ranks raise it.
        """
        request = self._request([local_seq_lens], "microbatch", initial_loads=initial_loads)
        return self._plan_now(request)[0]

    def plan_step(
        self, microbatches: Iterable[npt.ArrayLike | Sequences], *, sync: Sync = "microbatch"
    ) -> tuple["Step", ...]:
        """Plan all microbatches of an optimizer step from one fixed-size gather, on the host.

        Args:
            microbatches: Tokens of each sequence that this rank loaded, by microbatch; all ranks
                give the same number of microbatches.
            sync: When ranks wait for each other, as for `bascule.plan.plan_step`; see
                `bascule.train.sync_of`.
        """
        return self._plan_now(self._request(microbatches, sync))

    def set_speeds(self, speeds: npt.ArrayLike | None) -> None:
        """Plan later steps for ranks of these speeds: slow ranks get less work.

        Args:
            speeds: (ranks,) as `bascule.train.measure_speeds` returns them, the same on all ranks.
                None: equal speeds.
        """
        state = RankState.of(self._planning.group.size, speeds=speeds)
        self.speeds = None if speeds is None else tuple(state.speeds.tolist())

    def fail(self, error: Exception) -> None:
        """Raise this error as a CommError on all ranks; call it in place of `plan`."""
        self._plan_now(self._request([], "microbatch", error))

    def plan_async(
        self, microbatches: Iterable[npt.ArrayLike | Sequences], *, sync: Sync = "microbatch"
    ) -> PlanFuture:
        """Plan an optimizer step in a thread, during the current step; see `plan_step`.

        All ranks call `plan`, `plan_step` and `plan_async` in the same order.

        Returns:
            A future: its `result()` returns the steps, and raises the errors of `plan_step`.
        """
        if self._ahead is None:
            ranks = self._planning.group.ranks
            self._ahead = Planning(new_group(ranks, "ahead", self._timeout_s, backend="gloo"))
        ahead, request = self._ahead, self._request(microbatches, sync)
        self._latest = PlanFuture(
            lambda: ahead.plan_now(request),
            lambda plans: self._steps(request, plans),
            request.where,
            self._latest,
        )
        return self._latest

    def _plan_now(self, request: PlanRequest) -> tuple["Step", ...]:
        try:
            plans = self._planning.plan_now(request)
        except BaseException:
            self._num_plans = request.number  # stays the same on all ranks, whatever each requested
            raise
        return self._steps(request, plans)

    def _steps(self, request: PlanRequest, plans: Sequence[Plan]) -> tuple["Step", ...]:
        numbered = enumerate(plans, request.number)
        assert request.terms is not None  # there are plans
        terms = request.terms
        steps = tuple([Step(self._binding, plan, number, terms) for number, plan in numbered])
        self._recent = *self._recent[-1:], steps
        return steps

    def _request(
        self,
        microbatches: Iterable[npt.ArrayLike | Sequences],
        sync: Sync,
        error: Exception | None = None,
        *,
        initial_loads: npt.ArrayLike | None = None,
    ) -> PlanRequest:
        """Return this rank's request for the next plan, with an error for all ranks to raise."""
        number, offer, loaded = self._num_plans + 1, NO_ITEMS, microbatches
        terms, settings, carried = None, dict[str, str](), None
        try:
            if isinstance(microbatches, Iterator):  # it can be read once
                loaded = list(microbatches)
            terms, settings = self._terms_now()
            check_sync(sync)
            if error is None:
                offer = _offer(loaded)
            if initial_loads is not None:
                carried = RankState.of(self.group.size, initial_loads).carried
        except Exception as failure:  # the other ranks must not wait
            error = error or failure
        except BaseException as interrupt:
            leave(interrupt, f"step {number}: plan")
            raise
        self._num_plans += max(1, len(loaded) if isinstance(loaded, Sized) else 1)
        settings = {
            **settings,
            "microbatches": f"{len(offer.counts)}, sync={sync}",
            "initial_loads": str(None if carried is None else carried.tolist()),
        }
        return PlanRequest(number, offer, terms, sync, carried, settings, error)

    def _terms_now(self) -> tuple[Terms, dict[str, str]]:
        """Return the terms, and the settings that must be the same on all ranks."""
        used = attrgetter(*Terms.__dataclass_fields__)(self)
        if self._terms is None or any(map(is_not, used, self._terms[0])):
            terms = Terms(*used)
            settings = terms.settings | {
                "timeout_s": str(self._timeout_s),
                "kernel": str(self.kernel),
                "device": self.device.type,
                "gradients": self.gradients,
            }
            self._terms = used, terms, settings
        return self._terms[1:]


def _data_group(group: dist.ProcessGroup, ranks: Sequence[int]) -> RankGroup:
    data = member_of(resolve(group), "data")
    missing = sorted(set(ranks) - set(data.ranks))
    if missing:
        what = f"data_group has the ranks {list(data.ranks)} but not {missing} of the group"
        raise ConfigError(f"{what}: give all ranks whose gradients are averaged")
    return data
